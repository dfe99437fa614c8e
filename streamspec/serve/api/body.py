"""Parses the JSON of request bodies into typed fields; faults are named by their path in the request.
`tests/serve/api/test_chat_requests.py` covers this file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from streamspec.errors import DataError
from streamspec.json_fields import parse_json
from streamspec.serve.api.fields import Strict
from streamspec.serve.errors import ApiError, invalid


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


def without_fixed(values: Mapping[str, Any], fixed: Mapping[str, tuple[Any, ...]], where: str = "") -> dict[str, Any]:
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


def parsed_as(model: type[Request], values: Any, where: str = "") -> Request:
    """Returns `values` as an object of `model`. `where`: their path in the request. Raises ApiError
    for a fault."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise _first(error, values, where) from None


def _first(error: ValidationError, values: Any, where: str) -> ApiError:
    """Returns the deepest fault, an unknown field before others, by its path in the request."""
    faults = [(fault, _path(fault, values)) for fault in error.errors(include_url=False, include_context=False)]
    unknown = [(fault, path) for fault, path in faults if fault["type"] == "extra_forbidden"]
    fault, path = max(unknown or faults, key=lambda pair: len(pair[1]))
    param = where + ".".join(path) if path else where.rstrip(".") or None
    if unknown:
        return invalid(f"unknown field {param}; expected fields of docs/guides/serve.md", param, "unknown_field")
    if fault["type"] == "missing":
        return invalid(f"no {param}; expected the field", param, "missing_field")
    return invalid(f"{param}: {fault['msg'][:1].lower()}{fault['msg'][1:]}", param)


def _path(fault: Any, values: Any) -> list[str]:
    """Returns the path of a fault in the request; names of alternatives, which pydantic has in between, left out."""
    path: list[str] = []
    for key in fault["loc"]:
        inside = key in values if isinstance(values, dict) else isinstance(values, list) and isinstance(key, int)
        if inside or (fault["type"] == "missing" and key == fault["loc"][-1]):
            path.append(str(key))
            values = values[key] if inside else None
    return path
