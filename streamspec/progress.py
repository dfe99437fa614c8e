"""Shows the progress of a long operation: a bar on a terminal, a line every ten seconds elsewhere; always on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")
EVERY = 10.0  # seconds


def track(items: Iterable[T], label: str, total: int) -> Iterator[T]:
    """Yields `items` and shows how many of `total` are done."""
    with counted(label, total) as add:
        for item in items:
            yield item
            add(1)


@contextmanager
def counted(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """Gives a function that adds to what is done and shows how many of `total` that are; `add(0)` shows that work goes
    on.
    """
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import Progress

        with Progress(console=Console(stderr=True)) as bar:
            task = bar.add_task(label, total=total)
            yield lambda count: bar.update(task, advance=count)
        return
    last, done = time.monotonic(), 0

    def add(count: int) -> None:
        nonlocal last, done
        done += count
        if time.monotonic() - last > EVERY:
            print(f"{label}: {done}/{total}", file=sys.stderr, flush=True)
            last = time.monotonic()

    yield add
