"""Writes the grammar of calls in a template's own form: rules in the grammar library's Lark, with the schemas that they
name. `tests/serve/api/test_call_forms.py` covers this file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

from streamspec.errors import ConfigError
from streamspec.prompt.thought_tags import ThoughtTags
from streamspec.runtime import Grammar
from streamspec.schemas.formats import IN_TEXT, is_annotation
from streamspec.schemas.narrowing import ecma
from streamspec.schemas.schema_logic import TYPES
from streamspec.schemas.text_patterns import InexpressibleError, whole, without_look_ahead
from streamspec.serve.tools.call_arguments import logic_of
from streamspec.serve.tools.call_form import ID, CallForm, Quoted, Tagged

Schema = Mapping[str, Any]
OF_TEXT = {"minLength", "maxLength", "pattern", "format"}
OF_NUMBER = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
CHOICES = {"allOf", "anyOf", "oneOf"}
SIMPLE = {"type", "enum", "const"} | OF_TEXT | OF_NUMBER | CHOICES  # hold beside each other, whichever schema has them
SHAPE = {"type", "properties", "required", "additionalProperties"}  # of objects that these rules write themselves
LIST = {"type", "items", "minItems", "maxItems"}
CONSTRAINTS = SIMPLE | SHAPE | LIST | {"$ref", "$dynamicRef", "$recursiveRef", "not", "if", "propertyNames"}
CONSTRAINTS |= {"patternProperties", "minProperties", "maxProperties", "dependentRequired", "dependentSchemas"}
CONSTRAINTS |= {"dependencies", "unevaluatedProperties", "unevaluatedItems", "prefixItems", "additionalItems"}
CONSTRAINTS |= {"contains", "uniqueItems"}
ELSE = ("a pattern without look-around, or with it at its beginning", "leave it out")
MOST_LEVELS, MOST_CHOICES = 20, 1000  # of choices within each other, and of all for a value
MOST_WORDS = 8  # messages of words before a call


class NoValueError(ConfigError):
    """A schema that no value satisfies."""


class CallRules(NamedTuple):
    """Rules of calls, and the schemas that they name. `lenient`: names of those of which a keyword may be left out;
    `left_out`: keywords that went already, by their path."""

    text: str
    schemas: dict[str, Any]
    lenient: list[str]
    left_out: list[str]


def rules_of(
    form: CallForm,
    parameters: Mapping[str, Schema],
    most: int,
    lenient: Collection[str] = (),
    checking: bool = False,
) -> CallRules:
    """Returns the rules `calls`, up to `most` calls of these functions, and `rest`, the same without the form's
    trigger; with the schemas they name. Of answers in messages, `rest` are calls or words, which `content` ends, after
    other words. `checking`: ask the library about each pattern, to name the parameter. Raises ConfigError for what this
    form cannot enforce, but for keywords in the parameters of `lenient` functions, which are left out."""
    made = _Rules(form, lenient, checking)
    try:
        return CallRules(_all_rules(made, form, parameters, most), made.schemas, made.lenient, made.left_out)
    except RecursionError:
        raise ConfigError("parameters of a tool that nest too deep", "fewer levels", "simplify them") from None


def _all_rules(made: _Rules, form: CallForm, parameters: Mapping[str, Schema], most: int) -> str:
    if form.messages is not None:
        return _in_messages(made, form, form.messages, parameters)
    middles = " | ".join(made.literal(middle) for _, middle in form.ways)
    ones = [f"{made.literal(name)} middle {made.arguments(name, schema)} id" for name, schema in parameters.items()]
    more = "" if form.between is None or most < 2 else f" ({made.literal(form.between)} one){{0,{most - 1}}}"
    after = f"one{more} {made.literal(form.suffix)}"
    rest = form.prefix.partition(form.trigger)[2] if form.trigger else form.prefix
    lines = [
        f"calls: {made.literal(form.prefix.lstrip())} {after}",
        f"rest: {made.literal(rest)} {after}",
        "one: " + " | ".join(ones),
        f"middle: {middles}",
        f"id: {made.literal(form.id_member)}",
        *made.lines,
    ]
    return "\n".join(lines) + "\n"


def _in_messages(made: _Rules, form: CallForm, tags: ThoughtTags, parameters: Mapping[str, Schema]) -> str:
    arguments = {name: made.arguments(name, schema) for name, schema in parameters.items()}
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

    def __init__(self, form: CallForm, lenient: Collection[str], checking: bool) -> None:
        self.lines: list[str] = []
        self.schemas: dict[str, Any] = {}
        self.lenient: list[str] = []
        self.left_out: list[str] = []
        self._lenient, self._loose = lenient, False  # functions, and whether the one whose rule is written is of them
        self._style, self._specials, self._checking = form.style, dict(form.specials), checking
        self._root: Schema = {}
        self._logic = logic_of({})
        self._known: dict[tuple[Any, ...], str] = {}  # rules of objects and lists, by their properties or items
        self._name = ""  # of the parameter whose rule is written
        self._free = ""  # the rule of any arguments, once there is one

    def literal(self, text: str) -> str:
        """Returns a text of the template, with its special tokens as themselves; a call's id is any."""
        marks = [re.escape(mark) for mark in sorted((*self._specials, ID), key=len, reverse=True)]
        pieces = re.split(f"({'|'.join(marks)})", text)
        written = [
            f"<[{self._specials[piece]}]>"
            if piece in self._specials
            else "/[a-zA-Z0-9]{9}/"
            if piece == ID
            else json.dumps(piece).replace("<[", "\\u003c[")  # no special token of the rules
            for piece in pieces
            if piece
        ]
        return " ".join(written) or '""'

    def arguments(self, function: str, schema: Schema) -> str:
        """Returns the rule of a function's arguments."""
        self._root, self._logic, self._known = schema, logic_of(schema), {}
        self._loose = function in self._lenient
        if "object" not in self._logic.kinds(schema):
            raise ConfigError("parameters of a tool that are no object", '"type": "object"', "correct them")
        if self._style is None:
            return self._json(schema)
        schema = self._resolved({key: value for key, value in schema.items() if key != "type"})
        wrong = (schema.keys() & CONSTRAINTS) - SHAPE
        if wrong and self._loose:
            schema = self._without(schema, wrong, "#")
        elif wrong:
            raise ConfigError(f"{min(wrong)} in the parameters of a tool", "an object with properties", "take it out")
        if schema.keys().isdisjoint(("properties", "required")) and schema.get("additionalProperties", True) in (
            True,
            {},
        ):
            self._free = self._free or (self._any_tagged() if isinstance(self._style, Tagged) else self._any_quoted())
            return self._free
        if isinstance(self._style, Quoted):
            return self._object(schema)
        parts = []
        for name, value, needed in self._members(schema, self._value):
            _check_name(name, not set("<>\n") & set(name) and name.strip() == name)
            begin = self.literal(self._style.begin + name + self._style.colon)
            parts.append(f"({begin} {value})" + ("" if needed else "?"))
        return self._rule(" ".join([*parts, self.literal(self._style.close)]))

    def _without(self, schema: Schema, keys: Collection[str], path: str = "") -> dict[str, Any]:
        """Leaves keywords out of a schema at `path`, "" for the parameter whose rule is written."""
        where = path or f"#/properties/{self._name}"
        self.left_out += [f"{where}/{key}" for key in sorted(keys)]
        return {key: value for key, value in schema.items() if key not in keys}

    def _any_tagged(self) -> str:
        """Returns the rule of arguments of any names, each a text up to its end tag."""
        style = self._style
        assert isinstance(style, Tagged)
        name = f"/[^<>\\n{_slashed(re.escape(style.colon[0]))}]+/"
        one = f"{self.literal(style.begin)} {name} {self.literal(style.colon)} {self._ended({}, style.end)}"
        return self._rule(f"({one})* {self.literal(style.close)}")

    def _members(self, schema: Schema, rule: Callable[[Any], str]) -> Iterator[tuple[str, str, bool]]:
        """Yields the name of each property, the rule of its value, and whether it has to be there."""
        properties, required = schema.get("properties", {}), schema.get("required") or ()
        others = {name: schema.get("additionalProperties", True) for name in required if name not in properties}
        for name, inner in (properties | others).items():
            self._name = name
            try:
                yield name, rule(inner), name in required
            except NoValueError:
                if name in required:
                    raise

    def _rule(self, body: str) -> str:
        name = f"r{len(self.lines)}"
        self.lines.append(f"{name}: {body}")
        return name

    def _json(self, schema: Any) -> str:
        name = f"json{len(self.schemas)}"
        kept = {key: self._root[key] for key in ("$defs", "definitions") if key in self._root}
        self.schemas[name] = {**kept, **schema} if isinstance(schema, Mapping) else schema
        self.lenient += [name] if self._loose else []
        return name

    def _resolved(self, schema: Any) -> Any:
        """Returns what a `$ref` names, with what stands beside it; the schema itself where they cannot be joined."""
        try:
            named = self._logic.resolved(schema)
        except InexpressibleError as error:
            raise ConfigError(f"{error} in the parameters of a tool", "one in their $defs", "correct it") from None
        if named is schema or not schema.keys() & CONSTRAINTS - {"$ref"}:
            return named
        joined = self._joined([named, {key: value for key, value in schema.items() if key != "$ref"}])
        return schema if joined is None else joined

    def _alternatives(self, schema: Any, level: int = 0) -> list[Schema]:
        """Returns the alternatives of a schema; one that says nothing is a text."""
        schema = self._resolved(schema)
        if schema is False:
            return []
        if level > MOST_LEVELS:
            raise ConfigError(f"choices of a tool within {level} others", f"at most {MOST_LEVELS}", "simplify them")
        if schema is True or not schema.keys() & CONSTRAINTS:
            return [{"type": "string"}]
        for key in CHOICES & schema.keys():
            rest = {name: value for name, value in schema.items() if name != key}
            ways = [[rest, *schema[key]]] if key == "allOf" else [[rest, one] for one in schema[key]]
            joined = [self._joined(way) for way in ways]
            if None in joined:
                return [schema]
            if key != "oneOf" or all(self._logic.disjoint(*pair) for pair in combinations(joined, 2)):
                found = [one for each in joined for one in self._alternatives(each, level + 1)]
                if len(found) > MOST_CHOICES:
                    count = f"{len(found)} choices for a value in a tool"
                    raise ConfigError(count, f"at most {MOST_CHOICES}", "simplify them")
                return found
        return [schema]

    def _joined(self, schemas: Sequence[Any]) -> Any:
        """Returns a schema that says what all of these do; None where that takes more than to list their keywords."""
        meant = [self._resolved(one) for one in schemas]
        if False in meant:
            return False
        said = [one for one in meant if one is not True and one.keys() & CONSTRAINTS]
        if len(said) < 2:
            return said[0] if said else True
        joined: dict[str, Any] = {}
        for one in said:
            told = {key: value for key, value in one.items() if key in CONSTRAINTS}
            if told.keys() - SIMPLE or any(joined.get(key, value) != value for key, value in told.items()):
                return None
            joined |= told
        return joined

    def _split(self, schema: Any) -> tuple[list[Schema], list[Any]]:
        """Returns the alternatives of a schema: those of texts, and others."""
        texts, others = list[Schema](), list[Any]()
        for one in self._alternatives(schema):
            kinds = self._logic.kinds(one)
            told = one.keys() & CONSTRAINTS
            if "string" in kinds and (told & {"type", "$ref"} or told <= OF_TEXT | {"enum", "const"}):
                texts += self._texts(one)
            kinds -= {"string", "integer"} if "number" in kinds else {"string"}
            rest = [kind for kind in TYPES if kind in kinds]
            others += [{**one, "type": rest if rest[1:] else rest[0]}] if rest else []
        if not (texts or others):
            raise NoValueError("a value in the parameters of a tool that nothing can be", "one of some", "correct it")
        return texts, others

    def _texts(self, one: Schema) -> list[Schema]:
        """Returns the alternatives of an alternative that may be a text: one that is given, or a kind of text."""
        listed = [one["const"]] if "const" in one else one.get("enum")
        said = {key for key in one.keys() & OF_TEXT if key != "format" or not is_annotation(one[key], one)}
        wrong = one.keys() & (CHOICES | {"not", "if", "$ref", "$dynamicRef", "$recursiveRef"})
        wrong |= said & {"pattern", "format"} if isinstance(listed, list) else set()
        if wrong and self._loose:
            one, said = self._without(one, wrong), said - wrong
        elif wrong:
            raise ConfigError(f"{min(wrong)} of a text in a tool of this template", "another keyword", "leave it out")
        if not isinstance(listed, list):
            return [{key: one[key] for key in said}]
        least, most = one.get("minLength", 0), one.get("maxLength")
        texts = [value for value in listed if isinstance(value, str) and self._end.strip() not in value]
        return [{"const": text} for text in texts if least <= len(text) and (most is None or len(text) <= most)]

    @property
    def _end(self) -> str:
        """What a text ends with."""
        assert self._style is not None
        return self._style.end if isinstance(self._style, Tagged) else self._style.quote

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
        mark = end.rstrip()
        last, tag = (_slashed(re.escape(each).replace("\\\n", "\n")) for each in (mark, mark.lstrip()))
        name = self._terminal(f"{self._text(text, last)} & ~/(?s:.*){tag}(?s:.+)/")
        return f"{name} {self.literal(end[len(mark) :])}"

    def _terminal(self, body: str) -> str:
        name = f"T{len(self.lines)}"
        self.lines.append(f"{name}: {body}")
        return name

    def _text(self, text: Schema, last: str = "") -> str:
        """Returns the terminal of a text and an expression `last`."""
        try:
            patterns = _patterns(text)
            for each in patterns if "pattern" in text and (self._checking or self._loose) else ():
                Grammar.regex(each)
            return " & ".join(f"/{_slashed(each)}{last}/" for each in patterns)
        except (ConfigError, InexpressibleError) as error:
            if self._loose:
                bounds = text.keys() & {"minLength", "maxLength"}
                wrong = {"format"} if "format" in text else bounds or {"pattern"}
                return self._text(self._without(text, wrong), last)
            told = (error.found, error.expected, error.fix) if isinstance(error, ConfigError) else (str(error),)
            raise ConfigError(f"in the parameter {self._name!r:.80}, {told[0]}", *(told[1:] or ELSE)) from None

    # ---- arguments with quotes of their own

    def _quoted(self, schema: Any) -> str:
        assert isinstance(self._style, Quoted)
        quote = self._style.quote
        texts, others = self._split(schema)
        ways = []
        for text in texts:
            if "const" in text:
                ways.append(self.literal(quote + text["const"] + quote))
            elif quote in self._specials:
                ways.append(f"{self.literal(quote)} {self._terminal(self._text(text))} {self.literal(quote)}")
            else:
                ways.append(f"{self.literal(quote)} {self._ended(text, quote)}")
        for other in others:
            kinds, said = other["type"], other.keys() & CONSTRAINTS
            for kind in kinds if isinstance(kinds, list) else [kinds]:
                one = {**other, "type": kind}
                if kind == "object" and other.get("properties") and said <= SHAPE:
                    ways.append(self._object(one))
                elif kind == "array" and isinstance(other.get("items"), dict) and said <= LIST:
                    ways.append(self._list(one))
                else:
                    ways.append(self._json(one))
        return self._rule(" | ".join(ways))

    def _any_quoted(self) -> str:
        """Returns the rule of an object of any names and values."""
        assert isinstance(self._style, Quoted)
        value, quote = self._rule(""), self.literal(self._style.quote)
        text = f"/(?s:.*)/ {quote}" if self._style.quote in self._specials else self._ended({}, self._style.quote)
        member = self._rule(f'/[^":{{}}\\s]([^":\\n]*[^":\\s])?/ ":" {value}')
        members = self._rule(f'"{{}}" | "{{" {member} ("," {member})* "}}"')
        items = self._rule(f'"[]" | "[" {value} ("," {value})* "]"')
        others = self._json({"type": ["null", "boolean", "number"]})
        self.lines[int(value[1:])] = f"{value}: {quote} {text} | {members} | {items} | {others}"
        return members

    def _list(self, schema: Schema) -> str:
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if most == 0:
            return self._rule('"[]"')
        known = id(schema["items"]), least, most
        if known in self._known:
            return self._known[known]
        self._known[known] = rule = self._rule("")
        item = self._quoted(schema["items"])
        bounds = f"{{{max(0, least - 1)},{'' if most is None else most - 1}}}"
        some = f'{item} ("," {item}){bounds}'
        self.lines[int(rule[1:])] = f'{rule}: "[" {some} "]"' + (' | "[]"' if not least else "")
        return rule

    def _object(self, schema: Schema) -> str:
        known = (id(schema.get("properties")),)
        if known in self._known:
            return self._known[known]
        self._known[known] = rule = self._rule("")
        members = sorted(self._members(schema, self._quoted))
        rest = ['"}"', '"}"']  # after the first members: none was written, some were
        for name, value, needed in reversed(members):
            _check_name(name, not set(':"') & set(name) and name.strip() == name != "" and name[0] != "}")
            rest = [
                self._rule(
                    f"{json.dumps(comma + name + ':')} {value} {rest[1]}" + ("" if needed else f" | {rest[begun]}")
                )
                for begun, comma in enumerate(("", ","))
            ]
        self.lines[int(rule[1:])] = f'{rule}: "{{" {rest[0]}'
        return rule


