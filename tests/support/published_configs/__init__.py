"""Configs of published models, by family: `FAMILY.json` maps a model's name to its `config.json` as its vendor
publishes it, with the same fields, flags and spellings.

Only sizes are shrunk: hidden size 64, few layers, a vocabulary of 320, windows of 16, an original rope length of 32 (64
where a bundle ends there), so that 80 rows reach past them. `tests/export/test_published_configs.py` exports each.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CONFIGS: dict[str, dict[str, Any]] = {
    name: config
    for file in sorted(Path(__file__).parent.glob("*.json"))
    for name, config in json.loads(file.read_text(encoding="utf-8")).items()
}
