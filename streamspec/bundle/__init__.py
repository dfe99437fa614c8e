"""The bundle and adapter formats: manifests, files, checks of untrusted input.

The names most used are looked up here on first use, as `streamspec.bundle` was one module up to 0.1.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from streamspec.bundle.files import read_manifest as read_manifest
    from streamspec.bundle.files import verify_files as verify_files
    from streamspec.bundle.files import write_bundle as write_bundle
    from streamspec.bundle.manifest import Manifest as Manifest

__all__ = ["Manifest", "read_manifest", "verify_files", "write_bundle"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "manifest" if name == "Manifest" else "files"
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)
