"""A small valid manifest for tests to bend, and a bundle with it."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from streamspec.bundle.manifest import BaseInfo, DrafterInfo, DraftTreeInfo, Manifest, ProbeInfo, check_name
from streamspec.bundle.model_section import ModelInfo
from streamspec.bundle.write_files import bundle_folder, finish
from streamspec.prompt.prompt_format import PromptFormat
from streamspec.runtime.kv_cache.layout import CacheGroup, cache_groups
from streamspec.step_graph import GraphFeatures


def manifest(**changes: Any) -> Manifest:
    """A streaming bundle's manifest, without files."""
    fields: dict[str, Any] = {
        "base": BaseInfo("tiny", "ab" * 32, "llama"),
        "method": "streaming",
        "precision": "int8",
        "model": ModelInfo(2, 1, 8, 257, 16, 128, (0,), 1),
        "prompt_format": PromptFormat("raw", "\n"),
        "streams": DrafterInfo(2, 1, 5),
        "trees": DraftTreeInfo(((0, 0, 1.0), (0, 0, 0.75), (1, 0, 0.5), (0, 4, 0.125)), 3),
        "probe": ProbeInfo((1, 2, 3), (2, 3, 4), (1.5, 2.5, -3.0)),
        "recipe": "staged",
        "drafter": "streaming",
        "parity": {"max_difference": 1e-5},
        "weights_bytes": 10,
        "tools": {"streamspec": "0.1.0"},
    }
    return Manifest(**(fields | changes))


FILES: dict[str, Any] = {
    "model.onnx": b"graph",
    "model.onnx.data": b"weights",
    "tokenizer.json": "{}",
    "README.md": "card",
}


def write_bundle(
    directory: str | Path, files: Mapping[str, Path | bytes | str], manifest: Manifest, force: bool = False
) -> Manifest:
    """Writes a bundle from `files` (name -> source path to copy, bytes, or text). Errors as in `bundle_folder`."""
    with bundle_folder(directory, force) as folder:
        for name, content in files.items():
            check_name(name)
            if isinstance(content, Path):
                shutil.copyfile(content, folder / name)
            else:
                (folder / name).write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
        return finish(folder, manifest)


def plain_groups(layers: int, kv_heads: int, head_dim: int) -> tuple[CacheGroup, ...]:
    """Of a cache whose layers all keep everything."""
    return cache_groups(GraphFeatures(layers, kv_heads, head_dim, 0))
