"""One training stage: transformers' Trainer over a target, with or without a drafter, with a wall-clock budget.

A stage saves only what it trains, resumes exactly, and can be cut at any moment: a checkpoint counts once its marker
file is there.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import ExportableState

from streamspec.adapters.dataset.token_rows import TokenRow
from streamspec.adapters.distributed import processes
from streamspec.adapters.distributed.step_batches import StepLoader, drawn_numbers, step_loader
from streamspec.adapters.reporting.periodic_validation import PeriodicValidation
from streamspec.adapters.reporting.stage_display import CHECKED, StageDisplay
from streamspec.adapters.reporting.trackers import trackers
from streamspec.adapters.runs.budget import Deadline
from streamspec.adapters.training.config import TrainConfig
from streamspec.adapters.training.device import has_bf16

COMPLETE = "complete"  # marker: everything of this checkpoint is on disk
Losses = dict[str, Tensor]
StepLoss = Callable[[dict[str, Tensor], float], Losses]


class StageLosses(nn.Module):
    """A stage as one module, which DistributedDataParallel wraps: what its forward pass reads has its gradients
    averaged over processes.
    """

    def __init__(self, model: nn.Module, loss: StepLoss) -> None:
        super().__init__()
        self.model, self.loss = model, loss
        frozen = [name for name, parameter in self.named_parameters() if not parameter.requires_grad]
        alike = frozen + [name for name, _ in self.named_buffers()]  # every process has read them: nothing to send
        nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self, alike)

    def forward(self, batch: dict[str, Tensor], draw: float) -> Losses:
        """Losses by name. Only "total" has a gradient, so that no parameter seems used that it does not reach."""
        return {name: value if name == "total" else value.detach() for name, value in self.loss(batch, draw).items()}


@dataclass(frozen=True)
class Stage:
    """One stage: model, rows, loss and end. `loss(batch, draw)` returns scalar losses by name, "total" among them:
    means over the batches of all processes. `draw` is the step's random number in [0, 1). `batch_size` is that of all
    processes together. `note` is called now and then, to write down the time used; `check` measures the model on a few
    validation texts. `ahead`: indices of rows that the first epoch begins with.
    """

    name: str
    model: nn.Module
    loss: StepLoss
    rows: Sequence[TokenRow]
    lr: float
    batch_size: int
    until: Deadline
    note: Callable[[], None] = lambda: None
    check: Callable[[], dict[str, float]] | None = None
    ahead: Sequence[int] = ()


def run_stage(stage: Stage, config: TrainConfig, folder: Path) -> tuple[list[dict[str, float]], float]:
    """Trains until the epochs or the time are over; returns the log and the minutes used.

    With `config.resume`, goes on from the last complete checkpoint.
    """
    last = processes.from_first(last_checkpoint(folder) if config.resume else None)
    arguments = _arguments(stage, config, folder)
    clock = Clock(stage.until, config.warmup)
    display = StageDisplay(stage.name, stage.until.left, processes.count())
    shown = [display, *trackers(config.report_to, config.out, stage.name)] if processes.is_first() else []
    checks = [] if stage.check is None else [PeriodicValidation(stage.check)]
    trainer = _StageTrainer(
        stage,
        clock,
        display,
        *checks,
        model=StageLosses(stage.model, stage.loss),
        args=arguments,
        train_dataset=stage.rows,
        callbacks=[clock, _Completeness(), *shown, *checks],
    )
    trainer.remove_callback(PrinterCallback)  # it prints to stdout, which belongs to the result
    if last is not None:
        clock.load(last)
    with _autocast_only(stage.model), display.shown() if shown else nullcontext():
        trainer.train(resume_from_checkpoint=str(last) if last else None)
    return [entry for entry in trainer.state.log_history if {"loss", *CHECKED} & set(entry)], clock.elapsed() / 60


def _arguments(stage: Stage, config: TrainConfig, folder: Path) -> TrainingArguments:
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=stage.batch_size,  # of all processes: StepLoader deals it
        num_train_epochs=config.epochs,
        learning_rate=stage.lr,
        adam_beta2=0.98,
        max_grad_norm=1.0,
        bf16=has_bf16(),
        use_cpu=processes.device().type == "cpu",
        remove_unused_columns=False,
        dataloader_num_workers=0,
        dataloader_pin_memory=False,
        logging_steps=10,
        logging_first_step=True,
        logging_nan_inf_filter=False,  # it would wait for the device at every step
        gradient_accumulation_steps=config.accumulate,
        save_steps=config.save_steps,
        save_total_limit=2,
        report_to=[],
        seed=config.seed,
        disable_tqdm=True,
        ddp_find_unused_parameters=True,  # a step may leave some out: few passes, heads that learn alone
    )
    arguments.mixed_precision = "bf16" if arguments.bf16 else "no"  # not as `accelerate launch` was configured
    arguments._n_gpu = min(1, arguments.n_gpu)  # never nn.DataParallel, which several GPUs in sight would switch on
    return arguments


@contextmanager
def _autocast_only(model: nn.Module) -> Iterator[None]:
    """LoRA layers cast their input to fp32 and autocast casts it back: leave it to autocast, a tenth of a step
    cheaper.
    """
    layers = [m for m in model.modules() if isinstance(m, BaseTunerLayer)] if has_bf16() else []
    for layer in layers:
        layer.cast_input_dtype_enabled = False
    try:
        yield
    finally:
        for layer in layers:
            layer.cast_input_dtype_enabled = True


class Clock(TrainerCallback, ExportableState):
    """Time of a stage that ends at `until`. Progress is the larger of the shares of steps done and of time used, so the
    learning rate ends at 0 either way.
    """

    def __init__(self, until: Deadline, warmup: float) -> None:
        self.until, self.warmup = until, warmup
        self.before, self.started, self.steps = 0.0, until.now(), 0  # seconds used before a resume; steps since

    def elapsed(self) -> float:
        """Returns the seconds of training so far on this process, attempts before a resume included."""
        return self.before + self.until.now() - self.started

    def granted(self) -> float:
        """Returns the seconds of the whole stage, infinite without a limit."""
        return self.before + max(self.until.at - self.started, 0.0)

    def state(self) -> dict[str, Any]:
        """Returns the state that a checkpoint saves."""
        return {"args": {"warmup": self.warmup}, "attributes": {"before": self.elapsed()}}

    def load(self, checkpoint: Path) -> None:
        """Restores the seconds used from a checkpoint's trainer_state.json."""
        from transformers import TrainerState

        saved = TrainerState.load_from_json(str(checkpoint / "trainer_state.json")).stateful_callbacks.get("Clock", {})
        saved = saved[0] if isinstance(saved, list) else saved
        self.before = float(saved.get("attributes", {}).get("before", 0.0))

    def factor(self, step: int, steps: int) -> float:
        """Linear warm-up, then linear decay to 0."""
        done = step / max(steps, 1)
        if not math.isinf(self.until.at):  # the first process's clock counts
            done = max(done, processes.from_first(self.elapsed() / max(self.granted(), 1e-9)))
        if done < self.warmup:
            return min(1.0, max(done, 1 / max(steps, 1)) / self.warmup)
        return max(0.0, (1 - done) / (1 - self.warmup))

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Starts the stage's clock: loading a model is not training."""
        self.started = self.until.now()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stops training once most of another step would come too late. The last step of all is logged."""
        self.steps += 1
        control.should_log |= state.global_step >= state.max_steps
        late = self.until.over((self.until.now() - self.started) / self.steps / 2)
        if not math.isinf(self.until.at) and processes.from_first(late):
            control.should_training_stop = control.should_log = control.should_save = True


class _Completeness(TrainerCallback):
    """Writes the marker after everything else of a checkpoint."""

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not state.is_world_process_zero:
            return
        (Path(args.output_dir) / f"checkpoint-{state.global_step}" / COMPLETE).touch()


class _StageTrainer(Trainer):
    """Trainer that computes a stage's losses, logs each by name and stores trainable tensors only."""

    def __init__(
        self, stage: Stage, clock: Clock, display: StageDisplay, check: PeriodicValidation | None = None, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.stage, self.clock, self.display, self.check = stage, clock, display, check
        self.parts: dict[str, list[Tensor]] = {}  # read when they are logged: a step waits for no number
        self.shares = deque([1.0])  # of the batches to come, if a step adds up several
        self.drawn_for = -1

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        seed, step = self.args.seed, self.state.global_step
        if step != self.drawn_for:  # dropout: a function of the step and the process, so a resumed run repeats it
            torch.manual_seed(int(np.random.SeedSequence((seed, step, processes.index())).generate_state(1)[0]))
            self.drawn_for = step
        draw = float(drawn_numbers(1, seed, step)[0])
        with self._autocast():
            losses = model(inputs, draw)
        total = losses["total"]
        parts = {name: value for name, value in losses.items() if name != "total"}
        for name, value in parts.items():
            self.parts.setdefault(name, []).append(value)
        self.display.losses.append({"loss": total.detach()} | parts)
        if self.args.gradient_accumulation_steps > 1:
            total = total * self.shares.popleft()
        return (total, losses) if return_outputs else total

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> tuple[list[Any], Any]:
        """The batches of a step. Each counts as many times as it has completion tokens, as if they were one batch."""
        batches, items = super().get_batch_samples(*args, **kwargs)
        if self.args.gradient_accumulation_steps > 1:
            mine = [int(batch["loss_mask"][:, 1:].sum()) for batch in batches]
            tokens = [sum(counts) for counts in zip(*processes.gathered(mine), strict=True)]
            self.shares = deque(
                count * len(tokens) / max(sum(tokens), 1) for count in tokens
            )  # Trainer takes their mean
        return batches, items

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.args.device.type, dtype=torch.bfloat16, enabled=self.args.bf16)

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Tensor:
        self.display.batch(inputs)
        return super().training_step(model, inputs, *args, **kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Measures on a few validation texts, as PeriodicValidation asked for."""
        assert self.check is not None
        with self._autocast():
            figures = self.check.run()
        super().log(figures)
        self.callback_handler.on_evaluate(self.args, self.state, self.control, figures)
        return figures

    def get_train_dataloader(self) -> StepLoader:
        """Loads this process's share of each step; not accelerate's, which repeats rows to fill the last one."""
        return step_loader(self.stage.rows, self.args.per_device_train_batch_size, self.args.seed, self.stage.ahead)

    def _save_rng_state(self, output_dir: str) -> None:
        """Saves nothing: random numbers are functions of the step, whatever the number of processes."""

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Loads nothing, as nothing is saved."""

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        means = {name: torch.stack(seen).mean() for name, seen in self.parts.items()}
        logs |= {name: round(mean.item(), 4) for name, mean in means.items()}
        logs["minutes"] = round(self.clock.elapsed() / 60, 2)
        self.parts.clear()
        self.stage.note()
        super().log(logs, *args, **kwargs)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer or self.optimizer, lambda step: self.clock.factor(step, num_training_steps)
        )
        return self.lr_scheduler

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        folder = Path(output_dir or self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        save_file(trainable_state(self.stage.model), folder / "trainable.safetensors")

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        load_trainable(self.stage.model, load_file(Path(resume_from_checkpoint) / "trainable.safetensors"))


def trainable_state(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the parameters that require a gradient, by name."""
    return {n: p.detach().clone().contiguous() for n, p in model.named_parameters() if p.requires_grad}


def load_trainable(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Copies tensors of `trainable_state` back into the model's parameters."""
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in state.items():
            parameters[name].copy_(value)


def last_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint whose save was finished."""
    complete = [p.parent for p in folder.glob(f"checkpoint-*/{COMPLETE}")]
    return max(complete, key=lambda p: int(p.name.split("-")[1]), default=None)
