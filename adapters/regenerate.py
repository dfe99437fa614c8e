"""The target's own greedy completions of a list of prompts: batched, cached line by line, resumable.

Acceptance is counted on what the model itself writes, so drafters learn from these. Knows nothing about streams.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from streamspec.adapters.progress import track


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
    for start in track(batches, label):
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
    """Greedy answers to left-padded prompts; a row ends with `eos` (kept) or after `max_new_tokens`."""
    length = max(map(len, prompts))
    device = model.get_input_embeddings().weight.device
    ids = torch.tensor([[eos] * (length - len(p)) + p for p in prompts], device=device)
    mask = torch.tensor([[0] * (length - len(p)) + [1] * len(p) for p in prompts], device=device)
    out: Any = model.generate(
        input_ids=ids,
        attention_mask=mask,
        max_new_tokens=max_new_tokens,
        do_sample=False,
        eos_token_id=eos,
        pad_token_id=eos,
        temperature=None,
        top_p=None,
        top_k=None,
        repetition_penalty=1.0,
        use_cache=True,
    )
    answers = []
    for row in out[:, length:].tolist():
        answers.append(row[: row.index(eos) + 1] if eos in row else row)
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
