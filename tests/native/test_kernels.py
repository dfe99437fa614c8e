"""The kernels of all instruction sets that this processor runs, against each other and, as the operators, under
sanitizers; those of ARM in an emulator.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from streamspec.runtime.hardware import native_library

ROOT = Path(__file__).parents[2]
NATIVE = ROOT / "native"
SETS = NATIVE / "instruction_sets"
OPERATORS = sorted((NATIVE / "operators").glob("*.cpp"))
MACHINES = {"amd64": "x86_64", "aarch64": "arm64"}
FLAGS = ("-std=c++17", "-O0", "-fPIC", "-ffp-contract=off", "-w", f"-I{NATIVE}")  # a third of the time of -O1
LANES = ("-O1",)  # of kernels over vectors, which take longer to compile without
CASES = 15  # where something is emulated
NEEDS = {"amx": "amx_int8", "avx512vnni": "avx512_vnni", "avxvnni": "avx_vnni"}
CPUINFO = Path("/proc/cpuinfo")
WORDS = CPUINFO.read_text().split() if CPUINFO.exists() else [*NEEDS.values()]
NOT_HERE = tuple(name for name, word in NEEDS.items() if word not in WORDS)  # compiling them takes long
# Checks by calls and without scopes of locals, of which the kernels' are many: a sixth of the time to compile.
ADDRESS = ("-fsanitize=address", "-fno-sanitize-recover=all", "-fno-sanitize-address-use-after-scope")
CALLS = {
    "gcc": ("--param", "asan-instrumentation-with-call-threshold=0"),
    "clang": ("-mllvm", "-asan-instrumentation-with-call-threshold=0"),
}
UNDEFINED = ("-fsanitize=undefined",)
FEW = ("-fno-sanitize=null,alignment,object-size,vptr",)  # pointers are the other sanitizer's part


class Toolchain:
    """A compiler with GCC's flags, and objects of the sources of a machine in `folder`."""

    def __init__(self, compiler: str, machine: str, folder: Path) -> None:
        self.compiler, self.machine, self.folder = compiler, machine, folder
        self.clang = "clang" in subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout
        self.calls = CALLS["clang" if self.clang else "gcc"]

    def run(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run([self.compiler, *map(str, arguments)], capture_output=True, text=True)

    def compile(self, path: Path, *flags: str) -> str:
        """The object, or "" where the compiler does not take it."""
        made = self.folder / f"{path.stem}.o"
        return str(made) if self.run(*FLAGS, *flags, "-c", path, "-o", made).returncode == 0 else ""

    def kernels(self, *flags: str, portable: tuple[str, ...] = (), without: tuple[str, ...] = ()) -> list[str]:
        """Kernels of the machine and what chooses among them. `portable`: flags of those alone that all machines have;
        `without`: those that are left out."""
        rows = tomllib.loads((SETS / "kernels.toml").read_text(encoding="utf-8"))
        names = [path.stem.removeprefix("kernels_") for path in sorted(SETS.glob("kernels_*.cpp"))]
        own = [name for name in names if rows.get(name, {}).get("machine", self.machine) == self.machine]

        def one(name: str) -> str:
            if name in without:
                return ""
            more = (*LANES, *rows[name]["gcc"]) if name in rows else portable
            return self.compile(SETS / f"kernels_{name}.cpp", *flags, *more)

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            made = dict(zip(own, pool.map(one, own), strict=True))
        assert made["portable"] and sum(map(bool, made.values())) > 1
        left_out = [f"-DSTREAMSPEC_WITHOUT_{name.upper()}" for name, file in made.items() if not file]
        return [*filter(None, made.values()), self.compile(NATIVE / "kernels" / "choose.cpp", *flags, *left_out)]

    def link(self, name: str, *arguments: str) -> Path:
        done = self.run(*arguments, "-o", self.folder / name)
        assert done.returncode == 0, done.stderr
        return self.folder / name


@pytest.fixture(scope="module")
def sanitizing(tmp_path_factory: pytest.TempPathFactory) -> Toolchain:
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))), None)
    if os.name == "nt" or compiler is None:
        pytest.skip("no compiler that takes GCC's flags")
    machine = platform.machine().lower()
    made = Toolchain(compiler, MACHINES.get(machine, machine), tmp_path_factory.mktemp("sanitized"))
    empty = made.folder / "empty.cpp"
    empty.write_text("int main() {}\n")
    if made.run(*ADDRESS, *UNDEFINED, empty, "-o", made.folder / "empty").returncode:
        pytest.skip(f"{compiler} has no sanitizers")
    return made


@pytest.fixture(scope="module")
def objects(sanitizing: Toolchain) -> list[str]:
    return sanitizing.kernels(*ADDRESS, *sanitizing.calls, portable=(*UNDEFINED, *FEW), without=NOT_HERE)


