#!/usr/bin/env python3
"""Exports bases at real width with random weights:
`python benchmarks/big_models.py OUT [--only NAME ...] [--precision int8 ...]`.

Each base is built from the configuration of a published model, saved in bfloat16 as shards, and exported by a process
of its own. Prints one table row each: the graph's distance from PyTorch, the sizes of checkpoint and bundle, the
export's peak memory over the checkpoint's size, and its minutes. `--bench` also prints the time of a plain step, the
relative cost of steps of 2 to 32 rows, and the speed-up of 3.5 tokens a step at that cost. Existing files in OUT are
reused.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROPE = {"rope_type": "default"}
BASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-3.2-1b": (
        "llama",
        {
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "vocab_size": 128256,
            "max_position_embeddings": 131072,
            "tie_word_embeddings": True,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5e5,
                "factor": 32.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        },
    ),
    "llama-3.2-3b": (
        "llama",
        {
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "num_hidden_layers": 28,
            "num_attention_heads": 24,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 128256,
            "max_position_embeddings": 131072,
            "tie_word_embeddings": True,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5e5,
                "factor": 32.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        },
    ),
    "gemma-3-1b": (
        "gemma3_text",
        {
            "hidden_size": 1152,
            "intermediate_size": 6912,
            "num_hidden_layers": 26,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "vocab_size": 262144,
            "max_position_embeddings": 32768,
            "sliding_window": 512,
            "query_pre_attn_scalar": 256,
        },
    ),
    "phi-1.5": (
        "phi",
        {
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 24,
            "num_attention_heads": 32,
            "vocab_size": 51200,
            "max_position_embeddings": 2048,
            "rope_parameters": ROPE | {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
    ),
    "pythia-1b": (
        "gpt_neox",
        {
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 8,
            "vocab_size": 50304,
            "max_position_embeddings": 2048,
            "rope_parameters": ROPE | {"rope_theta": 1e4, "partial_rotary_factor": 0.25},
        },
    ),
    "stablelm-2-1.6b": (
        "stablelm",
        {
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_hidden_layers": 24,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "vocab_size": 100352,
            "max_position_embeddings": 4096,
            "use_qkv_bias": True,
            "rope_parameters": ROPE | {"rope_theta": 1e4, "partial_rotary_factor": 0.25},
        },
    ),
    "qwen3-1.7b": (
        "qwen3",
        {
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151936,
            "max_position_embeddings": 40960,
            "tie_word_embeddings": True,
            "rope_parameters": ROPE | {"rope_theta": 1e6},
        },
    ),
    "danube-1.8b": (
        "mistral",
        {
            "hidden_size": 2560,
            "intermediate_size": 6912,
            "num_hidden_layers": 24,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 32000,
            "max_position_embeddings": 16384,
            "sliding_window": 4096,
            "rms_norm_eps": 1e-5,
            "rope_parameters": ROPE | {"rope_theta": 1e4},
        },
    ),
    "qwen2.5-1.5b": (
        "qwen2",
        {
            "hidden_size": 1536,
            "intermediate_size": 8960,
            "num_hidden_layers": 28,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "vocab_size": 151936,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": True,
            "rope_parameters": ROPE | {"rope_theta": 1e6},
        },
    ),
    "phi-3.5-mini": (
        "phi3",
        {
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "vocab_size": 32064,
            "max_position_embeddings": 4096,
            "sliding_window": 2047,
            "rope_parameters": ROPE | {"rope_theta": 1e4},
        },
    ),
    "gpt2-large": ("gpt2", {"n_embd": 1280, "n_layer": 36, "n_head": 20, "vocab_size": 50257, "n_positions": 1024}),
    "gemma-2-2b": (
        "gemma2",
        {
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "vocab_size": 256000,
            "max_position_embeddings": 8192,
            "sliding_window": 4096,
            "query_pre_attn_scalar": 256,
        },
    ),
    "opt-1.3b": (
        "opt",
        {
            "hidden_size": 2048,
            "ffn_dim": 8192,
            "num_hidden_layers": 24,
            "num_attention_heads": 32,
            "vocab_size": 50272,
            "word_embed_proj_dim": 2048,
            "max_position_embeddings": 2048,
        },
    ),
}
SECONDS, TAU = 60.0, 3.5  # of measuring a curve; tokens a step
ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}


def make(name: str, folder: Path) -> None:
    """Writes random weights in bfloat16, shards of a gigabyte, with the reference base's tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from streamspec.adapters.base_models.resolve import resolve_base

    family, sizes = BASES[name]
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **sizes, **ENDS, dtype="bfloat16")
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder, max_shard_size="1GB")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(resolve_base("smollm2-135m").path / file, folder / file)


