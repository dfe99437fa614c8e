"""The folder of installed bundles: where `pull` puts them and every command finds them by name."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from platformdirs import user_data_dir

from streamspec.atomic import recover, remove_folder, sweep
from streamspec.bundle.files import verify_files
from streamspec.bundle.manifest import MANIFEST, plain_name
from streamspec.errors import BundleError, ConfigError, StreamspecError, meant

VARIABLE = "STREAMSPEC_BUNDLES"


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


def library_dir() -> Path:
    """The folder `STREAMSPEC_BUNDLES`, else one in the user's data. Raises ConfigError where the user has none."""
    configured = os.environ.get(VARIABLE)
    folder = Path(configured or user_data_dir("streamspec")) / ("" if configured else "bundles")
    if str(folder).startswith("~"):
        raise ConfigError("a user without a home folder", f"a folder in {VARIABLE}", "set it, or give --out")
    return folder


def installed() -> list[InstalledBundle]:
    """Lists the installed bundles by name. Hashes are not checked: loading checks them."""
    folder = library_dir()
    sweep(folder)
    folders = sorted(path for path in folder.iterdir() if plain_name(path.name)) if folder.is_dir() else []
    return [_described(path) for path in folders if (path / MANIFEST).is_file()]


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
    return installed_bundle if (installed_bundle / MANIFEST).is_file() else path


def remove(name: str) -> int:
    """Deletes an installed bundle; from one moment to the next its name is gone. Returns how many bytes it had.

    Raises ConfigError for a name that is not installed. Programs that run the bundle keep it where the system lets
    them.
    """
    sweep(library_dir())
    path = library_dir() / name
    if not plain_name(name) or path.is_symlink() or not (path / MANIFEST).is_file():
        known = [bundle.name for bundle in installed()]
        raise ConfigError(f"no installed bundle {name!r}", ", ".join(known) or "one", "check it" + meant(name, known))
    size = _bytes(path)
    remove_folder(path)
    return size


def _described(path: Path) -> InstalledBundle:
    try:
        manifest = verify_files(path, hashes=False)
    except (StreamspecError, OSError) as error:
        problem = error.found if isinstance(error, BundleError) else str(error)
        return InstalledBundle(path.name, path, _bytes(path), problem=problem)
    return InstalledBundle(path.name, path, _bytes(path), manifest.base.id, manifest.trained, manifest.precision)


def _bytes(path: Path) -> int:
    return sum(file.lstat().st_size for file in path.rglob("*") if not file.is_dir())
