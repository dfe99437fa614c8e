"""Options of Medusa heads, and their row in the table of drafters. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass

from streamspec.adapters.drafters.drafter_method import HARD_LABELS, DrafterMethod
from streamspec.adapters.drafters.options import TrainedAloneOptions
from streamspec.option_fields import option


@dataclass
class MedusaOptions:
    """Medusa heads"""

    own_heads: bool = option(False, "each head has a vocabulary matrix of its own; otherwise all share the LM head")
    heads_share: float = option(0.25, "joint: fraction of the time in which only the heads train", above=0, below=1)


MEDUSA = DrafterMethod(
    "streamspec.adapters.drafters.medusa.model:MedusaModel",
    (TrainedAloneOptions, MedusaOptions),
    defaults=HARD_LABELS,
    learns_alone="heads_share",
)
