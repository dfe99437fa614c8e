"""Files of every format give the same rows; damaged ones are refused with file and line; Parquet and `datasets` are
optional.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from streamspec.data import count_rows, fingerprints, iterate_examples, json_files, read_examples
from streamspec.errors import DataError

ROWS = [{"prompt": f"a {i}", "completion": 'b, "c"\nd; é'} for i in range(5)]


def csv_text(delimiter: str) -> str:
    cell = '"b, ""c""\nd; é"'
    return f"prompt{delimiter}completion\n" + "".join(f"{row['prompt']}{delimiter}{cell}\n" for row in ROWS)


WRITTEN = {
    "lines.jsonl": "".join(json.dumps(row) + "\n" for row in ROWS),
    "mark.jsonl": "\ufeff" + "\n\n".join(json.dumps(row) for row in ROWS),
    "array.json": json.dumps(ROWS),
    "pretty.json": "\ufeff \n" + json.dumps(ROWS, indent=2) + "\n",
    "comma.csv": csv_text(","),
    "excel.csv": "\ufeff" + csv_text(";").replace("\n", "\r\n").replace("\r\nd", "\nd"),
    "tab.tsv": csv_text("\t"),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_every_format_gives_the_same_rows(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_files, "CHUNK", 7)  # characters: rows of an array are cut anywhere
    (tmp_path / name).write_text(WRITTEN[name], encoding="utf-8", newline="")
    examples = read_examples(tmp_path / name)
    assert [(e.prompt, e.completion) for e in examples] == [(r["prompt"], r["completion"]) for r in ROWS]
    assert count_rows(tmp_path / name) >= len(ROWS)
    assert len(read_examples(tmp_path / name, 2)) == 2


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.json", '[{"text": "a"},\n{"text": }]', "line 2: Expecting value"),
        ("a.json", '[{"text": "a"}\n{"text": "b"}]', "line 2: '{' in a JSON array"),
        ("a.json", '[{"text": "a"},\n', "line 2: a JSON array without its end"),
        ("a.json", '[{"text": "a"}] x', "line 1: 'x' after a JSON array"),
        ("a.json", '[{"text": "a"},\n[1]]', r"line 2: '\[' in a JSON array"),
        ("a.json", "[]", "holds no rows"),
        ("a.csv", "text,text\n1,2\n", "one name for each column"),
        ("a.csv", "text,b\n1\n", "line 2: more or fewer cells"),
        ("a.csv", "text,b\n1,2,3\n", "line 2: more or fewer cells"),
        ("a.csv", 'text\n"ab"c\n', "after line 1: .*expected after"),
        ("a.csv", "", "holds no rows"),
        ("a.csv", "text\n\xff", "not UTF-8"),
    ],
)
def test_damaged_files_are_refused_with_file_and_line(name: str, text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(text.encode("latin-1"))
    with pytest.raises(DataError, match=says) as error:
        read_examples(tmp_path / name)
    assert name in str(error.value) and "\n" not in str(error.value)


def test_several_files_and_patterns_are_read_in_order(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "c.csv"):
        (tmp_path / name).write_text(f"text\n{name}\n" if name.endswith("csv") else json.dumps({"text": name}))
    names = [str(tmp_path / "c.csv"), str(tmp_path / "*.jsonl")]
    assert [e.completion for e in iterate_examples(names)] == ["c.csv", "a.jsonl", "b.jsonl"]
    assert list(fingerprints(names)) == ["c.csv", "a.jsonl", "b.jsonl"]
    with pytest.raises(DataError, match="no file of this pattern"):
        list(iterate_examples(str(tmp_path / "*.txt")))


def test_files_of_one_name_have_hashes_of_their_own(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.jsonl").write_text(folder)
    found = fingerprints(str(tmp_path / "*" / "a.jsonl"))
    assert list(found) == ["a.jsonl", "a.jsonl (2)"] and len(set(found.values())) == 2


def test_a_folder_of_anything_is_no_data(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"\*\.jsonl"):
        read_examples(tmp_path)


@pytest.mark.parametrize(("name", "package"), [("a.parquet", "pyarrow"), ("owner/name", "datasets")])
def test_a_missing_library_is_one_line(
    name: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setitem(sys.modules, f"{package}.parquet", None)
    monkeypatch.chdir(tmp_path)
    if name.endswith("parquet"):
        (tmp_path / name).write_bytes(b"PAR1")
    with pytest.raises(DataError, match=rf"no package {package}; .*streamspec\[data\]"):
        read_examples(name)


USER, CALL = {"role": "user", "content": "a"}, {"function": {"name": "f", "arguments": {"x": 1}}}
TALKS: list[dict[str, Any]] = [
    {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}]},
    {"messages": [USER, {"role": "assistant", "content": "b"}]},
    {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "g"}}]}]},
]


def talks(tmp_path: Path) -> list[Any]:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in TALKS))
    return [(e.prompt, e.completion) for e in read_examples(tmp_path / "a.jsonl")]


def test_parquet_gives_the_same_rows_as_json(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    from pyarrow import parquet

    parquet.write_table(arrow.Table.from_pylist(TALKS), tmp_path / "a.parquet")
    assert [(e.prompt, e.completion) for e in read_examples(tmp_path / "a.parquet")] == talks(tmp_path)
    assert count_rows(tmp_path / "a.parquet") == 3 and list(fingerprints(tmp_path / "a.parquet")) == ["a.parquet"]
    (tmp_path / "b.parquet").write_bytes(b"PAR1 no more")
    with pytest.raises(DataError, match="readable Parquet file"):
        read_examples(tmp_path / "b.parquet")


def test_saved_datasets_give_the_same_rows_as_json(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="the extra `data` is not installed")
    whole, expected = datasets.Dataset.from_list(TALKS), talks(tmp_path)
    whole.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"train": whole.select([0]), "test": whole.select([1, 2])}).save_to_disk(tmp_path / "splits")
    for name, part in {"saved": expected, "splits": expected[:1], "splits:test": expected[1:]}.items():
        data = f"{tmp_path / name}"
        assert [(e.prompt, e.completion) for e in read_examples(data)] == part
        assert count_rows(data) == len(part) and len(fingerprints(data)) == 1
    with pytest.raises(DataError, match="no split dev; expected train or test"):
        read_examples(f"{tmp_path / 'splits'}:dev")
