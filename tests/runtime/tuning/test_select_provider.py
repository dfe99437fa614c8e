"""Which of the graphs that compute right on the CPU is opened, and which is not even tried."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from streamspec.errors import BundleError
from streamspec.runtime import LoadOptions, load
from streamspec.runtime.hardware import native_library
from streamspec.runtime.tuning import select_provider

MODEL = SimpleNamespace(layers=1, vocab_size=1, per_layer_width=0)
NATIVE: Any = SimpleNamespace(
    flavour="native", files={"native.onnx"}, precision="int8", data_bytes=10**8, model=MODEL, static=None
)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the providers that are opened, of those that fit: native and cpu."""
    names: list[str] = []

    def open_on(folder: Path, manifest: Any, name: str, *rest: Any) -> Any:
        names.append(name)
        return SimpleNamespace(provider=name)

    monkeypatch.setattr(native_library, "why_not", lambda: "")
    monkeypatch.setattr(select_provider, "fitting", lambda kind: (["native", "cpu"], {}))
    monkeypatch.setattr(select_provider, "open_on", open_on)
    monkeypatch.setattr(select_provider, "cached_calibration", lambda *rest: None)
    costs = {"native": {1: 1.0}, "cpu": {1: 2.0}}
    measured = lambda runner, *rest: SimpleNamespace(costs=costs[runner.provider], expected={})  # noqa: E731
    monkeypatch.setattr(select_provider, "calibrated", measured)
    return names


def best(manifest: Any = NATIVE) -> Any:
    return select_provider._ProviderSearch(Path(), manifest, LoadOptions(threads=2), None).best()  # type: ignore[arg-type]


@pytest.mark.parametrize("kernels", ["amx", "avx512vnni", "avx2"])
def test_kernels_known_to_be_faster_are_not_timed_against_onnxruntimes(
    kernels: str, opened: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_library, "kernels", lambda: kernels)
    assert best().provider == "native" and opened == ["native"]


@pytest.mark.parametrize("kernels", ["avxvnni", "dotprod", "neon", "portable"])
def test_other_kernels_are(kernels: str, opened: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_library, "kernels", lambda: kernels)
    assert best().provider == "native" and opened == ["native", "cpu"]


@pytest.mark.parametrize(("precision", "least"), [("int8", 0.73), ("int4", 0.25), ("gguf", 0.25)])
def test_a_standard_graph_of_gigabytes_is_not_opened_to_be_timed(
    precision: str, least: float, opened: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for kernels, others in (("avxvnni", []), ("neon", []), ("portable", ["cpu"])):
        monkeypatch.setattr(native_library, "kernels", lambda kernels=kernels: kernels)
        for gigabytes, also in ((least - 0.01, ["cpu"]), (least + 0.01, others)):
            opened.clear()
            of_size = SimpleNamespace(**{**vars(NATIVE), "precision": precision, "data_bytes": gigabytes * 1e9})
            assert best(of_size).provider == "native" and opened == ["native", *also]


def test_native_operators_that_compute_wrongly_give_way(opened: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_library, "kernels", lambda: "avx512vnni")
    whole = select_provider.open_on

    def fails(folder: Path, manifest: Any, name: str, *rest: Any) -> Any:
        if name == "native":
            raise BundleError("wrong", "right", "report it")
        return whole(folder, manifest, name, *rest)

    monkeypatch.setattr(select_provider, "open_on", fails)
    assert best().provider == "cpu"


def test_a_device_that_is_slower_than_the_cpu_is_passed_over(
    opened: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`auto` goes by what the steps of both cost here, whichever is tried first."""
    monkeypatch.setattr(select_provider, "fitting", lambda kind: (["cuda", "cpu"], {}))
    for cuda, cpu, wanted in ((0.5, 2.0, "cuda"), (3.0, 2.0, "cpu")):
        costs = {"cuda": {1: cuda, 8: 1.1 * cuda}, "cpu": {1: cpu, 8: 2 * cpu}}
        measured = lambda runner, *rest, costs=costs: SimpleNamespace(  # noqa: E731
            costs=costs[runner.provider], expected={8: 1.5}
        )
        monkeypatch.setattr(select_provider, "calibrated", measured)
        search = select_provider._ProviderSearch(Path(), NATIVE, LoadOptions(threads=2), None)  # type: ignore[arg-type]
        assert search.best().provider == wanted
        (other,) = {"cuda", "cpu"} - {wanted}
        assert "tokens/s expected" in search.passed_over[other] and opened[-2:] == ["cuda", "cpu"]


def test_a_cpu_is_tested_once_for_the_same_files(
    bundles: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, tested = tmp_path / "bundle", list[str]()
    shutil.copytree(bundles("fp32"), folder)
    monkeypatch.setattr("streamspec.paths.SETTLED", 2.0)
    monkeypatch.setattr(select_provider, "check_numerics", lambda runner, manifest: tested.append(runner.provider))
    now = time.time

    def opened(cache: str, seconds: float = 3600, **options: Any) -> list[str]:
        monkeypatch.setattr(time, "time", lambda: now() + seconds)
        tested.clear()
        load(folder, provider="cpu", tree="plain", cache_dir=tmp_path / cache, **options).close()
        return list(tested)

    assert opened("new", seconds=0) == ["cpu"] and opened("new", seconds=0) == ["cpu"]  # the files are as old as this
    assert opened("cache") == ["cpu"] and opened("cache") == [] and opened("cache", verify=False) == []
    assert opened("cache", threads=3) == ["cpu"] and opened("other") == ["cpu"]
    weights = folder / "model.onnx.data"
    weights.write_bytes(weights.read_bytes())
    assert opened("cache") == ["cpu"] and opened("cache") == []
    monkeypatch.setattr(select_provider, "on_cpu", lambda provider: False)
    assert opened("cache") == ["cpu"]  # drivers change without a file of ours
