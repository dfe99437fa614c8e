"""The demo's parts that need no model: what it ships, how it paints, its picture."""

from __future__ import annotations

from pathlib import Path

from streamspec.bench.prompts import read_cases
from streamspec.demo.plot import draw
from streamspec.demo.run import paint
from streamspec.demo.sample import PROMPTS, TRAIN, VALIDATION
from streamspec.runtime.decoding.stats import Stats


def test_the_shipped_sample_is_readable_and_has_answers() -> None:
    train, validation, prompts = (read_cases(file) for file in (TRAIN, VALIDATION, PROMPTS))
    assert (len(train), len(validation), len(prompts)) == (800, 40, 24)
    assert all(case.references for case in prompts)
    assert not {str(case.turns[0]) for case in train} & {str(case.turns[0]) for case in prompts}


def test_drafted_tokens_are_marked_with_and_without_colour() -> None:
    assert paint(["SELECT", " a", "b"], [False, True, True], colour=False).plain == "SELECT[ ab]"
    coloured = paint(["SELECT", " a"], [False, True], colour=True)
    assert coloured.plain == "SELECT a" and "green" in str(coloured.spans[-1].style)


def test_the_plot_is_a_picture(tmp_path: Path) -> None:
    plain = Stats(new_tokens=9, plain_steps=8, prefill_seconds=0.1, decode_seconds=0.8, graph_seconds=0.7)
    fast = Stats(new_tokens=9, steps=3, step_tokens=8, prefill_seconds=0.1, decode_seconds=0.3, graph_seconds=0.2)
    draw([plain, plain], [fast, fast], tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
