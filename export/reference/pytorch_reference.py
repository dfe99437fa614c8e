"""Computes a context and a draft tree in PyTorch, calling Hugging Face's own decoder layers with explicit masks.

One forward pass over all rows together, no cache tricks. Written to be read next to docs/explain/how-it-works.md, not
to be fast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from streamspec.draft_tree import MASKED
from streamspec.export.ops.builder import Array
from streamspec.export.reference.long_context import LongText
from streamspec.export.spec.draft_spec import DraftSpec
from streamspec.export.weights.lazy_weights import Float32Decoder
from streamspec.progress import track

if TYPE_CHECKING:
    from streamspec.export.reference.reference import Around


@dataclass
class ReferenceOutput:
    """The states of a pass over `T` rows that logits and drafters read."""

    final: Tensor  # [1, T, H] finished hidden states
    entry: Tensor  # [1, T, H] input of layer N-Ns
    keys: dict[int, Tensor]  # layer -> [1, Hkv, T, D]
    values: dict[int, Tensor]


class ReferenceModel:
    """HF's layers of `model`, called one by one in float32."""

    def __init__(self, model: Any, draft_spec: DraftSpec | None = None) -> None:
        self.model, self.decoder, self.config = model, Float32Decoder(model), model.config
        self.layers = len(self.decoder.layers)
        self.first = draft_spec.first_layer(self.layers) if draft_spec else self.layers

    @torch.no_grad()
    def states(
        self,
        tokens: Array,
        positions: Array,
        sees: Array,
        around: Around | None = None,
        entered: dict[int, Tensor] | None = None,
    ) -> ReferenceOutput:
        """Rows at int64 positions [T]. `sees` bool [T, T]: row i may look at row j (sliding windows are added per
        layer). Each layer is called within `around` of it; its input [1, T, H] becomes that of its number in `entered`.
        """
        cache, ids = _Record({}), torch.as_tensor(tokens)[None]
        final, entry = self._run(ids, torch.as_tensor(positions), sees, cache, around, entered)
        keys, values = ({i: side[source] for i, source in self._kept(side)} for side in (cache.keys, cache.values))
        return ReferenceOutput(final, entry, keys, values)

    @torch.no_grad()
    def texts(self, tokens: Array, around: Around | None = None) -> Array:
        """Finished states float32 [B, T, H] of texts of tokens [B, T], each by itself. `around` as for `states`."""
        length = tokens.shape[1]
        sees = np.tri(length, dtype=bool)
        final: Array = self._run(torch.as_tensor(tokens), torch.arange(length), sees, _Pass({}), around)[0].numpy()
        return final

    @contextmanager
    def watched(self, layer: int, modules: Sequence[str]) -> Iterator[dict[str, Array]]:
        """Collects the inputs of linear maps of a layer while the block runs: rows [rows, in] by the map's name."""
        seen: dict[str, Array] = {}

        def keep(name: str) -> Callable[[Any, Any], None]:
            def hook(_: Any, args: Any) -> None:
                seen[name] = args[0].flatten(0, -2).float().cpu().numpy()

            return hook

        of = self.decoder.layer(layer)
        with ExitStack() as hooks:
            for name in modules:
                hooks.enter_context(of.get_submodule(name).register_forward_pre_hook(keep(name)))
            yield seen

    @contextmanager
    def fast_products(self) -> Iterator[None]:
        """While entered, PyTorch may multiply by oneDNN, whose float32 is twice as fast as MKL's on CPUs of AMD, and
        round factors to bfloat16 where a CPU has units for it: a text's second moments are not known better."""
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("medium")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)

    def _run(
        self,
        tokens: Tensor,
        positions: Tensor,
        sees: Array,
        cache: Any,
        around: Around | None,
        entered: dict[int, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Finished states, and those that enter the first layer of streams, [B, T, H] of tokens [B, T]."""
        where = positions.expand(len(tokens), -1)
        entry = hidden = self.decoder.begin(tokens, where)
        rotary = self.decoder.rotary_embeddings(hidden, where)
        per_layer_inputs = self.decoder.per_layer_inputs(tokens, hidden)
        for layer in track(range(self.layers), "layers of the reference", self.layers):
            if layer == self.first:
                entry = hidden
            if entered is not None:
                entered[layer] = hidden
            mask = self.mask(torch.as_tensor(sees), positions, positions, self.decoder.window(layer))
            with around(layer) if around else nullcontext():
                hidden = self.decoder.call_layer(layer, hidden, mask, where, rotary, cache, per_layer_inputs)
        return self.decoder.finish(hidden), entry

    def _kept(self, side: dict[int, Tensor]) -> list[tuple[int, int]]:
        """The numbers by which layers use one of `side`, and which that is."""
        places = [(number, self.decoder.cache_place(number)) for number in self.decoder.cache_numbers(0)]
        return [(number, place) for number, place in places if place in side]

    def finished(self, output: ReferenceOutput) -> Array:
        """The input of the head, float32 [T, H], of all rows of `states`."""
        final: Array = output.final[0].numpy()
        return final

    @torch.no_grad()
    def logits(self, output: ReferenceOutput) -> Array:
        """Computes the logits of all rows, float32 [T, V]."""
        logits: Array = self.decoder.logits(output.final)[0].numpy()
        return logits

    @torch.no_grad()
    def head(self, finished: Array) -> Array:
        """Logits float32 [r, V] of finished states [r, H]."""
        logits: Array = self.decoder.logits(torch.from_numpy(finished)).numpy()
        return logits

    @property
    def parameters(self) -> int:
        """Numbers in the layers."""
        return sum(parameter.numel() for parameter in self.decoder.layers.parameters())

    def long(self, text: LongText, tokens: Array) -> Array:
        """Logits float32 [rows, V] of the compared rows of a long text, from the tokens of the computed ones."""
        from streamspec.export.reference.pytorch_long import long_logits

        return long_logits(self.decoder, text, tokens)

    @staticmethod
    def mask(sees: Tensor, rows: Tensor, columns: Tensor, window: int | None) -> Tensor:
        """Additive [1, 1, rows, columns]: 0 where a row sees a column, also within the sliding window."""
        if window is not None:
            sees = sees & (rows[:, None] - columns[None, :] < window)
        return torch.where(sees, 0.0, MASKED)[None, None]


def add_update(linear: Any, update: Array) -> None:
    """Puts the weight plus an `update` [out, in] in place of a linear map's weight."""
    added = torch.as_tensor(update)
    linear.weight.data = linear.weight.data + (added.T if isinstance(linear, Conv1D) else added)


@dataclass
class _Pass:
    """A cache that returns K/V unchanged. `shared`: by kind of layer, those that others attend to."""

    shared: dict[str, tuple[Tensor, Tensor]]

    def update(self, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return key, value


@dataclass
class _Record(_Pass):
    """A cache that returns K/V unchanged and records them by layer."""

    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self.keys[layer], self.values[layer] = key, value
        return key, value
