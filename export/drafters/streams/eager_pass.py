"""Eager speculative streams: gamma rows beside every node, in the pass that verifies the tree (Speculative Streaming,
section 3.2.2). After acceptance only the accepted node's are left, and the head is all that still runs.

From layer N-Ns on the rows of a call are the nodes and their streams: one linear map for all of them, attention apart,
as main rows must not see streams. What a stream sees is what it sees deferred, so its candidates are the same. It
starts before its root is known: the root counts through the bigram alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from onnx import TensorProto

from streamspec.errors import ConfigError
from streamspec.export.drafters.draft_pass import Accepted
from streamspec.export.drafters.streams.draft_pass import StreamPass, StreamRows, stream_update
from streamspec.export.layers.decoder import Residual
from streamspec.export.ops.builder import Scope
from streamspec.export.ops.static_scope import StaticScope
from streamspec.export.quantization.precisions import Rows
from streamspec.export.spec.decoder_spec import DecoderSpec
from streamspec.export.spec.draft_spec import DraftSpec
from streamspec.step_graph import EAGER

if TYPE_CHECKING:
    from streamspec.export.graphs.layer_stack import LayerRows


def eager(drafter: DraftSpec | None, spec: DecoderSpec) -> DraftSpec:
    """The drafter as eager streams. Raises ConfigError for one that cannot be, and for layers that do not allow it."""
    found = "no streams" if drafter is None else drafter.not_eager
    if not found and any(spec.conv_widths):
        found = f"the short convolutions of {spec.model_type}"
    if drafter is not None and not found:
        return replace(drafter, eager=True)
    raise ConfigError(
        f"--streams {EAGER} with {found}",
        "streams of `train --method streaming --no-root-token`, over layers of attention",
        f"leave --streams {EAGER} out, or train such streams",
    )


class Stacked:
    """Lays out the rows of a call and their streams: all main rows, then the streams of the first node, of the second,
    .. `main`, `streams`: how many there are."""

    main: Callable[[], Rows]
    streams: Rows

    def __init__(self) -> None:
        self._together: dict[str, tuple[str, Rows]] = {}

    def count(self, g: Scope, ids: str) -> Rows:
        """The rows int64 `ids`."""
        return Rows(g.op("Shape", ids))

    def rows(self, g: Scope) -> Rows:
        """Main rows and streams together."""
        return self._counted(g)[1]

    def _counted(self, g: Scope) -> tuple[str, Rows]:
        """int64 [2], how many main rows and streams, and both together."""
        sides = self.main().count, self.streams.count
        if sides[0] not in self._together:
            self._together[sides[0]] = g.op("Concat", *sides, axis=0), Rows(g.op("Add", *sides))
        return self._together[sides[0]]

    def split(self, g: Scope, x: str, axis: int = 1) -> tuple[str, str]:
        """Main rows and streams apart."""
        main, streams = g.ops("Split", x, self._counted(g)[0], out=(None, None), axis=axis)
        return main, streams

    def join(self, g: Scope, main: str, streams: str, axis: int = 1) -> str:
        """Main rows and streams [.., rows, ..] together."""
        return g.op("Concat", main, streams, axis=axis)


class Interleaved(Stacked):
    """Each node before its `gamma` streams, where a scope knows all sizes but the number of nodes: none is counted."""

    def __init__(self, gamma: int) -> None:
        super().__init__()
        self.sizes = 1, gamma

    def count(self, g: Scope, ids: str) -> Rows:
        return Rows("")

    def rows(self, g: Scope) -> Rows:
        return Rows("")

    def split(self, g: Scope, x: str, axis: int = 1) -> tuple[str, str]:
        width = _known(g, x, axis)
        groups = g.op("Reshape", x, g.ints(-1, sum(self.sizes), *width))
        main, streams = g.ops("Split", groups, g.ints(*self.sizes), out=(None, None), axis=1)
        shape = g.ints(*(1,) * axis, -1, *width)
        return g.op("Reshape", main, shape), g.op("Reshape", streams, shape)

    def join(self, g: Scope, main: str, streams: str, axis: int = 1) -> str:
        width = _known(g, main, axis)
        sides = zip((main, streams), self.sizes, strict=True)
        groups = g.op("Concat", *(g.op("Reshape", x, g.ints(-1, size, *width)) for x, size in sides), axis=1)
        return g.op("Reshape", groups, g.ints(*(1,) * axis, -1, *width))


def _known(g: Scope, x: str, axis: int) -> tuple[int, ...]:
    """The sizes of x after an axis, before which all are 1."""
    assert isinstance(g, StaticScope)
    return g.shape(x)[axis + 1 :]


class EagerPass(StreamPass):
    """Streams beside several nodes: `begin` adds their rows to the main rows, `main_heads` and `mixed` are the
    attention of both, `end` keeps the streams' states until a node is accepted."""

    states = ""  # [r * m, H], finished

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.layout = Stacked()

    def begin(self, g: Scope, state: LayerRows, nodes: Accepted, stream_ids: str, main: Callable[[], Rows]) -> None:
        """Adds the rows `stream_ids` [m] beside each of `nodes.node` int64 [r] to the `main` rows of `state`, which may
        become fewer."""
        row = g.op("Unsqueeze", stream_ids, g.ints(0))
        none = g.op("Sub", row, row)

        def each(node: str) -> str:
            return g.op("Reshape", g.op("Add", g.op("Unsqueeze", node, g.ints(1)), none), g.ints(-1))

        column = g.op("Unsqueeze", g.op("Sub", nodes.node, nodes.node), g.ints(1))
        ids = g.op("Reshape", g.op("Add", column, row), g.ints(-1))
        below = nodes.below and replace(nodes.below, node=each(nodes.below.node), several=True)
        group = replace(nodes, node=each(nodes.node), below=below, several=True)
        layout, self._heads = self.layout, ("", "", "")
        layout.main, layout.streams = main, layout.count(g, ids)
        self.group = StreamRows(self, g, group, ids, layout.streams)
        normed, residual = self.decoder.enter(g, Residual(self.start(g, group, ids)), self.first)
        state.normed = layout.join(g, state.normed, normed)
        state.residual = Residual(layout.join(g, state.residual.stream, residual.stream))
        state.rotary = self.decoder.rotary(g, layout.join(g, nodes.positions, self.group.positions, axis=0))
        if given := state.per_layer_inputs:  # streams have no token, and their part is zero
            zero = g.op("Cast", g.op("Unsqueeze", g.op("Sub", ids, ids), g.ints(0, 2)), to=TensorProto.FLOAT)
            wide = g.op("Concat", g.ints(1, 1), g.op("Shape", given, start=2), axis=0)
            state.per_layer_inputs = layout.join(g, given, g.op("Expand", zero, wide))

    def rows(self, g: Scope) -> Rows:
        """Main rows and streams together."""
        return self.layout.rows(g)

    def main_heads(self, g: Scope, heads: tuple[str, str, str]) -> tuple[str, str, str]:
        """The main rows' part of q, k and v ('' for none); keeps the streams'."""
        (q, *sides), self._heads = zip(*(self.layout.split(g, x) if x else ("", "") for x in heads), strict=True)
        return q, *sides

    def mixed(self, g: Scope, layer: int, main: str, present: tuple[str, ...]) -> str:
        """[1, rows, Hq*D]: attention of the `main` rows, and that of the streams whose heads are kept."""
        return self.layout.join(g, main, self.group.mixed(g, layer, *self._heads, present))

    def picked(self, g: Scope, x: str, rows: str) -> str:
        """The main rows int64 `rows` of x [1, n, ..], and all streams."""
        main, streams = self.layout.split(g, x)
        return self.layout.join(g, g.op("Gather", main, rows, axis=1), streams)

    def end(self, g: Scope, states: str) -> str:
        """The main rows' finished states [r, H] of all rows'; keeps the streams'."""
        main, self.states = self.layout.split(g, states, axis=0)
        return main

    def linear_of_all(
        self, g: Scope, x: str, rows: Rows, layer: int, modules: tuple[str, ...], activated: bool = False
    ) -> str:
        """The maps of main rows and streams: one product, and for the streams' own LoRA one of low rank."""
        decoder, layout = self.decoder, self.layout
        if not any((layer, module) in self.spec.lora for module in modules):
            return decoder.linear(g, x, rows, layer, modules, activated)
        main, streams = layout.split(g, decoder.linear(g, x, rows, layer, modules))
        update = stream_update(decoder, self.spec, g, layout.split(g, x)[1], layer, modules)
        total = layout.join(g, main, g.op("Add", streams, update))
        return decoder.activated(g, total, layer, decoder.fused(layer, modules).rows // 2) if activated else total

    def logits(self, g: Scope, accepted: Accepted, presents: list[tuple[str, ...]], stream_ids: str) -> str:
        """The head over the accepted node's streams: [m, D]."""
        each = g.op("Concat", g.ints(-1), g.op("Shape", stream_ids), g.op("Shape", self.states, start=1), axis=0)
        own = g.op("Gather", g.op("Reshape", self.states, each), accepted.node_in_logit_rows, axis=0)
        with g.named("head"):
            return self.head(g, g.op("Squeeze", own, g.ints(0)), Rows(g.op("Shape", stream_ids)))
