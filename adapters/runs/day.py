"""The day that templates write into prompts: kept, since another day's prompts are other tokens. Free of torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from streamspec.adapters.distributed import processes
from streamspec.adapters.runs.run_folder import WORK
from streamspec.atomic import write_text
from streamspec.data.sources import sources
from streamspec.prompt.template_sandbox import TODAY

DAY = "day"  # file in the folder of an unfinished run, or by that suffix beside a file of answers


@contextmanager
def day_of(data: Sequence[str], out: Path, answers: Path | None, resume: bool) -> Iterator[None]:
    """Templates that write today's date write the day of the run that is resumed, or of the file of answers; else that
    on which the data last changed. So their answers and states are found by the same tokens, also tomorrow.
    """
    changed = next(filter(None, map(_kept, places(out if resume else None, answers))), None)
    if changed is None:
        found = [file for source in sources(data) for file in source.files()]
        changed = max((file.stat().st_mtime for file in found if file.exists()), default=None)
    changed = processes.from_first(changed)  # a copy of the data elsewhere may be of another day
    token = TODAY.set(None if changed is None else datetime.fromtimestamp(changed))
    try:
        yield
    finally:
        TODAY.reset(token)


def keep_day(out: Path, answers: Path | None) -> None:
    """Keeps that day for the run in `out` when it is resumed, and for later runs over the same `answers`."""
    today = TODAY.get()
    if today is None or not processes.is_first():
        return
    for place in places(out, answers):
        if not place.exists():
            write_text(place, str(today.timestamp()))


def places(out: Path | None, answers: Path | None) -> list[Path]:
    """Where it is kept."""
    run = [] if out is None else [out / WORK / DAY]
    return run + ([] if answers is None else [answers.with_name(f"{answers.name}.{DAY}")])


def _kept(place: Path) -> float | None:
    try:
        return float(place.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
