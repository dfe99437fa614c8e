"""The slow truth: the architecture's equations in PyTorch, calling Hugging Face's own decoder layers with explicit
masks.

One forward pass over context and tree together, no cache tricks; streams then run beside one row. Written to be read
next to docs/architecture.md, not to be fast. Knows nothing about ONNX.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from streamspec.adapters.drafters.base import DraftRows
from streamspec.adapters.drafters.draft_layer import DraftLayerModel
from streamspec.adapters.drafters.draft_layer_config import DraftLayerConfig
from streamspec.draft_tree import MASKED, DraftTree
from streamspec.export.drafters.base import DraftSpec
from streamspec.export.drafters.draft_layer import DraftLayerSpec
from streamspec.export.drafters.medusa import MedusaSpec
from streamspec.export.drafters.streams import StreamSpec
from streamspec.export.layers.decoder_spec import DecoderSpec, describe
from streamspec.export.ops.builder import Array
from streamspec.export.weights.lazy_weights import Float32Decoder


@dataclass
class ReferenceOutput:
    """Of a pass over `T` rows: what logits and streams need."""

    final: Tensor  # [1, T, H] finished hidden states
    entry: Tensor  # [1, T, H] input of layer N-Ns
    keys: dict[int, Tensor]  # layer -> [1, Hkv, T, D]
    values: dict[int, Tensor]


class ReferenceModel:
    """HF's layers of `model`, called one by one in float32."""

    def __init__(self, model: Any, streams: DraftSpec | None = None) -> None:
        self.model, self.streams, self.decoder = model, streams, Float32Decoder(model)
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
        where = torch.as_tensor(positions)[None]
        hidden = self.decoder.begin(torch.as_tensor(tokens)[None], where)
        rotary = self.decoder.rotary_embeddings(hidden, where)
        cache = _Record({}, {})
        entry = hidden
        for layer in range(self.layers):
            if layer == self.first:
                entry = hidden
            mask = self._mask(torch.as_tensor(sees), where[0], where[0], self.decoder.window(layer))
            with around(layer) if around else nullcontext():
                hidden = self.decoder.call_layer(layer, hidden, mask, where, rotary, cache)
        return ReferenceOutput(self.decoder.finish(hidden), entry, cache.keys, cache.values)

    @torch.no_grad()
    def logits(self, answer: ReferenceOutput) -> Array:
        """float32 [T, V]"""
        found: Array = self.decoder.logits(answer.final)[0].numpy()
        return found

    @torch.no_grad()
    def draft_logits(self, main: ReferenceOutput, positions: Array, sees: Array, row: int, root: int) -> Tensor:
        """[gamma, V]: the drafter beside `row`, whose next token is `root`; without a bigram's share."""
        if isinstance(self.streams, MedusaSpec):
            return self._medusa_logits(main.final[0, row], self.streams)
        assert isinstance(self.streams, StreamSpec)
        return self._stream_logits(self.streams, main, positions, sees, row, root)

    def _medusa_logits(self, hidden: Tensor, spec: MedusaSpec) -> Tensor:
        """Heads of their own know draft tokens only: elsewhere their logits are minus infinity."""
        moved = torch.as_tensor(spec.block_weights) @ hidden + torch.as_tensor(spec.block_biases)
        states = hidden + torch.nn.functional.silu(moved)
        logits: Tensor = self.decoder.logits(states)
        if spec.heads is not None:
            own = torch.einsum("jdh,jh->jd", torch.as_tensor(spec.heads).float(), states)
            chosen = slice(None) if spec.draft_vocab is None else torch.as_tensor(spec.draft_vocab)
            logits = torch.full_like(logits, -torch.inf)
            logits[:, chosen] = own
        return logits

    def _stream_logits(
        self, spec: StreamSpec, main: ReferenceOutput, positions: Array, sees: Array, row: int, root: int
    ) -> Tensor:
        """Streams see the main rows that `row` sees."""
        shift = torch.as_tensor(spec.embeddings)
        shares = torch.ones(spec.gamma, 2) if spec.shares is None else torch.as_tensor(spec.shares)
        if spec.root_map is not None:
            embedded = self.decoder.embed(torch.tensor([root]))
            unit = embedded * torch.rsqrt(embedded.pow(2).mean(-1, keepdim=True) + 1e-12)
            shift = shift + shares[:, 1:] * (unit @ torch.as_tensor(spec.root_map).T)
        hidden = shares[:, :1] * main.entry[:, row : row + 1] + spec.scale * shift[None]
        steps = torch.arange(1, spec.gamma + 1) if spec.shifted else torch.zeros(spec.gamma, dtype=torch.long)
        where = int(positions[row]) + steps
        rotary = self.decoder.rotary_embeddings(hidden, where[None])
        seen = torch.cat(
            [torch.as_tensor(sees)[row].expand(spec.gamma, -1), torch.ones(spec.gamma, spec.gamma).tril().bool()], 1
        )
        columns = torch.cat([torch.as_tensor(positions), where])
        shape = describe(self.model)
        for layer in range(self.first, self.layers):
            mask = self._mask(seen, where, columns, self.decoder.window(layer))
            with _stream_weights(self.decoder, layer, spec, shape):
                hidden = self.decoder.call_layer(layer, hidden, mask, where[None], rotary, _Append(main, layer))
        logits: Tensor = self.decoder.logits(self.decoder.finish(hidden))[0]
        return logits

    @staticmethod
    def _mask(sees: Tensor, rows: Tensor, columns: Tensor, window: int | None) -> Tensor:
        if window is not None:
            sees = sees & (rows[:, None] - columns[None, :] < window)
        return torch.where(sees, 0.0, MASKED)[None, None]


