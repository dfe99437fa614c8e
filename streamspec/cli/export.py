"""`streamspec export`: base + adapter -> bundle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from streamspec.errors import ConfigError


def command(
    base: Annotated[
        str,
        typer.Option(help="Base: smollm2-135m, a Hugging Face folder, a .gguf file or a hub id.", show_default=False),
    ],
    out: Annotated[Path, typer.Option(help="Bundle folder to write.", show_default=False)],
    adapter: Annotated[
        list[Path] | None,
        typer.Option(help="Adapter folder; without it the untouched base. With --swappable it may be given again.", show_default=False),
    ] = None,
    precision: Annotated[str, typer.Option(help="Precision of the weights: fp32, int8 or int4.")] = "int8",
    stream_weights: Annotated[
        str, typer.Option(help="How the streams' own LoRA is carried: merged or delta.")
    ] = "merged",
    force: Annotated[bool, typer.Option("--force", help="Replace a bundle that is there already.")] = False,
    plain_genai: Annotated[
        bool, typer.Option("--plain-genai", help="Write a folder that onnxruntime-genai runs as an ordinary model, without a drafter.")
    ] = False,
    swappable: Annotated[
        bool, typer.Option("--swappable", help="Keep adapters beside the base's weights, to be swapped while the bundle runs.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="The last line on stdout is the result as one JSON object.")
    ] = False,
) -> None:
    """Write a bundle: graph, quantised weights, tokenizer and draft trees, checked against PyTorch."""
    from streamspec.export import export_bundle, export_genai, export_swappable

    adapters = adapter or []
    if len(adapters) > 1 and not swappable:
        raise ConfigError(f"{len(adapters)} adapters", "one, or --swappable", "leave all but one out, or add --swappable")
    if swappable and plain_genai:
        raise ConfigError("--swappable and --plain-genai", "one of them", "leave one out")
    if swappable and stream_weights != "merged":
        raise ConfigError(f"--swappable and --stream-weights {stream_weights}", "one of them: LoRA that are swapped are products of their own", "leave one out")
    one = adapters[0] if adapters else None
    if plain_genai:
        report = export_genai(base, one, out, precision=precision, force=force)
        print(json.dumps({"out": str(out), **report}) if as_json else f"wrote {out}; run it with onnxruntime-genai")
        return
    if swappable:
        export_swappable(base, adapters, out, precision=precision, force=force)
    else:
        export_bundle(base, one, out, precision=precision, force=force, stream_weights=stream_weights)

    from streamspec.cli.inspect import describe

    _, rows = describe(out)
    if as_json:
        print(json.dumps({"out": str(out), **dict(rows)}))
    else:
        print(f"wrote {out}; look at it with: streamspec inspect {out}")
