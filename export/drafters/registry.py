"""The one table of drafters: how each is read, written as nodes, computed without a graph, and where
it fits.

A further drafter is a folder beside this file and a row here. Its `DraftSpec.info` is what the manifest records.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from streamspec.bundle.adapter_folder import Adapter
from streamspec.bundle.manifest import DRAFT_LAYERS
from streamspec.export.drafters.adapter_section import AdapterSection, Shapes, read_section
from streamspec.export.drafters.assistant.draft_pass import AssistantPass
from streamspec.export.drafters.assistant.spec import AssistantSpec
from streamspec.export.drafters.dflash import spec as dflash
from streamspec.export.drafters.dflash.draft_pass import BlockPass
from streamspec.export.drafters.draft_layer import spec as draft_layer
from streamspec.export.drafters.draft_layer.draft_pass import DraftLayerPass
from streamspec.export.drafters.draft_pass import DraftPass
from streamspec.export.drafters.eagle3 import spec as eagle3
from streamspec.export.drafters.eagle3.draft_pass import Eagle3Pass
from streamspec.export.drafters.medusa import spec as medusa
from streamspec.export.drafters.medusa.draft_pass import MedusaPass
from streamspec.export.drafters.mtp.draft_pass import MtpPass
from streamspec.export.drafters.mtp.spec import MtpSpec
from streamspec.export.drafters.published import trained
from streamspec.export.drafters.published.draft_pass import PublishedBlockPass
from streamspec.export.drafters.published.spec import PublishedBlockSpec
from streamspec.export.drafters.shared_layer import spec as shared_layer
from streamspec.export.drafters.shared_layer.draft_pass import SharedLayerPass
from streamspec.export.drafters.streams import spec as streams
from streamspec.export.drafters.streams.draft_pass import StreamPass
from streamspec.export.drafters.streams.eager_pass import EagerPass
from streamspec.export.layers.decoder import Decoder
from streamspec.export.ops.builder import Array
from streamspec.export.reference.draft_reference import DraftReference
from streamspec.export.reference.numpy_reference import NumpyReference
from streamspec.export.spec.decoder_spec import DecoderSpec
from streamspec.export.spec.draft_spec import DraftSpec


@dataclass(frozen=True, kw_only=True)
class Drafter:
    """Reads, writes and compares the drafters of one method. `read`, where adapters hold them, takes an adapter's
    section, its tensors, which are as `shapes` says, and the fields that all specs share; `nodes` the decoder, the
    spec, the number of candidates and how a LoRA of the drafter's own is carried. `in_numpy`: its reference where numpy
    reads the base. `swappable`: an adapter may bring it to a swappable graph; `whole_model`: its reference needs the
    whole base in float32, not layer by layer."""

    spec: type[DraftSpec]
    nodes: Callable[[Decoder, Any, int, str], DraftPass]
    reference: str  # module and class; the modules need PyTorch
    in_numpy: str | None = None  # likewise
    shapes: Callable[[AdapterSection], Shapes] | None = None
    read: Callable[[AdapterSection, dict[str, Array], dict[str, Any]], DraftSpec] | None = None
    swappable: bool = False
    whole_model: bool = False

    def reference_of(self, model: Any, spec: DraftSpec) -> DraftReference:
        """The drafter as the reference `model` of its target computes, in PyTorch or numpy."""
        chosen = self.in_numpy if isinstance(model, NumpyReference) else self.reference
        assert chosen is not None, "no other drafter is in a base that numpy reads"
        module, name = chosen.split(":")
        reference: DraftReference = getattr(import_module(f"{__package__}.{module}"), name)(model, spec)
        return reference


_DRAFT_LAYER = Drafter(
    spec=draft_layer.DraftLayerSpec,
    shapes=draft_layer.shapes,
    read=draft_layer.read,
    nodes=DraftLayerPass,
    reference="draft_layer.reference:DraftLayerReference",
    whole_model=True,
)
DRAFTERS = {
    "streaming": Drafter(
        spec=streams.StreamSpec,
        shapes=streams.shapes,
        read=streams.read,
        nodes=lambda decoder, spec, *more: (EagerPass if spec.eager else StreamPass)(decoder, spec, *more),
        reference="streams.reference:StreamReference",
        swappable=True,
    ),
    "medusa": Drafter(
        spec=medusa.MedusaSpec,
        shapes=medusa.shapes,
        read=medusa.read,
        nodes=MedusaPass,
        reference="medusa.reference:MedusaReference",
    ),
    **dict.fromkeys(DRAFT_LAYERS, _DRAFT_LAYER),  # with two whose own rows follow
    "eagle-lora": Drafter(
        spec=shared_layer.SharedLayerSpec,
        shapes=shared_layer.shapes,
        read=shared_layer.read,
        nodes=SharedLayerPass,
        reference="shared_layer.reference:SharedLayerReference",
    ),
    "eagle3": Drafter(
        spec=eagle3.Eagle3Spec,
        shapes=eagle3.shapes,
        read=eagle3.read,
        nodes=Eagle3Pass,
        reference="eagle3.reference:Eagle3Reference",
    ),
    "dflash": Drafter(
        spec=dflash.BlockSpec,
        shapes=dflash.shapes,
        read=dflash.read,
        nodes=BlockPass,
        reference="dflash.reference:BlockReference",
        whole_model=True,
    ),
    "dspark": Drafter(  # and block drafters that others published
        spec=PublishedBlockSpec,
        shapes=trained.shapes,
        read=trained.read,
        nodes=PublishedBlockPass,
        reference="published.reference:PublishedBlockReference",
    ),
}  # by an adapter's method
OTHERS = (  # in no adapter: layers that a checkpoint brings, an assistant
    Drafter(
        spec=MtpSpec,
        nodes=MtpPass,
        reference="mtp.reference:MtpReference",
        in_numpy="mtp.numpy_reference:MtpNumpyReference",
    ),
    Drafter(spec=AssistantSpec, nodes=AssistantPass, reference="assistant.reference:AssistantReference"),
)


def row_of(spec: DraftSpec) -> Drafter:
    """Finds the row of a drafter's spec."""
    return next(row for row in (*DRAFTERS.values(), *OTHERS) if row.spec is type(spec))


def read_drafter(adapter: Adapter, spec: DecoderSpec) -> DraftSpec:
    """The drafter of an adapter. All wrong or missing tensors are named in one error."""
    row = DRAFTERS[adapter.method]
    assert row.shapes is not None and row.read is not None, adapter.method
    return read_section(adapter, spec, row.shapes, row.read)
