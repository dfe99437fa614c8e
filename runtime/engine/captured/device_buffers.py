"""What the captured graphs of one sequence read and write, bound once: the cache, and for each row count one array in
and one out.

ONNX Runtime replays a captured graph on the addresses of its capture. It keeps one graph for each `gpu_graph_id`, as
long as the session lives, and captures within the first run of an id, which it repeats: that run must change nothing
that matters, so it happens here, over an empty cache. Buffers that no sequence needs any more, and the graphs captured
over them, serve the next one.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from streamspec import step_graph as sg
from streamspec.captured.packed_call import CallSizes, Numbers, pack, result_parts, unmoved
from streamspec.runtime.engine.loaded_model import LoadedModel
from streamspec.runtime.hardware.providers import named
from streamspec.runtime.kv_cache.captured_cache import CapturedCache
from streamspec.runtime.kv_cache.layout import cache_groups

NOT_CAPTURED, CPU = -1, "cpu"  # the id of runs that capture nothing; where the CPU stands in for a device


class BoundCall:
    """A call of so many rows. `packed` int64 [n, width], of the host, is copied before a run, and `result` after it;
    `logits` stay on the device until they are asked for. `parts`: of the result."""

    def __init__(self, model: LoadedModel, rows: int, caches: Sequence[Sequence[Any]], graph_id: int) -> None:
        assert model.captured is not None
        features, device = model.features, named(model.provider).memory or CPU
        self.parts = result_parts(rows, features)
        value = model.ort.OrtValue.ortvalue_from_numpy
        self.packed = np.zeros((rows, model.captured.width(rows)), np.int64)
        self.device = [
            value(array.copy(), device, 0)
            for array in (
                self.packed,
                np.zeros(sum(part.size for part in self.parts), np.float32),
                np.zeros((rows, features.vocab), np.float32),
            )
        ]
        self.io = model.session.io_binding()
        self.io.bind_ortvalue_input(sg.CALL, self.device[0])
        for name, bound in zip((sg.RESULT, sg.RAW_LOGITS), self.device[1:], strict=True):
            self.io.bind_ortvalue_output(name, bound)
        for layer, parts in enumerate(caches):
            for kind, bound in zip(sg.CACHE_KINDS, parts, strict=False):
                self.io.bind_ortvalue_input(sg.past(layer, kind), bound)
                self.io.bind_ortvalue_output(sg.present(layer, kind), bound)
        self.options = model.ort.RunOptions()
        self.options.add_run_config_entry("gpu_graph_id", str(graph_id))
        self.options.log_severity_level = 4

    def send(self) -> None:
        """Copies the packed call to the device."""
        self.device[0].update_inplace(self.packed)

    def result(self) -> np.ndarray:
        """Copies the result from the device: float32 [x]."""
        result: np.ndarray = self.device[1].numpy()
        return result

    def logits(self) -> np.ndarray:
        """Copies the logits from the device: float32 [n, vocabulary]."""
        logits: np.ndarray = self.device[2].numpy()
        return logits


class DeviceBuffers:
    """The cache of one sequence, and a `BoundCall` for each row count."""

    def __init__(self, model: LoadedModel, sizes: CallSizes) -> None:
        self.session = model.session
        value, device = model.ort.OrtValue.ortvalue_from_numpy, named(model.provider).memory or CPU
        groups = cache_groups(model.features)
        self.caches: list[Sequence[Any]] = [()] * (1 + max(layer for group in groups for layer in group.layers))
        for group in groups:
            empty = np.zeros(group.shape(sizes.all_slots)[2:], group.dtype)
            for layer in group.layers:
                self.caches[layer] = [value(empty.copy(), device, 0) for _ in range(group.parts)]
        self.calls = {
            rows: BoundCall(model, rows, self.caches, next(model.graph_ids) if model.captures else NOT_CAPTURED)
            for rows in sizes.rows
        }
        with model.scheduler.acquire(threading.Event()):
            for call in self.calls.values():
                pack(call.packed, sizes, Numbers(0, 0), ((), (), ()), np.zeros((0, 0), np.bool_), unmoved(sizes, 0))
                call.send()
                self.session.run_with_iobinding(call.io, call.options)


def captured_cache(model: LoadedModel, rows: int) -> CapturedCache:
    """An empty cache in buffers that were captured over. It has as many rows as the graph has, whatever `rows` says."""
    assert model.captured is not None
    spare = model.spare_buffers
    buffers = spare.pop() if spare else DeviceBuffers(model, model.captured)
    cache = CapturedCache(buffers.caches, cache_groups(model.features), model.captured, buffers.calls)
    weakref.finalize(cache, _give_back, weakref.ref(model), buffers)
    return cache


def _give_back(model: weakref.ref[LoadedModel], buffers: DeviceBuffers) -> None:
    """Keeps the buffers of a sequence that is gone, where their session is still open."""
    owner = model()
    if owner is not None and owner.session is buffers.session:
        owner.spare_buffers.append(buffers)
