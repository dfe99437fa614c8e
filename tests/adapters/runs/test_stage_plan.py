"""What a stage is about to do: texts of a step, and steps; a run that goes on keeps to it."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from streamspec.adapters import recipe_stages
from streamspec.adapters.drafters.drafting_model import TargetModel
from streamspec.adapters.runs import budget
from streamspec.adapters.runs.stage_plan import StagePlan, StageTime, batch_in_time
from streamspec.adapters.train import train
from streamspec.adapters.training import device, trainer
from tests.support.tiny_models import options


@pytest.mark.parametrize(
    ("left", "batches", "each", "batch", "steps"),
    [
        (math.inf, 1, None, 8, 380),  # two epochs of 190
        (math.inf, 3, None, 8, 128),  # 63.3 steps an epoch are 64
        (3000.0, 1, 0.5, 8, 380),
        (400.0, 1, 0.5, 8, 100),
        (80.0, 1, 0.5, 8, 20),  # these fit exactly
        (79.0, 1, 0.5, 7, 22),
        (80.0, 4, 0.5, 2, 20),
        (20.0, 1, 0.5, 2, 20),
        (5.0, 1, 0.5, 1, 10),  # no step has less than a text
        (0.1, 1, 0.5, 1, 1),
        (-3.0, 1, 0.5, 1, 1),
        (60.0, 1, None, 1, 1),
        (60.0, 1, 0.0, 8, 380),
    ],
)
def test_a_short_time_is_divided_into_several_steps(
    left: float, batches: int, each: float | None, batch: int, steps: int
) -> None:
    time = StageTime(left, each)
    assert batch_in_time(8, batches, time) == batch
    assert StagePlan(1520, 84100, 80, batch, batches).steps(2.0, time) == steps


def test_the_plan_says_rows_tokens_steps_and_time() -> None:
    plan, many = StagePlan(1520, 84100, 80, 8, 1), StagePlan(1520, 84100, 80, 8, 2)
    endless, short = StageTime(math.inf, None), StageTime(252.0, 0.25)
    assert plan.described(8, 2.0, endless) == "1,520 rows with 84,100 tokens, 80 held out, 380 steps of 8 rows"
    assert many.described(8, 2.0, short).endswith("80 held out, about 63 steps of 16 rows in 4 min")
    least = StagePlan(1, 1, 1, 1, 2).described(3, 1.0, StageTime(-1.0, 0.5))
    assert least == "1 row with 1 token, 1 held out, about 1 step of 2 rows instead of 6 in 0 s"


def test_every_stage_says_its_plan_before_its_first_step_and_has_these_steps(
    base: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(options(base, data, tmp_path / "out", recipe="staged", accumulate=2))
    said = capsys.readouterr().err
    log = json.loads((tmp_path / "out" / "training.json").read_text())["log"]
    for stage, texts in (("task", 16), ("streams", 4)):
        plan = log[f"plan_{stage}"]
        line = rf"^{stage}: (\d+) rows with ([\d,]+) tokens, (\d+) held out, (\d+) steps of {texts} rows$"
        found = re.search(line, said, re.MULTILINE)
        assert found is not None and found.start() < said.index(f"{stage}: step ")
        *rows, steps = (int(number.replace(",", "")) for number in found.groups())
        assert rows == [plan[name] for name in ("rows", "tokens", "held_out")]
        assert log[stage][-1]["step"] == steps == 2 * math.ceil(plan["rows"] / texts)
    count = len(data.read_text().splitlines())
    assert log["plan_task"]["rows"] + log["plan_task"]["held_out"] == count and log["plan_streams"]["rows"] == 24
    assert log["plan_task"]["tokens"] == log["plan_task"]["rows"] * (2 + 9 + 1)  # prompt, answer and its end


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Texts of the steps of each stage. By the run's clock reading a text takes a second, the way back two, and nothing
    else any time.
    """
    now, seen = [0.0], list[int]()
    read, learn, begin = TargetModel.main_pass, trainer._StageTrainer.training_step, recipe_stages.run_stage

    def main_pass(model: TargetModel, ids: Any, mask: Any) -> Any:
        now[0] += len(ids)
        return read(model, ids, mask)

    def training_step(self: Any, model: Any, inputs: dict[str, Any], *more: Any) -> Any:
        now[0] += 2 * len(inputs["input_ids"])
        return learn(self, model, inputs, *more)

    monkeypatch.setattr(device, "clock_of", lambda config: lambda: now[0])
    monkeypatch.setattr(TargetModel, "main_pass", main_pass)
    monkeypatch.setattr(trainer._StageTrainer, "training_step", training_step)
    monkeypatch.setattr(
        recipe_stages, "run_stage", lambda stage, *more: seen.append(stage.batch_size) or begin(stage, *more)
    )
    return seen


