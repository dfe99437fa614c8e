"""Writes the sampling of tokens as nodes: greedy, or drawn from the processed distribution by inverse CDF.

A row's choice depends on its logits, its text and the uniform number that belongs to its position, never on its
siblings: a drafted token is accepted where it equals that choice, so sampled output is the same for any tree and any
drafter. Processors and their order are those of transformers: repetition penalty, a grammar's mask, temperature, top-k,
top-p, min-p. All parameters are overridable inputs; with their defaults the choice is greedy and nothing else runs.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto

from streamspec.export.native.operators import NativeOps
from streamspec.export.ops.builder import Scope, WeightStore, declared, finish
from streamspec.step_graph import (
    ALLOWED,
    CHOICES,
    FREE,
    INPUT_IDS,
    MIN_P,
    RAW_LOGITS,
    REPETITION_PENALTY,
    SAMPLING,
    SEEN,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    TREE_MASK,
    UNIFORMS,
    GraphFeatures,
    inputs,
    outputs,
)

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64
SORTED = 64, 1024  # tokens sorted for top-p: rows whose nucleus is larger go on to the next number, at last to all
BLOCK = 256  # tokens per block of the two-level cumulative sum
CHOICE_OPSET = 21  # of sampling as a graph of its own, which the ONNX Runtime 1.22 of ROCm reads, too


class TokenSampler:
    """Adds sampling to a graph over logits, `raw` [r, vocab] times `scale` [r, 1] above 0, '' for 1. `tokens` int64
    [n] and `mask` [r, n] (0: precedes or is the row). `native`: writes native operators where there are such.
    """

    def __init__(self, vocab: int, native: NativeOps | None = None) -> None:
        self.vocab, self.native = vocab, native
        self.features = GraphFeatures(0, 0, 0, vocab)
        self.inputs = [row for row in inputs(SAMPLING, self.features) if row.default is not None]

    def add(
        self, g: Scope, raw: str, scale: str, tokens: str, mask: str, slots: str = "", out: str | None = None
    ) -> str:
        """int64 [r]. `slots` int64 [r]: which of `uniforms` and `allowed` belongs to each row, '' where they are in
        order.
        """
        for row in self.inputs:
            assert row.default is not None
            (g.store.add if row.name == SEEN else g.store.add_inline)(row.name, row.filled(row.default))
        mild = g.op("Equal", REPETITION_PENALTY, g.number(1))
        untouched = g.op("And", g.op("And", g.op("LessOrEqual", TEMPERATURE, g.number(0)), mild), FREE)
        greedy, inner = Scope(g.store, "greedy"), Scope(g.store, "processed")
        best = self._argmax(greedy, raw)
        logits = inner.op("Mul", raw, scale) if scale else raw
        as_they_are, harder = Scope(g.store, "unpenalised"), Scope(g.store, "penalised")
        branches = (
            (as_they_are, as_they_are.op("Identity", logits)),
            (harder, with_penalty(harder, logits, tokens, mask)),
        )
        penalised = self._mask(inner, _if(inner, mild, *branches, FLOAT), slots)
        hot = inner.op("Greater", TEMPERATURE, inner.number(0))
        calm, drawing = Scope(g.store, "processed/greedy"), Scope(g.store, "drawn")
        calmest = self._argmax(calm, penalised)
        uniforms = drawing.op("Gather", UNIFORMS, slots, axis=0) if slots else UNIFORMS
        drawn = self._draw(drawing, penalised, uniforms)
        chosen = _if(inner, hot, (drawing, drawn), (calm, calmest), INT64)
        return _if(g, untouched, (greedy, best), (inner, chosen), INT64, out=out)

    def _mask(self, g: Scope, logits: str, slots: str) -> str:
        """Masks tokens that are not `allowed`; with `free` that input, which may hold an earlier mask, is not read."""
        limited, free = Scope(g.store, g.label + "/masked"), Scope(g.store, g.label + "/free")
        allowed = limited.op("Gather", ALLOWED, slots, axis=0) if slots else ALLOWED
        masked = limited.op("Where", allowed, logits, limited.number(-np.inf))
        return _if(g, FREE, (free, free.op("Identity", logits)), (limited, masked), FLOAT)

    def _argmax(self, g: Scope, x: str) -> str:
        return g.op("ArgMax", x, axis=-1, keepdims=0) if self.native is None else self.native.argmax(g, x)

    def _draw(self, g: Scope, logits: str, uniforms: str) -> str:
        scores = g.op("Div", logits, TEMPERATURE)
        top = g.op("ReduceMax", scores, g.ints(1), keepdims=1)
        weights = g.op("Exp", g.op("Sub", scores, top))
        with g.named("truncate"):
            floor = self._floor(g, weights)
        kept = g.op("Where", g.op("Less", weights, floor), g.number(0), weights)
        with g.named("inverse_cdf"):
            return inverse_cdf(g, kept, uniforms, self.vocab)

    def _floor(self, g: Scope, weights: str) -> str:
        """[r, 1]: the smallest weight that top-k, top-p and min-p keep; the largest weight is 1 and always stays."""
        zero, one = g.integer(0), g.number(1)
        by_rank = g.op("Or", g.op("Greater", TOP_K, zero), g.op("Less", TOP_P, one))
        sorting, idle = Scope(g.store, g.label + "/sort"), Scope(g.store, g.label + "/idle")
        none = idle.op("Expand", idle.number(0), idle.ints(1, 1))
        ranked = _if(g, by_rank, (sorting, self._rank_floor(sorting, weights)), (idle, none), FLOAT)
        return g.op("Max", ranked, MIN_P)

    def _rank_floor(self, g: Scope, weights: str) -> str:
        vocab = g.ints(self.vocab)
        limited = g.op("Greater", TOP_K, g.integer(0))
        first = g.op("Min", g.op("Where", limited, TOP_K, g.ints(SORTED[0])), vocab)
        best, _ = g.ops("TopK", weights, first, out=(None, None), axis=-1, largest=1, sorted=1)
        held = total(g, best)
        # top-p counts shares of the tokens that top-k keeps
        share = g.op("Mul", g.op("Where", limited, held, total(g, weights)), TOP_P)
        enough = g.op("Where", g.op("Less", TOP_P, g.number(1)), share, g.number(np.inf))
        short = g.op("And", g.op("Not", limited), g.op("Less", held, enough))
        return self._widened(g, _nucleus(g, best, enough), weights, enough, short, (*SORTED[1:], self.vocab))

    def _widened(self, g: Scope, floor: str, weights: str, enough: str, short: str, sizes: tuple[int, ...]) -> str:
        """`floor` [r, 1], in rows that are `short` (bool [r, 1]) anew from more sorted tokens: each further row sorted
        costs.
        """
        wide, done = (Scope(g.store, f"{g.label}/{name}") for name in (sizes[0], "enough"))
        rows = wide.op("Squeeze", wide.op("NonZero", wide.op("Squeeze", short, wide.ints(1))), wide.ints(0))
        of_short, goal = (wide.op("Gather", x, rows, axis=0) for x in (weights, enough))
        best, _ = wide.ops(
            "TopK", of_short, wide.ints(min(sizes[0], self.vocab)), out=(None, None), axis=-1, largest=1, sorted=1
        )
        lower = _nucleus(wide, best, goal)
        if sizes[1:]:
            lower = self._widened(wide, lower, of_short, goal, wide.op("Less", total(wide, best), goal), sizes[1:])
        whole = wide.op("ScatterND", floor, wide.op("Unsqueeze", rows, wide.ints(1)), lower)
        any_short = g.op("Greater", g.op("ReduceMax", g.op("Cast", short, to=INT64), keepdims=0), g.integer(0))
        return _if(g, any_short, (wide, whole), (done, done.op("Identity", floor)), FLOAT)


def with_penalty(g: Scope, logits: str, tokens: str, mask: str) -> str:
    """[r, vocab]: `logits` of tokens that occur before or in a row, in `SEEN` or as the `tokens` [n] that `mask` [r, n]
    has 0 for, divided by the penalty if positive, multiplied if negative."""
    # Columns that do not precede a row repeat the token of its first that does.
    before = g.op("Equal", mask, g.number(0))
    row = g.op("Unsqueeze", tokens, g.ints(0))
    first = g.op("Gather", tokens, g.op("ArgMax", g.op("Cast", before, to=FLOAT), axis=1, keepdims=1), axis=0)
    indices = g.op("Where", before, row, first)
    # Values that are true in every row: no count of rows is looked up, which a captured graph does not know.
    base = g.op("And", SEEN, g.op("Equal", first, first))
    seen = g.op("ScatterElements", base, indices, g.op("Equal", indices, indices), axis=1)
    milder, harder = g.op("Mul", logits, REPETITION_PENALTY), g.op("Div", logits, REPETITION_PENALTY)
    return g.op("Where", seen, g.op("Where", g.op("Less", logits, g.number(0)), milder, harder), logits)


def inverse_cdf(g: Scope, weights: str, uniforms: str, vocab: int) -> str:
    """int64 [r]: the token at which the running sum of `weights` [r, vocab] exceeds uniform * total; over blocks, then
    within one. Of nodes that a device captures."""
    pad = -vocab % BLOCK
    if pad:
        weights = g.op("Pad", weights, g.ints(0, 0, 0, pad))
    count = (vocab + pad) // BLOCK
    blocks = g.op("Reshape", weights, g.ints(-1, count, BLOCK))
    axis = g.integer(1)
    sums = g.op("ReduceSum", blocks, g.ints(2), keepdims=0)
    ends = g.op("CumSum", sums, axis)
    target = g.op(
        "Mul", g.op("Slice", ends, g.ints(-1), g.ints(count), g.ints(1)), g.op("Unsqueeze", uniforms, g.ints(1))
    )
    block = g.op("Min", _first_above(g, ends, target, count), g.integer(count - 1))  # of NaN: none is
    before = g.op("GatherElements", g.op("CumSum", sums, axis, exclusive=1), block, axis=1)
    place = g.op("Add", g.op("Unsqueeze", block, g.ints(2)), g.store.constant(np.zeros((1, 1, BLOCK)), np.int64))
    inside = g.op("Squeeze", g.op("GatherElements", blocks, place, axis=1), g.ints(1))
    running = g.op("CumSum", inside, axis)
    token = _first_above(g, g.op("Add", before, running), target, BLOCK)
    # Sums over blocks and over tokens round differently: where none exceeds the target, any token with weight will do.
    possible = _first_above(g, running, g.number(0), BLOCK)
    token = g.op("Where", g.op("Less", token, g.integer(BLOCK)), token, possible)
    token = g.op("Min", g.op("Add", g.op("Mul", block, g.ints(BLOCK)), token), g.integer(vocab - 1))
    return g.op("Squeeze", token, g.ints(1))


def _first_above(g: Scope, rising: str, target: str, count: int) -> str:
    """int64 [r, 1]: the index of the first of `count` rising numbers [r, count] that is above the target; `count` where
    none is. Counted, as which of equal ones an ArgMax returns is each provider's own choice."""
    above = g.op("Cast", g.op("Greater", rising, target), to=INT64)
    return g.op("Sub", g.integer(count), g.op("ReduceSum", above, g.ints(1), keepdims=1))


