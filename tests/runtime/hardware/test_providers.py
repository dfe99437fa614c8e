"""Finding, requesting and refusing providers; and which one a session gets (select_provider, choose_policy, loader)."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import helper, numpy_helper
from typer.testing import CliRunner

from streamspec.bundle.cache_section import COMPACT
from streamspec.bundle.manifest import Manifest
from streamspec.cli import app
from streamspec.errors import BundleError, ConfigError, ProviderError, ResourceError
from streamspec.runtime import load
from streamspec.runtime.engine import loaded_model as graph
from streamspec.runtime.engine.ort_runner import OrtRunner
from streamspec.runtime.hardware import providers
from streamspec.runtime.hardware.int8_saturation import products_saturate
from streamspec.runtime.hardware.providers import (
    CPU,
    DEVICE,
    DYNAMIC,
    PROVIDERS,
    STATIC,
    Provider,
    ProviderChoice,
    UsableProvider,
    check_placement,
    find,
    prepare,
)
from streamspec.runtime.tuning import select_provider as choice
from streamspec.runtime.tuning import step_costs as calibrate

Bundles = Callable[[str], Path]
# The CPU under another name: takes every path that a provider of its own takes.
MIRROR = Provider("mirror", CPU.ort, "streamspec-mirror", (DYNAMIC,))


@pytest.fixture
def mirror(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Provider:
    monkeypatch.setenv("STREAMSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(PROVIDERS, "mirror", MIRROR)
    return MIRROR


@pytest.mark.parametrize("error", [RuntimeError("Exception during initialization: std::bad_alloc"), MemoryError()])
def test_a_graph_without_memory_is_no_broken_bundle_and_no_larger_one_is_tried(
    error: Exception, bundles: Bundles, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder, tried, _ = bundles("int8"), list[str](), products_saturate()

    def full(path: str, *_: Any, **__: Any) -> None:
        tried.append(path)
        raise error

    monkeypatch.setattr(onnxruntime, "InferenceSession", full)
    with pytest.raises(ResourceError, match="no memory is left to open"):
        load(folder, threads=1, cache_dir=tmp_path)
    assert len(tried) == 1


def test_an_onnxruntime_that_cannot_be_loaded_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "onnxruntime.py").write_text("raise ImportError('DLL load failed')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "onnxruntime")
    with pytest.raises(ConfigError, match="onnxruntime cannot be loaded: DLL load failed"):
        providers.import_onnxruntime()


class Opened:
    """Counts what is opened, and makes a provider as fast as is said."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **speeds: float) -> None:
        self.names: list[str] = []
        on = choice.open_on

        def opening(folder: Path, manifest: Any, provider: str, *options: Any) -> OrtRunner:
            self.names.append(provider)
            return on(folder, manifest, provider, *options)

        def measured(runner: OrtRunner, *options: Any, **more: Any) -> Any:
            return {1: 1 / speeds[runner.provider]}, True

        monkeypatch.setattr(choice, "open_on", opening)
        monkeypatch.setattr(calibrate, "measure", measured)


@pytest.mark.parametrize(
    ("speeds", "best", "other"),
    [({"mirror": 50, "cpu": 20}, "mirror", "cpu"), ({"mirror": 10, "cpu": 20}, "cpu", "mirror")],
)
def test_auto_takes_the_fastest_that_is_right(
    bundles: Bundles,
    mirror: Provider,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    speeds: dict[str, float],
    best: str,
    other: str,
) -> None:
    opened = Opened(monkeypatch, **speeds)
    session = load(bundles("fp32"), threads=1, cache_dir=tmp_path)
    assert session.provider.name == session.runner.provider == best and sorted(opened.names) == ["cpu", "mirror"]
    assert dict(session.provider.passed_over)[other] == f"{speeds[other]} tokens/s expected, {best} {speeds[best]}"
    again = load(bundles("fp32"), threads=1, cache_dir=tmp_path)
    assert again.provider == session.provider and opened.names[2:] == [best]
    assert load(bundles("fp32"), threads=1, cache_dir=tmp_path, provider=other).provider == ProviderChoice(other)


