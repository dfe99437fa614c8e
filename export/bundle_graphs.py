"""Builds the graphs of a bundle from its parts and writes them over one file of weights. Covered by the tests of
`bundle_writer`.
"""

from __future__ import annotations

from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, BinaryIO, cast

import onnx
from tokenizers import Tokenizer

from streamspec.bundle.cache_section import CAPTURED, COMPACT
from streamspec.bundle.manifest import CHOICE, MODEL, NATIVE
from streamspec.bundle.model_section import SHORT, SHORT_NATIVE
from streamspec.export.bundle_parts import Parts
from streamspec.export.deployment_target import DEVICES, Target
from streamspec.export.graphs.captured_step_graph import CapturedStepGraph
from streamspec.export.graphs.device_cache_graph import compact_graph
from streamspec.export.graphs.dynamic_step_graph import StepGraph
from streamspec.export.graphs.static_step_graph import StaticStepGraph
from streamspec.export.layers.sampling import choice_graph
from streamspec.export.native.operators import native_ops
from streamspec.export.ops.builder import WeightStore
from streamspec.export.options import DELTA, Progress
from streamspec.export.quantization import smoothing as smooth
from streamspec.export.quantization.calibration_text import calibration_tokens, page
from streamspec.export.quantization.method import RTN, method_for
from streamspec.export.quantization.precisions import Precision
from streamspec.export.quantization.static_precisions import StaticPrecision
from streamspec.export.spec.decoder_spec import DecoderSpec
from streamspec.export.spec.draft_spec import graph_features
from streamspec.export.spec.mixture_spec import MixtureSpec
from streamspec.export.spec.weight_source import Source
from streamspec.export.weights.target import source_of

DATA = f"{MODEL}.data"


def build_graph(
    parts: Parts,
    precision: Precision | StaticPrecision,
    stream_weights: str,
    tokenizer: Tokenizer,
    say: Progress,
    method: str | None,
    folder: Path,
) -> StepGraph | StaticStepGraph:
    """The step graph over the target's weights. `stream_weights`: how a LoRA of the streams' own is stored. `method`:
    as of `weights`; `folder`: where codes may wait that are not written yet."""
    draft_spec = parts.draft_spec
    turned = draft_spec is not None and draft_spec.turns_values
    source = weights(parts.target.weighed, parts.spec, precision, tokenizer, say, method, folder, turned)
    if isinstance(source, smooth.SmoothedSource) and draft_spec is not None:
        draft_spec = replace(draft_spec, lora=source.scales.lora(draft_spec.lora, parts.spec))
    if parts.static:
        rows, slots = parts.static.rows, parts.static.slots
        fixed = cast(StaticPrecision, precision)
        return StaticStepGraph(parts.spec, source, fixed, rows, slots, draft_spec, parts.candidates, stream_weights)
    tree = parts.trees.tree() if parts.trees else None
    candidates, embeddings = parts.candidates, parts.embeddings
    return StepGraph(parts.spec, source, precision, draft_spec, tree, candidates, stream_weights, embeddings=embeddings)


def weights(
    model: Any,
    spec: DecoderSpec,
    precision: Precision,
    tokenizer: Tokenizer,
    say: Progress,
    method: str | None = None,
    folder: Path | None = None,
    turned: bool = False,
) -> Source:
    """The model's weights, smoothed where the precision rounds, and in int4 rounded by `method`, None: as
    `method_for` says. `folder`: as of `build_graph`; `turned`: as of `smooth`."""
    source, simulation = source_of(model, spec), precision.simulation
    if simulation is None:
        return source
    if (method or method_for(spec)) == RTN:
        simulation = replace(simulation, nearest=True)
    if not simulation.on_text:
        say(f"smoothing for {precision.name}")
        tokens = page(tokenizer, smooth.TEXT, spec.vocab, min(smooth.ROWS, spec.context_length))[None]
        return smooth.smooth(model, spec, source, tokens, simulation, turned=turned)
    tokens = calibration_tokens(tokenizer, spec)
    say(f"rounding on {tokens.size} tokens")
    with nullcontext() if folder is None else TemporaryFile(dir=folder) as spare:  # the codes stay mapped
        return smooth.smooth(model, spec, source, tokens, simulation, cast(BinaryIO, spare), turned)


def write_graphs(folder: Path, graph: StepGraph | StaticStepGraph, parts: Parts, target: Target) -> int:
    """Writes the step graph, the one of native operators and the small graphs beside it; returns the opset."""
    with closing(WeightStore(folder / DATA)) as store:
        if isinstance(graph, StepGraph):
            _write_native_and_short(folder, graph, parts, store)
            if parts.captured:
                shared = graph.draft_spec, graph.candidates, graph.stream_weights, DEVICES[target.name].lacks
                captured = CapturedStepGraph(graph.spec, graph.source, graph.precision, parts.captured, *shared)
                onnx.save(captured.build(store), folder / CAPTURED)
        step = graph.build(store)
        onnx.save(step, folder / MODEL)
    if parts.static or parts.captured:
        onnx.save(choice_graph(parts.spec.vocab), folder / CHOICE)
    if target.device:
        onnx.save(compact_graph(graph_features(parts.spec, parts.draft_spec, parts.candidates)), folder / COMPACT)
    opset: int = step.opset_import[0].version
    return opset


def idle_share(native: Path, mixture: MixtureSpec) -> float:
    """Of the bytes of the weights of a graph of native operators, those of experts that a row does not choose."""
    tensors = onnx.load(native, load_external_data=False).graph.initializer
    sizes = {one.name: int(entry.value) for one in tensors for entry in one.external_data if entry.key == "length"}
    stacks = sum(size for name, size in sizes.items() if f".{mixture.names.experts}." in name)
    return round(stacks * (1 - mixture.active / mixture.count) / max(1, sum(sizes.values())), 4)


def _write_native_and_short(folder: Path, graph: StepGraph, parts: Parts, store: WeightStore) -> None:
    short = graph.without(parts.skipped) if any(parts.skipped) else None
    native = native_ops(graph.precision) if _can_be_native(graph) else None
    if native is not None:
        onnx.save(graph.build(store, native), folder / NATIVE)
        if short is not None:
            onnx.save(short.build(store, native), folder / SHORT_NATIVE)
    if short is not None:
        onnx.save(short.build(store, first=True), folder / SHORT)


def _can_be_native(graph: StepGraph) -> bool:
    """Native operators know no eager streams, and apply the gate of an MLP within its first map, where nothing can be
    added to its outputs."""
    if graph.draft_spec is None:
        return True
    family = graph.spec.family
    own = any(module in family.up for _, module in graph.draft_spec.lora)
    beside = graph.stream_weights == DELTA and family.gated and own and not graph.draft_spec.own_layers
    return not (graph.draft_spec.eager or beside)