def _check_name(name: str, right: bool) -> None:
    """Raises ConfigError for a name that calls of this form cannot have."""
    if not right:
        raise ConfigError(f"a parameter {name!r:.80} in a tool of this template", "letters and digits", "rename it")


def _patterns(text: Schema) -> list[str]:
    """Returns regular expressions that all match a text as a whole. Raises ConfigError and InexpressibleError for what
    none says."""
    name, pattern = text.get("format"), text.get("pattern")
    bounded = "minLength" in text or "maxLength" in text
    if name is not None and name not in IN_TEXT:
        raise ConfigError(f"the format {name!r:.80} in a tool of this template", ", ".join(IN_TEXT), "leave it out")
    if (name is not None) + (pattern is not None) + bounded > 1:
        raise ConfigError(
            "two of pattern, format and length of a text in a tool of this template", "one", "leave one out"
        )
    if name is not None:
        return [f"(?:{IN_TEXT[name]})"]
    if pattern is not None:
        return [whole(ecma(each, words=True)) for each in without_look_ahead(pattern)]
    return [f"(?s:.{{{text.get('minLength', 0)},{text.get('maxLength', '')}}})" if bounded else "(?s:.*)"]


def _slashed(pattern: str) -> str:
    return re.sub(r"(\\.)|/", lambda piece: piece[1] or r"\/", pattern, flags=re.DOTALL).replace("\n", "\\n")
