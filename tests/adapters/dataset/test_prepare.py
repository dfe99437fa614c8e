"""From options to the rows of a run: the prompt format that conversations get, several files, renamed columns."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from streamspec.adapters.prepare import prepare
from streamspec.adapters.training.config import TrainConfig
from streamspec.adapters.training_run import Run
from streamspec.errors import ConfigError
from tests.support.tiny_models import options, tiny_tokenizer

TALK = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}] * 2
OTHER = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]


@pytest.fixture
def chat_base(base: Path, tmp_path: Path) -> Path:
    shutil.copytree(base, tmp_path / "chat")
    tiny_tokenizer(chat=True).save_pretrained(tmp_path / "chat")
    return tmp_path / "chat"


def written(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def prepared(base: Path, data: Any, tmp_path: Path, **changes: Any) -> Run:
    return prepare(options(base, data, tmp_path / "out", method="lora", **changes))


def test_conversations_are_rendered_with_the_bases_template(
    chat_base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = written(tmp_path / "d.jsonl", *[{"messages": TALK}] * 3, {"messages": TALK[:2]})
    run = prepared(chat_base, data, tmp_path)
    assert run.config.format == "chat" and run.formatter.tokenizer.decode(run.rows[0].input_ids).startswith(
        "<s>u:ab<s>a:cd</s>"
    )
    assert sum(run.rows[0].loss_mask) in (3, 6)  # one answer or two, each with its end
    said = capsys.readouterr().err
    assert "rendered with the base's chat template" in said and "1 of 4 rows drawn for validation" in said


@pytest.mark.parametrize(
    ("rows", "changes"),
    [
        ([{"prompt": "ab", "completion": "cd"}, {"prompt": "cd", "completion": "cd"}], {}),
        ([{"messages": TALK}, {"messages": OTHER}], {"format": "raw"}),
        ([{"messages": TALK}, {"messages": OTHER}], {"separator": "\n"}),
    ],
)
def test_other_data_and_what_asks_for_raw_are_raw(
    rows: list[dict[str, Any]], changes: dict[str, str], chat_base: Path, tmp_path: Path
) -> None:
    assert prepared(chat_base, written(tmp_path / "d.jsonl", *rows), tmp_path, **changes).config.format == "raw"


def test_conversations_on_a_base_without_a_template_are_raw(base: Path, tmp_path: Path) -> None:
    data = written(tmp_path / "d.jsonl", {"messages": TALK}, {"messages": OTHER})
    assert prepared(base, data, tmp_path).config.format == "raw"


def test_conversations_beside_plain_prompts_need_a_format(chat_base: Path, tmp_path: Path) -> None:
    data = [
        written(tmp_path / "a.jsonl", {"messages": TALK}),
        written(tmp_path / "b.jsonl", *({"prompt": c, "completion": c} for c in "abc")),
    ]
    with pytest.raises(ConfigError, match="give --format"):
        prepared(chat_base, data, tmp_path)
    run = prepared(chat_base, data, tmp_path, format="chat")
    assert len(run.prompts) + len(run.val_prompts) == 4 and sorted(run.data) == ["a.jsonl", "b.jsonl"]


def test_columns_are_renamed_on_the_way(base: Path, tmp_path: Path) -> None:
    data = written(tmp_path / "d.jsonl", *({"q": c, "a": c + c} for c in "abcd"))
    run = prepared(base, data, tmp_path, columns="prompt=q,completion=a")
    assert sorted(run.formatter.tokenizer.decode(row.input_ids) for row in run.prompts)[0][1:] in ("aa</s>", "bb</s>")


def test_options_of_data() -> None:
    default = {"base": "b", "data": "d", "out": "o"}
    assert TrainConfig.from_dict(default | {"data": ["x/a", Path("b")]}).data == ["x/a", "b"]
    assert TrainConfig.from_dict(default | {"data": ["x/a", "y/b"]}).to_json()["data"] == ["a", "b"]
    columns = TrainConfig.from_dict(default | {"columns": {"prompt": "q"}}).renamed
    assert columns == TrainConfig.from_dict(default | {"columns": "prompt=q"}).renamed == {"prompt": "q"}
    for change in (
        {"data": []},
        {"data": [1]},
        {"columns": "question=q"},
        {"columns": "prompt"},
        {"columns": "prompt="},
    ):
        with pytest.raises(ConfigError):
            TrainConfig.from_dict(default | change)
