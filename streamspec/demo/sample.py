"""Where the demo's own files lie: a small sample of WikiSQL and an adapter trained on all of it.

The adapter is shipped once, as the package `streamspec.demo.sql_adapter` (in a checkout: benchmarks/adapters/wikisql).
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from streamspec.errors import AdapterError

DATA = Path(__file__).parent / "data"
TRAIN, VALIDATION, PROMPTS = DATA / "train.jsonl", DATA / "val.jsonl", DATA / "prompts.jsonl"


def sql_adapter() -> Path:
    """Folder of the shipped adapter. Raises AdapterError where this installation came without it."""
    try:
        folder = Path(str(files("streamspec.demo.sql_adapter").joinpath("streamspec_config.json"))).parent
    except ModuleNotFoundError:
        folder = Path("streamspec/demo/sql_adapter")
    if not (folder / "streamspec_config.json").is_file():
        raise AdapterError("no SQL adapter in this installation", "benchmarks/adapters/wikisql", "run: streamspec demo --train")
    return folder
