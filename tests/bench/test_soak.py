"""The record of a soak goes on from piece to piece, and its slope is that of servers' growth, not of their sizes; what
a server has to answer is made for each form of request.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
soak_record = __import__("soak_record")
Kept, Life = soak_record.Kept, soak_record.Life


def life(start: float, growth: float, rests: int = 8) -> object:
    """Of a server that grows by `growth` MB at each of its rests, 100 requests apart."""
    return Life(1, 0.0, "-", rests=[[100 * i, start + growth * i, 5, 5] for i in range(1, rests + 1)], ended="SIGTERM")


def test_what_a_piece_kept_the_next_one_reads(tmp_path: Path) -> None:
    kept = Kept(["/a/bundle"], 32, {"bundle|greedy|0": [["text", [["clock", "{}"]], "stop"]], "bundle|x|0": None})
    kept.counts["answered greedy"] = 3
    kept.firsts["bundle"] = [10.5, 12.0]
    kept.lives.append(life(100.0, 0.0))
    kept.cap = 10**9
    kept.write(tmp_path / "soak.json")
    assert Kept.read(tmp_path / "soak.json") == kept


def test_every_form_of_request_has_an_answer_that_nobody_disturbs(tmp_path: Path) -> None:
    pytest.importorskip("openai")
    from streamspec.runtime import load
    from tests.support.served_bundles import calling_bundle

    soak = __import__("soak")
    session = load(calling_bundle(tmp_path), threads=1, tree=8)
    answers = {form: soak.alone(session, soak.body_of(f"any|{form}|0", 64)) for form in soak.FORMS}
    assert all(answers.values()) and [form for form, said in answers.items() if len(said) == 2] == ["n of 2"]
    assert answers["with a named tool"][0][1][0][0] == "look_after"
    assert answers["with a required tool"][0][1][0][0] in ("look_after", "clock")


def test_the_slope_is_of_growth_within_servers() -> None:
    assert soak_record.slope([life(100.0, 0.0), life(500.0, 0.0)]) == pytest.approx(0)
    assert soak_record.slope([life(100.0, 0.2), life(500.0, 0.2)]) == pytest.approx(2)


def test_the_report_counts_over_all_pieces(capsys: pytest.CaptureFixture[str]) -> None:
    counts = {"answered greedy": 3, "answered with tools": 2, "left in its stream": 4, "wrong": 1}
    kept = Kept(["/a/bundle"], 32, counts=counts, firsts={"bundle": [1.0, 3.0]}, lives=[life(100, 0.1), life(90, 0.1)])
    kept.faults.append("another answer")
    soak_record.report(kept)
    said = capsys.readouterr().out
    assert "| answered, equal to a session's | 5: 3 greedy, 2 with tools |" in said
    assert "| left by the client | 4: 4 in its stream |" in said and "| faults | 1; another answer |" in said
    assert "100.1 to 100.8; 90.1 to 90.8; +1.00 per 1,000 requests" in said and "| 2, 3 (2 streams) |" in said
