"""The step graph of docs/architecture.md: main rows over the cache, acceptance, then streams where there are any.

Main rows attend under an additive bias [past zeros ; tree mask] shared by all layers (`attention`); rotary embeddings
are separate nodes with explicit positions, and the cache is bound in place by the caller. Sliding windows are part of
the bias and follow true positions: a tree uses more slots than positions. Knows nothing about files or training.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto

from streamspec.bundle.manifest import SwappableCapacity
from streamspec.draft_tree import DraftTree
from streamspec.export.drafters.base import Accepted, DraftPass, DraftSpec
from streamspec.export.drafters.draft_layer import DraftLayerPass, DraftLayerSpec
from streamspec.export.drafters.medusa import MedusaPass, MedusaSpec
from streamspec.export.drafters.streams import StreamPass, StreamSpec, window_out
from streamspec.export.graphs.swappable import SwappableDecoder, SwappableStore, SwappableStreams
from streamspec.export.layers.acceptance import deepest_standing, unless_forced
from streamspec.export.layers.attention import RowExactAttention
from streamspec.export.layers.decoder import Decoder, Residual, Source, Tables
from streamspec.export.layers.decoder_spec import DecoderSpec
from streamspec.export.layers.early_exit import EarlyExit
from streamspec.export.layers.sampling import TokenSampler
from streamspec.export.ops.builder import Scope, WeightStore, finish, tensor
from streamspec.export.quantization.precisions import Precision, Rows

FLOAT, INT64, INT32 = TensorProto.FLOAT, TensorProto.INT64, TensorProto.INT32


@dataclass
class StepGraph:
    """What the step graph is made of. `tree`: the exported default for `tree_mask` and `parents`. `room`: the graph is
    of the base alone, with room for adapters; `streams` are then empty ones, and `build` writes through a
    `SwappableStore`."""

    spec: DecoderSpec
    source: Source
    precision: Precision
    streams: DraftSpec | None = None
    tree: DraftTree | None = None
    candidates: int = 10
    stream_weights: str = "merged"
    room: SwappableCapacity | None = None

    def build(self, store: WeightStore) -> onnx.ModelProto:
        """Writes the weights through `store`, closes it, and returns the graph."""
        return _Builder(self, store).build()


@dataclass
class _Batch:
    """The rows of a group of layers: all of them, or above the early exit those that went on.

    `logit_rows` [r]: which of the rows get logits; `places` [r]: where their choices belong among those asked for.
    """

    rows: Rows
    tokens: str  # int64 [n]
    positions: str  # int64 [n]
    tree_mask: str  # [n, n]
    parents: str  # int64 [r]
    logit_rows: str
    visible: str  # int64 [1]: slots of the cache in use after this call, L + n
    attention: RowExactAttention
    kept: str = ""  # int64 [n]: numbers of these rows among all, '' for all of them
    places: str = ""
    biases: dict[int | None, str] = field(default_factory=dict)


class _Builder:
    def __init__(self, parts: StepGraph, store: WeightStore) -> None:
        self.parts, self.spec, self.store = parts, parts.spec, store
        self.decoder = (SwappableDecoder if parts.room else Decoder)(parts.spec, parts.source, parts.precision)
        self.chooser = TokenSampler(parts.spec.vocab)
        self.g = Scope(store)
        pruning = parts.streams.pruning if parts.streams is not None else None
        self.drafter = self._drafter(parts.streams) if parts.streams is not None else None
        self.exit = EarlyExit(self.decoder, pruning) if pruning is not None else None
        self.own_layers = int(isinstance(parts.streams, DraftLayerSpec))  # of the drafter, in the cache
        self.presents: list[tuple[str, ...]] = []
        self.entries: dict[int, str] = {}  # by layer: [1, n, H] at its input, of those that the drafter taps
        self.final = ""

    def build(self) -> onnx.ModelProto:
        g, streams = self.g, self.parts.streams
        self.batch = self._all_rows()
        raw, scale = self._head(self._rows())
        batch = self.batch
        with g.named("head"):
            mask = g.op("Gather", batch.tree_mask, batch.logit_rows, axis=0)
            choices = self.chooser.add(
                g, raw, scale, batch.tokens, mask, batch.places, out="chosen" if batch.kept else "choices"
            )
            if batch.kept:  # a pruned row chose nothing
                none = g.op("Expand", self.store.constant(-1, np.int64), g.op("Shape", "logit_rows"))
                g.op("ScatterElements", none, batch.places, choices, out="choices", axis=0)
        if streams is not None:
            first = streams.first_layer(self.spec.layers)
            drafter = self.drafter
            assert drafter is not None
            if isinstance(drafter, DraftLayerPass):
                drafter.rows(
                    g,
                    [self.entries[layer] for layer in streams.tapped(self.spec.layers)],
                    self._following(choices),
                    batch.positions,
                    batch.attention,
                    batch.rows,
                )
                self.presents.append(drafter.present)
            drafter.add(g, lambda branch: self._accept(branch, choices), self.presents[first:], "stream_ids")
        self._defaults()
        return finish(g, self._inputs(), self._outputs(), "streamspec")

    def _drafter(self, spec: DraftSpec) -> DraftPass:
        if isinstance(spec, StreamSpec):
            if isinstance(self.decoder, SwappableDecoder):
                assert self.parts.room is not None
                return SwappableStreams(self.decoder, spec, self.parts.candidates, self.parts.room)
            return StreamPass(self.decoder, spec, self.parts.candidates, self.parts.stream_weights)
        if isinstance(spec, DraftLayerSpec):
            return DraftLayerPass(self.decoder, spec, self.parts.candidates)
        assert isinstance(spec, MedusaSpec)
        return MedusaPass(self.decoder, spec, self.parts.candidates)

    # ---- interface

    def _inputs(self) -> list[onnx.ValueInfoProto]:
        streams = self.parts.streams
        inputs = [
            tensor("input_ids", INT64, [1, "n"]),
            tensor("position_ids", INT64, [1, "n"]),
            tensor("tree_mask", FLOAT, ["n", "n"]),
            tensor("past_length", INT64, [1]),
            tensor("logit_rows", INT64, ["r"]),
            *self.chooser.inputs(),
        ]
        if self.exit is not None:
            inputs += self.exit.inputs()
        if streams is not None:
            inputs += [
                tensor("parents", INT64, ["r"]),
                tensor("stream_ids", INT64, ["m"]),
                tensor("forced_node", INT64, [1]),
            ]
            if streams.uses_root:
                inputs.append(tensor("forced_root", INT64, [1]))
            if isinstance(streams, DraftLayerSpec):
                inputs.append(tensor("next_ids", INT64, ["n"]))
        if isinstance(self.store, SwappableStore):
            inputs += self.store.inputs()
        return inputs + [tensor(f"past_key_values.{i}.{kind}", FLOAT, self._cache()) for i, kind in self._cache_names()]

    def _outputs(self) -> list[onnx.ValueInfoProto]:
        outputs = [
            tensor("choices", INT64, ["r"]),
            tensor("raw_logits", FLOAT, ["s", self.spec.vocab]),
            tensor("logit_scale", FLOAT, ["s", 1]),
        ]
        if self.drafter is not None:
            outputs += [tensor(name, *form) for name, form in self.drafter.shapes().items()]
        return outputs + [tensor(f"present.{i}.{kind}", FLOAT, self._cache()) for i, kind in self._cache_names()]

    def _cache(self) -> list[int | str]:
        return [1, self.spec.kv_heads, "S", self.spec.head_dim]

    def _cache_names(self) -> list[tuple[int, str]]:
        return [(i, kind) for i in range(self.spec.layers + self.own_layers) for kind in ("key", "value")]

    def _defaults(self) -> None:
        """The exported tree as overridable initializers (graph inputs of the same name), or a row alone that nothing is
        drafted behind.
        """
        tree = self.parts.tree
        if self.parts.room is not None:
            alone: dict[str, Any] = {"tree_mask": np.zeros((1, 1), np.float32)}
            if self.parts.streams is not None:
                alone |= {"parents": [0], "stream_ids": [], "forced_node": [-1]} | (
                    {"forced_root": [-1]} if self.parts.streams.uses_root else {}
                )
            for name, value in alone.items():
                self.store.add_inline(name, np.asarray(value, np.float32 if name == "tree_mask" else np.int64))
            return
        if self.parts.streams is None or tree is None:
            return
        self.store.add_inline("tree_mask", tree.mask())
        self.store.add_inline("parents", np.asarray(tree.parents, np.int64))

    # ---- main rows

    def _all_rows(self) -> _Batch:
        g = self.g
        rows = Rows(g.op("Shape", "input_ids", start=1))
        visible = g.op("Add", "past_length", rows.count)
        return _Batch(
            rows=rows,
            tokens=g.op("Squeeze", "input_ids", g.ints(0)),
            positions=g.op("Squeeze", "position_ids", g.ints(0)),
            tree_mask="tree_mask",
            parents="parents",
            logit_rows="logit_rows",
            visible=visible,
            attention=RowExactAttention(g, self.spec, visible),
        )

    def _surviving(self, entry: str) -> _Batch:
        """The rows that go on after the early exit at entry [1, n, H]."""
        assert self.exit is not None
        g, below = self.g, self.batch
        with g.named("prune"):
            kept, logit_rows, parents, places = self.exit.add(g, entry, below.rows.count, below.tokens)
            rows = Rows(g.op("Shape", kept))
            visible = g.op("Add", "past_length", rows.count)
            return _Batch(
                rows=rows,
                tokens=g.op("Gather", below.tokens, kept, axis=0),
                positions=g.op("Gather", below.positions, kept, axis=0),
                tree_mask=g.op("Gather", g.op("Gather", "tree_mask", kept, axis=0), kept, axis=1),
                parents=parents,
                logit_rows=logit_rows,
                visible=visible,
                attention=RowExactAttention(g, self.spec, visible),
                kept=kept,
                places=places,
            )

    def _bias(self, window: int | None) -> str:
        """[1, 1, n, L + n]"""
        batch = self.batch
        if window in batch.biases:
            return batch.biases[window]
        g = self.g
        with g.named(f"bias.{window or 'full'}"):
            if window is None:
                past = g.op("Concat", batch.rows.count, "past_length", axis=0)
                zeros = g.op("Expand", self.store.constant(0, np.float32), past)
                mask = g.op("Concat", zeros, batch.tree_mask, axis=1)
            else:
                zero, one = self.store.constant(0, np.int64), self.store.constant(1, np.int64)
                slots = g.op("Range", zero, g.op("Squeeze", "past_length"), one)
                seen = g.op("Unsqueeze", g.op("Concat", slots, batch.positions, axis=0), g.ints(0))
                full = g.op("Squeeze", self._bias(None), g.ints(0, 1))
                mask = window_out(g, full, batch.positions, seen, window)
            batch.biases[window] = g.op("Unsqueeze", mask, g.ints(0, 1))
        return batch.biases[window]

    def _rows(self) -> Residual:
        """All layers; the last one goes on with the rows of `logit_rows` as soon as its K/V is written."""
        g, spec = self.g, self.spec
        residual = self.decoder.begin(g, "input_ids", self.batch.positions)
        rotary = self.decoder.rotary(g, self.batch.positions)
        streams = self.parts.streams
        first, tapped = (streams.first_layer(spec.layers), streams.tapped(spec.layers)) if streams else (-1, ())
        for layer in range(spec.layers):
            with g.named(f"layers.{layer}"):
                normed, residual = self.decoder.enter(g, residual, layer)
                if layer == first and self.exit is not None:
                    self.batch = self._surviving(residual.stream)
                    normed, stream = (g.op("Gather", x, self.batch.kept, axis=1) for x in (normed, residual.stream))
                    residual = Residual(stream)
                    rotary = self.decoder.rotary(g, self.batch.positions)
                if layer in tapped:
                    self.entries[layer] = residual.stream
                mixed = self._attention(normed, layer, rotary)
                rows = self.batch.rows
                if layer == spec.layers - 1:
                    rows = self.answering = Rows(g.op("Shape", self.batch.logit_rows))
                    mixed, normed, stream = (
                        g.op("Gather", x, self.batch.logit_rows, axis=1) for x in (mixed, normed, residual.stream)
                    )
                    residual = Residual(stream)
                residual = self.decoder.leave(g, mixed, normed, residual, rows, layer, self.decoder.linear)
        return residual

    def _attention(self, normed: str, layer: int, rotary: Tables) -> str:
        batch = self.batch
        q, k, v = self.decoder.queries_keys_values(self.g, normed, batch.rows, layer, rotary, self.decoder.linear)
        bias = self._bias(self.spec.windows[layer])
        with self.g.named("attention"):
            key, value = batch.attention.append(k, layer, "key"), batch.attention.append(v, layer, "value")
            self.presents.append((key, value))
            return batch.attention.mix(q, key, value, bias)

    def _head(self, residual: Residual) -> tuple[str, str]:
        g = self.g
        with g.named("head"):
            self.final = flat = g.op("Squeeze", self.decoder.finish(g, residual), g.ints(0))
            raw, scale = self.decoder.logits(g, flat, self.answering, self.decoder.head_weight(), out="raw_logits")
            each = g.op("Concat", self.answering.count, g.ints(1), axis=0)
            g.op("Expand", scale or self.store.constant(1, np.float32), each, out="logit_scale")
            return raw, scale

    def _following(self, choices: str) -> str:
        """int64 [n]: the token behind each row, as given by `next_ids`, or else as chosen."""
        g = self.g
        chosen = g.op("ScatterElements", "next_ids", self.batch.logit_rows, choices, axis=0)
        given = g.op("GreaterOrEqual", "next_ids", self.store.constant(0, np.int64))
        return g.op("Where", given, "next_ids", chosen)

    # ---- acceptance

    def _accept(self, g: Scope, choices: str) -> Accepted:
        """The deepest node that stands, or the one that is forced. Nodes of scope `g`."""
        batch = self.batch
        with g.named("accept"):
            tokens = g.op("Gather", batch.tokens, batch.logit_rows, axis=0)
            expected = g.op("Gather", choices, batch.parents, axis=0)
            seen = g.op("Gather", g.op("Gather", batch.tree_mask, batch.logit_rows, axis=0), batch.logit_rows, axis=1)
            deepest = deepest_standing(g, tokens, expected, batch.logit_rows, seen)
            found = g.op("Gather", batch.logit_rows, deepest, axis=0)
            node = unless_forced(g, "forced_node", found)
            number = g.op("Gather", batch.kept, node, axis=0) if batch.kept else node
            at = g.op("ArgMax", g.op("Cast", g.op("Equal", batch.logit_rows, node), to=INT32), axis=0, keepdims=1)
            return Accepted(
                node=node,
                number=number,
                root=self._root(g, at, choices),
                entries=self.entries,
                final=g.op("Gather", self.final, at, axis=0),
                positions=batch.positions,
                tree_mask=batch.tree_mask,
                visible=batch.visible,
            )

    def _root(self, g: Scope, at: str, choices: str) -> str:
        """int64 [1]: the token after the accepted node, number `at` of those with logits."""
        streams = self.parts.streams
        if streams is None or not streams.uses_root:
            return ""
        return unless_forced(g, "forced_root", g.op("Gather", choices, at, axis=0))
