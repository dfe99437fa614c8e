"""Sends what a run logs to TensorBoard, Weights & Biases or trackio (`--report-to`), through transformers' own
integrations. Every stage is a run of its own there, called OUT-STAGE.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.integrations import TensorBoardCallback, TrackioCallback, WandbCallback

from streamspec.adapters.distributed.processes import say
from streamspec.errors import ConfigError
from streamspec.progress import is_quiet

PROJECT = "streamspec"  # where no variable of the tracker names another


@contextmanager
def _unheard() -> Iterator[None]:
    """Drops the output of trackers: stdout belongs to the result, stderr to our own lines."""
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        yield


class StageTensorBoard(TensorBoardCallback):
    """A folder of TensorBoard's for one stage, in the adapter folder."""

    def __init__(self, out: Path, stage: str) -> None:
        from torch.utils.tensorboard import SummaryWriter

        super().__init__(SummaryWriter(log_dir=str(out / "tensorboard" / stage)))

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        super().on_train_begin(args, state, control)  # without the model, of which it wants Hugging Face's config


class StageWandb(WandbCallback):
    """A run of Weights & Biases for one stage. Its files lie in the adapter folder, also with WANDB_MODE=offline."""

    def __init__(self, out: Path, stage: str) -> None:
        for name, value in (("PROJECT", PROJECT), ("SILENT", "true"), ("DIR", str(out))):
            os.environ.setdefault(f"WANDB_{name}", value)
        super().__init__()
        self.run_name = f"{out.name}-{stage}"

    def setup(self, args: Any, state: Any, model: Any, **more: Any) -> None:
        args.run_name = self.run_name
        try:
            with _unheard():
                super().setup(args, state, None)  # of a model it wants Hugging Face's config
        except self._wandb.Error as error:  # no key, no network
            advice = "run `wandb login`, or set WANDB_MODE=offline"
            raise ConfigError(f"--report-to wandb: {error}", "an account that it can log to", advice) from None
        if self._wandb.run is not None:
            say(f"wandb: {self.run_name} goes to {self._wandb.run.url or self._wandb.run.dir}")

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        with _unheard():
            super().on_train_end(args, state, control, **more)
            self._wandb.finish()


class StageTrackio(TrackioCallback):
    """A run of trackio for one stage."""

    def __init__(self, out: Path, stage: str) -> None:
        super().__init__()
        self.run_name = f"{out.name}-{stage}"

    def setup(self, args: Any, state: Any, model: Any, **more: Any) -> None:
        args.run_name, args.project = self.run_name, os.environ.get("TRACKIO_PROJECT", PROJECT)
        with _unheard():
            super().setup(args, state, None)
        say(f"trackio: {self.run_name}; `trackio show --project {args.project}` shows it")

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        with _unheard():
            super().on_train_end(args, state, control, **more)


TRACKERS: dict[str, Callable[[Path, str], TrainerCallback]] = {
    "tensorboard": StageTensorBoard,
    "wandb": StageWandb,
    "trackio": StageTrackio,
}


def trackers(report_to: str | None, out: Path, stage: str) -> list[TrainerCallback]:
    """The callback of `--report-to` for a stage of the run that writes to `out`; none in processes after the first."""
    if report_to is None or is_quiet("RANK"):
        return []
    return [TRACKERS[report_to](out, stage)]
