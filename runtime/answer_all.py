"""Answers a list of prompts: one after the other, or several at once where calls can be shared. Covered by
tests/runtime/engine/shared/test_call_sharing.py."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from streamspec.runtime.options import GenerationOptions
from streamspec.runtime.stream import Completion, Stream

if TYPE_CHECKING:
    from streamspec.runtime.session import Session


def answer_all(session: Session, prompts: Sequence[Sequence[int]], options: GenerationOptions) -> list[Completion]:
    """Returns the answers in order. Checks all prompts before the first is read. Where an answer fails, the others are
    cancelled and its error is raised."""
    opened = [session.stream(ids, options) for ids in prompts]
    at_once = min(session.batch, len(prompts))
    if at_once < 2:
        return [Completion.of(list(stream)) for stream in opened]
    others = [session.another() for _ in range(at_once - 1)]
    left, answers, errors = deque(enumerate(prompts)), dict[int, Completion](), list[BaseException]()
    running: dict[Session, Stream] = {}

    def end(error: BaseException) -> None:
        errors.append(error)
        for stream in list(running.values()):
            stream.cancel()

    def work(worker: Session) -> None:
        try:
            while not errors:
                try:
                    number, ids = left.popleft()
                except IndexError:
                    return
                running[worker] = stream = worker.stream(ids, options)
                if errors:  # since it was asked for
                    return
                answers[number] = Completion.of(list(stream))
        except BaseException as error:
            end(error)

    threads = [threading.Thread(target=work, args=(worker,), name="streamspec", daemon=True) for worker in others]
    for thread in threads:
        thread.start()
    work(session)
    for thread in threads:
        try:
            thread.join()
        except BaseException as error:  # Ctrl-C
            end(error)
            thread.join()
    if errors:
        raise errors[0]
    return [answers[number] for number in range(len(prompts))]
