"""A Hugging Face causal LM's decoder layers, rotary embedding, final norm and head, found by its family's description.

The layers themselves are called as they are.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass
from functools import cache as remembered
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from streamspec.adapters.base_models.config_fields import layer_rotates, layer_window, read_field
from streamspec.adapters.base_models.token_mixers.recurrent_state import recurrent_state, watched_states
from streamspec.adapters.base_models.token_mixers.short_conv import short_conv, watched_inputs
from streamspec.model_families import Family, factor, family_of
from streamspec.model_families.family import STATE_LAYER, MapMultipliers

# Names of the argument for the KV cache: in newer versions of transformers, in older ones, in those of GPT-NeoX.
CACHE_ARGUMENTS = "cache", "past_key_values", "layer_past"


def with_cache(module: nn.Module, cache: Any) -> dict[str, Any]:
    """The KV cache as the keyword argument by which `module`, a model of transformers or a part of one, takes it."""
    return {_cache_argument(type(module).forward): cache}


@remembered
def _cache_argument(forward: Callable[..., Any]) -> str:
    taken = inspect.signature(forward).parameters
    return next(name for name in CACHE_ARGUMENTS if name in taken)


def base_of(rotary: Any) -> float:
    """The base of a rotary embedding."""
    return float(rotary.config.rope_parameters["rope_theta"])


@dataclass
class PerLayerModules:
    """Modules that give each of the `layers` a further input of `width` numbers a token: a row of `table`, and a map
    of the token's embedding, normalized for each layer."""

    table: nn.Embedding
    context: nn.Module
    norm: nn.Module
    layers: int
    width: int
    scales: tuple[float, float, float]  # of the table, of the map, of the sum

    @classmethod
    def of(cls, stack: Any, family: Family, config: Any) -> PerLayerModules | None:
        """Returns the modules of a model's `stack`; None where it has none."""
        names = family.per_layer_input
        if names is None or not (width := getattr(config, names.width)):
            return None
        table, context, norm = (getattr(stack, name) for name in (names.table, names.context, names.context_norm))
        scales = table.scalar_embed_scale, stack.per_layer_model_projection_scale, stack.per_layer_input_scale
        return cls(table, context, norm, len(getattr(stack, family.layers)), int(width), scales)

    def inputs(self, known: Tensor, hidden: Tensor) -> Tensor:
        """[B, R, layers, width] of tokens whose rows of the table are `known` [B, R, layers * width], and that enter
        the first layer as `hidden` [B, R, H]."""
        shape = (*known.shape[:-1], self.layers, self.width)
        of_table, of_map, of_sum = self.scales
        known = known.to(hidden.dtype).reshape(shape) * of_table
        return (self.norm((self.context(hidden) * of_map).reshape(shape)) + known) * of_sum


