"""Swappable bundles and their adapters, written: the base's graph once, with room for all adapters asked for, and each
adapter as a folder of its own.

Smoothed for the base alone; the scales are kept beside the graph (`SCALES`), since an adapter reads and writes scaled
rows. Every adapter is compared with PyTorch as a merged export would be.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx
from tokenizers import Tokenizer

from streamspec import __version__
from streamspec.adapters.base_models.resolve import Base, resolve_base
from streamspec.atomic import new_folder
from streamspec.bundle.adapter_folder import TASK_CONFIG, Adapter, read_adapter, read_json
from streamspec.bundle.manifest import (
    BIGRAM_CANDIDATES,
    DRAFT_CANDIDATES,
    MODEL,
    TEMPLATE,
    TOKENIZER,
    BaseInfo,
    DrafterInfo,
    DraftTreeInfo,
    Manifest,
    SwappableCapacity,
    bundle_folder,
    finish,
    plain_name,
    verify_files,
)
from streamspec.bundle.onnx_check import check_graphs
from streamspec.bundle.swappable import (
    ADAPTERS,
    METHODS,
    SCALES,
    TENSORS,
    SwappableAdapter,
    check_swappable,
    fingerprint,
    write,
)
from streamspec.errors import AdapterError, BundleError, ConfigError
from streamspec.export.bundle_card import write_card
from streamspec.export.bundle_writer import (
    DATA,
    DEFAULT_ROWS,
    Parts,
    Progress,
    describe_bundle,
    to_stderr,
    weights,
)
from streamspec.export.drafters.adapter_section import read_nodes
from streamspec.export.drafters.base import DraftSpec, Lora
from streamspec.export.drafters.streams import StreamSpec
from streamspec.export.drafters.table import read_drafter
from streamspec.export.graphs.step_graph import StepGraph
from streamspec.export.graphs.swappable import SwappableStore, adapter_rows, empty_streams, update
from streamspec.export.layers.decoder import Decoder
from streamspec.export.layers.decoder_spec import DecoderSpec, describe
from streamspec.export.quantization.arithmetic import NO_SATURATION, Array, quantise_rows
from streamspec.export.quantization.precisions import Fp32, Precision
from streamspec.export.quantization.precisions import precision as precision_named
from streamspec.export.quantization.smoothing import Scales, SmoothedSource
from streamspec.export.tokenizer_files import copy_tokenizer
from streamspec.export.validate.graph_runner import open_session
from streamspec.export.validate.parity import check_parity, expect, make_probe, passage
from streamspec.export.weights.load_weights import ModelSource, load_model, task_lora
from streamspec.export.weights.lora_inputs import PIECE
from streamspec.step_graph import (
    BIGRAM_IN,
    BIGRAM_OUT,
    DRAFT_HEAD_BIAS,
    DRAFT_HEAD_FLOAT,
    DRAFT_HEAD_INT8,
    DRAFT_HEAD_SCALE,
    DRAFT_VOCAB,
    EXIT_DOWN,
    EXIT_UP,
    STREAM_BEGIN,
    STREAM_EMBEDDINGS,
    STREAM_LORA,
    STREAM_ROOT_MAP,
    STREAM_SHARES,
    STREAM_SHIFT,
    TASK_LORA,
)


def export_swappable(
    base: str | Path,
    adapters: Sequence[str | Path],
    out: str | Path,
    precision: str = "int8",
    force: bool = False,
    progress: Progress | None = None,
) -> Manifest:
    """Writes the swappable bundle `out` of `base` with `adapters` in it, each under the name of its folder, and returns
    its manifest.

    The graph has room for the drafters of these adapters, and for any that has no more (`adapt`). `precision`,
    `progress` and errors as for `export_bundle`; AdapterError also for drafters other than streams and for a LoRA that
    is more than low-rank updates of linear maps.
    """
    if precision == "fp16":
        raise ConfigError("a swappable bundle in fp16", "fp32, int8 or int4: it runs on CPUs", "choose one of them")
    say, kind = progress or to_stderr, precision_named(precision)
    found = resolve_base(base, say)
    described = {_name(Path(path).resolve().name): read_adapter(Path(path)) for path in adapters}
    if len(described) < len(adapters):
        raise ConfigError(
            "two adapters of one name",
            "folders with names of their own",
            "rename one, or add it later with `streamspec adapt --name`",
        )
    for adapter in described.values():
        _check(adapter, found.id, found.sha256)
    with bundle_folder(out, force) as folder:
        say("loading the base")
        model = load_model(found, None, whole=False)
        spec = describe(model)
        room = _room([read_drafter(one, spec) for one in described.values() if one.streams is not None], spec)
        tokenizer = copy_tokenizer(found, folder)
        tokens = passage(tokenizer, spec.vocab, spec.context_length)
        say("asking PyTorch")
        expected = expect(model, None, tokens)
        source = weights(model, spec, kind, tokenizer, say)
        say(f"writing the {precision} graph")
        store = SwappableStore(folder / DATA, adapter_rows(spec, room, kind, source.bias("lm_head.bias") is not None))
        graph = StepGraph(spec, source, kind, empty_streams(spec, room), None, room.candidates, room=room)
        onnx.save(graph.build(store), folder / MODEL)
        scales = source.scales if isinstance(source, SmoothedSource) else Scales()
        if scales.columns:
            scales.save(folder / SCALES)
        parts = Parts(found, None, None, spec, None, None, room.candidates)
        del graph, source, model
        say("comparing with what PyTorch said")
        session = open_session(folder / MODEL)
        manifest = describe_bundle(parts, precision, tokenizer, (folder / TEMPLATE).is_file())
        manifest = replace(
            manifest,
            swappable=room,
            weights_bytes=(folder / DATA).stat().st_size,
            parity=check_parity(session, expected, precision),
            probe=make_probe(session, tokens),
        )
        write_card(folder, manifest)
        say("hashing the files")
        manifest = finish(folder, manifest)
        check_graphs(folder, manifest)
        for name, adapter in described.items():
            say(f"adapter {name}")
            (folder / ADAPTERS / name).mkdir(parents=True)
            _write(folder / ADAPTERS / name, _Bundle(manifest, session, tokens, scales), found, adapter)
        return manifest


def adapt(
    bundle: str | Path,
    adapter: str | Path,
    name: str | None = None,
    out: str | Path | None = None,
    base: str | Path | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Makes an adapter folder fit for a swappable bundle; returns where it lies: in the bundle as `name` (default: its
    folder's), or in `out`.

    `base`: the bundle's own, where its name alone does not lead to it. The folder appears whole or not at all, and
    replaces an older one with `force` only. Raises AdapterError for one of another base or with more than the bundle
    has room for, BundleError, ConfigError.
    """
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
    _check(described, manifest.base.id, manifest.base.sha256)
    found = resolve_base(base or manifest.base.id, say)
    if found.sha256 != manifest.base.sha256:
        raise AdapterError(
            f"{found.id} (weights {found.sha256[:12]})",
            f"the bundle's base, {manifest.base.id} (weights {manifest.base.sha256[:12]})",
            "name it with --base",
        )
    try:
        tokenizer, session = Tokenizer.from_file(str(folder / TOKENIZER)), open_session(folder / MODEL)
    except Exception as error:  # neither library has a class of its own for this
        raise BundleError(
            f"{folder}: {error}", "a tokenizer and a graph that load", "export the bundle again"
        ) from None
    tokens = passage(tokenizer, manifest.model.vocab_size, manifest.model.context_length)
    opened = _Bundle(manifest, session, tokens, Scales.load(folder / SCALES) if SCALES in manifest.files else Scales())
    with new_folder(target) as staging:
        say("loading the base with the adapter, asking PyTorch")
        _write(staging, opened, found, described)
    return target


