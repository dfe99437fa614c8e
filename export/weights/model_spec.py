"""Describes a decoder, read off a Hugging Face causal LM: sizes, rotary frequencies, which parts exist.

The family's description (`streamspec/model_families/families.py`) says only what the modules themselves cannot tell.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from streamspec.adapters.base_models.config_fields import (
    FIXED_WITHIN,
    HEADS,
    activation,
    activations,
    check_config,
    fits,
    read_field,
)
from streamspec.adapters.base_models.parameters import head_norms, state_sizes
from streamspec.errors import BaseModelError
from streamspec.export.spec.decoder_spec import DecoderSpec, LayerSizes, Rotary, StateSizes
from streamspec.export.spec.latent_spec import LatentSizes
from streamspec.export.spec.mixture_spec import MixtureSpec
from streamspec.model_families import Family, factor, switched
from streamspec.model_families.family import RecurrentState

if TYPE_CHECKING:
    from streamspec.adapters.base_models.hf_decoder import HFDecoder


def describe(model: Any) -> DecoderSpec:
    """DecoderSpec of a loaded HF causal LM. Raises BaseModelError for anything the graph would compute wrongly."""
    from streamspec.adapters.base_models.hf_decoder import HFDecoder

    config, decoder = model.config, HFDecoder(model)
    check_config(config)
    family, layers, embedding = decoder.family, decoder.layers, decoder.embedding
    conv_widths, mlps = _conv_widths(decoder), decoder.mlps
    last = layers[decoder.last_attention]
    sizes, widths, kv_heads = _map_sizes(decoder, conv_widths)
    rotaries, rotary_of, length = _rotaries(decoder)
    head_dim, normed = widths[family.out[0]][1] // config.num_attention_heads, head_norms(config)
    spec = DecoderSpec(
        model_type=config.model_type,
        family=family,
        layers=len(layers),
        hidden=config.hidden_size,
        intermediate=widths.get(family.down[0], (0, 0))[1],
        heads=config.num_attention_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=embedding.weight.shape[0],
        context_length=length,
        eps=decoder.eps,
        activation=activations(family)[activation(config)],
        parallel=switched(config, family.parallel),
        mlp_norm=None if switched(config, family.shares_norm) else family.mlp_norm,
        head_norms=normed,
        joint_head_norms=bool(normed) and _joint(last.get_submodule(normed[0]), head_dim),
        tied=decoder.lm_head.weight is embedding.weight,
        windows=tuple(decoder.window(layer) for layer in range(len(layers))),
        conv_widths=conv_widths,
        rotaries=rotaries,
        rotary_of=rotary_of,
        embedding_scale=decoder.embedding_scale,
        residual_scale=decoder.residual_scale,
        attention_scale=float(getattr(last, family.attention).scaling),
        attention_cap=read_field(config, "attn_logit_softcapping"),
        logit_scale=decoder.logit_multiplier / decoder.logit_divisor,
        logit_cap=read_field(config, "final_logit_softcapping"),
        clip=getattr(config, family.clip) if family.clip else None,
        widths=widths,
        shapes=_shapes(last, family) | _bare_shapes(family, config.hidden_size),
        eos_token_ids=_eos(model),
        bos_token_id=next(iter(known_tokens(config.bos_token_id, embedding.weight.shape[0])), None),
        sizes=sizes,
        kv_sources=decoder.kv_sources if sizes else (),
        state=StateSizes(*state_sizes(config)) if any(conv_widths) and family.recurrent else None,
        both=tuple(range(len(layers))) if family.conv_beside else (),
        no_attention=mlps,
        no_mlp=tuple(layer for layer in range(len(layers)) if layer not in mlps) if family.halved else (),
        mixture=_mixture(decoder),
    )
    if family.recurrent is not None:
        spec = _with_steps(spec, decoder, family.recurrent)
    if latent := _latent(decoder):
        spec = replace(spec, latent=latent, kv_heads=1, head_dim=latent.width)
    if decoder.per_layer:
        spec = replace(spec, per_layer_width=decoder.per_layer.width, per_layer_scales=decoder.per_layer.scales)
    spec = replace(spec, map_scales=_map_scales(spec, config))
    attending = (layer for i, layer in enumerate(layers) if spec.attends(i))
    _check(spec, [getattr(getattr(layer, family.attention), "scaling", None) for layer in attending])
    return spec


def _conv_widths(decoder: HFDecoder) -> tuple[int, ...]:
    """Counts the rows that each layer's short convolution mixes, 0 where it has attention. Raises BaseModelError where
    none has."""
    convolutions = (decoder.conv(layer) for layer in range(len(decoder.layers)))
    recurrent = decoder.family.recurrent
    name = recurrent.taps if recurrent else "conv"
    conv_widths = tuple(0 if conv is None else getattr(conv, name).weight.shape[-1] for conv in convolutions)
    if all(conv_widths) and not decoder.family.conv_beside:
        raise BaseModelError("a model without attention", "one with at least a layer of it", "export another base")
    return conv_widths


def _map_scales(spec: DecoderSpec, config: Any) -> dict[str, tuple[NDArray[np.float32], NDArray[np.float32]]]:
    """What weights and biases of linear maps are multiplied by (`DecoderSpec.map_scales`), those that are not 1."""
    scales = {}
    for module, names in spec.family.map_multipliers.items():
        given, rows = getattr(config, names.outputs, None), np.ones(spec.out_width(module), np.float32)
        if isinstance(given, (list, tuple)) and spec.state is not None:
            state = spec.state
            parts = state.values, state.values, state.keys, state.keys, state.heads
            rows = np.repeat(np.asarray(given, np.float32), parts)
        else:
            rows *= np.float32(factor(config, names.outputs))
        inputs = np.float32(factor(config, names.inputs))
        if inputs != 1 or (rows != 1).any():
            scales[module] = rows * inputs, rows
    return scales


def _latent(decoder: HFDecoder) -> LatentSizes | None:
    """Sizes of the states that layers attend to, where they do."""
    names, config = decoder.family.latent_attention, decoder.model.config
    if names is None:
        return None
    rank, turned, still, values = (int(getattr(config, name)) for name in names.sizes)
    norm: Any = decoder.layers[0].get_submodule(names.norm)
    return LatentSizes(rank, turned, still, values, float(norm.variance_epsilon))


def _with_steps(spec: DecoderSpec, decoder: HFDecoder, names: RecurrentState) -> DecoderSpec:
    """The spec with what bounds the steps of recurrent states, and the norm of what they return."""
    config, convolutions = decoder.model.config, (decoder.conv(layer) for layer in range(len(decoder.layers)))
    limits = next((found for conv in convolutions if (found := getattr(conv, "time_step_limit", None))), None)
    least, most = limits or (0.0, inf)
    normed = names.normed is None or switched(config, names.normed)
    return replace(
        spec,
        step_limits=(float(least), float(most)),
        largest_step=2.0 if switched(config, names.doubled) else 1.0,
        state_norm=normed,
        norm_first=normed and switched(config, names.norm_first),
    )


def _map_sizes(
    decoder: HFDecoder, conv_widths: tuple[int, ...]
) -> tuple[tuple[LayerSizes, ...], dict[str, tuple[int, int]], int]:
    """The sizes of each layer where they differ, those of the linear maps of one with attention or a convolution, and
    its number of key/value heads."""
    family, config, layers, last = decoder.family, decoder.model.config, decoder.layers, decoder.last_attention
    heads = config.num_attention_heads
    sizes = tuple(_sizes(layer, family, heads) for layer in layers) if family.shared_kv is not None else ()
    widths = dict((sizes[last] if sizes else _sizes(layers[last], family, heads)).widths)
    if family.mixture is not None or family.halved:
        widths = _mlp_widths(layers, family) | widths
    if any(conv_widths):
        convolving = layers[conv_widths.index(max(conv_widths))]
        widths |= {name: _widths(convolving.get_submodule(name)) for name in (*family.conv_in, *family.conv_out)}
    kv_heads = sizes[last].kv_heads if sizes else read_field(config, "num_key_value_heads") or heads
    return sizes, widths, kv_heads


def _sizes(layer: Any, family: Family, heads: int) -> LayerSizes:
    """Sizes of a layer with attention, of the linear maps that it has."""
    names = family.per_layer_input
    known = dict(layer.named_modules())
    latent = family.latent_attention
    maps = (*family.qkv, *family.out, *family.up, *family.down, *((names.gate, names.up) if names else ()))
    maps += (latent.queries,) if latent else ()
    widths = {name: _widths(known[name]) for name in maps if name in known}
    groups = getattr(getattr(layer, family.attention), "num_key_value_groups", 1)
    inner = widths.get(family.down[0], (0, 0))[1]  # none of a mixture of experts
    return LayerSizes(heads // groups, widths[family.out[0]][1] // heads, inner, widths)


def _mixture(decoder: HFDecoder) -> MixtureSpec | None:
    """The mixtures of experts of some layers, which are of one size; None without any."""
    from streamspec.adapters.base_models.experts import experts_of

    names, config = decoder.family.mixture, decoder.model.config
    found = {} if names is None else {i: experts_of(layer, names.experts) for i, layer in enumerate(decoder.layers)}
    numbers = tuple(number for number, experts in found.items() if experts is not None)
    if names is None or not numbers:
        return None
    layer, experts = decoder.layers[numbers[0]], found[numbers[0]]
    count, *sides = experts.down_proj.shape
    outer, width = reversed(sides) if getattr(experts, "is_transposed", False) else sides
    holder, _, bias = (names.bias or "").rpartition(".")
    widths = _mlp_widths([layer], decoder.family)
    return MixtureSpec(
        names=names,
        layers=numbers,
        count=count,
        active=names.chosen(config),
        width=width,
        outer=outer,
        gated=decoder.family.gated,
        groups=_expert_groups(config, names.groups),
        biased=bool(bias) and hasattr(layer.get_submodule(holder), bias),
        latent=bool(names.latent_maps) and names.latent_maps[0] in widths,
        shared=widths[names.shared[1][0]][1] if names.shared[1] and names.shared[1][0] in widths else 0,
        clamp=names.clamp and (float(experts.alpha), float(experts.limit)),
        normalized=switched(config, names.normalized),
        least=factor(config, names.least) if names.least else 0.0,
        scale=factor(config, names.scale),
    )


def _expert_groups(config: Any, names: tuple[str, str] | None) -> tuple[int, int] | None:
    """How many groups the experts lie in, and how many of them are chosen; None where all are."""
    count, chosen = (int(getattr(config, name)) for name in names) if names else (1, 1)
    return (count, chosen) if count > chosen else None


def _mlp_widths(layers: Iterable[Any], family: Family) -> dict[str, tuple[int, int]]:
    """(out, in) of the maps that all rows run through in the MLP's place, of the layers that have such."""
    mixture = family.mixture
    groups = family.up, family.down, *((*mixture.shared, mixture.latent_maps) if mixture else ())
    names = {name for group in groups for name in group}
    known = [(name, module) for layer in layers for name, module in layer.named_modules() if name in names]
    return {name: _widths(module) for name, module in known if hasattr(module, "weight")}


