"""Reads a config.json without transformers, and completes it as transformers does.

tests/export/test_without_torch.py compares configs as vendors publish them, field by field.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from streamspec.adapters.base_models.weight_files import HEAD, stored_tensors
from streamspec.adapters.base_models.without_torch import INSTALL
from streamspec.adapters.base_models.without_torch.families import COMMON, FULL, SLIDING, FamilyFacts, Values, facts_of
from streamspec.errors import BaseModelError
from streamspec.json_fields import parse_object
from streamspec.model_families.text_parts import BESIDE, TEXT_PARTS, TextPart, text_name

CONFIG, AGAIN = "config.json", "fetch the base again"
LARGEST, MOST_LAYERS, MOST_EXPERTS = (1 << 31) - 1, 1 << 12, 1 << 12
TO_ROPE = ("rope_scaling", "rope_theta", "rope_local_base_freq", "partial_rotary_factor")  # parts of `rope_parameters`
LENGTH = "original_max_position_embeddings"
WITH_LENGTH = ("llama3", "yarn", "longrope")  # rotary embeddings that depend on the length before they were scaled
# Fields of every config of transformers that say nothing about what a model computes.
SHARED = frozenset(
    {"_name_or_path", "architectures", "chunk_size_feed_forward", "dtype", "id2label", "is_encoder_decoder"}
    | {"label2id", "model_type", "output_attentions", "output_hidden_states", "problem_type", "return_dict"}
    | {"torch_dtype", "transformers_version"}
)
ROPE_PARAMETERS = frozenset(
    {"attention_factor", "beta_fast", "beta_slow", "factor", "high_freq_factor", "long_factor", "low_freq_factor"}
    | {"mrope_section", "mscale", "mscale_all_dim", LENGTH, "partial_rotary_factor"}
    | {"rope_theta", "rope_type", "short_factor", "truncate"}
)


def _whole(low: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and low <= value <= LARGEST


def _number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _positive(value: Any) -> bool:
    return _number(value) and value > 0


def _none_or(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or check(value)


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _numbers(value: Any) -> bool:
    return isinstance(value, list) and all(type(number) is int for number in value)


_SIZE, _MAYBE_SIZE = (_whole(1), "a whole number from 1"), (_none_or(_whole(1)), "a whole number from 1, or null")
_NUMBER, _MAYBE_NUMBER = (_number, "a number"), (_none_or(_number), "a number or null")
_SWITCH = lambda value: isinstance(value, bool), "true or false"
_NAME = lambda value: isinstance(value, str), "a name"
Check = tuple[Callable[[Any], bool], str]  # whether a value is right, and what it should be
CHECKS: dict[str, Check] = {
    **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads"), _SIZE),
    **dict.fromkeys(("max_position_embeddings", "no_rope_layer_interval", "sliding_window_pattern"), _SIZE),
    "num_hidden_layers": (
        lambda value: _whole(1)(value) and value <= MOST_LAYERS,
        f"a whole number from 1 to {MOST_LAYERS}",
    ),
    **dict.fromkeys(("moe_intermediate_size", "num_experts_per_tok", "decoder_sparse_step"), _SIZE),
    "shared_expert_intermediate_size": _SIZE,
    **dict.fromkeys(("conv_L_cache", "block_multiple_of", "full_attention_interval", "linear_conv_kernel_dim"), _SIZE),
    **dict.fromkeys((f"linear_{kind}_head_dim" for kind in ("key", "value")), _SIZE),
    **dict.fromkeys((f"linear_num_{kind}_heads" for kind in ("key", "value")), _SIZE),
    "block_ff_dim": _MAYBE_SIZE,
    "block_ffn_dim_multiplier": (_none_or(_positive), "a number above 0, or null"),
    "tie_embedding": (_none_or(_SWITCH[0]), "true, false or null"),
    "num_dense_layers": (_whole(0), "a whole number"),
    "full_attn_idxs": (_none_or(_numbers), "a list of whole numbers, or null"),
    **dict.fromkeys(
        ("num_experts", "num_local_experts"),
        (
            _none_or(lambda value: _whole(0)(value) and value <= MOST_EXPERTS),
            f"a whole number to {MOST_EXPERTS}, or null",
        ),
    ),
    "mlp_only_layers": (_none_or(_numbers), "a list of whole numbers, or null"),
    "max_window_layers": (_whole(0), "a whole number"),
    **dict.fromkeys(("num_key_value_heads", "head_dim", "sliding_window"), _MAYBE_SIZE),
    **dict.fromkeys(("rms_norm_eps", "norm_eps"), (lambda value: _number(value) and value >= 0, "a number from 0")),
    "query_pre_attn_scalar": (_positive, "a number above 0"),
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "attention_multiplier"), _NUMBER),
    "routed_scaling_factor": _NUMBER,
    "logits_scaling": (lambda value: _number(value) and value != 0, "a number other than 0"),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), _MAYBE_NUMBER),
    **dict.fromkeys(("attention_bias", "attention_out_bias", "mlp_bias", "tie_word_embeddings"), _SWITCH),
    **dict.fromkeys(("use_sliding_window", "norm_topk_prob", "use_expert_bias"), _SWITCH),
    **dict.fromkeys(("conv_bias", "block_auto_adjust_ff_dim"), _SWITCH),
    **dict.fromkeys(("hidden_act", "hidden_activation"), _NAME),
    "layer_types": (_none_or(_texts), "a list of names, or null"),
    "no_rope_layers": (lambda value: value is None or isinstance(value, list), "a list, or null"),
    **dict.fromkeys(
        ("rope_parameters", "rope_scaling"), (_none_or(lambda value: isinstance(value, dict)), "an object")
    ),
    **dict.fromkeys(TO_ROPE[1:], (_none_or(_positive), "a number above 0, or null")),
}
ROPE_NUMBERS = ("rope_theta", "factor", "low_freq_factor", "high_freq_factor", LENGTH)
ROPE_CHECKS: dict[str, Check] = dict.fromkeys(ROPE_NUMBERS, (_positive, "a number above 0")) | {
    "partial_rotary_factor": (lambda value: _positive(value) and value <= 1, "a number above 0 and at most 1")
}


class CompletedConfig:
    """The config of a causal LM, with every field that its model reads as an attribute."""

    model_type: str

    def __init__(self, values: Values) -> None:
        vars(self).update(values)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


def read_completed(folder: Path) -> CompletedConfig:
    """Reads the config of a Hugging Face folder, of a multimodal model that of its text part. Raises BaseModelError for
    one that cannot be read, and of a family that needs PyTorch."""
    given = _given(folder)
    return completed(given if (part := _part(given)) is None else _of_text(folder, given, part), str(folder / CONFIG))


def text_part(folder: Path) -> TextPart | None:
    """Where a folder keeps its text model, if it is one of a multimodal model. Raises BaseModelError for a config that
    cannot be read."""
    return _part(_given(folder))


def _given(folder: Path) -> Values:
    file = folder / CONFIG
    try:
        data = file.read_bytes()
    except OSError as error:
        raise BaseModelError(f"{file} cannot be read ({error.strerror})", "a config of transformers", AGAIN) from None
    return parse_object(data, str(file), BaseModelError, AGAIN, infinite=True)


def _part(given: Values) -> TextPart | None:
    return TEXT_PARTS.get(str(given.get("model_type")))


def _of_text(folder: Path, given: Values, part: TextPart) -> Values:
    """The config of the text part, with what the whole model's states of it; its head is the embedding where the files
    have no other."""
    text = given.get("text_config")
    if part.family is not None or not isinstance(text, dict) or "model_type" not in text:
        found = f"the text part of a multimodal checkpoint ({given['model_type']}) without PyTorch"
        raise BaseModelError(found, "a text model", INSTALL)
    beside = {name: given[name] for name in BESIDE if given.get(name) is not None}
    names = {text_name(tensor.name, part.stack) for tensor in stored_tensors(folder)}
    return {**_without(text, {"tie_embedding"}), **beside, "tie_word_embeddings": HEAD not in names}


def completed(given: Values, where: str = "config.json") -> CompletedConfig:
    """Completes the fields of a config.json. Raises BaseModelError as `read_completed` does."""
    model_type = str(given.get("model_type"))
    facts = facts_of(model_type)
    values: Values = {**_without(COMMON, facts.lacks), **facts.fields, **given}
    known = {*COMMON, *facts.fields, *TO_ROPE, "head_dim"} - facts.lacks
    _check(values, {name: check for name, check in CHECKS.items() if name in known}, where)
    values |= {"rope_scaling": values.get("rope_scaling"), "model_type": model_type}
    if values["num_key_value_heads"] is None:
        values["num_key_value_heads"] = values["num_attention_heads"]
    facts.complete(values)
    _check_layers(values, where)
    values["rope_parameters"] = _rope(values, facts, where)
    for name in TO_ROPE:
        values.pop(name, None)
    return CompletedConfig(values)


def _without(values: Mapping[str, Any], names: Collection[str]) -> Values:
    return {name: value for name, value in values.items() if name not in names}


def _check(values: Values, checks: dict[str, Check], where: str) -> None:
    for name, (right, expected) in checks.items():
        if name in values and not right(values[name]):
            raise BaseModelError(f"{where}: {name} is {str(values[name])[:60]}", expected, AGAIN)


def _check_layers(values: Values, where: str) -> None:
    """Refuses lists with another number of layers, and heads of no whole size."""
    layers, heads = values["num_hidden_layers"], values["num_attention_heads"]
    for name in ("layer_types", "no_rope_layers"):
        listed = values.get(name)
        if listed is not None and len(listed) != layers:
            raise BaseModelError(f"{where}: {len(listed)} {name} for {layers} layers", "one for each", AGAIN)
    if heads % values["num_key_value_heads"] or (values.get("head_dim") is None and values["hidden_size"] % heads):
        found = f"{heads} heads, {values['num_key_value_heads']} of keys, in a width of {values['hidden_size']}"
        raise BaseModelError(f"{where}: {found}", "numbers that divide each other", AGAIN)


def _rope(values: Values, facts: FamilyFacts, where: str) -> dict[str, Any]:
    """`rope_parameters`: of one rotary embedding, or by kind of layer."""
    parameters = dict(values["rope_scaling"] or values["rope_parameters"] or {})
    if facts.local_theta is not None:
        return _two_ropes(values, facts, facts.local_theta, where)
    kinds = set(values.get("layer_types") or ())
    nested = [kind for kind in parameters if kind in kinds]
    theta, rotated = values.get("rope_theta") or facts.theta, values.get("partial_rotary_factor")
    if not nested:
        return _standard(parameters, theta, values, where, rotated, one=True)
    if others := kinds - {FULL, SLIDING}:
        found = f"rope_parameters of {', '.join(nested)} beside layers of {', '.join(sorted(others))}"
        raise BaseModelError(f"{where}: {found}", "one rotary embedding", AGAIN)
    return {kind: _standard(_object(parameters[kind], where), theta, values, where, rotated) for kind in nested}


def _two_ropes(values: Values, facts: FamilyFacts, local: tuple[str, float], where: str) -> dict[str, Any]:
    by_type = dict(values["rope_parameters"] or {})
    if unknown := by_type.keys() - {FULL, SLIDING}:
        raise BaseModelError(f"{where}: rope_parameters of {', '.join(sorted(unknown))}", f"{FULL}, {SLIDING}", AGAIN)
    whole = {**_object(by_type.get(FULL) or {}, where), **(values["rope_scaling"] or {})}
    within = _object(by_type.get(SLIDING) or {}, where)
    return {
        FULL: _standard(whole, values.get("rope_theta") or facts.theta, values, where),
        SLIDING: _standard(within, values.get(local[0]) or local[1], values, where),
    }


def _standard(
    parameters: dict[str, Any],
    theta: float,
    values: Values,
    where: str,
    rotated: float | None = None,
    one: bool = False,
) -> dict[str, Any]:
    """Completes the parameters of a rotary embedding. `one`: of all layers; a length beside them then counts first."""
    made = {"rope_theta": theta, "rope_type": parameters.get("type", "default"), **parameters}
    if rotated is not None:
        made.setdefault("partial_rotary_factor", rotated)
    if made["rope_type"] in WITH_LENGTH:
        made |= {LENGTH: values[LENGTH]} if one and LENGTH in values else {}
        made.setdefault(LENGTH, values["max_position_embeddings"])
    _check(made, ROPE_CHECKS, where)
    return made


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BaseModelError(f"{where}: rope_parameters hold {str(value)[:60]}", "an object for each kind", AGAIN)
    return value
