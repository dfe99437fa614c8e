"""A LoRA of PEFT that was trained on a multimodal checkpoint, as a LoRA of its text part.

Its tensors are named as in the whole model (`base_model.model.model.language_model.layers...`, or as older layouts
have it), and so are the modules of its configuration: a pattern such as `.*language_model.*q_proj` names nothing in
the text model. The configuration for the text model therefore lists the modules that the file holds. Updates of the
vision tower and of the projector are left out: no text passes there.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from streamspec.atomic import scratch_folder
from streamspec.bundle.adapter_folder import TASK_CONFIG, TASK_WEIGHTS, read_json, tensor_shapes
from streamspec.model_families.text_parts import WRAPPER, text_names, unwrapped

LORA_A = (".lora_A", ".lora_embedding_A")


@contextmanager
def text_lora(folder: Path, weights: bool = True) -> Iterator[Path]:
    """A folder of PEFT's with the LoRA in `folder` for the text model: `folder` itself where its tensors are named so
    already, else a copy that lasts as long as the block; without tensors unless `weights`.
    """
    shapes = tensor_shapes(folder / TASK_WEIGHTS)
    names = text_names(shapes)
    if all(names.get(name) == name for name in shapes):
        yield folder
        return
    with scratch_folder() as made:
        settings = _settings(read_json(folder / TASK_CONFIG), names)
        (made / TASK_CONFIG).write_text(json.dumps(settings), encoding="utf-8")
        if weights:
            from safetensors.torch import load_file, save_file

            tensors = load_file(folder / TASK_WEIGHTS)
            save_file({mapped: tensors[name] for name, mapped in names.items()}, made / TASK_WEIGHTS)
        yield made


def _settings(raw: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """PEFT's configuration `raw` of the whole model for the text model. Ranks and scales of each module are those that
    PEFT gives it by its name in the whole model.
    """
    from peft.utils.other import get_pattern_key

    modules = {_module(name): _module(mapped) for name, mapped in names.items() if any(side in name for side in LORA_A)}
    settings: dict[str, Any] = {
        "target_modules": sorted(modules.values()),
        "exclude_modules": None,
        "layers_to_transform": None,
        "layers_pattern": None,
    }
    for setting, default in (("rank_pattern", raw.get("r")), ("alpha_pattern", raw.get("lora_alpha"))):
        patterns = raw.get(setting) or {}
        values = {module: patterns.get(get_pattern_key(list(patterns), module), default) for module in modules}
        settings[setting] = {modules[module]: value for module, value in values.items() if value != default}
    if whole := raw.get("modules_to_save"):
        settings["modules_to_save"] = _held(whole, names) or None
    if isinstance(rows := raw.get("trainable_token_indices"), dict):
        settings["trainable_token_indices"] = {unwrapped(f"{module}.")[:-1]: ids for module, ids in rows.items()}
    return raw | settings


def _held(modules: list[str], names: Iterable[str]) -> list[str]:
    """The modules saved whole, as the text model names them, that the tensors `names` of the file include."""
    held = {part for name in names for part in name.split(".")}
    mapped = [unwrapped(f"{module}.")[:-1] for module in modules]
    return [module for module in mapped if module.split(".")[-1] in held]


def _module(name: str) -> str:
    """The module that the tensor `name` of a file is an update of."""
    cut = next(name.index(side) for side in LORA_A if side in name)
    return name[:cut].removeprefix(WRAPPER)
