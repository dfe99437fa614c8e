"""The static step graph of docs/static.md: fixed shapes and standard operators alone, for providers that compile one
shape.

The same decoder and drafters as in `graph`, built in a scope that lowers their operators (`lowering`). One shape serves
prompt chunks and padded trees. The cache is only read: the K/V of a call's rows are outputs, and whoever runs the graph
keeps those of accepted rows. The choice is greedy; sampling is a graph beside it (`sampling.choice_graph`). Knows
nothing about files or training.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import onnx
from onnx import TensorProto

from streamspec.draft_tree import MASKED
from streamspec.errors import ConfigError
from streamspec.export.drafters.base import Accepted, DraftPass, DraftSpec
from streamspec.export.drafters.medusa import MedusaPass, MedusaSpec
from streamspec.export.drafters.streams import StreamPass, StreamSpec, window_out
from streamspec.export.layers.acceptance import deepest_standing, unless_forced
from streamspec.export.layers.attention import attend, by_head
from streamspec.export.layers.decoder import Decoder, Source, Tables
from streamspec.export.layers.decoder_spec import DecoderSpec
from streamspec.export.ops.builder import Scope, WeightStore, finish, tensor
from streamspec.export.ops.static_scope import StaticScope
from streamspec.export.quantization.precisions import Rows
from streamspec.export.quantization.static_precisions import StaticPrecision

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64


@dataclass
class StaticStepGraph:
    """What the graph is made of. `rows` of every call, `slots` of the cache."""

    spec: DecoderSpec
    source: Source
    precision: StaticPrecision
    rows: int
    slots: int
    streams: DraftSpec | None = None
    candidates: int = 10
    stream_weights: str = "merged"

    def build(self, store: WeightStore) -> onnx.ModelProto:
        """Writes the weights through `store`, closes it, and returns the graph."""
        return _StaticBuilder(self, store).build()


def fitting(streams: DraftSpec) -> DraftSpec:
    """The drafter as a static graph has it: without an early exit, whose rows would be counted at run time. Raises
    ConfigError for a draft layer.
    """
    if not isinstance(streams, (StreamSpec, MedusaSpec)):
        raise ConfigError(
            "a draft layer in a static graph",
            "streams, Medusa heads or no drafter",
            "leave --static out, or train another --method",
        )
    return replace(streams, pruning=None)


class _TableDecoder(Decoder):
    """Cosines and sines of all positions that can occur, baked."""

    def __init__(self, parts: StaticStepGraph) -> None:
        super().__init__(parts.spec, parts.source, parts.precision)
        self.positions = parts.slots + parts.rows + (parts.streams.gamma if parts.streams else 0)

    def rotary(self, g: Scope, positions: str) -> Tables:
        return tuple(
            (self._rows_of(g, number, "cos", positions), self._rows_of(g, number, "sin", positions))
            for number in range(len(self.spec.rotaries))
        )

    def _rows_of(self, g: Scope, number: int, function: str, positions: str) -> str:
        kind, name = self.spec.rotaries[number], f"rotary.{number}.{function}"
        if name not in g.store:
            angles = np.arange(self.positions, dtype=np.float32)[:, None] * kind.inv_freq
            g.store.add(name, getattr(np, function)(angles) * np.float32(kind.scale))
        return g.op("Gather", name, positions, axis=0)


@dataclass(frozen=True)
class _AcceptedApart(Accepted):
    """With the past and the call's rows in two parts. `past_bias` [1, S]: 0 over slots in use."""

    past_bias: str

    def past_mask(self, g: Scope) -> str:
        return g.op("Concat", self.past_bias, g.op("Gather", self.tree_mask, self.node, axis=0), axis=1)

    def seen(self, g: Scope, present: tuple[str, ...]) -> list[tuple[str, str]]:
        past_key, past_value, key, value = present
        return [(past_key, past_value), (key, value)]


