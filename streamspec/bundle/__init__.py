"""The bundle and adapter formats: manifests, files, checks of untrusted input."""

from __future__ import annotations

import importlib
from typing import Any

# name -> (module, attribute), looked up on first use: `streamspec.bundle` was one module up to 0.1. Pickles of 0.1
# carry its names for the parts of a manifest, kept for one minor version.
_LAZY = {
    "Manifest": ("manifest", "Manifest"),
    "read_manifest": ("files", "read_manifest"),
    "verify_files": ("files", "verify_files"),
    "write_bundle": ("write_files", "write_bundle"),
    **{name: ("manifest", name) for name in ("BaseInfo", "FileInfo", "ProbeInfo", "StaticInfo")},
    "ModelInfo": ("model_section", "ModelInfo"),
    "StreamsInfo": ("manifest", "DrafterInfo"),
    "TreesInfo": ("manifest", "DraftTreeInfo"),
    "Room": ("manifest", "SwappableCapacity"),
}
__all__ = ["Manifest", "read_manifest", "verify_files", "write_bundle"]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _LAZY[name]
    return getattr(importlib.import_module(f"{__name__}.{module}"), attribute)
