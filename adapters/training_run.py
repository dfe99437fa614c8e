"""One training run: its options, base, data and state, shared by every stage."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from streamspec.adapters.answers.bundle import BundleAnswers
from streamspec.adapters.answers.completion_file import CompletionFile
from streamspec.adapters.answers.request import AnswerSource
from streamspec.adapters.base_models.resolve import Base
from streamspec.adapters.dataset.batches import collate
from streamspec.adapters.dataset.formatter import Formatter
from streamspec.adapters.dataset.token_rows import TokenRow, TokenRows
from streamspec.adapters.distributed import processes
from streamspec.adapters.runs.budget import TimeBudget
from streamspec.adapters.runs.run_folder import WORK
from streamspec.adapters.runs.run_state import RunState
from streamspec.adapters.training.config import UNTOUCHED, TrainConfig
from streamspec.adapters.training.device import has_bf16
from streamspec.adapters.training.served_layers import Served, States
from streamspec.atomic import sha256_file
from streamspec.bundle.adapter_folder import TASK_CONFIG, TASK_WEIGHTS

FIT_ROWS = 8  # texts that a drafter's first fit reads at once
FIT_SHARE = 0.15  # of the time left that the fit may take in a short run; the target's answers took at most 0.4


@dataclass
class RunInputs:
    """The inputs of a run."""

    config: TrainConfig
    base: Base
    formatter: Formatter
    prompts: TokenRows  # whose openings the target answers: all rows, those too long to learn from included
    rows: Sequence[TokenRow]  # that are learnt from; of a drafter of a finished target its own answers
    val_prompts: TokenRows
    val_rows: Sequence[TokenRow]
    ns: int  # MSA layers
    data: dict[str, str]  # hashes of the data by file name
    source: AnswerSource | None  # who answers instead of the target as PyTorch computes it
    served: Served | None  # opens the target's first layers as they are served


@dataclass
class Run(RunInputs):
    """A run as all stages see it."""

    state: RunState  # finished parts, saved after each
    budget: TimeBudget  # the minutes of the whole command
    lower_layers: States | None = None  # of the target, as they are served

    @property
    def options(self) -> dict[str, Any]:
        """Every option as the method reads it."""
        return self.config.resolved

    @property
    def begins_with(self) -> Path | None:
        """The adapter whose drafter is where training begins."""
        return self.config.begins_with

    @property
    def work(self) -> Path:
        """Checkpoints, regenerated answers and finished stages of a run that is not over."""
        return self.config.out / WORK

    @property
    def dtype(self) -> torch.dtype:
        """The dtype a frozen base is loaded in: bfloat16 where the device computes in it."""
        return torch.bfloat16 if has_bf16() else torch.float32

    @property
    def device(self) -> torch.device:
        """The GPU where there is one, of several processes each its own; else the CPU."""
        return processes.device()

    def in_step(self, batch: int) -> int:
        """Counts the texts of a step of which each process reads `batch`; also where a run goes on with more or fewer
        processes than it began with.
        """
        return batch * self.state.processes

    def first_rows(self, count: int) -> Sequence[TokenRow]:
        """Returns the first `count` training rows, or an eighth of them where the time is short."""
        return self.rows[: max(1, count // 8) if self.budget.short else count]

    def measured_once(self, part: str, measure: Callable[[], float]) -> float:
        """What `measure` gives, once for the run, however often that goes on."""
        if not self.state.finished(part):
            self.state.finish(part, 0.0, {"value": measure()})
        return float(self.state.log[part]["value"])

    def fit_start(self, fit: Callable[[Iterator[tuple[Tensor, Tensor]]], float]) -> None:
        """Calls `fit` on the training rows, batch by batch (ids and attention mask [B, T]), and logs its time and the
        share of variance it leaves unexplained; where a short time cut it, the `tokens` read: of one batch at least.
        """
        began, end = self.budget.now(), self.budget.if_short(FIT_SHARE)
        log, read = dict[str, float](), 0

        def batches() -> Iterator[tuple[Tensor, Tensor]]:
            nonlocal read
            for i in range(0, len(self.rows), FIT_ROWS):
                each = (self.budget.now() - began) * FIT_ROWS / max(i, 1)
                if i and not math.isinf(end.at) and processes.from_first(end.over(each)):
                    log["tokens"] = read
                    return
                batch = collate(self.rows[i : i + FIT_ROWS], self.device)
                read += int(batch["attention_mask"].sum())
                yield batch["input_ids"], batch["attention_mask"]

        left = fit(batches())
        self.state.finish("start", (self.budget.now() - began) / 60, {"unexplained": round(left, 4)} | log)


def answers_made_by(config: TrainConfig, base: Base, source: AnswerSource | None) -> dict[str, Any]:
    """Base, target, source and sampling that regenerated answers depend on, besides their prompts."""
    settings = target_of(config, base) | {"max_new_tokens": config.max_new_tokens}
    settings |= source.made_by() if source is not None else {}
    settings |= {"base_bits": config.base_bits} if config.base_bits and source is None else {}
    sampling = {"temperature": config.answer_temperature, "top_p": config.answer_top_p, "seed": config.seed}
    return settings | sampling if config.answer_temperature else settings


def file_of_answers(path: Path, config: TrainConfig, base: Base, source: AnswerSource | None) -> CompletionFile:
    """Opens a file of such answers. Raises DataError for other ones."""
    made_by = answers_made_by(config, base, source)
    return CompletionFile(path, made_by, made_by | (source.made_before() if isinstance(source, BundleAnswers) else {}))


def target_of(config: TrainConfig, base: Base) -> dict[str, Any]:
    """Base and task LoRA of a run's target, by the hashes of their files."""
    target = "trained in this run"
    if config.target_adapter is not None:
        task = config.target_lora
        target = (
            UNTOUCHED if task is None else " ".join(sha256_file(task / name) for name in (TASK_WEIGHTS, TASK_CONFIG))
        )
    return {"base": base.sha256, "target": target}


def preview(run: Run) -> str:
    """One rendered training row, the completion in brackets."""
    row = run.rows[0]
    start = row.loss_mask.index(True)
    prompt, answer = (run.formatter.tokenizer.decode(ids) for ids in (row.input_ids[:start], row.input_ids[start:]))
    return f"{prompt}[[{answer}]]"
