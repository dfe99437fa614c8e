"""The layers of a drafter that are not the target's: their configuration, of transformers, as a decoder and as a source
of weights. Covered by tests/export/drafters/test_eagle3.py and test_published_block.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from pathlib import Path
from typing import Any, cast

from streamspec.adapters.base_models.config_fields import ACTIVATIONS, FIXED_ROPE, HEADS, fits
from streamspec.errors import AdapterError
from streamspec.export.drafters.adapter_section import Shapes
from streamspec.export.ops.builder import Array
from streamspec.export.spec.decoder_spec import DecoderSpec, Rotary
from streamspec.export.spec.weight_source import PlainSource, Table
from streamspec.model_families import FAMILIES

FETCH = "fetch the head again, or choose another"
NUMBERS = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"),
    "max_position_embeddings",
)
LAYER_FIELDS = frozenset(
    {
        *NUMBERS,
        *("model_type", "hidden_act", "rms_norm_eps", "attention_bias", "mlp_bias"),
        *("rope_theta", "rope_scaling", "rope_parameters"),
    }
)
PICTURES = "mrope"  # a rotary embedding with three positions of a token, which are the same in a text
# Of a rotary embedding; the last two say which position turns which part of a head (`PICTURES`).
ROPE_FIELDS = frozenset(
    {
        *("rope_type", "type", "rope_theta", "factor", "attention_factor", "original_max_position_embeddings"),
        *("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
        *("mrope_section", "mrope_interleaved"),
    }
)


def layer_config(file: Path, fields: dict[str, Any]) -> Any:
    """The layer's configuration with the defaults of its family."""
    from transformers import AutoConfig

    for name in NUMBERS:
        if fields.get(name) is not None:
            whole(file, name, fields[name], 1 << 30)
        else:
            fields.pop(name, None)
    try:
        config = AutoConfig.for_model(fields.pop("model_type"), **fields)
        rope, theta = (config.rope_parameters[name] for name in ("rope_type", "rope_theta"))
        eps = float(config.rms_norm_eps)
    except Exception as error:  # transformers raises errors of every kind
        text = " ".join(str(error).split())[:200]
        raise AdapterError(f"{file}: {type(error).__name__} {text}", "a layer's configuration", FETCH) from None
    faults = []
    if rope == PICTURES:
        config.rope_parameters["rope_type"] = rope = "default"
    if type(theta) not in (int, float) or not 0 < theta < inf:
        faults.append(f"rope_theta = {theta!r}"[:100])
    if rope not in FIXED_ROPE:
        faults.append(f"rotary embedding of type {rope!r} (only {', '.join(sorted(FIXED_ROPE))})")
    odd = {name: value for name, value in config.rope_parameters.items() if name not in ROPE_FIELDS}
    whole_head = {"partial_rotary_factor": 1.0}
    faults += [
        f"rope_parameters.{name} = {value!r}"[:100] for name, value in odd.items() if value != whole_head.get(name)
    ]
    if config.hidden_act not in ACTIVATIONS:
        faults.append(f"hidden_act = {config.hidden_act!r}")
    if config.num_attention_heads % config.num_key_value_heads:
        faults.append(f"{config.num_attention_heads} heads over {config.num_key_value_heads} of keys")
    if not fits(config.head_dim):
        faults.append(f"heads of {config.head_dim} ({HEADS})")
    if not 0 < eps < 1:
        faults.append(f"rms_norm_eps = {eps}")
    if faults:
        raise AdapterError(f"{file}: {'; '.join(faults)}", "nothing that streamspec does not compute", FETCH)
    return config


def whole(file: Path, name: str, value: Any, high: int) -> int:
    """`value`, called `name` in the error, where it is a whole number 1..high. Raises AdapterError."""
    if type(value) is not int or not 1 <= value <= high:
        raise wrong(file, name, value, f"a whole number 1..{high}")
    return value


def wrong(file: Path, name: str, value: Any, expected: str) -> AdapterError:
    """The error for a field of a value that cannot be."""
    return AdapterError(f"{file}: {name} is {str(value)[:60]}", expected, FETCH)


