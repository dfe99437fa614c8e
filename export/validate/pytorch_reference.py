"""Computes a context and a draft tree in PyTorch, calling Hugging Face's own decoder layers with explicit masks.

One forward pass over all rows together, no cache tricks. Written to be read next to docs/explain/how-it-works.md, not
to be fast.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from streamspec.draft_tree import MASKED, DraftTree
from streamspec.export.drafters.draft_pass import DraftSpec
from streamspec.export.ops.builder import Array
from streamspec.export.weights.lazy_weights import Float32Decoder


@dataclass
class ReferenceOutput:
    """The states of a pass over `T` rows that logits and drafters read."""

    final: Tensor  # [1, T, H] finished hidden states
    entry: Tensor  # [1, T, H] input of layer N-Ns
    keys: dict[int, Tensor]  # layer -> [1, Hkv, T, D]
    values: dict[int, Tensor]


class ReferenceModel:
    """HF's layers of `model`, called one by one in float32."""

    def __init__(self, model: Any, streams: DraftSpec | None = None) -> None:
        self.model, self.decoder = model, Float32Decoder(model)
        self.layers = len(self.decoder.layers)
        self.first = streams.first_layer(self.layers) if streams else self.layers

    @torch.no_grad()
    def states(
        self,
        tokens: Array,
        positions: Array,
        sees: Array,
        around: Callable[[int], AbstractContextManager[None]] | None = None,
    ) -> ReferenceOutput:
        """Rows at int64 positions [T]. `sees` bool [T, T]: row i may look at row j (sliding windows are added per
        layer). Each layer is called within `around` of it.
        """
        cache = _Record({}, {}, {})
        final, entry = self._run(torch.as_tensor(tokens)[None], torch.as_tensor(positions), sees, cache, around)
        keys, values = ({i: side[source] for i, source in self._kept(side)} for side in (cache.keys, cache.values))
        return ReferenceOutput(final, entry, keys, values)

    @torch.no_grad()
    def texts(self, tokens: Array, around: Callable[[int], AbstractContextManager[None]] | None = None) -> Tensor:
        """Finished states [B, T, H] of texts of tokens [B, T], each by itself. `around` as for `states`."""
        length = tokens.shape[1]
        sees = np.tri(length, dtype=bool)
        return self._run(torch.as_tensor(tokens), torch.arange(length), sees, _Pass({}), around)[0]

    def _run(
        self,
        tokens: Tensor,
        positions: Tensor,
        sees: Array,
        cache: Any,
        around: Callable[[int], AbstractContextManager[None]] | None,
    ) -> tuple[Tensor, Tensor]:
        """Finished states, and those that enter the first layer of streams, [B, T, H] of tokens [B, T]."""
        where = positions.expand(len(tokens), -1)
        entry = hidden = self.decoder.begin(tokens, where)
        rotary = self.decoder.rotary_embeddings(hidden, where)
        per_layer_inputs = self.decoder.per_layer_inputs(tokens, hidden)
        for layer in range(self.layers):
            if layer == self.first:
                entry = hidden
            mask = self.mask(torch.as_tensor(sees), positions, positions, self.decoder.window(layer))
            with around(layer) if around else nullcontext():
                hidden = self.decoder.call_layer(layer, hidden, mask, where, rotary, cache, per_layer_inputs)
        return self.decoder.finish(hidden), entry

    def _kept(self, side: dict[int, Tensor]) -> list[tuple[int, int]]:
        """The layers that attend to one of `side`, and which that is."""
        return [(layer, source) for layer, source in enumerate(self.decoder.kv_sources) if source in side]

    @torch.no_grad()
    def logits(self, output: ReferenceOutput) -> Array:
        """Computes the logits of all rows, float32 [T, V]."""
        logits: Array = self.decoder.logits(output.final)[0].numpy()
        return logits

    @staticmethod
    def mask(sees: Tensor, rows: Tensor, columns: Tensor, window: int | None) -> Tensor:
        """Additive [1, 1, rows, columns]: 0 where a row sees a column, also within the sliding window."""
        if window is not None:
            sees = sees & (rows[:, None] - columns[None, :] < window)
        return torch.where(sees, 0.0, MASKED)[None, None]


def tree_rows(context: Array, tree_tokens: Array, tree: DraftTree) -> tuple[Array, Array, Array]:
    """Tokens, positions and visibility of a context followed by a tree, for one pass of the reference."""
    length, n = len(context), len(tree_tokens)
    positions = np.concatenate([np.arange(length), length + np.asarray(tree.depths)])
    sees = np.zeros((length + n, length + n), bool)
    sees[:length, :length] = np.tri(length, dtype=bool)
    sees[length:, :length] = True
    sees[length:, length:] = tree.ancestors
    return np.concatenate([context, tree_tokens]), positions, sees


@dataclass
class _Pass:
    """A cache that returns K/V unchanged. `shared`: by kind of layer, those that others attend to."""

    shared: dict[str, tuple[Tensor, Tensor]]

    def update(self, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return key, value


@dataclass
class _Record:
    """A cache that returns K/V unchanged and records them. `shared`: by kind of layer, those that others attend to."""

    keys: dict[int, Tensor]
    values: dict[int, Tensor]
    shared: dict[str, tuple[Tensor, Tensor]]

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self.keys[layer], self.values[layer] = key, value
        return key, value
