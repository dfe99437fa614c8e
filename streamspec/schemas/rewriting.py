"""Says in the grammar library's keywords what a JSON schema says in others: `not`, `if`, overlapping `oneOf` and more.
What comes out has no value that the schema rejects. tests/schemas/test_rewriting.py covers this module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import combinations, islice
from typing import Any

from streamspec.errors import ConfigError
from streamspec.schemas.formats import PATTERNS, is_annotation
from streamspec.schemas.schema_logic import BY_NAME, NO_CONSTRAINTS, VALUES, Schema, SchemaLogic
from streamspec.schemas.text_patterns import InexpressibleError, listed, without_look_ahead

IN_LISTS = {"allOf", "anyOf", "oneOf", "prefixItems"}
INNER = {"items", "additionalItems", "additionalProperties"}
SINCE = {  # drafts that brought a keyword; before, it says nothing
    **dict.fromkeys(("const", "contains", "propertyNames"), 6),
    **dict.fromkeys(("if", "then", "else"), 7),
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "minContains", "maxContains"), 2019),
    **dict.fromkeys(("unevaluatedProperties", "unevaluatedItems"), 2019),
}
PLACES = 4  # where in a list what it `contains` may come
MOST_WAYS = 64  # in which an object may have some of its keys
MOST = 30_000  # objects of a schema that is written anew
FIX = "correct it, leave it out and check it after the answer, or set strict to false"


class Rewriting:
    """Rewrites the schema `root`. `strict`: raise ConfigError for what cannot be said; otherwise it goes, and
    `left_out` names it. `empty`: as of `SchemaLogic`."""

    def __init__(self, root: Schema, strict: bool, empty: Callable[[list[Schema]], bool]) -> None:
        dialect = root.get("$schema") if isinstance(root, dict) else None
        self.draft = next((draft for draft, name in DRAFTS.items() if name in str(dialect)), 2020)
        self._root = _of_draft(root, self.draft)
        self._logic, self._strict = SchemaLogic(self._root, self.draft, empty), strict
        self._written = 0
        self.left_out: list[str] = []

    def result(self) -> Schema:
        """Returns the schema as the library takes it."""
        return self._schema(self._root, "#")

    def _schema(self, schema: Schema, path: str) -> Schema:
        if not isinstance(schema, dict):
            return schema
        self._written += 1
        if self._written > MOST:
            raise ConfigError(f"a JSON schema of more than {MOST} parts, written out", "fewer", "simplify it")
        schema = _by_name(schema)
        out: dict[str, Any] = {}
        further: list[Schema] = []
        for key, value in schema.items():
            if key not in REWRITES:
                out[key] = self._inner(key, value, f"{path}/{key}")
                continue
            try:
                parts = list(REWRITES[key](self._logic, value, schema))
                out |= {"allOf": []} if key == "allOf" else {}  # keeps its place, which orders properties
            except InexpressibleError as error:
                self._leave_out(key, f"{path}/{key}", str(error))
                continue
            except (AttributeError, TypeError):  # a keyword within it has none of its values
                raise refused(f"{key} of what is no schema ({path}/{key})") from None
            for part in parts:
                new = part if part == {key: value} else self._schema(part, path)
                if isinstance(new, dict) and new.keys() == {"anyOf"} and "anyOf" not in schema.keys() | out.keys():
                    out |= new
                elif new is not True:
                    further.append(new)
        out["allOf"] = [*out.get("allOf", []), *further]
        return out if out["allOf"] else {key: value for key, value in out.items() if key != "allOf"}

    def _inner(self, key: str, value: Any, path: str) -> Any:
        """Returns what a keyword that stays has."""
        if key in BY_NAME and isinstance(value, dict):
            named = key != "patternProperties"
            inner = {name: self._schema(each, f"{path}/{name}") for name, each in value.items()}
            return inner if named else {self._key(name, path): each for name, each in inner.items()}
        if isinstance(value, list) and (key in IN_LISTS or key == "items"):
            return [self._schema(each, f"{path}/{i}") for i, each in enumerate(value)]
        return self._schema(value, path) if key in INNER else value

    def _key(self, pattern: str, path: str) -> str:
        """Returns a regular expression of keys without look-ahead."""
        try:
            patterns = without_look_ahead(pattern)
            if len(patterns) == 1:
                return patterns[0]
            raise InexpressibleError(f"look-around in the pattern {pattern!r:.80}")
        except InexpressibleError as error:
            self._leave_out("patternProperties", path, str(error))
            return "(?s:.*)"

    def _leave_out(self, key: str, path: str, why: str) -> None:
        if self._strict:
            raise refused(f"{why} ({path})" if why.startswith(key) else f"{key} ({path}: {why})")
        self.left_out.append(path)


def refused(found: str) -> ConfigError:
    """Returns the error of a keyword that cannot be enforced."""
    return ConfigError(f"{found[:200]} in a JSON schema", "what a grammar can enforce", FIX)


DRAFTS = {4: "draft-04", 6: "draft-06", 7: "draft-07", 2019: "2019-09"}


def _of_draft(schema: Schema, draft: int) -> Schema:
    """Takes away keywords that a draft does not have."""
    if isinstance(schema, list):
        return [_of_draft(each, draft) for each in schema]
    if not isinstance(schema, dict):
        return schema
    within = partial(_of_draft, draft=draft)
    return {key: visited(key, value, within) for key, value in schema.items() if SINCE.get(key, 0) <= draft}


def visited(key: str, value: Any, visit: Callable[[Any], Any]) -> Any:
    """Returns the value of a keyword, each schema in it as `visit` gives it."""
    if key in VALUES:
        return value
    if key in BY_NAME and isinstance(value, dict):
        return {name: visit(each) for name, each in value.items()}
    return visit(value)


def _by_name(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Names the properties whose pattern spells them: the library lets another key begin where none is left."""
    properties, patterns = schema.get("properties", {}), schema.get("patternProperties")
    if not isinstance(properties, dict) or not isinstance(patterns, dict):
        return schema
    spelled = {pattern: names for pattern in patterns if (names := listed(pattern)) is not None}
    if not spelled:
        return schema
    named = dict(properties)
    for pattern, names in spelled.items():
        for name in names:
            named[name] = {"allOf": [named[name], patterns[pattern]]} if name in named else patterns[pattern]
    others = {pattern: inner for pattern, inner in patterns.items() if pattern not in spelled}
    rest = {key: value for key, value in schema.items() if key not in ("properties", "patternProperties")}
    return {"properties": named, **({"patternProperties": others} if others else {}), **rest}


