"""streamspec.export: base + adapter -> bundle, an ONNX step graph with everything the runtime needs beside it.

`export` writes a bundle. Read in this order: `bundle_writer` (the steps of an export), `graphs` (whole graphs),
`layers` (their parts), `drafters` (a table with one row each), `quantization` (precisions), `weights` (the model as it
is read), `ops` (nodes and initializers), `validate` (PyTorch's results beside the graph's). `swappable_bundle` exports
adapters beside the base, swapped while it runs; `onnxruntime_genai` exports a plain model for onnxruntime-genai. The
names of the graphs' inputs and outputs are in `streamspec.step_graph`.
"""

from __future__ import annotations

import sys

from streamspec.export.answer_store import StoreFiles
from streamspec.export.bundle_writer import export_bundle
from streamspec.export.deployment_target import Target
from streamspec.export.onnxruntime_genai import export_genai
from streamspec.export.swappable_bundle import adapt, export_swappable
from streamspec.export.validate.perplexity import HeldOut
from streamspec.prompt.prompt_format import PromptFormat

export = export_bundle

__all__ = [
    "HeldOut",
    "PromptFormat",
    "StoreFiles",
    "Target",
    "adapt",
    "export",
    "export_bundle",
    "export_genai",
    "export_swappable",
]

# Names of modules up to 0.1, which pickles of these classes carry. Kept for one minor version.
sys.modules[f"{__name__}.quality"] = sys.modules[HeldOut.__module__]
sys.modules[f"{__name__}.target"] = sys.modules[Target.__module__]
