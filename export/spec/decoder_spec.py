"""Describes a decoder: sizes, rotary frequencies, which parts exist. `weights.model_spec` reads one off a Hugging Face
model, `weights.config_spec` off a configuration. The tests of both cover it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from streamspec.export.spec.latent_spec import LatentSizes
from streamspec.export.spec.mixture_spec import MixtureSpec
from streamspec.layer_cache import (
    ATTENTION,
    BESIDE,
    CONV,
    DECAY,
    DTYPES,
    INPUT,
    KEY,
    LAYER_KINDS,
    MARK,
    NONE,
    SHARED,
    STATE,
    STATE_BLOCK,
    STATE_WINDOW,
    UPDATE,
    VALUE,
    LayerCache,
    window_slots,
)
from streamspec.model_families import Family


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


class LayerNorms(NamedTuple):
    """Norms of a layer, None for none: of what attention, or a convolution in its place, and the MLP read, and of what
    they add."""

    attention: str | None
    mlp: str | None
    attention_out: str | None = None
    mlp_out: str | None = None


class Mixer(NamedTuple):
    """What mixes rows in a layer: attention, or where it `convolves` a short convolution with what follows it. The maps
    before and after it, and of what those before it give."""

    before: tuple[str, ...]
    after: tuple[str, ...]
    convolves: bool = False
    between: tuple[str, ...] = ()


class StateSizes(NamedTuple):
    """Sizes of recurrent states [key width, value width], one for each of the value heads; a key head belongs to
    several."""

    key_heads: int
    heads: int
    key_width: int
    width: int

    @property
    def keys(self) -> int:
        """Numbers of all keys of a row, or of all its queries."""
        return self.key_heads * self.key_width

    @property
    def values(self) -> int:
        """Numbers of all values of a row."""
        return self.heads * self.width

    @property
    def inputs(self) -> int:
        """Numbers of a row that the convolution mixes."""
        return 2 * self.keys + self.values

    def cache(self, kind: str) -> LayerCache:
        """What a layer of this kind keeps: keys, what is added to states, the same before it is solved, inputs of the
        convolution, decays with steps, slices of the states, and a mark of those that are there."""
        added = self.heads, self.width
        slices = self.key_width * self.values // STATE_BLOCK
        sizes = {KEY: (self.key_heads, self.key_width), VALUE: added, UPDATE: added, INPUT: (1, self.inputs)}
        sizes |= {DECAY: (1, 2 * self.heads), STATE: (1, slices), MARK: (1, 1)}
        parts = (number for part in LAYER_KINDS[kind].parts for number in sizes[part])
        return LayerCache(kind, STATE_WINDOW, parts=tuple(parts))


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
    conv_widths: tuple[int, ...]  # per layer: rows that a short convolution mixes, 0: there is none
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
    absent: tuple[int, ...] = ()  # rows of the tables that are no token of the tokenizer, and never chosen
    cache_dtype: str = DTYPES[0]  # of stored keys and values
    sizes: tuple[LayerSizes, ...] = ()  # per layer; empty: all are alike
    kv_sources: tuple[int, ...] = ()  # per layer: the one whose keys and values it attends to; empty: each its own
    numbers: tuple[int, ...] = ()  # per layer: in the names of its weights; empty: its own, from 0 on
    both: tuple[int, ...] = ()  # layers with attention beside their convolution: what the two give adds up
    no_attention: tuple[int, ...] = ()  # layers that are their MLP alone, of the model or of a short graph
    no_mlp: tuple[int, ...] = ()  # and those that are their attention alone
    state: StateSizes | None = None  # recurrent, of the layers with short convolutions
    step_limits: tuple[float, float] = (0.0, inf)  # of a state space
    largest_step: float = 1.0  # of the gated delta rule
    state_norm: bool = True  # what a state space returns is normalised
    norm_first: bool = False  # and then multiplied by its gates, not before
    # By a layer's linear map: what its weight [out] and its bias [out] are multiplied by, rows in Hugging Face's order.
    map_scales: Mapping[str, tuple[NDArray[np.float32], NDArray[np.float32]]] = field(default_factory=dict)
    per_layer_width: int = 0  # of each layer's own input for a token, 0 where there is none
    per_layer_scales: tuple[float, float, float] = (1.0, 1.0, 1.0)  # of its table, of its map, of their sum
    mixture: MixtureSpec | None = None  # of experts, in place of the MLP of some layers
    latent: LatentSizes | None = None  # of attention to states; heads are these with a turned key

    @property
    def caches(self) -> tuple[LayerCache, ...]:
        """The cache of each layer; empty where all layers keep every token in float32."""
        own = [(size.kv_heads, size.head_dim) for size in self.sizes]
        sizes = [(0, 0) if size == (self.kv_heads, self.head_dim) else size for size in own]
        windows, context, sources = self.windows, self.context_length, self.kv_sources
        state = self.state.cache(self.family.recurrent.kind) if self.state and self.family.recurrent else None
        bare, both = self.no_attention, self.both
        return layer_caches(windows, context, self.cache_dtype, self.conv_widths, sizes, sources, bare, state, both)

    def at(self, layer: int) -> DecoderSpec:
        """The spec with the sizes of `layer`, for the nodes of that layer."""
        return replace(self, **vars(self.sizes[layer])) if layer < len(self.sizes) else self

    def source(self, layer: int) -> int:
        """The layer whose keys and values a layer attends to, mostly itself."""
        return self.kv_sources[layer] if layer < len(self.kv_sources) else layer

    def ring(self, layer: int, part: str = KEY) -> int | None:
        """The window of a layer whose keys, or another part of its cache, are kept for no more than that; None where
        everything is, as of a draft layer."""
        return self._kept(layer, part).window

    def kept_in(self, layer: int, part: str) -> str:
        """The type in which the cache holds a part of a layer, or of a draft layer."""
        return self._kept(layer, part).dtype

    def _kept(self, layer: int, part: str) -> LayerCache:
        """The cache of a part; of draft layers everything, as keys are kept."""
        caches = self.caches
        return caches[self.source(layer)].of(part)[0] if layer < len(caches) else LayerCache(dtype=self.cache_dtype)

    def state_part(self, layer: int, part: str) -> str:
        """The name of a part of the cache that belongs to a layer's convolution, or to the state after it."""
        return f"{BESIDE}{part}" if layer in self.both else part

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
        mixing = (maps for mixer in self.mixers(layer) for maps in (mixer.before, mixer.between, mixer.after))
        return *filter(None, (*mixing, *self.mlp_maps(layer))), *per_layer

    def mlp_kind(self, layer: int) -> str:
        """The kind of MLP of a layer: `dense` or `experts`."""
        number = self.numbers[layer] if self.numbers else layer
        return "experts" if self.mixture and number in self.mixture.layers else "dense"

    def mlp_maps(self, layer: int) -> tuple[tuple[str, ...], ...]:
        """The fused maps that all rows of a layer run through in the MLP's place, first and second of each pair."""
        if layer in self.no_mlp:
            return ()
        if self.mixture and self.mlp_kind(layer) == "experts":
            return self.mixture.maps
        return self.family.up, self.family.down

    def activates(self, modules: tuple[str, ...]) -> bool:
        """Whether the fused maps `modules` are those before an MLP's activation."""
        return modules == self.family.up or (self.mixture is not None and modules == self.mixture.names.shared[0])

    def norms(self, layer: int) -> LayerNorms:
        """The norms of a layer; one after the last has attention."""
        family = self.family
        if family.conv_norms and any(self.conv_widths[layer : layer + 1]):
            return LayerNorms(*family.conv_norms)
        return LayerNorms(family.attention_norm, self.mlp_norm, family.attention_out_norm, family.mlp_out_norm)

    def sensitive(self, modules: Sequence[str]) -> bool:
        """Whether int4 keeps 8 bits, in native operators 6, of the fused maps `modules`: those of queries, keys and
        values, whichever of these a layer has, and of what a recurrent state reads."""
        family = self.family
        if self.state and modules[0] in family.conv_in:
            return tuple(modules) == family.conv_in
        return all(name in family.qkv for name in modules)

    def attends(self, layer: int) -> bool:
        """Whether a layer has attention, as one after the last does."""
        convolves = any(self.conv_widths[layer : layer + 1]) and layer not in self.both
        return not convolves and layer not in self.no_attention

    def mixers(self, layer: int) -> tuple[Mixer, ...]:
        """What mixes the rows of a layer, mostly one; they read the same rows, and what they give adds up."""
        family, widths = self.family, self.at(layer).widths
        between = () if self.query_map in family.qkv else (self.query_map,)
        attention = Mixer(tuple(name for name in family.qkv if name in widths), family.out, between=between)
        convolution = Mixer(family.conv_in, family.conv_out, convolves=True)
        convolves = layer not in self.no_attention and any(self.conv_widths[layer : layer + 1])
        return *((attention,) if self.attends(layer) else ()), *((convolution,) if convolves else ())

    @property
    def last_attention(self) -> int:
        """The last layer that attends to keys of its own; draft layers are like it."""
        return max(layer for layer in range(self.layers) if self.attends(layer) and self.source(layer) == layer)

    @property
    def draft_channels(self) -> int:
        """Inner numbers of a draft layer's MLP: of that of the last layer with attention, or of a row's experts in its
        place together."""
        mixed = self.mixture and not self.mixture.names.around and self.mlp_kind(self.last_attention) == "experts"
        return self.mixture.active * self.mixture.width if self.mixture and mixed else self.intermediate

    def turns(self, layer: int) -> tuple[int, int] | None:
        """The kinds of rotary embedding of a layer; of one that is not described those of the last with attention."""
        return self.rotary_of[layer if layer < len(self.rotary_of) else self.last_attention]

    def rotated(self, kind: int) -> int:
        """Leading numbers of each head that a kind of rotary embedding turns."""
        return 2 * len(self.rotaries[kind].inv_freq)

    def weight_name(self, layer: int, module: str) -> str:
        """`module` as in HF: `self_attn.q_proj`, `mlp.up_proj`, `input_layernorm`, ..."""
        number = self.numbers[layer] if self.numbers else layer
        return f"{self.stacked(self.family.layers)}.{number}.{module}"

    def without(self, skipped: Skipped) -> DecoderSpec:
        """The spec without some layers or halves of layers, which share nothing with the others, over the same
        weights."""
        remaining = tuple(layer for layer in range(self.layers) if layer not in skipped.layers)
        return replace(
            self,
            layers=len(remaining),
            numbers=remaining,
            no_attention=tuple(i for i, layer in enumerate(remaining) if layer in skipped.attention),
            no_mlp=tuple(i for i, layer in enumerate(remaining) if layer in skipped.mlps),
            windows=tuple(self.windows[layer] for layer in remaining),
            conv_widths=tuple(self.conv_widths[layer] for layer in remaining),
            rotary_of=tuple(self.rotary_of[layer] for layer in remaining),
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

    @property
    def query_map(self) -> str:
        """The linear map that makes the queries."""
        names = self.family.latent_attention
        return names.queries if names and names.queries in self.widths else self.family.qkv[0]

    def row_order(self, module: str) -> NDArray[np.int64] | None:
        """Indices of a linear map's outputs in HF's order, in the order of the graph (all queries, all their gates, all
        keys, all values; before a state all queries, keys, values and gates, all steps and decays); None where it is
        the same.
        """
        recurrent, state = self.family.recurrent, self.state
        if recurrent is not None and recurrent.by_key_head and state is not None and module in self.family.conv_in:
            of_key = state.heads // state.key_heads  # heads
            mapped = state.key_width, state.key_width, of_key * state.width, of_key * state.width
            sizes = mapped if module == self.family.conv_in[0] else (of_key, of_key)
            each = np.arange(self.out_width(module)).reshape(state.key_heads, sum(sizes))
            return np.concatenate([part.reshape(-1) for part in np.split(each, np.cumsum(sizes)[:-1], axis=1)])
        if self.latent is not None and module == self.query_map:
            return self.latent.query_order(self.heads)
        if self.family.gated_queries and module == self.family.qkv[0]:
            return np.arange(self.out_width(module)).reshape(self.heads, 2, -1).swapaxes(0, 1).reshape(-1)
        if not (self.family.interleaved and module in self.family.qkv):
            return None
        return np.arange(self.out_width(module)).reshape(self.heads, 3, self.head_dim).swapaxes(0, 1).reshape(-1)

    def in_graph(self, name: str, array: NDArray[Any]) -> NDArray[Any]:
        """A weight or bias of a layer's `module` ("self_attn.q_proj.weight", linear maps [out, in]) or of another norm
        as the graph has it: rows in its order and multiplied, norms with the one that is added. The same for the map B
        [out, r] of a LoRA.
        """
        module, _, kind = name.rpartition(".")
        if module in self.map_scales:
            scale = self.map_scales[module][kind == "bias"]
            array = array * scale.reshape(-1, *[1] * (array.ndim - 1))
        plain = self.family.recurrent is not None and name.startswith(f"{self.family.conv}.")
        if array.ndim == 1 and self.family.one_added and name.endswith(".weight") and not plain:
            return array + 1
        order = self.row_order(module) if module in self.widths else None
        return array if order is None else array[order]

    def from_graph(self, module: str, array: NDArray[Any]) -> NDArray[Any]:
        """The map B [out, r] of a LoRA over a layer's `module` of which `in_graph` made this one."""
        order = self.row_order(module)
        array = array if order is None else array[np.argsort(order)]
        return array / self.map_scales[module][0][:, None] if module in self.map_scales else array


def layer_caches(
    windows: Sequence[int | None],
    context: int,
    dtype: str = DTYPES[0],
    taps: Sequence[int] = (),
    sizes: Sequence[tuple[int, int]] = (),
    sources: Sequence[int] = (),
    bare: Sequence[int] = (),
    recurrent: LayerCache | None = None,
    both: Sequence[int] = (),
) -> tuple[LayerCache, ...]:
    """Describes what each layer keeps of a `context`, by the `windows` of tokens that its rows see
    (None: all): a ring where that takes fewer slots. `dtype`: of keys and values; inputs of
    convolutions and states stay in the first of `DTYPES`.

    `taps`: for each layer, rows that a short convolution sees in place of attention, 0 for
    attention; `sizes`: its heads and their width, 0 for the model's; `sources`: the layer whose
    keys it attends to; `bare`: layers without attention; `recurrent`: what layers with such
    convolutions keep, where that is a recurrent state; `both`: those with attention beside them.
    Returns an empty tuple where all layers keep everything in the first of `DTYPES`, as in bundles
    without the section.
    """
    none, caches = [0] * len(windows), list[LayerCache]()
    by_layer = zip(windows, taps or none, sizes or [(0, 0)] * len(windows), sources or range(len(windows)), strict=True)
    for layer, (window, convolved, size, source) in enumerate(by_layer):
        if layer in bare or source != layer:
            caches.append(LayerCache(NONE if layer in bare else SHARED, None, dtype))
            continue
        cache = LayerCache(ATTENTION, _ring_within(window, context), dtype, *size)
        if convolved:
            conv = recurrent or LayerCache(CONV, _ring_within(convolved, context), DTYPES[0], *size)
            cache = replace(cache, beside=conv) if layer in both else conv
        caches.append(cache)
    return () if set(caches) == {LayerCache()} else tuple(caches)


def _ring_within(seen: int | None, context: int) -> int | None:
    """The window of a ring for rows that see so many tokens; None where all of a context takes no more slots."""
    return seen if seen is not None and window_slots(seen) < context else None
