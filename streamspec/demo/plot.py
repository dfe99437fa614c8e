"""Draws the demo's figure: tokens per step, and tokens per second plain and speculative, prompt by prompt."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from streamspec.bench.figures import speed
from streamspec.runtime.decoding.stats import Stats

PLAIN_COLOUR, SPECULATIVE_COLOUR = "#9aa5b1", "#2a7f4f"


def draw(plain: Sequence[Stats], speculative: Sequence[Stats], file: Path) -> None:
    """Writes a PNG. Both sequences hold the counts of an answer per prompt, in the same order."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True)
    positions = range(1, len(plain) + 1)
    steps = [m.step_tokens / m.steps if m.steps else 1.0 for m in speculative]
    mean = sum(m.step_tokens for m in speculative) / max(1, sum(m.steps for m in speculative))
    above.bar(positions, steps, color=SPECULATIVE_COLOUR)
    above.axhline(1, color=PLAIN_COLOUR, linestyle="--")
    above.set_ylabel("tokens per step")
    above.set_title(f"{mean:.2f} tokens per step (dashed: plain decoding)", loc="left")
    fast, slow = speed(list(speculative)), speed(list(plain))
    below.bar([x - 0.2 for x in positions], [speed([m]) for m in plain], width=0.4, color=PLAIN_COLOUR, label="plain")
    below.bar(
        [x + 0.2 for x in positions],
        [speed([m]) for m in speculative],
        width=0.4,
        color=SPECULATIVE_COLOUR,
        label="speculative",
    )
    below.set_ylabel("tokens per second")
    below.set_xlabel("prompt")
    below.set_title(f"{slow:.0f} -> {fast:.0f} tokens per second", loc="left")
    figure.legend(*below.get_legend_handles_labels(), loc="outside right upper", frameon=False)
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=120, format="png")
