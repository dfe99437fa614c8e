"""`streamspec export`: base + adapter -> bundle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from streamspec.cli.shared_options import AllowBaseMismatch, AsJson, Format, Separator, unescaped
from streamspec.errors import ConfigError

if TYPE_CHECKING:
    from streamspec.export import ExportOptions, HeldOut

NEW_TOKENS = 128  # of an answer


def command(
    base: Annotated[
        str,
        typer.Option(help="Base: smollm2-135m, a Hugging Face folder, a .gguf file or a hub id.", show_default=False),
    ],
    out: Annotated[Path, typer.Option(help="Bundle folder to write.", show_default=False)],
    adapter: Annotated[
        list[Path] | None,
        typer.Option(
            help="Adapter folder of train, or a LoRA of PEFT; default: the base alone. Repeatable with --swappable.",
            show_default=False,
        ),
    ] = None,
    drafter: Annotated[
        Path | None,
        typer.Option(
            help="Folder of a published EAGLE-3, DFlash or DSpark drafter of this base (speculators, EAGLE, z-lab).",
            show_default=False,
        ),
    ] = None,
    precision: Annotated[str, typer.Option(help="Precision of the weights: fp32, fp16, int8 or int4.")] = "int8",
    block_size: Annotated[
        int | None, typer.Option(help="Weights that share a scale in int4: 32 or 128.", show_default="32")
    ] = None,
    stream_weights: Annotated[
        str | None,
        typer.Option(
            help="How the streams' own LoRA is stored: merged or delta; default: merged, of eager streams delta.",
            show_default=False,
        ),
    ] = None,
    streams: Annotated[
        str,
        typer.Option(help="When streams run: deferred, after acceptance, or eager, beside every node of a draft tree."),
    ] = "deferred",
    exit_layer: Annotated[
        int | None,
        typer.Option(
            help="Layer of the early exit, one that the adapter was trained for; default: the last of them.",
            show_default=False,
        ),
    ] = None,
    target: Annotated[
        str,
        typer.Option(
            help="Hardware that the graph is shaped for: cpu, cuda, rocm, or a compiler of static graphs: openvino, "
            "migraphx, directml, coreml."
        ),
    ] = "cpu",
    static: Annotated[
        bool,
        typer.Option(
            "--static", help="Write fixed shapes and standard operators, for providers that compile one shape."
        ),
    ] = False,
    capture: Annotated[
        bool,
        typer.Option(
            "--capture", help="With --target cuda or rocm: write a graph of fixed addresses for CUDA or HIP graphs."
        ),
    ] = False,
    rows: Annotated[
        str | None,
        typer.Option(
            help="With --static: rows of every call, 16 by default; with --capture: row counts, 1,8,16,32 by default.",
            show_default=False,
        ),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            help="With --static or --capture: maximum tokens in the KV cache; default: 2048, or the base's context.",
            show_default=False,
        ),
    ] = None,
    format: Format = None,
    separator: Separator = None,
    allow_base_mismatch: AllowBaseMismatch = False,
    kv_cache_dtype: Annotated[
        str, typer.Option(help="Type of cached keys and values: float32, or float16 for half their memory.")
    ] = "float32",
    force: Annotated[bool, typer.Option("--force", help="Replace an existing bundle.")] = False,
    val: Annotated[
        Path | None,
        typer.Option(
            help="Held-out data (JSONL): also measure what the precision costs and how well the bundle answers.",
            show_default=False,
        ),
    ] = None,
    store: Annotated[
        list[Path] | None,
        typer.Option(
            help="Data, answers that train kept, or plain text whose answers are drafted from as well; repeatable.",
            show_default=False,
        ),
    ] = None,
    store_tokens: Annotated[
        int | None,
        typer.Option(help="Most tokens of --store, 6 bytes each; default: 300000.", show_default=False),
    ] = None,
    self_draft: Annotated[
        str | None,
        typer.Option(
            help="Also write a graph without layers (3,7-9), attention or MLPs (4a,5m), or auto, for --draft self.",
            show_default=False,
        ),
    ] = None,
    embeddings: Annotated[
        bool, typer.Option("--embeddings", help="Give the model's last states, too, for /v1/embeddings.")
    ] = False,
    limit: Annotated[int | None, typer.Option(min=1, help="Rows of --val; default: 20.", show_default=False)] = None,
    swappable: Annotated[
        bool,
        typer.Option(
            "--swappable", help="Keep adapters beside the base's weights, so that they can be swapped at run time."
        ),
    ] = False,
    form: Annotated[
        str | None,
        typer.Option(
            "--as",
            help="speculators: write the adapter's EAGLE-3 head for vLLM and SGLang instead of a bundle.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a bundle: graph, quantized weights, tokenizer and draft trees, checked against PyTorch."""
    from streamspec.cli.bench import parse_rows
    from streamspec.export import ExportOptions, PromptFormat, Target, export_bundle, export_swappable
    from streamspec.export.answer_store import TOKENS, StoreFiles
    from streamspec.export.drafters.published.write import write_published
    from streamspec.export.held_out import LIMIT, HeldOut

    adapters, counts = adapter or [], tuple(parse_rows(rows) or ())
    one = counts[0] if len(counts) == 1 and not capture else None
    shape = Target(target, static, one, context, capture, counts if counts and one is None else None)
    layout = PromptFormat.given(format, separator and unescaped(separator))
    options = ExportOptions(
        drafter=drafter,
        precision=precision,
        block_size=block_size,
        stream_weights=stream_weights,
        streams=streams,
        exit_layer=exit_layer,
        target=shape,
        prompt_format=layout,
        allow_base_mismatch=allow_base_mismatch,
        kv_cache_dtype=kv_cache_dtype,
        force=force,
        held_out=HeldOut(val, limit or LIMIT) if val else None,
        store=StoreFiles(store, TOKENS if store_tokens is None else store_tokens) if store else None,
        self_draft=self_draft,
        embeddings=embeddings,
    )
    check_kinds(len(adapters), swappable, options)
    if limit is not None and val is None:
        raise ConfigError("--limit without --val", "both", "add --val")
    if store_tokens is not None and not store:
        raise ConfigError("--store-tokens without --store", "both", "add --store")
    first = adapters[0] if adapters else None
    if form is not None:
        if first is None or len(adapters) > 1 or swappable or options.bundle_flags:
            raise ConfigError("--as with other options", "--base, --adapter, --out and --force", "leave them out")
        write_published(base, first, out, form, force)
        print(json.dumps({"out": str(out)}) if as_json else f"wrote {out}, an EAGLE-3 head in the format of {form}")
        return
    if swappable:
        export_swappable(
            base,
            adapters,
            out,
            precision=precision,
            force=force,
            prompt_format=layout,
            allow_base_mismatch=allow_base_mismatch,
            kv_cache_dtype=kv_cache_dtype,
        )
        report(out, {}, as_json)
        return
    if options.held_out is not None:
        import rouge_score  # noqa: F401 - scores the answers after the export: say at once if it is missing

    manifest = export_bundle(base, first, out, options=options)
    rows_default = manifest.trees.default_rows if manifest.trees else 0
    report(out, score_answers(out, options.held_out, rows_default) if options.held_out else {}, as_json)


