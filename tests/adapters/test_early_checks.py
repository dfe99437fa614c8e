"""Bad options, paths, data, adapters and bases are refused before torch or another model library is imported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from streamspec.adapters.early_checks import check_early
from streamspec.adapters.training.config import TrainConfig
from streamspec.errors import AdapterError, BaseModelError, ConfigError, DataError, StreamspecError

ROOT = Path(__file__).parents[2]
HEAVY = "torch transformers peft accelerate tokenizers huggingface_hub"
SCRIPT = f"""
import json, sys
from typer.testing import CliRunner
from streamspec.cli import app
said = [CliRunner().invoke(app, ["train", *case]).stderr for case in json.loads(sys.argv[1])]
print(json.dumps([said, [name for name in "{HEAVY}".split() if name in sys.modules]]))
"""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A folder as far as it is read early: its config."""
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 4}))
    return tmp_path / "base"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "train.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 3)
    return tmp_path / "train.jsonl"


def test_refusals_import_no_model_library(base: Path, data: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"prompt": 1}\n')
    (tmp_path / "c.yaml").write_text("max-minuts: 3\n")
    good = ["--base", str(base), "--data", str(data), "--out", str(tmp_path / "out")]
    cases = {
        "did you mean base?": ["--base", f"{base}e"],
        "bad.jsonl, line 1": ["--data", str(tmp_path / "bad.jsonl")],
        "check the path, did you mean train.jsonl?": ["--data", str(tmp_path / "train.json")],
        "dev.jsonl: No such file": ["--val", str(tmp_path / "dev.jsonl")],
        f"{data} is a file": ["--out", str(data / "out")],
        "base is neither empty nor an unfinished run": ["--out", str(base)],
        "change --method to eagle": ["--method", "eagel"],
        "expected max_minutes; check the spelling": ["--config", str(tmp_path / "c.yaml")],
        "did you mean c.yaml?": ["--config", str(tmp_path / "d.yaml")],
        "ns = 5; expected 1..4": ["--ns", "5"],
        "taps = 2,9; expected 1..4": ["--method", "eagle", "--taps", "2,9"],
        "no adapter_model.safetensors": ["--target-adapter", str(tmp_path / "lora")],
        "no streamspec.safetensors": ["--recipe", "staged", "--warm-start", str(tmp_path / "drafter")],
        "--outt": ["--outt", "x"],
    }
    arguments = json.dumps([good + case for case in cases.values()])
    done = subprocess.run([sys.executable, "-c", SCRIPT, arguments], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    said, imported = json.loads(done.stdout)
    for expected, line in zip(cases, said, strict=True):
        assert expected in line
        assert "--outt" in expected or len(line.splitlines()) == 1, line
    assert imported == []


def test_what_is_right_passes(base: Path, data: Path, tmp_path: Path) -> None:
    check_early(TrainConfig(base=str(base), data=data, out=tmp_path / "out" / "deep"))
    check_early(TrainConfig(base="owner/name", data=data, out=tmp_path / "out"))  # on the hub, perhaps
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"model_type": "nonsense", "num_hidden_layers": 4}, "nonsense"),
        ({"model_type": "gpt2", "n_layer": 2}, r"ns = 3; expected 1\.\.2"),
        ({"num_hidden_layers": 4}, "names no model_type"),
    ],
)
def test_a_base_is_judged_by_its_config(base: Path, data: Path, tmp_path: Path, config: dict, says: str) -> None:
    (base / "config.json").write_text(json.dumps(config))
    with pytest.raises(StreamspecError, match=says):
        check_early(TrainConfig(base=str(base), data=data, out=tmp_path / "out", ns=3))


def test_values_that_are_made_of_states_are_not_turned(base: Path, data: Path, tmp_path: Path) -> None:
    (base / "config.json").write_text(json.dumps({"model_type": "youtu", "num_hidden_layers": 4}))
    with pytest.raises(ConfigError, match="--value-rotation over youtu, whose layers attend to states"):
        check_early(TrainConfig(base=str(base), data=data, out=tmp_path / "out", ns=2, value_rotation=True))


def test_a_lora_given_as_the_base_is_refused(base: Path, data: Path, tmp_path: Path) -> None:
    (base / "adapter_config.json").write_text("{}")
    with pytest.raises(BaseModelError, match="holds a model and an adapter"):
        check_early(TrainConfig(base=str(base), data=data, out=tmp_path / "out"))


def test_a_folder_that_cannot_be_written_is_refused(
    base: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != tmp_path)  # root may write anywhere
    with pytest.raises(AdapterError, match=f"{tmp_path} cannot be written"):
        check_early(TrainConfig(base=str(base), data=data, out=tmp_path / "out"))


def test_a_missing_package_is_named(base: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamspec.adapters.early_checks.find_spec", lambda name: None)
    for option, package in (({"base_bits": 4}, "bitsandbytes"), ({"report_to": "wandb"}, "wandb")):
        with pytest.raises(ConfigError, match=f"without the package {package}; .* pip install {package}"):
            check_early(TrainConfig(base=str(base), data=data, out=tmp_path / "out", **option))


def test_only_the_first_rows_are_read_early(base: Path, data: Path, tmp_path: Path) -> None:
    data.write_text('{"prompt": "a", "completion": "b"}\n' * 20 + "{\n")
    check_early(TrainConfig(base=str(base), data=data, out=tmp_path / "out"))
    data.write_text('{"prompt": "a", "completion": "b"}\n' * 19 + "{\n")
    with pytest.raises(DataError, match="line 20"):
        check_early(TrainConfig(base=str(base), data=data, out=tmp_path / "out"))


def test_fsdp_of_a_base_in_few_bits_is_refused(
    base: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    config = TrainConfig(base=str(base), data=data, out=tmp_path / "out", base_bits=4)
    with pytest.raises(ConfigError, match="FSDP with --base-bits 4"):
        check_early(config)
