"""Trackers get the log of every stage through transformers' integrations; stand-ins for their packages record it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from transformers.integrations import integration_utils

from streamspec.adapters.reporting.trackers import TRACKERS, trackers
from streamspec.adapters.training import config as options_module
from streamspec.adapters.training.config import TrainConfig
from streamspec.errors import ConfigError

STATE = SimpleNamespace(
    is_world_process_zero=True, is_hyper_param_search=False, trial_name=None, global_step=3, logging_steps=10
)


class OurModel:
    """A drafter's config is none of Hugging Face's."""

    config = object()


def arguments() -> Any:
    return SimpleNamespace(
        to_dict=dict,
        run_name=None,
        output_dir="x",
        project="huggingface",
        trackio_space_id=None,
        trackio_bucket_id=None,
        trackio_static_space_id=None,
        hub_private_repo=None,
        logging_dir=None,
    )


def config(out: Path, **changes: Any) -> TrainConfig:
    return TrainConfig(base="b", data=Path("d"), out=out, **changes)


def test_every_tracker_that_can_be_named_has_a_callback() -> None:
    assert tuple(TRACKERS) == options_module.TRACKERS


def test_the_old_flag_means_tensorboard_and_none_means_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert config(tmp_path, tensorboard=True).report_to == "tensorboard"
    assert trackers(None, tmp_path, "task") == []
    monkeypatch.setenv("RANK", "1")
    assert trackers("wandb", tmp_path, "task") == []


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """wandb as far as the integration calls it; `said` is what it was told."""
    fake: Any = ModuleType("wandb")
    fake.said, fake.run, fake.Error = [], None, type("Error", (Exception,), {})
    fake.config = type("Config", (dict,), {"update": lambda self, *_, **__: None})()

    def init(**given: Any) -> None:
        fake.said.append(("init", given))
        fake.run = SimpleNamespace(url=None, dir="folder", _label=lambda **_: None, summary={})

    def finish() -> None:
        fake.said.append("finish")
        fake.run = None

    fake.init, fake.finish = init, finish
    fake.log = lambda logs, **_: fake.said.append(logs)
    errors: Any = ModuleType("wandb.sdk.lib.config_util")
    errors.ConfigError = type("ConfigError", (Exception,), {})
    for name in ("wandb", "wandb.sdk", "wandb.sdk.lib", "wandb.sdk.lib.config_util"):
        monkeypatch.setitem(sys.modules, name, errors if name.endswith("util") else fake)
    monkeypatch.setattr(integration_utils, "is_wandb_available", lambda: True)
    for name in ("WANDB_PROJECT", "WANDB_SILENT", "WANDB_DIR"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return fake


def test_wandb_gets_a_run_for_each_stage(wandb: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for stage in ("task", "streams"):
        (callback,) = trackers("wandb", tmp_path / "out", stage)
        callback.on_train_begin(arguments(), STATE, None, model=OurModel())
        callback.on_log(arguments(), STATE, None, logs={"loss": 1.0, "eval_tau": 2.0})
        callback.on_train_end(arguments(), STATE, None)
    inits = [entry[1] for entry in wandb.said if isinstance(entry, tuple)]
    assert inits == [{"project": "streamspec", "name": f"out-{stage}"} for stage in ("task", "streams")]
    assert {"train/loss": 1.0, "eval/tau": 2.0, "train/global_step": 3} in wandb.said
    assert wandb.said.count("finish") == 2
    assert capsys.readouterr().err.splitlines()[0] == "wandb: out-task goes to folder"


def test_wandb_without_an_account_is_one_line(wandb: Any, tmp_path: Path) -> None:
    def init(**_: Any) -> None:
        raise wandb.Error("api_key not configured")

    wandb.init = init
    (callback,) = trackers("wandb", tmp_path / "out", "task")
    with pytest.raises(ConfigError, match="api_key not configured; .* WANDB_MODE=offline"):
        callback.on_train_begin(arguments(), STATE, None, model=OurModel())


def test_tensorboard_gets_a_folder_for_each_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []

    class SummaryWriter:
        def __init__(self, log_dir: str) -> None:
            said.append(log_dir)

        def add_scalar(self, *given: Any) -> None:
            said.append(given)

        add_text = flush = close = lambda self, *_: None

    fake: Any = ModuleType("torch.utils.tensorboard")
    fake.SummaryWriter = SummaryWriter
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
    monkeypatch.setattr(integration_utils, "is_tensorboard_available", lambda: True)
    (callback,) = trackers("tensorboard", tmp_path / "out", "streams")
    given: Any = SimpleNamespace(**vars(arguments()), to_json_string=str)
    callback.on_train_begin(given, STATE, None, model=OurModel())
    callback.on_log(given, STATE, None, logs={"loss": 1.0, "eval_tau": 2.0})
    assert said == [str(tmp_path / "out" / "tensorboard" / "streams"), ("train/loss", 1.0, 3), ("eval/tau", 2.0, 3)]


def test_what_trackio_prints_stays_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake: Any = ModuleType("trackio")
    fake.said, fake.config = [], type("Config", (dict,), {"update": lambda self, *_, **__: None})()
    fake.context_vars = SimpleNamespace(current_space_id=SimpleNamespace(get=lambda: None))
    fake.init = lambda **given: (print("* Trackio project initialized"), fake.said.append(given))
    fake.log, fake.finish = fake.said.append, lambda: print("* Run finished")
    monkeypatch.setitem(sys.modules, "trackio", fake)
    monkeypatch.setattr(integration_utils, "is_trackio_available", lambda: True)
    (callback,) = trackers("trackio", tmp_path / "out", "streams")
    callback.on_train_begin(arguments(), STATE, None, model=OurModel())
    callback.on_log(arguments(), STATE, None, logs={"loss": 1.0})
    callback.on_train_end(arguments(), STATE, None)
    out, err = capsys.readouterr()
    assert out == "" and err == "trackio: out-streams; `trackio show --project streamspec` shows it\n"
    assert fake.said[0]["project"] == "streamspec" and fake.said[0]["name"] == "out-streams"
    assert fake.said[1] == {"train/loss": 1.0, "train/global_step": 3}
