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
from streamspec.schemas.rewriting import Rewriting, visited
from streamspec.schemas.schema_checks import (
    BOUNDS,
    PIECES,
    common_multiple,
    joins,
    multiples_of,
    objects_of,
    units_of,
)
from streamspec.schemas.schema_logic import BY_NAME, VALUES
from streamspec.schemas.text_patterns import InexpressibleError
from streamspec.schemas.unique_items import UniquePlaces, unique_places

DECIMALS = 10  # of a number without `multipleOf`; more the library cannot count
FEW = 100  # units of `multipleOf` beside which digits are bounded: the library gave up at a thousand
WIDEST = 2**63 - 1  # which the library takes for all whole numbers from there on; of others it takes none
LIMITS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
LOWER, UPPER = LIMITS[::2], LIMITS[1::2]
DIALECTS = re.compile(r"https?://json-schema\.org/(draft-0[467]|draft/20(19-09|20-12))/schema#?")
_SPACE = r"\t\n\x0B\x0C\r\x20\xA0\u1680\u2000-\u200A\u2028\u2029\u202F\u205F\u3000\uFEFF"
_WORDS = {r"\d": "[0-9]", r"\D": "[^0-9]", r"\w": "[0-9A-Za-z_]", r"\W": "[^0-9A-Za-z_]"}
_WITHIN_LINE = r"[^\n\r\u2028\u2029]"
_ESCAPE, _DOT_ALL = re.compile(r"\\.", re.DOTALL), re.compile(r"\(\?[a-zA-Z]*s")


class Narrowed(NamedTuple):
    """A schema as the library takes it. `open_keys`: whether some object may have keys beside those that it names;
    `unique`: its lists without equal items; `left_out`: keywords that went."""

    schema: Any
    open_keys: bool
    unique: UniquePlaces | None
    left_out: tuple[str, ...]

    def plain(self) -> Narrowed:
        """Returns the same, of whose other keys a pattern admits those without needless escapes, so that nothing else
        has to; itself where it has other patterns of keys, which the library does not join. Keys that have a schema
        beside the named ones are left out."""
        if any("patternProperties" in each for each in objects_of(self.schema)):
            return self
        return self._replace(schema=_plain(self.schema), open_keys=False)


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
    unique, left_out = None, rewriting.left_out
    if any(each.get("uniqueItems") is True for each in objects_of(schema)):
        try:
            unique = unique_places(schema, rewriting.draft)
        except InexpressibleError as error:
            if strict:
                raise _refused(f"uniqueItems beside {error}", "references that lead to schemas here") from None
            left_out = [*left_out, "uniqueItems"]
    schema = _narrowed(schema, list(multiples_of(schema)) if joins(schema) else [])
    return Narrowed(schema, _has_open_keys(schema), unique, tuple(left_out))


def _has_open_keys(schema: Any) -> bool:
    named = {"properties", "patternProperties"}
    objects = (each for each in objects_of(schema) if not named.isdisjoint(each))
    return any(each.get("additionalProperties") is not False for each in objects)


