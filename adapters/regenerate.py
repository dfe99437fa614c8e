"""The target's own greedy completions of a list of prompts: batched, cached line by line, resumable.

Acceptance is counted on what the model itself writes, so drafters learn from these. Knows nothing about streams.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from streamspec.progress import track


@torch.no_grad()
def regenerate(
    model: PreTrainedModel,
    prompts: list[list[int]],
    eos: int,
    *,
    max_new_tokens: int,
    batch_size: int,
    cache: Path | None = None,
    minutes: float | None = None,
    label: str = "regenerating",
) -> list[list[int]]:
    """Greedy answers, end-of-text included where it was reached, in the order of `prompts`.

    With `cache`, finished batches are appended to it and a later call with the same prompts goes on from there. With
    `minutes`, stops at that time: the answers of the prompts done so far come back, a prefix of the list.
    """
    done = _read(cache, prompts)
    started = time.monotonic()
    batches = range(len(done), len(prompts), batch_size)
    for start in track(batches, label, len(batches)):
        if minutes is not None and time.monotonic() - started > 60 * minutes and done:
            break
        batch = prompts[start : start + batch_size]
        answers = greedy_batch(model, batch, eos, max_new_tokens)
        done += answers
        if cache is not None:
            with cache.open("a", encoding="utf-8") as file:
                file.writelines(
                    json.dumps({"prompt": p, "answer": a}) + "\n" for p, a in zip(batch, answers, strict=True)
                )
    return done


def greedy_batch(model: PreTrainedModel, prompts: list[list[int]], eos: int, max_new_tokens: int) -> list[list[int]]:
    """Greedy answers to left-padded prompts; a row ends with `eos` (kept) or after `max_new_tokens`.

    Finished rows leave the batch once they are half of it: one straggler must not cost a whole batch's time.
    """
    length = max(map(len, prompts))
    device = model.get_input_embeddings().weight.device
    body, head = model.base_model, model.get_output_embeddings()
    tokens = torch.tensor([[eos] * (length - len(p)) + p for p in prompts], device=device)
    mask = torch.tensor([[0] * (length - len(p)) + [1] * len(p) for p in prompts], device=device)
    answers: list[list[int]] = [[] for _ in prompts]
    rows = list(range(len(prompts)))  # which prompt each row of the batch answers
    cache = DynamicCache()
    for _ in range(max_new_tokens):
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
        out = body(
            input_ids=tokens, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
        )
        # two dimensions: with a third, torch copies the head's matrix once per row of the batch
        choices = head(out.last_hidden_state[:, -1]).argmax(-1)
        for row, token in zip(rows, choices.tolist(), strict=True):
            if not answers[row] or answers[row][-1] != eos:
                answers[row].append(token)
        alive = [i for i, row in enumerate(rows) if answers[row][-1] != eos]
        if not alive:
            break
        tokens, mask = choices[:, None], torch.cat([mask, mask.new_ones(len(rows), 1)], dim=1)
        if 2 * len(alive) <= len(rows):
            kept = torch.tensor(alive, device=device)
            cache.batch_select_indices(kept)
            tokens, mask, rows = tokens[kept], mask[kept], [rows[i] for i in alive]
    return answers


def _read(cache: Path | None, prompts: list[list[int]]) -> list[list[int]]:
    """Cached answers, as far as they belong to the first of `prompts`; anything else is cut off the file."""
    if cache is None or not cache.exists():
        return []
    answers: list[list[int]] = []
    kept = []
    for line, prompt in zip(cache.read_text(encoding="utf-8").splitlines(), prompts, strict=False):
        try:
            row = json.loads(line)
        except json.JSONDecodeError:  # the process was killed in the middle of this line
            break
        if row["prompt"] != prompt:
            break
        answers.append(row["answer"])
        kept.append(line + "\n")
    cache.write_text("".join(kept), encoding="utf-8")
    return answers
