"""A LoRA whose tensors are inputs of the graph: x A^T B^T beside a linear map, bit for bit the same for a row alone and
among others.

ONNX Runtime cannot pack weights that are inputs beforehand, and adds their products up otherwise for one row than for
several, and for few columns a thread than for many (tests/export/weights/test_lora_inputs.py). Three things mend it:

- its kernel for single rows is for products without a factor, so products have one (`FACTOR`);
- it adds in pieces whose length depends on the columns of a thread, but never in pieces shorter than `PIECE`: so x and
A are cut
  into pieces no longer than that, whose sums are added at last;
- where rows are quantised anyway (int8), A is of int8 too and reads their codes: sums of whole numbers have no order,
and A is a quarter as large.

B's sums are as long as the rank of a map, `PIECE` at most for this to hold. Rank 0 adds nothing. Knows nothing about
decoders.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from streamspec.export.ops.builder import Scope
from streamspec.export.quantization.arithmetic import NO_SATURATION, Array, quantise_rows

FACTOR = 0.5  # a power of two, which rounds nothing
PIECE = 128
Form = tuple[Any, tuple[int | str, ...]]  # numpy type and dimensions of an input; a name stands for any size


@dataclass(frozen=True)
class LowRank:
    """The update `label` of linear maps with one input [.., width], fused to one output. `outputs`: a label and the
    width of each.
    """

    label: str
    width: int
    outputs: tuple[tuple[str, int], ...]

    @property
    def piece(self) -> int:
        """Length of the pieces in which rows are read."""
        return next(size for size in range(min(PIECE, self.width), 0, -1) if self.width % size == 0)

    def forms(self, coded: bool) -> dict[str, Form]:
        """The inputs. `coded`: rows are read as codes. With several outputs their ranks are an input as well."""
        rank = f"{self.label}.rank"
        kinds: dict[str, Form] = {f"{label}.B": (np.float32, (f"{label}.rank", out)) for label, out in self.outputs}
        if len(self.outputs) > 1:
            kinds[f"{self.label}.ranks"] = np.int64, (len(self.outputs),)
        if coded:
            return kinds | {
                f"{self.label}.A": (np.int8, (self.width, rank)),
                f"{self.label}.A.scale": (np.float32, (rank,)),
            }
        return kinds | {f"{self.label}.A": (np.float32, (self.width // self.piece, self.piece, rank))}

    def tensors(self, pairs: Sequence[tuple[Array, Array] | None], coded: bool) -> dict[str, Array]:
        """What the inputs hold for A [r, width], B [out, r] of each output, or None."""
        ranks = [len(pair[0]) if pair else 0 for pair in pairs]
        if not any(ranks):
            return {}
        down = np.concatenate([pair[0] for pair in pairs if pair])
        out: dict[str, Array] = {f"{self.label}.ranks": np.asarray(ranks)} if len(pairs) > 1 else {}
        for (label, _), pair in zip(self.outputs, pairs, strict=True):
            if pair:
                out[f"{label}.B"] = pair[1].T / np.float32(FACTOR)
        if coded:
            codes, scale = quantise_rows(down, NO_SATURATION)
            return out | {f"{self.label}.A": codes.T, f"{self.label}.A.scale": scale}
        return out | {f"{self.label}.A": down.T.reshape(-1, self.piece, len(down)) / np.float32(FACTOR)}

    def of_rows(self, g: Scope, x: str) -> str:
        """x A^T [n, r] of rows [1, n, width]."""
        pieces = g.op("Reshape", x, g.ints(-1, self.width // self.piece, self.piece))
        sums = g.contrib("FusedMatMul", pieces, f"{self.label}.A", alpha=FACTOR, transBatchA=1)
        return g.op("ReduceSum", sums, g.ints(0), keepdims=0)

    def of_codes(self, g: Scope, codes: str) -> str:
        """The same [1, n, r] of rows' uint8 codes around 128."""
        one, middle = g.store.constant(1, np.float32), g.store.constant(128, np.uint8)
        return g.contrib("MatMulIntegerToFloat", codes, f"{self.label}.A", one, f"{self.label}.A.scale", middle)

    def added(self, g: Scope, product: str, inner: str) -> str:
        """`product` [1, n, out] and B applied to `inner`, what A gave."""
        parts = (
            [inner]
            if len(self.outputs) == 1
            else g.ops("Split", inner, f"{self.label}.ranks", out=(None,) * len(self.outputs), axis=-1)
        )
        updates = [
            g.contrib("FusedMatMul", part, f"{label}.B", alpha=FACTOR)
            for part, (label, _) in zip(parts, self.outputs, strict=True)
        ]
        return g.op("Add", product, updates[0] if len(updates) == 1 else g.op("Concat", *updates, axis=-1))
