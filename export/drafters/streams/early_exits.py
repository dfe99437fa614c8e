"""The early exits that an adapter of streams was trained for, each at the input of one layer."""

from __future__ import annotations

import numpy as np

from streamspec.export.drafters.adapter_section import AdapterSection
from streamspec.export.ops.builder import Array
from streamspec.export.spec.draft_spec import PruningSpec


def exit_layers(section: AdapterSection) -> list[int]:
    """The layers of several early exits, in the order of the tensors; [] where there is one, at the streams' first."""
    found, most = section.config.get("exit_layers") or [], section.spec.layers - section.config["ns"]
    numbers = isinstance(found, list) and all(type(layer) is int and 1 <= layer <= most for layer in found)
    if not numbers or len(set(found)) < len(found):
        raise section.refused(f"streams.exit_layers is {found!r}", f"a list of layers 1..{most}, each once")
    return list(found)


def read_exits(section: AdapterSection, tensors: dict[str, Array]) -> tuple[PruningSpec, ...]:
    """The early exits by ascending layer."""
    if not section.config.get("pruning"):
        return ()
    down, up = (tensors[name].astype(np.float32) for name in ("prune_down", "prune_up"))
    if not (layers := exit_layers(section)):
        return (PruningSpec(down, up),)
    exits = (PruningSpec(a, b, layer) for a, b, layer in zip(down, up, layers, strict=True))
    return tuple(sorted(exits, key=lambda one: one.layer or 0))
