"""Schemas and expressions that the grammar library panics over, or that would take it for ever."""

from __future__ import annotations

import time

import pytest

from streamspec.errors import ConfigError
from streamspec.runtime.text.grammar import Grammar


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "é" * 50},
        {"$ref": "é" * 200},
        {"type": "object", "required": ["é" * 99 + "x" * 300], "properties": {"é" * 99: {"type": "é" * 400}}},
        {"$ref": "#/$defs/" + "é" * 300},
        {"type": "string", "format": "é" * 500},
    ],
    ids=["type", "reference", "names", "definition", "format"],
)
def test_a_schema_that_is_quoted_in_the_middle_of_a_character(schema: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as caught:
        Grammar.json_schema(schema)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    "pattern",
    [
        "((a{1,1000}){1,1000}){1,1000}",
        "(" * 10_000,
        "a{99999999999}",
        "a{" + "9" * 5000 + "}",
        "(?<=a)b",
        r"\p{Nothing}",
        "[z-a]",
        "é" * 9_999 + "(",
    ],
)
def test_an_expression_that_grows_or_is_none(pattern: str) -> None:
    started = time.perf_counter()
    with pytest.raises(ConfigError) as caught:
        Grammar.regex(pattern)
    assert str(caught.value).isprintable() and time.perf_counter() - started < 20


@pytest.mark.parametrize(
    "schema", ["", "[", "[" * 100_000, '{"type": "object"', "5", '"a"', '{"a": NaN', "x" * 1_000_000]
)
def test_a_schema_that_is_no_json(schema: str) -> None:
    with pytest.raises(ConfigError):
        Grammar.json_schema(schema)
