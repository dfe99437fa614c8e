"""Writes the adapter folder (docs/reference/adapter-format.md): PEFT's two files for the task LoRA, ours beside them.

Everything is written to a temporary name first, `training.json` last.
"""

from __future__ import annotations

import json
import platform
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from streamspec.acceptance_stats import Acceptance
from streamspec.adapters.base_models.resolve import Base
from streamspec.adapters.distributed import processes
from streamspec.adapters.drafters.acceptance_eval import MAX_RANK
from streamspec.adapters.drafters.drafting_model import DraftingModel
from streamspec.adapters.reporting.model_card import write_card
from streamspec.adapters.reporting.verdict import verdict
from streamspec.adapters.training_run import Run
from streamspec.atomic import write_bytes, write_text
from streamspec.bundle.adapter_folder import (
    ACCEPTANCE,
    FORMAT_VERSION,
    PROVENANCE,
    RESTORE,
    SCALE,
    STREAM_CONFIG,
    STREAM_WEIGHTS,
    TASK_CONFIG,
    TASK_WEIGHTS,
    from_bytes,
)
from streamspec.errors import AdapterError
from streamspec.json_fields import read_note
from streamspec.prompt.template_file import PROCESSOR_TEMPLATE, SETTINGS, SPECIALS, TEMPLATE


def write_task_lora(peft: PeftModel, base: Base, out: Path) -> None:
    """The task LoRA in PEFT's format, fp16. The first process writes it."""
    state = {k: v.half().contiguous() for k, v in get_peft_model_state_dict(peft).items()}
    save_tensors(state, out / TASK_WEIGHTS)
    config = peft.peft_config["default"].to_dict()
    config.update(base_model_name_or_path=base.id, inference_mode=True)
    config = {k: sorted(v) if isinstance(v, set) else v for k, v in config.items()}
    if processes.is_first():
        write_text(out / TASK_CONFIG, json.dumps(config, indent=1, default=str))


def copy_task_lora(source: Path, out: Path) -> None:
    """Copies the task LoRA of `source` into the folder of the drafter trained over it, and the chat template and the
    tokenizer's settings where `source` has its own.
    """
    if not processes.is_first():
        return
    for name in (TASK_CONFIG, TASK_WEIGHTS, TEMPLATE, PROCESSOR_TEMPLATE, SETTINGS, SPECIALS):
        if name in (TASK_CONFIG, TASK_WEIGHTS) or (source / name).is_file():
            write_bytes(out / name, (source / name).read_bytes())


def drafter_tensors(drafter: DraftingModel, vocabulary: Tensor | None) -> dict[str, Tensor]:
    """The tensors of `streamspec.safetensors`: parameters as fp16, and the draft vocabulary int64."""
    out = {k: v.detach().half().contiguous() for k, v in drafter.drafter_tensors().items()}
    if vocabulary is not None:
        out["draft_vocab"] = vocabulary.long().contiguous()
    return out


def load_drafter(adapter: Path, drafter: DraftingModel) -> None:
    """Puts the drafter's tensors of `adapter` into `drafter`; names every tensor that does not fit in one error.

    Its `optional_tensors` may be missing from `adapter`, and a LoRA may have fewer ranks (a shrunk one): what is
    new starts without effect. Layers that `drafter` does not have are left out.
    """
    saved, current = read_tensors(adapter / STREAM_WEIGHTS), drafter.drafter_tensors()
    new = tuple(prefix for prefix, sign in drafter.optional_tensors.items() if sign not in saved)
    current = {n: p for n, p in current.items() if not n.startswith(new)}
    wrong = sorted(n for n, p in current.items() if n not in saved or not _fits(n, saved[n], p))
    if wrong:
        raise AdapterError(
            f"{adapter}: {', '.join(wrong[:4])} missing or of another shape",
            "a drafter of the same shape, and of no higher rank",
            "check --warm-start or --continue",
        )
    with torch.no_grad():
        for name, parameter in current.items():
            value = saved[name]
            if value.shape != parameter.shape and name.endswith("lora_B"):
                parameter.zero_()
            parameter[tuple(map(slice, value.shape))] = value