def _shapes(layer: Any, family: Family) -> dict[str, tuple[int, ...]]:
    """The shapes of a layer with attention, without a convolution beside it."""
    shapes = {}
    for name, value in layer.named_parameters():
        module, _, kind = name.rpartition(".")
        if "lora_" in name or (family.conv_beside and name.startswith(f"{family.conv}.")):
            continue
        shape = _widths(layer.get_submodule(module)) if value.ndim == 2 and kind == "weight" else tuple(value.shape)
        shapes[f"{module.removesuffix('.base_layer')}.{kind}"] = shape
    return shapes


def _bare_shapes(family: Family, hidden: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the weights that draft layers learn where the target's norms have none."""
    norms = family.attention_norm, family.mlp_norm, family.attention_out_norm, family.mlp_out_norm
    return {f"{norm}.weight": (hidden,) for norm in norms if norm and family.bare_norms}


def _widths(module: Any) -> tuple[int, int]:
    from transformers.pytorch_utils import Conv1D

    out, into = module.weight.shape
    base = module.get_base_layer() if hasattr(module, "get_base_layer") else module  # below a LoRA
    return (into, out) if isinstance(base, Conv1D) else (out, into)


def _joint(norm: Any, head_dim: int) -> bool:
    """Whether a norm of queries is over all heads together."""
    weight = getattr(norm, "weight", None)
    return weight is not None and weight.ndim == 1 and len(weight) > head_dim


def _rotaries(decoder: HFDecoder) -> tuple[tuple[Rotary, ...], tuple[tuple[int, int] | None, ...], int]:
    """The frequencies in use, which of them each layer has, and up to which length they hold."""
    config, layers, kinds = decoder.model.config, range(len(decoder.layers)), decoder.rotary_kinds()
    length = int(config.max_position_embeddings)
    if not kinds:
        return (), (None,) * len(layers), length
    rotaries = []
    for layer_kind, (module, prefix, rope) in kinds.items():
        if rope in FIXED_WITHIN:
            parameters = config.rope_parameters[layer_kind] if prefix else config.rope_parameters
            length = min(length, int(parameters.get("original_max_position_embeddings") or length))
        rotaries.append(
            Rotary(
                getattr(module, f"{prefix}original_inv_freq").detach().float().cpu().numpy(),
                float(getattr(module, f"{prefix}attention_scaling")),
            )
        )
    grown = 0
    if decoder.family.query_growth is not None:
        names = decoder.family.query_growth, "original_max_position_embeddings"
        beta, original = (config.rope_parameters[name] for name in names)
        grown = len(rotaries)
        rotaries += [replace(kind, growth=(float(beta), int(original))) for kind in rotaries]
    of = (list(kinds).index(kind) if (kind := decoder.rotary_kind(layer)) in kinds else 0 for layer in layers)
    pairs = tuple((kind + grown, kind) if decoder.rotates(i) else None for i, kind in enumerate(of))
    return tuple(rotaries), pairs, length


def _eos(model: Any) -> tuple[int, ...]:
    """End tokens: those of the generation config, which often names more than the model's own."""
    generation = getattr(model, "generation_config", None)
    value = getattr(generation, "eos_token_id", None)
    if value is None:
        value = model.config.eos_token_id
    return known_tokens(value, model.get_input_embeddings().weight.shape[0])


def known_tokens(tokens: int | list[int] | None, rows: int) -> tuple[int, ...]:
    """Keeps the tokens that an embedding of so many rows has; `check_folder` has reported the others."""
    listed = tokens if isinstance(tokens, (list, tuple)) else [] if tokens is None else [tokens]
    return tuple(int(token) for token in listed if 0 <= token < rows)


def _check(spec: DecoderSpec, scales: list[float | None]) -> None:
    turned = enumerate(spec.rotary_of)
    of_layers = {(spec.at(layer).head_dim, spec.rotated(kinds[0]) if kinds else 0) for layer, kinds in turned}
    for head_dim, rotated in sorted(of_layers):
        if not fits(head_dim) or rotated > head_dim:
            raise BaseModelError(
                f"heads of {head_dim} with {rotated} rotated",
                f"{HEADS}, no more rotated than they hold",
                "choose another base",
            )
    if any(kind.growth for kind in spec.rotaries) and spec.rotated(0) < spec.head_dim:
        raise BaseModelError(
            f"queries that grow, {spec.rotated(0)} of {spec.head_dim} numbers rotated",
            "all rotated",
            "export another base",
        )
    if any(scale != scales[0] for scale in scales):
        raise BaseModelError("attention that is scaled otherwise in each layer", "one scale", "choose another base")
