"""Opens a bundle on the requested provider, or on the fastest of those that compute it right.

A provider must fit (`hardware.providers`), pass the self-test (`self_test`) and is timed (`calibration`).
"""

from __future__ import annotations

from pathlib import Path

from streamspec.bundle.cache_section import CAPTURED
from streamspec.bundle.manifest import Manifest
from streamspec.errors import StreamspecError, one_line
from streamspec.runtime.engine.loaded_model import LoadedModel
from streamspec.runtime.engine.ort_runner import OrtRunner
from streamspec.runtime.hardware import native_library
from streamspec.runtime.hardware.cpu import physical_cores
from streamspec.runtime.hardware.providers import AUTO, CPU, FASTER, NATIVE_CPU, ProviderChoice, fitting, flavour, named
from streamspec.runtime.tuning.self_test import check_numerics
from streamspec.runtime.tuning.step_costs import Calibration, cached_calibration, calibrated


def open_runner(
    folder: Path,
    manifest: Manifest,
    provider: str = AUTO,
    threads: int | None = None,
    spin: bool = True,
    cache_dir: str | Path | None = None,
) -> tuple[OrtRunner, ProviderChoice]:
    """Opens the bundle in `folder`, whose graphs were checked (`check_graphs`); it has passed the self-test.
    `cache_dir`: where measurements are kept.

    Raises ConfigError for a name that no provider has; where the requested provider, or with "auto" the CPU, cannot be
    used or leaves too much to the CPU, ProviderError; where it cannot load the graph or computes wrongly, BundleError.
    """
    if provider != AUTO:
        runner = open_on(folder, manifest, provider, threads, spin)
        return runner, _choice(runner)
    search = _ProviderSearch(folder, manifest, threads, spin, cache_dir)
    runner = search.best()
    return runner, _choice(runner, tuple(search.passed_over.items()))


def _choice(runner: OrtRunner, passed_over: tuple[tuple[str, str], ...] = ()) -> ProviderChoice:
    model = runner.model
    return ProviderChoice(runner.provider, model.on_cpu, passed_over, model.captures, model.why_not_captured)


def open_on(
    folder: Path, manifest: Manifest, provider: str, threads: int | None = None, spin: bool = True
) -> OrtRunner:
    """Opens the bundle in `folder` on this provider and runs the self-test; raises as `open_runner`. A graph for
    capture that cannot be captured, or computes wrongly, gives way to the ordinary one; the model says why."""
    wanted, why_not = named(provider), ""
    if manifest.captured is not None and wanted.capture is not None:
        try:
            return _checked(folder / CAPTURED, manifest, threads, wanted.name, spin)
        except StreamspecError as error:
            why_not = one_line(error.found, 300)
    runner = _checked(folder / wanted.graph, manifest, threads, wanted.name, spin)
    runner.model.why_not_captured = why_not
    return runner


def _checked(graph: Path, manifest: Manifest, threads: int | None, provider: str, spin: bool) -> OrtRunner:
    runner = OrtRunner(LoadedModel(graph, manifest, threads, provider, spin))
    check_numerics(runner, manifest)
    return runner


def speed(calibration: Calibration) -> float:
    """Tokens per second that the best tree promises, or plain decoding where it is faster."""
    return max(calibration.expected.get(rows, 1.0) / cost for rows, cost in calibration.costs.items())


class _ProviderSearch:
    """Finds the fastest provider that computes right.

    One measured before on this machine is opened only where it is the fastest; one that is refused is tried again at
    every load, since drivers and packages change."""

    def __init__(
        self, folder: Path, manifest: Manifest, threads: int | None, spin: bool, cache_dir: str | Path | None
    ) -> None:
        self.folder, self.manifest, self.spin, self.cache_dir = folder, manifest, spin, cache_dir
        self.threads = threads if threads is not None else physical_cores()
        self.fitting, self.passed_over = fitting(flavour(manifest))  # the latter installed, each with the reason

    def best(self) -> OrtRunner:
        if self.fitting == [CPU.name]:
            return self._open(CPU.name)
        if NATIVE_CPU.name in self.fitting and native_library.kernels() in FASTER:
            self.fitting.remove(CPU.name)
            if self.fitting == [NATIVE_CPU.name]:
                return self._tried(NATIVE_CPU.name) or self._open(CPU.name)
        speeds: dict[str, float] = {}
        held: OrtRunner | None = None  # the fastest of those that had to be opened
        for name in self.fitting:
            known = cached_calibration(name, self.threads, self.manifest, self.cache_dir)
            runner = self._tried(name) if known is None else None
            if runner is not None:
                try:
                    known = calibrated(runner, self.manifest, self.cache_dir)
                except StreamspecError as error:  # passed the self-test, then failed
                    self.passed_over[name] = one_line(error.found, 200)
                    continue
            if known is not None:
                speeds[name] = speed(known)
            if runner is not None and (held is None or speeds[name] > speeds[held.provider]):
                held = runner
        for name in sorted(speeds, key=lambda name: -speeds[name]):
            runner = held if held is not None and held.provider == name else self._tried(name)
            if runner is not None:
                for other in speeds:
                    if other != name and other not in self.passed_over:
                        self.passed_over[other] = f"{speeds[other]:.0f} tokens/s expected, {name} {speeds[name]:.0f}"
                return runner
        return self._open(CPU.name)  # says what is wrong

    def _tried(self, name: str) -> OrtRunner | None:
        try:
            return self._open(name)
        except StreamspecError as error:
            self.passed_over[name] = one_line(error.found, 200)
            return None

    def _open(self, name: str) -> OrtRunner:
        return open_on(self.folder, self.manifest, name, self.threads, self.spin)
