"""Bundles whose early exit is below the streams: the same answers, rows moved in the right layers, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from streamspec.bundle.files import read_manifest
from streamspec.errors import AdapterError, ConfigError, StreamspecError
from streamspec.export import Target, export_bundle
from streamspec.runtime import Pruning, load
from tests.runtime.engine.test_ort_runner import PROMPTS
from tests.support.tiny_bundles import tiny_adapter, tiny_base


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A base of 4 layers, and streams of the last 2 with exits at layers 2 and 1."""
    folder = tmp_path_factory.mktemp("exits")
    base = tiny_base(folder / "base")
    return base, tiny_adapter(folder / "adapter", base, full=True, root_token=False, exits=(2, 1))


def exported(parts: tuple[Path, Path], out: Path, **options: Any) -> Path:
    export_bundle(*parts, out, "fp32", progress=lambda line: None, **options)
    return out


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("provider", ["cpu", "device"])
@pytest.mark.parametrize("when", ["deferred", "eager"])
def test_answers_pruned_below_the_streams_are_the_plain_ones(
    when: str, provider: str, parts: tuple[Path, Path], tmp_path: Path
) -> None:
    bundle = exported(parts, tmp_path / "bundle", exit_layer=1, streams=when, target=Target("cuda"))
    session = load(bundle, provider=provider, threads=1, tree=12, pruning=Pruning(rows=4))
    committed = steps = 0
    for prompt in PROMPTS:
        plain = session.generate(prompt, max_new_tokens=60, speculate=False)
        drafted = session.generate(prompt, max_new_tokens=60)
        assert drafted.token_ids == plain.token_ids
        committed, steps = committed + drafted.stats.step_tokens, steps + drafted.stats.steps
    assert committed > steps  # some drafts came true


def test_the_last_of_the_exits_is_taken_by_default(parts: tuple[Path, Path], tmp_path: Path) -> None:
    streams = read_manifest(exported(parts, tmp_path / "bundle")).streams
    assert streams is not None and streams.exit_layer == 2


def test_an_exit_that_was_not_trained_is_refused(parts: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--exit-layer 3; expected 1 or 2, as the adapter was trained"):
        exported(parts, tmp_path / "bundle", exit_layer=3)
    with pytest.raises(ConfigError, match="no early exit"):
        export_bundle(parts[0], None, tmp_path / "bundle", "fp32", progress=lambda line: None, exit_layer=1)


@pytest.mark.parametrize("exits", [(3, 1), (1, 1), (0, 1), ("1", 2), (True, 2)])
def test_exits_that_cannot_be_are_refused(exits: Any, parts: tuple[Path, Path], tmp_path: Path) -> None:
    adapter = tiny_adapter(tmp_path / "adapter", parts[0], exits=exits)
    with pytest.raises(AdapterError, match="exit_layers"):
        exported((parts[0], adapter), tmp_path / "bundle")


def test_a_static_graph_leaves_the_exit_out(parts: tuple[Path, Path], tmp_path: Path) -> None:
    streams = read_manifest(exported(parts, tmp_path / "bundle", target=Target(static=True))).streams
    assert streams is not None and not streams.pruning and streams.exit_layer is None


def test_pruning_without_an_exit_is_refused(parts: tuple[Path, Path], tmp_path: Path) -> None:
    bundle = exported(parts, tmp_path / "bundle", target=Target(static=True))
    with pytest.raises(StreamspecError, match="early exit"):
        load(bundle, pruning=Pruning(rows=2))
