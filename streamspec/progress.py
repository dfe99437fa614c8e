"""Shows the progress of a long operation: a bar on a terminal, a line every ten seconds elsewhere; always on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")
EVERY = 10.0  # seconds


def track(items: Iterable[T], label: str, total: int) -> Iterator[T]:
    """Yields `items` and shows how many of `total` are done."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import track as bar

        yield from bar(items, description=label, total=total, console=Console(stderr=True))
        return
    last = time.monotonic()
    for done, item in enumerate(items, start=1):
        yield item
        if time.monotonic() - last > EVERY:
            print(f"{label}: {done}/{total}", file=sys.stderr, flush=True)
            last = time.monotonic()
