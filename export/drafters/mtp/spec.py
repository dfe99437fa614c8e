"""A checkpoint's own layer for multi-token prediction (MTP): its description, its tensors, and its weights under the
name of a further layer. Its nodes are in `draft_pass`.
"""

from __future__ import annotations

from dataclasses import dataclass

from streamspec.bundle.adapter_folder import FINAL_STATE
from streamspec.export.drafters.adapter_section import Shapes
from streamspec.export.drafters.draft_layer.spec import DraftLayerSource, DraftLayerSpec
from streamspec.export.spec.decoder_spec import DecoderSpec
from streamspec.export.spec.weight_source import ChangedSource, Source

LAYER, LABEL = "layers.0.", "mtp."  # of the checkpoint's names, without what they begin with; of those in the graph
PAIR = "pre_fc_norm_embedding", "pre_fc_norm_hidden"  # norms of what `fc` reads, in its order
MAP, NORM = "fc.weight", "norm"


@dataclass(frozen=True, kw_only=True)
class MtpSpec(DraftLayerSpec):
    """A layer for multi-token prediction. `tensors`: by the checkpoint's names, without what these begin with."""

    taps: tuple[int, ...] = (FINAL_STATE,)


def shapes(spec: DecoderSpec) -> Shapes:
    """Shapes of the tensors of a layer like the last one with attention of a decoder."""
    norms = {f"{name}.weight": (spec.hidden,) for name in (*PAIR, NORM)}
    return {MAP: (spec.hidden, 2 * spec.hidden), **norms, **{f"{LAYER}{name}": of for name, of in spec.shapes.items()}}


class MtpSource(DraftLayerSource):
    """The target's weights, and the layer's as those of number `layers`."""

    def __init__(self, source: Source, spec: DraftLayerSpec, decoder: DecoderSpec) -> None:
        ChangedSource.__init__(self, source)
        layer = decoder.weight_name(decoder.layers, "")
        self.prefixes = (layer, LABEL)
        self.own = {}
        for name, tensor in spec.tensors.items():
            inside = name.removeprefix(LAYER)
            self.own[f"{LABEL if inside == name else layer}{inside}"] = decoder.in_graph(inside, tensor)
