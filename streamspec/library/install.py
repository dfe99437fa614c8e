"""Pulls a bundle from wherever it is, checks every file, and installs it whole or not at all."""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from streamspec.atomic import delete, sha256_file, sweep
from streamspec.bundle.files import read_manifest, regular_file
from streamspec.bundle.manifest import MANIFEST, plain_name
from streamspec.bundle.write_files import bundle_folder
from streamspec.errors import AdapterError, BundleError, ConfigError, ResourceError
from streamspec.file_lock import held, held_if_any
from streamspec.library import archive, download
from streamspec.library.file_list import (
    AGAIN,
    FileList,
    check_arrived,
    check_size,
    expected_files,
    megabytes,
    receive,
    total_of,
)
from streamspec.library.hub import REPOSITORY, fetch_repository
from streamspec.library.installed import PULLS, library_dir
from streamspec.paths import cache_dir

KEPT = 14 * 86400.0  # seconds for which a download that broke off is kept
ENDINGS = re.compile(r"(\.streamspec|\.tar|\.bundle)+$")


@dataclass(frozen=True)
class SourceKind:
    """`fits(source)`; `fetch(source, work, sha256)` returns the packed file or the folder, brought to the folder `work`
    where it is not on this machine (`remote`). `one_file`: it has a checksum.
    """

    words: str
    fits: Callable[[str], bool]
    fetch: Callable[[str, Path, str | None], Path]
    one_file: bool
    remote: bool


def _local_file(source: str, work: Path, sha256: str | None) -> Path:
    path = Path(source)
    if sha256 is not None and (digest := sha256_file(path)) != sha256.lower():
        raise BundleError(f"{path} has sha256 {digest}", sha256.lower(), "check file and checksum")
    return path


def _local(kind: Callable[[Path], bool]) -> Callable[[str], bool]:
    """Whether a source is a path of this `kind`; an address is none, however long."""
    return lambda source: "://" not in source and kind(Path(source))


SOURCES = (
    SourceKind("a folder", _local(Path.is_dir), lambda source, work, sha256: Path(source), False, False),
    SourceKind("a file of `streamspec pack`", _local(Path.is_file), _local_file, True, False),
    SourceKind("an https address", lambda s: "://" in s, download.fetch, True, True),
    SourceKind(
        "a Hugging Face repository (owner/name)",
        lambda s: REPOSITORY.fullmatch(s) is not None and not s.startswith("."),
        lambda source, work, sha256: fetch_repository(source, work),
        False,
        True,
    ),
)


def pull(
    source: str, out: str | Path | None = None, name: str | None = None, force: bool = False, sha256: str | None = None
) -> Path:
    """Installs the bundle from `source` (`SOURCES`) as the folder `out`, by default under `name` in the library, and
    returns the folder. `sha256`: of the packed file, where `source` is one.

    Every file has the manifest's size and hash, or nothing is installed. A download that breaks off goes on in the next
    call. Raises BundleError for a bundle that is damaged or hostile or cannot be fetched, ConfigError for a source, a
    name or a checksum that is none, ResourceError where the disk is too small or another process fetches the same.
    """
    source_type = _source_type(source, sha256)
    named = name or name_of(source)
    if out is None and not plain_name(named):
        raise ConfigError(f"the name {named!r}", "letters, digits, dots and dashes", "give --name")
    target = Path(out) if out is not None else library_dir() / named
    if out is None:
        sweep(target.parent)
    if (target / MANIFEST).exists() and not force:
        raise BundleError(f"{target} already holds a bundle", "a new name", "choose another --name, or pass --force")
    with _workplace(source) if source_type.remote else nullcontext(Path()) as work:
        with bundle_folder(target, force) as staging:  # a target that cannot be is refused before anything is fetched
            fetched = source_type.fetch(source, work, sha256)
            try:
                files = copy(fetched, staging) if fetched.is_dir() else archive.unpack(fetched, staging)
                check_arrived(staging, files)
            except (BundleError, AdapterError):  # fetching the same again would not help
                if source_type.remote:
                    delete(work)
                raise
        if source_type.remote:
            delete(work)
    return target


def _source_type(source: str, sha256: str | None) -> SourceKind:
    """Finds the kind of `source`. Raises ConfigError for one of no kind, and for a checksum that it cannot have."""
    source_type = next((known for known in SOURCES if known.fits(source)), None)
    if source_type is None:
        raise ConfigError(f"nothing at {source}", " or ".join(known.words for known in SOURCES), "check the source")
    if sha256 is not None and not (source_type.one_file and re.fullmatch(r"[0-9a-fA-F]{64}", sha256)):
        raise ConfigError(f"--sha256 {sha256} for {source_type.words}", "64 hex digits, for one file", "leave it out")
    return source_type


@contextmanager
def _workplace(source: str) -> Iterator[Path]:
    """Yields the folder for what is fetched from `source`. It stays where that broke off, for the next call to go on,
    for `KEPT` seconds. Raises ResourceError where another process fetches the same.
    """
    folder = cache_dir() / PULLS
    folder.mkdir(parents=True, exist_ok=True)
    name = hashlib.sha256(source.encode()).hexdigest()[:24]
    for old in {entry.stem for entry in folder.iterdir() if entry.stem != name}:
        with suppress(OSError), held(folder / f"{old}.lock") as alone:
            newest = max((entry.lstat().st_mtime for entry in (folder / old).rglob("*")), default=0.0)
            if alone and time.time() - newest > KEPT:
                delete(folder / old)
    with held_if_any(folder / f"{name}.lock") as alone:
        if not alone:
            raise ResourceError("another process fetches the same", "one at a time", "wait for it, or end it")
        (folder / name).mkdir(exist_ok=True)
        yield folder / name


def copy(source: Path, folder: Path) -> FileList:
    """Copies the bundle in folder `source` into the empty folder `folder`, every hash checked. Raises BundleError and
    AdapterError.
    """
    files = expected_files(source, read_manifest(source), hashes=False)
    check_size(total_of(files), folder)
    with megabytes("copying", total_of(files)) as add:
        for name, info in files.items():
            path = source / name
            with open(regular_file(path.parent, path.name, AGAIN), "rb") as stream:
                receive(stream, folder / name, name, info, add)
    return files


def name_of(source: str) -> str:
    """The name that a bundle from `source` gets: the last part of the path, without the endings of files."""
    path = urlsplit(source).path if "://" in source else source
    if REPOSITORY.fullmatch(source) and source[0] != "." and not os.path.exists(source):
        path = source.partition("@")[0]
    return ENDINGS.sub("", Path(path).resolve().name if path in (".", "..") else Path(path).name)
