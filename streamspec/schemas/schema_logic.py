"""Reasons about JSON schemas: whether two have a value in common, and the opposite of one. Both err on the safe side:
what is not proved disjoint may overlap, and the opposite of a schema holds none of its values but may lack others.
tests/schemas/test_schema_logic.py compares it with `jsonschema`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any
from urllib.parse import unquote

from streamspec.errors import ConfigError
from streamspec.schemas.formats import is_annotation
from streamspec.schemas.text_patterns import InexpressibleError, beginning, other_texts, outside

Schema = Any  # an object or a boolean
TYPES = ("null", "boolean", "string", "array", "object", "integer", "number")  # "number": those that are no integers
DEPTH = 12  # of references and alternatives that are followed
OF_TEXTS = ("pattern", "format", "minLength", "maxLength", "const", "enum")
MOST_PAIRS = 20_000  # of schemas that are compared
MOST_STEPS = 300_000  # in all: half a second. References that double would take for ever
NO_CONSTRAINTS = {
    *("$schema", "$id", "id", "$anchor", "$comment", "$defs", "definitions", "title", "description", "default"),
    *("examples", "readOnly", "writeOnly", "deprecated", "contentMediaType", "contentEncoding", "contentSchema"),
    *("then", "else", "minContains", "maxContains"),  # read with the keyword that they belong to
}
BY_NAME = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}  # hold schemas by name
VALUES = {"enum", "const", "default", "examples"}  # hold no schemas
# Keywords that say nothing where they are empty or true.
OPEN = {"additionalProperties", "patternProperties", "items", "additionalItems", "prefixItems", "propertyNames"}
OPEN |= {"unevaluatedProperties", "unevaluatedItems", "dependencies", "dependentSchemas"}


class SchemaLogic:
    """Answers about parts of the schema `root`, which has their definitions. `draft`: 4, 6, 7, 2019 or 2020.
    `empty`: tells whether no text satisfies all of some schemas."""

    def __init__(self, root: Schema, draft: int, empty: Callable[[list[Schema]], bool]) -> None:
        self._root, self.draft, self._empty = root, draft, empty
        self._bases = isinstance(root, dict) and _identified({**root, "$id": None, "id": None}, draft)
        self._steps = 0
        self._known: dict[tuple[int, int], tuple[Schema, Schema, bool]] = {}  # what is disjoint, kept alive for its id

    def resolved(self, schema: Schema) -> Schema:
        """Returns what a `$ref` names. Raises InexpressibleError for one outside of the schema."""
        for _ in range(DEPTH):
            if not isinstance(schema, dict) or not isinstance(reference := schema.get("$ref"), str):
                return schema
            schema = self._root
            if self._bases or (reference and reference[0] != "#") or (reference[1:] and reference[1] != "/"):
                raise InexpressibleError(f'"$ref": {reference!r:.80}')
            for name in reference[2:].split("/") if reference[2:] else ():
                name = unquote(name).replace("~1", "/").replace("~0", "~")
                inner = {str(i): each for i, each in enumerate(schema)} if isinstance(schema, list) else schema
                schema = inner.get(name) if isinstance(inner, dict) else None
            if not isinstance(schema, (dict, bool)):
                raise InexpressibleError(f'"$ref": {reference!r:.80}')
        raise InexpressibleError('a circle of "$ref"')

    def parts(self, schema: Schema, depth: int = DEPTH, whole: bool = False) -> Iterator[Schema]:
        """Yields schemas that all hold wherever `schema` does: itself, and those it refers to or joins. Raises
        InexpressibleError where they have to be `whole` and a reference leads nowhere that is known."""
        self._count()
        if not isinstance(schema, dict) or depth < 0:
            yield schema
            return
        alone = "$ref" in schema and self.draft <= 7  # what stands beside it does not count
        if not alone:
            yield schema
        if isinstance(schema.get("$ref"), str):
            try:
                yield from self.parts(self.resolved({"$ref": schema["$ref"]}), depth - 1, whole)
            except InexpressibleError:
                if whole:
                    raise
                yield True
        for inner in _listed(schema, "allOf") if not alone else ():
            yield from self.parts(inner, depth - 1, whole)

    def _count(self) -> None:
        self._steps += 1
        if self._steps > MOST_STEPS:
            raise ConfigError("a JSON schema whose parts refer to each other too often", "fewer", "simplify it")

    def kinds(self, schema: Schema, depth: int = DEPTH) -> set[str]:
        """Returns the types that values of `schema` may have."""
        found = set(TYPES)
        for part in self.parts(schema, depth):
            if part is False:
                return set()
            if not isinstance(part, dict) or depth < 0:
                continue
            if (listed := _values(part)) is not None:
                found &= set(map(kind_of, listed))
            if isinstance(named := part.get("type"), (str, list)):
                found &= _expanded([named] if isinstance(named, str) else named)
            for key in ("anyOf", "oneOf"):
                if options := _listed(part, key):
                    found &= set().union(*(self.kinds(each, depth - 1) for each in options))
        return found

    def asks(self, schema: Schema, keyword: str, depth: int = DEPTH) -> bool:
        """Tells whether `schema` has a keyword with the value true, or one that it refers to or chooses among has.
        Raises InexpressibleError where a reference leads nowhere that is known."""
        for part in self.parts(schema, depth, whole=True):
            if isinstance(part, dict):
                options = (each for key in ("anyOf", "oneOf") for each in _listed(part, key))
                if part.get(keyword) is True or any(self.asks(each, keyword, depth - 1) for each in options):
                    return True
        return False

    def values(self, schema: Schema) -> list[Any] | None:
        """Returns the only values of `schema`, where it lists them."""
        return next((found for part in self.parts(schema) if (found := _values(part)) is not None), None)

    def disjoint(self, one: Schema, other: Schema, depth: int = DEPTH) -> bool:
        """Tells whether the two are known to have no value in common."""
        known = self._known.setdefault((id(one), id(other)), (one, other, False))  # False for circles
        if known[2] or len(self._known) > MOST_PAIRS:
            return known[2]
        found = self._disjoint(one, other, depth)
        self._known[id(one), id(other)] = (one, other, found)
        return found

    def _disjoint(self, one: Schema, other: Schema, depth: int) -> bool:
        common = self.kinds(one) & self.kinds(other)
        if not common:
            return True
        if depth < 0:
            return False
        for first, second in ((one, other), (other, one)):
            for part in self.parts(first):
                for key in ("anyOf", "oneOf") if isinstance(part, dict) else ():
                    options = _listed(part, key)
                    if options and all(self.disjoint(each, second, depth - 1) for each in options):
                        return True
            listed = self.values(first)
            if listed is not None and all(self.rejects(second, value) for value in listed):
                return True
        return all(self._apart(kind, one, other, depth) for kind in common)

    def _apart(self, kind: str, one: Schema, other: Schema, depth: int) -> bool:
        """Whether the two are known to have no value of a type in common."""
        parts = [part for each in (one, other) for part in self.parts(each) if isinstance(part, dict)]
        if kind in ("integer", "number"):
            return _no_number(parts)
        if kind == "object":
            names = {name for part in parts for name in _listed(part, "required") if isinstance(name, str)}
            ways = [(self.of_property(one, name), self.of_property(other, name)) for name in sorted(names)]
            return any(self.disjoint(a, b, depth - 1) for first, second in ways for a in first for b in second)
        if kind == "string":
            return self._empty([{key: part[key] for key in OF_TEXTS if key in part} for part in parts])
        least, most = _bounds(parts, "minItems", "maxItems")
        return kind == "array" and least > most

    def of_property(self, schema: Schema, name: str) -> list[Schema]:
        """Returns schemas that all hold for a property of `schema`."""
        found: list[Schema] = [True]
        for part in self.parts(schema):
            if not isinstance(part, dict):
                continue
            properties = part.get("properties")
            if isinstance(properties, dict) and name in properties:
                found.append(properties[name])
            elif not part.get("patternProperties"):
                found.append(part.get("additionalProperties", True))
        return found

    def rejects(self, schema: Schema, value: Any, depth: int = DEPTH) -> bool:
        """Tells whether a value is known not to satisfy `schema`."""
        kind = kind_of(value)
        for part in self.parts(schema) if depth >= 0 else ():
            if not isinstance(part, dict):
                continue
            if (listed := _values(part)) is not None and all(not same(value, each) for each in listed):
                return True
            if kind in ("integer", "number") and _no_number([part, {"minimum": value, "maximum": value}]):
                return True
            options = (_listed(part, key) for key in ("anyOf", "oneOf"))
            if any(each and all(self.rejects(one, value, depth - 1) for one in each) for each in options):
                return True
        return kind not in self.kinds(schema)

    # ---- the opposite

    def negated(self, schema: Schema, beside: Schema = True, depth: int = DEPTH) -> Schema:
        """Returns a schema whose values `schema` rejects. `beside`: a schema that holds as well; where it is given,
        differences between the two may be left out that others make up for. Raises InexpressibleError."""
        self._count()
        if isinstance(schema, bool):
            return not schema
        if depth < 0:
            raise InexpressibleError("not, of a schema of many levels")
        if "$ref" in schema:
            named = self.negated(self.resolved({"$ref": schema["$ref"]}), beside, depth - 1)
            rest = {} if self.draft <= 7 else {key: value for key, value in schema.items() if key != "$ref"}
            return _any([named, self.negated(rest, beside, depth - 1)])
        ways: list[Schema] = []
        lacking = ""
        for key, value in _claims(schema):
            try:
                ways += self._opposites(key, value, schema, beside, depth - 1)
            except InexpressibleError as error:
                if beside is True:
                    raise
                lacking = str(error)
        if lacking and all(self.disjoint(beside, way) for way in ways):
            raise InexpressibleError(lacking)
        return _any(ways)

    def _opposites(self, key: str, value: Any, schema: Schema, beside: Schema, depth: int) -> list[Schema]:
        """Returns schemas whose values a keyword rejects."""
        open_ended = key in OPEN and (value is True or value in ({}, []))
        if key in NO_CONSTRAINTS or open_ended or (key == "format" and is_annotation(value, schema)):
            return []
        if key in _BOUNDS and type(value) in (int, float):
            kind, opposite, more = _BOUNDS[key]
            if schema.get(f"exclusive{key[:1].upper()}{key[1:]}") is True:  # of draft 4
                opposite = {"minimum": "maximum", "maximum": "minimum"}[key]
            return [] if value + more < 0 and kind != "number" else [{"type": kind, opposite: value + more}]
        if value is False and key in ("uniqueItems", "exclusiveMinimum", "exclusiveMaximum"):
            return []
        if value is True and key in ("exclusiveMinimum", "exclusiveMaximum"):
            return []  # said with the bound
        if (opposite_of := OPPOSITES.get(key)) is not None:
            return opposite_of(self, value, schema, beside, depth)
        if key in KEYWORDS:
            raise InexpressibleError(f"{key} in what may not hold")
        return []

    def _types(self, value: Any, schema: Schema, beside: Schema, depth: int) -> list[Schema]:
        named = [value] if isinstance(value, str) else value
        if "integer" in named and "number" not in named and beside is not True and "number" in self.kinds(beside):
            raise InexpressibleError("the type integer in what may not hold")
        rest = [kind for kind in TYPES if kind not in named and kind != "integer"]
        return [{"type": [kind for kind in rest if kind != "number" or "integer" not in named]}] if rest else []

    def _required(self, value: Any, *_: Any) -> list[Schema]:
        return [{"type": "object", "properties": {name: False}} for name in value]

    def _properties(self, value: Any, schema: Schema, beside: Schema, depth: int) -> list[Schema]:
        return [self._with(name, self.negated(inner, True, depth)) for name, inner in value.items()]

    def _dependent(self, value: Any, *_: Any) -> list[Schema]:
        pairs = ((name, needed) for name, all_needed in value.items() for needed in all_needed)
        return [{"type": "object", "required": [name], "properties": {needed: False}} for name, needed in pairs]

    def _all(self, value: Any, schema: Schema, beside: Schema, depth: int) -> list[Schema]:
        return [self.negated(each, beside, depth) for each in value]

    def _any_of(self, value: Any, schema: Schema, beside: Schema, depth: int) -> list[Schema]:
        return [{"allOf": [self.negated(each, beside, depth) for each in value]}]

    def _not(self, value: Any, *_: Any) -> list[Schema]:
        return [value]

    def _pattern(self, value: Any, *_: Any) -> list[Schema]:
        return [{"type": "string", "pattern": outside(beginning(value))}]

    def _if(self, value: Any, schema: Schema, beside: Schema, depth: int) -> list[Schema]:
        ways = [("then", [value]), ("else", [self.negated(value, True, depth)])]
        return [{"allOf": [*when, self.negated(schema[way], True, depth)]} for way, when in ways if way in schema]

    def _contains(self, value: Any, schema: Schema, beside: Schema, depth: int) -> list[Schema]:
        if not schema.keys().isdisjoint(("minContains", "maxContains")):
            raise InexpressibleError("contains in what may not hold")
        return [{"type": "array", "items": self.negated(value, True, depth)}]

    def _items(self, value: Any, schema: Schema, beside: Schema, depth: int) -> list[Schema]:
        """Says that the first item is wrong."""
        if isinstance(value, list) or "prefixItems" in schema:
            raise InexpressibleError("items in what may not hold")
        first = [self.negated(value, True, depth)]
        return [{"type": "array", "minItems": 1, "items" if self.draft <= 2019 else "prefixItems": first}]

    def _other_keys(self, value: Any, schema: Schema, beside: Schema, depth: int) -> list[Schema]:
        """Says that there is another key, one that `beside` names."""
        parts = [part for part in self.parts(beside) if isinstance(part, dict)]
        others = sorted(
            {name for part in parts for name in part.get("properties", ())} - {*schema.get("properties", ())}
        )
        if not others or schema.get("patternProperties"):
            raise InexpressibleError("additionalProperties in what may not hold")
        return [self._with(name, self.negated(value, True, depth)) for name in others]

    @staticmethod
    def _with(name: str, schema: Schema) -> Schema:
        return schema is not False and {"type": "object", "required": [name], "properties": {name: schema}}


OPPOSITES: dict[str, Callable[..., list[Schema]]] = {
    "const": lambda _, value, *more: _others([value]),
    "enum": lambda _, value, *more: _others(value),
    "type": SchemaLogic._types,
    "required": SchemaLogic._required,
    "properties": SchemaLogic._properties,
    "dependentRequired": SchemaLogic._dependent,
    "allOf": SchemaLogic._all,
    "anyOf": SchemaLogic._any_of,
    "oneOf": SchemaLogic._any_of,
    "not": SchemaLogic._not,
    "pattern": SchemaLogic._pattern,
    "if": SchemaLogic._if,
    "contains": SchemaLogic._contains,
    "items": SchemaLogic._items,
    "additionalProperties": SchemaLogic._other_keys,
}
_BOUNDS = {
    "minimum": ("number", "exclusiveMaximum", 0),
    "maximum": ("number", "exclusiveMinimum", 0),
    "exclusiveMinimum": ("number", "maximum", 0),
    "exclusiveMaximum": ("number", "minimum", 0),
    "minLength": ("string", "maxLength", -1),
    "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1),
    "maxItems": ("array", "minItems", 1),
    "minProperties": ("object", "maxProperties", -1),
    "maxProperties": ("object", "minProperties", 1),
}
KEYWORDS = OPEN | {"format", "multipleOf", "uniqueItems", "$dynamicRef", "$recursiveRef", *_BOUNDS}


def kind_of(value: Any) -> str:
    """Returns the type of a JSON value, as `TYPES` has it."""
    if isinstance(value, float) and value.is_integer():
        return "integer"
    names = {type(None): "null", bool: "boolean", str: "string", list: "array", dict: "object", int: "integer"}
    return names.get(type(value), "number")


def same(one: Any, other: Any) -> bool:
    """Tells whether two JSON values are equal: 1 and 1.0 are, 1 and true are not."""
    return frozen(one) == frozen(other)


def frozen(value: Any) -> Any:
    """Returns a JSON value as one that can be hashed, equal where the values are."""
    if isinstance(value, list):
        return tuple(map(frozen, value))
    if isinstance(value, dict):
        return frozenset((key, frozen(inner)) for key, inner in value.items())
    return (bool, value) if isinstance(value, bool) else value


def _others(values: Any) -> list[Schema]:
    """Says that a value is none of these. Arrays and objects are left out where one of them is named."""
    if not isinstance(values, list):
        raise InexpressibleError("an enum that is no list")
    kinds = set(map(kind_of, values))
    texts = [value for value in values if isinstance(value, str)]
    numbers = sorted({value for value in values if kind_of(value) in ("integer", "number")})
    ways: list[Schema] = []
    if rest := [kind for kind in TYPES[:5] if kind not in kinds]:
        ways.append({"type": rest})
    if texts:
        ways.append({"type": "string", "pattern": other_texts(texts)})
    if kinds & {"boolean"}:
        ways += [{"enum": [flag]} for flag in (False, True) if not any(value is flag for value in values)]
    bounds = [None, *numbers, None]
    for least, most in pairwise(bounds):
        limits = {"exclusiveMinimum": least, "exclusiveMaximum": most}
        ways.append({"type": "number", **{key: bound for key, bound in limits.items() if bound is not None}})
    return ways


def _any(ways: list[Schema]) -> Schema:
    ways = [way for way in ways if way is not False]
    return ways[0] if len(ways) == 1 else {"anyOf": ways} if ways else False


def _claims(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields the keywords of a schema with their values, each property by itself."""
    for key, value in schema.items():
        if key == "properties" and isinstance(value, dict):
            yield from ((key, {name: inner}) for name, inner in value.items())
        else:
            yield key, value


