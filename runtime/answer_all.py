"""Answers a list of prompts: one after the other, or several at once where calls can be shared. Covered by
tests/runtime/engine/shared/test_call_sharing.py."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from streamspec.runtime.options import GenerationOptions
from streamspec.runtime.stream import Completion, Stream

CANCELLED = "cancelled"  # why an answer ended

if TYPE_CHECKING:
    from streamspec.runtime.session import Session


def answer_all(session: Session, prompts: Sequence[Sequence[int]], options: GenerationOptions) -> list[Completion]:
    """Returns the answers in order. Checks all prompts before the first is read. Where an answer fails, the others are
    cancelled and its error is raised; `Session.cancel` ends all that are not finished."""
    opened = [session.stream(ids, options) for ids in prompts]
    at_once = min(session.batch, len(prompts))
    if at_once > 1:
        return _SeveralAtOnce(prompts, options).answer(session, at_once)
    answers = list[Completion]()
    for stream in opened:
        if answers and answers[-1].finish_reason == CANCELLED:
            stream.cancel()
        answers.append(Completion.of(list(stream)))
    return answers


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
        try:
            for other in others:
                thread = threading.Thread(target=self._work, args=(other,), name="streamspec", daemon=True)
                thread.start()
                started.append(thread)
        except RuntimeError as error:  # no more threads
            self._end(error)
        self._work(session)
        for thread in started:
            try:
                thread.join()
            except BaseException as error:  # Ctrl-C
                self._end(error)
                thread.join()
        if self._errors:
            raise self._errors[0]
        return [self._answers[number] for number in sorted(self._answers)]

    def _work(self, worker: Session) -> None:
        try:
            while not self._errors:
                try:
                    number, ids = self._left.popleft()
                except IndexError:
                    return
                self._running[worker] = stream = worker.stream(ids, self._options)
                if self._stopped.is_set():  # since it was asked for
                    stream.cancel()
                self._answers[number] = Completion.of(list(stream))
                if self._answers[number].finish_reason == CANCELLED:
                    self._stop()
        except BaseException as error:
            self._end(error)

    def _end(self, error: BaseException) -> None:
        self._errors.append(error)
        self._stop()

    def _stop(self) -> None:
        """Ends what is under way, and what comes next before it is read."""
        self._stopped.set()
        for stream in list(self._running.values()):
            stream.cancel()
