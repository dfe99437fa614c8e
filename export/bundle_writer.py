"""Exports a base and an adapter as a bundle: resolve, check, build, quantize, compare with PyTorch, write.

Each step has a module of its own; this one has their order. A bundle appears whole or not at all.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import onnx
from tokenizers import Tokenizer

from streamspec.adapters.base_models.config_fields import read_config
from streamspec.adapters.base_models.resolve import Base, resolve_base
from streamspec.adapters.dataset.token_rows import TokenRow
from streamspec.adapters.task_lora import check_adapter, format_of, template_of
from streamspec.bundle.adapter_folder import Adapter, read_adapter
from streamspec.bundle.cache_section import CAPTURED, COMPACT
from streamspec.bundle.manifest import CHOICE, MODEL, NATIVE, Manifest
from streamspec.bundle.model_section import SHORT, SHORT_NATIVE
from streamspec.bundle.onnx_check import OVER_MODEL, check_graphs, digests, shortened
from streamspec.bundle.precision_cost import ANSWERS
from streamspec.bundle.write_files import bundle_folder, finish
from streamspec.captured.packed_call import CallSizes, captured_features
from streamspec.errors import ConfigError
from streamspec.export.answer_store import StoreFiles, add_store
from streamspec.export.bundle_card import write_card
from streamspec.export.bundle_parts import (
    Parts,
    Progress,
    captured_parts,
    describe_bundle,
    load_parts,
    static_parts,
    with_exit,
    with_short,
)
from streamspec.export.deployment_target import DEVICES, PLAIN_CPU, Target
from streamspec.export.drafters.published.read import read_published
from streamspec.export.drafters.streams.eager_pass import DEFERRED, eager, weights_of
from streamspec.export.graphs.captured_step_graph import CapturedStepGraph
from streamspec.export.graphs.device_cache_graph import compact_graph
from streamspec.export.graphs.dynamic_step_graph import StepGraph
from streamspec.export.graphs.static_step_graph import StaticStepGraph
from streamspec.export.layers.sampling import choice_graph
from streamspec.export.native.operators import native_ops
from streamspec.export.ops.builder import Array, WeightStore
from streamspec.export.quantization import smoothing as smooth
from streamspec.export.quantization.calibration_text import calibration_tokens
from streamspec.export.quantization.precisions import Precision, check_hidden_size
from streamspec.export.quantization.static_precisions import StaticPrecision
from streamspec.export.runners.captured_runner import CapturedGraph
from streamspec.export.runners.graph_runner import open_session
from streamspec.export.spec.decoder_spec import DecoderSpec
from streamspec.export.spec.draft_spec import graph_features
from streamspec.export.spec.weight_source import Source
from streamspec.export.tokenizer_files import copy_tokenizer
from streamspec.export.validate.measured_text import text_rows, texts_for
from streamspec.export.validate.parity import (
    TREE_ROWS,
    Expected,
    check_parity,
    check_sampled,
    expect,
    make_probe,
    page,
    passage,
)
from streamspec.export.validate.perplexity import HeldOut, Measured, measure_all, perplexities
from streamspec.export.weights.target import TORCH, computed_by, need_torch, source_of
from streamspec.layer_cache import DTYPES
from streamspec.prompt.prompt_format import PromptFormat, check_template
from streamspec.prompt.template_file import special_token
from streamspec.runtime.hardware import native_library
from streamspec.step_graph import GraphFeatures

DATA = f"{MODEL}.data"


def export_bundle(
    base: str | Path,
    adapter: str | Path | None,
    out: str | Path,
    precision: str = "int8",
    force: bool = False,
    progress: Progress | None = None,
    stream_weights: str | None = None,
    held_out: HeldOut | None = None,
    block_size: int | None = None,
    target: Target = PLAIN_CPU,
    prompt_format: PromptFormat | None = None,
    allow_base_mismatch: bool = False,
    kv_cache_dtype: str = DTYPES[0],
    store: StoreFiles | None = None,
    drafter: str | Path | None = None,
    streams: str = DEFERRED,
    exit_layer: int | None = None,
    self_draft: str | None = None,
    embeddings: bool = False,
) -> Manifest:
    """Exports a base and an adapter as the bundle `out` and returns its manifest.

    - `base`: a Hugging Face folder, a GGUF file, a hub id or `smollm2-135m`.
    - `adapter`: adapter folder of `train`, or a LoRA of PEFT; None exports the base alone.
    - `precision`: fp32, fp16, int8 or int4. `block_size`: weights that share a scale in int4, 32 (default) or 128.
    - `force`: replaces an existing bundle.
    - `progress`: called with one line per step (default: prints to stderr).
    - `stream_weights`: how the stream LoRA of a staged recipe is stored: `merged` (a second copy of the last layers,
      the default) or `delta` (low-rank products beside the shared weights; the only one of eager streams).
    - `held_out`: data whose perplexity in the bundle and in PyTorch is written to `manifest.parity`, beside that of a
      general text (`bundle.precision_cost` says both in words).
    - `target`: the hardware that the graph is shaped for.
    - `prompt_format`: how prompts become text, where no adapter of `train` records it. Default: the base's chat
      template (or the one beside a LoRA of PEFT), else raw without a separator.
    - `allow_base_mismatch`: takes a LoRA of PEFT whose configuration names another base.
    - `kv_cache_dtype`: float32, or float16 for half the memory of keys and values; they are computed in float32.
    - `store`: answers or other texts that the runtime drafts from as well.
    - `drafter`: folder of a published drafter (EAGLE-3, DFlash, DSpark) of this base; `adapter` then has none.
    - `streams`: `deferred` (after acceptance) or `eager` (beside every node of the tree, in the pass that verifies it;
      of an adapter trained without the root token).
    - `exit_layer`: of the layers that `adapter` has an early exit at, the one to prune at; default: the last.
    - `self_draft`: layers to leave out, such as `3,7-9`, or of some the attention or the MLP, `4a,5-6m`; or `auto` (the
      best on `held_out`, or on a general text): a second, short graph without them over the same weights drafts for the
      whole model (`load(draft="self")`).
    - `embeddings`: the graph gives the target's last states, too, for `Session.embed`; not of fixed shapes.

    numpy reads and rounds the weights of a base alone, of the families of `without_torch.families.FACTS`, so that it
    becomes the same bundle without PyTorch; what a graph is compared with is then numpy's own pass.

    Raises StreamspecError; `out` then stays as it was.
    """
    say = progress or to_stderr
    need_torch(None if adapter is None else "an adapter")
    need_torch(None if held_out is None else "held-out data")
    need_torch(None if self_draft is None else "a model without some of its layers")
    kind = target.precision(precision, block_size)
    stream_weights = weights_of(streams, stream_weights, target.static)
    check_cache_dtype(kv_cache_dtype)
    resolved, described = resolve_pair(base, adapter, say, allow_base_mismatch)
    head = None if drafter is None else read_published(Path(drafter), resolved, described, target, kind)
    if self_draft is not None and (head is not None or (described is not None and described.streams is not None)):
        raise ConfigError("--self-draft beside a drafter", "one of them", "leave one out")
    if self_draft is not None and (target.static or target.device):
        given = "fixed shapes" if target.static else target.name
        raise ConfigError(f"--self-draft for {given}", "a bundle for CPUs, of any shapes", "leave one out")
    if embeddings and (target.static or target.capture):
        raise ConfigError("--embeddings for fixed shapes", "a graph that takes texts of any length", "leave one out")
    layout = choose_format(resolved, described, prompt_format)
    check_hidden_size(kind, read_config(resolved.path).hidden_size)
    if held_out is not None:
        held_out.read()  # its faults are reported before the long work
    stored = store.read(resolved.sha256) if store is not None else []
    with bundle_folder(out, force) as folder:
        say("loading the base")
        parts = replace(load_parts(resolved, described, head), embeddings=embeddings)
        tokenizer = copy_tokenizer(resolved, folder, described.path if described else None)
        if self_draft is not None:
            rows = _held_out_rows(held_out, parts, layout) or text_rows(tokenizer, parts.spec, slow=True)
            parts = with_short(parts, self_draft, [row.input_ids for row in rows], say)
        parts = replace(parts, spec=replace(parts.spec, cache_dtype=kv_cache_dtype))
        if exit_layer is not None:
            parts = replace(parts, streams=with_exit(parts.streams, parts.spec.layers, exit_layer))
        if streams != DEFERRED:
            parts = replace(parts, streams=eager(parts.streams, parts.spec))
        if target.static:
            parts = static_parts(parts, target, say)
        elif target.capture:
            parts = captured_parts(parts, target)
        manifest = replace(
            describe_bundle(parts, precision, tokenizer, layout),
            provider=target.name,
            block_size=block_size,
        )
        if store is not None:
            manifest = add_store(folder, manifest, stored, store.most, tokenizer)
        rows = _held_out_rows(held_out, parts, layout)
        texts = {ANSWERS: rows} | texts_for(precision, tokenizer, parts.spec, slow=parts.static is not None)
        reference = _compute_reference(parts, tokenizer, texts, say)
        parts = replace(parts, target=parts.target.weights_only())
        graph = _graph(parts, kind, tokenizer, stream_weights, say)
        say(f"writing the {precision} graph")
        manifest = replace(manifest, opset=_write_graphs(folder, graph, parts, target))
        static = parts.static is not None
        del graph, parts  # the session and the model need not be in memory together
        say(f"comparing with {reference.by}")
        manifest = _measured(manifest, folder, open_session(folder / MODEL, static=static), reference)
        if (folder / NATIVE).exists():
            manifest = _with_native(manifest, folder, reference, say)
        if manifest.captured is not None:
            manifest = _with_captured(manifest, manifest.captured, folder, reference)
        return complete(folder, manifest, say)


def check_cache_dtype(dtype: str) -> None:
    """Raises ConfigError for a type that no cache has."""
    if dtype not in DTYPES:
        raise ConfigError(f"a K/V cache of {dtype!r}", " or ".join(DTYPES), "correct --kv-cache-dtype")


def _held_out_rows(held_out: HeldOut | None, parts: Parts, layout: PromptFormat) -> list[TokenRow]:
    if held_out is None:
        return []
    return held_out.rows(parts.base, layout, parts.spec.context_length, parts.adapter.path if parts.adapter else None)


def resolve_pair(
    base: str | Path, adapter: str | Path | None, say: Progress, allow_base_mismatch: bool = False
) -> tuple[Base, Adapter | None]:
    """Resolves a base and reads an adapter. Raises AdapterError where they do not belong together."""
    described = read_adapter(Path(adapter)) if adapter is not None else None
    resolved = resolve_base(base, say)
    if described is not None:
        check_adapter(described, resolved, allow_base_mismatch, say)
    return resolved, described


def choose_format(base: Base, adapter: Adapter | None, given: PromptFormat | None) -> PromptFormat:
    """The adapter's prompt format, or the one given, or the base's chat template, or raw without a separator.

    Raises ConfigError for one given beside an adapter that records its own, and for chats without a chat template.
    """
    recorded = adapter.prompt_format if adapter else None
    if adapter is not None and recorded is not None and given is not None:
        raise ConfigError(
            f"a prompt format beside {adapter.path}",
            f"the one it was trained with ({recorded.kind})",
            "leave --format and --separator out",
        )
    own = given or format_of(base, adapter)
    if own.kind == "chat" and template_of(base, adapter.path if adapter else None) is None:
        raise ConfigError(
            f"the prompt format chat for {base.id}, which has no chat template",
            "a base with chat_template.jinja",
            "use --format raw, or put the template into the base's folder",
        )
    if own.kind == "chat":
        _check_template(base, adapter)
    return own


def _check_template(base: Base, adapter: Adapter | None) -> None:
    """Raises ConfigError where the chat template cannot render a message, with a system prompt or without."""
    names = ("bos_token", "eos_token")
    specials = {name: text for name in names if (text := special_token(base.path, name)) is not None}
    try:
        check_template(template_of(base, adapter.path if adapter else None) or b"", specials)
    except ConfigError as error:
        recorded = adapter is not None and adapter.prompt_format is not None
        advice = "mend it" if recorded else "mend it, or export with --format raw"
        raise ConfigError(f"{base.id}: {error.found}", error.expected, advice) from None


@dataclass(frozen=True)
class _Reference:
    """The reference's results over `tokens` and over texts (`measure_all`), to compare a graph with; `by`: of what."""

    by: str
    tokens: Array
    expected: Expected
    texts: Mapping[str, Measured]


