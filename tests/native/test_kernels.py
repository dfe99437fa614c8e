"""The kernels of all instruction sets that this processor runs, against each other and under sanitizers."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NATIVE = ROOT / "native"
MACHINES = {"amd64": "x86_64", "aarch64": "arm64"}
FLAGS = ("-std=c++17", "-O1", "-ffp-contract=off", "-w", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


@pytest.mark.slow
def test_all_kernels_give_the_same_bits_within_their_memory(tmp_path: Path) -> None:
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))), None)
    if os.name == "nt" or compiler is None:
        pytest.skip("no compiler that takes GCC's flags")
    machine = platform.machine().lower()
    machine = MACHINES.get(machine, machine)
    rows = tomllib.loads((NATIVE / "kernels.toml").read_text(encoding="utf-8"))
    flags: dict[Path, list[str]] = {NATIVE / "choose.cpp": [], Path(__file__).with_name("kernels_test.cpp"): []}
    for path in sorted(NATIVE.glob("kernels_*.cpp")):
        row = rows.get(path.stem.removeprefix("kernels_"), {"machine": machine})
        if row["machine"] == machine:
            flags[path] = row.get("gcc", [])

    def compiled(path: Path) -> str:
        made = tmp_path / f"{path.stem}.o"
        command = [compiler, *FLAGS, *flags[path], f"-I{NATIVE}", "-c", str(path), "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode and path.stem.startswith("kernels_") and flags[path]:
            pytest.skip(f"this compiler has no {path.stem}")
        assert done.returncode == 0, done.stderr
        return str(made)

    with ThreadPoolExecutor() as pool:
        objects = list(pool.map(compiled, flags))
    program = tmp_path / "kernels_test"
    linked = subprocess.run([compiler, *FLAGS, *objects, "-o", str(program)], capture_output=True, text=True)
    if linked.returncode:
        pytest.skip("this compiler has no sanitizers")
    done = subprocess.run([str(program), "150"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "equal in 150 cases" in done.stdout
