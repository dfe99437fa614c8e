#!/usr/bin/env python3
"""Copies the task LoRA of an adapter without its drafter: `python benchmarks/target_lora.py ADAPTER --out DIR`."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from streamspec.bundle.adapter_folder import PROVENANCE, STREAM_CONFIG, TASK_CONFIG, TASK_WEIGHTS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("adapter", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name in (TASK_CONFIG, TASK_WEIGHTS, PROVENANCE):
        shutil.copyfile(arguments.adapter / name, arguments.out / name)
    config = json.loads((arguments.adapter / STREAM_CONFIG).read_text(encoding="utf-8"))
    config |= {"method": "lora", "recipe": None, "streams": None}
    (arguments.out / STREAM_CONFIG).write_text(json.dumps(config), encoding="utf-8")


if __name__ == "__main__":
    main()
