"""Lists without equal items: nothing that repeats is let through, all else is, and no list comes to a dead end."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest

from streamspec.runtime import Grammar
from streamspec.schemas.unique_items import UniquePlaces
from tests.support.random_answers import accepts, random_answer

UNIQUE = {"type": "array", "uniqueItems": True}
TEXTS = {**UNIQUE, "items": {"type": "string"}}
POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
CASES: list[tuple[Any, list[str], list[str]]] = [
    (TEXTS, ['["a", "ab", ""]', "[]", r'["\\", "\""]'], ['["a", "a"]', '["a", "b", "a"]', '["", ""]', '["é", "é"]']),
    (TEXTS, [r'["\u0001", "\u0002"]', '["a\\"", "a"]'], [r'["\u001f", "\u001F"]', r'["\t", "\u0009"]']),
    (UNIQUE, ['[1, "1", true, [1], {}, []]', "[0, false, null]"], ["[1, 1.0]", "[[1], [1]]", "[{}, {}]", "[0, -0]"]),
    (UNIQUE, ['[{"a": 1}, {"a": 2}]'], ['[{"a": 1, "b": 2}, {"b": 2, "a": 1}]', '[["a"], ["a"]]']),
    ({**UNIQUE, "items": {"type": "integer"}}, ["[1, 10, 100]"], ["[10, 1, 10]", "[-1, -1]"]),
    ({**UNIQUE, "items": POINT}, ['[{"x": 1}, {"x": 10}]'], ['[{"x": 1}, {"x": 1}]']),
    ({"properties": {"a": TEXTS, "b": {"type": "array"}}}, ['{"a": ["x"], "b": [1, 1]}'], ['{"a": ["x", "x"]}']),
    ({"type": "array", "items": {**UNIQUE, "items": {"type": "integer"}}}, ["[[1], [1]]"], ["[[1, 1]]"]),
    ({"additionalProperties": TEXTS, "type": "object"}, ['{"q": ["x"]}'], ['{"q": ["x", "x"]}']),
    ({"$defs": {"t": TEXTS}, "properties": {"a": {"anyOf": [{"$ref": "#/$defs/t"}, {}]}}}, [], ['{"a": ["", ""]}']),
    ({"type": "array", "uniqueItems": False}, ["[1, 1]"], []),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(CASES)))
def test_no_item_comes_twice_and_all_else_may(case: int) -> None:
    schema, right, wrong = CASES[case]
    grammar = Grammar.json_schema(schema)
    assert [text for text in right if not accepts(grammar, text)] == []
    assert [text for text in wrong if accepts(grammar, text)] == []


@pytest.mark.parametrize(
    "schema",
    [
        {**UNIQUE, "items": {"enum": ["a", "ab", "abc", 1, 10]}, "minItems": 5},
        {**UNIQUE, "items": {"type": "boolean"}, "minItems": 2},
        {**UNIQUE, "items": {"type": "integer", "minimum": 8, "maximum": 12}, "minItems": 4},
        {**UNIQUE, "items": {**UNIQUE, "items": {"const": 1}}, "minItems": 2},
        {**UNIQUE, "items": {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"],
                             "additionalProperties": False}, "minItems": 2},
    ],
)  # fmt: skip
def test_a_list_that_has_all_items_but_one_gets_that_one(schema: Any) -> None:
    grammar = Grammar.json_schema(schema)
    answers = [random_answer(grammar, Random(seed)) for seed in range(8)]
    lists = [json.loads(answer) for answer in answers if answer is not None]
    assert len(lists) == 8 and all(len({json.dumps(item) for item in each}) == len(each) for each in lists)


def test_only_the_lists_of_its_place_are_looked_at() -> None:
    schema = {"properties": {"a": TEXTS, "b": {"items": TEXTS}, "c": {"items": {"type": "string"}}}}
    assert Grammar.json_schema(schema).unique == UniquePlaces(frozenset("a"), within=True)
    assert Grammar.json_schema({"items": {"type": "string"}}).unique is None