def _compute_reference(
    parts: Parts, tokenizer: Tokenizer, texts: Mapping[str, Sequence[TokenRow]], say: Progress
) -> _Reference:
    tokens = passage(tokenizer, parts.spec.vocab, parts.spec.context_length)
    say(f"computing the reference in {computed_by(parts.target.model)}")
    expected = expect(parts.target.model, parts.streams, tokens, parts.most_rows or TREE_ROWS, parts.spec, say)
    return _Reference(computed_by(parts.target.model), tokens, expected, measure_all(parts.target.model, texts))


def _write_graphs(folder: Path, graph: StepGraph | StaticStepGraph, parts: Parts, target: Target) -> int:
    """Writes the step graph, the one of native operators and the small graphs beside it; returns the opset."""
    store = WeightStore(folder / DATA)
    eager = graph.streams is not None and graph.streams.eager  # native operators know no eager streams
    short = graph.without(parts.skipped) if isinstance(graph, StepGraph) and any(parts.skipped) else None
    if isinstance(graph, StepGraph) and not eager and (native := native_ops(graph.precision)) is not None:
        onnx.save(graph.build(store, native), folder / NATIVE)
        if short is not None:
            onnx.save(short.build(store, native), folder / SHORT_NATIVE)
    if short is not None:
        onnx.save(short.build(store, first=True), folder / SHORT)
    if isinstance(graph, StepGraph) and parts.captured:
        captured = CapturedStepGraph(
            graph.spec,
            graph.source,
            graph.precision,
            parts.captured,
            graph.streams,
            graph.candidates,
            graph.stream_weights,
            DEVICES[target.name].lacks,
        )
        onnx.save(captured.build(store), folder / CAPTURED)
    step = graph.build(store)
    onnx.save(step, folder / MODEL)
    if parts.static or parts.captured:
        onnx.save(choice_graph(parts.spec.vocab), folder / CHOICE)
    if target.device:
        onnx.save(compact_graph(graph_features(parts.spec, parts.streams, parts.candidates)), folder / COMPACT)
    opset: int = step.opset_import[0].version
    return opset


