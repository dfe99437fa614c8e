"""Validation as training goes: when it is due, what it measures, and that it changes nothing."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace as Some

import pytest
import torch
from safetensors.torch import load_file

from streamspec.adapters.dataset.token_rows import TokenRow, joined
from streamspec.adapters.drafters.acceptance_eval import validation_loss
from streamspec.adapters.reporting import periodic_validation
from streamspec.adapters.reporting.periodic_validation import PeriodicValidation, sample, target_figures
from streamspec.adapters.train import train
from tests.support.tiny_models import options


def test_it_takes_three_percent_of_the_time_at_most() -> None:
    clock = Some(now=0.0)
    checks = PeriodicValidation(lambda: {"tau": 2.0}, lambda: clock.now)
    checks.measure = lambda: setattr(clock, "now", clock.now + 4.0) or {"tau": 2.0}
    checks.on_train_begin(None, Some(global_step=0), None)
    due = []
    for step in range(1, 2001):
        clock.now += 1.0
        control = Some(should_evaluate=False)
        checks.on_step_end(None, Some(global_step=step, max_steps=2000), control)
        if control.should_evaluate:
            assert checks.run() == {"eval_tau": 2.0}
            due.append(step)
            assert checks.spent <= 0.03 * clock.now + 1e-9 or len(due) == 1
    assert due[0] == 267 and 13 <= len(due) <= 15  # eight steps were assumed at first; then four seconds each


def test_cheap_measurements_come_fifty_times_at_most() -> None:
    clock = Some(now=0.0)
    checks = PeriodicValidation(dict, lambda: clock.now)
    count = 0
    for step in range(1, 1001):
        clock.now += 1.0
        control = Some(should_evaluate=False)
        checks.on_step_end(None, Some(global_step=step, max_steps=1000), control)
        if control.should_evaluate:
            checks.run()
            count += 1
    assert 30 <= count <= 50


def test_a_sample_is_spread_over_all_rows_and_small() -> None:
    rows = [joined([1], [n] * 100) for n in range(200)]
    taken = [row.input_ids[1] for row in sample(rows)]
    assert taken == [n * 200 // 16 for n in range(10)]
    assert len(sample([joined([1], [2])] * 100)) == 16
    assert len(sample([TokenRow([1] * 9999, [True] * 9999)] * 3)) == 1


def test_figures_are_the_models_and_it_goes_on_training() -> None:
    from streamspec.adapters.drafters.drafting_model import TargetModel
    from tests.support.tiny_models import tiny_model

    model = TargetModel(tiny_model("llama")).train()
    rows = [joined([5, 6], [7, 8, 9])]
    found = target_figures(model, rows)
    assert model.training and found == {"loss": round(validation_loss(model, rows)[0], 4), "texts": 1}
    model.frozen = True
    assert target_figures(model, rows) == {}


def test_measuring_changes_nothing_and_is_in_the_log(
    base: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outs = [tmp_path / name for name in ("never", "often")]
    for out, share in zip(outs, (0.0, 1e9), strict=True):
        monkeypatch.setattr(periodic_validation, "MOST_TIME", share)
        train(options(base, data, out, method="streaming", recipe="joint", epochs=1.0))
    never, often = (load_file(out / "streamspec.safetensors") for out in outs)
    assert all(torch.equal(never[name], often[name]) for name in never)
    log = json.loads((outs[1] / "training.json").read_text())["log"]["joint"]
    checked = [entry for entry in log if "eval_tau" in entry]
    assert len(checked) >= 5 and all(1 <= entry["eval_tau"] <= 3 and entry["eval_loss"] > 0 for entry in checked)
    assert "loss" in log[0] and log[0]["step"] == 1
    assert not any("eval_tau" in entry for entry in json.loads((outs[0] / "training.json").read_text())["log"]["joint"])
