"""What a manifest says of the KV cache, and that manifests which say nothing are as they were."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from streamspec.bundle.manifest import FileInfo, Manifest
from streamspec.errors import BundleError
from streamspec.layer_cache import STATE_WINDOW, LayerCache
from streamspec.step_graph import COMPACTION, DYNAMIC, STATIC, GraphFeatures, inputs, outputs
from tests.support.manifests import FILES, manifest

SIZES = (LayerCache(heads=2, width=32), LayerCache("shared"))
STATE = LayerCache("state_space", STATE_WINDOW, parts=(2, 16, 4, 32, 1, 192, 1, 8, 1, 32, 1, 1))
BESIDE = (LayerCache(beside=STATE), STATE)
CACHES = (LayerCache(window=8, dtype="float16"), LayerCache(dtype="float16"))


def complete(caches: tuple[LayerCache, ...]) -> Manifest:
    model = replace(manifest().model, caches=caches)
    return replace(manifest(model=model), files={name: FileInfo("0" * 64, 1) for name in FILES})


def test_a_manifest_keeps_what_layers_keep() -> None:
    assert Manifest.from_json(complete(CACHES).to_json()) == complete(CACHES)
    assert Manifest.from_json(complete(SIZES).to_json()) == complete(SIZES)
    assert Manifest.from_json(complete(BESIDE).to_json()) == complete(BESIDE)
    assert "beside" not in complete((STATE, STATE)).to_json()
    assert "width" not in complete(CACHES).to_json()


def test_states_and_keys_may_be_of_different_types() -> None:
    caches = (STATE, LayerCache(dtype="float16", beside=STATE))
    assert Manifest.from_json(complete(caches).to_json()) == complete(caches)
    rows = {row.name: row.dtype for row in inputs(DYNAMIC, GraphFeatures(2, 1, 8, 257, caches=caches, own_layers=1))}
    half = {name for name, dtype in rows.items() if dtype == "float16"}
    assert half == {f"past_key_values.{layer}.{part}" for layer in (1, 2) for part in ("key", "value")}


def test_a_layer_that_keeps_nothing_has_no_inputs() -> None:
    features = GraphFeatures(2, 1, 8, 257, caches=SIZES, own_layers=1)
    caches = {row.name: row.dims for row in inputs(DYNAMIC, features) if row.name.startswith("past_key_values.")}
    assert caches["past_key_values.0.key"] == (1, 2, "S", 32) and caches["past_key_values.2.key"] == (1, 1, "S", 8)
    assert len(caches) == 4
    with pytest.raises(BundleError, match="a first layer that keeps nothing"):
        Manifest.from_json(complete(SIZES[::-1]).to_json())


def test_a_layer_has_inputs_for_what_it_keeps_beside_its_keys() -> None:
    features = GraphFeatures(2, 1, 8, 257, caches=BESIDE)
    caches = {row.name: row.dims for row in inputs(DYNAMIC, features) if row.name.startswith("past_key_values.")}
    assert caches["past_key_values.0.key"] == (1, 1, "S", 8)
    ring = f"S{STATE_WINDOW}"
    assert caches["past_key_values.0.beside_key"] == caches["past_key_values.1.key"] == (1, 2, ring, 16)
    assert caches["past_key_values.0.beside_mark"] == (1, 1, ring, 1) and len(caches) == 2 + 6 + 6
    fixed = {row.name: row.dims for row in inputs(STATIC, replace(features, rows=4, slots=1000))}
    assert (fixed["past_key_values.0.key"][2], fixed["past_key_values.0.beside_key"][2]) == (1000, 256)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda c: c[0]["beside"].update(window=8), r"caches\[0\].beside.parts"),
        (lambda c: c[0]["beside"].update(kind="other"), r"caches\[0\].beside.kind"),
        (lambda c: c[0].update(beside=5), r"caches\[0\].beside"),
        (lambda c: c[1].update(beside=c[0]["beside"]), r"caches\[1\].kind is .state_space.*expected attention"),
    ],
)
def test_what_makes_no_sense_beside_attention_is_refused(change: Any, field: str) -> None:
    content = json.loads(complete(BESIDE).to_json())
    change(content["model"]["caches"])
    with pytest.raises(BundleError, match=field):
        Manifest.from_json(json.dumps(content))


def test_layers_that_keep_everything_are_not_mentioned() -> None:
    """Saved conversations are keyed by the manifest's text."""
    text = complete(()).to_json()
    assert "caches" not in text and '"heads"' not in text and Manifest.from_json(text).model.caches == ()
    assert "per_layer_width" not in text and "idle_share" not in text
    wide = replace(complete(()), model=replace(manifest().model, heads=4, per_layer_width=8, idle_share=0.5))
    assert Manifest.from_json(wide.to_json()) == wide


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda c: c.pop(), "caches is '1 layers'"),
        (lambda c: c.append(c[0]), "caches"),
        (lambda c: c[0].update(window=0), r"caches\[0\].window"),
        (lambda c: c[0].update(window="8"), r"caches\[0\].window"),
        (lambda c: c[0].update(width=1 << 20), r"caches\[0\].width"),
        (lambda c: c[0].update(kind="other"), r"caches\[0\].kind"),
        (lambda c: c[1].update(dtype="bfloat16"), r"caches\[1\].dtype"),
        (lambda c: c[1].update(dtype="float32"), "all keys and values of one dtype"),
        (lambda c: c.__setitem__(0, 5), r"caches\[0\]"),
    ],
)
def test_caches_that_make_no_sense_are_refused(change: Any, field: str) -> None:
    content = json.loads(complete(CACHES).to_json())
    change(content["model"]["caches"])
    with pytest.raises(BundleError, match=field):
        Manifest.from_json(json.dumps(content))


def test_the_interface_follows_what_layers_keep() -> None:
    features = GraphFeatures(2, 1, 8, 257, caches=CACHES, own_layers=1)
    for kind in (DYNAMIC, COMPACTION):
        caches = [row for row in inputs(kind, features) if row.name.startswith("past_key_values.")]
        assert [row.dims[2] for row in caches] == ["S8", "S8", "S", "S", "S", "S"]
        assert {row.dtype for row in caches} == {"float16"} == {row.dtype for row in outputs(kind, features)[-6:]}
    fixed = GraphFeatures(2, 1, 8, 257, caches=CACHES, rows=4, slots=1000)
    assert [row.dims[2] for row in inputs(STATIC, fixed)[-4:]] == [384, 384, 1000, 1000]
    assert [(row.dims[2], row.dtype) for row in outputs(STATIC, fixed)[-4:]] == [(4, "float16")] * 4
