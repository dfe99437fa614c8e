"""A target's layers divided among the processes of a run, by PyTorch's FSDP2: each holds a part of every weight, and a
layer's are gathered while a text passes through it.

accelerate divides a model when its Trainer begins, drafter included; here the target answers before, and drafters read
weights beside its layers. So its frozen layers alone are divided, as it is loaded.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from streamspec.adapters.distributed import processes
from streamspec.adapters.distributed.launch import FSDP, divides

_groups: tuple[Any, Any] | None = None  # of processes that divide weights: to gather them, and to count passes


@contextmanager
def as_launched() -> Iterator[None]:
    """Divides targets in the block where the launch asks for FSDP. transformers, which would read weights on the first
    process alone, and accelerate see nothing of it."""
    global _groups
    if divides() and processes.count() > 1:  # beside DDP's group: each has an order of its own
        _groups = dist.new_group(timeout=processes.WAIT), dist.new_group(timeout=processes.WAIT, backend="gloo")
    value = os.environ.pop(FSDP, None)
    try:
        yield
        processes.meet()  # others may still pass
    finally:
        _groups = None
        processes.meet_after(None)
        if value is not None:
            os.environ[FSDP] = value


def asked() -> bool:
    """Tells whether targets are to be divided."""
    return _groups is not None


def is_part(parameter: Tensor) -> bool:
    """Tells whether this process holds a part of a parameter alone."""
    return isinstance(parameter, DTensor)


def divide(body: nn.Module, layers: Sequence[nn.Module], device: torch.device) -> None:
    """Divides the frozen weights of `layers` among the processes, moving them to `device`; what learns in them, such as
    a LoRA, stays whole. `body`: what is called once in each pass through all of them.
    """
    assert _groups is not None
    mesh = DeviceMesh.from_group(_groups[0], device.type)
    for layer in layers:
        learned = {parameter for parameter in layer.parameters() if parameter.requires_grad}
        fully_shard(layer, mesh=mesh, reshard_after_forward=True, ignored_params=learned)
    whole = {parameter for parameter in body.parameters() if not is_part(parameter)}
    fully_shard(body, mesh=mesh, reshard_after_forward=True, ignored_params=whole)  # one root: one pool of memory
    processes.meet_after(_Passes(body).follow)


class _Passes:
    """All processes gather a layer's weights together, so a pass of one is a pass of all, although their texts differ
    in number and length: before a pass, and before values are exchanged, they count who passes. Those that are at an
    exchange pass one token along with them, which nobody reads.
    """

    def __init__(self, body: nn.Module) -> None:
        self.body, self.follows = ref(body), False
        body.register_forward_pre_hook(self._pass)

    def _pass(self, *_: object) -> None:
        if not self.follows:
            _count(1)

    def follow(self) -> None:
        """Passes as often as others do, until all are at an exchange."""
        while _count(0):
            body = self.body()
            assert body is not None, "another process passes through a model that is gone here"
            self.follows = True
            try:
                with torch.no_grad():
                    body(torch.zeros(1, 1, dtype=torch.long, device=processes.device()), use_cache=False)
            finally:
                self.follows = False


def _count(passing: int) -> int:
    """Counts the processes that are about to pass."""
    assert _groups is not None
    number = torch.tensor(passing)
    dist.all_reduce(number, group=_groups[1])
    return int(number)
