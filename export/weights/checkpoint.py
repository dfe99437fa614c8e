"""Reads a base's tensors out of its safetensors files or its GGUF file with numpy alone: mapped, in float32 where they
are used.

tests/export/test_without_torch.py covers it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from streamspec.adapters.base_models.generation_config import read_generation
from streamspec.adapters.base_models.gguf.converter import read_drafting, read_parameters
from streamspec.adapters.base_models.gguf.file import JoinedTensor, StoredTensor
from streamspec.adapters.base_models.gguf.tensors import Parameter
from streamspec.adapters.base_models.parameters import stored_parameters
from streamspec.adapters.base_models.resolve import Base
from streamspec.adapters.base_models.weight_files import SafeTensor
from streamspec.adapters.base_models.without_torch.config import read_completed
from streamspec.errors import BaseModelError, ConfigError
from streamspec.export.file_blocks.kinds import KINDS, decode
from streamspec.export.ops.builder import Array
from streamspec.export.spec.decoder_spec import DecoderSpec
from streamspec.export.spec.weight_source import PlainSource, StoredBlocks
from streamspec.runtime.hardware import native_library

FLOATS = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}  # BF16: the upper half of a float32's bits


def widened(values: Array) -> Array:
    """float32 of the numbers in a file; of 16-bit integers, which are bfloat16."""
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return np.asarray(values, np.float32)


class Checkpoint:
    """A Hugging Face folder: its config, and its tensors by their names. Raises BaseModelError for a family that needs
    PyTorch."""

    tensors: Mapping[str, Any]

    def __init__(self, folder: Path) -> None:
        self.folder, self.config = folder, read_completed(folder)
        self.tensors = self._found()
        self._files: dict[Path, Array] = {}

    def _found(self) -> Mapping[str, Any]:
        return stored_parameters(self.folder)

    @cached_property
    def generation(self) -> dict[str, Any]:
        """The generation config, empty where there is none."""
        return read_generation(self.folder)

    def stored(self, name: str) -> Array:
        """A tensor as it lies in its file, mapped; bfloat16 as uint16."""
        tensor: SafeTensor = self.tensors[name]
        if tensor.dtype not in FLOATS:
            raise BaseModelError(f"{name} is of type {tensor.dtype}", ", ".join(FLOATS), "convert the base")
        if tensor.file not in self._files:
            self._files[tensor.file] = np.memmap(tensor.file, np.uint8, "r")
        return (
            self._files[tensor.file][tensor.start : tensor.start + tensor.size]
            .view(FLOATS[tensor.dtype])
            .reshape(tensor.shape)
        )

    def weight(self, name: str) -> Array:
        """A tensor in float32."""
        return widened(self.stored(name))

    def table(self, name: str) -> StoredTable:
        """A table whose rows are read where they are used."""
        stored = self.stored(name)
        return StoredTable(stored.shape, lambda rows: widened(stored[rows]))

    def blocks(self, name: str) -> StoredBlocks | None:
        """Rows of a linear map or a table as they lie in a GGUF file; None where there is none, or no such rows."""
        return None


class _BlockTensor(StoredTensor):
    """A tensor of blocks that the native library decodes, where it is there; the first row of each piece is compared
    with what the `gguf` package makes of it."""

    at_once = 1 << 20  # values: what is done for each piece in Python has its price

    def _dequantize(self, data: Array, out: Array) -> None:
        if self.kind_name not in KINDS or native_library.library() is None:
            return super()._dequantize(data, out)
        try:
            decode(KINDS[self.kind_name], data, out)
        except ConfigError:  # scales that float16 does not hold
            return super()._dequantize(data, out)
        first = np.empty_like(out[:1])
        super()._dequantize(data[:1], first)
        if not np.array_equal(out[:1], first, equal_nan=True):
            raise BaseModelError(
                f"{self.name}: blocks of {self.kind_name} that decode otherwise than by the gguf package",
                "the same weights",
                "set STREAMSPEC_NATIVE=0 and report this file",
            )


class _Layer(threading.local):
    """The de-quantized tensors of one layer, of each thread."""

    number = ""

    def __init__(self) -> None:
        self.tensors = dict[str, Array]()


class GgufCheckpoint(Checkpoint):
    """A GGUF file beside the folder of its config. De-quantized weights of a layer are kept until another is read."""

    def __init__(self, folder: Path, file: Path) -> None:
        self.file, self._kept = file, _Layer()
        super().__init__(folder)

    def _found(self) -> Mapping[str, Any]:
        return parameters_in(self.file)

    def stored(self, name: str) -> Array:
        """A tensor, de-quantized: float32."""
        number, kept = ".".join(part for part in name.split(".") if part.isdigit()), self._kept  # of an expert, too
        if number != kept.number:
            kept.number, kept.tensors = number, {}
        if name not in kept.tensors:
            kept.tensors[name] = self._parameter(name).values()
        return kept.tensors[name]

    def table(self, name: str) -> StoredTable:
        """A table whose rows are de-quantized where they are used; all at once where the file has them otherwise."""
        parameter = self._parameter(name)
        read = parameter.rows if parameter.change is None else lambda rows: self.stored(name)[rows]
        return StoredTable(parameter.shape, read)

    def blocks(self, name: str) -> StoredBlocks | None:
        """Rows of a linear map or a table as they lie in the file; None where a row is made of several."""
        return stored_blocks(self._parameter(name))

    def _parameter(self, name: str) -> Parameter:
        parameter: Parameter = self.tensors[name]
        return parameter


def stored_blocks(parameter: Parameter) -> StoredBlocks | None:
    """The rows of a linear map or a table as they lie in its file; None where a row is made of several."""
    data = parameter.blocks()
    return None if data is None else StoredBlocks(parameter.source.kind_name, data, parameter.source.shape[-1])


def in_graph(blocks: StoredBlocks | None, spec: DecoderSpec, name: str) -> StoredBlocks | None:
    """The rows of the weight `name`, if any, in the graph's order; None for one that the graph has multiplied."""
    module = name.removeprefix(f"{spec.stacked(spec.family.layers)}.").partition(".")[2]
    scaled = module.removesuffix(".weight") in spec.map_scales
    return None if blocks is None or scaled else replace(blocks, data=spec.in_graph(module, blocks.data))


