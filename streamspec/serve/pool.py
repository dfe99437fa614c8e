"""Schedules requests over a bounded number of sessions with one set of weights for each bundle.

A request gets the free session of its bundle and adapter whose cache holds most of its prompt; queued ones are served
in order of arrival. Lives in the event loop's thread; every session has a thread of its own.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from queue import SimpleQueue
from typing import Any

from streamspec.errors import StreamspecError
from streamspec.prompt.prompt_format import PromptFormat
from streamspec.runtime import Chunk, GenerationOptions, Session, Stats, Stream
from streamspec.runtime.embeddings import Embedding
from streamspec.serve.errors import ApiError, closing, ended_by_time, out_of_time, too_many
from streamspec.serve.limits import Limits
from streamspec.serve.tools.call_form import CallForm
from streamspec.serve.tools.checked_grammars import CheckedGrammars


@dataclass
class Slot:
    """Holds a session, opened when it is first needed, and its thread. `base`: the session in
    `Pool.bases` of the same bundle. `used`: when the session last answered; `prompt_tokens`: of the
    last prompt that ended a user's turn, with which the cache begins (0: unknown)."""

    session: Session | None = None
    base: Session | None = None
    busy: bool = False
    used: float = 0.0
    prompt_tokens: int = 0
    _tasks: SimpleQueue[Callable[[], None] | None] = field(default_factory=SimpleQueue)
    _thread: threading.Thread | None = None

    def run(self, task: Callable[[], None]) -> None:
        """Runs `task` in the slot's thread. It is always the same thread: malloc keeps memory by
        threads, and what many short threads leave adds up."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="streamspec-generation", daemon=True)
            self._thread.start()
        self._tasks.put(task)

    def of(self, base: Session) -> Session:
        """Returns the session of the bundle of `base`: its own, or a new one after freeing another
        bundle's cache."""
        if self.session is None or self.base is not base:
            self.session, self.base = None, base
            self.session = base.another()
        return self.session

    def serves(self, request: QueuedRequest) -> bool:
        """Whether its session has the request's bundle and adapter."""
        return self.session is not None and self.base is request.base and self.session.adapter == request.adapter

    @property
    def cached_tokens(self) -> Sequence[int]:
        """Tokens in its session's cache."""
        return [] if self.session is None else self.session.cached_tokens

    def knows(self, prompt: list[int]) -> bool:
        """Tells whether it can reuse nearly all of `prompt`, or of the prompt in its cache. The answer there does not
        count: the next turn may have other tokens of it, or leave its thoughts out."""
        held = self.prompt_tokens or len(self.cached_tokens)
        return self.reusable_tokens(prompt) >= NEARLY_ALL * min(len(prompt), held) > 0

    def reusable_tokens(self, prompt: list[int]) -> int:
        """Counts the tokens of `prompt` that its session need not compute again."""
        return 0 if self.session is None else self.session.reusable_tokens(prompt)

    def end(self) -> None:
        """Ends the thread after its task."""
        self._tasks.put(None)

    def _work(self) -> None:
        while task := self._tasks.get():
            task()
            del task  # and the request with it


@dataclass
class Counts:
    """Counts generations since the start, for the metrics."""

    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    refused: int = 0
    totals: dict[str, float] = field(default_factory=dict)  # sums of `Stats`, by field


