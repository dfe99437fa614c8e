"""Reads an assistant of Gemma 4 in a GGUF file, as llama.cpp's converter writes it. Its head is over all tokens: the
clusters that some of these files have are no part of what llama.cpp computes. Covered by
tests/export/drafters/test_assistant.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from streamspec.adapters.base_models.gguf.architectures import ARCHITECTURES
from streamspec.adapters.base_models.gguf.config import config_of
from streamspec.adapters.base_models.gguf.config_rules import Config, gemma4, gemma4_heads
from streamspec.adapters.base_models.gguf.file import GgufFile, read_gguf
from streamspec.adapters.base_models.gguf.keys import DRAFTING, Keys
from streamspec.adapters.base_models.gguf.tensors import parameters_of
from streamspec.errors import AdapterError, BaseModelError
from streamspec.export.drafters.adapter_section import Shapes
from streamspec.export.drafters.layer_config import FETCH
from streamspec.export.ops.builder import Array

ARCHITECTURE = "gemma4-assistant"
CLUSTERS, WIDTH = "masked_embd_", "embedding_length_out"
_BASE = ARCHITECTURES["gemma4"]


def _of_target(keys: Keys, config: Config) -> None:
    """Adds the width of the target's states; layers have no inputs of their own."""
    gemma4(keys, config)
    config |= {WIDTH: keys.whole(WIDTH), "vocab_size_per_layer_input": 0}


_ROW = replace(
    _BASE,
    names={name: path.removeprefix("model.") for name, path in _BASE.names.items()}
    | {f"nextn.{side}_projection": f"{side}_projection" for side in ("pre", "post")},
    where={},
    heads=partial(gemma4_heads, least=0),  # all attend to the target's keys
    more=_of_target,
)


def gguf_assistant(file: Path) -> tuple[dict[str, Any], GgufFile]:
    """The configuration of the assistant in `file`, as transformers has it, and the file. Raises AdapterError for
    another model and for what is damaged or not understood."""
    try:
        model = read_gguf(file)
        if model.architecture != ARCHITECTURE:
            found = f"{file}, a GGUF file of {model.architecture}, as the drafter"
            raise AdapterError(found, f"one of {ARCHITECTURE}, or a folder", FETCH)
        keys = model.below(ARCHITECTURE)
        keys.only(DRAFTING, keys.raw("block_count"))  # all layers draft
        metadata = {key: value for key, value in model.metadata.items() if key != f"{ARCHITECTURE}.{DRAFTING}"}
        text = config_of(replace(model, metadata=metadata), _ROW)
    except BaseModelError as error:
        raise AdapterError(error.found, error.expected, error.fix) from None
    kept = {name: tensor for name, tensor in model.tensors.items() if not name.startswith(CLUSTERS)}
    fields = {"model_type": ARCHITECTURE.replace("-", "_"), "backbone_hidden_size": text.pop(WIDTH)}
    return fields | {"use_ordered_embeddings": False, "text_config": text}, replace(model, tensors=kept)


def gguf_tensors(model: GgufFile, text: Mapping[str, Any], shapes: Shapes) -> dict[str, Array]:
    """The tensors of an assistant by transformers' names without `model.`, which have the `shapes`, in float32. Raises
    AdapterError for others, and for numbers that are not finite."""
    try:
        found = parameters_of(model, _ROW, text, shapes)
        return {one.name: one.values() for one in found}
    except BaseModelError as error:
        raise AdapterError(error.found, error.expected, error.fix) from None
