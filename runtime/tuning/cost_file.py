"""Keeps what steps cost in the user's cache: one file for each processor, bundle, provider, number of threads and ONNX
Runtime.

Covered by tests/runtime/tuning/test_step_costs.py and test_cost_file.py."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from pathlib import Path

from streamspec import paths as cache
from streamspec.atomic import write_text
from streamspec.bundle.manifest import Manifest
from streamspec.draft_tree import BOTH, SCORES
from streamspec.errors import StreamspecError
from streamspec.json_fields import Fields, parse_json
from streamspec.runtime.costs.learned_costs import CostRecord, LearnedRowCosts
from streamspec.runtime.decoding.draft_tree_search import MAX_ROWS
from streamspec.runtime.hardware import native_library
from streamspec.runtime.hardware.cpu import cpu_model
from streamspec.runtime.hardware.providers import NATIVE_CPU, import_onnxruntime

FEW_STEPS = 16  # learned since the file was written: not worth writing it again
PAUSE = 30.0  # seconds from one writing to the next, unless as much was learned since as before


def costs_file(
    provider: str,
    threads: int,
    manifest: Manifest,
    cache_dir: str | Path | None,
    draft: Manifest | None = None,
    window: int = 0,
) -> Path | None:
    """Returns the file that keeps the costs of this machine and bundle, and of what drafts for it: a second bundle, or
    itself over a `window`; None where there is no cache."""
    folder = cache_dir or cache.cache_dir_if_any()
    if folder is None:
        return None
    parts = [cpu_model(), manifest.to_json(), provider, str(threads), import_onnxruntime().__version__]
    if provider == NATIVE_CPU.name:
        library = native_library.find()
        parts += [library.kernels, library.sources]
    parts += [] if draft is None else [str(window) if window else draft.to_json()]
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()
    return Path(folder).absolute() / "calibration" / f"{key[:32]}.json"


def save_record(file: Path | None, record: CostRecord) -> None:
    """Saves a record, whole or not at all; no folder, or one that cannot be written, only means learning again."""
    if file is None:
        return
    content = {
        "format_version": 1,
        "costs": {str(n): seconds for n, seconds in record.seconds.items()},
        "least": record.min_probability,
        "score": record.score,
        "steps": record.steps,
    }
    if record.price is not None:
        content["drafter"] = record.price
    if record.context is not None:
        content["context"] = [number for number in record.context if number is not None]
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, json.dumps(content))
    except OSError:
        pass


def read_record(file: Path | None) -> CostRecord | None:
    """Returns the record in a file, also of an older version; None where there is none or it makes no sense."""
    if file is None:
        return None
    try:
        raw = Fields(parse_json(file.read_bytes(), file.name), file.name)
        raw.integer("format_version", 1, 1)
        costs = Fields(raw.raw("costs"), "costs")
        seconds = {int(n): costs.number(n, 1e-7, 1e4) for n in costs.values}
        if 1 not in seconds or not all(1 <= n <= MAX_ROWS for n in seconds):
            return None
        price = raw.number("drafter", 0.0, 1e4) if "drafter" in raw.values else None
        context = None
        if "context" in raw.values:
            values = raw.raw("context")
            numbers = Fields(dict(zip("abd"[: max(len(values), 2)], values, strict=True)), "context")
            grows = numbers.number("d", 0.0, 1e4) if "d" in numbers.values else None
            context = numbers.number("a", 0.0, 1e4), numbers.number("b", 0.0, 1e4), grows
        steps = raw.integer("steps", 0, 10**12) if "steps" in raw.values else 0
        least = raw.number("least", 0.0, 1.0)
        score = raw.choice("score", SCORES) if "score" in raw.values else BOTH
        return CostRecord(seconds, price, context, steps, least, score) if least < 1 else None
    except (OSError, TypeError, ValueError, StreamspecError):
        return None


class CostKeeper:
    """Saves what a process learns in `file`, where answers end: often at the beginning, then now and then."""

    def __init__(self, file: Path | None) -> None:
        self.file, self._steps, self._next = file, 0, 0.0

    def __call__(self, costs: LearnedRowCosts, closing: bool) -> None:
        """`closing`: the session closes, so write it now."""
        if sys.is_finalizing():  # a stream that the program left half read: files can no longer be opened
            return
        now = time.monotonic()
        new = costs.steps - self._steps
        if new >= FEW_STEPS and (closing or new >= self._steps or now >= self._next):
            self._steps, self._next = costs.steps, now + PAUSE
            save_record(self.file, costs.record())
