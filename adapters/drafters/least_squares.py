"""Least-squares fits from which drafters start, and the scale they work at."""

from __future__ import annotations

import torch
from torch import Tensor

RIDGE = 1e-2  # of the mean square, added to the diagonal
LEAST = 1e-6  # added at least, so that rows of which none differs from their mean give a map of zeros
MASSIVE = 3.0  # rows with an rms above so many times the typical one are left out of a fit
FIT_TOKENS = 8192  # rows that a fit reads


def unit_rms(x: Tensor) -> Tensor:
    """x over the root mean square of its last dimension."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-12)


def share_left(rest: Tensor, whole: Tensor) -> float:
    """The share of the squares of `whole` that is left in `rest`; 1 where there is nothing to explain."""
    total = float(whole.pow(2).sum())
    return float(rest.pow(2).sum()) / total if total > 0 else 1.0


def pairs_ahead(tokens: Tensor, states: Tensor, usable: Tensor, ahead: int) -> tuple[Tensor, Tensor, Tensor]:
    """e(y_(t+1)), M_t and M_(t+ahead) [n, ..] of all t in [B, T] where both rows are usable."""
    both = usable[:, :-ahead] & usable[:, ahead:]
    last = max(usable.shape[1] - ahead, 0)
    return tokens[:, 1 : last + 1][both], states[:, :-ahead][both], states[:, ahead:][both]


def ridge(x: Tensor, y: Tensor) -> Tensor:
    """Solves for the matrix [columns of x, columns of y] that maps x [n, ..] to y [n, ..] with least squares."""
    square = x.T @ x
    added = (RIDGE * square.diagonal().mean()).clamp(min=LEAST)
    return torch.linalg.solve(square + added * torch.eye(len(square), device=x.device), x.T @ y)
