"""Answers a list of prompts: one after the other, or several at once where calls can be shared. Covered by
tests/runtime/engine/shared/test_call_sharing.py."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from streamspec.runtime.options import GenerationOptions
from streamspec.runtime.stream import Completion, Stream

if TYPE_CHECKING:
    from streamspec.runtime.session import Session


def answer_all(session: Session, prompts: Sequence[Sequence[int]], options: GenerationOptions) -> list[Completion]:
    """Returns the answers in order. Checks all prompts before the first is read. Where an answer fails, the others are
    cancelled and its error is raised; `Session.cancel` ends all that are not finished."""
    opened = [session.stream(ids, options) for ids in prompts]
    at_once = min(session.batch, len(prompts))
    several, outer = _SeveralAtOnce(prompts, options), session.end_list
    session.end_list = several.stop if at_once > 1 else partial(_cancel, opened)
    try:
        if at_once > 1:
            return several.answer(session, at_once)
        return [Completion.of(list(stream)) for stream in opened]
    finally:
        session.end_list = outer


def _cancel(streams: Iterable[Stream]) -> None:
    for stream in streams:
        stream.cancel()


class _SeveralAtOnce:
    """Sessions that take the next prompt each, in threads of their own."""

    def __init__(self, prompts: Sequence[Sequence[int]], options: GenerationOptions) -> None:
        self._options, self._left = options, deque(enumerate(prompts))
        self._answers = dict[int, Completion]()
        self._running: dict[Session, Stream] = {}
        self._errors, self._stopped = list[BaseException](), threading.Event()

    def answer(self, session: Session, at_once: int) -> list[Completion]:
        """The answers in order."""
        others, started = [session.another() for _ in range(at_once - 1)], list[threading.Thread]()
        first = self._left.popleft()  # whatever the threads do, the session itself is asked: it may be busy
        try:
            for other in others:
                thread = threading.Thread(target=self._work, args=(other,), name="streamspec", daemon=True)
                thread.start()
                started.append(thread)
        except RuntimeError as error:  # no more threads
            self._end(error)
        self._work(session, first)
        for thread in started:
            try:
                thread.join()
            except BaseException as error:  # Ctrl-C
                self._end(error)
                thread.join()
        if self._errors:
            raise self._errors[0]
        return [self._answers[number] for number in sorted(self._answers)]

    def _work(self, worker: Session, given: tuple[int, Sequence[int]] | None = None) -> None:
        try:
            while not self._errors:
                try:
                    number, ids = given or self._left.popleft()
                except IndexError:
                    return
                given = None
                self._running[worker] = stream = worker.stream(ids, self._options)
                if self._stopped.is_set():  # since it was asked for
                    stream.cancel()
                self._answers[number] = Completion.of(list(stream))
        except BaseException as error:
            self._end(error)

    def _end(self, error: BaseException) -> None:
        self._errors.append(error)
        self.stop()

    def stop(self) -> None:
        """Ends what is under way, and what comes next before it is read."""
        self._stopped.set()
        _cancel(list(self._running.values()))
