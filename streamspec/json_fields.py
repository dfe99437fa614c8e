"""Reads fields of untrusted JSON: checks the type and range of every value; every error names the field."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from streamspec.errors import BundleError, StreamspecError

MAX_JSON = 16 << 20  # bytes of a JSON document
MAX_DEPTH = 64


class Fields:
    """One JSON object, read field by field.

    `where` names it in messages, `fix` says what to do. Each method raises `error` for a field that is missing, of
    another type or out of range.
    """

    def __init__(
        self,
        value: object,
        where: str,
        error: type[StreamspecError] = BundleError,
        fix: str = "export the bundle again",
    ) -> None:
        self.where, self.error, self.fix = where, error, fix
        if not isinstance(value, dict):
            raise error(f"{where} is {_short(value)}", "an object", fix)
        self.values: dict[str, Any] = value

    def fail(self, name: str, found: object, expected: str) -> StreamspecError:
        """Makes the error for a field, for the caller to raise."""
        return self.error(f"{self.where}.{name} is {_short(found)}", expected, self.fix)

    def raw(self, name: str) -> Any:
        """Returns the unchecked value of a field. Raises for a missing one."""
        if name not in self.values:
            raise self.error(f"{self.where} has no {name}", f"the field {name}", self.fix)
        return self.values[name]

    def integer(self, name: str, low: int, high: int) -> int:
        """A whole number low..high."""
        return self._integer(name, self.raw(name), low, high)

    def number(self, name: str, low: float, high: float) -> float:
        """A finite number low..high."""
        return self._number(name, self.raw(name), low, high)

    def flag(self, name: str) -> bool:
        """True or false."""
        value = self.raw(name)
        if not isinstance(value, bool):
            raise self.fail(name, value, "true or false")
        return value

    def text(self, name: str, longest: int = 4096) -> str:
        """A string of at most `longest` characters."""
        value = self.raw(name)
        if not isinstance(value, str) or len(value) > longest:
            raise self.fail(name, value, f"a string of at most {longest} characters")
        return value

    def choice(self, name: str, allowed: Sequence[str]) -> str:
        """One of the strings `allowed`."""
        value = self.raw(name)
        if value not in allowed:
            raise self.fail(name, value, " or ".join(allowed))
        return str(value)

    def digest(self, name: str) -> str:
        """A sha256 as 64 lower-case hex digits."""
        value = self.raw(name)
        if not isinstance(value, str) or len(value) != 64 or set(value) - set("0123456789abcdef"):
            raise self.fail(name, value, "a sha256 of 64 lower-case hex digits")
        return value

    def optional(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self.values.get(name) is not None

    def nested(self, name: str) -> Fields:
        """An object within this one."""
        return Fields(self.raw(name), f"{self.where}.{name}", self.error, self.fix)

    def array(self, name: str, longest: int) -> list[Any]:
        """A list of at most `longest` entries, which are unchecked."""
        value = self.raw(name)
        if not isinstance(value, list) or len(value) > longest:
            raise self.fail(name, value, f"a list of at most {longest} entries")
        return value

    def integers(self, name: str, low: int, high: int, longest: int) -> tuple[int, ...]:
        """At most `longest` whole numbers low..high."""
        items = self.array(name, longest)
        return tuple(self._integer(f"{name}[{i}]", v, low, high) for i, v in enumerate(items))

    def numbers(self, name: str, low: float, high: float, longest: int) -> tuple[float, ...]:
        """At most `longest` finite numbers low..high."""
        items = self.array(name, longest)
        return tuple(self._number(f"{name}[{i}]", v, low, high) for i, v in enumerate(items))

    def items(self, name: str, longest: int) -> Iterator[tuple[str, Any]]:
        """Entries of an object used as a map."""
        entries = self.nested(name).values
        if len(entries) > longest:
            raise self.fail(name, f"a map of {len(entries)}", f"at most {longest} entries")
        yield from entries.items()

    def _integer(self, name: str, value: object, low: int, high: int) -> int:
        if type(value) is not int or not low <= value <= high:
            raise self.fail(name, value, f"a whole number {low}..{high}")
        return value

    def _number(self, name: str, value: object, low: float, high: float) -> float:
        # bool is an int to isinstance; NaN fails both comparisons
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
            raise self.fail(name, value, f"a number {low:g}..{high:g}")
        return float(value)


def parse_json(
    data: bytes,
    where: str,
    error: type[StreamspecError] = BundleError,
    fix: str = "export the bundle again",
    most: int = MAX_JSON,
    infinite: bool = False,
) -> Any:
    """Parses UTF-8 JSON of bounded size; NaN, infinities, repeated keys, halves of surrogate pairs and absurd nesting
    are refused. `infinite`: infinities are taken, which transformers writes into configs.
    """
    if len(data) > most:
        raise error(f"{where} has {len(data)} bytes", f"at most {most}", fix)
    try:
        constant = _infinity if infinite else _refuse_constant
        value = json.loads(
            data.decode("utf-8"), parse_constant=constant, parse_float=_finite, object_pairs_hook=_unique
        )
        _refuse_odd(value, MAX_DEPTH)
        return value
    except (ValueError, RecursionError) as problem:
        raise error(f"{where}: {problem}", "JSON", fix) from None


def parse_object(
    data: bytes, where: str, error: type[StreamspecError], fix: str, infinite: bool = False
) -> dict[str, Any]:
    """Parses JSON that must be an object. Errors as in `parse_json`."""
    return Fields(parse_json(data, where, error, fix, infinite=infinite), where, error, fix).values


def read_note(file: Path) -> dict[str, Any]:
    """Reads a note in the cache, a JSON object. Returns an empty one where the file is missing or
    damaged: the caller then computes anew what was noted."""
    try:
        return parse_object(file.read_bytes(), file.name, BundleError, "")
    except (OSError, StreamspecError):
        return {}


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def _infinity(name: str) -> float:
    return float(name) if name != "NaN" else _refuse_constant(name)


def _refuse_odd(value: object, depth: int) -> None:
    if depth == 0:
        raise ValueError(f"nested more than {MAX_DEPTH} deep")
    if isinstance(value, str):
        value.encode()  # raises a ValueError of its own
    elif isinstance(value, (dict, list)):
        for part in (*value, *value.values()) if isinstance(value, dict) else value:
            _refuse_odd(part, depth - 1)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is too large")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ValueError("a key is repeated")
    return out


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
