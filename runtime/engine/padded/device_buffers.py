"""Binds, once, the buffers of one sequence's captured graphs: the cache, and for each row count one array in,
one that says how tokens are sampled, and one out.

ONNX Runtime replays a captured graph on the addresses of its capture. It keeps one graph for each `gpu_graph_id`, as
long as the session lives, and captures within the first run of an id, which it repeats: that run must change nothing
that matters, so it happens here, over an empty cache. Buffers that no sequence needs any more, and the graphs captured
over them, serve the next one.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np

from streamspec import step_graph as sg
from streamspec.captured.packed_call import (
    DRAW_COLUMNS,
    CallSizes,
    Numbers,
    pack,
    pack_draw,
    result_parts,
    unmoved,
)
from streamspec.errors import ProviderError
from streamspec.runtime.engine.executor import run_options
from streamspec.runtime.engine.loaded_model import LoadedModel
from streamspec.runtime.hardware.providers import named
from streamspec.runtime.kv_cache.captured_cache import CapturedCache
from streamspec.runtime.kv_cache.layout import cache_groups
from streamspec.runtime.sampling.sampling_params import GREEDY

NOT_CAPTURED, CPU = -1, "cpu"  # the id of runs that capture nothing; where the CPU stands in for a device


class BoundRun(NamedTuple):
    """The arguments of one captured graph's runs. `draw` float32 [1 + s, x], of the host: how it samples, [1, x] where
    it does not; `on_device`: its place there."""

    io: Any
    options: Any
    draw: np.ndarray
    on_device: Any


class BoundCall:
    """A call of so many rows. `packed` int64 [n, width], of the host, is copied before a run, and `result` after it;
    `logits` stay on the device until they are asked for. `parts`: of the result. A `greedy` run samples no rows, a
    `sampled` one all."""

    def __init__(
        self, model: LoadedModel, rows: int, caches: Sequence[Sequence[Any]], seen: Any, graph_ids: Iterator[int]
    ) -> None:
        """`seen`: the sequence's array of tokens that are penalised."""
        assert model.captured is not None
        features, device = model.features, named(model.provider).memory or CPU
        self.parts = result_parts(rows, features)
        value = model.ort.OrtValue.ortvalue_from_numpy
        self.packed = np.zeros((rows, model.captured.width(rows)), np.int64)
        self.seen = seen
        self.device = [
            value(array.copy(), device, 0)
            for array in (
                self.packed,
                np.zeros(sum(part.size for part in self.parts), np.float32),
                np.zeros((rows, features.vocab), np.float32),
            )
        ]
        self.greedy, self.sampled = (
            self._run(model, caches, np.zeros((1 + count, DRAW_COLUMNS), np.float32), next(graph_ids))
            for count in (0, rows)
        )

    def _run(self, model: LoadedModel, caches: Sequence[Sequence[Any]], draw: np.ndarray, graph_id: int) -> BoundRun:
        on_device = model.ort.OrtValue.ortvalue_from_numpy(draw.copy(), named(model.provider).memory or CPU, 0)
        io = model.session.io_binding()
        for name, bound in ((sg.CALL, self.device[0]), (sg.SEEN, self.seen), (sg.DRAW, on_device)):
            io.bind_ortvalue_input(name, bound)
        for name, bound in zip((sg.RESULT, sg.RAW_LOGITS), self.device[1:], strict=True):
            io.bind_ortvalue_output(name, bound)
        for layer, parts in enumerate(caches):
            for kind, bound in zip(sg.CACHE_KINDS, parts, strict=False):
                io.bind_ortvalue_input(sg.past(layer, kind), bound)
                io.bind_ortvalue_output(sg.present(layer, kind), bound)
        return BoundRun(io, run_options(model.ort, graph_id=graph_id), draw, on_device)

    def run(self, session: Any, run: BoundRun, seen: np.ndarray | None) -> np.ndarray:
        """Runs what is packed, after `send_draw` where that is sampled; returns the result. As all that follows in the
        device's thread."""
        self.send()
        if run is self.sampled:
            self.send_draw(seen)
        session.run_with_iobinding(run.io, run.options)
        return self.result()

    def send(self) -> None:
        """Copies the packed call to the device."""
        self.device[0].update_inplace(self.packed)

    def send_draw(self, seen: np.ndarray | None) -> None:
        """Copies to the device how the sampled run draws, and where tokens are penalised those `seen` bool
        [vocabulary]."""
        self.sampled.on_device.update_inplace(self.sampled.draw)
        if seen is not None:
            self.seen.update_inplace(seen)

    def result(self) -> np.ndarray:
        """Copies the result from the device: float32 [x]."""
        result: np.ndarray = self.device[1].numpy()
        return result

    def logits(self) -> np.ndarray:
        """Copies the logits from the device: float32 [n, vocabulary]."""
        logits: np.ndarray = self.device[2].numpy()
        return logits


class DeviceBuffers:
    """The cache of one sequence, and a `BoundCall` for each row count. Made in the device's thread."""

    def __init__(self, model: LoadedModel, sizes: CallSizes) -> None:
        self.session = model.session
        value, device = model.ort.OrtValue.ortvalue_from_numpy, named(model.provider).memory or CPU
        groups = cache_groups(model.features)
        self.caches: list[Sequence[Any]] = [()] * (1 + max(layer for group in groups for layer in group.layers))
        for group in groups:
            empty = np.zeros(group.shape(sizes.all_slots)[2:], group.dtype)
            for layer in group.layers:
                self.caches[layer] = [value(empty.copy(), device, 0) for _ in range(group.parts)]
        seen = value(np.zeros(model.features.vocab, np.bool_), device, 0)
        ids = model.graph_ids if model.captures else repeat(NOT_CAPTURED)
        self.calls = {rows: BoundCall(model, rows, self.caches, seen, ids) for rows in sizes.rows}
        for call in self.calls.values():
            pack(call.packed, sizes, Numbers(0, 0), ((), (), ()), np.zeros((0, 0), np.bool_), unmoved(sizes, 0))
            pack_draw(call.sampled.draw, [*GREEDY.scalars().values()], np.arange(0), np.zeros(0))
            for run in (call.greedy, call.sampled):
                call.run(self.session, run, None)


def captured_cache(model: LoadedModel, rows: int) -> CapturedCache:
    """Returns an empty cache in buffers that were captured over. It has as many rows as the graph has, whatever `rows`
    says."""
    assert model.captured is not None
    spare = model.spare_buffers
    buffers = spare.pop() if spare else _captured(model, model.captured)
    groups = cache_groups(sg.GraphFeatures.of_manifest(model.manifest))  # those of the graph have no windows
    cache = CapturedCache(buffers.caches, groups, model.captured, buffers.calls, model.on_device)
    weakref.finalize(cache, _give_back, weakref.ref(model), buffers)
    return cache


def _captured(model: LoadedModel, sizes: CallSizes) -> DeviceBuffers:
    """Raises ProviderError where the device cannot hold the buffers or capture the graph."""
    try:
        with model.scheduler.acquire(threading.Event()):
            return model.on_device(lambda: DeviceBuffers(model, sizes))
    except Exception as error:
        raise ProviderError(
            f"provider {model.provider} cannot capture the graph: {error}",
            "room on the device, and operators that it captures",
            "export without --capture, or choose provider cpu",
        ) from None


def _give_back(model: weakref.ref[LoadedModel], buffers: DeviceBuffers) -> None:
    """Keeps the buffers of a sequence that is gone, where their session is still open."""
    owner = model()
    if owner is not None and owner.session is buffers.session:
        owner.spare_buffers.append(buffers)
