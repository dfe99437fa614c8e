"""Reads a base's tensors out of its safetensors files with numpy alone: mapped, in float32 where they are used.

tests/export/test_without_torch.py covers it.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from streamspec.adapters.base_models.generation_config import read_generation
from streamspec.adapters.base_models.weight_files import SafeTensor, stored_tensors
from streamspec.adapters.base_models.without_torch.config import read_completed
from streamspec.errors import BaseModelError
from streamspec.export.ops.builder import Array
from streamspec.export.spec.decoder_spec import DecoderSpec
from streamspec.export.spec.weight_source import PlainSource

FLOATS = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}  # BF16: the upper half of a float32's bits


def widened(values: Array) -> Array:
    """float32 of the numbers in a file; of 16-bit integers, which are bfloat16."""
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return np.asarray(values, np.float32)


class Checkpoint:
    """A Hugging Face folder: its config, and its tensors by their names. Raises BaseModelError for a family that needs
    PyTorch."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.config = folder, read_completed(folder)
        self.tensors: dict[str, SafeTensor] = {tensor.name: tensor for tensor in stored_tensors(folder)}
        self._files: dict[Path, Array] = {}

    @cached_property
    def generation(self) -> dict[str, Any]:
        """The generation config, empty where there is none."""
        return read_generation(self.folder)

    def stored(self, name: str) -> Array:
        """A tensor as it lies in its file, mapped; bfloat16 as uint16."""
        tensor = self.tensors[name]
        if tensor.dtype not in FLOATS:
            raise BaseModelError(f"{name} is of type {tensor.dtype}", ", ".join(FLOATS), "convert the base")
        mapped = self._files.setdefault(tensor.file, np.memmap(tensor.file, np.uint8, "r"))
        return mapped[tensor.start : tensor.start + tensor.size].view(FLOATS[tensor.dtype]).reshape(tensor.shape)


class StoredTable:
    """A table [rows, columns] in the dtype of its file, read in parts as float32 arrays."""

    def __init__(self, stored: Array) -> None:
        self.stored = stored
        self.shape: tuple[int, int] = (stored.shape[0], stored.shape[1])

    def __getitem__(self, rows: slice | Array) -> Array:
        return widened(self.stored[rows])

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
        array = widened(self.model.stored(name))
        return self.spec.in_graph(name if inside == name else inside.partition(".")[2], array)

    def rows_of(self, name: str) -> StoredTable:
        """Returns the LM head or the embedding."""
        return StoredTable(self.model.stored(name))

    def bias(self, name: str) -> Array | None:
        """Returns the bias `name`, or None."""
        return self.weight(name) if name in self.model.tensors else None
