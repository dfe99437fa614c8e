"""`streamspec export`: base + adapter -> bundle."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Precision(StrEnum):
    FP32 = "fp32"
    FP16 = "fp16"
    INT8 = "int8"
    INT4 = "int4"


def command(
    base: Annotated[str, typer.Option(help="Base: smollm2-135m, a Hugging Face folder, a .gguf file or a hub id.", show_default=False)],
    out: Annotated[Path, typer.Option(help="Bundle folder to write.", show_default=False)],
    adapter: Annotated[Path | None, typer.Option(help="Adapter folder; without it the untouched base.", show_default=False)] = None,
    precision: Annotated[Precision, typer.Option(help="Precision of the weights.")] = Precision.INT8,
    force: Annotated[bool, typer.Option("--force", help="Replace a bundle that is there already.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The last line on stdout is the result as one JSON object.")] = False,
) -> None:
    """Write a bundle: graph, quantised weights, tokenizer and draft trees, checked against PyTorch."""
    from streamspec.export import export_bundle

    export_bundle(base, adapter, out, precision=precision.value, force=force)

    from streamspec.cli.inspect import describe

    _, rows = describe(out)
    if as_json:
        print(json.dumps({"out": str(out), **dict(rows)}))
    else:
        print(f"wrote {out}; look at it with: streamspec inspect {out}")
