"""Streams one generation: chunks of text as they come, cancelling, reading it from another thread."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

from streamspec.runtime.decoding.loop import SpeculativeDecoder
from streamspec.runtime.decoding.model_runner import Cancelled, ModelRunner
from streamspec.runtime.decoding.stats import Stats
from streamspec.runtime.sampling.grammar_state import GrammarState
from streamspec.runtime.sampling.sampling_params import Logprob
from streamspec.runtime.text.answer_text import AnswerText
from streamspec.runtime.text.detokenize import ShowingSpecials
from streamspec.runtime.text.thought import Thought

SIGNALS = 0.5  # seconds after which a wait looks for signals: on Windows nothing interrupts it
EXIT_SECONDS = 10.0  # for threads to end, when the interpreter exits


@dataclass(frozen=True)
class Chunk:
    """Text and tokens that one model call added.

    - `text`: may be empty while a character or a possible stop string is incomplete.
    - `token_ids`; `drafted[i]` tells whether token i was an accepted draft token.
    - `finish_reason`: None, and in the last chunk "eos", "stop" (a stop string, or the grammar's end in a vocabulary
      without end-of-text), "length", "cancelled" or "timeout".
    - `stats`: the counts so far.
    - `logprobs`: one per token, or None where the options do not request them.
    - `prompt_logprobs`: in the first chunk, one per token of the prompt, where the options request them; that of the
      prompt's first token, which nothing precedes, is nan.
    - `reasoning`: what the model thinks before its answer, which `text` is without, and without the blanks around both.
    - `thought`: of each token, True where it belongs to the thought, False to the text, None to the tags and blanks
      around these; None altogether where thoughts are not kept apart.
    """

    text: str
    token_ids: list[int]
    drafted: list[bool]
    finish_reason: str | None
    stats: Stats
    logprobs: list[Logprob] | None = None
    prompt_logprobs: list[Logprob] | None = None
    reasoning: str = ""
    thought: list[bool | None] | None = None


@dataclass(frozen=True)
class Completion:
    """A whole answer. Fields as in `Chunk`.

    `token_ids` include end-of-text if the model wrote it; `text` has neither it nor the stop string.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    stats: Stats
    drafted: list[bool] = field(default_factory=list)
    logprobs: list[Logprob] | None = None
    prompt_logprobs: list[Logprob] | None = None
    reasoning: str = ""
    thought: list[bool | None] | None = None

    @classmethod
    def of(cls, chunks: Sequence[Chunk]) -> Completion:
        """Joins all chunks of an answer."""
        last = chunks[-1]
        assert last.finish_reason is not None
        tokens, drafted = ([x for chunk in chunks for x in getattr(chunk, name)] for name in ("token_ids", "drafted"))
        logprobs = None if last.logprobs is None else [x for chunk in chunks for x in chunk.logprobs or []]
        thought = None if last.thought is None else [x for chunk in chunks for x in chunk.thought or []]
        text, reasoning = ("".join(getattr(chunk, name) for chunk in chunks) for name in ("text", "reasoning"))
        of_prompt = chunks[0].prompt_logprobs
        return cls(text, tokens, last.finish_reason, last.stats, drafted, logprobs, of_prompt, reasoning, thought)


class CancelToken:
    """Ends one generation from any thread at any time."""

    def __init__(self) -> None:
        self.reason = ""  # "cancelled" or "timeout" once the generation has been ended
        self.rollback = False
        # Reentrant: while it is held, a stream that nobody holds any longer may end in the same thread.
        self._lock = threading.RLock()
        self._runner: ModelRunner | None = None

    def end(self, reason: str, rollback: bool = False) -> None:
        with self._lock:
            self.reason, self.rollback = self.reason or reason, self.rollback or rollback
            if self._runner is not None:
                self._runner.cancel()

    @contextmanager
    def within(self, timeout: float | None) -> Iterator[None]:
        """Ends the generation in the body, its preparation included, after `timeout` seconds."""
        if timeout is None:
            yield
            return
        timer = threading.Timer(timeout, self.end, ("timeout",))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    @contextmanager
    def over(self, runner: ModelRunner) -> Iterator[None]:
        """Lets `end` cancel the body, a generation on `runner`."""
        with runner.generation():
            with self._lock:
                self._runner = runner
            try:
                yield
            finally:
                with self._lock:
                    self._runner = None

    def check(self) -> None:
        """Raises Cancelled once the generation has been ended; called between two calls of the model."""
        if self.reason:
            raise Cancelled


