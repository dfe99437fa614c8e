"""Parses the JSON of request bodies into typed fields; faults are named by their path in the request.
`tests/serve/api/test_chat_requests.py` covers this file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, TypeVar, get_args

from pydantic import ValidationError

from streamspec.errors import DataError, meant
from streamspec.json_fields import parse_json
from streamspec.serve.api.fields import Strict
from streamspec.serve.errors import ApiError, invalid

Fixed = Mapping[str, tuple[Any, ...]]  # values that fields may have, beside null
NONE: Fixed = MappingProxyType({})


def bounded(size: int, most: int, param: str) -> None:
    """Raises ApiError for a field `param` of more than `most` characters."""
    if size > most:
        raise invalid(f"{param} of {size} characters; expected at most {most}", param, "too_large")


def json_object(body: bytes) -> dict[str, Any]:
    """Returns the object that a body is. Raises ApiError for anything else."""
    try:
        values = parse_json(body, "the request", DataError, "correct the request")
    except DataError as error:
        raise invalid(str(error), code="invalid_json") from None
    if not isinstance(values, dict):
        raise invalid("the request is no JSON object; expected one", code="invalid_json")
    return values


def without_fixed(values: Mapping[str, Any], fixed: Fixed, where: str = "") -> dict[str, Any]:
    """Returns `values` without the `fixed` fields. Raises ApiError unless those are null or have a
    supported value."""
    for name in fixed.keys() & values.keys():
        value, supported = values[name], fixed[name]
        if value is not None and not any(
            value == right and isinstance(value, bool) == isinstance(right, bool) for right in supported
        ):
            expected = " or ".join(json.dumps(right) for right in (*supported, None))
            raise invalid(f"{where}{name} is not supported; expected {expected}", f"{where}{name}", "unsupported_value")
    return {name: value for name, value in values.items() if name not in fixed}


Request = TypeVar("Request", bound=Strict)


def parsed_as(model: type[Request], values: Any, where: str = "", fixed: Fixed = NONE) -> Request:
    """Returns `values` as an object of `model`, but for `fixed` fields (`without_fixed`). `where`: their path in the
    request. Raises ApiError for a fault."""
    values = without_fixed(values, fixed, where) if isinstance(values, dict) else values
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise _first(error, values, where, model, fixed) from None


def renamed(error: ApiError, names: Mapping[str, str]) -> ApiError:
    """Returns the error of a chat with the field's name on another path. `names`: of fields there."""
    name = next((name for name in names if error.param in (name, f"{name}.type")), None)
    if name is None:
        return error
    message = error.message.replace(name, names[name], 1)
    return ApiError(error.status, message, error.code, names[name], error.kind)


def _first(error: ValidationError, values: Any, where: str, model: type[Strict], fixed: Fixed) -> ApiError:
    """Returns the deepest fault, a wrong type of an object and an unknown field before others, by its path in the
    request."""
    faults = [(fault, _path(fault, values)) for fault in error.errors(include_url=False)]
    typed = [
        (fault, path)
        for fault, path in faults
        if fault["type"].startswith("union_tag") or (fault["type"] == "literal_error" and path[-1:] == ["type"])
    ]
    unknown = [(fault, path) for fault, path in faults if fault["type"] == "extra_forbidden"]
    fault, path = max(typed or unknown or faults, key=lambda pair: len(pair[1]))
    if fault["type"].startswith("union_tag"):
        path = [*path, "type"]
    param, context = where + ".".join(path) if path else where.rstrip(".") or None, fault.get("ctx", {})
    if fault["type"] in ("missing", "union_tag_not_found"):
        return invalid(f"no {param}; expected the field", param, "missing_field")
    if typed:
        found, expected = context.get("tag", fault["input"]), context.get("expected_tags", context.get("expected"))
        return invalid(f"{param} {found!r:.40} is not supported; expected {expected}", param, "unsupported_value")
    if unknown:
        known = _names(model, path[:-1])
        near = meant(path[-1], [*known, *(fixed if len(path) == 1 else ())])
        return invalid(
            f"unknown field {param}" + (near or f"; expected one of {', '.join(known)}"), param, "unknown_field"
        )
    return invalid(f"{param}: {fault['msg'][:1].lower()}{fault['msg'][1:]}", param)


def _names(model: type[Strict], path: list[str]) -> list[str]:
    """Returns the names of the fields that an object at `path` in a request of this model may have and that mean
    something."""
    fields = list(model.model_fields.items())
    for key in path:
        if not key.isdecimal():
            inner = [field.annotation for name, field in fields if key in (name, field.alias)]
            fields = [item for one in inner for model in _models_in(one) for item in model.model_fields.items()]
    return list(dict.fromkeys(field.alias or name for name, field in fields if not field.exclude))


def _models_in(annotation: Any) -> Iterator[type[Strict]]:
    for inner in get_args(annotation):
        yield from _models_in(inner)
    if isinstance(annotation, type) and issubclass(annotation, Strict):
        yield annotation


def _path(fault: Any, values: Any) -> list[str]:
    """Returns the path of a fault in the request; names of alternatives, which pydantic has in between, left out."""
    path: list[str] = []
    for before, key in zip((None, None, *fault["loc"]), fault["loc"], strict=False):
        if "tagged-union" in str(before):  # of the list; this key names the kind of its item
            continue
        inside = key in values if isinstance(values, dict) else isinstance(values, list) and isinstance(key, int)
        if inside or (fault["type"] == "missing" and key == fault["loc"][-1]):
            path.append(str(key))
            values = values[key] if inside else None
    return path
