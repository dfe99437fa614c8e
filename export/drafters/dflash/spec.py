"""A block drafter (DFlash, arXiv 2602.06036): its description, its tensors in an adapter, and its weights under the
names of further layers. Its nodes are in `draft_pass`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from streamspec.bundle.manifest import DrafterInfo
from streamspec.bundle.model_section import MAX_CONTEXT
from streamspec.export.drafters.adapter_section import AdapterSection, Shapes
from streamspec.export.drafters.streams.spec import StreamSpec
from streamspec.export.ops.builder import Array
from streamspec.export.spec.decoder_spec import DecoderSpec
from streamspec.export.spec.weight_source import ChangedSource, Source

NORM_OUT, NORM_BIAS = "dflash.norm_out", "norm_out.bias"


@dataclass(frozen=True, kw_only=True)
class BlockSpec(StreamSpec):
    """The block drafter of one adapter. `block_layers`: of its own; `taps`, `window`, `causal`:
    as in `streamspec.adapters.drafters.dflash.config.BlockConfig`; `tensors`: of the layers, the last norm and the
    map of the tapped states, by their names in the adapter.
    """

    block_layers: int
    taps: tuple[int, ...]
    window: int | None
    tensors: Mapping[str, Array]
    causal: bool = False
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
    if type(config.get("causal", False)) is not bool:
        raise section.refused(f"streams.causal is {config['causal']!r}", "true or false")
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
    own = {name: tensor.astype(np.float32) for name, tensor in tensors.items() if name != "draft_vocab"}
    own = {name: tensor for name, tensor in own.items() if not name.startswith("bigram_")}
    return BlockSpec(
        **shared,
        block_layers=config["block_layers"],
        taps=tuple(config["taps"]),
        window=config.get("window"),
        causal=config.get("causal", False),
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
        inside = next((prefix for prefix in self.inside if name.startswith(prefix)), "")
        return self.source.weight(name.replace(inside, self.last, 1) if inside else name)

    def bias(self, name: str) -> Array | None:
        """Returns a bias of the drafter or of the target; None where there is none."""
        return self.own.get(name) if name.startswith((*self.inside, NORM_OUT)) else self.source.bias(name)
