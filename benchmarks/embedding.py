#!/usr/bin/env python3
"""Measures what a bundle costs the program that embeds it (Linux), each figure in a fresh process.

python benchmarks/embedding.py memory BUNDLE...     expected and measured memory, by context
python benchmarks/embedding.py idle BUNDLE...       CPU time of an idle session; memory after unloading, time of
                                                    unloading and reloading
python benchmarks/embedding.py mapped BUNDLE...     private and mapped memory: as it is, and with the packed weights
                                                    that ONNX Runtime writes
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

MB = 1e6
CONTEXTS = (512, 2048)
ROOM = 32  # tokens of the context left to the answer
IDLE = 10.0  # seconds
FIELDS = ("VmRSS", "VmHWM", "RssAnon", "RssFile")


def status() -> dict[str, float]:
    """Returns MB of this process: resident now, peak, private, mapped from files."""
    text = Path("/proc/self/status").read_text()
    return {name: int(re.search(rf"{name}:\s+(\d+)", text)[1]) * 1024 / MB for name in FIELDS}  # type: ignore[index]


def prompt(tokens: int) -> list[int]:
    return [5 + i % 1000 for i in range(tokens)]


def measure_memory(bundle: str, context: int) -> dict[str, Any]:
    from streamspec.runtime import load

    before = status()["VmRSS"]
    session = load(bundle, context=context)
    loaded = status()
    session.generate(prompt(session.runner.context_length - ROOM), max_new_tokens=ROOM)
    after = status()
    return {"loaded": loaded["VmRSS"] - before, "peak": after["VmHWM"] - before, "after": after["VmRSS"] - before}


def memory(bundles: list[Path]) -> None:
    from streamspec.bundle.files import read_manifest
    from streamspec.runtime import estimate_memory as estimate

    print(
        "| bundle | context | expected, MB | weights, packed, cache, work | after load | after an answer | most | "
        "expected over most |\n|---|---|---|---|---|---|---|---|"
    )
    for bundle in bundles:
        for context in sorted({min(c, read_manifest(bundle).model.context_length) for c in CONTEXTS}):
            fresh("measure_memory", bundle, context)  # what is measured once on a machine is not measured in the next
            found, expected = fresh("measure_memory", bundle, context), estimate(bundle, context=context)
            parts = ", ".join(
                f"{part / MB:.0f}" for part in (expected.weights, expected.packed, expected.cache, expected.work)
            )
            total = expected.total / MB
            print(
                f"| {bundle.name} | {context} | {total:.0f} | {parts} | {found['loaded']:.0f} | {found['after']:.0f} "
                f"| {found['peak']:.0f} | {total / found['peak']:.2f} |",
                flush=True,
            )


def measure_idle(bundle: str, threads: int, spin: bool) -> dict[str, Any]:
    from streamspec.runtime import load

    before, began = status()["VmRSS"], time.perf_counter()
    session = load(bundle, threads=threads, spin=spin, context=2048)
    loading = time.perf_counter() - began
    answer = session.generate(prompt(300), max_new_tokens=ROOM)
    used = time.process_time()
    time.sleep(IDLE)
    out = {"busy": time.process_time() - used, "loading": loading, "loaded": status()["VmRSS"] - before}
    session.unload()
    out["unloaded"], began = status()["VmRSS"] - before, time.perf_counter()
    again = session.generate(prompt(300), max_new_tokens=ROOM)
    out["waking"] = time.perf_counter() - began - again.stats.prefill_seconds - again.stats.decode_seconds
    assert again.token_ids == answer.token_ids
    return out


def idle(bundles: list[Path]) -> None:
    print(
        f"| bundle | threads, spinning | processor time in {IDLE:.0f} s of idleness | load, s | resident, MB | "
        f"unloaded, MB | waking, s |\n|---|---|---|---|---|---|---|"
    )
    for bundle in bundles:
        for spin in (True, False):
            fresh("measure_idle", bundle, 2, spin)  # what is measured once on a machine is not measured in the next
            found = fresh("measure_idle", bundle, 2, spin)
            print(
                f"| {bundle.name} | 2, {'yes' if spin else 'no'} | {found['busy']:.3f} s | {found['loading']:.2f} | "
                f"{found['loaded']:.0f} | {found['unloaded']:.0f} | {found['waking']:.2f} |",
                flush=True,
            )


def measure_mapped(bundle: str, folder: str, packed: bool) -> dict[str, Any]:
    """Returns private and mapped memory of the graph alone, and its plain step.

    `packed` uses the files of `folder`, which are written first if missing.
    """

    from streamspec.bundle.files import read_manifest
    from streamspec.draft_tree import chain
    from streamspec.runtime.decoding.model_runner import StepRequest
    from streamspec.runtime.engine.loaded_model import LoadedModel
    from streamspec.runtime.engine.ort_runner import OrtRunner

    model, written = Path(bundle) / "model.onnx", Path(folder) / "model.onnx"

    class Writing(LoadedModel):
        def options(self) -> Any:
            options = super().options()
            if packed and not written.exists():
                options.optimized_model_filepath = str(written)
                options.add_session_config_entry("session.save_external_prepacked_constant_initializers", "1")
                options.add_session_config_entry(
                    "session.optimized_model_external_initializers_file_name", "model.data"
                )
                options.add_session_config_entry(
                    "session.optimized_model_external_initializers_min_size_in_bytes", "1024"
                )
            return options

    before, began = status(), time.perf_counter()
    engine = OrtRunner(Writing(written if packed and written.exists() else model, read_manifest(bundle), threads=1))
    opening = time.perf_counter() - began
    engine.prefill(StepRequest(prompt(64)))
    steps = []
    for _ in range(60):
        began = time.perf_counter()
        engine.verify(StepRequest([0], chain(0)))
        steps.append(time.perf_counter() - began)
    after = status()
    size = sum(file.stat().st_size for file in written.parent.iterdir()) / MB
    return {
        "private": after["RssAnon"] - before["RssAnon"],
        "mapped": after["RssFile"] - before["RssFile"],
        "opening": opening,
        "size": size,
        "step": 1000 * min(steps),
    }


def mapped(bundles: list[Path]) -> None:
    print(
        "| bundle | weights | private, MB | mapped, MB | opening, s | quickest plain step, ms | further files, MB "
        "|\n|---|---|---|---|---|---|---|"
    )
    for bundle in bundles:
        with tempfile.TemporaryDirectory() as folder:
            fresh("measure_mapped", bundle, folder, True)  # writes
            for packed in (False, True) * 2:
                found = fresh("measure_mapped", bundle, folder, packed)
                print(
                    f"| {bundle.name} | {'packed before' if packed else 'as they are'} | {found['private']:.0f} | "
                    f"{found['mapped']:.0f} | {found['opening']:.2f} | {found['step']:.2f} | "
                    f"{found['size'] * packed:.0f} |",
                    flush=True,
                )


def fresh(function: str, *arguments: Any) -> dict[str, Any]:
    """Calls a function of this file in a process of its own and returns its result."""
    command = [sys.executable, __file__, "call", json.dumps([function, *map(str, arguments[:1]), *arguments[1:]])]
    out = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return dict(json.loads(out.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("memory", "idle", "mapped", "call"))
    parser.add_argument("bundles", nargs="+")
    arguments = parser.parse_args()
    if arguments.what == "call":
        function, *values = json.loads(arguments.bundles[0])
        print(json.dumps(globals()[function](*values)))
    else:
        globals()[arguments.what]([Path(bundle) for bundle in arguments.bundles])


if __name__ == "__main__":
    main()
