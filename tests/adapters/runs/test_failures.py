"""Interruptions, full disks, memory and lost GPUs are one line that says how to go on; the checkpoints stay."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError

from streamspec import atomic
from streamspec.adapters.drafters import losses
from streamspec.adapters.runs.failures import explained
from streamspec.adapters.train import train
from streamspec.adapters.training import trainer
from streamspec.errors import ResourceError
from tests.support.tiny_models import options

FULL = OSError(errno.ENOSPC, "No space left on device")
TORCH_FULL = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0")
RUST_FULL = SafetensorError('Error while serializing: Os { code: 28, kind: StorageFull, message: "No space" }')
GPU_FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
RAM_FULL = RuntimeError("[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory")
GPU_LOST = RuntimeError("CUDA error: unspecified launch failure\nCUDA kernel errors might be asynchronously reported")


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (FULL, "out could not be written: no space left.* MB free.*; make room; the same command begins again"),
        (TORCH_FULL, "out could not be written: no space left"),
        (RUST_FULL, "out could not be written: no space left"),
        (GPU_FULL, r"the GPU is out of memory .*smaller --batch-size or --max-length"),
        (RAM_FULL, r"the computer is out of memory"),
        (MemoryError(), "out of memory"),
        (GPU_LOST, "the GPU failed .*unspecified launch failure.*nvidia-smi"),
    ],
)
def test_what_can_happen_to_a_run_is_one_line(error: Exception, says: str, tmp_path: Path) -> None:
    found = explained(error, tmp_path / "out")
    assert found is not None and "\n" not in str(found)
    with pytest.raises(ResourceError, match=says):
        raise found


@pytest.mark.parametrize("error", [RuntimeError("shape [2] is invalid"), OSError(errno.ENOENT, "x"), ValueError("a")])
def test_other_errors_stay_what_they_are(error: Exception, tmp_path: Path) -> None:
    assert explained(error, tmp_path) is None


def failing(after: int, error: BaseException, call: Any) -> Any:
    """`call`, which raises `error` from its call number `after` on."""
    count = 0

    def run(*given: Any, **named: Any) -> Any:
        nonlocal count
        count += 1
        if count > after:
            raise error
        return call(*given, **named)

    return run


@pytest.mark.parametrize(
    ("module", "name", "after", "error", "says"),
    [
        (torch, "save", 6, TORCH_FULL, "no space left"),  # the second checkpoint's optimiser
        (trainer, "save_file", 1, RUST_FULL, "no space left"),
        (atomic, "write_bytes", 5, FULL, "no space left"),
        (losses, "head_losses", 8, GPU_FULL, "out of memory"),
        (trainer.Clock, "on_step_end", 8, KeyboardInterrupt(), "interrupted; the same command with --resume"),
    ],
)
def test_a_run_that_was_cut_goes_on_from_its_last_checkpoint(
    module: Any,
    name: str,
    after: int,
    error: BaseException,
    says: str,
    base: Path,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = {"method": "lora", "epochs": 2.0, "save_steps": 3}
    with monkeypatch.context() as patch:
        patch.setattr(module, name, failing(after, error, getattr(module, name)))
        with pytest.raises((ResourceError, KeyboardInterrupt), match=says) as seen:
            train(options(base, data, tmp_path / "out", **config))
    assert "--resume goes on from the last checkpoint" in str(seen.value)
    kept = list((tmp_path / "out" / "run").glob("checkpoints-task/checkpoint-*/complete"))
    assert kept and not list((tmp_path / "out").rglob("*.tmp"))
    train(options(base, data, tmp_path / "out", resume=True, **config))
    assert (tmp_path / "out" / "training.json").exists()
