"""A LoRA whose tensors are inputs of the graph: x A^T B^T beside a linear map, bit for bit the same for a row alone and
among others.

ONNX Runtime cannot pack weights that are inputs beforehand, and adds their products up otherwise for one row than for
several, and for few columns a thread than for many (tests/export/quantization/test_lora_inputs.py). Three measures
prevent that:

- its kernel for single rows is for products without a factor, so products have one (`FACTOR`);
- it adds in pieces whose length depends on the columns of a thread, but never in pieces shorter than `PIECE`: so x and
  A are cut into pieces no longer than that, whose sums are added at last;
- where rows are quantized anyway (int8), A is of int8 too and reads their codes: sums of whole numbers have no order,
  and A is a quarter as large.

B's sums are as long as the rank of a map, `PIECE` at most for this to hold. Rank 0 adds nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from streamspec.export.ops.builder import Array, Scope
from streamspec.export.quantization.arithmetic import NO_SATURATION, quantize_rows
from streamspec.step_graph import LORA_A, LORA_A_SCALE, LORA_B, LORA_RANK, LORA_RANKS, GraphTensor, lora_name

FACTOR = 0.5  # a power of two, which rounds nothing
PIECE = 128


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

    def inputs(self, coded: bool) -> list[GraphTensor]:
        """The graph's inputs. `coded`: rows are read as codes. With several outputs their ranks are an input too."""
        rank, doc = lora_name(LORA_RANK, self.label), f"of the LoRA {self.label}"
        rows = [
            GraphTensor(lora_name(LORA_B, label), "float32", (lora_name(LORA_RANK, label), out), doc)
            for label, out in self.outputs
        ]
        if len(self.outputs) > 1:
            rows.append(GraphTensor(self._ranks, "int64", (len(self.outputs),), doc))
        if coded:
            codes = GraphTensor(self._a, "int8", (self.width, rank), doc)
            return [*rows, codes, GraphTensor(self._scale, "float32", (rank,), doc)]
        return [*rows, GraphTensor(self._a, "float32", (self.width // self.piece, self.piece, rank), doc)]

    @property
    def _a(self) -> str:
        return lora_name(LORA_A, self.label)

    @property
    def _scale(self) -> str:
        return lora_name(LORA_A_SCALE, self.label)

    @property
    def _ranks(self) -> str:
        return lora_name(LORA_RANKS, self.label)

    def tensors(self, pairs: Sequence[tuple[Array, Array] | None], coded: bool) -> dict[str, Array]:
        """Values of the inputs for A [r, width], B [out, r] of each output, or None."""
        ranks = [len(pair[0]) if pair else 0 for pair in pairs]
        if not any(ranks):
            return {}
        down = np.concatenate([pair[0] for pair in pairs if pair])
        out: dict[str, Array] = {self._ranks: np.asarray(ranks)} if len(pairs) > 1 else {}
        for (label, _), pair in zip(self.outputs, pairs, strict=True):
            if pair:
                out[lora_name(LORA_B, label)] = pair[1].T / np.float32(FACTOR)
        if coded:
            codes, scale = quantize_rows(down, NO_SATURATION)
            return out | {self._a: codes.T, self._scale: scale}
        return out | {self._a: down.T.reshape(-1, self.piece, len(down)) / np.float32(FACTOR)}

    def of_rows(self, g: Scope, x: str) -> str:
        """x A^T [n, r] of rows [1, n, width]."""
        pieces = g.op("Reshape", x, g.ints(-1, self.width // self.piece, self.piece))
        sums = g.contrib("FusedMatMul", pieces, self._a, alpha=FACTOR, transBatchA=1)
        return g.op("ReduceSum", sums, g.ints(0), keepdims=0)

    def of_codes(self, g: Scope, codes: str) -> str:
        """x A^T [1, n, r] of rows given as uint8 codes around 128."""
        one, middle = g.number(1), g.store.constant(128, np.uint8)
        return g.contrib("MatMulIntegerToFloat", codes, self._a, one, self._scale, middle)

    def added(self, g: Scope, product: str, inner: str) -> str:
        """Adds B applied to `inner`, the output of A, to `product` [1, n, out]."""
        parts = (
            [inner]
            if len(self.outputs) == 1
            else g.ops("Split", inner, self._ranks, out=(None,) * len(self.outputs), axis=-1)
        )
        updates = [
            g.contrib("FusedMatMul", part, lora_name(LORA_B, label), alpha=FACTOR)
            for part, (label, _) in zip(parts, self.outputs, strict=True)
        ]
        return g.op("Add", product, updates[0] if len(updates) == 1 else g.op("Concat", *updates, axis=-1))
