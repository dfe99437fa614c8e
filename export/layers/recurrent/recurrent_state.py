"""Writes layers with a recurrent state as nodes, exact in draft trees: the gated delta rule (arXiv 2412.06464).

    S_p = e^g_p S_(p-1) + k_p d_p^T    d_p = b_p (v_p - e^g_p S_(p-1)^T k_p)    o_p = S_p^T q_p

Rows of a tree need the states after their own ancestors. So no row's state is kept, but of each row k, d and g, in the
ring of a cache, and the state at every 64th token. A row starts from the one before token 64 (floor((p + 1) / 64) - 1),
whatever the call, and adds what came since, which is attention without a softmax. With G_jp the sum of g after j:

    o_p = e^G_0p S^T q_p + sum_(j<=p) e^G_jp (k_j q_p) d_j
    d_p = w_p - sum_j A_pj d_j            w_p = b_p (v_p - e^G_0p S^T k_p - sum_j e^G_jp (k_j k_p) d_j)
    A_pj = b_p e^G_jp (k_j k_p)           d = (1 - A) (1 + A^2) (1 + A^4) w

where A has the j < p of the same run of eight tokens and the sum in w those before it. So w is kept as well, and a call
takes a step for each run that it touches, not for each row. Sums run over all slots, of which masked ones add exact
zeros, in the products of `attention`: a row is the same bit for bit alone and in any tree. The state after a block of
64 tokens lies in slices beside its rows, which no call moves any more; the first call after a block computes it.
A state space (Mamba-2, arXiv 2405.21060) is the same with d_p = b_p v_p: nothing is solved, and w is not kept.
docs/lab/decisions/2026-11-23-recurrent-state-in-draft-trees.md has the proof. tests/export/layers/
test_recurrent_state.py covers it.
"""

from __future__ import annotations

from math import inf

import numpy as np
from onnx import TensorProto

from streamspec.export.layers.attention import ONES_WIDTH, RowExactAttention
from streamspec.export.layers.decoder import Decoder
from streamspec.export.layers.recurrent.state_layer import StateLayer, WholeBlocks
from streamspec.export.layers.recurrent.state_rules import decay_weights, part_name, skip_weight, taps_bias
from streamspec.export.layers.short_conv import RowsBefore, from_cache, mixed_rows, tap_weights
from streamspec.export.native.operators import NativeOps
from streamspec.export.ops.builder import Scope
from streamspec.export.quantization.precisions import Rows
from streamspec.layer_cache import (
    DECAY,
    INPUT,
    KEY,
    LAYER_KINDS,
    MARK,
    STATE,
    STATE_BLOCK,
    SUM_BLOCK,
    UPDATE,
    VALUE,
)
from streamspec.step_graph import PAST_LENGTH, past, present

RUN = 8  # tokens whose d are solved together; with more of them powers of A would cancel
MOST_RUNS = STATE_BLOCK // RUN + 1  # that a call touches


