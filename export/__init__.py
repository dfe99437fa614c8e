"""streamspec.export: base + adapter -> bundle, an ONNX step graph with everything the runtime needs beside it.

`export` writes a bundle. The pieces: `families` (what a decoder is), `builder` (nodes and weights to disk), `quantise`
(precisions), `decoder` and `graph` (main rows, acceptance), `drafting`, `streams` and `medusa` (drafters), `oracle` and
`parity` (PyTorch's word on it), `quality` (what a precision costs), `source` and `bundle_writer` (files in, files out);
`target` (what for), `static`, `lowering` and `weight_only` (the graph of fixed shapes), `compact` (a cache on a
device); `lowrank`, `swappable` and `swappable_writer` (adapters beside the base, swapped while it runs); `genai` (a
plain model for onnxruntime-genai).
"""

from __future__ import annotations

import sys

from streamspec.export.bundle_writer import export_bundle
from streamspec.export.genai import export_genai
from streamspec.export.swappable_bundle import adapt, export_swappable
from streamspec.export.target import Target
from streamspec.export.validate.perplexity import HeldOut

export = export_bundle

__all__ = ["HeldOut", "Target", "adapt", "export", "export_bundle", "export_genai", "export_swappable"]

# The module of HeldOut up to 0.1, which its pickles name. Kept for one minor version.
sys.modules[f"{__name__}.quality"] = sys.modules[HeldOut.__module__]
