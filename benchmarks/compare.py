#!/usr/bin/env python3
"""Tests whether two systems differ in quality, prompt by prompt.

    python benchmarks/compare.py A.jsonl B.jsonl [--side plain|speculative|BUNDLE] [--side-b ...]

A and B are files of `streamspec bench --save-outputs`, possibly the same one. BUNDLE is the path of a bundle that took
part by `--also`. Prints means, the difference B - A with its 95 % interval (paired bootstrap over prompts), and one
JSON line at the end.
"""

from __future__ import annotations

import argparse
import json
import sys

from streamspec.bench import compare
from streamspec.bench.figures import rounded
from streamspec.bench.quality import METRICS
from streamspec.errors import StreamspecError


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("a")
    parser.add_argument("b")
    parser.add_argument("--side", default="plain")
    parser.add_argument("--side-b", default=None)
    options = parser.parse_args()
    try:
        result = compare(options.a, options.b, options.side, options.side_b)
    except StreamspecError as error:
        print(f"compare: {error}", file=sys.stderr)
        return error.exit_status
    print(
        f"{result['prompts']} prompts, {result['side']} and {result['side_b']} answers, {result['equal']} of them equal"
    )
    for metric in METRICS:
        one = result[metric]
        print(
            f"{metric:7} {one['a']:.4f} -> {one['b']:.4f}   {one['difference']:+.4f} [{one['low']:+.4f}, "
            f"{one['high']:+.4f}]"
        )
    print(json.dumps(rounded(result)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
