"""Reads Medusa heads (Medusa, arXiv 2401.10774, section 3.1): one block per depth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from streamspec.export.drafters.adapter_section import AdapterSection, Shapes
from streamspec.export.ops.builder import Array
from streamspec.export.spec.draft_spec import DraftSpec


@dataclass(frozen=True, kw_only=True)
class MedusaSpec(DraftSpec):
    """Heads of one adapter. `heads` None: all propose through the LM head."""

    block_weights: Array  # W [gamma, H, H]
    block_biases: Array  # b [gamma, H]
    heads: Array | None = None  # [gamma, D, H]


def shapes(section: AdapterSection) -> Shapes:
    """Shapes of the tensors that a configuration names."""
    gamma, hidden = section.gamma, section.spec.hidden
    blocks: Shapes = {"block_weights": (gamma, hidden, hidden), "block_biases": (gamma, hidden)}
    return blocks | {"heads": (gamma, section.proposable, hidden)} if section.config.get("own_heads") else blocks


def read(section: AdapterSection, tensors: dict[str, Array], shared: dict[str, Any]) -> MedusaSpec:
    """Reads the heads from tensors that have the `shapes`."""
    blocks: dict[str, Any] = {name: tensors[name].astype(np.float32) for name in ("block_weights", "block_biases")}
    return MedusaSpec(**shared, **blocks, heads=tensors.get("heads"))
