"""A checkpoint's own layer for multi-token prediction (MTP): its description, its tensors, and its weights under the
name of a further layer. Its nodes are in `draft_pass`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from streamspec.bundle.adapter_folder import FINAL_STATE
from streamspec.export.drafters.adapter_section import Shapes
from streamspec.export.drafters.draft_layer.spec import DraftLayerSpec, mixture_of, with_layer
from streamspec.export.ops.builder import Array
from streamspec.export.spec.decoder_spec import DecoderSpec
from streamspec.export.spec.mixture_spec import DOWN, GATE, UP
from streamspec.export.spec.weight_source import ChangedSource, Source
from streamspec.model_families.family import MtpNames

LAYER, LABEL = "layers.0.", "mtp."  # what the names of the layer's own parts begin with; those of the rest in the graph
PAIR = "pre_fc_norm_embedding", "pre_fc_norm_hidden"  # norms of what `fc` reads, in its order
MAP, NORM = "fc.weight", "norm"


@dataclass(frozen=True, kw_only=True)
class MtpSpec(DraftLayerSpec):
    """A layer for multi-token prediction, which attends like layer `like` of the target. `tensors`: by Qwen3.5's names,
    without what these begin with, those of experts one by one."""

    like: int
    taps: tuple[int, ...] = (FINAL_STATE,)

    @property
    def reads_whole_head(self) -> bool:
        """Yes: it was trained with all tokens."""
        return True

    def layer_of(self, decoder: DecoderSpec) -> DecoderSpec:
        """The target's description with this layer as one after the last."""
        return with_layer(decoder, self.like)


def own_name(name: str, number: int, names: MtpNames) -> str:
    """What a tensor of the checkpoint's layer `number` is called here; '' for a copy of the target's."""
    begin = names.layer.format(number)
    inside = name.removeprefix(begin if name.startswith(begin) else names.beside)
    around = dict(
        zip((names.embedding_norm, names.state_norm, names.map, names.norm), (*PAIR, "fc", NORM), strict=True)
    )
    module, _, kind = inside.rpartition(".")
    if module in around:
        return f"{around[module]}.{kind}"
    if inside in names.copies:
        return ""
    return f"{LAYER}{inside}" if name.startswith(begin) else inside


def shapes(spec: DecoderSpec, found: Collection[str]) -> Shapes:
    """Shapes of the tensors of a layer like the last one with attention of a decoder; of experts together where these
    are `found` so."""
    layer, mixture = dict(spec.shapes), mixture_of(spec)
    if mixture is not None:
        stacks = {name for name in layer if name.startswith(f"{mixture.names.experts}.")}
        if not any(f"{LAYER}{name}" in found for name in stacks):
            layer = {name: of for name, of in layer.items() if name not in stacks}
            parts = mixture.sizes.items()
            layer |= {f"{mixture.expert(i, part)}.weight": of for i in range(mixture.count) for part, of in parts}
        if mixture.biased:
            layer.setdefault(str(mixture.names.bias), (mixture.count,))
    norms = {f"{name}.weight": (spec.hidden,) for name in (*PAIR, NORM)}
    return {MAP: (spec.hidden, 2 * spec.hidden), **norms, **{f"{LAYER}{name}": of for name, of in layer.items()}}


def one_by_one(tensors: Mapping[str, Array], spec: DecoderSpec) -> dict[str, Array]:
    """The tensors with those of experts apart."""
    mixture, apart = mixture_of(spec), dict(tensors)
    for stack, parts in (("gate_up_proj", (GATE, UP)), (DOWN, (DOWN,))):
        name = "" if mixture is None else f"{LAYER}{mixture.names.experts}.{stack}"
        if mixture is not None and name in apart:
            maps = apart.pop(name)
            for i in range(mixture.count):
                halves = maps[i].reshape(len(parts), -1, maps.shape[2])
                apart |= {
                    f"{LAYER}{mixture.expert(i, part)}.weight": half for part, half in zip(parts, halves, strict=True)
                }
    return apart


class MtpSource(ChangedSource):
    """The target's weights, and the layer's as those of number `layers`."""

    def __init__(self, source: Source, spec: DraftLayerSpec, decoder: DecoderSpec) -> None:
        super().__init__(source)
        layer = decoder.weight_name(decoder.layers, "")
        self.tensors, self.decoder, self.prefixes = spec.tensors, decoder, (layer, LABEL)
        inside = {name: name.removeprefix(LAYER) for name in spec.tensors}
        self.named = {f"{LABEL if part == name else layer}{part}": name for name, part in inside.items()}

    def weight(self, name: str) -> Array:
        """Returns a weight of the layer, read when it is asked for, or else of the target."""
        if name not in self.named:
            return self.source.weight(name)
        own = self.named[name]
        return self.decoder.in_graph(own.removeprefix(LAYER), self.tensors[own])

    def bias(self, name: str) -> Array | None:
        """Returns a bias of the layer or of the target; None where there is none."""
        if name.startswith(self.prefixes):
            return self.weight(name) if name in self.named else None
        return self.source.bias(name)
