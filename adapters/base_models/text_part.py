"""Loads a causal LM from a Hugging Face folder; of a multimodal checkpoint its text part, as a model of the text's own
family.

The text part keeps its place in the folder: its tensors are found by the name of their stack (`TEXT_PARTS`), whatever
the layout of the files.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from streamspec.adapters.base_models.weight_files import HEAD, stored_tensors
from streamspec.errors import BaseModelError
from streamspec.model_families import turned_back
from streamspec.model_families.text_parts import BESIDE, TEXT_PARTS, name_patterns, text_name

AGAIN = "fetch the base again"


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Returns the config of the text part; a text model's own config as it is."""
    if config.model_type not in TEXT_PARTS:
        return config
    text: PreTrainedConfig = config.get_text_config(decoder=True)
    if (family := TEXT_PARTS[config.model_type].family) is not None:
        text = _as_family(text, family)
    for name in BESIDE:
        if getattr(config, name, None) is not None:
            setattr(text, name, getattr(config, name))
    return text


def _as_family(text: PreTrainedConfig, family: str) -> PreTrainedConfig:
    """The config of a model of `family` that computes the same for text, whose tokens have one position each."""
    config_class = CONFIG_MAPPING[family]
    known, own = (each().to_dict().keys() for each in (config_class, type(text)))
    rope = {name: value for name, value in (text.rope_parameters or {}).items() if not name.startswith("mrope")}
    # Of what one class alone knows the model reads nothing; what neither does is to be judged, too.
    same = {name: value for name, value in text.to_dict().items() if (name in known) == (name in own)}
    made: PreTrainedConfig = config_class(**same | {"rope_parameters": rope, "model_type": family})
    return made


def load_causal_lm(folder: Path, **options: Any) -> PreTrainedModel:
    """Loads the model, or the text part, from safetensors files with eager attention. `options` are those of
    `from_pretrained`. Raises BaseModelError where a text part is not whole.
    """
    model, missing, unknown, _ = load_reported(folder, **options)
    faults = [f"no {name}" for name in missing] + [f"unknown {name}" for name in unknown]
    if faults and model.config.model_type != AutoConfig.from_pretrained(folder).model_type:
        raise BaseModelError(f"the text part of {folder}: {'; '.join(faults[:4])}", "all tensors of its config", AGAIN)
    return model


def load_reported(folder: Path, **options: Any) -> tuple[PreTrainedModel, list[str], list[str], list[str]]:
    """As `load_causal_lm`; returns also the names of tensors that the files lack, that the model has no place for, and
    that have another shape (with both shapes; only with `ignore_mismatched_sizes`).
    """
    options |= {"attn_implementation": "eager", "use_safetensors": True, "output_loading_info": True}
    options["experts_implementation"] = "eager"  # others round otherwise
    with quiet():
        config = AutoConfig.from_pretrained(folder)
    if packed := turned_back(config):
        config.quantization_config["dequantize"] = True
    names, options = None, options | {"config": config}  # else an attention that the config names would be looked for
    if config.model_type in TEXT_PARTS:
        stack, text = TEXT_PARTS[config.model_type].stack, text_config(config)
        names = {mapped for tensor in stored_tensors(folder) if (mapped := text_name(tensor.name, stack))}
        text.tie_word_embeddings = HEAD not in names
        options |= {"config": text, "key_mapping": name_patterns(stack)}
    with quiet():  # it warns of every tensor that is no part of a text, and we say it in one line
        model, report = AutoModelForCausalLM.from_pretrained(folder, **options)
        model = model.to(model.dtype) if packed else model  # older versions turn back to bfloat16
    missing, unknown = set(report["missing_keys"]), set(report["unexpected_keys"])
    if names is not None:
        missing, unknown = missing - set(model.all_tied_weights_keys), unknown & names
    shapes = [f"{name} of {tuple(stored)}, not {tuple(shape)}" for name, stored, shape in report["mismatched_keys"]]
    return model, sorted(missing), sorted(unknown), sorted(shapes)


@contextmanager
def quiet() -> Iterator[None]:
    """transformers and PEFT print no warnings and no bars while the block runs."""
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
