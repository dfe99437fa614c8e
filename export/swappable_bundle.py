"""Exports swappable bundles and their adapters: the base's graph once, with room for the given adapters, and each
adapter as a folder of its own.

Smoothed for the base alone; the scales are kept beside the graph (`SCALES`), since an adapter reads and writes scaled
rows. Every adapter is compared with PyTorch as a merged export would be.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import onnx
from tokenizers import Tokenizer

from streamspec import __version__
from streamspec.adapters.base_models.resolve import Base, resolve_base
from streamspec.adapters.reporting.quiet import our_words_only
from streamspec.adapters.task_lora import check_adapter
from streamspec.atomic import new_folder
from streamspec.bundle.adapter_folder import TASK_CONFIG, Adapter, more_than_low_rank, read_adapter, read_json
from streamspec.bundle.files import verify_files
from streamspec.bundle.manifest import MODEL, TOKENIZER, BaseInfo, DraftTreeInfo, Manifest, plain_name
from streamspec.bundle.onnx_check import check_graphs
from streamspec.bundle.swappable_adapters import (
    ADAPTERS,
    METHODS,
    SCALES,
    TENSORS,
    SwappableAdapter,
    check_swappable,
    fingerprint,
    write,
)
from streamspec.bundle.write_files import bundle_folder
from streamspec.errors import AdapterError, BundleError, ConfigError
from streamspec.export.bundle_graphs import DATA, weights
from streamspec.export.bundle_parts import (
    DEFAULT_ROWS,
    Parts,
    absent_tokens,
    describe_bundle,
    say_of_open_turns,
    with_tokens,
)
from streamspec.export.bundle_writer import complete, to_stderr
from streamspec.export.described_base import DescribedBase, describe_base
from streamspec.export.drafters.adapter_section import read_nodes
from streamspec.export.drafters.registry import DRAFTERS, read_drafter
from streamspec.export.drafters.streams.spec import StreamSpec
from streamspec.export.graphs.dynamic_step_graph import StepGraph
from streamspec.export.graphs.swappable_step_graph import SwappableStore, adapter_rows, empty_streams
from streamspec.export.ops.builder import Array
from streamspec.export.options import Progress, check_cache_dtype, check_family
from streamspec.export.quantization.lora_inputs import PIECE
from streamspec.export.quantization.precisions import Precision, check_hidden_size
from streamspec.export.quantization.precisions import precision as precision_named
from streamspec.export.quantization.smoothing import Scales, SmoothedSource
from streamspec.export.runners.graph_runner import open_session
from streamspec.export.spec.decoder_spec import DecoderSpec
from streamspec.export.swappable_tensors import adapter_tensors, capacity_for, fitting_info
from streamspec.export.validate.bundle_parity import compute_reference
from streamspec.export.validate.measured_text import texts_for
from streamspec.export.validate.parity import check_parity, expect, passage
from streamspec.export.weights.model_spec import describe
from streamspec.export.weights.target import need_torch, read_target
from streamspec.layer_cache import DTYPES
from streamspec.prompt.prompt_format import PromptFormat
from streamspec.prompt.template_file import special_token
from streamspec.step_graph import STREAM_LORA, TASK_LORA


@our_words_only()
def export_swappable(
    base: str | Path,
    adapters: Sequence[str | Path],
    out: str | Path,
    precision: str = "int8",
    force: bool = False,
    progress: Progress | None = None,
    prompt_format: PromptFormat | None = None,
    allow_base_mismatch: bool = False,
    kv_cache_dtype: str | None = None,
) -> Manifest:
    """Exports `base` as the swappable bundle `out`, with `adapters` in it, and returns its manifest.

    Each adapter gets its folder's name. The graph reserves capacity for these adapters; `adapt` adds further ones that
    need no more. Other arguments as for `export_bundle`; `prompt_format` is that of the base and of adapters that
    record none. Raises also AdapterError for drafters other than streams, for a LoRA that is more than low-rank updates
    of linear maps, and for one with a chat template or an end token of its own.
    """
    need_torch("a swappable bundle")
    if precision == "fp16":
        raise ConfigError("a swappable bundle in fp16", "fp32, int8 or int4: it runs on CPUs", "choose one of them")
    check_cache_dtype(kv_cache_dtype)
    say, rounded = progress or to_stderr, precision_named(precision)
    resolved = resolve_base(base, say)
    described = describe_base(resolved, None, prompt_format)
    check_family(described.config, "a swappable bundle")
    named = {_name(Path(path).resolve().name): read_adapter(Path(path)) for path in adapters}
    if len(named) < len(adapters):
        raise ConfigError(
            "two adapters of one name",
            "folders with names of their own",
            "rename one, or add it later with `streamspec adapt --name`",
        )
    for name, adapter in named.items():
        check_adapter(adapter, resolved, allow_base_mismatch, say)
        _check(adapter)
        named[name] = _with_format(adapter, described, prompt_format)
    check_hidden_size(rounded, described.config.hidden_size)
    with bundle_folder(out, force) as folder:
        bundle = _write_base(folder, described, list(named.values()), rounded, kv_cache_dtype or DTYPES[0], say)
        for name, adapter in named.items():
            say(f"adapter {name}")
            (folder / ADAPTERS / name).mkdir(parents=True)
            _write(folder / ADAPTERS / name, bundle, resolved, adapter)
        return bundle.manifest


@dataclass(frozen=True)
class _Bundle:
    """The bundle that adapters are made for. `tokens`: graphs are compared on them; `absent`: rows that are none."""

    manifest: Manifest
    session: Any
    tokens: Array
    scales: Scales
    absent: tuple[int, ...]


def _write_base(
    folder: Path,
    described: DescribedBase,
    adapters: Sequence[Adapter],
    kind: Precision,
    cache_dtype: str,
    say: Progress,
) -> _Bundle:
    """Writes the bundle of the base alone, with room for the drafters of `adapters`."""
    say("loading the base")
    target = read_target(described.base, None, whole=False)
    spec = replace(target.spec, cache_dtype=cache_dtype)
    room = capacity_for([_drafter(adapter, spec) for adapter in adapters if adapter.streams is not None], spec)
    tokenizer = described.copy_tokenizer(folder)
    parts = with_tokens(Parts(described, target, spec, None, None, room.candidates), tokenizer)
    spec = parts.spec
    reference = compute_reference(parts, tokenizer, texts_for(kind.name, tokenizer, spec), say)
    source = weights(target.weighed, spec, kind, tokenizer, say)
    say(f"writing the {kind.name} graph")
    store = SwappableStore(folder / DATA, adapter_rows(spec, room, kind, source.bias("lm_head.bias") is not None))
    graph = StepGraph(spec, source, kind, empty_streams(spec, room), None, room.candidates, room=room)
    onnx.save(graph.build(store), folder / MODEL)
    scales = source.scales if isinstance(source, SmoothedSource) else Scales()
    if scales.columns or scales.mixed:
        scales.save(folder / SCALES)
    manifest = describe_bundle(parts, kind.name, tokenizer)
    say_of_open_turns(manifest, described, tokenizer, say)
    for adapter in adapters:
        _check_end(adapter, manifest, tokenizer)
    del graph, source, target, parts  # the session and the model need not be in memory together
    say(f"comparing with {reference.by}")
    session = open_session(folder / MODEL)
    manifest = replace(reference.measure(manifest, folder, session), swappable=room)
    return _Bundle(complete(folder, manifest, say), session, reference.tokens, scales, spec.absent)


@our_words_only()
def adapt(
    bundle: str | Path,
    adapter: str | Path,
    name: str | None = None,
    out: str | Path | None = None,
    base: str | Path | None = None,
    force: bool = False,
    progress: Progress | None = None,
    prompt_format: PromptFormat | None = None,
    allow_base_mismatch: bool = False,
) -> Path:
    """Converts an adapter folder for a swappable bundle and returns the folder it wrote.

    - `name`: the adapter's name in the bundle (default: its folder's). `out`: a folder to write to instead.
    - `base`: the bundle's base, if the id in its manifest does not lead to it.
    - `force`: replaces an existing adapter of that name.
    - `prompt_format`, `allow_base_mismatch`: of a LoRA of PEFT, as for `export_bundle`.

    Writes the folder whole or not at all. Raises AdapterError for an adapter of another base or one that exceeds the
    bundle's capacity, BundleError and ConfigError.
    """
    need_torch("an adapter")
    say, folder, source = progress or to_stderr, Path(bundle), Path(adapter)
    manifest = verify_files(folder)
    check_swappable(manifest)
    check_graphs(folder, manifest)
    target = Path(out) if out is not None else folder / ADAPTERS / _name(name or source.resolve().name)
    if name is not None and out is not None:
        raise ConfigError("--name and --out together", "one of them", "name the folder with --out")
    if os.path.lexists(target) and not (force and (target / TENSORS).is_file()):
        raise AdapterError(
            f"{target} is there already", "a new folder, or with --force an adapter to replace", "choose another name"
        )
    described = read_adapter(source)
    described.check_base(manifest.base.id, manifest.base.sha256)
    _check(described)
    resolved = resolve_base(base or manifest.base.id, say)
    if resolved.sha256 != manifest.base.sha256:
        raise AdapterError(
            f"{resolved.id} (weights {resolved.sha256[:12]})",
            f"the bundle's base, {manifest.base.id} (weights {manifest.base.sha256[:12]})",
            "name it with --base",
        )
    check_adapter(described, resolved, allow_base_mismatch, say)
    described = _with_format(described, describe_base(resolved, None, manifest.prompt_format), prompt_format)
    try:
        tokenizer, session = Tokenizer.from_file(str(folder / TOKENIZER)), open_session(folder / MODEL)
    except Exception as error:  # neither library has a class of its own for this
        raise BundleError(
            f"{folder}: {error}", "a tokenizer and a graph that load", "export the bundle again"
        ) from None
    _check_end(described, manifest, tokenizer)
    tokens = passage(tokenizer, manifest.model.vocab_size, manifest.model.context_length)
    scales = Scales.load(folder / SCALES) if SCALES in manifest.files else Scales()
    absent = absent_tokens(tokenizer, manifest.model.vocab_size, manifest.model.eos_token_ids)
    opened = _Bundle(manifest, session, tokens, scales, absent)
    with new_folder(target) as staging:
        say("loading the base with the adapter, computing the reference in PyTorch")
        _write(staging, opened, resolved, described)
    return target


def _write(folder: Path, bundle: _Bundle, base: Base, adapter: Adapter) -> None:
    """Writes an adapter, converted for the bundle, into an empty folder."""
    import onnxruntime as ort

    manifest, kind = bundle.manifest, precision_named(bundle.manifest.precision)
    room = manifest.swappable
    assert room is not None
    from streamspec.export.weights.load_weights import ModelSource, load_model, task_lora

    model = load_model(base, adapter, whole=False)
    spec = replace(describe(model), absent=bundle.absent)
    streams = _drafter(adapter, spec) if adapter.streams is not None else None
    info = fitting_info(adapter, streams, room, spec)
    task = task_lora(model, adapter, spec)
    tensors = adapter_tensors(
        ModelSource(model, spec),
        spec,
        room,
        kind,
        bundle.scales.lora(task, spec),
        streams and replace(streams, lora=bundle.scales.lora(streams.lora, spec)),
    )
    parity = check_parity(bundle.session, expect(model, streams, bundle.tokens, spec=spec), manifest.precision, tensors)
    nodes = read_nodes(adapter, streams.gamma, room.candidates) if streams else ()
    ranks = {
        TASK_LORA: max((len(a) for a, _ in task.values()), default=0),
        STREAM_LORA: max((len(a) for a, _ in streams.lora.values()), default=0) if streams else 0,
    }
    packed = ort.AdapterFormat()
    packed.set_adapter_version(1)
    packed.set_model_version(1)
    packed.set_parameters({name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in tensors.items()})
    try:
        packed.export_adapter(str(folder / TENSORS))
    except RuntimeError as error:  # of ONNX Runtime, such as where the disk is full
        raise OSError(errno.EIO, f"cannot be written ({str(error).splitlines()[0]})", str(folder / TENSORS)) from None
    tools = {"streamspec": __version__} | {
        name: version(name) for name in ("onnxruntime", "torch", "transformers", "peft")
    }
    write(
        folder,
        SwappableAdapter(
            base=BaseInfo(base.id, base.sha256, base.model_type, base.revision),
            graph=fingerprint(manifest),
            method=adapter.method,
            recipe=adapter.recipe,
            prompt_format=adapter.prompt_format or PromptFormat(),
            streams=info,
            trees=DraftTreeInfo(nodes, min(DEFAULT_ROWS, len(nodes))) if nodes else None,
            ranks=ranks,
            parity=parity,
            tools=tools,
        ),
        manifest,
    )


def _with_format(adapter: Adapter, base: DescribedBase, prompt_format: PromptFormat | None) -> Adapter:
    """The adapter with its prompt format. Raises AdapterError where it has a chat template of its own: a swappable
    bundle has the base's.
    """
    described = describe_base(base.base, adapter, prompt_format if adapter.prompt_format is None else None)
    if described.format.kind == "chat" and described.template != base.template:
        raise _not_here(adapter, "a chat template of its own", "the base's chat template")
    return replace(adapter, prompt_format=described.format)


def _check_end(adapter: Adapter, bundle: Manifest, tokenizer: Tokenizer) -> None:
    """Raises AdapterError where the adapter ends its answers with a token at which the bundle does not stop."""
    text = special_token(adapter.path, "eos_token")
    if text is not None and tokenizer.token_to_id(text) not in (None, *bundle.model.eos_token_ids):
        raise _not_here(adapter, f"an end token of its own, {text}", "the base's end tokens")


def _not_here(adapter: Adapter, found: str, expected: str) -> AdapterError:
    return AdapterError(f"{adapter.path}: {found}", expected, "export it merged, without --swappable")


def _check(adapter: Adapter) -> None:
    """Raises AdapterError for a drafter that is not streams, and for a task LoRA that a swappable graph cannot take."""
    if adapter.streams is not None and not DRAFTERS[adapter.method].swappable:
        raise _not_here(adapter, f"a drafter of method {adapter.method}", " or ".join(METHODS))
    if odd := [name for name in ("value_rotation", "start_rank") if (adapter.streams or {}).get(name)]:
        raise _not_here(adapter, f"streams with {' and '.join(odd)}", "streams without")
    if adapter.has_task_lora and (more := more_than_low_rank(adapter.path)):
        raise _not_here(adapter, f"a task LoRA with {' and '.join(more)}", "low-rank updates of linear maps alone")
    rank = _rank(adapter)
    if rank > PIECE:
        raise AdapterError(
            f"{adapter.path}: a task LoRA of rank {rank}",
            f"at most {PIECE}: longer sums depend on a row's siblings",
            "cut it with `streamspec shrink`",
        )


def _rank(adapter: Adapter) -> int:
    """The largest of the task LoRA, as PEFT's configuration says."""
    if not adapter.has_task_lora:
        return 0
    config = read_json(adapter.path / TASK_CONFIG)
    ranks = [config.get("r"), *(config.get("rank_pattern") or {}).values()]
    return max((rank for rank in ranks if isinstance(rank, int)), default=0)


def _name(name: str) -> str:
    if not plain_name(name):
        raise ConfigError(f"an adapter named {name[:100]!r}", "a plain folder name", "name it with --name")
    return name


def _drafter(adapter: Adapter, spec: DecoderSpec) -> StreamSpec:
    """An adapter's streams, with an early exit where they begin or none: a swappable graph has no other."""
    streams = cast(StreamSpec, read_drafter(adapter, spec))
    exits = [exit for exit in streams.exits if exit.layer in (None, streams.first_layer(spec.layers))]
    return replace(streams, pruning=replace(exits[0], layer=None) if exits else None)