# ---- keywords: each yields schemas that say the same together


def _one_of(logic: SchemaLogic, options: Any, schema: Mapping[str, Any]) -> Iterator[Schema]:
    if not isinstance(options, list) or not options:
        raise InexpressibleError("oneOf without schemas")
    apart = []
    for i, one in enumerate(options):
        others = [other for j, other in enumerate(options) if j != i and not logic.disjoint(one, other)]
        try:
            parts = [logic.negated(other, one) for other in others]
        except InexpressibleError as error:
            raise InexpressibleError(f"oneOf of schemas that may hold together: {error}") from None
        apart.append({"allOf": [one, *parts]} if parts else one)
    yield {"anyOf": apart}


def _not(logic: SchemaLogic, value: Schema, schema: Mapping[str, Any]) -> Iterator[Schema]:
    yield logic.negated(value)


def _if(logic: SchemaLogic, value: Schema, schema: Mapping[str, Any]) -> Iterator[Schema]:
    if "then" in schema:
        yield {"anyOf": [logic.negated(value), schema["then"]]}
    if "else" in schema:
        yield {"anyOf": [value, schema["else"]]}


def _dropped(logic: SchemaLogic, value: Any, schema: Mapping[str, Any]) -> Iterator[Schema]:
    return iter(())


def _all_of(logic: SchemaLogic, parts: Any, schema: Mapping[str, Any]) -> Iterator[Schema]:
    """Takes together what a list says of the values of one property, which the library would multiply out."""
    if not isinstance(parts, list):
        raise InexpressibleError("allOf without schemas")
    read = [(part, _case(part)) for part in parts]
    names = [case[0] for _, case in read if case is not None]
    yield from (part for part, case in read if case is None or names.count(case[0]) == 1)
    for name in sorted(name for name in set(names) if names.count(name) > 1):
        yield _by_cases(logic, name, [case[1:] for _, case in read if case is not None and case[0] == name])


