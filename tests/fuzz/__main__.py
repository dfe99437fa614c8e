"""`python -m tests.fuzz TARGET --runs 100000 --seed 0`: hostile inputs, the same for the same seed; `all` takes each
target in turn.

Batches run in processes of their own with a limit on memory, each input with one on time; what goes wrong is kept as a
file and its number shown, and `--only NUMBER` runs that input alone. Needs POSIX.

`--guided --corpus DIR` lets coverage guide (`guided.py`), for `--runs` inputs or `--minutes` of each target;
`--minimise --corpus DIR` writes the smallest inputs that reach as much to `corpus.tar.xz`, which the tests run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import os
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

from tests.fuzz.guided import check_atheris, guided, minimise
from tests.fuzz.targets import TARGETS
from tests.fuzz.targets.vocabularies import TOKENIZERS
from tests.fuzz.verdict import Slow, limit_memory, limited_time, one_input

BATCH = 5000


def run_batch(
    name: str, seed: int, numbers: range, at: Any = None
) -> tuple[Counter[str], float, list[tuple[int, str]]]:
    """(outcomes, processor seconds of the slowest input, failures). `at`: where the number of the input under way is
    kept.
    """
    target, outcomes, slowest, failures = TARGETS[name], Counter[str](), 0.0, []
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder, _quiet():
        for number in numbers:
            if at is not None:
                at[:8] = number.to_bytes(8, "little")
            data = target.make(Random(f"{name} {seed} {number}"))
            started = time.process_time()
            try:
                with limited_time():
                    outcomes[one_input(target, data, Path(folder))] += 1
            except (Exception, Slow):
                failures.append((number, traceback.format_exc(limit=-3)))
            slowest = max(slowest, time.process_time() - started)
    return outcomes, slowest, failures


@contextlib.contextmanager
def _quiet() -> Any:
    """Panics of native libraries print, whoever catches them."""
    kept = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def fuzz(name: str, runs: int, seed: int, keep: Path) -> int:
    """All batches of a target; returns how many inputs failed."""
    outcomes, slowest, failed = Counter[str](), 0.0, 0
    at, started = mmap.mmap(-1, 8), time.perf_counter()
    TARGETS[name].make(Random(0))  # corpora are made once
    for first in range(0, runs, BATCH):
        numbers = range(first, min(first + BATCH, runs))
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            try:
                limit_memory()
                found = run_batch(name, seed, numbers, at)
                with os.fdopen(writing, "w") as pipe:
                    json.dump([dict(found[0]), found[1], found[2]], pipe)
                os._exit(0)
            finally:
                os._exit(1)
        os.close(writing)
        with os.fdopen(reading) as pipe:
            text = pipe.read()
        _, status = os.waitpid(child, 0)
        if status or not text:
            number = int.from_bytes(at[:8], "little")
            found = Counter(), 0.0, [(number, f"the process ended with status {status}")]
        else:
            found = json.loads(text)
        outcomes.update(found[0])
        slowest = max(slowest, found[1])
        for number, why in found[2]:
            failed += 1
            file = keep / f"{name}-{seed}-{number}"
            file.write_bytes(TARGETS[name].make(Random(f"{name} {seed} {number}")))
            print(f"{name}: input {number} failed, kept as {file}\n{why}", flush=True)
        print(
            f"{name}: {numbers.stop} of {runs}, {dict(outcomes.most_common())}, slowest {slowest:.2f} s, "
            f"{time.perf_counter() - started:.0f} s, {failed} failed",
            file=sys.stderr,
            flush=True,
        )
    print(
        f"{name}: {runs} inputs, seed {seed}, {dict(outcomes.most_common())}, slowest {slowest:.2f} s, "
        f"{time.perf_counter() - started:.0f} s, {failed} failed",
        flush=True,
    )
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("target", choices=[*TARGETS, "all"])
    parser.add_argument("--runs", type=int, help="inputs of each target; 100,000 unless guided")
    parser.add_argument("--seed", type=int, default=0, help="of generated inputs")
    parser.add_argument("--only", type=int, help="the number of one input")
    parser.add_argument("--keep", type=Path, default=Path(tempfile.gettempdir()), help="folder for inputs that failed")
    parser.add_argument("--guided", action="store_true", help="let coverage guide, with atheris")
    parser.add_argument("--minutes", type=float, help="of each target, guided")
    parser.add_argument("--corpus", type=Path, help="folder that guided fuzzing keeps inputs in and goes on from")
    parser.add_argument("--minimise", action="store_true", help="write the smallest of these inputs for the tests")
    parser.add_argument(
        "--tokenizers", nargs="+", type=Path, default=[], metavar="FILE", help="tokenizer.json files, for `vocabulary`"
    )
    asked = parser.parse_args()
    if asked.tokenizers:
        os.environ[TOKENIZERS] = os.pathsep.join(str(file.resolve(strict=True)) for file in asked.tokenizers)
    names = list(TARGETS) if asked.target == "all" else [asked.target]
    if asked.only is not None:
        found = run_batch(names[0], asked.seed, range(asked.only, asked.only + 1))
        print(*found, sep="\n")
        return len(found[2])
    if asked.guided or asked.minimise:
        check_atheris()
        if asked.corpus is None or (asked.guided and not (asked.runs or asked.minutes)):
            parser.error("--guided takes --corpus and --runs or --minutes, --minimise takes --corpus")
        if asked.minimise:
            minimise(names, asked.corpus, os.cpu_count() or 1)
            return 0
        return min(1, sum(guided(name, asked.corpus, asked.keep, asked.runs, asked.minutes) for name in names))
    return min(1, sum(fuzz(name, asked.runs or 100_000, asked.seed, asked.keep) for name in names))


if __name__ == "__main__":
    sys.exit(main())
