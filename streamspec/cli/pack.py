"""`streamspec pack`: a bundle as one file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from streamspec.cli.shared_options import AsJson, Bundle, Precision, folder_of

ENDING = ".streamspec.tar"


def command(
    bundle: Bundle,
    file: Annotated[
        Path | None, typer.Argument(help=f"File to write; default: the bundle's name and {ENDING}.")
    ] = None,
    precision: Precision = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a bundle as one file, its files listed with size and sha256."""
    from streamspec.library.archive import pack

    folder = folder_of(bundle, precision, to_load=False)
    target = file or Path(folder.resolve().name + ENDING)
    done = pack(folder, target, force)
    facts = {"file": str(target), "bytes": done.bytes, "sha256": done.sha256}
    print(json.dumps(facts) if as_json else f"wrote {target}, {done.bytes / 1e6:.1f} MB, sha256 {done.sha256}")
