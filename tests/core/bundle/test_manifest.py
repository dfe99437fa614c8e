"""What a manifest says; tests/attacks/test_bundles.py has what it may not say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from streamspec.bundle.files import verify_files
from streamspec.bundle.manifest import DrafterInfo, FileInfo, Manifest, StaticInfo, SwappableCapacity
from streamspec.errors import BundleError, ConfigError
from tests.support.manifests import FILES, manifest, write_bundle


def complete(**changes: object) -> Manifest:
    """A manifest as it is written, its files listed."""
    return replace(manifest(**changes), files={name: FileInfo("0" * 64, 1) for name in FILES})


def test_plain_bundles_have_no_streams(tmp_path: Path) -> None:
    plain = manifest(method="lora", streams=None, trees=None, recipe=None, drafter=None)
    assert verify_files(tmp_path / "b", write_bundle(tmp_path / "b", FILES, plain)).streams is None


def test_a_manifest_comes_back_from_its_text() -> None:
    assert Manifest.from_json(complete().to_json()) == complete()


def test_what_was_trained_is_in_words_and_no_lora_where_there_is_none() -> None:
    plain = manifest(method="lora", streams=None, trees=None, recipe=None, drafter=None)
    words = {plain.base.sha256: "none: the base alone", "1" * 64: "lora"}
    words |= {None: "none or lora: this older bundle does not tell"}
    assert {weights: replace(plain, weights_sha256=weights).trained for weights in words} == words
    assert replace(manifest(), weights_sha256=plain.base.sha256).trained == "streaming / staged"


def test_method_streams_and_trees_belong_together() -> None:
    for changes in ({"method": "lora"}, {"streams": None, "trees": None}, {"trees": None}):
        with pytest.raises(BundleError, match="streams and trees for every method but lora"):
            Manifest.from_json(complete(**changes).to_json())
    with pytest.raises(BundleError, match="levels for jakiro and eagle"):
        Manifest.from_json(complete(method="eagle").to_json())
    with pytest.raises(BundleError, match="layers for streaming, and only there"):
        Manifest.from_json(complete(method="medusa").to_json())


@pytest.mark.parametrize("has", ["nothing else", "embeddings", "streams", "static"])
def test_a_swappable_bundle_has_the_base_alone(has: str) -> None:
    none = {"method": "lora", "streams": None, "trees": None, "recipe": None, "drafter": None}
    capacity = {} if has == "streams" else none
    one = complete(swappable=SwappableCapacity(), static=StaticInfo(8, 64) if has == "static" else None, **capacity)
    one = replace(one, model=replace(one.model, context_length=64, embeddings=has == "embeddings"))
    if has == "nothing else":
        assert Manifest.from_json(one.to_json()) == one
    else:
        with pytest.raises(BundleError, match="a swappable bundle with streams of its own, fixed shapes or embeddings"):
            Manifest.from_json(one.to_json())


def test_keys_of_a_drafter_are_said_where_they_are_not_the_models() -> None:
    own = complete(method="dflash", streams=DrafterInfo(2, 0, 5, layers=1, own_keys=(3, 4)))
    assert Manifest.from_json(own.to_json()) == own
    plain = replace(own, streams=replace(own.streams, own_keys=(0, 0)))
    assert "own_keys" not in plain.to_json() and Manifest.from_json(plain.to_json()) == plain
    for keys in ((3,), (3, 4, 5), (3, 0)):
        with pytest.raises(BundleError, match="streams.own_keys"):
            Manifest.from_json(replace(own, streams=replace(own.streams, own_keys=keys)).to_json())


def test_a_draft_layer_over_the_targets_keys_is_said_and_nothing_else_is() -> None:
    layer = complete(method="mtp", streams=DrafterInfo(2, 0, 5, levels=(1, 4), target_keys=True))
    assert Manifest.from_json(layer.to_json()) == layer
    assert "target_keys" not in replace(layer, streams=replace(layer.streams, target_keys=False)).to_json()
    with pytest.raises(BundleError, match="method medusa over the target's keys; expected a draft layer"):
        Manifest.from_json(replace(layer, method="medusa", streams=DrafterInfo(2, 0, 5, target_keys=True)).to_json())


def test_pruning_needs_an_early_exit() -> None:
    with pytest.raises(ConfigError, match="leave pruning out"):
        complete().check_prunes()


def test_the_precision_is_said_in_words() -> None:
    assert (
        complete().rounding == "int8" and complete(precision="int4", block_size=32).rounding == "int4 in blocks of 32"
    )
