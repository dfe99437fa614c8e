"""Options of block drafters, and their row in the table of drafters. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass

from streamspec.adapters.drafters.dflash.config import check_block_base
from streamspec.adapters.drafters.drafter_method import HARD_LABELS, STAGED, DrafterMethod
from streamspec.adapters.drafters.options import DraftLayerOptions, TrainedAloneOptions
from streamspec.option_fields import option


@dataclass
class BlockOptions:
    """Block drafters"""

    block_layers: int = option(1, "layers of the drafter's own, which start as the target's last ones", minimum=1)


@dataclass
class CausalOptions:
    """Block drafters"""

    causal: bool = option(False, "rows of the block see no later ones, as in JetSpec, which also takes `--labels kl`")


DFLASH = DrafterMethod(
    "streamspec.adapters.drafters.dflash.model:BlockDraftModel",
    (TrainedAloneOptions, DraftLayerOptions, BlockOptions, CausalOptions),
    defaults=HARD_LABELS,
    recipes=STAGED,
    check_base=check_block_base,
    unsupported_layers=lambda family, config: (
        family.halves or ("have mixtures of experts" if family.mixes(config) else None)
    ),
)
