"""Bundles with short convolutions beyond what their rings hold: long answers, going back, saved conversations.

tests/export/graphs compares their graphs with PyTorch.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from streamspec import load
from streamspec.bundle.files import read_manifest
from streamspec.draft_tree import DraftTree
from streamspec.export import Target, export_bundle
from streamspec.layer_cache import ATTENTION, CONV, window_slots
from streamspec.runtime import Session
from streamspec.runtime.decoding.model_runner import StepRequest
from tests.support.tiny_models import tiny_model, tiny_tokenizer

CONTEXT, PROMPT, NEW = 1024, 300, 331
TREE, PATH = DraftTree((0, 0, 0, 2, 2), (0, 0, 1, 0, 1)), [0, 2, 4]  # the path's rows have others between them
TEXT = "".join(np.random.default_rng(0).choice(list("abcdefghijkl "), PROMPT))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("convolving")
    tiny_model("lfm2", max_position_embeddings=CONTEXT, initializer_range=0.3).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def bundle(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundles") / "int8"
    manifest = export_bundle(base, None, folder, "int8", progress=lambda line: None)
    assert [cache.window for cache in manifest.model.caches if cache.kind == CONV] == [3, 3]
    assert window_slots(3) < PROMPT + NEW
    return folder


def opened(bundle: Path, tmp_path: Path) -> Session:
    return load(bundle, threads=1, cache_dir=tmp_path)


@pytest.mark.parametrize("static", [False, True])
def test_long_answers_through_trees_are_those_of_hugging_face(static: bool, base: Path, tmp_path: Path) -> None:
    target = Target(static=static, context=CONTEXT if static else None)
    export_bundle(base, None, tmp_path / "bundle", "fp32", progress=lambda line: None, target=target)
    session = opened(tmp_path / "bundle", tmp_path)
    answer = session.generate(TEXT, max_new_tokens=NEW, speculate=False).token_ids
    prompt, model = session.encode(TEXT), tiny_model("lfm2", max_position_embeddings=CONTEXT, initializer_range=0.3)
    assert answer == model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].argmax(1).tolist()
    check_through_trees(session, answer)


def check_through_trees(session: Session, answer: list[int]) -> None:
    """Commits the plain `answer` to TEXT tree by tree, and compares every choice."""
    runner = session.runner
    runner.reset()
    runner.prefill(StepRequest(session.encode(TEXT)))
    for at in range(0, len(answer) - 3, 3):
        first, second, third, after = answer[at : at + 4]
        rows = [first, (second + 1) % 60, second, (third + 1) % 60, third]
        chosen = runner.verify(StepRequest(rows, TREE)).choices
        assert [chosen[row] for row in PATH] == [second, third, after], at
        runner.commit(PATH)


@pytest.fixture(scope="module")
def half(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle whose keys and values are in float16."""
    folder = tmp_path_factory.mktemp("half") / "bundle"
    export_bundle(base, None, folder, "int8", kv_cache_dtype="float16", progress=lambda line: None)
    return folder


@pytest.mark.parametrize("provider", ["cpu", "native"])
@pytest.mark.parametrize("kept", ["bundle", "half"])
def test_long_answers_through_trees_are_those_of_plain_decoding(
    kept: str, provider: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    session = load(request.getfixturevalue(kept), threads=1, cache_dir=tmp_path, provider=provider)
    check_through_trees(session, session.generate(TEXT, max_new_tokens=NEW, speculate=False).token_ids)


def test_a_convolution_is_one_native_operator_and_its_inputs_stay_in_float32(bundle: Path, half: Path) -> None:
    for folder in (bundle, half):
        graph = onnx.load(folder / "native.onnx", load_external_data=False).graph
        assert [node.op_type for node in graph.node].count("ShortConv") == 2
    kinds = {(cache.kind, cache.dtype) for cache in read_manifest(half).model.caches}
    assert kinds == {(CONV, "float32"), (ATTENTION, "float16")}


@pytest.mark.parametrize("back", [3, 200, 500])
def test_an_answer_after_going_back_is_that_of_a_new_session(back: int, bundle: Path, tmp_path: Path) -> None:
    used, new = opened(bundle, tmp_path), opened(bundle, tmp_path)
    used.generate(TEXT, max_new_tokens=NEW, speculate=True)
    kept = used.cached_tokens[: len(used.cached_tokens) - back]
    prompt = [*kept, 5, 9, 7]
    ours, theirs = (session.generate(prompt, max_new_tokens=40, speculate=True) for session in (used, new))
    assert ours.token_ids == theirs.token_ids == used.generate(prompt, max_new_tokens=40, speculate=False).token_ids


def test_a_saved_conversation_goes_on(bundle: Path, tmp_path: Path) -> None:
    used, other = opened(bundle, tmp_path), opened(bundle, tmp_path)
    used.generate(TEXT, max_new_tokens=NEW)
    used.save(tmp_path / "conversation")
    other.restore(tmp_path / "conversation")
    assert other.cached_tokens == used.cached_tokens
    prompt = [*used.cached_tokens, 5, 9, 7]
    answers = [session.generate(prompt, max_new_tokens=40).token_ids for session in (used, other)]
    assert answers[0] == answers[1]
