"""An EAGLE-3 head as nodes: the levels of a draft layer (`draft_layer.draft_pass`) with the head's own layer.

Row t stands for the pair (f_t, y_(t+1)), f_t = fc(the taps of row t, side by side):

    n_t = hidden_norm(f_t)      r_t = n_t with norm_before_residual, else f_t
    u_t = r_t + attention([input_norm(e(y_(t+1))) ; n_t])               over rows <= t
    g_t = u_t + mlp(post_norm(u_t))
    head(norm(g_t)) predicts y_(t+2), over the draft vocabulary

The row after a draft token for y_(t+2) has f = g_t (norm(g_t) with norm_output) and that token's embedding.
"""

from __future__ import annotations

from streamspec.export.drafters.draft_layer.draft_pass import ChosenRows, DraftBranch, DraftLayerPass, DraftLevel
from streamspec.export.drafters.draft_layer.spec import DraftLayerSpec
from streamspec.export.drafters.draft_pass import MainRows, own_weight
from streamspec.export.drafters.eagle3.spec import EMBEDDING, HEAD, NORM, Eagle3Spec
from streamspec.export.drafters.layer_config import HeadSource
from streamspec.export.layers.decoder import Decoder, Residual
from streamspec.export.ops.builder import Scope
from streamspec.export.quantization.precisions import Rows, Weight


class Eagle3Pass(DraftLayerPass):
    """The head as a branch, and its rows' K/V in the main graph."""

    spec: Eagle3Spec

    def own_decoder(self, decoder: Decoder, spec: DraftLayerSpec) -> Decoder:
        """Writes the head's layer, whose sizes and weights are its own."""
        assert isinstance(spec, Eagle3Spec)
        self.target = decoder
        layer = spec.decoder(decoder.spec.cache_dtype)
        own = decoder.drafting(layer, HeadSource(spec.tensors, layer, self.layer, "eagle3."))
        own.rotary_prefix = "eagle3."
        return own

    def main_rows(self, g: Scope, main: MainRows) -> list[tuple[str, ...]]:
        """Writes the head's K/V of the main rows; returns its cache outputs."""
        decoder, entries = self.decoder, list(main.entries)
        if self.spec.head.fc_norm:
            norms = (f"eagle3.fc_norm.{number}" for number in range(len(entries)))
            entries = [decoder.norm(g, Residual(entry), name)[0] for entry, name in zip(entries, norms, strict=True)]
        joined = g.op("Concat", *entries, axis=-1)
        if self.spec.head.norm_before_fc:
            joined, _ = decoder.norm(g, Residual(joined), "eagle3.input_norm")
        feature = decoder.linear_map(g, joined, main.rows, self._own("fc.weight"))
        self.inputs = self._pairs(g, main.following, feature)
        read, _ = self._read(g, self.inputs)
        _, *sides = self._queries_keys_values(g, read, main.rows, main.positions, self.layer)
        self.present = main.keep(self.layer, sides, decoder.spec)
        return [self.present]

    def head(self, g: Scope, flat: str, rows: Rows) -> str:
        """The head's own LM head over draft tokens [m, D] of finished states [m, H], or the target's."""
        if HEAD not in self.spec.tensors:
            return self.head_of(self.target, g, flat, rows)
        return self.scaled(g, *self.decoder.writer.head(g, flat, rows, self._own(HEAD)))

    def _next_inputs(self, g: Scope, before: DraftLevel, chosen: ChosenRows, at: tuple[str, int], rows: Rows) -> str:
        return self._pairs(g, chosen.tokens, g.op("Gather", before.feature, chosen.parents, axis=1))

    def _level(self, g: Scope, x: str, number: int, at: str, branch: DraftBranch, sees: str | None) -> DraftLevel:
        decoder, count = self.decoder, self.spec.levels[number]
        rows = Rows(g.ints(count))
        read, stream = self._read(g, x)
        mixed, sees = self._attention(g, read, rows, count, at, branch, sees, self.layer)
        normed, residual = decoder.before_mlp(g, mixed, "", Residual(stream), self.layer)
        state = g.op("Add", residual.stream, decoder.mlp(g, normed, rows, self.layer, decoder.linear, residual))
        finished, _ = decoder.norm(g, Residual(state), NORM)
        return DraftLevel(finished, feature=finished if self.spec.head.norm_output else state, sees=sees or "")

    def _pairs(self, g: Scope, tokens: str, feature: str) -> str:
        """[1, m, 2H]: normed embeddings of tokens int64 [m], and features [1, m, H]."""
        ids = g.op("Unsqueeze", tokens, g.ints(0))
        if EMBEDDING in self.spec.tensors:
            embedded = self.decoder.look_up(g, ids, self._own(EMBEDDING, looked_up=True))
        else:
            embedded = self.target.embed(g, ids)
        normed, _ = self.decoder.enter(g, Residual(embedded), self.layer)
        return g.op("Concat", normed, feature, axis=-1)

    def _read(self, g: Scope, pairs: str) -> tuple[str, str]:
        """The input of attention [1, m, 2H] and the residual stream [1, m, H] of pairs [1, m, 2H]."""
        decoder = self.decoder
        hidden = decoder.spec.hidden
        embedded, feature = g.ops("Split", pairs, g.ints(hidden, hidden), out=(None, None), axis=-1)
        normed, _ = decoder.norm(g, Residual(feature), decoder.spec.weight_name(self.layer, "hidden_norm"))
        stream = normed if self.spec.head.norm_before_residual else feature
        return g.op("Concat", embedded, normed, axis=-1), stream

    def _own(self, name: str, looked_up: bool = False) -> Weight:
        return own_weight(f"eagle3.{name}", self.spec.tensors[name], looked_up)