def _fits(name: str, value: Tensor, parameter: Tensor) -> bool:
    """Equal shapes, but for the rank: rows of `lora_A`, columns of `lora_B`."""
    if name.endswith("lora_A"):
        return value.shape[0] <= parameter.shape[0] and value.shape[1:] == parameter.shape[1:]
    if name.endswith("lora_B"):
        return value.shape[1] <= parameter.shape[1] and value.shape[:1] == parameter.shape[:1]
    return value.shape == parameter.shape


def finish_drafting(
    run: Run, drafter: DraftingModel, vocabulary: Tensor | None, ranks: list[list[list[int]]], metrics: dict[str, Any]
) -> dict[str, Any]:
    """Completes the folder of an adapter with a drafter."""
    config = run.config
    save_tensors(drafter_tensors(drafter, vocabulary), config.out / STREAM_WEIGHTS)
    if processes.is_first():
        Acceptance(drafter.gamma, MAX_RANK, ranks).save(config.out / ACCEPTANCE)
    described = drafter.described() | {"draft_vocab": None if vocabulary is None else len(vocabulary)}
    return finish(run, described, metrics)


def finish(run: Run, drafter: dict[str, Any] | None, metrics: dict[str, Any]) -> dict[str, Any]:
    """Completes the folder of an adapter; `drafter` describes its drafter, None for a plain fine-tune."""
    config, base = run.config, run.base
    description = {
        "format_version": FORMAT_VERSION,
        "method": config.method,
        "recipe": config.recipe if drafter else None,
        "base": {"id": base.id, "sha256": base.sha256, "model_type": base.model_type},
        "prompt_format": asdict(run.formatter.format),
        "streams": drafter,
    }
    write_json(config.out / STREAM_CONFIG, description)
    provenance = _provenance(run, metrics)
    sentences = verdict(metrics, run.state.log)
    if processes.is_first():
        write_card(config.out, description, provenance, sentences)
    write_json(config.out / PROVENANCE, provenance)
    return {
        "out": str(config.out),
        "method": config.method,
        "recipe": description["recipe"],
        "minutes": provenance["minutes"],
        **metrics,
        "verdict": sentences,
    }


def _provenance(run: Run, metrics: dict[str, Any]) -> dict[str, Any]:
    """Returns the content of `training.json`, which records how the adapter was made."""
    return {
        "config": run.config.to_json(),
        "metrics": metrics,
        "minutes": round(run.budget.elapsed() / 60, 2),
        "data": run.data,
        "log": run.state.log,
        "versions": {n: version(n) for n in ("torch", "transformers", "peft")} | {"python": platform.python_version()},
        "device": run.device.type,
        "threads": torch.get_num_threads(),
        "processes": run.state.processes,
        "continued": [] if run.config.continue_ is None else runs_of(run.config.continue_),
    }


def runs_of(folder: Path) -> list[dict[str, Any]]:
    """Minutes, device and data of the runs that made an adapter, the first one first; none where it does not say."""
    saved = read_note(folder / PROVENANCE)
    last = {name: saved[name] for name in ("minutes", "device", "data") if name in saved}
    return [*saved.get("continued", []), *([last] if len(last) == 3 else [])]


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Tensors of a file of the adapter folder, those in 8 bits as float16. Raises AdapterError where it is missing or
    damaged.
    """
    try:
        tensors = load_file(path)
        kept = {name for name, value in tensors.items() if name.endswith(SCALE) or value.dtype == torch.int8}
        wide = from_bytes({name: tensors.pop(name).numpy() for name in kept})
        return tensors | {name: torch.from_numpy(value) for name, value in wide.items()}
    except (OSError, TypeError, ValueError, SafetensorError) as error:
        raise AdapterError(f"{path}: {error}", "a safetensors file", RESTORE) from None


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Writes a configuration file of the adapter folder atomically, on the first process."""
    if processes.is_first():
        write_text(path, json.dumps(value, indent=1))


def save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Writes a safetensors file atomically, on the first process."""
    if processes.is_first():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, save(tensors))
