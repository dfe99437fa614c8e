"""The row of Medusa heads in the table of drafters. Free of torch."""

from __future__ import annotations

from streamspec.adapters.drafters.drafter_method import HARD, DrafterMethod
from streamspec.adapters.drafters.medusa.options import MedusaOptions
from streamspec.adapters.drafters.options import TrainedAloneOptions

MEDUSA = DrafterMethod(
    "streamspec.adapters.drafters.medusa.model:MedusaModel",
    (TrainedAloneOptions, MedusaOptions),
    defaults=HARD,
    learns_alone="heads_share",
)
