"""Manifests, and what adapters and drafters say of themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.fuzz.targets.target import Target, fail, of_json
from tests.support.manifests import manifest


def _manifests() -> list[Any]:
    entry = {"sha256": "0" * 64, "bytes": 1}
    good = json.loads(manifest().to_json()) | {"files": dict.fromkeys(("model.onnx", "tokenizer.json"), entry)}
    plain = good | {"method": "lora", "streams": None, "trees": None, "drafter": None}
    room = {"ns": [2, 1], "candidates": 5, "root_token": True, "bigram": True, "pruning": True, "draft_vocab": True}
    fixed = plain | {"static": {"rows": 8, "slots": 128}, "files": good["files"] | {"choose.onnx": entry}}
    return [good, plain, plain | {"swappable": room}, fixed]


def run_manifest(data: bytes, folder: Path) -> object:
    from streamspec.bundle.manifest import Manifest

    made = Manifest.from_json(data)
    return Manifest.from_json(made.to_json()).to_json() == made.to_json() or fail(
        "a manifest that reads otherwise when written again"
    )


def _swappable() -> list[Any]:
    from dataclasses import replace

    from streamspec.bundle.manifest import FileInfo
    from streamspec.bundle.swappable_adapters import SwappableAdapter, fingerprint

    bundle = _room()
    streams = manifest().streams
    assert streams is not None
    whole = SwappableAdapter(
        bundle.base,
        fingerprint(bundle),
        "streaming",
        bundle.prompt_format,
        "staged",
        streams,
        manifest().trees,
        {"task": 4},
        {"x": 1.0},
        {"torch": "2"},
        FileInfo("0" * 64, 5),
    )
    return [json.loads(one.to_json()) for one in (whole, replace(whole, method="lora", streams=None, trees=None))]


def _room() -> Any:
    from streamspec.bundle.manifest import SwappableCapacity

    return manifest(
        method="lora", streams=None, trees=None, swappable=SwappableCapacity((1,), 5, True, True, True, True)
    )


def run_swappable(data: bytes, folder: Path) -> object:
    from streamspec.bundle.manifest import Manifest
    from streamspec.bundle.swappable_adapters import SwappableAdapter

    return SwappableAdapter.from_json(data, _room()).on(_room()).to_json() and Manifest


def _adapters() -> list[Any]:
    streams = {
        "gamma": 3,
        "ns": 2,
        "scale": 1.0,
        "positions": "shifted",
        "root_token": True,
        "lora": {"rank": 2, "alpha": 2.0},
        "draft_vocab": 48,
        "bigram": 3,
        "pruning": 4,
    }
    shared = {
        "format_version": 1,
        "base": {"id": "x", "sha256": "0" * 64, "model_type": "llama"},
        "prompt_format": {"kind": "raw", "separator": "\n"},
    }
    return [
        shared | {"method": "streaming", "recipe": "joint", "streams": streams},
        shared | {"method": "lora", "recipe": None, "streams": None},
    ]


def run_adapter(data: bytes, folder: Path) -> object:
    from streamspec.bundle.adapter_folder import STREAM_CONFIG, read_adapter

    (folder / STREAM_CONFIG).write_bytes(data)
    return read_adapter(folder)


def _loras() -> list[Any]:
    return [
        {
            "task_type": "CAUSAL_LM",
            "peft_type": "LORA",
            "r": 12,
            "target_modules": ["q_proj"],
            "exclude_modules": None,
            "lora_alpha": 12,
            "rank_pattern": {"a.b": 4},
            "alpha_pattern": {},
            "init_lora_weights": True,
            "layer_replication": None,
            "megatron_config": None,
            "megatron_core": "megatron.core",
            "loftq_config": {},
            "use_dora": False,
            "bias": "none",
        }
    ]


def run_lora(data: bytes, folder: Path) -> object:
    """As an export begins, and as `inspect` reads it."""
    from safetensors.numpy import save_file

    from streamspec.bundle.adapter_folder import TASK_CONFIG, TASK_WEIGHTS, more_than_low_rank, read_adapter
    from streamspec.cli.inspect import describe

    (folder / TASK_CONFIG).write_bytes(data)
    save_file({"base_model.model.q_proj.lora_A.weight": np.zeros((12, 4), np.float32)}, folder / TASK_WEIGHTS)
    read_adapter(folder)
    return more_than_low_rank(folder), describe(folder)


def _acceptances() -> list[Any]:
    return [{"gamma": 2, "max_rank": 4, "ranks": [[[0, 1], [-1, 3], [2, -2], [-2, -2]], [[0, 0]]]}]


def run_acceptance(data: bytes, folder: Path) -> object:
    from streamspec.acceptance_stats import Acceptance, node_order

    (folder / "acceptance.json").write_bytes(data)
    found = Acceptance.load(folder / "acceptance.json")
    return node_order(found.ranks, found.gamma)


def _heads() -> list[Any]:
    from tests.support.published_heads import flat_config, speculators_config

    nested = {"eagle_aux_hidden_state_layer_ids": [0, 1], "use_aux_hidden_state": True}
    return [speculators_config("llama"), speculators_config("qwen3"), flat_config(eagle_config=nested)]


def _blocks() -> list[Any]:
    from tests.support.published_blocks import WINDOWED, speculators_block_config, zlab_config

    spoken = [speculators_block_config(kind) for kind in ("dflash", "dspark")]
    return [*spoken, zlab_config(), zlab_config(layer=WINDOWED)]


def run_published(data: bytes, folder: Path) -> object:
    """As an export reads the drafter beside a target of six layers."""
    from streamspec.export.drafters.published.block_config import kind_of, read_block_config
    from streamspec.export.drafters.published.eagle3_config import CONFIG, read_config, read_fields

    (folder / CONFIG).write_bytes(data)
    read = read_block_config if kind_of(read_fields(folder)) else read_config
    return read(folder).tapped(6)


CONFIGURATIONS = {
    "manifest": Target(of_json(_manifests), run_manifest),
    "swappable": Target(of_json(_swappable), run_swappable),
    "adapter": Target(of_json(_adapters), run_adapter),
    "lora": Target(of_json(_loras), run_lora),
    "acceptance": Target(of_json(_acceptances), run_acceptance),
    "eagle3": Target(of_json(_heads), run_published),
    "dflash": Target(of_json(_blocks), run_published),
}
