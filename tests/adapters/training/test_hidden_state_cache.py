"""Drafters learn from kept states what they learn from the target itself, without its layers."""

from __future__ import annotations

import errno
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from safetensors.torch import load_file
from torch import Tensor

from streamspec.adapters import recipe_stages
from streamspec.adapters.dataset.batches import collate
from streamspec.adapters.dataset.token_rows import TokenRow
from streamspec.adapters.drafters.dflash.config import BlockConfig
from streamspec.adapters.drafters.dflash.model import BlockDraftModel
from streamspec.adapters.drafters.draft_layer.config import DraftLayerConfig
from streamspec.adapters.drafters.draft_layer.model import DraftLayerModel
from streamspec.adapters.drafters.drafting_model import DraftingModel, DraftTargets, FitStep, TargetModel
from streamspec.adapters.drafters.losses import pick_rows
from streamspec.adapters.drafters.medusa.model import MedusaModel
from streamspec.adapters.drafters.streams.config import StreamConfig
from streamspec.adapters.drafters.streams.model import StreamingModel
from streamspec.adapters.runs.budget import Deadline
from streamspec.adapters.train import train
from streamspec.adapters.training import hidden_state_cache, text_arrays
from streamspec.adapters.training.hidden_state_cache import FINAL, HiddenStateCache
from streamspec.adapters.training.text_arrays import keys_of
from tests.support.tiny_models import options, tiny_model

GAMMA = 3
ROWS = [TokenRow([(7 * i + n) % 60 + 3 for i in range(6 + 3 * n)], [i > 2 for i in range(6 + 3 * n)]) for n in range(4)]


def streaming(family: str, ns: int = 2, exits: tuple[int, ...] = ()) -> StreamingModel:
    model = tiny_model(family)
    lora = LoraConfig(r=4, target_modules=r".*\.3\..*proj|.*h\.3\..*c_.*", init_lora_weights=False)
    inject_adapter_in_model(lora, model, adapter_name="streams")
    return StreamingModel(
        model, StreamConfig(GAMMA, ns, scale=0.7), True, prune_rank=2 if exits else 0, exit_layers=exits
    )


DRAFTERS: dict[str, Callable[[], DraftingModel]] = {
    **{f"streams of {family}": lambda family=family: streaming(family) for family in ("llama", "gemma3_text", "gpt2")},
    "streams over shared K/V": lambda: streaming("gemma4_text", 3),
    "streams over convolutions": lambda: streaming("lfm2", 3),
    "early exits": lambda: streaming("qwen2", 2, (1, 2)),
    "draft layer": lambda: DraftLayerModel(tiny_model("qwen3"), DraftLayerConfig(GAMMA, taps=(2, 1))),
    "draft layer over finished states": lambda: DraftLayerModel(
        tiny_model("llama"), DraftLayerConfig(GAMMA, taps=(0, 2))
    ),
    "medusa": lambda: MedusaModel(tiny_model("llama"), GAMMA, True, None, False),
    "block": lambda: BlockDraftModel(tiny_model("llama"), BlockConfig(GAMMA, 1, 0.7, taps=(2, 3))),
    "causal block": lambda: BlockDraftModel(tiny_model("llama"), BlockConfig(GAMMA, 1, 0.7, taps=(2, 3), causal=True)),
}


def bytes_of(states: HiddenStateCache, tokens: int) -> int:
    return sum(part.texts.bytes_of(tokens) for part in states.parts.values())


@pytest.fixture(autouse=True)
def in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hidden_state_cache, "has_bf16", lambda: False)


