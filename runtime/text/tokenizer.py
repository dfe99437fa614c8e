"""Opens the bundle's tokenizer and chat template, which are not trusted.

The tokenizers library takes anything that parses: padding to 10^12 tokens, replacements and post-processors that
multiply a text, tokens of megabytes, dropout, steps that panic at the first text. So padding and truncation are taken
off, what can grow is limited, what draws at random is refused, and a panic ends in one line.
"""

from __future__ import annotations

import base64
import json
import re
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from streamspec.bundle.files import read_small
from streamspec.bundle.manifest import TEMPLATE, TOKENIZER, Manifest
from streamspec.errors import BundleError
from streamspec.prompt.control_tokens import ControlTokens
from streamspec.runtime.hardware.huge_pages import trim
from streamspec.runtime.text.token_bytes import steps_of

MAX_TOKENIZER = 128 << 20  # bytes; the largest in use, of 262,144 tokens, have 33 MB
MAX_TEMPLATE = 1 << 20  # bytes
MAX_GROWTH = 256  # times that a text may get longer on its way to tokens, or a token's on its way to text
MAX_STEPS = 64
MAX_ADDED = 1000  # characters or tokens put around a text
MAX_STRING = 8 << 10  # bytes of a token or an expression in the file; the longest token in use has 163
MAX_WORD = 1000  # characters that WordPiece tries all parts of; usual are 100
LARGE = 1 << 20  # bytes of a file whose reading takes ten times as much for a while
LONG = 1 << 16  # characters of a text that takes 10 MB and more while it is split: 350 bytes a character at worst
FIX = "export the bundle again"
GROWTH = {"ByteLevel": 2, "Metaspace": 4, "NFKC": 4, "NFKD": 4, "NFC": 2, "NFD": 2, "ByteFallback": 2}


_one_long = threading.Lock()  # the process's memory is at stake, whatever the bundle


class BundleTokenizer:
    """A `tokenizers.Tokenizer` whose panics are BundleErrors; everything else is delegated to it. It encodes one long
    text at a time and returns what that took to the system: where no memory is left, the library ends the process.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str, add_special_tokens: bool = True) -> Any:
        long = len(text) > LONG
        with _one_long if long else nullcontext():
            encoded = _guarded(self._tokenizer.encode, text, add_special_tokens=add_special_tokens)
            if long:
                trim()
        return encoded

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return str(_guarded(self._tokenizer.decode, ids, skip_special_tokens=skip_special_tokens))

    def __getattr__(self, name: str) -> Any:
        if name == "_tokenizer":  # not set yet: while it is copied
            raise AttributeError(name)
        return getattr(self._tokenizer, name)


def read_tokenizer(folder: Path) -> BundleTokenizer:
    """Reads the tokenizer of the bundle in `folder`. Raises BundleError for one that does not load or that no text
    could safely be given to.
    """
    from tokenizers import Tokenizer

    data = read_small(folder, TOKENIZER, FIX, MAX_TOKENIZER)
    _check_strings(data)
    tokenizer = _guarded(Tokenizer.from_buffer, data)
    if len(data) > LARGE:
        del data
        trim()
    tokenizer.no_padding()
    tokenizer.no_truncation()
    _check_growth("text", tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.post_processor)
    _check_growth("tokens", tokenizer.decoder)
    if dropout := getattr(tokenizer.model, "dropout", None):
        raise BundleError(f"{TOKENIZER}: dropout of {dropout:g}", "one way to split a text", FIX)
    if (longest := getattr(tokenizer.model, "max_input_chars_per_word", 0)) > MAX_WORD:
        raise BundleError(f"{TOKENIZER}: words of {longest} characters", f"at most {MAX_WORD}", FIX)
    return BundleTokenizer(tokenizer)


def control_tokens(tokenizer: Any, template: str) -> ControlTokens:
    """Returns the control tokens of a `tokenizers.Tokenizer` and a chat template."""

    def read(written: str) -> Any:
        from tokenizers import Tokenizer

        return BundleTokenizer(_guarded(Tokenizer.from_str, written))

    return ControlTokens(tokenizer, template, read)


def read_template(folder: Path, manifest: Manifest) -> str | None:
    """Reads the bundle's chat template, None where it has none. Raises BundleError."""
    if TEMPLATE not in manifest.files:
        if manifest.prompt_format.kind == "chat":
            raise BundleError(f"a chat bundle without {TEMPLATE}", "a chat template", FIX)
        return None
    try:
        return read_small(folder, TEMPLATE, FIX, MAX_TEMPLATE).decode("utf-8")
    except UnicodeDecodeError:
        raise BundleError(f"{TEMPLATE} is no UTF-8 text", "a chat template", FIX) from None


