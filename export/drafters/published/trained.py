"""A block drafter in the published form that was trained here (`--method dspark`): its tensors in an adapter, by their
names in speculators' format.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from streamspec.bundle.adapter_folder import STREAM_CONFIG
from streamspec.export.drafters.adapter_section import AdapterSection, Shapes
from streamspec.export.drafters.eagle3.spec import HEAD
from streamspec.export.drafters.layer_config import layer_config
from streamspec.export.drafters.published.block_config import STACK_FIELDS, BlockHeadConfig
from streamspec.export.drafters.published.spec import PublishedBlockSpec, block_shapes
from streamspec.export.ops.builder import Array


def config_of(section: AdapterSection) -> BlockHeadConfig:
    """The drafter that a section describes. Raises AdapterError for one that cannot be, or is not of the base."""
    config, spec, file = section.config, section.spec, section.adapter.path / STREAM_CONFIG
    count, taps, layer = section.whole("block_layers", 1, spec.layers), section.taps(), config.get("layer")
    if not isinstance(layer, dict) or layer.get("model_type") != "qwen3" or set(layer) - STACK_FIELDS:
        raise section.refused(f"streams.layer is {str(layer)[:80]}", "the configuration of layers of qwen3")
    own = layer_config(file, dict(layer))
    sizes = own.hidden_size, own.vocab_size, len(own.layer_types)
    if sizes != (spec.hidden, spec.vocab, count):
        raise section.refused(f"streams.layer has the sizes {sizes}", f"{(spec.hidden, spec.vocab, count)}")
    mask_token = section.whole("mask_token", 0, spec.vocab - 1)
    return BlockHeadConfig(
        layer=own,
        layers=count,
        draft_vocab=section.proposable or spec.vocab,
        gamma=section.gamma,
        taps=tuple(spec.layers - tap for tap in taps),
        mask_token=mask_token,
        target_layers=0,
        target=None,
        from_anchor=True,
        rank=0,
        confidence=0,
        windows=(None,) * count,
        causal=(False,) * count,
        anchored=True,
        finished=False,
    )


def shapes(section: AdapterSection) -> Shapes:
    """Shapes of the tensors that a configuration names. Raises AdapterError for one that cannot be."""
    return _own_shapes(config_of(section))


def _own_shapes(config: BlockHeadConfig) -> Shapes:
    own = block_shapes(config, set())
    return {name: shape for name, shape in own.items() if name not in (HEAD, "d2t")}  # the target's


def read(section: AdapterSection, tensors: dict[str, Array], shared: dict[str, Any]) -> PublishedBlockSpec:
    """Reads the drafter from tensors that have the `shapes`."""
    config, spec = config_of(section), section.spec
    keys = config.layer.num_key_value_heads, config.layer.head_dim
    if (pair := shared["bigram"]) is not None:  # of the token before a row for every token, zero where none is learnt
        before, chosen = np.zeros((spec.vocab, pair[0].shape[1]), np.float32), shared["draft_vocab"]
        before[slice(None) if chosen is None else chosen] = pair[0]
        shared = shared | {"bigram": (before, np.asarray(pair[1], np.float32))}
    return PublishedBlockSpec(
        **shared,
        own_keys=(0, 0) if keys == (spec.kv_heads, spec.head_dim) else keys,
        block=config,
        block_layers=config.layers,
        entries=config.taps,
        tensors={name: tensors[name].astype(np.float32) for name in _own_shapes(config)},
    )
