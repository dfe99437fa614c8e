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
    precision: Annotated[str, typer.Option(help="Precision of the weights: fp32, fp16, int8 or int4.")] = "int8",
    block_size: Annotated[int | None, typer.Option(help="Weights that share a scale in int4: 32 or 128.", show_default="32")] = None,
    stream_weights: Annotated[
        str, typer.Option(help="How the streams' own LoRA is carried: merged or delta.")
    ] = "merged",
    target: Annotated[
        str, typer.Option(help="What computes the bundle: cpu, cuda, or a compiler of static graphs: openvino, migraphx, directml, coreml.")
    ] = "cpu",
    static: Annotated[
        bool, typer.Option("--static", help="Fixed shapes and standard operators alone, for providers that compile one shape.")
    ] = False,
    rows: Annotated[int | None, typer.Option(help="With --static: rows of every call; default: 16.", show_default=False)] = None,
    context: Annotated[
        int | None, typer.Option(help="With --static: most tokens in the cache; default: 2048, or the base's context.", show_default=False)
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a bundle that is there already.")] = False,
    plain_genai: Annotated[
        bool, typer.Option("--plain-genai", help="Write a folder that onnxruntime-genai runs as an ordinary model, without a drafter.")
    ] = False,
    val: Annotated[
        Path | None, typer.Option(help="Held-out rows (JSONL): measures what the precision costs, before the bundle appears.", show_default=False)
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Rows of --val.")] = 20,
    swappable: Annotated[
        bool, typer.Option("--swappable", help="Keep adapters beside the base's weights, to be swapped while the bundle runs.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="The last line on stdout is the result as one JSON object.")
    ] = False,
) -> None:
    """Write a bundle: graph, quantised weights, tokenizer and draft trees, checked against PyTorch."""
    from streamspec.export import HeldOut, Target, export_bundle, export_genai, export_swappable

    adapters = adapter or []
    if len(adapters) > 1 and not swappable:
        raise ConfigError(f"{len(adapters)} adapters", "one, or --swappable", "leave all but one out, or add --swappable")
    kinds = [name for name, asked in (("--swappable", swappable), ("--static", static or target != "cpu"), ("--plain-genai", plain_genai)) if asked]
    if len(kinds) > 1:
        raise ConfigError(" and ".join(kinds), "one of them", "leave the others out")
    if kinds and (val or block_size) and not static:
        raise ConfigError(f"{kinds[0]} and {'--val' if val else '--block-size'}", "one of them", "leave one out")
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
        export_bundle(
            base, one, out, precision=precision, force=force, stream_weights=stream_weights, held_out=HeldOut(val, limit) if val else None,
            block_size=block_size, target=Target(target, static, rows, context),
        )

    from streamspec.cli.inspect import describe

    _, facts = describe(out)
    if as_json:
        print(json.dumps({"out": str(out), **dict(facts)}))
    else:
        for name, value in facts:
            if name.startswith("parity: "):
                print(f"{name.removeprefix('parity: ')}: {value}")
        print(f"wrote {out}; look at it with: streamspec inspect {out}")
