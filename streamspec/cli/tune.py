"""`streamspec tune`: measures step costs by rows on this machine; chooses the fastest tree and its pruning."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from streamspec.cli.option_flags import Flags, with_flags
from streamspec.cli.shared_options import AsJson, Bundle, Precision, folder_of
from streamspec.cli.tables import print_figures, print_line
from streamspec.runtime.options import LoadOptions

if TYPE_CHECKING:
    from streamspec.runtime.tuning.step_costs import Calibration


@with_flags
def command(
    *,
    bundle: Bundle,
    precision: Precision = None,
    context: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Tokens in the KV cache while measuring; repeatable. Default: 64 and 512."),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="Validation data (JSONL): also find the probability below which pruning drafts pays."),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Use the first N rows of --prompts only.")] = 20,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens per answer to --prompts.")] = 128,
    loading: Annotated[LoadOptions, Flags(only=("adapter", "threads", "provider"))],
    plot: Annotated[Path | None, typer.Option(help="PNG file for a plot of the curves.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure the cost of a step by its number of rows; later loads on this machine use the result."""
    from streamspec.bench.plots import check_plot
    from streamspec.bench.prompts import read_cases
    from streamspec.bench.quality import check_packages
    from streamspec.runtime import load
    from streamspec.runtime.costs.learned_costs import describe
    from streamspec.runtime.tuning.cost_file import costs_file, read_record
    from streamspec.runtime.tuning.tune import keep_min_probability, tune

    if plot is not None:
        check_plot(plot)
    folder = folder_of(bundle, precision)
    session: Any = load(folder, replace(loading, tree="plain", prepare_grammar=False))
    if prompts is not None:
        session.manifest.check_prunes()
        check_packages(read_cases(prompts, limit))  # not after the measuring
    before = read_record(costs_file(session.runner.provider, session.runner.threads, session.manifest, None))
    calibrations = tune(session.runner, session.manifest, context)
    if before is not None:
        print_line(f"known before: {describe(before)}")
    for tokens, calibration in calibrations.items():
        print_costs(tokens, calibration)
    chosen = next(iter(calibrations.values()))
    print_line(f"provider: {session.provider}")
    print_line(f"chosen: {chosen.rows} rows" if chosen.rows > 1 else f"chosen: plain decoding ({chosen.reason})")
    if plot is not None:
        draw(calibrations, plot)
        print_line(f"curves: {plot}")
    result: dict[str, Any] = {
        "rows": chosen.rows,
        "provider": session.provider.name,
        "contexts": {str(n): as_dict(c) for n, c in calibrations.items()},
    }
    if prompts is not None:
        from streamspec.bench.pruning import find_pruning
        from streamspec.cli.bench import basis, print_speeds

        report, pruning = find_pruning(
            folder, prompts, limit, max_new_tokens, replace(loading, provider=session.provider.name)
        )
        probability = pruning.min_probability
        keep_min_probability(session.runner, session.manifest, probability, score=pruning.score)
        print_line(f"{prompts.name}: {basis(report)}")
        print_speeds(report)
        print_line(
            f"pruning: below a probability of {probability:g} by {pruning.score}"
            if probability
            else "pruning: none (it does not pay here)"
        )
        result["prune"] = {
            "least": probability,
            "score": pruning.score,
            "tried": [asdict(arm) for arm in report.rows],
            "prompts": report.prompts,
            "repeats": report.repeats,
        }
    if as_json:
        print(json.dumps(result))


def as_dict(calibration: Calibration) -> dict[str, Any]:
    return {
        "rows": calibration.rows,
        "step_ms": {str(n): round(1000 * cost, 3) for n, cost in calibration.costs.items()},
        "expected_tokens": {str(n): round(tokens, 3) for n, tokens in calibration.expected.items()},
    }


def print_costs(context: int, calibration: Calibration) -> None:
    """Prints what steps of each number of rows cost and bring; the chosen one is bold."""
    from rich.text import Text

    lines = []
    for rows, cost in calibration.costs.items():
        ratio, tokens = calibration.ratio(rows), calibration.expected[rows]
        cells = (f"{rows}", f"{1000 * cost:.2f}", f"{ratio:.2f}", f"{tokens:.2f}", f"{tokens / ratio:.2f}x")
        lines.append([Text(cell, style="bold" if rows == calibration.rows else "") for cell in cells])
    headings = ("rows", "step ms", "x plain", "tokens/step expected", "speed-up expected")
    print_figures(headings, lines, f"{context} tokens in the cache")


def draw(calibrations: dict[int, Calibration], file: Path) -> None:
    """Writes a PNG: cost and expected speed-up against rows."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for context, calibration in calibrations.items():
        rows = list(calibration.costs)
        left.plot(rows, [calibration.ratio(n) for n in rows], marker="o", label=f"{context} tokens in the cache")
        right.plot(rows, [calibration.expected[n] / calibration.ratio(n) for n in rows], marker="o")
        right.plot(
            calibration.rows,
            calibration.expected[calibration.rows] / calibration.ratio(calibration.rows),
            "k*",
            markersize=12,
        )
    left.set_title("step time over a plain step", loc="left")
    right.set_title("expected speed-up (star: chosen)", loc="left")
    left.legend(frameon=False)
    for axes in (left, right):
        axes.set_xlabel("rows verified together")
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=120, format="png")
