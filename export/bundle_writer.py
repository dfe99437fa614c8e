"""Exports a base and an adapter as a bundle: resolve, check, build, quantize, compare with PyTorch, write; or nothing.

Each step lives in a module of its own; this one has their order.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import onnx
from tokenizers import Tokenizer

from streamspec import __version__
from streamspec.adapters.base_models.resolve import Base, resolve_base
from streamspec.bundle.adapter_folder import Adapter, read_adapter
from streamspec.bundle.manifest import (
    CHOICE,
    COMPACT,
    MODEL,
    TEMPLATE,
    BaseInfo,
    DraftTreeInfo,
    Manifest,
    ModelInfo,
    StaticInfo,
)
from streamspec.bundle.onnx_check import check_graphs
from streamspec.bundle.write_files import bundle_folder, finish
from streamspec.errors import ConfigError
from streamspec.export.bundle_card import write_card
from streamspec.export.deployment_target import PLAIN_CPU, ROWS, SLOTS, Target
from streamspec.export.drafters.adapter_section import read_nodes
from streamspec.export.drafters.base import DraftSpec, graph_features, most_candidates
from streamspec.export.drafters.streams import DEFAULT_STREAM_WEIGHTS, STREAM_WEIGHTS
from streamspec.export.drafters.table import DRAFTERS, read_drafter
from streamspec.export.graphs.cache_compaction import compact_graph
from streamspec.export.graphs.dynamic_step_graph import StepGraph
from streamspec.export.graphs.static_step_graph import StaticStepGraph, fitting
from streamspec.export.layers.decoder import Source
from streamspec.export.layers.decoder_spec import DecoderSpec, describe
from streamspec.export.layers.sampling import choice_graph
from streamspec.export.ops.builder import IR_VERSION, OPSET, WeightStore
from streamspec.export.quantization import smoothing as smooth
from streamspec.export.quantization.precisions import Precision
from streamspec.export.quantization.static_precisions import StaticPrecision
from streamspec.export.tokenizer_files import copy_tokenizer, end_tokens
from streamspec.export.validate.graph_runner import open_session
from streamspec.export.validate.parity import TREE_ROWS, check_parity, expect, make_probe, page, passage
from streamspec.export.validate.perplexity import HeldOut, answer_tokens, perplexity_of_graph, perplexity_of_model
from streamspec.export.weights.load_weights import ModelSource, load_model
from streamspec.prompt.prompt_format import PromptFormat

DEFAULT_ROWS = 8  # of the tree baked in as default; the runtime chooses its own by measuring
DATA = f"{MODEL}.data"

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Parts:
    """Everything that goes into the graph and the manifest."""

    base: Base
    adapter: Adapter | None
    model: Any
    spec: DecoderSpec
    streams: DraftSpec | None
    trees: DraftTreeInfo | None
    candidates: int
    static: StaticInfo | None = None


def export_bundle(
    base: str | Path,
    adapter: str | Path | None,
    out: str | Path,
    precision: str = "int8",
    force: bool = False,
    progress: Progress | None = None,
    stream_weights: str = DEFAULT_STREAM_WEIGHTS,
    held_out: HeldOut | None = None,
    block_size: int | None = None,
    target: Target = PLAIN_CPU,
) -> Manifest:
    """Writes the bundle `out` and returns its manifest.

    `precision`: fp32, fp16, int8 or int4, the last in blocks of `block_size` 32 (default) or 128 weights.
    `stream_weights`: how a staged recipe's stream LoRA is carried, `merged` (a second copy of the last layers) or
    `delta` (low-rank products beside the shared weights). `held_out`: the perplexity of these rows' answers here and in
    PyTorch is kept in `manifest.parity`. `target`: what the graph is shaped for. `progress` gets one line per step
    (default: stderr). Raises StreamspecError; the previous state of `out` then stays as it was.
    """
    say = progress or to_stderr
    kind = target.precision(precision, block_size)
    if stream_weights not in STREAM_WEIGHTS:
        raise ConfigError(f"stream weights `{stream_weights}`", " or ".join(STREAM_WEIGHTS), "choose one of them")
    found, described = asked_for(base, adapter, say)
    if held_out is not None:
        held_out.read()  # what is wrong with it should be said at once
    with bundle_folder(out, force) as folder:
        say("loading the base")
        parts = _load(found, described)
        if target.static:
            parts = _fixed(parts, target, say)
        tokenizer = copy_tokenizer(found, folder)
        tokens = passage(tokenizer, parts.spec.vocab, parts.spec.context_length)
        say("asking PyTorch")
        expected = expect(parts.model, parts.streams, tokens, parts.static.rows if parts.static else TREE_ROWS)
        manifest = replace(
            describe_bundle(parts, precision, tokenizer, (folder / TEMPLATE).is_file()),
            provider=target.name,
            block_size=block_size,
        )
        asked = held_out.rows(found, manifest.prompt_format, parts.spec.context_length) if held_out else []
        perplexity = {"pytorch": perplexity_of_model(parts.model, asked)} if asked else {}
        graph = _graph(parts, kind, tokenizer, stream_weights, say)
        say(f"writing the {precision} graph")
        written = graph.build(WeightStore(folder / DATA))
        onnx.save(written, folder / MODEL)
        opset = written.opset_import[0].version
        if parts.static:
            onnx.save(choice_graph(parts.spec.vocab), folder / CHOICE)
        if target.device:
            onnx.save(_compact_graph(parts), folder / COMPACT)
        del graph, written
        parts = replace(parts, model=None)  # the session and the model need not be in memory together
        say("comparing with what PyTorch said")
        session = open_session(folder / MODEL, static=parts.static is not None)
        parity = check_parity(session, expected, precision)
        if asked:
            parity["perplexity"] = {
                "tokens": answer_tokens(asked),
                "bundle": perplexity_of_graph(session, asked),
            } | perplexity
        manifest = replace(
            manifest,
            parity=parity,
            probe=make_probe(session, tokens),
            opset=opset,
            weights_bytes=(folder / DATA).stat().st_size,
        )
        del session
        write_card(folder, manifest)
        say("hashing the files")
        manifest = finish(folder, manifest)
        check_graphs(folder, manifest)  # one that we would refuse to load must not be written
        return manifest


def asked_for(base: str | Path, adapter: str | Path | None, say: Progress) -> tuple[Base, Adapter | None]:
    """Base and adapter, which must belong together."""
    found = resolve_base(base, say)
    described = read_adapter(Path(adapter)) if adapter is not None else None
    if described is not None:
        described.check_base(found.id, found.sha256)
    return found, described


def _load(base: Base, adapter: Adapter | None) -> Parts:
    whole = adapter is not None and adapter.streams is not None and DRAFTERS[adapter.method].whole_model
    model = load_model(base, adapter, whole=whole)
    spec = describe(model)
    if adapter is None or adapter.streams is None:
        return Parts(base, adapter, model, spec, None, None, most_candidates(None, spec.vocab))
    streams = read_drafter(adapter, spec)
    candidates = most_candidates(streams, spec.vocab)
    nodes = read_nodes(adapter, streams.gamma, candidates)
    return Parts(base, adapter, model, spec, streams, DraftTreeInfo(nodes, min(DEFAULT_ROWS, len(nodes))), candidates)


def _fixed(parts: Parts, target: Target, say: Progress) -> Parts:
    """As a static graph can have them, with a context of its own. Raises ConfigError for one that makes no sense."""
    spec, gamma = parts.spec, parts.streams.gamma if parts.streams else 0
    rows = target.rows or ROWS
    slots = target.context or min(SLOTS, spec.context_length)
    if not rows + gamma < slots <= spec.context_length:
        raise ConfigError(
            f"a context of {slots} tokens",
            f"{rows + gamma + 1} to {spec.context_length}, which the base has",
            "correct --context",
        )
    streams = fitting(parts.streams) if parts.streams else None
    if parts.streams and parts.streams.pruning:
        say("leaving the early exit out: a static graph cannot prune")
    return replace(parts, spec=replace(spec, context_length=slots), streams=streams, static=StaticInfo(rows, slots))


def _compact_graph(parts: Parts) -> onnx.ModelProto:
    return compact_graph(graph_features(parts.spec, parts.streams, parts.candidates))


def _graph(
    parts: Parts, kind: Precision | StaticPrecision, tokenizer: Tokenizer, stream_weights: str, say: Progress
) -> StepGraph | StaticStepGraph:
    source = weights(parts.model, parts.spec, kind, tokenizer, say)
    streams = parts.streams
    if isinstance(source, smooth.SmoothedSource) and streams is not None:
        streams = source.drafter(streams, parts.spec)
    if fixed := parts.static:
        return StaticStepGraph(
            parts.spec,
            source,
            cast(StaticPrecision, kind),
            fixed.rows,
            fixed.slots,
            streams,
            parts.candidates,
            stream_weights,
        )
    tree = parts.trees.tree() if parts.trees else None
    return StepGraph(parts.spec, source, kind, streams, tree, parts.candidates, stream_weights)


def weights(model: Any, spec: DecoderSpec, precision: Precision, tokenizer: Tokenizer, say: Progress) -> Source:
    """The model's weights, smoothed where the precision rounds."""
    source = ModelSource(model, spec)
    if precision.simulation is None:
        return source
    say(f"smoothing for {precision.name}")
    tokens = page(tokenizer, smooth.TEXT, spec.vocab, min(smooth.ROWS, spec.context_length))
    return smooth.smooth(model, spec, source, tokens, precision.simulation)


