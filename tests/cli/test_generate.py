"""`streamspec generate`: where the prompt comes from."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

import streamspec.runtime
from streamspec.cli import app
from streamspec.cli.generate import given_prompt
from streamspec.errors import ConfigError


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Prompts that reached the session."""
    seen: list[str] = []
    session = SimpleNamespace(stream=lambda text, options: seen.append(text) or iter(()))
    monkeypatch.setattr(streamspec.runtime, "load", lambda *_, **__: session)
    monkeypatch.setattr("streamspec.library.base_bundle.bundle_of", lambda name, precision, **_: Path(name))
    return seen


def run(*arguments: str | Path, stdin: str | bytes | None = None) -> Any:
    return CliRunner().invoke(app, ["generate", *map(str, arguments)], input=stdin)


@pytest.mark.parametrize("given", [["b", "a prompt"], ["b", "--prompt", "a prompt"], ["--", "b", "a prompt"]])
def test_the_prompt_is_the_second_argument_or_a_flag(given: list[str], asked: list[str]) -> None:
    assert run(*given).exit_code == 0 and asked == ["a prompt"]


@pytest.mark.parametrize(
    ("stdin", "prompt"),
    [("a\n", "a"), ("a", "a"), ("a\nb \n\n", "a\nb \n"), ("\n a\n", "\n a"), (b"a\r\nb\r\n", "a\nb")],
)
@pytest.mark.parametrize("name", [[], ["--prompt"]])
def test_the_last_newline_of_a_pipe_is_not_part_of_the_prompt(
    stdin: str | bytes, prompt: str, name: list[str], asked: list[str]
) -> None:
    assert run("b", *name, "-", stdin=stdin).exit_code == 0 and asked == [prompt]


@pytest.mark.parametrize(("terminal", "shown"), [(True, "\ufffd[2Ja\n"), (False, "\x1b[2Ja\n")])
def test_a_model_does_not_steer_the_terminal_and_a_pipe_gets_every_byte(
    terminal: bool, shown: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chunks = [SimpleNamespace(text=text, reasoning="", stats=None) for text in ("\x1b[2J", "a")]
    monkeypatch.setattr(streamspec.runtime, "load", lambda *_, **__: SimpleNamespace(stream=lambda *_: iter(chunks)))
    monkeypatch.setattr("streamspec.library.base_bundle.bundle_of", lambda name, precision, **_: Path(name))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    app(["generate", "b", "x"], standalone_mode=False)
    assert capsys.readouterr().out == shown


def test_an_argument_keeps_its_newline(asked: list[str]) -> None:
    assert run("b", "a\n").exit_code == 0 and asked == ["a\n"]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["b"], "no prompt; expected one prompt"),
        (["b", "x", "--prompt", "y"], "a prompt and --prompt"),
        (["b", "-"], "an empty prompt"),
    ],
)
def test_no_prompt_two_and_an_empty_one_are_refused(given: list[str], says: str, asked: list[str]) -> None:
    result = run(*given, stdin="\n")
    assert result.exit_code == 2 and says in result.stderr and result.stderr.count("\n") == 1 and not asked


def test_bytes_that_are_no_text_are_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a\xff"), "utf-8"))
    with pytest.raises(ConfigError, match="stdin that is no text .*expected utf-8"):
        given_prompt("-", None)


def test_a_window_drafts_by_its_name_and_a_bundle_by_its_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    drafts = list[object]()
    session = SimpleNamespace(stream=lambda text, options: iter(()))
    monkeypatch.setattr(streamspec.runtime, "load", lambda _, options: drafts.append(options.draft) or session)
    for bundle in ("window", "b"):
        (tmp_path / bundle).mkdir()
        (tmp_path / bundle / "manifest.json").touch()
    monkeypatch.chdir(tmp_path)
    for draft in ("window", "window:200", "./window"):
        assert run("b", "x", "--draft", draft).exit_code == 0
    assert drafts == ["window", "window:200", Path("window")]
    monkeypatch.undo()
    result = run("b", "x", "--draft", "window:7")
    assert result.exit_code == 2 and "window:N with 128 tokens or more" in result.stderr
    assert result.stderr.count("\n") == 1 and len(drafts) == 3


def test_a_prediction_is_the_text_of_a_file(monkeypatch: pytest.MonkeyPatch, asked: list[str], tmp_path: Path) -> None:
    predictions = list[object]()
    session = SimpleNamespace(stream=lambda text, options: predictions.append(options.prediction) or iter(()))
    monkeypatch.setattr(streamspec.runtime, "load", lambda *_, **__: session)
    file = tmp_path / "module.py"
    file.write_bytes("größer = 1\n".encode())
    assert run("b", "x", "--prediction", file).exit_code == 0 == run("b", "x").exit_code
    assert predictions == ["größer = 1\n", None]
    file.write_bytes(b"\xff")
    for wrong in (file, tmp_path / "none"):
        result = run("b", "x", "--prediction", wrong)
        assert result.exit_code == 2 and "a file with a text that the answer may repeat" in result.stderr
        assert result.stderr.count("\n") == 1
