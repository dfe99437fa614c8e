"""Keywords that the grammar library does not have: what they let through is what `jsonschema` takes for valid."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

import jsonschema
import numpy as np
import pytest

from streamspec.errors import ConfigError
from streamspec.runtime import Grammar
from tests.support.random_answers import TOKENIZER, accepts, random_answer, vocabulary

Schema = Any
A, B, C = ({"type": "object", "properties": {"k": {"const": name}}, "required": ["k"]} for name in "abc")
CLOSED = {"type": "object", "additionalProperties": False}
IF_A = {"if": {"properties": {"k": {"const": "a"}}, "required": ["k"]}}
WHOLE = {"type": "integer"}
KV = {"type": "object", "properties": {"k": {"enum": ["a", "b", "c"]}, "v": {}}, "additionalProperties": False}
CASES: dict[str, tuple[Schema, list[str], list[str]]] = {
    "not an enum": ({"type": "string", "not": {"enum": ["foo", "fob"]}}, ['"fo"', '"fooo"', '""'], ['"foo"', '"fob"']),
    "not a const": ({"not": {"const": 3}}, ["2.5", "4", '"3"'], ["3"]),
    "not a type": ({"not": {"type": ["string", "null"]}}, ["3", "[]"], ["null", '""']),
    "not required": ({**KV, "not": {"required": ["k", "v"]}}, ['{"k": "a"}', '{"v": 1}', "{}"], ['{"k": "a", "v": 1}']),
    "not a beginning": ({"type": "string", "not": {"pattern": "^x-"}}, ['"y"', '"x"'], ['"x-1"']),
    "not not": ({"not": {"not": WHOLE}}, ["3"], ['"a"']),
    "not a length": ({"type": "string", "not": {"maxLength": 1}}, ['"ab"'], ['"a"']),
    "oneOf by a const": ({"oneOf": [A, B]}, ['{"k": "a"}', '{"k": "b"}'], ['{"k": "c"}', "{}"]),
    "oneOf by a reference": (
        {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "$defs": {"a": A, "b": B}},
        ['{"k": "a"}'],
        ['{"k": "c"}'],
    ),
    "oneOf of required keys": (
        {"oneOf": [{"required": ["x"]}, {"required": ["y"]}], "type": "object", "properties": {"x": WHOLE, "y": WHOLE}},
        ['{"x": 1}', '{"y": 1}'],
        ['{"x": 1, "y": 1}', "{}"],
    ),
    "oneOf of keys of a key that may not be there": (
        {
            "type": "object",
            "oneOf": [{"properties": {"d": {"properties": {key: {"not": {}}}}, "s": {"const": key}}} for key in "ab"],
        },
        ['{"d": {"a": 1}}', '{"d": {"b": 1}}', '{"d": 1, "s": "a"}'],
        ['{"d": 1}', "{}", '{"d": {}}', '{"d": {"a": 1}, "s": "a"}'],
    ),
    "oneOf of flags, by draft 4": (
        {
            "$schema": "http://json-schema.org/draft-04/schema#",
            "type": "object",
            "oneOf": [{"properties": {"a": {"enum": [flag]}, "b": {"enum": [False]}}} for flag in (True, False)],
        },
        ['{"a": true, "b": false}', '{"a": false, "b": false}'],
        ['{"b": false}', "{}", '{"a": true, "b": true}'],
    ),
    "oneOf of closed objects": (
        {"oneOf": [{**CLOSED, "properties": {"x": {}}}, {**CLOSED, "properties": {"y": {}}}]},
        ['{"x": 1}', '{"y": 1}'],
        ["{}", '{"x": 1, "y": 1}'],
    ),
    "oneOf of lists": (
        {"oneOf": [{"type": "array", "items": WHOLE}, {"type": "array", "items": {"type": "string"}}]},
        ["[1]", '["a", "b"]'],
        ["[]", '[1, "a"]'],
    ),
    "oneOf of texts and some of them": (
        {"oneOf": [{"type": "string", "pattern": "^a+$"}, {"enum": ["b", "c"]}]},
        ['"aa"', '"b"'],
        ['"d"', '""'],
    ),
    "oneOf of numbers": ({"oneOf": [{"type": "number", "minimum": 5}, {"type": "number", "maximum": 5}]}, ["4"], ["5"]),
    "oneOf with the same twice": ({"oneOf": [True, {"type": "string"}]}, ["3"], ['"a"']),
    "if a property": (
        {**KV, **IF_A, "then": {"properties": {"v": WHOLE}}, "else": {"properties": {"v": {"type": "string"}}}},
        ['{"k": "a", "v": 1}', '{"k": "b", "v": "x"}', '{"v": "x"}'],
        ['{"k": "a", "v": "x"}', '{"k": "b", "v": 1}', '{"v": 1}'],
    ),
    "if one of many": (
        {
            **KV,
            "allOf": [
                {"if": {"properties": {"k": {"const": "a"}}}, "then": {"properties": {"v": WHOLE}}},
                {"if": {"properties": {"k": {"enum": ["b", "a"]}}, "required": ["k"]}, "then": {"required": ["v"]}},
            ],
        },
        ['{"k": "a", "v": 1}', '{"k": "b", "v": "x"}', '{"k": "c"}', "{}", '{"v": 1}'],
        ['{"k": "a", "v": "x"}', '{"k": "b"}', '{"k": "a"}', '{"v": "x"}'],
    ),
    "dependentRequired": (
        {**KV, "dependentRequired": {"k": ["v"]}},
        ['{"v": 1}', '{"k": "a", "v": 1}', "{}"],
        ['{"k": "a"}'],
    ),
    "dependentSchemas": (
        {**KV, "dependentSchemas": {"k": {"properties": {"v": WHOLE}}}},
        ['{"v": "x"}', '{"k": "a", "v": 1}'],
        ['{"k": "a", "v": "x"}'],
    ),
    "dependencies": (
        {**KV, "$schema": "http://json-schema.org/draft-07/schema#", "dependencies": {"k": ["v"]}},
        ['{"v": 1}'],
        ['{"k": "a"}'],
    ),
    "propertyNames of an enum": (
        {"type": "object", "propertyNames": {"enum": ["x", "y"]}, "additionalProperties": WHOLE},
        ['{"x": 1}', '{"x": 1, "y": 2}', "{}"],
        ['{"z": 1}', '{"x": "a"}'],
    ),
    "propertyNames of a pattern": (
        {"type": "object", "propertyNames": {"pattern": "^[a-c]+$"}, "additionalProperties": WHOLE},
        ['{"ab": 1}', "{}"],
        ['{"d": 1}', '{"a": "x"}'],
    ),
    "propertyNames of a pattern that spells them": (
        {"type": "object", "propertyNames": {"pattern": "^(en|de)$"}, "properties": {"en": WHOLE, "de": WHOLE}},
        ['{"en": 1}', '{"en": 1, "de": 2}', "{}"],
        ['{"fr": 1}', '{"en": "a"}', '{"en1": 1}'],
    ),
    "properties of patterns that spell them": (
        {
            **CLOSED,
            "properties": {"en": {}, "x": WHOLE},
            "patternProperties": {"^(?:en|de)$": WHOLE, "^de$": {"minimum": 3}, "^y": {"type": "string"}},
        },
        ['{"en": 1, "de": 3}', '{"x": 1, "y2": "z"}', "{}"],
        ['{"de": 2}', '{"en": "a"}', '{"z": 1}', '{"y": 1}'],
    ),
    "propertyNames of a length": ({"type": "object", "propertyNames": {"maxLength": 1}}, ['{"d": 1}'], ['{"ab": 1}']),
    "propertyNames of a format": (
        {"type": "object", "propertyNames": {"format": "date"}},
        ['{"2024-02-29": 1}'],
        ['{"2023-02-29": 1}'],
    ),
    "contains": (
        {"type": "array", "items": {"type": ["string", "integer"]}, "contains": WHOLE},
        ['["a", 1]', '[1, "a"]', '["a", "a", "a", 1, "a"]'],
        ['["a"]', "[]"],
    ),
    "unevaluatedProperties": (
        {"allOf": [{"properties": {"x": WHOLE}}], "properties": {"y": WHOLE}, "unevaluatedProperties": False},
        ['{"y": 1}', '{"x": 1}', '{"x": 1, "y": 2}'],
        ['{"z": 1}'],
    ),
    "additionalProperties beside allOf": (
        {"allOf": [{"properties": {"x": {}}}], "additionalProperties": {"type": "boolean"}},
        ['{"x": true}'],
        ['{"x": 1}'],
    ),
    "minProperties": (
        {**CLOSED, "properties": {"x": WHOLE, "y": WHOLE, "z": WHOLE}, "minProperties": 2},
        ['{"x": 1, "y": 1}', '{"x": 1, "z": 1}', '{"x": 1, "y": 1, "z": 1}'],
        ['{"x": 1}', "{}"],
    ),
    "minProperties of an open object": (
        {"type": "object", "properties": {"x": WHOLE}, "minProperties": 1},
        ['{"x": 1}', '{"y": 1}'],
        ["{}"],
    ),
    "minProperties of an open object, one more than required": (
        {"type": "object", "properties": {"x": WHOLE, "y": WHOLE}, "required": ["x"], "minProperties": 2},
        ['{"x": 1, "y": 1}', '{"x": 1, "z": 1}'],
        ['{"x": 1}', '{"x": 1, "x": 1}'],
    ),
    "maxProperties": (
        {**CLOSED, "properties": {"x": WHOLE, "y": WHOLE, "z": WHOLE}, "maxProperties": 2},
        ['{"x": 1, "z": 1}', "{}"],
        ['{"x": 1, "y": 1, "z": 1}'],
    ),
    "look-ahead": ({"type": "string", "pattern": "^(?!x-)[a-z-]+$"}, ['"a"', '"xa"'], ['"x-a"', '""', '"A"']),
    "look-ahead in a key": ({**CLOSED, "patternProperties": {"^(?!x-)": WHOLE}}, ['{"a": 1}'], ['{"x-": 1}']),
    "a keyword of a later draft": (
        {"$schema": "http://json-schema.org/draft-04/schema#", "type": "object", "propertyNames": {"enum": []}},
        ['{"a": 1}'],
        [],
    ),
}  # fmt: skip
REFUSED: list[tuple[Schema, str]] = [
    ({"not": {"multipleOf": 3}}, "multipleOf in what may not hold"),
    ({"oneOf": [{"type": "string"}, {"type": "string", "pattern": "a"}]}, "oneOf of schemas that may hold together"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "type integer"),
    ({"properties": {"a": {"contains": {}, "maxContains": 3}}}, "contains .*#/properties/a/contains"),
    ({"unevaluatedItems": False}, "unevaluatedItems"),
    ({"anyOf": [{}], "unevaluatedProperties": False}, "unevaluatedProperties beside alternatives"),
    ({"propertyNames": {"anyOf": [{"pattern": "a"}]}}, "propertyNames with anyOf"),
    ({"type": "string", "pattern": "a(?!b)"}, "look-around"),
    ({"type": "string", "pattern": "^(?!a)b|c"}, "the opposite of the pattern"),
    ({"patternProperties": {"^(?!a)b": {}}}, "look-around"),
    ({"minProperties": "3"}, "a number of properties '3'"),
    ({"minProperties": 5, "properties": dict.fromkeys("abcdefghijkl", True)}, "minProperties 5"),
]


@pytest.mark.parametrize("wrong", [5, {"type": 5}, {"anyOf": ["x"]}, {"properties": []}, {"pattern": 5}])
def test_what_is_no_schema_is_refused_where_its_opposite_is_needed(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="not of what is no schema"):
        Grammar.json_schema({"not": wrong})


def validator(schema: Schema) -> Any:
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    made = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    return made(schema, format_checker=made.FORMAT_CHECKER)


@pytest.mark.parametrize("name", CASES)
def test_a_keyword_lets_through_what_is_valid(name: str) -> None:
    schema, right, wrong = CASES[name]
    grammar, check = Grammar.json_schema(schema), validator(schema)
    assert [text for text in right if not check.is_valid(json.loads(text))] == []
    assert [text for text in wrong if check.is_valid(json.loads(text))] == []
    assert [text for text in right if not accepts(grammar, text)] == []
    assert [text for text in wrong if accepts(grammar, text)] == []


@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_what_cannot_be_said_is_refused_by_name_or_left_out(case: int) -> None:
    schema, found = REFUSED[case]
    with pytest.raises(ConfigError, match=found) as error:
        Grammar.json_schema(schema)
    assert "\n" not in str(error.value)
    assert Grammar.json_schema(schema, strict=False).left_out != ()


@pytest.mark.parametrize(
    "keys",
    [
        {"propertyNames": {"pattern": "^(en|de)$"}},
        {"patternProperties": {"^(en|de)$": {}}, "additionalProperties": False},
    ],
)
def test_where_every_key_is_written_no_other_begins(keys: Schema) -> None:
    grammar = Grammar.json_schema({"type": "object", "properties": {"en": WHOLE, "de": WHOLE}, **keys})
    state, path = vocabulary().start(grammar), TOKENIZER.encode('{"en": 1, "de": 2').ids
    state.advance(path)
    assert not {TOKENIZER.id_to_token(i) for i in np.flatnonzero(state.after().mask)} & {",", ", "}
    assert accepts(grammar, '{"en": 1, "de": 2}')


def test_a_schema_that_is_kept_to_leaves_nothing_out() -> None:
    assert Grammar.json_schema({"type": "object", "not": {"required": ["a"]}}, strict=False).left_out == ()


LEAVES: list[Schema] = [
    *(True, {}, {"type": "string"}, {"type": "integer"}, {"type": ["null", "boolean"]}, {"type": "object"}),
    *({"const": 1}, {"const": "a"}, {"enum": ["a", "b", 2, None, True]}, {"minimum": 2}, {"exclusiveMaximum": 3}),
    *({"type": "string", "minLength": 2}, {"maxLength": 1}, {"type": "string", "pattern": "^a"}, {"minItems": 1}),
    *({"required": ["a"]}, {"required": ["b"], "type": "object"}, {"maxItems": 2}, {"not": {}}, {"enum": [False]}),
]  # fmt: skip


def is_schema(schema: Schema) -> bool:
    """Whether it is one by its own dialect: draft 4 has no true and false."""
    try:
        type(validator(schema)).check_schema(schema)
    except jsonschema.SchemaError:
        return False
    return True


DIALECTS = [f"http://json-schema.org/draft-0{number}/schema#" for number in (4, 6, 7)]
DIALECTS += [f"https://json-schema.org/draft/{year}/schema" for year in ("2019-09", "2020-12")]


def random_schema(random: Random, depth: int = 2) -> Schema:
    if depth == 0 or random.random() < 0.2:
        return random.choice(LEAVES)

    def inner() -> Schema:
        return random_schema(random, depth - 1)

    def some() -> list[Schema]:
        return [inner() for _ in range(random.randint(1, 3))]

    keywords: dict[str, Callable[[], Any]] = {
        "type": lambda: random.choice(["object", "array", "string", "integer", ["object", "array"]]),
        "properties": lambda: {name: inner() for name in random.choice(["a", "ab", "abc"])},
        "additionalProperties": lambda: random.random() < 0.5 and inner(),
        "required": lambda: random.choice([["a"], ["a", "b"], ["c"]]),
        "items": inner,
        "uniqueItems": lambda: True,
        "propertyNames": lambda: random.choice([{"enum": ["a", "c"]}, {"maxLength": 1}, {"pattern": "^[ab]$"}]),
        "dependentRequired": lambda: random.choice([{"a": ["b"]}, {"b": ["a", "c"]}]),
        "dependentSchemas": lambda: {"a": inner()},
        "unevaluatedProperties": lambda: False,
        **dict.fromkeys(("contains", "not", "if", "then", "else"), inner),
        **dict.fromkeys(("anyOf", "oneOf", "allOf"), some),
        **dict.fromkeys(("minProperties", "maxProperties", "minItems"), lambda: random.randint(0, 2)),
    }
    return {key: keywords[key]() for key in random.sample(list(keywords), random.randint(1, 5))}


def test_whatever_answer_comes_satisfies_its_schema(seeds: range = range(150)) -> None:
    answers = 0
    for seed in seeds:
        random = Random(seed)
        schema = random_schema(random)
        if isinstance(schema, dict):
            schema = {"$schema": random.choice(DIALECTS)} | schema
        if not is_schema(schema):
            continue
        try:
            grammar = Grammar.json_schema(json.dumps(schema))
        except ConfigError:
            continue
        for _ in range(3):
            try:
                answer = random_answer(grammar, random)
            except ConfigError as error:
                assert "nothing in this vocabulary" in str(error)
                continue
            if answer is not None:
                answers += 1
                assert validator(schema).is_valid(json.loads(answer)), (seed, schema, answer)
    assert answers > len(seeds)


SHAPES = {  # each of a published schema
    "thirty keys, some of which need others": {
        "type": "object",
        "properties": {f"p{i}": {"type": "string"} for i in range(30)},
        "dependentRequired": {f"p{i}": [f"p{29 - i}"] for i in range(6)},
        "additionalProperties": False,
    },
    "at most fifty words": {"type": "string", "pattern": r"^(?:\S+\s+){0,49}\S+$", "maxLength": 500},
}


@pytest.mark.parametrize("schema", SHAPES.values(), ids=SHAPES)
def test_answers_of_published_shapes_come_to_their_end(schema: Schema) -> None:
    grammar = Grammar.json_schema(schema)
    answers = [answer for seed in range(4) if (answer := random_answer(grammar, Random(seed))) is not None]
    assert answers and all(validator(schema).is_valid(json.loads(answer)) for answer in answers)
