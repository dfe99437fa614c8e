"""Converts an adapter to the inputs of a swappable graph, and checks that the bundle has room for it."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np

from streamspec.bundle.adapter_folder import Adapter
from streamspec.bundle.manifest import BIGRAM_CANDIDATES, DRAFT_CANDIDATES, DrafterInfo, SwappableCapacity
from streamspec.errors import AdapterError
from streamspec.export.drafters.streams.spec import StreamSpec
from streamspec.export.graphs.swappable_step_graph import adapter_rows, update
from streamspec.export.layers.decoder import Decoder
from streamspec.export.ops.builder import Array
from streamspec.export.quantization.arithmetic import NO_SATURATION, quantize_rows
from streamspec.export.quantization.precisions import Fp32, Precision
from streamspec.export.spec.decoder_spec import DecoderSpec
from streamspec.export.spec.draft_spec import DraftSpec, Lora
from streamspec.export.spec.weight_source import Source
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


def adapter_tensors(
    source: Source,
    spec: DecoderSpec,
    room: SwappableCapacity,
    precision: Precision,
    task: Lora,
    streams: StreamSpec | None,
) -> dict[str, Array]:
    """Values of the inputs that an adapter fills (`swappable.adapter_rows`). `task`, `streams`: in the
    coordinates of the graph. Updates of rank 0 are left out.
    """
    out: dict[str, Array] = {}
    for part, lora in ((TASK_LORA, task), (STREAM_LORA, streams.lora if streams else {})):
        for layer in range(spec.layers) if lora else ():
            for modules in spec.fused(layer, streams=part == STREAM_LORA):
                out |= update(spec, layer, modules, part).tensors(
                    [lora.get((layer, module)) for module in modules], precision.coded
                )
    if streams is not None:
        out |= _stream_tensors(source, spec, room, precision, streams)
    rows = adapter_rows(spec, room, precision, source.bias("lm_head.bias") is not None)
    dtypes = {row.name: row.dtype for row in rows}
    return {name: np.ascontiguousarray(array, dtypes[name]) for name, array in out.items()}


def _stream_tensors(
    source: Source, spec: DecoderSpec, room: SwappableCapacity, precision: Precision, streams: StreamSpec
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
        codes, out[DRAFT_HEAD_SCALE] = quantize_rows(rows, NO_SATURATION)
        out[DRAFT_HEAD_INT8] = codes.T
    bias = source.bias("lm_head.bias")
    return out if bias is None else out | {DRAFT_HEAD_BIAS: bias[vocabulary]}


def capacity_for(drafters: Sequence[DraftSpec], spec: DecoderSpec) -> SwappableCapacity:
    """The capacity that holds all of these drafters. Raises AdapterError where no one graph can."""
    streams = [cast(StreamSpec, drafter) for drafter in drafters]  # `_check` refuses all others
    ns = tuple(sorted({drafter.ns for drafter in streams}, reverse=True))
    bigram = any(drafter.bigram for drafter in streams)
    lists = [len(drafter.draft_vocab) for drafter in streams if drafter.draft_vocab is not None]
    _check_shared(ns, spec)
    return SwappableCapacity(
        ns=ns,
        candidates=min(BIGRAM_CANDIDATES if bigram else DRAFT_CANDIDATES, spec.vocab, *lists),
        root_token=any(drafter.root_map is not None for drafter in streams),
        bigram=bigram,
        pruning=any(drafter.pruning is not None and drafter.ns == ns[0] for drafter in streams),
        draft_vocab=bool(lists),
    )


def _check_shared(ns: tuple[int, ...], spec: DecoderSpec) -> None:
    """Raises AdapterError where streams over one of `ns` (falling) pass a layer that a later one shares keys with in
    another part of the graph: that part has the keys of the main rows alone (`SwappableStreams`).
    """
    begins = [spec.layers - count for count in ns]
    shared = {layer: spec.source(layer) for layer in range(spec.layers) if spec.source(layer) != layer}
    apart = [layer for layer, source in shared.items() if 0 < bisect(begins, source) < bisect(begins, layer)]
    if apart:
        raise AdapterError(
            f"adapters with streams over {' or '.join(map(str, ns))} layers, of which layer {apart[0]} attends to the "
            f"keys of layer {shared[apart[0]]}",
            f"streams over one number of layers, or over at most {spec.layers - 1 - max(shared.values())}",
            "export a bundle for each number of layers",
        )


def fitting_info(
    adapter: Adapter, streams: StreamSpec | None, room: SwappableCapacity, spec: DecoderSpec
) -> DrafterInfo | None:
    """The drafter as the manifest describes it. Raises AdapterError where the bundle has no room for it."""
    if streams is None:
        return None
    own = capacity_for([streams], spec)
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