def export(folder: Path, bundle: Path, precision: str) -> None:
    """Exports in this process and prints its peak memory."""
    import resource

    from streamspec.export import export_bundle

    started = time.monotonic()
    manifest = export_bundle(folder, None, bundle, precision)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # KiB on Linux
    parts = {part: manifest.parity[part] for part in ("plain", "tree")}
    (bundle.parent / f"{bundle.name}.json").write_text(
        json.dumps({"peak": peak, "minutes": (time.monotonic() - started) / 60, "parity": parts})
    )


def curve(bundle: Path, threads: int | None) -> dict[int, float]:
    """Maps rows to ms of a step: medians, interleaved, of a chain of draft tokens after `CONTEXT` tokens."""
    from streamspec.bundle.files import read_manifest
    from streamspec.runtime.engine.loaded_model import LoadedModel
    from streamspec.runtime.engine.ort_runner import OrtRunner
    from streamspec.runtime.tuning.step_costs import CONTEXT, measure
    from streamspec.runtime.tuning.tune import ROUNDS

    engine = OrtRunner(LoadedModel(bundle / "model.onnx", read_manifest(bundle), threads=threads))
    chain = [(max(0, node - 1), 0, 1.0) for node in range(32)]
    return {rows: 1e3 * seconds for rows, seconds in measure(engine, chain, SECONDS, CONTEXT, ROUNDS)[0].items()}


def size(folder: Path, *endings: str) -> int:
    return sum(file.stat().st_size for file in folder.iterdir() if file.name.endswith(endings))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="+", choices=BASES, default=list(BASES))
    parser.add_argument("--precision", nargs="+", default=["int8"])
    parser.add_argument("--bench", action="store_true", help="also the cost of steps")
    parser.add_argument("--threads", type=int, help="of --bench (default: all cores)")
    parser.add_argument("--make", help=argparse.SUPPRESS)
    parser.add_argument("--export", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.make:
        return make(arguments.make, arguments.out)
    if arguments.export:
        return export(arguments.out, Path(arguments.export[0]), arguments.export[1])
    print(
        "| base | precision | checkpoint, GB | bundle, GB | plain: relative, first agrees | tree | peak memory over "
        "checkpoint | minutes |\n|---|---|---|---|---|---|---|---|"
    )
    for name in arguments.only:
        folder = arguments.out / name
        if not (folder / "tokenizer_config.json").exists():
            subprocess.run([sys.executable, __file__, folder, "--make", name], check=True, stdout=sys.stderr)
        checkpoint = size(folder, ".safetensors")
        for precision in arguments.precision:
            bundle = arguments.out / f"{name}-{precision}"
            if not bundle.exists():
                subprocess.run(
                    [sys.executable, __file__, folder, "--export", bundle, precision], check=True, stdout=sys.stderr
                )
            found = json.loads((arguments.out / f"{bundle.name}.json").read_text())
            off = " | ".join(
                f"{found['parity'][part]['relative']:.2g}, {100 * found['parity'][part]['argmax']:.0f} %"
                for part in ("plain", "tree")
            )
            print(
                f"| {name} | {precision} | {checkpoint / 1e9:.2f} | {size(bundle, '') / 1e9:.2f} | {off} | "
                f"{found['peak'] / checkpoint:.2f} | {found['minutes']:.1f} |",
                flush=True,
            )
            if arguments.bench:
                costs = curve(bundle, arguments.threads)
                ratios = ", ".join(f"{rows} rows {ms / costs[1]:.2f}" for rows, ms in costs.items() if rows > 1)
                gains = ", ".join(
                    f"{rows} rows {TAU * costs[1] / costs[rows]:.2f}" for rows in (8, 16) if rows in costs
                )
                print(
                    f"\na plain step {costs[1]:.1f} ms; over it: {ratios}; speed-up of {TAU} tokens a step: {gains}\n",
                    flush=True,
                )


if __name__ == "__main__":
    main()
