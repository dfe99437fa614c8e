"""Data of which little or nothing can be learnt: a line that names the cause, or a run that ends."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from streamspec.adapters.drafters.least_squares import ridge, share_left
from streamspec.adapters.train import train
from streamspec.errors import DataError
from tests.support.tiny_models import options, tiny_model

GOOD = [{"prompt": f"{c}{d}", "completion": c * 5 + d * 3} for c in "abcde" for d in "ghij"]
EMPTY = [row | {"completion": ""} for row in GOOD]
LONG = [{"prompt": "a" * n, "completion": "b"} for n in range(70, 80)]
SMALL = {"val_rows": 2, "regenerate_rows": 4, "max_new_tokens": 4, "epochs": 1.0}


def written(path: Path, rows: list[dict[str, str]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("rows", "val", "says"),
    [
        (EMPTY, None, "the data has empty answers alone: only their end would be learnt; expected rows with answers"),
        (GOOD, EMPTY, "the validation data has empty answers alone"),
        (LONG, GOOD, "the data has no row of at most 64 tokens; expected shorter rows; raise --max-length to 72,"),
        (GOOD, LONG, "the validation data has no row of at most 64 tokens"),
        (GOOD[:1], None, "data of one row"),
        (
            [{"text": ""}, {"text": "a" * 80}],
            [{"text": "abcdef"}],
            "the data has no row of at most 64 tokens with some",
        ),
    ],
)
def test_data_that_teach_nothing_are_refused_for_the_right_reason(
    rows: list[dict[str, str]], val: list[dict[str, str]] | None, says: str, base: Path, tmp_path: Path
) -> None:
    data = written(tmp_path / "data.jsonl", rows)
    known = {} if val is None else {"val": written(tmp_path / "val.jsonl", val)}
    with pytest.raises(DataError, match=says) as error:
        train(options(base, data, tmp_path / "out", method="lora", **SMALL, **known))
    assert ("--max-length" in str(error.value)) == ("raise" in says or "validation data has no row" in says)
    assert not (tmp_path / "out").exists()


def test_a_base_that_learned_its_positions_is_taught_no_text_beyond_them(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    learned = tmp_path / "learned"
    tiny_model("gpt2", vocab_size=64, n_positions=48).save_pretrained(learned)
    AutoTokenizer.from_pretrained(base).save_pretrained(learned)
    rows = [{"prompt": "a" * n, "completion": "bc"} for n in (20, 30, 43, 44, 50)]  # of n + 3 tokens
    data = written(tmp_path / "data.jsonl", rows)
    train(options(learned, data, tmp_path / "out", val=data, method="lora", max_length=60, **SMALL))
    said = capsys.readouterr().err
    assert "--max-length 48 and not 60: this base has learned no positions beyond" in said
    assert said.count("1 of 5 rows are longer than 48 tokens and were left out") == 1


@pytest.mark.parametrize("changes", [{"recipe": "joint"}, {"target_adapter": "base"}, {"method": "jakiro"}])
def test_one_row_is_enough(changes: dict[str, Any], base: Path, tmp_path: Path) -> None:
    data, val = written(tmp_path / "data.jsonl", GOOD[:1]), written(tmp_path / "val.jsonl", GOOD[1:4])
    given = {"target_adapter": "base", "regenerate_rows": 0} if "method" in changes else {}
    train(options(base, data, tmp_path / "out", val=val, **(SMALL | given | changes)))
    log = json.loads((tmp_path / "out" / "training.json").read_text())["log"]
    assert math.isfinite(log["start"]["unexplained"])


def test_a_fit_of_equal_rows_is_a_map_of_zeros() -> None:
    same = torch.zeros(5, 3)
    assert not ridge(same, torch.randn(5, 2)).any()
    assert share_left(same, same) == 1.0 and share_left(torch.ones(2), torch.full((2,), 2.0)) == 0.25
