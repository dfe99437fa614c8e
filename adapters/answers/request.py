"""Requests for answers, and the interface of their sources. Free of torch. Tests: tests/adapters/answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from streamspec.adapters.runs.budget import ENDLESS, Deadline, Speeds


@dataclass(frozen=True)
class AnswerRequest:
    """A prompt as token ids, and how to answer it: greedily, or sampled at a `temperature` above 0."""

    prompt: list[int]
    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class AnswerJob:
    """Settings for the answers to a list of prompts. `sampled`: temperature, top_p and seed of every second answer;
    None: all are greedy.
    Ends by `until`: prompts without an answer are then left out. The time that an answer takes is added to `speeds`;
    `note` is called now and then.
    """

    max_new_tokens: int
    sampled: tuple[float, float, int] | None = None
    until: Deadline = ENDLESS
    speeds: Speeds = field(default_factory=Speeds)
    label: str = "regenerating"
    note: Callable[[], None] = lambda: None

    def request(self, prompt: list[int], number: int) -> AnswerRequest:
        """The request for the prompt of this number."""
        if self.sampled is None or number % 2 == 0:
            return AnswerRequest(prompt, self.max_new_tokens)
        temperature, top_p, seed = self.sampled
        return AnswerRequest(prompt, self.max_new_tokens, temperature, top_p, seed + number)


class AnswerSource(Protocol):
    """A program that answers like the target. `parallel`: requests that it serves at once, from as many threads."""

    parallel: int

    def made_by(self) -> dict[str, str]:
        """Returns the settings that the answers depend on, for the file that keeps them."""

    def answer(self, request: AnswerRequest) -> list[int] | None:
        """The answer's token ids, with end-of-text where it was reached; None where they cannot be told from the text
        that came. Raises a StreamspecError where no answer comes.
        """

    def close(self) -> None:
        """Ends the requests under way."""
