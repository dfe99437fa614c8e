"""Deferred speculative streams: gamma rows beside the accepted node, once more through the last Ns layers.

    S_j = c_j f(M) + scale * (P_j + a_j W e(root))        (docs/explain/how-it-works.md)

Attention is written in primitive operators over two pieces of K/V, the main rows' (a slice of the cache) and the
streams' own, whose scores meet in one softmax: nothing is concatenated or repeated per query head.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from streamspec.bundle.adapter_folder import rotation_angle
from streamspec.export.drafters.draft_pass import Accepted, ParallelDraftPass
from streamspec.export.drafters.streams.recurrent_rows import NodeStates, RecurrentStreams, slots_of
from streamspec.export.drafters.streams.spec import StreamSpec
from streamspec.export.drafters.streams.stream_masks import StreamMasks
from streamspec.export.layers.attention import attend, by_head
from streamspec.export.layers.decoder import Decoder, Residual
from streamspec.export.layers.heads import Linear, Tables
from streamspec.export.layers.latent_attention import attention_maps
from streamspec.export.layers.short_conv import gated_inputs, mixed_streams
from streamspec.export.ops.builder import Scope
from streamspec.export.options import MERGED
from streamspec.export.quantization.precisions import Rows, mixed_inputs_of
from streamspec.export.spec.decoder_spec import DecoderSpec
from streamspec.export.spec.weight_source import MergedSource
from streamspec.step_graph import STREAM_EMBEDDINGS, STREAM_ROOT_MAP, STREAM_SHARES


def stream_linear(decoder: Decoder, spec: StreamSpec, mode: str) -> Linear:
    """Applies a layer's maps to stream rows: the base's own, plus a low-rank `delta`, or a second `merged` copy."""
    if not spec.lora:
        return decoder.linear
    updates = {f"{decoder.spec.weight_name(layer, module)}.weight": pair for (layer, module), pair in spec.lora.items()}
    merged = MergedSource(decoder.source, updates)

    def apply(g: Scope, x: str, rows: Rows, layer: int, modules: tuple[str, ...], activated: bool = False) -> str:
        if not any((layer, module) in spec.lora for module in modules):
            return decoder.linear(g, x, rows, layer, modules, activated)
        if mode == MERGED:
            weight = replace(decoder.fused(layer, modules, merged, suffix=".streams"), drafter=True)
            return decoder.mapped(g, x, rows, weight, layer, modules, activated)
        update = stream_update(decoder, spec, g, x, layer, modules)
        total = g.op("Add", decoder.linear(g, x, rows, layer, modules), update)
        return decoder.activated(g, total, layer, decoder.fused(layer, modules).rows // 2) if activated else total

    return apply


def stream_update(decoder: Decoder, spec: StreamSpec, g: Scope, x: str, layer: int, modules: tuple[str, ...]) -> str:
    """x A^T B^T of the fused modules: the A stacked, the B on the diagonal of one matrix."""
    x = mixed_inputs_of(g, x, decoder.fused(layer, modules))
    label = decoder.spec.fused_name(layer, modules) + ".streams"
    if f"{label}.A" not in g.store:
        pairs = [spec.lora.get((layer, module)) for module in modules]
        rank = sum(pair[0].shape[0] for pair in pairs if pair)
        own = decoder.spec.at(layer)
        down = np.zeros((rank, own.in_width(modules[0])), np.float32)
        up = np.zeros((rank, sum(own.out_width(m) for m in modules)), np.float32)
        row = column = 0
        for module, pair in zip(modules, pairs, strict=True):
            width = own.out_width(module)
            if pair:
                size = pair[0].shape[0]
                down[row : row + size] = pair[0]
                up[row : row + size, column : column + width] = pair[1].T
                row += size
            column += width
        g.store.add(f"{label}.A", down.T)
        g.store.add(f"{label}.B", up)
    return g.op("MatMul", g.op("MatMul", x, f"{label}.A"), f"{label}.B")


class StreamPass(ParallelDraftPass):
    """Streams as a branch."""

    spec: StreamSpec

    def __init__(self, decoder: Decoder, spec: StreamSpec, candidates: int, mode: str) -> None:
        super().__init__(decoder, spec, candidates, mode)
        self.linear = stream_linear(decoder, spec, mode)
        self.first = spec.first_layer(decoder.spec.layers)
        self.exit_layer = spec.exit_layer(decoder.spec.layers) or 0

    def logits(self, g: Scope, accepted: Accepted, presents: list[tuple[str, ...]], stream_ids: str) -> str:
        """Adds the stream rows through the last layers and the head: [m, D]."""
        rows = Rows(g.op("Shape", stream_ids))
        residual = self._through(
            g,
            Residual(self.start(g, accepted, stream_ids)),
            rows,
            range(self.first, self.decoder.spec.layers),
            accepted,
            presents,
            stream_ids,
        )
        return self._states_to_logits(g, residual, rows)

    def _through(
        self,
        g: Scope,
        residual: Residual,
        rows: Rows,
        layers: range,
        accepted: Accepted,
        presents: list[tuple[str, ...]],
        stream_ids: str,
    ) -> Residual:
        group = StreamRows(self, g, accepted, stream_ids, rows)
        rotary = self.decoder.rotary(g, group.positions)
        for layer in layers:
            with g.named(f"layers.{layer}"):
                residual = self._layer(g, residual, group, layer, rotary, presents[layer - self.first])
        return residual

    def _states_to_logits(self, g: Scope, residual: Residual, rows: Rows) -> str:
        with g.named("head"):
            return self.head(g, g.op("Squeeze", self.decoder.finish(g, residual), g.ints(0)), rows)

    def start(self, g: Scope, accepted: Accepted, stream_ids: str) -> str:
        """S [1, m, H]"""
        spec, store = self.spec, g.store
        table = store.add(STREAM_EMBEDDINGS, (spec.embeddings * spec.scale).astype(np.float32)[None])
        shift, state = g.op("Gather", table, stream_ids, axis=1), self._state(g, accepted)
        if spec.moved is not None:
            down, up = (store.add(f"streams.start.{n}", side.T) for n, side in zip("DU", spec.moved, strict=True))
            state = g.op("Add", state, g.op("MatMul", g.op("MatMul", state, down), up))
        start = g.op("Add", self._share(g, state, stream_ids, 0), shift)
        if spec.root_map is None:
            return start
        root = self.decoder.embed(g, g.op("Unsqueeze", accepted.root, g.ints(0)))
        unit = self.decoder.unit_rms(g, root)
        mapping = store.add(STREAM_ROOT_MAP, (spec.root_map * spec.scale).astype(np.float32).T)
        return g.op("Add", start, self._share(g, g.op("MatMul", unit, mapping), stream_ids, 1))

    def _state(self, g: Scope, accepted: Accepted) -> str:
        """M of the accepted node [1, 1, H]"""
        return g.op("Gather", accepted.entries[self.first], accepted.node, axis=1)

    def window(self, layer: int) -> int | None:
        """How many positions back rows of a layer look, themselves included; None: all."""
        return self.decoder.spec.windows[layer]

    def sees_later(self, layer: int) -> bool:
        """Whether a stream sees those after it, too."""
        return False

    def looking_from(self, g: Scope, positions: str) -> str:
        """The positions that windows count from, of rows at int64 `positions` [m]."""
        return positions

    def _share(self, g: Scope, x: str, stream_ids: str, which: int) -> str:
        """x [1, 1, H] times c (0) or a (1) of each stream: [1, m, H], or x itself where all are 1."""
        if self.spec.shares is None:
            return x
        column = g.store.add(STREAM_SHARES[which], self.spec.shares[None, :, which : which + 1].astype(np.float32))
        return g.op("Mul", x, g.op("Gather", column, stream_ids, axis=1))

    def positions(self, g: Scope, accepted: Accepted, stream_ids: str) -> str:
        """int64 [m]"""
        own = g.op("Gather", accepted.positions, accepted.node, axis=0)
        if not self.spec.shifted:
            return own if accepted.several else g.op("Expand", own, g.op("Shape", stream_ids))
        return g.op("Add", g.op("Add", own, stream_ids), g.ints(1))

    def _layer(
        self, g: Scope, residual: Residual, group: StreamRows, layer: int, rotary: Tables, present: tuple[str, ...]
    ) -> Residual:
        decoder, rows = self.decoder, group.rows
        normed, residual = decoder.enter(g, residual, layer)
        mixed = [
            self._convolved(g, normed, group, layer, present)
            if mixer.convolves
            else self._attended(g, normed, group, layer, rotary, present)
            for mixer in decoder.spec.mixers(layer)
        ]
        return decoder.leave(g, mixed, normed, residual, rows, layer, self.linear)

    def _convolved(self, g: Scope, normed: str, group: StreamRows, layer: int, present: tuple[str, ...]) -> str:
        """[1, m, ..] by a short convolution, and by the state that follows, if any."""
        decoder, rows, accepted = self.decoder, group.rows, group.seeing(layer).accepted
        if decoder.spec.state is not None:
            with g.named("recurrent"):
                states = group.states(g, layer)
                return RecurrentStreams(g, decoder, layer, self.linear, accepted, states).mix(normed, rows)
        gate, inputs = gated_inputs(decoder, g, normed, rows, layer, self.linear)
        with g.named("conv"):
            main = accepted.last_inputs(g, present, decoder.spec.conv_widths[layer] - 1)
            return g.op("Mul", gate, mixed_streams(decoder, g, inputs, rows, main, layer))

    def _attended(
        self, g: Scope, normed: str, group: StreamRows, layer: int, rotary: Tables, present: tuple[str, ...]
    ) -> str:
        """[1, m, Hq*D] by attention."""
        decoder, rows, sizes = self.decoder, group.rows, self.decoder.spec.at(layer)
        linear = attention_maps(decoder, layer, self.linear)
        plain = not (decoder.spec.kv_sources or self.spec.value_rotation or decoder.spec.family.sinks)
        if decoder.native is not None and decoder.native.attends(sizes) and plain:
            heads = decoder.packed_heads(g, normed, rows, layer, rotary, linear)
            mask = group.seeing(layer).of(g, self.window(layer), 1, self.sees_later(layer))
            return linear.applied(g, decoder.native.draft_attention(g, sizes, heads, mask, present, own=True))
        heads_of = decoder.queries_keys_values(g, normed, rows, layer, rotary, linear)
        return linear.applied(g, group.mixed(g, layer, *heads_of, present))


class StreamRows:
    """Stream rows on their way through the layers, and what they see: of the accepted node `accepted.node` int64 [1],
    or of several nodes, the one of each row [m]."""

    def __init__(self, streams: StreamPass, g: Scope, accepted: Accepted, stream_ids: str, rows: Rows) -> None:
        self.streams, self.spec, self.rows = streams, streams.decoder.spec, rows
        self.positions = streams.positions(g, accepted, stream_ids)
        looking = streams.looking_from(g, self.positions)
        self._masks = StreamMasks(accepted, stream_ids, self.positions, looking, rows)
        self._below = accepted.below and StreamMasks(accepted.below, stream_ids, self.positions, looking, rows)
        self._own: dict[int, tuple[str, str]] = {}  # by layer, keys and values of the streams themselves
        self._states: NodeStates | None = None

    def seeing(self, layer: int) -> StreamMasks:
        """The masks over the keys that a layer attends to."""
        return self._below if self._below and self.spec.source(layer) < self.streams.exit_layer else self._masks

    def states(self, g: Scope, layer: int) -> NodeStates:
        """What they see of the states of all layers with such, `layer` among them."""
        if self._states is None:
            with g.named("states"):
                slots = slots_of(g, self.streams.decoder, layer)
                self._states = NodeStates(g, self._masks.accepted, slots, self.rows, self.streams.spec.gamma)
        return self._states

    def mixed(self, g: Scope, layer: int, q: str, k: str, v: str, present: tuple[str, ...]) -> str:
        """[1, m, Hq*D] of rotated q, k and v. A layer that attends to another's keys sees the streams where they run
        through that one; else the main rows alone."""
        spec, masks, own = self.spec, self.seeing(layer), self._own
        sizes, source = spec.at(layer), spec.source(layer)
        window, later = self.streams.window(layer), self.streams.sees_later(layer)
        mask = masks.of(g, window, sizes.group, later, beside=source == layer or source in own)
        if source == layer:
            own[layer] = by_head(g, sizes, k), by_head(g, sizes, self._turned(g, sizes, v))
        seen = masks.accepted.seen(g, spec, present, spec.ring(layer))
        parts = [*seen, own[source]] if source in own else seen
        return attend(g, sizes, q, parts, mask, self.streams.decoder.sinks(g, layer))

    def _turned(self, g: Scope, sizes: DecoderSpec, v: str) -> str:
        """v [1, m, Hkv*D] of each stream turned by its angle, where that tells streams apart."""
        streams = self.streams.spec
        if not streams.value_rotation:
            return v
        angles = np.arange(1, streams.gamma + 1)[:, None] * np.full(sizes.head_dim // 2, rotation_angle(streams.gamma))
        tables = (g.store.constant(side(angles), np.float32) for side in (np.cos, np.sin))
        rows = [g.op("Gather", table, self._masks.stream_ids, axis=0) for table in tables]
        return g.contrib("RotaryEmbedding", v, g.ints(0), *rows)