class HFDecoder:
    """Uniform view of a causal LM's decoder: `layers`, `call_layer`, `head`. Holds no parameters of its own."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.family = family = family_of(model.config.model_type, "a model")
        stack = attrgetter(family.stack)(model)
        self.model = model
        self.layers: nn.ModuleList = getattr(stack, family.layers)
        self.norm: nn.Module | None = getattr(stack, family.final_norm)
        self.rotary: nn.Module | None = getattr(stack, family.rotary) if family.rotary else None
        self.positions: nn.Module | None = getattr(stack, family.position_table) if family.position_table else None
        self.project_out: nn.Module | None = getattr(stack, "project_out", None)
        self.lm_head: nn.Module = model.get_output_embeddings()
        self.embedding: nn.Embedding = model.get_input_embeddings()
        self.hidden_size: int = model.config.hidden_size  # of the residual stream; OPT-350m embeds narrower
        scalar = float(getattr(self.embedding, "scalar_embed_scale", 1.0))
        self.embedding_scale: float = scalar * factor(model.config, family.embedding_multiplier)
        depth = math.sqrt(len(self.layers)) if family.residual_depth else 1.0
        scale = factor(model.config, family.residual_multiplier) * factor(model.config, family.residual_depth)
        self.residual_scale: float = scale / depth  # of what half a layer adds
        self.kv_sources = self._kv_sources()
        self.per_layer = PerLayerModules.of(stack, family, model.config)
        self.logit_multiplier = factor(model.config, family.logit_multiplier)
        self.logit_divisor = factor(model.config, family.logit_divisor)

    @property
    def eps(self) -> float:
        """The epsilon of the norms."""
        norm: Any = self.norm
        return self.family.bare_norms or float(norm.eps if hasattr(norm, "eps") else norm.variance_epsilon)

    def window(self, index: int) -> int | None:
        """Sliding attention window of layer `index` in tokens, or None."""
        return layer_window(self.model.config, self.family, index)

    def _kv_sources(self) -> tuple[int, ...]:
        """Returns for each layer the index of the layer whose keys and values it attends to, mostly its own."""
        layers, name = range(len(self.layers)), self.family.shared_kv
        shared_from = len(layers) - (int(getattr(self.model.config, name) or 0) if name else 0)
        types = getattr(self.model.config, "layer_types", None) or [""] * len(layers)
        return tuple(
            i if i < shared_from else max(j for j in range(shared_from) if types[j] == types[i]) for i in layers
        )

    def kept_below(self, first: int) -> list[int]:
        """The layers from `first` on that attend to what one below `first` keeps."""
        return [layer for layer in range(first, len(self.layers)) if self.kv_sources[layer] < first]

    def rotates(self, index: int) -> bool:
        """Tells whether layer `index` rotates queries and keys."""
        return self._attends(index) and layer_rotates(self.model.config, self.family, index)

    @property
    def last_attention(self) -> int:
        """The last layer that attends to keys of its own, as which a draft layer starts."""
        layers = enumerate(self.kv_sources)
        return max(index for index, source in layers if source == index and self._attends(index))

    def conv(self, index: int) -> Any:
        """The short convolution that layer `index` has in place of attention or beside it, or None."""
        if index in self.mlps or (self._attends(index) and not self.family.conv_beside):
            return None
        return getattr(self.layer(index), str(self.family.conv))

    @property
    def mlps(self) -> tuple[int, ...]:
        """The layers that are an MLP or a mixture of experts alone."""
        kinds = self.model.config.layer_types if self.family.halved else ()
        return tuple(index for index, kind in enumerate(kinds) if kind in self.family.bare)

    def _attends(self, index: int) -> bool:
        """By the module at rest: `layer` may compute all of its weights."""
        name = self.family.conv
        if self.family.halved:
            return bool(self.model.config.layer_types[index] not in (*self.family.bare, STATE_LAYER))
        return name is None or self.family.conv_beside or getattr(self.layers[index], name, None) is None

    def map_factor(self, module: str) -> tuple[float, float]:
        """The numbers that inputs and outputs of a layer's linear map are multiplied by."""
        names = self.family.map_multipliers.get(module, MapMultipliers())
        return factor(self.model.config, names.inputs), factor(self.model.config, names.outputs)

    def new_cache(self) -> DynamicCache:
        """An empty cache for the model's own passes, which keeps every row of attention, whatever its window."""
        if not self.family.conv:
            return DynamicCache()
        config, kinds = self.model.config, getattr(self.model.config, "layer_types", None) or ()
        if "sliding_attention" in kinds:
            config = copy(config)
            config.layer_types = [kind.replace("sliding_attention", "full_attention") for kind in kinds]
        return DynamicCache(config=config)

    def rotary_embeddings(self, hidden: Tensor, positions: Tensor) -> Any:
        """cos and sin for `positions` [B, R], those of each kind of layer where they differ, or None where positions
        enter at the embedding only.
        """
        if self.rotary is None:
            return None
        found = {
            kind: rotary(hidden, positions, kind) if prefix else rotary(hidden, position_ids=positions)
            for kind, (rotary, prefix, _) in self.rotary_kinds().items()
        }
        return found.get("", found)

    def rotary_kinds(self) -> dict[Any, tuple[Any, str, str]]:
        """Of each kind of rotary embedding its module, how the names of its buffers begin there, and its type; the kind
        is that of the layers or their base, '' where all are alike."""
        if self.rotary is None:
            return {}
        if isinstance(self.rotary, nn.ModuleList):
            return {base_of(one): (one, "", one.rope_type) for one in self.rotary}
        types: Any = self.rotary.rope_type
        if isinstance(types, dict):
            return {kind: (self.rotary, f"{kind}_", rope) for kind, rope in types.items()}
        return {"": (self.rotary, "", types)}

    def rotary_kind(self, index: int) -> Any:
        """The kind of rotary embedding of layer `index`, as `rotary_kinds` has it; another for none."""
        config, bases = self.model.config, self.family.rotary_layers
        if bases and isinstance(self.rotary, nn.ModuleList):
            return getattr(config, bases)[index]
        return "" if "" in self.rotary_kinds() else config.layer_types[index]

    def layer(self, index: int) -> nn.Module:
        """Decoder layer `index`."""
        return self.layers[index]

    def call_layer(
        self,
        index: int,
        hidden: Tensor,
        mask: Tensor,
        positions: Tensor,
        rotary: Any,
        cache: Any,
        per_layer_inputs: Tensor | None = None,
        module: nn.Module | None = None,
    ) -> Tensor:
        """Runs decoder layer `index`, or `module` in its place, on rows `hidden` [B, R, H] with an additive mask
        [B, 1, R, K]. `per_layer_inputs`: those of all layers [B, R, layers, width], None for rows without a token:
        zeros, which add nothing. Where layers share K/V `cache.shared` has them by kind of layer.
        """
        if self.family.conv_beside or self.conv(index) is not None:
            return self._call_mixers(module or self.layer(index), index, hidden, mask, positions, cache)
        module = module or self.layer(index)
        extra = self._attending(module, index, positions, rotary, cache)
        if self.per_layer is not None:
            zeros = hidden.new_zeros(1, 1, self.per_layer.width)
            extra["per_layer_input"] = zeros if per_layer_inputs is None else per_layer_inputs[:, :, index]
        out = module(hidden, attention_mask=mask, use_cache=True, **extra)
        return out[0] if isinstance(out, tuple) else out

    def _call_mixers(
        self, layer: nn.Module, index: int, hidden: Tensor, mask: Tensor, positions: Tensor, cache: Any
    ) -> Tensor:
        """As `call_layer`: the parts of Hugging Face's layer, but for which rows a convolution mixes. Of attention and
        a convolution beside it a drafter's layer has attention alone."""
        family, updates = self.family, list[Tensor]()
        first, second = family.conv_norms or (str(family.attention_norm), str(family.mlp_norm))
        normed = layer.get_submodule(first)(hidden)
        if family.conv_beside:
            updates.append(self.attend(layer.get_submodule(family.attention), index, normed, mask, positions, cache))
        if (conv := getattr(layer, str(family.conv), None)) is not None:
            mixing = partial(recurrent_state, family=family) if family.recurrent else short_conv
            number = index + len(self.layers) * len(updates)  # in the cache, where attention has its own
            mixed = mixing(conv, hidden=normed, mask=mask, cache=cache, index=number)
            updates.append(mixed * self.map_factor(family.conv_out[0])[1])
        hidden = hidden + self._normed(layer, family.attention_out_norm, sum(updates)) * self.residual_scale
        if family.halved:
            return hidden
        updated = self._mlp(layer, layer.get_submodule(second)(hidden))
        return hidden + self._normed(layer, family.mlp_out_norm, updated) * self.residual_scale

    def _normed(self, layer: nn.Module, name: str | None, update: Any) -> Tensor:
        """What half a layer with a convolution adds, under its norm, if any."""
        normed: Tensor = layer.get_submodule(name)(update) if name and not self.family.conv_norms else update
        return normed

    def _mlp(self, layer: nn.Module, normed: Tensor) -> Tensor:
        """What the MLP of a layer gives, and a mixture of experts where that is a module beside it."""
        mixture, known = self.family.mixture, dict(layer.named_modules())
        maps = self.family.up[0], *((mixture.experts,) if mixture else ())
        modules = {name.rpartition(".")[0] for name in maps if name in known}
        total: Tensor = sum(known[name](normed) for name in sorted(modules))
        return total

    def attend(
        self, attention: nn.Module, index: int, normed: Tensor, mask: Tensor, positions: Tensor, cache: Any
    ) -> Tensor:
        """Runs the module `attention`, a copy of that of layer `index`, on rows [B, R, H] as `call_layer` runs it."""
        rotary = self.rotary_embeddings(normed, positions)
        extra = self._attending(attention, index, positions, rotary, cache)
        # Hugging Face's layer multiplies what enters the module and what leaves it.
        before, after = self.map_factor(self.family.qkv[0])[0], self.map_factor(self.family.out[0])[1]
        attended: Tensor = attention(normed * before, attention_mask=mask, **extra)[0]
        return attended * after

    def _attending(self, module: nn.Module, index: int, positions: Tensor, rotary: Any, cache: Any) -> dict[str, Any]:
        """The arguments of `module`, a layer or its attention: positions, their rotary embeddings, the cache."""
        arguments = {"position_ids": positions, **with_cache(module, cache)}
        if self.family.shared_kv is not None:
            shared = getattr(cache, "shared", None)
            arguments["shared_kv_states"] = {} if shared is None else shared
        if rotary is not None:
            arguments["position_embeddings"] = (
                rotary.get(self.rotary_kind(index)) if isinstance(rotary, dict) else rotary
            )
        return arguments

    def cache_numbers(self, first: int) -> list[int]:
        """By which numbers the layers from `first` on use a cache: those of the layers, and after all of these those of
        convolutions beside attention; none of layers that are halves, which no drafter runs through."""
        layers, beside = range(first, len(self.layers)), self.family.conv_beside
        numbers = [*layers, *((len(self.layers) + layer for layer in layers) if beside else ())]
        return [] if self.family.halved else numbers

    def cache_place(self, number: int) -> int:
        """The number under which a cache keeps what is used by this one."""
        return self.kv_sources[number] if number < len(self.layers) else number

    @contextmanager
    def keys_values(self, first: int, cache: DynamicCache) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
        """Lists that the block's end fills, by `cache_numbers`, with K and V [B, Hkv, T, D] that the layers from
        `first` on attend to, out of the `cache` of a pass within it; of convolutions with the inputs [B, 1, T, ..],
        where a state follows with decays and steps, and nothing.
        """
        keys, values, numbers = list[Tensor](), list[Tensor](), self.cache_numbers(first)
        watch: Any = partial(watched_states, family=self.family) if self.family.recurrent else watched_inputs
        with ExitStack() as stack:
            watched = dict[int, list[tuple[Tensor, Tensor]]]()
            for number in numbers:
                layer = number % len(self.layers)
                attends = number == layer and self.family.conv_beside
                if not attends and (conv := self.conv(layer)) is not None:
                    watched[number] = stack.enter_context(watch(conv))
            yield keys, values
        for number in numbers:
            if number in watched:
                key, value = watched[number][0]
            else:
                layer = cache.layers[self.cache_place(number)]
                key, value = layer.keys, layer.values
            keys.append(key)
            values.append(value)

    @contextmanager
    def watched(self, index: int) -> Iterator[list[Tensor]]:
        """The hidden states [B, T, H] that enter layer `index` while the block runs, one for each pass."""
        entered: list[Tensor] = []
        with self.layers[index].register_forward_pre_hook(
            lambda _, args, kwargs: entered.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
        ):
            yield entered

    def finish(self, hidden: Tensor) -> Tensor:
        """Applies the final norm and OPT's output projection, after which comes the head."""
        if self.norm is not None:
            hidden = self.norm(hidden)
        return hidden if self.project_out is None else self.project_out(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """The head over finished states."""
        return self.finish_logits(self.lm_head(hidden))

    def finish_logits(self, logits: Tensor) -> Tensor:
        """Applies the family's factors and soft cap, if any, to the head's products."""
        logits = logits if self.logit_multiplier == 1.0 else logits * self.logit_multiplier
        logits = logits if self.logit_divisor == 1.0 else logits / self.logit_divisor
        cap = read_field(self.model.config, "final_logit_softcapping")
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def begin(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Input [B, R, H] of the first layer for tokens at `positions` [B, R]."""
        embedded = self.embed(tokens) * self.embedding_scale
        if self.positions is None:
            return embedded
        return embedded + nn.functional.embedding(positions + self.family.position_offset, self.positions.weight)

    def per_layer_inputs(self, tokens: Tensor, hidden: Tensor) -> Tensor | None:
        """The layers' own inputs [B, R, layers, width] for tokens [B, R] that enter the first layer as `hidden`; None
        where layers have none."""
        if self.per_layer is None:
            return None
        return self.per_layer.inputs(self.rows_of(self.per_layer.table, tokens), hidden)

    def embed(self, tokens: Tensor) -> Tensor:
        """Token embeddings as they are in the table, without positions: [.., E]."""
        return self.rows_of(self.embedding, tokens)

    def rows_of(self, table: nn.Embedding, tokens: Tensor) -> Tensor:
        """The rows [.., E] of tokens in a table."""
        return nn.functional.embedding(tokens, table.weight)

    def linear_names(self, first: int) -> list[str]:
        """Full names of the linear maps in layers `first..N-1` that streams run through, for their own LoRA."""
        family, shared = self.family, self.family.mixture.shared if self.family.mixture else ()
        between = (family.latent_attention.queries,) if family.latent_attention else ()
        groups = (family.qkv, between, family.out, family.up, family.down, family.conv_in, family.conv_out, *shared)
        maps = {name for group in groups for name in group}
        layers = range(first, len(self.layers))
        return [f"{layer}.{name}" for layer in layers for name, _ in self.layers[layer].named_modules() if name in maps]
