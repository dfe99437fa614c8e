"""The LoRA of a drafter's own over linear maps of the target's layers: its tensors in an adapter. Covered by
tests/export/graphs/test_dynamic_step_graph.py and tests/integration/test_draft_layers.py.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from streamspec.export.drafters.adapter_section import AdapterSection, Shapes
from streamspec.export.ops.builder import Array
from streamspec.export.spec.draft_spec import Lora

MAX_RANK = 4096


def lora_shapes(section: AdapterSection, layers: Mapping[str, int]) -> Shapes:
    """Shapes of its tensors. `layers`: of the target, by what names of their tensors begin with. Raises AdapterError
    for a LoRA that cannot be."""
    lora, spec, shapes = section.config.get("lora"), section.spec, Shapes()
    rank = section.whole("rank", 1, MAX_RANK, lora)
    section.positive("lora.alpha", section.config["lora"].get("alpha"))
    for prefix, layer in layers.items():
        for module in spec.modules(layer, streams=True):
            shapes[f"{prefix}{module}.lora_A"] = rank, spec.at(layer).in_width(module)
            shapes[f"{prefix}{module}.lora_B"] = spec.at(layer).out_width(module), rank
    return shapes


def read_lora(section: AdapterSection, tensors: Mapping[str, Array], layers: Mapping[str, int]) -> Lora:
    """Reads it from tensors that have the `lora_shapes`: B as the graph has it, with the LoRA's factor."""
    lora, spec = section.config["lora"], section.spec
    factor = np.float32(float(lora["alpha"]) / lora["rank"])
    out = {}
    for prefix, layer in layers.items():
        for module in spec.modules(layer, streams=True):
            a, b = (tensors[f"{prefix}{module}.lora_{side}"].astype(np.float32) for side in "AB")
            out[layer, module] = a, spec.in_graph(f"{module}.weight", b) * factor
    return out
