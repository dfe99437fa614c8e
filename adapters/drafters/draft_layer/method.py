"""The rows of draft layers in the table of drafters. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from streamspec.adapters.drafters.draft_layer.config import check_draft_layer, check_draft_layer_base
from streamspec.adapters.drafters.draft_layer.options import (
    JakiroOptions,
    ModulesOptions,
    PrefixOptions,
    UnrolledOptions,
)
from streamspec.adapters.drafters.drafter_method import HARD, STAGED, DrafterMethod
from streamspec.adapters.drafters.options import DraftLayerOptions, TrainedAloneOptions

TARGET_STATES = {"labels": "kl", "state_weight": 10.0, "taps": "2"}  # the target's distribution and hidden states
ALL_ATTEND = {"prefix_attention": False}
ONE_EXPERT = {"experts": 1, "active": 1, "contrast": False, "parallel": False, "two_lists": False}


def _row(options: tuple[type, ...], fixed: Mapping[str, Any], defaults: Mapping[str, Any]) -> DrafterMethod:
    return DrafterMethod(
        "streamspec.adapters.drafters.draft_layer.model:DraftLayerModel",
        (TrainedAloneOptions, DraftLayerOptions, *options),
        fixed,
        defaults,
        recipes=STAGED,
        check=check_draft_layer,
        check_base=check_draft_layer_base,
    )


JAKIRO = _row((UnrolledOptions, PrefixOptions, JakiroOptions), {}, TARGET_STATES | ALL_ATTEND)
EAGLE = _row((UnrolledOptions, PrefixOptions), ONE_EXPERT, TARGET_STATES | ALL_ATTEND)
MTP = _row((ModulesOptions,), ONE_EXPERT | ALL_ATTEND | {"unroll": 1}, HARD | {"taps": "1"})
HYDRA = _row((PrefixOptions,), ONE_EXPERT | {"own_heads": True}, TARGET_STATES | {"prefix_attention": True})
