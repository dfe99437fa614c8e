"""Sessions of a bundle that answers read whole answers, and only these, where their states are kept."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from streamspec.adapters.answers.bundle import BundleAnswers
from streamspec.adapters.answers.request import AnswerRequest
from streamspec.bundle.manifest import FileInfo
from streamspec.errors import ResourceError

REQUEST = AnswerRequest([5, 6], 8, 0.0, 1.0, 0)


class FakeSession:
    """A session that answers 7, 8 unless it is cancelled in the call of number `cancelled`."""

    batch, context_length = 1, 64

    def __init__(self, cancelled: int | None = None) -> None:
        self.calls, self.cancelled = list[list[int]](), cancelled

    def another(self) -> FakeSession:
        return self

    def generate(self, prompt: list[int], max_new_tokens: int) -> Any:
        self.calls.append(prompt)
        ended = "cancelled" if len(self.calls) - 1 == self.cancelled else "stop"
        return SimpleNamespace(token_ids=[7, 8][:max_new_tokens], finish_reason=ended)


@pytest.mark.parametrize("cancelled", [None, 0, 1])
def test_a_cancelled_answer_is_not_read_again(cancelled: int | None) -> None:
    session, kept = FakeSession(cancelled), list[Any]()
    answers = BundleAnswers(Path("bundle"), lambda folder, **_: session, 1)
    answers.keep_states(Path("keeping"), kept.append)
    assert answers.answer(REQUEST) == [7, 8]
    assert session.calls == [[5, 6], [5, 6, 7, 8]][: 1 if cancelled == 0 else 2]
    assert kept == ([session] if cancelled is None else [])


def test_a_bundle_made_anew_of_the_same_weights_goes_on_with_their_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    def answerer(**changes: Any) -> dict[str, str]:
        files = {"model.onnx.data": FileInfo("ab" * 32, 5), "model.onnx": FileInfo(changes.pop("graph", "cd" * 32), 5)}
        made: dict[str, Any] = {"rounding": "int8", "files": files} | changes
        monkeypatch.setattr("streamspec.adapters.answers.bundle.read_manifest", lambda _: SimpleNamespace(**made))
        return BundleAnswers(Path("bundle"), lambda folder, **_: FakeSession(), 1).made_by()

    first = answerer()
    assert answerer(tools={"streamspec": "9"}, graph="ef" * 32) == first
    assert answerer(rounding="int4") != first
    assert answerer(files={"model.onnx.data": FileInfo("01" * 32, 5)}) != first


def test_a_text_as_long_as_the_context_is_not_read_again() -> None:
    session, kept = FakeSession(), list[Any]()
    session.context_length = 4
    answers = BundleAnswers(Path("bundle"), lambda folder, **_: session, 1)
    answers.keep_states(Path("keeping"), kept.append)
    assert answers.answer(REQUEST) == [7, 8] and len(session.calls) == 1 and not kept


def test_where_the_second_bundle_has_no_room_the_first_goes_on_answering() -> None:
    session, kept = FakeSession(), list[Any]()

    def opened(folder: Path, **_: Any) -> FakeSession:
        if folder.name == "keeping":
            raise ResourceError("no memory", "more", "close something")
        return session

    answers = BundleAnswers(Path("bundle"), opened, 1)
    with pytest.raises(ResourceError):
        answers.keep_states(Path("keeping"), kept.append)
    assert answers.answer(REQUEST) == [7, 8] and len(session.calls) == 1 and not kept
