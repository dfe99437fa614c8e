"""Describes attention to narrow states in place of keys and values (multi-head latent attention, DeepSeek V2, equations
9 to 19). tests/export/layers/mlp/test_experts.py covers it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class LatentSizes(NamedTuple):
    """Numbers of a state (`rank`); of a head's query, those `turned` by its position and those `still`; of what a head
    gives (`values`). `eps`: of the norms of states."""

    rank: int
    turned: int
    still: int
    values: int
    eps: float

    @property
    def width(self) -> int:
        """Numbers of a key in the cache: the turned ones, then the state."""
        return self.turned + self.rank

    def query_order(self, heads: int) -> NDArray[np.int64]:
        """Indices of the outputs of the map of queries, in which each head has its still numbers first: all turned
        ones, then all still ones."""
        each = np.arange(heads * (self.still + self.turned)).reshape(heads, -1)
        return np.concatenate([each[:, self.still :].reshape(-1), each[:, : self.still].reshape(-1)])

    def parts(self, weight: NDArray[np.float32], heads: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Of the map that makes each head's key and value of a state [heads * (still + values), rank]: the map of a
        head's query to one of states [heads, rank, still], and that of a state to its value [heads, values, rank]."""
        each = weight.reshape(heads, self.still + self.values, self.rank)
        return each[:, : self.still].swapaxes(1, 2), each[:, self.still :]