@dataclass(frozen=True)
class _Bundle:
    """The bundle that adapters are made for. `tokens`: graphs are compared on them."""

    manifest: Manifest
    session: Any
    tokens: Array
    scales: Scales


def _write(folder: Path, bundle: _Bundle, base: Base, adapter: Adapter) -> None:
    """Fills an empty folder."""
    import onnxruntime as ort

    manifest, kind = bundle.manifest, precision_named(bundle.manifest.precision)
    room = manifest.swappable
    assert room is not None
    model = load_model(base, adapter, whole=False)
    spec = describe(model)
    streams = cast(StreamSpec, read_drafter(adapter, spec)) if adapter.streams is not None else None
    info = _described(adapter, streams, room, spec)
    task = task_lora(model, adapter, spec)
    brought = tensors(
        ModelSource(model, spec),
        spec,
        room,
        kind,
        bundle.scales.lora(task, spec),
        streams and replace(streams, lora=bundle.scales.lora(streams.lora, spec)),
    )
    parity = check_parity(bundle.session, expect(model, streams, bundle.tokens), manifest.precision, brought)
    nodes = read_nodes(adapter, streams.gamma, room.candidates) if streams else ()
    ranks = {
        TASK_LORA: max((len(a) for a, _ in task.values()), default=0),
        STREAM_LORA: max((len(a) for a, _ in streams.lora.values()), default=0) if streams else 0,
    }
    packed = ort.AdapterFormat()
    packed.set_adapter_version(1)
    packed.set_model_version(1)
    packed.set_parameters({name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in brought.items()})
    packed.export_adapter(str(folder / TENSORS))
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
            prompt_format=adapter.prompt_format,
            streams=info,
            trees=DraftTreeInfo(nodes, min(DEFAULT_ROWS, len(nodes))) if nodes else None,
            ranks=ranks,
            parity=parity,
            tools=tools,
        ),
        manifest,
    )


