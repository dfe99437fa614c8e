"""Swaps the adapter of an open bundle: all or nothing.

An adapter is read, its hash, base and graph are checked, its tensors are compared with the graph's inputs, bound and
tried, and only then does it replace the other one; an error before that leaves the other one in use. Its tensors stay
in the mapped file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np

from streamspec import step_graph
from streamspec.bundle import swappable
from streamspec.bundle.manifest import TEMPLATE, Manifest
from streamspec.errors import AdapterError
from streamspec.runtime.decoding.model_runner import ModelRunner
from streamspec.runtime.decoding_policy import AdaptiveState, DecodingPolicy, LoadPolicy, settle
from streamspec.runtime.engine.runner import OrtRunner
from streamspec.runtime.hardware.providers import import_onnxruntime


class Tensors(dict[str, Any]):
    """OrtValues by name, views of the mapped file. Sessions with the same adapter share them; nothing else keeps
    them.
    """


class _Adapter(NamedTuple):
    """`manifest`: the bundle's with this adapter."""

    name: str | None
    manifest: Manifest
    tensors: Tensors


class AdapterSwapper:
    """Of one open bundle. What was settled and learnt for an adapter is kept for when it comes back."""

    def __init__(self, folder: Path, manifest: Manifest, engine: OrtRunner, asked: LoadPolicy, verify: bool) -> None:
        self.folder, self.bundle, self.engine, self.asked, self.verify = folder, manifest, engine, asked, verify
        self._now = _Adapter(None, manifest, Tensors())
        self._settings: dict[str, DecodingPolicy] = {}
        self._shared: WeakValueDictionary[str, Tensors] = WeakValueDictionary()

    def over(self, engine: ModelRunner) -> AdapterSwapper:
        """One for another sequence of the same graph: adapters are read and measured once for all, what is learnt is
        each one's own.
        """
        assert isinstance(engine, OrtRunner)
        new = AdapterSwapper(self.folder, self.bundle, engine, self.asked, self.verify)
        new._settings = {
            key: replace(setting, learnt=AdaptiveState(setting.calibration))
            for key, setting in self._settings.copy().items()
        }
        new._shared = self._shared
        return new

    def names(self) -> list[str]:
        """Adapters that lie in the bundle."""
        return swappable.names(self.folder)

    def to(self, adapter: str | Path | None) -> DecodingPolicy:
        """From now on the engine computes with this adapter, None: the base alone. Raises AdapterError; all is then as
        before.
        """
        chosen, before, engine = self._read(adapter), self._now, self.engine
        key = chosen.manifest.to_json()
        try:
            engine.use(chosen.manifest, chosen.tensors)
            engine.reset()
            engine.prefill(
                [0], draft=0 < engine.gamma < engine.context_length
            )  # runs with sizes that fit, or not at all
            engine.reset()
            if key not in self._settings:
                self._settings[key] = settle(engine, chosen.manifest, self.asked)
        except BaseException:
            engine.use(before.manifest, before.tensors)
            raise
        self._now = chosen
        return replace(self._settings[key], adapter=chosen.name)

    def _read(self, adapter: str | Path | None) -> _Adapter:
        if adapter is None:
            return _Adapter(None, self.bundle, Tensors())
        folder = swappable.find(self.folder, adapter)
        found = swappable.read(folder, self.bundle, self.verify)
        manifest = found.on(self.bundle)
        if manifest.prompt_format.kind == "chat" and TEMPLATE not in self.bundle.files:
            raise AdapterError(
                f"{folder}: an adapter for chats",
                f"a bundle with {TEMPLATE}",
                "use it with a base that has a chat template",
            )
        key = manifest.to_json()
        tensors = self._shared.get(key)
        if tensors is None:
            tensors = self._shared[key] = read_tensors(
                folder / swappable.TENSORS, manifest, self.engine.model.adapter_inputs
            )
        return _Adapter(str(adapter), manifest, tensors)


def read_tensors(file: Path, manifest: Manifest, inputs: Mapping[str, Any]) -> Tensors:
    """OrtValues by name, views of the mapped file. `inputs`: what the graph has for adapters, by name, with `type` and
    `shape`.

    Raises AdapterError where names, types, sizes or numbers are not what the graph and the manifest ask for.
    """
    try:
        values = Tensors(import_onnxruntime().AdapterFormat.read_adapter(str(file)).get_parameters())
    except Exception as error:  # ONNX Runtime has no class of its own for this
        raise AdapterError(f"{file}: {error}", "an adapter of ONNX Runtime", swappable.AGAIN) from None
    streams = manifest.streams
    needed = {
        row.name
        for row in step_graph.ADAPTER_INPUTS
        if streams and row.name in inputs and (streams.pruning or row.needs != "early_exit")
    }
    faults = [f"unknown {name}" for name in values if name not in inputs] + [
        f"no {name}" for name in sorted(needed - set(values))
    ]
    sizes: dict[str, int] = {"gamma": streams.gamma, "root": manifest.model.hidden_size} if streams else {}
    for name, value in values.items() if not faults else ():
        faults += _faults(name, value, inputs[name], sizes)
    if not faults and streams:
        faults += _odd_streams({name: values[name].numpy() for name in needed}, manifest)
    if faults:
        raise AdapterError(
            f"{file}: {'; '.join(faults[:4])}", "the tensors that the bundle's graph takes", swappable.AGAIN
        )
    return values


def _faults(name: str, value: Any, wanted: Any, sizes: dict[str, int]) -> list[str]:
    """`sizes`: those that names of dimensions stand for so far; is added to."""
    shape = value.shape()
    if value.data_type() != wanted.type or len(shape) != len(wanted.shape):
        return [f"{name} is {value.data_type()} {shape}, not {wanted.type} {wanted.shape}"]
    for found, size in zip(shape, wanted.shape, strict=True):
        if found != (sizes.setdefault(size, found) if isinstance(size, str) else size):
            return [f"{name} has the shape {shape}, not {wanted.shape}"]
    array = value.numpy()
    return [f"{name} is not finite"] if array.dtype.kind == "f" and not np.isfinite(array).all() else []


def _odd_streams(tensors: Mapping[str, np.ndarray], manifest: Manifest) -> list[str]:
    streams, model = manifest.streams, manifest.model
    assert streams is not None
    capacity = manifest.swappable
    begin, shift = (int(tensors[name][0]) for name in (step_graph.STREAM_BEGIN, step_graph.STREAM_SHIFT))
    assert capacity is not None
    out = []
    if begin != capacity.ns.index(streams.ns):
        out.append(f"{step_graph.STREAM_BEGIN} {begin} with streams over {streams.ns} layers")
    if shift != (streams.positions == "shifted"):
        out.append(f"{step_graph.STREAM_SHIFT} {shift} with positions {streams.positions}")
    vocabulary = tensors.get(step_graph.DRAFT_VOCAB)
    if vocabulary is not None and not (
        len(vocabulary) >= streams.candidates and 0 <= vocabulary.min() <= vocabulary.max() < model.vocab_size
    ):
        out.append(
            f"a draft vocabulary of {len(vocabulary)} tokens, some outside 0..{model.vocab_size - 1}, or fewer than "
            f"{streams.candidates}"
        )
    return out