def agree(command: list[str], cases: int) -> tuple[str, str]:
    """Names of the kernels that agree, and a hash of what they gave."""
    done = subprocess.run([*command, str(cases)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    said = re.fullmatch(rf"kernels_test: (.*): equal in {cases} cases, hash (\w+)\n", done.stdout)
    assert said, done.stdout
    return said[1], said[2]


@pytest.fixture(scope="module")
def program(sanitizing: Toolchain, objects: list[str]) -> str:
    test = sanitizing.compile(Path(__file__).with_name("kernels_test.cpp"), *ADDRESS, *sanitizing.calls)
    return str(sanitizing.link("kernels_test", *ADDRESS, *UNDEFINED, test, *objects))


@pytest.fixture(scope="module")
def given(program: str) -> str:
    """The hash of what the kernels of this machine give in as many cases as others'."""
    return agree([program], CASES)[1]


@pytest.mark.slow
def test_all_kernels_give_the_same_bits_within_their_memory(program: str) -> None:
    assert native_library.kernels() in agree([program], 50)[0].split(", ")


@pytest.mark.slow
def test_operators_stay_within_their_memory(sanitizing: Toolchain, objects: list[str]) -> None:
    if sys.platform != "linux" or sanitizing.clang:
        pytest.skip("only GCC's sanitizers on Linux are loaded ahead of Python")
    flags = (*ADDRESS, *UNDEFINED, *sanitizing.calls, "-DSTREAMSPEC_EXACT_SCRATCH")
    sources = [sanitizing.compile(path, *flags) for path in (*OPERATORS, NATIVE / "sources.cpp")]
    library = sanitizing.link("streamspec_native.so", "-shared", *flags, *sources, *objects)
    needs = subprocess.run(["ldd", str(library)], capture_output=True, text=True).stdout
    ahead = re.findall(r"lib[au]b?san\S* => (\S+)", needs)
    assert len(ahead) == 2, needs
    environment = {**os.environ, "LD_PRELOAD": " ".join(ahead), "ASAN_OPTIONS": "detect_leaks=0"}
    command = [sys.executable, "-m", "tests.support.native_sanitized", str(library), "20"]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " cases within their memory" in done.stdout  # 20 of each operator


@pytest.mark.slow
def test_kernels_of_arm_give_the_same_bits_as_those_of_this_machine(given: str, tmp_path: Path) -> None:
    compiler, emulator = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64-static")
    if compiler is None or emulator is None:
        pytest.skip("no g++-aarch64-linux-gnu and qemu-user-static (Debian) here")
    arm = Toolchain(compiler, "arm64", tmp_path)
    test = arm.compile(Path(__file__).with_name("kernels_test.cpp"))
    program = arm.link("kernels_test", "-static", test, *arm.kernels())
    assert agree([emulator, str(program)], CASES) == ("dotprod, neon, portable", given)


WINE = Path("/usr/lib/wine/wine64")
LOADS = """
#include <cstdio>
#include <initializer_list>
#include <windows.h>
int main(int, char** arguments) {
    const HMODULE library = LoadLibraryA(arguments[1]);
    if (!library) return 1;
    for (const char* name : {"RegisterCustomOps", "streamspec_draft_tree", "streamspec_draft_compare"})
        if (!GetProcAddress(library, name)) return 2;
    using Text = const char* (*)();
    for (const char* name : {"streamspec_sources", "streamspec_kernels"})
        std::printf("%s\\n", reinterpret_cast<Text>(reinterpret_cast<void*>(GetProcAddress(library, name)))());
}
"""


@pytest.mark.slow
def test_the_library_for_windows_loads_there_and_its_kernels_give_the_same_bits(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = shutil.which("x86_64-w64-mingw32-g++-posix")
    if compiler is None or not WINE.exists():
        pytest.skip("no g++-mingw-w64-x86-64-posix and wine64 (Debian) here")
    monkeypatch.setenv("WINEPREFIX", str(tmp_path / "wine"))
    monkeypatch.setenv("WINEDEBUG", "-all")
    monkeypatch.setenv("WINEDLLOVERRIDES", "mscoree,mshtml=")  # no .NET and no browser, which take seconds to set up
    windows = Toolchain(compiler, "x86_64", tmp_path)
    # MinGW's own fmaf rounds twice. Of the sets only those that differ in their lanes.
    kernels = windows.kernels(portable=("-mfma",), without=("amx", "avxvnni", *NOT_HERE))
    test = windows.link(
        "kernels_test.exe", "-static", windows.compile(Path(__file__).with_name("kernels_test.cpp")), *kernels
    )
    names, bits = agree([str(WINE), str(test)], CASES)
    assert bits == given

    own = [
        windows.compile(path, '-DSTREAMSPEC_SOURCES="of this test"')
        for path in (*OPERATORS, *sorted((NATIVE / "draft_tree").glob("*.cpp")), NATIVE / "sources.cpp")
    ]
    library = windows.link("streamspec_native.dll", "-shared", "-static", *own, *kernels)
    loads = tmp_path / "loads.cpp"
    loads.write_text(LOADS)
    loader = windows.link("loads.exe", "-static", windows.compile(loads))
    done = subprocess.run([WINE, loader, library], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    sources, chosen = done.stdout.splitlines()
    assert "of this test" in sources and chosen in names
