"""Tables fit the terminal and break no word; in a pipe they are for other programs."""

from __future__ import annotations

import sys

import pytest

from streamspec.cli.tables import print_facts, print_figures, print_line

HEADINGS = ("", "tokens/step", "step ms", "speed-up")
ROWS = [(name, "1.00", "12.34", "1.00x (1.00..1.00)") for name in ("plain", "speculative", "8 rows", "16 rows")]
FACTS = [("base", "smollm2-135m (llama, weights 144c4f6518e2)"), ("memory, 1,024 tokens of context", "about 343 MB")]


def terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "dumb")  # whose width rich takes for 80
    monkeypatch.setenv("COLUMNS", str(columns))


@pytest.mark.parametrize("columns", [40, 45, 60, 80, 200])
def test_a_terminals_width_holds_every_line_and_no_word_is_broken(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal(columns, monkeypatch)
    print_figures(HEADINGS, ROWS, "four arms")
    figures = capsys.readouterr().out
    for word in ("speculative", "tokens/step", "12.34", "16 rows", "1.00x (1.00..1.00)"):
        assert figures.count(word) >= 1
    assert figures.count("12.34") == len(ROWS)
    print_line("known before: " + "a cost, " * 30)
    lines = [*figures.splitlines(), *capsys.readouterr().out.splitlines()]
    path = "/a/path/" + "x" * 90
    print_facts([(*fact, "in the cache") for fact in FACTS] + [("x", path, "")], "bundle", ("", "here", "bundles"))
    facts = capsys.readouterr().out
    assert facts.count("x") == 92 and "\u2026" not in facts and "cache" in facts
    lines += facts.splitlines()
    print_facts(FACTS, "bundle  /a/path")
    facts = capsys.readouterr().out
    assert "144c4f6518e2)" in facts and "smollm2-135m" in facts and "context" in facts
    lines += facts.splitlines()
    three = [("openvino", "onnxruntime_ep_openvino finds none", "static, device"), ("cpu", "yes", "dynamic " * 9)]
    print_facts(three, "", ("provider", "here", "bundles"))
    lines += capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= columns and all(line[-1] in "┓┃┩│┘┐ " or "cost" in line for line in lines)


def test_where_there_is_room_a_row_is_a_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shapes = []
    for columns in (100, 60, 45):
        terminal(columns, monkeypatch)
        print_figures(HEADINGS, ROWS)
        shapes.append(capsys.readouterr().out.count("tokens/step"))
    assert shapes == [1, 1, len(ROWS)]


def test_a_pipe_gets_whole_rows_whatever_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    print_facts(FACTS, "bundle")
    assert capsys.readouterr().out.splitlines() == [": ".join(row) for row in FACTS]
    print_line("word " * 30)
    assert capsys.readouterr().out == "word " * 30 + "\n"
    print_figures(HEADINGS, ROWS)
    lines = capsys.readouterr().out.splitlines()
    assert all(any(all(cell in line for cell in row) for line in lines) for row in ROWS)
