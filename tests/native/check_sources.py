"""Checks the C++ sources: clang-format, clang-tidy, and the warnings of every compiler that is here, as errors. What is
not installed is skipped with a line.

`python -m tests.native.check_sources`; `run.py test --only native` does it.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.packaging.conftest import ROOT, module

# Of one version: others lay the same sources out otherwise, and have other checks.
FORMAT, TIDY = "clang-format-14", "clang-tidy-14"
# Compilers by the machine that they build for. Only the first optimises, which finds what is not initialised; of the
# kernels the portable ones alone, which share their code with those of all instruction sets.
COMPILERS = {
    "g++": platform.machine(),
    "clang++-14": platform.machine(),
    "aarch64-linux-gnu-g++": "aarch64",
    "x86_64-w64-mingw32-g++-posix": "amd64",
}
TEST = Path("tests", "native", "kernels_test.cpp")


def commands() -> list[list[str | Path]]:
    """A command for each file and tool that is installed."""
    build = module(ROOT / "setup.py")

    def sources(machine: str) -> list[Path]:
        return [*build.sources(build.MACHINES.get(machine.lower(), machine.lower())), TEST]

    def flags(path: Path) -> list[str]:
        return ["-std=c++17", f"-I{build.NATIVE}", *build.instruction_set(path).get("gcc", [])]

    made: list[list[str | Path]] = []
    if installed(FORMAT):
        made.append(
            [FORMAT, "--dry-run", "--Werror", *(path for path in build.SOURCES if path.suffix != ".toml"), TEST]
        )
    if installed(TIDY):
        made += [[TIDY, "--quiet", path, "--", *flags(path)] for path in sources(platform.machine()) if path != TEST]
    for compiler, machine in filter(lambda row: installed(row[0]), COMPILERS.items()):
        made += [
            [compiler, *build.WARNINGS, "-Werror", *flags(path), *depth(compiler, path), path]
            for path in sources(machine)
        ]
    return made


def depth(compiler: str, path: Path) -> list[str]:
    lanes = path.stem.startswith("kernels_") and path.stem != "kernels_portable"
    return ["-fsyntax-only"] if lanes or compiler != next(iter(COMPILERS)) else ["-O1", "-c", "-o", os.devnull]


def installed(program: str) -> bool:
    if shutil.which(program):
        return True
    print(f"{program} is not installed: its checks are skipped", flush=True)
    return False


def passes(command: list[str | Path]) -> bool:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        print(*command, "\n" + done.stdout + done.stderr, flush=True)
    return done.returncode == 0


if __name__ == "__main__":
    if sys.platform != "linux":
        sys.exit(print("C++ is checked on Linux, by the compilers of its distributions"))
    os.chdir(ROOT)  # paths of setup.py are relative
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        sys.exit(0 if all(list(pool.map(passes, commands()))) else 1)
