"""Defines `ModelRunner`, the interface of a model for the decoding loop and a session. The tests implement it with a
toy."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, Self

import numpy as np

from streamspec.draft_tree import BOTH, EXIT, PRIOR, PRIOR_WEIGHT, SCORES, DraftTree
from streamspec.errors import ConfigError
from streamspec.runtime.costs.draft_depth import EarlyEnd
from streamspec.runtime.decoding.draft_proposal import DraftProposal
from streamspec.runtime.sampling.sampling_params import GREEDY, Sampling

if TYPE_CHECKING:
    from streamspec.runtime.engine.idle_unload import IdleUnloader

ROOT_ONLY = DraftTree((0,), (0,))
TINY = 1e-30  # probabilities of which a logarithm is taken are at least this
DROPPED = -1e6  # prior of a row that the early exit must drop, whatever its own score


class Cancelled(Exception):
    """A call was stopped by `ModelRunner.cancel`; the cache holds what it held before the call."""


class StepResult(NamedTuple):
    """One call's results. `choices` [n]: the target's token after each row, -1 where it was pruned. `accepted`:
    the node the graph found, and the drafter's `proposal` after it; both None where the drafter did not run. `logits`
    float32 [n, vocabulary]: the model's own, where they were asked for; good until the next call. `sequences`: that the
    call had rows of. `dropped`: calls of a drafter whose proposal is of no use."""

    choices: Sequence[int]
    accepted: int | None = None
    proposal: DraftProposal | None = None
    logits: np.ndarray | None = None
    sequences: int = 1
    dropped: int = 0


@dataclass(frozen=True)
class Pruning:
    """Selects the rows of a draft tree that continue after the early exit.

    - `rows`: at most this many; None: any number.
    - `min_probability`: none below this probability, 0 to 1.
    - `score`: whose probability that is: the early exit's (`exit`), the drafter's (`prior`), or the mean of their
      logarithms, 1 : 2 (`both`).

    Raises ConfigError for values out of range.
    """

    rows: int | None = None
    min_probability: float = 0.0
    score: str = BOTH

    def __post_init__(self) -> None:
        if self.rows is not None and (type(self.rows) is not int or self.rows < 1):
            raise ConfigError(f"pruning to {self.rows!r} rows", "a whole number from 1 on, or None", "correct rows")
        if not 0 <= self.min_probability < 1:
            raise ConfigError(
                f"pruning below a probability of {self.min_probability!r}",
                "one from 0 to below 1",
                "correct min_probability",
            )
        if self.score not in SCORES:
            raise ConfigError(f"pruning by the score {self.score!r}", " or ".join(SCORES), "correct score")

    def asked(self, priors: np.ndarray) -> np.ndarray:
        """Returns the priors to give to the graph for `priors` float32 [n], the drafter's log probabilities, so that
        its score of both is the requested `score`."""
        if self.score == BOTH:
            return priors
        if self.score == EXIT:
            return np.zeros_like(priors)
        passed = priors >= math.log(max(self.min_probability, TINY))
        passed[np.argsort(-priors, kind="stable")[self.rows :] if self.rows else []] = False  # parents come first
        return np.where(passed, 0, DROPPED).astype(np.float32)

    @property
    def lowest(self) -> float:
        """The score below which the graph prunes a row."""
        threshold = math.log(max(self.min_probability, TINY))
        return {BOTH: threshold, EXIT: threshold / (1 + PRIOR_WEIGHT), PRIOR: DROPPED / (1 + PRIOR_WEIGHT)}[self.score]


@dataclass(frozen=True, eq=False)
class StepRequest:
    """A call of a model: the rows of a draft tree, or part of a prompt.

    - `tokens` [n]: of the tree's nodes, the root first; of a prompt in the order of its text.
    - `tree`: of n nodes. A prompt has none: `prefill` does not read it.
    - `run_drafter`: whether the drafter runs after the rows and proposes the next draft.
    - `pruning`: drops rows after the early exit; `priors` float32 [n], for it: the drafter's log
      probability of each node. None: all rows stay; all are equally likely.
    - `mask` bool [n, vocabulary], of a prompt [1, vocabulary]: the tokens that may be chosen after
      each row, at least one. None: any.
    - `draft_depth`: tokens that a second model drafts, 1 to `ModelRunner.gamma`; None: `gamma`.
      `early_end`: when it drafts fewer; None: never. Other drafters read neither.
    """

    tokens: Sequence[int]
    tree: DraftTree = ROOT_ONLY
    run_drafter: bool = False
    pruning: Pruning | None = None
    priors: np.ndarray | None = None
    mask: np.ndarray | None = None
    draft_depth: int | None = None
    early_end: EarlyEnd | None = None


class SharedModel(Protocol):
    """The open model that all runners of a bundle share."""

    @property
    def unloader(self) -> IdleUnloader:
        """Unloads and reloads it."""

    @property
    def sequences(self) -> int:
        """Number of runners over it."""

    @property
    def sharing(self) -> SharedCalls | None:
        """The calls that runners may share; None where they share none."""


class SharedCalls(Protocol):
    """Calls that have rows of several sequences."""

    max_sequences: int


class ModelRunner(Protocol):
    """Runs a model on one sequence: `length` committed tokens and their KV cache. One thread at a time, `cancel`
    excepted."""

    @property
    def model(self) -> SharedModel: ...

    @property
    def threads(self) -> int:
        """CPU threads."""

    @property
    def gamma(self) -> int:
        """Most draft tokens that a call can propose; 0: no drafter."""

    @property
    def context_length(self) -> int:
        """Maximum number of tokens of a sequence."""

    @property
    def length(self) -> int:
        """Tokens in the cache."""

    @property
    def tokens(self) -> Sequence[int]:
        """Tokens in the cache."""

    @property
    def together(self) -> int:
        """Sequences that the next call is to be shared with, this one included, without a drafter; 1: none."""

    @property
    def graph_seconds(self) -> float:
        """Time inside the model so far."""

    @property
    def waited_seconds(self) -> float:
        """Time in the scheduler's queue so far."""

    def fork(self, context: int | None = None) -> Self:
        """Makes a runner with an empty cache over the same model, of the same context length unless told."""

    def reset(self) -> None:
        """Empties the cache."""

    def release(self) -> None:
        """Empties the cache and gives its memory back."""

    def reusable(self, prompt: Sequence[int]) -> int:
        """Returns how many tokens `begin` would keep."""

    def begin(self, prompt: Sequence[int], sampling: Sampling = GREEDY, logits: bool = False, turn: bool = True) -> int:
        """Begins a generation that chooses tokens by `sampling` and, where `logits`, returns logits with every call.
        Keeps the cached tokens that `prompt` begins with, all but its last token at most, forgets the rest, and returns
        how many it kept: fewer or none where layers no longer hold what the next tokens would see. Such layers keep a
        copy of the rows at the prompt's end and, while `turn` is False (tool calls), at the end of the last user
        turn."""

    def prefill(self, request: StepRequest, progress: Callable[[int], None] | None = None) -> StepResult:
        """Commits the request's tokens, part of a prompt; `choices` [1] is the token after the last of them.
        `progress` is told after each call how many of them are in the cache."""

    def verify(self, request: StepRequest) -> StepResult:
        """Runs the rows of a draft tree; commits nothing."""

    def commit(self, path: Sequence[int]) -> None:
        """Commits the rows of `path`, root first, out of the last `verify`."""

    def score(self, ids: Sequence[int], start: int = 0) -> np.ndarray:
        """Returns logits float32 [len(ids) - start, vocabulary] after each of `ids[start:]`, from an empty cache;
        commits `ids`."""

    def score_chunks(self, ids: Sequence[int], start: int = 0) -> Iterator[np.ndarray]:
        """Yields the rows of `score` in parts, as all need not fit into memory; `ids` are committed at the end."""

    def snapshot(self) -> tuple[list[int], list[np.ndarray]]:
        """Copies the tokens in the cache and their rows (`Cache.rows`)."""

    def restore(self, tokens: Sequence[int], rows: Sequence[np.ndarray]) -> None:
        """Replaces the cache by a snapshot."""

    def cancel(self) -> None:
        """From any thread: stops the call under way, or the next one, with `Cancelled`."""

    def generation(self) -> AbstractContextManager[None]:
        """Forgets earlier cancellations; the body is one generation."""
