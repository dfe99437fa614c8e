"""A process with little address space left: one line, not a traceback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("resource", reason="address space is limited as on POSIX")

SQUEEZED = """
import resource, sys
from streamspec.errors import StreamspecError
from streamspec.runtime import load
load(sys.argv[2], threads=1).close()  # what is imported late is
taken = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
left = int(sys.argv[1]) << 20
resource.setrlimit(resource.RLIMIT_AS, (taken + left, taken + left))
try:
    load(sys.argv[2], threads=1).generate("a", max_new_tokens=2)
    print("fine")
except StreamspecError as error:
    print("refused", error)
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="how much is taken is read from /proc")
@pytest.mark.parametrize("megabytes", [8, 40])
def test_too_little_address_space_is_said_in_one_line(original: Path, megabytes: int) -> None:
    command = [sys.executable, "-c", SQUEEZED, str(megabytes), str(original)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.count("\n") == 1, (done.stdout, done.stderr[-2000:])


def test_a_load_that_gets_no_memory_says_so(original: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from streamspec.errors import ResourceError
    from streamspec.runtime import load, loader

    def full(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(loader, "read_tokenizer", full)
    with pytest.raises(ResourceError, match="no memory or address space is left"):
        load(original, threads=1)


def test_a_command_without_memory_ends_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    from streamspec.cli.errors import guarded

    def full() -> None:
        raise MemoryError

    with pytest.raises(SystemExit) as ended:
        guarded("generate", full)()
    assert ended.value.code == 1 and "no memory is left" in capsys.readouterr().err
