"""A finished adapter trains longer: a new run begins with its weights and its options."""

from __future__ import annotations

import json
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from streamspec.adapters import recipe_stages
from streamspec.adapters.adapter_writer import runs_of
from streamspec.adapters.drafters.registry import MethodOptions
from streamspec.adapters.early_checks import check_early
from streamspec.adapters.train import train
from streamspec.adapters.training.config import TrainConfig
from streamspec.adapters.training.continued import start_of
from streamspec.errors import AdapterError, ConfigError, StreamspecError
from tests.support.tiny_models import options

SMALL = {"val_rows": 2, "regenerate_rows": 8, "max_new_tokens": 4, "epochs": 1.0, "bigram_rank": 3}
STAGED = {"target_adapter": "base"}
RUNS: dict[str, dict[str, Any]] = {
    "lora": {"method": "lora", "lora_alpha": 6.0, "separator": " "},
    "joint": {"recipe": "joint", "ns": 1, "gamma": 3},
    "joint medusa": {"method": "medusa", "recipe": "joint"},
    "staged": {"recipe": "staged", "prune_rank": 2, "ns": 1, "exit_layer": "1"},
    "staged base": STAGED | {"root_token": False},
    "jakiro": STAGED | {"method": "jakiro", "experts": 3, "taps": "2,1", "gamma": 3},
    "hydra": STAGED | {"method": "hydra", "labels": "hard"},
    "mtp": STAGED | {"method": "mtp"},
    "eagle-lora": STAGED | {"method": "eagle-lora", "taps": "2,1", "stream_rank": 3},
    "eagle3": STAGED | {"method": "eagle3", "taps": "2,1"},
    "dflash": STAGED | {"method": "dflash", "block_layers": 2, "causal": True},
    "dspark": STAGED | {"method": "dspark", "block_layers": 2, "bigram_rank": 3},
}


KEPT = ("method", "recipe", "gamma", "rank", "lr", "seed", "max_length", "val_rows", "draft_vocab", "bigram_rank")
KEPT += ("prune_rank", "exit_layer", "root_token", "own_heads", "experts", "labels", "stream_rank", "regenerate_rows")


def again(base: Path, data: Path, folder: Path, out: Path, **changes: Any) -> TrainConfig:
    given = {"base": str(base), "data": data, "out": out, "continue": folder, "epochs": 1.0} | changes
    return TrainConfig.from_dict(given)


