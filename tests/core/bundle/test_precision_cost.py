"""Sentences on what a precision costs."""

from __future__ import annotations

from typing import Any

import pytest

from streamspec.bundle.precision_cost import costs
from tests.support.manifests import manifest


def said(precision: str = "int8", block_size: int | None = None, **found: Any) -> str:
    parity = {"text": {"tokens": 1500, "pytorch": 20.0, "error": 0.002} | found}
    return costs(manifest(precision=precision, block_size=block_size, parity=parity))["text"]


@pytest.mark.parametrize(
    ("bundle", "words"),
    [
        (19.9, "no visible loss"),
        (20.2, "no visible loss"),
        (20.5, "a small loss; finer: --precision fp32"),
        (21.9, "a noticeable loss; finer: --precision fp32"),
        (30.0, "a heavy loss; finer: --precision fp32"),
        (float("inf"), "a heavy loss; finer: --precision fp32"),
    ],
)
def test_the_rise_of_perplexity_has_words(bundle: float, words: str) -> None:
    assert said(bundle=bundle).endswith(f"1500 tokens): {words}")


def test_the_sentence_has_the_figures() -> None:
    assert said("int4", 128, bundle=21.0) == (
        "int4 in blocks of 128: perplexity +5.0 +- 0.2 % on the exporter's text (float32 20, bundle 21, 1500 tokens): "
        "a noticeable loss; finer: --precision int8"
    )


def test_a_model_that_cannot_predict_the_text_is_not_judged_by_it() -> None:
    assert said(pytorch=240.0, bundle=300.0).endswith(
        "the base cannot predict this text, so it says nothing of quality"
    )


@pytest.mark.parametrize("damaged", [3, {}, {"pytorch": "20", "bundle": 21}, {"pytorch": 0, "bundle": 1}, None])
def test_a_manifest_without_such_figures_says_nothing(damaged: Any) -> None:
    assert costs(manifest(parity={"text": damaged})) == {}
