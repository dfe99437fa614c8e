"""The errors a user can cause, each as one line: what was found, what was expected, what to do.

Any other exception that escapes is a bug and may show a traceback.
"""

from __future__ import annotations

import os
from collections.abc import Iterable


class StreamspecError(Exception):
    """Base class of every error that a user can act on. `str(error)` is one line.

    - `found`, `expected`, `fix`: the parts of that line: what was found, what was expected, what to do.
    - `code`: stable, for scripts to match on; the wording may change.
    - `exit_status`: exit code of the command line.

    Raise it with the three parts:
    `raise BundleError("model.onnx has 10 bytes", "12 bytes as the manifest says", "export the bundle again")`.
    """

    code = "error"
    exit_status = 2

    def __init__(self, found: str, expected: str = "", fix: str = "") -> None:
        self.found = one_line(found)
        self.expected = one_line(expected)
        self.fix = one_line(fix)
        parts = [self.found]
        if self.expected:
            parts.append(f"expected {self.expected}")
        if self.fix:
            parts.append(self.fix)
        super().__init__("; ".join(parts))

    def __reduce__(self) -> tuple[type[StreamspecError], tuple[str, str, str]]:
        # Exception's own pickling would hand the joined message back as `found`.
        return type(self), (self.found, self.expected, self.fix)


class BundleError(StreamspecError):
    """A bundle is damaged, incomplete, hostile or of a format this version cannot read."""

    code = "bundle"


class AdapterError(StreamspecError):
    """An adapter folder does not hold what its configuration promises."""

    code = "adapter"


class DataError(StreamspecError):
    """Training or benchmark data cannot be read as one of the known shapes."""

    code = "data"


class ContextOverflow(StreamspecError):
    """The prompt leaves no room for a new token in the model's context."""

    code = "context_overflow"


class ConversationError(StreamspecError):
    """A saved conversation is damaged, hostile, or of another bundle, adapter or template."""

    code = "conversation"


class ConfigError(StreamspecError):
    """Options contradict each other or are out of range."""

    code = "config"


class ProviderError(StreamspecError):
    """An execution provider is not installed, or cannot run the bundle."""

    code = "provider"


class ResourceError(StreamspecError):
    """The machine has less memory or disk than needed, or its GPU failed."""

    code = "memory"


class BaseModelError(StreamspecError):
    """A base model cannot be found, read or supported."""

    code = "base_model"


class StreamspecWarning(RuntimeWarning):
    """What a user should know and that stops nothing. Those of libraries are not shown to users."""


def one_line(text: str, limit: int = 600) -> str:
    """Collapses white space and control characters: file content quoted in a message must not forge further lines."""
    clean = "".join(ch if ch.isprintable() else " " for ch in str(text))
    clean = " ".join(clean.split())
    return clean if len(clean) <= limit else clean[: limit - 3] + "..."


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Returns the name among `known` that `name` most likely misspells; None where none is close."""
    from difflib import get_close_matches

    lower = {candidate.lower(): candidate for candidate in known}
    matches = get_close_matches(name.lower(), lower, n=1, cutoff=0.7)
    return lower[matches[0]] if matches else None


def meant(name: str, known: Iterable[str]) -> str:
    """ ", did you mean ...?", for the end of an error; empty where nothing known is close to `name`."""
    near = nearest(name, known)
    return "" if near is None else f", did you mean {near}?"


def names_in(folder: str | os.PathLike[str] = ".") -> list[str]:
    """Lists what a folder holds, for `meant`; nothing where it cannot be read."""
    try:
        return os.listdir(folder)
    except OSError:
        return []
