"""Describes a decoder, read off a Hugging Face causal LM: sizes, rotary frequencies, which parts exist.

The family's description (`streamspec/model_families/families.py`) says only what the modules themselves cannot tell.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

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
from streamspec.errors import BaseModelError
from streamspec.layer_cache import DTYPES, LayerCache, layer_caches
from streamspec.model_families import Family, switched

if TYPE_CHECKING:
    from streamspec.adapters.base_models.hf_decoder import HFDecoder


@dataclass(frozen=True)
class Rotary:
    """`inv_freq` [rotated / 2], from HF's own rotary embedding; cos and sin are multiplied by `scale` (HF's
    attention_scaling), and by 1 + beta * log(1 + floor(position / length)) where there is a `growth` (beta, length).
    """

    inv_freq: NDArray[np.float32]
    scale: float
    growth: tuple[float, int] | None = None


class Skipped(NamedTuple):
    """Rising numbers of layers that a short graph leaves out, and of those whose attention or whose MLP it does."""

    layers: tuple[int, ...] = ()
    attention: tuple[int, ...] = ()
    mlps: tuple[int, ...] = ()


NOTHING_SKIPPED = Skipped()


@dataclass(frozen=True)
class LayerSizes:
    """Sizes of one of layers that differ; fields as in `DecoderSpec`."""

    kv_heads: int
    head_dim: int
    intermediate: int
    widths: Mapping[str, tuple[int, int]]


@dataclass(frozen=True)
class DecoderSpec:
    """One decoder. Weight names are Hugging Face's (`weight_name`). Where layers differ (`sizes`), sizes are those of
    the last layer with keys of its own, which draft layers are like; `at` has those of another."""

    model_type: str
    family: Family
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context_length: int
    eps: float
    activation: str  # silu, gelu, gelu_tanh, relu, relu2 or xielu
    parallel: bool
    mlp_norm: str | None  # None: no norm of its own
    head_norms: tuple[str, ...]
    joint_head_norms: bool  # over all heads together
    tied: bool
    windows: tuple[int | None, ...]  # per layer: how many positions back a row may look, itself included; None: all
    taps: tuple[int, ...]  # per layer: rows that a short convolution in place of attention mixes, 0: attention
    rotaries: tuple[Rotary, ...]
    rotary_of: tuple[tuple[int, int] | None, ...]  # per layer: which of them turns queries, which keys; None: none
    embedding_scale: float
    residual_scale: float  # of what a half of a layer adds
    attention_scale: float
    attention_cap: float | None  # scores and logits are cap * tanh(x / cap)
    logit_scale: float
    logit_cap: float | None
    clip: float | None  # of queries, keys and values: no number of them is larger
    widths: Mapping[str, tuple[int, int]]  # (out, in) of a layer's linear maps
    shapes: Mapping[str, tuple[int, ...]]  # of the parameters of the last layer with attention, linear maps [out, in]
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    cache_dtype: str = DTYPES[0]  # of stored keys and values
    sizes: tuple[LayerSizes, ...] = ()  # per layer; empty: all are alike
    kv_sources: tuple[int, ...] = ()  # per layer: the one whose keys and values it attends to; empty: each its own
    numbers: tuple[int, ...] = ()  # per layer: in the names of its weights; empty: its own, from 0 on
    no_attention: tuple[int, ...] = ()  # layers of a short graph that are their MLP alone
    no_mlp: tuple[int, ...] = ()  # and those that are their attention alone
    per_layer_width: int = 0  # of each layer's own input for a token, 0 where there is none
    per_layer_scales: tuple[float, float, float] = (1.0, 1.0, 1.0)  # of its table, of its map, of their sum

    @property
    def caches(self) -> tuple[LayerCache, ...]:
        """What each layer keeps of the tokens before; empty: everything, in float32."""
        own = [(one.kv_heads, one.head_dim) for one in self.sizes]
        sizes = [(0, 0) if size == (self.kv_heads, self.head_dim) else size for size in own]
        windows, context, sources = self.windows, self.context_length, self.kv_sources
        return layer_caches(windows, context, self.cache_dtype, self.taps, sizes, sources, self.no_attention)

    def at(self, layer: int) -> DecoderSpec:
        """The same with the sizes of a layer, for what is written within it."""
        return replace(self, **vars(self.sizes[layer])) if layer < len(self.sizes) else self

    def source(self, layer: int) -> int:
        """The layer whose keys and values a layer attends to, mostly itself."""
        return self.kv_sources[layer] if layer < len(self.kv_sources) else layer

    def kept_below(self, first: int) -> list[int]:
        """The layers from `first` on that attend to what one below `first` keeps."""
        return [layer for layer in range(first, self.layers) if self.source(layer) < first]

    def ring(self, layer: int) -> int | None:
        """The window of a layer whose keys are kept for no more than that; None where everything is, as of a draft
        layer."""
        return self.caches[self.source(layer)].window if layer < len(self.caches) else None

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.heads // self.kv_heads

    def modules(self, layer: int, streams: bool = False) -> tuple[str, ...]:
        """Linear maps of a layer, of `streams` those that their rows run through."""
        return tuple(module for group in self.fused(layer, streams) for module in group)

    def fused(self, layer: int, streams: bool = False) -> tuple[tuple[str, ...], ...]:
        """The modules in the groups that are computed as one map."""
        names = self.family.per_layer_input
        per_layer = ((names.gate,), (names.up,)) if names and self.per_layer_width and not streams else ()
        return *self.mixer(layer), self.family.up, self.family.down, *per_layer

    def sensitive(self, modules: Sequence[str]) -> bool:
        """Whether int4 keeps 8 bits of the fused maps `modules`."""
        return tuple(modules) == self.family.qkv

    def mixer(self, layer: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The maps before and after a layer's attention or convolution; a layer after the last has attention."""
        family = self.family
        if any(self.taps[layer : layer + 1]):
            return family.conv_in, family.conv_out
        widths = self.at(layer).widths
        return tuple(name for name in family.qkv if name in widths), family.out

    @property
    def last_attention(self) -> int:
        """The last layer that attends to keys of its own; draft layers are like it."""
        return max(layer for layer, count in enumerate(self.taps) if not count and self.source(layer) == layer)

    def rotated(self, kind: int) -> int:
        """Leading numbers of each head that a kind of rotary embedding turns."""
        return 2 * len(self.rotaries[kind].inv_freq)

    def weight_name(self, layer: int, module: str) -> str:
        """`module` as in HF: `self_attn.q_proj`, `mlp.up_proj`, `input_layernorm`, ..."""
        number = self.numbers[layer] if self.numbers else layer
        return f"{self.stacked(self.family.layers)}.{number}.{module}"

    def without(self, skipped: Skipped) -> DecoderSpec:
        """The same without some of its layers or halves of them, which share nothing with the others, over the same
        weights."""
        kept = tuple(layer for layer in range(self.layers) if layer not in skipped.layers)
        return replace(
            self,
            layers=len(kept),
            numbers=kept,
            no_attention=tuple(i for i, layer in enumerate(kept) if layer in skipped.attention),
            no_mlp=tuple(i for i, layer in enumerate(kept) if layer in skipped.mlps),
            windows=tuple(self.windows[layer] for layer in kept),
            taps=tuple(self.taps[layer] for layer in kept),
            rotary_of=tuple(self.rotary_of[layer] for layer in kept),
        )

    def fused_name(self, layer: int, modules: tuple[str, ...]) -> str:
        """The name of linear maps of a layer fused to one."""
        return self.weight_name(layer, "+".join([modules[0], *(module.split(".")[-1] for module in modules[1:])]))

    def stacked(self, module: str) -> str:
        """Name of a module beside the layers."""
        return f"{self.family.stack}.{module}"

    def out_width(self, module: str) -> int:
        """Output size of a linear map of a layer."""
        return self.widths[module][0]

    def in_width(self, module: str) -> int:
        """Input size of a linear map of a layer."""
        return self.widths[module][1]

    def row_order(self, module: str) -> NDArray[np.int64] | None:
        """Indices of a linear map's outputs in HF's order, in the order of the graph (all queries, all keys, all
        values); None where it is the same.
        """
        if not (self.family.interleaved and module in self.family.qkv):
            return None
        return np.arange(self.out_width(module)).reshape(self.heads, 3, self.head_dim).swapaxes(0, 1).reshape(-1)

    def in_graph(self, name: str, array: NDArray[Any]) -> NDArray[Any]:
        """A weight or bias of a layer's `module` ("self_attn.q_proj.weight", linear maps [out, in]) or of another norm
        as the graph has it: rows in its order, norms with the one that is added.
        """
        module = name.rpartition(".")[0]
        if array.ndim == 1 and self.family.one_added and name.endswith(".weight"):
            return array + 1
        order = self.row_order(module) if module in self.widths else None
        return array if order is None else array[order]


