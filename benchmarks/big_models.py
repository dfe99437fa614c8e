#!/usr/bin/env python3
"""Exports bases at real width with random weights:
`python benchmarks/big_models.py OUT [--only NAME ...] [--precision int8 ...] [--mtp]`.

Each base is built from the configuration of a published model, saved in bfloat16 as shards, and exported by a process
of its own. Prints one table row each: the graph's distance from PyTorch, the sizes of checkpoint and bundle, the
export's peak memory over the checkpoint's size, and its minutes. Figures are kept in OUT and not measured again;
`--mtp` adds an MTP layer to a base of Qwen3.5; `--discard` deletes a base's files when it is done.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from base_shapes import BASES

ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}


def make(name: str, folder: str, *mtp: str) -> None:
    """Writes random weights in bfloat16, shards of a gigabyte, with the reference base's tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from streamspec.adapters.base_models.resolve import resolve_base

    family, sizes = BASES[name]
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **sizes, **ENDS, dtype="bfloat16")
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="1GB")
    if mtp:
        add_mtp(model, Path(folder))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(resolve_base("smollm2-135m").path / file, Path(folder, file))


def add_mtp(model: Any, folder: Path) -> None:
    """Adds an MTP layer like Qwen3.5's to the shards: one of the kind of the last layer, between norms and a map."""
    import torch
    from safetensors.torch import save_file

    layer, hidden = model.model.layers[-1].state_dict(), model.config.hidden_size
    shapes = {f"layers.0.{name}": tuple(value.shape) for name, value in layer.items()}
    shapes |= dict.fromkeys(("norm.weight", "pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight"), (hidden,))
    shapes["fc.weight"] = (hidden, 2 * hidden)
    made = {f"mtp.{name}": 0.02 * torch.randn(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    save_file(made, folder / "mtp.safetensors", {"format": "pt"})
    index, config = folder / "model.safetensors.index.json", folder / "config.json"
    listed, fields = json.loads(index.read_text()), json.loads(config.read_text())
    listed["weight_map"] |= dict.fromkeys(made, "mtp.safetensors")
    index.write_text(json.dumps(listed))
    config.write_text(json.dumps(fields | {"mtp_num_hidden_layers": 1}))


def export(folder: str, bundle: str, precision: str) -> None:
    """Exports in this process and prints the parity of its parts."""
    from streamspec.export import export_bundle

    manifest = export_bundle(folder, None, bundle, precision)
    print(json.dumps({part: manifest.parity[part] for part in ("plain", "tree")}))


JOBS = {job.__name__: job for job in (make, export)}


def run(*command: Any) -> dict[str, Any]:
    """Runs a process; returns its minutes, its peak memory in bytes, and the JSON that its last line of output is."""
    started = time.monotonic()
    with subprocess.Popen(
        list(map(str, command)),
        stdout=subprocess.PIPE,
        text=True,
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


def size(folder: Path, *endings: str) -> int:
    return sum(file.stat().st_size for file in folder.iterdir() if file.name.endswith(endings))


def folder_of(out: Path, name: str, arguments: argparse.Namespace) -> Path:
    return out / f"{name}{'-mtp' * arguments.mtp}"


def measure_base(out: Path, name: str, precision: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """All figures of a base in a precision; those that stand in `OUT/NAME-PRECISION.json` are taken from there."""
    folder = folder_of(out, name, arguments)
    bundle = out / f"{folder.name}-{precision}"
    record = bundle.with_name(f"{bundle.name}.json")
    found: dict[str, Any] = json.loads(record.read_text()) if record.exists() else {}
    steps: dict[str, Any] = {
        "checkpoint": lambda: size(folder, ".safetensors"),
        "export": lambda: job("export", folder, bundle, precision),
        "bundle": lambda: size(bundle, ""),
    }
    missing = [step for step in steps if step not in found]
    if missing and not (folder / "tokenizer_config.json").exists():
        job("make", name, folder, *(["mtp"] if arguments.mtp else []))
    for step in missing:
        found[step] = steps[step]()
        record.write_text(json.dumps(found))
    if arguments.discard:
        shutil.rmtree(bundle, ignore_errors=True)
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


def main() -> None:
    if sys.argv[1:2] == ["--job"]:
        return JOBS[sys.argv[2]](*sys.argv[3:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="+", choices=BASES, default=list(BASES))
    parser.add_argument("--precision", nargs="+", default=["int8"])
    parser.add_argument("--mtp", action="store_true", help="with an MTP layer like Qwen3.5's")
    parser.add_argument("--discard", action="store_true", help="delete checkpoints and bundles once measured")
    arguments = parser.parse_args()
    if arguments.mtp and any(BASES[name][0] != "qwen3_5_text" for name in arguments.only):
        parser.error("--mtp is for bases of Qwen3.5: name them with --only")
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    print(
        "| base | precision | checkpoint, GB | bundle, GB | plain: relative, first agrees | tree | peak memory over "
        "checkpoint | minutes |\n|---|---|---|---|---|---|---|---|"
    )
    for name in arguments.only:
        for precision in arguments.precision:
            found = measure_base(out, name, precision, arguments)
            print(export_row(name, precision, found), flush=True)
        if arguments.discard:
            shutil.rmtree(folder_of(out, name, arguments), ignore_errors=True)


if __name__ == "__main__":
    main()
