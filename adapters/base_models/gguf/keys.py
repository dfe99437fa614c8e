"""Reads the keys of a GGUF file: each is checked for its type and range as it is read, and those left over are refused
by name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NoReturn

from streamspec.errors import BaseModelError
from streamspec.json_fields import Fields

REQUIRED: Any = object()  # default of a key that must be there
WIDEST = 1 << 18  # of hidden states, heads and MLPs; the widest MLP published has 2^16
MOST_HEADS = 512
LONGEST = 1 << 30  # of contexts and windows, in tokens
LARGEST = 1e9  # of factors, scales and caps
SMALLEST = 1e-9  # of those that cannot be 0
DRAFTING = "nextn_predict_layers"  # counts the layers after the model's own, which draft


class Keys(Fields):
    """The keys below `prefix` of the file `name`, which has `tensors` of these names. Every method but `skip` and `has`
    raises BaseModelError for a value of another type or out of its range; where the file lacks the key it returns the
    default, unchecked, or raises where that is REQUIRED. It remembers which were asked for, for `finish`.
    """

    def __init__(self, metadata: Mapping[str, Any], name: str, prefix: str, tensors: Collection[str] = ()) -> None:
        self.file, self.prefix, self.tensors = name, prefix + ".", tensors
        below = {key.removeprefix(self.prefix): v for key, v in metadata.items() if key.startswith(self.prefix)}
        fix = "check the file, or use the model's Hugging Face folder"
        super().__init__(below, f"{name}: {prefix}", BaseModelError, fix)
        self._taken: set[str] = set()

    def raw(self, name: str) -> Any:
        """The unchecked value of a key. Raises BaseModelError for one that is missing."""
        self._taken.add(name)
        if name not in self.values:
            raise BaseModelError(f"{self.file} has no {self.prefix}{name}", "this key", "convert the model again")
        return self.values[name]

    def _missing(self, key: str, default: Any) -> bool:
        self._taken.add(key)
        return key not in self.values and default is not REQUIRED

    def whole(self, key: str, default: Any = REQUIRED, low: int = 1, high: int = WIDEST) -> Any:
        """A whole number."""
        return default if self._missing(key, default) else self.integer(key, low, high)

    def same(self, key: str, default: Any = REQUIRED, high: int = WIDEST, zeros: bool = False) -> int:
        """A whole number above 0. A list of equal numbers, one for each layer, counts as one; `zeros` may be among
        them.
        """
        value = default if self._missing(key, default) else self.raw(key)
        if isinstance(value, list):
            different = {number for number in value if not (zeros and number == 0)}
            value = different.pop() if len(different) == 1 else value
        if type(value) is not int or not 0 < value <= high:
            self.refuse(key, value, f"a number from 1 to {high}, the same in all layers")
        return value

    def real(self, key: str, default: Any = REQUIRED, low: float = 0.0, high: float = LARGEST) -> Any:
        """A number."""
        return default if self._missing(key, default) else self.number(key, low, high)

    def switch(self, key: str, default: bool) -> bool:
        """True or false."""
        return default if self._missing(key, default) else self.flag(key)

    def word(self, key: str, default: Any = REQUIRED, longest: int = 100) -> Any:
        """A text."""
        return default if self._missing(key, default) else self.text(key, longest)

    def words(self, key: str) -> list[str]:
        """A list of texts, of any length; the key must be there."""
        value = self.raw(key)
        if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
            self.refuse(key, value, "a list of texts")
        return value

    def only(self, key: str, *allowed: Any) -> None:
        """Takes a key that may be missing, or one of the values."""
        if not self._missing(key, None) and self.values[key] not in allowed:
            self.refuse(key, self.values[key], " or ".join(map(str, allowed)))

    def skip(self, *keys: str) -> None:
        """Keys that do not change what the model computes."""
        self._taken.update(keys)

    def has(self, key: str) -> bool:
        """Tells whether the file has the key, without taking it."""
        return key in self.values

    def refuse(self, key: str, value: Any, expected: str) -> NoReturn:
        """Raises BaseModelError for a value that is not understood."""
        raise BaseModelError(f"{self.file}: {self.prefix}{key} is {str(value)[:60]}", expected, self.fix)

    def finish(self) -> None:
        """Raises BaseModelError for keys that nobody took."""
        if left := sorted(self.values.keys() - self._taken):
            more = f" and {len(left) - 1} more" if len(left) > 1 else ""
            raise BaseModelError(
                f"{self.file} has the key {self.prefix}{left[0]} ({str(self.values[left[0]])[:40]}){more}",
                "keys that this converter understands",
                self.fix,
            )
