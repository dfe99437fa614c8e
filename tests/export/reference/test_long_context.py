"""Rows after the window and after the rope's original length: compared at every export, bugs there are seen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from streamspec.errors import StreamspecError
from streamspec.export import export_bundle
from streamspec.export.graphs.dynamic_step_graph import StepGraph
from streamspec.export.ops.builder import WeightStore
from streamspec.export.quantization.precisions import precision
from streamspec.export.reference import long_context
from streamspec.export.reference.long_context import expect_long, plan
from streamspec.export.reference.reference import reference_of
from streamspec.export.runners.graph_runner import open_session
from streamspec.export.spec.decoder_spec import DecoderSpec
from streamspec.export.validate.parity import check_parity, expect
from streamspec.export.weights.load_weights import ModelSource
from streamspec.export.weights.model_spec import describe
from tests.support.tiny_exports import VOCAB, build, build_static, save_base, tiny_model

TOKENS = np.random.default_rng(0).integers(0, VOCAB, 40)  # fewer than any limit here
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 200,
}
LONG: dict[str, tuple[str, dict[str, Any]]] = {
    "window": ("mistral", {"sliding_window": 150}),
    "window and soft cap": ("gemma2", {"sliding_window": 150}),
    "window and two rotaries": ("gemma3_text", {"sliding_window": 150}),
    "rope": ("llama", {"rope_parameters": LLAMA3}),
    "window and rope": ("mistral", {"sliding_window": 150, "rope_parameters": LLAMA3}),
}


def long_model(name: str) -> Any:
    family, changes = LONG[name]
    return tiny_model(family, max_position_embeddings=512, **changes)


def written(folder: Path, model: Any, spec: DecoderSpec) -> Any:
    graph = StepGraph(spec, ModelSource(model, spec), precision("fp32"))
    onnx.save(graph.build(WeightStore(folder / "model.onnx.data")), folder / "model.onnx")
    return open_session(folder / "model.onnx", threads=1)


def quiet(line: str) -> None:
    pass


@pytest.fixture(params=["all rows", "with gaps"])
def gaps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """With and without rows that are skipped; in chunks of 16 rows."""
    monkeypatch.setattr(long_context, "SCORE_BYTES", 1)
    if request.param == "with gaps":
        for name, value in (("WORK", 0), ("FIRST", 8), ("BEFORE", 8)):
            monkeypatch.setattr(long_context, name, value)
    return request.param == "with gaps"


@pytest.mark.parametrize("name", LONG)
def test_a_graph_agrees_after_its_limits(name: str, gaps: bool, tmp_path: Path) -> None:
    model = long_model(name)
    built = build(tmp_path, model, streams=True)
    report = check_parity(built.session, expect(model, built.streams, TOKENS, spec=built.spec), "fp32")
    limits = {150: "window"} if "window" in name else {}
    limits |= {200: "original rope length"} if "rope" in name else {}
    text, _ = plan(reference_of(model), built.spec)
    assert text is not None and text.limits == limits and bool((~text.computed).any()) == gaps
    assert report["long"]["rows"] == 16 * len(limits) and report["long"]["relative"] < 1e-5
    for limit, what in limits.items():
        assert f"positions {limit}-{limit + 15} (after the {what} of {limit})" in report["long"]["where"]


def test_convolutions_are_compared_where_all_rows_are_computed(gaps: bool, tmp_path: Path) -> None:
    """The first rows after a gap would read those before it."""
    model = tiny_model("lfm3", max_position_embeddings=512, sliding_window=150)
    built = build(tmp_path, model, streams=False)
    text, left_out = plan(reference_of(model), built.spec)
    report = check_parity(built.session, expect(model, None, TOKENS, spec=built.spec), "fp32")
    if gaps:
        assert text is None and left_out == "rows after the window of 150: short convolutions" and "long" not in report
    else:
        assert left_out is None and report["long"]["rows"] == 16 and report["long"]["relative"] < 1e-5


@pytest.mark.parametrize("name", LONG)
def test_the_reference_is_hugging_faces_own_pass(name: str) -> None:
    model = long_model(name)
    expected = expect_long(reference_of(model), describe(model), TOKENS, quiet)
    assert expected.text is not None and expected.text.computed.all()
    with torch.no_grad():
        theirs = model(torch.as_tensor(expected.tokens)[None], use_cache=False).logits[0].numpy()
    np.testing.assert_allclose(expected.logits, theirs[expected.text.compared], atol=2e-5 * theirs.std())


@pytest.mark.parametrize(
    ("name", "bug"),
    [
        ("window", lambda spec: replace(spec, windows=(None,) * 4)),
        ("window", lambda spec: replace(spec, windows=(151, 150, 150, 150))),
        ("window and soft cap", lambda spec: replace(spec, windows=tuple(w and 149 for w in spec.windows))),
        ("rope", lambda spec: replace(spec, rotaries=(replace(spec.rotaries[0], inv_freq=slow(spec)),))),
    ],
)
def test_a_bug_that_short_texts_do_not_show_is_seen(name: str, bug: Any, gaps: bool, tmp_path: Path) -> None:
    model = long_model(name)
    spec = describe(model)
    session = written(tmp_path, model, bug(spec))
    assert check_parity(session, expect(model, None, TOKENS), "fp32")["plain"]["relative"] < 1e-3
    with pytest.raises(StreamspecError, match="long logits differ"):
        check_parity(session, expect(model, None, TOKENS, spec=spec), "fp32")


def slow(spec: DecoderSpec) -> np.ndarray:
    """Frequencies whose slowest ones turn a little less, as where a scaling is forgotten."""
    return np.where(np.arange(8) < 7, spec.rotaries[0].inv_freq, spec.rotaries[0].inv_freq * 0.2).astype(np.float32)


def test_static_graphs_are_compared_within_their_slots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_context, "WORK", 0)
    model = tiny_model("mistral", sliding_window=30)
    built = build_static(tmp_path, model, streams=False)
    tokens = TOKENS[:20]
    spec = replace(built.spec, context_length=64)
    report = check_parity(built.session, expect(model, None, tokens, 10, spec), "fp32")
    assert report["long"]["rows"] == 16 and report["long"]["relative"] < 1e-5
    assert "long" not in check_parity(
        built.session, expect(model, None, tokens, 10, replace(spec, context_length=40)), "fp32"
    )


def test_a_window_of_4096_is_computed_whole_and_one_of_twice_that_in_part() -> None:
    model = tiny_model("mistral", sliding_window=4096)
    for window, whole in ((4096, True), (8192, False)):
        spec = replace(describe(model), windows=(window,) * 4, context_length=1 << 14)
        text, _ = plan(reference_of(model), spec)
        assert text is not None and bool(text.computed.all()) == whole
        assert text.limits == {window: "window"} and text.computed[text.compared].all()


def test_a_model_without_limits_has_no_long_rows() -> None:
    for family, changes in (("llama", {}), ("gpt2", {}), ("mistral", {"sliding_window": None})):
        model = tiny_model(family, **changes)
        assert plan(reference_of(model), describe(model)) == (None, None)


def test_what_needs_too_large_a_cache_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_context, "CACHE_BYTES", 190_000)
    base = save_base(tmp_path / "base", long_model("window and rope"))
    lines: list[str] = []
    manifest = export_bundle(base.path, None, tmp_path / "bundle", "fp32", progress=lines.append)
    assert manifest.parity["long"]["where"] == "positions 150-165 (after the window of 150)"
    assert manifest.parity["not_compared"].startswith("rows after the original rope length of 200: keys and values")
    card = (tmp_path / "bundle" / "README.md").read_text()
    assert "| long | 16 |" in card and "(after the window of 150)" in card and "Not compared: rows after" in card
    assert any("rows of the reference, to compare positions 150-165" in line for line in lines)
