"""The draft layer's graph against the model that was trained, level by level."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from streamspec.adapters.drafters.draft_layer.config import DraftLayerConfig
from streamspec.adapters.drafters.draft_layer.model import DraftLayerModel
from streamspec.bundle.adapter_folder import Adapter
from streamspec.draft_tree import DraftTree
from streamspec.export.drafters.adapter_section import AdapterSection
from streamspec.export.drafters.draft_layer.reference import DraftLayerReference
from streamspec.export.drafters.draft_layer.spec import DraftLayerSpec, shapes
from streamspec.export.reference.pytorch_reference import ReferenceModel
from streamspec.export.runners.captured_runner import CapturedGraphRunner
from streamspec.export.weights.model_spec import describe
from tests.support.latent_families import LATENT
from tests.support.mixture_families import MIXTURES
from tests.support.near_families import VARIED
from tests.support.recurrent_families import WHOLE
from tests.support.tiny_exports import FAMILIES, VOCAB, build, build_captured, build_static, tiny_model

CONTEXT = np.random.default_rng(3).integers(3, VOCAB, 11)
GAMMA, WRONG = 4, 5
WINDOW = 5  # less than the context
ONE = {"experts": 1, "active": 1, "contrast": False, "parallel": False}
METHODS = {
    "jakiro": {"window": WINDOW},
    "hydra": {**ONE, "prefix_attention": True, "own_heads": True},
    "plain hydra": {**ONE, "own_heads": True},
    "mtp": {**ONE, "taps": (0,), "depth": 3, "window": WINDOW},
}
SHAPES = [
    {},
    {"experts": 1, "active": 1, "contrast": False, "parallel": False},
    {"experts": 1, "active": 1, "contrast": False},
    {"experts": 4, "active": 2},
    {"experts": 3, "active": 3, "contrast": False},
    {"parallel": False},
    {"taps": (3,)},
    {"taps": (1, 3, 2)},
    {"prefix_attention": True},
    {"prefix_attention": True, "parallel": False},
    {"prefix_attention": True, "experts": 1, "active": 1, "contrast": False, "parallel": False},
    {"taps": (4,)},
    {"gamma": 2},
    {"gamma": 2, "prefix_attention": True, "taps": (2, 1)},
    {"gamma": 1, "parallel": False},
    {"two_lists": True},
    {"two_lists": True, "contrast": False},
    {"two_lists": True, "parallel": False},
    {"two_lists": True, "parallel": False, "contrast": False},
    {"two_lists": True, "experts": 4, "active": 3},
    {"two_lists": True, "gamma": 1, "parallel": False, "contrast": False},
    {"prefix_attention": True, "own_heads": True, "experts": 1, "active": 1, "contrast": False, "parallel": False},
    {"prefix_attention": True, "own_heads": True},
    {"own_heads": True, "two_lists": True},
    {**ONE, "own_heads": True},
    {"taps": (0,)},
    {**ONE, "taps": (0,)},
    {"taps": (1, 0)},
    {**ONE, "depth": 2},
    {**ONE, "depth": 4, "window": 3},
    {"depth": 2, "taps": (0,)},
    {**ONE, "taps": (1,)},
    {**ONE, "window": 2},  # less than the passes
]
FIXED = [
    *SHAPES[::3],
    {"taps": (1, 3, 2)},
    {**ONE, "depth": 4, "window": 3},
]  # each option once, and those together that share nodes
# Families whose layers are those of another here: of a draft layer, which is like one of theirs, that says enough.
TWINS = {"mistral", "qwen2", "cwm", "iquestcoder", "exaone", "ministral", "seed_oss"}
TWINS |= {"olmo3", "gemma", "qwen3_moe", "mixtral", "mellum", "exaone_moe", "hunyuan_v1_moe", "dots1"}
TWINS |= {"glm4_moe", "granitemoe", "granitemoeshared", "flex_olmo", "bamba", "qwen3_5_moe_text", "deepseek_v2"}
ODD = [  # families whose layers are put together otherwise, with shapes that read their parts otherwise
    ("phi", {"own_heads": True}),
    ("phi", {**ONE, "depth": 2, "window": 2}),
    ("phi", {"prefix_attention": True, "two_lists": True, "experts": 4, "active": 3}),
    ("gpt_neox", {"own_heads": True, "prefix_attention": True}),
    ("gpt2", {"two_lists": True, "parallel": False}),
    ("gemma2", {"own_heads": True, "two_lists": True}),
    ("gemma2", {**ONE, "depth": 3, "taps": (0,), "window": 3}),
    ("olmo2", {"prefix_attention": True, "own_heads": True}),
]
MIXED = [  # gates and sinks of attention, and weights in place of experts', in passes of their own
    ("qwen3_5_text", {**ONE, "depth": 2}),
    ("gpt_oss", {**ONE, "depth": 2, "window": 3}),
    ("gpt_oss", {"prefix_attention": True, "own_heads": True}),
    ("ernie4_5_moe", {"two_lists": True, "experts": 4, "active": 3}),
]


def trained(family: str, **shape: object) -> DraftLayerModel:
    torch.manual_seed(1)
    return shaken(DraftLayerModel(tiny_model(family), DraftLayerConfig(**{"gamma": GAMMA} | shape)))  # type: ignore[arg-type]


def shaken(model: DraftLayerModel) -> DraftLayerModel:
    with torch.no_grad():
        for parameter in model.drafter_tensors().values():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def spec_of(model: DraftLayerModel, draft_vocab: np.ndarray | None = None) -> DraftLayerSpec:
    shape = model.config
    tensors = {name: value.detach().numpy() for name, value in model.drafter_tensors().items()}
    return DraftLayerSpec(
        gamma=shape.gamma,
        taps=shape.taps,
        active=shape.active,
        contrast=shape.contrast,
        parallel=shape.parallel,
        two_lists=shape.two_lists,
        prefix_attention=shape.prefix_attention,
        own_heads=shape.own_heads,
        depth=shape.depth,
        window=shape.window,
        tensors=tensors,
        draft_vocab=draft_vocab,
    )


def check(model: DraftLayerModel, folder: Path, draft_vocab: np.ndarray | None = None) -> None:
    """A prompt, then a tree whose right path stops at its second node: levels after that node."""
    built = build(folder, model.model, spec_of(model, draft_vocab))
    candidates, stepper = min(10, VOCAB if draft_vocab is None else len(draft_vocab)), built.stepper()
    ids = greedy(model, 4)
    root, first, second, after = ids[len(CONTEXT) :]
    stepper.prefill(CONTEXT, next_ids=np.append(CONTEXT[1:], -1))
    tree = DraftTree((0, 0, 1, 0, 2), (0, 0, 0, 1, 0))
    tokens = np.array([root, first, second, (first + 1) % VOCAB, (after + 1) % VOCAB])
    out = stepper.step(tokens, np.asarray(tree.depths), tree.mask(), parents=np.asarray(tree.parents), streams=1)
    assert int(out["accepted_node"][0]) == 2
    assert len(out["candidates"]) == len(out["origins"]) == sum(built.streams.levels)
    offered = np.arange(VOCAB) if draft_vocab is None else draft_vocab
    rows = DraftLayerReference(ReferenceModel(built.model), built.streams).drafts(
        np.array(ids[:-1]), after, None, [], out
    )
    paths, start = np.zeros(1), 0
    for count in built.streams.levels:
        scores = np.empty((count, candidates))
        for row in range(count):
            proposed, logits, expected = next(rows)
            best = offered[np.argsort(-expected[offered], kind="stable")[:candidates]]
            np.testing.assert_array_equal(proposed, best)
            np.testing.assert_allclose(logits, expected[best], atol=2e-3, rtol=1e-3)
            scores[row] = paths[row] + expected[best] - np.log(np.exp(expected[offered]).sum())
        start += count
        goes_on = out["origins"][start : start + built.streams.beam]
        if len(goes_on):
            assert goes_on.tolist() == np.argsort(-scores.ravel(), kind="stable")[: built.streams.beam].tolist()
            paths = scores.ravel()[goes_on]


@pytest.mark.parametrize(
    ("family", "method"),
    [
        (f, m)
        for f in (*FAMILIES, *WHOLE, *MIXTURES, *LATENT)
        for m in METHODS
        if f in VARIED or (m == "jakiro" and f not in TWINS)
    ],
)
def test_agrees_with_the_trained_model(family: str, method: str, tmp_path: Path) -> None:
    model = trained(family, **METHODS[method])
    check(model, tmp_path)
    section = AdapterSection(
        Adapter(tmp_path, "", None, "", "", family, None, {}), model.described(), describe(model.model), GAMMA
    )  # type: ignore[arg-type]
    assert shapes(section) == {name: tuple(value.shape) for name, value in model.drafter_tensors().items()}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_all_shapes_agree(shape: dict, tmp_path: Path) -> None:
    check(trained("llama", **shape), tmp_path, np.sort(np.random.default_rng(0).permutation(VOCAB)[:40]))


@pytest.mark.parametrize(("family", "shape"), [*ODD, *MIXED], ids=str)
def test_shapes_of_other_families_agree(family: str, shape: dict, tmp_path: Path) -> None:
    check(trained(family, **shape), tmp_path)


def greedy(model: DraftLayerModel, count: int) -> list[int]:
    """The context and the target's own `count` tokens after it."""
    ids = CONTEXT.tolist()
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(model.model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids


def committed(steps: Any, path: np.ndarray) -> None:
    if isinstance(steps, CapturedGraphRunner):
        return steps.accept(path)
    for rows in steps.buffers.values():
        rows[:, :, steps.length : steps.length + len(path)] = rows[:, :, steps.length + path]
    steps.length += len(path)


@pytest.mark.parametrize(
    ("family", "shape"),
    [*(("llama", shape) for shape in FIXED), *ODD, ("gemma4_text", {}), ("lfm2", ONE), ("gpt2", {})],
    ids=str,
)
def test_fixed_levels_draft_what_the_dynamic_graph_drafts(family: str, shape: dict, tmp_path: Path) -> None:
    """A prompt in chunks, then trees of which a path with a gap is accepted each time."""
    model = trained(family, **shape)
    ids = greedy(model, 10)
    makes = [build, build_static, *([] if family == "lfm2" else [build_captured])]
    tree = DraftTree((0, 0, 0, 2, 3), (0, 0, 1, 0, 0))
    drafted = []
    for make in makes:
        (tmp_path / make.__name__).mkdir()
        steps = make(tmp_path / make.__name__, model.model, spec_of(model)).stepper()
        steps.prefill(CONTEXT, next_ids=np.append(CONTEXT[1:], -1))
        for start in range(len(CONTEXT), len(CONTEXT) + 9, 3):
            root, right, last = ids[start : start + 3]
            tokens = np.array([root, (right + 1) % VOCAB, right, last, (ids[start + 3] + 1) % VOCAB])
            out = steps.step(tokens, np.asarray(tree.depths), tree.mask(), parents=np.asarray(tree.parents), streams=1)
            assert out["accepted_node"].tolist() == [3]
            committed(steps, np.array([0, 2, 3]))
            drafted.append(out)
    for theirs, ours in zip(drafted[:3] * (len(makes) - 1), drafted[3:], strict=True):
        for name in ("candidates", "origins"):
            np.testing.assert_array_equal(ours[name], theirs[name])
        np.testing.assert_allclose(ours["candidate_logits"], theirs["candidate_logits"], atol=1e-4)


def test_positions_behind_the_table_are_its_last_one(tmp_path: Path) -> None:
    torch.manual_seed(1)
    base = tiny_model("gpt2", n_positions=len(CONTEXT) + 4)  # all drafts are behind its end
    check(shaken(DraftLayerModel(base, DraftLayerConfig(GAMMA))), tmp_path)


def test_fewer_tokens_to_propose_than_a_level_goes_on_from(tmp_path: Path) -> None:
    check(trained("llama"), tmp_path, np.array([7, 20, 41]))
