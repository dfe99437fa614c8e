"""What may be asked of one generation. Knows nothing about how it is done."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypedDict

from streamspec.errors import ConfigError
from streamspec.runtime.decoding.sampling import GREEDY, Sampling
from streamspec.runtime.text.grammar import Grammar

MOST_LOGPROBS = 100
Progress = Callable[[int, int], None]


class GenerationKwargs(TypedDict, total=False):
    """Keywords of `generate`, `stream`, `chat` and `stream_chat`; what each means: `GenerationOptions`."""

    max_new_tokens: int
    stop: str | Sequence[str]
    speculate: bool
    sampling: Sampling
    grammar: Grammar | None
    logprobs: int | None
    timeout: float | None
    progress: Progress | None


@dataclass(frozen=True)
class GenerationOptions:
    """`stop`: strings behind which the text ends; they are left out of it. `speculate` False decodes plainly, with the
    same result, sampled or not (given a seed). `sampling`: greedy unless it has a temperature. `timeout`: seconds after
    which the answer ends with what there is. `grammar`: what the answer must follow (docs/guides/structured.md), as far
    as it comes. `logprobs`: say how likely the model itself held each token, and so many of the likeliest.
    `progress(read, tokens)` is called while the prompt is read. Raises ConfigError for values that make no sense."""

    max_new_tokens: int = 256
    stop: str | Sequence[str] = ()
    speculate: bool = True
    sampling: Sampling = GREEDY
    grammar: Grammar | None = None
    logprobs: int | None = None
    timeout: float | None = None
    progress: Progress | None = None

    def __post_init__(self) -> None:
        if type(self.max_new_tokens) is not int or self.max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens {self.max_new_tokens!r}", "a whole number of at least 1", "correct it")
        if not isinstance(self.stop, Sequence) or any(not isinstance(s, str) or not s for s in self.stops):
            raise ConfigError(f"stop strings {self.stop!r}", "non-empty strings", "correct stop")
        if not isinstance(self.sampling, Sampling):
            raise ConfigError(f"sampling {self.sampling!r}", "a Sampling", "make one: Sampling(temperature=0.7)")
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            raise ConfigError(
                f"a grammar of type {type(self.grammar).__name__}",
                "a Grammar",
                "make one with Grammar.json_schema, .regex or .choice",
            )
        if self.logprobs is not None and (type(self.logprobs) is not int or not 0 <= self.logprobs <= MOST_LOGPROBS):
            raise ConfigError(f"logprobs {self.logprobs!r}", f"a whole number from 0 to {MOST_LOGPROBS}", "correct it")
        if self.timeout is not None and not (
            type(self.timeout) in (int, float) and 0 < self.timeout <= threading.TIMEOUT_MAX
        ):
            raise ConfigError(
                f"a timeout of {self.timeout!r}",
                f"seconds, above 0 and at most {threading.TIMEOUT_MAX:.0f}",
                "correct timeout",
            )

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop)
