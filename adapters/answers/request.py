"""What is asked of a source of answers, and what a source is. Free of torch. Tests: tests/adapters/answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class AnswerRequest:
    """A prompt as token ids, and how to answer it: greedily, or sampled at a `temperature` above 0."""

    prompt: list[int]
    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


class AnswerSource(Protocol):
    """Something that answers like the target. `parallel`: requests that it serves at once, from as many threads."""

    parallel: int

    def made_by(self) -> dict[str, str]:
        """What the answers depend on, for the file that keeps them."""

    def answer(self, request: AnswerRequest) -> list[int] | None:
        """The answer's token ids, with end-of-text where it was reached; None where they cannot be told from the text
        that came. Raises a StreamspecError where no answer comes.
        """

    def close(self) -> None:
        """Ends what is under way."""
