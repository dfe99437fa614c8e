"""The one command behind all tables: its commands exist, and no page shows one that is not among them."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from streamspec.cli import app
from tests.support.shown_commands import read_shown, shown_on

ROOT = Path(__file__).parents[2]
BENCHMARKS, PAGES = ROOT / "benchmarks", ROOT / "docs" / "lab" / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
reproduce = __import__("reproduce")
PARTS = reproduce.read_parts()
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def options_of(script: Path) -> set[str]:
    """The words that look like options in a script and in the modules beside it that it imports."""
    source = script.read_text(encoding="utf-8")
    beside = [BENCHMARKS / f"{name}.py" for name in re.findall(r"^from (\w+) import", source, re.MULTILINE)]
    return set(re.findall(r'"(--[\w-]+)"', source)).union(*(options_of(file) for file in beside if file.exists()))


@pytest.mark.parametrize("name", PARTS)
def test_every_command_of_a_part_is_understood(name: str) -> None:
    for command in reproduce.commands(PARTS[name]):
        program, *options = command.words
        if program == "streamspec":
            command_line = COMMANDS[options[0]]
            command_line.make_context(options[0], list(options[1:]))
        elif options[0] == "-m":
            module = ROOT / options[1].replace(".", "/")
            assert (module / "__main__.py").exists() or module.with_suffix(".py").exists()
        else:
            known = options_of(BENCHMARKS / Path(options[0]).name)
            assert {option for option in options if option.startswith("--")} <= known


@pytest.mark.parametrize("page", sorted(PAGES.glob("*.md")), ids=lambda page: page.stem)
def test_every_command_that_a_page_shows_is_a_parts_command(page: Path) -> None:
    run = [read_shown(list(command.words)) for part in PARTS.values() for command in reproduce.commands(part)]
    shown = list(shown_on(page.read_text(encoding="utf-8")))
    assert [line for line, one in shown if not any(one.is_of(other) for other in run)] == []
    assert page.stem in {part.page for part in PARTS.values()}


@pytest.mark.parametrize(
    ("shown", "is_it"),
    [
        ("streamspec bench BUNDLE --prompts e2e/test.jsonl --limit 20 --threads 1", True),
        ("streamspec bench BUNDLE --prompts e2e/test.jsonl --limit N --threads 1 [--rows 8 | --json]", True),
        ("streamspec bench BUNDLE ... --limit 20", False),  # dots after a file stand for files
        ("streamspec bench ... --limit 20", True),
        ("streamspec bench", True),
        ("streamspec bench BUNDLE --prompts e2e/test.jsonl --limit 40 --threads 1", False),
        ("streamspec bench BUNDLE --prompts e2e/test.jsonl --threads 1", False),
        ("streamspec bench BUNDLE --prompts e2e/test.jsonl --limit 20 --threads 1 --rows 8", False),
        ("streamspec tune BUNDLE --prompts e2e/test.jsonl --limit 20 --threads 1", False),
    ],
)
def test_a_shown_command_is_compared_option_by_option(shown: str, is_it: bool) -> None:
    run = read_shown(shlex.split("streamspec bench e2e-int8 --prompts DATA/e2e/test.jsonl --limit 20 --threads 1"))
    ((_, one),) = shown_on(f"Command: `{shown}`.")
    assert one.is_of(run) is is_it


def test_every_part_is_of_a_page_that_exists() -> None:
    assert all((PAGES / f"{part.page}.md").exists() for part in PARTS.values())


def run_parts(tmp_path: Path, commands: str) -> subprocess.CompletedProcess[str]:
    """Runs the script with `commands` as its only part."""
    script = BENCHMARKS / "reproduce.py"
    (tmp_path / "reproduce.py").write_text(script.read_text(encoding="utf-8"), encoding="utf-8")
    (tmp_path / "results.toml").write_text(
        "[words]\nHELLO = 'hello there'\n[parts.one]\npage = 'speed'\nabout = 'x'\nhours = 1\n"
        f"commands = '''{commands}'''\n",
        encoding="utf-8",
    )
    data = tmp_path / "data" / "e2e"
    data.mkdir(parents=True)
    (data / "test.jsonl").touch()
    (tmp_path / "adapters").mkdir()
    words = [sys.executable, "reproduce.py", "--data", "data", "--work", "work"]
    return subprocess.run(words, cwd=tmp_path, text=True, capture_output=True)


def test_a_command_that_fails_does_not_stop_the_others_and_is_named_at_the_end(tmp_path: Path) -> None:
    done = run_parts(tmp_path, "\npython -c 'raise SystemExit(3)'\npython -c 'print(\"HELLO TASK\")'\n")
    assert done.returncode == 1 and "failed, of one: python -c" in done.stderr
    assert "hello there e2e" in done.stdout and "hello there wikisql" in done.stdout
    assert "hello there wikisql" in (tmp_path / "work" / "logs" / "one.txt").read_text()


def test_a_result_that_is_there_is_not_made_again(tmp_path: Path) -> None:
    made = 'result <- python -c \'open("result", "a").write("x")\'\n'
    done = run_parts(tmp_path, f"\n{made}{made}")
    assert done.returncode == 0 and (tmp_path / "work" / "result").read_text() == "x"
    assert "result is there already" in done.stdout


def test_commands_run_the_installed_package_not_the_checkout_beside_it(tmp_path: Path) -> None:
    """The folder of a checkout, before the installed package on the path, would hide its native operators."""
    done = run_parts(tmp_path, "\npython -c 'import sys; print([one for one in sys.path if one])'\n")
    assert done.returncode == 0 and f"'{tmp_path.parent}'" not in done.stdout


def test_a_training_that_was_interrupted_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    command = reproduce.Command(("streamspec", "train", "--out", "half"), "half")
    assert "--resume" not in command.arguments()
    Path("half").mkdir()
    assert command.arguments()[-1] == "--resume"


def test_a_folder_without_the_data_is_refused(tmp_path: Path) -> None:
    words = [sys.executable, str(BENCHMARKS / "reproduce.py"), "--data", str(tmp_path)]
    done = subprocess.run(words, text=True, capture_output=True)
    assert done.returncode == 2 and "found no e2e/test.jsonl" in done.stderr
