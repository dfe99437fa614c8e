"""Bundles that give the target's last states: the graph's output against PyTorch and numpy, and who gives none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from streamspec.adapters.base_models import without_torch
from streamspec.bundle.files import read_manifest
from streamspec.bundle.manifest import Manifest
from streamspec.cli import app
from streamspec.errors import BundleError, ConfigError
from streamspec.export import Target, export_bundle
from streamspec.runtime import load
from tests.support.forging import edit
from tests.support.tiny_bundles import tiny_base, tiny_bundle
from tests.support.tiny_exports import save_base


@pytest.mark.parametrize(
    "options",
    [{"full": True}, {"full": True, "root_token": False, "when": "eager"}, {"method": "eagle"}],
    ids=["pruned", "eager", "draft layer"],
)
def test_states_are_compared_with_pytorchs(options: dict[str, Any], tmp_path: Path) -> None:
    manifest = read_manifest(tiny_bundle(tmp_path, embeddings=True, **options))
    assert manifest.model.embeddings
    assert manifest.parity["states"]["rows"] > 90 and manifest.parity["states"]["relative"] < 1e-4


def test_numpy_compares_them_where_pytorch_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = save_base(tmp_path / "base").path
    monkeypatch.setattr(without_torch, "find_spec", lambda name: None)
    manifest = export_bundle(base, None, tmp_path / "out", "fp32", progress=lambda line: None, embeddings=True)
    assert manifest.parity["reference"] == "numpy" and manifest.parity["states"]["relative"] < 1e-4


def test_weights_are_the_same_with_and_without(tmp_path: Path) -> None:
    base, quiet = tiny_base(tmp_path / "base"), {"progress": lambda line: None}
    made = {}
    for given in (False, True):
        manifest = export_bundle(base, None, tmp_path / str(given), "int8", embeddings=given, **quiet)  # type: ignore[arg-type]
        made[given] = manifest.files["model.onnx.data"]
        assert ('"embeddings"' in manifest.to_json()) == given == ("states" in manifest.parity)
    assert made[False] == made[True]


def test_a_short_graph_beside_it_gives_none(tmp_path: Path) -> None:
    base = tiny_base(tmp_path / "base")
    export_bundle(base, None, tmp_path / "out", "fp32", self_draft="1", embeddings=True, progress=lambda line: None)
    session = load(tmp_path / "out", threads=1, draft="self", cache_dir=tmp_path)
    assert session.embed("hello").shape == (1, 32)


@pytest.mark.parametrize("target", [Target(static=True), Target("openvino"), Target("cuda", capture=True)], ids=str)
def test_graphs_of_fixed_shapes_are_refused(target: Target, tmp_path: Path) -> None:
    base = tiny_base(tmp_path / "base")
    with pytest.raises(ConfigError, match="--embeddings for fixed shapes; expected a graph that takes texts of any"):
        export_bundle(base, None, tmp_path / "out", "fp32", target=target, embeddings=True, progress=lambda line: None)
    assert not (tmp_path / "out").exists()


def test_a_swappable_bundle_with_them_is_refused_by_name(tmp_path: Path) -> None:
    out = tmp_path / "out"
    found = CliRunner().invoke(app, ["export", "--base", "base", "--out", str(out), "--swappable", "--embeddings"])
    assert found.exit_code == 2 and "--swappable and --embeddings" in " ".join(found.output.split())


def test_a_manifest_that_promises_what_its_graph_lacks_is_refused(tmp_path: Path) -> None:
    bundle = tiny_bundle(tmp_path, streams=False)
    edit(bundle, lambda manifest: manifest["model"].update(embeddings=True))
    with pytest.raises(BundleError, match="a graph without hidden_states"):
        load(bundle, threads=1, cache_dir=tmp_path)


def test_fixed_shapes_and_embeddings_are_refused_in_a_manifest(tmp_path: Path) -> None:
    text = read_manifest(tiny_bundle(tmp_path, target=Target(static=True, rows=8))).to_json()
    with pytest.raises(BundleError, match=r"manifest\.model\.embeddings beside fixed shapes"):
        Manifest.from_json(text.replace('"layers":', '"embeddings": true, "layers":', 1))
