"""What saves memory changes no gradient: batches added up, and layers computed again in the backward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from streamspec.adapters.dataset.batches import collate
from streamspec.adapters.dataset.token_rows import TokenRow
from streamspec.adapters.drafters.drafting_model import DraftTargets, FitStep, TargetModel
from streamspec.adapters.drafters.losses import next_token_loss, pick_rows
from streamspec.adapters.drafters.streams.config import StreamConfig
from streamspec.adapters.drafters.streams.model import StreamingModel
from streamspec.adapters.runs.budget import ENDLESS
from streamspec.adapters.training import trainer
from streamspec.adapters.training.trainer import Stage, run_stage
from tests.support.tiny_models import options, tiny_model

ROWS = [
    TokenRow([(5 * i + n) % 60 + 3 for i in range(6 + 3 * n)], [i > 2 + n for i in range(6 + 3 * n)]) for n in range(8)
]


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_close(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys() and a
    for name, value in a.items():
        torch.testing.assert_close(b[name], value, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("size", [2, 3])  # of 8 rows; 3: the last batch is smaller
def test_batches_added_up_give_the_gradients_of_one(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "has_bf16", lambda: False)
    seen: list[dict[str, Tensor]] = []

    class Recorder(trainer._Completeness):
        def on_pre_optimizer_step(self, *_: Any, model: torch.nn.Module, **__: Any) -> None:
            seen.append(gradients(model))

    monkeypatch.setattr(trainer, "_Completeness", Recorder)
    logs = []
    for name, batch, accumulate in (("whole", 8, 1), ("parts", size, -(-8 // size))):
        target = TargetModel(tiny_model("llama", seed=2))

        def loss(batch: dict[str, Tensor], draw: float, target: TargetModel = target) -> dict[str, Tensor]:
            return {
                "total": next_token_loss(target, target.main_pass(batch["input_ids"], batch["attention_mask"]), batch)
            }

        config = options(tmp_path, tmp_path, tmp_path / name, method="lora", accumulate=accumulate, epochs=1.0)
        log, _ = run_stage(Stage("task", target, loss, ROWS, 1e-3, batch, ENDLESS), config, tmp_path / name)
        logs.append(log[-1]["loss"])
    assert len(seen) == 2
    assert_close(*seen)
    assert logs[1] == pytest.approx(logs[0], rel=1e-3)


@contextmanager
def calls_of(layer: torch.nn.Module) -> Iterator[list[int]]:
    seen: list[int] = []
    hook = layer.mlp.register_forward_pre_hook(lambda *_: seen.append(1))
    yield seen
    hook.remove()


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gemma4_text", "lfm2", "gpt2", "opt", "phi3"])
def test_layers_computed_again_give_the_same_gradients(family: str) -> None:
    model = tiny_model(family, seed=2)
    drafter = StreamingModel(model, StreamConfig(2, 2, scale=0.7), frozen=False)
    batch = collate(ROWS[:3])
    settings = options(Path(), Path(), Path(), recipe="joint")

    def step() -> tuple[Tensor, dict[str, Tensor]]:
        torch.manual_seed(3)  # dropout
        drafter.train().zero_grad(set_to_none=True)
        picked = pick_rows(batch, 2, 4, torch.Generator().manual_seed(1))
        main = drafter.main_pass(batch["input_ids"], batch["attention_mask"])
        step = FitStep(batch, DraftTargets(main, picked), torch.ones(2), settings.resolved, 0.5)
        total = drafter.losses(step)["total"]
        total.backward()
        return total.detach(), gradients(drafter)

    loss, plain = step()
    drafter.checkpoint_layers()
    again, checked = step()
    torch.testing.assert_close(again, loss)
    assert_close(plain, checked)
    with torch.no_grad():
        drafter.eval()
        assert drafter.main_pass(batch["input_ids"], batch["attention_mask"]).keys


def test_layers_below_the_drafter_are_computed_twice() -> None:
    target = TargetModel(tiny_model("llama", seed=2)).train()
    batch = collate(ROWS[:3])
    for checkpointed, calls in ((False, (1, 1)), (True, (2, 1))):
        if checkpointed:
            target.checkpoint_layers()
        layers = target.decoder.layers
        with calls_of(layers[0]) as lower, calls_of(layers[-1]) as last:
            next_token_loss(target, target.main_pass(batch["input_ids"], batch["attention_mask"]), batch).backward()
        assert (len(lower), len(last)) == calls