def test_a_provider_that_fails_while_it_is_measured_is_passed_over(
    bundles: Bundles, mirror: Provider, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fails(runner: OrtRunner, *options: Any, **more: Any) -> Any:
        if runner.provider == "mirror":
            raise BundleError("rows that went astray")
        return {1: 1.0}, True

    monkeypatch.setattr(calibrate, "measure", fails)
    found = load(bundles("fp32"), threads=1, cache_dir=tmp_path).provider
    assert found.name == "cpu" and dict(found.passed_over)["mirror"] == "rows that went astray"


def test_a_fastest_provider_that_fails_later_makes_way_for_the_next(
    bundles: Bundles, mirror: Provider, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    Opened(monkeypatch, mirror=50, cpu=20)
    assert load(bundles("fp32"), threads=1, cache_dir=tmp_path).provider.name == "mirror"

    def refuse(session: Any, provider: Provider) -> int:
        if provider is CPU:
            return 0
        raise ProviderError("its driver has gone")

    monkeypatch.setattr(graph, "check_placement", refuse)
    later = load(bundles("fp32"), threads=1, cache_dir=tmp_path).provider
    assert later.name == "cpu" and dict(later.passed_over)["mirror"] == "its driver has gone"


def test_auto_passes_over_one_whose_trees_are_wrong_and_says_so(
    bundles: Bundles, mirror: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = OrtRunner.forward

    def blind(self: OrtRunner, tokens: Any, offsets: Any, *rest: Any) -> np.ndarray:
        return forward(self, tokens, range(len(tokens)) if self.provider == "mirror" else offsets, *rest)

    monkeypatch.setattr(OrtRunner, "forward", blind)
    session = load(bundles("fp32"), threads=1, tree="plain")
    assert session.provider.name == "cpu"
    assert dict(session.provider.passed_over)["mirror"].startswith("provider mirror computes a draft tree with logits")
    with pytest.raises(BundleError, match="provider mirror computes a draft tree.*choose provider cpu"):
        load(bundles("fp32"), threads=1, tree="plain", provider="mirror")


def test_a_bundle_that_no_provider_takes_is_refused_as_the_cpu_says(
    bundles: Bundles, mirror: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = OrtRunner.forward
    monkeypatch.setattr(OrtRunner, "forward", lambda self, *args: forward(self, *args) * np.float32(2))
    with pytest.raises(BundleError, match="this machine computes a prompt"):
        load(bundles("fp32"), threads=1, tree="plain")


@pytest.mark.parametrize("name", ["rocm", "migraphx", "webgpu"])
def test_a_provider_that_is_not_there_is_refused_with_what_brings_it(
    bundles: Bundles, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(providers, "find_spec", lambda module: None)
    with pytest.raises(ProviderError, match=f"provider {name}: not installed: pip install .*{name}.*doctor"):
        load(bundles("fp32"), threads=1, provider=name)


def test_an_unknown_provider_is_refused_with_the_names(bundles: Bundles) -> None:
    with pytest.raises(ConfigError, match="'tpu'.*auto, cuda, .*cpu"):
        load(bundles("fp32"), threads=1, provider="tpu")


def test_a_provider_of_another_flavour_is_refused_and_not_started(
    bundles: Bundles, mirror: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PROVIDERS, "mirror", replace(MIRROR, flavours=(STATIC,)))
    with pytest.raises(ProviderError, match="runs static bundles only, and this one is dynamic"):
        load(bundles("fp32"), threads=1, provider="mirror")
    session = load(bundles("fp32"), threads=1, tree="plain")
    assert dict(session.provider.passed_over)["mirror"].startswith("runs static")
    assert "not mirror: runs static bundles only" in str(session.provider)


def test_the_flavour_is_the_manifests() -> None:
    kinds = [
        Manifest.flavour.fget(SimpleNamespace(static=static, files=files))  # type: ignore[attr-defined]
        for static, files in ((None, {}), (object(), {}), (None, {COMPACT: None}))
    ]
    assert kinds == [DYNAMIC, STATIC, DEVICE]


@pytest.mark.parametrize(
    ("version", "kind", "expected"),
    [
        ("1.31.0", DYNAMIC, ""),
        ("2.0.0", "", ""),
        ("1.30.1", DYNAMIC, "bundles but static ones need 1.31 or newer"),
        ("1.4.0", STATIC, "bundles need 1.22 or newer"),
        ("1.22.2", STATIC, ""),
        ("1.24.1", "", "bundles but static ones need 1.31 or newer"),
    ],
)
def test_an_older_onnxruntime_is_named_with_its_place(
    version: str, kind: str, expected: str, bundles: Bundles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnxruntime, "__version__", version)
    found = find(CPU, kind).why_not
    place = Path(onnxruntime.__file__).parent
    assert found == (f"ONNX Runtime {version} in {place} comes first on Python's path; {expected}" if expected else "")
    if kind == DYNAMIC and expected:
        for provider in ("auto", "cpu"):
            with pytest.raises(ProviderError, match=re.escape(found)):
                load(bundles("fp32"), threads=1, provider=provider)
    if expected and not kind:
        done = CliRunner().invoke(app, ["doctor"])
        assert f"cpu: {found}; dynamic" in done.stdout and f"ONNX Runtime: {version}" in done.stdout, done.stdout


def test_a_plug_in_that_cannot_be_loaded_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_plugin.py").write_text(f"def get_library_path(): return {str(tmp_path / 'none.so')!r}")
    monkeypatch.syspath_prepend(tmp_path)
    found = find(Provider("odd", "OddExecutionProvider", "odd", (DYNAMIC,), "broken_plugin"))
    assert found.installed and "broken_plugin cannot be loaded" in found.why_not and "none.so" in found.why_not


def test_a_plug_in_keeps_its_device_when_it_is_looked_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimpleNamespace(ep_name="OddExecutionProvider", device=SimpleNamespace(type=SimpleNamespace(name="GPU")))
    ort = SimpleNamespace(
        __version__="1.31.1", get_available_providers=lambda: [device.ep_name], get_ep_devices=lambda: [device]
    )
    monkeypatch.setattr(providers, "import_onnxruntime", lambda: ort)
    assert find(Provider("odd", device.ep_name, "odd", (DYNAMIC,), "odd_plugin")).devices == (device,)
    assert find(Provider("odd", device.ep_name, "odd", (DYNAMIC,))) == UsableProvider(
        Provider("odd", device.ep_name, "odd", (DYNAMIC,)), True
    )


def test_openvinos_plug_in_has_a_device_or_says_that_it_has_none() -> None:
    pytest.importorskip("onnxruntime_ep_openvino", reason="onnxruntime-ep-openvino is not installed")
    found = find(PROVIDERS["openvino"], STATIC)
    assert bool(found.devices) != bool(found.why_not)
    if found.why_not:
        assert "finds no CPU here" in found.why_not


def test_openvino_takes_a_graph_of_products_whole_and_rightly() -> None:
    found = find(PROVIDERS["openvino"], STATIC)
    if found.why_not:
        pytest.skip(found.why_not)
    weights = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "w"], ["h"]),
            helper.make_node("Relu", ["h"], ["r"]),
            helper.make_node("MatMul", ["r", "w"], ["y"]),
        ],
        "products",
        [helper.make_tensor_value_info("x", 1, [4, 64])],
        [helper.make_tensor_value_info("y", 1, [4, 64])],
        [numpy_helper.from_array(weights, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    options = onnxruntime.SessionOptions()
    providers = prepare(onnxruntime, found, options, 1)
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=providers)
    rows = np.random.default_rng(1).standard_normal((4, 64)).astype(np.float32)
    right = np.maximum(rows @ weights, 0) @ weights
    assert check_placement(session, found.provider) == 0
    assert np.abs(session.run(None, {"x": rows})[0] - right).max() < 1e-5 * np.abs(right).max()


def test_generate_says_which_provider_computed(bundles: Bundles) -> None:
    options = ["--prompt", "a b", "--max-new-tokens", "3", "--threads", "1", "--provider", "cpu", "--stats"]
    done = CliRunner().invoke(app, ["generate", str(bundles("fp32")), *options])
    assert done.exit_code == 0 and "; provider: cpu; step costs: " in done.stderr
    refused = CliRunner().invoke(app, ["generate", str(bundles("fp32")), *options, "--provider", "rocm"])
    assert (
        refused.exit_code == 2
        and "provider rocm: not installed" in refused.stderr
        and "\n" not in refused.stderr.strip()
    )


def test_what_is_for_another_system_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(providers.platform, "system", lambda: "Linux")
    assert PROVIDERS["coreml"].missing == "for macOS only" and PROVIDERS["directml"].missing == "for Windows only"
    monkeypatch.setattr(providers.platform, "system", lambda: "Windows")
    assert PROVIDERS["directml"].missing == "not installed: pip install onnxruntime-directml"


def test_compiled_graphs_are_kept_where_that_is_possible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMSPEC_CACHE", str(tmp_path / "cache"))
    kept = PROVIDERS["migraphx"].options(1)["migraphx_model_cache_dir"]
    assert Path(kept).is_dir() and Path(kept).is_relative_to(tmp_path)
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("STREAMSPEC_CACHE", str(tmp_path / "file"))
    assert PROVIDERS["migraphx"].options(1) == {}


class Placed:
    """A session whose nodes lie where `parts` says: provider -> (operator, name)."""

    def __init__(self, parts: dict[str, list[tuple[str, str]]], names: list[str] | None = None) -> None:
        self.parts, self.names, self.falls_back = parts, names or [*parts], True

    def disable_fallback(self) -> None:
        self.falls_back = False

    def get_providers(self) -> list[str]:
        return self.names

    def get_provider_graph_assignment_info(self) -> list[Any]:
        return [
            SimpleNamespace(
                ep_name=name,
                get_nodes=lambda nodes=nodes: [SimpleNamespace(op_type=kind, name=node) for kind, node in nodes],
            )
            for name, nodes in self.parts.items()
        ]


OPENVINO = PROVIDERS["openvino"]


def test_small_nodes_on_the_cpu_are_counted() -> None:
    session = Placed({OPENVINO.ort: [("MatMul", "a")], CPU.ort: [("Shape", "b"), ("TopK", "c")]})
    assert check_placement(session, OPENVINO) == 2 and not session.falls_back


def test_a_device_of_a_plug_in_is_asked_for(bundles: Bundles, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU is listed among the devices as well."""
    device = next(d for d in onnxruntime.get_ep_devices() if d.ep_name == CPU.ort)
    monkeypatch.setitem(PROVIDERS, "mirror", replace(MIRROR, options=lambda threads: {}))
    monkeypatch.setattr(graph, "usable", lambda provider, wanted: UsableProvider(provider, True, devices=(device,)))
    session = load(bundles("fp32"), threads=1, tree="plain", provider="mirror")
    assert (
        session.provider == ProviderChoice("mirror") and len(session.generate("a b", max_new_tokens=3).token_ids) == 3
    )


def test_products_on_the_cpu_are_refused_by_name() -> None:
    session = Placed(
        {
            OPENVINO.ort: [("Add", "a")],
            CPU.ort: [("MatMul", "head/MatMul"), ("MatMul", "mlp"), ("Conv", "c"), ("Shape", "d")],
        }
    )
    with pytest.raises(
        ProviderError, match=r"openvino leaves 2 MatMul, 1 Conv, such as head/MatMul, mlp, c, to the CPU"
    ):
        check_placement(session, OPENVINO)


def test_a_provider_that_takes_nothing_or_did_not_start_is_refused() -> None:
    with pytest.raises(ProviderError, match="leaves the whole graph to the CPU"):
        check_placement(Placed({CPU.ort: [("Shape", "a")]}, [OPENVINO.ort, CPU.ort]), OPENVINO)
    with pytest.raises(ProviderError, match="cuda did not start"):
        check_placement(Placed({CPU.ort: [("Shape", "a")]}), PROVIDERS["cuda"])


def test_an_onnxruntime_that_cannot_say_where_nodes_lie_may_leave_none_to_the_cpu() -> None:
    options, old = onnxruntime.SessionOptions(), SimpleNamespace(InferenceSession=object)
    prepare(old, find(MIRROR), options, 1)
    assert options.get_session_config_entry("session.disable_cpu_ep_fallback") == "1"


def test_a_session_that_starts_elsewhere_than_asked_is_refused(
    bundles: Bundles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ONNX Runtime itself starts on the CPU, with a warning, where a provider of its build fails."""
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CUDAExecutionProvider", CPU.ort])
    with pytest.raises(ProviderError, match="cuda did not start"), pytest.warns(UserWarning):
        load(bundles("device fp32"), threads=1, provider="cuda")
    with pytest.warns(UserWarning):
        session = load(bundles("device fp32"), threads=1, tree="plain")
    assert "did not start" in dict(session.provider.passed_over)["cuda"]


def test_the_default_looks_for_plug_ins_without_loading_any(bundles: Bundles, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(plugin: str) -> str:
        raise AssertionError(plugin)

    monkeypatch.setattr(providers, "_register", refuse)
    assert load(bundles("fp32"), threads=1, tree="plain").runner.provider == "cpu"  # type: ignore[attr-defined]
