"""A run that is resumed may have more time or epochs than it began with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from streamspec.adapters import train as train_module
from streamspec.adapters.answers import self_distillation
from streamspec.adapters.runs import failures
from streamspec.adapters.train import train
from streamspec.adapters.training import trainer
from streamspec.cli.errors import guarded
from streamspec.errors import ConfigError
from tests.support.tiny_models import options


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


@pytest.fixture
def rates(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, float]]:
    """Steps and the share of the learning rate after each."""
    seen: list[tuple[int, float]] = []
    factor = trainer.Clock.factor

    def watched(clock: trainer.Clock, step: int, steps: int) -> float:
        seen.append((step, factor(clock, step, steps)))
        return seen[-1][1]

    monkeypatch.setattr(trainer.Clock, "factor", watched)
    return seen


@pytest.mark.parametrize(
    ("changes", "stage"),
    [
        ({"recipe": "staged", "target_adapter": "base"}, "streams"),
        ({"recipe": "joint"}, "joint"),
        ({"recipe": "joint", "self_distill": True}, "distill"),
    ],
)
def test_more_epochs_after_the_last_stage_was_done(
    changes: dict[str, Any],
    stage: str,
    base: Path,
    data: Path,
    rates: list[tuple[int, float]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out, small = tmp_path / "out", {"val_rows": 2, "regenerate_rows": 16, "max_new_tokens": 4} | changes
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt, match="epochs may be higher"):
        patch.setattr(train_module, "finish_drafter", interrupt)
        train(options(base, data, out, epochs=1.0, **small))
    before = trainer.last_checkpoint(out / "run" / f"checkpoints-{stage}")
    assert before is not None
    done = int(before.name.split("-")[1])
    assert rates[-1] == (done, 0.0)  # saved at the end
    for fewer in ({"epochs": 0.5}, {"epochs": 1.0, "seed": 3}):
        with pytest.raises(ConfigError, match=r"expected (at least 1.0|0) as when the run began"):
            train(options(base, data, out, resume=True, **(small | fewer)))
    answered = list[int]()
    made = self_distillation.answer_batch
    monkeypatch.setattr(
        self_distillation, "answer_batch", lambda *given, **named: answered.append(1) or made(*given, **named)
    )
    rates.clear()
    train(options(base, data, out, resume=True, epochs=3.0, **small))
    assert rates[-1] == (3 * done, 0.0)
    again = next(rate for step, rate in rates if step == done + 1 and rate)
    assert again == pytest.approx((1 - (done + 1) / (3 * done)) / 0.95, rel=0.01)  # as that of the longer run
    assert (stage == "streams") == (not answered)  # a target that learnt on answers anew


def test_more_minutes_in_the_middle_of_a_stage(
    base: Path, data: Path, rates: list[tuple[int, float]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(trainer.Clock, "on_step_end", lambda *given, **_: interrupt() if len(rates) > 5 else None)
        train(options(base, data, out, method="lora", max_minutes=3.0, epochs=1.0))
    with pytest.raises(ConfigError, match=r"--max-minutes 2.0; expected at least 3.0 as when the run began"):
        train(options(base, data, out, method="lora", max_minutes=2.0, epochs=1.0, resume=True))
    train(options(base, data, out, method="lora", max_minutes=None, epochs=2.0, resume=True))
    assert rates[-1] == (16, 0.0) and (out / "training.json").exists()


def test_the_command_says_how_to_go_on_when_it_is_interrupted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def command() -> None:
        with failures.one_line_failures(tmp_path):
            raise KeyboardInterrupt

    with pytest.raises(SystemExit):
        guarded("train", command)()
    assert capsys.readouterr().err == "streamspec: interrupted; the same command begins again\n"
