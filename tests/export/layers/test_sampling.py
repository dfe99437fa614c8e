"""The sampling nodes against transformers' processors and against exact frequencies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto
from transformers.generation import logits_process as hf

from streamspec.export.layers.sampling import TokenSampler
from streamspec.export.ops.builder import Scope, WeightStore, declared, finish, tensor

GRID = 4096  # uniform numbers per distribution: a frequency may be off by 1 / GRID
SCALE = 0.25  # of every row: logits come without it


def session(vocab: int, folder: Path) -> Any:
    store = WeightStore(folder / "w.data")
    g, sampler = Scope(store), TokenSampler(vocab)
    sampler.add(g, "logits", "scale", "tokens", "mask", out="choices")
    inputs = [
        tensor("logits", TensorProto.FLOAT, ["r", vocab]),
        tensor("scale", TensorProto.FLOAT, ["r", 1]),
        tensor("tokens", TensorProto.INT64, ["n"]),
        tensor("mask", TensorProto.FLOAT, ["r", "n"]),
        *declared(sampler.inputs),
    ]
    model = finish(g, inputs, [tensor("choices", TensorProto.INT64, ["r"])])
    onnx.save(model, folder / "m.onnx")
    options = ort.SessionOptions()
    options.log_severity_level = 4
    return ort.InferenceSession(str(folder / "m.onnx"), options)


@pytest.fixture(scope="module", params=[12, 700, 3000])
def graph(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Any]:
    return request.param, session(request.param, tmp_path_factory.mktemp("sampling"))


def choose(graph: Any, logits: np.ndarray, tokens: list[int], mask: np.ndarray, **given: Any) -> np.ndarray:
    dtypes = {"top_k": np.int64}
    fed = {k: np.array([v], dtypes.get(k, np.float32)) for k, v in given.items() if np.isscalar(v)}
    fed |= {k: v for k, v in given.items() if not np.isscalar(v)}
    return np.asarray(
        graph.run(
            ["choices"],
            {
                "logits": (logits / SCALE).astype(np.float32),
                "scale": np.full((len(logits), 1), SCALE, np.float32),
                "tokens": np.array(tokens),
                "mask": mask,
                **fed,
            },
        )[0]
    )


def expected(logits: np.ndarray, context: list[int], allowed: list[int] | None = None, **given: float) -> np.ndarray:
    """Probabilities by transformers' processors, in its order."""
    scores, ids = torch.tensor(logits)[None], torch.tensor([context])
    if given.get("repetition_penalty", 1) != 1:
        scores = hf.RepetitionPenaltyLogitsProcessor(given["repetition_penalty"])(ids, scores)
    if allowed is not None:
        scores = hf.PrefixConstrainedLogitsProcessor(lambda batch, text: allowed, 1)(ids, scores)
    scores = hf.TemperatureLogitsWarper(float(given["temperature"]))(ids, scores)
    if given.get("top_k"):
        scores = hf.TopKLogitsWarper(int(given["top_k"]))(ids, scores)
    if given.get("top_p", 1) < 1:
        scores = hf.TopPLogitsWarper(given["top_p"])(ids, scores)
    if given.get("min_p"):
        scores = hf.MinPLogitsWarper(given["min_p"])(ids, scores)
    return np.asarray(scores[0].double().softmax(-1))


SETTINGS: list[dict[str, float]] = [
    {"temperature": 1.0},
    {"temperature": 0.4},
    {"temperature": 1.7, "top_k": 7},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 3.0, "top_p": 0.999},
    {"temperature": 0.9, "top_k": 40, "top_p": 0.8},
    {"temperature": 1.3, "min_p": 0.05},
    {"temperature": 1.1, "top_k": 50, "top_p": 0.95, "min_p": 0.02, "repetition_penalty": 1.3},
    {"temperature": 1.0, "repetition_penalty": 0.8},
]


SHARES = (None, 0.5, 0.01)
# All shares with each setting in one vocabulary; in the smallest and the largest, one share with each: in the largest
# no mask with the nucleus that is most of its tokens.
DRAWN = [(700, given, share) for given in SETTINGS for share in SHARES]
DRAWN += [(12, given, SHARES[number % 3]) for number, given in enumerate(SETTINGS)]
DRAWN += [(3000, given, SHARES[(number + 2) % 3]) for number, given in enumerate(SETTINGS)]


