"""Narrows JSON schemas where the grammar library is too lax: formats that it half enforces, numbers without an end, and
keywords that it takes for comments. tests/runtime/text/test_grammar_schema.py compares the result with `jsonschema`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from streamspec.errors import ConfigError
from streamspec.runtime.text.grammar_checks import (
    BOUNDS,
    PIECES,
    common_multiple,
    joins,
    multiples_of,
    objects_of,
    units_of,
)

MOST = 10**15 - 1  # of a number without bounds of its own: as many digits as a double holds
DECIMALS = 10  # of a number without `multipleOf`; more the library cannot count
FEW = 100  # units of `multipleOf` beside which digits are bounded: the library gave up at a thousand
DIALECTS = re.compile(r"https?://json-schema\.org/(draft-0[467]|draft/20(19-09|20-12))/schema#?")
BY_NAME = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}  # hold schemas by name
VALUES = {"enum", "const", "default", "examples"}  # hold no schemas

_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_FOURS = "(?:0[48]|[2468][048]|[13579][26])"
_LONG = "(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
_DAY = f"(?:{_LONG}|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
_DATE = f"(?:{_YEAR}-{_DAY}|(?:[0-9]{{2}}{_FOURS}|{_FOURS}00)-02-29)"
_HOUR = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOUR}:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:Z|[+-]{_HOUR})"
_COUNT = "[0-9]{1,9}"
_TIME_OF = f"T(?:{_COUNT}H(?:{_COUNT}M(?:{_COUNT}S)?)?|{_COUNT}M(?:{_COUNT}S)?|{_COUNT}S)"
_DATE_OF = f"(?:{_COUNT}Y(?:{_COUNT}M(?:{_COUNT}D)?)?|{_COUNT}M(?:{_COUNT}D)?|{_COUNT}D)"
_SPACE = r"\t\n\x0B\x0C\r\x20\xA0\u1680\u2000-\u200A\u2028\u2029\u202F\u205F\u3000\uFEFF"
_WITHIN_LINE = r"[^\n\r\u2028\u2029]"
_ESCAPE, _DOT_ALL = re.compile(r"\\.", re.DOTALL), re.compile(r"\(\?[a-zA-Z]*s")
# RFC 3339 without leap seconds, in upper case and from the year 1 on, which parsers agree on.
PATTERNS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": f"P(?:{_DATE_OF}(?:{_TIME_OF})?|{_TIME_OF}|{_COUNT}W)",
}
LENGTHS = {"email": 254, "hostname": 253}  # characters
ENFORCED = {"ipv4", "ipv6", "uri", "uuid", *LENGTHS}  # by the library
# Formats of numbers, as OpenAPI has them: least and largest.
RANGES: dict[str, tuple[int, ...]] = {"int": (-MOST, MOST), "uint": (0, MOST), "float": (), "double": ()}
for _bits in (8, 16, 32):
    RANGES |= {f"int{_bits}": (-(2 ** (_bits - 1)), 2 ** (_bits - 1) - 1), f"uint{_bits}": (0, 2**_bits - 1)}
RANGES |= {"int64": RANGES["int"], "uint64": RANGES["uint"]}


def narrowed(schema: Any) -> Any:
    """Returns a checked schema whose every format is enforced and whose numbers end. Raises ConfigError for a format or
    keyword that cannot be enforced."""
    dialect = schema.get("$schema") if isinstance(schema, dict) else None
    if isinstance(dialect, str) and not DIALECTS.fullmatch(dialect):
        raise _refused(f'"$schema": {dialect!r:.80}', "a draft from 4 to 2020-12")
    return _narrowed(schema, list(multiples_of(schema)) if joins(schema) else [])


def has_open_keys(schema: Any) -> bool:
    """Tells whether some object may have keys beside those that the schema names."""
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
    out = {key: _narrowed_value(key, value, met) for key, value in schema.items()}
    least, required = out.get("minProperties"), out.get("required")
    if isinstance(least, int) and least > max(1, len(required) if isinstance(required, list) else 0):
        raise _refused(f"minProperties {least}", "as many required properties, as keys may be written twice")
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
    name = schema["format"]
    if name in PATTERNS:
        _add(schema, pattern=f"^(?:{PATTERNS[name]})$")
    elif name in RANGES and kinds and kinds <= {"integer", "number", "null"}:
        _add(schema, **dict(zip(("minimum", "maximum"), RANGES[name], strict=False)))
    elif name in ENFORCED:
        if name in LENGTHS:
            _add(schema, maxLength=LENGTHS[name])
        return
    else:
        texts, numbers = ", ".join(sorted(ENFORCED.union(PATTERNS))), ", ".join(sorted(RANGES))
        raise _refused(f"the format {name!r:.80}", f"one of {texts}; with the type integer or number of {numbers}")
    del schema["format"]


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