def gradients(drafter: DraftingModel) -> dict[str, Tensor]:
    """Gradients of a step by the parameters' names; those of the target's own are None."""
    torch.manual_seed(1)
    batch = collate(ROWS)
    drafter.zero_grad()
    with torch.no_grad():
        main = drafter.main_pass(batch["input_ids"], batch["attention_mask"])
    picked = pick_rows(batch, GAMMA, 5, torch.Generator().manual_seed(0))
    names = {StreamingModel: "streaming", DraftLayerModel: "jakiro", MedusaModel: "medusa", BlockDraftModel: "dflash"}
    settings = options(Path(), Path(), Path(), method=names[type(drafter)], recipe="staged").resolved
    step = FitStep(batch, DraftTargets(main, picked), torch.ones(GAMMA), settings, 0.9)
    drafter.losses(step)["total"].backward()
    return {name: p.grad.clone() for name, p in drafter.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", DRAFTERS)
def test_kept_states_give_the_gradients_of_the_target(name: str, tmp_path: Path) -> None:
    drafter = DRAFTERS[name]().train()
    drafter.model.requires_grad_(False)
    for parameter in (p for n, p in drafter.named_parameters() if "lora_" in n):
        parameter.requires_grad_(True)
    live = gradients(drafter)
    states = HiddenStateCache(drafter, tmp_path)
    assert HiddenStateCache.serves(drafter) and states.fill([ROWS], "streams")
    drafter.kept = states
    assert drafter.free_layers() > 0
    kept = gradients(drafter)
    assert kept.keys() == live.keys() and live
    for parameter, gradient in live.items():
        assert (kept[parameter] - gradient).norm() <= 4e-3 * gradient.norm() + 1e-6, parameter  # of float16


def test_a_target_in_bfloat16_keeps_every_bit(tmp_path: Path) -> None:
    drafter = DraftLayerModel(tiny_model("llama").to(torch.bfloat16), DraftLayerConfig(GAMMA, taps=(0, 1)))
    states = HiddenStateCache(drafter, tmp_path)
    states.fill([ROWS], "streams")
    ids = torch.tensor(ROWS[2].input_ids)[None]
    with torch.no_grad():
        found, wanted = states(ids, torch.ones_like(ids)), drafter.computed_pass(ids, torch.ones_like(ids))
    assert torch.equal(found.entry, wanted.entry) and torch.equal(found.final, wanted.final)
    assert found.entry.dtype == torch.bfloat16


def test_states_beyond_float16_are_kept(tmp_path: Path) -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        model.get_input_embeddings().weight[5] *= 1e7
    drafter = DraftLayerModel(model, DraftLayerConfig(GAMMA, taps=(3,)))
    states = HiddenStateCache(drafter, tmp_path)
    ids = torch.tensor([[9, 5, 7]])
    with torch.no_grad():
        wanted = drafter.computed_pass(ids, torch.ones_like(ids)).entry
        assert wanted[0, 1].abs().max() > 1e6
        torch.testing.assert_close(states(ids, torch.ones_like(ids)).entry, wanted, rtol=1e-3, atol=1e-3)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of each pass through the target."""
    seen: list[int] = []
    computed = TargetModel.computed_pass

    def counted(model: TargetModel, ids: Tensor, mask: Tensor) -> Any:
        seen.append(ids.numel())
        return computed(model, ids, mask)

    monkeypatch.setattr(TargetModel, "computed_pass", counted)
    return seen


def test_what_an_earlier_attempt_kept_is_found_and_what_it_began_is_not(tmp_path: Path, passes: list[int]) -> None:
    drafter = DRAFTERS["draft layer"]()
    states = HiddenStateCache(drafter, tmp_path)
    states.fill([ROWS[:2], ROWS[:3]], "streams")
    assert passes == [1, 6, 9, 12]  # each text once
    with states.parts[FINAL].texts.own.open("ab") as file:
        file.write(b"killed here")
    with keys_of(states.parts[FINAL].texts.own).open("ab") as file:
        file.write(b"here")
    passes.clear()
    again = HiddenStateCache(drafter, tmp_path)
    assert again.parts[FINAL].texts.own.stat().st_size == again.parts[FINAL].texts.bytes_of(6 + 9 + 12)
    assert again.fill([ROWS], "streams") and passes == [1, 15]
    passes.clear()
    batch = collate(ROWS)
    mine, theirs = (
        states(batch["input_ids"], batch["attention_mask"]),
        again(batch["input_ids"], batch["attention_mask"]),
    )
    assert torch.equal(mine.entry, theirs.entry) and passes == [15]  # computed or kept, they are the same


def test_drafters_share_the_states_that_both_read(tmp_path: Path, passes: list[int]) -> None:
    model = tiny_model("llama")
    HiddenStateCache(StreamingModel(model, StreamConfig(GAMMA, 3, scale=0.7), True, exit_layers=()), tmp_path).fill(
        [ROWS[:2]], "streams"
    )
    for drafter in (
        MedusaModel(model, GAMMA, True, None, False),
        DraftLayerModel(model, DraftLayerConfig(GAMMA, taps=(0, 3))),
    ):
        passes.clear()
        states = HiddenStateCache(drafter, tmp_path)
        assert states.fill([ROWS[:2]], "draft") and passes == [1]
        with torch.no_grad():
            ids = torch.tensor(ROWS[1].input_ids)[None]
            wanted = drafter.computed_pass(ids, torch.ones_like(ids))
            torch.testing.assert_close(states(ids, torch.ones_like(ids)).entry, wanted.entry, rtol=1e-3, atol=1e-3)
    other = HiddenStateCache(DraftLayerModel(model, DraftLayerConfig(GAMMA, taps=(0, 1))), tmp_path)
    sizes = {file.name: file.stat().st_size for file in tmp_path.glob("*.bin")}
    assert not other.kept_rows(ROWS) and other.fill([ROWS[:2]], "draft")
    assert {
        file.name: file.stat().st_size for file in tmp_path.glob("*.bin")
    }.items() > sizes.items()  # what was there stays


def test_states_without_the_names_of_their_texts_are_none(tmp_path: Path) -> None:
    states = HiddenStateCache(DRAFTERS["medusa"](), tmp_path)
    states.parts[FINAL].texts.own.write_bytes(b"killed before the first name")
    assert HiddenStateCache(states.drafter, tmp_path).fill([ROWS], "streams")


@pytest.mark.parametrize("running", [False, True])
def test_a_deleted_file_of_states_takes_its_texts_along(running: bool, tmp_path: Path) -> None:
    states = HiddenStateCache(DRAFTERS["draft layer"](), tmp_path)
    states.fill([ROWS[:2]], "streams")
    states.parts[FINAL].texts.own.unlink()
    states = states if running else HiddenStateCache(states.drafter, tmp_path)
    states.fill([ROWS[3:]], "streams")
    assert states.kept_rows(ROWS) == HiddenStateCache(states.drafter, tmp_path).kept_rows(ROWS) == [3]


def test_the_disk_is_waited_for_now_and_then_not_for_each_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits, clock = list[int](), [0.0]
    monkeypatch.setattr(text_arrays.os, "fsync", waits.append)
    monkeypatch.setattr(text_arrays.time, "monotonic", lambda: clock[0])
    states = HiddenStateCache(streaming("llama"), tmp_path)
    states.fill([ROWS[:1]], "streams")
    once = len(waits)
    states.fill([ROWS], "streams")
    assert 0 < once == len(waits) / 2
    texts = states.parts[FINAL].texts
    texts.add(b"a" * 16, np.zeros((2, texts.width), np.int16))
    others = HiddenStateCache(states.drafter, tmp_path, owner="others-")
    assert len(waits) == 2 * once and others.kept_rows(ROWS) == [0, 1, 2, 3]
    clock[0] = 60.0
    texts.add(b"b" * 16, np.zeros((2, texts.width), np.int16))
    others.parts[FINAL].texts.find()
    assert {b"a" * 16, b"b" * 16} <= others.parts[FINAL].texts.kept.keys()


def test_processes_find_each_others_states_when_all_have_computed_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = HiddenStateCache(streaming("llama"), tmp_path)
    others: list[list[int]] = []

    def gathered(mine: object) -> list[object]:
        others.append(HiddenStateCache(states.drafter, tmp_path, owner="other-").kept_rows(ROWS))
        return [mine, not isinstance(mine, bool)]  # the other one had no room

    monkeypatch.setattr(hidden_state_cache.processes, "gathered", gathered)
    whole = states.fill([ROWS], "streams")
    assert states.kept_rows(ROWS) == others[0] == list(range(len(ROWS)))
    assert not whole  # as the other one says: all do the same next


def test_the_room_that_is_told_is_that_of_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_model("llama", hidden_size=1024, num_hidden_layers=2, intermediate_size=8)
    rows = [TokenRow([3 + (n + i) % 57 for i in range(60)], [True] * 60) for n in range(20)]
    HiddenStateCache(MedusaModel(model, GAMMA, True, None, False), tmp_path).fill([rows * 2], "heads")
    capsys.readouterr()
    HiddenStateCache(DraftLayerModel(model, DraftLayerConfig(GAMMA, taps=(0, 1))), tmp_path).fill([rows * 2], "layer")
    size = 2 * (1024 + 1) * sum(len(row.input_ids) for row in rows)
    assert f"take {size / 1e6:,.0f} MB of disk" in capsys.readouterr().err


@pytest.mark.parametrize("full", ["beforehand", "meanwhile"])
def test_a_full_disk_keeps_some_texts_and_the_others_pass_again(
    full: str, tmp_path: Path, passes: list[int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    drafter = DRAFTERS["draft layer"]()
    states = HiddenStateCache(drafter, tmp_path)
    if full == "beforehand":
        free = 2 * bytes_of(states, 6 + 9 + 5)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: type("", (), {"free": free}))
    else:
        opened = Path.open

        def failing(path: Path, mode: str = "r", *more: Any) -> Any:
            if (
                path == states.parts[FINAL].texts.own
                and path.exists()
                and path.stat().st_size >= states.parts[FINAL].texts.bytes_of(6 + 9)
            ):
                with opened(path, mode) as file:
                    file.write(b"a part of it")
                raise OSError(errno.ENOSPC, "No space left on device")
            return opened(path, mode, *more)

        monkeypatch.setattr(Path, "open", failing)
    assert not states.fill([ROWS], "streams")
    said = capsys.readouterr().err
    assert "the target's states of 4 texts, computed once, take 0 MB of disk" in said
    assert ("half of what is free: the others pass again" in said) == (full == "beforehand")
    passes.clear()
    batch = collate(ROWS)
    states(batch["input_ids"], batch["attention_mask"])
    assert passes == [12, 15] and states.parts[FINAL].texts.own.stat().st_size == states.parts[FINAL].texts.bytes_of(
        6 + 9
    )


def test_states_of_another_target_are_not_read_and_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drafter = DRAFTERS["draft layer"]()
    first = HiddenStateCache(drafter, tmp_path, {"base": "a"}, "one-")
    most = bytes_of(first, 6 + 9 + 16)
    assert first.fill([ROWS[:2]], "streams") and "not read" not in capsys.readouterr().err
    assert HiddenStateCache(drafter, tmp_path, {"base": "a"}, "two-").kept_rows(ROWS) == [0, 1]
    other = HiddenStateCache(drafter, tmp_path, {"base": "b"}, "one-", most)
    assert not other.kept_rows(ROWS) and not other.fill([ROWS], "streams") and other.kept_rows(ROWS) == [0, 1]
    said = capsys.readouterr().err
    assert f"MB of {tmp_path} are states of another target or other layers: not read" in said
    assert "what --states-gb leaves: the others pass again" in said
    assert sum(file.stat().st_size for file in tmp_path.glob("*.bin")) <= most


def test_states_computed_at_first_use_are_kept(tmp_path: Path, passes: list[int]) -> None:
    drafter = DRAFTERS["draft layer"]()
    states = HiddenStateCache(drafter, tmp_path)
    assert not states.fill([ROWS], "streams", ahead=False) and passes == [1]
    batch = collate(ROWS[1:3])
    first = states(batch["input_ids"], batch["attention_mask"])
    again = states(batch["input_ids"], batch["attention_mask"])
    assert passes == [1, 9, 12] and torch.equal(first.entry, again.entry)
    states.name()
    assert states.kept_rows(ROWS) == HiddenStateCache(drafter, tmp_path).kept_rows(ROWS) == [1, 2]


def test_states_are_of_one_configuration_of_the_base(tmp_path: Path) -> None:
    config = options(tmp_path, tmp_path, tmp_path / "out", answers=tmp_path / "answers.jsonl", **STAGED)
    base = SimpleNamespace(path=tmp_path, sha256="of the weights")
    run: Any = SimpleNamespace(config=config, base=base, work=tmp_path / "out" / "run", lower_layers=None)

    def opened() -> Path:
        return (
            recipe_stages.opened_states(run, DRAFTERS["medusa"](), recipe_stages.states_folder(run))
            .parts[FINAL]
            .texts.own
        )

    (tmp_path / "config.json").write_text('{"rope_theta": 10000.0}')
    first = opened()
    assert opened() == first
    (tmp_path / "config.json").write_text('{"rope_theta": 500000.0}')
    assert opened() != first


STAGED = {"threads": 1, "recipe": "staged", "target_adapter": "base", "epochs": 3.0}


def adapter(out: Path) -> tuple[dict[str, Tensor], Any]:
    """The drafter that a run wrote, and the figures of its validation."""
    return load_file(out / "streamspec.safetensors"), json.loads((out / "training.json").read_text())["metrics"]


def test_runs_read_each_text_once_and_end_as_one_whose_disk_is_full(
    base: Path,
    data: Path,
    tmp_path: Path,
    passes: list[int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    answers = tmp_path / "answers.jsonl"
    train(options(base, data, tmp_path / "kept", answers=answers, **STAGED))
    said, once = capsys.readouterr().err, len(passes)
    assert "streams: the target's first 2 layers are no longer needed" in said
    assert not (tmp_path / "kept" / "run").exists()
    passes.clear()
    train(options(base, data, tmp_path / "later", answers=answers, **STAGED))
    said, later = capsys.readouterr().err, len(passes)
    assert "texts are in" in said and "computed once" not in said and "no longer needed" in said
    assert later < once / 3  # of the streams' start alone
    passes.clear()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("", (), {"free": 0}))
    train(options(base, data, tmp_path / "full", answers=answers, states_gb=0.0, **STAGED))
    assert "no longer needed" not in capsys.readouterr().err and len(passes) > 2 * once
    kept, figures = adapter(tmp_path / "kept")
    for name in ("later", "full"):
        same, others = adapter(tmp_path / name)
        assert kept.keys() == same.keys() and all(torch.equal(kept[tensor], same[tensor]) for tensor in kept)
        assert figures == others


@pytest.mark.parametrize("seconds", [1e-3, 1e6])
def test_states_are_kept_where_the_time_allows_an_epoch(
    seconds: float,
    base: Path,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(recipe_stages, "learning_seconds", lambda *_: seconds)
    train(options(base, data, tmp_path / "out", max_minutes=5.0, **STAGED))
    said = capsys.readouterr().err
    assert ("no longer needed" in said) == (seconds < 1) != ("computed at first use" in said)


def test_time_to_learn_is_left_where_states_take_longer_than_expected(
    base: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    packed, keep, fill = HiddenStateCache._packed, recipe_stages.keep_states, HiddenStateCache.fill
    lost, ends, rows, clock = list[float](), list[float](), list[int](), time.monotonic
    monkeypatch.setattr(recipe_stages, "learning_seconds", lambda *_: 2.0)

    def slow(self: HiddenStateCache, ids: Tensor) -> np.ndarray:
        lost.append(20.0)
        return packed(self, ids)

    def kept(*arguments: Any) -> Any:
        ends.append(arguments[-1].at)
        return keep(*arguments)

    def filled(self: HiddenStateCache, texts: Any, name: str, until: Deadline, ahead: bool, note: Any) -> bool:
        ends.append(until.at)
        rows.append(len(texts[-1]))
        return fill(self, texts, name, until, ahead, note)

    monkeypatch.setattr(HiddenStateCache, "_packed", slow)
    monkeypatch.setattr(recipe_stages, "keep_states", kept)
    monkeypatch.setattr(HiddenStateCache, "fill", filled)
    monkeypatch.setattr(time, "monotonic", lambda: clock() + sum(lost))
    train(options(base, data, tmp_path / "out", max_minutes=5.0, **STAGED))
    said = capsys.readouterr().err
    assert "rows are there in the time for them, the others come at first use" in said
    assert ends[0] - ends[1] == pytest.approx(2.0 * rows[0])
