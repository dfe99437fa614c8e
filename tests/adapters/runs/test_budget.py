"""The budget counts everything and every attempt, keeps time for the last validation, and whole runs end in time."""

from __future__ import annotations

import json
import math
from itertools import count
from pathlib import Path

import pytest

from streamspec.adapters.dataset.token_rows import TokenRow
from streamspec.adapters.drafters.acceptance_eval import batches_in_time
from streamspec.adapters.runs.budget import ANSWERS, ENDLESS, RANKED, Deadline, TimeBudget
from streamspec.adapters.train import train
from streamspec.adapters.training import device
from streamspec.errors import AdapterError
from tests.support.tiny_models import options


def test_time_counts_from_the_beginning_of_the_command_and_before_a_resume(tmp_path: Path) -> None:
    now = [1000.0]
    first = TimeBudget(2, lambda: now[0], spent=10.0)
    first.keep(tmp_path / "run" / "time.json", resume=False)
    now[0] += 20
    assert first.elapsed() == 30 and first.until().left() == 90
    assert first.until(0.5).left() == 30 and first.until(0.5, kept=40).left() == 10
    first.note()
    assert json.loads((tmp_path / "run" / "time.json").read_text()) == {"seconds": 30}
    now[0] += 5000
    again = TimeBudget(2, lambda: now[0], spent=5.0)
    again.keep(tmp_path / "run" / "time.json", resume=True)
    assert again.elapsed() == 35 and again.until().left() == 85
    fresh = TimeBudget(2, lambda: now[0])
    fresh.keep(tmp_path / "run" / "time.json", resume=False)
    assert fresh.elapsed() == 0
    assert math.isinf(TimeBudget(None).until(0.5, 100).left()) and not ENDLESS.over(1e9)


def test_a_damaged_note_of_the_time_is_refused(tmp_path: Path) -> None:
    (tmp_path / "time.json").write_text("{}")
    with pytest.raises(AdapterError, match=r"time\.json.*the time used by a run; remove the file"):
        TimeBudget(2).keep(tmp_path / "time.json", resume=True)


def test_the_last_validation_keeps_the_time_that_it_was_measured_to_take() -> None:
    budget = TimeBudget(10, lambda: 0.0)
    work = {ANSWERS: 100.0, RANKED: 200.0}
    assert budget.reserve(work) == pytest.approx(60 + 2)  # nothing measured: a tenth
    budget.speeds.measured(ANSWERS, 4, 2.0)
    budget.speeds.measured(RANKED, 10, 1.0)
    assert budget.reserve(work) == pytest.approx((50 + 20) * 1.15 + 2)
    assert budget.reserve({ANSWERS: 1000.0}) == 150  # a quarter at most
    assert TimeBudget(None).reserve(work) == 0
    left = 600 - 2
    assert budget.until_done(ANSWERS, work).left() == pytest.approx(left * 50 / 70)
    assert budget.until_done(RANKED, {RANKED: 200.0}).left() == pytest.approx(left)
    assert budget.until_done(RANKED, {RANKED: 1.0, "unknown": 5.0}).left() == pytest.approx(left / 2)


def test_work_is_cut_where_the_next_batch_would_be_late_and_takes_rows_from_everywhere() -> None:
    now, rows, done = [0.0], [TokenRow([1], [True])] * 100, []
    for batch in batches_in_time(rows, 8, Deadline(10.0, lambda: now[0]), "work"):
        done += batch
        now[0] += 0.25 * len(batch)
    assert len(done) == len(set(done)) == 33 and max(done) > 50  # one, four times eight; the next would end at 10.25
    assert [len(b) for b in batches_in_time(rows, 8, Deadline(10.0, lambda: 11.0), "work")] == [1]
    assert [i for batch in batches_in_time(rows, 8, ENDLESS, "work") for i in batch] == list(range(100))


@pytest.mark.parametrize(
    ("changes", "minutes"),
    [
        ({"method": "lora"}, 0.04),
        ({"recipe": "staged", "target_adapter": "base"}, 0.06),
        ({"recipe": "joint", "self_distill": True}, 0.08),
    ],
)
def test_the_whole_run_takes_the_minutes_it_was_given(
    base: Path,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, object],
    minutes: float,
) -> None:
    """By a clock that goes on by 10 ms whenever somebody looks at it: on no machine is a step's time known."""
    looks = count()
    monkeypatch.setattr(device, "clock_of", lambda config: lambda: 0.01 * next(looks))
    more = {"epochs": 10_000, "max_minutes": minutes, "save_steps": 1000}
    summary = train(options(base, data, tmp_path / "out", **changes, **more))
    assert 0.01 * next(looks) == pytest.approx(60 * minutes, rel=0.1)
    assert summary["minutes"] == pytest.approx(minutes, rel=0.2)


def test_without_any_time_a_run_does_the_least_and_ends(
    base: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = {"epochs": 10_000, "max_minutes": 1e-4, "val_rows": 30, "val": data}
    train(options(base, data, tmp_path / "out", recipe="staged", **more))
    saved = json.loads((tmp_path / "out" / "training.json").read_text())
    assert (saved["metrics"]["val_answers"], saved["metrics"]["val_texts"]) == (0, 1)
    assert [entry["step"] for entry in saved["log"]["streams"]] == [1]
    said = capsys.readouterr().err
    assert "validation loss: 1 of 30 texts in the time left" in said
    assert "regenerating (val): 0 of 30 prompts in the time for it: references, if any, are taken instead" in said
