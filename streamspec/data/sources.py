"""Finds what a name of data means: a file by its ending, a pattern of files, a folder of `datasets`, or a name on the
Hub. Tests: tests/core/data/test_sources.py.
"""

from __future__ import annotations

import glob
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain, count
from pathlib import Path
from typing import Any

from streamspec.atomic import sha256_file
from streamspec.data import tables
from streamspec.data.json_files import CHUNK, Located, csv_rows, json_rows
from streamspec.errors import DataError

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
SAVED = ("dataset_info.json", "dataset_dict.json")  # of datasets.save_to_disk


@dataclass(frozen=True)
class DataSource:
    """Reads the rows under one name, counts them, and lists the files that hold them."""

    name: str
    rows: Callable[[], Iterator[Located]]
    length: Callable[[], int]
    files: Callable[[], list[Path]]


def sources(data: Sequence[str | Path] | str | Path) -> list[DataSource]:
    """One source for each file or dataset that `data` names, in order. Raises DataError for a name that is none."""
    names = [data] if isinstance(data, (str, Path)) else list(data)
    return [source for name in names for source in _named(str(name))]


def fingerprints(data: Sequence[str | Path] | str | Path) -> dict[str, str]:
    """Sha256 of all that `data` names, hexadecimal, by the last part of each name."""
    digests_by_name: dict[str, str] = {}
    for source in sources(data):
        try:
            digests = [sha256_file(file) for file in source.files()]
        except OSError as error:
            raise DataError(f"{source.name}: {error.strerror}", "a readable file", "check the path") from None
        joined = digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()
        digests_by_name[_unused(Path(source.name).name, digests_by_name)] = joined
    return digests_by_name


def _unused(name: str, used: Mapping[str, str]) -> str:
    """Returns `name`, with a number where a file of another folder has the same name."""
    names = chain([name], (f"{name} ({number})" for number in count(2)))
    return next(candidate for candidate in names if candidate not in used)


def count_rows(data: Sequence[str | Path] | str | Path) -> int:
    """Counts rows, for progress: in text files lines, of which a few may be blank or continue a cell."""
    return sum(source.length() for source in sources(data))


def _named(name: str) -> list[DataSource]:
    path = Path(name)
    if not path.exists():
        if glob.has_magic(name):
            matches = sorted(glob.glob(name, recursive=True))
            if not matches:
                raise DataError(f"{name}: no file of this pattern", "files", "check --data")
            return [source for match in matches for source in _named(match)]
        folder, colon, split = name.rpartition(":")
        if colon and Path(folder).is_dir():
            return [_saved(Path(folder), split)]
        if HUB_NAME.fullmatch(name.split(":")[0]) and path.suffix.lower() not in READERS and not path.parent.is_dir():
            return [_hub(name)]
    if path.is_dir():
        return [_saved(path, None)]
    read, length = READERS.get(path.suffix.lower(), READERS[".jsonl"])
    return [DataSource(name, partial(read, path), partial(length, path), lambda: [path])]


def _saved(folder: Path, split: str | None) -> DataSource:
    if not any((folder / file).is_file() or (folder / (split or "") / file).is_file() for file in SAVED):
        raise DataError(
            f"{folder} is a folder without {' or '.join(SAVED)}",
            "a file, or what datasets.save_to_disk wrote",
            f"for files give a pattern such as '{folder}/*.jsonl'",
        )
    return _dataset(f"{folder}" + (f":{split}" if split else ""), lambda: tables.saved_dataset(folder, split))


def _hub(name: str) -> DataSource:
    repository, *rest = name.split(":")
    if len(rest) > 2:
        raise DataError(f"{name}", "NAME, NAME:SPLIT or NAME:CONFIGURATION:SPLIT", "check --data")
    configuration = rest[0] if len(rest) == 2 else None
    return _dataset(name, lambda: tables.hub_dataset(repository, configuration, rest[-1] if rest else None))


def _dataset(name: str, opened: Callable[[], Any]) -> DataSource:
    once = lru_cache(maxsize=1)(opened)

    def files() -> list[Path]:
        return [Path(cached["filename"]) for cached in once().cache_files]

    return DataSource(name, lambda: tables.dataset_rows(once(), name), lambda: len(once()), files)


def _count_json(path: Path) -> int:
    try:
        with path.open("rb") as file:
            if file.read(CHUNK).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] != b"[":
                return _count_lines(path)
    except OSError:
        return 0  # reading it says why
    return sum(1 for _ in json_rows(path))


def _count_lines(path: Path, header: int = 0) -> int:
    lines, last = 0, b"\n"
    try:
        with path.open("rb") as file:
            while block := file.read(CHUNK):
                lines, last = lines + block.count(b"\n"), block[-1:]
    except OSError:
        return 0
    return max(0, lines + (last != b"\n") - header)


Reader = tuple[Callable[[Path], Iterator[Located]], Callable[[Path], int]]
_JSON: Reader = (json_rows, _count_json)
_CSV: Reader = (csv_rows, partial(_count_lines, header=1))
READERS: dict[str, Reader] = {  # by the ending of a file's name; any other is JSON
    ".jsonl": _JSON,
    ".json": _JSON,
    ".csv": _CSV,
    ".tsv": _CSV,
    ".parquet": (tables.parquet_rows, tables.parquet_length),
}
