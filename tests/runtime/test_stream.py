"""Streams on a toy runner: ending them from outside, reading them from another thread, errors on their way."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import time
from typing import Any

import pytest

from streamspec.errors import ConfigError
from streamspec.runtime import Session
from tests.runtime.test_session import saying
from tests.support.toy_runner import ToyRunner

TEXT = "abcdefghijklmnopqrstuvwxyz"


def slow(seconds: float = 0.01) -> Session:
    session = saying(TEXT * 4, context=400, rows=1)
    toy(session).on_call = lambda: time.sleep(seconds)
    return session


def toy(session: Session) -> ToyRunner:
    assert isinstance(session.runner, ToyRunner)
    return session.runner


def test_a_stream_cancelled_before_it_began_reads_nothing() -> None:
    session = saying(TEXT)
    stream = session.stream("p")
    stream.cancel()
    assert [c.finish_reason for c in stream] == ["cancelled"] and not toy(session).calls
    assert session.generate("p", max_new_tokens=3).text == "abc"


def test_a_stream_that_another_thread_reads_is_closed_there() -> None:
    session, texts = slow(0.05), list[str]()
    stream = session.stream("p", max_new_tokens=100)
    reader = threading.Thread(target=lambda: texts.extend(chunk.text for chunk in stream))
    reader.start()
    time.sleep(0.12)
    stream.close()
    reader.join(5)
    assert not reader.is_alive() and 0 < len(texts) < 50
    assert session.generate("p", max_new_tokens=2).text == "ab"


def test_a_coroutine_may_close_the_stream_whose_reading_was_cancelled() -> None:
    session = slow(0.05)

    async def read() -> None:
        async with asyncio.timeout(0.12):
            with contextlib.closing(session.stream("p", max_new_tokens=100)) as stream:
                async for _ in stream:
                    pass

    with pytest.raises(TimeoutError):
        asyncio.run(read())
    assert session.generate("p", max_new_tokens=2).text == "ab"


def test_cancel_ends_all_answers_of_a_list() -> None:
    session, calls = saying(TEXT * 4, context=400, rows=1), list[int]()

    def third() -> None:
        calls.append(1)
        if len(calls) == 3:
            session.cancel()

    toy(session).on_call = third
    answers = session.generate(["p", "q", "r"], max_new_tokens=50)
    assert [answer.finish_reason for answer in answers] == ["cancelled"] * 3 and len(calls) < 6


def test_a_cancel_while_the_prompt_is_read_ends_there() -> None:
    session = saying(TEXT)
    toy(session).on_call = session.cancel
    answer = session.generate("p")
    assert (answer.text, answer.finish_reason, toy(session).calls) == ("", "cancelled", [])


def test_time_that_runs_out_ends_the_answer_with_what_there_is() -> None:
    others = set(threading.enumerate())  # what earlier tests left running
    session = slow()
    answer = session.generate("p", max_new_tokens=100, timeout=0.1)
    assert answer.finish_reason == "timeout" and 0 < len(answer.text) < 50 and TEXT.startswith(answer.text[:26])
    assert session.generate("p", max_new_tokens=3, timeout=60).finish_reason == "length"
    for timer in [t for t in threading.enumerate() if isinstance(t, threading.Timer) and t not in others]:
        timer.join(1)
        assert not timer.is_alive()


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), "soon", True, 1e12])
def test_senseless_timeouts_are_refused(timeout: Any) -> None:
    with pytest.raises(ConfigError, match="timeout"):
        saying("abc").generate("p", timeout=timeout)


@pytest.mark.parametrize("stop", [None, 5, [5], "", [""], b"x"])
def test_senseless_stops_are_refused(stop: Any) -> None:
    with pytest.raises(ConfigError, match="stop"):
        saying("abc").generate("p", stop=stop)


def test_sampling_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="sampling 0.7"):
        saying("abc").stream("p", sampling=0.7)  # type: ignore[typeddict-item]


def test_a_stream_nobody_holds_leaves_the_session_free_at_once() -> None:
    session = saying(TEXT)
    gc.disable()
    try:
        for _ in session.stream("p"):
            break
        assert session.generate("p", max_new_tokens=2).text == "ab"
    finally:
        gc.enable()


def test_progress_of_the_prompt_is_told() -> None:
    told: list[tuple[int, int]] = []
    saying("abc").generate("prompt", progress=lambda read, tokens: told.append((read, tokens)))
    assert told == [(7, 7)]


class MalformedGraph(Exception):
    pass


def test_an_error_in_the_stream_reaches_its_reader_and_frees_the_session() -> None:
    session = saying(TEXT)

    def fail() -> None:
        raise MalformedGraph

    runner = toy(session)
    runner.on_call = lambda: fail() if len(runner.calls) == 2 else None
    running = session.stream("p").start()
    read = []
    with pytest.raises(MalformedGraph):
        for chunk in running:
            read.append(chunk.text)
    assert "".join(read) == "abcde"  # all that came before
    with pytest.raises(MalformedGraph):
        running.result(5)
    runner.on_call = lambda: None
    assert session.generate("p", max_new_tokens=2).text == "ab"


def test_a_thread_reads_and_gives_the_same_answer() -> None:
    session, news = saying(TEXT), list[int]()
    running = session.stream("p").start(lambda: news.append(1))
    answer = running.result(5)
    assert answer.text == TEXT and answer.finish_reason == "eos" and running.done
    chunks = running.read()
    assert "".join(c.text for c in chunks) == TEXT and running.read() == [] and len(news) == len(chunks) + 1


def test_waiting_has_an_end_and_the_answer_goes_on() -> None:
    running = slow(0.05).stream("p", max_new_tokens=8).start()
    with pytest.raises(TimeoutError):
        running.result(0.01)
    assert running.result(5).text == "abcdefgh"


def test_a_thread_is_cancelled_from_another() -> None:
    session = slow()
    running = session.stream("p", max_new_tokens=100).start()
    while not running.read():
        time.sleep(0.001)
    asked = time.perf_counter()
    running.cancel()
    assert running.result(5).finish_reason == "cancelled" and time.perf_counter() - asked < 1
    assert session.generate("p", max_new_tokens=2).text == "ab"


def test_an_error_of_the_notified_is_no_hidden_one() -> None:
    session = slow()

    def notify() -> None:
        raise MalformedGraph

    with pytest.raises(MalformedGraph):
        session.stream("p").start(notify).result(5)
    assert session.generate("p", max_new_tokens=2).text == "ab"


def test_a_busy_session_refuses_in_the_readers_thread() -> None:
    session = slow()
    first = session.stream("p", max_new_tokens=50).start()
    while not first.read():
        time.sleep(0.001)
    with pytest.raises(ConfigError, match="busy"):
        session.stream("p").start().result(5)
    first.cancel()
    assert first.result(5).finish_reason == "cancelled"


def test_async_for_reads_a_stream_beside_other_tasks() -> None:
    async def talk() -> tuple[str, int]:
        ticks, done = 0, False

        async def tick() -> None:
            nonlocal ticks
            while not done:
                ticks += 1
                await asyncio.sleep(0.001)

        beside = asyncio.create_task(tick())
        text = "".join([chunk.text async for chunk in session.stream("p", max_new_tokens=10)])
        done = True
        await beside
        return text, ticks

    session = slow()
    text, ticks = asyncio.run(talk())
    assert text == TEXT[:10] and ticks > 10
    assert session.generate("p", max_new_tokens=3).text == "abc"


def test_async_for_raises_the_generations_error_and_a_left_stream_frees_the_session() -> None:
    session = slow()

    async def leave() -> str:
        async for chunk in session.stream("p"):
            return chunk.text
        return ""

    assert asyncio.run(leave()) == "a" and session.generate("p", max_new_tokens=1).text == "a"

    def fail() -> None:
        raise RuntimeError("broken")

    toy(session).on_call = fail
    with pytest.raises(RuntimeError, match="broken"):
        asyncio.run(leave())


def test_a_cancelled_task_ends_its_stream_and_frees_the_session() -> None:
    session = slow(0.05)

    async def talk() -> None:
        async def read() -> None:
            async for _ in session.stream_chat("p"):
                pass

        task = asyncio.create_task(read())
        await asyncio.sleep(0.12)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0.2)
        toy(session).on_call = lambda: None
        answer = [chunk.text async for chunk in session.stream("p", max_new_tokens=3)]
        assert "".join(answer) == "abc" and session.messages == []

    asyncio.run(talk())