def map_sizes(layer: Any, into: int) -> dict[str, tuple[int, int]]:
    """(out, in) of the linear maps of a layer whose first maps read states of the width `into`."""
    family = FAMILIES[layer.model_type]
    hidden, inner = layer.hidden_size, layer.intermediate_size
    queries, keys = layer.num_attention_heads * layer.head_dim, layer.num_key_value_heads * layer.head_dim
    sizes = {name: (out, into) for name, out in zip(family.qkv, (queries, keys, keys), strict=True)}
    sizes |= dict.fromkeys(family.up, (inner, hidden))
    return sizes | {family.out[0]: (hidden, queries), family.down[0]: (hidden, inner)}


def layer_shapes(layer: Any, into: int) -> Shapes:
    """Shapes of the norms and linear maps of a layer, without biases."""
    family = FAMILIES[layer.model_type]
    shapes: Shapes = {f"{norm}.weight": (layer.hidden_size,) for norm in (family.attention_norm, str(family.mlp_norm))}
    shapes |= {f"{norm}.weight": (layer.head_dim,) for norm in family.head_norms}
    return shapes | {f"{name}.weight": size for name, size in map_sizes(layer, into).items()}


def layer_decoder(layer: Any, cache_dtype: str, into: int, layers: int = 1) -> DecoderSpec:
    """A decoder of `layers` layers of the configuration `layer` (of transformers), whose first maps read states of the
    width `into`."""
    family = FAMILIES[layer.model_type]
    width = layer.head_dim
    return DecoderSpec(
        model_type=layer.model_type,
        family=family,
        layers=layers,
        hidden=layer.hidden_size,
        intermediate=layer.intermediate_size,
        heads=layer.num_attention_heads,
        kv_heads=layer.num_key_value_heads,
        head_dim=width,
        vocab=layer.vocab_size,
        context_length=layer.max_position_embeddings,
        eps=float(layer.rms_norm_eps),
        activation=ACTIVATIONS[layer.hidden_act],
        parallel=False,
        mlp_norm=family.mlp_norm,
        head_norms=family.head_norms,
        joint_head_norms=False,
        tied=False,
        windows=(None,) * layers,
        conv_widths=(0,) * layers,
        rotaries=(_rotary(layer),),
        rotary_of=((0, 0),) * layers,
        embedding_scale=1.0,
        residual_scale=1.0,
        attention_scale=width**-0.5,
        attention_cap=None,
        logit_scale=1.0,
        logit_cap=None,
        clip=None,
        widths=map_sizes(layer, into),
        shapes={},
        eos_token_ids=(),
        bos_token_id=None,
        cache_dtype=cache_dtype,
    )


class HeadSource(PlainSource):
    """The tensors of a published drafter, its layers as those from number `first` on, as a `spec.weight_source.Source`.
    `label`: what the names of its other tensors begin with in the graph."""

    def __init__(
        self, tensors: Mapping[str, Array], decoder: DecoderSpec, first: int, label: str, layers: int = 1
    ) -> None:
        self.tensors, self.label = tensors, label
        self.inside = {decoder.weight_name(first + i, ""): f"layers.{i}." for i in range(layers)}

    def weight(self, name: str) -> Array:
        """Returns the weight `name`, of a layer or of the drafter (`eagle3.norm.weight`)."""
        return self.tensors[self._own(name)]

    def bias(self, name: str) -> Array | None:
        """Returns the bias `name`, or None."""
        return self.tensors.get(self._own(name))

    def rows_of(self, name: str) -> Table:
        """Returns a table of the head."""
        return cast(Table, self.tensors[self._own(name)])

    def _own(self, name: str) -> str:
        inside = next((prefix for prefix in self.inside if name.startswith(prefix)), None)
        return name.removeprefix(self.label) if inside is None else self.inside[inside] + name.removeprefix(inside)


def _rotary(layer: Any) -> Rotary:
    """The frequencies of the head's own rotary embedding, as transformers computes them."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rotary = LlamaRotaryEmbedding(layer)
    return Rotary(rotary.inv_freq.detach().float().cpu().numpy(), float(rotary.attention_scaling))
