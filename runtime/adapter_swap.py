"""Swaps the adapter of an open bundle: all or nothing.

An adapter is read, its hash, base and graph are checked, its tensors are compared with the graph's inputs, bound and
tried, and only then does it replace the other one; an error before that leaves the other one in use. Its tensors stay
in the mapped file.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np

from streamspec import step_graph
from streamspec.bundle import swappable_adapters as swappable
from streamspec.bundle.manifest import TEMPLATE, Manifest
from streamspec.errors import AdapterError
from streamspec.runtime.decoding.model_runner import ModelRunner, StepRequest
from streamspec.runtime.decoding.policy import AdaptiveState, DecodingPolicy
from streamspec.runtime.draft_model.runner import TwoModelRunner
from streamspec.runtime.draft_sources.registry import NO_DATA, SourceData
from streamspec.runtime.engine.ort_runner import OrtRunner
from streamspec.runtime.hardware.providers import import_onnxruntime
from streamspec.runtime.options import LoadOptions
from streamspec.runtime.tuning.choose_policy import choose_policy
from streamspec.runtime.tuning.self_test import check_pruning


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
    """Swaps the adapters of one runner. The policy and the adaptive state of an adapter are kept for when it returns.
    `options`: of the load; `data`: for the sources of drafts.
    """

    def __init__(
        self, folder: Path, manifest: Manifest, runner: OrtRunner, options: LoadOptions, data: SourceData = NO_DATA
    ) -> None:
        self.folder, self.bundle, self.runner, self.options, self._data = folder, manifest, runner, options, data
        self._active = _Adapter(None, manifest, Tensors())
        self._policies: dict[str, tuple[DecodingPolicy, AdaptiveState]] = {}
        self._shared: WeakValueDictionary[str, Tensors] = WeakValueDictionary()

    def over(self, runner: ModelRunner) -> AdapterSwapper:
        """Returns a swapper of another runner over the same model: adapters are read and measured once for all, the
        adaptive states are each one's own.
        """
        runner = runner.target if isinstance(runner, TwoModelRunner) else runner
        assert isinstance(runner, OrtRunner)
        new = AdapterSwapper(self.folder, self.bundle, runner, self.options, self._data)
        new._policies = {key: (policy, AdaptiveState(policy)) for key, (policy, _) in self._policies.copy().items()}
        new._shared = self._shared
        return new

    def names(self) -> list[str]:
        """Names of the adapters in the bundle."""
        return swappable.names(self.folder)

    def to(self, adapter: str | Path | None) -> tuple[str | None, Manifest, DecodingPolicy, AdaptiveState]:
        """Makes the runner compute with this adapter, None: the base alone. Returns the adapter as it was given, the
        bundle's manifest with it, its policy and its adaptive state. Raises AdapterError; all is then as before.
        """
        chosen, before, runner = self._read(adapter), self._active, self.runner
        key = chosen.manifest.to_json()
        try:
            runner.use(chosen.manifest, chosen.tensors)
            runner.reset()
            drafts = 0 < runner.gamma < runner.context_length
            runner.prefill(StepRequest([0], run_drafter=drafts))  # runs with sizes that fit, or fails
            runner.reset()
            if key not in self._policies:
                check_pruning(runner, chosen.manifest)
                policy = choose_policy(runner, chosen.manifest, self.options, self._data)
                self._policies[key] = policy, AdaptiveState(policy)
        except BaseException:
            runner.use(before.manifest, before.tensors)
            raise
        self._active = chosen
        return chosen.name, chosen.manifest, *self._policies[key]

    def _read(self, adapter: str | Path | None) -> _Adapter:
        if adapter is None:
            return _Adapter(None, self.bundle, Tensors())
        folder = swappable.find(self.folder, adapter)
        manifest = swappable.read(folder, self.bundle, self.options.verify).on(self.bundle)
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
                folder / swappable.TENSORS, manifest, self.runner.model.adapter_inputs
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


def _faults(name: str, value: Any, declared: Any, sizes: dict[str, int]) -> list[str]:
    """`sizes`: those that names of dimensions stand for so far; is added to."""
    shape = value.shape()
    if value.data_type() != declared.type or len(shape) != len(declared.shape):
        return [f"{name} is {value.data_type()} {shape}, not {declared.type} {declared.shape}"]
    for actual, size in zip(shape, declared.shape, strict=True):
        if actual != (sizes.setdefault(size, actual) if isinstance(size, str) else size):
            return [f"{name} has the shape {shape}, not {declared.shape}"]
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
