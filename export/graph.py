"""The step graph of docs/architecture.md: main rows over the cache, acceptance, then streams where there are any.

Main rows attend under an additive bias [past zeros ; tree mask] shared by all layers (`attention`); rotary embeddings are
separate nodes with explicit positions, and the cache is bound in place by the caller. Sliding windows are part of the bias
and follow true positions: a tree uses more slots than positions. Knows nothing about files or training.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto

from streamspec.export.attention import RowExactAttention
from streamspec.export.builder import Scope, WeightStore, finish, tensor
from streamspec.export.decoder import OUT, Decoder, Residual, Source
from streamspec.export.families import DecoderSpec
from streamspec.export.quantise import Precision, Rows
from streamspec.export.sampling import Chooser
from streamspec.export.streams import Accepted, StreamPass, StreamSpec, stream_outputs, window_out
from streamspec.trees import DraftTree

FLOAT, INT64, INT32 = TensorProto.FLOAT, TensorProto.INT64, TensorProto.INT32


@dataclass
class StepGraph:
    """What the step graph is made of. `tree`: the exported default for `tree_mask` and `parents`."""

    spec: DecoderSpec
    source: Source
    precision: Precision
    streams: StreamSpec | None = None
    tree: DraftTree | None = None
    candidates: int = 10
    stream_weights: str = "merged"

    def build(self, store: WeightStore) -> onnx.ModelProto:
        """Writes the weights through `store`, closes it, and returns the graph."""
        return _Builder(self, store).build()


class _Builder:
    def __init__(self, parts: StepGraph, store: WeightStore) -> None:
        self.parts, self.spec, self.store = parts, parts.spec, store
        self.decoder = Decoder(parts.spec, parts.source, parts.precision)
        self.chooser = Chooser(parts.spec.vocab)
        self.g = Scope(store)
        self.presents: list[tuple[str, str]] = []
        self.entry = ""
        self._biases: dict[int | None, str] = {}

    def build(self) -> onnx.ModelProto:
        g, streams = self.g, self.parts.streams
        self._lengths()
        logits = self._head(self._rows())
        with g.named("head"):
            tokens = g.op("Squeeze", "input_ids", g.ints(0))
            choices = self.chooser.add(g, logits, tokens, g.op("Gather", "tree_mask", "logit_rows", axis=0))
        if streams is not None:
            stage = StreamPass(self.decoder, streams, self.parts.candidates, self.parts.stream_weights)
            stage.add(g, lambda branch: self._accept(branch, choices), self.presents[stage.first :], "stream_ids")
        self._defaults()
        return finish(g, self._inputs(), self._outputs(), "streamspec")

    # ---- interface

    def _inputs(self) -> list[onnx.ValueInfoProto]:
        streams = self.parts.streams
        inputs = [
            tensor("input_ids", INT64, [1, "n"]), tensor("position_ids", INT64, [1, "n"]),
            tensor("tree_mask", FLOAT, ["n", "n"]), tensor("past_length", INT64, [1]), tensor("logit_rows", INT64, ["r"]),
            *self.chooser.inputs(),
        ]
        if streams is not None:
            inputs += [tensor("parents", INT64, ["r"]), tensor("stream_ids", INT64, ["m"]), tensor("forced_node", INT64, [1])]
            if streams.uses_root:
                inputs.append(tensor("forced_root", INT64, [1]))
        return inputs + [tensor(f"past_key_values.{i}.{kind}", FLOAT, self._cache()) for i, kind in self._cache_names()]

    def _outputs(self) -> list[onnx.ValueInfoProto]:
        outputs = [tensor("choices", INT64, ["r"]), tensor("logits", FLOAT, ["r", self.spec.vocab])]
        if self.parts.streams is not None:
            outputs += [tensor(name, *form) for name, form in stream_outputs(self.parts.streams, self.parts.candidates).items()]
        return outputs + [tensor(f"present.{i}.{kind}", FLOAT, self._cache()) for i, kind in self._cache_names()]

    def _cache(self) -> list[int | str]:
        return [1, self.spec.kv_heads, "S", self.spec.head_dim]

    def _cache_names(self) -> list[tuple[int, str]]:
        return [(i, kind) for i in range(self.spec.layers) for kind in ("key", "value")]

    def _defaults(self) -> None:
        """The exported tree as overridable initializers (graph inputs of the same name)."""
        tree = self.parts.tree
        if self.parts.streams is None or tree is None:
            return
        self.store.add_inline("tree_mask", tree.mask())
        self.store.add_inline("parents", np.asarray(tree.parents, np.int64))

    # ---- main rows

    def _lengths(self) -> None:
        g = self.g
        self.rows = Rows(g.op("Shape", "input_ids", start=1))
        self.visible = g.op("Add", "past_length", self.rows.count)
        self.attention = RowExactAttention(g, self.spec, self.visible)
        self.positions = g.op("Squeeze", "position_ids", g.ints(0))
        self.kept = Rows(g.op("Shape", "logit_rows"))

    def _bias(self, window: int | None) -> str:
        """[1, 1, n, L + n]"""
        if window in self._biases:
            return self._biases[window]
        g = self.g
        with g.named(f"bias.{window or 'full'}"):
            if window is None:
                past = g.op("Concat", self.rows.count, "past_length", axis=0)
                zeros = g.op("Expand", self.store.constant(0, np.float32), past)
                mask = g.op("Concat", zeros, "tree_mask", axis=1)
            else:
                zero, one = self.store.constant(0, np.int64), self.store.constant(1, np.int64)
                slots = g.op("Range", zero, g.op("Squeeze", "past_length"), one)
                seen = g.op("Unsqueeze", g.op("Concat", slots, self.positions, axis=0), g.ints(0))
                full = g.op("Squeeze", self._bias(None), g.ints(0, 1))
                mask = window_out(g, full, self.positions, seen, window)
            self._biases[window] = g.op("Unsqueeze", mask, g.ints(0, 1))
        return self._biases[window]

    def _rows(self) -> Residual:
        """All layers; the last one goes on with the rows of `logit_rows` as soon as its K/V is written."""
        g, spec = self.g, self.spec
        residual = Residual(self.decoder.embed(g, "input_ids"))
        rotary = self.decoder.rotary(g, self.positions)
        streams = self.parts.streams
        first = streams.first_layer(spec.layers) if streams else -1
        for layer in range(spec.layers):
            with g.named(f"layers.{layer}"):
                name = spec.weight_name(layer, "input_layernorm")
                normed, residual = self.decoder.norm(g, residual, name)
                if layer == first:
                    self.entry = residual.stream
                mixed = self._attention(normed, layer, rotary)
                rows = self.rows
                if layer == spec.layers - 1:
                    rows = self.kept
                    mixed = g.op("Gather", mixed, "logit_rows", axis=1)
                    residual = Residual(g.op("Gather", residual.stream, "logit_rows", axis=1))
                residual.update = self.decoder.linear(g, mixed, rows, layer, OUT)
                residual = self.decoder.mlp(g, residual, rows, layer, self.decoder.linear)
        return residual

    def _attention(self, normed: str, layer: int, rotary: tuple[str, str]) -> str:
        q, k, v = self.decoder.queries_keys_values(self.g, normed, self.rows, layer, rotary, self.decoder.linear)
        bias = self._bias(self.spec.windows[layer])
        with self.g.named("attention"):
            key, value = self.attention.append(k, layer, "key"), self.attention.append(v, layer, "value")
            self.presents.append((key, value))
            return self.attention.mix(q, key, value, bias)

    def _head(self, residual: Residual) -> str:
        g = self.g
        with g.named("head"):
            normed, _ = self.decoder.norm(g, residual, "model.norm")
            flat = g.op("Squeeze", normed, g.ints(0))
            logits = self.parts.precision.head(g, flat, self.kept, self.decoder.head_weight())
            return g.op("Identity", logits, out="logits")

    # ---- acceptance

    def _accept(self, g: Scope, choices: str) -> Accepted:
        """A node stands if it and all its ancestors (root excluded) equal the choice of their parents. Nodes of scope `g`."""
        store = self.store
        with g.named("accept"):
            tokens = g.op("Gather", g.op("Squeeze", "input_ids", g.ints(0)), "logit_rows", axis=0)
            expected = g.op("Gather", choices, "parents", axis=0)
            wrong = g.op("Not", g.op("Equal", tokens, expected))
            # The root is no guess; in a prompt chunk `forced_node` decides and none of this matters.
            wrong = g.op("And", wrong, g.op("Greater", "logit_rows", store.constant(0, np.int64)))
            seen = g.op("Gather", g.op("Gather", "tree_mask", "logit_rows", axis=0), "logit_rows", axis=1)
            ancestors = g.op("Cast", g.op("Equal", seen, store.constant(0, np.float32)), to=FLOAT)
            column = g.op("Unsqueeze", g.op("Cast", wrong, to=FLOAT), g.ints(1))
            mistakes = g.op("Squeeze", g.op("MatMul", ancestors, column), g.ints(1))
            depth = g.op("ReduceSum", ancestors, g.ints(1), keepdims=0)
            stands = g.op("Equal", mistakes, store.constant(0, np.float32))
            deepest = g.op("ArgMax", g.op("Mul", depth, g.op("Cast", stands, to=FLOAT)), axis=0, keepdims=1)
            found = g.op("Gather", "logit_rows", deepest, axis=0)
            forced = g.op("GreaterOrEqual", "forced_node", store.constant(0, np.int64))
            node = g.op("Where", forced, "forced_node", found)
            return Accepted(
                node=node, root=self._root(g, node, choices), entry=self.entry, position_ids="position_ids",
                tree_mask="tree_mask", visible=self.visible,
            )

    def _root(self, g: Scope, node: str, choices: str) -> str:
        """int64 [1]: the token after the accepted node."""
        streams = self.parts.streams
        if streams is None or not streams.uses_root:
            return ""
        at = g.op("ArgMax", g.op("Cast", g.op("Equal", "logit_rows", node), to=INT32), axis=0, keepdims=1)
        own = g.op("Gather", choices, at, axis=0)
        given = g.op("GreaterOrEqual", "forced_root", self.store.constant(0, np.int64))
        return g.op("Where", given, "forced_root", own)
