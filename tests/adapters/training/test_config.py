"""The options of a run: what is refused, what each method makes of them, and the reference."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from streamspec.adapters.drafters.draft_layer.config import DraftLayerConfig, counted_passes
from streamspec.adapters.drafters.registry import DRAFTERS
from streamspec.adapters.training.config import TrainConfig, grouped_fields, help_of, reference
from streamspec.errors import ConfigError
from streamspec.option_fields import flag
from tests.support.tiny_models import options


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"method": "jakiro", "recipe": "joint"}, "--method jakiro with --recipe joint; expected --recipe staged"),
        ({"method": "jakiro", "active": 3}, "3 active of 2 experts; expected 1 to 64"),
        ({"method": "jakiro", "active": 1}, "contrast"),
        ({"method": "jakiro", "gamma": 1}, "parallel"),
        ({"method": "jakiro", "unroll": 0}, "unroll = 0; expected at least 1"),
        ({"seed": 2**32}, "seed = 4294967296; expected 0..4294967295"),
        ({"method": "jakiro", "taps": "2,2"}, "taps = '2,2'; expected whole numbers"),
        ({"method": "jakiro", "taps": "2,02"}, "taps = '2,02'; expected whole numbers"),
        ({"method": "eagle", "taps": "0,x"}, "taps = '0,x'; expected whole numbers"),
        ({"method": "eagle", "taps": "0"}, "taps = '0'; expected whole numbers from 1 on or final"),
        ({"method": "eagle", "taps": "final,2,final"}, "taps = 'final,2,final'; expected whole numbers"),
        ({"method": "eagle", "depth": 2}, "--depth with --method eagle; expected --method mtp"),
        ({"method": "mtp", "prefix_attention": True}, "--prefix-attention with --method mtp"),
        ({"method": "eagle", "taps": "9" * 5000}, "taps = '999"),
        ({"method": "jakiro", "unroll": 2}, "unroll = 2; expected at most 1"),
        (
            {"method": "jakiro", "active": 1, "contrast": False, "two_lists": True},
            "two lists with 1 active expert; expected two at least",
        ),
        ({"method": "mtp", "unroll": 1}, "--unroll with --method mtp; expected --method jakiro or eagle"),
        ({"method": "hydra", "two_lists": True}, "--two-lists with --method hydra; expected --method jakiro"),
        ({"method": "eagle", "experts": 4}, "--experts with --method eagle; expected --method jakiro"),
        ({"method": "eagle", "ns": 3}, "--ns with --method eagle; expected --method streaming"),
        ({"prefix_attention": True}, "--prefix-attention with --method streaming; expected --method jakiro or eagle"),
        ({"own_heads": True}, "--own-heads with --method streaming; expected --method medusa"),
        (
            {"method": "medusa", "recipe": "staged", "warm_start": "x"},
            "--warm-start with --method medusa --recipe staged; expected --method streaming",
        ),
        ({"answers": "x"}, "--answers without --target-adapter"),
        ({"labels": "soft"}, "labels = soft; expected hard or kl or tv or topk"),
        ({"alpha_decay": 0}, "alpha_decay = 0.0; expected above 0"),
        ({"clock": "sun"}, "clock = sun; expected wall or cpu"),
        ({"answer_temperature": -1}, "answer_temperature = -1.0; expected 0 or more"),
        ({"answer_top_p": 0}, "answer_top_p = 0.0; expected above 0 and at most 1"),
        ({"method": "lora", "self_distill": True}, "--self-distill with another recipe"),
    ],
)
def test_options_that_would_do_nothing_are_refused(changes: dict, found: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=found):
        options(tmp_path, tmp_path, tmp_path, **changes)


@pytest.mark.parametrize(("given", "taps"), [(2, (2,)), ([2, 10, 20], (2, 10, 20)), (" 2, 10", (2, 10))])
def test_yaml_may_name_the_taps_as_numbers(given: object, taps: tuple[int, ...], tmp_path: Path) -> None:
    config = options(tmp_path, tmp_path, tmp_path, method="eagle", taps=given)
    assert DraftLayerConfig.of(config.resolved).taps == taps and config.taps == ",".join(map(str, taps))


def test_mtp_reads_the_last_state_and_learns_from_its_first_pass_alone(tmp_path: Path) -> None:
    config = options(tmp_path, tmp_path, tmp_path, method="mtp")
    assert DraftLayerConfig.of(config.resolved).taps == (1,) and counted_passes(config.resolved) == 1

    def taught(**changes: object) -> tuple[str, float]:
        resolved = options(tmp_path, tmp_path, tmp_path, **changes).resolved
        return resolved["labels"], resolved["state_weight"]

    assert taught(method="mtp") == ("hard", 0) and taught(method="hydra") == ("kl", 10)
    assert taught(method="eagle", labels="hard", state_weight=0) == ("hard", 0)
    assert DraftLayerConfig.of(options(tmp_path, tmp_path, tmp_path, method="mtp", taps="2").resolved).taps == (2,)
    assert counted_passes(options(tmp_path, tmp_path, tmp_path, method="eagle").resolved) == 2


def test_every_module_of_mtp_is_counted(tmp_path: Path) -> None:
    config = options(tmp_path, tmp_path, tmp_path, method="mtp", gamma=4, depth=3, taps="final")
    shape = DraftLayerConfig.of(config.resolved)
    assert counted_passes(config.resolved) == shape.heads + 1 == 3 and shape.taps == (0,)
    with pytest.raises(ConfigError, match="depth = 5; expected at most 4, the passes of this layer"):
        options(tmp_path, tmp_path, tmp_path, method="mtp", gamma=4, depth=5)


def test_hydra_alone_attends_in_its_first_pass_by_default(tmp_path: Path) -> None:
    def attends(**changes: object) -> list[bool]:
        shape = DraftLayerConfig.of(options(tmp_path, tmp_path, tmp_path, **changes).resolved)
        return [shape.attends(number) for number in range(2)]

    assert attends(method="hydra") == attends(method="eagle", prefix_attention=True) == [True, False]
    assert attends(method="hydra", prefix_attention=False) == [False, False]
    assert attends(method="eagle") == attends(method="jakiro") == attends(method="mtp") == [True, True]


def test_drafters_that_learn_alone_learn_in_small_batches(tmp_path: Path) -> None:
    staged = {"recipe": "staged"}
    for method, changes, batch in (
        ("streaming", {}, 8),
        ("streaming", staged, 2),
        ("eagle", {}, 2),
        ("eagle", {"stream_batch_size": 5}, 5),
        ("medusa", staged, 2),
    ):
        assert options(tmp_path, tmp_path, tmp_path, method=method, batch_size=8, **changes).drafter_batch == batch
    with pytest.raises(ConfigError, match="stream_batch_size = 0; expected at least 1"):
        options(tmp_path, tmp_path, tmp_path, stream_batch_size=0)


def test_every_option_has_help_and_stands_once_in_the_reference() -> None:
    text = reference()
    for one, group in grouped_fields():
        assert one.metadata["help"] in help_of(one, group)
        assert len(re.findall(rf"^\| `{flag(one.name)}` \|", text, re.MULTILINE)) == 1
    assert len(grouped_fields()) == len(fields(TrainConfig))
    assert "## Medusa heads (medusa)" in text and "| int | `6` | 1..8 |" in text


def test_help_names_the_methods_that_read_an_option() -> None:
    says = {one.name: help_of(one, group) for one, group in grouped_fields()}
    assert says["own_heads"].startswith("medusa: ") and says["unroll"].startswith("jakiro, eagle, eagle-lora, eagle3: ")
    assert not any(says["stream_batch_size"].startswith(method) for method in DRAFTERS)
