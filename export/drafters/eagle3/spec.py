"""An EAGLE-3 head (arXiv 2503.01840): its description, and its tensors in an adapter. Its nodes are in `draft_pass`;
`published` reads the heads of others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from streamspec.bundle.adapter_folder import STREAM_CONFIG
from streamspec.export.drafters.adapter_section import AdapterSection, Shapes
from streamspec.export.drafters.draft_layer.spec import DraftLayerSpec
from streamspec.export.drafters.layer_config import LAYER_FIELDS, layer_config, layer_decoder, layer_shapes
from streamspec.export.ops.builder import Array
from streamspec.export.spec.decoder_spec import DecoderSpec
from streamspec.model_families import FAMILIES

LAYERS = ("llama", "qwen3")  # families of the head's decoder layer


@dataclass(frozen=True)
class HeadConfig:
    """The configuration of a published head.

    `layer`: the configuration of its decoder layer, of transformers. `taps`: layers of the target whose inputs it
    reads; empty: the default ones. `gamma`: tokens that it drafts. `target`: the model it names, None for none.
    `norm_*` and `fc_norm` as in speculators: norms before the residual stream, before `fc` over all taps or over each,
    and of the state that goes on.
    """

    layer: Any
    draft_vocab: int
    target_hidden: int
    gamma: int
    taps: tuple[int, ...]
    target: str | None
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool

    def tapped(self, layers: int) -> tuple[int, ...]:
        """The layers whose inputs it reads in a target of so many layers."""
        return self.taps or (2, layers // 2, layers - 3)


LAYER, NORM = "layers.0.", "eagle3.norm"
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True, kw_only=True)
class Eagle3Spec(DraftLayerSpec):
    """A published head. `entries`: the layers of the target whose inputs it reads; `tensors`: by their names in
    speculators' format."""

    head: HeadConfig
    entries: tuple[int, ...]
    taps: tuple[int, ...] = ()

    def tapped(self, layers: int) -> tuple[int, ...]:
        """The layers whose inputs the head reads."""
        return self.entries

    def decoder(self, cache_dtype: str) -> DecoderSpec:
        """The head's layer as a decoder of one layer, whose first maps read a pair of states."""
        return layer_decoder(self.head.layer, cache_dtype, 2 * self.head.layer.hidden_size)


def head_shapes(config: HeadConfig, taps: int, own_embedding: bool, found: set[str]) -> Shapes:
    """Shapes of the tensors that a configuration names; of those that may be there or not as they were `found`."""
    layer, family, hidden = config.layer, FAMILIES[config.layer.model_type], config.layer.hidden_size
    shapes: Shapes = {"fc.weight": (hidden, taps * config.target_hidden), "norm.weight": (hidden,)}
    shapes |= {HEAD: (config.draft_vocab, hidden), f"{LAYER}hidden_norm.weight": (hidden,)}
    shapes |= {f"{LAYER}{name}": shape for name, shape in layer_shapes(layer, 2 * hidden).items()}
    biased = [*family.qkv] if getattr(layer, "attention_bias", False) else []
    if biased and f"{LAYER}{family.out[0]}.bias" in found:
        biased += family.out
    if getattr(layer, "mlp_bias", False):
        biased += [*family.up, *family.down]
    shapes |= {f"{LAYER}{name}.bias": shapes[f"{LAYER}{name}.weight"][:1] for name in biased}
    if own_embedding:
        shapes[EMBEDDING] = layer.vocab_size, hidden
    if config.norm_before_fc:
        shapes["input_norm.weight"] = (taps * config.target_hidden,)
    if config.fc_norm:
        shapes |= {f"fc_norm.{tap}.weight": (config.target_hidden,) for tap in range(taps)}
    if config.draft_vocab != layer.vocab_size or "d2t" in found:
        shapes["d2t"] = (config.draft_vocab,)
    if "t2d" in found:
        shapes["t2d"] = (layer.vocab_size,)
    return shapes


def _config(section: AdapterSection) -> HeadConfig:
    """The head that a section describes. Raises AdapterError for one that cannot be, or is not of the base."""
    config, spec = section.config, section.spec
    layer, taps, file = config.get("layer"), section.taps(), section.adapter.path / STREAM_CONFIG
    if not isinstance(layer, dict) or layer.get("model_type") not in LAYERS or set(layer) - LAYER_FIELDS:
        raise section.refused(f"streams.layer is {str(layer)[:80]}", f"the configuration of a layer of {LAYERS}")
    own = layer_config(file, dict(layer))
    sizes = own.hidden_size, own.vocab_size, own.num_key_value_heads, own.head_dim
    if sizes != (spec.hidden, spec.vocab, spec.kv_heads, spec.head_dim):
        raise section.refused(f"streams.layer has the sizes {sizes}", "those of the base")
    entries = tuple(spec.layers - tap for tap in taps)
    draft_vocab = section.proposable or spec.vocab
    return HeadConfig(own, draft_vocab, spec.hidden, section.gamma, entries, None, False, False, False, False)


def shapes(section: AdapterSection) -> Shapes:
    """Shapes of the tensors that a configuration names. Raises AdapterError for one that cannot be."""
    config = _config(section)
    if section.config.get("bigram"):
        raise section.refused("an EAGLE-3 head with a bigram", "none: its candidates know the token before")
    own = head_shapes(config, len(config.taps), False, set(section.config.get("biases") or ()))
    return {name: shape for name, shape in own.items() if name not in (HEAD, "d2t")}


def read(section: AdapterSection, tensors: dict[str, Array], shared: dict[str, Any]) -> Eagle3Spec:
    """Reads the head from tensors that have the `shapes`."""
    config = _config(section)
    own = {name: tensor.astype(np.float32) for name, tensor in tensors.items() if name != "draft_vocab"}
    return Eagle3Spec(**shared, head=config, entries=config.taps, tensors=own)
