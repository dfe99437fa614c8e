"""Regenerated answers equal HF's own greedy generate, prompt by prompt, and the cache goes on where it was cut."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from streamspec.adapters.regenerate import regenerate
from tests.adapters.tiny import tiny_model

PROMPTS = [[5, 9, 33], [8], [40, 41, 42, 43, 44, 45], [7, 7], [12, 60], [33, 5, 21, 9, 8]]


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "opt", "gpt2", "phi"])
def test_answers_equal_generate_one_prompt_at_a_time(family: str) -> None:
    model = tiny_model(family, seed=3)
    eos = 17
    answers = regenerate(model, PROMPTS, eos, max_new_tokens=20, batch_size=4)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        out = model.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False, eos_token_id=eos, pad_token_id=0)
        assert answer == out[0, len(prompt) :].tolist()


def test_cache_is_continued_and_a_torn_line_is_dropped(tmp_path: Path) -> None:
    model, cache = tiny_model("llama", seed=3), tmp_path / "answers.jsonl"
    whole = regenerate(model, PROMPTS, 17, max_new_tokens=8, batch_size=2, cache=cache)
    lines = cache.read_text().splitlines(keepends=True)
    cache.write_text("".join(lines[:3]) + lines[3][:10])
    assert regenerate(model, PROMPTS, 17, max_new_tokens=8, batch_size=2, cache=cache) == whole
    assert [json.loads(line)["answer"] for line in cache.read_text().splitlines()] == whole


def test_cache_of_other_prompts_is_not_used(tmp_path: Path) -> None:
    model, cache = tiny_model("llama", seed=3), tmp_path / "answers.jsonl"
    regenerate(model, PROMPTS, 17, max_new_tokens=8, batch_size=2, cache=cache)
    other = [[3, 3], *PROMPTS[1:]]
    fresh = regenerate(model, other, 17, max_new_tokens=8, batch_size=2)
    assert regenerate(model, other, 17, max_new_tokens=8, batch_size=2, cache=cache) == fresh
