"""The step graph of a swappable bundle: the base's weights as they are, and whatever belongs to an adapter an input.

An adapter's tensors are initializers that may be overridden, of rank 0 or empty without an adapter, so that the graph
alone is the base. How rows stay exact beside weights that are inputs is told in `lowrank`.

A bundle has `SwappableCapacity` for streams over certain numbers of layers, a bigram, a draft vocabulary; an adapter
uses all of it or less, and what it lacks is neutral. Knows nothing about files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

from streamspec.bundle.manifest import SwappableCapacity
from streamspec.export.drafters.base import VOCABULARY, Accepted
from streamspec.export.drafters.streams import StreamPass, StreamSpec
from streamspec.export.layers.decoder import Decoder, Residual
from streamspec.export.layers.decoder_spec import DecoderSpec
from streamspec.export.layers.early_exit import PruningSpec
from streamspec.export.ops.builder import Array, Scope, WeightStore, tensor
from streamspec.export.quantization.precisions import Fp32, Int8, Precision, Rows, Weight
from streamspec.export.weights.lora_inputs import Form, LowRank

TASK, STREAMS = "task", "streams"  # parts of an adapter: the LoRA of all rows, and that of stream rows alone
HEAD = "streams.head"  # rows of the LM head for the tokens that may be proposed
BEGIN, SHIFT = (
    "streams.begin",
    "streams.shift",
)  # int64 [1]: which of the room's numbers of layers; 1 where stream j sits at t + j, 0 where at t


def forms(spec: DecoderSpec, room: SwappableCapacity, precision: Precision, head_bias: bool) -> dict[str, Form]:
    """By name, all that an adapter may bring. `head_bias`: the LM head has one."""
    kinds: dict[str, Form] = {}
    for layer in range(spec.layers):
        for part in (TASK, STREAMS) if layer >= spec.layers - max(room.ns, default=0) else (TASK,):
            for modules in spec.fused:
                kinds |= update(spec, layer, modules, part).forms(precision.coded)
    return kinds | (_stream_forms(spec, room, precision, head_bias) if room.ns else {})


def _stream_forms(spec: DecoderSpec, room: SwappableCapacity, precision: Precision, head_bias: bool) -> dict[str, Form]:
    tokens: int | str = "draft_tokens" if room.draft_vocab else spec.vocab
    kinds: dict[str, Form] = {
        BEGIN: (np.int64, (1,)),
        SHIFT: (np.int64, (1,)),
        "streams.embeddings": (np.float32, (1, "gamma", spec.hidden)),
        "streams.shares.0": (np.float32, (1, "gamma", 1)),
        "streams.shares.1": (np.float32, (1, "gamma", 1)),
    }
    if room.root_token:
        kinds["streams.root_map"] = np.float32, ("root", spec.hidden)
    if room.bigram:
        kinds |= dict.fromkeys(("streams.bigram.in", "streams.bigram.out"), (np.float32, (tokens, "bigram")))
    if room.pruning:
        kinds |= {"prune.down": (np.float32, (spec.hidden, "prune")), "prune.up": (np.float32, ("prune", spec.hidden))}
    if room.draft_vocab:
        kinds[VOCABULARY] = np.int64, (tokens,)
        if isinstance(precision, Fp32):
            kinds[f"{HEAD}.transposed"] = np.float32, (spec.hidden, tokens)
        else:
            kinds |= {f"{HEAD}.int8": (np.int8, (spec.hidden, tokens)), f"{HEAD}.scale": (np.float32, (tokens,))}
        if head_bias:
            kinds[f"{HEAD}.bias"] = np.float32, (tokens,)
    return kinds


def update(spec: DecoderSpec, layer: int, modules: tuple[str, ...], part: str) -> LowRank:
    """Of linear maps fused to one, the update by `part` of an adapter, TASK or STREAMS."""
    outputs = tuple((f"{spec.weight_name(layer, module)}.{part}", spec.out_width(module)) for module in modules)
    return LowRank(f"{spec.fused_name(layer, modules)}.{part}", spec.in_width(modules[0]), outputs)


def empty_streams(spec: DecoderSpec, room: SwappableCapacity) -> StreamSpec | None:
    """Streams without numbers, of which the graph is built."""
    if not room.ns:
        return None
    none = np.zeros((0, 0), np.float32)
    return StreamSpec(
        gamma=1,
        ns=room.ns[0],
        scale=1.0,
        shifted=True,
        embeddings=none,
        shares=np.zeros((0, 2), np.float32),
        root_map=none if room.root_token else None,
        bigram=(none, none) if room.bigram else None,
        draft_vocab=np.zeros(0, np.int64) if room.draft_vocab else None,
        pruning=PruningSpec(none, none) if room.pruning else None,
    )


class SwappableStore(WeightStore):
    """Initializers of which some, `kinds`, are inputs that may be overridden: whatever is added under their names is an
    adapter's and not kept.
    """

    def __init__(self, path: Path, kinds: Mapping[str, Form]) -> None:
        super().__init__(path)
        self.kinds = kinds
        for name, (kind, sizes) in kinds.items():
            self.add_inline(name, np.zeros([0 if isinstance(size, str) else size for size in sizes], kind))

    def add(self, name: str, array: Array) -> str:
        return name if name in self.kinds else super().add(name, array)

    def inputs(self) -> list[onnx.ValueInfoProto]:
        """The graph inputs of these names."""
        return [
            tensor(name, helper.np_dtype_to_tensor_dtype(np.dtype(kind)), list(sizes))
            for name, (kind, sizes) in self.kinds.items()
        ]


class SwappableDecoder(Decoder):
    """A decoder whose linear maps carry an adapter's task LoRA."""

    def linear(self, g: Scope, x: str, rows: Rows, layer: int, modules: tuple[str, ...]) -> str:
        return self.adapted(g, x, rows, layer, modules, (TASK,))

    def adapted(
        self, g: Scope, x: str, rows: Rows, layer: int, modules: tuple[str, ...], parts: tuple[str, ...]
    ) -> str:
        """The base's own maps and these parts of the adapter."""
        updates = [update(self.spec, layer, modules, part) for part in parts]
        return self.add_bias(g, self.precision.linear(g, x, rows, self.fused(layer, modules), updates), layer, modules)