def parameters_in(file: Path, by_table: bool = True) -> dict[str, Parameter]:
    """`read_parameters` of a GGUF file, whose blocks the native library decodes."""
    return _decoded(read_parameters(file, by_table))


def drafting_in(file: Path) -> dict[str, Parameter]:
    """`read_drafting` of a GGUF file, whose blocks the native library decodes."""
    return _decoded(read_drafting(file))


def _decoded(parameters: dict[str, Parameter]) -> dict[str, Parameter]:
    return {name: replace(one, source=_in_blocks(one.source)) for name, one in parameters.items()}


def _in_blocks(tensor: StoredTensor) -> StoredTensor:
    if isinstance(tensor, JoinedTensor):
        return replace(tensor, parts=tuple(map(_in_blocks, tensor.parts)))
    return _BlockTensor(**vars(tensor)) if type(tensor) is StoredTensor else tensor


def open_checkpoint(base: Base) -> Checkpoint:
    """The tensors of a base, in its folder or its GGUF file. Raises BaseModelError as `Checkpoint`."""
    file = base.gguf or base.stored_in
    return Checkpoint(base.path) if file is None else GgufCheckpoint(base.path, file)


class StoredTable:
    """A table [rows, columns] in its file, read in parts as float32 arrays."""

    def __init__(self, shape: tuple[int, ...], read: Callable[[Any], Array]) -> None:
        self.shape, self.read = (shape[0], shape[1]), read

    def __getitem__(self, rows: slice | Array) -> Array:
        return self.read(rows)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return self[:].astype(dtype or "float32", copy=False)


class CheckpointSource(PlainSource):
    """Weights of a checkpoint as float32 arrays, a `spec.weight_source.Source`."""

    def __init__(self, model: Checkpoint, spec: DecoderSpec) -> None:
        self.model, self.spec = model, spec
        self._prefix = f"{spec.stacked(spec.family.layers)}."

    def weight(self, name: str) -> Array:
        """Returns the weight or bias `name`, rows in the graph's order."""
        inside = name.removeprefix(self._prefix)
        array = self.model.weight(name)
        return self.spec.in_graph(name if inside == name else inside.partition(".")[2], array)

    def stored(self, name: str) -> StoredBlocks | None:
        """Returns the weight `name` as a GGUF file holds it, rows in the graph's order."""
        return in_graph(self.model.blocks(name), self.spec, name)

    def rows_of(self, name: str) -> StoredTable:
        """Returns the LM head or the embedding."""
        return self.model.table(name)

    def bias(self, name: str) -> Array | None:
        """Returns the bias `name`, or None."""
        return self.weight(name) if name in self.model.tensors else None