def test_rows_that_a_continued_run_draws_anew_are_pointed_out(
    base: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more, note = tmp_path / "more.jsonl", "rows drawn for validation may be among those"
    more.write_text(data.read_text() + json.dumps({"prompt": "zz", "completion": "zz"}) + "\n")
    for number, (val, later, noted) in enumerate(
        [(None, data, False), (None, more, True), (data, data, True)], start=1
    ):
        first, second = tmp_path / f"first{number}", tmp_path / f"second{number}"
        train(options(base, data, first, **(SMALL | RUNS["staged base"] | {"val": val})))
        capsys.readouterr()
        train(again(base, later, first, second))
        assert (note in capsys.readouterr().err) == noted


@pytest.mark.parametrize("name", RUNS)
def test_a_continued_run_begins_with_the_weights_and_options_of_the_adapter(
    name: str, base: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    first = options(base, data, before, **(SMALL | RUNS[name]))
    train(first)
    stages = []
    monkeypatch.setattr(recipe_stages, "run_stage", lambda stage, *_: stages.append(stage.name) or ([], 0.0))
    config = again(base, data, before, after)
    train(config)
    for option in KEPT:
        assert config.resolved[option] == first.resolved[option], option
    assert stages == [{"lora": "task", "joint": "joint", "joint medusa": "joint"}.get(name, "streams")]
    for file in sorted(one.name for one in before.glob("*.safetensors")):
        was, now = load_file(before / file), load_file(after / file)
        assert was.keys() == now.keys() and all(torch.equal(was[k], now[k]) for k in was), file
    described = [json.loads((one / "streamspec_config.json").read_text()) for one in (before, after)]
    assert described[0] == described[1]
    if name == "lora":
        assert described[1]["prompt_format"]["separator"] == " "
        loras = [json.loads((one / "adapter_config.json").read_text()) for one in (before, after)]
        assert [(one["r"], one["lora_alpha"]) for one in loras] == [(4, 6.0)] * 2


@pytest.mark.parametrize("changes", [{"method": "lora"}, {"method": "eagle", "target_adapter": "base"}])
def test_training_longer_goes_on_where_it_was(changes: dict[str, Any], base: Path, data: Path, tmp_path: Path) -> None:
    folders = [tmp_path / "first", tmp_path / "second"]
    train(
        options(base, data, folders[0], **(SMALL | {"epochs": 4.0, "regenerate_rows": 24, "batch_size": 4} | changes))
    )
    train(again(base, data, *folders, epochs=4.0))
    runs = [json.loads((one / "training.json").read_text()) for one in folders]
    logs = [run["log"] for run in runs]
    first, second = ([entry["loss"] for entry in (log.get("task") or log["streams"])] for log in logs)
    assert second[0] < first[0] and min(second) < min(first) and "start" not in logs[1]
    told = [{name: run[name] for name in ("minutes", "device", "data")} for run in runs]
    assert (runs[0]["continued"], runs[1]["continued"], runs_of(folders[1])) == ([], told[:1], told)
    card = (folders[1] / "README.md").read_text()
    assert card.count("minutes on cpu") == 2 and "Before (`--continue`), " in card


@pytest.fixture(scope="module")
def eagle(base: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("eagle") / "out"
    train(options(base, data, out, method="eagle", target_adapter="base", **SMALL))
    return out


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"method": "medusa"}, "--method medusa with --continue .*; expected eagle, as there; leave --method out"),
        ({"recipe": "joint"}, "--recipe joint with --continue .*; expected staged"),
        ({"gamma": 4}, "--gamma 4; expected 2, as .*; leave it out, or start anew without --continue"),
        ({"taps": "1"}, "--taps 1; expected 2, as "),
        ({"target_adapter": "elsewhere"}, "--target-adapter elsewhere with --continue .*; expected base"),
        ({"warm_start": "elsewhere"}, "--warm-start elsewhere with --continue .*; expected nothing"),
        ({"gama": 4}, "unknown option gama"),
    ],
)
def test_other_shapes_are_refused(
    changes: dict[str, Any], says: str, eagle: Path, base: Path, data: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=says):
        check_early(again(base, data, eagle, tmp_path / "out", **changes))


def test_each_option_of_a_method_in_the_adapters_section_is_its_shape(eagle: Path, tmp_path: Path) -> None:
    """None is left out that a method has and `continued` did not hear of."""
    names = {option.name for option in fields(MethodOptions)} - {"taps"}  # which the section has as a list
    config = json.loads((eagle / "streamspec_config.json").read_text())
    config["streams"] |= dict.fromkeys(names, 7)
    (tmp_path / "adapter").mkdir()
    for file in eagle.iterdir():
        shutil.copy(file, tmp_path / "adapter")
    (tmp_path / "adapter/streamspec_config.json").write_text(json.dumps(config))
    start = start_of(tmp_path / "adapter")
    assert start.shape.items() >= dict.fromkeys(names, 7).items() and start.shape["taps"] == "2"
    with pytest.raises(ConfigError, match="--unroll 1; expected 7, as .*; leave it out, or start anew"):
        start.check(start.shape | {"unroll": 1})


def test_what_is_no_finished_adapter_of_ours_is_refused(eagle: Path, base: Path, data: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.mkdir()
    with pytest.raises(AdapterError, match="plain is no adapter; expected a finished adapter"):
        again(base, data, plain, tmp_path / "out")
    (plain / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4}')
    with pytest.raises(AdapterError, match="a LoRA of PEFT: --target-adapter takes it"):
        again(base, data, plain, tmp_path / "out")
    (plain / "streamspec_config.json").write_text((eagle / "streamspec_config.json").read_text())
    for content, says in ((None, "no training.json"), ('{"config": 3}', "no config"), ("{", "training.json")):
        if content is not None:
            (plain / "training.json").write_text(content)
        with pytest.raises(StreamspecError, match=says):
            again(base, data, plain, tmp_path / "out")
    with pytest.raises(AdapterError, match="finished adapter"):
        check_early(again(base, data, eagle, eagle))
    direct = options(base, data, tmp_path / "out", method="eagle", continue_=eagle, **SMALL)  # without from_dict
    check_early(direct)
    assert direct.recipe == "staged" and str(direct.target_adapter) == "base" and direct.taps == "2"
