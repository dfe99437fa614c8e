"""A block drafter (DFlash, arXiv 2602.06036) as it is published: its tensors, checked against its configuration and its
target, and its nodes.

Keys and values of row s of the text are maps of F_s in every layer, without the layer's first norm:

    F_s = hidden_norm(fc [h_s^1 ; h_s^2 ; ..])          h^k: the inputs of the tapped layers

The rows of the block are the target's embeddings of y_(t+1) and of mask tokens, at positions t+1, t+2, ... They see F_s
of s <= t and one another; in layers of a sliding window those of the window, and in causal layers no later row of the
block (`block_config`). Row j > 0 predicts the token at its own position, with `from_anchor` each row the next one.
"""

from __future__ import annotations

from dataclasses import replace

from streamspec.export.drafters.dflash.draft_pass import BlockPass
from streamspec.export.drafters.dflash.spec import BlockSpec
from streamspec.export.drafters.draft_pass import Accepted, MainRows
from streamspec.export.drafters.eagle3.spec import EMBEDDING, HEAD
from streamspec.export.drafters.layer_config import HeadSource, layer_decoder
from streamspec.export.drafters.published.spec import PublishedBlockSpec
from streamspec.export.layers.decoder import Decoder, Residual
from streamspec.export.ops.builder import Scope
from streamspec.export.quantization.precisions import Rows
from streamspec.step_graph import DRAFT_VOCAB


class PublishedBlockPass(BlockPass):
    """The whole block as a branch, of which the depths asked for reach the head."""

    spec: PublishedBlockSpec

    def own_decoder(self, decoder: Decoder, spec: BlockSpec) -> Decoder:
        """Writes the drafter's layers, whose sizes and weights are its own; the target's head gives plain products."""
        assert isinstance(spec, PublishedBlockSpec)
        self.target = decoder.drafting(replace(decoder.spec, logit_scale=1.0, logit_cap=None), decoder.source)
        layer, count = spec.block.layer, decoder.spec.layers  # its layers are further ones, like those before
        sizes = layer_decoder(layer, decoder.spec.cache_dtype, layer.hidden_size, count)
        own = decoder.drafting(sizes, HeadSource(spec.tensors, sizes, count, "dflash.", spec.block_layers))
        own.rotary_prefix = "dflash."
        return own

    def context(self, g: Scope, main: MainRows) -> str:
        """F [1, n, H] of the main rows."""
        joined = g.op("Concat", *main.entries, axis=-1)
        states = self.decoder.linear_map(g, joined, main.rows, self.own_weight("fc.weight"))
        return self.decoder.norm(g, Residual(states), "dflash.hidden_norm")[0]

    def read_context(self, g: Scope, states: str, layer: int) -> str:
        """F itself."""
        return states

    def logits(self, g: Scope, accepted: Accepted, presents: list[tuple[str, ...]], stream_ids: str) -> str:
        """Adds the block through its layers, and the head of the depths `stream_ids`: [m, D]."""
        spec = self.spec
        before = 0 if spec.block.from_anchor else 1  # rows that draft nothing
        count = spec.gamma + before
        masks = g.ints(*[spec.block.mask_token] * (count - 1)) if count > 1 else ""
        tokens = g.op("Concat", accepted.root, masks, axis=0) if masks else accepted.root
        start = Residual(self._embedded(g, g.op("Unsqueeze", tokens, g.ints(0))))
        whole, numbers = replace(accepted, rings={}), g.ints(*range(count))
        residual = self._through(g, start, Rows(g.ints(count)), self.own, whole, presents, numbers)
        with g.named("head"):
            finished, _ = self.decoder.norm(g, residual, "dflash.norm")
            drafting = g.op("Gather", finished, g.op("Add", stream_ids, g.ints(before)), axis=1)
            return self.head(g, g.op("Squeeze", drafting, g.ints(0)), Rows(g.op("Shape", stream_ids)))

    def head(self, g: Scope, flat: str, rows: Rows) -> str:
        """The drafter's own LM head over draft tokens [m, D] of finished states [m, H], or the target's."""
        if HEAD not in self.spec.tensors:
            return self.head_of(self.target, g, flat, rows)
        return self.scaled(g, *self.decoder.writer.head(g, flat, rows, self.own_weight(HEAD)))

    def window(self, layer: int) -> int | None:
        """How many positions back rows of a layer look: from their own, or all from the first one's."""
        window = self.spec.block.windows[layer - self.first]
        return window + 1 if window is not None and self.spec.block.anchored else window

    def sees_later(self, layer: int) -> bool:
        """Whether rows of a layer see later ones of the block."""
        return not self.spec.block.causal[layer - self.first]

    def looking_from(self, g: Scope, positions: str) -> str:
        """The positions that windows count from: the rows' own, or the first one's."""
        if not self.spec.block.anchored:
            return positions
        return g.op("Expand", g.op("Slice", positions, g.ints(0), g.ints(1), g.ints(0)), g.op("Shape", positions))

    def _of_root(self, g: Scope, before: str, root: str) -> str:
        return g.op("Gather", before, root, axis=0)  # a row for every token of the target

    def _of_earlier(self, g: Scope, before: str, numbers: str) -> str:
        tokens = numbers if self.spec.draft_vocab is None else g.op("Gather", DRAFT_VOCAB, numbers, axis=0)
        return super()._of_earlier(g, before, tokens)

    def _embedded(self, g: Scope, ids: str) -> str:
        if EMBEDDING not in self.spec.tensors:
            return self.target.embed(g, ids)
        return self.decoder.look_up(g, ids, self.own_weight(EMBEDDING, looked_up=True))
