"""The everyday types of pydantic and zod: every answer under a model's schema is one that the model takes."""

from __future__ import annotations

import enum
import json
import uuid
from collections.abc import Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from ipaddress import IPv4Address
from pathlib import Path
from random import Random
from typing import Annotated, Any, Literal, NamedTuple

import jsonschema
import pytest
from pydantic import UUID4, AnyUrl, BaseModel, Field, TypeAdapter

from streamspec.runtime import Grammar
from tests.schemas.test_rewriting import validator
from tests.support.random_answers import accepts, random_answer


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int = Field(9, ge=1, le=9)


class Dog(BaseModel):
    kind: Literal["dog"]
    tags: set[Colour] = set()


class Node(BaseModel):
    value: bool
    children: list[Node] = Field([], max_length=2)


class Point(NamedTuple):
    x: int
    y: Literal["a", 1]


Short = Annotated[str, Field(max_length=3)]
TYPES: dict[str, Any] = {
    "optional": Annotated[int, Field(ge=0, lt=50)] | None,
    "union": Literal[1, "a", None] | bool | Colour,
    "discriminated union": Annotated[Cat | Dog, Field(discriminator="kind")],
    "list of a union": Annotated[list[Cat | Dog], Field(max_length=2)],
    "recursive": Node,
    "dict": dict[Short, bool],
    "dict of an enum": dict[Colour, bool],
    "dict of a literal": dict[Literal["a", "b"], Short],
    "dict of UUIDs": dict[uuid.UUID, bool],
    "dict of dates": dict[date, None],
    "set of an enum": set[Colour],
    "set of texts": Annotated[set[Short], Field(min_length=2, max_length=3)],
    "frozenset of numbers": Annotated[frozenset[Annotated[int, Field(ge=0, le=3)]], Field(min_length=3)],
    "tuple": tuple[bool, Short],
    "named tuple": Point,
    "sequence": Annotated[Sequence[bool], Field(max_length=3)],
    "times": tuple[date, time, datetime, timedelta],
    "UUIDs": tuple[uuid.UUID, IPv4Address],
    "path": Path,
}


@pytest.mark.parametrize("name", TYPES)
def test_a_model_takes_every_answer_under_its_schema(name: str) -> None:
    model: TypeAdapter[Any] = TypeAdapter(TYPES[name])
    schema = model.json_schema()
    grammar, check = Grammar.json_schema(schema), validator(schema)
    answers = [random_answer(grammar, Random(seed)) for seed in range(6)]
    for answer in (answer for answer in answers if answer is not None):
        check.validate(json.loads(answer))
        model.validate_json(answer)
    assert any(answer is not None for answer in answers)


@pytest.mark.parametrize("kind", [UUID4, AnyUrl, bytes, float, Decimal, Any, dict[int, Any]])
def test_other_types_are_taken(kind: Any) -> None:
    assert Grammar.json_schema(TypeAdapter(list[kind]).json_schema()).left_out == ()


def test_what_zod_writes_is_taken() -> None:
    """`z.toJSONSchema` of a discriminated union, a record, a set of options and a strict object."""
    strict = {"type": "object", "additionalProperties": False}
    cat = {**strict, "properties": {"kind": {"type": "string", "const": "cat"}}, "required": ["kind"]}
    dog = {**strict, "properties": {"kind": {"type": "string", "const": "dog"}}, "required": ["kind"]}
    record = {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "boolean"}}
    email = {"type": "string", "format": "email", "pattern": r"^(?!\.)[a-z.]+@[a-z]+\.[a-z]{2,}$"}
    properties = {"pet": {"oneOf": [cat, dog]}, "flags": record, "mail": email}
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **strict, "properties": properties}
    grammar = Grammar.json_schema(schema)
    right = '{"pet": {"kind": "dog"}, "flags": {"x": true}, "mail": "a.b@c.de"}'
    assert jsonschema.Draft202012Validator(schema).is_valid(json.loads(right)) and accepts(grammar, right)
    assert not accepts(grammar, '{"mail": ".a@c.de"}') and not accepts(grammar, '{"pet": {"kind": "cow"}}')
