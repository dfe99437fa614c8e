"""Packs a bundle into one file: a tar that lists its files with size and sha256 in front, and keeps their order.

Weights are not compressed: quantized ones hardly shrink. The same bundle gives the same bytes. Unpacking parses the
list alone and compares every header with the one that `pack` writes for the listed name and size: links, paths, sizes
and extensions of the format are never looked at.
"""

from __future__ import annotations

import hashlib
import os
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from streamspec.atomic import new_file
from streamspec.bundle.files import COPY_AGAIN, regular_file, verify_files
from streamspec.bundle.manifest import MAX_MANIFEST, FileInfo
from streamspec.errors import BundleError, ConfigError
from streamspec.library.file_list import (
    AGAIN,
    AT_ONCE,
    FileList,
    check_size,
    expected_files,
    from_json,
    megabytes,
    receive,
    to_json,
    total_of,
)

LISTING = "streamspec-files.json"  # the first entry
BLOCK, LONGEST_NAME = 512, 100  # of tar
END = bytes(2 * BLOCK)


def pack(bundle: str | Path, file: str | Path, force: bool = False) -> FileInfo:
    """Writes the bundle in folder `bundle` as one file, whole or not at all. Returns the file's hash and size.

    Raises BundleError for a damaged bundle, ConfigError where `file` exists and `force` is not given.
    """
    folder, target = Path(bundle), Path(file)
    if target.is_dir() or (target.exists() and not force):
        raise ConfigError(f"{target} exists", "a new file", "choose another name, or pass --force for a file")
    files = expected_files(folder, verify_files(folder, hashes=False), hashes=False)
    for name in files:
        if len(name.encode()) > LONGEST_NAME:
            raise BundleError(f"{name} has a long name", f"at most {LONGEST_NAME} bytes", "rename the adapter")
    check_size(total_of(files), target.absolute().parent)
    listing, whole = to_json(files), hashlib.sha256()
    with new_file(target) as temporary, open(temporary, "xb") as out, megabytes("packing", total_of(files)) as add:

        def put(data: bytes) -> None:
            whole.update(data)
            out.write(data)

        put(_header(LISTING, len(listing)) + listing + _padding(len(listing)))
        for name, info in files.items():
            put(_header(name, info.bytes))
            for data in _content(folder / name, name, info):
                put(data)
                add(len(data))
            put(_padding(info.bytes))
        put(END)
        size = out.tell()
    return FileInfo(whole.hexdigest(), size)


def unpack(file: str | Path, folder: Path) -> FileList:
    """Unpacks a file of `pack` into the empty folder `folder` and returns what it held, every hash checked.

    Raises BundleError for anything else than a file of `pack`, ResourceError where the disk is too small.
    """
    path = Path(file)
    with open(path, "rb") as source:
        first = source.read(BLOCK)
        size = int(first[124:135], 8) if re.fullmatch(rb"[0-7]{11}", first[124:135]) else 0
        if first != _header(LISTING, size) or not 0 < size <= MAX_MANIFEST:
            raise BundleError(f"{path.name} does not begin with {LISTING}", "a file of `streamspec pack`", AGAIN)
        listing = source.read(size)
        _skip_padding(source, size)
        files = from_json(listing, LISTING)
        packed = len(END) + sum(BLOCK + n + len(_padding(n)) for n in (size, *(i.bytes for i in files.values())))
        if os.fstat(source.fileno()).st_size != packed:
            found = f"{path.name} of {os.fstat(source.fileno()).st_size} bytes"
            raise BundleError(found, f"{packed} bytes as it lists", AGAIN)
        check_size(total_of(files), folder)
        with megabytes("unpacking", total_of(files)) as add:
            for expected, info in files.items():
                if source.read(BLOCK) != _header(expected, info.bytes):
                    raise BundleError(f"something else before {expected}", "its header alone", "do not use this bundle")
                receive(source, folder / expected, expected, info, add)
                _skip_padding(source, info.bytes)
        if source.read(len(END) + 1) != END:
            raise BundleError("data after the last file", "its end", "do not use this bundle")
    return files


def _header(name: str, size: int) -> bytes:
    entry = tarfile.TarInfo(name)  # mode 644, no owner, time 0
    entry.size = size
    return entry.tobuf(tarfile.GNU_FORMAT)


def _padding(size: int) -> bytes:
    return bytes(-size % BLOCK)


def _skip_padding(source: BinaryIO, size: int) -> None:
    if source.read(-size % BLOCK) != _padding(size):
        raise BundleError("data between two files", "zeros", "do not use this bundle")


def _content(file: Path, name: str, info: FileInfo) -> Iterator[bytes]:
    """Yields the content of a file in pieces. Raises BundleError where it is not what the manifest says."""
    digest, left = hashlib.sha256(), info.bytes
    with open(regular_file(file.parent, file.name, AGAIN), "rb") as source:
        while left and (data := source.read(min(left, AT_ONCE))):
            left -= len(data)
            digest.update(data)
            yield data
    if left or digest.hexdigest() != info.sha256:
        raise BundleError(
            f"{name} has sha256 {digest.hexdigest()[:12]}", f"{info.sha256[:12]} as the manifest says", COPY_AGAIN
        )
