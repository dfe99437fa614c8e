"""A mixture of experts in a Hugging Face layer: its sizes by its modules, and the weights of one expert out of the
tensors in which transformers stacks those of all.

tests/export/layers/mlp/test_experts.py covers it.
"""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor, nn

from streamspec.adapters.base_models.gguf.lazy_tensors import is_hollow, read_expert

EXPERT = re.compile(r"(.+)\.(\d+)\.(gate|up|down)_proj")  # below a layer: the module, an expert's number, its map


def experts_of(layer: nn.Module, path: str) -> Any:
    """The module `path` of a layer with the experts' weights; None in a layer with an MLP."""
    return dict(layer.named_modules()).get(path)


def expert_tensor(layer: nn.Module, path: str, kind: str) -> Tensor | None:
    """A map [out, in] or bias [out] (`kind`) of an expert; None where there is none. `path`: `EXPERT`. Gate and up
    map lie in one tensor; without a gate, the up map in one of its own."""
    found = EXPERT.fullmatch(path)
    assert found is not None, path
    experts, number, part = experts_of(layer, found[1]), int(found[2]), found[3]
    whole = hasattr(experts, f"{part}_proj")
    stacked = f"{part}_proj" if whole else "gate_up_proj"
    tensor = getattr(experts, stacked if kind == "weight" else f"{stacked}_{kind}", None)
    if tensor is None:
        return None
    if is_hollow(tensor):  # gate and up of an expert lie one after the other, as `is_concatenated`
        return read_expert(tensor, number, part == "up" and not whole)
    own: Tensor = tensor[number].detach()
    if kind == "weight" and getattr(experts, "is_transposed", False):
        own = own.T
    if whole:
        return own
    half, second = len(own) // 2, part == "up"
    if getattr(experts, "is_concatenated", True):
        return own[half:] if second else own[:half]
    return own[int(second) :: 2]
