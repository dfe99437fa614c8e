"""Predicts the speed-up of a measured run by the theory (`runtime.costs.theory`), to be shown beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from streamspec.runtime.costs.row_costs import RowCosts
from streamspec.runtime.costs.theory import DraftCounts, best_gamma, expected_speedup, expected_tokens, speedups

CONTEXTS = 256  # tokens from one context to the next that a prediction is made for


@dataclass(frozen=True)
class Prediction:
    """The theory's prediction for a measurement.

    - `alpha`: share of the draft tokens looked at that were accepted; those after a rejected one are not looked at. Of
      a tree: of the depths, where any candidate may be right.
    - `gamma`: mean depth of a draft. `draft`, `verify`: plain steps that drafting and verifying one take.
    - `speedup`: the one expected over plain decoding, the plain steps between counted.
    - `best_gamma`, `best_speedup`: of a drafter that takes one call for each token; None of others.
    - `pays_from`: tokens of context from which a window's drafts pay, 0: nowhere; None of others.
    """

    alpha: float
    gamma: float
    draft: float
    verify: float
    speedup: float
    best_gamma: int | None = None
    best_speedup: float | None = None
    pays_from: int | None = None


def predict(counts: Sequence[tuple[DraftCounts, int]], costs: RowCosts | None, max_gamma: int = 0) -> Prediction | None:
    """Predicts the speed of answers from their drafts and plain steps, and the costs of steps. `max_gamma`: the largest
    `gamma` to choose from; 0: there is nothing to choose. None without drafts or costs."""
    drafts, plain_steps = DraftCounts.sum(drafts for drafts, _ in counts), sum(plain for _, plain in counts)
    if costs is None or not drafts.tried:
        return None
    alpha, gamma = drafts.accepted / drafts.tried, drafts.depth / drafts.steps
    draft, verify = costs.price * drafts.calls / drafts.steps, costs.verify(drafts.rows / drafts.steps)
    tokens = drafts.steps * expected_tokens(alpha, gamma) + plain_steps
    speedup = tokens / (drafts.steps * (draft + verify) + plain_steps)
    if not max_gamma:
        return Prediction(alpha, gamma, draft, verify, speedup)
    best = best_gamma(alpha, costs.price, max_gamma, lambda depth: costs.verify(depth + 1))
    reached = expected_speedup(alpha, best, costs.price, costs.verify(best + 1))
    return Prediction(alpha, gamma, draft, verify, speedup, best, reached)


def pays_from(alpha: float, costs: RowCosts, max_gamma: int, limit: int) -> int:
    """Returns the fewest tokens of context, in whole `CONTEXTS` up to `limit`, at which drafts of the best length from
    1 to `max_gamma` are faster than plain decoding, `costs` at that context; 0 where they never are."""
    for cached in range(CONTEXTS, limit + 1, CONTEXTS):
        verify, price = costs.at(cached)
        if speedups(alpha, verify[: max_gamma + 1], price).max() > 1:
            return cached
    return 0
