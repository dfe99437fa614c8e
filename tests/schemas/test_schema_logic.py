"""What is said to be disjoint has no value in common, and an opposite holds none of a schema's values: by `jsonschema`,
over random schemas and values."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from streamspec.schemas.schema_logic import SchemaLogic, frozen, kind_of
from streamspec.schemas.text_patterns import InexpressibleError
from tests.schemas.test_rewriting import random_schema, validator

VALUES: list[Any] = [
    *(None, True, False, 0, 1, 1.0, 2, 2.5, -1, 3, "", "a", "b", "ab", "abc", [], [1], ["a"], [1, 1], [1, 2, 3], {}),
    *({"a": 1}, {"a": "a", "b": 2}, {"b": None}, {"c": {}}, {"a": [], "b": {}, "c": 1}, {"a": True, "c": "a"}, [[]]),
]  # fmt: skip
TREE = {"$defs": {"t": {"properties": {"a": {"$ref": "#/$defs/t"}}, "required": ["a"]}}, "$ref": "#/$defs/t"}


def logic(root: Any = True) -> SchemaLogic:
    return SchemaLogic(root, 2020, lambda _: False)


@pytest.mark.parametrize("seed", range(3))
def test_what_is_disjoint_has_no_value_in_common(seed: int) -> None:
    random, found = Random(seed), 0
    for _ in range(60):
        one, other = random_schema(random), random_schema(random)
        if logic().disjoint(one, other):
            found += 1
            checks = validator(one), validator(other)
            assert [value for value in VALUES if all(check.is_valid(value) for check in checks)] == [], (one, other)
    assert found > 2


@pytest.mark.parametrize("seed", range(3))
def test_an_opposite_holds_no_value_of_the_schema(seed: int) -> None:
    random, said = Random(seed), 0
    for _ in range(60):
        schema, beside = random_schema(random), random.choice([True, random_schema(random)])
        try:
            opposite = logic().negated(schema, beside)
        except InexpressibleError:
            continue
        said += 1
        checks = [validator(each) for each in (schema, opposite, beside)]
        assert [value for value in VALUES if all(check.is_valid(value) for check in checks)] == [], (schema, opposite)
    assert said > 20


@pytest.mark.parametrize(
    ("schema", "right"),
    [
        ({"type": "object", "required": ["a"]}, [None, {}, {"b": None}]),
        ({"enum": [1, "a", True]}, [False, None, 0, 2.5, "", "ab", "b"]),
        ({"minimum": 2}, [1]),
        ({"properties": {"a": {"type": "string"}}}, [{"a": 1}]),
        ({"minLength": 2, "type": "string"}, ["", "a", 1, {}]),
        ({"if": {"type": "string"}, "then": {"const": "a"}, "else": {"type": "null"}}, ["b", 1]),
        ({"minimum": 1, "exclusiveMinimum": True}, [1]),
    ],
)
def test_an_opposite_has_the_values_that_it_should(schema: Any, right: list[Any]) -> None:
    opposite = validator(logic().negated(schema))
    assert [value for value in right if not opposite.is_valid(value)] == []


def test_recursive_schemas_come_to_an_end() -> None:
    assert not logic(TREE).disjoint(TREE, {"$ref": "#/$defs/t"})
    with pytest.raises(InexpressibleError, match="many levels"):
        logic(TREE).negated(TREE)


@pytest.mark.parametrize("reference", ["other.json", "#anchor", "#/$defs/none", "#/$defs/a/b", "#/$defs/a/0"])
def test_a_reference_that_is_not_followed_is_said(reference: str) -> None:
    with pytest.raises(InexpressibleError, match=r"\$ref"):
        logic({"$defs": {"a": []}}).negated({"$ref": reference})


def test_equal_values_are_those_of_json_schema() -> None:
    assert frozen([1, {"a": 2}]) == frozen([1.0, {"a": 2.0}]) and frozen(True) != frozen(1) != frozen("1")
    assert frozen([True]) != frozen([1]) and frozen({}) != frozen([]) and frozen([1]) != frozen(True)
    assert [kind_of(value) for value in (1.0, 1.5, True, None)] == ["integer", "number", "boolean", "null"]
