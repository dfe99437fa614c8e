"""Finds the likeliest tokens among the logits of a whole vocabulary, and how likely the first of them is."""

from __future__ import annotations

import numpy as np

BLOCK = 128  # logits whose maximum is taken first


def likeliest(logits: np.ndarray, count: int) -> np.ndarray:
    """Token ids int64 [at most count] of the largest of `logits` float32 [vocabulary], the largest first; of equals the
    lower id first.

    They lie in the blocks with the largest maxima: one pass that processors do many numbers at a time in, instead of a
    selection over the vocabulary.
    """
    size = len(logits)
    count = min(count, size)
    whole = size // BLOCK * BLOCK
    ids = np.arange(whole, size)
    if whole:
        maxima = logits[:whole].reshape(-1, BLOCK).max(axis=1)
        blocks = np.argsort(-maxima, kind="stable")[:count] if len(maxima) <= count else _largest(maxima, count)
        ids = np.concatenate(((blocks[:, None] * BLOCK + np.arange(BLOCK)).ravel(), ids))
        ids.sort()
    return np.asarray(ids[np.argsort(-logits[ids], kind="stable")[:count]], np.int64)


def confidence(logits: np.ndarray, largest: float) -> float:
    """Returns the probability of the likeliest token, whose logit is the `largest` of `logits` float32 [vocabulary]."""
    return 1 / float(np.exp(logits - np.float32(largest)).sum())


def _largest(values: np.ndarray, count: int) -> np.ndarray:
    """Returns the indices of `count` largest values, the lower ones of equals."""
    threshold = np.partition(values, len(values) - count)[len(values) - count]
    above, equal = np.flatnonzero(values > threshold), np.flatnonzero(values == threshold)
    return np.concatenate((above, equal[: count - len(above)]))
