"""Keeps the answers that the sessions of one `load` gave, to draft from: a store that grows. Off unless asked for, in
memory unless a file is named.

The file begins with a line that names it and the tokenizer's sha256, then come token ids as uint32, little-endian, each
answer ended by end-of-text. Answers are appended as they come, by any number of processes, one at a time; the oldest
are dropped when it is read or has grown long.
"""

from __future__ import annotations

import os
import stat
import sys
import threading
import warnings
from collections.abc import Sequence
from copy import copy
from pathlib import Path
from typing import BinaryIO

import numpy as np

from streamspec.atomic import new_file
from streamspec.bundle.manifest import TOKENIZER, Manifest
from streamspec.bundle.store_section import suffix_array
from streamspec.errors import ConfigError, StreamspecWarning
from streamspec.file_lock import held_if_any
from streamspec.runtime.draft_sources.store import AnswerStore

MAX_TOKENS = 100_000  # tokens that are drafted from; the newest, after they were ordered in 0.07 s
FIRST, SHARE = 128, 8  # tokens that wait to be ordered: this many, or this share of those that are
MAX_FILE = 64 << 20  # bytes
GROWN = 10 * MAX_TOKENS  # tokens of a file, after which it is written anew with the newest
PATIENCE = 5.0  # seconds that a process waits for another one's turn at the file
KIND = "streamspec answers 1"


class PastAnswers:
    """`store`: of the answers so far, None while there are few. For any number of threads."""

    def __init__(self, manifest: Manifest, path: str | Path | None = None) -> None:
        """Reads the file `path`, or makes it. Raises ConfigError for a base without an end of text, and for a file that
        is none of these answers, of another tokenizer, or cannot be made."""
        model = manifest.model
        if not model.eos_token_ids:
            raise ConfigError("past answers of a base without an end of text", "an end-of-text token", "leave them out")
        self.store: AnswerStore | None = None
        self._end, self._vocab = model.eos_token_ids[0], model.vocab_size
        self._header = f"{KIND} {manifest.files[TOKENIZER].sha256}\n".encode()
        self._path, self._lock = None if path is None else _located(path), threading.RLock()
        self._tokens, self._ordered = list[int](), 0
        if self._path is not None:
            with held_if_any(_turn(self._path), PATIENCE):
                self._tokens = self._read(self._path)
            self._order()
        self._loaded = np.array(self._tokens, np.uint32)

    def add(self, answer: Sequence[int]) -> None:
        """Adds an answer, and to the file, too."""
        if not answer:
            return
        answer = [*answer] if answer[-1] == self._end else [*answer, self._end]
        with self._lock:
            self._tokens += answer
            if self._path is not None:
                self._append(self._path, np.array(answer, "<u4").tobytes())
            if len(self._tokens) - self._ordered >= max(FIRST, self._ordered // SHARE):
                self._order()

    def as_loaded(self) -> PastAnswers:
        """Returns the answers that the file had when it was read. Further ones stay in memory."""
        other = copy(self)
        other._lock = threading.RLock()
        other._path = None
        other.store = None
        other._tokens = self._loaded.tolist()
        other._order()
        return other

    def _order(self) -> None:
        """Drops the oldest answers and makes the store anew."""
        if len(self._tokens) > MAX_TOKENS:
            first = self._tokens.index(self._end, len(self._tokens) - MAX_TOKENS - 1) + 1
            del self._tokens[:first]
        self._ordered = len(self._tokens)
        if self._ordered >= FIRST:
            tokens = np.array(self._tokens)
            self.store = AnswerStore(tokens, suffix_array(tokens), self._end)

    def _read(self, path: Path) -> list[int]:
        """The tokens of a file, at this process's turn; makes it where it is not there or was cut off within its first
        line."""
        try:
            handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
            with open(handle, "rb") as file:
                about = os.fstat(handle)
                plain = stat.S_ISREG(about.st_mode)
                header = file.read(len(self._header)) if plain else b""
                if skipped := max(0, about.st_size - len(header) - MAX_FILE):  # the oldest
                    file.seek(skipped // 4 * 4, os.SEEK_CUR)
                ids = file.read(MAX_FILE) if header else b""
        except FileNotFoundError:
            plain, header = True, b""
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}", "a file that can be read", "name another one") from None
        if plain and self._begun(header):
            try:
                self._write(path, b"")
            except OSError as error:
                raise ConfigError(f"{path}: {error.strerror}", "a place for a file", "name another one") from None
            return []
        if not plain or header != self._header:
            raise ConfigError(f"{path} holds no answers of this tokenizer", "a file of its own", "name another one")
        tokens = np.frombuffer(ids[: len(ids) // 4 * 4], "<u4")  # a killed process may have cut the last one
        if len(tokens) and tokens.max() >= self._vocab:
            raise ConfigError(f"{path} has token {tokens.max()}", f"tokens 0..{self._vocab - 1}", "name another file")
        ends = np.flatnonzero(tokens == self._end) + 1
        whole = int(ends[-1]) if len(ends) else 0
        if len(tokens) > 2 * MAX_TOKENS:  # from the first answer that begins among the newest tokens
            tokens = tokens[int(ends[np.searchsorted(ends, whole - MAX_TOKENS)]) : whole]
        if len(tokens[:whole]) * 4 != len(ids):
            tokens = tokens[:whole]
            try:
                self._write(path, tokens.tobytes())
            except OSError as error:
                self._give_up(path, error.strerror)
        return [int(token) for token in tokens]

    def _begun(self, header: bytes) -> bool:
        """Whether a file that begins so was cut off within its first line, or has none."""
        return not header or (len(KIND) <= len(header) < len(self._header) and self._header.startswith(header))

    def _write(self, path: Path, data: bytes) -> None:
        """Writes the whole file anew."""
        with new_file(path) as new, _private(new) as file:
            file.write(self._header + data)

    def _append(self, path: Path, data: bytes) -> None:
        if sys.is_finalizing():  # files can no longer be opened
            return
        try:
            with held_if_any(_turn(path), PATIENCE):
                with _private(path) as file:
                    header = file.read(len(self._header))
                    if header == self._header:
                        file.seek(0, os.SEEK_END)
                        file.write(data)
                    elif self._begun(header):
                        file.truncate(0)
                        file.write(self._header + data)
                    else:
                        return self._give_up(path, "it holds answers of another tokenizer by now")
                    grown = file.tell() > 4 * GROWN
                if grown:
                    self._read(path)
        except OSError as error:
            self._give_up(path, error.strerror)
        except ConfigError as error:
            self._give_up(path, error.found)

    def _give_up(self, path: Path, why: str | None) -> None:
        """Answers go on without the file."""
        self._path = None
        warnings.warn(f"{path}: {why}; answers are no longer kept", StreamspecWarning, stacklevel=3)


def _located(path: str | Path) -> Path:
    """The file itself, not a link to it. Raises ConfigError for what is no path."""
    try:
        return Path(os.path.realpath(path))
    except ValueError as error:
        raise ConfigError(f"past_answers {str(path)!r}: {error}", "a path", "name a file") from None


def _turn(path: Path) -> Path:
    """The lock of the process that reads or writes a file."""
    return path.with_name(f"{path.name}.lock")


def _private(path: Path) -> BinaryIO:
    """Opens a file to append to, which its owner alone may read."""
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0)
    return open(os.open(path, flags, 0o600), "r+b")
