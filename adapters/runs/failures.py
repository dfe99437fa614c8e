"""Explains what ends a run early (interruption, a full disk, memory, a lost GPU) in one line that says how to go on."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError

from streamspec.adapters.runs.run_folder import RUN_STATE, WORK
from streamspec.errors import ResourceError, StreamspecError
from streamspec.paths import nearest_existing

FULL = (errno.ENOSPC, errno.EDQUOT)
DISK_WORDS = (
    "No space left",
    "StorageFull",
    "os error 28",
    "Disk quota exceeded",
    "inline_container",
    "file write failed",
)
MEMORY_WORDS = ("out of memory", "can't allocate memory", "not enough memory", "CUBLAS_STATUS_ALLOC_FAILED")
GPU_WORDS = ("CUDA error", "CUDA driver", "HIP error", "CUBLAS_STATUS", "CUDNN_STATUS", "cuDNN error", "NCCL error")


@contextmanager
def one_line_failures(out: Path) -> Iterator[None]:
    """Turns failures of the machine, in a run that writes to `out`, into ResourceErrors of one line that say how to go
    on; an interruption says it too. Other exceptions pass.
    """
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"interrupted; {how_to_go_on(out)}") from None
    except StreamspecError:
        raise
    except (OSError, RuntimeError, MemoryError, SafetensorError) as error:
        if (explanation := explained(error, out)) is None:
            raise
        raise explanation from error


def explained(error: BaseException, out: Path) -> ResourceError | None:
    """The error in words, None for one that is none of these."""
    text = str(error)
    words = " ".join(text.split())[:160]
    if isinstance(error, torch.OutOfMemoryError) or (isinstance(error, RuntimeError) and _has(text, MEMORY_WORDS)):
        device = "GPU" if torch.cuda.is_available() or "CUDA" in text else "computer"
        return ResourceError(
            f"the {device} is out of memory ({words})",
            "room for a training step",
            f"end other programs; {how_to_go_on(out)}, or start anew with a smaller --batch-size or --max-length",
        )
    if isinstance(error, MemoryError):
        return ResourceError("out of memory", "", f"end other programs; {how_to_go_on(out)}")
    if isinstance(error, RuntimeError) and _has(text, GPU_WORDS):
        return ResourceError(
            f"the GPU failed ({words})", "one that computes", f"see what nvidia-smi says; {how_to_go_on(out)}"
        )
    if (isinstance(error, OSError) and error.errno in FULL) or _has(text, DISK_WORDS):
        return ResourceError(
            f"{out} could not be written: no space left, or over the quota ({_free(out)} free)",
            "room for checkpoints and the adapter",
            f"make room; {how_to_go_on(out)}",
        )
    return None


def how_to_go_on(out: Path) -> str:
    """Says how to go on with the run in `out`, whose checkpoints are there."""
    if not (out / WORK / RUN_STATE).exists():
        return "the same command begins again"
    return "the same command with --resume goes on from the last checkpoint, --max-minutes and --epochs may be higher"


def _has(text: str, words: tuple[str, ...]) -> bool:
    return any(word in text for word in words)


def _free(out: Path) -> str:
    return f"{shutil.disk_usage(nearest_existing(out)).free / 1e6:,.0f} MB"
