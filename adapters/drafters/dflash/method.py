"""The row of block drafters in the table of drafters. Free of torch."""

from __future__ import annotations

from streamspec.adapters.drafters.dflash.config import check_block_base
from streamspec.adapters.drafters.dflash.options import BlockOptions
from streamspec.adapters.drafters.drafter_method import HARD, STAGED, DrafterMethod
from streamspec.adapters.drafters.options import DraftLayerOptions, TrainedAloneOptions

DFLASH = DrafterMethod(
    "streamspec.adapters.drafters.dflash.model:BlockDraftModel",
    (TrainedAloneOptions, DraftLayerOptions, BlockOptions),
    defaults=HARD,
    recipes=STAGED,
    check_base=check_block_base,
)
