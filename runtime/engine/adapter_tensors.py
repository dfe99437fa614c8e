"""Reads the tensors of an adapter and compares them with the inputs of the graph that takes them.

Covered by tests/runtime/test_adapter_swap.py and tests/attacks/test_adapters.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from streamspec import step_graph
from streamspec.bundle import swappable_adapters as swappable
from streamspec.bundle.manifest import Manifest
from streamspec.errors import AdapterError
from streamspec.runtime.hardware.providers import import_onnxruntime


class Tensors(dict[str, Any]):
    """OrtValues by name, views of the mapped file. Sessions with the same adapter share them; nothing else keeps
    them.
    """


def read_tensors(file: Path, manifest: Manifest, inputs: Mapping[str, Any]) -> Tensors:
    """Returns the OrtValues of an adapter by name, views of the mapped file. `inputs`: the graph's inputs for adapters
    by name, with `type` and `shape`.

    Raises AdapterError where names, types, sizes or numbers are not those that the graph and the manifest ask for.
    """
    try:
        values = Tensors(import_onnxruntime().AdapterFormat.read_adapter(str(file)).get_parameters())
    except Exception as error:  # ONNX Runtime has no class of its own for this
        raise AdapterError(f"{file}: {error}", "an adapter of ONNX Runtime", swappable.AGAIN) from None
    drafter = manifest.streams
    needed = {
        row.name
        for row in step_graph.ADAPTER_INPUTS
        if drafter and row.name in inputs and (drafter.pruning or row.needs != "early_exit")
    }
    faults = [f"unknown {name}" for name in values if name not in inputs] + [
        f"no {name}" for name in sorted(needed - set(values))
    ]
    sizes: dict[str, int] = {"gamma": drafter.gamma, "root": manifest.model.hidden_size} if drafter else {}
    for name, value in values.items() if not faults else ():
        faults += _faults(name, value, inputs[name], sizes)
    if not faults and drafter:
        faults += _drafter_faults({name: values[name].numpy() for name in needed}, manifest)
    if faults:
        raise AdapterError(
            f"{file}: {'; '.join(faults[:4])}", "the tensors that the bundle's graph takes", swappable.AGAIN
        )
    return values


def _faults(name: str, value: Any, declared: Any, sizes: dict[str, int]) -> list[str]:
    """Compares a tensor with the input that takes it. `sizes`: sizes of named dimensions so far; it adds new ones."""
    shape = value.shape()
    if value.data_type() != declared.type or len(shape) != len(declared.shape):
        return [f"{name} is {value.data_type()} {shape}, not {declared.type} {declared.shape}"]
    for actual, size in zip(shape, declared.shape, strict=True):
        if actual != (sizes.setdefault(size, actual) if isinstance(size, str) else size):
            return [f"{name} has the shape {shape}, not {declared.shape}"]
    array = value.numpy()
    return [f"{name} is not finite"] if array.dtype.kind == "f" and not np.isfinite(array).all() else []


def _drafter_faults(tensors: Mapping[str, np.ndarray], manifest: Manifest) -> list[str]:
    drafter, model = manifest.streams, manifest.model
    assert drafter is not None
    capacity = manifest.swappable
    begin, shift = (int(tensors[name][0]) for name in (step_graph.STREAM_BEGIN, step_graph.STREAM_SHIFT))
    assert capacity is not None
    faults = []
    if begin != capacity.ns.index(drafter.ns):
        faults.append(f"{step_graph.STREAM_BEGIN} {begin} with streams over {drafter.ns} layers")
    if shift != (drafter.positions == "shifted"):
        faults.append(f"{step_graph.STREAM_SHIFT} {shift} with positions {drafter.positions}")
    vocabulary = tensors.get(step_graph.DRAFT_VOCAB)
    if vocabulary is not None and not (
        len(vocabulary) >= drafter.candidates and 0 <= vocabulary.min() <= vocabulary.max() < model.vocab_size
    ):
        faults.append(
            f"a draft vocabulary of {len(vocabulary)} tokens, some outside 0..{model.vocab_size - 1}, or fewer than "
            f"{drafter.candidates}"
        )
    return faults
