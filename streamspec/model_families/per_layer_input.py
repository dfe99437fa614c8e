"""Names the parts of a model whose layers have inputs of their own for each token (Gemma 4)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PerLayerInput:
    """Names of the modules that give each layer an input of its own for every token: beside the layers a table and a
    map of the embedding with its norm, within a layer a gate, a map and the norm of what they add."""

    width: str = "hidden_size_per_layer_input"  # config field; 0: there is none
    table: str = "embed_tokens_per_layer"
    context: str = "per_layer_model_projection"
    context_norm: str = "per_layer_projection_norm"
    gate: str = "per_layer_input_gate"
    up: str = "per_layer_projection"
    out_norm: str = "post_per_layer_input_norm"