class Stream(Iterator[Chunk]):
    """Iterates over the chunks of an answer, with `for` or `async for`. The model runs only while a chunk is being
    read; `start` reads the stream in a thread.
    """

    def __init__(
        self,
        decoder: SpeculativeDecoder,
        prompt: Sequence[int],
        tokenizer: Any,
        exclusive: Callable[[CancelToken], AbstractContextManager[None]],
        finished: Callable[[list[Chunk]], None],
        grammar: Callable[[CancelToken], GrammarState | None],
        thought: Thought | None = None,
    ) -> None:
        """Called by `Session.stream`. `exclusive` holds the session while the body runs; `finished` receives the chunks
        of an answer that the chat keeps. `grammar` starts what limits the answer, and may be cancelled. `thought`: what
        is kept apart from the text."""
        self._control = CancelToken()
        # These generators do not refer to this object, so a stream that nobody holds any longer ends at once.
        shown = decoder.options.shown_special_tokens
        decoding = ShowingSpecials(tokenizer, shown) if shown else tokenizer
        text = AnswerText(decoding, decoder.options.stops, thought, prompt)
        answer = _answer(decoder, prompt, text, self._control, grammar)
        self._chunks = _exclusively(decoder, answer, self._control, exclusive, finished)

    def __next__(self) -> Chunk:
        return next(self._chunks)

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Chunk:
        """Runs the model in a thread of the event loop's pool. A task that is cancelled meanwhile closes the stream."""
        import asyncio

        call = asyncio.get_running_loop().run_in_executor(None, next, self._chunks, None)
        try:
            chunk = await asyncio.shield(call)
        except asyncio.CancelledError:
            self.cancel(rollback=True)
            call.add_done_callback(lambda _: self.close())  # it is busy until then
            raise
        if chunk is None:
            raise StopAsyncIteration
        return chunk

    def close(self) -> None:
        """Ends the answer without reading further and frees the session; a chat drops the turn. An answer that another
        thread reads ends there."""
        try:
            self._chunks.close()
        except ValueError as error:
            if "already executing" not in str(error):
                raise
            self.cancel(rollback=True)

    def cancel(self, rollback: bool = False) -> None:
        """Ends the answer from any thread, also while the prompt is read.

        The last chunk's `finish_reason` is "cancelled". A chat keeps the turn so far, or drops it with `rollback`.
        """
        self._control.end("cancelled", rollback)

    def start(self, notify: Callable[[], None] | None = None) -> Running:
        """Reads the stream in a new thread and returns at once. `notify` is called in that thread after each chunk and
        at the end.
        """
        return Running(self, notify)


def _exclusively(
    decoder: SpeculativeDecoder,
    answer: Iterator[Chunk],
    control: CancelToken,
    exclusive: Callable[[CancelToken], AbstractContextManager[None]],
    finished: Callable[[list[Chunk]], None],
) -> Generator[Chunk, None, None]:
    """Yields the chunks of `answer` while it holds the session, for as long as the options allow."""
    chunks = list[Chunk]()
    with control.within(decoder.options.timeout), exclusive(control), control.over(decoder.runner):
        for chunk in answer:
            chunks.append(chunk)
            if chunk.finish_reason and not control.rollback:
                finished(chunks)
            yield chunk


