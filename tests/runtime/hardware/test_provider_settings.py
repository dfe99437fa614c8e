"""What `prepare` asks ONNX Runtime for, above all to capture a graph, and what follows where that is refused."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnxruntime
import pytest

from streamspec.bundle.cache_section import CAPTURED
from streamspec.bundle.manifest import MODEL
from streamspec.errors import BundleError
from streamspec.runtime import Session, load
from streamspec.runtime.engine.loaded_model import LoadedModel
from streamspec.runtime.engine.ort_runner import OrtRunner
from streamspec.runtime.hardware.providers import CPU, DEVICE, PROVIDERS, STATIC, Provider, UsableProvider, prepare

Bundles = Callable[[str], Path]
OPTION = "migraphx_hip_graph_enable"


@pytest.mark.parametrize(
    ("name", "option", "graph"),
    [
        ("cuda", "enable_cuda_graph", CAPTURED),
        ("migraphx", OPTION, MODEL),
    ],
)
def test_a_provider_is_told_to_capture_by_its_own_option(name: str, option: str, graph: str) -> None:
    state, old = UsableProvider(PROVIDERS[name], True), SimpleNamespace(InferenceSession=object)
    for capture in (True, False):
        asked = prepare(old, state, onnxruntime.SessionOptions(), 1, capture)
        assert asked is not None and asked[0][0] == PROVIDERS[name].ort
        assert asked[0][1].get(option) == ("1" if capture else None)
    assert PROVIDERS[name].captured == graph


def test_rocm_is_not_told_to_capture_and_runs_the_graph_for_it_all_the_same() -> None:
    rocm = PROVIDERS["rocm"]
    assert rocm.capture is not None and not rocm.capture and rocm.captured == CAPTURED


@pytest.fixture
def mirror(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """MIGraphX's row over the CPU: a provider of static bundles with an option for capture."""
    monkeypatch.setenv("STREAMSPEC_CACHE", str(tmp_path / "cache"))
    row = Provider("mirror", CPU.ort, "-", (STATIC,), capture={OPTION: "1"}, captured=MODEL)
    monkeypatch.setitem(PROVIDERS, "mirror", row)


def opened(monkeypatch: pytest.MonkeyPatch, folder: Path, known: bool) -> tuple[Session, list[bool]]:
    """The bundle open on the mirror, and whether each session was asked for with the option; where that is not `known`,
    it is refused as ONNX Runtime does."""
    asked: list[bool] = []
    whole = onnxruntime.InferenceSession._create_inference_session

    def create(self: Any, providers: Any, *rest: Any) -> None:
        if isinstance(providers[0], tuple):  # not of the sampler
            asked.append(OPTION in providers[0][1])
            if asked[-1] and not known:
                raise RuntimeError(f'Unknown provider option: "{OPTION}".')
        whole(self, providers, *rest)

    monkeypatch.setattr(onnxruntime.InferenceSession, "_create_inference_session", create)
    return load(folder, provider="mirror", threads=1, tree=8), asked


@pytest.mark.usefixtures("mirror")
def test_a_static_graph_is_captured_where_the_installed_provider_can(
    bundles: Bundles, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, asked = opened(monkeypatch, bundles("static full"), known=True)
    assert asked == [True] and str(session.provider) == "mirror (captured)"


@pytest.mark.usefixtures("mirror")
def test_a_provider_that_does_not_know_the_option_runs_without_it_and_says_so(
    bundles: Bundles, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    session, asked = opened(monkeypatch, bundles("static full"), known=False)
    assert asked == [True, False] and not session.provider.captured
    assert f"not captured: ONNX Runtime {onnxruntime.__version__} cannot load model.onnx on mirror: Unknown" in str(
        session.provider
    )
    plain = session.generate("a b c", max_new_tokens=20, speculate=False)
    assert session.generate("a b c", max_new_tokens=20).token_ids == plain.token_ids
    assert "EP Error" not in capfd.readouterr().out  # which ONNX Runtime prints where it falls back by itself


def test_a_provider_without_the_dynamic_graphs_operators_says_why_nothing_is_captured(
    bundles: Bundles, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs: list[str] = []
    whole = LoadedModel._open

    def opening(self: LoadedModel, path: Path, *rest: Any) -> Any:
        graphs.append(path.name)
        if path.name == CAPTURED:
            raise BundleError("no HIP graph", "one", "nothing")
        return whole(self, path, *rest)

    monkeypatch.setattr(LoadedModel, "_open", opening)
    monkeypatch.setattr(
        "streamspec.runtime.engine.loaded_model.prepare", lambda ort, here, options, threads, capture: [CPU.ort]
    )
    monkeypatch.setattr("streamspec.runtime.engine.loaded_model.check_placement", lambda *_: 0)
    for dynamic, seen in ((True, [CAPTURED, MODEL]), (False, [CAPTURED])):
        row = Provider("device", CPU.ort, "-", (DEVICE,), memory="cpu", capture={"some": "1"}, dynamic=dynamic)
        monkeypatch.setitem(PROVIDERS, "device", row)
        graphs.clear()
        if dynamic:
            session = load(bundles("captured fp32"), provider="device", threads=1, tree="plain")
            assert (
                isinstance(session.runner, OrtRunner) and session.provider.why_not_captured == "no HIP graph; nothing"
            )
        else:
            with pytest.raises(BundleError, match="no HIP graph"):
                load(bundles("captured fp32"), provider="device", threads=1, tree="plain")
        assert graphs[:2] == seen


WARNING = """
import sys
import onnxruntime
from streamspec.runtime.hardware.providers import CPU, DYNAMIC, Provider, UsableProvider, prepare

if sys.argv[1] == "prepared":
    odd = UsableProvider(Provider("odd", CPU.ort, "-", (DYNAMIC,)), True)
    prepare(onnxruntime, odd, onnxruntime.SessionOptions(), 1)
options = onnxruntime.SessionOptions()
for value in "01":  # the second replaces the first, of which the default logger warns, as kernels do
    options.add_session_config_entry("session.intra_op.allow_spinning", value)
"""


@pytest.mark.parametrize("prepared", [True, False])
def test_a_warning_past_the_sessions_logger_does_not_reach_the_terminal(prepared: bool) -> None:
    """Of a kernel of CUDA's, ScatterND, it did."""
    done = subprocess.run(
        [sys.executable, "-c", WARNING, "prepared" if prepared else "not"], capture_output=True, text=True, check=True
    )
    assert done.stdout == "" and ("already exists" in done.stderr) != prepared
    assert not prepared or done.stderr == ""
