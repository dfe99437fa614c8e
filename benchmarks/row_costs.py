#!/usr/bin/env python3
"""Measures what a step of several rows costs at the widths of a published model, with random weights:
`python benchmarks/row_costs.py OUT --shape olmoe-1b-7b --layers 4 --precision int4`.

`--layers`: of so many layers alone, to fit in memory. The rows of a step are those of other tokens, and random routers
choose experts without regard to the text: no text brings more experts into a step. Prints a table row of the medians
over interleaved rounds, in ms and in plain steps.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import big_models
from base_shapes import BASES

ROWS = (2, 4, 8, 16)
CONTEXTS = (64, 2000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=BASES, required=True)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--precision", default="int4")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    family, sizes = BASES[arguments.shape]
    BASES[arguments.shape] = (family, sizes | {"num_hidden_layers": arguments.layers})
    name = f"{arguments.shape}-{arguments.layers}"
    base, bundle = arguments.out / name, arguments.out / f"{name}-{arguments.precision}"
    if not bundle.exists():
        if not (base / "tokenizer_config.json").exists():
            big_models.make(arguments.shape, str(base))
        big_models.export(str(base), str(bundle), arguments.precision)

    from streamspec import load
    from streamspec.runtime.engine.ort_runner import OrtRunner
    from streamspec.runtime.tuning.step_costs import measure

    session = load(bundle, tree="plain", threads=arguments.threads)
    assert isinstance(session.runner, OrtRunner)
    nodes = [(max(number - 1, 0), 0, 0.0) for number in range(max(ROWS))]  # a chain
    print(f"| shape, context | 1 row, ms | {' | '.join(f'{rows} rows' for rows in ROWS)} |")
    print("|---" * (2 + len(ROWS)) + "|")
    for context in CONTEXTS:
        costs, _ = measure(session.runner, nodes, budget=60.0, context=context, rounds=20, rows=ROWS)
        ratios = " | ".join(f"{costs[rows] / costs[1]:.2f}" for rows in ROWS)
        print(f"| {name} {arguments.precision}, {context} | {1e3 * costs[1]:.1f} | {ratios} |", flush=True)


if __name__ == "__main__":
    main()
