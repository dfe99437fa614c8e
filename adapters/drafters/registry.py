"""The drafters in training: one row of one table each. Free of torch; the networks are imported on use.

To add a drafter, write its network as a `DraftingModel` (drafters/base.py) in a file here, its options in options.py,
and its row in `DRAFTERS`. Medusa (drafters/medusa.py) is the smallest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from streamspec.adapters.drafters.dflash.config import check_block_base
from streamspec.adapters.drafters.draft_layer.config import check_draft_layer, check_draft_layer_base
from streamspec.adapters.drafters.eagle3.config import check_pair_base
from streamspec.adapters.drafters.options import (
    BlockOptions,
    DraftLayerOptions,
    JakiroOptions,
    MedusaOptions,
    ModulesOptions,
    PrefixOptions,
    StreamingOptions,
    TrainedAloneOptions,
    UnrolledOptions,
)
from streamspec.adapters.drafters.streams.config import check_exits, check_warm_streams

RECIPES = ("joint", "staged")
STAGED = ("staged",)


@dataclass(frozen=True)
class DrafterMethod:
    """A row: everything that training asks of a `--method`.

    `model`: "module:class" of its `DraftingModel`, which builds it, computes its losses and names its tensors; None
    for a plain fine-tune. `options`: the option groups that it alone or with others reads; other methods refuse them.
    `fixed`: values of options that it does not leave open; `defaults`: of those whose default is the method's.
    `recipes`: allowed ones, the default first; `warm_start`: those that may begin with another adapter's drafter.
    `learns_alone`: the option that says which share of a joint run trains the drafter alone first. `check` refuses
    resolved options that do not go together, `check_base` a base (family, number of layers) that cannot have it,
    `check_warm_start` an adapter (its `streams` section) of another shape.
    """

    model: str | None = None
    options: tuple[type, ...] = ()
    fixed: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    recipes: tuple[str, ...] = RECIPES
    warm_start: tuple[str, ...] = ()
    learns_alone: str | None = None
    check: Callable[[Mapping[str, Any]], None] = lambda options: None
    check_base: Callable[[Mapping[str, Any], str, int], None] = lambda options, family, layers: None
    check_warm_start: Callable[[Mapping[str, Any], Mapping[str, Any]], None] = lambda options, saved: None


HARD = {"labels": "hard", "state_weight": 0.0}  # the true tokens
TARGET_STATES = {"labels": "kl", "state_weight": 10.0, "taps": "2"}  # the target's distribution and hidden states
ALL_ATTEND = {"prefix_attention": False}
ONE_EXPERT = {"experts": 1, "active": 1, "contrast": False, "parallel": False, "two_lists": False}


def _draft_layer(options: tuple[type, ...], fixed: Mapping[str, Any], defaults: Mapping[str, Any]) -> DrafterMethod:
    return DrafterMethod(
        "streamspec.adapters.drafters.draft_layer.model:DraftLayerModel",
        (TrainedAloneOptions, DraftLayerOptions, *options),
        fixed,
        defaults,
        recipes=STAGED,
        check=check_draft_layer,
        check_base=check_draft_layer_base,
    )


DRAFTERS = {
    "streaming": DrafterMethod(
        "streamspec.adapters.drafters.streams.model:StreamingModel",
        (TrainedAloneOptions, StreamingOptions),
        defaults=HARD,
        warm_start=STAGED,
        check_base=check_exits,
        check_warm_start=check_warm_streams,
    ),
    "medusa": DrafterMethod(
        "streamspec.adapters.drafters.medusa.model:MedusaModel",
        (TrainedAloneOptions, MedusaOptions),
        defaults=HARD,
        learns_alone="heads_share",
    ),
    "jakiro": _draft_layer((UnrolledOptions, PrefixOptions, JakiroOptions), {}, TARGET_STATES | ALL_ATTEND),
    "eagle": _draft_layer((UnrolledOptions, PrefixOptions), ONE_EXPERT, TARGET_STATES | ALL_ATTEND),
    "mtp": _draft_layer((ModulesOptions,), ONE_EXPERT | ALL_ATTEND | {"unroll": 1}, HARD | {"taps": "1"}),
    "hydra": _draft_layer(
        (PrefixOptions,), ONE_EXPERT | {"own_heads": True}, TARGET_STATES | {"prefix_attention": True}
    ),
    "eagle3": DrafterMethod(
        "streamspec.adapters.drafters.eagle3.model:PairLayerModel",
        (TrainedAloneOptions, DraftLayerOptions, UnrolledOptions),
        ONE_EXPERT | ALL_ATTEND,
        TARGET_STATES,
        recipes=STAGED,
        check=check_draft_layer,
        check_base=check_pair_base,
    ),
    "dflash": DrafterMethod(
        "streamspec.adapters.drafters.dflash.model:BlockDraftModel",
        (TrainedAloneOptions, DraftLayerOptions, BlockOptions),
        defaults=HARD,
        recipes=STAGED,
        check_base=check_block_base,
    ),
    "lora": DrafterMethod(),
}


def readers(group: type) -> tuple[str, ...]:
    """The methods that read an option group; empty for a group that no method claims, which all accept."""
    return tuple(name for name, row in DRAFTERS.items() if group in row.options)
