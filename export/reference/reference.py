"""The model that graphs are compared with and calibrated on, in float32: by PyTorch, or where it is not installed by
numpy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

from streamspec.draft_tree import DraftTree
from streamspec.export.ops.builder import Array
from streamspec.export.reference.long_context import LongText
from streamspec.export.weights.checkpoint import Checkpoint

Around = Callable[[int], AbstractContextManager[None]]


class Reference(Protocol):
    """A decoder that runs layer by layer."""

    config: Any  # of transformers

    def states(self, tokens: Array, positions: Array, sees: Array, around: Around | None = None) -> Any:
        """Rows at int64 positions [T]. `sees` bool [T, T]: row i may look at row j (sliding windows are added per
        layer). Each layer is called within `around` of it.
        """

    def texts(self, tokens: Array, around: Around | None = None) -> Array:
        """Finished states float32 [B, T, H] of texts of tokens [B, T], each by itself."""

    def finished(self, output: Any) -> Array:
        """The input of the head, float32 [T, H], of all rows of `states`."""

    def logits(self, output: Any) -> Array:
        """Logits float32 [T, V] of all rows of `states`."""

    def head(self, finished: Array) -> Array:
        """Logits float32 [r, V] of finished states [r, H]."""

    def long(self, text: LongText, tokens: Array) -> Array:
        """Logits float32 [rows, V] of the compared rows of a long text, from the tokens of the computed ones."""

    def watched(self, layer: int, modules: Sequence[str]) -> AbstractContextManager[dict[str, Array]]:
        """Collects the inputs of linear maps of a layer while the block runs: rows [rows, in] by the map's name."""

    def fast_products(self) -> AbstractContextManager[None]:
        """While entered, products may be rounded as those of bfloat16 where that is faster."""

    @property
    def parameters(self) -> int:
        """Numbers in the layers."""


def reference_of(model: Any, drafter: Any = None) -> Reference:
    """The reference of a checkpoint, or of a model of transformers with what its `drafter` reads, if any."""
    if isinstance(model, Checkpoint):
        from streamspec.export.reference.numpy_reference import NumpyReference

        return NumpyReference(model)
    from streamspec.export.reference.pytorch_reference import ReferenceModel

    return ReferenceModel(model, drafter)


def tree_rows(context: Array, tree_tokens: Array, tree: DraftTree) -> tuple[Array, Array, Array]:
    """Tokens, positions and visibility of a context followed by a tree, for one pass of the reference."""
    length, n = len(context), len(tree_tokens)
    positions = np.concatenate([np.arange(length), length + np.asarray(tree.depths)])
    sees = np.zeros((length + n, length + n), bool)
    sees[:length, :length] = np.tri(length, dtype=bool)
    sees[length:, :length] = True
    sees[length:, length:] = tree.ancestors
    return np.concatenate([context, tree_tokens]), positions, sees
