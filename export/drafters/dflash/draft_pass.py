"""A block drafter as nodes (DFlash, arXiv 2602.06036): streams that run through layers of their own, over K/V of their
own, and see one another; in a causal block (JetSpec, arXiv 2606.18394) they see earlier ones alone. Row for row the
equations of `adapters/drafters/dflash/model.py`.

Every main row gives these layers keys and values, from its states at the tapped layers; they lie in the cache like
those of further layers. After the accepted node one pass over gamma rows drafts all depths.
"""

from __future__ import annotations

from dataclasses import replace

from streamspec.export.drafters.dflash.spec import NORM_OUT, BlockSource, BlockSpec
from streamspec.export.drafters.draft_pass import Accepted, MainRows, own_weight
from streamspec.export.drafters.streams.draft_pass import StreamPass
from streamspec.export.layers.decoder import Decoder, Residual
from streamspec.export.layers.latent_attention import attention_maps
from streamspec.export.ops.builder import Scope
from streamspec.export.quantization.precisions import Rows, Weight


class BlockPass(StreamPass):
    """The block as a branch, and its layers' K/V of the main rows in the main graph."""

    spec: BlockSpec

    def __init__(self, decoder: Decoder, spec: BlockSpec, candidates: int, stream_weights: str) -> None:
        super().__init__(self.own_decoder(decoder, spec), spec, candidates, stream_weights)
        self.own = range(self.first, self.first + spec.block_layers)

    def own_decoder(self, decoder: Decoder, spec: BlockSpec) -> Decoder:
        """Writes the drafter's layers, which come after those of the target's `decoder`."""
        return decoder.drafting(decoder.spec, BlockSource(decoder.source, spec, decoder.spec))

    def context(self, g: Scope, main: MainRows) -> str:
        """F [1, n, H] of the main rows."""
        joined = g.op("Concat", *(self.decoder.unit_rms(g, entry) for entry in main.entries), axis=-1)
        return self.decoder.linear_map(g, joined, main.rows, self.own_weight("fuse"))

    def read_context(self, g: Scope, states: str, layer: int) -> str:
        """The states from which a layer makes keys and values of the main rows."""
        return self.decoder.enter(g, Residual(states), layer)[0]

    def own_weight(self, name: str, looked_up: bool = False) -> Weight:
        """A linear map [out, in] of the drafter beside its layers, or a table whose rows are `looked_up`."""
        return own_weight(f"dflash.{name}", self.spec.tensors[name], looked_up)

    def main_rows(self, g: Scope, main: MainRows) -> list[tuple[str, ...]]:
        """Writes the K/V of the main rows in the drafter's layers; returns these layers' cache outputs."""
        decoder = self.decoder
        rotary, presents = decoder.rotary(g, main.positions), []
        states = self.context(g, main)
        for layer in self.own:
            with g.named(f"dflash.{layer}"):
                normed = self.read_context(g, states, layer)
                linear = attention_maps(decoder, layer)
                _, *sides = decoder.queries_keys_values(g, normed, main.rows, layer, rotary, linear)
                presents.append(main.keep(layer, sides, decoder.spec))
        return presents

    def logits(self, g: Scope, accepted: Accepted, presents: list[tuple[str, ...]], stream_ids: str) -> str:
        """Adds the block through its layers and the head: [m, D]."""
        rows, start = Rows(g.op("Shape", stream_ids)), Residual(self.start(g, accepted, stream_ids))
        whole = replace(accepted, rings={})  # its layers keep every row, whatever their window
        residual = self._through(g, start, rows, self.own, whole, presents, stream_ids)
        with g.named("head"):
            finished, _ = self.decoder.norm(g, residual, NORM_OUT)
            return self.head(g, g.op("Squeeze", finished, g.ints(0)), rows)

    def window(self, layer: int) -> int | None:
        """The window of the target's layers from which the drafter was started."""
        return self.spec.window

    def sees_later(self, layer: int) -> bool:
        """Whether rows of the block see later ones, as they do unless it is causal."""
        return not self.spec.causal

    def _state(self, g: Scope, accepted: Accepted) -> str:
        entry = accepted.entries[self.spec.tapped(self.first)[0]]
        return g.op("Gather", entry, accepted.node, axis=1)
