"""The step graph of a swappable bundle: the base's weights are constants, all tensors of an adapter are inputs.

An adapter's tensors are initializers that may be overridden, of rank 0 or empty without an adapter, so that the graph
alone is the base. `lora_inputs` says how rows stay exact beside weights that are inputs.

A bundle has `SwappableCapacity` for streams over certain numbers of layers, a bigram, a draft vocabulary; an adapter
uses all of it or less, and the defaults of the inputs that it leaves out have no effect.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import cast

import numpy as np
from onnx import TensorProto

from streamspec.bundle.manifest import SwappableCapacity
from streamspec.export.drafters.draft_pass import Accepted
from streamspec.export.drafters.streams.draft_pass import StreamPass
from streamspec.export.drafters.streams.spec import StreamSpec
from streamspec.export.layers.decoder import Decoder, Residual
from streamspec.export.layers.heads import Linear
from streamspec.export.ops.builder import Array, Scope, WeightStore
from streamspec.export.quantization.lora_inputs import LowRank
from streamspec.export.quantization.precisions import Fp32, Int8, Precision, Rows, Weight
from streamspec.export.spec.decoder_spec import DecoderSpec
from streamspec.export.spec.draft_spec import DraftSpec, PruningSpec, graph_features
from streamspec.step_graph import (
    ACCEPTED_NODE,
    DRAFT_HEAD,
    DRAFT_HEAD_BIAS,
    STREAM_BEGIN,
    STREAM_LORA,
    STREAM_SHIFT,
    TASK_LORA,
    GraphTensor,
    adapter_inputs,
)

STATE_TYPES = (TensorProto.FLOAT,) * 2  # of the residual stream and the pending update


def adapter_rows(
    spec: DecoderSpec, room: SwappableCapacity, precision: Precision, head_bias: bool
) -> list[GraphTensor]:
    """The inputs that an adapter may fill. `head_bias`: the LM head has one."""
    rows: list[GraphTensor] = []
    for layer in range(spec.layers):
        shared = layer < spec.layers - max(room.ns, default=0)
        for part in (TASK_LORA,) if shared else (TASK_LORA, STREAM_LORA):
            for modules in spec.fused(layer, streams=part == STREAM_LORA):
                rows += update(spec, layer, modules, part).inputs(precision.coded)
    streams = empty_streams(spec, room)
    if streams is None:
        return rows
    return rows + adapter_inputs(
        graph_features(
            spec,
            streams,
            room.candidates,
            swappable=True,
            root_map=room.root_token,
            draft_vocab=room.draft_vocab,
            float_head=room.draft_vocab and isinstance(precision, Fp32),
            head_bias=room.draft_vocab and head_bias,
        )
    )


def update(spec: DecoderSpec, layer: int, modules: tuple[str, ...], part: str) -> LowRank:
    """The update of linear maps fused to one by `part` of an adapter, `TASK_LORA` or `STREAM_LORA`."""
    own = spec.at(layer)
    outputs = tuple((f"{spec.weight_name(layer, module)}.{part}", own.out_width(module)) for module in modules)
    return LowRank(f"{spec.fused_name(layer, modules)}.{part}", own.in_width(modules[0]), outputs)


def empty_streams(spec: DecoderSpec, room: SwappableCapacity) -> StreamSpec | None:
    """Builds streams with empty tensors, for which the graph is written."""
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
    """Initializers, of which those of `rows` are inputs that an adapter overrides."""

    def __init__(self, path: Path, rows: Sequence[GraphTensor]) -> None:
        super().__init__(path)
        self.rows, self._names = rows, {row.name for row in rows}
        for row in rows:
            self.add_inline(row.name, row.filled(0, symbol=0))

    def add(self, name: str, array: Array) -> str:
        """Adds an initializer; keeps nothing under the name of an adapter's input."""
        return name if name in self._names else super().add(name, array)


class SwappableDecoder(Decoder):
    """A decoder whose linear maps carry an adapter's task LoRA."""

    def linear(
        self, g: Scope, x: str, rows: Rows, layer: int, modules: tuple[str, ...], activated: bool = False
    ) -> str:
        """Applies the base's maps and the adapter's task LoRA."""
        return self.adapted((TASK_LORA,))(g, x, rows, layer, modules, activated)

    def adapted(self, parts: tuple[str, ...]) -> Linear:
        """Applies the base's own maps and these parts of the adapter."""

        def apply(g: Scope, x: str, rows: Rows, layer: int, modules: tuple[str, ...], activated: bool = False) -> str:
            updates = [update(self.spec, layer, modules, part) for part in parts]
            return self.mapped(g, x, rows, self.fused(layer, modules), layer, modules, activated, updates)

        return apply


