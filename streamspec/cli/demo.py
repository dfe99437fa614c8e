"""`streamspec demo`: the whole loop on the reference base."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from streamspec.cli.shared_options import AsJson
from streamspec.errors import ConfigError


def command(
    train: Annotated[bool, typer.Option("--train", help="Fine-tune an adapter on the packaged sample first.")] = False,
    minutes: Annotated[
        float | None, typer.Option(min=0.5, help="With --train: minutes of training. Default: 5.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Use the first N prompts only.")] = None,
    plot: Annotated[Path, typer.Option(help="PNG file to write.")] = Path("streamspec-demo.png"),
    as_json: AsJson = False,
) -> None:
    """Export the shipped SQL adapter and show it decode, plain and speculative."""
    from streamspec.demo import demo

    if minutes is not None and not train:
        raise ConfigError(f"--minutes {minutes:g} without --train", "both or neither", "add --train")
    result = demo(minutes or 5.0 if train else None, limit, plot)
    if as_json:
        print(json.dumps(result))
