"""The target's own last layer under a LoRA as nodes: the levels of a draft layer (`draft_layer.draft_pass`), each a
pass of that layer. Row for row the equations of `adapters/drafters/shared_layer/model.py`.
"""

from __future__ import annotations

from streamspec.export.drafters.draft_layer.draft_pass import DraftBranch, DraftLayerPass, DraftLevel
from streamspec.export.drafters.draft_layer.spec import DraftLayerSpec
from streamspec.export.drafters.shared_layer.spec import SharedLayerSource, SharedLayerSpec
from streamspec.export.layers.decoder import Decoder
from streamspec.export.ops.builder import Scope


class SharedLayerPass(DraftLayerPass):
    """The layer as a branch, and its rows' K/V in the main graph."""

    def own_decoder(self, decoder: Decoder, spec: DraftLayerSpec) -> Decoder:
        """Writes the layer, which is number `self.layer` of the target's `decoder`."""
        assert isinstance(spec, SharedLayerSpec)
        return decoder.drafting(spec.layer_of(decoder.spec), SharedLayerSource(decoder.source, spec, decoder.spec))

    def _level(self, g: Scope, x: str, number: int, at: str, branch: DraftBranch, sees: str | None) -> DraftLevel:
        stream, update, sees = self._whole_layer(g, x, number, at, branch, sees)
        return DraftLevel(self._finish(g, g.op("Add", stream, update)), sees=sees or "")
