"""A progress bar on a terminal, a line every ten seconds elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

from rich.progress import track as rich_track

T = TypeVar("T")


def track(items: Sequence[T], label: str) -> Iterator[T]:
    """Yields `items` and shows how far it is, on stderr."""
    if sys.stderr.isatty():
        from rich.console import Console

        yield from rich_track(items, description=label, console=Console(stderr=True))
        return
    last = time.monotonic()
    for i, item in enumerate(items):
        yield item
        if time.monotonic() - last > 10 or i + 1 == len(items):
            print(f"{label}: {i + 1}/{len(items)}", file=sys.stderr, flush=True)
            last = time.monotonic()
