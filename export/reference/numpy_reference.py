"""Computes a decoder in numpy, in float32: what graphs are compared with and calibrated on where PyTorch is not.

One forward pass over all rows together, without a cache, independent of the step graph. Written to be read, not to be
fast. tests/export/test_without_torch.py compares it with transformers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np

from streamspec.adapters.base_models.parameters import shapes_by_layer
from streamspec.adapters.base_models.weight_files import HEAD
from streamspec.draft_tree import MASKED
from streamspec.export.ops.builder import Array
from streamspec.export.reference.long_context import LongText
from streamspec.export.spec.decoder_spec import Rotary
from streamspec.export.spec.mixture_spec import DOWN, GATE, UP
from streamspec.export.spec.weight_source import Source, Table
from streamspec.export.weights.checkpoint import Checkpoint, CheckpointSource
from streamspec.export.weights.config_spec import describe_checkpoint
from streamspec.progress import track

if TYPE_CHECKING:
    from streamspec.export.reference.reference import Around

PIECE = 1 << 20  # weights in float32 at a time, which a processor's cache holds
SCORES = 1 << 24  # of attention, at a time
Skipped = Callable[[int | None], Array]  # of a window: how many skipped rows each row sees [T]


def _gelu_tanh(x: Array) -> Array:
    inner = np.float32(np.sqrt(2 / np.pi)) * (x + np.float32(0.044715) * x * x * x)
    return np.float32(0.5) * x * (1 + np.tanh(inner))


def _silu(x: Array) -> Array:
    out = np.clip(x, -80, None)
    np.exp(np.negative(out, out=out), out=out)
    out += 1
    np.divide(x, out, out=out)
    return out


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": _silu,
    "gelu_tanh": _gelu_tanh,
    "relu": lambda x: np.maximum(x, 0),
    "relu2": lambda x: np.square(np.maximum(x, 0)),
}


class NumpyReference:
    """A checkpoint's layers, called one by one; a `reference.Reference`."""

    def __init__(self, model: Checkpoint) -> None:
        self.config, self.spec = model.config, describe_checkpoint(model)
        self.source: Source = CheckpointSource(model, self.spec)
        self._watching: tuple[int, Sequence[str], dict[str, Array]] = (-1, (), {})

    def states(self, tokens: Array, positions: Array, sees: Array, around: Around | None = None) -> Array:
        """Finished states float32 [1, T, H] of rows at int64 positions [T]."""
        return self._run(np.asarray(tokens)[None], positions, sees, around)

    def texts(self, tokens: Array, around: Around | None = None) -> Array:
        """Finished states float32 [B, T, H] of texts of tokens [B, T], each by itself."""
        length = tokens.shape[1]
        return self._run(tokens, np.arange(length), np.tri(length, dtype=bool), around)

    def finished(self, output: Array) -> Array:
        """The input of the head, float32 [T, H], of all rows of `states`."""
        return output[0]

    def logits(self, output: Array) -> Array:
        """Logits float32 [T, V] of all rows of `states`."""
        return self.head(output[0])

    def head(self, finished: Array) -> Array:
        """Logits float32 [r, V] of finished states [r, H]."""
        spec = self.spec
        name = f"{spec.stacked(spec.family.embedding)}.weight" if spec.tied else HEAD
        logits = times(finished, self.source.rows_of(name))
        logits *= np.float32(spec.logit_scale)
        return _capped(logits, spec.logit_cap)

    def long(self, text: LongText, tokens: Array) -> Array:
        """Logits float32 [rows, V] of the compared rows of a long text, whose skipped rows are zeros."""
        where, skips = text.positions, np.concatenate([[0], np.cumsum(~text.computed)])

        def skipped(window: int | None) -> Array:
            first = np.zeros_like(where) if window is None else np.maximum(where - window + 1, 0)
            counts: Array = skips[where + 1] - skips[first]
            return counts

        final = self._run(tokens[None], where, where[:, None] >= where, None, skipped)[0]
        return self.head(final[np.searchsorted(where, text.compared)])

    @contextmanager
    def watched(self, layer: int, modules: Sequence[str]) -> Iterator[dict[str, Array]]:
        """Collects the inputs of linear maps of a layer while the block runs: rows [rows, in] by the map's name."""
        self._watching = layer, modules, {}
        try:
            yield self._watching[2]
        finally:
            self._watching = -1, (), {}

    def fast_products(self) -> Any:
        """Changes nothing: numpy has one kind of product."""
        return nullcontext()

    @property
    def parameters(self) -> int:
        """Numbers in the layers."""
        return sum(math.prod(shape) for shapes in shapes_by_layer(self.config) for shape in shapes.values())

    def _run(
        self, tokens: Array, positions: Array, sees: Array, around: Around | None, skipped: Skipped | None = None
    ) -> Array:
        spec, hidden = self.spec, self.embedded(tokens)
        turns, taps = self.turns(positions), max(spec.conv_widths)
        before = _last_seen(sees, max(taps, 2)) if taps else np.empty((len(sees), 0), np.int64)
        for layer in track(range(spec.layers), "layers of the reference", spec.layers):
            window = spec.windows[layer]
            mask = _mask(sees, positions, window)
            if skipped is not None:  # a zero stands for all zeros that a row sees
                counts = np.maximum(np.log(np.maximum(skipped(window), 1e-30)), MASKED)
                mask = np.concatenate([counts[:, None].astype(np.float32), mask], axis=1)
            with around(layer) if around else nullcontext():
                hidden = self._fed_forward(layer, self._mixed(layer, hidden, mask, turns, before))
        return self.norm(hidden, spec.stacked(spec.family.final_norm))

    def embedded(self, tokens: Array) -> Array:
        """Inputs of the first layer float32 [.., H] of tokens [..]."""
        table = self.source.rows_of(f"{self.spec.stacked(self.spec.family.embedding)}.weight")
        return table[tokens.reshape(-1)].reshape(*tokens.shape, -1) * np.float32(self.spec.embedding_scale)

    def turns(self, positions: Array) -> list[tuple[Array, Array]]:
        """cos and sin [T, rotated / 2] of each kind of rotary embedding."""
        return [_turns(kind, positions) for kind in self.spec.rotaries]

    def attending_layer(self, layer: int, hidden: Array, window: int | None) -> Array:
        """The last rows [B, H] of texts [B, T, H] after a layer in which they attend to no more than `window` rows."""
        positions = np.arange(hidden.shape[1])
        mask = _mask(np.tri(len(positions), dtype=bool), positions, window)
        mixed = self._mixed(layer, hidden, mask, self.turns(positions), np.empty((len(positions), 0), np.int64))
        return self._fed_forward(layer, mixed[:, -1:])[:, 0]

    def _mixed(
        self, layer: int, hidden: Array, mask: Array, turns: Sequence[tuple[Array, Array]], before: Array
    ) -> Array:
        spec, family = self.spec, self.spec.family
        normed = self._named_norm(layer, hidden, family.attention_norm)
        if spec.attends(layer):
            mixed = self._map(layer, family.out[0], self._attention(layer, normed, mask, turns))
        else:
            mix = self._delta_rule if spec.state else self._short_convolution
            mixed = self._map(layer, family.conv_out[0], mix(layer, normed, before))
        update = self._named_norm(layer, mixed, family.attention_out_norm)
        return hidden + update * np.float32(spec.residual_scale)

    def _fed_forward(self, layer: int, hidden: Array) -> Array:
        spec, family = self.spec, self.spec.family
        normed = self._named_norm(layer, hidden, spec.mlp_norm)
        compute = self._mlp if spec.mlp_kind(layer) == "dense" else self._experts
        update = self._named_norm(layer, compute(layer, normed), family.mlp_out_norm)
        return hidden + update * np.float32(spec.residual_scale)

    def _mlp(self, layer: int, normed: Array, up: Sequence[str] = (), down: Sequence[str] = ()) -> Array:
        """An MLP of the maps `up` and `down`, or of the layer's own."""
        first, *gated = up or self.spec.family.up
        inner = ACTIVATIONS[self.spec.activation](self._map(layer, first, normed))
        for name in gated:
            inner *= self._map(layer, name, normed)
        return self._map(layer, (down or self.spec.family.down)[0], inner)

    def _experts(self, layer: int, normed: Array) -> Array:
        """The sum of what the likeliest experts of each row give, by their scores, and of the MLP for all rows."""
        mixture, rows = self.spec.mixture, normed.reshape(-1, normed.shape[-1])
        assert mixture is not None
        names = mixture.names
        scores = SCORES_OF[names.scores](self._map(layer, names.router, rows))
        added = self.source.weight(self.spec.weight_name(layer, str(names.bias))) if mixture.biased else 0
        ranked = scores + added
        chosen = np.argsort(-ranked, axis=1, kind="stable")[:, : mixture.active]
        shares, update = np.take_along_axis(scores, chosen, axis=1), np.zeros_like(rows)
        if mixture.normalized:
            shares /= shares.sum(axis=1, keepdims=True) + np.float32(names.added)
        shares *= np.float32(mixture.scale)
        for number in np.unique(chosen):
            own, place = np.nonzero(chosen == number)
            gate, up, down = (mixture.expert(number, part) for part in (GATE, UP, DOWN))
            update[own] += self._mlp(layer, rows[own], (gate, up), (down,)) * shares[own, place][:, None]
        if mixture.shared:
            share = _sigmoid(self._map(layer, names.shared_gate, rows)) if names.shared_gate else 1
            update += self._mlp(layer, rows, *names.shared) * share
        return update.reshape(normed.shape)

    def _short_convolution(self, layer: int, normed: Array, before: Array) -> Array:
        """C sum_k w_k u_k [B, T, H] of normed rows [B, T, H], where u = B x of the rows `before` [T, K] each (LFM2,
        arXiv 2511.23404)."""
        first, gate, x = np.split(self._map(layer, self.spec.family.conv_in[0], normed), 3, axis=-1)
        return np.asarray(gate * self._convolved(layer, "conv", first * x, before))

    def _convolved(self, layer: int, taps: str, inputs: Array, before: Array) -> Array:
        """sum_k w_k u_k of inputs u [B, T, N] of the rows `before` [T, K] each."""
        weight = self._part(layer, f"{taps}.weight")  # [N, 1, taps]
        mixed = np.zeros_like(inputs)
        for tap, rows in enumerate(before.T[before.shape[1] - weight.shape[-1] :]):
            mixed += np.where((rows >= 0)[:, None], inputs[:, rows], 0) * weight[:, 0, tap]
        return mixed

    def _part(self, layer: int, name: str) -> Array:
        """A weight of the convolution's module."""
        return self.source.weight(self.spec.weight_name(layer, f"{self.spec.family.conv}.{name}"))

    def _delta_rule(self, layer: int, normed: Array, before: Array) -> Array:
        """What states return to normed rows [B, T, H], each after the state of the row that it sees last (gated delta
        rule, arXiv 2412.06464): S = a S' + k (b (v - a S' k))^T, S^T q."""
        spec, names, sizes = self.spec, self.spec.family.recurrent, self.spec.state
        assert names is not None and sizes is not None
        inputs, gate, step, decay = (self._map(layer, name, normed) for name in spec.family.conv_in)
        mixed = _silu(self._convolved(layer, names.taps, inputs, before))
        q, k, v = np.split(mixed, [sizes.keys, 2 * sizes.keys], axis=-1)
        group = sizes.heads // sizes.key_heads
        q, k = (_unit(x.reshape(*x.shape[:2], sizes.key_heads, -1)).repeat(group, axis=2) for x in (q, k))
        v, q = v.reshape(*v.shape[:2], sizes.heads, -1), q * np.float32(sizes.key_width**-0.5)
        growth = -np.exp(self._part(layer, names.decay)) * np.logaddexp(
            np.float32(0), decay + self._part(layer, names.decay_bias)
        )
        kept, step = np.exp(growth), _sigmoid(step)
        parents, returned = before[:, -2].tolist(), np.empty_like(v)
        last_use = {parent: row for row, parent in enumerate(parents)}
        states = {-1: np.zeros((len(v), sizes.heads, sizes.key_width, sizes.width), np.float32)}
        for row, parent in enumerate(parents):
            state = states.pop(parent) if last_use[parent] == row else states[parent].copy()
            state *= kept[:, row, :, None, None]
            key, new = k[:, row, :, :, None], v[:, row] - (k[:, row, :, None] @ state)[:, :, 0]
            state += key * (new * step[:, row, :, None])[:, :, None]
            returned[:, row] = (q[:, row, :, None] @ state)[:, :, 0]
            if row in last_use:
                states[row] = state
        finished = self.norm(returned, spec.weight_name(layer, f"{spec.family.conv}.{names.norm}"))
        return np.asarray(finished.reshape(gate.shape) * _silu(gate))

    def _attention(self, layer: int, normed: Array, mask: Array, turns: Sequence[tuple[Array, Array]]) -> Array:
        """[B, T, Hq * D] of normed rows [B, T, H] under an additive mask [T, K]."""
        spec, family = self.spec, self.spec.family
        q, k, v = (self._map(layer, name, normed) for name in family.qkv)
        if family.gated_queries:
            both = np.split(q.reshape(*q.shape[:2], spec.heads, -1), 2, axis=-1)
            q, gate = (half.reshape(*q.shape[:2], -1) for half in both)
        kinds = spec.rotary_of[layer]

        def turned(x: Array, kind: int) -> Array:
            return x if kinds is None else _turned(x, *turns[kinds[kind]])

        def finished(x: Array, side: int) -> Array:
            if not spec.head_norms:
                return turned(self._heads(x), side)
            name = spec.weight_name(layer, spec.head_norms[side])
            if spec.joint_head_norms:
                return turned(self._heads(self.norm(x, name)), side)
            if family.head_norms_last:
                return self.norm(turned(self._heads(x), side), name)
            return turned(self.norm(self._heads(x), name), side)

        q, k, v = finished(q, 0), finished(k, 1), self._heads(v)
        count, rows = q.shape[0], q.shape[2]
        q = q.reshape(count, spec.kv_heads, spec.group, rows, spec.head_dim)
        out, columns = np.empty_like(q), mask.shape[1] - k.shape[2]  # 1 where zeros are counted
        step = max(1, SCORES // (count * spec.heads * mask.shape[1]))
        for at in range(0, rows, step):
            part = slice(at, at + step)
            scores = q[:, :, :, part] @ k[:, :, None].swapaxes(-1, -2)
            scores *= np.float32(spec.attention_scale)
            scores = _capped(scores, spec.attention_cap)
            scores = np.pad(scores, [(0, 0)] * 4 + [(columns, 0)]) if columns else scores
            scores += mask[part]
            out[:, :, :, part] = _softmax(scores)[..., columns:] @ v[:, :, None]
        heads = out.transpose(0, 3, 1, 2, 4).reshape(count, rows, -1)
        return heads * _sigmoid(gate) if family.gated_queries else heads

    def _heads(self, x: Array) -> Array:
        """[B, heads, T, D] of [B, T, heads * D]."""
        return x.reshape(*x.shape[:2], -1, self.spec.head_dim).swapaxes(1, 2)

    def _map(self, layer: int, module: str, x: Array) -> Array:
        """A linear map of a layer, of rows [.., in]."""
        watched, modules, seen = self._watching
        if watched == layer and module in modules:
            seen[module] = x.reshape(-1, x.shape[-1])
        name = self.spec.weight_name(layer, module)
        product = times(x.reshape(-1, x.shape[-1]), self.source.rows_of(f"{name}.weight"))
        if (bias := self.source.bias(f"{name}.bias")) is not None:  # in the graph's order
            order = self.spec.row_order(module)
            product += bias if order is None else bias[np.argsort(order)]
        return product.reshape(*x.shape[:-1], -1)

    def _named_norm(self, layer: int, x: Array, module: str | None) -> Array:
        return x if module is None else self.norm(x, self.spec.weight_name(layer, module))

    def norm(self, x: Array, name: str) -> Array:
        mean = np.square(x).mean(axis=-1, keepdims=True) + np.float32(self.spec.eps)
        normed: Array = x / np.sqrt(mean) * self.source.weight(f"{name}.weight")
        return normed


def _mask(sees: Array, positions: Array, window: int | None) -> Array:
    """Additive float32 [T, T]: 0 where a row sees a column, also within the sliding window."""
    seen = sees if window is None else sees & (positions[:, None] - positions < window)
    return np.where(seen, np.float32(0), np.float32(MASKED))


def times(rows: Array, table: Table | Array) -> Array:
    """Rows [n, in] times the transposed table [out, in]: [n, out], a piece of the table after the other."""
    outputs, width = table.shape
    product, step = np.empty((len(rows), outputs), np.float32), max(len(rows), PIECE // width)
    for at in range(0, outputs, step):
        piece = slice(at, at + step)
        product[:, piece] = rows @ table[piece].T
    return product


def _last_seen(sees: Array, count: int) -> Array:
    """int64 [T, count]: the last columns that each row of bool [T, K] sees, ascending; -1 where it sees fewer."""
    seen = np.where(sees, np.arange(sees.shape[1]), -1)
    padded = np.pad(seen, [(0, 0), (count, 0)], constant_values=-1)
    last: Array = np.sort(np.partition(padded, padded.shape[1] - count - 1, axis=1)[:, padded.shape[1] - count :])
    return last


def _softmax(scores: Array) -> Array:
    """In place, along the last axis."""
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    return scores


def _unit(x: Array) -> Array:
    """x over the length of its last axis."""
    return np.asarray(x / np.sqrt(np.square(x).sum(axis=-1, keepdims=True) + np.float32(1e-6)))


def _sigmoid(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-np.clip(x, -80, None))))


SCORES_OF: dict[str, Callable[[Array], Array]] = {"softmax": _softmax, "sigmoid": _sigmoid}  # of experts


def _capped(x: Array, cap: float | None) -> Array:
    return x if cap is None else np.tanh(x / np.float32(cap)) * np.float32(cap)


def _turns(kind: Rotary, positions: Array) -> tuple[Array, Array]:
    """cos and sin [T, D / 2]."""
    angles = np.asarray(positions, np.float32)[:, None] * kind.inv_freq
    return np.cos(angles) * np.float32(kind.scale), np.sin(angles) * np.float32(kind.scale)


def _turned(x: Array, cos: Array, sin: Array) -> Array:
    """Heads [B, heads, T, D], of whose leading 2 h numbers i turns with h + i."""
    half = cos.shape[-1]
    first, second, rest = np.split(x, [half, 2 * half], axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)
