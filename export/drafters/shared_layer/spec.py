"""A draft layer that is the target's own last layer under a LoRA: its description, its tensors in an adapter, and its
weights under the names of a further layer. Its nodes are in `draft_pass`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from streamspec.export.drafters.adapter_section import AdapterSection, Shapes
from streamspec.export.drafters.draft_layer.spec import DraftLayerSpec, check, shape_of, with_layer
from streamspec.export.drafters.own_lora import lora_shapes, read_lora
from streamspec.export.ops.builder import Array
from streamspec.export.spec.decoder_spec import DecoderSpec
from streamspec.export.spec.weight_source import MergedSource, Source

LAYER = "layer."  # what the names of the LoRA's tensors begin with


@dataclass(frozen=True, kw_only=True)
class SharedLayerSpec(DraftLayerSpec):
    """The layer of one adapter. `lora`: that of the target's last layer with attention."""

    def layer_of(self, decoder: DecoderSpec) -> DecoderSpec:
        """The target's description with this layer as one after the last."""
        return with_layer(decoder, decoder.last_attention)


def shapes(section: AdapterSection) -> Shapes:
    """Shapes of the tensors that a configuration names. Raises AdapterError for one that cannot be."""
    check(section)
    config, spec = section.config, section.spec
    hidden = spec.hidden
    found: Shapes = {"from_token": (hidden, hidden), "bias": (hidden,), "norm_out.weight": (hidden,)}
    found["from_entry"] = hidden, len(config["taps"]) * hidden
    if not SharedLayerSpec(gamma=section.gamma, **shape_of(section), tensors={}).one_map:
        found["from_state"] = hidden, hidden
    if "norm_out.bias" in (config.get("biases") or []):
        found["norm_out.bias"] = (hidden,)
    return found | lora_shapes(section, {LAYER: spec.last_attention})


def read(section: AdapterSection, tensors: dict[str, Array], shared: dict[str, Any]) -> SharedLayerSpec:
    """Reads the layer from tensors that have the `shapes`."""
    own = {name: tensors[name].astype(np.float32) for name in shapes(section) if not name.startswith(LAYER)}
    lora = read_lora(section, tensors, {LAYER: section.spec.last_attention})
    return SharedLayerSpec(**shared, **shape_of(section), tensors=own, lora=lora)


class SharedLayerSource(MergedSource):
    """The target's weights, and its last layer with the LoRA merged into it as layer number `layers`."""

    def __init__(self, source: Source, spec: SharedLayerSpec, decoder: DecoderSpec) -> None:
        self.layer, self.last = (decoder.weight_name(number, "") for number in (decoder.layers, decoder.last_attention))
        named = {decoder.weight_name(layer, f"{module}.weight"): pair for (layer, module), pair in spec.lora.items()}
        super().__init__(source, named)

    def _of_target(self, name: str) -> str:
        return name.replace(self.layer, self.last, 1)

    def weight(self, name: str) -> Array:
        """Returns a weight of the layer, or else of the target."""
        return super().weight(self._of_target(name)) if name.startswith(self.layer) else self.source.weight(name)

    def bias(self, name: str) -> Array | None:
        """Returns a bias of the layer, which is the target's, or of the target; None where there is none."""
        return self.source.bias(self._of_target(name))

    def mixed(self, module: str) -> int:
        """Returns the size of blocks in which a linear map's inputs are mixed, those of the layer as the target's."""
        return self.source.mixed(self._of_target(module))

    def importance(self, module: str) -> Array | None:
        """Returns how much each input of a linear map counts."""
        return self.source.importance(self._of_target(module))
