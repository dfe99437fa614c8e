"""Sends what a run logs to TensorBoard, Weights & Biases or trackio, through transformers' own integrations."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from streamspec.adapters.training.config import TrainConfig


def trackers(config: TrainConfig, stage: str) -> list[TrainerCallback]:
    """The callbacks of `--report-to` for a stage."""
    if not config.tensorboard:
        return []
    from torch.utils.tensorboard import SummaryWriter
    from transformers.integrations import TensorBoardCallback

    writer: Any = SummaryWriter(log_dir=str(config.out / "tensorboard" / stage))
    return [TensorBoardCallback(writer)]
