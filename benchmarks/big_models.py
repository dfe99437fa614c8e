#!/usr/bin/env python3
"""Exports bases at real width with random weights:
`python benchmarks/big_models.py OUT [--only NAME ...] [--precision int8 ...] [--bench] [--genai]`.

Each base is built from the configuration of a published model, saved in bfloat16 as shards, and exported by a process
of its own. Prints one table row each: the graph's distance from PyTorch, the sizes of checkpoint and bundle, the
export's peak memory over the checkpoint's size, and its minutes. `--bench` also prints the relative cost of steps of 2
to 32 rows, and the speed-up of 3.5 tokens a step at that cost. `--genai` also has onnxruntime-genai's model builder
write the same weights (it needs `pip install onnxruntime-genai onnx-ir`) and prints, beside each other: minutes and
peak memory of both exports, peak memory of a session that answers 32 tokens, and steps of 1 and 8 rows in turns
(`genai_step.py`). Where the builder needs more than 80 % of this machine's memory, its figures are left out. Figures
are kept in OUT and not measured again; `--discard` deletes a base's files when it is done.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from base_shapes import BASES

SECONDS, TAU = 60.0, 3.5  # of measuring a curve; tokens a step
ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
PROMPT, ANSWER = 64, 32  # tokens of a session whose memory is measured
ROUNDS, STEPS = 5, 16  # of steps in turns


def make(name: str, folder: str) -> None:
    """Writes random weights in bfloat16, shards of a gigabyte, with the reference base's tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from streamspec.adapters.base_models.resolve import resolve_base

    family, sizes = BASES[name]
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **sizes, **ENDS, dtype="bfloat16")
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder, max_shard_size="1GB")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(resolve_base("smollm2-135m").path / file, Path(folder, file))


def export(folder: str, bundle: str, precision: str) -> None:
    """Exports in this process and prints the parity of its parts."""
    from streamspec.export import export_bundle

    manifest = export_bundle(folder, None, bundle, precision)
    print(json.dumps({part: manifest.parity[part] for part in ("plain", "tree")}))


def session(bundle: str, threads: str) -> None:
    """Answers as an application does: opens the bundle and writes `ANSWER` tokens."""
    import streamspec

    opened = streamspec.load(bundle, threads=int(threads))
    opened.generate(list(range(3, 3 + PROMPT)), max_new_tokens=ANSWER)


def genai_session(folder: str, threads: str) -> None:
    import numpy as np
    from genai_step import open_theirs, theirs

    theirs(open_theirs(Path(folder), int(threads)), np.arange(3, 3 + PROMPT), 1, ANSWER)


def compare_steps(bundle: str, folder: str, threads: str) -> None:
    from genai_step import compare

    other = Path(folder)
    print(json.dumps(compare(Path(bundle), other if other.exists() else None, ROUNDS, STEPS, PROMPT, int(threads))))


def curve(bundle: str, threads: str) -> None:
    """Prints the ms of a step by its rows: medians, interleaved, of a chain of draft tokens after `CONTEXT` tokens."""
    from streamspec.bundle.files import read_manifest
    from streamspec.runtime.engine.loaded_model import LoadedModel
    from streamspec.runtime.engine.ort_runner import OrtRunner
    from streamspec.runtime.tuning.step_costs import CONTEXT, measure
    from streamspec.runtime.tuning.tune import ROUNDS

    engine = OrtRunner(LoadedModel(Path(bundle, "model.onnx"), read_manifest(bundle), threads=int(threads)))
    chain = [(max(0, node - 1), 0, 1.0) for node in range(32)]
    costs = measure(engine, chain, SECONDS, CONTEXT, ROUNDS)[0]
    print(json.dumps({rows: 1e3 * seconds for rows, seconds in costs.items()}))


JOBS = {job.__name__: job for job in (make, export, session, genai_session, compare_steps, curve)}


def run(*command: Any, memory: int = resource.RLIM_INFINITY) -> dict[str, Any]:
    """Runs a process of at most `memory` bytes; returns its minutes, its peak memory in bytes, and the JSON that its
    last line of output is."""
    started = time.monotonic()
    with subprocess.Popen(
        list(map(str, command)),
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (memory, memory)),
    ) as process:
        assert process.stdout is not None
        lines = process.stdout.read().splitlines()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, process.args)
    found = json.loads(lines[-1]) if lines and lines[-1].startswith("{") else None
    return {
        "minutes": (time.monotonic() - started) / 60,
        "peak": usage.ru_maxrss * 1024,
        "found": found,
    }  # KiB on Linux


def job(name: str, *given: Any) -> dict[str, Any]:
    return run(sys.executable, __file__, "--job", name, *given)


def build_genai(folder: Path, other: Path, precision: str, hub: Path) -> dict[str, Any]:
    """Has onnxruntime-genai's builder write the base; an empty result where it needs too much memory."""
    builder = (sys.executable, "-m", "onnxruntime_genai.models.builder", "-p", precision, "-e", "cpu")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * 8 // 10
    try:
        return run(*builder, "-i", folder, "-o", other, "-c", hub, memory=memory)
    except subprocess.CalledProcessError:
        shutil.rmtree(other, ignore_errors=True)
        return {}