class SwappableStreams(StreamPass):
    """Streams of the adapter in use, over as many layers as it has them.

    Layers that not all adapters use are in a branch of their own, and all branches lie in the main graph: ONNX Runtime
    packs a weight for a branch, not for a branch within one.
    """

    decoder: SwappableDecoder

    def __init__(self, decoder: SwappableDecoder, spec: DraftSpec, candidates: int, room: SwappableCapacity) -> None:
        super().__init__(decoder, cast(StreamSpec, spec), candidates, "delta")
        self.linear = decoder.adapted((TASK_LORA, STREAM_LORA))
        self.begins = [decoder.spec.layers - ns for ns in room.ns]
        self._entering = Residual("")  # the input of the next layers

    def add(
        self, g: Scope, accept: Callable[[Scope], Accepted], presents: list[tuple[str, ...]], stream_ids: str
    ) -> None:
        """Adds the start, the optional layers and the drafting as three `If`s of the main graph."""
        drafting = g.op("Greater", g.op("Size", stream_ids), g.integer(0))
        accepted, self._entering = self._start_branch(g, drafting, accept, stream_ids)
        for number, (first, end) in enumerate(pairwise(self.begins)):
            begun = g.op("And", drafting, g.op("LessOrEqual", STREAM_BEGIN, g.ints(number)))
            self._entering = self._optional_layers(g, begun, range(first, end), accepted, presents, stream_ids)
        inside = Scope(g.store, "streams")
        values = self.propose(inside, accepted, presents, stream_ids)
        self.branch(g, drafting, self.outputs[1:], (inside, values), self.empty_outputs())

    def _start_branch(
        self, g: Scope, drafting: str, accept: Callable[[Scope], Accepted], stream_ids: str
    ) -> tuple[Accepted, Residual]:
        """Adds acceptance and the streams' start; without drafts there is no node and there are no rows."""
        starting, idle = Scope(g.store, "streams/start"), Scope(g.store, "streams/none")
        accepted = accept(starting)
        stream = self.start(starting, accepted, stream_ids)
        update, no_rows = starting.op("Sub", stream, stream), np.zeros((1, 0, self.decoder.spec.hidden), np.float32)
        nodes = (accepted.node_in_call, accepted.node, accepted.root or accepted.node)
        values = [*(starting.op("Identity", value) for value in nodes), stream, update]
        empty = [idle.op("Identity", g.store.constant([-1], np.int64)) for _ in nodes]
        empty += [idle.op("Identity", g.store.constant(no_rows, np.float32)) for _ in STATE_TYPES]
        types = (*[TensorProto.INT64] * 3, *STATE_TYPES)
        _, node, root, stream, update = g.either(
            drafting, (starting, values), (idle, empty), types, (ACCEPTED_NODE, None, None, None, None)
        )
        below = accepted.below and replace(accepted.below, node=ACCEPTED_NODE, root=root)
        return replace(accepted, node=node, root=root, below=below), Residual(stream, update)

    def _optional_layers(
        self, g: Scope, begun: str, layers: range, accepted: Accepted, presents: list[tuple[str, ...]], stream_ids: str
    ) -> Residual:
        """Adds layers that only some adapters use; streams that have not `begun` pass them by."""
        inside, outside = (Scope(g.store, f"streams/{layers.start}/{name}") for name in ("begun", "waiting"))
        rows = Rows(inside.op("Shape", stream_ids))
        done = self._through(inside, self._entering, rows, layers, accepted, presents, stream_ids)
        pending = done.update or inside.op("Sub", done.stream, done.stream)
        same = [outside.op("Identity", value) for value in (self._entering.stream, self._entering.update)]
        stream, update = g.either(begun, (inside, [done.stream, pending]), (outside, same), STATE_TYPES)
        return Residual(stream, update)

    def logits(self, g: Scope, accepted: Accepted, presents: list[tuple[str, ...]], stream_ids: str) -> str:
        """Adds the layers that all adapters use, and the head: [m, D]."""
        rows = Rows(g.op("Shape", stream_ids))
        shared = range(self.begins[-1], self.decoder.spec.layers)
        return self._states_to_logits(
            g, self._through(g, self._entering, rows, shared, accepted, presents, stream_ids), rows
        )

    def _state(self, g: Scope, accepted: Accepted) -> str:
        states = [g.op("Gather", accepted.entries[layer], accepted.node, axis=1) for layer in self.begins]
        return g.op("Gather", g.op("Concat", *states, axis=1), STREAM_BEGIN, axis=1)

    def positions(self, g: Scope, accepted: Accepted, stream_ids: str) -> str:
        own = g.op("Gather", accepted.positions, accepted.node, axis=0)
        return g.op("Add", own, g.op("Mul", g.op("Add", stream_ids, g.ints(1)), STREAM_SHIFT))

    def head(self, g: Scope, flat: str, rows: Rows) -> str:
        """Applies the LM head; with a draft vocabulary its rows from the adapter, in int8 unless the graph is fp32."""
        chosen = self.spec.draft_vocab
        if chosen is None:
            return super().head(g, flat, rows)
        part = Weight(DRAFT_HEAD, 0, self.decoder.spec.hidden, lambda: np.zeros(0, np.float32))
        kept = self.decoder.precision if isinstance(self.decoder.precision, Fp32) else Int8()
        products = g.op("Squeeze", kept.linear(g, g.op("Unsqueeze", flat, g.ints(0)), rows, part), g.ints(0))
        return self.decoder.finish_logits(g, products, self.decoder.head_bias(g, DRAFT_HEAD_BIAS, chosen))
