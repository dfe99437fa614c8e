"""Reads `generation_config.json` of a Hugging Face folder: which tokens end answers, and how its publisher samples."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from streamspec.bundle.sampling_section import read_sampling
from streamspec.errors import BaseModelError
from streamspec.json_fields import Fields, parse_object

GENERATION, AGAIN = "generation_config.json", "fetch the base again"
# transformers' own values where a file samples and does not state them: it saves no field that equals its default.
SAMPLED = {"temperature": 1.0, "top_k": 50}
OFF = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
# Fields that do not tell which token follows: ends, lengths, caches, what is returned, how drafts are made.
HARMLESS = re.compile(
    r"_.*|do_sample|(bos|eos|pad|unk|user|assistant|decoder_start)_token_id|transformers_version|chat_format|max_.*"
    r"|.*cache.*|output_.*|return_dict.*|num_return_sequences|.*assistant.*|.*_look.*|speculation.*"
    r"|use_mtp|.*compile.*|prefill_.*|.*batching.*|low_memory|renormalize_logits|remove_invalid_values"
    r"|early_stopping|length_penalty|is_.*|trust_.*"
)
ONE_IS_OFF = ("num_beams", "num_beam_groups", "typical_p", "encoder_repetition_penalty", "guidance_scale")


def read_generation(folder: Path) -> dict[str, Any]:
    """Returns the fields of the generation config, none where there is no file. Raises BaseModelError for a damaged
    one."""
    file = folder / GENERATION
    return parse_object(file.read_bytes(), str(file), BaseModelError, AGAIN) if file.is_file() else {}


def sampling_of(generation: dict[str, Any]) -> dict[str, Any]:
    """Returns the sampling of transformers' `generate` with this file, as `Manifest.sampling` has it: fields that are
    off are left out. Empty where a value cannot be sampled with (`unused_fields`).
    """
    try:
        return _read(generation)
    except BaseModelError:
        return {}


def unused_fields(generation: dict[str, Any]) -> list[str]:
    """Names what the file asks for and `sampling_of` leaves out."""
    off = {} if generation.get("do_sample") else {name: None for name in OFF if name != "repetition_penalty"}
    left = [
        f"{name} {str(value)[:40]}" + " without do_sample" * (name in off)
        for name, value in generation.items()
        if (name in off or name not in OFF) and not HARMLESS.fullmatch(name)
        if value and not (name in ONE_IS_OFF and value == 1) and value not in (OFF.get(name), SAMPLED.get(name))
    ]
    try:
        _read(generation)
    except BaseModelError as error:
        return [f"its sampling ({error.found.partition('.json.')[2]}; expected {error.expected})", *left]
    return left


def _read(generation: dict[str, Any]) -> dict[str, Any]:
    stated = {name: generation[name] for name in OFF if generation.get(name) is not None}
    wanted = SAMPLED | stated
    if not generation.get("do_sample") or wanted["temperature"] == 0:
        wanted = {name: value for name, value in stated.items() if name == "repetition_penalty"}
    values = read_sampling(Fields(wanted, GENERATION, BaseModelError, AGAIN))
    return {name: value for name, value in values.items() if value != OFF[name]}
