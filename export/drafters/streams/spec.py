"""Reads speculative streams: their description, their tensors in an adapter, and the early exits that they were trained
with, each at the input of one layer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from streamspec.bundle.manifest import POSITIONS, DrafterInfo
from streamspec.export.drafters.adapter_section import AdapterSection, Shapes
from streamspec.export.drafters.own_lora import lora_shapes, read_lora
from streamspec.export.ops.builder import Array
from streamspec.export.spec.decoder_spec import DecoderSpec
from streamspec.export.spec.draft_spec import DraftSpec, PruningSpec

MOST_OVER_STATES = 16  # streams: powers that solve for more of them would cancel


@dataclass(frozen=True, kw_only=True)
class StreamSpec(DraftSpec):
    """Streams of one adapter."""

    ns: int
    scale: float
    shifted: bool
    embeddings: Array  # P [gamma, hidden]
    root_map: Array | None = None  # W [hidden, hidden]
    shares: Array | None = None  # c, a [gamma, 2]; None: ones
    moved: tuple[Array, Array] | None = None  # D [r, hidden] and U [hidden, r] of f(M) = M + U D M; None: M
    value_rotation: bool = False

    @property
    def uses_root(self) -> bool:
        """Whether streams or their bigram read the token after the accepted node."""
        return self.root_map is not None or super().uses_root

    @property
    def not_eager(self) -> str:
        """Streams that start from the root wait for acceptance."""
        return "streams that read the root, which is not known before acceptance" if self.root_map is not None else ""

    @property
    def turns_values(self) -> bool:
        """Streams that are told apart by it."""
        return self.value_rotation

    def first_layer(self, layers: int) -> int:
        """The first of the last `ns` layers, which streams run through."""
        return layers - self.ns

    def tapped(self, layers: int) -> tuple[int, ...]:
        """The last `ns` layers."""
        return tuple(range(self.first_layer(layers), layers))

    def info(self, candidates: int) -> DrafterInfo:
        """Adds the number of layers, the positions and the root token to the description."""
        positions, root = "shifted" if self.shifted else "same", self.root_map is not None
        return replace(super().info(candidates), ns=self.ns, positions=positions, root_token=root, eager=self.eager)


def shapes(section: AdapterSection) -> Shapes:
    """Shapes of the tensors that a configuration names. Raises AdapterError for one that cannot be."""
    config, spec = section.config, section.spec
    ns = section.whole("ns", 1, spec.layers)
    section.positive("scale", config.get("scale"))
    if config.get("positions") not in POSITIONS:
        raise section.refused(f"streams.positions is {config.get('positions')!r}", " or ".join(POSITIONS))
    shapes: Shapes = {} if config.get("value_rotation") else {"stream_embeddings": (section.gamma, spec.hidden)}
    if config.get("start_rank"):
        rank = section.whole("start_rank", 1, 4096)
        shapes |= {"start_down": (rank, spec.hidden), "start_up": (spec.hidden, rank)}
    if config.get("shares"):
        shapes["shares"] = (section.gamma, 2)
    if config.get("root_token"):
        shapes["root_map"] = (spec.hidden, spec.hidden)
    if spec.state is not None and section.gamma > MOST_OVER_STATES:
        raise section.refused(f"streams.gamma is {section.gamma} over recurrent states", f"1..{MOST_OVER_STATES}")
    if config.get("pruning"):
        if spec.state is not None:
            raise section.refused("streams.pruning, over recurrent states, which take up all rows of a draft", "none")
        prune = section.whole("pruning", 1, 4096)
        many = (len(exits),) if (exits := exit_layers(section)) else ()
        shapes |= {"prune_down": (*many, prune, spec.hidden), "prune_up": (*many, spec.hidden, prune)}
    if config.get("lora"):
        shapes |= lora_shapes(section, lora_places(spec, ns))
    return shapes


def read(section: AdapterSection, tensors: dict[str, Array], shared: dict[str, Any]) -> StreamSpec:
    """Reads the streams from tensors that have the `shapes`."""
    config = section.config
    exits = read_exits(section, tensors)
    moved = [tensors[name].astype(np.float32) for name in ("start_down", "start_up") if name in tensors]
    none = np.zeros((section.gamma, section.spec.hidden), np.float32)  # values tell streams apart
    return StreamSpec(
        **shared,
        ns=config["ns"],
        scale=float(config["scale"]),
        shifted=config["positions"] == "shifted",
        embeddings=tensors.get("stream_embeddings", none).astype(np.float32),
        moved=(moved[0], moved[1]) if moved else None,
        value_rotation=bool(config.get("value_rotation")),
        shares=tensors["shares"].astype(np.float32) if "shares" in tensors else None,
        root_map=tensors["root_map"].astype(np.float32) if "root_map" in tensors else None,
        lora=read_lora(section, tensors, lora_places(section.spec, config["ns"])) if config.get("lora") else {},
        pruning=exits[-1] if exits else None,
        exits=exits,
    )


def lora_places(spec: DecoderSpec, ns: int) -> dict[str, int]:
    """The layers that the LoRA is in, by what the names of its tensors there begin with."""
    return {f"layers.{layer}.": layer for layer in range(spec.layers - ns, spec.layers)}


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
    return tuple(sorted(exits, key=lambda exit: exit.layer or 0))
