"""Tokenizes all that `--data` names into one folder of the cache: in batches, with progress, once.

Tests: tests/adapters/dataset/test_tokenize.py.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import tokenizers

from streamspec import __version__
from streamspec.adapters.dataset.formatter import Formatter
from streamspec.adapters.dataset.token_rows import ABOUT, RowWriter, TokenRows, read_rows
from streamspec.atomic import scratch_folder
from streamspec.data import Example, count_rows, iterate_examples
from streamspec.errors import DataError
from streamspec.paths import cache_dir
from streamspec.progress import track

BATCH = 1000  # examples tokenized at once
KEPT = 5000  # from so many rows on their tokens are kept, and progress is shown
KEPT_DAYS = 30  # that tokens stay in the cache unused
COUNTS = ("examples", "split", "empty", "kept", "dropped")
LAYOUT = 2  # raised with every change of what the folder holds


@dataclass(frozen=True)
class Tokens:
    """The rows of the data and what making them found: `examples`; of these `split` became several rows, and `empty`
    ones none. `kept`: answers with a thought before them, `dropped`: those whose thought the chat template leaves out.
    """

    rows: TokenRows
    examples: int
    split: int
    empty: int
    kept: int
    dropped: int
    odd: str | None  # how prompts end where the chat template writes answers otherwise

    def notes(self, name: str) -> list[str]:
        """Notes on these rows for the user, a line each."""
        lines = []
        if self.split:
            lines.append(
                f"{name}: {self.split:,} conversations became several rows, so that every answer counts: the prompt "
                "format does not keep earlier turns as they were"
            )
        if self.empty:
            lines.append(f"{name}: {self.empty:,} of {self.examples:,} rows have empty answers and were left out")
        if self.kept or self.dropped:
            lines.append(
                f"{name}: {self.kept + self.dropped:,} answers have thoughts: {self.kept:,} are trained with them, "
                f"{self.dropped:,} without, as the chat template drops them"
            )
        if self.odd is not None:
            lines.append(
                f"{name}: prompts end with {self.odd!r}, which the chat template does not write before an answer; "
                "answers are trained right after it"
            )
        return lines


def tokenize(
    data: Sequence[str], formatter: Formatter, columns: Mapping[str, str] | None, digest: str, label: str
) -> Tokens:
    """Makes the tokens of `data`, or reads those of many rows from the cache. `digest`: the data's fingerprint. Raises
    DataError for data that the formatter refuses, for none at all, and where the cache cannot be written.
    """
    total = count_rows(data)
    if total < KEPT:
        with scratch_folder() as small:
            _write(small / "rows", formatter, iterate_examples(data, columns))
            found = _read(small / "rows", in_memory=True)
            assert found is not None
            return found
    folder = cache_dir() / "tokens" / key(formatter, columns, digest)
    found = _read(folder)
    if found is None:
        _make(folder, formatter, track(iterate_examples(data, columns), label, total))
        found = _read(folder)
    if found is None:
        raise DataError(f"{folder} is damaged", "the tokens of the data", "remove it")
    return found


def _make(folder: Path, formatter: Formatter, examples: Iterator[Example]) -> None:
    """Writes the tokens of `examples` to a folder of the cache, which appears there whole."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _forget_old(folder.parent)
        made = Path(mkdtemp(prefix="unfinished-", dir=folder.parent))
        try:
            _write(made / "rows", formatter, examples)
            if _read(folder) is None:  # damaged
                shutil.rmtree(folder, ignore_errors=True)
            with suppress(OSError):  # another process has made it meanwhile
                os.replace(made / "rows", folder)
        finally:
            shutil.rmtree(made, ignore_errors=True)
    except OSError as error:
        raise DataError(
            f"{folder.parent}: {error.strerror}",
            "room for the tokens of the data",
            "free some, or set STREAMSPEC_CACHE",
        ) from None


def key(formatter: Formatter, columns: Mapping[str, str] | None, digest: str) -> str:
    """Names all that decides the tokens: data, columns, tokenizer, prompt format, template and versions."""
    tokenizer = formatter.tokenizer
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    text = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    state = [
        LAYOUT,
        __version__,
        tokenizers.__version__,
        digest,
        sorted((columns or {}).items()),
        hashlib.sha256(text.encode()).hexdigest(),
        [formatter.format.kind, formatter.format.separator, formatter.template, formatter.ends, tokenizer.bos_token],
        formatter.prompts_alone,
    ]
    return hashlib.sha256(json.dumps(state).encode()).hexdigest()[:24]


def _read(folder: Path, in_memory: bool = False) -> Tokens | None:
    found = read_rows(folder, in_memory)
    if found is None:
        return None
    rows, about = found
    with suppress(OSError):
        (folder / ABOUT).touch()
    return Tokens(rows, **{name: about[name] for name in (*COUNTS, "odd")})


def _write(folder: Path, formatter: Formatter, examples: Iterator[Example]) -> None:
    writer, counts = RowWriter(folder, max(formatter.tokenizer.get_vocab().values()) + 1), Counter[str]()
    before = Counter[str](formatter.chat.thoughts if formatter.chat else ())
    try:
        while batch := list(islice(examples, BATCH)):
            prompted = formatter.all_rows(batch)
            first = counts["examples"]
            writer.add([(row, opening, first + i) for i, rows in enumerate(prompted) for row, opening in rows])
            counts["examples"] += len(batch)
            counts["split"] += sum(len(rows) > 1 for rows in prompted)
            counts["empty"] += sum(not rows for rows in prompted)
        if not writer.rows:
            raise DataError("data without an answer in any row", "rows to learn from", "check the data")
        odd = formatter.chat.odd_beginning if formatter.chat else None
        counts += (formatter.chat.thoughts if formatter.chat else Counter()) - before
        writer.finish({name: counts[name] for name in COUNTS} | {"odd": odd})
    finally:
        writer.close()


def _forget_old(folder: Path) -> None:
    """Removes tokens that no run has used for long, and what killed runs left."""
    limit = time.time() - KEPT_DAYS * 86400
    for old in folder.iterdir():
        with suppress(OSError):
            about = old / ABOUT
            if (about if about.exists() else old).stat().st_mtime < limit:
                shutil.rmtree(old, ignore_errors=True)
