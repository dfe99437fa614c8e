"""`streamspec adapt`: one more adapter for a swappable bundle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from streamspec.bundle.manifest import MANIFEST
from streamspec.cli.shared_options import AllowBaseMismatch, AsJson, Format, Separator, unescaped
from streamspec.errors import ConfigError


def swappable(bundle: Path) -> Path:
    """Returns the folder of a bundle from its path, or from the name of an installed one. Raises ConfigError for
    anything else: a base has no adapters beside it."""
    from streamspec.library.installed import path_of

    path = path_of(bundle.expanduser())
    if not (path / MANIFEST).is_file():
        found, fix = f"{bundle}, which is no bundle", "make one of a base: streamspec export --base BASE --swappable"
        raise ConfigError(found, "a bundle of export --swappable, by its folder or installed name", fix)
    return path


def command(
    bundle: Annotated[
        Path,
        typer.Argument(help="Bundle of `export --swappable`, or the name of an installed one."),
    ],
    adapter: Annotated[Path, typer.Argument(help="Adapter folder of `train`, or a LoRA of PEFT.")],
    name: Annotated[str | None, typer.Option(help="Name of the adapter in the bundle; default: its folder's.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder to write to instead of the bundle.")] = None,
    base: Annotated[str | None, typer.Option(help="The bundle's base; default: the id in its manifest.")] = None,
    format: Format = None,
    separator: Separator = None,
    allow_base_mismatch: AllowBaseMismatch = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing adapter.")] = False,
    as_json: AsJson = False,
) -> None:
    """Convert an adapter for a swappable bundle and compare it with PyTorch."""
    from streamspec.export import PromptFormat, adapt

    bundle = swappable(bundle)
    layout = PromptFormat.given(format, separator and unescaped(separator))
    written = adapt(
        bundle, adapter, name, out, base, force, prompt_format=layout, allow_base_mismatch=allow_base_mismatch
    )
    if as_json:
        print(json.dumps({"out": str(written), "bytes": sum(file.stat().st_size for file in written.iterdir())}))
    else:
        print(
            f"wrote {written}; use it with: streamspec generate {bundle} --use "
            f"{written.name if out is None else written}"
        )
