"""Refuses, within a second and before torch is imported, output folders, missing packages, data whose first rows cannot
be read, and adapters and bases that do not fit the options. Free of torch.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from streamspec.adapters.answers.openai_server import OpenAiServer, is_server
from streamspec.adapters.base_models.resolve import peek
from streamspec.adapters.distributed.launch import check_launch, divides
from streamspec.adapters.runs.run_folder import WORK, check_out
from streamspec.adapters.runs.run_lock import check_unused
from streamspec.adapters.training.config import UNTOUCHED, TrainConfig
from streamspec.adapters.training.continued import start_of
from streamspec.bundle.adapter_folder import (
    STREAM_CONFIG,
    STREAM_WEIGHTS,
    TASK_CONFIG,
    TASK_WEIGHTS,
    check_task_lora,
    read_adapter,
    streams_of,
)
from streamspec.bundle.files import read_manifest
from streamspec.data import sample_examples
from streamspec.errors import AdapterError, ConfigError
from streamspec.model_families import turned_back
from streamspec.option_fields import flag

FIRST_ROWS = 20  # of the data, read before anything is loaded; the rest is read later


def check_early(config: TrainConfig) -> None:
    """Refuses what can be refused without a model library. Raises ConfigError, DataError, AdapterError or
    BaseModelError.
    """
    check_launch()
    if config.base_bits and divides():
        raise ConfigError(f"FSDP with --base-bits {config.base_bits}", "one of both", "leave --base-bits out")
    check_unused(config.out / WORK)
    check_out(config.out, config.resume)
    check_packages(config)
    for data in (config.data, config.val):
        if data is not None:
            sample_examples(data, config.renamed, FIRST_ROWS)
    shape = peek(config.base)
    ns = config.ns
    if shape is not None:
        ns = check_layers(config, *shape)
    check_target_folder(config)
    if config.answers_from is not None:
        check_answers_from(config.answers_from)
    if config.warm_start is not None:
        check_warm_start(config, ns)
    if config.continue_ is not None:
        start_of(config.continue_).check(config.resolved)


def check_packages(config: TrainConfig) -> None:
    """Refuses options whose package is not installed."""
    needed = {"report_to": config.report_to, "base_bits": config.base_bits and "bitsandbytes"}
    for name, package in needed.items():
        if package and find_spec(package) is None:
            found = f"{flag(name)} {getattr(config, name)} without the package {package}"
            raise ConfigError(found, "the package", f"pip install {package}")


def check_answers_from(place: str) -> None:
    """Refuses a folder that is no bundle, and a server that does not answer."""
    if is_server(place):
        OpenAiServer(place)
    else:
        read_manifest(Path(place))


def check_layers(config: TrainConfig, family: str, layers: int) -> int:
    """Refuses options that a base of this family and number of layers cannot have; returns its number of MSA layers."""
    config.drafter.check_base(config.resolved, family, layers)
    ns = config.ns or max(1, round(layers / 3))
    if ns > layers:
        raise ConfigError(f"ns = {ns}", f"1..{layers}, the layers of this base", "change --ns")
    return ns


def check_bits(config: TrainConfig, base: Any) -> None:
    """Refuses to round a base once more whose weights, by its config, are packed already."""
    if config.base_bits is not None and turned_back(base):
        found = f"{flag('base_bits')} {config.base_bits} for a base whose weights are packed already"
        raise ConfigError(found, "weights in float16, bfloat16 or float32", "leave it out, or take a copy in bfloat16")


def check_target_folder(config: TrainConfig) -> None:
    """Refuses a target adapter without a task LoRA, a damaged one, and the word "base" where it may mean a folder."""
    target, path = config.target_adapter, config.target_lora
    if target is not None and path is None and (target / TASK_WEIGHTS).exists():
        raise ConfigError(
            f"--target-adapter {UNTOUCHED}, and an adapter in a folder of that name",
            "the untouched base or that adapter",
            "give the folder's whole path, or rename it",
        )
    if path is None:
        return
    described = any((path / name).exists() for name in (STREAM_CONFIG, TASK_CONFIG))
    if described:
        read_adapter(path)
    if not described or not (path / TASK_WEIGHTS).exists():
        raise AdapterError(f"{path} has no {TASK_WEIGHTS}", "an adapter folder with it", "check --target-adapter")
    check_task_lora(path)


def check_warm_start(config: TrainConfig, ns: int | None) -> None:
    """Refuses a warm start from no drafter, and, where the number `ns` of MSA layers is known, from one of another
    shape.
    """
    path = config.warm_start
    assert path is not None
    if not (path / STREAM_WEIGHTS).exists():
        raise AdapterError(f"{path} has no {STREAM_WEIGHTS}", "an adapter folder with it", "check --warm-start")
    saved = streams_of(path)
    if ns is not None:
        config.drafter.check_warm_start(config.resolved | {"ns": ns}, saved)
