"""The built library on processors that lack instructions that some of its files are built for, in an emulator: it is
loaded there, runs nothing of these files, and chooses kernels that the processor has.
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys

import pytest

from streamspec.runtime.hardware import native_library

LOAD = """
import ctypes, sys
function = getattr(ctypes.CDLL(sys.argv[1]), sys.argv[2])
function.restype = ctypes.c_char_p
print(function().decode())
"""


@pytest.mark.parametrize(("processor", "kernels"), [("Nehalem", "portable"), ("Haswell", "avx2, portable")])
def test_the_library_is_loaded_where_newer_instructions_end_a_process(
    processor: str, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulator = shutil.which("qemu-x86_64-static")
    if sys.platform != "linux" or platform.machine() != "x86_64" or emulator is None:
        pytest.skip("no qemu-user-static (Debian) on x86-64 here")
    version = subprocess.run([emulator, "--version"], capture_output=True, text=True).stdout
    found = re.search(r"version (\d+)\.(\d+)", version)
    if processor == "Haswell" and found and (int(found[1]), int(found[2])) < (7, 2):
        pytest.skip("this qemu does not know AVX2")
    if not native_library.place().is_file():
        pytest.skip(native_library.why_not())
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    command = [emulator, "-cpu", processor, sys.executable, "-S", "-E", "-c", LOAD]
    done = subprocess.run(
        [*command, str(native_library.place()), native_library.RUNNABLE], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout.strip()) == (0, kernels), done.stderr
