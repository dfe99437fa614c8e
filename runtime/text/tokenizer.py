"""Opens the bundle's tokenizer and chat template, which are not trusted.

The tokenizers library takes anything that parses: padding to 10^12 tokens, replacements that multiply a text a hundred
times over, and steps that panic at the first text. So padding and truncation are taken off, what can grow is limited,
and a panic ends in one line.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from streamspec.bundle.files import read_small
from streamspec.bundle.manifest import TEMPLATE, TOKENIZER, Manifest
from streamspec.errors import BundleError

MAX_TOKENIZER = 128 << 20  # bytes; the largest in use, of 262,144 tokens, have 33 MB
MAX_TEMPLATE = 1 << 20  # bytes
MAX_GROWTH = 256  # times that a text may get longer on its way to tokens, or a token's on its way to text
MAX_STEPS = 64
MAX_ADDED = 1000  # characters put in front of a text
FIX = "export the bundle again"
GROWTH = {"ByteLevel": 2, "Metaspace": 4, "NFKC": 4, "NFKD": 4, "NFC": 2, "NFD": 2, "ByteFallback": 2}


class BundleTokenizer:
    """A `tokenizers.Tokenizer` whose panics are BundleErrors; everything else is delegated to it."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str, add_special_tokens: bool = True) -> Any:
        return _guarded(self._tokenizer.encode, text, add_special_tokens=add_special_tokens)

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
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        raise BundleError(f"{TOKENIZER} is no UTF-8 text", "a tokenizer", FIX) from None
    tokenizer = _guarded(Tokenizer.from_str, text)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    _check_growth("text", tokenizer.normalizer, tokenizer.pre_tokenizer)
    _check_growth("tokens", tokenizer.decoder)
    return BundleTokenizer(tokenizer)


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


def _check_growth(what: str, *parts: Any) -> None:
    """`parts`: steps of the tokenizer, or None."""
    growth, added = 1.0, 0
    steps = [step for part in parts if part is not None for step in _steps(json.loads(part.__getstate__()))]
    for step in steps:
        kind = step.get("type")
        if kind == "Replace":
            pattern = step.get("pattern") or {}
            replaced, content = len(pattern.get("String", "")), len(step.get("content", ""))
            growth *= max(1.0, content / replaced if replaced else content + 1)
        elif kind == "Prepend":
            added += len(step.get("prepend", ""))
        else:
            growth *= GROWTH.get(str(kind), 1)
    if growth > MAX_GROWTH or added > MAX_ADDED or len(steps) > MAX_STEPS:
        raise BundleError(
            f"{TOKENIZER}: {len(steps)} steps that make {what} {growth:.3g} times as long and {added} longer",
            f"at most {MAX_STEPS}, {MAX_GROWTH} times and {MAX_ADDED}",
            FIX,
        )


def _steps(part: dict[str, Any]) -> Iterator[dict[str, Any]]:
    inner = next((part[name] for name in ("normalizers", "pretokenizers", "decoders") if name in part), None)
    if inner is None:
        yield part
    for one in inner or ():
        yield from _steps(one)
