"""`streamspec pull`, `list` and `remove`: the installed bundles."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from streamspec.cli.shared_options import AsJson


def command(
    source: Annotated[
        str,
        typer.Argument(
            help="File of pack, bundle folder, https address, or Hugging Face repository (owner/name[@revision])."
        ),
    ],
    out: Annotated[Path | None, typer.Option(help="Folder to install as; default: by name in the library.")] = None,
    name: Annotated[str | None, typer.Option(help="Name to install under; default: the source's.")] = None,
    sha256: Annotated[str | None, typer.Option(help="Of a file or an address: sha256 that it must have.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an installed bundle.")] = False,
    as_json: AsJson = False,
) -> None:
    """Fetch a bundle, check every file, install it."""
    from streamspec.errors import ConfigError
    from streamspec.library.install import pull

    if out is not None and name is not None:
        raise ConfigError("--out and --name", "one of them", "leave one out")
    path = pull(source, out, name, force, sha256)
    shown = path if out else path.name
    print(json.dumps({"path": str(path)}) if as_json else f"installed {path}; talk to it with: streamspec chat {shown}")


def list_command(as_json: AsJson = False) -> None:
    """List the installed bundles."""
    from streamspec.library.installed import installed, library_dir

    bundles = installed()
    if as_json:
        print(json.dumps({"bundles": [asdict(bundle) | {"path": str(bundle.path)} for bundle in bundles]}))
    elif not bundles:
        print(f"no bundles in {library_dir()}; streamspec pull installs one")
    width = max((len(bundle.name) for bundle in bundles), default=0)
    for bundle in bundles if not as_json else ():
        facts = (
            f"damaged: {bundle.problem}" if bundle.problem else f"{bundle.base}, {bundle.method}, {bundle.precision}"
        )
        print(f"{bundle.name:<{width}}  {bundle.bytes / 1e6:8.1f} MB  {facts}")


def remove_command(
    name: Annotated[str, typer.Argument(help="Name of an installed bundle.")],
) -> None:
    """Delete an installed bundle."""
    from streamspec.library.installed import remove

    print(f"removed {name}, {remove(name) / 1e6:.1f} MB")