def check_kinds(adapters: int, swappable: bool, options: ExportOptions) -> None:
    """Raises ConfigError for kinds of export that exclude each other, and for options that a kind does not take."""
    if adapters > 1 and not swappable:
        raise ConfigError(f"{adapters} adapters", "one, or --swappable", "leave all but one out, or add --swappable")
    if swappable:
        options.check_unused("--swappable")


def report(out: Path, answers: dict[str, float], as_json: bool) -> None:
    """Prints what `inspect` says of the bundle that was written, and the figures of its answers."""
    from streamspec.cli.inspect import describe

    _, facts = describe(out)
    if as_json:
        print(json.dumps({"out": str(out), **dict(facts), **({"answers": answers} if answers else {})}))
        return
    for name, value in facts:
        if name.startswith("parity: "):
            print(f"{name.removeprefix('parity: ')}: {value}")
        elif name.startswith("cost: "):
            print(value)
    if answers:
        figures = (f"{name} {value:.4g}" for name, value in answers.items() if name not in ("prompts", "scored"))
        print(f"answers to {answers['prompts']} prompts, {answers['scored']} of them scored: {', '.join(figures)}")
    print(f"wrote {out}; look at it with: streamspec inspect {out}")


def score_answers(bundle: Path, held_out: HeldOut, tree_rows: int) -> dict[str, float]:
    """Scores the bundle's greedy answers on the CPU, by figures that depend on no clock.

    `tokens_per_step` with a tree of `tree_rows` rows (0: no drafter) and without n-grams, and `em`, `rouge1`, `rouge2`,
    `rougeL` where the rows have references; `prompts`: how many were answered, `scored`: of them, with references.
    """
    from streamspec.bench import bench

    report = bench(
        bundle,
        held_out.path,
        held_out.limit,
        NEW_TOKENS,
        repeats=1,
        tree=tree_rows or "plain",
        provider="cpu",
        ngram=False,
        recycling=False,
    )
    found: dict[str, float] = {"prompts": report.prompts, "scored": report.quality.get("scored", 0)}
    if tree_rows:
        found["tokens_per_step"] = report.speculative.tokens_per_step
    return found | {name: float(value) for name, value in report.quality.get("plain", {}).items()}