def _by_cases(logic: SchemaLogic, name: str, cases: list[tuple[list[Any], bool, Schema]]) -> Schema:
    """Returns what holds for each value of the property `name`. `cases`: some values, whether it has to be there, and
    what holds then."""
    values = list(dict.fromkeys(value for listed, _, _ in cases for value in listed))
    options = [
        {
            "properties": {name: {"enum": [value]}},  # draft 4 has no const
            "required": [name],
            "allOf": [then for listed, _, then in cases if value in listed],
        }
        for value in values
    ]
    other = {"properties": {name: logic.negated({"enum": values})}, "required": [name]}
    absent = {"properties": {name: False}, "allOf": [then for _, needed, then in cases if not needed]}
    return {"if": {"type": "object"}, "then": {"anyOf": [*options, other, absent]}}


def _case(part: Schema) -> tuple[str, list[Any], bool, Schema] | None:
    """Reads `if` a property has one of some values, `then`: the property, the texts, whether it has to be there, what
    holds."""
    if not isinstance(part, dict) or part.keys() - {"if", "then", *NO_CONSTRAINTS} or "then" not in part:
        return None
    condition = part.get("if")
    if "else" in part or not isinstance(condition, dict) or condition.keys() - {"properties", "required", "type"}:
        return None
    properties, required = condition.get("properties"), condition.get("required", [])
    if not isinstance(properties, dict) or len(properties) != 1 or condition.get("type", "object") != "object":
        return None
    [(name, inner)] = properties.items()
    if not isinstance(inner, dict) or required not in ([], [name]) or inner.keys() - {"const", "enum", "type", "title"}:
        return None
    listed = [inner["const"]] if "const" in inner else inner.get("enum")
    if not isinstance(listed, list) or not all(isinstance(value, str) for value in listed):
        return None
    return name, listed, bool(required), part["then"]


def _dependent_required(logic: SchemaLogic, value: Any, schema: Mapping[str, Any]) -> Iterator[Schema]:
    if not isinstance(value, dict):
        raise InexpressibleError("dependentRequired that is no object")
    for name, needed in value.items():
        held = {"required": needed} if isinstance(needed, list) else needed
        if held not in (True, {}, {"required": []}):
            yield {"anyOf": [{"properties": {name: False}}, held]}


def _property_names(logic: SchemaLogic, value: Schema, schema: Mapping[str, Any]) -> Iterator[Schema]:
    names = logic.values(value)
    for part in logic.parts(value, whole=True):
        told = part if isinstance(part, dict) else {} if part else {"type": []}
        told = {key: one for key, one in told.items() if key not in (*NO_CONSTRAINTS, "$ref", "allOf", "enum", "const")}
        if "string" not in logic.kinds(part) or ((told.pop("type", None), names)[1] is not None and told):
            raise InexpressibleError("propertyNames of other texts")
        pattern = _key_pattern(logic, told)
        if pattern is not None and (spelled := listed(pattern)) is not None:
            yield {"properties": dict.fromkeys(spelled, True), "additionalProperties": False}
        elif pattern is not None:
            yield {"patternProperties": {pattern: True}, "additionalProperties": False}
    if names is not None:
        yield {"properties": {name: True for name in names if isinstance(name, str)}, "additionalProperties": False}


def _key_pattern(logic: SchemaLogic, told: Mapping[str, Any]) -> str | None:
    """Returns the regular expression of keys, None for any."""
    if told.keys() <= {"minLength", "maxLength"}:
        least, most = told.get("minLength", 0), told.get("maxLength", "")
        return f"^(?s:.{{{least},{most}}})$" if told else None
    if told.keys() == {"format"}:
        if is_annotation(told["format"], {}):
            return None
        if told["format"] in PATTERNS:
            return f"^(?:{PATTERNS[told['format']]})$"
    if told.keys() == {"pattern"}:
        return str(told["pattern"])
    if told.keys() == {"not"} and isinstance(opposite := logic.negated(told["not"]), dict):
        texts = [way for way in opposite.get("anyOf", [opposite]) if "pattern" in way]
        if len(texts) == 1:
            return str(texts[0]["pattern"])
    raise InexpressibleError(f"propertyNames with {' and '.join(sorted(told))}")


def _contains(logic: SchemaLogic, value: Schema, schema: Mapping[str, Any]) -> Iterator[Schema]:
    least, most = schema.get("minContains", 1), schema.get("maxContains")
    if most is not None or least not in (0, 1):
        raise InexpressibleError("contains with maxContains, or minContains above 1")
    key = "prefixItems" if logic.draft > 2019 else "items"
    kinds = [{"type": ["null", "boolean", "number", "string", "object"]}]
    if least:
        places = range(min(PLACES, schema["maxItems"]) if type(schema.get("maxItems")) is int else PLACES)
        yield {"anyOf": [*kinds, *({"type": "array", "minItems": i + 1, key: [*[True] * i, value]} for i in places)]}


