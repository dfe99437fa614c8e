"""`streamspec pull`, `list` and `remove`: the installed bundles, and what bases left in the cache."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from streamspec.cli.shared_options import AsJson
from streamspec.cli.tables import print_facts


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
    """List the installed bundles, and what bases left in the cache."""
    from streamspec.library.installed import cached, in_lines, in_rows, installed, library_dir

    bundles, kept = installed(), cached()
    if as_json:
        print(json.dumps({"bundles": [*map(asdict, bundles)], "cached": [*map(asdict, kept)]}, default=str))
        return
    if not bundles:
        print(f"no bundles in {library_dir()}; streamspec pull installs one")
    rows = in_rows(bundles, kept)
    if rows and sys.stdout.isatty():
        print_facts(rows, "", ("", "", ""))
        return
    for line in in_lines(rows):
        print(line)


def remove_command(
    name: Annotated[str | None, typer.Argument(help="Name of an installed bundle, or what list calls it.")] = None,
    all_cached: Annotated[
        bool, typer.Option("--cached", help="Delete all that bases left in the cache; it is made again when needed.")
    ] = False,
) -> None:
    """Delete an installed bundle, or what bases left in the cache."""
    from streamspec.errors import ConfigError
    from streamspec.library.installed import cached, remove

    if (name is None) != all_cached:
        raise ConfigError("a name and --cached" if name else "no name", "one name, or --cached", "give one of them")
    for one in [name] if name is not None else [entry.name for entry in cached()]:
        print(f"removed {one}, {remove(one) / 1e6:.1f} MB")