class QueuedRequest:
    """The answers to its prompts, waiting or running, one after the other in one session. `Pool.enqueue` starts it.
    Iterate `items`, the chunks of the answers; `cancel` when nobody reads any more.
    """

    def __init__(
        self,
        pool: Pool,
        adapter: str | None,
        prompts: Sequence[Callable[[Session], Any]],
        options: Sequence[GenerationOptions],
        hint: list[int] | None,
        base: Session | None = None,
        arrived: float | None = None,
    ) -> None:
        """`options`: of each answer, as many to each prompt. `hint`: the first prompt's tokens, to find the cache that
        holds most of them.
        `base`: its bundle's session in `Pool.bases`, by default the first. `arrived`: when its time began, by
        `time.perf_counter`, by default now.
        """
        self.pool = pool
        self.adapter = adapter
        self.prompts = prompts
        self.options = options
        self.hint = hint
        self.base: Session = pool.first if base is None else base
        self.arrived = time.perf_counter() if arrived is None else arrived
        self.began: float | None = None
        self.slot: Slot | None = None
        self._inbox: asyncio.Queue[Any] = asyncio.Queue()  # what the answer is made of, or its error; None: the end
        self.running: Stream | Embedding | None = None
        self._cancelled = self._over = False

    @property
    def left(self) -> float:
        """Seconds until the request's time is up."""
        return self.arrived + self.pool.limits.timeout - time.perf_counter()

    @property
    def waited(self) -> float:
        """Seconds before a session was free."""
        return (self.began or time.perf_counter()) - self.arrived

    async def items(self) -> AsyncIterator[Any]:
        """Yields what the worker tells: a generation's chunks. Raises what the worker raised, or ApiError for a request
        that found no session in time or a server that closes.
        """
        while True:
            try:
                async with asyncio.timeout(None if self.slot else max(self.left, 0)):
                    item = await self._inbox.get()
            except TimeoutError:
                if self.slot is not None:  # it began just then
                    continue
                self.cancel()
                raise out_of_time(self.pool.limits.timeout) from None
            if isinstance(item, BaseException):
                raise item
            if item is None:
                return
            yield item

    def cancel(self) -> None:
        """Ends the request wherever it is; does nothing after its end."""
        if self._over or self._cancelled:
            return
        self._cancelled = True
        if self.slot is None:
            self._over = True
            self.pool.forget(self)
        elif self.running is not None:  # else the thread will see it
            self.running.cancel()

    def fail(self, error: BaseException) -> None:
        """Ends the request with an error for its reader."""
        self._inbox.put_nowait(error)
        self.cancel()

    def begin(self, slot: Slot) -> None:
        """Starts the generation in the thread of `slot`."""
        self.slot, self.began = slot, time.perf_counter()
        slot.run(partial(self._work, slot, asyncio.get_running_loop()))

    def _work(self, slot: Slot, loop: asyncio.AbstractEventLoop) -> None:
        """Answers, in the slot's thread."""
        ends: list[Stats] = []
        failure: BaseException | None = None
        try:
            session = slot.of(self.base)
            if session.adapter != self.adapter:
                session.swap(self.adapter)
            self._answer(session, loop, ends)
        except BaseException as error:
            refused = isinstance(error, StreamspecError | ApiError)
            failure = error.with_traceback(None) if refused else error  # whose frames would hold the session
        _tell(loop, self._end, ends, failure)

    def _answer(self, session: Session, loop: asyncio.AbstractEventLoop, ends: list[Stats]) -> None:
        """Answers, in the slot's thread, and adds the counts of each answer to `ends`."""
        prompts = [make(session) for make in self.prompts]
        for number, options in enumerate(self.options):
            prompt = prompts[number * len(prompts) // len(self.options)]
            self.running = stream = session.stream(prompt, replace(options, timeout=max(self.left, 0.001)))
            if self._cancelled:  # it may have been before there was a stream to end
                stream.cancel()
            last: Chunk | None = None
            try:
                for last in stream:
                    # One of several answers to a prompt may be missing, and no prompt's.
                    nothing = last.finish_reason == "timeout" and not last.stats.new_tokens
                    if nothing and (len(prompts) > 1 or not ends):
                        raise ended_by_time(self.pool.limits.timeout)
                    self.tell(loop, last)
            finally:
                stream.close()  # or one that is left would hold the session
                ends += [last.stats] if last is not None else []
            if self._cancelled:
                break

    def tell(self, loop: asyncio.AbstractEventLoop, item: Any) -> None:
        """Hands an item of the answer from the slot's thread to its reader."""
        _tell(loop, self._inbox.put_nowait, item)

    def _end(self, ends: list[Stats], failure: BaseException | None) -> None:
        assert self.slot is not None
        self._over = True
        self._inbox.put_nowait(failure)
        self.pool.release(self, self.slot, self._cancelled, ends, failure)


class Pool:
    """Runs requests in the sessions of all slots.

    `bases`: the loaded sessions, one of each bundle; further ones are opened when they are needed.
    With several bundles none of `bases` answers, so that any bundle may have all sessions.
    """

    def __init__(self, bases: Session | Sequence[Session], limits: Limits) -> None:
        self.bases: list[Session] = list(bases) if isinstance(bases, Sequence) else [bases]
        self.first, self.limits = self.bases[0], limits
        self.slots = [Slot() for _ in range(limits.sessions)]
        if len(self.bases) == 1:
            self.slots[0] = Slot(self.first, self.first)
        self.waiting: deque[QueuedRequest] = deque()
        self.requests: set[QueuedRequest] = set()
        self.counts = Counts()
        self.closed = False
        self.grammars = CheckedGrammars()
        self._forms: dict[tuple[int, PromptFormat], CallForm] = {}  # by bundles, whose sessions share a tokenizer

    def enqueue(self, request: QueuedRequest) -> None:
        """Begins a request, or puts it into the queue. Raises ApiError: 429 where the queue is full, 503 while the
        server closes.
        """
        if self.closed:
            raise closing()
        if all(slot.busy for slot in self.slots) and len(self.waiting) >= self.limits.queue:
            self.counts.refused += 1
            raise too_many(f"{len(self.waiting)} requests wait already; expected fewer; ask again later")
        self.requests.add(request)
        self.waiting.append(request)
        self._dispatch()

    def call_form(self, reader: Session) -> CallForm:
        """Returns how prompts of a model write tool calls, determined once. `reader`: encodes them. Callable from any
        thread. Raises ApiError."""
        key = id(reader.tokenizer), reader.manifest.prompt_format
        if key not in self._forms:
            self._forms[key] = CallForm.of(reader)
        return self._forms[key]

    def close(self) -> None:
        """Ends every generation, waiting or running, with an error for its reader."""
        self.closed = True
        for request in list(self.requests):
            request.fail(closing())
        for slot in self.slots:
            slot.end()

    async def ended(self, seconds: float) -> None:
        """Waits for every generation to end, after `close`, for at most `seconds`."""
        ends = time.monotonic() + seconds
        while self.requests and time.monotonic() < ends:
            await asyncio.sleep(0.01)

    def forget(self, request: QueuedRequest) -> None:
        """Removes a request that never began."""
        self.requests.discard(request)
        if request in self.waiting:
            self.waiting.remove(request)
            self.counts.cancelled += 1

    def release(
        self, request: QueuedRequest, slot: Slot, cancelled: bool, ends: list[Stats], failure: BaseException | None
    ) -> None:
        """Frees the slot of a request that ran and has ended. `ends`: the counts of its answers."""
        self.requests.discard(request)
        slot.busy, slot.used = False, time.monotonic()
        if ends and request.options:  # else nothing of it is in the cache
            goes_on = request.options[-1].within_turn and ends[-1].reused_tokens >= slot.prompt_tokens > 0
            slot.prompt_tokens = slot.prompt_tokens if goes_on else ends[-1].prompt_tokens
        counts = self.counts
        if failure is not None:
            counts.failed += 1
        elif cancelled:
            counts.cancelled += 1
        else:
            counts.finished += 1
        for stats in ends:
            for name in SUMMED:
                counts.totals[name] = counts.totals.get(name, 0) + getattr(stats, name)
        self._dispatch()

    def _dispatch(self) -> None:
        while self.waiting and not self.closed and any(not slot.busy for slot in self.slots):
            slot = self._choose(request := self.waiting[0])
            self.waiting.popleft()
            slot.busy = True
            request.begin(slot)

    def _choose(self, request: QueuedRequest) -> Slot:
        """Chooses, of the free sessions with the request's bundle and adapter, the one that can reuse most of the
        prompt, where that is nearly all of the prompt (sent again) or of the one in its cache (the conversation goes
        on). Else a new one: a conversation that merely begins alike may still go on. Else the one longest unused.
        """
        free = [slot for slot in self.slots if not slot.busy]
        same = [slot for slot in free if slot.serves(request)]
        prompt = request.hint or []
        best = max(same, key=lambda slot: slot.reusable_tokens(prompt), default=None)
        if best is not None and best.knows(prompt):
            return best
        empty = [slot for slot in same if not slot.cached_tokens] or [slot for slot in free if slot.session is None]
        return empty[0] if empty else min(same or free, key=lambda slot: slot.used)


NEARLY_ALL = 0.75
SUMMED = (
    "prompt_tokens",
    "reused_tokens",
    "new_tokens",
    "steps",
    "step_tokens",
    "plain_steps",
    "shared_steps",
    "prefill_seconds",
    "decode_seconds",
)


def _tell(loop: asyncio.AbstractEventLoop, function: Callable[..., Any], *arguments: Any) -> None:
    with suppress(RuntimeError):  # the loop has closed: nobody is left to tell
        loop.call_soon_threadsafe(function, *arguments)
