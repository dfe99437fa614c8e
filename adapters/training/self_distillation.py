"""The target's own completions of a list of prompts, greedy or half of them sampled: batched, kept line by line,
resumable.

Acceptance is measured on the model's own answers, so drafters learn from them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.generation.logits_process import TemperatureLogitsWarper, TopPLogitsWarper

from streamspec.adapters.base_models.hf_decoder import HFDecoder
from streamspec.atomic import write_text
from streamspec.errors import DataError
from streamspec.progress import track


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
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, "".join(json.dumps(row) + "\n" for row in rows or [made_by]))

    def add(self, prompts: list[list[int]], answers: list[list[int]]) -> None:
        """Adds the answers to these prompts, in memory and to the file."""
        self.known |= {tuple(p): a for p, a in zip(prompts, answers, strict=True)}
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


def drawn(temperature: float, top_p: float, generator: torch.Generator) -> Choose:
    """As `best`, but tokens of odd rows are drawn: a drafter that learns from both kinds of answers serves both."""
    warm, nucleus = TemperatureLogitsWarper(temperature), TopPLogitsWarper(top_p)

    def choose(logits: torch.Tensor, rows: list[int]) -> torch.Tensor:
        probabilities = nucleus(None, warm(None, logits.float())).softmax(-1)
        odd = torch.tensor([row % 2 == 1 for row in rows], device=logits.device)
        return torch.where(odd, torch.multinomial(probabilities, 1, generator=generator)[:, 0], best(logits, rows))

    return choose


@torch.no_grad()
def regenerate(
    model: PreTrainedModel,
    prompts: list[list[int]],
    eos: int,
    kept: CompletionFile,
    *,
    max_new_tokens: int,
    batch_size: int,
    sampled: tuple[float, float, int] | None = None,
    minutes: float | None = None,
    now: Callable[[], float] = time.monotonic,
    label: str = "regenerating",
) -> list[tuple[list[int], list[int]]]:
    """(prompt, answer) in the order of `prompts`, end-of-text included where it was reached.

    `sampled`: temperature, top_p and seed of every second answer of a batch; None: all are greedy. Answers in `kept`
    are not made again, new ones are added to it. With `minutes`, stops at that time by the clock `now`, with at least
    one batch: prompts without an answer are then left out.
    """
    known, started = kept.known, now()
    missing = [list(p) for p in dict.fromkeys(map(tuple, prompts)) if p not in known]
    starts = range(0, len(missing), batch_size)
    for start in track(starts, label, len(starts)):
        if minutes is not None and now() - started > 60 * minutes and any(tuple(p) in known for p in prompts):
            break
        batch = missing[start : start + batch_size]
        choose: Choose = best
        if sampled is not None:  # a batch draws the same numbers after an interruption as without
            temperature, top_p, seed = sampled
            choose = drawn(temperature, top_p, torch.Generator(model.device).manual_seed(seed + len(known)))
        kept.add(batch, answer_batch(model, batch, eos, max_new_tokens, choose))
    return [(p, known[tuple(p)]) for p in prompts if tuple(p) in known]


def answer_batch(
    model: PreTrainedModel, prompts: list[list[int]], eos: int, max_new_tokens: int, choose: Choose = best
) -> list[list[int]]:
    """Answers to left-padded prompts; a row ends with `eos` (kept) or after `max_new_tokens`.

    Finished rows leave the batch once they are half of it: one straggler must not cost a whole batch's time.
    """
    length = max(map(len, prompts))
    device = model.get_input_embeddings().weight.device
    body, head = model.base_model, model.get_output_embeddings()
    tokens = torch.tensor([[eos] * (length - len(p)) + p for p in prompts], device=device)
    mask = torch.tensor([[0] * (length - len(p)) + [1] * len(p) for p in prompts], device=device)
    answers: list[list[int]] = [[] for _ in prompts]
    rows = list(range(len(prompts)))  # which prompt each row of the batch answers
    cache = HFDecoder(model).new_cache()
    for _ in range(max_new_tokens):
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
        out = body(input_ids=tokens, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True)
        # two dimensions: with a third, torch copies the head's matrix once per row of the batch
        choices = choose(head(out.last_hidden_state[:, -1]), rows)
        for row, token in zip(rows, choices.tolist(), strict=True):
            if not answers[row] or answers[row][-1] != eos:
                answers[row].append(token)
        alive = [i for i, row in enumerate(rows) if answers[row][-1] != eos]
        if not alive:
            break
        tokens, mask = choices[:, None], torch.cat([mask, mask.new_ones(len(rows), 1)], dim=1)
        if 2 * len(alive) <= len(rows):
            kept = torch.tensor(alive, device=device)
            cache.reorder_cache(kept)
            tokens, mask, rows = tokens[kept], mask[kept], [rows[i] for i in alive]
    return answers
