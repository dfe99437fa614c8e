"""Opens a bundle's graph on the provider asked for, or on the fastest of those that compute it rightly.

Knows what makes a provider fit (`providers`), right (`probe`) and fast (`calibrate`), not how engines step.
"""

from __future__ import annotations

from pathlib import Path

from streamspec.bundle.manifest import MODEL, Manifest
from streamspec.bundle.onnx_check import check_graphs
from streamspec.errors import StreamspecError, one_line
from streamspec.runtime.engine.loaded_model import LoadedModel
from streamspec.runtime.engine.runner import OrtRunner
from streamspec.runtime.engine.static_runner import StaticModel, StaticOrtRunner
from streamspec.runtime.hardware.cpu import physical_cores
from streamspec.runtime.hardware.providers import CPU, ProviderChoice, fitting, flavour, named
from streamspec.runtime.tuning.calibration import Calibration, calibrated, remembered
from streamspec.runtime.tuning.self_test import check_probe

AUTO = "auto"


def open_runner(
    folder: Path,
    manifest: Manifest,
    provider: str = AUTO,
    threads: int | None = None,
    spin: bool = True,
    cache_dir: str | Path | None = None,
) -> tuple[OrtRunner, ProviderChoice]:
    """The graph of the bundle in `folder`, open, its probe passed. `cache_dir`: where measurements are kept.

    Raises ConfigError for a name that no provider has; where the provider asked for, or with "auto" the CPU, cannot be
    used or leaves too much to the CPU, ProviderError; where it cannot load the graph or computes wrongly, BundleError.
    """
    check_graphs(folder, manifest)
    if provider != AUTO:
        engine = open_on(folder, manifest, provider, threads, spin)
        return engine, ProviderChoice(provider, engine.model.on_cpu)
    search = _ProviderSearch(folder, manifest, threads, spin, cache_dir)
    engine = search.best()
    return engine, ProviderChoice(engine.provider, engine.model.on_cpu, tuple(search.passed_over.items()))


def open_on(
    folder: Path, manifest: Manifest, provider: str, threads: int | None = None, spin: bool = True
) -> OrtRunner:
    """The same on this provider and no other."""
    opened, kind = (LoadedModel, OrtRunner) if manifest.static is None else (StaticModel, StaticOrtRunner)
    engine = kind(opened(folder / MODEL, manifest, threads, named(provider).name, spin))
    check_probe(engine, manifest)
    return engine


def speed(calibration: Calibration) -> float:
    """Tokens per second that the best tree promises, or plain decoding where it is faster."""
    return max(calibration.expected.get(rows, 1.0) / cost for rows, cost in calibration.costs.items())


class _ProviderSearch:
    """For the fastest provider that is right. One measured before on this machine is opened only where it is the
    fastest; one that is refused is tried again at every load, since drivers and packages change."""

    def __init__(
        self, folder: Path, manifest: Manifest, threads: int | None, spin: bool, cache_dir: str | Path | None
    ) -> None:
        self.folder, self.manifest, self.spin, self.cache_dir = folder, manifest, spin, cache_dir
        self.threads = threads if threads is not None else physical_cores()
        self.fitting, self.passed_over = fitting(flavour(manifest))  # the latter installed, each with the reason

    def best(self) -> OrtRunner:
        if self.fitting == [CPU.name]:
            return self._open(CPU.name)
        speeds: dict[str, float] = {}
        held: OrtRunner | None = None  # the fastest of those that had to be opened
        for name in self.fitting:
            known = remembered(name, self.threads, self.manifest, self.cache_dir)
            engine = self._tried(name) if known is None else None
            if engine is not None:
                try:
                    known = calibrated(engine, self.manifest, self.cache_dir)
                except StreamspecError as error:  # right for the probe, and then not
                    self.passed_over[name] = one_line(error.found, 200)
                    continue
            if known is not None:
                speeds[name] = speed(known)
            if engine is not None and (held is None or speeds[name] > speeds[held.provider]):
                held = engine
        for name in sorted(speeds, key=lambda name: -speeds[name]):
            engine = held if held is not None and held.provider == name else self._tried(name)
            if engine is not None:
                for other in speeds:
                    if other != name and other not in self.passed_over:
                        self.passed_over[other] = f"{speeds[other]:.0f} tokens/s expected, {name} {speeds[name]:.0f}"
                return engine
        return self._open(CPU.name)  # says what is wrong

    def _tried(self, name: str) -> OrtRunner | None:
        try:
            return self._open(name)
        except StreamspecError as error:
            self.passed_over[name] = one_line(error.found, 200)
            return None

    def _open(self, name: str) -> OrtRunner:
        return open_on(self.folder, self.manifest, name, self.threads, self.spin)
