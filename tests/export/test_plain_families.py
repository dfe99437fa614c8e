"""Families of whose layers not all drafters, and no bundles but those of any shapes for CPUs, are made: refused before
any work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from streamspec.adapters.base_models.resolve import resolve_base
from streamspec.adapters.drafters.registry import chosen_method
from streamspec.adapters.drafters.streams.config import check_config
from streamspec.adapters.drafters.streams.model import StreamConfig, StreamingModel
from streamspec.adapters.train import train
from streamspec.adapters.training.config import TrainConfig
from streamspec.errors import AdapterError, ConfigError
from streamspec.export import Target, export_bundle, export_swappable
from tests.support.tiny_drafters import fresh_drafter, save_random
from tests.support.tiny_exports import save_base, tiny_model

STATE, HYBRID = "keep a recurrent state", "granitemoehybrid+mamba"
HALVED, HALF = "nemotron_h", "are attention or an MLP alone"
BOTH, EXPERTS = "falcon_h1", "granitemoehybrid+experts"
FAMILIES = {"qwen3_5_text": STATE, HYBRID: STATE, "ernie4_5_moe": "have mixtures of experts"}
FAMILIES |= {"gpt_oss": "have attention sinks", HALVED: HALF, BOTH: STATE, EXPERTS: STATE}
OWN = {HALVED: {"layers_block_type": ["full_attention", "mlp"] * 2}}
ASKED: list[tuple[dict[str, Any], str]] = [
    ({"target": Target(static=True)}, "--static"),
    ({"target": Target("cuda")}, "--target cuda"),
    ({"self_draft": "1"}, "--self-draft"),
]
CASES = [(family, *asked) for family in FAMILIES for asked in ASKED if family not in (HYBRID, HALVED, EXPERTS)]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("bases")
    return {name: save_base(folder / name, tiny_model(name, **OWN.get(name, {}))).path for name in FAMILIES}


def name(family: str) -> str:
    return family.partition("+")[0]


@pytest.mark.parametrize(("family", "asked", "named"), CASES)
def test_what_is_not_done_yet_is_refused_before_any_work(
    family: str, asked: dict[str, Any], named: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=f"{named} for {name(family)}, whose layers {FAMILIES[family]}; expected"):
        export_bundle(bases[family], None, tmp_path / "bundle", "fp32", progress=lambda line: None, **asked)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("family", FAMILIES)
def test_no_swappable_bundle_is_made(family: str, bases: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"a swappable bundle for {name(family)}, whose layers"):
        export_swappable(bases[family], [], tmp_path / "bundle", progress=lambda line: None)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("family", "method", "why"),
    [
        *((family, "dflash", "have mixtures") for family in ("gpt_oss", EXPERTS)),
        *((HALVED, method, HALF) for method in ("streaming", "eagle", "dflash")),
    ],
)
def test_drafters_that_are_not_made_over_such_layers_are_refused(
    family: str, method: str, why: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    simple = "medusa" if family == HALVED else "streaming"
    data, told = tmp_path / "data.jsonl", f"--method {method} for {name(family)}, whose layers {why}.*--method {simple}"
    data.write_text('{"prompt": "a", "completion": "b"}\n' * 8)
    with pytest.raises(ConfigError, match=told):
        train(TrainConfig(base=str(bases[family]), data=data, out=tmp_path / "adapter", method=method))
    assert [path.name for path in tmp_path.iterdir()] == ["data.jsonl"]
    model = tiny_model(family, **OWN.get(family, {}))
    adapter = save_random(tmp_path / "medusa", resolve_base(bases[family]), fresh_drafter(model, "medusa"), method)
    with pytest.raises(ConfigError, match=told):
        export_bundle(bases[family], adapter, tmp_path / "bundle", "fp32", progress=lambda line: None)


def test_streams_over_recurrent_states_have_no_early_exit(bases: dict[str, Path], tmp_path: Path) -> None:
    base, data = bases["qwen3_5_text"], tmp_path / "data.jsonl"
    data.write_text('{"prompt": "a", "completion": "b"}\n' * 8)
    with pytest.raises(ConfigError, match="--exit-layer 1 over qwen3_5_text, whose states take up all rows of a draft"):
        train(TrainConfig(base=str(base), data=data, out=tmp_path / "adapter", method="streaming", exit_layer="1"))
    drafter = StreamingModel(tiny_model("qwen3_5_text"), StreamConfig(17, 2), frozen=True)
    adapter = save_random(tmp_path / "long", resolve_base(base), drafter, "streaming")
    with pytest.raises(AdapterError, match=r"streams.gamma is 17 over recurrent states; expected 1\.\.16"):
        export_bundle(base, adapter, tmp_path / "bundle", "fp32", progress=lambda line: None)
    drafter = StreamingModel(tiny_model("qwen3_5_text"), StreamConfig(3, 2), frozen=True, prune_rank=4)
    adapter = save_random(tmp_path / "adapter", resolve_base(base), drafter, "streaming")
    check_config({"exit_layer": "1"}, tiny_model("granitemoehybrid").config)  # attention alone
    with pytest.raises(AdapterError, match="streams.pruning, over recurrent states, .*; expected none"):
        export_bundle(base, adapter, tmp_path / "bundle", "fp32", progress=lambda line: None)


@pytest.mark.parametrize(
    ("family", "chosen"),
    [("llama", "streaming"), ("qwen3_5_text", "streaming"), (HALVED, "medusa"), ("gpt_oss", "streaming")],
)
def test_auto_is_the_first_method_that_drafts_for_the_layers(family: str, chosen: str) -> None:
    assert chosen_method("auto", tiny_model(family, **OWN.get(family, {})).config) == chosen
