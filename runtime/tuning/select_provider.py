"""Opens a bundle on the requested provider, or on the fastest of those that compute it right.

A provider must fit (`hardware.providers`), pass the self-test (`self_test`) and is timed (`step_costs`).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from streamspec import __version__
from streamspec.bundle.manifest import MODEL, Manifest
from streamspec.errors import ResourceError, StreamspecError, one_line
from streamspec.paths import PassedChecks, file_state
from streamspec.runtime.engine.loaded_model import LoadedModel
from streamspec.runtime.engine.memory_estimate import runs_native
from streamspec.runtime.engine.ort_runner import OrtRunner
from streamspec.runtime.hardware import native_library
from streamspec.runtime.hardware.cpu import cpu_model, physical_cores
from streamspec.runtime.hardware.providers import (
    AUTO,
    CPU,
    NATIVE_CPU,
    ProviderChoice,
    fitting,
    named,
    on_cpu,
)
from streamspec.runtime.options import LoadOptions
from streamspec.runtime.tuning.cpu_bundle import CpuBundle
from streamspec.runtime.tuning.self_test import check_numerics
from streamspec.runtime.tuning.step_costs import Calibration, cached_calibration, calibrated


def open_runner(
    folder: Path, manifest: Manifest, options: LoadOptions, cpu_bundle: CpuBundle | None = None
) -> tuple[OrtRunner, ProviderChoice]:
    """Opens the bundle in `folder` and runs the self-test. `options`: of the load. `cpu_bundle`: with "auto", the
    bundle that computes on the CPU in its place. Files and graphs of both were checked (`check_graphs`).

    Raises ConfigError for a name that no provider has; where the requested provider, or with "auto" the CPU, cannot be
    used, cannot load the graph or leaves too much to the CPU, ProviderError; where it computes wrongly, BundleError.
    """
    if options.provider != AUTO:
        runner = open_on(folder, manifest, options.provider, options, options.passed_checks())
        return runner, _choice(runner)
    search = _ProviderSearch(folder, manifest, options, cpu_bundle)
    runner = search.best()
    choice = _choice(runner, tuple(search.passed_over.items()))
    if cpu_bundle is not None and runner.model.folder == cpu_bundle.folder.absolute():
        choice = replace(choice, bundle=str(cpu_bundle.folder))
    return runner, choice


def _choice(runner: OrtRunner, passed_over: tuple[tuple[str, str], ...] = ()) -> ProviderChoice:
    model = runner.model
    return ProviderChoice(runner.provider, model.on_cpu, passed_over, model.captures, model.why_not_captured)


def open_on(
    folder: Path,
    manifest: Manifest,
    provider: str,
    options: LoadOptions,
    passed: PassedChecks | None = None,
) -> OrtRunner:
    """Opens the bundle in `folder` on this provider and runs the self-test, unless `passed` knows that a CPU passed it
    with the same files and libraries; raises as `open_runner`. A graph that
    cannot be captured, or then computes wrongly, gives way to the ordinary one, where the provider runs that; the model
    says why."""
    chosen, why_not = named(provider), ""
    if chosen.capture is not None and chosen.captured in manifest.files:
        try:
            return _checked(folder / chosen.captured, manifest, chosen.name, options, True, passed)
        except StreamspecError as error:
            if not chosen.dynamic:
                raise
            why_not = one_line(f"{error.found}; {error.fix}", 300)
    graph = manifest.model_file if chosen.graph == MODEL else chosen.graph
    runner = _checked(folder / graph, manifest, chosen.name, options, False, passed)
    runner.model.why_not_captured = why_not
    return runner


def _checked(
    graph: Path, manifest: Manifest, provider: str, options: LoadOptions, capture: bool, passed: PassedChecks | None
) -> OrtRunner:
    runner = OrtRunner(LoadedModel(graph, manifest, options.threads, provider, options.spin, capture))
    check = _rests_on(runner, manifest) if passed is not None and on_cpu(provider) else None
    if passed is None or check is None:
        check_numerics(runner, manifest)
    elif check not in passed:
        check_numerics(runner, manifest)
        passed.add(check)
    return runner


def _rests_on(runner: OrtRunner, manifest: Manifest) -> tuple[object, ...] | None:
    """Returns all that decides what the self-test finds on a CPU; None where a file changes right now."""
    model, library = runner.model, native_library.library()
    paths = [*(model.folder / name for name in sorted(manifest.files)), *([library] if library else [])]
    files = [file_state(path) for path in paths]
    if None in files:
        return None
    kernels = cpu_model(), native_library.kernels(), model.version, __version__
    return "self-test", runner.provider, model.threads, model.path.name, kernels, files, manifest.to_json()


def speed(calibration: Calibration) -> float:
    """Returns the tokens per second that the best tree promises, or plain decoding where it is faster."""
    return max(calibration.expected.get(rows, 1.0) / cost for rows, cost in calibration.costs.items())


class _ProviderSearch:
    """Finds the fastest provider that computes right.

    One measured before on this machine is opened only where it is the fastest; one that is refused is tried again at
    every load, since drivers and packages change."""

    def __init__(self, folder: Path, manifest: Manifest, options: LoadOptions, cpu_bundle: CpuBundle | None) -> None:
        self.bundle = folder, manifest
        self.cpu_bundle = cpu_bundle
        self.options, self.passed = options, options.passed_checks()
        self.threads = options.threads if options.threads is not None else physical_cores()
        self.fitting, self.passed_over = fitting(manifest.flavour)  # the latter installed, each with the reason
        if cpu_bundle is not None:
            names, others = fitting(cpu_bundle.manifest.flavour)
            self.fitting = [name for name in self.fitting if not on_cpu(name)] + [*filter(on_cpu, names)]
            self.passed_over = {name: why for name, why in self.passed_over.items() if not on_cpu(name)}
            self.passed_over |= {name: why for name, why in others.items() if on_cpu(name)}

    def best(self) -> OrtRunner:
        if self.fitting == [CPU.name]:
            return self._open(CPU.name)
        if NATIVE_CPU.name in self.fitting and runs_native(self._bundle_for(NATIVE_CPU.name)[1], AUTO):
            self.fitting.remove(CPU.name)
            if self.fitting == [NATIVE_CPU.name]:
                return self._tried(NATIVE_CPU.name) or self._open(CPU.name)
        speeds, held = self._speeds()
        for name in sorted(speeds, key=lambda name: -speeds[name]):
            runner = held if held is not None and held.provider == name else self._tried(name)
            if runner is not None:
                self._pass_over_slower(name, speeds)
                return runner
        return self._open(CPU.name)  # says what is wrong

    def _speeds(self) -> tuple[dict[str, float], OrtRunner | None]:
        """Returns the tokens per second of the providers that compute right, and the fastest of those that had to be
        opened."""
        speeds: dict[str, float] = {}
        held: OrtRunner | None = None
        for name in self.fitting:
            runner, calibration = self._measured(name)
            if calibration is not None:
                speeds[name] = speed(calibration)
            if runner is not None and (held is None or speeds[name] > speeds[held.provider]):
                held = runner
        return speeds, held

    def _measured(self, name: str) -> tuple[OrtRunner | None, Calibration | None]:
        """Returns the runner of a provider where it had to be opened to measure it, and its calibration; None for both
        where it is refused."""
        _, manifest = self._bundle_for(name)
        known = cached_calibration(name, self.threads, manifest, self.options.cache_dir)
        runner = self._tried(name) if known is None else None
        if runner is None:
            return None, known
        try:
            return runner, calibrated(runner, manifest, self.options.cache_dir)
        except StreamspecError as error:  # passed the self-test, then failed
            self.passed_over[name] = one_line(error.found, 200)
            return None, None

    def _pass_over_slower(self, chosen: str, speeds: dict[str, float]) -> None:
        for name in speeds:
            if name != chosen and name not in self.passed_over:
                self.passed_over[name] = f"{speeds[name]:.0f} tokens/s expected, {chosen} {speeds[chosen]:.0f}"

    def _tried(self, name: str) -> OrtRunner | None:
        try:
            return self._open(name)
        except StreamspecError as error:
            if isinstance(error, ResourceError) and all(map(on_cpu, self.fitting)):  # the other graph takes more
                raise
            self.passed_over[name] = one_line(error.found, 200)
            return None

    def _open(self, name: str) -> OrtRunner:
        return open_on(*self._bundle_for(name), name, self.options, self.passed)

    def _bundle_for(self, provider: str) -> tuple[Path, Manifest]:
        return self.cpu_bundle if self.cpu_bundle is not None and on_cpu(provider) else self.bundle
