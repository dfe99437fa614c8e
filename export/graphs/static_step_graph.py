"""Writes the static step graph of docs/guides/static-shapes.md: fixed shapes and standard operators alone.

It is for providers that compile one shape. `streamspec/step_graph.py` has its interface.

The same decoder, layer stack and drafters as in the dynamic graph, built in a scope that lowers their operators
(`static_scope`). One shape serves prompt chunks and padded trees. The cache is only read: the K/V of a call's rows are
outputs, of which the caller keeps those of accepted rows. The choice is greedy; sampling is a graph beside it
(`sampling.choice_graph`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import onnx

from streamspec.draft_tree import MASKED
from streamspec.export.drafters.draft_pass import Accepted
from streamspec.export.drafters.registry import row_of
from streamspec.export.graphs.layer_stack import ConvolvingStack, LayerRows, UnbranchedStack
from streamspec.export.layers.attention import attend, by_head, loaded, stored, window_out
from streamspec.export.layers.decoder import Decoder
from streamspec.export.layers.heads import Linear, Tables
from streamspec.export.layers.short_conv import Read, RowsBefore, beside_cache
from streamspec.export.layers.window_ring import Ring, ring_beside
from streamspec.export.ops.builder import Scope, WeightStore, declared, finish
from streamspec.export.ops.static_scope import StaticScope
from streamspec.export.quantization.precisions import Precision, Rows
from streamspec.export.quantization.static_precisions import StaticPrecision
from streamspec.export.spec.decoder_spec import DecoderSpec
from streamspec.export.spec.draft_spec import DraftSpec, graph_features
from streamspec.export.spec.weight_source import Source
from streamspec.layer_cache import DTYPES, LayerCache
from streamspec.step_graph import (
    CACHE_KINDS,
    CHOICES,
    INPUT_IDS,
    KEY,
    PAST_LENGTH,
    POSITION_IDS,
    RAW_LOGITS,
    STATIC,
    TREE_MASK,
    inputs,
    new_rows,
    outputs,
    past,
)


@dataclass
class StaticStepGraph:
    """A static graph. `rows`: of every call; `slots`: of the cache."""

    spec: DecoderSpec
    source: Source
    precision: StaticPrecision
    rows: int
    slots: int
    draft_spec: DraftSpec | None = None
    candidates: int = 10
    stream_weights: str = "merged"

    def build(self, store: WeightStore) -> onnx.ModelProto:
        """Writes the weights through `store`, closes it, and returns the graph."""
        draft_spec = self.draft_spec
        positions = self.slots + self.rows + (draft_spec.gamma if draft_spec else 0)
        decoder = TableDecoder(self.spec, self.source, self.precision, positions)
        features = graph_features(self.spec, draft_spec, self.candidates, rows=self.rows, slots=self.slots)
        graph_inputs, graph_outputs = declared(inputs(STATIC, features)), outputs(STATIC, features)
        g = StaticScope(store, graph_inputs, self.precision.opset)
        layers = _StaticLayers(g, decoder, draft_spec, self.rows, self.slots)
        final = layers.run(layers.positions)
        with g.named("head"):
            raw, _ = decoder.logits(g, final, layers.rows(), decoder.head_weight(), out=RAW_LOGITS)
            choices = g.op("ArgMax", raw, out=CHOICES, axis=-1, keepdims=0)
        if draft_spec is not None:
            drafter = row_of(draft_spec).nodes(decoder, draft_spec, self.candidates, self.stream_weights)
            for row, value in zip(drafter.outputs, layers.drafts(drafter, final, choices), strict=True):
                g.op("Identity", value, out=row.name)
        g.drop_unused([row.name for row in graph_outputs])
        assert all(g.shape(row.name) == row.dims for row in graph_outputs)
        return finish(g, graph_inputs, declared(graph_outputs), self.precision.opset)


class TableDecoder(Decoder):
    """Cosines and sines of all `positions` that can occur, baked."""

    def __init__(self, spec: DecoderSpec, source: Source, precision: Precision, positions: int) -> None:
        super().__init__(spec, source, precision)
        self.positions = positions

    def rotary(self, g: Scope, positions: str) -> Tables:
        return tuple(
            (self._rows_of(g, number, "cos", positions), self._rows_of(g, number, "sin", positions))
            for number in range(len(self.spec.rotaries))
        )

    def _rows_of(self, g: Scope, number: int, function: str, positions: str) -> str:
        kind, name = self.spec.rotaries[number], f"{self.rotary_prefix}rotary.{number}.{function}"
        if name not in g.store:
            angles = np.arange(self.positions, dtype=np.float32)[:, None] * kind.inv_freq
            table = getattr(np, function)(angles) * np.float32(kind.scale)
            if kind.growth is not None:
                beta, length = kind.growth
                times = np.arange(self.positions)[:, None] // length
                table = table * (1 + beta * np.log(1 + times)).astype(np.float32)
            g.store.add(name, table)
        return g.op("Gather", name, positions, axis=0)


@dataclass(frozen=True, kw_only=True)
class _AcceptedApart(Accepted):
    """Accepted over the past and the call's rows in two parts. `past_bias` [1, S]: 0 over slots in use."""

    past_bias: str

    def past_mask(self, g: Scope) -> str:
        return g.op("Concat", self.past_bias, g.op("Gather", self.tree_mask, self.node, axis=0), axis=1)

    def seen(
        self, g: Scope, spec: DecoderSpec, present: tuple[str, ...], ring: int | None = None
    ) -> list[tuple[str, str]]:
        past_key, past_value, key, value = present
        return [(past_key, past_value), (key, value)]


