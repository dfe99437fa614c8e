"""Metrics and the paired bootstrap."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from streamspec.bench import compare
from streamspec.bench.quality import loops, mean_scores, paired_bootstrap, score
from streamspec.errors import DataError


def test_exact_match_ignores_white_space_and_nothing_else() -> None:
    assert score("SELECT  a\nFROM b ", ["SELECT a FROM b"])["em"] == 1.0
    assert score("select a FROM b", ["SELECT a FROM b"])["em"] == 0.0


def test_the_best_reference_counts() -> None:
    scores = score("the cat sat", ["a dog ran far", "the cat sat down"])
    assert scores["em"] == 0.0
    assert scores["rouge1"] == pytest.approx(2 * 3 / (3 + 4))
    assert scores["rouge2"] == pytest.approx(2 * 2 / (2 + 3))
    assert scores["rougeL"] == pytest.approx(2 * 3 / (3 + 4))


def test_means() -> None:
    assert mean_scores([]) == {}
    assert mean_scores([score("a", ["a"]), score("a", ["b"])])["em"] == 0.5


def test_the_interval_covers_a_difference_that_is_there_and_not_zero() -> None:
    rng = np.random.default_rng(1)
    a = rng.random(300)
    interval = paired_bootstrap(a, a + 0.1 + 0.02 * rng.standard_normal(300))
    assert interval.low < 0.1 < interval.high and interval.low > 0.09


def test_pairing_makes_equal_systems_equal() -> None:
    a = np.random.default_rng(2).random(50)
    interval = paired_bootstrap(a, a)
    assert (interval.difference, interval.low, interval.high) == (0.0, 0.0, 0.0)


def test_the_interval_has_the_width_theory_gives() -> None:
    differences = np.random.default_rng(3).standard_normal(2000)
    interval = paired_bootstrap(np.zeros(2000), differences)
    expected = 2 * 1.96 * differences.std() / np.sqrt(2000)
    assert interval.high - interval.low == pytest.approx(expected, rel=0.05)


def outputs(path: Path, *answers: tuple[str, float]) -> Path:
    rows = []
    for prompt, em in answers:
        scores = dict.fromkeys(("em", "rouge1", "rouge2", "rougeL"), em)
        texts = {"plain": f"{em}", "speculative": f"{em}", "other/bundle": "else"}
        rows.append({"prompt": prompt, **texts, "scores": dict.fromkeys(texts, scores)})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_compare_reads_saved_outputs(tmp_path: Path) -> None:
    a = outputs(tmp_path / "a.jsonl", ("p", 0.0), ("q", 1.0))
    b = outputs(tmp_path / "b.jsonl", ("p", 1.0), ("q", 1.0))
    result = compare(a, b)
    assert result["prompts"] == 2 and result["em"]["difference"] == 0.5 and result["equal"] == 1
    assert compare(b, b, "speculative", "other/bundle")["equal"] == 0


def test_compare_refuses_other_prompts_and_other_files(tmp_path: Path) -> None:
    a = outputs(tmp_path / "a.jsonl", ("p", 0.0))
    with pytest.raises(DataError, match="not the same ones"):
        compare(a, outputs(tmp_path / "b.jsonl", ("q", 0.0)))
    (tmp_path / "c.jsonl").write_text('{"prompt": "p"}\n')
    with pytest.raises(DataError, match=r"c\.jsonl, line 1"):
        compare(a, tmp_path / "c.jsonl")
    with pytest.raises(DataError, match=r"none\.jsonl"):
        compare(a, tmp_path / "none.jsonl")


def test_an_answer_loops_where_most_of_it_has_been_said_before() -> None:
    assert not loops([]) and not loops([1, 2, 3]) and not loops(list(range(40)))
    assert loops([7] * 12) and loops([1, 2, 3, 4, 5] * 8)
    assert not loops([1, 2, 3, 4, 5] * 2 + list(range(10, 20)))
