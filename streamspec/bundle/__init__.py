"""The bundle and adapter formats: manifests, files, checks of untrusted input."""

from __future__ import annotations

import importlib
from typing import Any

# The names most used, looked up on first use: `streamspec.bundle` was one module up to 0.1.
_LAZY = {"Manifest": "manifest", "read_manifest": "files", "verify_files": "files", "write_bundle": "write_files"}
__all__ = ["Manifest", "read_manifest", "verify_files", "write_bundle"]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
