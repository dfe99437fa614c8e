"""The processes of a run and the values they exchange. A process that runs alone is the first, and sends nothing.

Only the first writes, prints and looks at the clock. All call these functions in the same order.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from streamspec import progress
from streamspec.errors import ConfigError, StreamspecError

T = TypeVar("T")
HIDE = "hide the GPUs to train on the CPU: CUDA_VISIBLE_DEVICES="
GRACE = 20.0  # seconds in which a launcher ends the processes that are left
LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "NCCL", "Timed out", "timed out")
WAIT = timedelta(hours=6)  # for the first one's work; launchers end the others at once where one fails


_before_exchange: Callable[[], object] | None = None


def meet_after(turn: Callable[[], object] | None) -> None:
    """Calls `turn` on each of several processes before they exchange values (None: nothing)."""
    global _before_exchange
    _before_exchange = turn


def meet() -> None:
    """Waits until the others are at an exchange of values, too. Whatever sends values calls it first, but for what all
    processes do after equal work, as a step's gradients."""
    if _before_exchange is not None:
        _before_exchange()


def join() -> None:
    """Joins the processes that a launcher started, over NCCL between GPUs and gloo between CPUs. Raises ConfigError
    where they outnumber the machine's GPUs.
    """
    on_gpu = torch.cuda.is_available()
    if on_gpu and os.environ.get("ACCELERATE_USE_CPU", "").lower() == "true":
        raise ConfigError("accelerate launch --cpu beside a GPU", "training on it", HIDE)
    if not os.environ.get("LOCAL_RANK") or dist.is_initialized():
        return
    if on_gpu:
        local, gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        here = max(int(os.environ.get("LOCAL_WORLD_SIZE") or 0), local + 1)
        if here > gpus:
            found = f"{here} processes on a machine with {gpus} GPU{'s' * (gpus != 1)}"
            raise ConfigError(found, "a GPU for each", f"start fewer; or {HIDE}")
        torch.cuda.set_device(local)
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=WAIT)


@contextmanager
def together() -> Iterator[None]:
    """Runs the block as one of several processes: where another one ends early, so does this, and the other's own line
    says why. Raises StreamspecError if no launcher ends this process.
    """
    joined_before = dist.is_initialized()
    join()
    try:
        yield
    except RuntimeError as error:
        if count() == 1 or not any(sign in str(error) for sign in LOST):
            raise
        time.sleep(GRACE)
        raise StreamspecError(
            f"process {index()} lost another one of the run", "all to go on", "see the other's line"
        ) from None
    if not joined_before:
        leave()


def device() -> torch.device:
    """The GPU that this process trains on, else the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device()) if dist.is_initialized() else torch.device("cuda")


def leave() -> None:
    """Ends what `join` began."""
    if dist.is_initialized():
        dist.destroy_process_group()


def count() -> int:
    """Counts the processes of the run."""
    return dist.get_world_size() if dist.is_initialized() else 1


def index() -> int:
    """The number of this process, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def is_first() -> bool:
    """Tells whether this process is the one that writes and prints."""
    return index() == 0


def say(text: str) -> None:
    """Prints one line to stderr, on the first process; stdout belongs to the result."""
    if is_first():
        print(text, file=sys.stderr, flush=True)


class _Summed(torch.autograd.Function):
    """The sum over processes. DDP averages gradients over processes, so each one's own share counts as often as there
    are processes.
    """

    @staticmethod
    def forward(ctx: Any, share: Tensor) -> Tensor:
        total = share.detach().clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Tensor:
        return upstream[0] * count()


def summed(share: Tensor) -> Tensor:
    """Sums `share` over processes: the same number on each. A function of it has, averaged over processes as DDP does,
    the gradient that one process would compute from all shares.
    """
    if count() == 1:
        return share
    meet()
    total: Tensor = _Summed.apply(share)
    return total


def shared_mean(total: Tensor, number: Tensor) -> Tensor:
    """`total` over `number`, both summed over processes; 0 where nothing counts. Of equal shapes."""
    totals, numbers = summed(torch.stack([total, number.to(total.dtype)]))
    return totals / numbers.clamp(min=1)


def mean_over(values: Tensor) -> Tensor:
    """The mean of `values` [n, ..] over the n of all processes; 0 where there are none."""
    total = values.float().sum(0)
    return shared_mean(total, torch.full_like(total, len(values), requires_grad=False))


@torch.no_grad()
def spread_over(values: Tensor) -> Tensor:
    """Standard deviation of the numbers of all processes, a scalar above 0."""
    number = torch.tensor(values.numel(), device=values.device)
    centred = values - shared_mean(values.sum(), number)
    total, numbers = summed(torch.stack([centred.square().sum(), number.to(centred.dtype)]))
    return (total / (numbers - 1).clamp(min=1)).sqrt().clamp(min=torch.finfo(total.dtype).tiny)


def from_first(value: T) -> T:
    """The first process's `value`, on every one; what the first did before is then done for all."""
    if count() == 1:
        return value
    meet()
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


@contextmanager
def first_ahead() -> Iterator[None]:
    """The first process runs the block before the others, who find what it has downloaded or cached; all leave it
    together. Where the first fails, so that it alone says why, the others end. Nothing in the block may wait for
    another process.
    """
    if not is_first() and not from_first(True):
        raise SystemExit(2)
    try:
        yield
    except Exception:
        if is_first():
            from_first(False)
        raise
    if is_first():
        from_first(True)
    gathered(None)


def gathered(mine: T) -> list[T]:
    """Every process's `mine`, in their order, on every process."""
    if count() == 1:
        return [mine]
    meet()
    boxes: list[Any] = [None] * count()
    dist.all_gather_object(boxes, mine)
    return boxes


def counted(label: str, total: int) -> AbstractContextManager[Callable[[int], None]]:
    """As `progress.counted`, shown by the first process alone."""
    return progress.counted(label, total) if is_first() else nullcontext(lambda done: None)


def dealt(items: Sequence[T]) -> Sequence[T]:
    """This process's share of `items`: every n-th of n processes, from its own number on."""
    return items[index() :: count()]


def joined(shares: Sequence[Sequence[T]]) -> list[T]:
    """Merges the results of each process for its `dealt` items, in the order of all items."""
    return [shares[i % len(shares)][i // len(shares)] for i in range(sum(map(len, shares)))]
