"""streamspec.export: base + adapter -> bundle, an ONNX step graph with everything the runtime needs beside it.

`export` writes a bundle. Read in this order: `options` (what an export takes), `bundle_writer` (its steps), `spec`
(descriptions that all parts read), `graphs` (whole graphs), `layers` (their parts), `drafters` (a folder for each
method, a table with a row for each), `quantization` (precisions), `weights` (the model as it is read), `ops` (nodes and
initializers), `reference` (the model in PyTorch or numpy), `runners` (graphs, run), `validate` (both compared).
`swappable_bundle` exports adapters beside the base, swapped while it runs. The names of the graphs' inputs and outputs
are in `streamspec.step_graph`.

Public names are looked up on first use: a command line reads `options` without ONNX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from streamspec.export.answer_store import StoreFiles
    from streamspec.export.bundle_writer import export_bundle
    from streamspec.export.bundle_writer import export_bundle as export
    from streamspec.export.deployment_target import Target
    from streamspec.export.held_out import HeldOut
    from streamspec.export.options import ExportOptions
    from streamspec.export.swappable_bundle import adapt, export_swappable
    from streamspec.prompt.prompt_format import PromptFormat

__all__ = [
    "ExportOptions",
    "HeldOut",
    "PromptFormat",
    "StoreFiles",
    "Target",
    "adapt",
    "export",
    "export_bundle",
    "export_swappable",
]

# name -> (module, attribute)
_LAZY = {
    "ExportOptions": ("streamspec.export.options", "ExportOptions"),
    "HeldOut": ("streamspec.export.held_out", "HeldOut"),
    "PromptFormat": ("streamspec.prompt.prompt_format", "PromptFormat"),
    "StoreFiles": ("streamspec.export.answer_store", "StoreFiles"),
    "Target": ("streamspec.export.deployment_target", "Target"),
    "adapt": ("streamspec.export.swappable_bundle", "adapt"),
    "export": ("streamspec.export.bundle_writer", "export_bundle"),
    "export_bundle": ("streamspec.export.bundle_writer", "export_bundle"),
    "export_swappable": ("streamspec.export.swappable_bundle", "export_swappable"),
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _LAZY[name]
    return getattr(importlib.import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted(__all__)
