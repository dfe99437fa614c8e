"""Predicts how fast speculative decoding is: Leviathan et al. 2023 (arXiv 2211.17192, section 3).

Where every draft token is accepted with probability `alpha`, whatever came before, a step that drafts `gamma` of them
brings (1 - alpha^(gamma + 1)) / (1 - alpha) tokens (their equation 1). It takes `gamma * c + verify` plain steps, `c`
the price of a draft token, `verify` of checking them. The paper has verify = 1, as rows are free on its hardware; on
a CPU they are not (the ratio T_V / T_T of MagicDec, arXiv 2408.11049).

MagicDec's latency model lets both depend on the context: with L tokens in the cache a plain step takes w + k L, w for
the weights and k for a token's keys and values; a model that drafts for itself over a window of K tokens, w + k K.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import add
from typing import NamedTuple

import numpy as np

from streamspec.draft_tree import DraftTree


class DraftCounts(NamedTuple):
    """Verification steps, and over all of them: `rows` verified, the text's last token included; `depth` of the drafts;
    depths `tried`, of which `accepted` came true; `calls` of a drafter, of which a second model takes one a token."""

    steps: int = 0
    rows: int = 0
    depth: int = 0
    tried: int = 0
    accepted: int = 0
    calls: int = 0

    def after(self, tree: DraftTree, path: Sequence[int], calls: int) -> DraftCounts:
        """These, and a step that accepted `path` of a draft, with so many calls of the drafter."""
        accepted = len(path) - 1
        tried = accepted + bool(tree.children[path[-1]])
        return DraftCounts(*map(add, self, (1, len(tree), tree.depth, tried, accepted, calls)))

    @classmethod
    def sum(cls, counts: Iterable[DraftCounts]) -> DraftCounts:
        """All of them together."""
        return cls(*map(sum, zip(cls(), *counts, strict=True)))


NO_DRAFTS = DraftCounts()


def expected_tokens(alpha: float, gamma: float) -> float:
    """Returns the tokens per step, the target's own included. `alpha` 0 to 1; `gamma` >= 0, also a mean of several."""
    return gamma + 1 if alpha >= 1 else float((1 - alpha ** (gamma + 1)) / (1 - alpha))


def expected_speedup(alpha: float, gamma: float, c: float, verify: float = 1.0) -> float:
    """Speed over plain decoding's. `c`: a draft token's price, `verify`: a verification's, both in plain steps."""
    return expected_tokens(alpha, gamma) / (gamma * c + verify)


def speedups(alpha: float, verify: np.ndarray, price: float) -> np.ndarray:
    """Speed over plain decoding's [n - 1] of drafts of 1, 2, .. tokens (`expected_speedup`). `verify` [n]: plain
    steps that a step of 1, 2, .. rows takes; `price`: those of a draft token."""
    gammas, alpha = np.arange(1, len(verify)), min(alpha, 0.999)
    return (1 - alpha ** (gammas + 1)) / (1 - alpha) / (verify[1:] + gammas * price)


def best_gamma(alpha: float, c: float, max_gamma: int, verify: Callable[[int], float] = lambda gamma: 1.0) -> int:
    """Returns the gamma from 1 to `max_gamma` with the largest `expected_speedup`. `verify`: plain steps that checking
    so many draft tokens takes."""
    return max(range(1, max_gamma + 1), key=lambda gamma: expected_speedup(alpha, gamma, c, verify(gamma)))
