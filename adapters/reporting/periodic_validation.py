"""Measures a stage on a few validation texts while it trains: the next-token loss, and a drafter's simulated tau.

It takes at most `MOST_TIME` of a stage's time and draws no random numbers, so what is trained stays the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from transformers import TrainerCallback

from streamspec.acceptance_stats import Ranks, node_order, simulated_tau
from streamspec.adapters.dataset.token_rows import TokenRow, spread
from streamspec.adapters.distributed import processes
from streamspec.adapters.drafters.acceptance_eval import evaluating, record_ranks, validation_loss
from streamspec.adapters.drafters.drafting_model import DraftingModel, TargetModel
from streamspec.draft_tree import DraftTree

MOST_TIME = 0.03  # share of a stage
MOST_OFTEN = 50  # times in a stage
FIRST_COST = 8  # steps that the first measurement is taken to last as long as
SAMPLE_ROWS, SAMPLE_TOKENS = 16, 1024  # of answers, at most
REPORTED_ROWS = 16  # tau is that of the tree of this many rows


def sample(rows: Sequence[TokenRow]) -> list[TokenRow]:
    """A few of `rows`, spread over all of them: at most `SAMPLE_ROWS`, with `SAMPLE_TOKENS` tokens of answers."""
    taken: list[TokenRow] = []
    tokens = 0
    for row in (rows[index] for index in spread(len(rows), SAMPLE_ROWS)):
        tokens += sum(row.loss_mask)
        if taken and tokens > SAMPLE_TOKENS:
            break
        taken.append(row)
    return taken


def target_figures(model: TargetModel, rows: list[TokenRow]) -> dict[str, float]:
    """`loss`, the next-token loss, of a target that learns, and the number of `texts`; of a frozen one nothing."""
    if model.frozen:
        return {}
    with evaluating(model):
        return {"loss": round(validation_loss(model, rows)[0], 4), "texts": len(rows)}


def drafter_figures(model: DraftingModel, rows: list[TokenRow], vocabulary: Tensor | None) -> dict[str, float]:
    """The figures of its target, `tau`, and the number of `texts`."""
    figures = target_figures(model, rows)
    with evaluating(model):
        ranks = record_ranks(model, rows, vocabulary)
    return figures | {"tau": reported_tau(ranks, model.gamma), "texts": len(rows)}


def reported_tau(ranks: Ranks, gamma: int) -> float:
    """Simulated tau of the tree of `REPORTED_ROWS` rows."""
    tree = DraftTree.from_nodes(node_order(ranks, gamma), REPORTED_ROWS)
    return round(simulated_tau(ranks, tree), 3)


class PeriodicValidation(TrainerCallback):
    """Asks the Trainer to evaluate when that fits into `MOST_TIME`. `measure`: returns figures by name."""

    def __init__(self, measure: Callable[[], dict[str, float]], now: Callable[[], float] = time.monotonic) -> None:
        self.measure, self.now = measure, now
        self.began = now()
        self.spent = self.last = 0.0  # seconds: of all measurements, of the last one
        self.first_step = self.checked = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.began, self.first_step = self.now(), state.global_step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        used = self.now() - self.began
        each = (used - self.spent) / max(state.global_step - self.first_step, 1)
        expected = self.last or FIRST_COST * each
        apart = state.global_step - self.checked >= state.max_steps / MOST_OFTEN
        if processes.from_first(apart and self.spent + expected <= MOST_TIME * used):
            control.should_evaluate = True
            self.checked = state.global_step

    def run(self) -> dict[str, float]:
        """Measures, and notes the time it took."""
        began = self.now()
        figures = self.measure()
        self.last = self.now() - began
        self.spent += self.last
        return {f"eval_{name}": value for name, value in figures.items()}