def describe_bundle(parts: Parts, precision: str, tokenizer: Tokenizer, templated: bool) -> Manifest:
    """The manifest, but for what is measured. `templated`: an untouched base is used through its chat template where it
    has one.
    """
    base, adapter, spec = parts.base, parts.adapter, parts.spec
    method = adapter.method if adapter else "lora"
    return Manifest(
        base=BaseInfo(base.id, base.sha256, base.model_type, base.revision),
        method=method,
        recipe=adapter.recipe if adapter else None,
        drafter=method if parts.streams else None,
        precision=precision,
        opset=OPSET,
        ir_version=IR_VERSION,
        model=ModelInfo(
            layers=spec.layers,
            kv_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            vocab_size=spec.vocab,
            hidden_size=spec.hidden,
            context_length=spec.context_length,
            bos_token_id=spec.bos_token_id,
            eos_token_ids=end_tokens(base, tokenizer, spec.eos_token_ids),
        ),
        prompt_format=adapter.prompt_format if adapter else PromptFormat("chat" if templated else "raw"),
        streams=parts.streams.info(parts.candidates) if parts.streams else None,
        trees=parts.trees,
        static=parts.static,
        tools={"streamspec": __version__}
        | {name: version(name) for name in ("onnxruntime", "onnx", "torch", "transformers")},
    )


def to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
