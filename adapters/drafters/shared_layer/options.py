"""The row of shared draft layers in the table of drafters. Free of torch."""

from __future__ import annotations

from streamspec.adapters.drafters.draft_layer.config import check_draft_layer, check_draft_layer_base
from streamspec.adapters.drafters.draft_layer.options import ALL_ATTEND, ONE_EXPERT, TARGET_STATES, UnrolledOptions
from streamspec.adapters.drafters.drafter_method import STAGED, DrafterMethod
from streamspec.adapters.drafters.options import DraftLayerOptions, TrainedAloneOptions

EAGLE_LORA = DrafterMethod(
    "streamspec.adapters.drafters.shared_layer.model:SharedLayerModel",
    (TrainedAloneOptions, DraftLayerOptions, UnrolledOptions),
    ONE_EXPERT | ALL_ATTEND,
    TARGET_STATES,
    recipes=STAGED,
    check=check_draft_layer,
    check_base=check_draft_layer_base,
    unsupported_layers=lambda family, config: (
        family.halves or ("have a state space beside attention" if family.conv_beside else None)
    ),
)
