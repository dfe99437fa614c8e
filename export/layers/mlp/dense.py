"""Writes an MLP as nodes: the linear maps of the family, one for all rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamspec.export.ops.builder import Scope
from streamspec.export.quantization.precisions import Rows

if TYPE_CHECKING:
    from streamspec.export.layers.decoder import Decoder, Residual
    from streamspec.export.layers.heads import Linear


def dense(decoder: Decoder, g: Scope, normed: str, rows: Rows, layer: int, linear: Linear, residual: Residual) -> str:
    """The update that the MLP of a layer adds to rows."""
    family = decoder.spec.family
    return linear(g, linear(g, normed, rows, layer, family.up, activated=True), rows, layer, family.down)
