"""What a precision costs, measured at export: perplexity as transformers has it, the bundle's own answers, the same
figures each time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from streamspec.adapters.dataset.token_rows import TokenRow
from streamspec.bundle.precision_cost import costs
from streamspec.cli import app
from streamspec.errors import DataError
from streamspec.export import HeldOut, Target, export_bundle, export_swappable
from streamspec.export.quantization.smoothing import TEXT
from streamspec.export.validate.measured_text import PASSAGES
from streamspec.export.validate.parity import PASSAGE
from streamspec.export.validate.perplexity import losses_of

ROWS = [
    {"prompt": "the cat sat", "completion": "on the mat"},
    {"prompt": "a dog", "completion": "ran"},
    {"prompt": "no answer"},
]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    file = tmp_path / "val.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return file


@pytest.mark.parametrize("precision", ["fp32", "int8", "int4"])
def test_perplexity_is_that_of_transformers(precision: str, base: Path, rows: Path, tmp_path: Path) -> None:
    export = [
        export_bundle(base, None, tmp_path / name, precision, progress=lambda line: None, held_out=HeldOut(rows))
        for name in ("one", "two")
    ]
    found = export[0].parity["perplexity"]
    model, tokenizer = AutoModelForCausalLM.from_pretrained(base), AutoTokenizer.from_pretrained(base)
    losses: list[float] = []
    for row in ROWS[:2]:
        prompt = tokenizer(export[0].prompt_format.render(row["prompt"], tokenizer.chat_template))["input_ids"]
        ids = [*prompt, *tokenizer(row["completion"], add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0]
        losses += torch.nn.functional.cross_entropy(
            logits[len(prompt) - 1 : -1], torch.tensor(ids[len(prompt) :]), reduction="none"
        ).tolist()
    assert found["tokens"] == len(losses) and found["pytorch"] == pytest.approx(np.exp(np.mean(losses)), rel=1e-4)
    assert found["bundle"] == pytest.approx(found["pytorch"], rel={"fp32": 1e-4, "int8": 0.05, "int4": 0.5}[precision])
    assert precision == "fp32" or found["bundle"] != found["pytorch"]
    assert export[0].parity == export[1].parity and export[0].files == export[1].files
    assert "% on held-out answers (float32" in (tmp_path / "one" / "README.md").read_text()


@pytest.mark.parametrize(
    "options", [{}, {"target": Target(static=True, rows=8, context=64)}], ids=["dynamic", "static"]
)
def test_every_lossy_export_says_what_it_costs(options: dict[str, Any], base: Path, tmp_path: Path) -> None:
    manifest = export_bundle(base, None, tmp_path / "out", "int8", progress=lambda line: None, **options)
    found, tokenizer = manifest.parity["text"], AutoTokenizer.from_pretrained(base)
    model, losses, most = AutoModelForCausalLM.from_pretrained(base), [], 63 if options else 127
    for passage in PASSAGES:
        ids = torch.tensor([tokenizer(passage)["input_ids"][:most]])
        with torch.no_grad():
            losses += torch.nn.functional.cross_entropy(
                model(ids).logits[0, :-1], ids[0, 1:], reduction="none"
            ).tolist()
    assert found["tokens"] == len(losses) and found["pytorch"] == pytest.approx(np.exp(np.mean(losses)), rel=1e-4)
    assert 0 < found["error"] < 0.05 and found["bundle"] == pytest.approx(found["pytorch"], rel=0.05)
    (sentence,) = costs(manifest).values()
    assert sentence in (tmp_path / "out" / "README.md").read_text()
    said = CliRunner().invoke(app, ["inspect", str(tmp_path / "out"), "--json"])
    assert json.loads(said.stdout)["cost: text"] == sentence


def test_float32_costs_nothing_and_is_not_measured(base: Path, tmp_path: Path) -> None:
    manifest = export_bundle(base, None, tmp_path / "out", "fp32", progress=lambda line: None)
    assert "text" not in manifest.parity and not costs(manifest)


def test_a_swappable_bundle_says_it_too(base: Path, tmp_path: Path) -> None:
    assert costs(export_swappable(base, [], tmp_path / "swappable", progress=lambda line: None))


def test_nothing_is_smoothed_on_the_text_that_is_measured() -> None:
    def phrases(text: str) -> set[str]:
        words = text.split()
        return {" ".join(words[at : at + 4]) for at in range(len(words) - 3)}

    assert not phrases(" ".join(PASSAGES)) & phrases(f"{TEXT} {PASSAGE}")


def test_the_command_also_says_how_well_the_bundle_answers(base: Path, rows: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(
        app,
        [
            "export",
            "--base",
            str(base),
            "--out",
            str(tmp_path / "out"),
            "--precision",
            "fp32",
            "--val",
            str(rows),
            "--json",
        ],
    )
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout.splitlines()[-1])
    assert (
        set(said["answers"]) == {"prompts", "scored", "em", "rouge1", "rouge2", "rougeL"}
        and "tokens" in said["parity: perplexity"]
    )


def test_a_row_longer_than_the_context_is_refused_by_its_line(base: Path, rows: Path, tmp_path: Path) -> None:
    rows.write_text(rows.read_text() + json.dumps({"prompt": "the cat " * 400, "completion": "sat"}) + "\n")
    with pytest.raises(DataError, match="line 4 has .* tokens; expected fewer than the context's"):
        export_bundle(base, None, tmp_path / "out", "fp32", progress=lambda line: None, held_out=HeldOut(rows))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "options",
    [
        "--swappable --val F",
        "--swappable --block-size 128",
        "--swappable --static",
        "--swappable --target cuda",
        "--swappable --stream-weights delta",
        "--limit 5",
        "--rows 8",
        "--context 64",
        "--swappable --rows 8",
        "--target tpu",
        "--target cuda --static",
        "--target directml --precision int4",
    ],
)
def test_options_that_do_not_go_together_are_refused(options: str, base: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["export", "--base", str(base), "--out", str(tmp_path / "out"), *options.split()])
    assert done.exit_code != 0 and not (tmp_path / "out").exists()
    assert (
        isinstance(done.exception, SystemExit)
        and done.stderr.count("\n") == 1
        and done.stderr.startswith("streamspec: ")
    )


def test_rows_that_say_nothing_are_refused_before_anything_is_written(base: Path, tmp_path: Path) -> None:
    file = tmp_path / "val.jsonl"
    file.write_text(json.dumps({"prompt": "no answer"}) + "\n")
    with pytest.raises(DataError, match="no row with an answer.*name other data with --val"):
        export_bundle(base, None, tmp_path / "out", "fp32", progress=lambda line: None, held_out=HeldOut(file))
    assert not (tmp_path / "out").exists()


def test_a_first_token_has_none_before_it_to_tell_it_by() -> None:
    row, table = TokenRow([3, 1, 4, 1], [True] * 4), np.random.default_rng(0).standard_normal((6, 6))

    def scorer(tokens: np.ndarray, where: np.ndarray) -> Iterator[np.ndarray]:
        yield from (table[tokens[where[:2]]], table[tokens[where[2:]]])

    logits, targets = torch.tensor(table[[3, 1, 4]]), torch.tensor([1, 4, 1])
    expected = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    assert np.allclose(losses_of([row], scorer), expected)
