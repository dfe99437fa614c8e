"""Reads the arguments of a call as they are written in an answer, and gives them as JSON.
`tests/serve/api/test_tool_calls.py` covers this file.
"""

from __future__ import annotations

import ast
import json
import re
from typing import Any

from streamspec.serve.tools.call_form import Quoted, Tagged

COLON = re.compile(r"\s*:\s*")
BLANKS = re.compile(r"\s*")
BARE = re.compile(r"[^,:{}\[\]\s]+")


def arguments_at(text: str, at: int, style: Tagged | Quoted | None, schema: Any) -> tuple[str, int] | None:
    """Returns the JSON object of the arguments at `text[at]`, as it is written where it is JSON, and where they end;
    None where there are none. `schema`: says which values between tags are no texts."""
    try:
        if style is None:
            at = _after_blanks(text, at)
            value, end = STRICT.raw_decode(text, at)
            return (text[at:end], end) if isinstance(value, dict) else None
        value, end = _tagged(text, at, style, schema) if isinstance(style, Tagged) else _quoted(text, at, style.quote)
        return json.dumps(value, ensure_ascii=False), end
    except (ValueError, RecursionError):
        return None


def _tagged(text: str, at: int, style: Tagged, schema: Any) -> tuple[dict[str, Any], int]:
    begin = re.compile(spaced(style.begin) + r"(?P<key>[^\n<>]*?)" + re.escape(style.colon.rstrip()) + r"\n?")
    close, end = re.compile(spaced(style.close)), style.end.strip()
    found = dict[str, Any]()
    while mark := begin.match(text, at):
        until = text.index(end, mark.end())
        value = text[mark.end() : until].removesuffix("\n")
        found[mark["key"].strip()] = _valued(value, mark["key"].strip(), schema)
        at = until + len(end)
    if (over := close.match(text, at)) is None:
        raise ValueError("arguments without an end")
    return found, over.end()


def _valued(text: str, key: str, schema: Any) -> Any:
    """Returns the value that a text between tags stands for: a text, where its schema admits texts alone."""
    kinds = _kinds(schema.get("properties", {}).get(key, {}), schema, 0) if isinstance(schema, dict) else set()
    if kinds == {"string"}:
        return text
    for read in (STRICT.decode, ast.literal_eval):
        try:
            value = read(text.strip())
            json.dumps(value, allow_nan=False)
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            continue
        if not (isinstance(value, str) or (kinds and "string" in kinds and _kind(value) not in kinds)):
            return value
    return text


def _kinds(schema: Any, root: Any, depth: int) -> set[str]:
    """Returns the types that a schema admits; nothing for any."""
    schema = resolved(schema, root)
    if not isinstance(schema, dict) or depth > 20:
        return set()
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(inner := schema.get(key), list):
            every = [_kinds(each, root, depth + 1) for each in inner]
            return set().union(*every) if all(every) else set()
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        return {_kind(value) for value in values}
    kinds = schema.get("type", [])
    return {kinds} if isinstance(kinds, str) else {*kinds}


def resolved(schema: Any, root: Any) -> Any:
    """Returns a schema, or the one within `root` that it refers to; {} for one that is not there."""
    for _ in range(100):
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(reference, str) or not reference.startswith("#"):
            return schema
        schema = root
        for key in filter(None, reference[1:].split("/")):
            schema = schema.get(key, {}) if isinstance(schema, dict) else {}
    return schema


def _kind(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    names = {str: "string", int: "integer", float: "number", list: "array", tuple: "array", dict: "object"}
    return names[type(value)]


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
    return int(text) if len(text) < 400 else float(text)


STRICT = json.JSONDecoder(
    parse_int=_whole, parse_constant=_no_number
)  # NaN is no JSON; whole numbers of any length are
