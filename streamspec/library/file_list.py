"""The files of a bundle that travels: their names, sizes and hashes, checked where they leave and where they arrive."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO

from streamspec.atomic import sha256_file
from streamspec.bundle import swappable_adapters as swappable
from streamspec.bundle.files import read_manifest
from streamspec.bundle.manifest import MANIFEST, MAX_MANIFEST, FileInfo, Manifest, plain_name
from streamspec.errors import BundleError, ResourceError
from streamspec.export.ops.huge_page_file import HugePageFile
from streamspec.json_fields import Fields, parse_json
from streamspec.progress import adding

FORMAT = 1
MOST_FILES = 2000
MAX_BYTES = 256 << 30  # of all files together
AT_ONCE = 1 << 22
AGAIN = "fetch it again, or pack it again"
ADAPTER_FILE = re.compile(rf"{swappable.ADAPTERS}/([^/]+)/({swappable.ADAPTER}|{swappable.TENSORS})")

FileList = dict[str, FileInfo]  # by path in the bundle, the manifest first


def expected_files(bundle: Path, manifest: Manifest, hashes: bool = True) -> FileList:
    """The files that manifest and adapters in the folder `bundle` speak of; `hashes`: the adapters' are checked."""
    first = {MANIFEST: _info(bundle / MANIFEST)}
    others = dict(manifest.files)
    for name in swappable.names(bundle) if manifest.swappable is not None else ():
        folder = bundle / swappable.ADAPTERS / name
        tensors = swappable.read(folder, manifest, hashes).file
        assert tensors is not None
        within = f"{swappable.ADAPTERS}/{name}/"
        others |= {within + swappable.ADAPTER: _info(folder / swappable.ADAPTER), within + swappable.TENSORS: tensors}
    return first | dict(sorted(others.items()))


def to_json(files: FileList) -> bytes:
    content = {name: {"sha256": info.sha256, "bytes": info.bytes} for name, info in files.items()}
    return json.dumps({"format": FORMAT, "files": content}, indent=1).encode()


def from_json(data: bytes, where: str) -> FileList:
    """Parses a list that came with a bundle. Raises BundleError for names that lead elsewhere or are equal on some
    systems, and for sizes out of bounds.
    """
    raw = Fields(parse_json(data, where, BundleError, AGAIN, MAX_MANIFEST), where, BundleError, AGAIN)
    if raw.integer("format", 1, 1 << 31) != FORMAT:
        raise BundleError(f"a packed bundle of format {raw.raw('format')}", f"format {FORMAT}", "update streamspec")
    files: FileList = {}
    for name, value in raw.items("files", MOST_FILES):
        adapter_file = ADAPTER_FILE.fullmatch(name)
        if not plain_name(adapter_file[1] if adapter_file else name):
            raise BundleError(f"a file named {name[:100]!r}", "names of a bundle's own files", "do not use this bundle")
        info = Fields(value, f"{where}.files[{name}]", BundleError, AGAIN)
        files[name] = FileInfo(info.digest("sha256"), info.integer("bytes", 0, MAX_BYTES))
    if len({name.casefold() for name in files}) < len(files):
        raise BundleError("two files of one name but for capitals", "names of their own", "do not use this bundle")
    if next(iter(files), None) != MANIFEST or files[MANIFEST].bytes > MAX_MANIFEST:
        raise BundleError(f"a list without {MANIFEST} in front", "a packed bundle", AGAIN)
    return files


def check_size(total: int, folder: Path) -> None:
    """Raises BundleError for `total` bytes that are more than a bundle may have, ResourceError for more than are free
    at `folder`.
    """
    if total > MAX_BYTES:
        raise BundleError(f"{total / 1e9:.0f} GB", f"at most {MAX_BYTES / 1e9:.0f} GB", "do not use this bundle")
    free = shutil.disk_usage(folder).free
    if total > free:
        raise ResourceError(f"{free / 1e6:.0f} MB free at {folder}", f"{total / 1e6:.0f} MB", "make room, or use --out")


def total_of(files: FileList) -> int:
    """Bytes of all files."""
    return sum(info.bytes for info in files.values())


def megabytes(label: str, total: int) -> AbstractContextManager[Callable[[int], None]]:
    """Gives a function that adds to the bytes done, and shows how many of `total` those are."""
    return adding(lambda done: [f"{label}: {done / 1e6:.0f} of {total / 1e6:.0f} MB"])


def receive(source: BinaryIO, target: Path, name: str, info: FileInfo, add: Callable[[int], None]) -> None:
    """Writes exactly `info.bytes` of `source` to `target`, a new file, and tells `add` how many. Raises BundleError for
    fewer, and for another hash.
    """
    digest, left = hashlib.sha256(), info.bytes
    target.parent.mkdir(parents=True, exist_ok=True)
    with HugePageFile(target, "xb") as out:
        while left:
            data = source.read(min(left, AT_ONCE))
            if not data:
                raise BundleError(f"{name} ends {left} bytes early", f"{info.bytes} bytes", AGAIN)
            digest.update(data)
            out.write(data)
            add(len(data))
            left -= len(data)
    if digest.hexdigest() != info.sha256:
        raise BundleError(f"{name} has sha256 {digest.hexdigest()[:12]}", f"{info.sha256[:12]} as listed", AGAIN)


def check_arrived(folder: Path, files: FileList) -> None:
    """Checks that the files in `folder`, received as `files` says, are those of its manifest and adapters, no more and
    no fewer. Raises BundleError and AdapterError.
    """
    expected = expected_files(folder, read_manifest(folder), hashes=False)
    for name in sorted({*expected, *files}):
        if expected.get(name) != files.get(name):
            found = "is not listed" if name not in files else "is not what the manifest says"
            raise BundleError(f"{name} {found}", "the files of the manifest", AGAIN)


def _info(file: Path) -> FileInfo:
    return FileInfo(sha256_file(file), file.stat().st_size)
