"""The clock of the learning rate, and which checkpoints count."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace as Some

import pytest
import torch
from transformers import TrainerControl, TrainingArguments

from streamspec.adapters.runs.budget import ENDLESS, Deadline
from streamspec.adapters.train import train
from streamspec.adapters.training import trainer
from streamspec.adapters.training.device import processor_time
from streamspec.adapters.training.trainer import COMPLETE, Clock, last_checkpoint
from tests.support.tiny_models import options


def test_learning_rate_warms_up_and_reaches_zero_with_the_steps() -> None:
    clock = Clock(ENDLESS, warmup=0.1)
    factors = [clock.factor(step, 100) for step in range(101)]
    assert factors[0] > 0 and factors[10] == pytest.approx(1.0) and factors[100] == 0
    assert all(b > a for a, b in pairwise(factors[1:11]))
    assert all(b < a for a, b in pairwise(factors[10:]))
    assert [clock.factor(0, steps) for steps in (1, 4, 10)] == [1.0, 1.0, 1.0]  # a short run has no time to warm up


def test_learning_rate_follows_the_clock_where_minutes_run_out_first() -> None:
    now = [100.0]
    clock = Clock(Deadline(220.0, lambda: now[0]), warmup=0.0)
    now[0] += 60
    assert clock.factor(1, 1000) == pytest.approx(0.5)
    now[0] += 60
    assert clock.factor(2, 1000) == 0


def test_time_before_a_resume_counts() -> None:
    clock = Clock(Deadline(300.0, lambda: 0.0), warmup=0.0)
    clock.before = 300.0
    assert clock.factor(0, 1000) == pytest.approx(0.5)


def test_training_stops_before_a_step_of_which_most_would_come_too_late() -> None:
    now, stops = [0.0], []
    clock = Clock(Deadline(10.0, lambda: now[0]), warmup=0.0)
    clock.on_train_begin(None, None, None)
    for now[0] in (3.0, 6.0, 8.0, 9.0):  # type: ignore[misc]
        control = TrainerControl()
        clock.on_step_end(None, Some(global_step=1, max_steps=9), control)
        stops.append(control.should_training_stop)
    assert stops == [False, False, False, True]  # the mean step takes 2.25 s, and 1 s is left


def test_processor_time_passes_only_while_this_process_computes() -> None:
    clock = Clock(Deadline(60.0, processor_time), warmup=0.0)
    time.sleep(0.3)
    idle = clock.elapsed()
    started = time.process_time()
    while time.process_time() < started + 0.3:
        sum(range(1000))
    assert idle < 0.1
    assert clock.elapsed() - idle == pytest.approx(0.3 / torch.get_num_threads(), abs=0.1)


def test_a_checkpoint_without_its_marker_does_not_count(tmp_path: Path) -> None:
    for step, complete in ((9, True), (10, True), (200, False)):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        if complete:
            (folder / COMPLETE).touch()
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-10"
    assert last_checkpoint(tmp_path / "none") is None


def test_one_process_trains_on_one_gpu_whatever_it_sees(
    base: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class TwoGpus(TrainingArguments):
        def __post_init__(self) -> None:
            super().__post_init__()
            assert self.device.type == "cpu" or torch.cuda.is_available()
            self._n_gpu = 2

    class Spread(torch.nn.DataParallel):
        def __init__(self, *_: object, **__: object) -> None:
            pytest.fail("the batch was spread over GPUs")

    monkeypatch.setattr(trainer, "TrainingArguments", TwoGpus)
    monkeypatch.setattr(torch.nn, "DataParallel", Spread)
    train(options(base, data, tmp_path / "out", method="lora", epochs=0.2))
