"""The shape of a draft layer, as training options and bases allow it. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from streamspec.adapters.drafters.options import FINAL, taps_of_text, taps_text
from streamspec.bundle.adapter_folder import FINAL_STATE, DraftPasses, odd_draft_layer
from streamspec.errors import ConfigError
from streamspec.option_fields import require

# Fields that are options, too, in the order of an adapter's configuration.
SHAPE = ("experts", "active", "contrast", "parallel", "two_lists", "taps", "prefix_attention", "own_heads", "depth")


@dataclass
class DraftLayerConfig(DraftPasses):
    """Shape of the draft layer.

    `contrast`: the last position is drafted from the difference of the two best experts, else from their mixture;
    `parallel`: without a pass of its own. `two_lists`: each active expert proposes its own candidates. `taps`: layers
    of the target above each of the states that the layer reads, `FINAL_STATE` for the finished one. `prefix_attention`:
    only the first pass attends; `own_heads`: the others have weights of their own and never attend, without
    `prefix_attention` no pass does. `depth`: so many passes have weights of their own, attention's too. `window`: how
    many positions back a row may look, itself included.
    """

    gamma: int
    experts: int = 2
    active: int = 2
    contrast: bool = True
    parallel: bool = True
    two_lists: bool = False
    taps: tuple[int, ...] = (2,)
    prefix_attention: bool = False
    own_heads: bool = False
    depth: int = 1
    window: int | None = None

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> DraftLayerConfig:
        """The shape that `options` (`TrainConfig.resolved`) describe."""
        shape = {name: options[name] for name in ("gamma", *SHAPE)}
        return cls(**shape | {"taps": taps_of_text(options["taps"])})

    def check(self, layers: int) -> None:
        """Raises ConfigError where a base of so many layers cannot have it."""
        if not all(tap == FINAL_STATE or 1 <= tap <= layers for tap in self.taps):
            raise ConfigError(
                f"taps = {taps_text(self.taps)}", f"1..{layers}, the layers of this base, or {FINAL}", "change --taps"
            )


def check_draft_layer(options: Mapping[str, Any]) -> None:
    """Raises ConfigError for options (`TrainConfig.resolved`) of a draft layer that cannot be."""
    shape = DraftLayerConfig.of(options)
    if odd := odd_draft_layer(
        shape.gamma, shape.experts, shape.active, shape.contrast, shape.parallel, shape.two_lists
    ):
        raise ConfigError(*odd, "change --experts, --active, --gamma, --contrast, --parallel or --two-lists")
    require(shape.depth <= shape.passes, "depth", shape.depth, f"at most {shape.passes}, the passes of this layer")
    unroll = options["unroll"]
    require(
        unroll is None or unroll <= shape.passes, "unroll", unroll, f"at most {shape.passes}, the passes of this layer"
    )


def check_draft_layer_base(options: Mapping[str, Any], family: str, layers: int) -> None:
    """Raises ConfigError for taps beyond the base's `layers`."""
    DraftLayerConfig.of(options).check(layers)


def counted_passes(options: Mapping[str, Any]) -> int:
    """Most passes of the draft layer that a training step counts, from `TrainConfig.resolved`."""
    shape = DraftLayerConfig.of(options)
    return max(shape.depth, options["unroll"] or shape.passes)
