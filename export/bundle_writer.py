"""Exports a base and an adapter as a bundle: describe, check, build, quantize, compare with PyTorch, write.

Each step has a module of its own; this one has their order. A bundle appears whole or not at all.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Unpack

import onnx

from streamspec.adapters.dataset.token_rows import TokenRow
from streamspec.adapters.drafters.registry import check_drafted
from streamspec.adapters.reporting.quiet import our_words_only
from streamspec.atomic import sha256_file
from streamspec.background import Background
from streamspec.bundle.manifest import MODEL, Manifest
from streamspec.bundle.model_section import SHORT, SHORT_NATIVE
from streamspec.bundle.onnx_check import OVER_MODEL, check_graphs, digests, shortened
from streamspec.bundle.precision_cost import ANSWERS
from streamspec.bundle.write_files import bundle_folder, finish
from streamspec.export.answer_store import add_store
from streamspec.export.bundle_card import write_card
from streamspec.export.bundle_graphs import DATA, build_graph, write_graphs
from streamspec.export.bundle_parts import (
    describe_bundle,
    load_parts,
    say_of_open_turns,
    with_short,
    with_tokens,
)
from streamspec.export.described_base import read_base
from streamspec.export.drafters.published.read import read_published
from streamspec.export.options import ExportKwargs, ExportOptions, Progress
from streamspec.export.quantization.method import told
from streamspec.export.quantization.precisions import check_hidden_size
from streamspec.export.validate.bundle_parity import compute_reference
from streamspec.export.validate.measured_text import text_rows, texts_for
from streamspec.export.weights.target import need_torch


@our_words_only()
def export_bundle(
    base: str | Path,
    adapter: str | Path | None,
    out: str | Path,
    precision: str | None = None,
    *,
    options: ExportOptions | None = None,
    **keywords: Unpack[ExportKwargs],
) -> Manifest:
    """Exports a base and an adapter as the bundle `out` and returns its manifest.

    - `base`: a Hugging Face folder, a GGUF file, a hub id or `smollm2-135m`.
    - `adapter`: adapter folder of `train`, or a LoRA of PEFT; None exports the base alone.
    - `precision`: fp32, fp16, int8 (the default) or int4.
    - Other options come as keywords or as one `ExportOptions`, which says what they are.

    numpy reads and rounds the weights of a base alone, of the families of `without_torch.families.FACTS`, so that it
    becomes the same bundle without PyTorch; what a graph is compared with is then numpy's own pass.

    Raises StreamspecError; `out` then stays as it was.
    """
    options = replace(options or ExportOptions(), **keywords)
    if precision is not None:
        options = replace(options, precision=precision)
    say = options.progress or to_stderr
    _need_torch(adapter is not None, options)
    rounded = options.target.precision(options.precision, options.block_size)
    options.check()
    alone = adapter is None and options.base_alone
    described = read_base(base, adapter, options.prompt_format, options.allow_base_mismatch, say, alone)
    if described.adapter is not None:
        check_drafted(described.adapter.method, described.config)
    options.check_family(described.config, described.drafts)
    head = None if options.head is None else read_published(options.head, described, rounded)
    check_hidden_size(rounded, described.config.hidden_size)
    if options.held_out is not None:
        options.held_out.read()  # its faults are reported before the long work
    stored = options.store.read(described.base.sha256) if options.store is not None else []
    with bundle_folder(out, options.force) as folder:
        say("loading the base")
        tokenizer = described.copy_tokenizer(folder)
        parts = with_tokens(load_parts(described, head, options, say), tokenizer, options.draft_vocab)
        rows = list[TokenRow]()
        if options.held_out is not None:
            about, length = described.format, parts.spec.context_length
            rows = options.held_out.rows(described.base, about, length, described.adapter_path)
        if options.self_draft is not None:
            texts = rows or text_rows(tokenizer, parts.spec, slow=True)
            parts = with_short(parts, options.self_draft, [row.input_ids for row in texts], say)
        if options.measure or described.base.gguf is None:
            say(told(parts.spec, options.precision, options.quant_method))
        manifest = describe_bundle(parts, options.precision, tokenizer)
        say_of_open_turns(manifest, described, tokenizer, say)
        manifest = replace(manifest, provider=options.target.name, block_size=options.block_size)
        if options.store is not None:
            manifest = add_store(folder, manifest, stored, options.store.most, tokenizer)
        slow = parts.static is not None
        measured = texts_for(options.precision, tokenizer, parts.spec, slow) if options.measure else {}
        read, brief = {ANSWERS: rows} | measured, not options.measure
        computing = Background(partial(compute_reference, parts, tokenizer, read, say, brief=brief))
        if not parts.target.read_at_once:
            computing.result()
        parts = replace(parts, target=parts.target.weights_only())
        graph = build_graph(parts, rounded, options.stream_storage, tokenizer, say, options.quant_method, folder)
        say(f"writing the {options.precision} graph")
        manifest = replace(manifest, opset=write_graphs(folder, graph, parts, options.target))
        del graph, parts  # the session and the model need not be in memory together
        hashes = {DATA: sha256_file(folder / DATA)}
        reference = computing.result()
        say(f"comparing with {reference.by}")
        return complete(folder, reference.compare(manifest, folder, say), say, hashes)


def _need_torch(adapts: bool, options: ExportOptions) -> None:
    """Raises ConfigError for what needs PyTorch, where it is not installed."""
    need_torch("an adapter" if adapts else None)
    need_torch(None if options.held_out is None else "held-out data")
    need_torch(None if options.self_draft is None else "a model without some of its layers")


def complete(
    folder: Path, manifest: Manifest, say: Progress, hashes: Mapping[str, str] = MappingProxyType({})
) -> Manifest:
    """Writes the card and the manifest with the files' hashes, some of which are known. Raises BundleError for graphs
    that `load` refuses."""
    write_card(folder, manifest)
    for name in (MODEL, *OVER_MODEL):
        if (folder / name).exists():
            state(folder / name, manifest)
    say("hashing the files")
    manifest = finish(folder, manifest, hashes)
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
