"""What is on this machine: installed bundles, which `pull` puts where every command finds them by name, and what bases
left in the cache.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from platformdirs import user_data_dir

from streamspec.adapters.base_models.resolve import IDENTITY_FILE
from streamspec.atomic import recover, remove_folder, sweep
from streamspec.bundle.files import verify_files
from streamspec.bundle.manifest import MANIFEST, plain_name
from streamspec.errors import BundleError, ConfigError, ResourceError, StreamspecError, meant, names_in, one_line
from streamspec.file_lock import held_if_any
from streamspec.json_fields import read_note
from streamspec.paths import cache_dir, user_folder

VARIABLE = "STREAMSPEC_BUNDLES"
BUNDLES = "bundles"  # folder of the cache: of bases, exported for the commands that were given one
PULLS = "pull"  # what `pull` fetches, each beside its lock
CACHED = {  # folder of the cache -> which of its entries can be deleted, and what they are
    "downloads": ("*", "a base as it was fetched"),
    "bases": ("*", "a base, converted"),
    BUNDLES: ("*", "a base, exported"),
    "demo": ("bundle-*", "the demo's bundle"),
    PULLS: ("?" * 24, "a bundle, fetched in part"),
}


@dataclass(frozen=True)
class InstalledBundle:
    """Describes an installed bundle. `problem`: why it cannot be used, by its manifest and the
    sizes of its files; empty where nothing is wrong."""

    name: str
    path: Path
    bytes: int
    base: str = ""
    method: str = ""
    precision: str = ""
    problem: str = ""


@dataclass(frozen=True)
class CachedEntry:
    """Describes what the cache keeps of a base. `name`: its path there, such as `bases/smollm2-135m`."""

    name: str
    path: Path
    bytes: int
    what: str


def library_dir() -> Path:
    """The folder `STREAMSPEC_BUNDLES`, else one in the user's data. Raises ConfigError where the user has none."""
    return user_folder(VARIABLE, lambda: os.path.join(user_data_dir("streamspec"), "bundles"), "library of bundles")


def installed() -> list[InstalledBundle]:
    """Lists the installed bundles by name. Hashes are not checked: loading checks them."""
    folder = library_dir()
    sweep(folder)
    folders = sorted(path for path in folder.iterdir() if plain_name(path.name)) if folder.is_dir() else []
    return [_described(path) for path in folders if _is_bundle(path)]


def installed_names() -> list[str]:
    """The names in the library, for `meant`; none where a user has no library."""
    try:
        return names_in(library_dir())
    except ConfigError:
        return []


def cached() -> list[CachedEntry]:
    """Lists what bases left in the cache: all of it is fetched or made again where it is needed."""
    try:
        root = cache_dir()
    except ConfigError:  # no home folder: nothing is kept
        return []
    found = []
    for folder, (pattern, what) in CACHED.items():
        sweep(root / folder)
        for path in sorted((root / folder).glob(pattern)):
            if not path.name.startswith(".") and not path.is_symlink():  # a process writes under a hidden name
                base = read_note(path / IDENTITY_FILE).get("id")
                words = f"{what}: {one_line(str(base))}" if base else what
                found.append(CachedEntry(f"{folder}/{path.name}", path, _bytes(path), words))
    return found


def in_rows(bundles: Sequence[InstalledBundle], kept: Sequence[CachedEntry]) -> list[tuple[str, str, str]]:
    """Name, size and facts of each that `installed` and `cached` list."""
    found = [
        (
            one.name,
            one.bytes,
            f"damaged: {one.problem}" if one.problem else one_line(f"{one.base}, {one.method}, {one.precision}"),
        )
        for one in bundles
    ]
    found += [(one.name, one.bytes, f"in the cache: {one.what}") for one in kept]
    return [(name, f"{size / 1e6:,.1f} MB", facts) for name, size, facts in found]


def in_lines(rows: Sequence[tuple[str, str, str]]) -> list[str]:
    """`in_rows` as lines, in columns."""
    name, size = (max((len(row[column]) for row in rows), default=0) for column in (0, 1))
    return [f"{row[0]:<{name}}  {row[1]:>{size}}  {row[2]}" for row in rows]


def path_of(bundle: str | Path) -> Path:
    """The folder of `bundle`: a path, or the name of an installed one. A path that exists wins; what is neither is
    returned as it is, for the reader to refuse.
    """
    path, name = Path(bundle), str(bundle)
    if path.exists() or not plain_name(name):
        return path
    try:
        installed_bundle = library_dir() / name
        recover(installed_bundle)
    except (ConfigError, OSError):  # no home folder: nothing is installed
        return path
    return installed_bundle if _is_bundle(installed_bundle) else path


def remove(name: str) -> int:
    """Deletes an installed bundle, or what `cached` names; from one moment to the next its name is gone. Returns how
    many bytes it had.

    Raises ConfigError for a name that is neither, ResourceError for a download under way. Programs that run the bundle
    keep it where the system lets them.
    """
    kept = {entry.name: entry.path for entry in cached()}
    path = kept.get(name)
    if path is None:
        sweep(library_dir())
        path = library_dir() / name
        if not plain_name(name) or path.is_symlink() or not _is_bundle(path):
            known, found = [*(bundle.name for bundle in installed()), *kept], f"no installed bundle {name!r}"
            raise ConfigError(found, ", ".join(known) or "one", "check it" + meant(name, known))
    size = _bytes(path)
    with held_if_any(path.with_suffix(".lock")) if path.parent.name == PULLS else nullcontext(True) as alone:
        if not alone:
            raise ResourceError(f"another process fetches {name}", "none", "wait for it, or end it")
        remove_folder(path)
    return size


def _is_bundle(path: Path) -> bool:
    try:
        return (path / MANIFEST).is_file()
    except OSError:  # it may not be read: shown with the reason
        return True


def _described(path: Path) -> InstalledBundle:
    try:
        manifest = verify_files(path, hashes=False)
    except (StreamspecError, OSError) as error:
        problem = error.found if isinstance(error, BundleError) else str(error)
        return InstalledBundle(path.name, path, _bytes(path), problem=problem)
    return InstalledBundle(path.name, path, _bytes(path), manifest.base.id, manifest.trained, manifest.precision)


def _bytes(path: Path) -> int:
    return sum(map(_size, (path, *path.rglob("*"))))


def _size(file: Path) -> int:
    try:
        found = file.lstat()
    except OSError:
        return 0
    return 0 if stat.S_ISDIR(found.st_mode) else found.st_size