class StateRows(WholeBlocks):
    """Nodes shared by all such layers of a call: which slots each row sees. `seen`, `before` float [S, n]: 1 where row
    p starts below slot j and sees it, itself included, or j before the run of p; `after` [S, S + 16]: 1 where slot i
    comes after slot j, and columns of ones; `newer` bool [n, 1]: rows that start from the newest state.

    Of the seven tokens before the call and its rows, c = 7 + n: `near` int64 [c]: their slots; `within` [c, c]: 1 where
    row i is seen by row p of its run, itself included; `strictly` [c, c]: 1 where row p sees another row j of its run;
    `near_after` [c, c]: as `after`. `run` int64 [n]: of each row, 0 for that of the first token after the committed
    ones; `last_run` int64."""

    def __init__(
        self, g: Scope, slots: str, visible: str, positions: str, tree_mask: str, before: RowsBefore, solved: bool
    ) -> None:
        """`slots`, `visible` int64 [1]: of the ring, and rows of the sequence with those of the call; `positions` int64
        [n]; `tree_mask` [n, n]; `solved`: whether d are."""
        super().__init__(g, slots)
        zero, one, block = g.integer(0), g.ints(1), g.ints(STATE_BLOCK)
        self.rows = before
        each = g.arange(slots)
        rounds = g.op("Div", g.op("Sub", g.op("Sub", visible, one), each), slots)
        number = g.op("Add", each, g.op("Mul", rounds, slots))  # the newest row of each slot
        row = g.op("Sub", number, PAST_LENGTH)
        last = g.op("Sub", g.op("Shape", positions), one)
        new, row = g.op("GreaterOrEqual", row, zero), g.op("Min", g.op("Max", row, zero), last)
        position = g.op("Where", new, g.op("Gather", positions, row, axis=0), number)
        columns = g.op("Unsqueeze", position, one)

        begin = g.op("Sub", g.op("Div", g.op("Add", positions, one), block), one)
        begin = g.op("Max", g.op("Min", begin, self.newest), zero)
        newer = g.op("Equal", begin, self.newest)
        self.newer = g.op("Unsqueeze", newer, one)
        counted = g.op("Cast", newer, to=TensorProto.INT64)
        self.any_newer = g.op("Greater", g.op("ReduceMax", counted, keepdims=0), zero)
        start = g.op("Unsqueeze", g.op("Mul", begin, block), g.ints(0))

        in_call = g.op("Gather", g.op("Transpose", g.op("Equal", tree_mask, g.number(0))), row, axis=0)
        filled = g.op("Less", number, visible)
        new = g.op("Unsqueeze", new, one)
        sees = g.op("Or", g.op("And", new, in_call), g.op("Not", new))
        sees = g.op("And", sees, g.op("Unsqueeze", filled, one))
        sees = g.op("And", sees, g.op("GreaterOrEqual", columns, start))
        length = g.ints(RUN)
        run_of = g.op("Div", positions, length)
        run_start = g.op("Unsqueeze", g.op("Mul", run_of, length), g.ints(0))
        earlier = g.op("And", sees, g.op("Less", columns, run_start))
        self.seen, self.before = (g.op("Cast", side, to=TensorProto.FLOAT) for side in (sees, earlier))
        later = g.op("Greater", columns, g.op("Unsqueeze", position, g.ints(0)))
        ones = g.op("Expand", g.number(1), g.op("Concat", slots, g.ints(ONES_WIDTH), axis=0))
        self.after = g.op("Concat", g.op("Cast", later, to=TensorProto.FLOAT), ones, axis=1)
        self.run = g.op("Sub", run_of, g.op("Div", PAST_LENGTH, length))
        self.last_run = g.op("ReduceMax", self.run, keepdims=0)
        if solved:
            self._of_runs(g, positions, tree_mask)

    def _of_runs(self, g: Scope, positions: str, tree_mask: str) -> None:
        zero, one, count = g.integer(0), g.ints(1), RUN - 1
        offsets = g.op("Range", g.integer(-count), g.op("Squeeze", g.op("Shape", positions)), g.integer(1))
        number = g.op("Add", PAST_LENGTH, offsets)
        old = g.op("Add", PAST_LENGTH, g.ints(*range(-count, 0)))
        position = g.op("Concat", old, positions, axis=0)
        at = g.op("Max", number, zero)
        self.near = g.remainder(at, self.slots)
        run = g.op("Div", g.op("Max", position, zero), g.ints(RUN))
        rows, columns = (g.op("Unsqueeze", position, g.ints(axis)) for axis in (1, 0))
        same = g.op("Equal", g.op("Unsqueeze", run, one), g.op("Unsqueeze", run, g.ints(0)))
        same = g.op("And", same, g.op("GreaterOrEqual", columns, zero))
        tree = g.op("Cast", g.op("Equal", tree_mask, g.number(0)), to=TensorProto.FLOAT)
        wide = g.op("Concat", g.ints(count), g.op("Shape", positions), axis=0)
        tall = g.op("Concat", g.op("Shape", positions), g.ints(count), axis=0)
        older = g.store.once("recurrent.run", lambda: np.tri(count, dtype=np.float32))
        above = g.op("Concat", older, g.op("Expand", g.number(0), wide), axis=1)
        below = g.op("Concat", g.op("Expand", g.number(1), tall), tree, axis=1)
        sees = g.op("Mul", g.op("Concat", above, below, axis=0), g.op("Cast", same, to=TensorProto.FLOAT))
        later = g.op("Cast", g.op("Greater", rows, columns), to=TensorProto.FLOAT)
        self.within, self.strictly, self.near_after = g.op("Transpose", sees), g.op("Mul", sees, later), later


