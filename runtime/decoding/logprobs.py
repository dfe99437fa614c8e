"""How likely the model itself held each token of an answer: natural logarithms, before temperature, penalties and
grammars.

Pure arithmetic on rows of logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Logprob:
    """`logprob` of the `token` that came, and the `top` likeliest (token, log-probability), likeliest first."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


def logprob(logits: np.ndarray, token: int, count: int) -> Logprob:
    """Of `token` and the `count` likeliest, by the row of `logits` float32 [vocabulary] it was chosen from."""
    row = logits.astype(np.float64)
    row -= row.max()
    row -= np.log(np.exp(row).sum())
    count = min(count, len(row))
    best = np.argpartition(-row, count - 1)[:count] if count else np.empty(0, np.int64)
    ranked = sorted(((int(i), float(row[i])) for i in best), key=lambda pair: (-pair[1], pair[0]))
    return Logprob(token, float(row[token]), ranked)
