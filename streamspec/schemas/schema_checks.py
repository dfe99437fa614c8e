"""Checks schemas and regular expressions before the grammar library sees them: it would misread some of them and build
others for minutes. `test_grammar.py` and tests/attacks/test_grammars.py cover this module.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from decimal import Decimal
from typing import Any

from streamspec.errors import ConfigError

MAX_PATTERN = 10_000  # characters of a regular expression
MAX_REPEATS = 10_000  # counted repetitions one inside the other, multiplied: a{100} in (..){100}
MAX_DEPTH = 100  # levels of a schema
# `multipleOf`, in units of its last decimal, is a state for each remainder: 1,000,003 took 15 s and 270 MB. Beyond
# these the library also computes in 32 bits what needs more, and allows other numbers than it should.
MAX_MULTIPLE, MAX_DECIMALS = 10_000, 6
MAX_MULTIPLES = 100_000  # units of all in a schema, summed
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
# Keywords that may apply two values of `multipleOf` to one number.
JOINING = {"allOf", "anyOf", "oneOf", "$ref", "$dynamicRef", "$recursiveRef", "patternProperties", "dependentSchemas"}


def check_schema(schema: Any) -> None:
    """Raises ConfigError for a parsed JSON schema that is too deep or would take the library too long, and for numbers
    that it would round."""
    for pattern in _patterns(schema):
        check_pattern(pattern)
    _check_numbers(schema)
    _check_multiples(schema)


def _check_multiples(schema: Any) -> None:
    """Refuses values of `multipleOf` that are not above 0 or have too many remainders, each by itself, all together
    and, where one number may have to be a multiple of several, their least common multiple."""
    values = list(multiples_of(schema))
    fix = "check such numbers after the answer"
    units = []
    for value in values:
        digits, decimals = units_of(value)
        if value <= 0 or digits > MAX_MULTIPLE or decimals > MAX_DECIMALS:
            raise ConfigError(
                f"multipleOf {str(value)[:40]} in a JSON schema",
                f"a number above 0 of at most {MAX_MULTIPLE} units of its last decimal and {MAX_DECIMALS} decimals",
                fix,
            )
        units.append(digits)
    if sum(units) > MAX_MULTIPLES:
        raise ConfigError(f"multipleOf of {sum(units)} units in a JSON schema", f"at most {MAX_MULTIPLES} in all", fix)
    if len(set(values)) > 1 and joins(schema) and common_multiple(values) > MAX_MULTIPLE:
        raise ConfigError(
            f"a JSON schema with {len(set(values))} values of multipleOf, which may apply together",
            f"values whose common multiple has at most {MAX_MULTIPLE} units",
            fix,
        )


def multiples_of(schema: Any) -> Iterator[Decimal]:
    """Yields the values of `multipleOf`."""
    every = (each.get("multipleOf") for each in objects_of(schema))
    return (Decimal(repr(value)) for value in every if type(value) in (int, float))


def joins(schema: Any) -> bool:
    """Tells whether two parts of a schema may apply to one number."""
    return not all(map(JOINING.isdisjoint, objects_of(schema)))


def common_multiple(values: Sequence[Decimal]) -> int:
    """Returns the least common multiple, in units of the smallest last decimal."""
    scale = 10 ** max((units_of(value)[1] for value in values), default=0)
    return math.lcm(*(int(value * scale) for value in values))


def units_of(value: Decimal) -> tuple[int, int]:
    """Returns a number in units of its last decimal, and how many decimals it has."""
    decimals = max(0, -int(value.normalize().as_tuple().exponent))
    return int(abs(value).scaleb(decimals)), decimals


def _patterns(schema: Any) -> Iterator[str]:
    """Yields the regular expressions of a schema; properties of such a name are looked at as well, at no harm."""
    for each in objects_of(schema):
        if isinstance(each.get("pattern"), str):
            yield each["pattern"]
        if isinstance(each.get("patternProperties"), dict):
            yield from each["patternProperties"]


def objects_of(schema: Any, depth: int = 0) -> Iterator[dict[str, Any]]:
    """Yields all JSON objects in a schema, outer ones first. Raises ConfigError beyond `MAX_DEPTH` levels."""
    if depth > MAX_DEPTH:
        raise ConfigError(f"a JSON schema of more than {MAX_DEPTH} levels", f"at most {MAX_DEPTH}", "simplify it")
    if isinstance(schema, dict):
        yield schema
    for inner in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        yield from objects_of(inner, depth + 1)


def _check_numbers(schema: Any, steering: bool = False) -> None:
    """Refuses whole numbers that the library, which reads numbers as doubles, would round to others.

    Only where they steer the grammar: a default or an example may be any number. Bounds from 2^63 - 1 on are others
    after `narrowing.py`.
    """
    if isinstance(schema, dict):
        for key, value in schema.items():
            if key in BOUNDS[:4] and isinstance(value, int) and 2**63 - 1 <= abs(value) <= 2**1023:
                continue
            _check_numbers(value, steering or key in BOUNDS or key in ("enum", "const"))
    elif isinstance(schema, list):
        for item in schema:
            _check_numbers(item, steering)
    elif steering and isinstance(schema, int) and (abs(schema) > 2**1023 or int(float(schema)) != schema):
        raise ConfigError(
            f"the number {str(schema)[:40]} in a JSON schema",
            "whole numbers that a double holds: up to 2^53",
            "give it as a text",
        )


PIECES = re.compile(
    r"\\.|\[\^?\]?(?:\\.|[^\]\\])*(?:\]|\\?\Z)|\{(?P<least>\d+)(?P<comma>,(?P<most>\d*))?\}|.", re.DOTALL
)


def check_pattern(pattern: str) -> None:
    """Refuses regular expressions that are long, or whose counted repetitions multiply: the library would build them
    out.
    """
    if len(pattern) > MAX_PATTERN:
        raise ConfigError(f"a regular expression of {len(pattern)} characters", f"at most {MAX_PATTERN}", "simplify it")
    inside = [1]  # largest product of counts in each open group
    last = 1  # and in what a count would repeat
    for piece in PIECES.finditer(pattern):
        if piece["least"] is not None:
            last *= max(1, int((piece["most"] or piece["least"])[:9]))
            inside[-1] = max(inside[-1], last)
        elif piece[0] == "(":
            inside.append(1)
        elif piece[0] == ")" and len(inside) > 1:
            last = inside.pop()
            inside[-1] = max(inside[-1], last)
        elif piece[0] not in "*+?":
            last = 1
        if last > MAX_REPEATS:
            raise ConfigError(
                f"a regular expression that repeats {last} times over", f"at most {MAX_REPEATS}", "simplify it"
            )
