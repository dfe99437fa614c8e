"""Jakiro's draft layer as nodes (arXiv 2502.06282; with one expert EAGLE's): all its passes inside one call of a step.

Every main row also becomes a row of the draft layer: its states at the tapped layers and the token the target chose
after it. Only its K/V is made, and lies in the cache like that of one more layer. After the accepted node the layer
then drafts:

    level 1         the accepted node's own row                             C candidates after the root
    level 2 ..      the `BEAM` likeliest candidates of the level before,    C candidates after each
                    each with its parent's finished state
    the last        if parallel no pass: its own branch of the              C candidates after each
                    parents' rows

With prefix attention the first level alone attends; with own heads every pass has weights of its own, and no further
one attends; of `depth` passes each has its own attention, over keys of the text that the first one's weights make
(docs/explain/how-it-works.md). Row for row the equations of `adapters/drafters/draft_layer/model.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from streamspec.export.drafters.draft_layer.experts import ExpertUpdates, PassOutputs, contrast_weights, single_weights
from streamspec.export.drafters.draft_layer.spec import DraftLayerSource, DraftLayerSpec
from streamspec.export.drafters.draft_pass import Accepted, DraftPass, MainRows, own_weight
from streamspec.export.layers.activations import activate
from streamspec.export.layers.attention import attend, by_head, window_out
from streamspec.export.layers.decoder import Decoder, Residual
from streamspec.export.layers.heads import Linear
from streamspec.export.layers.latent_attention import attention_maps
from streamspec.export.ops.builder import Array, Scope
from streamspec.export.quantization.precisions import Rows, Weight


@dataclass
class DraftLevel:
    """Rows of the draft layer that draft for the same depth."""

    # finished [1, m, H], '' where unused: of the mixture, or in the last pass of the branch for the last depth
    state: str
    feature: str = ""  # [1, m, H], what rows after these read where that is another state
    last: str = ""  # [1, m, H], where that branch drafts one depth further: its input from the parent's row
    apart: tuple[str, str] | None = (
        None  # finished [1, K m, H] of the experts that count, and their log weights [K, m, 1]
    )
    sees: str = ""  # [m, own]: which of the layer's own rows so far, additive
    path: str = ""  # log probability [m] of the candidates that the rows follow
    logits: str = ""  # [m, D], of experts apart log probabilities
    values: str = ""  # of the best [m, C]
    tokens: str = ""  # int64 [m, C]
    numbers: str = ""  # int64 [m, C] among the D


@dataclass
class DraftBranch:
    """Values that all levels of a call share. `past`: the mask of the accepted node; `own`: K, V and positions of the
    draft's own rows so far, but for the first one's, which lies in the cache."""

    accepted: Accepted
    past: str
    own: list[tuple[str, str, str]]


@dataclass
class ChosenRows:
    """The likeliest candidates of a level. `picked` int64 [beam]: row x C + rank, `parents` [beam]: their rows, `path`
    [beam]: log probability.
    """

    picked: str
    parents: str
    tokens: str
    path: str


class DraftLayerPass(DraftPass):
    """The draft layer as a branch, and its rows' K/V in the main graph."""

    spec: DraftLayerSpec

    def __init__(self, decoder: Decoder, spec: DraftLayerSpec, candidates: int, stream_weights: str) -> None:
        self.layer = decoder.spec.layers
        super().__init__(self.own_decoder(decoder, spec), spec, candidates, stream_weights)
        self.inputs = ""  # x [1, n, H] of the main rows
        self.present: tuple[str, ...] = ()  # where the K/V of all rows so far are

    def own_decoder(self, decoder: Decoder, spec: DraftLayerSpec) -> Decoder:
        """Writes the layer, which is number `self.layer` of the target's `decoder`."""
        return decoder.drafting(decoder.spec, DraftLayerSource(decoder.source, spec, decoder.spec))

    # ---- in the main graph

    def main_rows(self, g: Scope, main: MainRows) -> list[tuple[str, ...]]:
        """Writes the draft layer's K/V of the main rows; returns its cache outputs."""
        units = [self.decoder.unit_rms(g, entry) for entry in main.entries]
        state = self._map(g, g.op("Concat", *units, axis=-1), main.rows, "from_entry")
        self.inputs = self._input(g, main.following, (main.positions, 1), state, main.rows)
        self.present = main.keep(self.layer, self._keys_values(g, main), self.decoder.spec)
        return [self.present]

    def _keys_values(self, g: Scope, main: MainRows) -> tuple[str, str]:
        """K and V [1, n, Hkv*D] of the main rows."""
        if self.spec.attends(0):
            normed = self._norm(g, self.inputs, self.layer)
            return self._queries_keys_values(g, normed, main.rows, main.positions, self.layer)[1:]
        width = self.decoder.spec.kv_heads * self.decoder.spec.head_dim
        column = g.op("Slice", self.inputs, g.ints(0), g.ints(1), g.ints(2))  # as many zeros as rows, uncounted
        zeros = g.op("Mul", column, g.number(0))
        return (g.op("Expand", zeros, g.ints(1, 1, width)),) * 2

    # ---- in the branch

    def propose(self, g: Scope, accepted: Accepted, presents: list[tuple[str, ...]], stream_ids: str) -> list[str]:
        """Adds one level per pass; returns tokens, values and origins of all levels, one after another."""
        branch = DraftBranch(accepted, accepted.past_mask(g), [])
        beam = self.spec.beam
        origins, levels, rows = [g.ints(-1)], [], Rows(g.ints(beam))
        with g.named("level.1"):
            x = self._first_inputs(g, accepted)
            where = g.op("Gather", accepted.positions, accepted.node, axis=0)
            levels.append(self._level(g, x, 0, where, branch, None))
            self._propose_level(g, levels[-1])
        for number in range(1, self.spec.passes):
            with g.named(f"level.{number + 1}"):
                before, chosen = levels[-1], self._likeliest(g, levels[-1])
                x = self._next_inputs(g, before, chosen, (where, number + 1), rows)
                at = g.op("Add", where, g.ints(number))
                sees = g.op("Gather", before.sees, chosen.parents, axis=0) if before.sees else ""
                levels.append(self._level(g, x, number, at, branch, sees))
                self._propose_level(g, levels[-1], chosen.path)
                origins.append(chosen.picked)
        if self.spec.parallel:
            with g.named("last"):
                chosen = self._likeliest(g, levels[-1])
                known = self._map(
                    g, self._embedded(g, chosen.tokens, (where, self.spec.passes + 1)), rows, "last_token"
                )
                state = g.op("Add", g.op("Gather", levels[-1].last, chosen.parents, axis=1), known)
                levels.append(DraftLevel(self._finish(g, state)))
                self._propose_level(g, levels[-1], chosen.path)
                origins.append(chosen.picked)
        return [
            g.op("Concat", *names, axis=0)
            for names in ([x.tokens for x in levels], [x.values for x in levels], origins)
        ]

    def _first_inputs(self, g: Scope, accepted: Accepted) -> str:
        """The input [1, 1, H] of the first level's row."""
        return g.op("Gather", self.inputs, accepted.node, axis=1)

    def _next_inputs(self, g: Scope, before: DraftLevel, chosen: ChosenRows, at: tuple[str, int], rows: Rows) -> str:
        """The inputs of the rows of the next pass, of chosen candidates `at` a position and a number further."""
        part = self._part(at[1] - 1)
        state, name = g.op("Gather", before.state, chosen.parents, axis=1), f"{part}from_state"
        if self.spec.one_map:
            state, name = self.decoder.unit_rms(g, state), "from_entry"
        state = self._map(g, state, rows, name)
        return self._input(g, chosen.tokens, at, state, rows, part)

    def _likeliest(self, g: Scope, level: DraftLevel) -> ChosenRows:
        logs = level.logits if level.apart else g.op("LogSoftmax", level.logits, axis=-1)
        probabilities = g.op("GatherElements", logs, level.numbers, axis=-1)
        if level.path:
            probabilities = g.op("Add", probabilities, g.op("Unsqueeze", level.path, g.ints(1)))
        path, picked = g.ops(
            "TopK", g.op("Reshape", probabilities, g.ints(-1)), g.ints(self.spec.beam), out=(None, None), axis=0
        )
        tokens = g.op("Gather", g.op("Reshape", level.tokens, g.ints(-1)), picked, axis=0)
        return ChosenRows(picked, g.op("Div", picked, g.ints(self.candidates)), tokens, path)

    def _level(self, g: Scope, x: str, number: int, at: str, branch: DraftBranch, sees: str | None) -> DraftLevel:
        """Runs pass `number` of the layer, the last one with the branch of the last depth. The first pass's row lies in
        the cache already (`sees` None); all others add to `branch.own`."""
        decoder, count, outputs = self.decoder, self.spec.levels[number], PassOutputs.of(self.spec, number)
        rows, layer = Rows(g.ints(count)), self.layer + min(number, self.spec.heads)
        normed, stream, sees = self._before_mlp(g, x, rows, number, at, branch, sees)
        added = self._experts(g, normed, rows, count, self._part(number), outputs)

        def joined(output: str) -> str:
            return g.op("Add", stream, decoder.mlp_update(g, output, layer))

        level = DraftLevel("", sees=sees or "")
        if outputs.mixture:
            level.state = self._finish(g, joined(added.mixture))
        if outputs.apart:
            lists = g.op("Concat", *(joined(update) for update in added.apart), axis=1)
            level.apart = self._finish(g, lists), g.op("Log", g.op("Transpose", added.shares, perm=[2, 1, 0]))
        if outputs.contrast or outputs.parallel:
            state = self._map(g, joined(added.contrast or added.mixture), rows, "last_state")
            if outputs.parallel:
                level.last = state
            else:
                level.state = self._finish(g, state)
        return level

    def _whole_layer(
        self, g: Scope, x: str, number: int, at: str, branch: DraftBranch, sees: str | None
    ) -> tuple[str, str, str | None]:
        """Runs pass `number` through a whole layer of the target's kind: the residual stream, what its MLP adds, and
        the rows that its rows have seen."""
        decoder, rows = self.decoder, Rows(g.ints(self.spec.levels[number]))
        normed, stream, sees = self._before_mlp(g, x, rows, number, at, branch, sees)
        given = decoder.mlp(g, normed, rows, self.layer, decoder.linear, Residual(stream))
        return stream, decoder.mlp_update(g, given, self.layer), sees

    def _before_mlp(
        self, g: Scope, x: str, rows: Rows, number: int, at: str, branch: DraftBranch, sees: str | None
    ) -> tuple[str, str, str | None]:
        """The input of the MLP of pass `number`, the residual stream, and the rows that its rows have seen."""
        decoder, layer = self.decoder, self.layer + min(number, self.spec.heads)
        residual, normed, update = Residual(x), "", ""
        if self.spec.attends(number):
            normed = self._norm(g, x, layer)
            mixed, sees = self._attention(g, normed, rows, self.spec.levels[number], at, branch, sees, layer)
            update = decoder.attention_update(g, mixed, layer)
        elif decoder.spec.parallel and not decoder.spec.mlp_norm:
            normed, _ = decoder.enter(g, residual, layer)
        normed, residual = decoder.before_mlp(g, update, normed, residual, layer)
        stream = g.op("Add", residual.stream, residual.update) if residual.update else residual.stream
        return normed, stream, sees

    def _part(self, number: int) -> str:
        """The prefix of the names of the weights of pass `number`."""
        own = min(number, self.spec.heads)
        return f"heads.{own - 1}." if own else ""

    def _attention(
        self, g: Scope, x: str, rows: Rows, count: int, at: str, branch: DraftBranch, sees: str | None, layer: int
    ) -> tuple[str, str | None]:
        """The output of a `layer`'s attention for `count` rows `x` at the position `at`, and which of the draft's own
        rows each row has seen.
        """
        accepted, own = branch.accepted, branch.own
        positions = g.op("Expand", at, g.ints(count))
        linear = attention_maps(self.decoder, layer)
        q, k, v = self._queries_keys_values(g, x, rows, positions, layer, linear)
        mask = g.op("Expand", branch.past, g.op("Concat", g.ints(count), accepted.visible, axis=0))
        if sees is not None:
            own.append((k, v, positions))
            masked = np.where(np.eye(count, dtype=bool), 0, -np.inf).astype(np.float32).clip(-1e30)
            alone = g.store.constant(masked, np.float32)
            sees = g.op("Concat", sees, alone, axis=1) if sees else alone
            mask = g.op("Concat", mask, sees, axis=1)
        if self.spec.window is not None:
            columns = g.op("Concat", *accepted.columns(g), *(at for _, _, at in own), axis=0)
            mask = window_out(g, mask, positions, g.op("Unsqueeze", columns, g.ints(0)), self.spec.window)
        spec = self.decoder.spec
        parts = accepted.seen(g, spec, self.present)
        if own:
            key, value = (
                g.op("Concat", *side, axis=1) if len(side) > 1 else side[0] for side in list(zip(*own, strict=True))[:2]
            )
            parts.append((by_head(g, spec, key), by_head(g, spec, value)))
        mask = g.op("Tile", mask, g.ints(spec.group, 1))
        mixed = linear.applied(g, attend(g, spec, q, parts, mask, self.decoder.sinks(g, layer)))
        return self.decoder.linear(g, mixed, rows, layer, self.decoder.spec.family.out), sees

    def _propose_level(self, g: Scope, level: DraftLevel, path: str = "") -> None:
        """The best candidates of the level, which follows candidates of the log probabilities `path` [m]."""
        states, shares = level.apart or (level.state, "")
        flat = g.op("Squeeze", states, g.ints(0))
        level.logits, level.path = self.head(g, flat, Rows(g.op("Shape", flat, start=0, end=1))), path
        if shares:
            lists = g.op(
                "Reshape",
                g.op("LogSoftmax", level.logits, axis=-1),
                g.op("Concat", g.op("Shape", shares, end=2), g.ints(-1), axis=0),
            )
            level.logits = g.op("ReduceLogSumExp", g.op("Add", lists, shares), g.ints(0), keepdims=0)
        level.tokens, level.values, level.numbers = self.best(g, level.logits)

    # ---- parts of the layer

    def _input(self, g: Scope, tokens: str, at: tuple[str, int], state: str, rows: Rows, part: str = "") -> str:
        """`at`: the tokens' positions, as in `_embedded`; `part`: prefix of the names of the pass's weights."""
        bias = self._constant(g, f"{part}bias", self.spec.tensors[f"{part}bias"])
        known = self._map(g, self._embedded(g, tokens, at), rows, f"{part}from_token")
        return g.op("Add", g.op("Add", known, bias), state)

    def _embedded(self, g: Scope, tokens: str, at: tuple[str, int]) -> str:
        """e of tokens [m] at positions int64 [m] or [1] and a number further, which count where they enter at the
        embedding (up to the last one).
        """
        decoder, ids = self.decoder, g.op("Unsqueeze", tokens, g.ints(0))
        if decoder.spec.family.position_table is None:
            return decoder.unit_rms(g, decoder.embed(g, ids))
        positions = g.op("Add", at[0], g.ints(at[1]))
        within = g.op("Min", positions, g.ints(decoder.spec.context_length - 1))
        return decoder.unit_rms(g, decoder.begin(g, ids, within).stream)

    def _map(self, g: Scope, x: str, rows: Rows, name: str) -> str:
        return self.decoder.linear_map(g, x, rows, self._weight(name, self.spec.tensors[name]))

    def _norm(self, g: Scope, x: str, layer: int) -> str:
        return self.decoder.enter(g, Residual(x), layer)[0]

    def _finish(self, g: Scope, x: str) -> str:
        spec, tensors = self.decoder.spec, self.spec.tensors
        weights = [self._constant(g, "norm_out", spec.in_graph("norm_out.weight", tensors["norm_out.weight"]))]
        if "norm_out.bias" in tensors:
            weights.append(self._constant(g, "norm_out.bias", tensors["norm_out.bias"]))
        return g.norm(x, *weights, eps=spec.eps, centred=spec.family.layernorm)

    def _queries_keys_values(
        self, g: Scope, x: str, rows: Rows, positions: str, layer: int, linear: Linear | None = None
    ) -> tuple[str, str, str]:
        rotary, maps = self.decoder.rotary(g, positions), linear or attention_maps(self.decoder, layer)
        return self.decoder.queries_keys_values(g, x, rows, layer, rotary, maps)

    def _experts(self, g: Scope, z: str, rows: Rows, count: int, part: str, outputs: PassOutputs) -> ExpertUpdates:
        """Runs all experts, as one product. Returns the updates of `outputs` alone."""
        tensors, decoder, active = self.spec.tensors, self.decoder, self.spec.active
        experts, inner, hidden = tensors[f"{part}experts.up"].shape
        half = experts * inner
        product = self._inner(g, z, rows, part)
        down = self._weight(f"{part}down", tensors[f"{part}experts.down"].transpose(2, 0, 1).reshape(hidden, half))
        bias = f"{part}experts.down_bias"
        if experts == 1:
            added = decoder.linear_map(g, product, rows, down)
            return ExpertUpdates(
                mixture=g.op("Add", added, self._constant(g, bias, tensors[bias])) if bias in tensors else added
            )
        router = self._constant(g, f"{part}router", np.ascontiguousarray(tensors[f"{part}experts.router"].T))
        scores, sides = g.ops("Split", g.op("MatMul", z, router), g.ints(experts, 2), out=(None, None), axis=-1)
        probabilities, best = g.ops("TopK", g.op("Softmax", scores, axis=-1), g.ints(active), out=(None, None), axis=-1)
        shares = g.op("Div", probabilities, g.op("ReduceSum", probabilities, g.ints(-1), keepdims=1))
        zeros = g.op("Expand", g.number(0), g.op("Shape", scores))
        spread = self._constant(
            g, "spread", np.kron(np.eye(experts), np.ones(inner)).astype(np.float32)
        )  # an expert's weight to its channels
        weights = (
            [g.op("ScatterElements", zeros, best, shares, axis=-1)] if outputs.mixture else []
        )  # of the experts [1, m, N]
        if outputs.contrast:
            weights.append(contrast_weights(g, zeros, best, sides))
        weights += [single_weights(g, zeros, best, number) for number in range(active if outputs.apart else 0)]
        sums = [g.op("Mul", product, g.op("MatMul", weight, spread)) for weight in weights]
        added = decoder.linear_map(
            g, g.op("Concat", *sums, axis=1) if sums[1:] else sums[0], Rows(g.ints(len(sums) * count)), down
        )
        if bias in tensors:
            shares_of = g.op("Concat", *weights, axis=1) if weights[1:] else weights[0]
            added = g.op("Add", added, g.op("MatMul", shares_of, self._constant(g, bias, tensors[bias])))
        parts = iter(
            g.ops("Split", added, g.ints(*[count] * len(sums)), out=(None,) * len(sums), axis=1)
            if sums[1:]
            else [added]
        )
        return ExpertUpdates(
            next(parts) if outputs.mixture else "", next(parts) if outputs.contrast else "", list(parts), shares
        )

    def _inner(self, g: Scope, z: str, rows: Rows, part: str) -> str:
        """The channels of all experts [1, m, N * channels] before the last map."""
        tensors, decoder = self.spec.tensors, self.decoder
        sides = [side for side in ("gate", "up") if f"{part}experts.{side}" in tensors]
        stacked = np.concatenate([tensors[f"{part}experts.{n}"].reshape(-1, decoder.spec.hidden) for n in sides])
        mapped = decoder.linear_map(g, z, rows, self._weight(f"{part}{'_'.join(sides)}", stacked))
        if f"{part}experts.up_bias" in tensors:
            biases = np.concatenate([tensors[f"{part}experts.{n}_bias"].reshape(-1) for n in sides])
            mapped = g.op("Add", mapped, self._constant(g, f"{part}{'_'.join(sides)}.bias", biases))
        if len(sides) == 1:
            return activate(decoder, g, mapped, decoder.spec.last_attention)
        half = len(stacked) // 2
        gate, up = g.ops("Split", mapped, g.ints(half, half), out=(None, None), axis=-1)
        return g.op("Mul", activate(decoder, g, gate, decoder.spec.last_attention), up)

    def _weight(self, name: str, array: Array) -> Weight:
        return own_weight(f"jakiro.{name}", array)

    @staticmethod
    def _constant(g: Scope, name: str, array: Array) -> str:
        return g.store.once(f"jakiro.{name}", lambda: array.astype(np.float32))
