"""Reads the target that is exported: the weights and the description of a base alone by numpy where its family allows
it, all others by PyTorch; what the graph of a Hugging Face folder is compared with is PyTorch's model where PyTorch is
installed, and memory has room for a mixture of experts.

So a base alone becomes the same bundle with PyTorch and without. tests/export/test_without_torch.py covers it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from streamspec import __version__
from streamspec.adapters.base_models.parameters import parameter_shapes
from streamspec.adapters.base_models.resolve import Base, resolve_base
from streamspec.adapters.base_models.weight_files import weight_files
from streamspec.adapters.base_models.without_torch import INSTALL, has_torch
from streamspec.bundle.adapter_folder import Adapter
from streamspec.errors import BaseModelError, ConfigError
from streamspec.export.spec.decoder_spec import DecoderSpec
from streamspec.export.spec.weight_source import Source
from streamspec.export.weights.checkpoint import Checkpoint, CheckpointSource, GgufCheckpoint, open_checkpoint
from streamspec.export.weights.config_spec import describe_checkpoint
from streamspec.export.weights.model_spec import describe
from streamspec.runtime.hardware.cpu import available

TOOLS = ("onnxruntime", "onnx", "torch", "transformers")
TORCH, NUMPY = "PyTorch", "numpy"
STACKED = 1.2  # of a mixture's files: what transformers takes of memory to stack the experts
LAST_BITS = 3e-7  # of rotary frequencies: PyTorch's powers are not always rounded correctly


@dataclass(frozen=True)
class ReadTarget:
    """`model`: what a graph is compared with, a model of transformers (`load_weights.load_model`) or a `Checkpoint`.
    `weighed`: one of the two, too: where weights come from, and what they are rounded on."""

    model: Any
    weighed: Any
    spec: DecoderSpec

    @property
    def read_at_once(self) -> bool:
        """Whether a thread may compute with the model while another writes its weights."""
        return isinstance(self.model, Checkpoint) and self.model is self.weighed

    def weights_only(self) -> ReadTarget:
        """Drops the model where it serves comparison alone, and frees its memory."""
        return replace(self, model=self.weighed)


def need_torch(what: str | None) -> None:
    """Raises ConfigError for `what` is asked for, if anything, where PyTorch is not installed."""
    if what is not None and not has_torch():
        raise ConfigError(f"{what} without PyTorch", "a base alone, in a bundle of this runtime", INSTALL)


def read_target(base: Base, adapter: Adapter | None, whole: bool, alone: bool = False) -> ReadTarget:
    """Reads a base and its adapter. `alone`: nothing is asked for that needs PyTorch's model. Raises BaseModelError for
    what is not computed correctly, or needs PyTorch."""
    if base.gguf is not None or not has_torch():
        checkpoint = open_checkpoint(base)
        return ReadTarget(checkpoint, checkpoint, describe_checkpoint(checkpoint))
    if alone and (found := _by_experts(base)) is not None:
        return found
    from streamspec.export.weights.load_weights import load_model

    model = load_model(base, adapter, whole=whole)
    spec = describe(model)
    drafts_alone = adapter is not None and not adapter.has_task_lora and base.made_of is not None
    if (adapter is None or drafts_alone) and (numpy_target := _checkpoint(base, spec)) is not None:
        return ReadTarget(model, *numpy_target)
    return ReadTarget(model, model, spec)


def _by_experts(base: Base) -> ReadTarget | None:
    """A mixture of experts that memory has no room for, as transformers stacks it there while it maps other weights:
    numpy reads an expert at a time. None for other bases, and for those that need PyTorch."""
    room = available()
    if base.made_of is not None or room is None:
        return None
    if STACKED * sum(file.stat().st_size for file in weight_files(base.path)) <= room:
        return None
    try:
        checkpoint = Checkpoint(base.path)
        spec = describe_checkpoint(checkpoint)
    except BaseModelError:
        return None
    return ReadTarget(checkpoint, checkpoint, spec) if spec.mixture and _under_its_names(checkpoint) else None


def resolve_readable(name: str | Path, say: Callable[[str], None]) -> Base:
    """Resolves a base that is exported alone: a GGUF file stays where it lies if numpy can describe its model. Raises
    what `resolve_base` raises."""
    base = resolve_base(name, say, weights=False)
    if base.gguf is None:
        return base
    try:
        describe_checkpoint(open_checkpoint(base))
        return base
    except BaseModelError:
        if not has_torch():  # nobody else can describe it
            raise
        return resolve_base(name, say)


def _checkpoint(base: Base, spec: DecoderSpec) -> tuple[Checkpoint, DecoderSpec] | None:
    """A base as numpy reads it; None where that differs from what PyTorch's modules say (`spec`), or takes them."""
    try:
        checkpoint = Checkpoint(base.path) if base.made_of is None else GgufCheckpoint(base.path, base.made_of)
        described = describe_checkpoint(checkpoint)
    except BaseModelError:
        return None
    return (checkpoint, described) if _under_its_names(checkpoint) and alike(described, spec) else None


def _under_its_names(checkpoint: Checkpoint) -> bool:
    """Whether the tensors have the names of transformers' parameters; it also takes others."""
    return parameter_shapes(checkpoint.config).keys() <= checkpoint.tensors.keys()


def alike(first: DecoderSpec, second: DecoderSpec) -> bool:
    """Whether two descriptions are the same but for the last bits of rotary frequencies."""
    if replace(first, rotaries=()) != replace(second, rotaries=()) or len(first.rotaries) != len(second.rotaries):
        return False
    return all(
        (mine.scale, mine.growth, len(mine.inv_freq)) == (own.scale, own.growth, len(own.inv_freq))
        and np.allclose(mine.inv_freq, own.inv_freq, rtol=LAST_BITS, atol=0)
        for mine, own in zip(first.rotaries, second.rotaries, strict=True)
    )


def source_of(model: Any, spec: DecoderSpec) -> Source:
    """The weights of a target."""
    if isinstance(model, Checkpoint):
        return CheckpointSource(model, spec)
    from streamspec.export.weights.load_weights import ModelSource

    return ModelSource(model, spec)


def computed_by(model: Any) -> str:
    """Names the library that computes a target: PyTorch or numpy."""
    return NUMPY if isinstance(model, Checkpoint) else TORCH


def tools(model: Any) -> dict[str, str]:
    """The versions of what made a bundle."""
    used = (name for name in TOOLS if name.startswith("onnx") or computed_by(model) == TORCH)
    return {"streamspec": __version__} | {name: version(name) for name in used}
