"""The row of EAGLE-3 heads in the table of drafters, with a draft layer's options, and the bases that can have one.
Free of torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from streamspec.adapters.drafters.draft_layer.config import check_draft_layer, check_draft_layer_base
from streamspec.adapters.drafters.draft_layer.options import ALL_ATTEND, ONE_EXPERT, TARGET_STATES, UnrolledOptions
from streamspec.adapters.drafters.drafter_method import STAGED, DrafterMethod
from streamspec.adapters.drafters.options import FINAL, DraftLayerOptions, TrainedAloneOptions
from streamspec.errors import ConfigError

# By the base's family: the one of the published formats' two that computes its layers, with the right biases.
LAYER_OF = {"llama": "llama", "mistral": "llama", "qwen2": "llama", "qwen3": "qwen3"}


def check_pair_base(options: Mapping[str, Any], family: str, layers: int) -> None:
    """Raises ConfigError for a base (its family, how many layers) or taps that the formats do not know."""
    if family not in LAYER_OF:
        raise ConfigError(f"--method eagle3 with {family}", " or ".join(LAYER_OF), "take --method eagle")
    if FINAL in options["taps"].split(","):
        raise ConfigError(
            f"--taps {FINAL} with --method eagle3", "inputs of layers", "name layers, or take --method eagle"
        )
    check_draft_layer_base(options, family, layers)


EAGLE3 = DrafterMethod(
    "streamspec.adapters.drafters.eagle3.model:PairLayerModel",
    (TrainedAloneOptions, DraftLayerOptions, UnrolledOptions),
    ONE_EXPERT | ALL_ATTEND,
    TARGET_STATES,
    recipes=STAGED,
    check=check_draft_layer,
    check_base=check_pair_base,
)
