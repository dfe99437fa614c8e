"""`streamspec.train`, and what the command does before it: finds the bundle that answers in the target's place, and
makes that of an untouched GGUF file, whose operators then compute it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from streamspec.adapters.answers.openai_server import is_server
from streamspec.adapters.early_checks import check_early
from streamspec.adapters.training.config import TrainConfig
from streamspec.bundle.manifest import OWN_WEIGHTS
from streamspec.errors import ConfigError
from streamspec.library import base_bundle
from streamspec.runtime.hardware import native_library


def train(config: TrainConfig, began: float | None = None, load: Callable[..., Any] | None = None) -> dict[str, Any]:
    """Trains an adapter and writes it to `config.out`, as `streamspec train` does.

    Returns the summary that `streamspec train --json` prints: `out`, `method`, `recipe`, `minutes`, `val_loss`, and for
    drafters `tau`, `tau_rows` and `per_stream_accuracy`. Prints progress to stderr. An interrupted run continues with
    `resume=True`. `answers_from` takes whatever a command takes for a bundle, or a server's address. On a CPU, an
    untouched GGUF file is computed by the bundle of its own weights, which is made where it is new. `began`: when the
    command that this is began, by `time.monotonic()`; its time counts from then on. `load`: not needed any more.

    Raises DataError, BaseModelError, ConfigError or AdapterError, before training where possible.
    """
    return run_training(with_own_bundle(checked(config)), began)


def checked(config: TrainConfig) -> TrainConfig:
    """Refuses what can be refused without a model library. Returns the options with `answers_from` as a folder."""
    if config.answers_from is not None and not is_server(config.answers_from):
        config = replace(config, answers_from=str(base_bundle.bundle_of(config.answers_from, None, to_load=False)))
    check_early(config)
    return config


def with_own_bundle(config: TrainConfig) -> TrainConfig:
    """The options; `answers_from` is the bundle of the file's own weights where that computes the target."""
    return replace(config, answers_from=config.answers_from or own_bundle(config))


def own_bundle(config: TrainConfig) -> str | None:
    """The bundle of a GGUF file's own weights, made where there is none, which on a CPU computes an untouched target in
    PyTorch's place. None for any other target, and where no native operators compute it; then says why.
    """
    from streamspec.adapters.training.device import has_gpu

    untouched = config.target_adapter is not None and config.target_lora is None and config.base_bits is None
    if not (untouched and Path(config.base).expanduser().is_file()) or has_gpu():
        return None
    try:
        if why := native_library.why_not():
            raise ConfigError(why, "native operators", "see `streamspec doctor`")
        return str(base_bundle.bundle_of(config.base, OWN_WEIGHTS, to_load=False))
    except ConfigError as error:
        print(f"PyTorch computes the target: {error.found}", file=sys.stderr)
        return None


def run_training(config: TrainConfig, began: float | None) -> dict[str, Any]:
    """Trains with what opens the bundle at `answers_from`, and its graph up to a layer."""
    from streamspec.adapters.train import train as run

    load: Callable[..., Any] | None = None
    lower_layers: Callable[..., Any] | None = None
    if config.answers_from is not None:
        from streamspec.runtime import load

        if find_spec("onnx") is not None:
            from streamspec.export.runners.lower_layers import LowerLayers as lower_layers

    return run(config, began, load, lower_layers)
