"""Fuzzing that coverage guides: of each input that reaches lines not reached before, others are made.

libFuzzer does it, through atheris, over the bytes that a target takes. It starts from generated inputs and the kept
ones (`KEPT`), writes those that reach something new to a folder, and goes on from there another time. A process that
ends is begun again. Covered by tests/fuzz/test_guided.py.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
import shlex
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

from tests.fuzz.counts import Counts
from tests.fuzz.targets import TARGETS
from tests.fuzz.verdict import SECONDS

KEPT = Path(__file__).with_name("corpus.tar.xz")
LARGE = "_large"  # ending of a target that takes what another one takes
GENERATED = 100  # inputs to start from, beside those that were kept
LONGEST = 1 << 16  # bytes of an input
PATIENCE = 12 * SECONDS  # seconds by the clock for an input whose native code does not come back
ROOT = Path(__file__).parents[2]


def check_atheris() -> None:
    """Exits with one line where atheris is not installed."""
    if importlib.util.find_spec("atheris") is None:
        sys.exit("tests.fuzz: --guided needs atheris, which is not installed; pip install atheris (Linux, macOS)")


def kept_inputs() -> dict[str, list[bytes]]:
    """The inputs that the repository keeps, by target; for a large vocabulary those for a small one."""
    found: dict[str, list[bytes]] = {}
    with tarfile.open(KEPT) as archive:
        for entry in archive:
            file = archive.extractfile(entry)
            assert file is not None
            found.setdefault(entry.name.partition("/")[0], []).append(file.read())
    return found | {name + LARGE: found[name] for name in list(found) if name + LARGE in TARGETS}


class Room:
    """A folder of one run: inputs to start from, a program for libFuzzer to start, and what it counts."""

    def __init__(self, name: str, folder: Path, keep: Path) -> None:
        self.name, self.seeds, self.program = name, folder / "seeds", folder / "run"
        self.log, self.counts = folder / "log", Counts(folder / "counts")
        self.seeds.mkdir()
        made = [TARGETS[name].make(Random(f"{name} guided {number}")) for number in range(GENERATED)]
        kept = kept_inputs().get(name, []) if KEPT.exists() else []
        for number, data in enumerate(one for one in (*kept, *made) if len(one) <= LONGEST):
            (self.seeds / str(number)).write_bytes(data)
        words = [sys.executable, "-m", "tests.fuzz.instrumented", name, str(folder / "counts"), str(keep)]
        self.program.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$0" "$@"\n')
        self.program.chmod(0o700)

    def start(self, *arguments: object) -> int:
        """Starts libFuzzer; returns its status."""
        with self.log.open("ab") as log:
            return subprocess.run(
                [str(self.program), *map(str, arguments)], stderr=log, cwd=ROOT, check=False
            ).returncode

    def said(self) -> str:
        """What libFuzzer wrote."""
        return self.log.read_text(errors="replace")


@contextlib.contextmanager
def _room(name: str, keep: Path) -> Iterator[Room]:
    with tempfile.TemporaryDirectory(prefix="guided-") as folder:
        yield Room(name, Path(folder), keep)


def guided(name: str, corpus: Path, keep: Path, runs: int | None = None, minutes: float | None = None) -> int:
    """Fuzzes a target, for so many inputs or minutes; returns how many places failed. Failing inputs go to `keep`."""
    found = corpus / name
    found.mkdir(parents=True, exist_ok=True)
    keep.mkdir(parents=True, exist_ok=True)
    started, crashes = time.monotonic(), 0
    limits = [f"-max_len={LONGEST}", f"-timeout={PATIENCE}", "-rss_limit_mb=0", "-close_fd_mask=2"]
    with _room(name, keep) as room:
        while True:
            left = [f"-artifact_prefix={keep}/{name}-guided-"]
            if runs is not None:
                left.append(f"-runs={max(1, runs - room.counts['inputs'])}")
            if minutes is not None:
                left.append(f"-max_total_time={max(1, round(60 * minutes - (time.monotonic() - started)))}")
            status = room.start(*limits, *left, found, room.seeds)
            if status == 0:
                break
            crashes += 1
            print(f"{name}: the process ended with status {status}\n{room.said()[-3000:]}", flush=True)
            if not _without_what_ended_it(room, found, keep):
                break
        counts = room.counts
        edges = max(map(int, re.findall(r"cov: (\d+) ", room.said())), default=0)
        print(
            f"{name}: {counts['inputs']} inputs, {100 * counts['accepted'] / max(1, counts['inputs']):.0f} % accepted, "
            f"{edges} edges, {len(list(found.iterdir()))} kept in {found}, "
            f"slowest {counts['milliseconds'] / 1000:.2f} s, {time.monotonic() - started:.0f} s, "
            f"{counts['failed'] + crashes} failed",
            flush=True,
        )
        return counts["failed"] + crashes


def _without_what_ended_it(room: Room, found: Path, keep: Path) -> bool:
    """Takes the input that ended a process from those to start from and those `found`. False where libFuzzer kept none:
    it could not start."""
    files = sorted(keep.glob(f"{room.name}-guided-*-*"), key=lambda one: one.stat().st_mtime)
    if not files or f"Test unit written to {files[-1]}" not in room.said():
        return False
    data = files[-1].read_bytes()
    for one in (*room.seeds.iterdir(), *found.iterdir()):
        if one.read_bytes() == data:
            one.unlink()
    return True


def minimise(names: list[str], corpus: Path, at_once: int) -> None:
    """Writes `KEPT` anew: of each target the smallest inputs that reach all edges that those in the folder reach, found
    for so many targets at once; what is kept of others stays.
    """
    own = [name for name in names if not name.endswith(LARGE)]
    with ThreadPoolExecutor(at_once) as pool:
        made = dict(zip(own, pool.map(lambda name: _smallest(name, corpus / name), own), strict=True))
    kept = {name: inputs for name, inputs in kept_inputs().items() if name in TARGETS} if KEPT.exists() else {}
    kept |= made
    with tarfile.open(KEPT, "w:xz", preset=9) as archive:
        for name in sorted(name for name in kept if not name.endswith(LARGE)):
            for number, data in enumerate(kept[name]):
                entry = tarfile.TarInfo(f"{name}/{number}")
                entry.size = len(data)
                archive.addfile(entry, io.BytesIO(data))
    print(f"{KEPT}: {KEPT.stat().st_size} bytes", flush=True)


def _smallest(name: str, found: Path) -> list[bytes]:
    """The smallest inputs of a target, by size, among those found and those to start from."""
    with tempfile.TemporaryDirectory(prefix="minimal-") as folder, _room(name, Path(folder)) as room:
        found.mkdir(parents=True, exist_ok=True)
        out = Path(folder, "out")
        out.mkdir()
        status = room.start("-merge=1", "-use_counters=0", f"-max_len={LONGEST}", out, found, room.seeds)
        files = sorted(out.iterdir(), key=lambda one: (one.stat().st_size, one.name))
        if status or not files:
            sys.exit(f"tests.fuzz: {name} could not be minimised (status {status}): {room.said()[-1000:]}")
        print(f"{name}: {len(files)} inputs, {sum(one.stat().st_size for one in files)} bytes", flush=True)
        return [one.read_bytes() for one in files]
