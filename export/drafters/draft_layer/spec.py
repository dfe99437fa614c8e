"""A draft layer (Jakiro, arXiv 2502.06282; EAGLE, MTP and Hydra are settings of it): its description, its tensors in
an adapter, and its weights under the names of further layers. Its nodes are in `draft_pass`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from streamspec.bundle.adapter_folder import FINAL_STATE, DraftPasses, odd_draft_layer
from streamspec.bundle.manifest import DrafterInfo
from streamspec.bundle.model_section import MAX_CONTEXT
from streamspec.export.drafters.adapter_section import AdapterSection, Shapes
from streamspec.export.ops.builder import Array
from streamspec.export.spec.decoder_spec import DecoderSpec
from streamspec.export.spec.draft_spec import DraftSpec
from streamspec.export.spec.mixture_spec import MixtureSpec
from streamspec.export.spec.weight_source import ChangedSource, Source

BEAM = 4  # candidates of a level that the next one goes on from


@dataclass(frozen=True, kw_only=True)
class DraftLayerSpec(DraftSpec, DraftPasses):
    """The draft layer of one adapter. Fields as in `streamspec.adapters.drafters.draft_layer.model.DraftLayerConfig`;
    `tensors`: by their names in the adapter.
    """

    taps: tuple[int, ...]
    active: int = 1
    contrast: bool = False
    parallel: bool = False
    two_lists: bool = False
    prefix_attention: bool = False
    own_heads: bool = False
    depth: int = 1
    window: int | None = None
    tensors: Mapping[str, Array]

    @property
    def uses_root(self) -> bool:
        """Always: the layer's input is the token after the accepted node."""
        return True

    @property
    def own_layers(self) -> int:
        """One: the draft layer's K/V are in the cache, zeros where it never attends."""
        return 1

    @property
    def levels(self) -> tuple[int, ...]:
        """Draft rows of each depth."""
        return 1, *[self.beam] * (self.gamma - 1)

    @property
    def beam(self) -> int:
        """Candidates of a level that the next one continues."""
        return BEAM if self.draft_vocab is None else min(BEAM, len(self.draft_vocab))

    def tapped(self, layers: int) -> tuple[int, ...]:
        """The layers `taps` before the end; the number of layers for the finished states."""
        return tuple(layers - tap for tap in self.taps)

    def info(self, candidates: int) -> DrafterInfo:
        """Adds the root token and the levels to the description."""
        return replace(super().info(candidates), root_token=True, levels=self.levels)


def shapes(section: AdapterSection) -> Shapes:
    """Shapes of the tensors that a configuration names. Raises AdapterError for one that cannot be."""
    config, gamma, spec = section.config, section.gamma, section.spec
    experts, active = check(section)
    hidden, taps = spec.hidden, config["taps"]
    shapes = _pass_shapes(spec, DraftLayerSpec(gamma=gamma, **shape_of(section), tensors={}), experts, active)
    shapes |= {"from_entry": (hidden, len(taps) * hidden), "norm_out.weight": (hidden,), "norm_out.bias": (hidden,)}
    if config.get("contrast") or config.get("parallel"):
        shapes["last_state"] = (hidden, hidden)
    if config.get("parallel"):
        shapes["last_token"] = (hidden, hidden)
    biases = config.get("biases") or []
    if not isinstance(biases, list):
        raise section.refused(f"streams.biases is {biases!r}", "a list of names")
    return {name: shape for name, shape in shapes.items() if not name.endswith((".bias", "_bias")) or name in biases}


def _pass_shapes(spec: DecoderSpec, passes: DraftLayerSpec, experts: int, active: int) -> Shapes:
    """Shapes of the weights of the first pass, and of the heads of the later ones, which may not attend."""
    hidden, layer = spec.hidden, _layer_shapes(spec)
    passed: Shapes = {"from_token": (hidden, hidden), "bias": (hidden,)} | _expert_shapes(spec, experts, active)
    handed = {"from_state": (hidden, hidden)}
    alone = {name: layer[name] for name in layer if name.startswith(("norm_mid.", "norm_mlp."))}
    if spec.parallel and spec.mlp_norm is None:
        alone |= {name.replace("norm_in", "norm_mid"): layer[name] for name in layer if name.startswith("norm_in.")}
    shapes: Shapes = passed | (layer if passes.attends(0) else alone)
    shapes |= {} if passes.heads or passes.one_map else handed
    for head in range(passes.heads):
        own = layer if passes.attends(head + 1) else alone
        shapes |= {f"heads.{head}.{name}": shape for name, shape in (passed | handed | own).items()}
    return shapes


