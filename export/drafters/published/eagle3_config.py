"""Reads `config.json` of a published EAGLE-3 head, as speculators writes it or as EAGLE, SpecForge, SGLang and vLLM do.

Fields that change what a head computes are understood or refused by name. Covered by
tests/export/drafters/test_eagle3.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from streamspec.draft_tree import MAX_GAMMA
from streamspec.errors import AdapterError
from streamspec.export.drafters.eagle3.spec import LAYERS, HeadConfig
from streamspec.export.drafters.layer_config import FETCH, LAYER_FIELDS, layer_config, whole, wrong
from streamspec.json_fields import parse_object

CONFIG = "config.json"
DRAFT_TOKENS = 5  # that a head drafts whose configuration does not say
TAPS = "eagle_aux_hidden_state_layer_ids"
ARCHITECTURES = frozenset(
    {
        *("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel"),
        "LlamaForCausalLM",
    }
)
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
# Of both formats, beside the layer's own: what a head computes.
HEAD_FIELDS = frozenset(
    {
        *FLAGS,
        *("draft_vocab_size", "truncated_vocab_size", "target_hidden_size", TAPS, "num_aux_hidden_states"),
        "eagle_config",
        *("speculators_config", "speculators_model_type", "transformer_layer_config"),
    }
)
# Fields that change nothing here: of training, of files, or read by other modules.
NEUTRAL = frozenset(
    {
        *("_name_or_path", "architectures", "auto_map", "model_type", "speculators_version", "target_model_type"),
        *("attention_dropout", "embed_requires_grad", "enable_sp_ulysses", "initializer_range", "use_cache"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "max_window_layers"),
        "decoder_sparse_step",  # of a target with experts; the layer is dense
        *("dtype", "torch_dtype", "transformers_version", "modal_type"),
        *("has_no_defaults_at_init", "base_model_ep_plan"),  # class attributes that early speculators wrote
        # Tokens of images and sound, which a target's config has and no drafter reads.
        *(f"{name}_token_id" for name in ("audio", "image", "video", "boa", "boi", "eoa", "eoi")),
        *("vision_start_token_id", "vision_end_token_id", "eoa_token_index"),
    }
)
# Fields with the only values that are computed.
ONLY: dict[str, tuple[Any, ...]] = {
    "num_hidden_layers": (1,),
    "tie_word_embeddings": (False, True),  # copied from the target: a head's own `lm_head` is among its tensors
    "use_mrope": (False,),
    "additional_fc": (False,),
    "pretraining_tp": (1,),
    "use_sliding_window": (False,),
    "layer_types": (["full_attention"], None),
    "is_causal": (True,),
    "bias": (False,),
    "parallel_drafting": (False,),
    "quantization_config": (None,),
}
EAGLE_CONFIG: dict[str, tuple[Any, ...]] = {
    "use_aux_hidden_state": (True,),
    "use_input_layernorm_in_first_layer": (True,),
    "use_mtp_layernorm": (False, None),
    "use_last_layernorm": (True,),
    "next_layer_regular": (True,),  # of layers after the first
    "parallel_draft_step": (1,),
}
# What `eagle_config` may hold besides; the last one says nothing where a step drafts one token.
EAGLE_FIELDS = frozenset({TAPS, "parallel_draft_heads_num_layers"})


def read_fields(folder: Path) -> dict[str, Any]:
    """The fields of a published drafter's configuration. Raises AdapterError where there is none."""
    file = folder / CONFIG
    try:
        data = file.read_bytes()
    except OSError as error:
        raise AdapterError(f"{file}: {error.strerror}", "the folder of a published drafter", FETCH) from None
    return parse_object(data, str(file), AdapterError, FETCH)


