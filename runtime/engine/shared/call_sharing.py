"""Gathers the calls of sequences that decode at once into shared ones.

The first sequence that has rows to verify leads: it waits for the model's lock, then a moment for the others that
decode, and makes one call for all. One that keeps the others waiting is not waited for again until it comes back.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from streamspec.errors import ResourceError
from streamspec.runtime.decoding.model_runner import Cancelled
from streamspec.runtime.engine.loaded_model import LoadedModel
from streamspec.runtime.engine.shared.shared_call import SharedCall, SharedRows
from streamspec.runtime.engine.shared.sharing_gate import SharingGate
from streamspec.runtime.kv_cache.host_cache import LAZY
from streamspec.runtime.kv_cache.layout import CacheGroup
from streamspec.runtime.kv_cache.shared_cache import CachePlaces, SharedCache

if TYPE_CHECKING:
    from streamspec.runtime.engine.ort_runner import OrtRunner

MAX_ROWS = 64  # of a shared call
PATIENCE = 0.5  # share of the last call's time that the others are waited for,
MAX_WAIT = 0.01  # seconds, at most


def share_calls(runner: OrtRunner, max_sequences: int) -> None:
    """Lets up to `max_sequences` sequences over the model of `runner`, it included, share calls, if its graph can and
    the system has address space for so many caches."""
    model = runner.model
    if model.features.sequences and LAZY:
        model.sharing = CallSharing(model, max_sequences)
        runner.release()
        if not isinstance(runner.cache, SharedCache):
            model.sharing = None


class CallSharing:
    """Gathers the calls of one open model, of up to `max_sequences` sequences. Safe to use from several threads."""

    def __init__(self, model: LoadedModel, max_sequences: int) -> None:
        self.max_sequences, self.gate = max_sequences, SharingGate()
        self._model = model
        self._places: CachePlaces | None = None
        self._call: SharedCall | None = None
        self._changed = threading.Condition()
        self._decoding: dict[object, tuple[float, ...]] = {}  # by sequence: equal for those that can share
        self._late: set[object] = set()  # sequences that nobody waits for
        self._waiting: list[SharedRows] = []
        self._leading = False
        self._patience = MAX_WAIT

    def cache(self, groups: Sequence[CacheGroup], limit: int) -> SharedCache | None:
        """Returns a cache whose sequence can share calls; None where no place is left."""
        with self._changed:  # all are in the same array
            try:
                self._places = self._places or CachePlaces(groups, limit, self.max_sequences)
            except ResourceError:
                return None
            return self._places.take(limit)

    def close(self) -> None:
        """Lets go of the model and the caches."""
        self._places = self._call = None

    def sequences(self, sequence: object, key: tuple[float, ...]) -> int:
        """Returns how many sequences, this one included, decode now and can share a call."""
        with self._changed:
            self._decoding[sequence] = key
            self._late.discard(sequence)
            return sum(other == key and one not in self._late for one, other in self._decoding.items())

    def leave(self, sequence: object) -> None:
        """Removes a sequence that has ended."""
        with self._changed:
            self._decoding.pop(sequence, None)
            self._late.discard(sequence)
            self._changed.notify_all()

    def recheck(self) -> None:
        """Makes all waiting sequences check whether they were cancelled."""
        with self._changed:
            self._changed.notify_all()

    def run(self, mine: SharedRows, cancelled: threading.Event) -> None:
        """Returns when a call with these rows has been made. Raises Cancelled, or BundleError where the graph fails."""
        with self._changed:
            self._waiting.append(mine)
            self._changed.notify_all()
            try:
                self._changed.wait_for(
                    lambda: mine.over or (not mine.taken and (not self._leading or cancelled.is_set()))
                )
            except BaseException:  # Ctrl-C: nobody may make the call later
                if mine.taken:
                    self._changed.wait_for(lambda: mine.over)
                else:
                    self._waiting.remove(mine)
                raise
            if not mine.over and cancelled.is_set():
                self._waiting.remove(mine)
                raise Cancelled
            leads = not mine.over
            self._leading = self._leading or leads
        if leads:
            self._lead(mine, cancelled)
        if cancelled.is_set():
            raise Cancelled
        if mine.error is not None:
            raise mine.error

    def _lead(self, mine: SharedRows, cancelled: threading.Event) -> None:
        calls: list[SharedRows] = []
        try:
            with self._model.scheduler.acquire(cancelled):
                began = time.perf_counter()
                calls = self._gathered(mine)
                self._make(calls, began)
        except BaseException as error:
            for call in calls:
                call.error = error if isinstance(error, Exception) else RuntimeError("the shared call was interrupted")
            if not calls or not isinstance(error, Exception):
                raise
        finally:
            with self._changed:
                for call in calls or [mine]:
                    call.over = True
                self._waiting = [call for call in self._waiting if not call.over]  # `mine` may have been cancelled
                self._leading = False
                self._changed.notify_all()

    def _gathered(self, mine: SharedRows) -> list[SharedRows]:
        """Waits a moment for the calls of other sequences and returns those to make together with `mine`."""
        with self._changed:
            self._changed.wait_for(lambda: not self._missing(mine), self._patience)
            self._late |= self._missing(mine)
            self._waiting.remove(mine)
            calls, key = [mine], mine.sampling.shared_call_key
            for call in [call for call in self._waiting if call.sampling.shared_call_key == key]:
                if sum(len(other.rows.tokens) for other in (*calls, call)) <= MAX_ROWS:
                    self._waiting.remove(call)
                    calls.append(call)
            for call in calls:
                call.taken = True
            return calls

    def _missing(self, mine: SharedRows) -> set[object]:
        key = mine.sampling.shared_call_key
        alike = {sequence for sequence, other in self._decoding.items() if other == key}
        return alike - {call.sequence for call in self._waiting} - self._late

    def _make(self, calls: list[SharedRows], gathering: float) -> None:
        assert self._places is not None
        if self._call is None:
            self._call = SharedCall(self._model, self._places)
        began = time.perf_counter()
        self._call.run(calls)
        ended = time.perf_counter()
        self._patience = min(PATIENCE * (ended - began), MAX_WAIT)
        for call in calls:
            call.sequences, call.began, call.seconds = len(calls), began, ended - began
        self.gate.called(len(calls), True, ended - gathering)
