"""`python -m tests.attacks.mutations`: breaks each promise of SECURITY.md in a copy of the package and sees its tests
fail; at last runs these tests on the package as it is: one that fails there, too, has noticed nothing. Needs a checkout
and POSIX.

`tests/integration/test_security.py` checks that the list is complete and fits the package.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import shutil
import signal
import sys
import tempfile
import tomllib
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_suffix(".toml")
COPIED = ("streamspec", "runtime", "export", "adapters", "native", "tests", "pyproject.toml")
SECONDS = 600  # for one test
NOT_RUN = 9  # status of a process that pytest's own failure ended
HEAVY = ("numpy", "torch", "transformers", "onnx", "pytest")  # imported once, for the processes of all tests


@dataclass(frozen=True)
class Mutation:
    """`promise`: how a row of SECURITY.md begins; `old` in `file` becomes `new`; each of `tests` then fails."""

    promise: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


def read() -> list[Mutation]:
    """The list, its tests as pytest takes them."""
    rows = tomllib.loads(LIST.read_text(encoding="utf-8"))["mutation"]
    return [Mutation(**row | {"tests": tuple(map(_path_of, row["tests"]))}) for row in rows]


def _path_of(test: str) -> str:
    return test if "/" in test else f"tests/attacks/{test}"


def failed(copy: Path, tests: Iterable[str], *options: str) -> set[str]:
    """Which of `tests` fail in the package at `copy`, any of their cases; all, where they cannot be run to the end."""
    tests = list(tests)
    report = copy / "report"
    child = os.fork()
    if not child:
        try:
            signal.alarm(SECONDS * len(tests))
            _run(copy, [*options, *tests], report)
        except BaseException:  # of pytest itself
            traceback.print_exc()
        finally:
            os._exit(NOT_RUN)
    _, status = os.waitpid(child, 0)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) == NOT_RUN:
        sys.exit(f"pytest could not begin with {' '.join(tests)}:\n{report.read_text('utf-8', 'replace')}")
    lines = report.read_text(encoding="utf-8", errors="replace").splitlines()
    ends = [line.split(" - ")[0].partition(" ")[2] for line in lines if line.startswith(("FAILED ", "ERROR "))]
    found = {test for test in tests if any(end == test or end.startswith(f"{test}[") for end in ends)}
    return found if found or not status else set(tests)


def _run(copy: Path, arguments: list[str], report: Path) -> None:
    """Runs pytest as a process of its own would that began in `copy`, and ends this one."""
    out = os.open(report, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.chdir(copy)
    os.environ |= {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    sys.dont_write_bytecode = True
    sys.path[:] = [str(copy), *(path for path in sys.path if path not in ("", str(ROOT)))]
    for name in [name for name in sys.modules if name.partition(".")[0] in ("tests", "streamspec")]:
        del sys.modules[name]
    import pytest

    imported = "ignore::pytest.PytestAssertRewriteWarning"  # before pytest: what HEAVY brings
    status = pytest.main(["-q", "--tb=no", "-rfE", "-p", "no:cacheprovider", "-W", imported, *arguments])
    sys.stdout.flush()
    os._exit(int(status))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.attacks.mutations", description=__doc__)
    parser.add_argument("word", nargs="?", default="", help="only mutations whose promise, file or tests have it")
    word = parser.parse_args().word
    chosen = [one for one in read() if word in f"{one.promise} {one.file} {one.tests}"]
    for name in HEAVY:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    missed = 0
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        copy = Path(folder)
        for name in COPIED:
            source = ROOT / name
            shutil.copytree(source, copy / name) if source.is_dir() else shutil.copy(source, copy / name)
        for number, one in enumerate(chosen, start=1):
            file = copy / one.file
            text = file.read_text(encoding="utf-8")
            file.write_text(text.replace(one.old, one.new), encoding="utf-8")
            for test in one.tests:
                noticed = bool(failed(copy, [test], "-x"))
                missed += not noticed
                said = "noticed" if noticed else "NOT NOTICED"
                print(f"{number} of {len(chosen)}, {one.promise}, {one.file}: {said} by {test}", flush=True)
            file.write_text(text, encoding="utf-8")
        broken = failed(copy, {test for one in chosen for test in one.tests})
    for test in sorted(broken):
        print(f"fails without any mutation: {test}")
    return min(1, missed + len(broken))


if __name__ == "__main__":
    sys.exit(main())
