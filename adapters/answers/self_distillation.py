"""The target's own completions of a list of prompts, greedy or half of them sampled: batched, kept line by line,
resumable.

Acceptance is measured on the model's own answers, so drafters learn from them.
"""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.generation.logits_process import TemperatureLogitsWarper, TopPLogitsWarper

from streamspec.adapters.base_models.hf_decoder import HFDecoder
from streamspec.adapters.distributed import processes
from streamspec.adapters.distributed.step_batches import drawn_numbers
from streamspec.adapters.runs.budget import ANSWERS, ENDLESS, Deadline, Speeds
from streamspec.atomic import write_text
from streamspec.errors import DataError

MOST_TOKENS = {"cpu": 1 << 14, "cuda": 1 << 16}  # of a batch, answers and padding included; more is hardly faster
FIRST_PROMPTS = 8  # answered first where time is short


class CompletionFile:
    """Answers by prompt, kept in a JSON lines file: first the settings that made them, then one line per answer,
    written as they come.

    A line cut off by a killed process is dropped. Raises DataError where other settings made the answers.
    """

    def __init__(self, path: Path, made_by: dict[str, Any]) -> None:
        self.path, self.known = path, dict[tuple[int, ...], list[int]]()
        try:
            lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
            rows = [row for row in map(_parsed, lines) if row is not None]
            self.known = {tuple(row["prompt"]): list(row["answer"]) for row in rows[1:]}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{path}: {type(error).__name__} {error}", "a file of answers", "name another file"
            ) from None
        if rows and rows[0] != made_by:
            raise DataError(
                f"{path}: answers of {_short(rows[0])}", _short(made_by), "name another file, or remove this one"
            )
        self.known = processes.from_first(self.known)  # the first may add answers before another has read the file
        if processes.is_first():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, "".join(json.dumps(row) + "\n" for row in rows or [made_by]))

    def add(self, prompts: list[list[int]], answers: list[list[int]]) -> None:
        """Adds the answers to these prompts, in memory and, on the first process, to the file."""
        self.known |= {tuple(p): a for p, a in zip(prompts, answers, strict=True)}
        if not processes.is_first():
            return
        with self.path.open("a", encoding="utf-8") as file:
            file.writelines(
                json.dumps({"prompt": p, "answer": a}) + "\n" for p, a in zip(prompts, answers, strict=True)
            )


def _short(row: dict[str, Any]) -> str:
    return ", ".join(f"{key} {str(value)[:24]}" for key, value in list(row.items())[:4])


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except json.JSONDecodeError:
        return None
    return row if isinstance(row, dict) else None


Choose = Callable[[torch.Tensor, list[int]], torch.Tensor]


