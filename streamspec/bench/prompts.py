"""Reads the rows of a data file as conversations: a prompt, or the turns of a dialogue, with accepted answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from streamspec.data import Example, read_examples

Message = dict[str, str]
Prompt = str | list[Message]


@dataclass(frozen=True)
class BenchPrompt:
    """One row. All `turns` are user inputs of one conversation; `references` are accepted answers to the last; `tools`:
    functions that answers may call, as chat templates take them."""

    turns: list[Prompt]
    references: list[str] = field(default_factory=list)
    category: str | None = None
    tools: list[dict[str, Any]] | None = None

    def prompt(self, turn: int, answers: Sequence[str]) -> Prompt:
        """Returns the prompt at `turn`, after the model's own `answers` to the turns before."""
        if turn == 0:
            return self.turns[0]
        history: list[Message] = []
        for turn_input, answer in zip(self.turns[:turn], answers, strict=True):
            history += [*_messages(turn_input), {"role": "assistant", "content": answer}]
        return history + _messages(self.turns[turn])


def read_cases(path: str | Path, limit: int | None = None) -> list[BenchPrompt]:
    """Reads at most `limit` rows of a JSONL file. Raises DataError naming file and line."""
    return [_case(example) for example in read_examples(path, limit)]


def _case(example: Example) -> BenchPrompt:
    category = str(example.extra["category"]) if "category" in example.extra else None
    if example.shape == "turns":
        return BenchPrompt(list(example.extra["turns"]), list(example.references), category)
    if example.shape == "text":
        return BenchPrompt([example.opening])
    references = list(example.references)
    if not references and example.completion is not None:
        answer = example.completion
        references = [answer if isinstance(answer, str) else answer[-1]["content"] or ""]
    references = [text for text in references if text]  # an empty one is no answer to be judged by
    return BenchPrompt([example.prompt], references, category, example.tools)


def _messages(turn_input: Prompt) -> list[Message]:
    return [{"role": "user", "content": turn_input}] if isinstance(turn_input, str) else list(turn_input)
