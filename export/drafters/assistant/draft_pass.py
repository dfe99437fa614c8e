"""An assistant of Gemma 4 as nodes: the levels of a draft layer (`draft_layer.draft_pass`), each through a small model
that has queries alone and attends to the target's keys and values.

After the accepted node at position p with the finished state h, y the token after it (W: the input map, P: the output
map, e: the target's embedding, scaled as its layers read it):

    g = norm(W [e(y) ; h] through the layers)       all at position p + 1, over the keys up to p
    head(g) proposes the token after y
    the row after a candidate c has y = c and h = P g

Of a layer with a window w the keys are those of positions p - w .. p, as transformers masks them after a prompt. With
an ordered head only the tokens of the clusters whose centroids fit g best are scored.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from streamspec.export.drafters.assistant.spec import (
    AFTER,
    BEFORE,
    CENTROIDS,
    HEAD,
    LABEL,
    ORDERING,
    AssistantSpec,
    lender,
)
from streamspec.export.drafters.draft_layer.draft_pass import ChosenRows, DraftBranch, DraftLayerPass, DraftLevel
from streamspec.export.drafters.draft_pass import Accepted, own_weight
from streamspec.export.drafters.layer_config import HeadSource
from streamspec.export.layers.attention import attend, window_out
from streamspec.export.layers.decoder import Decoder, Residual
from streamspec.export.ops.builder import Scope
from streamspec.export.quantization.precisions import Rows, Weight

if TYPE_CHECKING:
    from streamspec.export.drafters.draft_layer.spec import DraftLayerSpec
    from streamspec.export.layers.heads import Tables


@dataclass(frozen=True)
class LentKeys:
    """Keys and values of a layer of the target: its `cache`, with standard operators also the `parts` of it that are
    read, and the additive `mask` [1, slots] of what the accepted node's next token sees."""

    cache: tuple[str, ...]
    parts: list[tuple[str, str]]
    mask: str


