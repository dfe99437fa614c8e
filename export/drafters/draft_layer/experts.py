"""The updates that a pass of a draft layer takes from its experts, and their weights. Covered by
tests/export/drafters/test_draft_layer.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from streamspec.export.drafters.draft_layer.spec import DraftLayerSpec
from streamspec.export.ops.builder import Scope


class PassOutputs(NamedTuple):
    """The outputs of a pass. `mixture`: of its experts; `contrast`, `parallel`: the branch of the last depth, from
    contrasted experts or beside the rows; `apart`: the active experts, each by itself."""

    mixture: bool
    contrast: bool
    parallel: bool
    apart: bool

    @classmethod
    def of(cls, spec: DraftLayerSpec, number: int) -> PassOutputs:
        """The outputs of pass `number`."""
        last = number == spec.passes - 1
        contrast, parallel = last and spec.contrast, last and spec.parallel
        branch = contrast or parallel
        drafts = parallel or not branch  # the depth after the rows is not the branch's
        apart = spec.two_lists and drafts
        mixture = not last or (drafts and not apart) or (branch and not contrast)
        return cls(mixture, contrast, parallel, apart)


class ExpertUpdates(NamedTuple):
    """Updates of rows by experts, [1, m, H] each, '' where unused. `apart`: those of active experts; `shares` [1, m, K]
    their weights.
    """

    mixture: str = ""
    contrast: str = ""
    apart: Sequence[str] = ()
    shares: str = ""


def contrast_weights(g: Scope, zeros: str, best: str, sides: str) -> str:
    """[1, m, N]: the larger share of `sides` for the best expert, the other one negative for the second."""
    high, _ = g.ops("TopK", g.op("Softmax", sides, axis=-1), g.ints(2), out=(None, None), axis=-1, largest=1, sorted=1)
    signed = g.op("Mul", high, g.store.constant([1, -1], np.float32))
    two = g.op("Slice", best, g.ints(0), g.ints(2), g.ints(2))
    return g.op("ScatterElements", zeros, two, signed, axis=-1)


def single_weights(g: Scope, zeros: str, best: str, number: int) -> str:
    """[1, m, N]: 1 for the expert that is `number` among the `best`."""
    expert = g.op("Slice", best, g.ints(number), g.ints(number + 1), g.ints(2))
    ones = g.op("Expand", g.number(1), g.op("Shape", expert))
    return g.op("ScatterElements", zeros, expert, ones, axis=-1)
