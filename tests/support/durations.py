"""How long each test takes, from the last run that recorded it: the order of files, and the choice of `--quick`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

from streamspec.atomic import write_text

# Seconds of a test function, all its cases together, and of a file, of what its tests share.
PATH = Path(__file__).parents[1] / "durations.json"
RECORDED = 0.3  # seconds; what is shorter is not recorded
QUICK = 0.5  # seconds; longer functions are not part of `--quick`
QUICK_SHARED = 1.5  # seconds; nor are files whose tests share what takes longer to make


def read() -> dict[str, float]:
    return json.loads(PATH.read_text(encoding="utf-8"))


def record(reports: Iterable[pytest.TestReport]) -> None:
    """Replaces what is recorded of the files that these reports are about."""
    taken: Counter[str] = Counter()
    for report in reports:
        shared = report.when == "setup" and report.duration >= RECORDED
        taken[_file(report.nodeid) if shared else _function(report.nodeid)] += report.duration
    files = {_file(function) for function in taken}
    kept = {function: seconds for function, seconds in read().items() if _file(function) not in files}
    new = {function: round(seconds, 1) for function, seconds in taken.items() if seconds >= RECORDED}
    write_text(PATH, json.dumps(kept | new, indent=0, sort_keys=True) + "\n")  # whole: tests run pytest, too


def longest_files_first(items: list[pytest.Item]) -> None:
    """Sorts tests by the time that their files take: processes that take file after file then end together."""
    of_file: Counter[str] = Counter()
    for function, seconds in read().items():
        of_file[_file(function)] += seconds  # type: ignore[assignment]
    items.sort(key=lambda item: -of_file[_file(item.nodeid)])


def slow(items: list[pytest.Item]) -> list[pytest.Item]:
    """Tests that `--quick` leaves out: those that took long, those marked slow, those of the reference base."""
    seconds = read()
    return [
        item
        for item in items
        if seconds.get(_function(item.nodeid), 0) > QUICK
        or seconds.get(_file(item.nodeid), 0) > QUICK_SHARED
        or any(map(item.get_closest_marker, ("slow", "base")))
    ]


def _function(nodeid: str) -> str:
    return nodeid.partition("[")[0]


def _file(nodeid: str) -> str:
    return nodeid.partition("::")[0]
