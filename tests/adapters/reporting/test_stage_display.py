"""What a training stage shows: its step, time, speed, losses and validation."""

from __future__ import annotations

import math
from types import SimpleNamespace as Some

import pytest
import torch

from streamspec.adapters.reporting import stage_display
from streamspec.adapters.reporting.stage_display import StageDisplay


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Some:
    clock = Some(now=100.0)
    monkeypatch.setattr(stage_display, "time", Some(monotonic=lambda: clock.now))
    return clock


def run(display: StageDisplay, clock: Some, steps: int, seconds: float, first: int = 0) -> None:
    """`steps` steps of `seconds` each with 2 x 50 tokens, of which 20 are padding; the loss is the step's number, and
    every fifth step has one of its own.
    """
    mask = torch.cat([torch.ones(2, 40), torch.zeros(2, 10)], dim=1)
    for step in range(first + 1, first + steps + 1):
        display.batch({"attention_mask": mask})
        display.losses.append({"loss": torch.tensor(1.0 * step)} | ({} if step % 5 else {"deep": torch.tensor(0.25)}))
        clock.now += seconds
        display.on_step_end(None, Some(global_step=step, max_steps=100), None)


def test_a_stage_says_where_it_is_how_fast_and_how_long_it_takes(clock: Some) -> None:
    display = StageDisplay("streams", left=lambda: math.inf)
    display.on_train_begin(None, Some(global_step=0), None)
    assert display.parts() == []
    run(display, clock, 20, seconds=2.0)
    shown = ["streams: step 20/100", "0.7 min", "3 min left", "40 tokens/s"]
    assert display.parts() == [*shown, "loss 15.500 deep 0.250"]
    display.on_log(None, Some(global_step=20), None, logs={"eval_tau": 2.5, "eval_loss": 0.125, "eval_texts": 4})
    assert display.parts()[5:] == ["validation at step 20: tau 2.500 loss 0.125"]


def test_what_is_shown_is_of_the_latest_steps_whenever_these_are_logged(clock: Some) -> None:
    display = StageDisplay("streams", left=lambda: math.inf)
    display.on_train_begin(None, Some(global_step=0), None)
    run(display, clock, 1, seconds=60.0)
    display.on_log(None, Some(global_step=1), None, logs={"loss": 1.0})
    assert display.parts()[4:] == ["loss 1.000"]
    run(display, clock, 2, seconds=60.0, first=1)
    assert display.parts()[4:] == ["loss 2.000"]
    display.on_log(None, Some(global_step=3), None, logs={"eval_tau": 2.5})
    run(display, clock, 18, seconds=60.0, first=3)
    assert display.parts()[4:] == ["loss 16.500 deep 0.250", "validation at step 3: tau 2.500"]


def test_time_left_is_the_budgets_where_that_ends_first(clock: Some) -> None:
    display = StageDisplay("streams", left=lambda: 200.0 - clock.now)
    display.on_train_begin(None, Some(global_step=0), None)
    run(display, clock, 10, seconds=4.0)
    assert display.parts()[1:3] == ["0.7 of 1.7 min", "1 min left"]


def test_speed_is_that_of_the_last_minute_and_of_all_processes(clock: Some) -> None:
    display = StageDisplay("streams", left=lambda: math.inf, processes=2)
    display.on_train_begin(None, Some(global_step=30), None)  # resumed
    run(display, clock, 20, seconds=4.0, first=30)
    run(display, clock, 45, seconds=2.0, first=50)
    seconds, tokens = display.speed()
    assert seconds == pytest.approx(2.0) and tokens == pytest.approx(2 * 40.0)
