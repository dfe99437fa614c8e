"""The interface by which the exporter reads weights, whatever scales or drafters change about them on the way. Covered
by the tests of `load_weights`, `smoothing` and the drafters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from streamspec.export.ops.builder import Array

Blocks = tuple[Array, Array, Array]  # of 4 bits: packed codes, scales, zero points, as MatMulNBits reads them


@dataclass(frozen=True)
class StoredBlocks:
    """Rows of a linear map as a GGUF file holds them. `kind`: ggml's name of their type, such as Q4_K; `data`: uint8
    [out, bytes of a row], mapped, rows in the graph's order; `columns`: inputs."""

    kind: str
    data: Array
    columns: int


class Table(Protocol):
    """A table [rows, columns], read in parts as float32 arrays."""

    shape: tuple[int, int]

    def __getitem__(self, rows: slice | Array) -> Array:
        """Reads rows."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        """Reads everything."""


class Source(Protocol):
    """A source of weights: arrays float32 under Hugging Face names, linear maps [out, in] with rows in the graph's
    order (`DecoderSpec.row_order`), None for a bias that does not exist."""

    def weight(self, name: str) -> Array:
        """Returns the weight `name`."""

    def rows_of(self, name: str) -> Table:
        """Returns a table, such as the embedding, to be read part by part."""

    def bias(self, name: str) -> Array | None:
        """Returns the bias `name`, or None."""

    def mixed(self, module: str) -> int:
        """Returns the size of blocks in which a linear map's inputs are mixed (`arithmetic.hadamard`); 0: not."""

    def importance(self, module: str) -> Array | None:
        """Returns how much each input [in] of a linear map counts where its weight is rounded; None: all the same."""

    def rounded(self, modules: Sequence[str]) -> Blocks | None:
        """Returns 4 bits of the fused map of `modules`; None where it is not known how they are rounded."""

    def stored(self, name: str) -> StoredBlocks | None:
        """Returns the weight `name` as a GGUF file holds it; None where it is of no such file, or changed."""

    def stored_table(self, name: str) -> StoredBlocks | None:
        """Returns a table as a GGUF file holds it; None where it is of no such file."""


def stored_runs(source: Source, names: Sequence[str]) -> Sequence[StoredBlocks] | None:
    """Returns the rows of these weights, one after the other, as a GGUF file holds them; None unless all are so."""
    runs = [run for name in names if (run := source.stored(name)) is not None]
    return runs if len(runs) == len(names) else None


class PlainSource:
    """A source of weights that no text has scaled, weighed or rounded."""

    def mixed(self, module: str) -> int:
        """Returns 0: inputs are as the model has them."""
        return 0

    def importance(self, module: str) -> Array | None:
        """Returns None: nothing was measured."""
        return None

    def rounded(self, modules: Sequence[str]) -> Blocks | None:
        """Returns None: nothing was rounded."""
        return None

    def stored(self, name: str) -> StoredBlocks | None:
        """Returns None: of no GGUF file, or changed."""
        return None

    def stored_table(self, name: str) -> StoredBlocks | None:
        """Returns a table as `stored` does."""
        return self.stored(name)


class ChangedSource(PlainSource):
    """Passes tables and biases of another source on; subclasses change its weights."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def rows_of(self, name: str) -> Table:
        """Returns a table unchanged."""
        return self.source.rows_of(name)

    def stored_table(self, name: str) -> StoredBlocks | None:
        """Returns a table unchanged."""
        return self.source.stored_table(name)

    def bias(self, name: str) -> Array | None:
        """Returns the bias `name`, or None."""
        return self.source.bias(name)

    def mixed(self, module: str) -> int:
        """Returns the size of blocks in which a linear map's inputs are mixed."""
        return self.source.mixed(module)

    def importance(self, module: str) -> Array | None:
        """Returns how much each input of a linear map counts."""
        return self.source.importance(module)


class MergedSource(ChangedSource):
    """Another source's weights plus low-rank `updates`, by their names: A [r, in] and B [out, r]."""

    def __init__(self, source: Source, updates: Mapping[str, tuple[Array, Array]]) -> None:
        super().__init__(source)
        self.updates = updates

    def weight(self, name: str) -> Array:
        """Returns the weight plus its update, if any."""
        weight = self.source.weight(name)
        if name not in self.updates:
            return weight
        a, b = self.updates[name]
        return weight + b @ a
