"""Reads and verifies the folder of a bundle; `bundle.write_files` writes it.

Every file is untrusted on load: sizes and hashes are checked before a parser opens any of them. Hashes prove integrity,
not origin. Weights are numbers alone, which no parser reads: their hash may be computed while the graph is opened.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from streamspec.atomic import sha256_file
from streamspec.background import Background
from streamspec.bundle.manifest import DATA, MANIFEST, MAX_MANIFEST, FileInfo, Manifest
from streamspec.errors import BundleError
from streamspec.json_fields import MAX_JSON
from streamspec.paths import PassedChecks, file_state

PIECE = 1 << 20  # bytes read at once
COPY_AGAIN = "copy the bundle again or export it again"


def read_manifest(path: str | Path) -> Manifest:
    """Reads the manifest of the bundle in folder `path`. Raises BundleError."""
    folder = Path(path)
    if not folder.is_dir():
        raise BundleError(f"{folder} is no folder", "a bundle folder", "check the path")
    return Manifest.from_json(
        read_small(folder, MANIFEST, "check the path; a bundle is what `streamspec export` writes", MAX_MANIFEST)
    )


def read_small(folder: Path, name: str, fix: str, most: int = MAX_JSON) -> bytes:
    """Reads the regular file `name` of `folder`, at most `most` bytes. Raises BundleError.

    The kind is checked again on the open file, and reading stops at the limit: a file swapped in between neither blocks
    nor fills the memory.
    """
    file = regular_file(folder, name, fix)
    try:
        handle = os.open(file, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        with open(handle, "rb") as stream:
            info = os.fstat(handle)
            data = _read(stream, most + 1) if stat.S_ISREG(info.st_mode) else None
    except OSError as error:
        raise BundleError(f"{file}: {error.strerror}", "a readable file", fix) from None
    if data is None or len(data) > most:
        raise BundleError(f"{name} has {info.st_size} bytes", f"a file of at most {most}", "do not use this bundle")
    return data


def _read(stream: BinaryIO, limit: int) -> bytes:
    """Reads `limit` bytes, or as many as there are: `read(limit)` alone takes memory for all of them first."""
    out = bytearray()
    while len(out) < limit and (piece := stream.read(min(PIECE, limit - len(out)))):
        out += piece
    return bytes(out)


def verify_files(path: str | Path, manifest: Manifest | None = None, hashes: bool = True) -> Manifest:
    """Checks that every file of the manifest is a regular file inside the folder, of the right size and sha256.

    All sizes are checked before the first hash; `hashes=False` checks sizes only. Returns the manifest (read from the
    folder if None is given). Raises BundleError.
    """
    manifest = manifest or read_manifest(path)
    check_files(_listed(Path(path), manifest), manifest.files, hashes, COPY_AGAIN)
    return manifest


@contextmanager
def verified(
    folder: Path, manifest: Manifest, hashes: bool = True, passed: PassedChecks | None = None
) -> Iterator[None]:
    """Verifies files as `verify_files` does, but hashes the weights while the body runs, which
    opens them: their numbers decide nothing before the body has ended. Weights whose hash `passed`
    knows, and that have not changed since, are not hashed again. Raises BundleError; for a wrong
    hash also where the body failed first."""
    files = _listed(folder, manifest)
    check_files(files, manifest.files, False, COPY_AGAIN)
    large = {name: info for name, info in manifest.files.items() if name.endswith(DATA)}
    check_files(files, {name: info for name, info in manifest.files.items() if name not in large}, hashes, COPY_AGAIN)
    hashing = Background(lambda: _check_weights(files, large, hashes, passed))
    try:
        yield
    except Exception:
        hashing.result()
        raise
    hashing.result()


def _check_weights(
    files: Mapping[str, Path], expected: Mapping[str, FileInfo], hashes: bool, passed: PassedChecks | None
) -> None:
    for name, info in expected.items():
        state = file_state(files[name])
        check = ("sha256", info.sha256, state)
        if passed is None or state is None or check not in passed:
            check_files(files, {name: info}, hashes, COPY_AGAIN)
            if hashes and passed is not None and state is not None and file_state(files[name]) == state:
                passed.add(check)


def _listed(folder: Path, manifest: Manifest) -> dict[str, Path]:
    """Returns the paths of the manifest's files. Raises BundleError for a missing one."""
    return {name: regular_file(folder, name, COPY_AGAIN) for name in manifest.files}


def check_files(files: Mapping[str, Path], expected: Mapping[str, FileInfo], hashes: bool, fix: str) -> None:
    """Checks all sizes, then, with `hashes`, all hashes. Raises BundleError."""
    for name, info in expected.items():
        size = files[name].stat().st_size
        if size != info.bytes:
            raise BundleError(f"{name} has {size} bytes", f"{info.bytes} bytes as the manifest says", fix)
    for name, info in expected.items() if hashes else ():
        try:
            digest = sha256_file(files[name])
        except OSError as error:
            raise BundleError(f"{files[name]}: {error.strerror}", "a readable file", fix) from None
        if digest != info.sha256:
            raise BundleError(f"{name} has sha256 {digest[:12]}", f"{info.sha256[:12]} as the manifest says", fix)


def regular_file(folder: Path, name: str, fix: str) -> Path:
    """Returns the path of `name` if it is a regular file that really lies in `folder`. Raises BundleError."""
    path = folder / name
    try:
        mode = path.stat().st_mode  # follows links; a pipe or device must not be opened
        inside = path.resolve(strict=True).parent == folder.resolve(strict=True)
    except PermissionError as error:
        raise BundleError(f"{path}: {error.strerror}", "a readable file", fix) from None
    except (OSError, RuntimeError):  # RuntimeError: a loop of links
        raise BundleError(f"{folder} has no {name}", f"the file {name}", fix) from None
    if not stat.S_ISREG(mode) or not inside:
        raise BundleError(
            f"{name} is a link out of the folder or no regular file", "a regular file", "do not use this bundle"
        )
    return path
