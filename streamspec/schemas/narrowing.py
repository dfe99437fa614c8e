"""Narrows JSON schemas where the grammar library is too lax: formats that it half enforces, numbers without an end, and
keywords that it takes for comments. tests/schemas/test_narrowing.py compares the result with `jsonschema`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any, NamedTuple

from streamspec.errors import ConfigError
from streamspec.schemas.formats import ALIASES, LENGTHS, MOST, PATTERNS, RANGES, is_annotation
from streamspec.schemas.rewriting import BY_NAME, VALUES, Rewriting
from streamspec.schemas.schema_checks import (
    BOUNDS,
    PIECES,
    common_multiple,
    joins,
    multiples_of,
    objects_of,
    units_of,
)
from streamspec.schemas.unique_items import UniquePlaces, unique_places

DECIMALS = 10  # of a number without `multipleOf`; more the library cannot count
FEW = 100  # units of `multipleOf` beside which digits are bounded: the library gave up at a thousand
DIALECTS = re.compile(r"https?://json-schema\.org/(draft-0[467]|draft/20(19-09|20-12))/schema#?")
_SPACE = r"\t\n\x0B\x0C\r\x20\xA0\u1680\u2000-\u200A\u2028\u2029\u202F\u205F\u3000\uFEFF"
_WITHIN_LINE = r"[^\n\r\u2028\u2029]"
_ESCAPE, _DOT_ALL = re.compile(r"\\.", re.DOTALL), re.compile(r"\(\?[a-zA-Z]*s")


class Narrowed(NamedTuple):
    """A schema as the library takes it. `open_keys`: whether some object may have keys beside those that it names;
    `unique`: its lists without equal items; `left_out`: keywords that went."""

    schema: Any
    open_keys: bool
    unique: UniquePlaces | None
    left_out: tuple[str, ...]


def narrowed(schema: Any, strict: bool = True, unsatisfiable: Callable[[Any], bool] = lambda _: False) -> Narrowed:
    """Returns a checked schema in the library's keywords, whose every format is enforced and whose numbers end.
    `unsatisfiable`: asks the library about one in its keywords.

    Raises ConfigError for a keyword that cannot be enforced; where not `strict`, it is left out."""
    dialect = schema.get("$schema") if isinstance(schema, dict) else None
    if isinstance(dialect, str) and not DIALECTS.fullmatch(dialect):
        raise _refused(f'"$schema": {dialect!r:.80}', "a draft from 4 to 2020-12")

    def empty(parts: list[Any]) -> bool:
        return unsatisfiable({"type": "string", "allOf": _narrowed(parts, [])})

    rewriting = Rewriting(schema, strict, empty)
    schema = rewriting.result()
    unique = unique_places(schema, rewriting.draft)
    schema = _narrowed(schema, list(multiples_of(schema)) if joins(schema) else [])
    return Narrowed(schema, _has_open_keys(schema), unique, tuple(rewriting.left_out))


def _has_open_keys(schema: Any) -> bool:
    named = {"properties", "patternProperties"}
    objects = (each for each in objects_of(schema) if not named.isdisjoint(each))
    return any(each.get("additionalProperties") is not False for each in objects)


def _narrowed_value(key: str, value: Any, met: Sequence[Decimal]) -> Any:
    """What a keyword of a schema has after `_narrowed`."""
    if key in BY_NAME and isinstance(value, dict):
        name = _ecma if key == "patternProperties" else str
        return {name(each): _narrowed(inner, met) for each, inner in value.items()}
    if key == "pattern" and isinstance(value, str):
        return _ecma(value)
    return value if key in VALUES else _narrowed(value, met)


def _narrowed(schema: Any, met: Sequence[Decimal]) -> Any:
    """`met`: values of `multipleOf` that may apply to any number."""
    if isinstance(schema, list):
        return [_narrowed(each, met) for each in schema]
    if not isinstance(schema, dict):
        return schema
    out = {
        key: _narrowed_value(key, value, met)
        for key, value in schema.items()
        if key != "uniqueItems" or not isinstance(value, bool)
    }
    types = out.get("type")
    kinds = {each for each in (types if isinstance(types, list) else [types]) if isinstance(each, str)}
    if isinstance(out.get("format"), str):
        _apply_format(out, kinds)
    if kinds & {"integer", "number"} and out.keys().isdisjoint(("enum", "const")):
        _end_numbers(out, met, "number" in kinds)
    return out


def _ecma(pattern: str) -> str:
    """Writes out the white space and the ends of lines of ECMA 262, as JSON Schema has them, where Rust has others."""
    own = {r"\s": f"[{_SPACE}]", r"\S": f"[^{_SPACE}]"} | ({} if _DOT_ALL.search(pattern) else {".": _WITHIN_LINE})
    inside = {r"\s": _SPACE, r"\S": f"[^{_SPACE}]"}

    def written(piece: re.Match[str]) -> str:
        text = piece[0]
        return _ESCAPE.sub(lambda each: inside.get(each[0], each[0]), text) if text[0] == "[" else own.get(text, text)

    return PIECES.sub(written, pattern)


def _apply_format(schema: dict[str, Any], kinds: set[str]) -> None:
    """Replaces the format by keywords that are enforced as they are, where the library does not."""
    name = schema.pop("format")
    if name in PATTERNS:
        _add(schema, pattern=f"^(?:{PATTERNS[name]})$")
    elif name in RANGES and kinds and kinds <= {"integer", "number", "null"}:
        _add(schema, **dict(zip(("minimum", "maximum"), RANGES[name], strict=False)))
    elif not is_annotation(name, schema):
        schema["format"] = name = ALIASES.get(name, name)
        if name in LENGTHS:
            _add(schema, maxLength=LENGTHS[name])


def _add(schema: dict[str, Any], **more: Any) -> None:
    if schema.keys().isdisjoint(more):
        schema |= more
    elif isinstance(others := schema.get("allOf", []), list):  # anything else the library refuses
        schema["allOf"] = [*others, more]


def _end_numbers(schema: dict[str, Any], met: Sequence[Decimal], fraction: bool) -> None:
    """Bounds the digits of numbers where the schema leaves them open, and the library can: with a multiple it counts
    remainders for each number of digits. `fraction`: also those after the point."""
    bounds = [schema[key] for key in BOUNDS if type(schema.get(key)) in (int, float)]
    multiples = [*met, *multiples_of({"multipleOf": schema.get("multipleOf")})]
    if all(abs(bound) < MOST for bound in bounds) and common_multiple(multiples) <= FEW:
        if schema.keys().isdisjoint(("minimum", "exclusiveMinimum")):
            schema["minimum"] = -MOST
        if schema.keys().isdisjoint(("maximum", "exclusiveMaximum")):
            schema["maximum"] = MOST
    if fraction and not multiples and all(units_of(Decimal(repr(bound)))[1] <= DECIMALS for bound in bounds):
        schema["multipleOf"] = float(f"1e-{DECIMALS}")


def _refused(found: str, expected: str) -> ConfigError:
    return ConfigError(f"{found} in a JSON schema", expected, "correct it, or check it after the answer")
