"""Defines the values between the parts of the decoding loop: the plan of a call, its outcome, and its observers.

tests/runtime/decoding/test_loop.py and tests/runtime/draft_sources/test_lookahead.py cover this module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from streamspec.runtime.costs.draft_depth import EarlyEnd
from streamspec.runtime.decoding.acceptance import Committed
from streamspec.runtime.decoding.draft_proposal import DraftProposal
from streamspec.runtime.decoding.draft_tree_search import Draft
from streamspec.runtime.decoding.model_runner import Pruning, StepRequest, StepResult


class DrafterPlan(NamedTuple):
    """Says whether the drafter runs at the end of a call and, of a second model, how many tokens it drafts at most
    (`depth`) and when it stops before."""

    runs: bool
    depth: int | None = None
    early_end: EarlyEnd | None = None

    @property
    def calls(self) -> int:
        """Calls of the drafter that this takes, as far as is known before: a second model takes one for each token."""
        return 0 if not self.runs else 1 if self.depth is None else self.depth

    def request(self, tokens: Sequence[int], mask: np.ndarray | None) -> StepRequest:
        """Returns the call that reads the end of a prompt, `tokens`."""
        return StepRequest(
            tokens,
            run_drafter=self.runs,
            mask=mask,
            draft_depth=self.depth,
            early_end=self.early_end,
        )


class StepPlan(NamedTuple):
    """The next call of the model.

    - `draft`: the rows to verify, the text's last token first. A plain step has that row alone.
    - `drafter`: what the drafter does after the rows.
    - `proposal`: what the drafter proposed at the end of the previous call, used or not; None: it did not run.
    - `costs` [rows]: `costs[i]` is the time of a step with i + 1 rows, in plain steps; None: unknown.
    - `explored`: rows of the draft that are verified for what they teach.
    - `together`: sequences that share the call, this one included.
    - `paused`: speculation is off; only forced tokens are drafted, and what a source proposes that `wakes` it. False
      where such a source has ended the pause for this step.
    - `cached`: tokens in the KV cache. `began`: when the step did, on the decoder's clock.
    """

    draft: Draft
    drafter: DrafterPlan
    proposal: DraftProposal | None
    costs: np.ndarray | None
    explored: int
    together: int
    paused: bool
    cached: int
    began: float
    pruning: Pruning | None = None
    priors: np.ndarray | None = None  # float32 [rows], for `pruning`: log-probabilities of the drafted tokens

    @property
    def rows(self) -> int:
        return len(self.draft.tokens)

    @property
    def plain(self) -> bool:
        return self.rows == 1

    @property
    def cost(self) -> float | None:
        """The time that the step should take, in plain steps; None where costs are not known."""
        return None if self.costs is None else self.costs.item(self.rows - 1)

    def request(self, mask: np.ndarray | None) -> StepRequest:
        """Returns the call; `mask` bool [rows, vocabulary]: the tokens that may be chosen, None for all."""
        return StepRequest(
            self.draft.tokens,
            self.draft.tree,
            run_drafter=self.drafter.runs,
            pruning=self.pruning,
            priors=self.priors,
            mask=mask,
            draft_depth=self.drafter.depth,
            early_end=self.drafter.early_end,
        )


class StepOutcome(NamedTuple):
    """The outcome of a plan. `path`: nodes of the draft that were accepted, the root first. `constrained`: a grammar or
    thinking budget limited the choices, which say nothing about other texts then."""

    plan: StepPlan
    result: StepResult
    path: Sequence[int]
    committed: Committed
    constrained: bool
    clock: Callable[[], float]

    @property
    def tokens(self) -> list[int]:
        """Tokens that the step added to the text."""
        return self.committed.tokens

    @property
    def alone(self) -> bool:
        """Tells whether no other sequence shared the call, so that its time is that of this step."""
        return self.plan.together == 1

    @property
    def drafter_calls(self) -> int:
        """Calls that the drafter took."""
        if self.plan.drafter.depth is None:
            return int(self.plan.drafter.runs)
        return self.result.dropped if self.result.proposal is None else self.result.proposal.depths

    def seconds(self) -> float:
        """The seconds that the step has taken up to now, without those in the scheduler's queue."""
        return self.clock() - self.plan.began


class StepObserver:
    """Learns from the steps of one answer. The loop calls all observers in their order; none changes the text."""

    def begin(self, prompt_tokens: int) -> None:
        """Begins an answer."""

    def observe(self, outcome: StepOutcome) -> None:
        """Learns from a step that has ended."""

    def end(self, answer: Sequence[int]) -> None:
        """Ends the answer, also where its consumer has left. `answer`: token ids."""
