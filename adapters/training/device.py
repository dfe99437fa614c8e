"""The machine a run trains on: bf16 support, the allocator, and the clock that counts its minutes."""

from __future__ import annotations

import ctypes
import platform
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

from streamspec.adapters.runs.budget import TimeBudget
from streamspec.adapters.training.config import TrainConfig


def clock_of(config: TrainConfig) -> Callable[[], float]:
    """The clock in seconds by which the run counts its minutes."""
    return processor_time if config.clock == "cpu" else time.monotonic


def start_budget(config: TrainConfig, began: float | None) -> TimeBudget:
    """The command's time. `began`: the moment of `time.monotonic` at which a process of its own began with it; None:
    it begins now.
    """
    now = clock_of(config)
    if began is None:
        return TimeBudget(config.max_minutes, now)
    return TimeBudget(config.max_minutes, now, now() if config.clock == "cpu" else time.monotonic() - began)


def processor_time() -> float:
    """CPU seconds of this process per thread: the time a run takes on an otherwise idle machine."""
    return time.process_time() / torch.get_num_threads()


def has_gpu() -> bool:
    """True where a training runs on a GPU."""
    return torch.cuda.is_available()


def has_bf16() -> bool:
    """True where bf16 matrix products are fast: CUDA, or a CPU with AVX512-BF16 or AMX."""
    if has_gpu():
        return torch.cuda.is_bf16_supported()
    check = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return bool(check and check()) and ("avx512_bf16" in _cpu_info() or "amx_bf16" in _cpu_info())


@cache
def _cpu_info() -> str:
    return Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""


def spare_allocator() -> None:
    """Makes glibc keep freed memory: large activations otherwise go back to the kernel, and their page faults cost more
    than the products.

    mmap is switched off rather than its threshold raised, because glibc refuses thresholds above 32 MiB.
    """
    if platform.system() == "Linux" and platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        m_trim_threshold, m_top_pad, m_mmap_max = -1, -2, -4  # malloc.h
        libc.mallopt(m_mmap_max, 0)
        libc.mallopt(m_trim_threshold, 2**31 - 1)
        libc.mallopt(m_top_pad, 64 << 20)


def return_memory() -> None:
    """Returns freed memory to the system, which glibc keeps after `spare_allocator`."""
    if platform.system() == "Linux" and platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
