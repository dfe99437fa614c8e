"""An opened step graph (docs/architecture.md, "The step graph"): one ONNX Runtime session, shared by any number of
sequences.

What is opened once lies here: the weights, what the graph takes and gives, whose turn it is. What belongs to one text
is the engine's. Safe to use from several threads. Knows nothing about tokens.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakSet

import numpy as np

from streamspec.bundle.manifest import COMPACT, FLOAT_ROWS, Manifest, SwappableCapacity, verify_files
from streamspec.bundle.onnx_check import check_graphs
from streamspec.errors import BundleError, ConfigError
from streamspec.runtime.decoding.model_runner import Cancelled
from streamspec.runtime.decoding.sampling import GREEDY
from streamspec.runtime.engine.idle_unload import IdleUnloader
from streamspec.runtime.engine.io_binding import TYPES, IoBinding
from streamspec.runtime.engine.scheduler import FairLock
from streamspec.runtime.hardware.cpu import physical_cores
from streamspec.runtime.hardware.huge_pages import huge_pages, trim
from streamspec.runtime.hardware.int8_saturation import products_saturate
from streamspec.runtime.hardware.providers import (
    CPU,
    check_placement,
    flavour,
    import_onnxruntime,
    named,
    prepare,
    usable,
)

# microseconds that a worker waits busily: longer than a step's own work on the host, then it costs nothing until the
# next
SPIN = 1000
_NEEDED = ("input_ids", "position_ids", "tree_mask", "past_length", "logit_rows")
_CHOICE_INPUTS = (*GREEDY.scalars(), "uniforms", "seen", "free", "allowed")
_STREAM_INPUTS = ("parents", "stream_ids", "forced_node")
_STREAM_OUTPUTS = ("accepted_node", "candidates", "candidate_logits")
_PRUNING_INPUTS = ("keep_rows", "keep_above", "priors")


class Unloadable(Protocol):
    """What holds on to an open graph."""

    def unload(self) -> None:
        """Lets go of it, where it has hold of it."""

    def reload(self) -> None:
        """Takes hold of it as it is now."""


class LoadedModel:
    """The graph of a bundle, `manifest`, open on a provider."""

    def __init__(
        self,
        model: Path,
        manifest: Manifest,
        threads: int | None = None,
        provider: str = "cpu",
        spin: bool = True,
        profile: Path | None = None,
    ) -> None:
        """Raises BundleError where the graph is not what the manifest promises, ConfigError for unknown providers,
        ProviderError where this one cannot be used here or leaves to the CPU what decides the speed.

        `spin`: worker threads wait busily for up to a millisecond; faster, at the price of a warm core while
        generating. `profile`: ONNX Runtime records every node's time in a file whose name begins so (`end_profile` says
        which).
        """
        self.threads = threads if threads is not None else physical_cores()
        self.path, self.manifest, self.provider, self.spin = model, manifest, provider, spin
        self.rows = manifest.static.rows if manifest.static else None  # of every call, where shapes are fixed
        self.turns = FairLock()
        self.ort = import_onnxruntime()
        self.version = str(self.ort.__version__)
        self.unloader = IdleUnloader(self._close, self._reopen)
        self.hashes = True  # whether files are hashed again before they are opened again
        self._engines: WeakSet[Unloadable] = WeakSet()
        self._begin(profile)

    def _begin(self, profile: Path | None = None) -> None:
        """Opens the session and looks at what it takes and gives."""
        self.session = self._open(self.path, profile)
        self.on_cpu = check_placement(self.session, named(self.provider))  # small nodes that the provider left there
        self.cache_dtype = self._check_interface(self.manifest)
        self.adapter_inputs = self._adapter_inputs() if self.manifest.swappable else {}

    def _reopen(self) -> None:
        verify_files(self.path.parent, self.manifest, self.hashes)
        check_graphs(self.path.parent, self.manifest)
        try:
            self._begin()
            for engine in list(self._engines):
                engine.reload()
        except BaseException:  # awake all together, or nothing is kept
            self._close()
            raise

    def _close(self) -> None:
        for engine in list(self._engines):
            engine.unload()
        self.session, self.adapter_inputs = None, {}  # the latter hold on to the session
        trim()

    @property
    def sequences(self) -> int:
        """How many engines there are over this graph."""
        return len(self._engines)

    def serves(self, engine: Unloadable) -> None:
        """From now on `engine` sleeps and wakes with this graph, as long as anybody else holds it."""
        self._engines.add(engine)

    @property
    def in_place(self) -> bool:
        """Whether the provider reads and writes this process's memory where it lies."""
        return named(self.provider).ort == CPU.ort

    def mover(self) -> Any:
        """A session of the graph that moves rows of a cache on a device."""
        mover = self._open(self.path.parent / COMPACT)
        check_placement(mover, named(self.provider))
        return mover

    def run(self, binding: IoBinding, options: Any, cancelled: threading.Event) -> tuple[float, float]:
        """Calls the graph when it is our turn; returns seconds spent inside and in line. Raises Cancelled, or
        BundleError for a graph that fails.
        """
        asked = time.perf_counter()
        with self.turns.turn(cancelled):
            started = time.perf_counter()
            try:
                self.session.run_with_iobinding(binding.io, options)
            except Exception as error:
                if cancelled.is_set():  # ONNX Runtime has no error class of its own for this
                    raise Cancelled from None
                raise BundleError(
                    f"the graph failed: {error}", "a graph that runs", "check the bundle, export it again"
                ) from error
            return time.perf_counter() - started, started - asked

    def end_profile(self) -> Path:
        """Closes the profile and returns its file (Chrome trace events)."""
        return Path(self.session.end_profiling())

    def _open(self, model: Path, profile: Path | None = None) -> Any:
        found = usable(named(self.provider), flavour(self.manifest))
        if self.threads < 1:
            raise ConfigError(f"{self.threads} threads", "at least 1", "correct threads")
        options = self.options()
        if profile is not None:
            options.enable_profiling = True
            options.profile_file_prefix = str(profile)
        try:
            with huge_pages():
                return self.ort.InferenceSession(
                    str(model), options, providers=prepare(self.ort, found, options, self.threads)
                )
        except Exception as error:
            on = "" if found.provider is CPU else f" on {self.provider}"
            raise BundleError(
                f"ONNX Runtime {self.version} cannot load {model.name}{on}: {error}",
                "a graph it can run",
                "export the bundle again or update onnxruntime",
            ) from None

    def options(self) -> Any:
        """Session options, whatever computes."""
        options = self.ort.SessionOptions()
        options.intra_op_num_threads = self.threads
        options.inter_op_num_threads = 1
        options.enable_mem_pattern = False  # changing shapes would grow a pattern each
        options.enable_cpu_mem_arena = (
            True  # without it long prompts take three times the time and gigabytes (docs/decisions.md)
        )
        options.add_session_config_entry(
            "session.use_device_allocator_for_initializers", "1"
        )  # weights lie outside of it
        options.log_severity_level = 4  # overridable initializers are meant; errors come as exceptions
        options.add_session_config_entry("session.intra_op.allow_spinning", "1" if self.spin else "0")
        options.add_session_config_entry("session.intra_op.spin_duration_us", str(SPIN))
        options.add_session_config_entry("session.x64quantprecision", "1" if products_saturate() else "0")
        for key, value in FLOAT_ROWS.items() if self.rows is not None else ():
            options.add_session_config_entry(key, value)
        return options

    def _interface(self, manifest: Manifest) -> tuple[set[str], set[str]]:
        """Names of the inputs that the graph must have and of its outputs."""
        room, layers = manifest.swappable or SwappableCapacity(), range(cached_layers(manifest))
        streams = manifest.streams
        drafts = streams is not None or bool(room.ns)
        wanted = set(_NEEDED) | set(_CHOICE_INPUTS) | (set(_STREAM_INPUTS) if drafts else set())
        wanted |= {"next_ids"} if streams and streams.levels else set()
        wanted |= set(_PRUNING_INPUTS) if (streams and streams.pruning) or room.pruning else set()
        wanted |= {f"past_key_values.{i}.{kind}" for i in layers for kind in ("key", "value")}
        produced = {"choices", "raw_logits", "logit_scale"} | (set(_STREAM_OUTPUTS) if drafts else set())
        produced |= {"origins"} if streams and streams.levels else set()
        produced |= {"pair_logits"} if (streams and streams.bigram) or room.bigram else set()
        produced |= {f"present.{i}.{kind}" for i in layers for kind in ("key", "value")}
        return wanted, produced

    def _check_interface(self, manifest: Manifest) -> np.dtype:
        """The graph's names and cache shape against the manifest; returns the cache's type."""
        inputs, outputs = (
            {value.name: value for value in side if value.type in TYPES}
            for side in (
                self.session.get_inputs() + self.session.get_overridable_initializers(),
                self.session.get_outputs(),
            )
        )
        wanted, produced = self._interface(manifest)
        missing = sorted((wanted - set(inputs)) | (produced - set(outputs)))
        unknown = sorted({i.name for i in self.session.get_inputs()} - wanted - {"forced_root", "parents"})
        if missing or unknown:
            found = (
                f"a graph without {', '.join(missing[:3])}"
                if missing
                else f"a graph that wants {', '.join(unknown[:3])}"
            )
            raise BundleError(found, "the inputs and outputs of a step graph", "export the bundle again")
        model = manifest.model
        cache = inputs["past_key_values.0.key"]
        sizes = zip(cache.shape, (1, model.kv_heads, None, model.head_dim), strict=False)
        if len(cache.shape) != 4 or any(
            isinstance(found, int) and size is not None and found != size for found, size in sizes
        ):
            raise BundleError(
                f"a cache of shape {cache.shape}",
                f"{model.kv_heads} heads of {model.head_dim}",
                "export the bundle again",
            )
        if cache.type not in ("tensor(float)", "tensor(float16)"):
            raise BundleError(f"a cache of type {cache.type}", "float or float16", "export the bundle again")
        return np.dtype(TYPES[cache.type])

    def _adapter_inputs(self) -> dict[str, Any]:
        """By name, the inputs of a swappable graph that belong to adapters."""
        own = {*_NEEDED, *_CHOICE_INPUTS, *_STREAM_INPUTS, *_PRUNING_INPUTS, "forced_root"}
        return {value.name: value for value in self.session.get_overridable_initializers() if value.name not in own}


def cached_layers(manifest: Manifest) -> int:
    """Layers that keep keys and values: the model's, and a draft layer."""
    return manifest.model.layers + bool(manifest.streams and manifest.streams.levels)
