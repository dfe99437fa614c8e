"""Describes a decoder by its config alone, as `decoder_spec.describe` does by the modules of transformers, of which
PyTorch is a part.

tests/export/test_without_torch.py compares the two.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamspec.adapters.base_models.config_fields import (
    activation,
    activations,
    check_config,
    layer_rotates,
    layer_window,
    read_field,
    rope_parameters,
)
from streamspec.adapters.base_models.parameters import (
    convolving_layers,
    head_norms,
    head_size,
    layer_shapes,
    map_widths,
    mixed_by,
    router_bias,
    sparse_layers,
    state_sizes,
)
from streamspec.adapters.base_models.weight_files import HEAD
from streamspec.adapters.base_models.without_torch import INSTALL
from streamspec.adapters.base_models.without_torch.families import facts_of
from streamspec.errors import BaseModelError
from streamspec.export.spec.decoder_spec import DecoderSpec, Rotary, StateSizes
from streamspec.export.spec.mixture_spec import MixtureSpec
from streamspec.export.weights.checkpoint import Checkpoint
from streamspec.export.weights.model_spec import known_tokens
from streamspec.model_families import FAMILIES, factor, switched


def describe_checkpoint(model: Checkpoint) -> DecoderSpec:
    """DecoderSpec of a base. Raises BaseModelError for anything that takes PyTorch to be described."""
    config = model.config
    check_config(config)
    family, facts = FAMILIES[config.model_type], facts_of(config.model_type)
    layers, head_dim, widths = range(config.num_hidden_layers), head_size(config), map_widths(config)
    convolving = convolving_layers(config)
    last = max(set(layers) - set(convolving))
    rotaries, rotary_of = _rotaries(config)
    ends = model.generation.get("eos_token_id")
    scaling = head_dim if facts.scaling is None else getattr(config, facts.scaling)
    root = config.hidden_size**0.5 if facts.scaled_embedding else 1.0
    return DecoderSpec(
        model_type=config.model_type,
        family=family,
        layers=len(layers),
        hidden=config.hidden_size,
        intermediate=widths.get(family.down[0], (0, 0))[1],
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        vocab=config.vocab_size,
        context_length=int(config.max_position_embeddings),
        eps=float(getattr(config, facts.eps)),
        activation=_activation(config),
        parallel=switched(config, family.parallel),
        mlp_norm=None if switched(config, family.shares_norm) else family.mlp_norm,
        head_norms=head_norms(config),
        joint_head_norms=facts.joint_head_norms,
        tied=HEAD not in model.tensors or bool(config.tie_word_embeddings),
        windows=tuple(layer_window(config, family, layer) for layer in layers),
        conv_widths=tuple(getattr(config, facts.taps) if layer in convolving else 0 for layer in layers),
        rotaries=rotaries,
        rotary_of=rotary_of,
        embedding_scale=root * factor(config, family.embedding_multiplier),
        residual_scale=factor(config, family.residual_multiplier),
        attention_scale=float(scaling**facts.power),
        attention_cap=read_field(config, "attn_logit_softcapping"),
        logit_scale=factor(config, family.logit_multiplier) / factor(config, family.logit_divisor),
        logit_cap=read_field(config, "final_logit_softcapping"),
        clip=None,
        widths=widths,
        shapes=layer_shapes(config, sparse=last in sparse_layers(config)),
        eos_token_ids=known_tokens(config.eos_token_id if ends is None else ends, config.vocab_size),
        bos_token_id=next(iter(known_tokens(config.bos_token_id, config.vocab_size)), None),
        mixture=_mixture(config),
        state=StateSizes(*state_sizes(config)) if convolving and family.recurrent else None,
    )


def _mixture(config: Any) -> MixtureSpec | None:
    """The mixtures of experts of some layers; None without any."""
    if (names := mixed_by(config)) is None:
        return None
    return MixtureSpec(
        names=names,
        layers=sparse_layers(config),
        count=getattr(config, names.count),
        active=names.chosen(config),
        width=getattr(config, names.width),
        outer=config.hidden_size,
        biased=router_bias(config) is not None,
        shared=getattr(config, facts_of(config.model_type).shared, 0),
        normalized=switched(config, names.normalized),
        scale=factor(config, names.scale),
    )


def _activation(config: Any) -> str:
    name = activations(FAMILIES[config.model_type])[activation(config)]
    if name == "gelu":
        raise BaseModelError("the activation gelu without PyTorch", "one that numpy has", INSTALL)
    return name


def _rotaries(config: Any) -> tuple[tuple[Rotary, ...], tuple[tuple[int, int] | None, ...]]:
    """The rotary frequencies, and which of them each layer has."""
    family, every = FAMILIES[config.model_type], rope_parameters(config)
    kinds = [""] if "" in every else [kind for kind in sorted(set(config.layer_types)) if every.get(kind)]
    rotaries = tuple(Rotary(_frequencies(every[kind], config), 1.0) for kind in kinds)
    of, without = [], convolving_layers(config)
    for layer in range(config.num_hidden_layers):
        kind = 0 if "" in every else kinds.index(config.layer_types[layer])
        of.append((kind, kind) if layer not in without and layer_rotates(config, family, layer) else None)
    return rotaries, tuple(of)


def _frequencies(rope: dict[str, Any], config: Any) -> NDArray[np.float32]:
    """float32 [turned / 2], where `turned` are the numbers of a head that turn, as transformers computes them but for
    the last bit of a power here and there."""
    kind = str(rope.get("rope_type"))
    part, whole = rope.get("partial_rotary_factor", 1.0), not facts_of(config.model_type).turns_in_part
    turned = int(head_size(config) * part)
    if kind not in SCALINGS or (whole and part != 1.0) or not turned:
        found = f"rotary embedding of type `{kind}`" if kind not in SCALINGS else f"a head that turns in part ({part})"
        raise BaseModelError(f"{found} without PyTorch", f"one of {', '.join(SCALINGS)}, of whole heads", INSTALL)
    share = np.arange(0, turned, 2, dtype=np.float32) / np.float32(turned)
    powers = np.power(float(np.float32(rope["rope_theta"])), share.astype(np.float64)).astype(np.float32)
    return SCALINGS[kind](np.float32(1) / powers, rope).astype(np.float32)


def _llama3(frequencies: NDArray[np.float32], rope: dict[str, Any]) -> NDArray[np.float32]:
    """Computes `_compute_llama3_parameters` of transformers, sums and products in its order."""
    low, high, original = (
        rope[name] for name in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    )
    length = np.float32(1) / frequencies * np.float32(2 * math.pi)
    scaled = np.where(length > original / low, frequencies / np.float32(rope["factor"]), frequencies)
    share = (np.float32(1) / length * np.float32(original) - np.float32(low)) / np.float32(high - low)
    between = (1 - share) * scaled / np.float32(rope["factor"]) + share * scaled
    medium = ~(length < original / high) & ~(length > original / low)
    return np.where(medium, between, scaled)


SCALINGS = {
    "default": lambda frequencies, _: frequencies,
    "linear": lambda frequencies, rope: frequencies / np.float32(rope["factor"]),
    "llama3": _llama3,
}
