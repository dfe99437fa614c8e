"""Lists without equal items: nothing that repeats is let through, all else is, and no list comes to a dead end."""

from __future__ import annotations

import json
import re
import tracemalloc
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator

from streamspec.errors import ConfigError
from streamspec.runtime import Grammar
from streamspec.runtime.text.grammar import Vocabulary
from streamspec.schemas.unique_items import SortedTokens, UniqueItems, UniquePlaces
from tests.support.byte_tokenizers import byte_level
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


TAGS = {"properties": {"tags": {"$ref": "#/$defs/Tags"}}, "$defs": {"Tags": TEXTS}}
NAMES = {"propertyNames": {"$ref": "#/$defs/Name"}, "$defs": {"Name": {"pattern": "^[a-z]+$"}}, "type": "object"}
TWICE = '{"tags": ["a", "a"]}'


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        (TAGS | {"examples": [{"id": "x", "tags": ["a"]}]}, TWICE),
        ({**TAGS, "properties": {**TAGS["properties"], "id": {"const": {"$id": "x"}}}}, TWICE),
        ({"properties": {"tags": {"$ref": "#/$defs/Set%3Ca%3E"}}, "$defs": {"Set<a>": TEXTS}}, TWICE),
        ({"$ref": "#/components/schemas/User",
          "components": {"schemas": {"User": {"type": "object", "properties": {"tags": TEXTS}}}}}, TWICE),
        (NAMES | {"examples": [{"$id": "x"}]}, '{"A1": 1}'),
    ],
)  # fmt: skip
def test_references_lead_where_the_standard_says(schema: Any, text: str) -> None:
    assert not Draft202012Validator(schema).is_valid(json.loads(text))
    assert not accepts(Grammar.json_schema(schema), text)


@pytest.mark.parametrize(
    ("schema", "reference"),
    [
        ({**TAGS, "$defs": {"Tags": {"$id": "https://example.org/tags", **TEXTS}}}, "#/$defs/Tags"),
        ({"properties": {"tags": {"$ref": "#t"}}, "$defs": {"Tags": {"$anchor": "t", **TEXTS}}}, "#t"),
    ],
)
def test_a_reference_that_is_not_followed_is_refused_where_lists_have_no_item_twice(
    schema: Any, reference: str
) -> None:
    with pytest.raises(ConfigError, match=f"uniqueItems beside .*{re.escape(reference)}"):
        Grammar.json_schema(schema)
    assert Grammar.json_schema(schema, strict=False).left_out == ("uniqueItems",)


def test_items_within_each_other_are_tried_by_their_text_not_by_each_way_to_cut_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer, tried = byte_level(["very", "Ġvery", "Ġgood", "good", "Ġbad"]), 0  # texts are cut in many ways
    labels = [" ".join(["very"] * count + ["good"]) for count in range(8)]
    grammar = Grammar.json_schema({**UNIQUE, "minItems": 9, "items": {"enum": [*labels, "bad"]}})
    state = Vocabulary(tokenizer, tokenizer.get_vocab_size(), [0]).start(grammar)
    state.advance(tokenizer.encode(json.dumps(labels)[:-1] + ', "').ids)
    leads_on = UniqueItems._leads_on

    def counted(*arguments: Any) -> bool:
        nonlocal tried
        tried += 1
        assert tried < 5000
        return leads_on(*arguments)

    monkeypatch.setattr(UniqueItems, "_leads_on", counted)
    allowed = np.flatnonzero(state.after().mask)
    assert {tokenizer.decode([int(token)]) for token in allowed} == {"b"} and tried > 8


def test_what_is_kept_of_a_long_text_grows_with_it() -> None:
    inner = SimpleNamespace(consume=lambda token: True)
    lists = UniqueItems(inner, UniquePlaces(frozenset({"tags"})), SortedTokens([bytes([i]) for i in range(256)]))
    text = json.dumps([{"tags": ["a", "b"]}] * 400).encode()
    tracemalloc.start()
    assert all(map(lists.consume, text))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(text) > 8000 and most < 8_000_000  # copies of the text would be 35 MB


def test_only_the_lists_of_its_place_are_looked_at() -> None:
    schema = {"properties": {"a": TEXTS, "b": {"items": TEXTS}, "c": {"items": {"type": "string"}}}}
    assert Grammar.json_schema(schema).unique == UniquePlaces(frozenset("a"), within=True)
    assert Grammar.json_schema({"items": {"type": "string"}}).unique is None
