"""The flags of option dataclasses: one for each field, at every command that loads."""

from __future__ import annotations

import importlib
import re
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, get_type_hints

import pytest
import typer
from typer.testing import CliRunner

import streamspec.bench
import streamspec.cli
import streamspec.runtime
import streamspec.runtime.options
import streamspec.serve
from streamspec.bundle.manifest import MANIFEST
from streamspec.cli import app
from streamspec.cli.option_flags import Flags, with_flags
from streamspec.option_fields import flag, option, plain_type
from streamspec.runtime import GenerationOptions, LoadOptions, Sampling
from tests.support.manifests import manifest

# The commands that load a bundle to answer with it: what they need beside the bundle, and the fields that they set
# themselves. A new field is none of these.
LOADING: dict[str, tuple[list[str], set[str]]] = {
    "generate": (["--prompt", "p"], {"tree", "idle", "prepare_grammar"}),
    "chat": ([], {"tree", "idle", "prepare_grammar"}),
    "serve": ([], {"tree", "adapter"}),
    "bench": (
        ["--prompts", "p"],
        {"cpu_bundle", "idle", "prepare_grammar", "past_answers"},
    ),
}
# A flag's word and the value that it becomes, by the type of the field and by its name.
BY_TYPE: dict[type, tuple[str, Any]] = {
    int: ("3", 3),
    float: ("1.5", 1.5),
    str: ("x", "x"),
    Path: ("x", Path("x")),
}
BY_NAME: dict[str, tuple[str, Any]] = {
    "tree": ("7", 7),
    "draft": ("window:200", "window:200"),
    "top_p": ("0.5", 0.5),
    "reasoning_effort": ("low", "low"),
}
BY_NAME["min_p"] = BY_NAME["top_p"]


class Loads(Exception):
    """The command has come to where it loads."""


@dataclass(frozen=True)
class MoreOptions(LoadOptions):
    more: int | None = option(None, "More of it.", minimum=2)
    mode: str = option("fast", "How it is done.")
    switch: bool = option(False, "Switch it on.")
    unless: bool = option(True, "Do it.", off="Do not do it.")
    file: Path | None = option(None, "A file for it.", flag="--into")
    inner: int = option(1, "For programs.", flag=None)


def having_flags(options: type) -> list[str]:
    return [one.name for one in fields(options) if one.metadata.get("flag", "") is not None]


def words_for(options: type, name: str) -> tuple[list[str], Any]:
    """The words that set a field, and the value that it then has."""
    rules, kind = (
        options.__dataclass_fields__[name].metadata,
        plain_type(get_type_hints(options)[name]),
    )
    if "off" in rules:
        return [rules.get("flag", "--no-" + name)], False
    spelled = rules.get("flag", flag(name))
    if kind is bool:
        return [spelled], True
    word, value = BY_NAME.get(name, BY_TYPE[kind])
    return [spelled, word], [value] if "several" in rules else value


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[LoadOptions]:
    """The options that reach a load."""
    seen: list[LoadOptions] = []

    def load(bundle: Path, options: LoadOptions, **_: Any) -> None:
        seen.append(options)
        raise Loads

    monkeypatch.setattr("streamspec.library.base_bundle.bundle_of", lambda name, precision, **_: Path(name))
    monkeypatch.setattr(streamspec.runtime, "load", load)
    monkeypatch.setattr(streamspec.serve, "serve", load)
    monkeypatch.setattr(streamspec.bench, "bench", lambda bundle, *_, options, **__: load(bundle, options))
    return seen


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    (tmp_path / MANIFEST).write_text("{}")  # a base otherwise, to `chat`
    return tmp_path