class RecurrentLayer(StateLayer):
    """Nodes of one such layer for the rows of a call; writes the cache."""

    def __init__(self, g: Scope, decoder: Decoder, attention: RowExactAttention, rows: StateRows, layer: int) -> None:
        super().__init__(g, decoder, layer, decoder.linear)
        self.cache, self.rows = attention, rows

    def convolved(self, own: str, rows: Rows) -> str:
        """The convolution's sums of a call's rows [1, n, inputs]."""
        g = self.g
        kept = self.cache.keep(g.op("Unsqueeze", own, g.ints(1)), self.layer, self.part(INPUT))
        return mixed_rows(self.decoder, g, own, self.rows.rows, from_cache(kept), self.layer)

    def returned(self, q: str, k: str, v: str, decays: str, steps: str) -> str:
        """o [1, heads, n, width] of a call's rows."""
        g = self.g
        keys = self.cache.keep(k, self.layer, self.part(KEY))
        column = g.op("Transpose", steps, perm=[0, 3, 2, 1])
        logs = self.cache.keep(
            g.op("Concat", g.op("Unsqueeze", decays, g.ints(1)), column, axis=-1), self.layer, self.part(DECAY)
        )
        both = g.op("Concat", k, q, axis=2)
        sides = zip(self._in_runs(g, both, 3), self._in_runs(g, keys, 3), strict=True)
        products = self._total(g, [g.contrib("FusedMatMul", *parts, transB=1) for parts in sides])
        products = g.op("Transpose", products, perm=[0, 1, 3, 2])
        since, fading = self._fading(logs)
        of_keys, of_queries = g.ops("Split", products, out=(None, None), axis=-1, num_outputs=2)
        weights = self._weights(fading, of_queries, self.rows.seen)
        before_keys, before_queries = self._from_state(both, since)
        if self.rule.solved:
            of_keys = self._weights(fading, of_keys, self.rows.before)
            added = self._deltas(of_keys, g.op("Sub", v, before_keys), steps, self._solved(keys, logs))
        else:
            added = g.op("Mul", v, steps)
        added = self.cache.keep(added, self.layer, self.part(VALUE))
        return g.op("Add", before_queries, g.contrib("FusedMatMul", weights, added, transA=1))

    def _weights(self, fading: str, products: str, mask: str) -> str:
        """[1, heads, S, n] of products [1, key heads, S, n] under a mask [S, n]."""
        g = self.g
        faded = g.op("Mul", fading, g.op("Unsqueeze", products, g.ints(2)))
        shape = g.op("Concat", g.ints(1, self.sizes.heads), g.op("Shape", mask), axis=0)
        return g.op("Reshape", g.op("Mul", faded, mask), shape)

    def _fading(self, logs: str) -> tuple[str, str]:
        """What remains of the state that a row starts from [1, heads, n, 1], and of what each slot adds [1, key heads,
        group, S, n], where the logarithms of decays lie in a cache [1, 1, S, 2 heads]."""
        g, heads, rows = self.g, self.sizes.heads, self.rows
        column = g.op("Slice", g.op("Reshape", logs, g.ints(-1, 2 * heads, 1)), g.ints(0), g.ints(heads), g.ints(1))
        each = g.op("Mul", column, g.op("Unsqueeze", rows.seen, g.ints(1)))  # [S, heads, n]
        flat = g.op("Reshape", each, g.op("Concat", rows.slots, g.ints(-1), axis=0))
        sums = g.contrib("FusedMatMul", flat, rows.after, transA=1)  # [heads * n, S + 16]
        end = g.op("Add", rows.slots, g.ints(1))
        since = g.op("Reshape", g.op("Slice", sums, rows.slots, end, g.ints(1)), g.ints(1, heads, -1, 1))
        shape = g.op("Concat", g.ints(1, self.sizes.key_heads, self.group, -1), rows.slots, axis=0)
        after = g.op("Reshape", g.op("Slice", sums, g.ints(0), rows.slots, g.ints(1)), shape)
        return g.op("Exp", since), g.op("Exp", g.op("Transpose", after, perm=[0, 1, 2, 4, 3]))

    def _from_state(self, both: str, since: str) -> tuple[str, str]:
        """S^T k and S^T q [1, heads, n, width] of rows [1, key heads, 2 n, key width], faded to each."""
        g, rows = self.g, self.rows
        older, newest = self._older(g), self._keep_newest()
        found = self._products(g, both, older)
        some, none = (Scope(g.store, f"{g.label}/{name}") for name in ("newer", "older"))
        at = rows.block(some, 0)
        whole = some.op("Slice", newest, at, some.op("Add", at, some.ints(STATE_BLOCK)), some.ints(2))
        # Of no block it is what lies there, which counts nothing.
        whole = some.op("Mul", self._as_state(some, whole), rows.exists(some, 0))
        picked = [
            some.op("Where", rows.newer, new, old)
            for new, old in zip(self._products(some, both, whole), found, strict=True)
        ]
        same = [none.op("Identity", side) for side in found]
        sides = g.either(rows.any_newer, (some, picked), (none, same), (TensorProto.FLOAT,) * 2)
        keys, queries = (g.op("Mul", since, side) for side in sides)
        return keys, queries

    def _products(self, g: Scope, both: str, state: str) -> tuple[str, ...]:
        """S^T k and S^T q [1, heads, n, width]."""
        sizes, wide = self.sizes, g.op("Unsqueeze", both, g.ints(2))
        grouped = g.op("Reshape", state, g.ints(1, sizes.key_heads, self.group, sizes.key_width, sizes.width))
        sides = zip(self._in_runs(g, wide, 4), self._in_runs(g, grouped, 3), strict=True)
        product = self._total(g, [g.op("MatMul", *parts) for parts in sides])
        product = g.op("Reshape", product, g.ints(1, sizes.heads, -1, sizes.width))
        return g.ops("Split", product, out=(None, None), axis=2, num_outputs=2)

    def _in_runs(self, g: Scope, x: str, axis: int) -> list[str]:
        """x in parts along an `axis` of a key's numbers, each of which a product adds up in one run for any rows."""
        width = self.sizes.key_width
        parts = [min(SUM_BLOCK, width - at) for at in range(0, width, SUM_BLOCK)]
        return list(g.ops("Split", x, g.ints(*parts), out=(None,) * len(parts), axis=axis)) if parts[1:] else [x]

    def _total(self, g: Scope, products: list[str]) -> str:
        """The sum of the products of these parts."""
        total, *others = products
        for product in others:
            total = g.op("Add", total, product)
        return total

    def _as_state(self, g: Scope, slices: str) -> str:
        return g.op("Reshape", slices, g.ints(1, self.sizes.heads, self.sizes.key_width, self.sizes.width))

    def _older(self, g: Scope) -> str:
        """The states [1, heads, key width, width] after the block before the newest whole one."""
        at = self.rows.block(g, 1)
        slices = g.op("Slice", past(self.layer, self.part(STATE)), at, g.op("Add", at, g.ints(STATE_BLOCK)), g.ints(2))
        return g.op("Mul", self._as_state(g, slices), self.rows.exists(g, 1))

    def _keep_newest(self) -> str:
        """The cache of states with those after the newest whole block, which the first call after it computes."""
        g, rows = self.g, self.rows
        at, exists = rows.block(g, 0), rows.exists(g, 0)
        last = g.op("Add", at, g.ints(STATE_BLOCK - 1))
        mark = g.op("Slice", past(self.layer, self.part(MARK)), last, g.op("Add", last, g.ints(1)), g.ints(2))
        due = g.op("Squeeze", g.op("Less", g.op("Squeeze", mark, g.ints(0, 1, 2)), exists))
        # A call's rows have no marks; a block's are set after the old one was read, whose memory they share.
        shape = g.op("Concat", g.ints(1, 1), g.op("Shape", rows.run), g.ints(1), axis=0)
        none = g.op("Expand", g.number(0), shape)
        marks = g.op("TensorScatter", past(self.layer, self.part(MARK)), none, PAST_LENGTH, axis=2, mode="circular")
        there = g.op("Mul", g.op("Max", mark, exists), exists)
        whole = g.op("Expand", there, g.ints(1, 1, STATE_BLOCK, 1))
        g.op("TensorScatter", marks, whole, at, out=present(self.layer, self.part(MARK)), axis=2, mode="circular")

        compute, leave = (Scope(g.store, f"{g.label}/{name}") for name in ("state", "kept"))
        nothing = leave.op("Slice", past(self.layer, self.part(STATE)), g.ints(0), g.ints(0), g.ints(2))
        (slices,) = g.either(due, (compute, [self._newest(compute)]), (leave, [nothing]), (TensorProto.FLOAT,))
        name, out = past(self.layer, self.part(STATE)), present(self.layer, self.part(STATE))
        return g.op("TensorScatter", name, slices, at, out=out, axis=2, mode="circular")

    def _newest(self, g: Scope) -> str:
        """The slices [1, 1, 64, ..] of the states after the newest whole block."""
        sizes = self.sizes
        keys, logs, deltas = (self._block(g, kind) for kind in (KEY, DECAY, VALUE))
        table = g.store.once("recurrent.after", _after_in_block)
        flat = g.op("Reshape", logs, g.ints(STATE_BLOCK, 2 * sizes.heads))
        flat = g.op("Slice", flat, g.ints(0), g.ints(sizes.heads), g.ints(1))
        fading = g.op("Exp", g.contrib("FusedMatMul", flat, table, transA=1))  # [heads, 64 + 16]
        each = g.op("Slice", fading, g.ints(0), g.ints(STATE_BLOCK), g.ints(1))
        whole = g.op("Slice", fading, g.ints(STATE_BLOCK), g.ints(STATE_BLOCK + 1), g.ints(1))
        each = g.op("Reshape", each, g.ints(1, sizes.key_heads, self.group, STATE_BLOCK, 1))
        faded = g.op("Mul", g.op("Unsqueeze", keys, g.ints(2)), each)
        faded = g.op("Reshape", faded, g.ints(1, sizes.heads, STATE_BLOCK, sizes.key_width))
        added = g.contrib("FusedMatMul", faded, deltas, transA=1)
        kept = g.op("Mul", self._older(g), g.op("Reshape", whole, g.ints(1, sizes.heads, 1, 1)))
        return g.op("Reshape", g.op("Add", kept, added), g.ints(1, 1, STATE_BLOCK, -1))

    def _block(self, g: Scope, kind: str) -> str:
        """The rows of the newest whole block in a part of the cache."""
        at = self.rows.block(g, 0)
        return g.op("Slice", past(self.layer, self.part(kind)), at, g.op("Add", at, g.ints(STATE_BLOCK)), g.ints(2))

    def _solved(self, keys: str, logs: str) -> str:
        """(1 + A)^-1 - 1 of a call's rows, transposed: [1, heads, c, n]."""
        g, sizes, rows = self.g, self.sizes, self.rows
        near = g.op("Gather", keys, rows.near, axis=2)
        products = g.contrib("FusedMatMul", near, near, transB=1)  # [1, key heads, c, c]
        logs = g.op("Reshape", g.op("Gather", logs, rows.near, axis=2), g.ints(-1, 2 * sizes.heads))
        decays, steps = g.ops("Split", logs, out=(None, None), axis=1, num_outputs=2)
        each = g.op("Mul", g.op("Unsqueeze", decays, g.ints(2)), g.op("Unsqueeze", rows.within, g.ints(1)))
        count = g.op("Shape", rows.near)
        flat = g.op("Reshape", each, g.op("Concat", count, g.ints(-1), axis=0))
        sums = g.contrib("FusedMatMul", flat, rows.near_after, transA=1)  # [heads * c, c]
        shape = g.op("Concat", g.ints(1, sizes.key_heads, self.group, -1), count, axis=0)
        fading = g.op("Mul", g.op("Exp", g.op("Reshape", sums, shape)), g.op("Unsqueeze", products, g.ints(2)))
        shape = g.op("Concat", g.ints(1, sizes.heads, -1), count, axis=0)
        steps = g.op("Unsqueeze", g.op("Transpose", steps), g.ints(0, 3))
        a = g.op("Mul", g.op("Reshape", g.op("Mul", fading, rows.strictly), shape), steps)
        a = g.op("Mul", a, g.number(-1.0))
        # (1 + a) (1 + a^2) (1 + a^4) - 1
        second = g.op("MatMul", a, a)
        fourth = g.op("MatMul", second, second)
        inner = g.op("Add", g.op("Add", a, second), g.op("MatMul", a, second))
        inner = g.op("Add", g.op("Add", inner, fourth), g.op("MatMul", inner, fourth))
        own = g.op("Slice", inner, g.ints(RUN - 1), count, g.ints(2))
        return g.op("Transpose", own, perm=[0, 1, 3, 2])

    def _deltas(self, weights: str, values: str, steps: str, solved: str) -> str:
        """d [1, heads, n, width] of a call's rows, run by run; writes w. `weights` [1, heads, S, n]; `solved` [1,
        heads, c, n]."""
        g, rows, sizes = self.g, self.rows, self.sizes
        shape = g.op("Concat", g.op("Shape", rows.run), g.ints(sizes.heads, 1, sizes.width), axis=0)
        none = g.op("Expand", g.number(0), shape)
        before = g.op("Slice", rows.near, g.ints(0), g.ints(RUN - 1))
        old = g.op("Gather", past(self.layer, self.part(UPDATE)), before, axis=2)

        def run(g: Scope, number: int, earlier: tuple[str, str]) -> tuple[str, str]:
            """w and d [n, heads, 1, width] of the rows of the runs up to this one, zero for others, and of later ones
            where there are such."""
            ring = past(self.layer, self.part(VALUE))
            if number:
                known = g.op("Transpose", earlier[1], perm=[2, 1, 0, 3])
                ring = g.op("TensorScatter", ring, known, PAST_LENGTH, axis=2, mode="circular")
            equal = g.op("Equal", rows.run, g.integer(number))
            at = g.op("Squeeze", g.op("NonZero", equal), g.ints(0))
            sums = g.contrib("FusedMatMul", g.op("Gather", weights, at, axis=3), ring, transA=1)
            own, step = (g.op("Gather", side, at, axis=2) for side in (values, steps))
            own, column = g.op("Mul", step, g.op("Sub", own, sums)), g.op("Unsqueeze", at, g.ints(1))
            updates = g.op("ScatterND", earlier[0], column, g.op("Transpose", own, perm=[2, 1, 0, 3]))
            near = g.op("Concat", old, g.op("Transpose", updates, perm=[2, 1, 0, 3]), axis=2)
            mixed = g.contrib("FusedMatMul", g.op("Gather", solved, at, axis=3), near, transA=1)
            found = g.op("Transpose", g.op("Add", own, mixed), perm=[2, 1, 0, 3])
            done = updates, g.op("ScatterND", earlier[1], column, found)
            if number + 1 == MOST_RUNS:
                return done
            more, enough = (Scope(g.store, f"{self.g.label}/run.{number + 1}{name}") for name in ("", ".none"))
            kept = [enough.op("Identity", value) for value in done]
            further = run(more, number + 1, done)
            goes = g.op("Greater", rows.last_run, g.integer(number))
            updates, found = g.either(goes, (more, further), (enough, kept), (TensorProto.FLOAT,) * 2)
            return updates, found

        updates, found = (g.op("Transpose", side, perm=[2, 1, 0, 3]) for side in run(g, 0, (none, none)))
        self.cache.keep(updates, self.layer, self.part(UPDATE))
        return found


