"""Reads the arguments of a call as they are written in an answer, and gives them as JSON.
`tests/serve/api/test_tool_calls.py` covers this file.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from typing import Any

from streamspec.errors import ConfigError
from streamspec.schemas.schema_logic import TYPES, SchemaLogic
from streamspec.serve.tools.call_form import Quoted, Tagged

COLON = re.compile(r"\s*:\s*")
BLANKS = re.compile(r"\s*")
SURROGATE = re.compile("[\ud800-\udfff]")
BARE = re.compile(r"[^,:{}\[\]\s]+")


def arguments_at(text: str, at: int, style: Tagged | Quoted | None, schema: Any) -> tuple[str, int] | None:
    """Returns the JSON object of the arguments at `text[at]`, as it is written where it is JSON, and where they end;
    None where there are none. `schema`: says which values between tags are no texts."""
    try:
        if style is None:
            at = _after_blanks(text, at)
            value, end = STRICT.raw_decode(text, at)
            return (text[at:end], end) if isinstance(value, dict) else None
        if isinstance(style, Tagged):
            return _tagged(text, at, style, schema)
        value, end = _quoted(text, at, style.quote)
        return _dumped(value), end
    except (ValueError, RecursionError):
        return None


def _tagged(text: str, at: int, style: Tagged, schema: Any) -> tuple[str, int]:
    first, last = style.colon.endswith("\n"), style.end.startswith("\n")  # other line feeds are the value's
    colon = re.escape(style.colon.rstrip()) + r"\n?" * first
    begin = re.compile(spaced(style.begin) + r"(?P<key>[^\n<>]*?)" + colon)
    close, end = re.compile(spaced(style.close)), style.end.strip()
    found = dict[str, str]()
    while mark := begin.match(text, at):
        until = text.index(end, _json_end(text, mark.end(), end))
        value = text[mark.end() : until].removesuffix("\n" * last)
        found[mark["key"].strip()] = _valued(value, mark["key"].strip(), schema)
        at = _after_blanks(text, until + len(end))
    if (over := close.match(text, at)) is None:
        raise ValueError("arguments without an end")
    return "{" + ", ".join(f"{_dumped(key)}: {value}" for key, value in found.items()) + "}", over.end()


def _json_end(text: str, at: int, end: str) -> int:
    """Returns where the JSON at `text[at]` ends, whose texts may have the tag `end`, if that follows it; else `at`."""
    try:
        _, after = STRICT.raw_decode(text, _after_blanks(text, at))
    except (ValueError, RecursionError):
        return at
    return after if text.startswith(end, _after_blanks(text, after)) else at


def _valued(text: str, key: str, schema: Any) -> str:
    """Returns the JSON of the value that a text between tags stands for: a text, where its schema admits texts alone,
    or lists this one."""
    logic = logic_of(schema)
    try:
        inner: Any = {"allOf": logic.of_property(schema, key)}
        kinds, listed = logic.kinds(inner), logic.values(inner) or ()
    except ConfigError:  # references that double; nothing was to keep to them
        logic, inner, kinds, listed = logic_of(True), True, set(TYPES), ()
    if kinds == {"string"} or text in listed:
        return _dumped(text)
    for read in (STRICT.decode, ast.literal_eval):
        try:
            value = read(text.strip())
            written = text.strip() if read == STRICT.decode else _dumped(value)
            value = STRICT.decode(written)
            if not isinstance(value, str) and ("string" not in kinds or not logic.rejects(inner, value)):
                return written
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError, ConfigError):
            continue
    return _dumped(text)


def logic_of(root: Any) -> SchemaLogic:
    """Returns what reasons about parts of the parameters `root`."""
    return SchemaLogic(root, 2020, lambda parts: False)


def _dumped(value: Any) -> str:
    """Returns the JSON of a value, with halves of surrogate pairs, which no text can have, as they are escaped."""
    written = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return json.dumps(value) if SURROGATE.search(written) else written


def _quoted(text: str, at: int, quote: str) -> tuple[Any, int]:
    """Reads a value of `Quoted`."""
    at = _after_blanks(text, at)
    if text.startswith(quote, at):
        end = text.index(quote, at + len(quote))
        return text[at + len(quote) : end], end + len(quote)
    if text[at : at + 1] not in ("{", "["):
        if text[at : at + 1] == '"':
            return STRICT.raw_decode(text, at)
        if (bare := BARE.match(text, at)) is None:
            raise ValueError("no value")
        return STRICT.decode({"None": "null", "True": "true", "False": "false"}.get(bare[0], bare[0])), bare.end()
    closing, members, items = "}" if text[at] == "{" else "]", dict[str, Any](), list[Any]()
    at = _after_blanks(text, at + 1)
    while text[at : at + 1] != closing:
        if closing == "}":
            key, at = (
                _quoted(text, at, quote)
                if text.startswith((quote, '"'), at)
                else (text[at : (end := text.index(":", at))].strip(), end)
            )
            colon = COLON.match(text, at)
            if colon is None:
                raise ValueError("no colon")
            members[str(key)], at = _quoted(text, colon.end(), quote)
        else:
            item, at = _quoted(text, at, quote)
            items.append(item)
        at = _after_blanks(text, at)
        if text[at : at + 1] == ",":
            at = _after_blanks(text, at + 1)
        elif text[at : at + 1] != closing:
            raise ValueError("no end")
    return (members if closing == "}" else items), at + 1


def _after_blanks(text: str, at: int) -> int:
    blanks = BLANKS.match(text, at)
    assert blanks is not None
    return blanks.end()


def spaced(text: str) -> str:
    """Returns an expression of a text, with any blanks where it has some or may have them: between two tags."""
    return r"\s*".join(re.escape(piece) for piece in re.split(r"\s+|(?<=[\]>])(?=[\[<{])", text))


def members_at(text: str, at: int) -> tuple[dict[str, tuple[Any, str]], int] | None:
    """Returns the members of the JSON object at `text[at]`, each as a value and as it is written, and where the object
    ends; None for what is no such object, or has a key twice."""
    members = dict[str, tuple[Any, str]]()
    try:
        _, end = STRICT.raw_decode(text, at)
        while (quote := text.find('"', at, end)) >= 0:
            key, at = STRICT.raw_decode(text, quote)
            colon = COLON.match(text, at)
            assert colon is not None
            start = colon.end()
            value, at = STRICT.raw_decode(text, start)
            if key in members:
                return None
            members[key] = value, text[start:at]
    except (ValueError, RecursionError):
        return None
    return members, end


def json_of(text: str) -> Any:
    """Returns the value of JSON text, None for any other."""
    try:
        text.encode()  # halves of surrogate pairs are no text
        return STRICT.decode(text)
    except (ValueError, RecursionError):
        return None


def _no_number(text: str) -> Any:
    raise ValueError(text)


def _whole(text: str) -> int | float:
    return int(text) if len(text) < 400 else _finite(text)


def _finite(text: str) -> float:
    return max(-sys.float_info.max, min(sys.float_info.max, float(text)))  # JSON has no others


STRICT = json.JSONDecoder(
    parse_int=_whole, parse_float=_finite, parse_constant=_no_number
)  # NaN is no JSON; numbers of any size are
