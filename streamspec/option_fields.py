"""Fields of options: a default with the help text that command lines and the reference show."""

from __future__ import annotations

from dataclasses import field, fields
from typing import Any


def option(default: Any, help: str, **rules: Any) -> Any:
    """Makes a dataclass field with this default and help text. `rules`: further metadata, such as a range."""
    return field(default=default, metadata={"help": help, **rules})


def help_of(options: type, name: str) -> str:
    """The help text of the field `name` of a dataclass."""
    return str(next(field.metadata["help"] for field in fields(options) if field.name == name))
