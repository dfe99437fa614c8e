"""The row of published block drafters in the table of drafters, and the bases that can have one. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from streamspec.adapters.drafters.dflash.config import check_layers, taps_of
from streamspec.adapters.drafters.dflash.options import BlockOptions
from streamspec.adapters.drafters.drafter_method import HARD_LABELS, STAGED, DrafterMethod
from streamspec.adapters.drafters.eagle3.options import LAYER_OF
from streamspec.adapters.drafters.options import FINAL, DraftLayerOptions, TrainedAloneOptions
from streamspec.errors import ConfigError


def check_published_base(options: Mapping[str, Any], family: str, layers: int) -> None:
    """Raises ConfigError for a base (its family, how many layers) or taps that the format does not know."""
    if family not in LAYER_OF:
        raise ConfigError(f"--method dspark with {family}", " or ".join(LAYER_OF), "take --method dflash")
    if FINAL in (options["taps"] or "").split(","):
        raise ConfigError(f"--taps {FINAL} with --method dspark", "inputs of layers", "name layers")
    check_layers(options["block_layers"], taps_of(options, layers), layers, options["taps"])


DSPARK = DrafterMethod(
    "streamspec.adapters.drafters.dspark.model:PublishedBlockModel",
    (TrainedAloneOptions, DraftLayerOptions, BlockOptions),
    defaults=HARD_LABELS,
    recipes=STAGED,
    check_base=check_published_base,
)
