"""A row's logits are the same to the last bit alone and among up to sixteen, for any shape, in every precision; in
int4 where the processor's kernels allow.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from streamspec.draft_tree import MASKED
from streamspec.export.graphs.dynamic_step_graph import StepGraph
from streamspec.export.ops.builder import WeightStore
from streamspec.export.quantization.precisions import precision
from streamspec.export.runners.graph_runner import GraphRunner, open_session
from streamspec.export.weights.load_weights import ModelSource
from streamspec.export.weights.model_spec import describe
from streamspec.layer_cache import SUM_BLOCK
from tests.support.int4_rows import same_rows
from tests.support.tiny_exports import tiny_model

SLOTS = 1400
QUIET = {"session.intra_op.allow_spinning": "0"}  # eight threads on fewer cores
# By what once depended on the number of rows, and what resembles it. Hidden size, heads, K/V heads, head size, MLP.
SHAPES = {
    "one K/V head of 72": ("llama", 96, 3, 1, 72, 100, {}),
    "one K/V head of 256, as Gemma's": ("gemma3_text", 160, 4, 1, 256, 208, {"query_pre_attn_scalar": 256}),
    "heads of 192": ("llama", 96, 6, 2, 192, 72, {}),
    "as many K/V heads of 40": ("llama", 224, 2, 2, 40, 333, {}),
    "a scale of 1": ("gemma2", 160, 5, 5, 40, 40, {"query_pre_attn_scalar": 1, "attn_logit_softcapping": None}),
    "ten angles": ("stablelm", 320, 4, 4, 80, 577, {}),
}


def drawn(seed: int) -> tuple[Any, ...]:
    """A shape at random."""
    rng = np.random.default_rng(seed)
    kv = int(rng.choice([1, 1, 2, 3, 8]))
    heads, width = kv * int(rng.integers(1, 4)), 8 * int(rng.integers(2, 33))
    hidden = int(np.lcm(32, heads)) * int(rng.integers(1, 3))
    return "llama", hidden, heads, kv, width, int(rng.integers(33, 700)), {}


CASES = [(name, "fp32", "float32") for name in SHAPES]
SHAPES |= {f"drawn {seed}": drawn(seed) for seed in range(4)}
CASES += [(f"drawn {seed}", kind, "float32") for seed in range(4) for kind in ("fp32", "int8", "int4")]
CASES += [("one K/V head of 72", "int8", "float16"), ("heads of 192", "int4", "float16")]


def model_of(shape: str) -> Any:
    family, hidden, heads, kv, width, inner, changes = SHAPES[shape]
    sizes = {"hidden_size": hidden, "num_attention_heads": heads, "num_key_value_heads": kv, "intermediate_size": inner}
    sizes |= {} if family == "stablelm" else {"head_dim": width}
    layers: dict[str, Any] = {"num_hidden_layers": 2, "max_position_embeddings": SLOTS}
    layers |= {"sliding_window": SLOTS, "layer_types": ["full_attention"] * 2} if family.startswith("gemma") else {}
    return tiny_model(family, **sizes | layers | changes)


@pytest.mark.parametrize(("shape", "kind", "cache_dtype"), CASES)
def test_rows_are_the_same_alone_and_among_others(shape: str, kind: str, cache_dtype: str, tmp_path: Path) -> None:
    model = model_of(shape)
    spec = replace(describe(model), cache_dtype=cache_dtype)
    graph = StepGraph(spec, ModelSource(model, spec), precision(kind), None)
    onnx.save(graph.build(WeightStore(tmp_path / "model.onnx.data")), tmp_path / "model.onnx")
    wrong = []
    for threads in (1, 2, 8):
        runner = GraphRunner(open_session(tmp_path / "model.onnx", threads, **QUIET), SLOTS)
        rng = np.random.default_rng(0)
        for buffer in runner.buffers.values():
            buffer[:] = rng.standard_normal(buffer.shape)
        tokens = rng.integers(0, spec.vocab, 16)
        for length in (3, 57, 120, 250, 515, 1290):
            runner.length = length
            alone = [one_after_another(runner, tokens[[0, *path]], length) for path in ([1, 2, 3], [4, 7, 12])]
            for rows in (2, 3, 7, 16):
                chain = runner.step(tokens[:rows], np.arange(rows), np.where(np.tri(rows, dtype=bool), 0, MASKED))
                wrong += [(threads, length, rows)] * (not same(kind, chain["logits"], alone[0]))
            if length // SUM_BLOCK == (length + 15) // SUM_BLOCK:  # other trees are kept off borders
                path = [0, 4, 7, 12]
                mask = np.where(np.eye(16, dtype=bool), 0, MASKED)
                mask[:, 0] = 0
                for depth, node in enumerate(path):
                    mask[node, path[: depth + 1]] = 0
                depths = np.ones(16, int)
                depths[path] = range(4)
                tree = runner.step(tokens, depths, mask)["logits"]
                wrong += [(threads, length, "tree")] * (not same(kind, tree[path], alone[1]))
    assert not wrong


def one_after_another(runner: GraphRunner, tokens: np.ndarray, length: int) -> np.ndarray:
    """Logits of `tokens` [n], each in a call of its own."""
    rows = []
    for token in tokens:
        rows.append(runner.step(np.array([token]), np.zeros(1, int), np.zeros((1, 1)))["logits"])
        runner.length += 1
    runner.length = length
    return np.concatenate(rows)


def same(kind: str, some: np.ndarray, every: np.ndarray) -> bool:
    """Whether the rows that both have are the same, and are numbers."""
    count = min(len(some), len(every))
    return bool(np.isfinite(some).all() and same_rows(kind, some[:count], every[:count]))
