"""Data of many rows are tokenized once; the cache is another for other data, tokenizers, templates and columns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from streamspec.adapters.dataset import tokenize as module
from streamspec.adapters.dataset.formatter import Formatter
from streamspec.adapters.dataset.tokenize import tokenize
from streamspec.adapters.prepare import digest, read_rows_of
from streamspec.adapters.training.config import TrainConfig
from streamspec.data import fingerprints
from streamspec.errors import DataError
from streamspec.prompt.prompt_format import PromptFormat
from tests.support.tiny_models import tiny_tokenizer

TALK = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}]


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STREAMSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "KEPT", 10)
    monkeypatch.setattr(module, "BATCH", 7)
    return tmp_path / "cache" / "tokens"


def write(path: Path, count: int, **row: Any) -> list[str]:
    rows = (row or {"prompt": "ab" * (i % 3), "completion": "c" * i} for i in range(count))
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    return [str(path)]


def made(data: list[str], formatter: Formatter | None = None, columns: dict[str, str] | None = None) -> Any:
    return tokenize(
        data, formatter or Formatter(tiny_tokenizer(), PromptFormat()), columns, digest(fingerprints(data)), "data"
    )


def test_many_rows_are_tokenized_once(kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = write(tmp_path / "d.jsonl", 30)
    formatter = Formatter(tiny_tokenizer(), PromptFormat())
    first = made(data, formatter)
    expected = [row for example in module.iterate_examples(data) for row in formatter.rows(example)]
    assert list(first.rows) == expected and first.rows.examples.tolist() == list(range(30))
    monkeypatch.setattr(Formatter, "all_rows", None)
    assert list(made(data).rows) == expected
    assert len(list(kept.iterdir())) == 1


def test_few_rows_are_kept_nowhere(kept: Path, tmp_path: Path) -> None:
    assert len(made(write(tmp_path / "d.jsonl", 9)).rows) == 9 and not kept.exists()


def test_other_data_formats_columns_and_tokenizers_have_tokens_of_their_own(kept: Path, tmp_path: Path) -> None:
    data, other = write(tmp_path / "d.jsonl", 12), tiny_tokenizer(chat=True)
    made(data)
    made(data, Formatter(tiny_tokenizer(), PromptFormat("raw", "\n")))
    made(data, Formatter(other, PromptFormat("chat")))
    other.chat_template = other.chat_template.replace("a:", "b:")
    made(data, Formatter(other, PromptFormat("chat")))
    made(data, Formatter(tiny_tokenizer(), PromptFormat(), ["<s>"]))
    made(data, columns={"prompt": "completion", "completion": "prompt"})
    other.add_tokens(["zz"])
    made(data, Formatter(other, PromptFormat()))
    write(tmp_path / "d.jsonl", 13)
    made(data)
    assert len(list(kept.iterdir())) == 8


def test_what_is_damaged_or_unfinished_is_made_anew(kept: Path, tmp_path: Path) -> None:
    data = write(tmp_path / "d.jsonl", 20)
    data_file = tmp_path / "d.jsonl"
    data_file.write_text(data_file.read_text() + "{broken\n")
    with pytest.raises(DataError, match="line 21"):
        made(data)
    assert list(kept.iterdir()) == []
    write(tmp_path / "d.jsonl", 20)
    rows = list(made(data).rows)
    (folder,) = kept.iterdir()
    (folder / "mask.bin").write_bytes(b"")
    assert list(made(data).rows) == rows


def test_a_cache_that_cannot_be_written_is_one_line(kept: Path, tmp_path: Path) -> None:
    kept.parent.mkdir()
    kept.write_text("a file")
    with pytest.raises(DataError, match="STREAMSPEC_CACHE") as error:
        made(write(tmp_path / "d.jsonl", 20))
    assert "\n" not in str(error.value)


def test_what_was_found_is_said(tmp_path: Path) -> None:
    chat = Formatter(tiny_tokenizer(chat=True), PromptFormat("raw", "\n"))
    data = write(tmp_path / "d.jsonl", 4, messages=TALK * 2)
    assert [line.split(":")[0] for line in made(data, chat).notes("data")] == ["data"]
    assert "4 conversations became several rows" in made(data, chat).notes("data")[0]
    data += write(tmp_path / "e.jsonl", 1, messages=[TALK[0], {"role": "assistant", "content": None}])
    assert "1 of 5 rows have empty answers" in made(data, chat).notes("data")[1]
    with pytest.raises(DataError, match="without an answer"):
        made(data[1:], chat)


@pytest.mark.parametrize(
    ("shown", "kept", "dropped"),
    [
        ("{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}", 7, 0),
        ("{{ m.content }}", 3, 4),
        ("{{ m.content.split('</think>')[-1] }}", 0, 7),
    ],
)
def test_thoughts_are_said_to_be_kept_or_dropped(shown: str, kept: int, dropped: int, tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(chat=True)
    if "think" not in shown:
        shown = "{# </think> #}" + shown
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>"
        + shown
        + "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    formatter = Formatter(tokenizer, PromptFormat("chat"))
    thought = [TALK[0], {"role": "assistant", "content": "cd", "reasoning_content": "ef"}]
    data = write(tmp_path / "d.jsonl", 4, messages=thought)
    data += write(tmp_path / "e.jsonl", 3, messages=[TALK[0], {"role": "assistant", "content": "<think>ef</think>cd"}])
    data += write(tmp_path / "f.jsonl", 2, messages=TALK)
    for _ in range(2):  # what was found before does not count again
        (note,) = made(data, formatter).notes("data")
        assert f"7 answers have thoughts: {kept} are trained with them, {dropped} without" in note
    assert made(data[2:], formatter).notes("data") == []


def test_validation_rows_are_those_named_or_drawn(tmp_path: Path) -> None:
    data, val = write(tmp_path / "d.jsonl", 40), write(tmp_path / "v.jsonl", 5)
    formatter, said = Formatter(tiny_tokenizer(), PromptFormat()), list[str]()
    for named in (val, None):
        config = TrainConfig(base="b", data=data, out=tmp_path / "o", val=named)
        hashes = fingerprints(data), fingerprints(named or [])
        train, held = read_rows_of(config, formatter, *hashes, said.append)
        assert (len(train), len(held)) == ((40, 5) if named else (38, 2))
    assert said == ["2 of 40 rows drawn for validation; --val names a file"]
