"""What PyTorch says about sampled text: transformers' model and its own logits processors, in double precision.

`places` turns every token of an answer into a number that is uniform on [0, 1) exactly where the token was drawn from
the processed distribution after the tokens before it, and independent of the others: one answer is many draws.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)


class AnswerPenalties(LogitsProcessor):
    """The penalties of OpenAI's API, which transformers does not have: `presence` once and `frequency` for each time a
    token occurs after the first `prompt` tokens."""

    def __init__(self, prompt: int, frequency: float, presence: float) -> None:
        self.prompt, self.frequency, self.presence = prompt, frequency, presence

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        times = torch.zeros_like(scores).scatter_add_(
            1, input_ids[:, self.prompt :], torch.ones_like(scores[:, :1]).expand(-1, input_ids.shape[1] - self.prompt)
        )
        return scores - self.frequency * times - self.presence * (times > 0)  # type: ignore[return-value]


def processors(given: Mapping[str, Any], prompt: int) -> LogitsProcessorList:
    """The processors of the fields of `Sampling`, in its order. `prompt`: tokens."""
    chosen = LogitsProcessorList()
    if given.get("logit_bias"):
        chosen.append(SequenceBiasLogitsProcessor([[[i], float(bias)] for i, bias in given["logit_bias"].items()]))
    if "repetition_penalty" in given:
        chosen.append(RepetitionPenaltyLogitsProcessor(float(given["repetition_penalty"])))
    frequency, presence = given.get("frequency_penalty", 0.0), given.get("presence_penalty", 0.0)
    if frequency or presence:
        chosen.append(AnswerPenalties(prompt, frequency, presence))
    chosen.append(TemperatureLogitsWarper(float(given["temperature"])))
    for name, kind in (("top_k", TopKLogitsWarper), ("top_p", TopPLogitsWarper), ("min_p", MinPLogitsWarper)):
        if name in given:
            chosen.append(kind(given[name]))
    return chosen


@torch.no_grad()
def distributions(
    model: Any,
    contexts: Sequence[Sequence[int]],
    given: Mapping[str, Any],
    prompt: int,
    allowed: torch.Tensor | None = None,
) -> torch.Tensor:
    """Float64 [contexts, vocabulary]: of the token after each context, all of one length, out of those `allowed` (bool
    [vocabulary])."""
    ids = torch.tensor(contexts)
    return processed(model(ids).logits[:, -1], ids, given, prompt, allowed)


def processed(
    logits: torch.Tensor, ids: torch.Tensor, given: Mapping[str, Any], prompt: int, allowed: torch.Tensor | None = None
) -> torch.Tensor:
    """Float64 [texts, vocabulary] of `logits` [texts, vocabulary] after `ids` [texts, tokens]."""
    scores = logits.double()
    chosen = processors(given, prompt)
    if allowed is not None:  # a grammar masks what penalties leave, before temperature
        before = next(i for i, one in enumerate(chosen) if isinstance(one, TemperatureLogitsWarper))
        scores = LogitsProcessorList(chosen[:before])(ids, scores).masked_fill(~allowed, -torch.inf)
        chosen = LogitsProcessorList(chosen[before:])
    return chosen(ids, scores).softmax(-1)


@torch.no_grad()
def places(
    model: Any, prompt: Sequence[int], answers: Sequence[Sequence[int]], given: Mapping[str, Any], seed: int
) -> tuple[list[list[float]], list[list[float]]]:
    """Of every token of every answer, where it lies: the probability of all tokens before it and a random part of its
    own; once with likelier tokens before it, where a liking for likely tokens shows, once with those before it that the
    processors raised more, where a processor that does nothing shows. A token that could not be drawn is an
    AssertionError."""
    dice, first = np.random.default_rng(seed), len(prompt)
    longest = max(map(len, answers))
    texts = torch.tensor([[*prompt, *answer, *[0] * (longest - len(answer))] for answer in answers])
    logits = model(texts).logits
    likelier, raised = ([list[float]() for _ in answers] for _ in range(2))
    for at in range(longest):
        open_ = [i for i, answer in enumerate(answers) if len(answer) > at]
        rows, tokens = logits[open_, first + at - 1].double(), texts[open_, first + at, None]
        shares, parts = processed(rows, texts[open_, : first + at], given, first), dice.random(len(open_))
        own = shares.gather(1, tokens)
        wrong = [answers[i] for i, share in zip(open_, own, strict=True) if share <= 0]
        assert not wrong, f"token {at} of {wrong[0]} cannot come under {given}"
        for found, keys in ((likelier, shares), (raised, shares / rows.softmax(-1))):
            order = torch.argsort(-keys, stable=True).argsort()  # the place of each token
            before = (shares * (order < order.gather(1, tokens))).sum(1)
            for i, number in zip(open_, (before + torch.from_numpy(parts) * own[:, 0]).tolist(), strict=True):
                found[i].append(number)
    return likelier, raised
