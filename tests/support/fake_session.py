"""A session whose model is a function: the next token is a hash of the tokens so far. Streams two tokens a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from streamspec.runtime.decoding.policy import AdaptiveState, DecodingPolicy
from streamspec.runtime.decoding.stats import Stats
from streamspec.runtime.hardware.providers import ProviderChoice

VOCAB, EOS, SHOWN = 50, 0, 40  # `SHOWN` and their number: tools before a prompt


def target(ids: Sequence[int]) -> int:
    """The one right next token; an end after 12 tokens."""
    if len(ids) >= 12:
        return EOS
    return 1 + hash(tuple(ids)) % (VOCAB - 1)


@dataclass
class FakeSession:
    """`wrong_at`: position in the answer where speculation writes another token; `margin`: plain's lead there."""

    wrong_at: int | None = None
    margin: float = 5.0
    seconds: tuple[float, float] = (0.4, 0.1)  # decode time per step, plain and speculative
    wobble: float = 0.0  # of logits of rows on their own
    policy: DecodingPolicy = field(default_factory=DecodingPolicy)
    adaptive: AdaptiveState = field(default_factory=AdaptiveState)
    speculation: str = "on"
    provider: ProviderChoice = field(default_factory=lambda: ProviderChoice("cpu"))
    calls: list[bool] = field(default_factory=list)
    asked: list[list[int]] = field(default_factory=list)  # token ids of prompts
    manifest: Any = field(
        default_factory=lambda: SimpleNamespace(trees=object(), static=None, model=SimpleNamespace(vocab_size=VOCAB))
    )
    runner: Any = field(default_factory=lambda: SimpleNamespace(row_counts=()))

    threads, context_length = 2, 100

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        row = np.zeros(VOCAB, np.float32)
        row[target(ids)] = self.margin if len(ids) == self.wrong_at else 5.0
        return row

    def forget(self) -> None: ...

    @contextmanager
    def decode_with(self, policy: DecodingPolicy, adaptive: AdaptiveState) -> Iterator[None]:
        before, (self.policy, self.adaptive) = (self.policy, self.adaptive), (policy, adaptive)
        try:
            yield
        finally:
            self.policy, self.adaptive = before

    def encode(self, prompt: Any, tools: Sequence[Any] | None = None) -> list[int]:
        if tools:
            return [SHOWN + len(tools), *self.encode(prompt)]
        if isinstance(prompt, str):
            return [1 + len(word) for word in prompt.split()]
        if prompt and isinstance(prompt[0], dict):
            return [1 + len(message["content"].split()) for message in prompt]
        return list(prompt)

    def generate(self, prompt: Any, *, max_new_tokens: int, speculate: bool = True, **_: Any) -> Any:
        self.calls.append(speculate)
        ids = self.encode(prompt)
        self.asked.append(ids)
        answer: list[int] = []
        while len(answer) < max_new_tokens and (not answer or answer[-1] != EOS):
            token = target([*ids, *answer])
            if speculate and self.wrong_at == len(ids) + len(answer):
                token = 1 + token % (VOCAB - 1)
            answer.append(token)
        after = len(answer) - 1
        steps = (after + 1) // 2 if speculate else 0
        stats = Stats(
            prompt_tokens=len(ids),
            new_tokens=len(answer),
            steps=steps,
            step_tokens=after if speculate else 0,
            plain_steps=0 if speculate else after,
            prefill_seconds=0.1,
        )
        stats.decode_seconds = (steps or after) * self.seconds[speculate]
        stats.graph_seconds = stats.decode_seconds * 0.75
        text = " ".join(str(token) for token in answer if token != EOS)
        return SimpleNamespace(
            text=text, token_ids=answer, stats=stats, drafted=[False] * len(answer), finish_reason="eos"
        )

    def score(self, ids: Sequence[int], start: int = 0) -> np.ndarray:
        return np.stack([self.logits(ids[:end]) for end in range(start + 1, len(ids) + 1)])

    def score_one_by_one(self, ids: Sequence[int]) -> Iterator[np.ndarray]:
        return (row + self.wobble for row in self.score(ids))
