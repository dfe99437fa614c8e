"""Writes the dynamic step graph: main rows over the cache, sampling, acceptance, then drafts where there is a drafter.
`streamspec/step_graph.py` has its interface.

Main rows attend under an additive bias [past zeros ; tree mask] shared by all layers (`attention`); rotary embeddings
are separate nodes with explicit positions, and the cache is bound in place by the caller. Sliding windows are part of
the bias and follow true positions: a tree uses more slots than positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto

from streamspec.bundle.manifest import SwappableCapacity
from streamspec.draft_tree import DraftTree
from streamspec.export.drafters.draft_pass import Accepted, DraftPass
from streamspec.export.drafters.registry import row_of
from streamspec.export.drafters.streams.eager_pass import EagerPass
from streamspec.export.graphs.layer_stack import ConvolvingStack, LayerRows
from streamspec.export.graphs.swappable_step_graph import SwappableDecoder, SwappableStore, SwappableStreams
from streamspec.export.layers.acceptance import deepest_standing, unless_forced
from streamspec.export.layers.attention import RowExactAttention, window_out
from streamspec.export.layers.decoder import Decoder, Residual
from streamspec.export.layers.early_exit_pruning import EarlyExit
from streamspec.export.layers.heads import Linear
from streamspec.export.layers.recurrent.recurrent_state import RecurrentLayer, StateRows, native_mix
from streamspec.export.layers.sampling import TokenSampler
from streamspec.export.layers.short_conv import Read, RowsBefore, from_cache, native_conv
from streamspec.export.layers.window_ring import Ring, ring_after
from streamspec.export.native.operators import NativeOps
from streamspec.export.ops.builder import Scope, WeightStore, declared, finish
from streamspec.export.quantization.precisions import Precision, Rows
from streamspec.export.spec.decoder_spec import DecoderSpec, Skipped, StateSizes
from streamspec.export.spec.draft_spec import DraftSpec, graph_features
from streamspec.export.spec.weight_source import Source
from streamspec.layer_cache import LAYER_KINDS, UPDATE
from streamspec.step_graph import (
    CACHE_KINDS,
    CHOICES,
    DYNAMIC,
    EAGER,
    ENTERED,
    FORCED_NODE,
    FORCED_ROOT,
    HIDDEN_STATES,
    INPUT_IDS,
    KEY,
    LOGIT_ROWS,
    LOGIT_SCALE,
    NEXT_IDS,
    PARENTS,
    PAST_LENGTH,
    POSITION_IDS,
    RAW_LOGITS,
    STREAM_IDS,
    STREAMS,
    TREE_MASK,
    inputs,
    outputs,
    past,
)


@dataclass
class StepGraph:
    """A step graph. `tree`: the exported default for the tree's inputs. `room`: the graph is of the base
    alone, with capacity for adapters; `draft_spec` then has empty tensors, `build` writes through a `SwappableStore`.
    `embeddings`: it gives the states that the head reads."""

    spec: DecoderSpec
    source: Source
    precision: Precision
    draft_spec: DraftSpec | None = None
    tree: DraftTree | None = None
    candidates: int = 10
    stream_weights: str = "merged"
    room: SwappableCapacity | None = None
    embeddings: bool = False

    def build(self, store: WeightStore, native: NativeOps | None = None, first: bool = False) -> onnx.ModelProto:
        """Writes the weights through `store`, closes it, and returns the graph. `native`: the graph of native
        operators, after which the store stays open for the other one, as it does after a `first` one."""
        return _Builder(self, store, native).build(first)

    def without(self, skipped: Skipped) -> StepGraph:
        """The graph without some layers, or halves of them, and without a drafter, over the same weights."""
        return replace(self, spec=self.spec.without(skipped), draft_spec=None, tree=None, embeddings=False)


@dataclass
class _RowGroup:
    """The rows of a group of layers: all of them, or above the early exit those that went on.

    `logit_rows` [r]: which of the rows get logits; `slots` [r]: where their choices belong among those of the call.
    """

    rows: Rows
    tokens: str  # int64 [n]
    positions: str  # int64 [n]
    tree_mask: str  # [n, n]
    parents: str  # int64 [r]
    logit_rows: str
    visible: str  # int64 [1]: slots of the cache in use after this call, L + n
    attention: RowExactAttention
    surviving: str = ""  # int64 [n]: numbers of these rows among all, '' for all of them
    slots: str = ""
    biases: dict[int | None, str] = field(default_factory=dict)
    biases_below: dict[int | None, str] = field(default_factory=dict)  # over keys of layers below the early exit
    rings: dict[int, Ring] = field(default_factory=dict)  # by window
    before: RowsBefore | None = None  # where there are convolutions
    states: StateRows | None = None  # where there are recurrent states


class _Layers(ConvolvingStack):
    """The layers over a cache that is written in place; rows leave it at the early exit, and before the last MLP all
    that need no logits."""

    def __init__(self, g: Scope, decoder: Decoder, drafter: DraftSpec | None, eager: EagerPass | None = None) -> None:
        super().__init__(g, decoder, drafter)
        self._eager, native = eager, decoder.native
        self.several = native is not None and native.takes_several(self.spec, drafter)  # sequences in a call
        self._longest = g.op("ReduceMax", PAST_LENGTH, keepdims=1) if self.several else PAST_LENGTH
        pruning = drafter.pruning if drafter is not None else None
        self.exit = EarlyExit(decoder, pruning) if pruning is not None else None
        self.exit_layer = (drafter and drafter.exit_layer(self.spec.layers)) or 0
        rows = Rows(g.op("Shape", INPUT_IDS, start=1))
        visible = g.op("Add", PAST_LENGTH, rows.count)
        self.batch = _RowGroup(
            rows=rows,
            tokens=g.op("Squeeze", INPUT_IDS, g.ints(0)),
            positions=g.op("Squeeze", g.op("Min", POSITION_IDS, g.ints(self.spec.context_length - 1)), g.ints(0)),
            tree_mask=TREE_MASK,
            parents=PARENTS,
            logit_rows=LOGIT_ROWS,
            visible=visible,
            attention=RowExactAttention(g, self.spec, visible),
        )
        self.below: _RowGroup | None = None  # the rows before the early exit
        self._going_on = rows

    def rows(self) -> Rows:
        return self._going_on

    def entering(self, layer: int, state: LayerRows) -> None:
        if layer == self.exit_layer and self.exit is not None:
            self._prune(self.exit, state)
        if layer == self.first and self._eager is not None:
            nodes, self.entries[layer] = self.batch.logit_rows, state.residual.stream
            self.join(self._eager, state, self.accepted(nodes, self.in_call(self.g, nodes)))

    def _prune(self, early_exit: EarlyExit, state: LayerRows) -> None:
        g = self.g
        self.below, self.batch = self.batch, self._surviving(early_exit, state.residual.stream)
        state.normed, stream = (
            g.op("Gather", x, self.batch.surviving, axis=1) for x in (state.normed, state.residual.stream)
        )
        state.residual = Residual(stream)
        if state.per_layer_inputs:
            state.per_layer_inputs = g.op("Gather", state.per_layer_inputs, self.batch.surviving, axis=1)
        state.rotary = self.decoder.rotary(g, self.batch.positions)
        self._going_on = self.batch.rows

    def attention(self, layer: int, state: LayerRows, linear: Linear) -> str:
        batch, decoder, native = self.batch, self.decoder, self.decoder.native
        window, ring, source = self.spec.windows[layer], self.spec.ring(layer), self.spec.source(layer)
        if self.below is not None and source < self.exit_layer:
            bias, used = self._bias_below(self.below, ring or window, ring)
        else:
            bias = self._bias(window) if ring is None else self._ring_bias(source, ring)
            used = "" if ring is None else batch.rings[ring].used
        sizes = self.spec.at(layer)
        if native is not None and native.attends(sizes):
            heads = decoder.packed_heads(self.g, state.normed, batch.rows, layer, state.rotary, linear)
            if source != layer:
                self.presents.append(self.presents[source])
                return native.draft_attention(self.g, sizes, heads, bias, self.presents[layer], own=False)
            mixed, written = native.attention(self.g, sizes, heads, bias, layer, self.several)
            self.presents.append(written)
            return mixed
        q, *sides = self.heads(layer, state, linear)
        with self.g.named("attention"):
            self.presents.append(self.keep_rows(layer, sides) if source == layer else self.presents[source])
            key, value = self.presents[layer]
            return self.with_streams(
                layer, batch.attention.mix(q, key, value, bias, used, layer, decoder.sinks(self.g, layer))
            )

    def keep_rows(self, layer: int, sides: Sequence[str], own: DecoderSpec | None = None) -> tuple[str, ...]:
        kinds = zip(sides, CACHE_KINDS, strict=True)
        return tuple(self.batch.attention.append(rows, layer, kind, own) for rows, kind in kinds)

    def convolution(self, layer: int, state: LayerRows) -> str:
        g, native = self.g, self.decoder.native
        if self.spec.state is not None:
            return self._recurrent(layer, state, self.spec.state)
        if native is None or not native.convolves(self.spec.conv_widths[layer]):
            return super().convolution(layer, state)
        with g.named("conv"):
            mask = self.batch.tree_mask
            mixed, written = native_conv(native, self.decoder, g, state.normed, self.rows(), mask, layer)
            self.presents.append((written,))
            return mixed

    def _recurrent(self, layer: int, state: LayerRows, sizes: StateSizes) -> str:
        """As `convolution`, of a layer with a recurrent state."""
        g, batch, native, recurrent = self.g, self.batch, self.decoder.native, self.spec.family.recurrent
        assert recurrent is not None
        if len(self.presents) == layer:  # nothing beside it that drafters read
            self.presents.append(())
        taps = self.spec.conv_widths[layer]
        if native is not None and native.remembers(recurrent.kind, sizes, taps) and not self.spec.norm_first:
            with g.named("recurrent"):
                return native_mix(native, self.decoder, g, state.normed, self.rows(), layer)
        if batch.states is None:
            with g.named("states"):
                ring = past(layer, self.spec.state_part(layer, KEY))
                slots, before = g.op("Shape", ring, start=2, end=3), self.rows_before()
                solved = UPDATE in LAYER_KINDS[recurrent.kind].parts
                batch.states = StateRows(g, slots, batch.visible, batch.positions, batch.tree_mask, before, solved)
        with g.named("recurrent"):
            made = RecurrentLayer(g, self.decoder, batch.attention, batch.states, layer)
            return made.mix(state.normed, self.rows())

    def keep_inputs(self, layer: int, inputs: str) -> tuple[str, ...]:
        return (self.batch.attention.keep(self.g.op("Unsqueeze", inputs, self.g.ints(1)), layer, KEY),)

    def inputs_of(self, present: tuple[str, ...]) -> Read:
        return from_cache(*present)

    def rows_before(self) -> RowsBefore:
        batch, g = self.batch, self.g
        if batch.before is None:
            batch.before = RowsBefore(g, batch.tree_mask, g.arange(batch.rows.count), max(self.spec.conv_widths))
        return batch.before

    def leaving(self, layer: int, state: LayerRows) -> None:
        if layer != self.spec.layers - 1 or self.taps_final:
            return
        g, logit_rows = self.g, self.batch.logit_rows
        state.mixed = [self.picked(x, logit_rows) for x in state.mixed]
        state.normed, stream = (self.picked(x, logit_rows) for x in (state.normed, state.residual.stream))
        if state.per_layer_inputs:
            state.per_layer_inputs = self.picked(state.per_layer_inputs, logit_rows)
        state.residual = Residual(stream)
        self._going_on = Rows(g.op("Shape", logit_rows))

    def in_call(self, g: Scope, nodes: str) -> str:
        """int64: the indices of rows `nodes` among all rows of the call, pruned ones too."""
        return g.op("Gather", self.batch.surviving, nodes, axis=0) if self.batch.surviving else nodes

    def accepted(self, node: str, node_in_call: str, **more: Any) -> Accepted:
        """The values that drafting reads of row `node`, of the call's rows `node_in_call`; `more`: its root, its
        finished state and its index among the rows with logits."""
        batch, every = self.batch, self.below
        accepted = Accepted(
            node=node,
            node_in_call=node_in_call,
            entries=self.entries,
            positions=batch.positions,
            tree_mask=batch.tree_mask,
            visible=batch.visible,
            rings=batch.rings,
            before=self.rows_before,
            inputs_of=self.inputs_of,
            **more,
        )
        if every is None:
            return accepted
        below = replace(accepted, node=node_in_call, positions=every.positions, tree_mask=every.tree_mask)
        return replace(accepted, below=replace(below, visible=every.visible, rings=every.rings))

    def with_logits(self, finished: str) -> str:
        self._going_on = Rows(self.g.op("Shape", self.batch.logit_rows))
        return self.g.op("Gather", finished, self.batch.logit_rows, axis=1)

    def _surviving(self, early_exit: EarlyExit, entry: str) -> _RowGroup:
        """The rows that go on after the early exit at entry [1, n, H]."""
        g, below = self.g, self.batch
        with g.named("prune"):
            surviving, logit_rows, parents, slots = early_exit.add(g, entry, below.rows.count, below.tokens)
            rows = Rows(g.op("Shape", surviving))
            visible = g.op("Add", PAST_LENGTH, rows.count)
            return _RowGroup(
                rows=rows,
                tokens=g.op("Gather", below.tokens, surviving, axis=0),
                positions=g.op("Gather", below.positions, surviving, axis=0),
                tree_mask=g.op("Gather", g.op("Gather", TREE_MASK, surviving, axis=0), surviving, axis=1),
                parents=parents,
                logit_rows=logit_rows,
                visible=visible,
                attention=RowExactAttention(g, self.spec, visible),
                surviving=surviving,
                slots=slots,
            )

    def _bias(self, window: int | None) -> str:
        """[1, 1, n, L + n]"""
        batch, g = self.batch, self.g
        if window in batch.biases:
            return batch.biases[window]
        with g.named(f"bias.{window or 'full'}"):
            if window is None:
                past = g.op("Concat", batch.rows.count, self._longest, axis=0)
                zeros = g.op("Expand", g.number(0), past)
                mask = g.op("Concat", zeros, batch.tree_mask, axis=1)
            else:
                columns = g.op("Concat", g.arange(self._longest), batch.positions, axis=0)
                seen = g.op("Unsqueeze", columns, g.ints(0))
                full = g.op("Squeeze", self._bias(None), g.ints(0, 1))
                mask = window_out(g, full, batch.positions, seen, window)
            batch.biases[window] = g.op("Unsqueeze", mask, g.ints(0, 1))
        return batch.biases[window]

    def _bias_below(self, below: _RowGroup, window: int | None, ring: int | None) -> tuple[str, str]:
        """[1, 1, n, used] over the keys of a layer below the early exit, which are of all rows; and `used`."""
        used = below.visible if ring is None else below.rings[ring].used
        if window not in self.batch.biases_below:
            gathered = self.g.op("Gather", below.biases[window], self.batch.surviving, axis=2)
            self.batch.biases_below[window] = gathered
        return self.batch.biases_below[window], used

    def _ring_bias(self, layer: int, window: int) -> str:
        """[1, 1, n, used], over the slots of a layer that keeps no more than its window needs."""
        batch, g = self.batch, self.g
        if window not in batch.biases:
            with g.named(f"bias.{window}"):
                slots = g.op("Shape", past(layer, KEY), start=2, end=3)
                batch.rings[window] = ring = ring_after(g, slots, batch.visible, batch.positions, batch.tree_mask)
                mask = window_out(g, ring.sees, batch.positions, g.op("Unsqueeze", ring.positions, g.ints(0)), window)
                batch.biases[window] = g.op("Unsqueeze", mask, g.ints(0, 1))
        return batch.biases[window]


class _Builder:
    def __init__(self, parts: StepGraph, store: WeightStore, native: NativeOps | None) -> None:
        self.native = native
        self.parts, self.spec, self.store = parts, parts.spec, store
        self.sampler = TokenSampler(parts.spec.vocab, native)
        self.g = Scope(store)
        self.drafter: DraftPass | None = None
        self.decoder: Decoder
        if parts.room is not None:
            self.decoder = swappable = SwappableDecoder(parts.spec, parts.source, parts.precision)
            if parts.draft_spec is not None:
                self.drafter = SwappableStreams(swappable, parts.draft_spec, parts.candidates, parts.room)
        else:
            self.decoder = Decoder(parts.spec, parts.source, parts.precision, native)
            if parts.draft_spec is not None:
                build = row_of(parts.draft_spec).nodes
                self.drafter = build(self.decoder, parts.draft_spec, parts.candidates, parts.stream_weights)
        self.final = ""  # [r, H]

    def build(self, first: bool) -> onnx.ModelProto:
        eager = self.drafter if isinstance(self.drafter, EagerPass) else None
        self.layers, parts = _Layers(self.g, self.decoder, self.parts.draft_spec, eager), self.parts
        more = {"sequences": self.layers.several, "embeddings": parts.embeddings}
        self.features = graph_features(parts.spec, parts.draft_spec, parts.candidates, **more)
        self.final = self.layers.run(self.layers.batch.positions)
        if parts.embeddings:
            self.final = self.g.op("Identity", self.final, out=HIDDEN_STATES)
        choices = self._choices()
        if self.drafter is not None:
            self._draft(self.drafter, choices)
        self._defaults()
        adapter = self.store.rows if isinstance(self.store, SwappableStore) else ()
        graph_inputs, graph_outputs = inputs(DYNAMIC, self.features, adapter), outputs(DYNAMIC, self.features)
        native = self.native is not None
        model = finish(self.g, declared(graph_inputs), declared(graph_outputs), native=native, first=first)
        eager_streams = {} if self.layers.joined is None else {STREAMS: EAGER}
        onnx.helper.set_model_props(model, eager_streams | {ENTERED: " ".join(self.layers.entered)})
        return model

    def _defaults(self) -> None:
        """The exported tree as overridable initializers (graph inputs of the same name); of a swappable graph a row
        alone after which nothing is drafted.
        """
        tree = self.parts.tree
        if self.parts.room is not None:
            for row in inputs(DYNAMIC, self.features):
                if row.default_alone is not None:
                    self.store.add_inline(row.name, row.filled(row.default_alone))
        elif self.parts.draft_spec is not None and tree is not None:
            self.store.add_inline(TREE_MASK, tree.mask())
            self.store.add_inline(PARENTS, np.asarray(tree.parents, np.int64))

    def _choices(self) -> str:
        """int64 [r]: the target's token after each row that gets logits."""
        g, batch, rows = self.g, self.layers.batch, self.layers.rows()
        with g.named("head"):
            raw, scale = self.decoder.logits(g, self.final, rows, self.decoder.head_weight(), out=RAW_LOGITS)
            each = g.op("Concat", rows.count, g.ints(1), axis=0)
            g.op("Expand", scale or g.number(1), each, out=LOGIT_SCALE)
            mask = g.op("Gather", batch.tree_mask, batch.logit_rows, axis=0)
            out = "chosen" if batch.surviving else CHOICES
            choices = self.sampler.add(g, raw, scale, batch.tokens, mask, batch.slots, out=out)
            if batch.surviving:  # a pruned row chose nothing
                none = g.op("Expand", g.integer(-1), g.op("Shape", LOGIT_ROWS))
                g.op("ScatterElements", none, batch.slots, choices, out=CHOICES, axis=0)
        return choices

    def _draft(self, drafter: DraftPass, choices: str) -> None:
        spec, layers, batch = drafter.spec, self.layers, self.layers.batch
        every = (
            self.g.op("ScatterElements", NEXT_IDS, batch.logit_rows, choices, axis=0)
            if self.features.next_tokens
            else ""
        )
        presents = layers.with_own(drafter, batch.positions, batch.rows, every)
        drafter.add(self.g, lambda branch: self._accept(branch, spec, choices), presents[layers.first :], STREAM_IDS)

    def _accept(self, g: Scope, spec: DraftSpec, choices: str) -> Accepted:
        """The deepest node that stands, or the one that is forced. Nodes of scope `g`."""
        batch = self.layers.batch
        with g.named("accept"):
            tokens = g.op("Gather", batch.tokens, batch.logit_rows, axis=0)
            expected = g.op("Gather", choices, batch.parents, axis=0)
            seen = g.op("Gather", g.op("Gather", batch.tree_mask, batch.logit_rows, axis=0), batch.logit_rows, axis=1)
            deepest = deepest_standing(g, tokens, expected, batch.logit_rows, seen)
            node = unless_forced(g, FORCED_NODE, g.op("Gather", batch.logit_rows, deepest, axis=0))
            equal = g.op("Equal", batch.logit_rows, node)
            at = g.op("ArgMax", g.op("Cast", equal, to=TensorProto.INT32), axis=0, keepdims=1)
            root = unless_forced(g, FORCED_ROOT, g.op("Gather", choices, at, axis=0)) if spec.uses_root else ""
            final, in_call = g.op("Gather", self.final, at, axis=0), self.layers.in_call(g, node)
            return self.layers.accepted(node, in_call, root=root, final=final, node_in_logit_rows=at)
