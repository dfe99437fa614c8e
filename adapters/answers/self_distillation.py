"""The target's own completions of a list of prompts, greedy or half of them sampled: batched, kept line by line,
resumable.

Acceptance is measured on the model's own answers, so drafters learn from them.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.generation.logits_process import TemperatureLogitsWarper, TopPLogitsWarper

from streamspec.adapters.answers.completion_file import Answered, CompletionFile, answered
from streamspec.adapters.answers.request import AnswerJob
from streamspec.adapters.base_models.hf_decoder import HFDecoder, with_cache
from streamspec.adapters.distributed import processes
from streamspec.adapters.distributed.step_batches import drawn_numbers
from streamspec.adapters.runs.budget import ANSWERS, ENDLESS, Deadline, Speeds

MOST_TOKENS = {"cpu": 1 << 14, "cuda": 1 << 16}  # of a batch, answers and padding included; more is hardly faster
FIRST_PROMPTS = 8  # answered first where time is short


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
    prompts: list[list[int]], max_new_tokens: int, max_prompts: int, max_tokens: int
) -> list[list[list[int]]]:
    """Cuts prompts into batches of similar lengths, each of at most `max_tokens` tokens with answers and padding; in
    a random order, always the same, so that those a time limit leaves are no special ones.
    """
    batches: list[list[list[int]]] = []
    for prompt in sorted(prompts, key=len):  # the longest of a batch comes last
        last = batches[-1] if batches else []
        fits = (len(last) + 1) * (len(prompt) + max_new_tokens) <= max_tokens
        if last and fits and len(last) < max_prompts:
            last.append(prompt)
        else:
            batches.append([prompt])
    random.Random(0).shuffle(batches)
    return batches


def rows_in_time(count: int, until: Deadline, speeds: Speeds) -> int:
    """Returns how many of `count` prompts to answer at once: as many as are done by `until`; a few while it is
    not known how long one takes.
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
    file: CompletionFile,
    job: AnswerJob,
    batch_size: int,
) -> Answered:
    """(prompt, answer) in the order of `prompts`, the one of the tokens `ends` included that was reached, if any.

    Answers in `file` are not made again; new ones are added to it batch by batch, of at most `batch_size` prompts.
    """
    every = [list(p) for p in dict.fromkeys(map(tuple, prompts))]
    numbers = {tuple(prompt): index for index, prompt in enumerate(every)}
    max_tokens = processes.count() * MOST_TOKENS["cuda" if model.get_input_embeddings().weight.is_cuda else "cpu"]
    batches = answer_batches(every, job.max_new_tokens, processes.count() * batch_size, max_tokens)
    missing = [[p for p in batch if tuple(p) not in file.known] for batch in batches]
    with processes.counted(job.label, sum(len(processes.dealt(batch)) for batch in missing)) as add:
        for batch in missing:
            while batch:
                rows, began = processes.from_first(rows_in_time(len(batch), job.until, job.speeds)), job.until.now()
                asked = batch[:rows]
                answers = _shared_batch(model, asked, [numbers[tuple(p)] for p in asked], ends, job, add)
                if answers is None:
                    return answered(prompts, file.known)
                file.add(asked, answers)
                job.speeds.measured(ANSWERS, rows, job.until.now() - began)
                job.note()
                batch = batch[rows:]
    return answered(prompts, file.known)


def _shared_batch(
    model: PreTrainedModel,
    prompts: list[list[int]],
    numbers: list[int],
    ends: Sequence[int],
    job: AnswerJob,
    finished: Callable[[int], None],
) -> list[list[int]] | None:
    """Answers to `prompts`, of these `numbers` among all, of which each process makes its share; None where the time is
    over before.
    """
    if not prompts:
        return None
    mine, made = list(processes.dealt(prompts)), None
    if mine:
        sampled, steps = job.sampled, job.max_new_tokens
        choose = best if sampled is None else drawn(*sampled, list(processes.dealt(numbers)), steps)
        made = answer_batch(model, mine, ends, steps, choose, job.until, finished)
    shares = [share for share in processes.gathered(made if mine else []) if share is not None]
    return processes.joined(shares) if len(shares) == processes.count() else None


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
    device = model.get_input_embeddings().weight.device
    body, decoder = model.base_model, HFDecoder(model)
    missing = [max(map(len, prompts)) - len(prompt) for prompt in prompts]
    tokens = torch.tensor([[ends[0]] * count + ids for count, ids in zip(missing, prompts, strict=True)], device=device)
    mask = torch.tensor(
        [[0] * count + [1] * len(ids) for count, ids in zip(missing, prompts, strict=True)], device=device
    )
    answers: list[list[int]] = [[] for _ in prompts]
    rows = list(range(len(prompts)))  # which prompt each row of the batch answers
    cache, alive = decoder.new_cache(), len(prompts)
    for _ in range(max_new_tokens):
        if until.over():
            return None
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
        inputs = {"input_ids": tokens, "attention_mask": mask, "position_ids": positions}
        out = body(**inputs, **with_cache(body, cache), use_cache=True)
        # two dimensions: with a third, torch copies the head's matrix once per row of the batch
        choices = choose(decoder.logits(out.last_hidden_state[:, -1]), rows)
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
            unfinished = torch.tensor(going, device=device)
            cache.reorder_cache(unfinished)
            tokens, mask, rows = tokens[unfinished], mask[unfinished], [rows[i] for i in going]
    finished(alive)
    return answers
