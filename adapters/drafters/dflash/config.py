"""The shape of a block drafter, as training options and bases allow it. Free of torch. Covered by the tests of
`model`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from streamspec.adapters.drafters.options import taps_of_text
from streamspec.adapters.drafters.streams.config import StreamConfig
from streamspec.errors import ConfigError
from streamspec.model_families import FAMILIES


@dataclass
class BlockConfig(StreamConfig):
    """Shape of the drafter: `ns` layers of its own; `taps`: layers of the target above each of the states that it
    reads; `window`: how many positions back its rows look, themselves included; `causal`: rows of the block see no
    later ones.
    """

    taps: tuple[int, ...] = ()
    window: int | None = None
    causal: bool = False


def taps_of(options: Mapping[str, Any], layers: int, below: int = 1) -> tuple[int, ...]:
    """The taps that `options` (`TrainConfig.resolved`) name; else of a base of so many layers the one `below` the
    layers that the drafter starts as, and those at its thirds.
    """
    if options["taps"] is not None:
        return taps_of_text(options["taps"])
    return tuple(dict.fromkeys((below, max(1, layers // 3), max(1, 2 * layers // 3))))


def check_block_base(options: Mapping[str, Any], family: str, layers: int) -> None:
    """Raises ConfigError for a base (its family, how many layers) that cannot have such a drafter."""
    row = FAMILIES[family]
    if row.shared_kv is not None or row.per_layer_input is not None:
        raise ConfigError(
            f"--method dflash with {family}, whose layers share keys or have inputs of their own",
            "a base of plain layers",
            "take --method streaming",
        )
    check_layers(options["block_layers"], taps_of(options, layers), layers, options["taps"])


def check_layers(count: int, taps: tuple[int, ...], layers: int, given: str | None) -> None:
    """Raises ConfigError for `count` layers or `taps`, `given` as an option, of a base of so many `layers`."""
    if count > layers:
        raise ConfigError(f"block_layers = {count}", f"1..{layers}, the layers of this base", "change --block-layers")
    if not all(1 <= tap <= layers for tap in taps):
        raise ConfigError(f"taps = {given}", f"1..{layers}, the layers of this base", "change --taps")
