"""What the wheel holds: the runtime stays small, and data that an application can do without lies in packages of its
own.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from modulefinder import ModuleFinder
from pathlib import Path

import pytest

from streamspec.runtime.hardware import native_library
from tests.packaging.conftest import ROOT, module

BUDGET = 330_000  # bytes of core and runtime as they ship


def test_core_and_runtime_ship_in_less_than_330_kb(wheel: Path) -> None:
    shipped = module(ROOT / "benchmarks" / "shipped.py")
    runtime = shipped.runtime(shipped.parts(wheel))
    assert runtime.files > 30 and 50_000 < runtime.stored < BUDGET


def test_the_demo_adapter_is_a_package_of_data_only(wheel: Path) -> None:
    shipped = module(ROOT / "benchmarks" / "shipped.py")
    found = shipped.parts(wheel)
    adapter = found["streamspec.demo.sql_adapter"]
    assert wheel.stat().st_size - adapter.stored < 2.5 * 2**20  # all else is small
    names = [name for name in zipfile.ZipFile(wheel).namelist() if "/sql_adapter/" in name]
    assert len(names) == adapter.files and not any(name.endswith(".py") for name in names)


def test_every_file_of_the_wheel_has_a_part(wheel: Path) -> None:
    shipped = module(ROOT / "benchmarks" / "shipped.py")
    found, names = shipped.parts(wheel), zipfile.ZipFile(wheel).namelist()
    assert sum(part.files for part in found.values()) == len(names)
    assert found["metadata"].files == sum(name.split("/")[0].endswith(".dist-info") for name in names)


@pytest.mark.parametrize(
    "left_out",
    [
        "demo/sql_adapter",
        "demo",
        "bench",
        "chat",
        "export",
        "library",
        "adapters",
        "packaging",
        "schemas",
        "serve",
        "serve/page",
        native_library.NAME,
    ],
)
def test_the_runtime_and_its_commands_work_without(
    left_out: str, site: Path, chat_bundle: Path, tmp_path: Path
) -> None:
    if not (site / "streamspec" / left_out).exists():
        pytest.skip(f"the wheel has no {left_out}")
    installed = tmp_path / "site"
    shutil.copytree(site / "streamspec", installed / "streamspec")
    dropped = installed / "streamspec" / left_out
    shutil.rmtree(dropped) if dropped.is_dir() else dropped.unlink()
    command = [
        sys.executable,
        "-m",
        "streamspec",
        "generate",
        str(chat_bundle),
        "--prompt",
        "hello",
        "--max-new-tokens",
        "5",
        "--rows",
        "1",
    ]
    done = subprocess.run(
        command, env={"PYTHONPATH": str(installed), "HOME": str(tmp_path)}, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stdout.strip(), done.stderr


@pytest.mark.parametrize("line", ["import streamspec; streamspec.load", "from streamspec import load"])
def test_what_freezes_applications_finds_the_runtime_and_no_training(line: str, site: Path, tmp_path: Path) -> None:
    application = tmp_path / "application.py"
    application.write_text(line + "\n")
    finder = ModuleFinder(path=[str(site)])
    finder.run_script(str(application))
    parts = {name.split(".")[1] for name in finder.modules if name.startswith("streamspec.")}
    assert "streamspec.runtime.session" in finder.modules and not parts & {"adapters", "export", "bench", "serve"}


def test_the_server_is_frozen_with_its_page(site: Path) -> None:
    pytest.importorskip("PyInstaller", reason="pyinstaller is not installed")
    if not (site / "streamspec" / "serve" / "page").is_dir():
        pytest.skip("the wheel has no page")
    code = "import runpy, sys; print(*(file for file, _ in runpy.run_path(sys.argv[1])['datas']), sep='\\n')"
    hook = site / "streamspec" / "packaging" / "hook-streamspec.serve.py"
    done = subprocess.run(
        [sys.executable, "-c", code, hook], env={"PYTHONPATH": str(site)}, cwd=site, capture_output=True, text=True
    )
    page = {path.name for path in (site / "streamspec" / "serve" / "page").iterdir() if path.suffix != ".py"}
    assert "index.html" in page == {Path(line).name for line in done.stdout.split()}, done.stderr


def test_without_its_adapter_the_demo_says_so_in_one_line(site: Path, tmp_path: Path) -> None:
    shutil.copytree(site / "streamspec", tmp_path / "streamspec")
    shutil.rmtree(tmp_path / "streamspec" / "demo" / "sql_adapter")
    code = (
        "from streamspec.demo.sample import sql_adapter\ntry: sql_adapter()\nexcept Exception as error: "
        "print(type(error).__name__, error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(tmp_path)}, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stdout.startswith("AdapterError no SQL adapter") and done.stdout.count("\n") == 1, (
        done.stdout + done.stderr
    )


def test_steps_side_by_side_print_whole_and_one_that_fails_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    run = module(ROOT / "run.py")

    def step(letter: str, code: int) -> int:
        says = f"import sys, time; [print({letter!r}, flush=True, file=to) or time.sleep(0.01) for to in"
        return run.call(sys.executable, "-c", f"{says} (sys.stdout, sys.stderr) * 5]; sys.exit({code})")

    def torn() -> int:
        step("c", 0)
        return int(run.call("no-such-tool"))

    steps = {"c": torn, "a": lambda: step("a", 0), "b": lambda: step("b", 3)}
    assert sorted(run.side_by_side(steps)) == ["b", "c"]
    said = capfd.readouterr().out
    assert "== c\n" + "c\n" * 10 + "run.py: FileNotFoundError: " in said and "'no-such-tool'\n" in said
    assert "== a\n" + "a\n" * 10 in said and "== b\n" + "b\n" * 10 in said


def test_a_command_runs_where_a_folder_has_the_packages_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As beside a clone."""
    run = module(ROOT / "run.py")
    monkeypatch.setattr(run, "set_up", lambda extra: None)
    monkeypatch.setattr(run, "PYTHON", sys.executable)
    (tmp_path / "streamspec").mkdir()
    monkeypatch.chdir(tmp_path)
    assert run.main(["doctor", "--help"]) == 0 and "doctor" in capfd.readouterr().out


def test_the_oldest_libraries_are_those_that_are_tested() -> None:
    """`run.py lowest` installs exactly the lower bounds of pyproject.toml, torch apart, which CI on GitHub adds."""
    root = Path(__file__).parents[2]
    pinned = dict(re.findall(r"^([\w-]+)==([\d.]+)$", (root / "tests" / "lowest.txt").read_text(), re.MULTILINE))
    text = (root / "pyproject.toml").read_text(encoding="utf-8")
    torch = re.findall(r'STREAMSPEC_LOWEST_TORCH: "([\d.]+)"', (root / ".github" / "workflows" / "ci.yml").read_text())
    for name, version in [*pinned.items(), ("torch", torch[0])]:
        bounds = set(re.findall(rf'"{name}>=([\d.]+)"', text))
        assert {bound + ".0" * (2 - bound.count(".")) for bound in bounds} == {version}, name