def _guarded(function: Any, *arguments: Any, **options: Any) -> Any:
    try:
        return function(*arguments, **options)
    except BaseException as error:  # the library's panics are not Exceptions
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise BundleError(f"{TOKENIZER}: {error}", "a tokenizer that works", FIX) from None


def _check_strings(data: bytes) -> None:
    """Refuses long strings in JSON, but for sentencepiece's charsmap. Looks at quotes alone, before anything is parsed:
    none of a string's own lacks a backslash before it.
    """
    read = np.frombuffer(data, np.uint8)
    quotes = read == ord('"')
    quotes[1:] &= read[:-1] != ord("\\")
    at = np.flatnonzero(quotes)
    for i in np.flatnonzero(np.diff(at) > MAX_STRING):
        if not re.search(rb'"precompiled_charsmap"\s*:\s*\Z', data[max(0, at[i] - 40) : at[i]]):
            raise BundleError(
                f"{TOKENIZER}: a text of {at[i + 1] - at[i] - 1} bytes", f"tokens of at most {MAX_STRING}", FIX
            )


def _check_growth(what: str, *components: Any) -> None:
    """`components`: steps of the tokenizer, or None."""
    growth, added = 1.0, 0.0
    steps = [
        step
        for component in components
        if component is not None
        for step in steps_of(json.loads(component.__getstate__()))
    ]
    for step in steps:
        kind = str(step.get("type"))
        times, more = GROWING[kind](step) if kind in GROWING else (GROWTH.get(kind, 1), 0)
        growth, added = growth * times, added * times + more
    if growth > MAX_GROWTH or added > MAX_ADDED or len(steps) > MAX_STEPS:
        raise BundleError(
            f"{TOKENIZER}: {len(steps)} steps that make {what} {growth:.3g} times as long and {added:.0f} longer",
            f"at most {MAX_STEPS}, {MAX_GROWTH} times and {MAX_ADDED}",
            FIX,
        )


Growth = tuple[float, int]  # how many times as long a step makes a text, and what it adds to it


def _replaced(step: dict[str, Any]) -> Growth:
    replaced, content = len((step.get("pattern") or {}).get("String", "")), len(step.get("content", ""))
    return max(1.0, content / replaced if replaced else content + 1), 0


def _normalized(step: dict[str, Any]) -> Growth:
    """A charsmap is the bytes of its index, the index, and replacements that each end with a zero."""
    data = base64.b64decode(step.get("precompiled_charsmap") or "")
    return max(map(len, data[4 + int.from_bytes(data[:4], "little") :].split(b"\0"))) or 1, 0


def _around(step: dict[str, Any]) -> Growth:
    """A template of the post-processor, which has to hold the prompt once."""
    pieces, special = step.get("single", []), step.get("special_tokens", {})
    if (prompts := sum("Sequence" in piece for piece in pieces)) != 1:
        raise BundleError(f"{TOKENIZER}: a post-processor that puts the prompt in {prompts} times", "once", FIX)
    marks = [piece["SpecialToken"]["id"] for piece in pieces if "SpecialToken" in piece]
    return 1, sum(len(special[mark]["ids"]) for mark in marks)


GROWING: dict[str, Callable[[dict[str, Any]], Growth]] = {
    "Replace": _replaced,
    "Prepend": lambda step: (1, len(step.get("prepend", ""))),
    "Precompiled": _normalized,
    "TemplateProcessing": _around,
}