@pytest.mark.parametrize(("changes", "minutes"), [({"method": "lora"}, 1.0), ({"recipe": "joint"}, 2.0)])
def test_a_time_for_two_steps_of_the_size_asked_for_has_many_smaller_ones(
    changes: dict[str, Any],
    minutes: float,
    base: Path,
    data: Path,
    tmp_path: Path,
    batches: list[int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    train(options(base, data, tmp_path / "out", max_minutes=minutes, **changes))
    log = json.loads((tmp_path / "out" / "training.json").read_text())["log"]
    stage = "task" if "task" in log else "joint"
    steps = log[stage][-1]["step"]
    assert batches == [log[f"plan_{stage}"]["batch"]] == [1] and 12 <= steps <= 30
    found = re.search(
        rf"^{stage}: .*, about (\d+) steps of 1 row instead of 8 in ", capsys.readouterr().err, re.MULTILINE
    )
    assert found is not None and int(found[1]) == pytest.approx(steps, rel=0.2)


@pytest.mark.parametrize("short", [15.0, 3.0])
def test_the_fit_of_a_short_run_takes_a_share_of_its_time_and_the_plan_says_so(
    short: float,
    base: Path,
    data: Path,
    tmp_path: Path,
    batches: list[int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of three minutes the fit of all rows, a second each, would take a third; 24 rows are within its share."""
    monkeypatch.setattr(budget, "SHORT", short)
    main_pass, read = TargetModel.main_pass, list[int]()
    monkeypatch.setattr(
        TargetModel, "main_pass", lambda model, ids, mask: read.append(len(ids)) or main_pass(model, ids, mask)
    )
    train(options(base, data, tmp_path / "out", recipe="joint", max_minutes=3.0))
    log = json.loads((tmp_path / "out" / "training.json").read_text())["log"]
    said = re.search(r"^joint: .*; the start is fitted to (\d+) tokens instead of 8,192", capsys.readouterr().err, re.M)
    if short == 3.0:
        assert said is None and "tokens" not in log["start"]
    else:
        assert said is not None and int(said[1]) == log["start"]["tokens"] == 24 * (2 + 9 + 1)
    assert log["joint"][-1]["step"] >= 12
    assert read[0] == (16 if short == 3.0 else 2)  # at which the scale is measured


def test_a_run_that_goes_on_keeps_the_size_of_its_steps(
    base: Path, data: Path, tmp_path: Path, batches: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = {"method": "lora", "max_minutes": 4.0, "epochs": 9.0}
    step, out = trainer.Clock.on_step_end, tmp_path / "out"

    def cut(clock: Any, args: Any, state: Any, control: Any, **more: Any) -> None:
        if state.global_step == 16:
            raise KeyboardInterrupt
        step(clock, args, state, control, **more)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(trainer.Clock, "on_step_end", cut)
        train(options(base, data, out, **run))
    train(options(base, data, out, resume=True, **run))
    assert batches[0] == batches[1] == json.loads((out / "training.json").read_text())["log"]["plan_task"]["batch"] == 3


@pytest.mark.parametrize("minutes", [None, 1000.0])
def test_a_time_for_many_steps_leaves_their_size_as_asked_for(
    minutes: float | None, base: Path, data: Path, tmp_path: Path, batches: list[int]
) -> None:
    changes = {"recipe": "staged", "batch_size": 5, "stream_batch_size": 3}
    train(options(base, data, tmp_path / "out", max_minutes=minutes, **changes))
    assert batches == [5, 3]
