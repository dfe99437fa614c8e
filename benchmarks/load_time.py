#!/usr/bin/env python3
"""Measures loading by its phases: `python benchmarks/load_time.py BUNDLE [--loads 7] [--threads N] [--provider NAME]`.

Fresh processes load the bundle and give one token, with the costs of steps measured before. Prints milliseconds, median
with minimum and maximum, of each phase; those marked with + run in threads beside others. Then MB: the largest resident
size, and the memory at the end that is no file's, so that no other process can share it.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

STARTED = time.time()
PHASES = (  # name, module, function
    ("check the graphs", "streamspec.runtime.loader", "check_graphs"),
    ("open the graph", "streamspec.runtime.tuning.select_provider", "LoadedModel"),
    ("self-test", "streamspec.runtime.tuning.select_provider", "check_numerics"),
    ("costs of steps", "streamspec.runtime.loader", "choose_policy"),
    ("hashes +", "streamspec.bundle.files", "sha256_file"),
    ("tokenizer +", "streamspec.runtime.loader", "read_tokenizer"),
    ("huge pages +", "streamspec.runtime.hardware.huge_pages", "move"),
)


def timed(function: Callable[..., Any], spent: dict[str, float], name: str) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        began = time.perf_counter()
        try:
            return function(*arguments, **options)
        finally:
            spent[name] += 1e3 * (time.perf_counter() - began)

    return call


def measure(arguments: argparse.Namespace) -> dict[str, float]:
    """Loads in this process, which has imported nothing yet."""
    began = time.perf_counter()
    import importlib

    import onnxruntime  # noqa: F401
    import tokenizers  # noqa: F401

    from streamspec.runtime import load

    modules = {name: importlib.import_module(name) for _, name, _ in PHASES}
    spent = {"Python starts": 1e3 * (STARTED - arguments.one), "imports": 1e3 * (time.perf_counter() - began)}
    spent |= dict.fromkeys((name for name, _, _ in PHASES), 0.0)
    for name, module, function in PHASES:
        setattr(modules[module], function, timed(getattr(modules[module], function), spent, name))
    began = time.perf_counter()
    options = {"threads": arguments.threads, "provider": arguments.provider, "cache_dir": arguments.cache_dir}
    session = load(arguments.bundle, **options)
    spent["load in all"] = 1e3 * (time.perf_counter() - began)
    began = time.perf_counter()
    next(session.stream("Hello there", max_new_tokens=2))
    spent["first token"] = 1e3 * (time.perf_counter() - began)
    spent["process start to first token"] = 1e3 * (time.time() - arguments.one)
    session.runner.model.settle()
    status, smaps = Path("/proc/self/status"), Path("/proc/self/smaps_rollup")
    if smaps.exists():
        spent["largest resident, MB"] = int(re.search(r"VmHWM:\s+(\d+)", status.read_text())[1]) / 1e3
        spent["not shared, MB"] = int(re.search(r"Anonymous:\s+(\d+)", smaps.read_text())[1]) / 1e3
    return spent | {"provider": session.provider.name}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--loads", type=int, default=7)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--provider", default="auto")
    parser.add_argument("--cache-dir", type=Path)
    parser.add_argument("--one", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments)))
        return
    with tempfile.TemporaryDirectory() as folder:
        runs = []
        for _ in range(arguments.loads + 1):
            command = [sys.executable, __file__, *sys.argv[1:], "--cache-dir", str(arguments.cache_dir or folder)]
            done = subprocess.run([*command, "--one", str(time.time())], check=True, capture_output=True, text=True)
            runs.append(json.loads(done.stdout.splitlines()[-1]))
    print(f"provider {runs[-1].pop('provider')}; the first load took {runs[0]['load in all']:.0f} ms")
    for name in runs[-1]:
        values = [run[name] for run in runs[1:]]
        print(f"{name}: {statistics.median(values):.0f} ({min(values):.0f}..{max(values):.0f})")


if __name__ == "__main__":
    main()
