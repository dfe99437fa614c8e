"""Loads the model of a GGUF file by transformers, each tensor read where it is used: maps of the layers later than all
others.

Until then such a parameter is NaN, of one number's memory. tests/adapters/base_models/gguf/test_lazy_tensors.py
covers it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, GenerationConfig, PreTrainedModel

from streamspec.adapters.base_models.generation_config import GENERATION
from streamspec.adapters.base_models.gguf.converter import read_parameters
from streamspec.adapters.base_models.gguf.tensors import FolderTensor, Parameter, in_folder
from streamspec.adapters.base_models.text_part import load_causal_lm, quiet
from streamspec.adapters.base_models.weight_files import HEAD
from streamspec.model_families import FAMILIES

if TYPE_CHECKING:
    from streamspec.adapters.base_models.resolve import Base

LAZY = "lazy"  # the attribute of a torch parameter that has not been read
READ = "read"  # of a table that was read with the model, and is as in its file


@dataclass(frozen=True)
class LazyTensor:
    """A tensor in a GGUF file. transformers asks for it as for a slice of a safetensors file."""

    stored: FolderTensor
    dtype: torch.dtype

    def __getitem__(self, _: Any) -> Tensor:
        return self.read(self.dtype)

    def read(self, dtype: torch.dtype) -> Tensor:
        """The values, de-quantized and rounded to `dtype`, some rows at a time."""
        out = torch.empty(self.stored.shape, dtype=dtype)
        flat, at = out.view(-1), 0
        for values in self.stored.chunks():
            flat[at : at + values.size] = torch.from_numpy(values.reshape(-1))
            at += values.size
        return out


@dataclass(frozen=True)
class LazyStack:
    """The maps of a layer's experts in a GGUF file, each read where it is used."""

    stored: FolderTensor

    def __getitem__(self, number: Tensor | int) -> Tensor:
        return torch.from_numpy(self.stored.of_expert(int(number)))


@dataclass(frozen=True)
class Hollow:
    """NaN in a tensor's place, which takes the memory of one number."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __getitem__(self, _: Any) -> Tensor:
        return torch.full((), torch.nan, dtype=self.dtype).expand(self.shape)


def load_lazily(
    base: Base,
    dtype: torch.dtype,
    parameters: Mapping[str, Parameter] | None = None,
    hollow: bool = True,
    tables: bool = False,
    **options: Any,
) -> PreTrainedModel:
    """Loads the base's model in `dtype`, as `load_causal_lm`. Where the weights are in a GGUF file (`base.stored_in`)
    and `hollow`, its layers' maps are left there, for `fill` or `read_when_called`, and where `tables` embedding, head
    and the table of layers' own inputs, for `read_rows` or until they are called. `parameters`: of the file, as
    `read_parameters` gives them.
    """
    if base.stored_in is None:
        return load_causal_lm(base.path, dtype=dtype, **options)
    known = in_folder((parameters or read_parameters(base.stored_in, by_table=False)).values())
    lazy = {one.name: LazyTensor(one, dtype if len(one.shape) > 1 else torch.float32) for one in known}
    names = rf"\.\d+\.|^({'|'.join(tables_of(base.model_type))})$" if tables else r"\.\d+\."
    maps = [name for name, one in lazy.items() if len(one.stored.shape) > 1 and re.search(names, name)]
    later = {name: lazy[name] for name in maps if hollow}
    state = lazy | {name: Hollow(one.stored.shape, dtype) for name, one in later.items()}
    options |= {"attn_implementation": "eager", "experts_implementation": "eager"}
    with quiet():
        config = AutoConfig.from_pretrained(base.path)
        kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]  # the auto class would look for files
        model: PreTrainedModel = kind.from_pretrained(None, config=config, dtype=dtype, state_dict=state, **options)
    if (base.path / GENERATION).is_file():
        model.generation_config = GenerationConfig.from_pretrained(base.path)
    named = dict(model.named_parameters())
    for name in {*later, *(lazy.keys() & set(tables_of(base.model_type)))}:
        setattr(named[name], LAZY if name in later else READ, lazy[name])
    if tables:
        for name in {*later, HEAD} & {*tables_of(base.model_type)}:
            table = model.get_output_embeddings() if name == HEAD else model.get_submodule(name.rpartition(".")[0])
            table.register_forward_pre_hook(lambda module, _: fill(module.parameters()))
    return model


def tables_of(model_type: str) -> tuple[str, ...]:
    """The names of embedding, head and the table of layers' own inputs."""
    family = FAMILIES[model_type]
    own = (family.per_layer_input.table,) if family.per_layer_input else ()
    return *(f"{family.stack}.{table}.weight" for table in (family.embedding, *own)), HEAD


def is_hollow(parameter: Tensor) -> bool:
    """Tells whether a parameter is still in its file."""
    return hasattr(parameter, LAZY)


def lazy_stack(parameter: Tensor | None) -> LazyStack | None:
    """The experts' maps in a parameter that is still in its file; None for other parameters."""
    lazy: LazyTensor | None = getattr(parameter, LAZY, None)
    return LazyStack(lazy.stored) if lazy is not None and lazy.stored.stacked else None


def parameters_at_rest(model: nn.Module) -> dict[str, Parameter]:
    """What is still in its file, or a table as there, of the parameters that are the model's own, not those of a module
    that PEFT wrapped; experts' maps one by one."""
    found = dict[str, Parameter]()
    for name, parameter in model.named_parameters():
        lazy: LazyTensor | None = getattr(parameter, LAZY, getattr(parameter, READ, None))
        if lazy is not None and lazy.stored.name == name:
            found |= {one.name: one for part in lazy.stored.parts for one in (part, *part.sides)}
    return found


def read_lazily(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """The values of a parameter that is still in its file."""
    lazy: LazyTensor = getattr(parameter, LAZY)
    return lazy.read(dtype)


def read_rows(parameter: Tensor, rows: slice | NDArray[Any] | Tensor) -> Tensor:
    """Some rows of a table that is still in its file: float32 [rows, columns]."""
    lazy: LazyTensor = getattr(parameter, LAZY)
    return torch.from_numpy(lazy.stored.rows(rows if isinstance(rows, slice) else np.asarray(rows)))


def read_expert(parameter: Tensor, number: int, second: bool) -> Tensor:
    """A map of one expert out of a stack that is still in its file: float32 [out, in]; the `second` of its two."""
    lazy: LazyTensor = getattr(parameter, LAZY)
    parts = lazy.stored.parts
    return torch.from_numpy(parts[number * (len(parts) // len(parameter)) + second].values())


def fill(parameters: Iterable[Tensor]) -> None:
    """Reads the parameters that are still in their file, but for those that were given up; all may change then."""
    for parameter in parameters:
        parameter.__dict__.pop(READ, None)
        if is_hollow(parameter):
            if parameter.numel():
                parameter.data = read_lazily(parameter, parameter.dtype).to(parameter.device)
            delattr(parameter, LAZY)


def read_when_called(layers: nn.ModuleList) -> None:
    """From now on layers whose parameters are in their file read them for each call, and forget them after it."""

    def read(layer: nn.Module, *_: Any) -> None:
        for parameter in filter(is_hollow, layer.parameters()):
            parameter.data = read_lazily(parameter, parameter.dtype)

    def forget(layer: nn.Module, *_: Any) -> None:
        for parameter in filter(is_hollow, layer.parameters()):
            parameter.data = Hollow(parameter.shape, parameter.dtype)[...]

    for layer in layers:
        if any(map(is_hollow, layer.parameters())):
            layer.register_forward_pre_hook(read)
            layer.register_forward_hook(forget)
