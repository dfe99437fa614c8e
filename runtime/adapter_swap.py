"""Swaps the adapter of an open bundle: all or nothing.

An adapter is read, its hash, base and graph are checked, its tensors are compared with the graph's inputs, bound and
tried, and only then does it replace the other one; an error before that leaves the other one in use. Its tensors stay
in the mapped file.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple
from weakref import WeakValueDictionary

from streamspec.bundle import swappable_adapters as swappable
from streamspec.bundle.manifest import TEMPLATE, Manifest
from streamspec.errors import AdapterError
from streamspec.runtime.decoding.model_runner import ModelRunner, StepRequest
from streamspec.runtime.decoding.policy import AdaptiveState, DecodingPolicy
from streamspec.runtime.draft_model.runner import TwoModelRunner
from streamspec.runtime.draft_sources.registry import NO_DATA, SourceData
from streamspec.runtime.engine.adapter_tensors import Tensors, read_tensors
from streamspec.runtime.engine.ort_runner import OrtRunner
from streamspec.runtime.options import LoadOptions
from streamspec.runtime.tuning.choose_policy import choose_policy
from streamspec.runtime.tuning.self_test import check_pruning


class _Adapter(NamedTuple):
    """`manifest`: the bundle's with this adapter."""

    name: str | None
    manifest: Manifest
    tensors: Tensors


class AdapterSwapper:
    """Swaps the adapters of one runner. Remembers the policy and the adaptive state of each adapter. `options`: of the
    load; `data`: for the sources of drafts.
    """

    def __init__(
        self, folder: Path, manifest: Manifest, runner: OrtRunner, options: LoadOptions, data: SourceData = NO_DATA
    ) -> None:
        self.folder = folder.absolute()
        self.bundle = manifest
        self.runner = runner
        self.options = options
        self._data = data
        self._active = _Adapter(None, manifest, Tensors())
        self._policies: dict[str, tuple[DecodingPolicy, AdaptiveState]] = {}
        self._shared: WeakValueDictionary[str, Tensors] = WeakValueDictionary()

    def over(self, runner: ModelRunner) -> AdapterSwapper:
        """Returns a swapper of another runner over the same model: both read and measure adapters once, and each has
        adaptive states of its own.
        """
        runner = runner.target if isinstance(runner, TwoModelRunner) else runner
        assert isinstance(runner, OrtRunner)
        new = AdapterSwapper(self.folder, self.bundle, runner, self.options, self._data)
        new._policies = {key: (policy, AdaptiveState(policy)) for key, (policy, _) in self._policies.copy().items()}
        new._shared = self._shared
        return new

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

    def manifest_of(self, adapter: str | Path | None) -> Manifest:
        """Returns the bundle's manifest with this adapter, None: the base alone. Raises AdapterError."""
        return self.bundle if adapter is None else self._manifest(swappable.find(self.folder, adapter), hashes=False)

    def _manifest(self, folder: Path, hashes: bool) -> Manifest:
        manifest = swappable.read(folder, self.bundle, hashes).on(self.bundle)
        if manifest.prompt_format.kind == "chat" and TEMPLATE not in self.bundle.files:
            raise AdapterError(
                f"{folder}: an adapter for chats",
                f"a bundle with {TEMPLATE}",
                "use it with a base that has a chat template",
            )
        return manifest

    def _read(self, adapter: str | Path | None) -> _Adapter:
        if adapter is None:
            return _Adapter(None, self.bundle, Tensors())
        folder = swappable.find(self.folder, adapter)
        manifest = self._manifest(folder, self.options.verify)
        key = manifest.to_json()
        tensors = self._shared.get(key)
        if tensors is None:
            tensors = self._shared[key] = read_tensors(
                folder / swappable.TENSORS, manifest, self.runner.model.adapter_inputs
            )
        return _Adapter(str(adapter), manifest, tensors)