def read_config(folder: Path) -> HeadConfig:
    """Reads a head's configuration. Raises AdapterError that names every field that is not understood."""
    file, raw = folder / CONFIG, read_fields(folder)
    outside = "transformer_layer_config" in raw
    if outside and raw.get("speculators_model_type") != "eagle3":
        named = raw.get("speculators_model_type")
        raise AdapterError(f"{file}: a speculator of type {named!r}", "eagle3", FETCH)
    layer = raw["transformer_layer_config"] if outside else raw
    if not isinstance(layer, dict):
        raise AdapterError(f"{file}: transformer_layer_config is no object", "a layer's configuration", FETCH)
    faults = [*unread(raw, HEAD_FIELDS if outside else HEAD_FIELDS | LAYER_FIELDS, "")]
    faults += unread(layer, LAYER_FIELDS, "transformer_layer_config.") if outside else []
    nested = raw.get("eagle_config") or {}
    if not isinstance(nested, dict):
        raise wrong(file, "eagle_config", nested, "an object")
    faults += unread(nested, EAGLE_FIELDS, "eagle_config.", EAGLE_CONFIG)
    if unknown := sorted({str(name) for name in listed(file, raw, "architectures")} - ARCHITECTURES):
        faults.append(f"architectures {', '.join(unknown)}")
    if layer.get("model_type") not in LAYERS:
        faults.append(f"a layer of {layer.get('model_type')!r} (only {', '.join(LAYERS)})")
    if faults:
        raise AdapterError(f"{file}: {'; '.join(faults)}", "nothing that streamspec does not compute", FETCH)
    return _read(file, raw, layer, nested)


def unread(
    values: Mapping[str, Any], known: frozenset[str], where: str, only: Mapping[str, tuple[Any, ...]] = ONLY
) -> list[str]:
    """The fields that nothing here reads or whose values nothing here computes."""
    faults = []
    for name, value in values.items():
        if name in only:
            faults += [] if value in only[name] else [f"{where}{name} = {value!r}"[:100]]
        elif name == "sliding_window":  # in force only beside a switch that says so
            continue
        elif name not in known | NEUTRAL:
            faults.append(f"{where}{name} = {value!r}"[:100])
    return faults


def _read(file: Path, raw: Mapping[str, Any], layer: Mapping[str, Any], nested: Mapping[str, Any]) -> HeadConfig:
    config = layer_config(file, {name: layer[name] for name in layer if name in LAYER_FIELDS})
    hidden, vocab = config.hidden_size, config.vocab_size
    flags = {}
    for name in FLAGS:
        flags[name] = raw.get(name) or False
        if type(flags[name]) is not bool:
            raise wrong(file, name, raw[name], "true or false")
    target_hidden = whole(file, "target_hidden_size", raw.get("target_hidden_size") or hidden, 1 << 20)
    drafted = whole(file, "draft_vocab_size", raw.get("draft_vocab_size") or vocab, vocab)
    taps = _taps(file, raw, nested)
    for name, value in (("truncated_vocab_size", drafted), ("num_aux_hidden_states", len(taps) or None)):
        if raw.get(name) not in (None, value):
            raise wrong(file, name, raw[name], f"{value}, as other fields say")
    tokens, target = proposed(raw)
    return HeadConfig(
        layer=config,
        draft_vocab=drafted,
        target_hidden=target_hidden,
        gamma=whole(file, "speculative_tokens", tokens or DRAFT_TOKENS, MAX_GAMMA),
        taps=taps,
        target=target,
        **flags,
    )


def proposed(raw: Mapping[str, Any]) -> tuple[Any, str | None]:
    """What `speculators_config` says, of draft tokens as it stands there, and of the target; None of what it does not
    say."""
    speculators = raw.get("speculators_config")
    named = speculators if isinstance(speculators, dict) else {}
    methods, verifier = named.get("proposal_methods"), named.get("verifier")
    first = methods[0] if isinstance(methods, list) and methods else None
    target = verifier.get("name_or_path") if isinstance(verifier, dict) else None
    tokens = first.get("speculative_tokens") if isinstance(first, dict) else None
    return tokens, target if isinstance(target, str) else None


def _taps(file: Path, raw: Mapping[str, Any], nested: Mapping[str, Any]) -> tuple[int, ...]:
    """At the top a number is that of the layer whose input is read (vLLM), in `eagle_config` that of the layer whose
    output is (SGLang, Model-Optimizer)."""
    outside = raw.get(TAPS) or ()
    chosen = outside or nested.get(TAPS) or ()
    if not isinstance(chosen, (list, tuple)) or not all(type(layer) is int and 0 <= layer < 10_000 for layer in chosen):
        raise wrong(file, TAPS, chosen, "a list of numbers of layers")
    return tuple(layer if outside else layer + 1 for layer in chosen)


def listed(file: Path, values: Mapping[str, Any], name: str) -> list[Any]:
    """The list of that name, empty where there is none. Raises AdapterError for anything else."""
    value = values.get(name) or []
    if not isinstance(value, list):
        raise wrong(file, name, value, "a list")
    return value