def _layer_shapes(spec: DecoderSpec) -> Shapes:
    """Shapes of attention and norms, as in the last layer of the target."""
    shapes: Shapes = {}
    for part, module in _parts(spec).items():
        inside = f"{module}."
        shapes |= {
            f"{part}.{name.removeprefix(inside)}": shape
            for name, shape in spec.shapes.items()
            if name.startswith(inside)
        }
    return shapes


def _expert_shapes(spec: DecoderSpec, experts: int, active: int) -> Shapes:
    inner, sides = spec.draft_channels // active, ("gate", "up") if spec.family.gated else ("up",)
    shapes: Shapes = {f"experts.{name}": (experts, inner, spec.hidden) for name in (*sides, "down")}
    shapes |= {f"experts.{name}_bias": (experts, inner) for name in sides}
    shapes["experts.down_bias"] = experts, spec.hidden
    return shapes | ({"experts.router": (experts + 2, spec.hidden)} if experts > 1 else {})


def _parts(spec: DecoderSpec) -> dict[str, str]:
    """Parts of a layer by their names in a draft layer."""
    parts = spec.family.draft_layer_parts
    return {part: module for part, module in parts.items() if part != "norm_mid" or spec.mlp_norm}


def shape_of(section: AdapterSection) -> dict[str, Any]:
    """Fields of a spec that a checked configuration states."""
    config = section.config
    parts = "contrast", "parallel", "two_lists", "prefix_attention", "own_heads"
    return {name: bool(config.get(name)) for name in parts} | {
        "taps": tuple(config["taps"]),
        "active": config["active"],
        "depth": config.get("depth", 1),
        "window": config.get("window"),
    }


def check(section: AdapterSection) -> tuple[int, int]:
    """Checks a configuration; returns the numbers of experts and of active ones. Raises AdapterError."""
    config, gamma = section.config, section.gamma
    experts = section.whole("experts", 1, 64)
    active = section.whole("active", 1, experts)
    section.taps(FINAL_STATE)
    if odd := odd_draft_layer(
        gamma, experts, active, *(bool(config.get(part)) for part in ("contrast", "parallel", "two_lists"))
    ):
        raise section.refused(*odd)
    if "depth" in config:  # adapters up to 0.1 have none
        section.whole("depth", 1, gamma - bool(config.get("parallel")))
    if config.get("bigram"):
        raise section.refused("a draft layer with a bigram", "no bigram: its candidates know the token before")
    if config.get("window") is not None:
        section.whole("window", 1, MAX_CONTEXT)
    return experts, active


def read(section: AdapterSection, tensors: dict[str, Array], shared: dict[str, Any]) -> DraftLayerSpec:
    """Reads the draft layer from tensors that have the `shapes`."""
    own = {name: tensors[name].astype(np.float32) for name in shapes(section)}
    return DraftLayerSpec(**shared, **shape_of(section), tensors=own)


def with_layer(decoder: DecoderSpec, like: int) -> DecoderSpec:
    """A description with one more layer after the last, which attends like layer `like` and has the MLP, or the
    experts, of the last layer with attention."""
    mixture = mixture_of(decoder)
    if mixture is not None:
        mixture = replace(mixture, layers=(*mixture.layers, decoder.layers))
    return replace(decoder, mixture=mixture, rotary_of=(*decoder.rotary_of, decoder.rotary_of[like]))


def mixture_of(decoder: DecoderSpec) -> MixtureSpec | None:
    """The experts of the last layer with attention; None where it has an MLP."""
    return decoder.mixture if decoder.mlp_kind(decoder.last_attention) == "experts" else None


class DraftLayerSource(ChangedSource):
    """The target's weights, and the draft layer's as those of layer number `layers`; its own heads' as those of the
    layers after that.
    """

    def __init__(self, source: Source, spec: DraftLayerSpec, decoder: DecoderSpec) -> None:
        super().__init__(source)
        self.own = {}
        layers, parts = decoder.layers, _parts(decoder)
        self.prefixes = tuple(f"{decoder.weight_name(layers + number, '')}" for number in range(spec.gamma))
        for name, tensor in spec.tensors.items():
            number, part = 0, name
            if name.startswith("heads."):
                _, head, part = name.split(".", 2)
                number = 1 + int(head)
            part, _, rest = part.partition(".")
            if part == "norm_mid" and part not in parts:  # of a head, where the layer's MLP reads what attention reads
                part = "norm_in"
            if part in parts:
                inside = f"{parts[part]}.{rest}"
                self.own[decoder.weight_name(layers + number, inside)] = decoder.in_graph(
                    inside, tensor.astype(np.float32)
                )

    def weight(self, name: str) -> Array:
        """Returns a weight of the draft layer, or else of the target."""
        return self.own[name] if name in self.own else self.source.weight(name)

    def bias(self, name: str) -> Array | None:
        """Returns a bias of the draft layer or of the target; None where there is none."""
        return self.own.get(name) if name.startswith(self.prefixes) else self.source.bias(name)
