"""Writes the folder of a bundle, whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from streamspec.atomic import new_folder, recover, sha256_file, write_text
from streamspec.bundle.manifest import MANIFEST, FileInfo, Manifest, check_name
from streamspec.errors import BundleError, StreamspecError
from streamspec.json_fields import parse_json


@contextlib.contextmanager
def bundle_folder(directory: str | Path, force: bool = False) -> Iterator[Path]:
    """Yields an empty folder to write a bundle into; on a clean exit it becomes `directory`, whole or not at all.

    Write the other files first, then call `finish(folder, manifest)`. On any failure, Ctrl-C included, `directory`
    stays as it was. Raises BundleError where `directory` exists: replacing a bundle needs `force`, and a folder that is
    neither empty nor a bundle is never replaced.
    """
    target = Path(directory)
    recover(Path(os.path.realpath(target)))
    _check_replaceable(target, force)

    def check(staging: Path) -> None:
        _check_finished(staging)
        _check_replaceable(target, force)  # minutes later: somebody may have made it

    with new_folder(target, check=check) as staging:
        yield staging


def finish(folder: Path, manifest: Manifest, hashes: Mapping[str, str] = MappingProxyType({})) -> Manifest:
    """Hashes all files of `folder`, but for those in `hashes`, and writes the manifest last. Returns it with `files`
    filled in."""
    files: dict[str, FileInfo] = {}
    for path in sorted(folder.iterdir()):
        if path.name == MANIFEST:
            continue
        check_name(path.name)
        files[path.name] = FileInfo(hashes.get(path.name) or sha256_file(path), path.stat().st_size)
    complete = replace(manifest, files=files)
    text = complete.to_json()
    Manifest.from_json(text)  # never write a manifest that would be refused on load
    write_text(folder / MANIFEST, text)
    return complete


def _check_finished(folder: Path) -> None:
    if not (folder / MANIFEST).is_file():
        raise BundleError("a bundle without a manifest", f"{MANIFEST}, written last", "call finish() before leaving")


def _check_replaceable(target: Path, force: bool) -> None:
    if not os.path.lexists(target):
        return
    if not target.is_dir():
        raise BundleError(f"{target} is a file", "a folder to create", "choose another --out")
    with contextlib.suppress(OSError):  # a current folder that is gone
        if Path.cwd().is_relative_to(target.resolve()):
            raise BundleError(f"{target} holds the current folder", "a folder to create", "name one inside it")
    if os.path.ismount(target):
        raise BundleError(f"{target} is a mount point", "a folder to create", "name one inside it")
    if not any(target.iterdir()):
        return
    try:
        parse_json((target / MANIFEST).read_bytes(), MANIFEST)["format_version"]
    except (OSError, StreamspecError, LookupError, TypeError):  # other programs have a manifest.json as well
        raise BundleError(f"{target} is neither empty nor a bundle", "a new folder", "choose another --out") from None
    if not force:
        raise BundleError(f"{target} already holds a bundle", "a new folder", "choose another --out or pass --force")
