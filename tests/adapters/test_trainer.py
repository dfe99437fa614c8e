"""The clock behind the learning rate, and which checkpoints count."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from streamspec.adapters import trainer
from streamspec.adapters.trainer import COMPLETE, Clock, last_checkpoint


def test_learning_rate_warms_up_and_reaches_zero_with_the_steps() -> None:
    clock = Clock(None, warmup=0.1)
    factors = [clock.factor(step, 100) for step in range(101)]
    assert factors[0] > 0 and factors[10] == pytest.approx(1.0) and factors[100] == 0
    assert all(b > a for a, b in pairwise(factors[1:11]))
    assert all(b < a for a, b in pairwise(factors[10:]))


def test_learning_rate_follows_the_clock_where_minutes_run_out_first(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(trainer.time, "monotonic", lambda: now[0])
    clock = Clock(minutes=2, warmup=0.0)
    now[0] += 60
    assert clock.factor(1, 1000) == pytest.approx(0.5)
    now[0] += 60
    assert clock.factor(2, 1000) == 0


def test_time_before_a_resume_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer.time, "monotonic", lambda: 0.0)
    clock = Clock(minutes=10, warmup=0.0)
    clock.before = 300.0
    assert clock.factor(0, 1000) == pytest.approx(0.5)


def test_a_checkpoint_without_its_marker_does_not_count(tmp_path: Path) -> None:
    for step, complete in ((9, True), (10, True), (200, False)):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        if complete:
            (folder / COMPLETE).touch()
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-10"
    assert last_checkpoint(tmp_path / "none") is None
