"""Runs a sequence's calls on the shared model: one at a time, in the scheduler's order, cancellable from any thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from streamspec.errors import BundleError, ResourceError
from streamspec.runtime.decoding.model_runner import Cancelled
from streamspec.runtime.engine.loaded_model import LoadedModel, no_memory

if TYPE_CHECKING:
    from streamspec.runtime.engine.shared.call_sharing import CallSharing
    from streamspec.runtime.engine.shared.shared_call import SharedRows

T = TypeVar("T")


class GraphExecutor:
    """Belongs to one sequence. `graph_seconds`: time inside the model so far, `waited_seconds`: in the queue for it."""

    def __init__(self, model: LoadedModel) -> None:
        self.model = model
        self.graph_seconds = self.waited_seconds = 0.0
        self._options = run_options(model.ort)
        self._shrinking = run_options(model.ort, shrink=model.in_place)
        self._cancelled = threading.Event()

    def run_shared(self, rows: SharedRows, sharing: CallSharing) -> None:
        """Runs rows in a call that other sequences may share; `cancel` ends the wait for it. Raises as `run`."""
        queued = time.perf_counter()
        sharing.run(rows, self._cancelled)
        self.graph_seconds += rows.seconds
        self.waited_seconds += rows.began - queued

    def run(self, io: Any, shrink: bool = False) -> None:
        """Runs the graph on an IOBinding. `shrink`: the call returns its working memory to the system.

        Raises Cancelled, or BundleError for a graph that fails.
        """
        chosen = self._shrinking if shrink else self._options
        self._run(lambda: self.model.session.run_with_iobinding(io, chosen), stops=True)

    def run_there(self, work: Callable[[], T]) -> T:
        """Does work that runs a captured graph, where the model's device does that (`LoadedModel.on_device`). `cancel`
        does not stop it, only the next. Raises as `run`."""
        return self._run(lambda: self.model.on_device(work))

    def _run(self, work: Callable[[], T], stops: bool = False) -> T:
        model, queued = self.model, time.perf_counter()
        with model.scheduler.acquire(self._cancelled):
            started = time.perf_counter()
            try:
                result = work()
            except Exception as error:
                if self._cancelled.is_set() and stops:  # ONNX Runtime has no error class of its own for this
                    raise Cancelled from None
                raise graph_failed(error) from error
            self.graph_seconds += time.perf_counter() - started
            self.waited_seconds += started - queued
        return result

    def cancel(self) -> None:
        """Stops the call under way, or the next one. From any thread."""
        self._cancelled.set()
        self._options.terminate = self._shrinking.terminate = True
        self.model.scheduler.recheck()
        if self.model.sharing is not None:
            self.model.sharing.recheck()

    def clear(self) -> None:
        """Forgets a cancellation."""
        self._cancelled.clear()
        self._options.terminate = self._shrinking.terminate = False

    @contextmanager
    def request(self) -> Iterator[None]:
        """Forgets earlier cancellations and counts the body as one request, a generation."""
        self.clear()
        with self.model.scheduler.request():
            try:
                yield
            finally:
                if self.model.sharing is not None:
                    self.model.sharing.leave(self)


def run_options(ort: Any, shrink: bool = False, graph_id: int = -1) -> Any:
    """Options of calls; `shrink`: they return their working memory to the system. `graph_id`: of the captured graph."""
    options = ort.RunOptions()
    # -1 (no graph capture) is the default, but looking up an option that is not set costs 80 us in every call.
    options.add_run_config_entry("gpu_graph_id", str(graph_id))
    if shrink:
        options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    options.log_severity_level = 4
    return options


def graph_failed(error: Exception) -> BundleError | ResourceError:
    """Returns the error of a call that ONNX Runtime refused."""
    if no_memory(error):
        fix = "close something, or give a smaller context"
        return ResourceError("no memory is left for a call of the model", "more", fix)
    return BundleError(f"the graph failed: {error}", "a graph that runs", "check the bundle, export it again")
