"""A block drafter as nodes (DFlash, arXiv 2602.06036): streams that run through layers of their own, over K/V of their
own, and see one another. Row for row the equations of `adapters/drafters/dflash/block_drafter.py`.

Every main row gives these layers keys and values, from its states at the tapped layers; they lie in the cache like
those of further layers. After the accepted node one pass over gamma rows drafts all depths.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from streamspec.bundle.manifest import DrafterInfo
from streamspec.bundle.model_section import MAX_CONTEXT
from streamspec.export.drafters.adapter_section import AdapterSection, Shapes
from streamspec.export.drafters.draft_pass import Accepted, MainRows
from streamspec.export.drafters.streams.stream_pass import StreamPass, StreamSpec
from streamspec.export.layers.decoder import Decoder, Residual
from streamspec.export.ops.builder import Array, Scope
from streamspec.export.quantization.precisions import Rows, Weight
from streamspec.export.spec.decoder_spec import DecoderSpec
from streamspec.export.spec.weight_source import ChangedSource, Source

NORM_OUT, NORM_BIAS = "dflash.norm_out", "norm_out.bias"


@dataclass(frozen=True, kw_only=True)
class BlockSpec(StreamSpec):
    """The block drafter of one adapter. `block_layers`: of its own; `taps`, `window`: as in
    `streamspec.adapters.drafters.dflash.block_config.BlockConfig`; `tensors`: of the layers, the last norm and the
    map of the tapped states, by their names in the adapter.
    """

    block_layers: int
    taps: tuple[int, ...]
    window: int | None
    tensors: Mapping[str, Array]
    ns: int = 0

    @property
    def own_layers(self) -> int:
        """All of its layers have K/V in the cache."""
        return self.block_layers

    def tapped(self, layers: int) -> tuple[int, ...]:
        """The layers `taps` before the end."""
        return tuple(layers - tap for tap in self.taps)

    def info(self, candidates: int) -> DrafterInfo:
        """Adds the number of layers to the description of streams."""
        return replace(super().info(candidates), layers=self.block_layers)


def shapes(section: AdapterSection) -> Shapes:
    """Shapes of the tensors that a configuration names. Raises AdapterError for one that cannot be."""
    config, spec = section.config, section.spec
    count, taps = section.whole("block_layers", 1, spec.layers), section.taps()
    section.positive("scale", config.get("scale"))
    if config.get("window") is not None:
        section.whole("window", 1, MAX_CONTEXT)
    hidden, biases = spec.hidden, config.get("biases") or []
    if biases not in ([], [NORM_BIAS]):
        raise section.refused(f"streams.biases is {biases!r}", f"[] or [{NORM_BIAS!r}]")
    shapes: Shapes = {
        "stream_embeddings": (section.gamma, hidden),
        "shares": (section.gamma, 2),
        "root_map": (hidden, hidden),
        "fuse": (hidden, len(taps) * hidden),
        "norm_out.weight": (hidden,),
    }
    shapes |= dict.fromkeys(biases, (hidden,))
    return shapes | {f"layers.{i}.{name}": shape for i in range(count) for name, shape in spec.shapes.items()}


def read(section: AdapterSection, tensors: dict[str, Array], shared: dict[str, Any]) -> BlockSpec:
    """Reads the drafter from tensors that have the `shapes`."""
    config = section.config
    own = {name: one.astype(np.float32) for name, one in tensors.items() if name != "draft_vocab"}
    own = {name: one for name, one in own.items() if not name.startswith("bigram_")}
    return BlockSpec(
        **shared,
        block_layers=config["block_layers"],
        taps=tuple(config["taps"]),
        window=config.get("window"),
        scale=float(config["scale"]),
        shifted=True,
        embeddings=own.pop("stream_embeddings"),
        shares=own.pop("shares"),
        root_map=own.pop("root_map"),
        tensors=own,
    )


class BlockSource(ChangedSource):
    """The target's weights, and the drafter's layers as those after its last."""

    def __init__(self, source: Source, spec: BlockSpec, decoder: DecoderSpec) -> None:
        super().__init__(source)
        self.own, self.last = dict[str, Array](), decoder.weight_name(decoder.last_attention, "")
        self.inside = tuple(decoder.weight_name(decoder.layers + i, "") for i in range(spec.block_layers))
        for name, tensor in spec.tensors.items():
            part, _, rest = name.partition(".")
            if part == "layers":
                number, _, module = rest.partition(".")
                self.own[f"{self.inside[int(number)]}{module}"] = decoder.in_graph(module, tensor)
            elif part == "norm_out":
                self.own[f"dflash.{name}"] = decoder.in_graph(name, tensor)

    def weight(self, name: str) -> Array:
        """Returns a weight of the drafter, or else of the target; constants of a layer are those of the target's."""
        if name in self.own:
            return self.own[name]
        inside = next((one for one in self.inside if name.startswith(one)), "")
        return self.source.weight(name.replace(inside, self.last, 1) if inside else name)

    def bias(self, name: str) -> Array | None:
        """Returns a bias of the drafter or of the target; None where there is none."""
        return self.own.get(name) if name.startswith((*self.inside, NORM_OUT)) else self.source.bias(name)