class _StaticBuilder:
    def __init__(self, parts: StaticStepGraph, store: WeightStore) -> None:
        self.parts, self.spec = parts, parts.spec
        self.decoder = _TableDecoder(parts)
        self.inputs = self._inputs()
        self.g = StaticScope(store, self.inputs, parts.precision.opset)
        self.numbers = self.g.ints(*range(parts.rows))
        self.tokens, self.positions = (
            self.g.op("Squeeze", name, self.g.ints(0)) for name in ("input_ids", "position_ids")
        )
        self.past_bias = self._past_bias()
        self.biases: dict[int | None, str] = {}
        self.presents: list[tuple[str, ...]] = []  # of each layer: K and V of the past and of the call's rows
        self.entry = ""  # [1, n, H] at the input of the drafter's first layer
        self.outputs = ["choices", "raw_logits"]

    def build(self) -> onnx.ModelProto:
        g, streams = self.g, self.parts.streams
        final = self._rows()
        with g.named("head"):
            raw, _ = self.decoder.logits(g, final, self._count(), self.decoder.head_weight(), out="raw_logits")
            choices = g.op("ArgMax", raw, out="choices", axis=-1, keepdims=0)
        if streams is not None:
            self._draft(streams, final, choices)
        self.outputs += [f"new.{i}.{kind}" for i in range(self.spec.layers) for kind in ("key", "value")]
        g.drop_unused(self.outputs)
        kinds = [INT64 if name in ("choices", "accepted_node", "candidates") else FLOAT for name in self.outputs]
        outputs = [tensor(name, kind, list(g.shape(name))) for name, kind in zip(self.outputs, kinds, strict=True)]
        return finish(g, self.inputs, outputs, "streamspec", self.parts.precision.opset)

    def _inputs(self) -> list[onnx.ValueInfoProto]:
        parts, streams = self.parts, self.parts.streams
        n = parts.rows
        inputs = [
            tensor("input_ids", INT64, [1, n]),
            tensor("position_ids", INT64, [1, n]),
            tensor("tree_mask", FLOAT, [n, n]),
            tensor("past_length", INT64, [1]),
        ]
        if streams is not None:
            inputs += [tensor("parents", INT64, [n]), tensor("forced_node", INT64, [1])]
            inputs += [tensor("forced_root", INT64, [1])] if streams.uses_root else []
        cache = [1, self.spec.kv_heads, parts.slots, self.spec.head_dim]
        return inputs + [
            tensor(f"past_key_values.{i}.{kind}", FLOAT, list(cache))
            for i in range(self.spec.layers)
            for kind in ("key", "value")
        ]

    def _count(self) -> Rows:
        return Rows(self.g.ints(self.parts.rows))

    # ---- main rows

    def _rows(self) -> str:
        """All layers: [n, H], finished."""
        g, spec, streams = self.g, self.spec, self.parts.streams
        residual = self.decoder.begin(g, "input_ids", self.positions)
        rotary = self.decoder.rotary(g, self.positions)
        for layer in range(spec.layers):
            with g.named(f"layers.{layer}"):
                normed, residual = self.decoder.enter(g, residual, layer)
                if streams is not None and layer == streams.first_layer(spec.layers):
                    self.entry = residual.stream
                mixed = self._attention(normed, layer, rotary)
                residual = self.decoder.leave(g, mixed, normed, residual, self._count(), layer, self.decoder.linear)
        with g.named("head"):
            return g.op("Squeeze", self.decoder.finish(g, residual), g.ints(0))

    def _attention(self, normed: str, layer: int, rotary: Tables) -> str:
        g, spec = self.g, self.spec
        q, k, v = self.decoder.queries_keys_values(g, normed, self._count(), layer, rotary, self.decoder.linear)
        bias = self._bias(spec.windows[layer])
        with g.named("attention"):
            key, value = (
                by_head(g, spec, rows, out=f"new.{layer}.{kind}") for kind, rows in (("key", k), ("value", v))
            )
            past = f"past_key_values.{layer}.key", f"past_key_values.{layer}.value"
            self.presents.append((*past, key, value))
            return attend(g, spec, q, [past, (key, value)], bias)

    def _past_bias(self) -> str:
        """[1, S]: 0 over the first `past_length` slots."""
        g = self.g
        with g.named("bias"):
            used = g.op("Less", self._slots(), "past_length")
            return g.op("Unsqueeze", g.op("Where", used, g.number(0), g.number(MASKED)), g.ints(0))

    def _bias(self, window: int | None) -> str:
        """[group * n, S + n], as `attend` wants it."""
        if window not in self.biases:
            g = self.g
            with g.named(f"bias.{window or 'full'}"):
                past = g.op("Expand", self.past_bias, g.ints(self.parts.rows, self.parts.slots))
                mask = g.op("Concat", past, "tree_mask", axis=1)
                if window is not None:
                    seen = g.op("Unsqueeze", g.op("Concat", self._slots(), self.positions, axis=0), g.ints(0))
                    mask = window_out(g, mask, self.positions, seen, window)
                self.biases[window] = g.op("Tile", mask, g.ints(self.spec.group, 1))
        return self.biases[window]

    def _slots(self) -> str:
        """int64 [S]: 0, 1, ..: of the past also the positions."""
        name = "slots"
        return name if name in self.g.store else self.g.store.add(name, np.arange(self.parts.slots))

    # ---- behind the accepted node

    def _draft(self, streams: DraftSpec, final: str, choices: str) -> None:
        g = self.g
        drafter, first = self._drafter(streams), streams.first_layer(self.spec.layers)
        accepted = self._accept(streams, final, choices)
        with g.named("streams"):
            stream_ids = g.ints(*range(streams.gamma))
            values = [accepted.node, *drafter.guesses(g, accepted, self.presents[first:], stream_ids)]
        for name, value in zip(drafter.shapes(), values, strict=True):
            g.op("Identity", value, out=name)
            self.outputs.append(name)

    def _drafter(self, streams: DraftSpec) -> DraftPass:
        if isinstance(streams, StreamSpec):
            return StreamPass(self.decoder, streams, self.parts.candidates, self.parts.stream_weights)
        assert isinstance(streams, MedusaSpec)
        return MedusaPass(self.decoder, streams, self.parts.candidates)

    def _accept(self, streams: DraftSpec, final: str, choices: str) -> Accepted:
        g = self.g
        with g.named("accept"):
            expected = g.op("Gather", choices, "parents", axis=0)
            found = deepest_standing(g, self.tokens, expected, self.numbers, "tree_mask")
            node = unless_forced(g, "forced_node", found)
            root = unless_forced(g, "forced_root", g.op("Gather", choices, node, axis=0)) if streams.uses_root else ""
            return _AcceptedApart(
                node=node,
                number=node,
                root=root,
                entries={streams.first_layer(self.spec.layers): self.entry},
                final=g.op("Gather", final, node, axis=0),
                positions=self.positions,
                tree_mask="tree_mask",
                visible=g.ints(self.parts.slots + self.parts.rows),
                past_bias=self.past_bias,
            )
