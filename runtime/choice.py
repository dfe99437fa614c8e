"""Opens a bundle's graph on a provider that runs it rightly: the one asked for, or the first of those there are, CPU last.

Knows what makes a provider fit (`providers`) and right (`probe`), not how engines step.
"""

from __future__ import annotations

from pathlib import Path

from streamspec.bundle import MODEL, Manifest
from streamspec.errors import StreamspecError
from streamspec.runtime.engine import OrtEngine
from streamspec.runtime.probe import check_probe
from streamspec.runtime.providers import CPU, PROVIDERS, Chosen, find, flavour, named

AUTO = "auto"


def open_engine(
    folder: Path, manifest: Manifest, provider: str = AUTO, threads: int | None = None, spin: bool = True
) -> tuple[OrtEngine, Chosen]:
    """The graph of the bundle in `folder`, open, its probe passed.

    Raises ConfigError for a name that no provider has; where the provider asked for, or with "auto" the CPU, cannot be used or
    leaves too much to the CPU, ProviderError; where it cannot load the graph or computes wrongly, BundleError.
    """
    if provider != AUTO:
        engine = open_on(folder, manifest, provider, threads, spin)
        return engine, Chosen(provider, engine.on_cpu)
    passed_over: list[tuple[str, str]] = []
    for name in (name for name in PROVIDERS if name != CPU.name):
        found = find(PROVIDERS[name], flavour(manifest))
        reason = found.why_not
        if not reason:
            try:
                engine = open_on(folder, manifest, name, threads, spin)
                return engine, Chosen(name, engine.on_cpu, tuple(passed_over))
            except StreamspecError as error:
                reason = error.found
        if found.installed:
            passed_over.append((name, reason))
    engine = open_on(folder, manifest, CPU.name, threads, spin)
    return engine, Chosen(CPU.name, 0, tuple(passed_over))


def open_on(folder: Path, manifest: Manifest, provider: str, threads: int | None = None, spin: bool = True) -> OrtEngine:
    """The same on this provider and no other."""
    engine = OrtEngine(folder / MODEL, manifest, threads=threads, provider=named(provider).name, spin=spin)
    check_probe(engine, manifest)
    return engine
