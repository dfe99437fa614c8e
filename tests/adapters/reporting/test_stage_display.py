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
    """`steps` steps of `seconds` each with 2 x 50 tokens, of which 20 are padding."""
    mask = torch.cat([torch.ones(2, 40), torch.zeros(2, 10)], dim=1)
    for step in range(first + 1, first + steps + 1):
        display.batch({"attention_mask": mask})
        clock.now += seconds
        display.on_step_end(None, Some(global_step=step, max_steps=100), None)


def test_a_stage_says_where_it_is_how_fast_and_how_long_it_takes(clock: Some) -> None:
    display = StageDisplay("streams", left=lambda: math.inf)
    display.on_train_begin(None, Some(global_step=0), None)
    assert display.parts() == []
    run(display, clock, 20, seconds=2.0)
    logs = {"loss": 1.5, "stream_1": 0.25, "learning_rate": 1e-3, "grad_norm": 3.0, "epoch": 1.0, "minutes": 0.1}
    display.on_log(None, Some(), None, logs=logs)
    shown = ["streams: step 20/100", "0.7 min", "3 min left", "40 tokens/s", "loss 1.500 stream_1 0.250"]
    assert display.parts() == shown
    display.on_log(None, Some(), None, logs={"eval_tau": 2.5, "eval_loss": 0.125})
    assert display.parts() == [*shown, "validation: tau 2.500 loss 0.125"]


def test_time_left_is_the_budgets_where_that_ends_first(clock: Some) -> None:
    display = StageDisplay("streams", left=lambda: 200.0 - clock.now)
    display.on_train_begin(None, Some(global_step=0), None)
    run(display, clock, 10, seconds=4.0)
    display.losses = {"loss": 1.0}
    assert display.parts()[1:3] == ["0.7 of 1.7 min", "1 min left"]


def test_speed_is_that_of_the_last_minute_and_of_all_processes(clock: Some) -> None:
    display = StageDisplay("streams", left=lambda: math.inf, processes=2)
    display.on_train_begin(None, Some(global_step=30), None)  # resumed
    run(display, clock, 20, seconds=4.0, first=30)
    run(display, clock, 45, seconds=2.0, first=50)
    seconds, tokens = display.speed()
    assert seconds == pytest.approx(2.0) and tokens == pytest.approx(2 * 40.0)