def size(folder: Path, *endings: str) -> int:
    return sum(file.stat().st_size for file in folder.iterdir() if file.name.endswith(endings))


def measure_base(out: Path, name: str, precision: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """All figures of a base in a precision; those that stand in `OUT/NAME-PRECISION.json` are taken from there."""
    folder, bundle, other = out / name, out / f"{name}-{precision}", out / f"{name}-{precision}-genai"
    record = out / f"{name}-{precision}.json"
    found: dict[str, Any] = json.loads(record.read_text()) if record.exists() else {}
    steps: dict[str, Any] = {
        "checkpoint": lambda: size(folder, ".safetensors"),
        "export": lambda: job("export", folder, bundle, precision),
        "bundle": lambda: size(bundle, ""),
    }
    if arguments.bench:
        steps["curve"] = lambda: job("curve", bundle, arguments.threads)
    if arguments.genai:
        steps |= {
            "genai_export": lambda: build_genai(folder, other, precision, out / "hub"),
            "genai_bundle": lambda: size(other, "") if other.exists() else None,
            "session": lambda: job("session", bundle, arguments.threads),
            "genai_session": lambda: job("genai_session", other, arguments.threads) if other.exists() else {},
            "steps": lambda: job("compare_steps", bundle, other, arguments.threads),
        }
    missing = [step for step in steps if step not in found]
    if missing and not (folder / "tokenizer_config.json").exists():
        job("make", name, folder)
    for step in missing:
        found[step] = steps[step]()
        record.write_text(json.dumps(found))
    if arguments.discard:
        for made in (bundle, other):
            shutil.rmtree(made, ignore_errors=True)
    return found


def export_row(name: str, precision: str, found: dict[str, Any]) -> str:
    parts = found["export"]["found"]
    off = " | ".join(
        f"{parts[part]['relative']:.2g}, {100 * parts[part]['argmax']:.0f} %" for part in ("plain", "tree")
    )
    return (
        f"| {name} | {precision} | {found['checkpoint'] / 1e9:.2f} | {found['bundle'] / 1e9:.2f} | {off} | "
        f"{found['export']['peak'] / found['checkpoint']:.2f} | {found['export']['minutes']:.1f} |"
    )


def genai_row(name: str, precision: str, found: dict[str, Any]) -> str:
    from genai_step import text

    def pair(key: str, form: Callable[[dict[str, Any]], str]) -> str:
        return ", ".join(form(found[side]) if found[side] else "-" for side in (key, f"genai_{key}"))

    cells = [
        f"{found['checkpoint'] / 1e9:.2f}",
        pair("bundle", lambda size: f"{size / 1e9:.2f}"),
        pair("export", lambda made: f"{made['minutes']:.1f}"),
        pair("export", lambda made: f"{made['peak'] / found['checkpoint']:.2f}"),
        pair("session", lambda opened: f"{opened['peak'] / 1e9:.2f}"),
        *(text(found["steps"]["found"][rows]) for rows in ("1", "8")),
    ]
    return f"| {name} | {precision} | {' | '.join(cells)} |"


def curve_text(costs: dict[str, float]) -> str:
    ratios = ", ".join(f"{rows} rows {ms / costs['1']:.2f}" for rows, ms in costs.items() if rows != "1")
    gains = ", ".join(f"{rows} rows {TAU * costs['1'] / costs[rows]:.2f}" for rows in ("8", "16") if rows in costs)
    return f"\na plain step {costs['1']:.1f} ms; over it: {ratios}; speed-up of {TAU} tokens a step: {gains}\n"


def main() -> None:
    if sys.argv[1:2] == ["--job"]:
        return JOBS[sys.argv[2]](*sys.argv[3:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="+", choices=BASES, default=list(BASES))
    parser.add_argument("--precision", nargs="+", default=["int8"])
    parser.add_argument("--bench", action="store_true", help="also the cost of steps")
    parser.add_argument("--genai", action="store_true", help="also onnxruntime-genai on the same weights")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of steps and sessions (default: all)")
    parser.add_argument("--discard", action="store_true", help="delete checkpoints and bundles once measured")
    arguments = parser.parse_args()
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    rows: list[str] = []
    print(
        "| base | precision | checkpoint, GB | bundle, GB | plain: relative, first agrees | tree | peak memory over "
        "checkpoint | minutes |\n|---|---|---|---|---|---|---|---|"
    )
    for name in arguments.only:
        for precision in arguments.precision:
            found = measure_base(out, name, precision, arguments)
            print(export_row(name, precision, found), flush=True)
            if arguments.bench:
                print(curve_text(found["curve"]["found"]), flush=True)
            if arguments.genai:
                rows.append(genai_row(name, precision, found))
                print(rows[-1], file=sys.stderr, flush=True)
        if arguments.discard:
            shutil.rmtree(out / name, ignore_errors=True)
    if rows:
        print(
            "\nstreamspec's figure first, onnxruntime-genai's second, then the ratio over rounds (least..most)\n\n"
            "| base | precision | checkpoint, GB | bundle, GB | export, minutes | its peak memory over checkpoint | "
            "session, GB | plain step, ms | 8 rows, ms |\n|---|---|---|---|---|---|---|---|---|"
        )
        print("\n".join(rows))


if __name__ == "__main__":
    main()
