"""A scope for graphs of standard operators whose texts and tokens are counted at run time.

As in `static_scope`, fused operators are lowered; shapes are not folded. Norms have the form that ONNX Runtime and
others recognise and fuse again at load. Covered by tests/export/graphs/test_plain_decoder_graph.py.
"""

from __future__ import annotations

from typing import Any

from streamspec.export.ops.builder import Scope
from streamspec.export.ops.static_scope import LOWERED, Lowering, StaticScope, after_sum

KEPT = ("Expand", "LayerNormalization", "Min")  # standard operators, of which `LOWERED` makes others


class PlainScope(StaticScope):
    """Nodes of a graph whose inputs have symbolic shapes."""

    def ops(
        self, kind: str, *inputs: str, out: tuple[str | None, ...], domain: str = "", **attributes: Any
    ) -> tuple[str, ...]:
        """Adds a node as `Scope.ops` does, lowered to standard operators, and infers what is known of its shapes."""
        if kind in PLAIN:
            return PLAIN[kind](self, *inputs, **attributes)
        names = Scope.ops(self, kind, *inputs, out=out, domain=domain, **attributes)
        self._infer(self.nodes[-1])
        return names


def _rms_norm(g: Scope, x: str, weight: str, *, epsilon: float, **_: Any) -> tuple[str]:
    mean = g.op("ReduceMean", g.op("Pow", x, g.number(2)), g.ints(-1), keepdims=1)
    return (g.op("Mul", g.op("Div", x, g.op("Sqrt", g.op("Add", mean, g.number(epsilon)))), weight),)


def _layer_norm(g: Scope, x: str, *weights: str, epsilon: float, **_: Any) -> tuple[str]:
    return (g.op("LayerNormalization", x, *weights, axis=-1, epsilon=epsilon),)


PLAIN: dict[str, Lowering] = {
    **{kind: lowering for kind, lowering in LOWERED.items() if kind not in KEPT},
    "SimplifiedLayerNormalization": _rms_norm,
    "SkipSimplifiedLayerNormalization": after_sum(_rms_norm),
    "SkipLayerNormalization": after_sum(_layer_norm),
}
