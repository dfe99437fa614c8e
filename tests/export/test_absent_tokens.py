"""Rows of the vocabulary that are no token of the tokenizer: no graph chooses or drafts them, whatever their logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from streamspec.export import Target, bundle_parts, export_bundle
from streamspec.export.bundle_parts import absent_tokens
from streamspec.runtime import Grammar, Sampling, Session, load
from tests.support.byte_tokenizers import EOS, byte_level
from tests.support.tiny_bundles import lettered_base, tiny_adapter
from tests.support.tiny_models import tiny_model

TEXTS = ("x", "name", '{"a": tr')
DRAWN = Sampling(1.3, top_p=0.95, repetition_penalty=1.2, seed=3)
SHAPES = {
    "dynamic": Target(),
    "static": Target(static=True, rows=8),
    "captured": Target("cuda", capture=True, row_counts=(1, 4, 8), context=128),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base whose five rows beyond the tokenizer's are the likeliest tokens nearly everywhere."""
    folder = lettered_base(tmp_path_factory.mktemp("padded") / "base")
    model = AutoModelForCausalLM.from_pretrained(folder)
    head = model.lm_head.weight.data
    head[-5:] = 2 * head[[70, 80, 90, 100, 110]]
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def adapter(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_adapter(tmp_path_factory.mktemp("drafter") / "adapter", base)


def exported(base: Path, adapter: Path, folder: Path, precision: str, shape: str) -> Session:
    quiet: dict[str, Any] = {"measure": False, "progress": lambda line: None}
    export_bundle(base, adapter, folder / "bundle", precision, target=SHAPES[shape], **quiet)
    return load(folder / "bundle", threads=1, tree=8, cache_dir=folder / "cache")


@pytest.mark.parametrize(
    ("precision", "shape"),
    [("fp32", "dynamic"), ("int8", "dynamic"), ("int4", "dynamic"), ("int8", "static"), ("fp32", "captured")],
)
def test_they_are_neither_chosen_nor_drafted(
    base: Path, adapter: Path, tmp_path: Path, precision: str, shape: str
) -> None:
    session = exported(base, adapter, tmp_path, precision, shape)
    known = session.tokenizer.get_vocab_size()
    assert session.manifest.model.vocab_size == known + 5
    several: tuple[dict[str, Any], ...] = ({"sampling": DRAWN}, {"logprobs": 5}, {"grammar": Grammar.regex(".{1,40}")})
    for text, options in [*((text, {}) for text in TEXTS), *zip(TEXTS, several, strict=True)]:
        answers = [session.generate(text, max_new_tokens=40, speculate=s, **options) for s in (False, True)]
        plain, spec = (answer.token_ids for answer in answers)
        assert plain == spec and max(spec) < known
        for said in answers[1].logprobs or ():
            assert max(token for token, _ in said.top) < known
    assert np.isneginf(session.score(session.encode("name"))[:, known:]).all()


def test_the_others_are_chosen_as_transformers_would(base: Path, adapter: Path, tmp_path: Path) -> None:
    session = exported(base, adapter, tmp_path, "fp32", "dynamic")
    known, model = session.tokenizer.get_vocab_size(), AutoModelForCausalLM.from_pretrained(base)
    for text in TEXTS:
        ids, others = session.encode(text), 0
        for token in session.generate(text, max_new_tokens=20).token_ids:
            with torch.no_grad():
                logits = model(torch.tensor([ids])).logits[0, -1]
            assert token == int(logits[:known].argmax())
            others += token != int(logits.argmax())
            ids = [*ids, token]
        assert others


def test_a_graph_that_knows_nothing_of_them_still_loads_and_chooses_them(
    base: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle_parts, "absent_tokens", lambda *arguments: ())
    session = exported(base, adapter, tmp_path, "fp32", "dynamic")
    assert max(session.generate("name", max_new_tokens=40).token_ids) >= session.tokenizer.get_vocab_size()


@pytest.mark.parametrize("family", ["gemma2", "opt"])
def test_neither_under_a_cap_nor_beside_a_bias(family: str, tmp_path: Path, base: Path) -> None:
    model = tiny_model(family, vocab_size=AutoModelForCausalLM.from_pretrained(base).config.vocab_size)
    with torch.no_grad():
        model.get_output_embeddings().weight[-5:] *= 50
    folder = tmp_path / "base"
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes((base / "tokenizer.json").read_bytes())
    export_bundle(folder, None, tmp_path / "bundle", "int8", measure=False, progress=lambda line: None)
    session = load(tmp_path / "bundle", threads=1, cache_dir=tmp_path / "cache")
    for sampling in (Sampling(seed=0), DRAWN):
        answer = session.generate("name", max_new_tokens=40, sampling=sampling)
        assert max(answer.token_ids) < session.tokenizer.get_vocab_size()


@pytest.mark.parametrize("ends", [(), (261,)])
def test_rows_without_a_token_are_absent_but_for_ends(ends: tuple[int, ...]) -> None:
    tokenizer = byte_level()
    tokenizer.add_tokens(["[PAD257]", "ab", "[PAD]", "[PAD7]"])  # the first as GGUF files name what there is not
    absent = absent_tokens(tokenizer, 263, (EOS, *ends))
    assert absent == tuple(token for token in (257, 261, 262) if token not in ends)
