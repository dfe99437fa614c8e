"""The sampling that a base's publisher recommends is what transformers samples with; what cannot be done is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from streamspec.adapters.base_models.generation_config import read_generation, sampling_of, unused_fields
from streamspec.runtime import Sampling
from tests.support.pytorch_sampling import processors
from tests.support.tiny_bundles import tiny_base

PROMPT = torch.tensor([[5, 9, 11, 3]])
# Fields as published: Llama 3.2, Qwen 3, Gemma 3, Qwen 2.5, one that is greedy, and some of the rarer ones.
PUBLISHED: list[dict[str, Any]] = [
    {"do_sample": True, "temperature": 0.6, "top_p": 0.9},
    {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95},
    {"do_sample": True, "top_k": 64, "top_p": 0.95, "cache_implementation": "hybrid"},
    {"do_sample": True, "repetition_penalty": 1.05, "temperature": 0.7, "top_p": 0.8, "top_k": 20},
    {"do_sample": False, "max_new_tokens": 2048},
    {"temperature": 0.6, "top_p": 0.9},
    {"repetition_penalty": 1.3},
    {"do_sample": True, "top_k": 0, "min_p": 0.05, "repetition_penalty": 1.0},
    {"eos_token_id": [1, 2], "pad_token_id": 0},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_base(tmp_path_factory.mktemp("generation") / "base")


@pytest.mark.parametrize("fields", PUBLISHED, ids=str)
def test_it_is_what_transformers_samples_with(folder: Path, fields: dict[str, Any]) -> None:
    (folder / "generation_config.json").write_text(json.dumps(fields))
    model = AutoModelForCausalLM.from_pretrained(folder)
    wanted = {"max_new_tokens": 1, "output_scores": True, "output_logits": True, "return_dict_in_generate": True}
    done = model.generate(PROMPT, **wanted, pad_token_id=0)
    given = sampling_of(read_generation(folder))
    assert Sampling(**given).random == bool(model.generation_config.do_sample)
    processed = processors({"temperature": 1.0} | given, PROMPT.shape[1])(PROMPT, done.logits[0])
    assert torch.allclose(done.scores[0], processed)  # -inf where a token is dropped


def test_fields_that_are_off_are_left_out() -> None:
    assert sampling_of(PUBLISHED[7]) == {"temperature": 1.0, "min_p": 0.05}
    assert sampling_of(PUBLISHED[5]) == sampling_of(PUBLISHED[8]) == sampling_of({}) == {}
    assert sampling_of({"do_sample": True, "temperature": 0, "top_k": 20, "repetition_penalty": 1.1}) == {
        "repetition_penalty": 1.1
    }


@pytest.mark.parametrize(
    ("fields", "unused"),
    [
        ({"top_k": -1}, "its sampling (top_k is -1; expected a whole number 0..2147483647)"),
        ({"temperature": 1e-5}, "its sampling (temperature is 1e-05; expected a number 0.001..100)"),
        ({"temperature": "hot"}, "its sampling (temperature is 'hot'; expected a number 0.001..100)"),
        ({"top_p": True}, "its sampling (top_p is True; expected a number 0.001..1)"),
    ],
)
def test_a_value_that_cannot_be_sampled_with_leaves_decoding_greedy_and_is_named(
    fields: dict[str, Any], unused: str
) -> None:
    fields = {"do_sample": True, "temperature": 0.5} | fields
    assert sampling_of(fields) == {} and unused_fields(fields) == [unused]


def test_what_the_runtime_does_not_do_is_named() -> None:
    asked = {
        "num_beams": 4,
        "typical_p": 0.9,
        "no_repeat_ngram_size": 3,
        "xtc_probability": 0.5,
        "presence_penalty": 1.5,
    }
    sampled = {"do_sample": True, "temperature": 0.5}
    assert unused_fields(sampled | asked) == [f"{name} {value}" for name, value in asked.items()]
    off = {"num_beams": 1, "typical_p": 1.0, "no_repeat_ngram_size": 0, "bad_words_ids": None, "mirostat": 0}
    assert unused_fields(sampled | off) == []
    assert unused_fields({"temperature": 0.6, "top_k": 50, "top_p": 1.0}) == ["temperature 0.6 without do_sample"]
    assert [unused_fields(fields) for fields in PUBLISHED if fields is not PUBLISHED[5]] == [[]] * 8
