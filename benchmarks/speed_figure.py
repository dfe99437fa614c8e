"""Draws docs/images/speed.svg: tokens per second, plain against speculative, of the shipped adapters.

    python benchmarks/speed_figure.py [--out docs/images/speed.svg]

The figures are those of the README's own table (`peers.py table --into`), so that chart and table say the same. SVG by
hand, so that it needs no package.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from streamspec.adapters.reporting.training_figure import MUTED, TEXT, sheet

README = Path(__file__).resolve().parents[1] / "README.md"
TASKS = {  # by the name in the table
    "E2E": "E2E: facts to sentence",
    "WikiSQL": "WikiSQL: question to query",
    "chat": "Spec-Bench: chat",
}
LEFT, SCALE, ROW = 250, 0.5, 58  # pixels; SCALE: pixels per token/s
PLAIN, DRAFTED = "#9aa5b1", "#0b7a75"


def results(readme: str) -> list[tuple[str, int, int]]:
    """Task, plain and speculative tokens per second of int8, of the table's rows."""
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in readme.splitlines() if line[:2] == "| "]
    found = {cells[0]: cells for cells in rows if cells[0] in TASKS}
    return [(title, int(found[name][3].split(",")[0]), int(found[name][1])) for name, title in TASKS.items()]


def figure(readme: str) -> str:
    shown = results(readme)
    height = 74 + ROW * len(shown) + 34
    lines = [
        *sheet(height, 14, "Tokens per second, plain and speculative decoding"),
        f'<text x="24" y="34" font-size="16" font-weight="600" fill="{TEXT}">Tokens per second, same output</text>',
        f'<rect x="{LEFT + 120}" y="22" width="14" height="14" fill="{PLAIN}"/>',
        f'<text x="{LEFT + 140}" y="34" fill="{MUTED}">plain</text>',
        f'<rect x="{LEFT + 200}" y="22" width="14" height="14" fill="{DRAFTED}"/>',
        f'<text x="{LEFT + 220}" y="34" fill="{MUTED}">speculative</text>',
    ]
    for index, (task, plain, drafted) in enumerate(shown):
        top = 62 + ROW * index
        lines += [
            f'<text x="{LEFT - 14}" y="{top + 25}" text-anchor="end" fill="{TEXT}">{task}</text>',
            f'<rect x="{LEFT}" y="{top}" width="{plain * SCALE:.0f}" height="18" rx="2" fill="{PLAIN}"/>',
            f'<text x="{LEFT + plain * SCALE + 8:.0f}" y="{top + 14}" fill="{MUTED}">{plain}</text>',
            f'<rect x="{LEFT}" y="{top + 21}" width="{drafted * SCALE:.0f}" height="18" rx="2" fill="{DRAFTED}"/>',
            f'<text x="{LEFT + drafted * SCALE + 8:.0f}" y="{top + 35}" fill="{TEXT}">{drafted}'
            f'<tspan font-weight="600" dx="10">{drafted / plain:.1f} x</tspan></text>',
        ]
    lines += [
        f'<text x="24" y="{height - 20}" font-size="12" fill="{MUTED}">SmolLM2-135M-Instruct, int8. '
        "Medians, decoding alone.</text>",
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/images/speed.svg"))
    parser.parse_args().out.write_text(figure(README.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
