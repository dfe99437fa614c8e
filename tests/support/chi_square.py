"""Pearson's chi-square test. Cells expected fewer than five times are pooled."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch

FEW = 5


def p_value(seen: Mapping[Any, int], wanted: Mapping[Hashable, float], runs: int) -> float:
    """Probability of counts at least as far from `runs` * `wanted` as `seen`."""
    cells = [[float(seen.get(key, 0)), runs * share] for key, share in wanted.items()]
    large = [cell for cell in cells if cell[1] >= FEW]
    rare = [sum(column) for column in zip(*(cell for cell in cells if cell[1] < FEW), strict=True)]
    if rare and rare[1] > 0:
        large.append(rare)
    statistic = sum((count - mean) ** 2 / mean for count, mean in large)
    half = torch.tensor([(len(large) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))