def _answer(
    decoder: SpeculativeDecoder,
    prompt: Sequence[int],
    text: AnswerText,
    control: CancelToken,
    grammar: Callable[[CancelToken], GrammarState | None],
) -> Iterator[Chunk]:
    with_logprobs = decoder.options.logprobs is not None
    try:
        control.check()
        for done in decoder.run(prompt, grammar(control)):
            ended = done.finish_reason == "eos"  # not every vocabulary marks its end as special
            piece = text.push(done.tokens[:-1] if ended else done.tokens)
            tokens = done.tokens[: piece.counted] if piece.stopped else done.tokens
            reason = "stop" if piece.stopped else done.finish_reason
            if reason and not piece.stopped:
                piece = text.finish(piece)
                reason = "stop" if piece.stopped else reason
            dropped = len(done.tokens) - len(tokens)  # those after a stop string do not count
            decoder.stats.drop(dropped)
            left = time.perf_counter()
            logprobs = done.logprobs[: len(tokens)] if with_logprobs else None
            drafted, of_prompt = done.drafted[: len(tokens)], done.prompt_logprobs
            decoder.stats.reasoning_tokens = text.reasoning_tokens
            thought = None if piece.thought is None else [*piece.thought, text.kind][: len(tokens)]
            yield Chunk(
                piece.text, tokens, drafted, reason, decoder.stats.copy(), logprobs, of_prompt, piece.reasoning, thought
            )
            decoder.consumer_seconds += time.perf_counter() - left
            if reason:
                return
            control.check()
    except Cancelled:
        piece, logprobs = text.finish(), [] if with_logprobs else None
        stats = decoder.stats.copy()
        yield Chunk(
            piece.text, [], [], control.reason, stats, logprobs, reasoning=piece.reasoning, thought=piece.thought
        )


class Running:
    """A stream that is read in a thread of its own, made by `Stream.start`. For one reader at a time."""

    def __init__(self, stream: Stream, notify: Callable[[], None] | None = None) -> None:
        self._stream, self._notify = stream, notify or (lambda: None)
        self._changed = threading.Condition()
        self._chunks: list[Chunk] = []
        self._error: BaseException | None = None
        self._done = False
        self._read = 0
        self._thread = threading.Thread(target=self._work, name="streamspec", daemon=True)
        _running.add(self)
        self._thread.start()

    @property
    def done(self) -> bool:
        """Tells whether the generation has ended, with an answer or an error."""
        return self._done

    def read(self) -> list[Chunk]:
        """Returns the chunks since the last call, without waiting. Raises the generation's error once all chunks before
        it have been read.
        """
        with self._changed:
            new, self._read = self._chunks[self._read :], len(self._chunks)
            if not new and self._error is not None:
                raise self._error
            return new

    def __iter__(self) -> Iterator[Chunk]:
        while True:
            with self._changed:
                while not self._changed.wait_for(lambda: self._done or len(self._chunks) > self._read, SIGNALS):
                    pass
            new = self.read()
            yield from new
            if not new:
                return

    def result(self, timeout: float | None = None) -> Completion:
        """Waits for the whole answer and returns it. Raises the generation's error, or TimeoutError after `timeout`
        seconds, which does not end the generation.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._done, timeout):
                raise TimeoutError(f"no answer within {timeout} seconds")
        if self._error is not None:
            raise self._error
        return Completion.of(self._chunks)

    def cancel(self, rollback: bool = False) -> None:
        """Ends the answer (`Stream.cancel`)."""
        self._stream.cancel(rollback)

    def _work(self) -> None:
        try:
            for chunk in self._stream:
                with self._changed:
                    self._chunks.append(chunk)
                    self._changed.notify_all()
                self._notify()
        except BaseException as error:  # the reader raises it, whatever it is
            self._stream.close()
            self._error = error
        with self._changed:
            self._done = True
            self._changed.notify_all()
        try:
            self._notify()
        except BaseException as error:
            self._error = self._error or error


_running: WeakSet[Running] = WeakSet()


@atexit.register
def _end_all() -> None:
    """Cancels and joins started generations at exit: a thread still inside the model would crash the process."""
    left, end = [running for running in _running if not running.done], time.monotonic() + EXIT_SECONDS
    for running in left:
        running.cancel()
    for running in left:
        running._thread.join(max(0.0, end - time.monotonic()))
