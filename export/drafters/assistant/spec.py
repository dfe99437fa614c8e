"""An assistant of Gemma 4: its description, and which of the target's layers lends it keys and values. Its nodes are in
`draft_pass`; `published` reads it. Covered by tests/export/drafters/test_assistant.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from streamspec.bundle.manifest import DrafterInfo
from streamspec.export.drafters.draft_layer.spec import DraftLayerSpec
from streamspec.export.spec.decoder_spec import DecoderSpec

LABEL = "assistant."  # what the names of its tensors begin with in the graph
HEAD, BEFORE, AFTER = "lm_head.weight", "pre_projection.weight", "post_projection.weight"
CENTROIDS, ORDERING = "masked_embedding.centroids.weight", "masked_embedding.token_ordering"


@dataclass(frozen=True, kw_only=True)
class AssistantSpec(DraftLayerSpec):
    """An assistant. `config`: of transformers; `layers`: its layers as a decoder whose keys are not its own; `tensors`:
    by the names of its files without `model.`, the embedding, of which only the LM head is made, as `lm_head`."""

    config: Any
    layers: DecoderSpec
    taps: tuple[int, ...] = ()

    @property
    def own_layers(self) -> int:
        """None: its layers attend to the target's keys and values."""
        return 0

    @property
    def clusters(self) -> int:
        """How many clusters of the vocabulary the head looks at; 0: at all tokens."""
        return int(self.config.centroid_intermediate_top_k) if CENTROIDS in self.tensors else 0

    def first_layer(self, layers: int) -> int:
        """The first: any layer may lend its keys."""
        return 0

    def info(self, candidates: int) -> DrafterInfo:
        """Says that it keeps nothing."""
        return replace(super().info(candidates), target_keys=True)


def lender(target: DecoderSpec, window: int | None) -> int:
    """The layer of the target whose keys and values the layers with a `window`, or those without, attend to: the last
    of that kind with keys of its own."""
    own = (layer for layer in range(target.layers) if target.source(layer) == layer)
    return max(layer for layer in own if (target.windows[layer] is None) == (window is None))