def _unevaluated_properties(logic: SchemaLogic, value: Schema, schema: Mapping[str, Any]) -> Iterator[Schema]:
    if value is True or value == {}:
        return
    names: dict[str, Schema] = {}
    patterns: dict[str, Schema] = {}
    for part in logic.parts(schema):
        if not isinstance(part, dict):
            continue
        if part.keys() & {"anyOf", "oneOf", "if", "dependentSchemas", "not", "$dynamicRef", "$recursiveRef"}:
            raise InexpressibleError("unevaluatedProperties beside alternatives")
        if "additionalProperties" in part:
            return  # evaluates them all
        names |= dict.fromkeys(part.get("properties", {}), True)
        patterns |= dict.fromkeys(part.get("patternProperties", {}), True)
    yield {"properties": names, "patternProperties": patterns, "additionalProperties": value}


def _min_properties(logic: SchemaLogic, value: Any, schema: Mapping[str, Any]) -> Iterator[Schema]:
    """Keys that a schema does not name may be written twice: as many as count have to be named."""
    needed, named, others = _keys(schema)
    missing = _count(value) - len(needed)
    if missing <= 0:
        return
    ways: list[Schema] = [{"required": list(some)} for some in combinations(named, missing)]
    if missing == 1 and others:
        without: Schema = {"required": needed, "properties": dict.fromkeys(named, False)} if named else {}
        ways.append({"minProperties": value} | without)
    yield from _few(ways, f"minProperties {value}, with {len(needed)} required")


def _max_properties(logic: SchemaLogic, value: Any, schema: Mapping[str, Any]) -> Iterator[Schema]:
    needed, named, others = _keys(schema)
    room = _count(value) - len(needed)
    if not others and len(named) <= room:
        return
    if not named:
        yield {"maxProperties": value}
        return
    chosen = [
        some for size in range(min(room, len(named)) + 1) for some in islice(combinations(named, size), MOST_WAYS)
    ]
    ways: list[Schema] = [
        {
            "required": list(some),
            "properties": dict.fromkeys([name for name in named if name not in some], False),
            "maxProperties": value,
        }
        for some in chosen
    ]
    yield from _few(ways, f"maxProperties {value}, with {len(named)} optional")


def _keys(schema: Mapping[str, Any]) -> tuple[list[str], list[str], bool]:
    """Returns the required keys of an object, the optional ones, and whether it may have others."""
    needed = schema.get("required")
    needed = needed if isinstance(needed, list) else []
    properties = schema.get("properties")
    named = [
        name
        for name, inner in (properties.items() if isinstance(properties, dict) else ())
        if name not in needed and inner is not False
    ]
    return needed, named, schema.get("additionalProperties", True) is not False or bool(schema.get("patternProperties"))


def _count(value: Any) -> int:
    if not isinstance(value, (int, float)) or value != int(value):
        raise InexpressibleError(f"a number of properties {value!r:.40}")
    return int(value)


def _few(ways: list[Schema], what: str) -> Iterator[Schema]:
    if not 0 < len(ways) <= MOST_WAYS:
        raise InexpressibleError(what)
    yield ways[0] if len(ways) == 1 else {"anyOf": ways}


def _pattern(logic: SchemaLogic, value: Any, schema: Mapping[str, Any]) -> Iterator[Schema]:
    yield from ({"pattern": each} for each in (without_look_ahead(value) if isinstance(value, str) else [value]))


def _unsaid(logic: SchemaLogic, value: Any, schema: Mapping[str, Any]) -> Iterator[Schema]:
    raise InexpressibleError("")


REWRITES: dict[str, Callable[[SchemaLogic, Any, Mapping[str, Any]], Iterator[Schema]]] = {
    "oneOf": _one_of,
    "not": _not,
    "if": _if,
    "then": _dropped,
    "else": _dropped,
    "allOf": _all_of,
    "dependentRequired": _dependent_required,
    "dependentSchemas": _dependent_required,
    "dependencies": _dependent_required,
    "propertyNames": _property_names,
    "contains": _contains,
    "minContains": _dropped,
    "maxContains": _dropped,
    "unevaluatedProperties": _unevaluated_properties,
    "unevaluatedItems": _unsaid,
    "pattern": _pattern,
    "minProperties": _min_properties,
    "maxProperties": _max_properties,
}