def choice_graph(vocab: int) -> onnx.ModelProto:
    """Sampling as a graph of its own, for targets whose step graph is greedy."""
    g, sampler = Scope(WeightStore()), TokenSampler(vocab)
    sampler.add(g, RAW_LOGITS, "", g.op("Squeeze", INPUT_IDS, g.ints(0)), TREE_MASK, out=CHOICES)
    graph_inputs, graph_outputs = inputs(SAMPLING, sampler.features), outputs(SAMPLING, sampler.features)
    return finish(g, declared(graph_inputs), declared(graph_outputs), CHOICE_OPSET)


def total(g: Scope, weights: str) -> str:
    return g.op("ReduceSum", weights, g.ints(1), keepdims=1)


def _nucleus(g: Scope, values: str, enough: str) -> str:
    """[r, 1]: the last of the descending `values` [r, K] that is needed to make their sum reach `enough` [r, 1]."""
    before = g.op("CumSum", values, g.integer(1), exclusive=1)
    needed = g.op("ReduceSum", g.op("Cast", g.op("Less", before, enough), to=INT64), g.ints(1), keepdims=1)
    return g.op("GatherElements", values, g.op("Sub", needed, g.ints(1)), axis=1)


def _if(
    g: Scope, condition: str, yes: tuple[Scope, str], no: tuple[Scope, str], kind: int, out: str | None = None
) -> str:
    """An `If` with one output; each branch is a scope and the value it ends with."""
    return g.either(condition, (yes[0], yes[1:]), (no[0], no[1:]), [kind], (out,))[0]
