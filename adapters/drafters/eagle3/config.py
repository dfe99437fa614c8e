"""Which bases an EAGLE-3 head can have. Free of torch. Covered by the tests of `model`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from streamspec.adapters.drafters.draft_layer.config import check_draft_layer_base
from streamspec.adapters.drafters.options import FINAL
from streamspec.errors import ConfigError

FAMILIES = ("llama", "qwen3")  # whose layers the published formats know


def check_pair_base(options: Mapping[str, Any], family: str, layers: int) -> None:
    """Raises ConfigError for a base (its family, how many layers) or taps that the formats do not know."""
    if family not in FAMILIES:
        raise ConfigError(f"--method eagle3 with {family}", " or ".join(FAMILIES), "take --method eagle")
    if FINAL in options["taps"].split(","):
        raise ConfigError(
            f"--taps {FINAL} with --method eagle3", "inputs of layers", "name layers, or take --method eagle"
        )
    check_draft_layer_base(options, family, layers)
