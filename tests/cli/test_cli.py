"""The command line: errors in one line, exit codes, flags that follow the schema."""

from __future__ import annotations

import errno
import inspect
import json
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner

import streamspec.bench
from streamspec.adapters.training.config import TrainConfig
from streamspec.cli import app, train
from streamspec.cli.bench import parse_rows
from streamspec.cli.errors import guarded
from streamspec.cli.inspect import in_short
from streamspec.cli.serve import named_bundle
from streamspec.cli.shared_options import folders_of, unescaped
from streamspec.errors import ConfigError, StreamspecError
from streamspec.library import train as library_train
from streamspec.option_fields import flag

ROOT = Path(__file__).parents[2]


def run(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, [str(a) for a in arguments])


@pytest.mark.parametrize(("given", "read"), [(r"\n", "\n"), (r"\\n", r"\n"), ("|\t", "|\t"), (r"a\tb\q", "a\tb\\q")])
def test_a_separator_may_be_written_with_escapes(given: str, read: str) -> None:
    assert unescaped(given) == read


@pytest.mark.parametrize(
    ("given", "batch"),
    [((), 4), (("--sessions", "7"), 7), (("--batch", "1"), 1), (("--also", "x", "--sessions", "64"), 64)],
)
def test_all_sessions_may_share_calls_unless_told(
    given: tuple[str, ...], batch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = list[Any]()
    (tmp_path / "manifest.json").touch()
    monkeypatch.setattr("streamspec.serve.serve", lambda bundle, options, **_: served.append(options))
    result = run("serve", tmp_path, *(str(tmp_path) if word == "x" else word for word in given))
    assert result.exit_code == 0, result.output
    assert [options.batch for options in served] == [batch]


def test_a_further_bundle_may_have_a_name(tmp_path: Path) -> None:
    (equals := tmp_path / "a=b").mkdir()
    assert named_bundle("plain") == ("", "plain") and named_bundle(str(equals)) == ("", str(equals))
    assert named_bundle(f"code={equals}") == ("code", str(equals))


def test_a_precision_is_that_of_the_bases_among_several_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str | None]] = []
    monkeypatch.setattr("streamspec.library.base_bundle.bundle_of", lambda *given: (asked.append(given), tmp_path)[1])
    (tmp_path / "manifest.json").touch()
    bundle = str(tmp_path)
    folders_of([bundle, "base"], "int4")
    folders_of([bundle], "int4")  # refused by `bundle_of`
    assert asked == [(bundle, None), ("base", "int4"), (bundle, "int4")]


def test_the_line_of_the_address_may_be_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = SimpleNamespace(url="http://127.0.0.1:1", token="drawn")
    monkeypatch.setattr("streamspec.serve.serve", lambda bundle, options, ready, **_: ready(server))
    monkeypatch.delenv("STREAMSPEC_TOKEN", raising=False)
    (tmp_path / "manifest.json").touch()
    for given, token in (((), "drawn"), (("--token", "12345678"), None)):
        done = run("serve", tmp_path, "--json", *given)
        assert json.loads(done.stdout) == {"url": "http://127.0.0.1:1/v1", "token": token}


def one_line(text: str) -> str:
    lines = text.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("streamspec: "), text
    return lines[0]


def test_a_users_error_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    result = run("inspect", tmp_path / "nowhere")
    assert result.exit_code == 2
    assert "nowhere does not exist" in one_line(result.stderr)