class AssistantPass(DraftLayerPass):
    """The assistant as a branch; nothing of it is in the main graph."""

    spec: AssistantSpec  # type: ignore[assignment]

    def own_decoder(self, decoder: Decoder, spec: DraftLayerSpec) -> Decoder:
        """Writes the assistant's layers, whose sizes and weights are its own."""
        assert isinstance(spec, AssistantSpec)
        self.target, self.lent = decoder, dict[int | None, LentKeys]()
        layers = replace(spec.layers, cache_dtype=decoder.spec.cache_dtype)
        own = decoder.drafting(layers, HeadSource(spec.tensors, layers, 0, LABEL, layers.layers))
        own.rotary_prefix = LABEL
        return own

    def propose(self, g: Scope, accepted: Accepted, presents: list[tuple[str, ...]], stream_ids: str) -> list[str]:
        """Adds what all levels see of the target's keys, then the levels."""
        own = self.decoder.spec
        for layer, window in enumerate(own.windows):
            if window not in self.lent:
                with g.named(f"keys.{window or 'full'}"):
                    native = self.decoder.native is not None and self.decoder.native.attends(own.at(layer))
                    self.lent[window] = self._keys(g, accepted, presents, window, native)
        return super().propose(g, accepted, presents, stream_ids)

    def _keys(
        self, g: Scope, accepted: Accepted, presents: list[tuple[str, ...]], window: int | None, native: bool
    ) -> LentKeys:
        target = self.target.spec
        layer = lender(target, window)
        ring = target.ring(layer)
        if ring is not None and ring in accepted.rings:
            mask = g.op("Gather", accepted.rings[ring].sees, accepted.node, axis=0)
            columns = [accepted.rings[ring].positions]
        else:
            mask, columns = accepted.past_mask(g), [*accepted.columns(g)]
        if window is not None:
            seen = g.op("Concat", *columns, axis=0) if len(columns) > 1 else columns[0]
            position = g.op("Gather", accepted.positions, accepted.node, axis=0)
            mask = window_out(g, mask, position, g.op("Unsqueeze", seen, g.ints(0)), window + 1)
        parts = [] if native else accepted.seen(g, target, presents[layer], ring)
        return LentKeys(presents[layer], parts, mask)

    def _first_inputs(self, g: Scope, accepted: Accepted) -> str:
        return self._pairs(g, accepted.root, g.op("Unsqueeze", accepted.final, g.ints(0)), Rows(g.ints(1)))

    def _next_inputs(self, g: Scope, before: DraftLevel, chosen: ChosenRows, at: tuple[str, int], rows: Rows) -> str:
        return self._pairs(g, chosen.tokens, g.op("Gather", before.feature, chosen.parents, axis=1), rows)

    def _level(self, g: Scope, x: str, number: int, at: str, branch: DraftBranch, sees: str | None) -> DraftLevel:
        decoder, count = self.decoder, self.spec.levels[number]
        rows, residual = Rows(g.ints(count)), Residual(x)
        position = g.op("Add", at, g.ints(1 - number))  # of all levels the same
        rotary = decoder.rotary(g, g.op("Expand", position, g.ints(count)))
        for layer in range(decoder.spec.layers):
            with g.named(f"layers.{layer}"):
                normed, residual = decoder.enter(g, residual, layer)
                mixed = self._mixed(g, normed, rows, count, layer, rotary)
                residual = decoder.leave(g, [mixed], normed, residual, rows, layer, decoder.linear)
        finished = decoder.finish(g, residual)
        goes_on = number + 1 < self.spec.passes
        return DraftLevel(finished, feature=decoder.linear_map(g, finished, rows, self._own(AFTER)) if goes_on else "")

    def _mixed(self, g: Scope, normed: str, rows: Rows, count: int, layer: int, rotary: Tables) -> str:
        """[1, count, Hq*D]: attention of rows whose input is `normed` to the keys that are lent."""
        decoder, sizes = self.decoder, self.decoder.spec.at(layer)
        keys = self.lent[decoder.spec.windows[layer]]
        if decoder.native is not None and not keys.parts:
            heads = decoder.packed_heads(g, normed, rows, layer, rotary, decoder.linear)
            mask = g.op("Tile", keys.mask, g.ints(count, 1))
            return decoder.native.draft_attention(g, sizes, heads, mask, keys.cache, own=False)
        q, *_ = decoder.queries_keys_values(g, normed, rows, layer, rotary, decoder.linear)
        return attend(g, sizes, q, keys.parts, g.op("Tile", keys.mask, g.ints(count * sizes.group, 1)))

    def _pairs(self, g: Scope, tokens: str, states: str, rows: Rows) -> str:
        """The input of the layers [1, m, hidden] of tokens int64 [m] and states [1, m, H] of the target's width."""
        embedded = self.target.begin(g, g.op("Unsqueeze", tokens, g.ints(0)), "").stream
        # Two products: nothing brings the halves to one size, and rows in int8 have one scale.
        halves = zip((embedded, states), "eh", np.split(self.spec.tensors[BEFORE], 2, axis=1), strict=True)
        parts = [
            self.decoder.linear_map(g, half, rows, own_weight(f"{LABEL}{BEFORE}.{name}", weight))
            for half, name, weight in halves
        ]
        return g.op("Add", *parts)

    def head(self, g: Scope, flat: str, rows: Rows) -> str:
        """The assistant's own LM head over all tokens [m, V] of finished states [m, hidden]; of an ordered one those of
        a cluster lie one after the other."""
        weight, tensors = self._own(HEAD), self.spec.tensors
        if self.spec.clusters:
            weight = replace(weight, load=lambda: tensors[HEAD][tensors[ORDERING]])
        return self.scaled(g, *self.decoder.writer.head(g, flat, rows, weight))

    def _propose_level(self, g: Scope, level: DraftLevel, path: str = "") -> None:
        if not (clusters := self.spec.clusters):
            return super()._propose_level(g, level, path)
        tensors = self.spec.tensors
        size = len(tensors[ORDERING]) // len(tensors[CENTROIDS])  # tokens of a cluster
        centroids = g.store.once(f"{LABEL}{CENTROIDS}", lambda: np.ascontiguousarray(tensors[CENTROIDS].T))
        ordering = g.store.once(f"{LABEL}{ORDERING}", lambda: tensors[ORDERING])
        flat = g.op("Squeeze", level.state, g.ints(0))
        _, nearest = g.ops("TopK", g.op("MatMul", flat, centroids), g.ints(clusters), out=(None, None), axis=-1)
        first = g.op("Mul", g.op("Unsqueeze", nearest, g.ints(2)), g.ints(size))
        each = g.op("Add", first, g.store.constant(np.arange(size), np.int64))
        places = g.op("Reshape", each, g.ints(-1, clusters * size))
        # All tokens are scored: the chosen rows alone, gathered, took 23 ms, not 7 (4 levels, 131,072 tokens, int8).
        logits = self.head(g, flat, Rows(g.op("Shape", flat, start=0, end=1)))
        level.logits, level.path = g.op("GatherElements", logits, places, axis=1), path
        level.values, level.numbers = g.ops(
            "TopK", level.logits, g.ints(self.candidates), out=(None, None), axis=-1, largest=1, sorted=1
        )
        level.tokens = g.op("Gather", ordering, g.op("GatherElements", places, level.numbers, axis=1), axis=0)
        return None

    def _own(self, name: str) -> Weight:
        return own_weight(f"{LABEL}{name}", self.spec.tensors[name])