class ReferenceDraftLayer:
    """The draft layer as it was trained (`adapters/drafters/draft_layer.py`), beside one text."""

    def __init__(self, model: Any, spec: DraftLayerSpec) -> None:
        experts = len(spec.tensors["experts.gate"])
        self.spec = spec
        parts = {
            name: getattr(spec, name)
            for name in ("active", "contrast", "parallel", "two_lists", "taps", "prefix_attention", "own_heads")
        }
        self.model = DraftLayerModel(model, DraftLayerConfig(spec.gamma, experts, **parts)).eval()
        with torch.no_grad():
            for name, parameter in self.model.drafter_tensors().items():
                parameter.copy_(torch.as_tensor(spec.tensors[name]))

    @torch.no_grad()
    def guesses(self, text: Array, root: int, out: dict[str, Array]) -> Iterator[tuple[Array, Array, Array]]:
        """For every row of guesses in `out`, the graph's outputs behind the last token of `text` [T], whose next is
        `root`: its candidates [C], their logits [C], and the layer's own logits [V] behind the same guesses, minus
        infinity where nothing may be proposed; of both the largest is 0."""
        vocabulary = None if self.spec.draft_vocab is None else torch.as_tensor(self.spec.draft_vocab)
        tokens = torch.as_tensor(text)[None]
        main = self.model.main_pass(tokens, torch.ones_like(tokens))
        main.tokens = torch.cat([main.tokens[:, :1], tokens[:, 1:]], dim=1)
        main.tokens[0, 0] = root  # the layer takes row t's next token from place t + 1, the last row's from place 0
        behind: list[list[int]] = []  # of each row of the level before: the guesses it stands behind
        start, candidates = 0, out["candidates"].shape[1]
        for place, count in enumerate(self.spec.levels):
            before, behind = behind, []
            for row in range(count):
                origin = int(out["origins"][start + row])
                token = (
                    int(out["candidates"][start - len(before) + origin // candidates, origin % candidates])
                    if place
                    else 0
                )
                behind.append([*before[origin // candidates], token] if place else [])
                following = torch.tensor([[[*behind[-1], *[0] * (self.spec.gamma - len(behind[-1]))]]])
                picked = DraftRows(torch.tensor([[len(text) - 1]]), torch.tensor([[root]]), following)
                state = self.model.draft_pass(main, picked)[0, :, place]
                logits = torch.full((self.model.decoder.embedding.num_embeddings,), -torch.inf)
                logits[slice(None) if vocabulary is None else vocabulary] = self.model.draft_logits(
                    state, torch.tensor([place]), vocabulary
                )[0].float()
                ours = out["candidate_logits"][start + row]
                yield out["candidates"][start + row], ours - ours.max(), (logits - logits.max()).numpy()
            start += count


def tree_rows(context: Array, tree_tokens: Array, tree: DraftTree) -> tuple[Array, Array, Array]:
    """Tokens, positions and visibility of a context followed by a tree: what one pass of the oracle takes."""
    length, n = len(context), len(tree_tokens)
    positions = np.concatenate([np.arange(length), length + np.asarray(tree.depths)])
    sees = np.zeros((length + n, length + n), bool)
    sees[:length, :length] = np.tri(length, dtype=bool)
    sees[length:, :length] = True
    sees[length:, length:] = tree.ancestors
    return np.concatenate([context, tree_tokens]), positions, sees


@dataclass
class _Record:
    """A cache that returns K/V as they come and remembers them."""

    keys: dict[int, Tensor]
    values: dict[int, Tensor]

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self.keys[layer], self.values[layer] = key, value
        return key, value


@dataclass
class _Append:
    """A cache holding the main rows' K/V of one layer, to which stream rows append theirs."""

    main: ReferenceOutput
    layer: int

    def update(self, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return torch.cat([self.main.keys[self.layer], key], 2), torch.cat([self.main.values[self.layer], value], 2)


class _stream_weights:
    """While entered, a layer's weights carry the streams' LoRA."""

    def __init__(self, decoder: Float32Decoder, layer: int, spec: StreamSpec, shape: DecoderSpec) -> None:
        self.updates = []
        for module, (a, b) in [(module, pair) for (i, module), pair in spec.lora.items() if i == layer]:
            order, found = shape.row_order(module), decoder.layer(layer).get_submodule(module)
            update = torch.as_tensor((b if order is None else b[np.argsort(order)]) @ a)
            self.updates.append((found.weight, update.T if isinstance(found, Conv1D) else update))
        self.kept: list[Tensor] = []

    def __enter__(self) -> None:
        self.kept = [weight.data for weight, _ in self.updates]
        for weight, update in self.updates:
            weight.data = weight.data + update

    def __exit__(self, *_: object) -> None:
        for (weight, _), old in zip(self.updates, self.kept, strict=True):
            weight.data = old
