"""Deferred speculative streams in PyTorch, to compare the graph with: `adapters/drafters/streams/model.py` beside one
row.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from streamspec.bundle.adapter_folder import rotation_angle
from streamspec.export.drafters.streams.spec import StreamSpec
from streamspec.export.ops.builder import Array
from streamspec.export.reference.draft_reference import ParallelReference
from streamspec.export.reference.pytorch_reference import ReferenceOutput, add_update
from streamspec.export.spec.decoder_spec import DecoderSpec
from streamspec.export.weights.lazy_weights import Float32Decoder
from streamspec.export.weights.model_spec import describe


class StreamReference(ParallelReference):
    """Streams that see the main rows which their row sees."""

    spec: StreamSpec

    @torch.no_grad()
    def logits(self, main: ReferenceOutput, positions: Array, sees: Array, row: int, root: int) -> Tensor:
        """Runs the streams of `row` through the last layers: [gamma, V]."""
        spec, model, decoder = self.spec, self.model, self.model.decoder
        shift = torch.as_tensor(spec.embeddings)
        shares = torch.ones(spec.gamma, 2) if spec.shares is None else torch.as_tensor(spec.shares)
        if spec.root_map is not None:
            embedded = decoder.embed(torch.tensor([root]))
            unit = embedded * torch.rsqrt(embedded.pow(2).mean(-1, keepdim=True) + 1e-12)
            shift = shift + shares[:, 1:] * (unit @ torch.as_tensor(spec.root_map).T)
        entry = main.entry[:, row : row + 1]
        if spec.moved is not None:
            down, up = map(torch.as_tensor, spec.moved)
            entry = entry + entry @ down.T @ up.T
        hidden = shares[:, :1] * entry + spec.scale * shift[None]
        steps = torch.arange(1, spec.gamma + 1) if spec.shifted else torch.zeros(spec.gamma, dtype=torch.long)
        where = int(positions[row]) + steps
        rotary = decoder.rotary_embeddings(hidden, where[None])
        seen = torch.cat(
            [torch.as_tensor(sees)[row].expand(spec.gamma, -1), torch.ones(spec.gamma, spec.gamma).tril().bool()], 1
        )
        columns = torch.cat([torch.as_tensor(positions), where])
        shape, below = describe(model.model), decoder.kept_below(model.first)
        angles = torch.arange(1, spec.gamma + 1) * (rotation_angle(spec.gamma) if spec.value_rotation else 0.0)
        cache = _Append(main, {}, angles)
        for layer in below:
            cache.shared[model.model.config.layer_types[layer]] = main.keys[layer], main.values[layer]
        for layer in range(model.first, model.layers):
            mask = model.mask(seen, where, columns, decoder.window(layer))
            mask = mask[..., : len(positions)] if layer in below else mask
            with _stream_weights(decoder, layer, spec, shape):
                hidden = decoder.call_layer(layer, hidden, mask, where[None], rotary, cache)
        logits: Tensor = decoder.logits(decoder.finish(hidden))[0]
        return logits


@dataclass
class _Append:
    """A cache holding the main rows' K/V, to which stream rows append theirs. `shared`: by kind of layer, those that
    others attend to; `angles` [gamma]: by which values are turned."""

    main: ReferenceOutput
    shared: dict[str, tuple[Tensor, Tensor]]
    angles: Tensor

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Returns the main rows' K/V of `layer` followed by those of the stream rows."""
        half, cos, sin = value.shape[-1] // 2, self.angles.cos()[:, None], self.angles.sin()[:, None]
        real, imaginary = value[..., :half], value[..., half:]
        turned = torch.cat([real * cos - imaginary * sin, real * sin + imaginary * cos], dim=-1)
        return torch.cat([self.main.keys[layer], key], 2), torch.cat([self.main.values[layer], turned], 2)


@contextmanager
def _stream_weights(decoder: Float32Decoder, layer: int, spec: StreamSpec, shape: DecoderSpec) -> Iterator[None]:
    """While entered, a layer's weights carry the streams' LoRA."""
    kept = []
    try:
        for module, (a, b) in [(module, pair) for (i, module), pair in spec.lora.items() if i == layer]:
            linear = decoder.layer(layer).get_submodule(module)
            kept.append((linear.weight, linear.weight.data))
            add_update(linear, shape.from_graph(module, b) @ a)
        yield
    finally:
        for weight, old in kept:
            weight.data = old
