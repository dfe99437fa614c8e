"""Fields of options: a default with the help text that command lines and the reference show, and the conversion of
flags and YAML values to their types.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import field
from pathlib import Path
from types import NoneType
from typing import Any, get_args

from streamspec.errors import ConfigError

TYPES = {int: "a whole number", float: "a number", bool: "true or false", str: "text", Path: "a path"}


def option(default: Any, help: str, **rules: Any) -> Any:
    """Makes a dataclass field with this default and help text.

    `rules`: further metadata: a range, and what the field's flag is (`streamspec.cli.option_flags`).
    """
    return field(default=default, metadata={"help": help, **rules})


def flag(name: str) -> str:
    """Spells an option's field as its command-line flag."""
    return "--" + name.rstrip("_").replace("_", "-")  # `continue_`: a word of Python's own


def plain_type(hint: Any) -> type:
    """The type of a field's value where it is not None; of a union, the first."""
    type_: type = next((member for member in get_args(hint) if member is not NoneType), hint)
    return type_


def converted(name: str, value: Any, hint: Any) -> Any:
    """Converts `value` to the type `hint` of its field; YAML reads 1e-3 as text. Raises ConfigError
    for another value."""
    if value is None and NoneType in get_args(hint):
        return None
    type_ = plain_type(hint)
    is_bool, number = isinstance(value, bool), None
    if type_ is int and isinstance(value, (int, str)) and not is_bool:
        with contextlib.suppress(ValueError):
            return int(value)  # which a float holds up to 2^53
    if type_ in (int, float) and not is_bool:
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            number = float(value)
    if type_ is float and number is not None and math.isfinite(number):
        return number
    if type_ is int and number is not None and number.is_integer():
        return int(number)
    if (type_ is bool and is_bool) or (type_ is str and isinstance(value, str)):
        return value
    if type_ is Path and isinstance(value, (str, Path)):
        return Path(value)
    raise ConfigError(f"{name} = {value!r}", TYPES[type_], f"change {flag(name)}")


def require(good: bool, name: str, found: Any, expected: str) -> None:
    """Raises ConfigError naming the option `name` unless `good`."""
    if not good:
        raise ConfigError(f"{name} = {found}", expected, f"change {flag(name)}")
