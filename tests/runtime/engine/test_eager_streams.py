"""Eager streams in whole bundles: the same answers in the same steps as deferred ones, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from streamspec.bundle.files import read_manifest
from streamspec.errors import BundleError, ConfigError
from streamspec.export import Target, export_bundle
from streamspec.runtime import Pruning, load
from tests.runtime.engine.test_ort_runner import PROMPTS
from tests.support.forging import edit, refused

Bundles = Callable[[str], Path]


@pytest.mark.parametrize("pruning", [None, Pruning(rows=5), Pruning(min_probability=0.02)], ids=["all", "rows", "low"])
def test_answers_take_the_same_steps_as_with_deferred_streams(pruning: Pruning | None, bundles: Bundles) -> None:
    sessions = [load(bundles(name), threads=1, tree=12, pruning=pruning) for name in ("eager", "deferred")]
    committed = steps = 0
    for prompt in PROMPTS:
        eager, deferred = (session.generate(prompt, max_new_tokens=60) for session in sessions)
        plain = sessions[0].generate(prompt, max_new_tokens=60, speculate=False)
        assert eager.token_ids == deferred.token_ids == plain.token_ids
        counts = [(answer.stats.step_tokens, answer.stats.steps) for answer in (eager, deferred)]
        assert counts[0] == counts[1]
        committed, steps = committed + counts[0][0], steps + counts[0][1]
    assert committed > steps  # some drafts came true


def test_the_manifest_says_that_streams_are_eager(bundles: Bundles) -> None:
    for name in ("eager", "deferred"):
        streams = read_manifest(bundles(name)).streams
        assert streams is not None and streams.eager == (name == "eager")


@pytest.mark.parametrize("name", ["eager", "deferred"])
def test_a_manifest_that_says_otherwise_than_its_graph_is_refused(name: str, bundles: Bundles, tmp_path: Path) -> None:
    shutil.copytree(bundles(name), tmp_path / "bundle")
    edit(tmp_path / "bundle", lambda manifest: manifest["streams"].update(eager=name != "eager"))
    refused(tmp_path / "bundle", "when the manifest says")


def test_eager_streams_with_a_root_token_are_refused(bundles: Bundles) -> None:
    manifest = json.loads((bundles("eager") / "manifest.json").read_text())
    manifest["streams"]["root_token"] = True
    with pytest.raises(BundleError, match="eager streams"):
        type(read_manifest(bundles("eager"))).from_json(json.dumps(manifest))


@pytest.mark.parametrize(
    ("folder", "options", "found"),
    [
        ("full", {}, "read the root"),
        ("lora", {}, "no streams"),
        ("deferred", {"stream_weights": "merged"}, "--stream-weights merged"),
        ("deferred", {"target": Target(static=True)}, "static graph"),
        ("deferred", {"streams": "early"}, "early.*deferred or eager"),
    ],
)
def test_what_cannot_be_exported_with_eager_streams_is_refused(
    folder: str, options: dict[str, Any], found: str, bundles: Bundles, tmp_path: Path
) -> None:
    parts = bundles(folder).parent
    with pytest.raises(ConfigError, match=found):
        given = {"streams": "eager"} | options
        export_bundle(parts / "base", parts / "adapter", tmp_path / "out", "fp32", progress=lambda line: None, **given)
    assert not (tmp_path / "out").exists()
