"""Builds the native operators (native/) into one shared library beside the package, where a C++17 compiler is.

It is no Python extension: ONNX Runtime and ctypes load it, so one wheel serves every Python. Where it cannot be built,
the installation goes on without it and says so in one line. STREAMSPEC_NATIVE=0 leaves it out, =1 makes a failure an
error. All else is in pyproject.toml.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import re
import shutil
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

NATIVE = Path("native")  # paths are relative to the project's root, from where every frontend runs this file
# Compiled last: what chooses among the kernels that there are, and what says of which sources they are.
LAST = NATIVE / "kernels" / "choose.cpp", NATIVE / "sources.cpp"
SOURCES = sorted(path for path in NATIVE.rglob("*") if path.suffix in (".cpp", ".h", ".toml"))
INSTRUCTION_SETS = tomllib.loads((NATIVE / "instruction_sets" / "kernels.toml").read_text(encoding="utf-8"))
LIBRARY = "streamspec_native" + (".dll" if sys.platform == "win32" else ".so")
MODE = os.environ.get("STREAMSPEC_NATIVE", "")
MACHINES = {"amd64": "x86_64", "x86-64": "x86_64", "aarch64": "arm64"}  # other names of the same
HERE = MACHINES.get(platform.machine().lower(), platform.machine().lower())
# Errors to tests/native/check_sources.py alone: a newer compiler, which warns of more, must not fail an installation.
WARNINGS = ["-Wall", "-Wextra", "-Wshadow", "-Wconversion", "-Wno-sign-conversion"]
# The order of sums is part of the result: no contraction into fused multiply-adds that the source does not ask for.
# Older MSVC contracts under /fp:precise.
FLAGS = {
    "gcc": ["-std=c++17", "-O3", "-g0", "-fvisibility=hidden", "-fno-fast-math", "-ffp-contract=off", *WARNINGS],
    "msvc": ["/std:c++17", "/O2", "/EHsc", "/fp:strict", "/W4"],
}
LINK = {"linux": ["-Wl,-s", "-Wl,-z,defs"], "darwin": ["-Wl,-x"]}

if sys.platform == "darwin":  # a Python for two architectures would build every file for both
    os.environ.setdefault("ARCHFLAGS", f"-arch {platform.machine()}")


class BuildNative(build_ext):
    """Builds the library, or leaves the distribution without it."""

    def run(self) -> None:
        inplace = self.inplace
        try:
            if MODE == "0":
                raise RuntimeError("STREAMSPEC_NATIVE=0")
            super().run()
        except Exception as error:  # whatever a compiler, or its absence, comes up with
            if MODE == "1":
                raise SystemExit(f"streamspec: the native operators were not built: {brief(error)}") from error
            print(f"streamspec: no native operators, the standard ones run instead ({brief(error)})", file=sys.stderr)
            for ext in self.extensions:  # one of before would be installed
                Path(self.get_ext_fullpath(ext.name)).unlink(missing_ok=True)
            self.extensions = self.distribution.ext_modules = []
            if inplace:
                (Path("streamspec") / LIBRARY).unlink(missing_ok=True)

    def get_ext_filename(self, fullname: str) -> str:
        return os.path.join(*fullname.split(".")[:-1], LIBRARY)

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name))
        here = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]
        stamp = f"{digest()} {self.machine()}-{sys.platform} {here}"
        for built in (target, Path("streamspec") / LIBRARY):  # of these very sources: nothing to do
            if not self.force and is_of(built, stamp) and (self.machine() != HERE or loads(built)):
                if built != target:
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(built, target)
                return
        self.compiler.link_shared_object(
            self.compile(stamp),
            str(target),
            extra_postargs=LINK.get(sys.platform, []),
            build_temp=self.build_temp,
            target_lang="c++",
        )

    def compile(self, stamp: str) -> list[str]:
        """Compiles all sources of this machine side by side, and returns their objects."""
        family = "msvc" if self.compiler.compiler_type == "msvc" else "gcc"
        defines: list[tuple[str, str | None]] = []

        def objects(path: Path) -> list[str]:
            flags = FLAGS[family] + instruction_set(path).get(family, [])
            try:
                made = self.compiler.compile([str(path)], self.build_temp, defines, [str(NATIVE)], extra_postargs=flags)
            except Exception as error:
                raise RuntimeError(f"{path.as_posix()}: {brief(error)}") from error
            return list(made)

        if hasattr(self.compiler, "initialize") and not getattr(self.compiler, "initialized", False):
            self.compiler.initialize()
        at_once = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        with ThreadPoolExecutor(at_once) as pool:
            futures = {path: pool.submit(objects, path) for path in sources(self.machine()) if path not in LAST}
        built = []
        for path, future in futures.items():
            error = future.exception()
            if error is None:
                built += future.result()
                continue
            try:  # once more, alone: beside others it may have been killed for want of memory
                built += objects(path)
                continue
            except RuntimeError as again:
                error = again
            if not instruction_set(path) or MODE == "1":
                raise error
            print(f"streamspec: this compiler cannot build {path.name}: left out", file=sys.stderr)
            defines.append((f"STREAMSPEC_WITHOUT_{set_name(path).upper()}", None))
        left_out = "".join(f" {name}" for name, _ in defines)  # by this compiler: the next one may build it
        defines.append(("STREAMSPEC_SOURCES", f'"{stamp}{left_out}"'))
        return built + [file for path in LAST for file in objects(path)]

    def machine(self) -> str:
        """Processor architecture that is built for."""
        if sys.platform == "darwin":
            return os.environ["ARCHFLAGS"].split()[-1]
        found = self.plat_name.rpartition("-")[2].lower()
        return MACHINES.get(found, found)


class Wheel(bdist_wheel):
    """A wheel for any Python: of this platform with the library, of any without."""

    def run(self) -> None:
        if not self.skip_build:
            self.run_command("build_ext")  # whether it succeeds decides what the wheel is
        self.root_is_pure = not self.distribution.has_ext_modules()
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        python, abi, system = super().get_tag()
        if self.root_is_pure:
            return python, abi, system
        if sys.platform == "darwin":
            system = system.replace("universal2", os.environ["ARCHFLAGS"].split()[-1])
        return "py3", "none", system


def is_of(built: Path, stamp: str) -> bool:
    return built.is_file() and f"streamspec sources {stamp}\0".encode() in built.read_bytes()


def loads(built: Path) -> bool:
    """Tells whether the libraries that it needs are here: a checkout may be used from several systems."""
    try:
        ctypes.CDLL(str(built.resolve()))
    except OSError:
        return False
    return True


def brief(error: Exception) -> str:
    """One line; of a program that failed, which one and how, without its arguments."""
    line = (str(error) or type(error).__name__).splitlines()[0]
    return re.sub(r"^Command '\['?([^',\]]*).*?\]?' returned", r"\1 returned", line)


def set_name(path: Path) -> str:
    """NAME of kernels_NAME.cpp, its row in kernels.toml; empty of other sources."""
    return path.stem.removeprefix("kernels_") if path.stem.startswith("kernels_") else ""


def instruction_set(path: Path) -> dict[str, Any]:
    """The row of a source in kernels.toml; empty of one that every machine builds."""
    return INSTRUCTION_SETS.get(set_name(path), {})


def sources(machine: str) -> list[Path]:
    """What is compiled for a machine."""
    files = [path for path in SOURCES if path.suffix == ".cpp"]
    return [path for path in files if instruction_set(path).get("machine", machine) == machine]


def digest() -> str:
    """sha256 of the sources; `streamspec.runtime.hardware.native_library` computes the same in a checkout."""
    named = (path.relative_to(NATIVE).as_posix().encode() + b"\0" + path.read_bytes() for path in SOURCES)
    return hashlib.sha256(b"".join(named)).hexdigest()


if __name__ == "__main__":
    setup(
        ext_modules=[
            Extension(
                "streamspec.streamspec_native",
                [path.as_posix() for path in SOURCES if path.suffix == ".cpp"],
                depends=[path.as_posix() for path in SOURCES if path.suffix != ".cpp"],
            )
        ],
        cmdclass={"build_ext": BuildNative, "bdist_wheel": Wheel},
    )