def _measured(manifest: Manifest, folder: Path, session: Any, reference: _Reference) -> Manifest:
    """The manifest with parity, perplexity, probe and size of the graph that `session` has open."""
    parity = check_parity(session, reference.expected, manifest.precision) | perplexities(session, reference.texts)
    parity |= {} if reference.by == TORCH else {"reference": reference.by}
    return replace(
        manifest,
        parity=parity,
        probe=make_probe(session, reference.tokens),
        weights_bytes=(folder / DATA).stat().st_size,
    )


def _with_native(manifest: Manifest, folder: Path, reference: _Reference, say: Progress) -> Manifest:
    """The manifest with the parity of the graph of native operators, where the library is here."""
    if why_not := native_library.why_not():
        say(f"the graph of native operators is not compared here: {why_not}")
        return manifest
    report = check_parity(open_session(folder / NATIVE), reference.expected, manifest.precision)
    return replace(manifest, parity=manifest.parity | {"native": report})


def _with_captured(manifest: Manifest, sizes: CallSizes, folder: Path, reference: _Reference) -> Manifest:
    """The manifest with the parity of the captured graph, which computes the same here as on a device."""
    features = captured_features(GraphFeatures.of_manifest(manifest), sizes)
    graph = CapturedGraph(open_session(folder / CAPTURED), sizes, features)
    report = check_parity(graph, reference.expected, manifest.precision)
    report |= {"sampled": check_sampled(graph, reference.expected.case)}
    return replace(manifest, parity=manifest.parity | {"captured": report})


