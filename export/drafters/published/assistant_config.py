"""Reads an assistant of Gemma 4 as transformers or llama.cpp write it. Fields that change what it computes are
understood or refused by name, and it must be one for the target. Covered by tests/export/drafters/test_assistant.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from streamspec.adapters.base_models.config_fields import check_config
from streamspec.adapters.base_models.gguf.file import is_gguf
from streamspec.bundle.manifest import DRAFT_CANDIDATES
from streamspec.errors import AdapterError, BaseModelError, ConfigError
from streamspec.export.drafters.adapter_section import Shapes
from streamspec.export.drafters.assistant.spec import HEAD, ORDERING, AssistantSpec
from streamspec.export.drafters.layer_config import FETCH, whole, wrong
from streamspec.export.drafters.published.eagle3_config import CONFIG, read_fields, unread
from streamspec.export.drafters.published.gguf_assistant import gguf_assistant, gguf_tensors
from streamspec.export.drafters.published.tensors import checked_tensors
from streamspec.export.spec.decoder_spec import DecoderSpec
from streamspec.export.weights.model_spec import describe

TARGETS = {"gemma4_assistant": "gemma4_text", "gemma4_unified_assistant": "gemma4_unified_text"}  # by the kind
EMBEDDING, TOKENS = "embed_tokens.weight", 4  # drafted: each pass goes on from its own state
FIELDS = frozenset({"text_config", "backbone_hidden_size", "use_ordered_embeddings", "num_centroids"})
FIELDS |= {"centroid_intermediate_top_k"}
UNDERSTOOD = "nothing that streamspec does not compute"
ONLY: dict[str, tuple[Any, ...]] = {"tie_word_embeddings": (True,), "quantization_config": (None,)}


def is_assistant(raw: Mapping[str, Any]) -> bool:
    """Whether a configuration is of an assistant, of Gemma 4 or of another model."""
    return str(raw.get("model_type")).endswith("_assistant")


def read_assistant(place: Path, target: Any) -> AssistantSpec:
    """Reads the assistant in the folder or GGUF file `place` for a base of the configuration `target` (of
    transformers). Raises AdapterError, in one line before anything large is read, for one of another target or one that
    is not understood."""
    fields, stored = gguf_assistant(place) if is_gguf(place) else (read_fields(place), None)
    config = _read_config(place if stored else place / CONFIG, fields)
    _check_target(place, config, target)
    if stored:
        tensors = gguf_tensors(stored, fields["text_config"], _shapes(config))
    else:
        tensors = checked_tensors(place, lambda _: _shapes(config))
    own = {name: tensor if name == ORDERING else tensor.astype(np.float32) for name, tensor in tensors.items()}
    own[HEAD] = own.pop(EMBEDDING)
    if ORDERING in own:
        own[ORDERING] = own[ORDERING].astype(np.int64)
        if not np.array_equal(np.sort(own[ORDERING]), np.arange(len(own[HEAD]))):
            raise AdapterError(f"{place}: {ORDERING} does not name every token once", "an order of them", FETCH)
    return AssistantSpec(gamma=TOKENS, config=config, layers=_layers(config), tensors=own)


def _read_config(file: Path, raw: dict[str, Any]) -> Any:
    if (kind := raw["model_type"]) not in TARGETS:
        raise wrong(file, "model_type", kind, " or ".join(TARGETS))
    if find_spec(f"transformers.models.{kind}") is None:
        raise ConfigError(
            "an assistant of Gemma 4", "a transformers that has them, such as 5.24", "update transformers"
        )
    from transformers import AutoConfig, PreTrainedConfig

    faults = unread(raw, FIELDS | PreTrainedConfig().to_dict().keys(), "", ONLY)
    if faults:
        raise AdapterError(f"{file}: {'; '.join(faults)}", UNDERSTOOD, FETCH)
    try:
        config = AutoConfig.for_model(**raw)
        text = config.text_config
        found, vocab = text.model_type, text.vocab_size
    except Exception as error:  # transformers raises errors of every kind
        named = f"{file}: {type(error).__name__} {' '.join(str(error).split())[:200]}"
        raise AdapterError(named, "a configuration of an assistant", FETCH) from None
    if found != TARGETS[kind]:
        raise wrong(file, "text_config", f"of {found!r}", TARGETS[kind])
    try:
        check_config(text)
    except BaseModelError as error:
        raise AdapterError(f"{file}: text_config: {error.found}", UNDERSTOOD, FETCH) from None
    if config.use_ordered_embeddings:
        clusters = whole(file, "num_centroids", config.num_centroids, vocab)
        chosen = whole(file, "centroid_intermediate_top_k", config.centroid_intermediate_top_k, clusters)
        if vocab % clusters or chosen * (vocab // clusters) < DRAFT_CANDIDATES:
            expected = f"clusters of one size, {DRAFT_CANDIDATES} tokens or more in those that are looked at"
            raise wrong(file, "num_centroids", f"{clusters}, {chosen} looked at, of {vocab} tokens", expected)
    return config


def _check_target(folder: Path, config: Any, target: Any) -> None:
    """Raises AdapterError for an assistant of another target."""
    text = config.text_config
    if target.model_type not in TARGETS.values():  # a GGUF file tells no kind from the other
        bases = " or ".join(TARGETS.values())
        raise AdapterError(f"{folder}: an assistant beside {target.model_type}", f"a base of {bases}", "name its own")
    pairs = {
        "hidden size": (config.backbone_hidden_size, target.hidden_size),
        "vocabulary": (text.vocab_size, target.vocab_size),
        "sliding window": (text.sliding_window, target.sliding_window),
    }
    lent = target.layer_types[: target.num_hidden_layers - (target.num_kv_shared_layers or 0)]
    for layer, kind in enumerate(text.layer_types):
        at = max((number for number, other in enumerate(lent) if other == kind), default=None)
        theirs = None if at is None else _keys(target, at)
        pairs[f"keys of its layer {layer} of {kind} (heads, width)"] = _keys(text, layer), theirs
    other = [f"{name} {ours}, not {theirs}" for name, (ours, theirs) in pairs.items() if ours != theirs]
    if other:
        raise AdapterError(f"{folder}: {'; '.join(other)}", "an assistant of this base", "name its own base")


def _keys(config: Any, layer: int) -> tuple[int, int]:
    """Heads and width of the keys of a layer."""
    of = config.per_layer_config[layer]
    return of.num_key_value_heads, of.head_dim


def _shapes(config: Any) -> Shapes:
    """Shapes of the tensors of the model in transformers, by their names in its files without `model.`."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        named = AutoModelForCausalLM.from_config(config, attn_implementation="eager").state_dict()
    return {name.removeprefix("model."): tuple(tensor.shape) for name, tensor in named.items() if name != HEAD}


def _layers(config: Any) -> DecoderSpec:
    """The layers as a decoder under names of their own. They are described as those of a model with keys, whose maps of
    keys and values are then left out."""
    import torch
    from transformers import AutoModelForCausalLM

    text = copy(config.text_config)
    text.num_kv_shared_layers = 0
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(text, attn_implementation="eager")
    model.model.rotary_emb = type(model.model.rotary_emb)(text)  # its frequencies are numbers
    spec = describe(model)
    others = spec.family.qkv[1:]

    def without_keys(sizes: Any) -> Any:
        return replace(sizes, widths={name: of for name, of in sizes.widths.items() if name not in others})

    return replace(
        without_keys(spec),
        family=replace(spec.family, stack="assistant"),
        sizes=tuple(map(without_keys, spec.sizes)),
        kv_sources=(-1,) * spec.layers,
        logit_cap=None,
    )
