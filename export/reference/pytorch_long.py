"""Computes rows of a long text in PyTorch, layer by layer in chunks of rows (`long_context`).

tests/export/reference/test_long_context.py covers it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from streamspec.draft_tree import MASKED
from streamspec.export.ops.builder import Array
from streamspec.export.reference.long_context import LongText
from streamspec.export.weights.lazy_weights import Float32Decoder


@torch.no_grad()
def long_logits(decoder: Float32Decoder, text: LongText, tokens: Array) -> Array:
    """Logits float32 [rows, V] of the compared rows; `tokens`: of the computed ones."""
    given, where = torch.as_tensor(tokens)[None], torch.as_tensor(text.positions)
    hidden = decoder.begin(given, where[None])
    rotary = decoder.rotary_embeddings(hidden, where[None])
    per_layer_inputs = decoder.per_layer_inputs(given, hidden)
    zeros, kept = bool((~text.computed).any()), dict[str, tuple[Tensor, ...]]()
    for layer in range(len(decoder.layers)):
        cache, parts = _Growing(zeros, kept), []
        for rows in text.chunks():
            mask = _mask(text, where[rows], where[: rows.stop], decoder.window(layer))
            cut = _cut(rotary, rows)
            if decoder.kv_sources[layer] != layer:  # as it was when the layer below had read as many rows
                cache.shared = {kind: tuple(x[:, :, : zeros + rows.stop] for x in kv) for kind, kv in kept.items()}
            own = None if per_layer_inputs is None else per_layer_inputs[:, rows]
            parts.append(decoder.call_layer(layer, hidden[:, rows], mask, where[None, rows], cut, cache, own))
        hidden = torch.cat(parts, dim=1)
    final = decoder.finish(hidden[:, np.searchsorted(text.positions, text.compared)])
    logits: Array = decoder.logits(final)[0].numpy()
    return logits


def _zeros(text: LongText, where: Tensor, window: int | None) -> Tensor:
    """float32 [R]: how many skipped rows those at positions `where` [R] see."""
    skipped = torch.as_tensor(np.concatenate([[0], np.cumsum(~text.computed)]))
    first = torch.zeros_like(where) if window is None else (where - window + 1).clamp(min=0)
    return (skipped[where + 1] - skipped[first]).float()


def _mask(text: LongText, rows: Tensor, columns: Tensor, window: int | None) -> Tensor:
    """Additive [1, 1, R, K]: of rows and columns at these positions. Where rows are skipped there is a column before
    all others: a zero that stands for all zeros a row sees.
    """
    back = rows[:, None] - columns[None, :]
    sees = (back >= 0) & (back < (window or len(text.computed)))
    mask = torch.where(sees, 0.0, MASKED)
    if not text.computed.all():
        mask = torch.cat([_zeros(text, rows, window).log().clamp(min=MASKED)[:, None], mask], dim=1)
    return mask[None, None]


def _cut(rotary: Any, rows: slice) -> Any:
    """Cuts `rows` out of cos and sin, in some families one complex tensor."""
    if rotary is None:
        return None
    if isinstance(rotary, Tensor):
        return rotary[:, rows]
    if isinstance(rotary, dict):
        return {kind: _cut(tables, rows) for kind, tables in rotary.items()}
    return tuple(table[:, rows] for table in rotary)


@dataclass
class _Growing:
    """One layer's cache: K/V [1, Hkv, T, D] of all rows so far, after a row of zeros where `zeros`, by the number that
    each of its mixers gives; `shared`: by kind of layer, those that others attend to."""

    zeros: bool
    shared: dict[str, tuple[Tensor, ...]]
    parts: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def update(self, key: Tensor, value: Tensor, number: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        before = self.parts.get(number)
        if before is None and self.zeros:
            before = torch.zeros_like(key[:, :, :1]), torch.zeros_like(value[:, :, :1])
        if before is not None:
            key, value = torch.cat([before[0], key], dim=2), torch.cat([before[1], value], dim=2)
        self.parts[number] = key, value
        return key, value