def describe(model: Any) -> DecoderSpec:
    """DecoderSpec of a loaded HF causal LM. Raises BaseModelError for anything the graph would compute wrongly."""
    from streamspec.adapters.base_models.hf_decoder import HFDecoder

    config, decoder = model.config, HFDecoder(model)
    check_config(config)
    family, layers, embedding = decoder.family, decoder.layers, decoder.embedding
    taps = tuple(0 if (conv := decoder.conv(i)) is None else conv.conv.weight.shape[-1] for i in range(len(layers)))
    attending = [layer for layer, count in zip(layers, taps, strict=True) if not count]
    if not attending:
        raise BaseModelError("a model without attention", "one with at least a layer of it", "export another base")
    last = layers[decoder.last_attention]
    attention = getattr(last, family.attention)
    heads, differ = config.num_attention_heads, family.shared_kv is not None
    sizes = tuple(_sizes(layer, family, heads) for layer in layers) if differ else ()
    widths = dict((sizes[decoder.last_attention] if sizes else _sizes(last, family, heads)).widths)
    if any(taps):
        convolving = layers[taps.index(max(taps))]
        widths |= {name: _widths(convolving.get_submodule(name)) for name in (*family.conv_in, *family.conv_out)}
    rotaries, rotary_of, length = _rotaries(decoder)
    normed = not family.head_norm_switch or switched(config, family.head_norm_switch)
    head_dim, head_norms = widths[family.out[0]][1] // heads, family.head_norms if normed else ()
    spec = DecoderSpec(
        model_type=config.model_type,
        family=family,
        layers=len(layers),
        hidden=config.hidden_size,
        intermediate=widths[family.down[0]][1],
        heads=heads,
        kv_heads=sizes[decoder.last_attention].kv_heads
        if sizes
        else read_field(config, "num_key_value_heads") or heads,
        head_dim=head_dim,
        vocab=embedding.weight.shape[0],
        context_length=length,
        eps=decoder.eps,
        activation=activations(family)[activation(config)],
        parallel=switched(config, family.parallel),
        mlp_norm=None if switched(config, family.shares_norm) else family.mlp_norm,
        head_norms=head_norms,
        joint_head_norms=bool(head_norms) and _joint(last.get_submodule(head_norms[0]), head_dim),
        tied=decoder.lm_head.weight is embedding.weight,
        windows=tuple(decoder.window(layer) for layer in range(len(layers))),
        taps=taps,
        rotaries=rotaries,
        rotary_of=rotary_of,
        embedding_scale=decoder.embedding_scale,
        residual_scale=decoder.residual_scale,
        attention_scale=float(attention.scaling),
        attention_cap=read_field(config, "attn_logit_softcapping"),
        logit_scale=decoder.logit_multiplier / decoder.logit_divisor,
        logit_cap=read_field(config, "final_logit_softcapping"),
        clip=getattr(config, family.clip) if family.clip else None,
        widths=widths,
        shapes=_shapes(last) | _bare_shapes(family, config.hidden_size),
        eos_token_ids=_eos(model),
        bos_token_id=next(iter(known_tokens(config.bos_token_id, embedding.weight.shape[0])), None),
        sizes=sizes,
        kv_sources=decoder.kv_sources if differ else (),
        per_layer_width=decoder.per_layer.width if decoder.per_layer else 0,
        per_layer_scales=decoder.per_layer.scales if decoder.per_layer else (1.0, 1.0, 1.0),
    )
    _check(spec, [getattr(getattr(layer, family.attention), "scaling", None) for layer in attending])
    return spec


