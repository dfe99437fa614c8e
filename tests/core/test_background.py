from __future__ import annotations

import threading

import pytest

from streamspec.background import Background


def test_the_caller_goes_on_and_gets_the_result_later() -> None:
    allowed = threading.Event()
    running = Background(lambda: allowed.wait(10))
    allowed.set()
    assert running.result() is True and running.result() is True


def test_what_the_function_raises_comes_with_the_result() -> None:
    def fails() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError, match="x"):
        Background(fails).result()


def test_nobody_has_to_ask() -> None:
    running = Background(lambda: 1)
    running._thread.join(10)
    assert not running._thread.is_alive()


def test_without_memory_for_a_thread_it_runs_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert Background(lambda: 3).result() == 3
