"""A checkpoint's layer for multi-token prediction as nodes: the levels of a draft layer (`draft_layer.draft_pass`) with
the layer as it was trained with the target.

Row t stands for the pair (h_t, y_(t+1)), h_t: the target's finished state, which its head reads:

    x_t = fc [norm_e(e(y_(t+1))) ; norm_h(h_t)]
    g_t = norm(x_t through a decoder layer of the target's kind)            over rows <= t

head(g_t) predicts y_(t+2). The row after a draft token for y_(t+2) has h = g_t and that token's embedding. Embedding
and head are the target's.
"""

from __future__ import annotations

from streamspec.export.drafters.draft_layer.draft_pass import ChosenRows, DraftBranch, DraftLayerPass, DraftLevel
from streamspec.export.drafters.draft_layer.spec import DraftLayerSpec
from streamspec.export.drafters.draft_pass import MainRows, own_weight
from streamspec.export.drafters.mtp.spec import LABEL, MAP, NORM, PAIR, MtpSource, MtpSpec
from streamspec.export.layers.decoder import Decoder, Residual
from streamspec.export.ops.builder import Scope
from streamspec.export.quantization.precisions import Rows


class MtpPass(DraftLayerPass):
    """The layer as a branch, and its rows' K/V in the main graph."""

    def own_decoder(self, decoder: Decoder, spec: DraftLayerSpec) -> Decoder:
        """Writes the layer, which is number `self.layer` of the target's `decoder`."""
        assert isinstance(spec, MtpSpec)
        return decoder.drafting(spec.layer_of(decoder.spec), MtpSource(decoder.source, spec, decoder.spec))

    def main_rows(self, g: Scope, main: MainRows) -> list[tuple[str, ...]]:
        """Writes the layer's K/V of the main rows; returns its cache outputs."""
        self.inputs = self._pairs(g, main.following, main.entries[0], main.rows)
        self.present = main.keep(self.layer, self._keys_values(g, main), self.decoder.spec)
        return [self.present]

    def _next_inputs(self, g: Scope, before: DraftLevel, chosen: ChosenRows, at: tuple[str, int], rows: Rows) -> str:
        return self._pairs(g, chosen.tokens, g.op("Gather", before.state, chosen.parents, axis=1), rows)

    def _level(self, g: Scope, x: str, number: int, at: str, branch: DraftBranch, sees: str | None) -> DraftLevel:
        stream, update, sees = self._whole_layer(g, x, number, at, branch, sees)
        finished, _ = self.decoder.norm(g, Residual(stream, update), f"{LABEL}{NORM}")
        return DraftLevel(finished, sees=sees or "")

    def _pairs(self, g: Scope, tokens: str, states: str, rows: Rows) -> str:
        """x [1, m, H] of tokens int64 [m] and the states [1, m, H] before them."""
        embedded = self.decoder.embed(g, g.op("Unsqueeze", tokens, g.ints(0)))
        named = zip((embedded, states), PAIR, strict=True)
        pair = [self.decoder.norm(g, Residual(one), f"{LABEL}{name}")[0] for one, name in named]
        weight = own_weight(f"{LABEL}{MAP}", self.spec.tensors[MAP])
        return self.decoder.linear_map(g, g.op("Concat", *pair, axis=-1), rows, weight)
