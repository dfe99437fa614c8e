"""Defines the arms of a measurement: each one way of decoding, on a loaded session.

The only module of bench that touches the runtime's sessions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from streamspec.runtime.costs.row_costs import RowCosts
from streamspec.runtime.decoding.model_runner import Pruning
from streamspec.runtime.decoding.policy import AdaptiveState, DecodingPolicy
from streamspec.runtime.sampling.sampling_params import GREEDY, Sampling

if TYPE_CHECKING:
    from streamspec.runtime import Completion, Session

SAMPLE_ROWS = 2000  # rows that the wide / narrow comparison covers, where the prompts have as many
MOST_LOGITS = 1 << 26  # of a text that are held at once
MARGIN_FACTOR = 2.0  # both of the two best logits may be off, in opposite directions


@dataclass(eq=False)
class Arm:
    """One way of decoding. `rows`, `pruning`: forced instead of the session's own choice; None for the session's.
    `adaptive`: makes the state that an arm begins a pass with.

    What answers teach of texts is the arm's own, and each pass begins without it: no arm and no pass profits or suffers
    from another's.
    """

    name: str
    session: Session
    speculate: bool
    sampling: Sampling = GREEDY
    rows: int | None = None
    pruning: Pruning | None = None
    adaptive: Callable[[DecodingPolicy], AdaptiveState] = AdaptiveState
    _learned: tuple[DecodingPolicy, AdaptiveState] | None = field(default=None, init=False, repr=False)
    _costs: RowCosts | None = field(default=None, init=False, repr=False)

    def begin_pass(self) -> None:
        """Forgets what its answers have taught of texts, as a new process would not know it. What steps cost stays."""
        self._learned = None

    def answer(self, prompt: Any, limit: int, tools: list[dict[str, Any]] | None = None) -> Completion:
        """Answers `prompt`, which may call `tools`, with at most `limit` tokens, from an empty cache."""
        if tools:
            prompt = self.session.encode(prompt, tools=tools)
        self.session.forget()  # nobody profits from what another has read
        if self._learned is None:
            policy = self._policy()
            self._learned = policy, self.adaptive(policy)
        with self.session.decode_with(*self._learned):
            return self.session.generate(prompt, max_new_tokens=limit, speculate=self.speculate, sampling=self.sampling)

    def _policy(self) -> DecodingPolicy:
        """Returns the session's policy, with the rows and pruning that this arm forces and nothing learned."""
        policy = self.session.policy.unlearned()
        if self.rows is not None:  # without costs every step takes all rows
            policy = replace(policy, rows=self.rows, costs=None)
        if self.pruning is None:
            return policy
        if policy.costs is not None:  # those of pruned steps would mislead others, and be kept
            self._costs = self._costs or policy.costs.apart()
        return replace(policy, pruning=self.pruning, costs=self._costs)


class SessionTieBreaker:
    """A `TieBreaker` that asks the session of an arm. `texts`: token sequences to measure the tolerance on."""

    def __init__(self, arm: Arm, texts: list[list[int]], measured: float | None = None) -> None:
        self.arm, self.texts = arm, texts
        self.measured = measured  # the tolerance, once it is known

    def margin(self, prompt: Sequence[int], prefix: Sequence[int]) -> float:
        """See `TieBreaker`."""
        if not self.arm.sampling.plain_argmax:
            return math.inf  # rows that agree to the last bit draw alike: nothing else is excused
        ids = [*prompt, *prefix]
        logits = self.arm.session.score(ids, len(ids) - 1)[0]
        second, best = np.partition(logits, -2)[-2:]
        return float(best - second)

    def tolerance(self) -> float:
        """See `TieBreaker`. Measured on the first call."""
        if self.measured is None:
            self.measured = MARGIN_FACTOR * wide_narrow_difference(self.arm.session, self.texts)
        return self.measured

    def speculate(self, prompt: Sequence[int], prefix: Sequence[int], limit: int) -> list[int]:
        """See `TieBreaker`."""
        return self.arm.answer([*prompt, *prefix], limit).token_ids


def wide_narrow_difference(session: Session, texts: Sequence[Sequence[int]], rows: int = SAMPLE_ROWS) -> float:
    """Largest difference of any logit between rows computed together and one by one, over `rows` rows of `texts`."""
    worst, compared = 0.0, 0
    for text in texts:
        if compared >= rows:
            break
        ids = list(text)[: min(rows - compared, max(64, MOST_LOGITS // session.manifest.model.vocab_size))]
        wide = session.score(ids)
        for narrow, row in zip(session.score_one_by_one(ids), wide, strict=True):
            known = row > -np.inf  # rows of the vocabulary that are no token have no logit
            worst = max(worst, float(np.abs(narrow[known] - row[known]).max()))
        compared += len(ids)
    return worst
