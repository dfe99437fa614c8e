"""Samples tokens within a captured graph (docs/guides/cuda-graphs.md): what `layers.sampling` does, without `If`.

Which branch is taken is not known when a graph is captured, but shapes are: a greedy call gives no rows to sample, so
every node here computes nothing, and its captured graph has none of their kernels. One session over one copy of the
weights has both.

A device does not sort a vocabulary in a step's time. The threshold of top-k and top-p is looked for among the `RANKED`
likeliest tokens; the weights themselves are of the whole vocabulary, so tokens that tie with the threshold stay, and
temperature and min-p alone need no sorting at all. A row whose threshold lies further down says so.
"""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from streamspec.export.layers.sampling import inverse_cdf, total, with_penalty
from streamspec.export.ops.captured_scope import CapturedScope
from streamspec.step_graph import DRAW, DRAW_INPUTS, MIN_P, TEMPERATURE, TOP_K, TOP_P, TREE_MASK, UNIFORMS

INT64 = TensorProto.INT64
END = np.iinfo(np.int64).max
RANKED = 256  # CUDA's TopK runs the same kernel for 33 to 512 (topk_impl.cuh)


class CapturedSampler:
    """Adds sampling to a captured graph over `raw` logits [n, vocab] of rows `tokens` int64 [n]."""

    def __init__(self, g: CapturedScope, vocab: int) -> None:
        self.g, self.vocab = g, vocab
        first = g.op("Gather", DRAW, g.integer(0), axis=0)
        for column, name in enumerate(DRAW_INPUTS):
            g.op("Slice", first, g.ints(column), g.ints(column + 1), out=name)
        rows = g.op("Slice", DRAW, g.ints(1), g.ints(END), g.ints(0))
        self.rows = g.op("Cast", g.op("Gather", rows, g.integer(0), axis=1), to=INT64)
        g.op("Gather", rows, g.integer(1), out=UNIFORMS, axis=1)

    def add(self, raw: str, tokens: str, greedy: str, numbers: str) -> tuple[str, str]:
        """int64 [n]: the choice after each row, `greedy` where nothing is sampled; and the same as a result says it.
        `numbers` int64 [n]: 0, 1, .."""
        g = self.g
        logits = g.op("Gather", raw, self.rows, axis=0)
        logits = with_penalty(g, logits, tokens, g.op("Gather", TREE_MASK, self.rows, axis=0))
        hot = g.op("Greater", TEMPERATURE, g.number(0))
        scores = g.op("Div", logits, g.op("Where", hot, TEMPERATURE, g.number(1)))
        weights = g.op("Exp", g.op("Sub", scores, g.op("ReduceMax", scores, g.ints(1), keepdims=1)))
        floor, coarse = self._floor(weights)
        kept = g.op("Where", g.op("Less", weights, floor), g.number(0), weights)
        drawn = inverse_cdf(g, kept, UNIFORMS, self.vocab)
        best = g.op("ArgMax", logits, axis=1, keepdims=0)  # of no rows the CPU's gets -1 wrong
        chosen = g.op("Where", hot, drawn, best)
        result_token = g.op("Where", g.op("And", hot, coarse), g.op("Sub", g.ints(-1), chosen), chosen)
        # Rows to sample are all or none: a row's number finds the drawn token, or the greedy one, which is the first.
        choice, result = (
            g.op("Gather", g.op("Concat", sampled, greedy, axis=0), numbers, axis=0)
            for sampled in (chosen, result_token)
        )
        return choice, result

    def _floor(self, weights: str) -> tuple[str, str]:
        """[s, 1]: the smallest weight that top-k, top-p and min-p keep; and bool [s]: whether those of top-k and top-p
        lie further down than what is sorted."""
        g, ranked_count = self.g, min(RANKED, self.vocab)
        best, _ = g.ops("TopK", weights, g.ints(ranked_count), out=(None, None), axis=-1, largest=1, sorted=1)
        limited, nucleus = g.op("Greater", TOP_K, g.number(0)), g.op("Less", TOP_P, g.number(1))
        ranks = g.store.constant(np.arange(ranked_count)[None], np.float32)
        within = g.op("Less", ranks, g.op("Where", limited, TOP_K, g.number(ranked_count)))
        held = total(g, g.op("Where", within, best, g.number(0)))
        # top-p counts shares of the tokens that top-k keeps
        share = g.op("Mul", g.op("Where", limited, held, total(g, weights)), TOP_P)
        enough = g.op("Where", nucleus, share, g.number(np.inf))
        before = g.op("CumSum", best, g.integer(1), exclusive=1)
        needed = g.op("Cast", g.op("And", within, g.op("Less", before, enough)), to=INT64)
        last = g.op("Sub", g.op("ReduceSum", needed, g.ints(1), keepdims=1), g.ints(1))
        ranked = g.op("GatherElements", best, last, axis=1)
        floor = g.op("Max", g.op("Where", g.op("Or", limited, nucleus), ranked, g.number(0)), MIN_P)
        short = g.op("And", g.op("And", nucleus, g.op("Not", limited)), g.op("Less", held, enough))
        lowest = g.op("Slice", best, g.ints(ranked_count - 1), g.ints(ranked_count), g.ints(1))
        short = g.op("And", short, g.op("Less", MIN_P, lowest))  # what min-p drops needs no other threshold
        coarse = g.op("Or", short, g.op("Greater", TOP_K, g.number(ranked_count)))
        if ranked_count == self.vocab:
            coarse = g.op("And", coarse, g.store.constant(False, np.bool_))
        return floor, g.op("Squeeze", coarse, g.ints(1))