class SwappableStreams(StreamPass):
    """Streams of whichever adapter is there, over as many layers as it asks for.

    Layers that not all adapters use are in a branch of their own, and all branches lie in the main graph: ONNX Runtime
    packs a weight for a branch, not for a branch within one.
    """

    decoder: SwappableDecoder

    def __init__(self, decoder: SwappableDecoder, spec: StreamSpec, candidates: int, room: SwappableCapacity) -> None:
        super().__init__(decoder, spec, candidates, "delta")
        self.linear, self.begins = self._linear, [decoder.spec.layers - ns for ns in room.ns]
        self._entering = Residual("")  # what enters the layers that all use

    def add(
        self, g: Scope, accept: Callable[[Scope], Accepted], presents: list[tuple[str, ...]], stream_ids: str
    ) -> None:
        asked = g.op("Greater", g.op("Size", stream_ids), g.store.constant(0, np.int64))
        starting, idle = Scope(g.store, "streams/start"), Scope(g.store, "streams/none")
        found = accept(starting)
        stream = self._start(starting, found, stream_ids)
        update, nowhere = starting.op("Sub", stream, stream), np.zeros((1, 0, self.decoder.spec.hidden), np.float32)
        values = [
            *(starting.op("Identity", value) for value in (found.number, found.node, found.root or found.node)),
            stream,
            update,
        ]
        nothing = [idle.op("Identity", g.store.constant([-1], np.int64)) for _ in range(3)] + [
            idle.op("Identity", g.store.constant(nowhere, np.float32)) for _ in range(2)
        ]
        types = (TensorProto.INT64,) * 3 + (TensorProto.FLOAT,) * 2
        _, node, root, stream, update = g.ops(
            "If",
            asked,
            out=("accepted_node", None, None, None, None),
            then_branch=_branch(starting, values, types),
            else_branch=_branch(idle, nothing, types),
        )
        accepted = replace(found, node=node, root=root)
        for number, (first, end) in enumerate(pairwise(self.begins)):
            begun, waiting = (Scope(g.store, f"streams/{first}/{name}") for name in ("begun", "waiting"))
            done = self._through(
                begun,
                Residual(stream, update),
                Rows(begun.op("Shape", stream_ids)),
                range(first, end),
                accepted,
                presents,
                stream_ids,
            )
            same = [waiting.op("Identity", value) for value in (stream, update)]
            stream, update = g.ops(
                "If",
                g.op("And", asked, g.op("LessOrEqual", BEGIN, g.ints(number))),
                out=(None, None),
                then_branch=_branch(begun, [done.stream, done.update], types[3:]),
                else_branch=_branch(waiting, same, types[3:]),
            )
        self._entering = Residual(stream, update)
        guessing = Scope(g.store, "streams")
        guesses, shapes = self.guesses(guessing, accepted, presents, stream_ids), dict(list(self.shapes().items())[1:])
        empty = [helper.make_tensor(f"no_{name}", kind, [0, *shape[1:]], []) for name, (kind, shape) in shapes.items()]
        nodes = [helper.make_node("Constant", [], [value.name], value=value, name=value.name) for value in empty]
        g.ops(
            "If",
            asked,
            out=tuple(shapes),
            **{
                name: helper.make_graph(
                    made, name, [], [tensor(value, *form) for value, form in zip(outputs, shapes.values(), strict=True)]
                )
                for name, made, outputs in (
                    ("then_branch", guessing.nodes, guesses),
                    ("else_branch", nodes, [value.name for value in empty]),
                )
            },
        )

    def logits(self, g: Scope, accepted: Accepted, presents: list[tuple[str, ...]], stream_ids: str) -> str:
        rows = Rows(g.op("Shape", stream_ids))
        shared = range(self.begins[-1], self.decoder.spec.layers)
        return self._states_to_logits(
            g, self._through(g, self._entering, rows, shared, accepted, presents, stream_ids), rows
        )

    def _linear(self, g: Scope, x: str, rows: Rows, layer: int, modules: tuple[str, ...]) -> str:
        return self.decoder.adapted(g, x, rows, layer, modules, (TASK, STREAMS))

    def _state(self, g: Scope, accepted: Accepted) -> str:
        states = [g.op("Gather", accepted.entries[layer], accepted.node, axis=1) for layer in self.begins]
        return g.op("Gather", g.op("Concat", *states, axis=1), BEGIN, axis=1)

    def _positions(self, g: Scope, accepted: Accepted, stream_ids: str) -> str:
        own = g.op("Gather", accepted.positions, accepted.node, axis=0)
        return g.op("Add", own, g.op("Mul", g.op("Add", stream_ids, g.ints(1)), SHIFT))

    def head(self, g: Scope, flat: str, rows: Rows) -> str:
        """With a draft vocabulary the adapter brings rows of the LM head, rounded to seven bits unless nothing is."""
        chosen = self.spec.draft_vocab
        if chosen is None:
            return super().head(g, flat, rows)
        part = Weight(HEAD, 0, self.decoder.spec.hidden, lambda: np.zeros(0, np.float32))
        kept = self.decoder.precision if isinstance(self.decoder.precision, Fp32) else Int8()
        products = g.op("Squeeze", kept.linear(g, g.op("Unsqueeze", flat, g.ints(0)), rows, part), g.ints(0))
        return self.decoder.said(g, products, self.decoder.head_bias(g, f"{HEAD}.bias", chosen))


def _branch(scope: Scope, values: Sequence[str], types: Sequence[int]) -> onnx.GraphProto:
    return helper.make_graph(
        scope.nodes, scope.label, [], [tensor(value, kind, None) for value, kind in zip(values, types, strict=True)]
    )
