"""A checkpoint's layer for multi-token prediction in numpy, to compare the graph with where numpy reads the base."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import cast

import numpy as np

from streamspec.export.drafters.mtp.spec import LABEL, MAP, NORM, PAIR, MtpSource, MtpSpec
from streamspec.export.ops.builder import Array
from streamspec.export.reference.draft_reference import DraftedTree, LevelLogits, LevelReference, TreePass
from streamspec.export.reference.numpy_reference import NumpyReference, times
from streamspec.export.spec.weight_source import Table


class MtpNumpyReference(LevelReference):
    """The layer over the target's finished states, as one after the target's last."""

    spec: MtpSpec

    def __init__(self, model: NumpyReference, spec: MtpSpec) -> None:
        self.spec, self.model = spec, copy.copy(model)
        self.model.spec, self.model.source = spec.layer_of(model.spec), _StoredRows(model.source, spec, model.spec)

    def states(self, case: DraftedTree, main: TreePass) -> Array:
        """The finished states [T, H]."""
        states: Array = main.output[0]
        return states

    def after(self, text: Array, root: int, states: Array, rows: list[int]) -> LevelLogits:
        known, tokens, states = dict[tuple[int, ...], Array](), np.append(text[1:], root), states[rows]

        def logits(paths: list[list[int]]) -> Array:
            finished = self._finished(paths, tokens, states, known)
            known.update(zip(map(tuple, paths), finished, strict=True))
            return self.model.head(finished)

        return logits

    def _finished(
        self, paths: Sequence[list[int]], tokens: Array, states: Array, after: dict[tuple[int, ...], Array]
    ) -> Array:
        """The finished states [paths, H] after draft tokens, as many in each of `paths`. Rows read the state before a
        token: of the target, or this layer's `after` the draft tokens before it."""
        own = [[after[tuple(path[:depth])] for depth in range(len(path))] for path in paths]
        read = np.stack([np.concatenate([states, np.reshape(each, (-1, states.shape[1]))]) for each in own])
        embedded = self.model.embedded(np.array([[*tokens, *path] for path in paths]))
        pair = zip((embedded, read), PAIR, strict=True)
        joined = np.concatenate([self.model.norm(one, f"{LABEL}{name}") for one, name in pair], axis=-1)
        x = times(joined.reshape(-1, joined.shape[-1]), self.spec.tensors[MAP]).reshape(embedded.shape)
        out = self.model.attending_layer(self.model.spec.layers, x, self.spec.window)
        return self.model.norm(out, f"{LABEL}{NORM}")


class _StoredRows(MtpSource):
    """The layer's tables are as in the checkpoint, too."""

    def rows_of(self, name: str) -> Table:
        return cast(Table, self.tensors[self.named[name]]) if name in self.named else self.source.rows_of(name)