@pytest.mark.parametrize(("graph", "given", "share"), DRAWN, indirect=["graph"], ids=str)
def test_frequencies_over_a_grid_of_uniforms_are_the_processed_probabilities(
    graph: tuple[int, Any], given: dict[str, float], share: float | None
) -> None:
    """With and without a mask that allows a `share` of the tokens, and one at least."""
    vocab, run = graph
    random = np.random.default_rng(vocab)
    logits = random.normal(0, 2.5, vocab).astype(np.float32)
    context = random.integers(0, vocab, 9).tolist()
    seen = np.zeros(vocab, np.bool_)
    seen[context[:6]] = True
    uniforms = ((np.arange(GRID) + 0.5) / GRID).astype(np.float32)
    rows = np.repeat(logits[None], GRID, axis=0)
    mask = np.zeros((GRID, 3), np.float32)
    masked: dict[str, Any] = {}
    allowed = None
    if share is not None:
        allowed = np.argsort(random.random(vocab))[: max(1, int(share * vocab))].tolist()
        masked = {
            "free": np.array([False]),
            "allowed": np.repeat(np.isin(np.arange(vocab), allowed)[None], GRID, axis=0),
        }
    drawn = choose(run, rows, context[6:], mask, uniforms=uniforms, seen=seen, **given, **masked)
    frequency = np.bincount(drawn, minlength=vocab) / GRID
    wanted = expected(logits, context, allowed, **given)
    assert np.abs(frequency - wanted).max() <= 1.01 / GRID
    assert not frequency[wanted == 0].any()


def test_a_row_alone_and_among_others_chooses_alike(graph: tuple[int, Any]) -> None:
    vocab, run = graph
    random = np.random.default_rng(3)
    logits = random.normal(0, 1, (16, vocab)) * np.linspace(0.1, 5, 16)[:, None]  # the first have the largest nuclei
    logits = random.permutation(logits).astype(np.float32)
    uniforms, mask = random.random(16).astype(np.float32), np.zeros((16, 1), np.float32)
    given = {"temperature": 1.2, "top_p": 0.95}
    together = choose(run, logits, [0], mask, uniforms=uniforms, **given)
    alone = [choose(run, logits[i : i + 1], [0], mask[:1], uniforms=uniforms[i : i + 1], **given)[0] for i in range(16)]
    assert together.tolist() == alone


def test_only_what_precedes_a_row_is_penalised(graph: tuple[int, Any]) -> None:
    vocab, run = graph
    # Tokens 3 and 5 are the best two; row 0 follows 3, row 1 follows 5, row 2 neither of them (token 1).
    logits = np.full((3, vocab), -1, np.float32)
    logits[:, 3], logits[:, 5], logits[:, 7] = 2.0, 1.9, 1.0
    mask = np.where(np.eye(3, dtype=bool), 0, -1e9).astype(np.float32)
    choices = choose(run, logits, [3, 5, 1], mask, repetition_penalty=4.0)
    assert choices.tolist() == [5, 3, 3]
    seen = np.zeros(vocab, np.bool_)
    seen[3] = True
    assert choose(run, logits, [3, 5, 1], mask, repetition_penalty=4.0, seen=seen).tolist() == [5, 7, 5]


def test_a_greedy_choice_is_the_best_of_what_its_row_allows(graph: tuple[int, Any]) -> None:
    vocab, run = graph
    logits = np.random.default_rng(5).normal(0, 2, (4, vocab)).astype(np.float32)
    mask, allowed = np.zeros((4, 1), np.float32), np.zeros((4, vocab), np.bool_)
    for row, tokens in enumerate(([0], [1, 5, 7], [vocab - 1, 2], range(vocab))):
        allowed[row, list(tokens)] = True
    wanted = np.where(allowed, logits, -np.inf).argmax(1).tolist()
    assert choose(run, logits, [0], mask, free=np.array([False]), allowed=allowed).tolist() == wanted
    assert choose(run, logits, [0], mask, free=np.array([True]), allowed=allowed).tolist() == logits.argmax(1).tolist()
    drawn = choose(
        run,
        logits,
        [0],
        mask,
        temperature=1e-3,
        uniforms=np.full(4, 0.5, np.float32),
        free=np.array([False]),
        allowed=allowed,
    )
    assert drawn.tolist() == wanted


def test_a_mask_of_before_does_not_matter_where_all_tokens_are_free(graph: tuple[int, Any]) -> None:
    vocab, run = graph
    logits = np.random.default_rng(5).normal(0, 2, (4, vocab)).astype(np.float32)
    mask, stale = np.zeros((4, 1), np.float32), np.zeros((9, vocab), np.bool_)
    for given in ({"temperature": 1.0, "uniforms": np.full(4, 0.7, np.float32)}, {"repetition_penalty": 1.5}, {}):
        wanted = choose(run, logits, [0], mask, **given).tolist()
        assert choose(run, logits, [0], mask, free=np.array([True]), allowed=stale, **given).tolist() == wanted


def test_defaults_are_greedy_and_the_edges_of_the_interval_are_safe(graph: tuple[int, Any]) -> None:
    vocab, run = graph
    logits = np.random.default_rng(5).normal(0, 2, (4, vocab)).astype(np.float32)
    mask = np.zeros((4, 1), np.float32)
    assert choose(run, logits, [0], mask).tolist() == logits.argmax(1).tolist()
    for edge in (0.0, 1 - 2**-23):
        uniforms = np.full(4, edge, np.float32)
        drawn = choose(run, logits, [0], mask, temperature=1.0, top_k=3, uniforms=uniforms)
        best = np.argsort(-logits, axis=1)[:, :3]
        assert all(token in row for token, row in zip(drawn, best, strict=True))