def _values(part: Schema) -> list[Any] | None:
    if not isinstance(part, dict):
        return None
    return [part["const"]] if "const" in part else part["enum"] if isinstance(part.get("enum"), list) else None


def _listed(part: Mapping[str, Any], key: str) -> list[Any]:
    return value if isinstance(value := part.get(key), list) else []


def _expanded(names: Sequence[Any]) -> set[str]:
    known = {name for name in names if isinstance(name, str)}
    return known | {"integer"} if "number" in known else known


def _no_number(parts: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the bounds in `parts` leave no number."""
    least, most = _bounds(parts, "minimum", "maximum")
    open_least, open_most = _bounds(parts, "exclusiveMinimum", "exclusiveMaximum")
    return least > most or max(least, open_least) >= open_most or open_least >= min(most, open_most)


def _bounds(parts: Sequence[Mapping[str, Any]], least: str, most: str) -> tuple[float, float]:
    low = [part[least] for part in parts if type(part.get(least)) in (int, float)]
    high = [part[most] for part in parts if type(part.get(most)) in (int, float)]
    return max(low, default=float("-inf")), min(high, default=float("inf"))


def _identified(schema: Any, draft: int, named: bool = False) -> bool:
    """Whether a part of a schema is a document of its own, in which references mean others. `named`: the keys are names
    of parts."""
    if isinstance(schema, dict):
        name = None if named else schema.get("$id" if draft > 4 else "id")
        return (isinstance(name, str) and name[:1] != "#") or any(
            _identified(inner, draft, not named and key in BY_NAME)
            for key, inner in schema.items()
            if named or key not in VALUES
        )
    return isinstance(schema, list) and any(_identified(inner, draft) for inner in schema)
