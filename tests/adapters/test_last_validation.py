"""The share of the target's validation answers that equal a reference (how long the last validation takes is tested in
runs/test_budget.py).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from streamspec.adapters import training_run
from streamspec.adapters.reporting.model_card import CARD
from streamspec.adapters.train import train
from streamspec.cli.train import summary
from tests.support.tiny_models import options, tiny_tokenizer

STAGED: dict[str, Any] = {"recipe": "staged", "target_adapter": "base", "epochs": 1.0, "regenerate_rows": 8}
NONE_EQUAL = "none equals its reference"


def own_answer(base: Path, prompt: str) -> str:
    """What transformers has the base say, without its end."""
    tokenizer, model = tiny_tokenizer(), AutoModelForCausalLM.from_pretrained(base)
    ids = torch.tensor([tokenizer(prompt)["input_ids"]])
    out = model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
    return str(tokenizer.decode([token for token in out.tolist() if token != 2]))


@pytest.mark.parametrize("right", [0, 1, 3])
def test_answers_that_equal_a_reference_are_counted_and_none_is_said(
    right: int, base: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_run, "has_bf16", lambda: False)  # as transformers loads the base here
    prompts = ["ab", "cd", "ef", "gh"]
    rows = [
        {"prompt": p, "completion": own_answer(base, p) + ("  " if i < right else "zq")} for i, p in enumerate(prompts)
    ]
    rows.append({"prompt": "gh", "completion": "another answer to the same prompt"})
    val = tmp_path / "val.jsonl"
    val.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = options(base, data, tmp_path / "out", val=val, **STAGED)
    result = train(config)
    assert (result["val_em"], result["val_em_answers"]) == (right / 4, 4)
    assert f"exact match {right / 4:.3f} of 4 answers" in summary(result, config)
    card = (tmp_path / "out" / CARD).read_text()
    assert f"| exact match with the reference | {right / 4:.3f} | 4 answers of the target |" in card
    for said in (summary(result, config), card):
        assert (NONE_EQUAL in said) == (right == 0)


@pytest.mark.parametrize("kind", ["text", "sampled"])
def test_where_no_answer_can_equal_a_reference_nothing_is_said_of_it(
    kind: str, base: Path, data: Path, tmp_path: Path
) -> None:
    changes: dict[str, Any] = {"answer_temperature": 1.0}
    if kind == "text":
        changes, data = {}, tmp_path / "text.jsonl"
        data.write_text("".join(json.dumps({"text": c * 5 + d * 8}) + "\n" for c in "abcdefgh" for d in "ijkl"))
    config = options(base, data, tmp_path / "out", **STAGED | changes)
    result = train(config)
    assert result["val_answers"] and not any(name.startswith("val_em") for name in result)
    assert "exact match" not in summary(result, config) and NONE_EQUAL not in summary(result, config)
