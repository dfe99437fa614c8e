"""An EAGLE-3 head that was trained here, read from an adapter."""

from __future__ import annotations

from typing import Any

import numpy as np

from streamspec.bundle.adapter_folder import STREAM_CONFIG
from streamspec.export.drafters.adapter_section import AdapterSection, Shapes
from streamspec.export.drafters.eagle3.head import Eagle3Spec, head_shapes
from streamspec.export.drafters.eagle3.head_config import LAYER_FIELDS, LAYERS, HeadConfig, layer_config
from streamspec.export.ops.builder import Array


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
    return {name: shape for name, shape in own.items() if name not in ("lm_head.weight", "d2t")}


def read(section: AdapterSection, tensors: dict[str, Array], shared: dict[str, Any]) -> Eagle3Spec:
    """Reads the head from tensors that have the `shapes`."""
    config = _config(section)
    own = {name: one.astype(np.float32) for name, one in tensors.items() if name != "draft_vocab"}
    return Eagle3Spec(**shared, head=config, entries=config.taps, tensors=own)
