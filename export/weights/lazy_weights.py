"""Reads the target layer by layer: at rest in the dtype of its files, mapped, and in float32 with the task LoRA merged
while a layer is used.

So a base of any size needs one layer's memory, and on Linux hardly any of its files': pages are given back once read.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from streamspec.adapters.base_models.gguf.lazy_tensors import is_hollow, lazy_stack, read_lazily, read_rows
from streamspec.adapters.base_models.hf_decoder import HFDecoder
from streamspec.adapters.base_models.token_mixers.recurrent_state import restore_multipliers
from streamspec.export.ops.builder import Array

HEAD_ROWS = 1 << 14  # of the vocabulary, in float32 at a time
PAGE, PAGE_OUT = 4096, 21  # MADV_PAGEOUT of Linux 5.4: a hint that loses nothing


class Float32Decoder(HFDecoder):
    """A decoder that computes in float32 whatever dtype its model rests in. Its layers are copies, which all decoders
    of a model share: changes to one are lost when the next is read.
    """

    _kept: ClassVar[WeakKeyDictionary[nn.ModuleList, tuple[int, nn.Module]]] = WeakKeyDictionary()

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.norm = None if self.norm is None else to_float32(self.norm)
        if self.per_layer is not None:
            self.per_layer.context, self.per_layer.norm = (
                to_float32(module) for module in (self.per_layer.context, self.per_layer.norm)
            )
        if not isinstance(self.embedding, nn.Embedding):
            self.embedding = to_float32(self.embedding)
        if not isinstance(self.lm_head, nn.Linear):
            self.lm_head = to_float32(self.lm_head)

    def layer(self, index: int) -> nn.Module:
        """Returns a float32 copy of layer `index`; the last one is kept until another is read."""
        kept = self._kept.get(self.layers)
        if kept is None or kept[0] != index:
            del kept
            self._kept.pop(self.layers, None)
            kept = self._kept[self.layers] = index, self._copy(index)
            for parameter in self.layers[index].parameters():
                give_back(parameter)
        return kept[1]

    def _copy(self, index: int) -> nn.Module:
        layer, name = to_float32(self.layers[index]), self.family.map_multipliers.get(self.family.conv_in[0])
        if name is not None:
            restore_multipliers(getattr(layer, str(self.family.conv)), getattr(self.model.config, name.outputs))
        return layer

    def rows_of(self, table: nn.Embedding, tokens: Tensor) -> Tensor:
        """The rows [.., E] of tokens in a table, in float32."""
        if is_hollow(table.weight):
            return LazyMatrix(table.weight).rows(tokens.flatten()).view(*tokens.shape, -1)
        return super().rows_of(table, tokens).float()

    def logits(self, hidden: Tensor) -> Tensor:
        """Multiplies by the LM head, `HEAD_ROWS` of the vocabulary at a time."""
        weight, bias = self.lm_head.weight, self.lm_head.bias
        parts = LazyMatrix(weight)
        logits = hidden.new_empty(*hidden.shape[:-1], len(weight))
        for at in range(0, len(weight), HEAD_ROWS):
            rows = slice(at, at + HEAD_ROWS)
            logits[..., rows] = nn.functional.linear(hidden, parts.rows(rows))
        return self.finish_logits(logits if bias is None else logits + bias.float())


def to_float32(module: nn.Module) -> nn.Module:
    """Copies a module in float32 with its adapters merged; returns the module itself where that changes nothing."""
    has_adapters = any(isinstance(part, BaseTunerLayer) for part in module.modules())
    if not has_adapters and all(p.dtype == torch.float32 and not is_hollow(p) for p in module.parameters()):
        return module
    return _float32_copy(module, {})


def _float32_copy(module: nn.Module, copies: dict[int, nn.Module]) -> nn.Module:
    """A copy of modules, hooks and containers; configs and tensors in float32 are the module's own (copying them took
    ten times as long as the merge, which assigns new tensors). `copies`: those made so far, by `id`.
    """
    if id(module) in copies:
        return copies[id(module)]
    twin = module.__new__(type(module))
    twin.__dict__.update(
        {name: value.copy() if isinstance(value, dict | list) else value for name, value in vars(module).items()}
    )
    for name, parameter in module._parameters.items():
        if (stack := lazy_stack(parameter)) is not None:  # of all experts it would be most of the model's memory
            twin.__dict__[name] = stack
            del twin._parameters[name]
            continue
        twin._parameters[name] = None if parameter is None else nn.Parameter(_float32(parameter), False)
    for name, buffer in module._buffers.items():
        twin._buffers[name] = None if buffer is None else _float32(buffer)
    for name, child in module._modules.items():
        twin._modules[name] = None if child is None else _float32_copy(child, copies)
    if isinstance(twin, BaseTunerLayer):
        twin.merge(safe_merge=True)
        twin = twin.get_base_layer()
    copies[id(module)] = twin
    return twin


def _float32(tensor: Tensor) -> Tensor:
    if is_hollow(tensor):
        return read_lazily(tensor, torch.float32)
    return tensor.detach().float() if tensor.is_floating_point() else tensor


class LazyMatrix:
    """A table [rows, columns] in the dtype of its file, read in parts as float32 arrays; where each row of the tensor
    has several `parts`, these are the rows."""

    def __init__(self, tensor: Tensor, parts: int = 1) -> None:
        self.tensor, self.parts = tensor if is_hollow(tensor) else tensor.detach(), parts
        self.shape: tuple[int, int] = (tensor.shape[0] * parts, tensor.shape[1] // parts)

    def __getitem__(self, rows: slice | Array) -> Array:
        part: Array = self.rows(rows).numpy()
        return part

    def rows(self, rows: slice | Array | Tensor) -> Tensor:
        """Reads rows as a float32 tensor; gives a slice's pages of the file back."""
        if self.parts > 1:
            return self._rows_of_parts(rows)
        if is_hollow(self.tensor):
            return read_rows(self.tensor, rows)
        if not isinstance(rows, slice):
            return self.tensor[torch.as_tensor(rows)].float()
        part = self.tensor[rows]
        wide = part.float()
        give_back(part)
        return wide

    def _rows_of_parts(self, rows: slice | Array | Tensor) -> Tensor:
        count, whole = self.shape[0], LazyMatrix(self.tensor)
        if isinstance(rows, slice):
            first, last, _ = rows.indices(count)
            begin = first // self.parts
            found = whole.rows(slice(begin, -(-last // self.parts))).reshape(-1, self.shape[1])
            return found[first - begin * self.parts : last - begin * self.parts]
        numbers = torch.as_tensor(rows)
        found = whole.rows(numbers // self.parts).view(len(numbers), self.parts, -1)
        return found[torch.arange(len(numbers)), numbers % self.parts]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return self[:].astype(dtype or "float32", copy=False)


def give_back(part: Tensor) -> None:
    """Tells the system that a mapped part of a checkpoint is not needed for now: read again, it comes from its file."""
    if part.dtype == torch.float32 or not part.is_contiguous():  # in use as it is, or not a stretch of a file
        return
    first = -(-part.data_ptr() // PAGE) * PAGE
    length = (part.data_ptr() + part.nbytes - first) // PAGE * PAGE
    if length > 0 and (hint := _advice()) is not None:
        hint(ctypes.c_void_p(first), ctypes.c_size_t(length), PAGE_OUT)  # an older system refuses, and that is all


@cache
def _advice() -> Any:
    return getattr(ctypes.CDLL(None), "madvise", None) if sys.platform == "linux" else None
