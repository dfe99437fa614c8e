"""Vectors of texts: those of PyTorch's states, beside a conversation that does not notice."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from streamspec.errors import ConfigError, ContextOverflow, DataError, StreamspecError
from streamspec.runtime import Session, load
from streamspec.runtime.embeddings import Embedding
from streamspec.runtime.engine.executor import GraphExecutor
from streamspec.runtime.engine.memory_estimate import estimate_memory
from streamspec.runtime.hardware.native_library import why_not
from streamspec.runtime.kv_cache.host_cache import LAZY
from streamspec.runtime.kv_cache.shared_cache import SharedCache
from tests.support.tiny_bundles import tiny_bundle
from tests.support.tiny_models import tiny_model, tiny_tokenizer

SHORT, LONG = (
    "hello there",
    "one text of more rows than a call of the model takes, and of some more letters after those",
)
native = pytest.mark.skipif(bool(why_not()), reason="the native operators are not built")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`made("fp32")`: a bundle with streams and an early exit that gives embeddings."""
    bundles: dict[str, Path] = {}

    def make(precision: str) -> Path:
        if precision not in bundles:
            folder = tmp_path_factory.mktemp(precision)
            heads = {"num_attention_heads": 2, "num_key_value_heads": 1}  # which native operators attend over
            tiny_model("llama", initializer_range=0.5, **heads).save_pretrained(folder / "base")
            tiny_tokenizer().save_pretrained(folder / "base")
            options = {"full": True, "embeddings": True, "base": folder / "base"}
            bundles[precision] = tiny_bundle(folder, precision, **options)
        return bundles[precision]

    return make


@pytest.fixture
def session(made: Any, tmp_path: Path) -> Session:
    return load(made("fp32"), threads=1, tree=8, cache_dir=tmp_path)


def states(bundle: Path, session: Session, text: str) -> np.ndarray:
    """PyTorch's last hidden states [tokens, hidden]."""
    ids = torch.tensor([session.tokenizer.encode(text).ids])
    with torch.no_grad():
        found: np.ndarray = AutoModelForCausalLM.from_pretrained(bundle.parent / "base").model(ids).last_hidden_state[0]
    return np.asarray(found)


def unit(vector: np.ndarray) -> np.ndarray:
    return np.asarray(vector / np.linalg.norm(vector))


def test_vectors_are_pytorchs_states(made: Any, session: Session) -> None:
    vectors = session.embed([SHORT, LONG])
    last = session.embed([SHORT, LONG], pooling="last", normalize=False)
    assert vectors.dtype == np.float32 and vectors.shape == (2, session.manifest.model.hidden_size)
    for number, text in enumerate((SHORT, LONG)):
        expected = states(made("fp32"), session, text)
        assert np.abs(vectors[number] - unit(expected.mean(axis=0))).max() < 1e-4
        assert np.abs(last[number] - expected[-1]).max() < 1e-4 * np.abs(expected).max()
    assert len(session.encode(LONG)) > 64  # several calls


@pytest.mark.parametrize("provider", ["cpu", pytest.param("native", marks=native)])
def test_rounded_weights_change_them_little(provider: str, made: Any, tmp_path: Path) -> None:
    session = load(made("int8"), threads=1, tree=8, provider=provider, cache_dir=tmp_path)
    for text, vector in zip((SHORT, LONG), session.embed([SHORT, LONG]), strict=True):
        assert float(vector @ unit(states(made("int8"), session, text).mean(axis=0))) > 0.99


def test_one_text_tokens_and_lists_of_either(session: Session) -> None:
    one, ids = session.embed(SHORT), session.tokenizer.encode(SHORT).ids
    assert one.shape == (1, session.manifest.model.hidden_size)
    for same in ([SHORT], ids, [ids]):
        assert np.array_equal(session.embed(same), one)
    assert np.linalg.norm(one) == pytest.approx(1, abs=1e-6)
    assert np.linalg.norm(session.embed(SHORT, normalize=False)) != pytest.approx(1, abs=1e-3)


