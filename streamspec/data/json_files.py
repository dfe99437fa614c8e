"""Reads JSON lines, JSON arrays and CSV row by row, in bounded memory. Every error names the file and the line.

Tests: tests/core/data/test_sources.py.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from streamspec.errors import DataError, meant, names_in

Row = dict[str, Any]
Located = tuple[Row, str]  # a row and where it stands, for messages
MAX_LINE = 16 << 20  # characters
CHUNK = 1 << 20  # characters of a JSON array read at a time
OPENING = 1 << 12  # bytes that tell an array from lines
MEND = "mend or drop the line"


def json_rows(path: Path) -> Iterator[Located]:
    """Reads the rows of JSON lines, or of a JSON array, with or without a byte order mark."""

    def rows(file: TextIO, opening: bytes) -> Iterator[Located]:
        if opening.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"[":
            yield from _array(file, path)
            return
        for number, line in enumerate(_lines(file, path), start=1):
            if line.strip():
                yield _object(line, path, number), f"{path}, line {number}"

    yield from _reading(path, rows)


def csv_rows(path: Path) -> Iterator[Located]:
    """Reads the rows of a CSV or TSV file, the first line of which names the columns; cells are strings."""

    def rows(file: TextIO, opening: bytes) -> Iterator[Located]:
        header = opening.splitlines()[0] if opening.strip() else b""
        delimiter = "\t" if path.suffix.lower() == ".tsv" else ";" if b";" in header and b"," not in header else ","
        csv.field_size_limit(MAX_LINE)
        reader = csv.DictReader(_lines(file, path), delimiter=delimiter, strict=True)
        try:
            names = list(reader.fieldnames or [])
            if len(set(names)) < len(names) or "" in names:
                raise DataError(f"{path}: columns {names}", "one name for each column", "correct the first line")
            for row in reader:
                where = f"{path}, line {reader.line_num}"
                if None in row or None in row.values():
                    raise DataError(f"{where}: more or fewer cells than columns", f"{len(names)}", "mend the line")
                yield dict(row), where
        except csv.Error as error:
            raise DataError(f"{path}, after line {reader.line_num}: {error}", "CSV", MEND) from None

    yield from _reading(path, rows)


def _reading(path: Path, rows: Callable[[TextIO, bytes], Iterator[Located]]) -> Iterator[Located]:
    """Opens `path` as UTF-8 text and reads it. `rows` gets the file and its first bytes, which it has not consumed."""
    try:
        raw = path.open("rb")
    except OSError as error:
        advice = "check the path" + meant(path.name, names_in(path.parent))
        raise DataError(f"{path}: {error.strerror}", "a readable file", advice) from None
    with raw:
        last = ""
        try:
            opening = raw.peek(OPENING)[:OPENING]
            with io.TextIOWrapper(raw, encoding="utf-8-sig", newline="") as file:
                for row, last in rows(file, opening):
                    yield row, last
        except UnicodeDecodeError:
            where = last or f"{path}, the beginning"
            raise DataError(f"{where} and after: not UTF-8", "UTF-8 text", "re-encode the file") from None
        except OSError as error:
            raise DataError(f"{path}: {error.strerror}", "a readable file", "check the path") from None


def _lines(file: TextIO, path: Path) -> Iterator[str]:
    number = 0
    while line := file.readline(MAX_LINE + 1):
        number += 1
        if len(line) > MAX_LINE:
            raise DataError(
                f"{path}, line {number}: more than {MAX_LINE} characters", "one row a line", "check the file"
            )
        yield line


def _array(file: TextIO, path: Path) -> Iterator[Located]:
    """Reads the objects of a JSON array, each parsed as soon as it is whole."""
    decoder = json.JSONDecoder()
    text, at, line, expected = "", 0, 1, "["
    while True:
        chunk = file.read(CHUNK)
        text, at = text[at:] + chunk, 0
        while at < len(text):
            if text[at] in " \t\r\n":
                line, at = line + (text[at] == "\n"), at + 1
            elif text[at] in expected:
                expected = {"[": "]{", ",": "{", "]": ""}.get(text[at], ",]")
                if text[at] != "{":
                    at += 1
                    continue
                try:
                    row, end = decoder.raw_decode(text, at)
                except (ValueError, RecursionError) as error:
                    expected = "{"
                    if chunk and len(text) - at <= MAX_LINE and not isinstance(error, RecursionError):
                        break  # perhaps cut off: read on
                    raise _broken(error, path, line) from None
                yield _checked(row, path, line), f"{path}, line {line}"
                line, at = line + text.count("\n", at, end), end
            else:
                where = "in" if expected else "after"
                raise DataError(
                    f"{path}, line {line}: {text[at]!r} {where} a JSON array", "objects with commas between", "mend it"
                )
        if not chunk:
            break
    if expected:
        raise DataError(f"{path}, line {line}: a JSON array without its end", "]", "mend the file")


def _object(line: str, path: Path, number: int) -> Row:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _broken(error, path, number) from None
    return _checked(row, path, number)


def _broken(error: Exception, path: Path, number: int) -> DataError:
    reason = getattr(error, "msg", error)  # JSON's own errors count lines anew
    return DataError(f"{path}, line {number}: {reason}", "one JSON object a line", MEND)


def _checked(row: Any, path: Path, number: int) -> Row:
    if not isinstance(row, dict):
        raise DataError(f"{path}, line {number}: {type(row).__name__}", "a JSON object", MEND)
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except (UnicodeEncodeError, RecursionError):
        raise DataError(
            f"{path}, line {number}: half of a surrogate pair, or nested too deep",
            "text that UTF-8 can hold",
            MEND,
        ) from None
    return row
