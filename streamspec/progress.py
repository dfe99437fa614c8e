"""Shows the progress of a long operation, always on stderr: on a terminal one region that is redrawn, elsewhere a line
every ten seconds.

One operation is shown at a time; those inside it are silent. Of several processes of a training run the first alone
shows something.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar

T = TypeVar("T")
EVERY = 10.0  # seconds between two lines
REDRAWN = 4  # times a second
_busy = threading.Lock()  # held while an operation is shown


def track(items: Iterable[T], label: str, total: int) -> Iterator[T]:
    """Yields `items` and shows how many of `total` are done."""
    with counted(label, total) as add:
        for item in items:
            yield item
            add(1)


def counted(label: str, total: int) -> AbstractContextManager[Callable[[int], None]]:
    """Gives a function that adds to what is done and shows how many of `total` that are; `add(0)` shows that work goes
    on.
    """
    began = time.monotonic()

    def parts(done: int) -> list[str]:
        left = (time.monotonic() - began) / done * (total - done) if done else 0.0
        return [f"{label}: {done}/{total}", *([f"{duration(left)} left"] if 0 < done < total else [])]

    return adding(parts)


@contextmanager
def adding(parts: Callable[[int], list[str]]) -> Iterator[Callable[[int], None]]:
    """Gives a function that adds to what is done, of which `parts` are shown as of `region`."""
    done = 0

    def add(count: int) -> None:
        nonlocal done
        done += count
        show()

    with region(lambda: parts(done)) as show:
        yield add


@contextmanager
def region(parts: Callable[[], list[str]], first: bool = False) -> Iterator[Callable[[], None]]:
    """Shows what `parts` returns while the block runs: its first item, and the others after it.

    Gives a function to call when something has changed. On a terminal the region is redrawn anyway; elsewhere a line
    comes at the first call if `first`, then every `EVERY` seconds if `parts` have changed, without a call too, and a
    last one at the end.
    """
    if is_quiet("RANK") or not _busy.acquire(blocking=False):
        yield lambda: None
        return
    try:
        with (_drawn if sys.stderr.isatty() else _lines)(parts, first) as show:
            yield show
    finally:
        _busy.release()


@contextmanager
def _drawn(parts: Callable[[], list[str]], first: bool) -> Iterator[Callable[[], None]]:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    def text() -> Text:
        title, *others = parts() or [""]
        return Text("\n  ".join([title, *others]))

    live = Live(get_renderable=text, console=Console(stderr=True), refresh_per_second=REDRAWN)
    atexit.register(live.stop)  # shows the cursor again: at the end of a program its other threads are not unwound
    try:
        with live:
            yield lambda: None
    finally:
        atexit.unregister(live.stop)


@contextmanager
def _lines(parts: Callable[[], list[str]], first: bool) -> Iterator[Callable[[], None]]:
    printed, last = "", -EVERY if first else time.monotonic()
    changed, ended, printing = threading.Event(), threading.Event(), threading.Lock()

    def line() -> None:
        nonlocal printed, last
        with printing:
            if time.monotonic() - last >= EVERY or ended.is_set():
                text = ", ".join(parts())
                if text != printed:
                    print(text, file=sys.stderr, flush=True)
                printed, last = text, time.monotonic()

    def show() -> None:
        changed.set()
        if time.monotonic() - last >= EVERY:
            line()

    def wait() -> None:  # a step may take longer than `EVERY`
        changed.wait()
        while not ended.wait(max(EVERY - (time.monotonic() - last), 0.01)):
            line()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    try:
        yield show
    finally:
        ended.set()
        changed.set()
        thread.join()
        if printed:
            line()


def duration(seconds: float) -> str:
    """Spells a time for people: 42 s, 7 min, 3.4 h."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def is_quiet(of: str = "LOCAL_RANK", environment: Mapping[str, str] = os.environ) -> bool:
    """Tells whether this process leaves it to another one to print what all of them find: to one of its machine, or
    (`of` RANK) to one of the run.
    """
    return environment.get(of, "0") not in ("", "0")
