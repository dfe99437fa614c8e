"""SECURITY.md names for each promise the tests that hold it: they exist, and no file of attacks is left out."""

from __future__ import annotations

import re
from pathlib import Path

from tests.attacks.mutations import read

ROOT = Path(__file__).resolve().parents[2]
ATTACKS = ROOT / "tests" / "attacks"


def named() -> set[tuple[Path, str]]:
    """(file, function) of every test that SECURITY.md names."""
    found = re.findall(r"`([\w/]+\.py)::(\w+)`", (ROOT / "SECURITY.md").read_text(encoding="utf-8"))
    return {((ROOT / file) if "/" in file else ATTACKS / file, function) for file, function in found}


def test_every_named_test_exists() -> None:
    missing = [
        f"{file.name}::{function}"
        for file, function in named()
        if not file.is_file() or f"\ndef {function}(" not in file.read_text(encoding="utf-8")
    ]
    assert not missing


def test_every_file_of_attacks_is_named() -> None:
    assert set(ATTACKS.glob("test_*.py")) <= {file for file, _ in named()}


def test_every_promise_names_a_test() -> None:
    rows = [line for line in (ROOT / "SECURITY.md").read_text(encoding="utf-8").splitlines() if line.startswith("|")][
        2:
    ]
    assert len(rows) > 12 and all("::test_" in row for row in rows)


def test_each_promise_is_broken_by_a_mutation_that_fits_the_package() -> None:
    """`python -m tests.attacks.mutations` then sees its tests fail."""
    rows = [line for line in (ROOT / "SECURITY.md").read_text(encoding="utf-8").splitlines() if "::test_" in line]
    broken = set()
    for one in read():
        text = (ROOT / one.file).read_text(encoding="utf-8")
        assert text.count(one.old) == 1 and one.new != one.old, (
            f"{one.file} has {one.old!r} {text.count(one.old)} times"
        )
        (row,) = [row for row in rows if row.startswith(f"| {one.promise}")]
        for test in one.tests:
            assert test.partition("[")[0].removeprefix("tests/attacks/") in row, f"{one.promise}: {test}"
        broken.add(row)
    assert [row for row in rows if row not in broken] == []
