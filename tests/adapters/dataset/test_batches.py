"""Data shapes, completion masks, batches, the draft vocabulary and the training config's refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from streamspec.adapters.dataset.batches import LengthGroupedOrder, collate, draft_vocabulary
from streamspec.adapters.dataset.formatter import Formatter
from streamspec.adapters.dataset.token_rows import TokenRow
from streamspec.adapters.training.config import TrainConfig
from streamspec.data import read_examples
from streamspec.errors import ConfigError, DataError
from streamspec.prompt.prompt_format import PromptFormat
from tests.support.tiny_models import tiny_tokenizer


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows), encoding="utf-8")
    return path


USER, ANSWER = {"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}


@pytest.mark.parametrize(
    ("row", "shape"),
    [
        ({"text": "abc"}, "text"),
        ({"messages": [USER, ANSWER]}, "messages"),
        ({"prompt": "ab", "completion": "cd"}, "strings"),
        ({"prompt": [USER], "completion": [ANSWER]}, "message_lists"),
        ({"turns": ["ab"], "category": "qa"}, "turns"),
    ],
)
def test_shapes_are_detected_by_columns(tmp_path: Path, row: dict, shape: str) -> None:
    assert read_examples(write(tmp_path / "d.jsonl", row))[0].shape == shape


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "holds no rows"),
        (['{"text": "a"}', "{broken"], "line 2"),
        ([{"question": "a"}], "line 1.*question.*`messages`"),
        ([{"text": "a"}, {"prompt": "a", "completion": "b"}], "line 2 .*`strings` after rows of `text`"),
        ([{"messages": [{"role": "user"}]}], "line 1.*messages"),
        (["[1]"], "line 1: '1' in a JSON array"),
        (['{"text": ' + "9" * 5000 + "}"], "line 1.*digits"),
        (['{"text": "a"}', "[" * 200_000], "line 2.*recursion"),
    ],
)
def test_bad_data_names_file_and_line(tmp_path: Path, rows: list, message: str) -> None:
    with pytest.raises(DataError, match=message) as error:
        read_examples(write(tmp_path / "d.jsonl", *rows))
    assert "d.jsonl" in str(error.value) and "\n" not in str(error.value)


def test_missing_and_binary_files_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="none.jsonl"):
        read_examples(tmp_path / "none.jsonl")
    (tmp_path / "b.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="UTF-8"):
        read_examples(tmp_path / "b.jsonl")


def test_only_completion_and_end_are_trained_on(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    formatter = Formatter(tokenizer, PromptFormat("raw", "\n"))
    (row,) = formatter.rows(read_examples(write(tmp_path / "d.jsonl", {"prompt": "ab", "completion": "cd"}))[0])
    answer = [t for t, m in zip(row.input_ids, row.loss_mask, strict=True) if m]
    assert answer == [*tokenizer("cd")["input_ids"], tokenizer.eos_token_id]
    assert row.input_ids[: -len(answer)] == tokenizer("ab\n")["input_ids"]


def test_every_assistant_turn_of_a_conversation_is_trained_on(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(chat=True)
    formatter = Formatter(tokenizer, PromptFormat("chat", "\n"))
    messages = [USER, ANSWER, {"role": "user", "content": "ef"}, {"role": "assistant", "content": "gh"}]
    (row,) = formatter.rows(read_examples(write(tmp_path / "d.jsonl", {"messages": messages}))[0])
    trained = "".join(tokenizer.decode([t]) for t, m in zip(row.input_ids, row.loss_mask, strict=True) if m)
    assert trained.replace(tokenizer.eos_token, "|") == "cd|gh|"
    asked = tokenizer("<s>u:ab<s>a:", add_special_tokens=False)["input_ids"]
    assert row.input_ids[: row.loss_mask.index(True)] == asked


def test_batches_are_right_padded() -> None:
    batch = collate([TokenRow([3, 4, 5], [False, True, True]), TokenRow([6], [False])])
    assert batch["input_ids"].tolist() == [[3, 4, 5], [6, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["loss_mask"].dtype == torch.bool and batch["loss_mask"][1].sum() == 0


def test_order_is_a_function_of_seed_and_epoch_and_visits_each_row_once() -> None:
    rows = [TokenRow([0] * n, [True] * n) for n in range(1, 60)]
    order = LengthGroupedOrder(rows, 4, seed=3)
    first = list(order)
    assert sorted(first) == list(range(59)) and list(order) == first
    order.set_epoch(1)
    assert list(order) != first
    again = LengthGroupedOrder(rows, 4, seed=3)
    again.set_epoch(1)
    assert list(again) == list(order)


def test_the_first_epoch_begins_with_the_rows_ahead() -> None:
    order = LengthGroupedOrder([TokenRow([1] * (n % 5 + 1), [True]) for n in range(40)], 4, 7, ahead=[3, 31, 12])
    assert set(list(order)[:3]) == {3, 31, 12} and sorted(order) == list(range(40))
    order.set_epoch(1)
    assert set(list(order)[:3]) != {3, 31, 12}


def test_draft_vocabulary_keeps_the_most_frequent_and_the_end() -> None:
    rows = [TokenRow([5, 5, 5, 9, 9, 30], [True] * 6)]
    assert draft_vocabulary([rows], 3, 64, [2]) == [2, 5, 9]
    assert draft_vocabulary([rows], 0, 64, [2]) is None and draft_vocabulary([rows], 64, 64, [2]) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gamma": 9}, "gamma = 9.*1..8"),
        ({"gamma": 0}, "gamma = 0"),
        ({"ns": 0}, "ns = 0"),
        ({"method": "magic"}, "method = magic.*streaming or medusa"),
        ({"lr": 0.0}, "lr"),
        ({"recipe": "staged", "self_distill": True}, "self-distill"),
        ({"recipe": "joint", "target_adapter": "x"}, "target-adapter"),
        ({"gama": 3}, "unknown option gama"),
    ],
)
def test_options_out_of_range_are_refused_by_name(change: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainConfig.from_dict({"base": "b", "data": "d", "out": "o"} | change)


def test_the_recipe_is_joint_unless_a_finished_target_is_given() -> None:
    default = {"base": "b", "data": "d", "out": "o"}
    assert TrainConfig.from_dict(default).recipe == "joint"
    assert TrainConfig.from_dict(default | {"target_adapter": "base"}).recipe == "staged"
    assert TrainConfig.from_dict(default | {"warm_start": "x"}).recipe == "staged"


def test_a_text_is_continued_as_it_was_learnt(tmp_path: Path) -> None:
    formatter = Formatter(tiny_tokenizer(), PromptFormat("raw", "###"))
    example = read_examples(
        write(tmp_path / "d.jsonl", {"text": "The lighthouse keeper counted ships all night long."})
    )[0]
    ((row, opening),) = formatter.all_rows([example])[0]
    assert formatter.tokenizer.decode(row.input_ids[:opening]) == example.opening != ""
