"""Opens a bundle on the requested provider, or on the fastest of those that compute it right.

A provider must fit (`hardware.providers`), pass the self-test (`self_test`) and is timed (`calibration`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from streamspec.bundle.files import read_manifest
from streamspec.bundle.manifest import TEMPLATE, TOKENIZER, Manifest
from streamspec.errors import ConfigError, StreamspecError, one_line
from streamspec.runtime.engine.loaded_model import LoadedModel
from streamspec.runtime.engine.ort_runner import OrtRunner
from streamspec.runtime.hardware import native_library
from streamspec.runtime.hardware.cpu import physical_cores
from streamspec.runtime.hardware.providers import (
    AUTO,
    CPU,
    DEVICE,
    DYNAMIC,
    FASTER,
    NATIVE_CPU,
    NATIVE_OPS,
    ProviderChoice,
    fitting,
    flavour,
    named,
    on_cpu,
)
from streamspec.runtime.tuning.self_test import check_numerics
from streamspec.runtime.tuning.step_costs import Calibration, cached_calibration, calibrated

NEITHER = "leave cpu_bundle out"
TEXT_FILES = ("tokenizer", TOKENIZER), ("chat template", TEMPLATE)


def open_runner(
    folder: Path,
    manifest: Manifest,
    provider: str = AUTO,
    threads: int | None = None,
    spin: bool = True,
    cache_dir: str | Path | None = None,
    beside: CpuBundle | None = None,
) -> tuple[OrtRunner, ProviderChoice]:
    """Opens the bundle in `folder`; it has passed the self-test. `cache_dir`: where measurements are kept. `beside`:
    with "auto", what computes on the CPU in its place. Files and graphs of both were checked (`check_graphs`).

    Raises ConfigError for a name that no provider has; where the requested provider, or with "auto" the CPU, cannot be
    used, cannot load the graph or leaves too much to the CPU, ProviderError; where it computes wrongly, BundleError.
    """
    if provider != AUTO:
        runner = open_on(folder, manifest, provider, threads, spin)
        return runner, _choice(runner)
    search = _ProviderSearch(folder, manifest, threads, spin, cache_dir, beside)
    runner = search.best()
    choice = _choice(runner, tuple(search.passed_over.items()))
    other = beside is not None and runner.model.path.parent == beside.folder
    return runner, replace(choice, bundle=str(beside.folder)) if beside and other else choice


@dataclass(frozen=True)
class CpuBundle:
    """A bundle of the same weights for the CPU, beside one for a device."""

    folder: Path
    manifest: Manifest

    @classmethod
    def read(cls, folder: Path, device: Manifest) -> CpuBundle:
        """Raises ConfigError for a bundle that might answer otherwise than the one of `device`, or is for none."""
        manifest = read_manifest(folder)
        if flavour(device) != DEVICE:
            raise ConfigError(
                "a bundle for the CPU beside another", "beside one of export --target cuda or rocm", NEITHER
            )
        if flavour(manifest) not in (DYNAMIC, NATIVE_OPS):
            raise ConfigError(
                f"a {flavour(manifest)} bundle {folder} for the CPU", "one of export --target cpu", NEITHER
            )
        if device.weights_sha256 is None or manifest.weights_sha256 is None:
            raise ConfigError(
                "a bundle that does not tell its weights", "two of streamspec 0.2 or later", "export it again"
            )
        for (what, one), (_, other) in zip(_answering(device), _answering(manifest), strict=True):
            if one != other:
                raise ConfigError(f"{folder} with {what} {other}", f"{one}, as the bundle beside it", NEITHER)
        return cls(folder, manifest)


def _answering(manifest: Manifest) -> list[tuple[str, object]]:
    """What two bundles have to share to give the same answers to the same texts, each with its name."""
    hashes = [("weights", manifest.weights_sha256)]
    hashes += [(what, manifest.files[name].sha256 if name in manifest.files else None) for what, name in TEXT_FILES]
    model = manifest.model
    return [
        ("prompt format", manifest.prompt_format),
        *((what, value and value[:12]) for what, value in hashes),
        ("a context of", model.context_length),
        ("bos_token_id", model.bos_token_id),
        ("eos_token_ids", list(model.eos_token_ids)),
    ]


def _choice(runner: OrtRunner, passed_over: tuple[tuple[str, str], ...] = ()) -> ProviderChoice:
    model = runner.model
    return ProviderChoice(runner.provider, model.on_cpu, passed_over, model.captures, model.why_not_captured)


def open_on(
    folder: Path, manifest: Manifest, provider: str, threads: int | None = None, spin: bool = True
) -> OrtRunner:
    """Opens the bundle in `folder` on this provider and runs the self-test; raises as `open_runner`. A graph that
    cannot be captured, or then computes wrongly, gives way to the ordinary one, where the provider runs that; the model
    says why."""
    wanted, why_not = named(provider), ""
    if wanted.capture is not None and wanted.captured in manifest.files:
        try:
            return _checked(folder / wanted.captured, manifest, threads, wanted.name, spin, capture=True)
        except StreamspecError as error:
            if not wanted.dynamic:
                raise
            why_not = one_line(f"{error.found}; {error.fix}", 300)
    runner = _checked(folder / wanted.graph, manifest, threads, wanted.name, spin, capture=False)
    runner.model.why_not_captured = why_not
    return runner


def _checked(
    graph: Path, manifest: Manifest, threads: int | None, provider: str, spin: bool, capture: bool
) -> OrtRunner:
    runner = OrtRunner(LoadedModel(graph, manifest, threads, provider, spin, capture=capture))
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
        self,
        folder: Path,
        manifest: Manifest,
        threads: int | None,
        spin: bool,
        cache_dir: str | Path | None,
        beside: CpuBundle | None = None,
    ) -> None:
        self.folder, self.manifest, self.spin, self.cache_dir, self.beside = folder, manifest, spin, cache_dir, beside
        self.threads = threads if threads is not None else physical_cores()
        self.fitting, self.passed_over = fitting(flavour(manifest))  # the latter installed, each with the reason
        if beside is not None:
            names, others = fitting(flavour(beside.manifest))
            self.fitting = [name for name in self.fitting if not on_cpu(name)] + [*filter(on_cpu, names)]
            self.passed_over = {name: why for name, why in self.passed_over.items() if not on_cpu(name)}
            self.passed_over |= {name: why for name, why in others.items() if on_cpu(name)}

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
            manifest = self.beside.manifest if self.beside and on_cpu(name) else self.manifest
            known = cached_calibration(name, self.threads, manifest, self.cache_dir)
            runner = self._tried(name) if known is None else None
            if runner is not None:
                try:
                    known = calibrated(runner, manifest, self.cache_dir)
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
        if self.beside is None or not on_cpu(name):
            return open_on(self.folder, self.manifest, name, self.threads, self.spin)
        return open_on(self.beside.folder, self.beside.manifest, name, self.threads, self.spin)