def _graph(
    parts: Parts, kind: Precision | StaticPrecision, tokenizer: Tokenizer, stream_weights: str, say: Progress
) -> StepGraph | StaticStepGraph:
    source = weights(parts.target.weighed, parts.spec, kind, tokenizer, say)
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
    return StepGraph(
        parts.spec, source, kind, streams, tree, parts.candidates, stream_weights, embeddings=parts.embeddings
    )


def weights(model: Any, spec: DecoderSpec, precision: Precision, tokenizer: Tokenizer, say: Progress) -> Source:
    """The model's weights, smoothed where the precision rounds."""
    source = source_of(model, spec)
    if precision.simulation is None:
        return source
    if not precision.simulation.block:
        say(f"smoothing for {precision.name}")
        tokens = page(tokenizer, smooth.TEXT, spec.vocab, min(smooth.ROWS, spec.context_length))[None]
    else:
        tokens = calibration_tokens(tokenizer, spec)
        say(f"rounding on {tokens.size} tokens")
    return smooth.smooth(model, spec, source, tokens, precision.simulation)


def complete(folder: Path, manifest: Manifest, say: Progress) -> Manifest:
    """Writes the card and the manifest with the files' hashes. Raises BundleError for graphs that `load` refuses."""
    write_card(folder, manifest)
    for name in (MODEL, *OVER_MODEL):
        if (folder / name).exists():
            state(folder / name, manifest)
    say("hashing the files")
    manifest = finish(folder, manifest)
    check_graphs(folder, manifest)
    return manifest


def state(file: Path, manifest: Manifest) -> None:
    """Writes into the graph's metadata what the bundle's manifest says of it, for `load` to compare."""
    manifest = shortened(manifest) if file.name in (SHORT, SHORT_NATIVE) else manifest
    graph = onnx.load(file, load_external_data=False)
    stated = {entry.key: entry.value for entry in graph.metadata_props}
    onnx.helper.set_model_props(graph, stated | digests(manifest))
    onnx.save(graph, file)


def to_stderr(line: str) -> None:
    """Prints one line to stderr, the default `progress` of an export."""
    print(line, file=sys.stderr, flush=True)