def _plain(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_plain(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    out = {key: visited(key, value, _plain) for key, value in schema.items()}
    others, named, required = out.get("additionalProperties", True), out.get("properties"), out.get("required")
    if others is False or not isinstance(named, dict):
        return out
    if others in (True, {}):
        return out | {"patternProperties": {"(?s:.*)": True}, "additionalProperties": False}
    needed = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
    properties = named | {name: others for name in needed if name not in named}
    return out | {"properties": properties, "additionalProperties": False}


def _narrowed_value(key: str, value: Any, met: Sequence[Decimal]) -> Any:
    """What a keyword of a schema has after `_narrowed`."""
    if key in BY_NAME and isinstance(value, dict):
        name = ecma if key == "patternProperties" else str
        return {name(each): _narrowed(inner, met) for each, inner in value.items()}
    if key == "pattern" and isinstance(value, str):
        return ecma(value)
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
    if (not kinds or kinds & {"integer", "number"}) and out.keys().isdisjoint(("enum", "const")):
        fraction = not kinds or "number" in kinds
        _bring_within_range(out, fraction)
        if fraction:
            _close_bounds(out)
        if kinds:
            _end_numbers(out, met, fraction)
    return out


def ecma(pattern: str, words: bool = False) -> str:
    """Writes out the white space and the ends of lines of ECMA 262, as JSON Schema has them, where Rust has others.
    `words`: digits and letters as well, which the library has so in schemas alone."""
    own = {r"\s": f"[{_SPACE}]", r"\S": f"[^{_SPACE}]"} | ({} if _DOT_ALL.search(pattern) else {".": _WITHIN_LINE})
    inside = {r"\s": _SPACE, r"\S": f"[^{_SPACE}]"}
    if words:
        own, inside = own | _WORDS, inside | _WORDS

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


def _said(schema: dict[str, Any], keys: Sequence[str]) -> list[float]:
    """Returns the numbers that a schema has for these keywords."""
    return [schema[key] for key in keys if type(schema.get(key)) in (int, float)]


def _bring_within_range(schema: dict[str, Any], fraction: bool) -> None:
    """Lowers a maximum, and raises a minimum, that the library cannot count, to one that it can. `fraction`: of numbers
    that may have a fraction. Raises ConfigError where no number is left."""
    moved = {key: schema[key] for key in LIMITS if type(schema.get(key)) in (int, float) and abs(schema[key]) >= WIDEST}
    for key, bound in moved.items():
        schema[key] = -MOST if bound < 0 else MOST if fraction else WIDEST
    least, most = _said(schema, LOWER), _said(schema, UPPER)
    wrong = [key for key, bound in moved.items() if (bound > 0) == (key in LOWER)]
    if moved and (wrong or max(least, default=-MOST) > min(most, default=MOST)):
        key = min(wrong or moved)
        raise _refused(f"{key} {moved[key]!r:.40}", "bounds of at most 15 digits, or all below 2^63")


def _close_bounds(schema: dict[str, Any]) -> None:
    """Says a whole bound that is excluded as the next number that is not, of `DECIMALS` digits after the point or as
    few as a double holds: the library excludes none that is less than 1 away from the other bound."""
    for inclusive, exclusive, sign, inner in zip(("minimum", "maximum"), LIMITS[2:], (1, -1), (max, min), strict=True):
        said, beside = schema.get(exclusive), schema.get(inclusive)
        bound: Any = beside if said is True else said  # True: of draft 4
        if type(bound) not in (int, float) or bound != int(bound) or abs(bound) >= 2**53:
            continue
        if inclusive in schema and not _said(schema, [inclusive]):  # what is no number the library refuses
            continue
        steps = (int(bound) + sign * Decimal(10) ** -digits for digits in range(DECIMALS, -1, -1))
        moved = next(float(step) for step in steps if Decimal(repr(float(step))) == step)
        schema[inclusive] = inner([moved, *_said(schema, [inclusive])])
        del schema[exclusive]


def _end_numbers(schema: dict[str, Any], met: Sequence[Decimal], fraction: bool) -> None:
    """Bounds the digits of numbers where the schema leaves them open, and the library can: with a multiple it counts
    remainders for each number of digits. `fraction`: also those after the point."""
    bounds = _said(schema, BOUNDS)
    multiples = [*met, *multiples_of({"multipleOf": schema.get("multipleOf")})]
    if common_multiple(multiples) <= FEW:
        least, most = _said(schema, LOWER), _said(schema, UPPER)
        if schema.keys().isdisjoint(LOWER) and all(-MOST < bound <= MOST for bound in most):
            schema["minimum"] = -MOST
        if schema.keys().isdisjoint(UPPER) and all(-MOST <= bound < MOST for bound in least):
            schema["maximum"] = MOST
    if fraction and not multiples and all(units_of(Decimal(repr(bound)))[1] <= DECIMALS for bound in bounds):
        schema["multipleOf"] = float(f"1e-{DECIMALS}")


def _refused(found: str, expected: str) -> ConfigError:
    return ConfigError(f"{found} in a JSON schema", expected, "correct it, or check it after the answer")
