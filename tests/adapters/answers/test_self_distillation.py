"""Regenerated answers equal HF's own greedy generate, prompt by prompt, or follow the asked distribution; files of them
go on where they were cut.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from streamspec.adapters.answers import self_distillation
from streamspec.adapters.answers.completion_file import CompletionFile, up_to_end
from streamspec.adapters.answers.request import AnswerJob
from streamspec.adapters.answers.self_distillation import answer_batch, answer_batches, drawn, regenerate
from streamspec.adapters.distributed import processes
from streamspec.adapters.runs.budget import ANSWERS, Deadline, Speeds
from streamspec.errors import DataError
from tests.support.tiny_models import tiny_model

PROMPTS = [[5, 9, 33], [8], [40, 41, 42, 43, 44, 45], [7, 7], [12, 60], [33, 5, 21, 9, 8]]


MADE_BY = {"target": "tiny"}


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "opt", "gpt2", "phi", "lfm2"])
def test_answers_equal_generate_one_prompt_at_a_time(family: str, tmp_path: Path) -> None:
    model = tiny_model(family, seed=3)
    eos = [17]
    answered = regenerate(model, PROMPTS, eos, CompletionFile(tmp_path / "answers", MADE_BY), AnswerJob(20), 4)
    assert [prompt for prompt, _ in answered] == PROMPTS
    for prompt, answer in answered:
        out = model.generate(
            torch.tensor([prompt]), max_new_tokens=20, do_sample=False, eos_token_id=eos, pad_token_id=0
        )
        assert answer == out[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    ("family", "factors"),
    [
        ("granite", {"logits_scaling": 8.0}),
        ("gemma2", {"final_logit_softcapping": 2.0}),
        ("cohere", {"logit_scale": 0.2}),
    ],
)
def test_tokens_are_drawn_from_the_logits_that_the_model_gives(family: str, factors: dict[str, float]) -> None:
    model, given = tiny_model(family, seed=3, **factors), list[torch.Tensor]()

    def choose(logits: torch.Tensor, rows: list[int]) -> torch.Tensor:
        given.append(logits)
        return logits.argmax(-1)

    answer_batch(model, [PROMPTS[0]], [17], 1, choose)
    assert torch.allclose(given[0], model(torch.tensor([PROMPTS[0]])).logits[:, -1], atol=1e-5)


def test_what_made_answers_otherwise_is_named(tmp_path: Path) -> None:
    CompletionFile(tmp_path / "answers", {"base": "one", "target": "tiny", "seed": 1})
    with pytest.raises(DataError, match=r"answers of seed 1, base_bits None; expected seed 2, base_bits 4"):
        CompletionFile(tmp_path / "answers", {"base": "one", "target": "tiny", "seed": 2, "base_bits": 4})


def test_answers_end_with_the_first_of_several_ends(tmp_path: Path) -> None:
    model = tiny_model("llama", seed=3)
    free = regenerate(model, PROMPTS, [63], CompletionFile(tmp_path / "free", MADE_BY), AnswerJob(9), 4)
    ends = [63, free[0][1][4], free[2][1][2]]
    cut = regenerate(model, PROMPTS, ends, CompletionFile(tmp_path / "cut", MADE_BY), AnswerJob(9), 4)
    assert [answer for _, answer in cut] == [up_to_end(answer, ends) for _, answer in free]
    assert len(cut[0][1]) <= 5 and len(cut[2][1]) <= 3


def run(path: Path, prompts: list[list[int]] = PROMPTS, **options: Any) -> list[tuple[list[int], list[int]]]:
    job = AnswerJob(8, **options)
    return regenerate(tiny_model("llama", seed=3), prompts, [17], CompletionFile(path, MADE_BY), job, 2)


def test_a_file_is_continued_and_a_torn_line_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    whole = run(path)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:4]) + lines[4][:10])
    assert run(path) == whole
    kept = {tuple(row["prompt"]): row["answer"] for row in map(json.loads, path.read_text().splitlines()[1:])}
    assert kept == {tuple(prompt): answer for prompt, answer in whole}


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
    plain = {tuple(prompt): answer for prompt, answer in greedy}
    lines = (tmp_path / "sampled").read_text().splitlines(keepends=True)
    made = {tuple(row["prompt"]): row["answer"] for row in map(json.loads, lines[1:])}
    assert [made[tuple(prompt)] == plain[tuple(prompt)] for prompt in PROMPTS] == [True, False] * 3
    (tmp_path / "cut").write_text("".join(lines[:3]))
    assert run(tmp_path / "cut", sampled=(2.0, 1.0, 7)) == sampled
    assert run(tmp_path / "other", sampled=(2.0, 1.0, 8)) != sampled


def test_drawn_tokens_follow_the_temperature_and_the_nucleus() -> None:
    count, logits = 40_000, torch.tensor([2.0, 1.0, 0.5, 0.0, -3.0])
    choose = drawn(2.0, 0.9, 0, list(range(count)), 1)
    came = choose(logits.expand(count, -1), list(range(count)))
    assert (came[::2] == 0).all()
    probabilities = (logits[:4] / 2).softmax(0)  # the last is outside of the nucleus
    expected = probabilities * count / 2
    seen = torch.bincount(came[1::2], minlength=5)
    assert seen[4] == 0
    assert ((seen[:4] - expected) ** 2 / expected).sum() < 16.27  # chi-square, 3 degrees of freedom, p = 0.001


def test_without_time_only_what_is_there_comes_back(tmp_path: Path) -> None:
    path, over = tmp_path / "answers.jsonl", Deadline(0.0, lambda: 1.0)
    assert run(path, until=over) == run(path, until=over, sampled=(1.0, 1.0, 0)) == []
    few = run(path, PROMPTS[2:4])
    assert run(path, until=over) == few[::-1] or run(path, until=over) == few


def test_a_batch_that_is_cut_by_time_is_not_kept(tmp_path: Path) -> None:
    calls = [0.0]

    def now() -> float:  # a second for each token of a batch
        calls[0] += 1
        return calls[0]

    path = tmp_path / "answers.jsonl"
    whole = dict(zip(map(tuple, PROMPTS), (answer for _, answer in run(tmp_path / "whole")), strict=True))
    speeds = Speeds()
    speeds.measured(ANSWERS, 100, 1)  # believed to be fast
    made = run(path, until=Deadline(15.0, now), speeds=speeds)
    assert 2 <= len(made) < len(PROMPTS)
    assert all(whole[tuple(prompt)] == answer for prompt, answer in made)
    assert len(path.read_text().splitlines()) == 1 + len(made)


def test_no_batch_is_begun_that_would_be_late(tmp_path: Path) -> None:
    speeds = Speeds()
    speeds.measured(ANSWERS, 1, 5.0)
    path = tmp_path / "answers.jsonl"
    assert len(run(path, PROMPTS[:2])) == 2
    assert len(run(path, until=Deadline(4.0, lambda: 0.0), speeds=speeds)) == 2
    assert len(run(path, until=Deadline(5.0, lambda: 0.0), speeds=speeds)) > 2


def test_batches_hold_prompts_of_similar_length_within_their_tokens() -> None:
    prompts = [[1] * (1 + 7 * i % 50) for i in range(50)]
    batches = answer_batches(prompts, 10, 8, 200)
    assert sorted(map(len, (p for b in batches for p in b))) == sorted(map(len, prompts))
    assert all(len(b) <= 8 and (len(b) == 1 or len(b) * (len(b[-1]) + 10) <= 200) for b in batches)
    assert max(len(b[-1]) - len(b[0]) for b in batches) < 8
    first = [len(b[-1]) for b in batches]
    assert first != sorted(first) and batches == answer_batches(prompts, 10, 8, 200)


def test_progress_counts_every_answer_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []

    @contextmanager
    def counted(label: str, total: int) -> Iterator[Callable[[int], None]]:
        assert total == len(PROMPTS)
        yield counts.append

    monkeypatch.setattr(processes, "counted", counted)
    run(tmp_path / "answers.jsonl")
    assert sum(counts) == len(PROMPTS) and len(counts) > 3 * len(PROMPTS) / 2  # once a token, for a sign of life


def test_a_file_that_an_older_version_named_otherwise_goes_on(tmp_path: Path) -> None:
    path, older = tmp_path / "answers.jsonl", MADE_BY | {"answers_from": "bundle 1"}
    CompletionFile(path, older).add([[5]], [[6]])
    newer = MADE_BY | {"answers_from": "weights 2"}
    with pytest.raises(DataError, match="answers_from bundle 1"):
        CompletionFile(path, newer, MADE_BY | {"answers_from": "bundle 3"})
    assert CompletionFile(path, newer, older).known == CompletionFile(path, newer).known == {(5,): [6]}


def test_a_whole_file_is_left_to_others_that_add_to_it(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    CompletionFile(path, MADE_BY).add([[5]], [[6]])
    file = path.stat().st_ino
    CompletionFile(path, MADE_BY)
    assert path.stat().st_ino == file
    path.write_text(path.read_text().rstrip("\n"))  # torn behind the last bracket
    CompletionFile(path, MADE_BY).add([[7]], [[8]])
    assert CompletionFile(path, MADE_BY).known == {(5,): [6], (7,): [8]}


def test_answers_of_another_target_are_refused(tmp_path: Path) -> None:
    CompletionFile(tmp_path / "answers.jsonl", {"target": "other"})
    with pytest.raises(DataError, match="answers of .*other.* expected .*tiny"):
        CompletionFile(tmp_path / "answers.jsonl", MADE_BY)
