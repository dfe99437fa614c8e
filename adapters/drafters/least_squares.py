"""Least-squares fits from which drafters start, and the scale they work at."""

from __future__ import annotations

import torch
from torch import Tensor

RIDGE = 1e-2  # of the mean square, added to the diagonal
MASSIVE = 3.0  # rows with an rms above so many times the typical one are left out of a fit
FIT_TOKENS = 8192  # rows that a fit reads


def unit_rms(x: Tensor) -> Tensor:
    """x over the root mean square of its last dimension."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-12)


def pairs_ahead(tokens: Tensor, states: Tensor, usable: Tensor, ahead: int) -> tuple[Tensor, Tensor, Tensor]:
    """e(y_(t+1)), M_t and M_(t+ahead) [n, ..] of all t in [B, T] where both rows are usable."""
    both = usable[:, :-ahead] & usable[:, ahead:]
    last = max(usable.shape[1] - ahead, 0)
    return tokens[:, 1 : last + 1][both], states[:, :-ahead][both], states[:, ahead:][both]


def ridge(x: Tensor, y: Tensor) -> Tensor:
    """Solves for the matrix [columns of x, columns of y] that maps x [n, ..] to y [n, ..] with least squares."""
    square = x.T @ x
    return torch.linalg.solve(
        square + RIDGE * square.diagonal().mean() * torch.eye(len(square), device=x.device), x.T @ y
    )
