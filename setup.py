"""Builds the native operators (native/) into one shared library beside the package, where a C++17 compiler is.

It is no Python extension: ONNX Runtime and ctypes load it, so one wheel serves every Python. Where it cannot be built,
the installation goes on without it and says so in one line. STREAMSPEC_NATIVE=0 leaves it out, =1 makes a failure an
error. All else is in pyproject.toml.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

NATIVE = Path("native")  # paths are relative to the project's root, from where every frontend runs this file
SOURCES = sorted(path for path in NATIVE.rglob("*") if path.suffix in (".cpp", ".h", ".toml"))
LIBRARY = "streamspec_native" + (".dll" if sys.platform == "win32" else ".so")
MODE = os.environ.get("STREAMSPEC_NATIVE", "")
MACHINES = {"amd64": "x86_64", "x86-64": "x86_64", "aarch64": "arm64"}  # other names of the same
# The order of sums is part of the result: no contraction into fused multiply-adds that the source does not ask for.
# Older MSVC contracts under /fp:precise.
FLAGS = {
    "gcc": ["-std=c++17", "-O3", "-g0", "-fvisibility=hidden", "-fno-fast-math", "-ffp-contract=off", "-w"],
    "msvc": ["/std:c++17", "/O2", "/EHsc", "/fp:strict"],
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
            self.extensions = self.distribution.ext_modules = []
            if inplace:
                (Path("streamspec") / LIBRARY).unlink(missing_ok=True)

    def get_ext_filename(self, fullname: str) -> str:
        return os.path.join(*fullname.split(".")[:-1], LIBRARY)

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name))
        stamp = f"{digest()} {self.machine()}-{sys.platform}"
        for built in (target, Path("streamspec") / LIBRARY):  # of these very sources: nothing to do
            if not self.force and built.is_file() and f"streamspec sources {stamp}\0".encode() in built.read_bytes():
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
        rows = tomllib.loads((NATIVE / "instruction_sets" / "kernels.toml").read_text(encoding="utf-8"))
        defines = [("STREAMSPEC_SOURCES", f'"{stamp}"')]

        def one(path: Path) -> list[str] | Exception:
            flags = FLAGS[family] + rows.get(name(path), {}).get(family, [])
            try:
                return list(
                    self.compiler.compile([str(path)], self.build_temp, defines, [str(NATIVE)], extra_postargs=flags)
                )
            except Exception as error:
                return error

        files = [path for path in SOURCES if path.suffix == ".cpp"]
        machine = self.machine()
        optional = {path for path in files if name(path) in rows}
        wanted = [path for path in files if rows.get(name(path), {}).get("machine", machine) == machine]
        if hasattr(self.compiler, "initialize") and not getattr(self.compiler, "initialized", False):
            self.compiler.initialize()
        chooser = NATIVE / "kernels" / "choose.cpp"
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            sides = [path for path in wanted if path != chooser]
            made = dict(zip(sides, pool.map(one, sides), strict=True))
        for path, outcome in made.items():
            if isinstance(outcome, Exception) and (path not in optional or MODE == "1"):
                raise RuntimeError(f"{path.as_posix()}: {brief(outcome)}")
        left_out = [path for path, outcome in made.items() if isinstance(outcome, Exception)]
        for path in left_out:
            print(f"streamspec: this compiler cannot build {path.name}: left out", file=sys.stderr)
            defines.append((f"STREAMSPEC_WITHOUT_{name(path).upper()}", None))
        made[chooser] = one(chooser)
        if isinstance(made[chooser], Exception):
            raise RuntimeError(f"{chooser.as_posix()}: {brief(made[chooser])}")
        return [file for outcome in made.values() if not isinstance(outcome, Exception) for file in outcome]

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


def brief(error: Exception) -> str:
    """One line; of a program that failed, which one and how, without its arguments."""
    line = (str(error) or type(error).__name__).splitlines()[0]
    return re.sub(r"^Command '\['?([^',\]]*).*?\]?' returned", r"\1 returned", line)


def name(path: Path) -> str:
    """The row of a source in kernels.toml: NAME of kernels_NAME.cpp."""
    return path.stem.removeprefix("kernels_") if path.stem.startswith("kernels_") else ""


def digest() -> str:
    """sha256 of the sources; `streamspec.runtime.hardware.native_library` computes the same in a checkout."""
    named = (path.relative_to(NATIVE).as_posix().encode() + b"\0" + path.read_bytes() for path in SOURCES)
    return hashlib.sha256(b"".join(named)).hexdigest()


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