def best(logits: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """int64 [B]: the likeliest token after each row of `logits` [B, vocabulary]; `rows` [B] are their indices in the
    batch.
    """
    return logits.argmax(-1)


def drawn(temperature: float, top_p: float, seed: int, answers: list[int], steps: int) -> Choose:
    """As `best`, but tokens of odd answers are drawn: a drafter that learns from both kinds serves both. `answers` [B]:
    the number of each row's answer, of which with `seed` its random numbers are a function, whatever the batch.
    """
    warm, nucleus = TemperatureLogitsWarper(temperature), TopPLogitsWarper(top_p)
    numbers = torch.from_numpy(np.stack([drawn_numbers(steps, seed, answer) for answer in answers]))
    odd, step = torch.tensor(answers) % 2 == 1, itertools.count()

    def choose(logits: torch.Tensor, rows: list[int]) -> torch.Tensor:
        greedy, number = best(logits, rows), numbers[rows, next(step), None].to(logits.device)
        reached = nucleus(None, warm(None, logits.float())).softmax(-1).double().cumsum(-1)
        token = torch.searchsorted(reached, number * reached[:, -1:], right=True)[:, 0]
        return torch.where(odd[rows].to(logits.device), token, greedy)

    return choose


def answer_batches(
    prompts: list[list[int]], max_new_tokens: int, most_prompts: int, most_tokens: int
) -> list[list[list[int]]]:
    """Cuts prompts into batches of similar lengths, each of at most `most_tokens` tokens with answers and padding; in
    a random order, always the same, so that those a time limit leaves are no special ones.
    """
    batches: list[list[list[int]]] = []
    for prompt in sorted(prompts, key=len):  # the longest of a batch comes last
        last = batches[-1] if batches else []
        fits = (len(last) + 1) * (len(prompt) + max_new_tokens) <= most_tokens
        if last and fits and len(last) < most_prompts:
            last.append(prompt)
        else:
            batches.append([prompt])
    random.Random(0).shuffle(batches)
    return batches


def rows_in_time(count: int, until: Deadline, speeds: Speeds) -> int:
    """How many of `count` prompts to answer at once: as many as are done by `until`; of the first a few, which tell
    how long they take.
    """
    left = until.left()
    if math.isinf(left):
        return count
    each = speeds.cost(ANSWERS, 1)
    if each is None:
        return 0 if left <= 0 else min(count, FIRST_PROMPTS)
    return min(count, max(0, int(left / max(each, 1e-9))))


@torch.no_grad()
def regenerate(
    model: PreTrainedModel,
    prompts: list[list[int]],
    ends: Sequence[int],
    kept: CompletionFile,
    *,
    max_new_tokens: int,
    batch_size: int,
    sampled: tuple[float, float, int] | None = None,
    until: Deadline = ENDLESS,
    speeds: Speeds | None = None,
    label: str = "regenerating",
    note: Callable[[], None] = lambda: None,
) -> list[tuple[list[int], list[int]]]:
    """(prompt, answer) in the order of `prompts`, the one of the tokens `ends` included that was reached, if any.

    `sampled`: temperature, top_p and seed of every second answer of a batch; None: all are greedy. Answers in `kept`
    are not made again, new ones are added to it batch by batch, after which `note` is called. Ends by `until`: prompts
    without an answer are then left out. The time an answer takes is added to `speeds`.
    """
    known, speeds = kept.known, speeds or Speeds()
    every = [list(p) for p in dict.fromkeys(map(tuple, prompts))]
    numbers = {tuple(prompt): index for index, prompt in enumerate(every)}
    most = processes.count() * MOST_TOKENS["cuda" if model.get_input_embeddings().weight.is_cuda else "cpu"]
    batches = answer_batches(every, max_new_tokens, processes.count() * batch_size, most)
    missing = [[p for p in batch if tuple(p) not in known] for batch in batches]
    with processes.counted(label, sum(len(processes.dealt(batch)) for batch in missing)) as add:
        for batch in missing:
            while batch:
                rows, began = processes.from_first(rows_in_time(len(batch), until, speeds)), until.now()
                part = batch[:rows]
                mine = list(processes.dealt(part))
                choose = best if sampled is None else drawn(*sampled, [numbers[tuple(p)] for p in mine], max_new_tokens)
                made = answer_batch(model, mine, ends, max_new_tokens, choose, until, add) if mine else []
                shares = processes.gathered(made)
                if not part or None in shares:  # the time is over
                    return answered(prompts, known)
                kept.add(part, processes.joined([share for share in shares if share is not None]))
                speeds.measured(ANSWERS, rows, until.now() - began)
                note()
                batch = batch[rows:]
    return answered(prompts, known)


def up_to_end(answer: list[int], ends: Sequence[int]) -> list[int]:
    """The answer up to the first of `ends`: files of answers may come from runs that knew fewer."""
    stop = next((i for i, token in enumerate(answer, start=1) if token in ends), len(answer))
    return answer[:stop]


def answered(prompts: list[list[int]], known: dict[tuple[int, ...], list[int]]) -> list[tuple[list[int], list[int]]]:
    """The prompts that have an answer, with it."""
    return [(p, known[tuple(p)]) for p in prompts if tuple(p) in known]


def answer_batch(
    model: PreTrainedModel,
    prompts: list[list[int]],
    ends: Sequence[int],
    max_new_tokens: int,
    choose: Choose = best,
    until: Deadline = ENDLESS,
    finished: Callable[[int], None] = lambda count: None,
) -> list[list[int]] | None:
    """Answers to left-padded prompts; a row ends with one of `ends` (kept) or after `max_new_tokens`. None where the
    time was over before. `finished` is called after each step with the number of rows that ended in it.

    Finished rows leave the batch once they are half of it: one straggler must not cost a whole batch's time.
    """
    length = max(map(len, prompts))
    device = model.get_input_embeddings().weight.device
    body, head = model.base_model, model.get_output_embeddings()
    tokens = torch.tensor([[ends[0]] * (length - len(p)) + p for p in prompts], device=device)
    mask = torch.tensor([[0] * (length - len(p)) + [1] * len(p) for p in prompts], device=device)
    answers: list[list[int]] = [[] for _ in prompts]
    rows = list(range(len(prompts)))  # which prompt each row of the batch answers
    cache, alive = HFDecoder(model).new_cache(), len(prompts)
    for _ in range(max_new_tokens):
        if until.over():
            return None
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
        out = body(input_ids=tokens, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True)
        # two dimensions: with a third, torch copies the head's matrix once per row of the batch
        choices = choose(head(out.last_hidden_state[:, -1]), rows)
        for row, token in zip(rows, choices.tolist(), strict=True):
            if not answers[row] or answers[row][-1] not in ends:
                answers[row].append(token)
        going = [i for i, row in enumerate(rows) if answers[row][-1] not in ends]
        finished(alive - len(going))
        alive = len(going)
        if not going:
            break
        tokens, mask = choices[:, None], torch.cat([mask, mask.new_ones(len(rows), 1)], dim=1)
        if 2 * len(going) <= len(rows):
            kept = torch.tensor(going, device=device)
            cache.reorder_cache(kept)
            tokens, mask, rows = tokens[kept], mask[kept], [rows[i] for i in going]
    finished(alive)
    return answers
