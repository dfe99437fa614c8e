"""Draws `training.svg` of an adapter folder: losses and tau over the steps of each stage, acceptance by position.

SVG by hand, so that it needs no package. Free of torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

WIDTH, HEIGHT, LEFT, RIGHT, TOP, GAP = 760, 170, 64, 150, 44, 66  # pixels; HEIGHT: of a panel without its title
TEXT, MUTED, LINE = "#1f2933", "#52606d", "#d5dbe1"
COLOURS = ("#0b7a75", "#c2571a", "#4456a6", "#8c3b7a", "#6b7a0f", "#9aa5b1", "#b0413e", "#2f8fbf", "#5c5248")
NOT_CURVES = ("step", "epoch", "learning_rate", "grad_norm", "minutes", "eval_texts", "early_exit")
MOST_POINTS = 300  # of a curve
Points = list[tuple[float, float]]


def figure(log: Mapping[str, Any], accuracy: Sequence[float]) -> str:
    """The figure of a run: `log` by stage, `accuracy`: share of right first candidates by position, none of a plain
    fine-tune.
    """
    panels = [
        (f"{name}: {title}", found)
        for name, entries in log.items()
        if isinstance(entries, list)
        for title, found in (("losses", curves(entries, False)), ("validation", curves(entries, True)))
        if found
    ]
    height = TOP + (len(panels) + bool(accuracy)) * (HEIGHT + GAP)
    lines = sheet(height, 12, "Training: losses and acceptance")
    top = TOP
    for title, found in panels:
        lines += panel(title, found, top)
        top += HEIGHT + GAP
    if accuracy:
        lines += bars("first candidate right, by position", accuracy, top)
    return "\n".join([*lines, "</svg>"]) + "\n"


def sheet(height: int, size: int, title: str) -> list[str]:
    """The first lines of an SVG of this height and size of letters: an empty sheet with a title that is read aloud."""
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'font-family="system-ui, Helvetica, Arial, sans-serif" font-size="{size}" role="img">',
        f"<title>{title}</title>",
        f'<rect width="{WIDTH}" height="{height}" rx="10" fill="#ffffff" stroke="{LINE}"/>',
    ]


def curves(entries: Sequence[Mapping[str, float]], checked: bool) -> dict[str, Points]:
    """Points (step, value) by name, of the losses or of what validation found as it went."""
    found: dict[str, Points] = {}
    for entry in entries:
        for name, value in entry.items():
            if name not in NOT_CURVES and name.startswith("eval_") == checked and math.isfinite(value):
                found.setdefault(name.removeprefix("eval_"), []).append((entry["step"], value))
    return {name: points[:: len(points) // MOST_POINTS + 1] for name, points in found.items() if len(points) > 1}


def panel(title: str, found: Mapping[str, Points], top: float) -> list[str]:
    """Lines of SVG: curves over the steps, with their names beside them."""
    steps = [x for points in found.values() for x, _ in points]
    values = [y for points in found.values() for _, y in points]
    low, high = min(0.0, *values), max(values) or 1.0
    first, last = min(steps), max(max(steps), min(steps) + 1)
    wide = WIDTH - LEFT - RIGHT

    def at(x: float, y: float) -> str:
        return f"{LEFT + (x - first) / (last - first) * wide:.1f},{top + HEIGHT * (high - y) / (high - low):.1f}"

    lines = _frame(title, top, [(low, f"{low:.3g}"), (high, f"{high:.3g}")])
    lines += [
        f'<text x="{LEFT}" y="{top + HEIGHT + 16}" fill="{MUTED}">{first:.0f}</text>',
        f'<text x="{LEFT + wide}" y="{top + HEIGHT + 16}" text-anchor="end" fill="{MUTED}">step {last:.0f}</text>',
    ]
    for index, (name, points) in enumerate(found.items()):
        colour = COLOURS[index % len(COLOURS)]
        path = " ".join(at(x, y) for x, y in points)
        lines += [
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"/>',
            f'<text x="{LEFT + wide + 12}" y="{top + 12 + 15 * index}" fill="{colour}">{escape(name)} '
            f"{points[-1][1]:.3g}</text>",
        ]
    return lines


def bars(title: str, shares: Sequence[float], top: float) -> list[str]:
    """Lines of SVG: a bar for each share between 0 and 1."""
    lines = _frame(title, top, [(0.0, "0"), (1.0, "1")])
    each = (WIDTH - LEFT - RIGHT) / len(shares)
    for index, share in enumerate(shares):
        left, tall = LEFT + each * index + each * 0.15, HEIGHT * share
        middle = left + each * 0.35
        lines += [
            f'<rect x="{left:.1f}" y="{top + HEIGHT - tall:.1f}" width="{each * 0.7:.1f}" height="{tall:.1f}" rx="2" '
            f'fill="{COLOURS[0]}"/>',
            f'<text x="{middle:.1f}" y="{top + HEIGHT - tall - 5:.1f}" text-anchor="middle" fill="{TEXT}">'
            f"{share:.2f}</text>",
            f'<text x="{middle:.1f}" y="{top + HEIGHT + 16}" text-anchor="middle" fill="{MUTED}">{index + 1}</text>',
        ]
    return lines


def _frame(title: str, top: float, ticks: Sequence[tuple[float, str]]) -> list[str]:
    """The title, the two ends of the upright axis and their lines; `ticks`: the lower and the upper one."""
    lines = [f'<text x="24" y="{top - 18}" font-size="14" font-weight="600" fill="{TEXT}">{escape(title)}</text>']
    for y, (_, label) in zip((top + HEIGHT, top), ticks, strict=True):
        lines += [
            f'<line x1="{LEFT}" y1="{y}" x2="{WIDTH - RIGHT}" y2="{y}" stroke="{LINE}"/>',
            f'<text x="{LEFT - 8}" y="{y + 4}" text-anchor="end" fill="{MUTED}">{label}</text>',
        ]
    return lines
