"""Locates the demo's files: a small sample of WikiSQL and an adapter trained on all of it.

The adapter exists once: benchmarks/adapters/wikisql in a checkout, which the wheel carries as demo/sql_adapter.
"""

from __future__ import annotations

from pathlib import Path

from streamspec.bundle.adapter_folder import STREAM_CONFIG
from streamspec.errors import AdapterError

HERE = Path(__file__).resolve().parent
TRAIN, VALIDATION, PROMPTS = (HERE / "data" / name for name in ("train.jsonl", "val.jsonl", "prompts.jsonl"))
ADAPTERS = (HERE / "sql_adapter", HERE.parents[1] / "benchmarks" / "adapters" / "wikisql")


def sql_adapter() -> Path:
    """Folder of the shipped adapter. Raises AdapterError where this installation came without it."""
    for folder in ADAPTERS:
        if (folder / STREAM_CONFIG).is_file():
            return folder
    raise AdapterError(
        f"no SQL adapter in {ADAPTERS[1]}", "the adapter that the project ships", "run: streamspec demo --train"
    )
