"""Writes the early exit as nodes: it chooses the rows of a draft tree that go on through the upper layers (Speculative
Streaming, section 3.2.3).

The hidden state of row p at the input of one layer (N-Ns, or one below), through a map of low rank r, the final norm
and the head, predicts the token after it. That gives every child of p a probability and every node that of its whole
path; the likeliest nodes go on:

    u = M / rms(M)        h = norm(u + B A u)        log P(c | p) = (h_p . E_c) - logsumexp over the tree's distinct
    tokens

Only the tree's own columns of the head are computed: n x n numbers instead of n x vocabulary. A node's score is the
mean of this and of the drafter's own log probability, 1 : 2 (docs/lab/decisions). It is never above its parent's,
so the surviving nodes are a tree. Pruning depends on context alone and never changes the output. Where no row is to be
pruned, nothing here runs.
"""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from streamspec.draft_tree import MASKED, PRIOR_WEIGHT
from streamspec.export.layers.decoder import Decoder, Residual
from streamspec.export.ops.builder import Scope
from streamspec.export.spec.draft_spec import PruningSpec
from streamspec.step_graph import (
    EXIT_DOWN,
    EXIT_INPUTS,
    EXIT_UP,
    KEEP_ABOVE,
    KEEP_ROWS,
    LOGIT_ROWS,
    PARENTS,
    PRIORS,
    TREE_MASK,
)


class EarlyExit:
    """Adds the nodes that choose the surviving rows."""

    def __init__(self, decoder: Decoder, spec: PruningSpec) -> None:
        self.decoder, self.spec = decoder, spec

    def add(self, g: Scope, entry: str, count: str, tokens: str) -> tuple[str, ...]:
        """The rows of entry [1, n, H] that go on, int64 [k] ascending; which of these get logits [r], their parents
        among these [r], and their slots among the choices [r]. `count` int64 [1] is n, `tokens` int64 [n].

        Where rows are pruned, `logit_rows` must name them all.
        """
        for row in EXIT_INPUTS:
            assert row.default is not None
            g.store.add_inline(row.name, row.filled(row.default))
        limited = g.op("Greater", KEEP_ABOVE, g.number(float(np.finfo(np.float32).min)))
        pruning = g.op("Or", g.op("Less", KEEP_ROWS, count), limited)
        pruned, every = Scope(g.store, "prune"), Scope(g.store, "keep_all")
        surviving = self._best(pruned, self._scores(pruned, entry, tokens, count), count)
        old_parents = pruned.op("Gather", PARENTS, surviving, axis=0)
        zeros = pruned.op("Expand", g.integer(0), count)
        ranks = pruned.arange(pruned.op("Shape", surviving))
        parents = pruned.op(
            "Gather", pruned.op("ScatterElements", zeros, surviving, ranks, axis=0), old_parents, axis=0
        )
        unchanged = [every.op("Identity", name) for name in (LOGIT_ROWS, PARENTS)]
        best = [surviving, ranks, parents, pruned.op("Identity", surviving)]
        everything = [every.arange(count), *unchanged, every.arange(every.op("Shape", LOGIT_ROWS))]
        return g.either(pruning, (pruned, best), (every, everything), (TensorProto.INT64,) * 4)

    def _best(self, g: Scope, scores: str, count: str) -> str:
        most = g.op("Min", KEEP_ROWS, count)
        values, rows = g.ops("TopK", scores, most, out=(None, None), axis=0, largest=1, sorted=1)
        rows = g.op("Compress", rows, g.op("GreaterOrEqual", values, KEEP_ABOVE), axis=0)
        ascending, _ = g.ops("TopK", rows, g.op("Shape", rows), out=(None, None), axis=0, largest=0, sorted=1)
        return ascending

    def _scores(self, g: Scope, entry: str, tokens: str, count: str) -> str:
        """float [n], 0 for the root."""
        masked, zero = g.number(MASKED), g.number(0)
        columns = self.decoder.look_up(g, g.op("Unsqueeze", tokens, g.ints(0)), self.decoder.head_weight())
        scores = g.contrib("FusedMatMul", self._exit_states(g, entry), columns, transB=1)
        bias = self.decoder.head_bias(g)
        scores = self.decoder.finish_logits(
            g, g.op("Squeeze", scores, g.ints(0)), g.op("Gather", bias, tokens, axis=0) if bias else ""
        )
        # A token that several nodes share counts once, where it comes first.
        same = g.op("Equal", g.op("Unsqueeze", tokens, g.ints(1)), g.op("Unsqueeze", tokens, g.ints(0)))
        first = g.op("ArgMax", g.op("Cast", same, to=TensorProto.INT32), axis=1, keepdims=0)
        numbers = g.arange(count)
        distinct = g.op("Where", g.op("Equal", first, numbers), scores, masked)
        total = g.op("ReduceLogSumExp", distinct, g.ints(1), keepdims=1)
        logs = g.op("Gather", g.op("Sub", scores, total), PARENTS, axis=0)  # row c: all nodes after c's parent
        own = g.op("GatherElements", logs, g.op("Unsqueeze", numbers, g.ints(1)), axis=1)
        own = g.op("Where", g.op("Unsqueeze", g.op("Equal", numbers, g.integer(0)), g.ints(1)), zero, own)
        ancestors = g.op("Cast", g.op("Equal", TREE_MASK, zero), to=TensorProto.FLOAT)
        path = g.op("Squeeze", g.op("MatMul", ancestors, own), g.ints(1))
        both = g.op("Add", path, g.op("Mul", PRIORS, g.number(PRIOR_WEIGHT)))
        return g.op("Div", both, g.number(1 + PRIOR_WEIGHT))

    def _exit_states(self, g: Scope, entry: str) -> str:
        """h [1, n, H]"""
        unit = self.decoder.unit_rms(g, entry)
        down = g.store.add(EXIT_DOWN, np.ascontiguousarray(self.spec.down.T, np.float32))
        up = g.store.add(EXIT_UP, np.ascontiguousarray(self.spec.up.T, np.float32))
        moved = g.op("MatMul", g.op("MatMul", unit, down), up)
        return self.decoder.finish(g, Residual(unit, moved))