def native_mix(native: NativeOps, decoder: Decoder, g: Scope, normed: str, rows: Rows, layer: int) -> str:
    """As `RecurrentLayer.mix`, by a native operator, of the rows of a call under its tree mask."""
    spec, recurrent = decoder.spec, decoder.spec.family.recurrent
    assert spec.state is not None and recurrent is not None
    mapped = decoder.linear(g, normed, rows, layer, spec.family.conv_in)
    norm = decoder.norm_weights(g, part_name(decoder, layer, recurrent.norm))[0] if spec.state_norm else ""
    own, limits = [norm], {} if spec.largest_step == 1.0 else {"largest_step": spec.largest_step}
    if recurrent.skip:
        own = [skip_weight(decoder, g, layer), norm, taps_bias(decoder, g, layer)]
        limits = {"least": spec.step_limits[0]} | ({"most": spec.step_limits[1]} if spec.step_limits[1] < inf else {})
    weights = *decay_weights(decoder, g, layer), *own, *tap_weights(decoder, g, layer)
    parts = [spec.state_part(layer, part) for part in LAYER_KINDS[recurrent.kind].parts]
    caches = [[name(layer, part) for part in parts] for name in (past, present)]
    eps = recurrent.eps or spec.eps
    return native.recurrent(g, recurrent.kind, mapped, (caches[0], caches[1]), spec.state, eps, weights, **limits)


def _after_in_block() -> np.ndarray:
    """[64, 64 + 16]: 1 where row i comes after row j, and columns of ones."""
    ones = np.ones((STATE_BLOCK, ONES_WIDTH), np.float32)
    return np.concatenate([np.tri(STATE_BLOCK, k=-1, dtype=np.float32), ones], axis=1)
