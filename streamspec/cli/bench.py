"""`streamspec bench`: the measurement as tables, or as one JSON line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from streamspec.cli.option_flags import with_flags
from streamspec.cli.shared_options import AsJson, Bundle, Precision, folders_of, load_flags
from streamspec.cli.tables import print_figures, print_line
from streamspec.errors import ConfigError
from streamspec.runtime.decoding.model_runner import Pruning
from streamspec.runtime.options import LoadOptions
from streamspec.runtime.sampling.sampling_params import GREEDY, Sampling

if TYPE_CHECKING:
    from streamspec.bench.figures import Report, Spread
    from streamspec.bench.predicted_speedup import Prediction


@with_flags
def command(
    *,
    bundle: Bundle,
    precision: Precision = None,
    prompts: Annotated[
        Path,
        typer.Option(help="JSONL file: prompt/completion, messages, text or Spec-Bench turns."),
    ],
    limit: Annotated[int | None, typer.Option(min=1, help="Use the first N rows only.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens per answer.")] = 128,
    repeats: Annotated[int, typer.Option(min=1, help="Passes over all prompts; figures are medians over them.")] = 5,
    also: Annotated[
        list[str] | None,
        typer.Option(help="Also measure plain decoding of this bundle; repeatable."),
    ] = None,
    rows: Annotated[
        str | None,
        typer.Option(help="Also measure draft trees forced to these numbers of rows, such as 1,2,4,8."),
    ] = None,
    prune: Annotated[
        str | None,
        typer.Option(help="Also measure drafts pruned at the early exit below these probabilities, such as 0.01,0.1."),
    ] = None,
    prune_score: Annotated[
        str, typer.Option(help="Whose probability --prune means: exit, prior (the drafter's) or both.")
    ] = "both",
    loading: Annotated[LoadOptions, load_flags("cpu_bundle", "idle", "prepare_grammar", "past_answers")],
    sampling: Sampling = GREEDY,
    save_outputs: Annotated[
        Path | None, typer.Option(help="Write prompts, answers and scores to this JSONL file.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure plain against speculative decoding, interleaved, and compare their output token for token.

    Exit code 1 where outputs really differ: that must never happen.
    """
    from streamspec.bench import bench

    tested, *others = folders_of([bundle, *(also or ())], precision)
    report = bench(
        tested,
        prompts,
        limit=limit,
        max_new_tokens=max_new_tokens,
        repeats=repeats,
        also=others,
        rows=parse_rows(rows),
        prune=[Pruning(None, probability, prune_score) for probability in parse_probabilities(prune)],
        save_outputs=save_outputs,
        sampling=sampling,
        options=loading,
    )
    if as_json:
        print(json.dumps(report.to_json()))
    else:
        show(report)
    if report.mismatches or any(forced.mismatches for forced in report.rows):
        raise SystemExit(1)


def parse_rows(text: str | None) -> list[int]:
    parts = (text or "").replace(",", " ").split()
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ConfigError(f"--rows {text}", "whole numbers with commas, such as 1,2,4,8", "change --rows")
    return [int(part) for part in parts]


def parse_probabilities(text: str | None) -> list[float]:
    try:
        return [float(part) for part in (text or "").replace(",", " ").split()]
    except ValueError:
        raise ConfigError(f"--prune {text}", "probabilities with commas, such as 0.01,0.1", "change --prune") from None


def show(report: Report) -> None:
    """Prints the report as tables: plain and speculative decoding, then the further measurements."""
    print_line(
        f"{report.bundle}: {basis(report)}, {report.threads} threads; speculation: {report.speculation}; provider: "
        f"{report.provider}"
    )
    print_speeds(report)
    if report.over_fastest_plain:
        print_line(f"over the fastest plain decoding ({report.fastest_plain}): {_spread(report.over_fastest_plain)}")
    ties = (
        ""
        if report.largest_near_tie is None
        else f" (largest margin {report.largest_near_tie:.2g}, at most {report.tolerance:.2g})"
    )
    print_line(
        f"identical output: {report.identical:.1%} of prompts; near-ties: {report.near_ties}{ties}; mismatches: "
        f"{report.mismatches}"
    )
    if report.quality:
        sides = (("speculative", report.quality), ("plain", report.quality["plain"]))
        for name, scores in sides:
            metrics = ", ".join(f"{key} {scores[key]:.3f}" for key in ("em", "rouge1", "rouge2", "rougeL"))
            print_line(f"quality, {name}: {metrics} ({report.quality['scored']} answers)")
    print_line(
        f"host share of a speculative step: {report.speculative.host_share:.1%}; peak memory: "
        f"{report.peak_rss_mb:.0f} MB"
    )
    if report.speculative.sources:
        shares = (f"{name} {n.accepted} of {n.drafted}" for name, n in report.speculative.sources.items())
        print_line(f"drafts accepted in a pass: {', '.join(shares)}")
    for arm in (report.speculative, *report.rows):
        if arm.theory is not None:
            print_line(_theory(arm.name, arm.theory, arm.speedup.median))
    for category, figures in report.categories.items():
        print_line(
            f"  {category}: {figures['tokens_per_step']:.2f} tokens/step, {figures['speedup']:.2f}x, "
            f"{figures['prompts']} prompts"
        )


def basis(report: Report) -> str:
    """Describes what all figures of a report rest on."""
    return f"{report.prompts} prompts x {report.repeats} passes, {report.new_tokens} tokens a pass"


def print_speeds(report: Report) -> None:
    """Prints a row of figures for each arm."""
    print_figures(
        ("", "tokens/step", "per call", "step ms", "tokens/s", "speed-up", "with prefill", "mismatches"),
        [
            (
                arm.name,
                f"{arm.tokens_per_step:.2f}",
                f"{arm.call_reduction:.2f}",
                f"{arm.step_ms:.2f}",
                f"{arm.tokens_per_s:.1f}",
                _spread(arm.speedup),
                _spread(arm.speedup_total),
                str(arm.mismatches),
            )
            for arm in (report.plain, report.speculative, *report.rows, *report.others)
        ],
    )


def _theory(name: str, theory: Prediction, measured: float) -> str:
    best = "" if theory.best_gamma is None else f"; best gamma {theory.best_gamma}: {theory.best_speedup:.2f}x"
    if theory.pays_from is not None:
        best += f"; drafts pay from {theory.pays_from:,} tokens of context" if theory.pays_from else "; they never pay"
    return (
        f"theory, {name}: alpha {theory.alpha:.3f}, gamma {theory.gamma:.2f}, verifying {theory.verify:.2f} plain "
        f"steps, drafting {theory.draft:.2f}: {theory.speedup:.2f}x predicted, {measured:.2f}x measured{best}"
    )


def _spread(spread: Spread) -> str:
    return f"{spread.median:.2f}x ({spread.low:.2f}..{spread.high:.2f})"