def test_no_traceback_in_a_real_process(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "streamspec", "inspect", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "is neither a bundle nor a base" in one_line(done.stderr)


@pytest.mark.parametrize(
    ("command", "raised", "code", "says"),
    [
        ("train", StreamspecError("found", "that", "do this"), 2, "found; expected that; do this"),
        ("train", KeyboardInterrupt(), 130, "interrupted"),
        (
            "export",
            OSError(errno.ENOSPC, "No space left on device", "model.onnx"),
            2,
            "model.onnx: No space left on device",
        ),
        ("train", ModuleNotFoundError("", name="torch"), 2, 'pip install "streamspec[train]"'),
        ("export", ModuleNotFoundError("", name="torch"), 2, 'pip install "streamspec[export]"'),
        ("export", ModuleNotFoundError("", name="onnx"), 2, 'pip install "streamspec[cpu]"'),
        ("serve", ModuleNotFoundError("", name="uvicorn"), 2, 'pip install "streamspec[serve]"'),
        ("bench", ModuleNotFoundError("", name="rouge_score.x"), 2, 'pip install "streamspec[bench]"'),
    ],
)
def test_failures_become_a_line_and_a_code(
    command: str, raised: BaseException, code: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise raised

    with pytest.raises(SystemExit) as caught:
        guarded(command, fail)()
    assert caught.value.code == code
    assert says in one_line(capsys.readouterr().err)


def test_a_bug_keeps_its_traceback() -> None:
    def fail() -> None:
        raise ModuleNotFoundError("No module named 'streamspec.typo'", name="streamspec.typo")

    with pytest.raises(ModuleNotFoundError):
        guarded("export", fail)()


def test_importing_the_command_line_imports_no_heavy_package() -> None:
    heavy = "torch transformers peft onnx onnxruntime matplotlib rich"
    code = f"import sys, streamspec.cli; print([m for m in '{heavy}'.split() if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_version() -> None:
    assert run("--version").stdout.strip() == streamspec.__version__


# ---- train: flags = YAML keys = fields


def test_every_field_of_the_schema_is_a_flag() -> None:
    names = set(inspect.signature(train.command).parameters)
    assert names == {f.name for f in fields(TrainConfig)} | {"file", "as_json", "help_all"}


def test_help_shows_essentials_first_and_options_of_papers_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 100)
    short, whole = (run("train", wanted).stdout for wanted in ("--help", "--help-all"))
    shown = [re.findall(r"^│ (--[a-z-]+)", text, re.MULTILINE) for text in (short, whole)]
    names = [flag(f.name) for f in fields(TrainConfig)]
    assert shown[0][:10] == [name for name in names if name in map(flag, train.ESSENTIAL)]
    assert set(shown[1]) == {*names, "--config", "--json", "--help", "--help-all"}
    assert set(shown[1]) - set(shown[0]) == set(map(flag, train.PAPERS))
    assert "[default: 8]" in short and "--no-resume" not in whole and "--no-root-token" in whole


def test_the_tables_of_the_help_name_options_with_a_text() -> None:
    known = {f.name: f.metadata["help"] for f in fields(TrainConfig)}
    assert {*train.ESSENTIAL, *train.PAPERS} <= set(known) and not {*train.ESSENTIAL} & {*train.PAPERS}
    assert all(known.values())


def test_the_help_of_a_flag_stands_at_its_field() -> None:
    helps = {field.name: field.metadata.get("help", "") for field in fields(TrainConfig)}
    assert "number of streams" in helps["gamma"]


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[TrainConfig]:
    """Catches the config instead of checking files and training."""
    import streamspec.adapters.train as module

    monkeypatch.setattr(library_train, "check_early", lambda config: None)
    seen: list[TrainConfig] = []
    monkeypatch.setattr(
        module, "train", lambda config, *_: seen.append(config) or {"val_loss": 0.5, "val_texts": 1, "minutes": 3.2}
    )
    return seen


def test_training_ends_with_what_it_reached(tmp_path: Path, trained: list[TrainConfig]) -> None:
    result = run("train", "--base", "b", "--data", "d", "--out", tmp_path / "o")
    assert result.exit_code == 0, result.stderr
    assert (
        result.stdout.split("\n")[0]
        == f"wrote {tmp_path / 'o'} in 3 minutes; on validation data: next-token loss 0.500 of 1 text"
    )
    streams = {"val_loss": 1.25, "val_texts": 20, "val_answers": 12, "val_ranked": 12, "minutes": 40.1}
    streams |= {"tau": 3.456, "tau_rows": 16, "per_stream_accuracy": [0.9, 0.812]}
    line = train.summary(streams, trained[0]).split("\n")[0]
    assert "loss 1.250 of 20 texts" in line
    assert "simulated tau 3.46 (tree of 16 rows) on 12 answers of the target, " in line
    assert line.endswith("first candidate right: 0.90 0.81")
    line = train.summary(streams | {"val_answers": 0, "val_ranked": 9}, trained[0]).split("\n")[0]
    assert "simulated tau 3.46 (tree of 16 rows) on 9 reference answers, " in line


def test_a_flag_wins_over_the_file_and_the_file_over_the_default(tmp_path: Path, trained: list[TrainConfig]) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("base: b\ndata: d.jsonl\ngamma: 2\nmax-minutes: 3\nroot_token: true\nlr: 1e-3\nresume: true\n")
    result = run("train", "--config", file, "--out", "o", "--gamma", "3", "--no-root-token", "--no-resume", "--json")
    assert result.exit_code == 0, result.stderr
    (config,) = trained
    assert (config.base, config.gamma, config.max_minutes, config.root_token) == ("b", 3, 3, False)
    assert config.lr == 1e-3 and not config.resume  # YAML takes 1e-3 for text
    assert config.stream_lr == TrainConfig(base="b", data=Path("d"), out=Path("o")).stream_lr
    assert json.loads(result.stdout.splitlines()[-1]) == {"val_loss": 0.5, "val_texts": 1, "minutes": 3.2}


@pytest.mark.parametrize(
    ("yaml", "says"),
    [
        ("gama: 3", "unknown option gama; expected gamma; check the spelling"),
        ("bogus: 3", "expected accumulate, active, allow_base_mismatch, alpha, "),
        ("method: medsua", "change --method to medusa"),
        ("[1]", "holds a list"),
        ("a: [", "expected YAML"),
        ("gamma: 99", "gamma = 99"),
        ("gamma: 2.5", "gamma = 2.5; expected a whole number"),
        ("lr: fast", "lr = 'fast'; expected a number"),
        ("resume: 1", "resume = 1; expected true or false"),
        ("val-rows: 0", "val_rows = 0"),
    ],
)
def test_a_wrong_file_is_one_line(yaml: str, says: str, tmp_path: Path, trained: list[TrainConfig]) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(yaml)
    result = run("train", "--config", file, "--base", "b", "--data", "d", "--out", "o")
    assert result.exit_code == 2 and says in one_line(result.stderr)
    assert not trained


def test_what_is_missing_is_named(trained: list[TrainConfig]) -> None:
    assert "data, out missing" in one_line(run("train", "--base", "b").stderr)


# ---- the other commands


def test_generate_refuses_an_empty_prompt(tmp_path: Path) -> None:
    result = run("generate", tmp_path, "--prompt", " ")
    assert result.exit_code == 2 and "empty prompt" in one_line(result.stderr)


@pytest.mark.parametrize(("chosen", "forced", "code"), [(0, 0, 0), (1, 0, 1), (0, 2, 1)])
def test_bench_exits_1_on_any_mismatch_and_ends_with_json(
    chosen: int, forced: int, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "manifest.json").touch()

    class Report:
        mismatches = chosen
        rows = (SimpleNamespace(mismatches=forced),)

        def to_json(self) -> dict[str, Any]:
            return {"mismatches": chosen}

    monkeypatch.setattr(streamspec.bench, "bench", lambda *_, **__: Report())
    result = run("bench", tmp_path, "--prompts", "p", "--json")
    assert result.exit_code == code and json.loads(result.stdout.splitlines()[-1]) == {"mismatches": chosen}


def test_outputs_for_a_folder_that_is_not_there_are_refused_before_measuring(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").touch()
    result = run("bench", tmp_path, "--prompts", "p", "--save-outputs", tmp_path / "no" / "o.jsonl")
    assert result.exit_code == 2 and "no is no folder" in one_line(result.stderr)


def started(*words: object, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """Python in a process of its own, as users start it."""
    return subprocess.run(
        [sys.executable, *map(str, words)], capture_output=True, env=os.environ | environment, cwd=ROOT
    )


@pytest.mark.skipif(os.name == "nt", reason="the locale of C")
def test_letters_that_the_locale_has_not_are_escaped(tmp_path: Path) -> None:
    folder = tmp_path / "größe"
    folder.mkdir()
    lora = {"peft_type": "LORA", "r": 4, "base_model_name_or_path": "modèle", "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(lora))
    save_file({"x.lora_A.weight": np.zeros((4, 8), np.float32)}, folder / "adapter_model.safetensors")
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0"}
    done = started("-m", "streamspec", "inspect", folder, **locale)
    assert done.returncode == 0 and rb"mod\xe8le" in done.stdout, done.stderr
    done = started("-m", "streamspec", "inspect", folder / "nichts", **locale)
    assert done.returncode == 2 and done.stderr.count(b"\n") == 1, done.stderr


@pytest.mark.parametrize(("flags", "others"), [((), 0), (("-W", "default"), 1)])
def test_of_warnings_ours_alone_are_shown(flags: tuple[str, ...], others: int) -> None:
    code = """
import warnings
from streamspec import cli
from streamspec.errors import StreamspecWarning
def work():
    warnings.warn("soon gone", FutureWarning)
    warnings.warn("overflow", RuntimeWarning)
    warnings.warn("no longer kept", StreamspecWarning)
cli.app = work
cli.main()
"""
    said = started(*flags, "-c", code).stderr.decode()
    assert "streamspec: no longer kept\n" in said and said.count("soon gone") == said.count("overflow") == others
    assert others or said.count("\n") == 1


def test_rows_are_whole_numbers_with_commas() -> None:
    assert parse_rows("1,2, 16") == [1, 2, 16] and parse_rows(None) == []
    with pytest.raises(ConfigError, match="--rows 1,x"):
        parse_rows("1,x")


def test_a_figure_of_float32_is_called_so_whoever_computed_it() -> None:
    perplexities = {"tokens": 9, "bundle": 17.9, "pytorch": 17.76, "error": 0.01}
    assert in_short(perplexities) == "tokens 9, bundle 17.9, float32 17.76, error 0.01"


def test_inspect_describes_an_adapter(tmp_path: Path) -> None:
    config = {
        "format_version": 1,
        "method": "streaming",
        "recipe": "staged",
        "base": {"id": "tiny", "sha256": "ab" * 32, "model_type": "llama"},
        "prompt_format": {"kind": "raw", "separator": "\n"},
        "streams": {"gamma": 2, "ns": 3, "scale": 1.5, "lora": {"rank": 4, "alpha": 4.0}, "draft_vocab": None},
    }
    (tmp_path / "streamspec_config.json").write_text(json.dumps(config))
    (tmp_path / "acceptance.json").write_text(
        json.dumps({"gamma": 2, "max_rank": 4, "ranks": [[[0, 1], [0, -2], [-2, -2]]]})
    )
    result = run("inspect", tmp_path)
    assert result.exit_code == 0, result.stderr
    assert "2 over the last 3 layers" in result.stdout and "the untouched base" in result.stdout
    heads = {"gamma": 4, "own_heads": True, "draft_vocab": 9, "bigram": None}
    (tmp_path / "streamspec_config.json").write_text(json.dumps(config | {"method": "medusa", "streams": heads}))
    result = run("inspect", tmp_path)
    assert result.exit_code == 0 and "4, a matrix each" in result.stdout, result.stderr
    (tmp_path / "streamspec_config.json").write_text(json.dumps({"base": {}}))
    assert run("inspect", tmp_path).exit_code == 2


@pytest.mark.parametrize("columns", [60, 80, 100])
@pytest.mark.parametrize("command", [(), ("bench",), ("train",), ("serve",)])
def test_help_is_as_wide_as_the_terminal_and_cuts_nothing(
    columns: int, command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = run(*command, "--help").stdout.splitlines()
    assert columns - 12 <= max(map(len, lines)) <= columns
    assert not [
        line for line in lines if "..." in line.replace("[ARGS]...", "").replace("...)", "") or "\u2026" in line
    ]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_output_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    environment["STREAMSPEC_CACHE"] = environment["STREAMSPEC_BUNDLES"] = str(tmp_path)
    command = [sys.executable, "-m", "streamspec", "list"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment)
    assert (done.returncode, done.stderr) == (2, "streamspec: No space left on device\n")
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, env=environment)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.skipif(sys.platform == "win32", reason="the shell's words")
@pytest.mark.parametrize(("closed", "code"), [("list >&-", 0), ("inspect none 2>&-", 2)])
def test_what_the_caller_closed_takes_nothing(closed: str, code: int, tmp_path: Path) -> None:
    environment = os.environ | {"STREAMSPEC_CACHE": str(tmp_path), "STREAMSPEC_BUNDLES": str(tmp_path)}
    done = subprocess.run(
        ["sh", "-c", f'exec "$0" -m streamspec {closed}', sys.executable],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert (done.returncode, done.stderr) == (code, "")


@pytest.mark.parametrize("file", ["curves", "curves.bmp", "none/curves.png"])
def test_a_plot_that_could_not_be_written_is_refused_before_any_work(file: str, tmp_path: Path) -> None:
    for command in (("demo",), ("tune", "no bundle")):
        result = run(*command, "--plot", tmp_path / file)
        assert result.exit_code == 2 and re.search("PNG|no folder", result.output), result.output


def test_minutes_of_a_demo_that_does_not_train_are_refused() -> None:
    assert "--minutes 30 without --train" in run("demo", "--minutes", "30").output
