#!/usr/bin/env python3
"""What a bundle costs the program it is embedded in (Linux), each figure from a fresh process.

    python benchmarks/embedding.py memory BUNDLE...     expected and measured memory, by context
    python benchmarks/embedding.py sharing BUNDLE...    private and shared memory, with and without weights packed ahead (`load(packed=True)`)
    python benchmarks/embedding.py idle BUNDLE...       processor time while nothing is asked for, and what waking costs
    python benchmarks/embedding.py load BUNDLE...       seconds of loading, and of loading again after an idle unload
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

MB = 1e6
CONTEXTS = (512, 2048)
ROOM = 32  # tokens of the context left to the answer
IDLE = 10.0  # seconds
FIELDS = ("VmRSS", "VmHWM", "RssAnon", "RssFile")


def status() -> dict[str, float]:
    """MB of this process: resident now, at most so far, private, mapped from files."""
    text = Path("/proc/self/status").read_text()
    return {name: int(re.search(rf"{name}:\s+(\d+)", text)[1]) * 1024 / MB for name in FIELDS}  # type: ignore[index]


def prompt(tokens: int) -> list[int]:
    return [5 + i % 1000 for i in range(tokens)]


def measure_memory(bundle: str, context: int) -> dict[str, Any]:
    from streamspec.runtime import load

    before = status()["VmRSS"]
    session = load(bundle, context=context)
    loaded = status()
    session.generate(prompt(session.engine.context_length - ROOM), max_new_tokens=ROOM)
    after = status()
    return {"loaded": loaded["VmRSS"] - before, "peak": after["VmHWM"] - before, "after": after["VmRSS"] - before}


def memory(bundles: list[Path]) -> None:
    from streamspec.bundle import read_manifest
    from streamspec.runtime.memory import estimate

    print("| bundle | context | expected, MB | weights, packed, cache, work | after load | after an answer | most | expected over most |\n|---|---|---|---|---|---|---|---|")
    for bundle in bundles:
        for context in sorted({min(c, read_manifest(bundle).model.context_length) for c in CONTEXTS}):
            fresh("measure_memory", bundle, context)  # what is measured once on a machine is not measured in the next
            found, expected = fresh("measure_memory", bundle, context), estimate(bundle, context=context)
            parts = ", ".join(f"{part / MB:.0f}" for part in (expected.weights, expected.packed, expected.cache, expected.work))
            total = expected.total / MB
            print(f"| {bundle.name} | {context} | {total:.0f} | {parts} | {found['loaded']:.0f} | {found['after']:.0f} | {found['peak']:.0f} | {total / found['peak']:.2f} |", flush=True)


def fresh(function: str, *arguments: Any) -> dict[str, Any]:
    """What a function of this file returns in a process of its own."""
    command = [sys.executable, __file__, "call", json.dumps([function, *map(str, arguments[:1]), *arguments[1:]])]
    out = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return dict(json.loads(out.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("memory", "call"))
    parser.add_argument("bundles", nargs="+")
    arguments = parser.parse_args()
    if arguments.what == "call":
        function, *values = json.loads(arguments.bundles[0])
        print(json.dumps(globals()[function](*values)))
    else:
        globals()[arguments.what]([Path(bundle) for bundle in arguments.bundles])


if __name__ == "__main__":
    main()
