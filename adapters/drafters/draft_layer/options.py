"""Options of draft layers, and the rows of Jakiro, EAGLE, multi-token prediction and Hydra in the table of drafters.
Free of torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from streamspec.adapters.drafters.draft_layer.config import check_draft_layer, check_draft_layer_base
from streamspec.adapters.drafters.drafter_method import HARD_LABELS, STAGED, DrafterMethod
from streamspec.adapters.drafters.options import DraftLayerOptions, TrainedAloneOptions
from streamspec.option_fields import option


@dataclass
class PrefixOptions:
    """Attention of a draft layer's first pass"""

    prefix_attention: bool | None = option(
        None,
        "only the first pass attends, the later ones are heads on its states; default: of hydra alone, "
        "whose first pass does not attend either without it",
    )


@dataclass
class ModulesOptions:
    """Modules of multi-token prediction"""

    depth: int = option(
        1, "modules in a row, each with weights of its own and trained; the last one drafts on from itself", minimum=1
    )


@dataclass
class UnrolledOptions:
    """Draft layers trained on their own states"""

    unroll: int | None = option(
        None,
        "passes of the layer that training counts, of which the first reads the target's states; default: all",
        minimum=1,
    )
    random_unroll: bool = option(
        True, "each step draws how many of these passes it unrolls, n with a probability proportional to 1/n"
    )


@dataclass
class JakiroOptions:
    """Jakiro's experts"""

    experts: int = option(2, "experts of the draft layer")
    active: int = option(2, "experts used for a row")
    contrast: bool = option(
        True, "the last position is drafted from the contrast of the two best experts, not from their mixture"
    )
    parallel: bool = option(True, "the last position is drafted without a pass of its own")
    two_lists: bool = option(False, "each active expert proposes its own candidates (the MoE tree)")
    last_weight: float = option(
        0.5, "weight of the last position's own branch in the loss (0.5: the paper's)", minimum=0
    )
    last_state_weight: float | None = option(
        None,
        "weight of the loss on the hidden states of that branch; default: that of state_weight, as in the paper",
        minimum=0,
    )
    expert_weight: float = option(
        0.0, "weight of a loss that penalises experts for agreeing or for being used unevenly", minimum=0
    )


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
        unsupported_layers=lambda family, config: family.halves,
    )


JAKIRO = _row((UnrolledOptions, PrefixOptions, JakiroOptions), {}, TARGET_STATES | ALL_ATTEND)
EAGLE = _row((UnrolledOptions, PrefixOptions), ONE_EXPERT, TARGET_STATES | ALL_ATTEND)
MTP = _row((ModulesOptions,), ONE_EXPERT | ALL_ATTEND | {"unroll": 1}, HARD_LABELS | {"taps": "1"})
HYDRA = _row((PrefixOptions,), ONE_EXPERT | {"own_heads": True}, TARGET_STATES | {"prefix_attention": True})
