"""The example's window: it answers as the session does, shows what was drafted, and never waits for the model."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from streamspec.errors import DataError
from streamspec.runtime import Chunk, Sampling, Stats, load
from tests.packaging.conftest import APP, module


@pytest.fixture
def app(display: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("DISPLAY", display)
    monkeypatch.syspath_prepend(APP.parent)  # where its widgets and its theme are
    return module(APP)


@pytest.fixture
def window(app: Any) -> Iterator[Any]:
    made = app.Window(app.Model())
    made.model.start()
    yield weakref.proxy(made)
    if made.model.is_alive():
        made.close()
        made.model.join(10)
    assert not made.model.is_alive()
    ended = weakref.ref(made)
    del made
    gc.collect()  # here: another thread that collects it waits a second for each of its images, as Tk allows one alone
    assert ended() is None


def until(window: Any, reached: Callable[[], bool], seconds: float = 20) -> int:
    """Runs the window until it is so; returns how many times it could have done something else."""
    turns, deadline = 0, time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline, window.status.get()
        window.root.update()
        turns += 1
        time.sleep(0.005)
    return turns


def says(window: Any, message: str) -> None:
    window.entry.insert("1.0", message)
    window.send()


def shown(window: Any, tag: str) -> str:
    ranges = [str(index) for index in window.text.tag_ranges(tag)]
    return "".join(window.text.get(a, b) for a, b in zip(ranges[::2], ranges[1::2], strict=True))


def test_it_answers_as_the_session_does_and_shows_what_was_drafted(
    app: Any, window: Any, chat_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(bundle: Path) -> Any:
        return load(bundle, threads=1, tree=8, cache_dir=tmp_path)

    monkeypatch.setattr(app, "load", opened)
    window.open(chat_bundle)
    until(window, lambda: window.ready and not window.busy)
    said, chunks = window.on_said, list[Chunk]()
    window.on_said = lambda value: (chunks.append(value[0]), said(value))
    session, transcript = opened(chat_bundle), ""
    for message in ("hello", "how are\nyou?"):
        says(window, message)
        until(window, lambda: not window.busy)
        transcript += f"{message}\n{session.chat(message, max_new_tokens=app.MAX_NEW_TOKENS).text}\n"
    assert window.text.get("1.0", "end-1c") == transcript
    drafted = [token for chunk in chunks for token, was in zip(chunk.token_ids, chunk.drafted, strict=True) if was]
    words = session.tokenizer.decode(drafted).split()
    assert "".join(shown(window, "drafted").split()) == "".join(words) != ""
    ends = [place for place, chunk in enumerate(chunks) if chunk.finish_reason]
    last = [flag for chunk in chunks[ends[0] + 1 :] for flag in chunk.drafted]
    assert window.status.get().startswith(f"{len(last)} tokens · {sum(last) / len(last):.0%} drafted · ")


def test_with_the_switch_off_nothing_is_drafted_and_the_text_is_the_same(
    app: Any, window: Any, chat_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "load", lambda bundle: load(bundle, threads=1, tree=8, cache_dir=tmp_path))
    texts = {}
    for speculate in (True, False):
        window.open(chat_bundle)  # a new conversation
        until(window, lambda: window.ready and not window.busy)
        window.speculate.set(speculate)
        says(window, "how are you?")
        until(window, lambda: not window.busy)
        texts[speculate] = window.text.get("1.0", "end-1c")
        assert bool(shown(window, "drafted")) == speculate
    assert texts[True] == texts[False]


def test_the_window_lives_while_a_bundle_loads_and_says_why_one_does_not(
    app: Any, window: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = app.load

    def slowly(bundle: Path) -> Any:
        time.sleep(0.5)
        return real(bundle)

    monkeypatch.setattr(app, "load", slowly)
    window.open(tmp_path)
    assert "Loading" in window.status.get() and str(window.bar["mode"]) == "indeterminate"
    assert until(window, lambda: not window.busy) > 10  # a window that waits would be drawn once or twice
    assert "manifest.json" in window.status.get() and "\n" not in window.status.get()
    assert not window.ready and str(window.button["state"]) == "disabled"


class Talker:
    """A session that says a word every 20 ms until it is told to stop, refuses "no", and fails at "boom"."""

    speculation, sampling = "on", Sampling()

    class tokenizer:
        @staticmethod
        def decode(ids: list[int]) -> str:
            return "word "

    def stream_chat(self, message: str, **options: Any) -> Any:
        if message == "no":
            raise DataError("a question", "another", "ask another")
        options["progress"](1, 2)
        self.stream = Talk(message)
        return self.stream


class Talk(Iterator[Chunk]):
    def __init__(self, message: str) -> None:
        self._stopped, self._message, self._ended = threading.Event(), message, False

    def cancel(self) -> None:
        self._stopped.set()

    def __next__(self) -> Chunk:
        if self._message == "boom":
            raise ZeroDivisionError("of the model")
        if self._ended:
            raise StopIteration
        self._ended = self._stopped.wait(0.02)
        return Chunk(
            "" if self._ended else "word ",
            [] if self._ended else [1],
            [] if self._ended else [False],
            "cancelled" if self._ended else None,
            Stats(),
        )


def test_it_lives_while_an_answer_comes_and_the_button_stops_it(
    app: Any, window: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "load", lambda bundle: Talker())
    window.open(tmp_path)
    until(window, lambda: window.ready and not window.busy)
    says(window, "hello")
    assert window.button["text"] == "Stop" and str(window.opener["state"]) == "disabled"
    assert until(window, lambda: window.text.get("1.0", "end").count("word") >= 10) >= 10
    window.button.invoke()
    until(window, lambda: not window.busy, 2)
    assert window.status.get().endswith(" · stopped") and window.button["text"] == "Send"


def test_stopped_before_it_began_an_answer_ends_at_once(
    app: Any, window: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, talker = threading.Event(), Talker()
    begin = talker.stream_chat
    monkeypatch.setattr(talker, "stream_chat", lambda message, **options: gate.wait() and begin(message, **options))
    monkeypatch.setattr(app, "load", lambda bundle: talker)
    window.open(tmp_path)
    until(window, lambda: window.ready and not window.busy)
    says(window, "hello")
    window.button.invoke()
    gate.set()
    until(window, lambda: window.status.get().endswith(" · stopped"), 2)
    assert "word" not in window.text.get("1.0", "end")


@pytest.mark.parametrize(
    ("message", "line"),
    [("no", "a question; expected another; ask another"), ("boom", "ZeroDivisionError: of the model")],
)
def test_what_goes_wrong_is_one_line_and_the_window_goes_on(
    message: str, line: str, app: Any, window: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "load", lambda bundle: Talker())
    window.open(tmp_path)
    until(window, lambda: window.ready and not window.busy)
    says(window, message)
    until(window, lambda: not window.busy)
    assert window.status.get() == line and window.line["style"] == "Bad.TLabel"
    says(window, "hello")
    until(window, lambda: "word" in window.text.get("1.0", "end"))


def test_closing_ends_the_answer_and_the_thread(app: Any, window: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    talking(app, window, monkeypatch)
    says(window, "hello")
    until(window, lambda: "word" in window.text.get("1.0", "end"))
    window.close()
    window.model.join(2)
    assert not window.model.is_alive()


def talking(app: Any, window: Any, monkeypatch: pytest.MonkeyPatch) -> Talker:
    talker = Talker()
    monkeypatch.setattr(app, "load", lambda bundle: talker)
    window.open(Path("bundle"))
    until(window, lambda: window.ready and not window.busy)
    return talker


def test_enter_sends_shift_and_enter_begin_a_line_and_escape_stops(
    app: Any, window: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    talking(app, window, monkeypatch)
    window.entry.insert("1.0", "one")
    window.root.update()
    window.entry.focus_force()
    window.entry.event_generate("<Shift-Return>")
    window.entry.insert("end-1c", "two")
    until(window, lambda: window.entry["height"] == 2)
    assert not window.busy
    window.entry.event_generate("<Return>")
    assert window.busy and window.text.get("1.0", "3.0") == "one\ntwo\n" and window.entry.get("1.0", "end-1c") == ""
    until(window, lambda: "word" in window.text.get("1.0", "end"))
    window.root.event_generate("<Escape>")
    until(window, lambda: not window.busy, 2)
    assert window.status.get().endswith(" · stopped")


def test_a_new_conversation_forgets_the_old_one(app: Any, window: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    talker, forgotten = talking(app, window, monkeypatch), threading.Event()
    monkeypatch.setattr(talker, "forget", forgotten.set, raising=False)
    says(window, "hello")
    window.forget()  # an answer comes
    assert not forgotten.is_set()
    window.model.stop()
    until(window, lambda: not window.busy)
    window.anew.invoke()
    until(window, lambda: not window.busy)
    assert forgotten.is_set() and window.text.get("1.0", "end-1c") == "" and not window.text.winfo_children()


def test_colours_change_while_it_answers_and_long_messages_stay_in_the_window(
    app: Any, window: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    talking(app, window, monkeypatch)
    says(window, "hello " * 100)
    light = window.text["background"]
    window.shade.invoke()
    until(window, lambda: "word" in window.text.get("1.0", "end"))
    assert window.text["background"] != light and window.shade["text"] == "Light"
    (bubble,) = window.text.winfo_children()
    window.root.geometry("440x400")
    until(window, lambda: 0 < bubble.winfo_width() < 330 and bubble.winfo_x() + bubble.winfo_width() <= 440)


def test_nothing_wakes_an_idle_window(app: Any, window: Any) -> None:
    window.root.update()
    assert window.root.tk.call("after", "info") == ""
