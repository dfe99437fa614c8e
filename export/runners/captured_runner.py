"""Runs a captured graph as `graph_runner` runs the others, the CPU in the device's place."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from typing import Any, NamedTuple

import numpy as np

from streamspec.captured.packed_call import DRAW_COLUMNS, CallSizes, Numbers, pack, result_parts, unmoved, unpack
from streamspec.draft_tree import DraftTree
from streamspec.export.ops.builder import Array
from streamspec.export.runners.empty_cache import empty_cache
from streamspec.step_graph import (
    CALL,
    CHOICES,
    DRAW,
    PAST,
    PRESENT,
    RAW_LOGITS,
    RESULT,
    SEEN,
    GraphFeatures,
    renamed,
)


class CapturedGraph(NamedTuple):
    """An open captured graph. `features`: its own (`captured_features`)."""

    session: Any
    sizes: CallSizes
    features: GraphFeatures

    def get_inputs(self) -> Any:
        """As a session of ONNX Runtime."""
        return self.session.get_inputs()


class CapturedGraphRunner:
    """A captured graph over a cache that stays where it is. `length`: tokens in it.

    A prompt comes as accepted paths of trees, in calls of all row counts: beside every token but the first of a call
    is another node, and the next call moves the rows together. So whoever compares prompts and drafts compares that,
    too.
    """

    def __init__(self, graph: CapturedGraph) -> None:
        self.graph, self.length = graph, 0
        self.buffers = empty_cache(graph.get_inputs())
        self.sources = unmoved(graph.sizes, 0)

    def step(
        self,
        tokens: Array,
        offsets: Array,
        mask: Array,
        *,
        parents: Array | None = None,
        streams: int = 0,
        forced_node: int = -1,
        forced_root: int = -1,
        next_ids: Array | None = None,
        draw: Array | None = None,
        seen: Array | None = None,
    ) -> dict[str, Array]:
        """As `GraphRunner.step`; drafters always run, whatever the value of `streams`. `draw`: how tokens are sampled
        (`pack_draw`), None for greedily; `seen` bool [vocabulary]: the tokens before that are penalised."""
        import onnxruntime as ort

        n, sizes, features = len(tokens), self.graph.sizes, self.graph.features
        count = sizes.padded(n)
        call = np.zeros((count, sizes.width(count)), np.int64)
        positions = self.length + np.asarray(offsets, np.int64)
        rows = list(tokens), positions, np.zeros(n, np.int64) if parents is None else parents
        numbers = Numbers(self.length, forced_node, forced_root)
        pack(call, sizes, numbers, rows, np.asarray(mask) == 0, self.sources, next_ids)
        parts = result_parts(count, features)
        result = np.zeros(sum(part.size for part in parts), np.float32)
        raw = np.zeros((count, features.vocab), np.float32)
        draw = np.zeros((1, DRAW_COLUMNS), np.float32) if draw is None else draw
        seen = np.zeros(features.vocab, np.bool_) if seen is None else seen
        given, bound = {CALL: call, DRAW: draw, SEEN: seen, **self.buffers}, {RESULT: result, RAW_LOGITS: raw}
        bound |= {renamed(name, PAST, PRESENT): buffer for name, buffer in self.buffers.items()}
        binding, value = self.graph.session.io_binding(), ort.OrtValue.ortvalue_from_numpy
        held = {name: value(array) for name, array in (given | bound).items()}  # the binding does not keep them alive
        for name in given:
            binding.bind_ortvalue_input(name, held[name])
        for name in bound:
            binding.bind_ortvalue_output(name, held[name])
        self.graph.session.run_with_iobinding(binding)
        self.sources = unmoved(sizes, self.length)
        out = dict(zip((part.name for part in parts), unpack(result, parts), strict=True))
        return out | {CHOICES: out[CHOICES][:n], "logits": raw[:n]}

    def accept(self, path: Array) -> None:
        """Commits rows `path` of the last call, which the next one moves."""
        sizes, count = self.graph.sizes, len(path)
        first = sizes.margin + self.length
        self.length += count
        self.sources = unmoved(sizes, self.length)
        self.sources[sizes.margin - count :] = first + np.asarray(path)

    def prefill(
        self,
        tokens: Array,
        *,
        forced_node: int = -1,
        rows: Array | None = None,
        next_ids: Array | None = None,
        **options: Any,
    ) -> dict[str, Array]:
        """As `StaticGraphRunner.prefill`."""
        parts: list[dict[str, Array]] = []
        start, counts = 0, cycle(self.graph.sizes.rows)
        while start < len(tokens):
            path = np.arange(0, next(counts), 2)[: len(tokens) - start]
            chunk = slice(start, start + len(path))
            tree = _every_other(path[-1] + 1)
            following = np.full(len(tree), -1)
            if next_ids is not None:
                following[path] = next_ids[chunk]
            out = self.step(
                np.repeat(tokens[chunk], 2)[:-1],
                np.asarray(tree.depths),
                tree.mask(),
                parents=np.asarray(tree.parents),
                forced_node=2 * min(max(0, forced_node - start), len(path) - 1),
                next_ids=following,
                **options,
            )
            self.accept(path)
            parts.append(out | {name: out[name][path] for name in (CHOICES, "logits")})
            start += len(path)
        return joined_chunks(parts, rows)

    def skip(self, count: int) -> None:
        """Leaves `count` rows out: their keys and values are zeros."""
        sizes = self.graph.sizes
        first = self.length + sizes.margin
        for buffer in self.buffers.values():
            buffer[:, :, self.length : first] = buffer[:, :, self.sources]
            buffer[:, :, first : first + count] = 0
        self.length += count
        self.sources = unmoved(sizes, self.length)


def joined_chunks(chunks: Sequence[dict[str, Array]], rows: Array | None) -> dict[str, Array]:
    """The outputs of a prompt's last chunk, with the choices and logits of `rows` of all chunks (None: of all rows)."""
    chosen = slice(None) if rows is None else rows
    joined = {name: np.concatenate([chunk[name] for chunk in chunks])[chosen] for name in (CHOICES, "logits")}
    return chunks[-1] | joined


def _every_other(rows: int) -> DraftTree:
    """A chain of the even nodes, and a second child of each but the last."""
    nodes = np.arange(rows)
    return DraftTree(
        tuple((np.maximum(nodes - 1, 0) // 2 * 2).tolist()), tuple(((nodes + 1) % 2 * (nodes > 0)).tolist())
    )