@pytest.fixture(scope="module")
def extended() -> typer.Typer:
    """The command line of a package whose LoadOptions have the fields of MoreOptions."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streamspec.runtime.options, "LoadOptions", MoreOptions)
        patch.setattr(streamspec, "cli", streamspec.cli)
        for name in [name for name in sys.modules if name.startswith("streamspec.cli")]:
            patch.delitem(sys.modules, name)
        extended: typer.Typer = importlib.import_module("streamspec.cli").app
    return extended


@pytest.mark.parametrize("command", LOADING)
@pytest.mark.parametrize("name", having_flags(MoreOptions))
def test_a_field_of_the_load_options_is_a_flag_of_every_command_that_loads(
    name: str, command: str, extended: typer.Typer, loads: list[LoadOptions], bundle: Path
) -> None:
    needed, without = LOADING[command]
    words, value = words_for(MoreOptions, name)
    result = CliRunner().invoke(extended, [command, str(bundle), *needed, *words])
    if name in without:
        assert not loads or getattr(loads[0], name) != value
        return
    assert isinstance(result.exception, Loads), result.output
    assert getattr(loads[0], name) == value != getattr(MoreOptions(), name)
    rules = MoreOptions.__dataclass_fields__[name].metadata
    shown = " ".join(CliRunner().invoke(extended, [command, "--help"]).output.split())
    assert words[0] + " " in shown and rules.get("off", rules["help"]) in shown


@pytest.mark.parametrize("command", LOADING)
def test_absent_flags_leave_the_defaults(command: str, loads: list[LoadOptions], bundle: Path) -> None:
    needed, without = LOADING[command]
    CliRunner().invoke(app, [command, str(bundle), *needed])
    found, default = vars(loads[0]), vars(LoadOptions())
    set_by_command = {name for name in found if found[name] != default[name]}
    assert set_by_command <= without | {"batch"}


def test_each_field_of_an_answer_is_a_flag_of_generate(monkeypatch: pytest.MonkeyPatch, bundle: Path) -> None:
    seen: list[GenerationOptions] = []
    session = SimpleNamespace(stream=lambda text, options: seen.append(options) or iter(()))
    monkeypatch.setattr(streamspec.runtime, "load", lambda *_: session)
    names = [(options, name) for options in (GenerationOptions, Sampling) for name in having_flags(options)]
    assert len(names) >= 9
    for options, name in names:
        words, value = words_for(options, name)
        result = CliRunner().invoke(app, ["generate", str(bundle), "p", *words])
        assert result.exit_code == 0, result.output
        answer = seen.pop()
        default: Any = options()
        assert getattr(answer if options is GenerationOptions else answer.sampling, name) == value, name
        assert value != getattr(default, name)


@with_flags
def echo(
    *,
    bundle: Annotated[str, typer.Argument()],
    options: Annotated[
        MoreOptions,
        Flags(only=("inner", "more", "mode", "unless"), readers={"mode": lambda mode: mode.upper()}),
    ],
    sampling: Annotated[Sampling, Flags(without=("top_k",), first=("seed",))] = Sampling(0.5, seed=7),  # noqa: B008
) -> None:
    print(
        bundle,
        options.more,
        options.mode,
        options.unless,
        sampling.temperature,
        sampling.seed,
        sampling.top_k,
    )


def run(*words: str) -> Any:
    typed = typer.Typer(rich_markup_mode=None, add_completion=False)
    typed.command()(echo)
    return CliRunner().invoke(typed, words)


def test_the_help_shows_the_flags_in_order_with_their_defaults() -> None:
    shown = run("--help").output
    assert re.findall(r"^  --([a-z-]+)", shown, re.MULTILINE) == [
        *(
            "more",
            "mode",
            "no-unless",
            "seed",
            "temperature",
            "top-p",
            "min-p",
            "repetition-penalty",
            "help",
        )
    ]
    assert "[default: 0.5]" in shown and "[default: fast]" in shown and "[default: 7]" not in shown
    assert "[x>=2]" in shown


def test_a_default_stands_where_the_flag_is_absent_and_readers_read_what_is_there() -> None:
    assert run("b").output == "b None FAST True 0.5 7 0\n"
    words = ("--more", "2", "--mode", "slow", "--no-unless", "--temperature", "0", "--seed", "8")
    assert run("b", *words).output == "b 2 SLOW False 0.0 8 0\n"
    assert run("b", "--more", "1").exit_code == 2


def test_a_command_may_be_called_by_its_flags_names(capsys: pytest.CaptureFixture[str]) -> None:
    echo(bundle="b", more=4, no_unless=False)
    assert capsys.readouterr().out == "b 4 fast False 0.5 7 0\n"


@pytest.mark.parametrize("words", [[], ["--temperature", "0"], ["--temperature", "0.0", "--top-k", "0"]])
def test_chat_and_serve_get_the_sampling_flags_that_are_there(
    words: list[str], monkeypatch: pytest.MonkeyPatch, bundle: Path
) -> None:
    """An absent flag leaves what the model's publisher recommends."""
    given = dict(zip(("temperature", "top_k"), [0] * (len(words) // 2), strict=False))
    served: list[Any] = []
    monkeypatch.setattr(streamspec.serve, "serve", lambda *_, sampling, **__: served.append(sampling))
    assert CliRunner().invoke(app, ["serve", str(bundle), *words]).exit_code == 0
    assert served == [given]

    recommended, talked = Sampling(temperature=0.6, top_k=20), list[Sampling]()
    session = SimpleNamespace(sampling=recommended, manifest=manifest(), close=lambda: None)
    monkeypatch.setattr("streamspec.prompt.turn_end.unended_turn_of", lambda session: None)
    monkeypatch.setattr(streamspec.runtime, "load", lambda *_: session)
    monkeypatch.setattr(
        "streamspec.chat.terminal.TerminalChat",
        lambda session, options, marks, given, load: (
            talked.append(session.sampling.changed(**given))
            or SimpleNamespace(session=session, terminal=False, run=lambda: None, say=print)
        ),
    )
    assert CliRunner().invoke(app, ["chat", str(bundle), *words]).exit_code == 0
    assert talked == [recommended.changed(**given)]


@pytest.mark.parametrize("command", ["chat", "serve"])
def test_the_help_says_whose_sampling_is_the_default(command: str) -> None:
    shown = " ".join(CliRunner().invoke(app, [command, "--help"]).output.split())
    assert "0: greedy; above 0: sample at this temperature. [default: (the model's)]" in shown
    seed = re.search(r"--seed .*?repeatable\.( \[default)?", shown)
    assert (seed is None) == (command == "serve") and not (seed and seed[1])
