"""What the decoding loop needs of an engine. Anything that offers it can be decoded with: the tests use a toy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from streamspec.draft_tree import DraftTree
from streamspec.errors import ConfigError
from streamspec.runtime.decoding.draft_tree_search import DraftProposal
from streamspec.runtime.decoding.sampling import GREEDY, Sampling

ROOT_ONLY = DraftTree((0,), (0,))


class Cancelled(Exception):
    """A call was stopped by `ModelRunner.cancel`; the cache holds what it held before the call."""


@dataclass(frozen=True)
class StepResult:
    """One call's results. `choices` int64 [n]: the target's token after each row, -1 where it was pruned. `accepted`:
    the node the graph found, and `guesses` of the streams behind it; both None where streams did not run. `logits`
    float32 [n, vocabulary]: the model's own, where they were asked for; good until the next call."""

    choices: np.ndarray
    accepted: int | None = None
    guesses: DraftProposal | None = None
    logits: np.ndarray | None = None


@dataclass(frozen=True)
class Pruning:
    """Which rows of a tree go on above the early exit: at most `rows`, none whose chance is below `least`. `rows` None:
    any number. Raises ConfigError for values out of range."""

    rows: int | None = None
    least: float = 0.0

    def __post_init__(self) -> None:
        if self.rows is not None and (type(self.rows) is not int or self.rows < 1):
            raise ConfigError(f"pruning to {self.rows!r} rows", "a whole number from 1 on, or None", "correct rows")
        if not 0 <= self.least < 1:
            raise ConfigError(
                f"pruning below a chance of {self.least!r}", "a chance from 0 to below 1", "correct least"
            )


class ModelRunner(Protocol):
    """A model with a cache of `length` committed tokens."""

    gamma: int  # streams; 0 for a plain model
    context_length: int
    graph_seconds: float  # time inside the model so far,
    waited_seconds: float  # and in line for it

    @property
    def length(self) -> int: ...

    def reset(self) -> None:
        """Empties the cache."""

    def begin(self, prompt: Sequence[int], sampling: Sampling = GREEDY, logits: bool = False) -> int:
        """From now on chooses tokens as `sampling` says, and gives `logits` with every call, or not. Keeps of the cache
        what `prompt` begins with, so that some of it remains to be read, forgets the rest, and returns how many tokens
        it has kept."""

    def prefill(
        self,
        ids: Sequence[int],
        draft: bool,
        progress: Callable[[int], None] | None = None,
        allowed: np.ndarray | None = None,
    ) -> StepResult:
        """Commits `ids`; `choices` [1] is the token after the last of them, with guesses behind it where `draft`.
        `progress` is told after each call how many of them are in the cache. `allowed` bool [1, vocabulary]: the tokens
        it may be, None for all."""

    def verify(
        self,
        tokens: np.ndarray,
        tree: DraftTree,
        draft: bool,
        pruning: Pruning | None = None,
        priors: np.ndarray | None = None,
        allowed: np.ndarray | None = None,
    ) -> StepResult:
        """Runs the tree's rows; commits nothing. `priors` float32 [n], for pruning: the drafter's log chance of every
        node. `allowed` bool [n, vocabulary]: tokens that may be chosen after each row, at least one; None for all."""

    def keep(self, path: Sequence[int]) -> None:
        """Commits the rows of `path` out of the last `verify`."""

    def cancel(self) -> None:
        """From any thread: stops the call under way, or the next one, with `Cancelled`."""

    def generation(self) -> AbstractContextManager[None]:
        """The body is one generation; cancellations of before are forgotten."""
