"""Regenerated answers equal HF's own greedy generate, prompt by prompt, or follow the asked distribution; files of them
go on where they were cut.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from streamspec.adapters.training import self_distillation
from streamspec.adapters.training.self_distillation import CompletionFile, drawn, regenerate
from streamspec.errors import DataError
from tests.support.tiny_models import tiny_model

PROMPTS = [[5, 9, 33], [8], [40, 41, 42, 43, 44, 45], [7, 7], [12, 60], [33, 5, 21, 9, 8]]


MADE_BY = {"target": "tiny"}


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "opt", "gpt2", "phi", "lfm2"])
def test_answers_equal_generate_one_prompt_at_a_time(family: str, tmp_path: Path) -> None:
    model = tiny_model(family, seed=3)
    eos = 17
    answered = regenerate(
        model, PROMPTS, eos, CompletionFile(tmp_path / "answers", MADE_BY), max_new_tokens=20, batch_size=4
    )
    assert [prompt for prompt, _ in answered] == PROMPTS
    for prompt, answer in answered:
        out = model.generate(
            torch.tensor([prompt]), max_new_tokens=20, do_sample=False, eos_token_id=eos, pad_token_id=0
        )
        assert answer == out[0, len(prompt) :].tolist()


def run(path: Path, prompts: list[list[int]] = PROMPTS, **options: Any) -> list[tuple[list[int], list[int]]]:
    return regenerate(
        tiny_model("llama", seed=3),
        prompts,
        17,
        CompletionFile(path, MADE_BY),
        max_new_tokens=8,
        batch_size=2,
        **options,
    )


def test_a_file_is_continued_and_a_torn_line_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    whole = run(path)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:4]) + lines[4][:10])
    assert run(path) == whole
    assert [json.loads(line)["answer"] for line in path.read_text().splitlines()[1:]] == [answer for _, answer in whole]


def test_only_prompts_without_an_answer_are_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "answers.jsonl"
    whole = dict(zip(map(tuple, PROMPTS), (answer for _, answer in run(path)), strict=True))
    asked: list[list[int]] = []
    made = self_distillation.answer_batch
    monkeypatch.setattr(
        self_distillation,
        "answer_batch",
        lambda model, prompts, *rest: asked.extend(prompts) or made(model, prompts, *rest),
    )
    mixed = [PROMPTS[4], [3, 3], PROMPTS[0], [3, 3]]
    answered = run(path, mixed)
    assert asked == [[3, 3]] and [prompt for prompt, _ in answered] == mixed
    assert answered[0][1] == whole[tuple(PROMPTS[4])] and answered[2][1] == whole[tuple(PROMPTS[0])]


def test_every_second_answer_is_sampled_and_the_same_after_an_interruption(tmp_path: Path) -> None:
    greedy, sampled = run(tmp_path / "greedy"), run(tmp_path / "sampled", sampled=(2.0, 1.0, 7))
    assert [answer for _, answer in sampled[::2]] == [answer for _, answer in greedy[::2]]
    assert all(a != b for (_, a), (_, b) in zip(sampled[1::2], greedy[1::2], strict=True))
    run(tmp_path / "cut", PROMPTS[:2], sampled=(2.0, 1.0, 7))
    assert run(tmp_path / "cut", sampled=(2.0, 1.0, 7)) == sampled
    assert run(tmp_path / "other", sampled=(2.0, 1.0, 8)) != sampled


def test_drawn_tokens_follow_the_temperature_and_the_nucleus() -> None:
    count, logits = 40_000, torch.tensor([2.0, 1.0, 0.5, 0.0, -3.0])
    choose = drawn(2.0, 0.9, torch.Generator().manual_seed(0))
    came = choose(logits.expand(count, -1), list(range(count)))
    assert (came[::2] == 0).all()
    probabilities = (logits[:4] / 2).softmax(0)  # the last is outside of the nucleus
    expected = probabilities * count / 2
    seen = torch.bincount(came[1::2], minlength=5)
    assert seen[4] == 0
    assert ((seen[:4] - expected) ** 2 / expected).sum() < 16.27  # chi-square, 3 degrees of freedom, p = 0.001


def test_without_time_only_what_is_there_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    assert len(run(path, minutes=0.0)) == 2  # one batch at least
    assert [prompt for prompt, _ in run(path, minutes=0.0)] == PROMPTS[:2]


def test_answers_of_another_target_are_refused(tmp_path: Path) -> None:
    CompletionFile(tmp_path / "answers.jsonl", {"target": "other"})
    with pytest.raises(DataError, match="answers of .*other.* expected .*tiny"):
        CompletionFile(tmp_path / "answers.jsonl", MADE_BY)