def _sizes(layer: Any, family: Family, heads: int) -> LayerSizes:
    """Sizes of a layer with attention, of the linear maps that it has."""
    names = family.per_layer_input
    known = dict(layer.named_modules())
    maps = (*family.qkv, *family.out, *family.up, *family.down, *((names.gate, names.up) if names else ()))
    widths = {name: _widths(known[name]) for name in maps if name in known}
    groups = getattr(getattr(layer, family.attention), "num_key_value_groups", 1)
    return LayerSizes(heads // groups, widths[family.out[0]][1] // heads, widths[family.down[0]][1], widths)


def _shapes(layer: Any) -> dict[str, tuple[int, ...]]:
    shapes = {}
    for name, value in layer.named_parameters():
        module, _, kind = name.rpartition(".")
        if "lora_" in name:
            continue
        shape = _widths(layer.get_submodule(module)) if value.ndim == 2 else tuple(value.shape)
        shapes[f"{module.removesuffix('.base_layer')}.{kind}"] = shape
    return shapes


def _bare_shapes(family: Family, hidden: int) -> dict[str, tuple[int, ...]]:
    """Of the ones that a layer's norms without weights multiply by, which draft layers learn."""
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
    rotary, config, layers = decoder.rotary, decoder.model.config, range(len(decoder.layers))
    length = int(config.max_position_embeddings)
    if rotary is None:
        return (), (None,) * len(layers), length
    kinds = rotary.rope_type if isinstance(rotary.rope_type, dict) else {"": rotary.rope_type}
    rotaries = []
    for layer_kind, rope in kinds.items():
        prefix = f"{layer_kind}_" if layer_kind else ""
        if rope in FIXED_WITHIN:
            parameters = config.rope_parameters[layer_kind] if layer_kind else config.rope_parameters
            length = min(length, int(parameters.get("original_max_position_embeddings") or length))
        rotaries.append(
            Rotary(
                getattr(rotary, f"{prefix}original_inv_freq").detach().float().cpu().numpy(),
                float(getattr(rotary, f"{prefix}attention_scaling")),
            )
        )
    grown = 0
    if decoder.family.query_growth is not None:
        names = decoder.family.query_growth, "original_max_position_embeddings"
        beta, original = (config.rope_parameters[name] for name in names)
        grown = len(rotaries)
        rotaries += [replace(kind, growth=(float(beta), int(original))) for kind in rotaries]
    of = (0 if "" in kinds else list(kinds).index(config.layer_types[layer]) for layer in layers)
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
    """Those of the tokens that an embedding of so many rows has; `check_folder` has told of the others."""
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