def test_a_conversation_goes_on_as_if_nothing_had_been_embedded(made: Any, session: Session, tmp_path: Path) -> None:
    alone = load(made("fp32"), threads=1, tree=8, cache_dir=tmp_path)
    for one in (alone, session):
        one.chat("hello", max_new_tokens=8)
    tokens, messages = list(session.cached_tokens), list(session.messages)
    session.embed([SHORT, LONG])
    assert (list(session.cached_tokens), session.messages) == (tokens, messages)
    answers = [one.chat("and again", max_new_tokens=8) for one in (alone, session)]
    assert answers[0].token_ids == answers[1].token_ids
    assert answers[0].stats.reused_tokens == answers[1].stats.reused_tokens > 0
    assert session.runner.model.sequences == 1


def test_an_unloaded_bundle_is_opened_again(session: Session) -> None:
    before = session.embed(SHORT)
    session.unload()
    assert not session.loaded
    assert np.array_equal(session.embed(SHORT), before) and session.loaded
    session.unload()  # nothing of the call is left in use


@native
@pytest.mark.skipif(not LAZY, reason="address space cannot be taken without memory here")
def test_a_place_among_shared_caches_stays_free(made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = load(made("int8"), threads=1, tree=8, provider="native", batch=2, cache_dir=tmp_path)
    opened: list[Any] = []
    run = GraphExecutor.run

    def during(self: GraphExecutor, *arguments: Any) -> None:
        opened.extend([session.another()] * (not opened))
        run(self, *arguments)

    monkeypatch.setattr(GraphExecutor, "run", during)
    session.embed(LONG)
    assert isinstance(session.runner.cache, SharedCache) and isinstance(opened[0].runner.cache, SharedCache)


def test_what_cannot_be_embedded_is_refused_in_one_line(session: Session) -> None:
    with pytest.raises(ContextOverflow, match="a text of 200 tokens; expected at most 128; shorten the text, or split"):
        session.embed([SHORT, [5] * 200])
    with pytest.raises(DataError, match=r"token ids 5\.\.64; expected 0\.\.63"):
        session.embed([5, 64])
    for empty in ("", [], [SHORT, ""]):
        with pytest.raises(DataError, match="without tokens"):
            session.embed(empty)
    with pytest.raises(ConfigError, match="pooling 'max'; expected mean or last"):
        session.embed(SHORT, pooling="max")
    with pytest.raises(DataError, match="a prompt of type int"):
        session.embed(5)  # type: ignore[arg-type]


def test_a_bundle_without_embeddings_says_how_to_make_one(tmp_path: Path) -> None:
    session = load(tiny_bundle(tmp_path, streams=False), threads=1, cache_dir=tmp_path)
    with pytest.raises(ConfigError, match="a bundle without embeddings; expected one of `streamspec export --emb"):
        session.embed(SHORT)


def test_a_busy_session_refuses(session: Session) -> None:
    stream = session.stream(SHORT, max_new_tokens=8)
    next(stream)
    with pytest.raises(ConfigError, match="the session is busy"):
        session.embed(SHORT)
    stream.close()
    session.embed(SHORT)


def test_cancelled_before_while_and_out_of_time(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    early = Embedding(session, SHORT)
    early.cancel()
    with pytest.raises(StreamspecError, match="embeddings that were ended: cancelled"):
        early.run()
    run, during = GraphExecutor.run, session.cancel

    def hindered(self: GraphExecutor, *arguments: Any) -> None:
        during()
        run(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(GraphExecutor, "run", hindered)
        with pytest.raises(StreamspecError, match="ended: cancelled"):
            session.embed([SHORT, LONG])
        during = partial(time.sleep, 0.1)
        with pytest.raises(StreamspecError, match="ended: timeout"):
            session.embed([LONG] * 50, timeout=0.05)
    assert np.isfinite(session.embed(SHORT)).all()  # the session goes on


def test_the_estimate_counts_a_second_cache(session: Session) -> None:
    plain = replace(session.manifest, model=replace(session.manifest.model, embeddings=False))
    assert estimate_memory(session.manifest).cache == 2 * estimate_memory(plain).cache