def tensors(
    source: ModelSource,
    spec: DecoderSpec,
    room: SwappableCapacity,
    precision: Precision,
    task: Lora,
    streams: StreamSpec | None,
) -> dict[str, Array]:
    """Values of the graph's inputs that an adapter fills (`swappable.adapter_rows`). `task`, `streams`: in the
    coordinates of the graph. Updates of rank 0 are left out.
    """
    out: dict[str, Array] = {}
    for part, lora in ((TASK_LORA, task), (STREAM_LORA, streams.lora if streams else {})):
        for layer in range(spec.layers) if lora else ():
            for modules in spec.fused:
                out |= update(spec, layer, modules, part).tensors(
                    [lora.get((layer, module)) for module in modules], precision.coded
                )
    if streams is not None:
        out |= _stream_tensors(source, spec, room, precision, streams)
    rows = adapter_rows(spec, room, precision, source.bias("lm_head.bias") is not None)
    dtypes = {row.name: row.dtype for row in rows}
    return {name: np.ascontiguousarray(array, dtypes[name]) for name, array in out.items()}


def _stream_tensors(
    source: ModelSource, spec: DecoderSpec, room: SwappableCapacity, precision: Precision, streams: StreamSpec
) -> dict[str, Array]:
    ones = np.ones((streams.gamma, 2), np.float32)
    shares = ones if streams.shares is None else streams.shares
    out: dict[str, Any] = {
        STREAM_BEGIN: [room.ns.index(streams.ns)],
        STREAM_SHIFT: [int(streams.shifted)],
        STREAM_EMBEDDINGS: (streams.embeddings * streams.scale)[None],
    }
    out |= {STREAM_SHARES[which]: shares[None, :, which : which + 1] for which in (0, 1)}
    if room.root_token:
        out[STREAM_ROOT_MAP] = (
            np.zeros((spec.hidden, spec.hidden)) if streams.root_map is None else (streams.root_map * streams.scale).T
        )
    vocabulary = np.arange(spec.vocab) if streams.draft_vocab is None else streams.draft_vocab
    if room.bigram:
        none = np.zeros((len(vocabulary), 0))
        out |= dict(zip((BIGRAM_IN, BIGRAM_OUT), streams.bigram or (none, none), strict=True))
    if streams.pruning is not None and room.pruning and streams.ns == room.ns[0]:
        out |= {EXIT_DOWN: streams.pruning.down.T, EXIT_UP: streams.pruning.up.T}
    if not room.draft_vocab:
        return out
    rows = Decoder(spec, source, precision).head_weight().load()[vocabulary]
    out[DRAFT_VOCAB] = vocabulary
    if isinstance(precision, Fp32):
        out[DRAFT_HEAD_FLOAT] = rows.T
    else:
        codes, out[DRAFT_HEAD_SCALE] = quantise_rows(rows, NO_SATURATION)
        out[DRAFT_HEAD_INT8] = codes.T
    bias = source.bias("lm_head.bias")
    return out if bias is None else out | {DRAFT_HEAD_BIAS: bias[vocabulary]}


def _room(drafters: Sequence[DraftSpec], spec: DecoderSpec) -> SwappableCapacity:
    """Enough for all of them."""
    streams = [cast(StreamSpec, one) for one in drafters]  # `_check` refuses all others
    ns, bigram = tuple(sorted({one.ns for one in streams}, reverse=True)), any(one.bigram for one in streams)
    lists = [len(one.draft_vocab) for one in streams if one.draft_vocab is not None]
    return SwappableCapacity(
        ns=ns,
        candidates=min(BIGRAM_CANDIDATES if bigram else DRAFT_CANDIDATES, spec.vocab, *lists),
        root_token=any(one.root_map is not None for one in streams),
        bigram=bigram,
        pruning=any(one.pruning is not None and one.ns == ns[0] for one in streams),
        draft_vocab=bool(lists),
    )


def _described(
    adapter: Adapter, streams: StreamSpec | None, room: SwappableCapacity, spec: DecoderSpec
) -> DrafterInfo | None:
    """The drafter as the manifest says it. Raises AdapterError where the bundle has no room for it."""
    if streams is None:
        return None
    own = _room([streams], spec)
    more = [
        name.replace("_", " ")
        for name in ("root_token", "bigram", "draft_vocab")
        if getattr(own, name) and not getattr(room, name)
    ]
    if streams.ns not in room.ns:
        more = [f"streams over {streams.ns} layers, not {' or '.join(map(str, room.ns)) or 'none'}", *more]
    if room.candidates > (len(streams.draft_vocab) if streams.draft_vocab is not None else spec.vocab):
        more.append(f"fewer draft tokens than {room.candidates} candidates")
    if more:
        raise AdapterError(
            f"{adapter.path}: {', '.join(more)}",
            "a drafter that the bundle has room for",
            "export the bundle with this adapter among --adapter",
        )
    pruning = streams.pruning is not None and room.pruning and streams.ns == room.ns[0]
    return replace(streams.info(room.candidates), pruning=pruning)


def _check(adapter: Adapter, base: str, sha256: str) -> None:
    adapter.check_base(base, sha256)
    if adapter.method not in METHODS:
        raise AdapterError(
            f"{adapter.path}: a drafter of method {adapter.method}",
            " or ".join(METHODS),
            "export it merged, without --swappable",
        )
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
