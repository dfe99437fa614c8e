"""JSON schemas to the letter: what a grammar lets through is valid, and numbers end. Most values of formats are of the
JSON Schema Test Suite (draft 2020-12, optional/format).
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import jsonschema
import numpy as np
import pytest

from streamspec.errors import ConfigError
from streamspec.runtime import Grammar
from streamspec.runtime.text.grammar import Vocabulary
from streamspec.schemas.narrowing import DECIMALS, MOST, PATTERNS, narrowed
from tests.support.byte_tokenizers import EOS, byte_level

TOKENIZER = byte_level()
FORMATS: dict[str, tuple[list[str], list[str]]] = {
    "date": (
        ["1963-06-19", "2020-01-31", "2024-02-29", "2000-02-29", "0400-02-29", "0001-01-01", "9999-12-31"],
        ["2023-02-29", "1900-02-29", "2020-02-30", "2020-04-31", "2020-13-01", "2020-00-01", "0000-01-01", "1963-6-19"],
    ),
    "time": (
        ["08:30:06Z", "23:20:50.52Z", "08:30:06-08:00", "00:00:00+23:59"],
        [
            "24:00:00Z",
            "22:59:60Z",
            "23:59:60+01:00",
            "00:00:61Z",
            "12:00:00",
            "12:00:00+24:00",
            "1:00:00Z",
            "08:30:06.Z",
        ],
    ),
    "date-time": (
        ["1963-06-19T08:30:06.283185Z", "1990-12-31T15:59:59-08:00", "2024-02-29T00:00:00Z"],
        ["2023-02-29T00:00:00Z", "1998-12-31T23:58:60Z", "1990-02-31T15:59:59.123-08:00", "2013-350T01:01:01Z"],
    ),
    "duration": (
        ["P4DT12H30M5S", "P4Y", "PT0S", "P1M", "PT1M", "P4W", "P3Y6M4DT12H30M5S"],
        ["P", "PT", "P1", "P1YT", "PT1D", "P2D1Y", "P1Y2W", "P1Y1D", "4DT12H", "PT1H30S", "P" + "1" * 10 + "D"],
    ),
    "email": (
        ["joe.bloggs@example.com", "te~st@example.com", "joe@[127.0.0.1]"],
        ["2962", ".test@example.com", "te..st@example.com", "joe@" + "a." * 130 + "a"],
    ),
    "hostname": (
        ["www.example.com", "a.b-c.d", "1host", "a." * 126 + "a"],
        ["-bad", "bad-", "a_b", "a" * 64, "a..b", "", "a." * 127 + "a"],
    ),
    "ipv4": (["192.168.0.1", "0.0.0.0"], ["127.0.0.0.1", "256.1.1.1", "127.0", "087.10.0.1"]),
    "ipv6": (["::1", "::", "d6::42:1", "1:2:3:4:5:6:7:8"], ["12345::", "::abcg", "1::2::3", "1:2:3:4:5:6:7", ":2:3"]),
    "uri": (
        ["http://foo.bar/?baz=qux#quux", "urn:oasis:x", "tel:+1-816"],
        ["//foo.bar", "/abc", "\\\\x", "abc", "http:// a"],
    ),
    "uri-reference": (
        ["/a/b?x=1#f", "a", "", "http://a.b:8/c", "a/b:c", "?q", "./a", "mailto:a@b.c"],
        ["a b", "#a#b", "%zz", "\\\\a", "//a b"],
    ),
    "json-pointer": (["", "/a~0b/1", "//"], ["a", "/a~2", "/~"]),
    "relative-json-pointer": (["0", "1/a", "3#"], ["/a", "-1", "01/a", "0##"]),
    "uuid": (
        ["2eb8aa08-aa98-11ea-b4aa-73b441d16380"],
        ["2eb8aa08-aa98-11ea-b4aa-73b441d1638", "2eb8aa08aa9811eab4aa73b441d16380"],
    ),
}
NINES, THIRD = str(MOST), "0." + "3" * DECIMALS
CASES: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"type": "integer"}, ["0", "-7", NINES], [NINES + "9", "1.5", "1e5", "01"]),
    ({"type": "integer", "minimum": 3}, ["3", NINES], ["2", NINES + "0"]),
    ({"type": "integer", "exclusiveMaximum": 3}, ["2", "-" + NINES], ["3", "-1" + NINES]),
    ({"type": "integer", "multipleOf": 7}, ["7" * 15], ["8", "7" * 16]),
    ({"type": "integer", "multipleOf": 9600}, ["4294972800", "96" + "0" * 20], ["9601"]),
    ({"allOf": [{"type": "integer"}, {"multipleOf": 9600}]}, ["4294972800"], ["9601"]),
    ({"allOf": [{"type": "integer", "multipleOf": 4}, {"multipleOf": 25}]}, ["1" * 13 + "00"], ["1" * 14 + "00", "50"]),
    ({"type": "integer", "minimum": 10**15}, ["1" + "0" * 15, "1" + "0" * 20], ["5"]),
    ({"type": "number"}, ["0.5", "-3", THIRD, "3.10"], [THIRD + "3", NINES + "9", "1e9"]),
    ({"type": "number", "minimum": 0, "maximum": 1}, ["0.25", "1"], [THIRD + "3", "1.1", "-0.1"]),
    ({"type": "number", "minimum": 1e-12, "maximum": 1e-11}, ["0.000000000002"], ["0.1", "0"]),
    ({"type": "number", "multipleOf": 0.5}, ["2.5", "12"], ["0.25", THIRD]),
    ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, ["0.0000000001", "0.5"], ["0", "0.0", "-0", "0.51"]),
    ({"type": "number", "exclusiveMinimum": 1, "maximum": 1.5}, ["1.1", "1.0000000001"], ["1", "1.0"]),
    ({"type": "number", "minimum": -9.5, "exclusiveMaximum": -9}, ["-9.5", "-9.1"], ["-9", "-9.0"]),
    ({"type": ["null", "number"], "exclusiveMinimum": -1, "exclusiveMaximum": -0.5}, ["-0.75", "null"], ["-1", "-0.5"]),
    ({"type": "number", "exclusiveMinimum": 0.5, "maximum": 0.55}, ["0.51"], ["0.5", "0.50"]),
    ({"type": "number", "exclusiveMinimum": 0, "minimum": 0.25, "maximum": 0.5}, ["0.25"], ["0.2", "0"]),
    ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5, "multipleOf": 0.05}, ["0.05"], ["0", "0.0"]),
    ({"type": "number", "exclusiveMinimum": 10**14, "maximum": 10**14 + 0.5}, [f"{10**14}.25"], [f"{10**14}"]),
    ({"exclusiveMinimum": 0, "maximum": 0.5}, ["0.1", '"x"'], ["0", "0.0"]),
    ({"allOf": [{"type": "number", "exclusiveMinimum": 0}, {"maximum": 0.5}]}, ["0.1"], ["0"]),
    ({"allOf": [{"type": "integer"}, {"exclusiveMinimum": 0}]}, ["1"], ["0"]),
    ({"type": "integer", "exclusiveMinimum": MOST}, ["1" + "0" * 15], [NINES]),
    ({"type": "number", "maximum": 1.7976931348623157e308}, ["0.5", NINES, "-" + NINES], ["1" + NINES, "-1" + NINES]),
    ({"type": "number", "minimum": -3.4e38, "maximum": 3.4e38}, ["-0.5", NINES], ["1" + NINES]),
    ({"type": "number", "minimum": 0, "exclusiveMaximum": 1e19}, ["7"], ["-1", "1" + NINES]),
    ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, ["5", "-" + NINES, str(2**63 - 1)], [str(2**63)]),
    ({"type": "integer", "minimum": 0, "maximum": 2**64 - 1}, ["0", str(2**63 - 1)], ["-1", str(2**64)]),
    ({"maximum": 1e300}, ["5", '"x"'], []),
    ({"allOf": [{"type": "number"}, {"multipleOf": 10000}]}, ["20000"], ["0.5", "10001"]),
    ({"type": ["string", "number"]}, ['"' + "1" * 40 + '"', "5"], ["1" * 40]),
    ({"type": "integer", "enum": [10**16, 3]}, ["1" + "0" * 16, "3"], ["4"]),
    ({"type": "integer", "format": "int32"}, ["2147483647", "-2147483648"], ["2147483648", "-2147483649"]),
    ({"type": "integer", "format": "uint8", "minimum": 3}, ["3", "255"], ["2", "256"]),
    ({"type": ["null", "integer"], "format": "uint64"}, ["null", "9"], ["-1"]),
    ({"type": "number", "format": "double"}, ["-1.5"], ["1e5"]),
    ({"type": "string", "format": "date", "pattern": "^2023"}, ['"2023-02-28"'], ['"2023-02-29"', '"2024-01-01"']),
    ({"properties": {"format": {"type": "integer"}}}, ['{"format": 3}'], ['{"format": 3.5}']),
    ({"properties": {"const": {"format": "date"}}}, ['{"const": "2023-02-28"}'], ['{"const": "2023-02-29"}']),
    ({"const": {"format": "no", "type": "integer"}}, ['{"format": "no", "type": "integer"}'], ["3"]),
    ({"properties": {"a": {"type": "integer"}}}, ['{"a": 1, "b\\u0001": 2}'], ['{"\\u0061": "x"}', '{"\\u0062": 2}']),
    ({"patternProperties": {"^a": {"type": "integer"}}}, ['{"ab": 1, "b": "\\\\u"}'], ['{"\\u0061": "x"}']),
    ({"type": "object", "additionalProperties": {"type": "integer"}}, ['{"a": 1}'], ['{"a": "x"}']),
    ({"type": "string", "pattern": r"^\s\S[\s.][^\s]$"}, [r'" a\tb"'], ['"\x85a b"', '" \ufeff b"', '" a \ufeff"']),
    ({"type": "string", "pattern": r"^[^\S]\\S[.]$"}, [r'" \\S."'], [r'"a\\S."', r'" \\Sa"']),
    ({"type": "string", "pattern": "^.$"}, ['"a"', '"\x85"'], [r'"\n"', r'"\r"', '"\u2028"']),
    ({"type": "string", "pattern": "(?s)^.$"}, ['"a"', r'"\n"'], ['"ab"']),
    ({"patternProperties": {r"^\S$": {}}, "additionalProperties": False}, ['{"a": 1}'], ['{"\ufeff": 1}']),
    ({"type": "string", "format": "money"}, ['"5 EUR"', '""'], ["5"]),
    ({"type": "string", "format": "int64"}, ['"5"', '"x"'], ["5"]),
    ({"not": {"type": "string", "format": "path"}}, ["5"], ['"/x"']),
    ({"type": "object", "minProperties": 1}, ['{"a": 1}'], ["{}"]),
    ({"type": "object", "minProperties": 2, "required": ["a", "b"]}, ['{"a": 1, "b": 2}'], ['{"a": 1}']),
]  # fmt: skip
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"type": "object", "minProperties": 2}, "minProperties 2"),
    ({"type": "integer", "minimum": 10**19, "maximum": 10**21}, "minimum 10000000000000000000 .*15 digits"),
    ({"type": "number", "exclusiveMaximum": -1e19}, r"exclusiveMaximum -1e\+19 .*15 digits"),
    ({"type": "number", "minimum": 1e16, "maximum": 1e20}, r"maximum 1e\+20 .*15 digits"),
    ({"$schema": "http://json-schema.org/draft-03/schema#", "disallow": "string"}, "draft-03"),
]


@cache
def vocabulary() -> Vocabulary:
    return Vocabulary(TOKENIZER, TOKENIZER.get_vocab_size(), [EOS])


def accepts(schema: dict[str, Any], text: str) -> bool:
    """Whether an answer that ends by itself can be `text`."""
    state, path = vocabulary().start(Grammar.json_schema(schema)), tuple(TOKENIZER.encode(text).ids)
    return all(state.after(path[:i]).mask[token] for i, token in enumerate((*path, EOS)))


def is_valid(schema: dict[str, Any], text: str) -> bool:
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    return jsonschema.Draft202012Validator(schema, format_checker=checker).is_valid(json.loads(text))


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_lets_its_own_texts_through_and_no_others(name: str) -> None:
    schema = {"type": "string", "format": name}
    right, wrong = FORMATS[name]
    assert [
        text for text in right if not (accepts(schema, json.dumps(text)) and is_valid(schema, json.dumps(text)))
    ] == []
    assert [text for text in wrong if accepts(schema, json.dumps(text))] == []


@pytest.mark.parametrize("case", range(len(CASES)))
def test_a_schema_lets_through_what_is_valid_and_ends(case: int) -> None:
    schema, right, wrong = CASES[case]
    assert [text for text in right if not (accepts(schema, text) and is_valid(schema, text))] == []
    assert [text for text in wrong if accepts(schema, text)] == []


def test_any_object_has_numbers_that_end() -> None:
    state = vocabulary().start(Grammar.json_object())
    for text, ends in (
        ('{"a": [1, {"b": null}], "c": ""}', True),
        (f'{{"a": [{{"b": {NINES}', True),
        (f'{{"a": 1{NINES}', False),
    ):
        path = tuple(TOKENIZER.encode(text).ids)
        assert all(state.after(path[:i]).mask[token] for i, token in enumerate(path)) == ends


def test_the_longest_number_is_followed_by_what_comes_after_it() -> None:
    city = {"properties": {"name": {"type": "string"}, "pop": {"type": "integer"}}, "required": ["name", "pop"]}
    state = vocabulary().start(Grammar.json_schema(city | {"type": "object", "additionalProperties": False}))
    path = tuple(TOKENIZER.encode('{"name": "Paris", "pop": ' + "1" * 15).ids)
    assert [TOKENIZER.id_to_token(i) for i in np.flatnonzero(state.after(path).mask)] == ["}"]


@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_what_is_not_enforced_is_refused_by_name(case: int) -> None:
    schema, found = REFUSED[case]
    with pytest.raises(ConfigError, match=found) as error:
        Grammar.json_schema(schema)
    assert "\n" not in str(error.value)


def test_a_bound_that_draft_4_excludes_is_excluded() -> None:
    draft = {"$schema": "http://json-schema.org/draft-04/schema#"}
    schema = draft | {"type": "number", "minimum": 0, "exclusiveMinimum": True, "maximum": 0.5}
    assert [accepts(schema, text) for text in ("0", "0.1", "0.5")] == [False, True, True]


def test_a_schema_is_narrowed_and_not_changed() -> None:
    schema = {"type": "object", "properties": {"day": {"format": "date"}, "count": {"type": "integer"}}}
    before = json.dumps(schema)
    assert narrowed(schema).schema["properties"] == {
        "day": {"pattern": f"^(?:{PATTERNS['date']})$"},
        "count": {"type": "integer", "minimum": -MOST, "maximum": MOST},
    }
    assert json.dumps(schema) == before
