"""The row of EAGLE-3 heads in the table of drafters: a head has a draft layer's options. Free of torch."""

from __future__ import annotations

from streamspec.adapters.drafters.draft_layer.config import check_draft_layer
from streamspec.adapters.drafters.draft_layer.options import ALL_ATTEND, ONE_EXPERT, TARGET_STATES, UnrolledOptions
from streamspec.adapters.drafters.drafter_method import STAGED, DrafterMethod
from streamspec.adapters.drafters.eagle3.config import check_pair_base
from streamspec.adapters.drafters.options import DraftLayerOptions, TrainedAloneOptions

EAGLE3 = DrafterMethod(
    "streamspec.adapters.drafters.eagle3.model:PairLayerModel",
    (TrainedAloneOptions, DraftLayerOptions, UnrolledOptions),
    ONE_EXPERT | ALL_ATTEND,
    TARGET_STATES,
    recipes=STAGED,
    check=check_draft_layer,
    check_base=check_pair_base,
)
