"""Precisions whose weights lie in tiles, for bundles of a graph of native operators beside that of standard ones."""

from __future__ import annotations

from streamspec.export.native.layout import Unpacked, pack_int8
from streamspec.export.ops.builder import WeightStore
from streamspec.export.quantization.arithmetic import Array
from streamspec.export.quantization.precisions import Int8, Weight


class TiledInt8(Int8):
    """W8A8 over tiles."""

    def operator(self, store: WeightStore, weight: Weight) -> tuple[str, tuple[str, ...], dict[str, int]]:
        """See `streamspec.export.native.operators.TiledPrecision`."""
        return "LinearInt8", self._stored(store, weight, by_input=True), {}

    def table(self, store: WeightStore, weight: Weight) -> tuple[str, str, int]:
        """See `streamspec.export.native.operators.TiledPrecision`."""
        block = self.table_block(weight)
        return *self._stored(store, weight, by_input=False, block=block), block

    def _table(self, store: WeightStore, weight: Weight) -> tuple[str, str]:
        codes, scales, _ = self.table(store, weight)
        return Unpacked(store).table(codes, weight.rows, weight.columns), scales

    def _columns(self, store: WeightStore, weight: Weight) -> tuple[str, str]:
        codes, scales = self._stored(store, weight, by_input=True)
        return Unpacked(store).columns(codes, weight.rows, weight.columns, weight.gated), scales

    def _laid_out(self, codes: Array, weight: Weight, by_input: bool) -> Array:
        return pack_int8(codes, weight.gated)
