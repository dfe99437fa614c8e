"""Writes the grammar of calls in a template's own form: rules in the grammar library's Lark, with the schemas that they
name. `tests/serve/api/test_call_forms.py` covers this file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from streamspec.errors import ConfigError
from streamspec.prompt.thought_tags import ThoughtTags
from streamspec.schemas.formats import PATTERNS
from streamspec.serve.tools.call_arguments import resolved
from streamspec.serve.tools.call_form import ID, CallForm, Quoted, Tagged

Schema = Mapping[str, Any]
TEXT_FORMATS = PATTERNS | {
    "uri": "[a-zA-Z][a-zA-Z0-9+.-]*:[^ \\n<>]*",
    "email": "[a-zA-Z0-9._%+-]{1,64}@[a-zA-Z0-9-]{1,63}(?:\\.[a-zA-Z0-9-]{1,63}){1,3}",
}
SHAPE = {"type", "properties", "required", "additionalProperties", "$defs", "definitions", "description", "title"}
SHAPE |= {"$schema", "$id", "default", "examples", "propertyOrdering"}
MOST_WORDS = 8  # messages of words before a call
OF_TEXT = {"minLength", "maxLength", "pattern", "format"}


def rules_of(form: CallForm, parameters: Mapping[str, Schema], most: int) -> tuple[str, dict[str, Any]]:
    """Returns the rules `calls`, up to `most` calls of these functions, and `rest`, the same without the form's
    trigger; with the schemas they name. Of answers in messages, `rest` are calls or words, which `content` ends, after
    other words. Raises ConfigError for what this form cannot enforce."""
    made = _Rules(form)
    if form.messages is not None:
        return _in_messages(made, form, form.messages, parameters), made.schemas
    middles = " | ".join(made.literal(middle) for _, middle in form.ways)
    ones = [f"{made.literal(name)} middle {made.arguments(schema)}" for name, schema in parameters.items()]
    more = "" if form.between is None or most < 2 else f" ({made.literal(form.between)} one){{0,{most - 1}}}"
    after = f"one{more} {made.literal(form.suffix)}"
    rest = form.prefix.partition(form.trigger)[2] if form.trigger else form.prefix
    lines = [
        f"calls: {made.literal(form.prefix.lstrip())} {after}",
        f"rest: {made.literal(rest)} {after}",
        "one: " + " | ".join(ones),
        f"middle: {middles}",
        *made.lines,
    ]
    return "\n".join(lines) + "\n", made.schemas


def _in_messages(made: _Rules, form: CallForm, tags: ThoughtTags, parameters: Mapping[str, Schema]) -> str:
    arguments = {name: made.arguments(schema) for name, schema in parameters.items()}
    prefixes = dict.fromkeys(prefix for prefix, _ in form.ways)
    middles = [[middle for before, middle in form.ways if before == prefix] for prefix in prefixes]
    final, *others = map(made.literal, tags.heads)
    lines = [
        "calls: " + " | ".join(f"{made.literal(prefix)} one{i}" for i, prefix in enumerate(prefixes)),
        *(
            f"one{i}: " + " | ".join(f"{made.literal(name + m)} {arguments[name]}" for name in parameters for m in each)
            for i, each in enumerate(middles)
        ),
        f"rest: said{{0,{MOST_WORDS}}} (calls | {final} content)",
        f"said: ({' | '.join(others)}) words {made.literal(tags.end)}",
        "words: /(?s:.*)/",
        *made.lines,
    ]
    return "\n".join(lines) + "\n"


class _Rules:
    """Rules so far, by the number of the next."""

    def __init__(self, form: CallForm) -> None:
        self.lines: list[str] = []
        self.schemas: dict[str, Any] = {}
        self._style, self._specials = form.style, dict(form.specials)
        self._root: Schema = {}
        self._known: dict[str, str] = {}  # rules of definitions

    def literal(self, text: str) -> str:
        """Returns a text of the template, with its special tokens as themselves; a call's id is any."""
        marks = [re.escape(mark) for mark in sorted((*self._specials, ID), key=len, reverse=True)]
        pieces = re.split(f"({'|'.join(marks)})", text)
        written = [
            f"<[{self._specials[piece]}]>"
            if piece in self._specials
            else "/[a-zA-Z0-9]{9}/"
            if piece == ID
            else json.dumps(piece)
            for piece in pieces
            if piece
        ]
        return " ".join(written) or '""'

    def arguments(self, schema: Schema) -> str:
        """Returns the rule of a function's arguments."""
        self._root, self._known = schema, {}
        if self._style is None:
            return self._json(schema)
        schema = resolved(schema, self._root)
        if wrong := schema.keys() - SHAPE:
            raise ConfigError(f"{min(wrong)} in the parameters of a tool", "an object with properties", "take it out")
        if isinstance(self._style, Quoted):
            return self._object(schema)
        required, properties = schema.get("required", ()), schema.get("properties", {})
        parts = [
            f"({self.literal(self._style.begin + name + self._style.colon)} {self._value(inner)})"
            + ("" if name in required else "?")
            for name, inner in properties.items()
        ]
        return self._rule(" ".join([*parts, self.literal(self._style.close)]))

    def _rule(self, body: str, kind: str = "") -> str:
        name = f"r{len(self.lines)}"
        self.lines.append(f"{name}{kind}: {body}")
        return name

    def _json(self, schema: Any) -> str:
        name = f"json{len(self.schemas)}"
        kept = {key: self._root[key] for key in ("$defs", "definitions") if key in self._root}
        self.schemas[name] = {**kept, **schema} if isinstance(schema, Mapping) else schema
        return name

    def _alternatives(self, schema: Any) -> list[Schema]:
        """Returns the alternatives of a schema; one that says nothing is a text."""
        schema = resolved(schema, self._root)
        if not isinstance(schema, Mapping) or not schema.keys() - {"description", "title", "default", "examples"}:
            return [{"type": "string"}]
        for key in ("anyOf", "oneOf", "allOf"):
            if isinstance(inner := schema.get(key), list) and (key != "allOf" or len(inner) == 1):
                return [one for each in inner for one in self._alternatives(each)]
        return [schema]

    def _split(self, schema: Any) -> tuple[list[Schema], list[Any]]:
        """Returns the alternatives of a schema: those of texts, and others."""
        texts, others = list[Schema](), list[Any]()
        for one in self._alternatives(schema):
            listed, kinds = [one["const"]] if "const" in one else one.get("enum"), one.get("type")
            if isinstance(listed, list):
                texts += [{"const": value} for value in listed if isinstance(value, str)]
                values = [value for value in listed if not isinstance(value, str)]
                others += [{"enum": values}] if values else []
            else:
                names = kinds if isinstance(kinds, list) else [kinds]
                texts += [{key: one[key] for key in OF_TEXT & one.keys()}] * ("string" in names)
                rest = [name for name in names if name != "string"]
                others += [{**one, "type": rest if rest[1:] else rest[0]}] if rest else []
        return texts, others

    def _value(self, schema: Any) -> str:
        """Returns the rule of a value and what ends it."""
        assert isinstance(self._style, Tagged)
        texts, others = self._split(schema)
        end = self._style.end
        ways = [self._ended(text, end) for text in texts]
        ways += [f"{self._json(other)} {self.literal(end)}" for other in others]
        return self._rule(" | ".join(ways))

    def _ended(self, text: Schema, end: str) -> str:
        if "const" in text:
            return self.literal(text["const"] + end)
        last = re.escape(end).replace("\\\n", "\n")
        return self._rule(f"/{_slashed(_pattern(text))}{_slashed(last)}/", "[lazy]")

    # ---- arguments with quotes of their own

    def _quoted(self, schema: Any) -> str:
        assert isinstance(self._style, Quoted)
        quote = self._style.quote
        meant = resolved(schema, self._root)
        if meant is not schema:
            reference = str(schema["$ref"])
            if reference not in self._known:
                self._known[reference] = name = self._rule("")
                self.lines[int(name[1:])] = f"{name}: {self._quoted(meant)}"
            return self._known[reference]
        texts, others = self._split(schema)
        ways = []
        for text in texts:
            if "const" in text:
                ways.append(self.literal(quote + text["const"] + quote))
            elif quote in self._specials:
                ways.append(f"{self.literal(quote)} /{_slashed(_pattern(text))}/ {self.literal(quote)}")
            else:
                ways.append(f"{self.literal(quote)} {self._ended(text, quote)}")
        for other in others:
            kind = other.get("type")
            if kind == "object" and other.get("properties"):
                ways.append(self._object(other))
            elif kind == "array" and "items" in other:
                ways.append(self._list(other))
            else:
                ways.append(self._json(other))
        return self._rule(" | ".join(ways))

    def _list(self, schema: Schema) -> str:
        item, least, most = self._quoted(schema["items"]), schema.get("minItems", 0), schema.get("maxItems")
        if most == 0:
            return self._rule('"[]"')
        bounds = f"{{{max(0, least - 1)},{'' if most is None else most - 1}}}"
        some = f'{item} ("," {item}){bounds}'
        return self._rule(f'"[" {some} "]"' + (' | "[]"' if not least else ""))

    def _object(self, schema: Schema) -> str:
        names = sorted(schema.get("properties", {}))
        values = [self._quoted(schema["properties"][name]) for name in names]
        rest = ['"}"', '"}"']  # after the first members: none was written, some were
        for name, value in zip(reversed(names), reversed(values), strict=True):
            optional = name not in schema.get("required", ())
            rest = [
                self._rule(
                    f"{json.dumps(comma + name + ':')} {value} {rest[1]}" + (f" | {rest[begun]}" if optional else "")
                )
                for begun, comma in enumerate(("", ","))
            ]
        return self._rule(f'"{{" {rest[0]}')


def _pattern(text: Schema) -> str:
    """Returns the regular expression of a text. Raises ConfigError for what none says."""
    name, pattern = text.get("format"), text.get("pattern")
    bounded = "minLength" in text or "maxLength" in text
    if name is not None and name not in TEXT_FORMATS:
        raise ConfigError(
            f"the format {name!r:.80} in a tool of this template", ", ".join(TEXT_FORMATS), "leave it out"
        )
    if (name is not None) + (pattern is not None) + bounded > 1:
        raise ConfigError(
            "two of pattern, format and length of a text in a tool of this template", "one", "leave one out"
        )
    if name is not None:
        return f"(?:{TEXT_FORMATS[name]})"
    if pattern is not None:
        start, end = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith("\\$")
        inner = pattern[start : len(pattern) - end]
        return ("" if start else "(?s:.*)") + f"(?:{inner})" + ("" if end else "(?s:.*)")
    return f"(?s:.{{{text.get('minLength', 0)},{text.get('maxLength', '')}}})" if bounded else "(?s:.*)"


def _slashed(pattern: str) -> str:
    return re.sub(r"(\\.)|/", lambda piece: piece[1] or r"\/", pattern, flags=re.DOTALL).replace("\n", "\\n")