class BlockPass(StreamPass):
    """The block as a branch, and its layers' K/V of the main rows in the main graph."""

    spec: BlockSpec

    def __init__(self, decoder: Decoder, spec: BlockSpec, candidates: int) -> None:
        super().__init__(self.own_decoder(decoder, spec), spec, candidates, "merged")
        self.own = range(self.first, self.first + spec.block_layers)

    def own_decoder(self, decoder: Decoder, spec: BlockSpec) -> Decoder:
        """Writes the drafter's layers, which come after those of the target's `decoder`."""
        return decoder.drafting(decoder.spec, BlockSource(decoder.source, spec, decoder.spec))

    def context(self, g: Scope, main: MainRows) -> str:
        """F [1, n, H] of the main rows."""
        joined = g.op("Concat", *(self.decoder.unit_rms(g, entry) for entry in main.entries), axis=-1)
        return self.decoder.linear_map(g, joined, main.rows, self.own_weight("fuse"))

    def read_context(self, g: Scope, states: str, layer: int) -> str:
        """What a layer's keys and values of the main rows are maps of."""
        return self.decoder.enter(g, Residual(states), layer)[0]

    def own_weight(self, name: str) -> Weight:
        """A linear map [out, in] of the drafter beside its layers."""
        array = self.spec.tensors[name]
        return Weight(f"dflash.{name}", array.shape[0], array.shape[1], lambda: array, drafter=True)

    def main_rows(self, g: Scope, main: MainRows) -> list[tuple[str, ...]]:
        """Writes the K/V of the main rows in the drafter's layers; returns these layers' cache outputs."""
        decoder = self.decoder
        rotary, presents = decoder.rotary(g, main.positions), []
        states = self.context(g, main)
        for layer in self.own:
            with g.named(f"dflash.{layer}"):
                normed = self.read_context(g, states, layer)
                _, *sides = decoder.queries_keys_values(g, normed, main.rows, layer, rotary, decoder.linear)
                presents.append(main.keep(layer, sides, decoder.spec))
        return presents

    def logits(self, g: Scope, accepted: Accepted, presents: list[tuple[str, ...]], stream_ids: str) -> str:
        """Adds the block through its layers and the head: [m, D]."""
        rows, start = Rows(g.op("Shape", stream_ids)), Residual(self.start(g, accepted, stream_ids))
        whole = replace(accepted, rings={})  # its layers keep every row, whatever their window
        residual = self._through(g, start, rows, self.own, whole, presents, stream_ids)
        with g.named("head"):
            finished, _ = self.decoder.norm(g, residual, NORM_OUT)
            return self.head(g, g.op("Squeeze", finished, g.ints(0)), rows)

    def window(self, layer: int) -> int | None:
        """That of the layers which the drafter started as."""
        return self.spec.window

    def sees_later(self, layer: int) -> bool:
        """Always."""
        return True

    def _state(self, g: Scope, accepted: Accepted) -> str:
        entry = accepted.entries[self.spec.tapped(self.first)[0]]
        return g.op("Gather", entry, accepted.node, axis=1)
