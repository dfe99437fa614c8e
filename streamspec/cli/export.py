"""`streamspec export`: base + adapter -> bundle."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from streamspec.cli.option_flags import with_flags
from streamspec.cli.shared_options import AsJson, Format, Separator, unescaped
from streamspec.errors import ConfigError
from streamspec.export.answer_store import TOKENS, StoreFiles
from streamspec.export.deployment_target import Target
from streamspec.export.held_out import LIMIT, HeldOut
from streamspec.export.options import ExportOptions
from streamspec.prompt.prompt_format import PromptFormat

NEW_TOKENS = 128  # of an answer


@with_flags
def command(
    *,
    base: Annotated[
        str,
        typer.Option(help="Base: smollm2-135m, a Hugging Face folder, a .gguf file or a hub id."),
    ],
    out: Annotated[Path, typer.Option(help="Bundle folder to write.")],
    adapter: Annotated[
        list[Path] | None,
        typer.Option(
            help="Adapter folder of train, or a LoRA of PEFT; default: the base alone. Repeatable with --swappable."
        ),
    ] = None,
    options: ExportOptions,
    target: Target,
    rows: Annotated[
        str | None,
        typer.Option(
            help="With --static: rows of every call, 16 by default; with --capture: row counts, 1,8,16,32 by default."
        ),
    ] = None,
    format: Format = None,
    separator: Separator = None,
    val: Annotated[
        Path | None,
        typer.Option(
            help="Held-out data (JSONL): also measure what the precision costs and how well the bundle answers."
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Rows of --val; default: 20.")] = None,
    store: Annotated[
        list[Path] | None,
        typer.Option(
            help="Data, answers that train kept, or plain text whose answers are drafted from as well; repeatable."
        ),
    ] = None,
    store_tokens: Annotated[
        int | None,
        typer.Option(help="Most tokens of --store, 6 bytes each, of a vocabulary above 65,536 8; default: 300000."),
    ] = None,
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
            help="Instead of a bundle: optimum, an ONNX decoder for optimum-onnx in fp32 or fp16; speculators, the "
            "adapter's EAGLE-3, DFlash or DSpark drafter for vLLM and SGLang.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a bundle: graph, quantized weights, tokenizer and draft trees, checked against PyTorch."""
    adapters = adapter or []
    options = replace(
        options,
        target=with_rows(target, rows),
        prompt_format=PromptFormat.given(format, separator and unescaped(separator)),
        held_out=HeldOut(val, limit or LIMIT) if val else None,
        store=StoreFiles(store, TOKENS if store_tokens is None else store_tokens) if store else None,
    )
    if len(adapters) > 1 and not swappable:
        found = f"{len(adapters)} adapters"
        raise ConfigError(found, "one, or --swappable", "leave all but one out, or add --swappable")
    if swappable:
        options.check_unused("--swappable")
    if limit is not None and val is None:
        raise ConfigError("--limit without --val", "both", "add --val")
    if store_tokens is not None and not store:
        raise ConfigError("--store-tokens without --store", "both", "add --store")
    if form is not None:
        write_other(form, base, adapters, out, options, swappable, as_json)
    elif swappable:
        write_swappable(base, adapters, out, options, as_json)
    else:
        write_bundle(base, adapters, out, options, as_json)


def with_rows(target: Target, rows: str | None) -> Target:
    """The target with the numbers of --rows: those of the calls of a captured graph, or the one of a static graph."""
    from streamspec.cli.bench import parse_rows

    counts = tuple(parse_rows(rows))
    if len(counts) == 1 and not target.capture:
        return replace(target, rows=counts[0])
    return replace(target, row_counts=counts or None)


def write_other(
    form: str,
    base: str,
    adapters: Sequence[Path],
    out: Path,
    options: ExportOptions,
    swappable: bool,
    as_json: bool,
) -> None:
    """Writes what other engines read, a form of the table `FORMS`."""
    from streamspec.export.forms.registry import write_form

    if swappable:
        raise ConfigError("--as with --swappable", "one of them", "leave one out")
    what = write_form(form, base, adapters[0] if adapters else None, out, options)
    print(json.dumps({"out": str(out)}) if as_json else f"wrote {out}, {what}")


def write_swappable(base: str, adapters: Sequence[Path], out: Path, options: ExportOptions, as_json: bool) -> None:
    """Writes a bundle that keeps its adapters beside the base's weights."""
    from streamspec.export import export_swappable

    export_swappable(
        base,
        adapters,
        out,
        precision=options.precision,
        force=options.force,
        prompt_format=options.prompt_format,
        allow_base_mismatch=options.allow_base_mismatch,
        kv_cache_dtype=options.kv_cache_dtype,
    )
    report(out, {}, as_json)


def write_bundle(base: str, adapters: Sequence[Path], out: Path, options: ExportOptions, as_json: bool) -> None:
    """Writes an ordinary bundle, and scores its answers to held-out data."""
    from streamspec.export import export_bundle

    if options.held_out is not None:
        import rouge_score  # noqa: F401 - scores the answers after the export: say at once if it is missing

    manifest = export_bundle(base, adapters[0] if adapters else None, out, options=options)
    rows = manifest.trees.default_rows if manifest.trees else 0
    report(out, score_answers(out, options.held_out, rows) if options.held_out else {}, as_json)


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
    figures: dict[str, float] = {"prompts": report.prompts, "scored": report.quality.get("scored", 0)}
    if tree_rows:
        figures["tokens_per_step"] = report.speculative.tokens_per_step
    return figures | {name: float(value) for name, value in report.quality.get("plain", {}).items()}
