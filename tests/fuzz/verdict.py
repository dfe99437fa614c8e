"""What may come of one input, and its limits of time and memory. Covered by tests/fuzz/test_fuzz.py."""

from __future__ import annotations

import contextlib
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

from streamspec.errors import StreamspecError
from tests.fuzz.targets import Target

SECONDS = 10  # of the processor, for one input
MEMORY = 6 << 30  # address space of a process


class Slow(BaseException):
    """An input took too long."""


def one_input(target: Target, data: bytes, folder: Path) -> str:
    """What came of it: "fine", or the code of a StreamspecError. Anything else is raised."""
    try:
        target.run(data, folder)
        return "fine"
    except StreamspecError as error:
        text = str(error)
        if "\n" in text or len(text) > 2000 or not text.isprintable():
            raise AssertionError(f"a message that is not one short line: {text[:200]!r}") from error
        return error.code


def limit_memory() -> None:
    """Limits this process, for good."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))


@contextlib.contextmanager
def limited_time() -> Iterator[None]:
    """Raises Slow in what runs inside for too long."""

    def late(*_: object) -> None:
        raise Slow

    previous = signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, previous)