class _StaticLayers(UnbranchedStack, ConvolvingStack):
    """The layers over a cache that is only read."""

    g: StaticScope

    def __init__(self, g: StaticScope, decoder: Decoder, drafter: DraftSpec | None, rows: int, slots: int) -> None:
        super().__init__(g, decoder, drafter)
        self.count, self.slots = rows, slots
        self.numbers = g.ints(*range(rows))
        self.tokens, self.positions = (g.op("Squeeze", name, g.ints(0)) for name in (INPUT_IDS, POSITION_IDS))
        self.past_bias = self._past_bias()
        self._biases: dict[tuple[int | None, int], str] = {}
        self.rings: dict[int, Ring] = {}  # by window
        self.before: RowsBefore | None = None

    def rows(self) -> Rows:
        return Rows(self.g.ints(self.count))

    def attention(self, layer: int, state: LayerRows, linear: Linear) -> str:
        g, spec = self.g, self.spec
        q, *sides = self.decoder.queries_keys_values(g, state.normed, self.rows(), layer, state.rotary, linear)
        own = spec.at(layer)
        bias = self._bias(spec.windows[layer], spec.ring(layer) is not None, own.group)
        with g.named("attention"):
            source = spec.source(layer)
            self.presents.append(self.keep_rows(layer, sides) if source == layer else self.presents[source])
            past_key, past_value, key, value = self.presents[layer]
            return attend(g, own, q, [(past_key, past_value), (key, value)], bias)

    def keep_rows(self, layer: int, sides: Sequence[str], own: DecoderSpec | None = None) -> tuple[str, ...]:
        g, spec = self.g, self.spec
        new = [
            self._new_rows(partial(by_head, g, own or spec.at(layer), rows), layer, kind)
            for kind, rows in zip(CACHE_KINDS, sides, strict=True)
        ]
        return *(loaded(g, spec, past(layer, kind)) for kind in CACHE_KINDS), *new

    def _new_rows(self, shaped: Callable[[str | None], str], layer: int, kind: str) -> str:
        """Gives rows out that are `shaped` [1, heads, n, width]; returns them as the cache will hold them."""
        g, name, dtype = self.g, new_rows(layer, kind), self.spec.kept_in(layer, kind)
        if dtype == DTYPES[0]:
            return shaped(name)
        return loaded(g, self.spec, stored(g, dtype, shaped(None), out=name))

    def keep_inputs(self, layer: int, inputs: str) -> tuple[str, ...]:
        g = self.g
        return past(layer, KEY), self._new_rows(lambda out: g.op("Unsqueeze", inputs, g.ints(1), out=out), layer, KEY)

    def inputs_of(self, present: tuple[str, ...]) -> Read:
        return beside_cache(*present)

    def rows_before(self) -> RowsBefore:
        if self.before is None:
            self.before = RowsBefore(self.g, TREE_MASK, self.numbers, max(self.spec.conv_widths))
        return self.before

    def accepted(self, node: str, root: str, final: str) -> Accepted:
        return _AcceptedApart(
            node=node,
            node_in_call=node,
            root=root,
            entries=self.entries,
            final=final,
            positions=self.positions,
            tree_mask=TREE_MASK,
            visible=self.g.ints(self.slots + self.count),
            past_bias=self.past_bias,
            rings=self.rings,
            before=self.rows_before,
            inputs_of=self.inputs_of,
        )

    def _past_bias(self) -> str:
        """[1, S]: 0 over the first `past_length` slots."""
        g = self.g
        with g.named("bias"):
            used = g.op("Less", self._slots(), PAST_LENGTH)
            return g.op("Unsqueeze", g.op("Where", used, g.number(0), g.number(MASKED)), g.ints(0))

    def _bias(self, window: int | None, in_ring: bool, group: int) -> str:
        """[group * n, S + n], as `attend` takes it; `S` may be a ring's slots."""
        if (window, group) not in self._biases:
            g = self.g
            with g.named(f"bias.{window or 'full'}"):
                if window is not None and in_ring:
                    slots = LayerCache(window=window).slots(self.slots)
                    ring = self.rings[window] = ring_beside(g, slots, self.count, self.positions, TREE_MASK)
                    mask, columns = ring.sees, ring.positions
                else:
                    past_bias = g.op("Expand", self.past_bias, g.ints(self.count, self.slots))
                    mask = g.op("Concat", past_bias, TREE_MASK, axis=1)
                    columns = "" if window is None else g.op("Concat", self._slots(), self.positions, axis=0)
                if window is not None:
                    mask = window_out(g, mask, self.positions, g.op("Unsqueeze", columns, g.ints(0)), window)
                self._biases[window, group] = g.op("Tile", mask, g.ints(group, 1))
        return self._biases[window, group]

    def _slots(self) -> str:
        """int64 [S]: 0, 1, ..: of the past also the positions."""
        return self.g.store.once("slots", lambda: np.arange(self.slots))
