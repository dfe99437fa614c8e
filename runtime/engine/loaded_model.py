"""Opens a bundle's step graph (docs/reference/step-graph.md): one ONNX Runtime session, shared by any number
of sequences.

Holds what is opened once: the weights, the graph's interface, the scheduler. What belongs to one sequence is in its
runner. Safe to use from several threads.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from weakref import WeakSet

from streamspec import step_graph as sg
from streamspec.bundle.cache_section import CAPTURED, COMPACT
from streamspec.bundle.manifest import CHOICE, FLOAT_ROWS, MODEL, NATIVE, Manifest
from streamspec.bundle.model_section import SHORT
from streamspec.captured.packed_call import captured_features
from streamspec.errors import BundleError, ConfigError, ProviderError, ResourceError
from streamspec.paths import PassedChecks
from streamspec.runtime.engine.graph_interface import check_interface, shares_calls
from streamspec.runtime.engine.idle_unload import IdleUnloader
from streamspec.runtime.engine.memory_estimate import read_in_pieces_below
from streamspec.runtime.engine.scheduler import FairLock
from streamspec.runtime.folder_forms import form_of
from streamspec.runtime.hardware.cpu import physical_cores
from streamspec.runtime.hardware.device_thread import DeviceThread
from streamspec.runtime.hardware.huge_pages import HugePages, trim
from streamspec.runtime.hardware.int8_saturation import X64_PRECISION, x64_precision
from streamspec.runtime.hardware.providers import (
    CPU,
    check_placement,
    import_onnxruntime,
    named,
    on_cpu,
    prepare,
    usable,
)

if TYPE_CHECKING:
    from streamspec.runtime.engine.shared.call_sharing import CallSharing

# Microseconds that a worker spins: longer than a step's work on the host. After that it costs nothing until the next
# step.
SPIN = 1000
T = TypeVar("T")


class Unloadable(Protocol):
    """An object that holds references to an open model."""

    secondary: bool  # it reads for another runner's sequence, or for none

    def unload(self) -> None:
        """Releases the model."""

    def reload(self) -> None:
        """Binds to the model, which may have been opened again."""


# What ONNX Runtime and systems say where there is no memory.
NO_MEMORY = "Failed to allocate memory", "bad_alloc", "bad allocation", "out of memory", "Cannot allocate memory"


def no_memory(error: Exception) -> bool:
    """Tells whether a graph could not be opened or run for want of memory."""
    return isinstance(error, MemoryError) or any(words in str(error) for words in NO_MEMORY)


def no_room(file: Path) -> ResourceError:
    """Returns the error of a graph that cannot be opened for want of memory."""
    return ResourceError(f"no memory is left to open {file.name}", "more", "close something, or take a smaller model")


class LoadedModel:
    """The graph of a bundle, `manifest`, open on a provider. `sampler`: of a static bundle, a session of the graph that
    chooses tokens where that is not greedy."""

    def __init__(
        self,
        path: Path,
        manifest: Manifest,
        threads: int | None = None,
        provider: str = "cpu",
        spin: bool = True,
        capture: bool = True,
    ) -> None:
        """Raises BundleError where the graph is not what the manifest promises, ConfigError for unknown providers,
        ProviderError where this one cannot be used here or leaves to the CPU what decides the speed.

        `spin`: as of `load`. `capture`: lets a provider capture the graph, if it is one that the provider does.
        """
        self.threads = threads if threads is not None else physical_cores()
        self.path = path = path.absolute()  # it is opened again, from wherever the program may be by then
        self.folder = path.parents[len(Path(manifest.model_file).parts) - 1]  # of the bundle
        self.manifest = manifest
        self.provider = provider
        self.spin = spin
        self.rows = manifest.static.rows if manifest.static else None  # rows of every call, where shapes are fixed
        self.captured = manifest.captured if path.name == CAPTURED else None  # sizes of a graph that can be captured
        chosen = named(provider)
        self.captures = capture and path.name == chosen.captured and bool(chosen.capture)
        self.why_not_captured = ""  # reason, of a bundle with a graph for capture
        plain = sg.GraphFeatures.of_manifest(manifest)
        self.features = plain if self.captured is None else captured_features(plain, self.captured)
        self.graph_ids = itertools.count(1)  # ids of captured graphs
        self.spare_buffers: list[Any] = []  # that graphs were captured over, of sequences that are gone
        self.device_thread = DeviceThread() if self.captures else None
        self.scheduler = FairLock()
        self.ort = import_onnxruntime()
        self.version = str(self.ort.__version__)
        self.unloader = IdleUnloader(self._close, self._reopen)
        self.sharing: CallSharing | None = None  # calls that sequences share
        self.companion: LoadedModel | None = None  # is unloaded and opened again with this one
        self.hashes = True  # whether files are hashed again before they are opened again
        self.passed: PassedChecks | None = None  # which then need not be
        self._runners: WeakSet[Unloadable] = WeakSet()
        self._open_sessions()

    def _open_sessions(self) -> None:
        """Opens the graph, checks its interface, and opens the sampler of a static bundle."""
        self.session = self._open(self.path)
        self.on_cpu = check_placement(self.session, named(self.provider))  # small nodes that the provider left there
        if self.captures and self.captured is not None and self.on_cpu:
            raise ProviderError(
                f"provider {self.provider} leaves {self.on_cpu} nodes of {CAPTURED} to the CPU",
                "none there, or nothing can be captured",
                "export without --capture",
            )
        if self.path.name in (MODEL, SHORT) and NATIVE in self.manifest.files:
            trim()  # frees what turning tiles back took
        kind = sg.DYNAMIC if self.rows is None else sg.STATIC
        self.features = replace(self.features, sequences=shares_calls(self.session))
        check_interface(self.session, self.manifest, kind if self.captured is None else sg.CAPTURED, self.features)
        self.adapter_inputs = self._adapter_inputs() if self.manifest.swappable else {}
        self.sampler: Any = self._open_sampler() if self.rows is not None or self.captured is not None else None

    def _reopen(self) -> None:
        try:
            with form_of(self.manifest).checked(self.folder, self.manifest, self.hashes, self.passed):
                self._open_sessions()
                for runner in list(self._runners):
                    runner.reload()
            if self.companion is not None:
                with self.companion.unloader.in_use():
                    pass
        except BaseException:  # all are loaded together, or none
            self._close()
            raise

    def _close(self) -> None:
        for runner in list(self._runners):
            runner.unload()
        if self.sharing is not None:
            self.sharing.close()
        if self.companion is not None:
            self.companion.unloader.unload()
        self.session = self.sampler = None
        self.spare_buffers.clear()
        self.adapter_inputs = {}  # they hold on to the session
        trim()

    def on_device(self, work: Callable[[], T]) -> T:
        """Does work with captured graphs, in the thread of these where the device captures."""
        return work() if self.device_thread is None else self.device_thread.run(work)

    @property
    def sequences(self) -> int:
        """Number of sequences that run over this model."""
        return sum(not runner.secondary for runner in self._runners)

    def attach(self, runner: Unloadable) -> None:
        """Unloads and reloads `runner` with this model from now on; holds a weak reference to it."""
        self._runners.add(runner)

    @property
    def in_place(self) -> bool:
        """Tells whether the provider reads and writes this process's memory where it lies."""
        return named(self.provider).ort == CPU.ort

    def open_compactor(self) -> Any:
        """Opens a session of the graph that compacts a cache on a device."""
        compactor = self._open(self.folder / COMPACT)
        check_placement(compactor, named(self.provider))
        return compactor

    def _open(self, path: Path) -> Any:
        here = usable(named(self.provider), self.manifest.flavour)
        if type(self.threads) is not int or self.threads < 1:
            raise ConfigError(f"{self.threads!r} threads", "a whole number of at least 1", "correct threads")
        options = self.options()
        try:
            with HugePages(self.folder, read_in_pieces_below(self.manifest)) as pages:
                session = self.ort.InferenceSession(
                    str(path),
                    options,
                    providers=prepare(self.ort, here, options, self.threads, self.captures and path == self.path),
                    enable_fallback=0,  # a refused option would be printed, and the CPU taken
                )
        except Exception as error:
            what = f"ONNX Runtime {self.version} cannot load {path.name}"
            if on_cpu(self.provider) and no_memory(error):
                raise no_room(path) from None
            if on_cpu(self.provider):
                raise BundleError(
                    f"{what}: {error}", "a graph it can run", "export the bundle again or update onnxruntime"
                ) from None
            raise ProviderError(
                f"{what} on {self.provider}: {error}",
                "a driver, libraries and a graph that it can use",
                "update them or choose provider cpu",
            ) from None
        self._pages = pages
        return session

    def settle(self) -> None:
        """Waits until the weights lie where they stay: steps get faster until then."""
        self._pages.wait()

    def _open_sampler(self) -> Any:
        try:
            return self.ort.InferenceSession(
                str(self.folder / CHOICE), self.options(), providers=["CPUExecutionProvider"]
            )
        except Exception as error:
            if no_memory(error):
                raise no_room(self.folder / CHOICE) from None
            raise BundleError(
                f"ONNX Runtime {self.version} cannot load {CHOICE}: {error}",
                "a graph it can run",
                "export the bundle again",
            ) from None

    def options(self) -> Any:
        """Session options, the same for every provider."""
        options = self.ort.SessionOptions()
        options.intra_op_num_threads = self.threads
        options.inter_op_num_threads = 1
        options.enable_mem_pattern = False  # changing shapes would grow a pattern each
        # Without an arena long prompts take three times the time and gigabytes (docs/lab/decisions).
        options.enable_cpu_mem_arena = True
        # Weights lie outside of it.
        options.add_session_config_entry("session.use_device_allocator_for_initializers", "1")
        options.log_severity_level = 4  # overridable initializers are meant; errors come as exceptions
        options.add_session_config_entry("session.intra_op.allow_spinning", "1" if self.spin else "0")
        options.add_session_config_entry("session.intra_op.spin_duration_us", str(SPIN))
        options.add_session_config_entry(X64_PRECISION, x64_precision())
        for key, value in FLOAT_ROWS.items() if self.rows is not None else ():
            options.add_session_config_entry(key, value)
        return options

    def _adapter_inputs(self) -> dict[str, Any]:
        """By name, the inputs of a swappable graph that belong to adapters."""
        optional = {value.name: value for value in self.session.get_overridable_initializers()}
        for row in sg.INTERFACES[sg.DYNAMIC][0]:
            optional.pop(row.name, None)
        return optional
