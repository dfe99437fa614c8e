"""Many sessions over one bundle, prompts whose beginning is known, chats (conversation), conversations on disk
(saved_session).
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from streamspec.errors import ConfigError, ContextOverflow, ConversationError, DataError
from streamspec.runtime import Completion, Sampling, Session, load
from streamspec.runtime.conversation import forget
from streamspec.runtime.engine import ort_runner as engines
from streamspec.runtime.engine.scheduler import _Turn

Bundles = Callable[[str], Path]
HOT = Sampling(temperature=1.0, seed=5)
HARSH = Sampling(temperature=0.8, top_k=20, repetition_penalty=1.3, seed=7)
PROMPTS = ["hello", "hello again", "hello against", "other", "hello again, and more of it", "he"]


def open_session(folder: Path, **options: Any) -> Session:
    return load(folder, **{"threads": 1, "tree": 8, "cache_dir": folder.parent / "cache"} | options)


def cold(session: Session, prompt: Any, **options: Any) -> Completion:
    fresh = session.another()
    answer = fresh.generate(prompt, **options)
    assert answer.stats.reused_tokens == 0
    return answer


@pytest.mark.parametrize("bundle", ["fp32", "int8", "full", "jakiro", "static full", "device full"])
@pytest.mark.parametrize("sampling", [Sampling(seed=0), HOT, HARSH])
def test_a_known_beginning_is_not_read_again_and_changes_nothing(
    bundle: str, sampling: Sampling, bundles: Bundles, request: pytest.FixtureRequest
) -> None:
    if bundle.startswith("device"):
        request.getfixturevalue("device")
    session = open_session(bundles(bundle), **({"provider": "device"} if bundle.startswith("device") else {}))
    reused = 0
    for number, prompt in enumerate(PROMPTS):
        expected = cold(session, prompt, max_new_tokens=20, sampling=sampling)
        answer = session.generate(prompt, max_new_tokens=20, sampling=sampling, speculate=number % 3 != 2)
        assert (answer.token_ids, answer.text, answer.finish_reason) == (
            expected.token_ids,
            expected.text,
            expected.finish_reason,
        )
        reused += answer.stats.reused_tokens
        again = session.encode(prompt) + answer.token_ids  # what a next turn begins with
        if len(again) < 120:
            grown = session.generate([*again, 9], max_new_tokens=5, sampling=sampling)
            assert grown.stats.reused_tokens >= len(again) - 2
            assert grown.token_ids == cold(session, [*again, 9], max_new_tokens=5, sampling=sampling).token_ids
    assert reused > 0


def test_threads_with_sessions_of_their_own_answer_as_one_alone(
    bundles: Bundles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "SHARED_CHUNK", 2)  # prompts in pieces while others wait
    session = open_session(bundles("full"))
    options: list[dict[str, Any]] = [{}, {"sampling": HOT}, {"speculate": False}, {"sampling": HARSH}]
    expected = {
        (i, p): session.generate(p, max_new_tokens=30, **options[i]).token_ids for i in range(4) for p in PROMPTS
    }
    found: dict[tuple[int, str], list[int]] = {}

    def work(i: int, own: Session) -> None:
        for prompt in PROMPTS:
            found[i, prompt] = own.generate(prompt, max_new_tokens=30, **options[i]).token_ids

    threads = [threading.Thread(target=work, args=(i, session.another())) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == expected
    assert len({id(session.another().runner.model) for _ in range(3)} | {id(session.runner.model)}) == 1


def test_loading_from_several_threads_at_once(bundles: Bundles, tmp_path: Path) -> None:
    folder, answers = bundles("int8"), list[list[int]]()

    def work() -> None:
        answers.append(load(folder, threads=1, cache_dir=tmp_path).generate("hello", max_new_tokens=12).token_ids)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert answers == [open_session(folder).generate("hello", max_new_tokens=12).token_ids] * 4


def test_two_at_once_are_served_in_turn(bundles: Bundles, monkeypatch: pytest.MonkeyPatch) -> None:
    session, order, running = open_session(bundles("fp32"), tree="plain"), list[str](), {"a", "b"}
    enter = _Turn.__enter__

    def once_all_wait(turn: _Turn) -> None:  # so that whose thread the system lets run first says nothing
        enter(turn)
        order.append(threading.current_thread().name)
        while len(turn._queue) < len(running):
            time.sleep(0.0005)

    def work(own: Session) -> None:
        name = threading.current_thread().name
        try:
            own.generate("x" if name == "a" else "zzzzzz", max_new_tokens=100)
        finally:
            running.remove(name)

    threads = [threading.Thread(target=work, args=(session.another(),), name=name) for name in "ab"]
    monkeypatch.setattr(_Turn, "__enter__", once_all_wait)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    both = min(order.count("a"), order.count("b"))  # after it one asks alone
    assert both > 50 and "".join(order[: 2 * both]) in {"ab" * both, "ba" * both}


@pytest.mark.parametrize("bundle", ["fp32", "static fp32"])
def test_a_prompt_being_read_is_cancelled_between_and_within_its_pieces(
    bundle: str, bundles: Bundles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "CHUNK", 8)
    session = open_session(bundles(bundle))
    told: list[int] = []

    def progress(read: int, total: int) -> None:
        told.append(read)
        if read >= 16:
            session.cancel()

    answer = session.generate([7, 9, 11, 30] * 20, progress=progress)
    assert (answer.finish_reason, answer.token_ids, told) == ("cancelled", [], [8, 16])
    again = session.generate([7, 9, 11, 30] * 20, max_new_tokens=5)
    assert again.stats.reused_tokens == 16  # what had been read stays read
    assert again.token_ids == cold(session, [7, 9, 11, 30] * 20, max_new_tokens=5).token_ids


def test_the_context_can_be_capped_and_memory_with_it(bundles: Bundles) -> None:
    session = open_session(bundles("fp32"), context=32)
    assert len(session.generate("x", max_new_tokens=100).token_ids) + len(session.encode("x")) <= 32
    with pytest.raises(ContextOverflow, match="context's 32"):
        session.generate([7] * 32)
    assert session.runner.cache.capacity <= 32 + engines.CHUNK + 3  # type: ignore[attr-defined]
    for wrong in (1, 129, 0, True, 2.5):
        with pytest.raises(ConfigError, match=r"2\.\.128"):
            open_session(bundles("fp32"), context=wrong)


# ---- chats


def test_a_chat_goes_on_turn_by_turn_as_if_read_anew(bundles: Bundles) -> None:
    session = open_session(bundles("chat"))
    session.messages = [{"role": "system", "content": "s"}]
    for said in ("hi", "and", "on"):
        expected = cold(session, [*session.messages, {"role": "user", "content": said}], max_new_tokens=6)
        answer = session.chat(said, max_new_tokens=6)
        assert (answer.text, answer.token_ids) == (expected.text, expected.token_ids)
        assert session.messages[-2:] == [
            {"role": "user", "content": said},
            {"role": "assistant", "content": answer.text},
        ]
    assert [m["role"] for m in session.messages] == ["system"] + ["user", "assistant"] * 3
    assert answer.stats.reused_tokens > 0


def test_a_cancelled_turn_stays_or_is_rolled_back(bundles: Bundles) -> None:
    session = open_session(bundles("chat"), tree="plain")
    first = session.chat("hi", max_new_tokens=4)
    kept = list(session.messages)
    for rollback in (True, False):
        stream = session.stream_chat("more", max_new_tokens=40)
        text = next(stream).text + next(stream).text
        session.cancel(rollback)
        last = list(stream)[-1]
        assert last.finish_reason == "cancelled"
        text += last.text
        expected = (
            kept if rollback else [*kept, {"role": "user", "content": "more"}, {"role": "assistant", "content": text}]
        )
        assert session.messages == expected
    session.messages = kept
    stream = session.stream_chat("left")
    next(stream)
    stream.close()  # left early: forgotten
    assert session.messages == kept and first.text == kept[1]["content"]
    assert (
        session.chat("more", max_new_tokens=4).token_ids
        == cold(session, [*kept, {"role": "user", "content": "more"}], max_new_tokens=4).token_ids
    )


def test_a_chat_that_no_longer_fits_is_refused_or_forgets_its_oldest_turns(bundles: Bundles) -> None:
    session = open_session(bundles("chat"))
    session.messages = [{"role": "system", "content": "s"}]
    with pytest.raises(ContextOverflow, match="context"):
        for _ in range(40):
            session.chat("tell me", max_new_tokens=8)
    full = list(session.messages)
    with pytest.raises(ContextOverflow):
        session.chat("tell me", max_new_tokens=8)
    assert session.messages == full
    session.chat("tell me", max_new_tokens=8, overflow="forget")
    assert session.messages[0] == full[0] and len(session.messages) < len(full)
    assert session.messages[-2]["content"] == "tell me" and session.messages[1]["role"] == "user"
    with pytest.raises(ConfigError, match="overflow"):
        session.chat("x", overflow="hope")


def test_forgetting_drops_whole_turns_and_leaves_the_last() -> None:
    turns = [
        {"role": r, "content": c}
        for r, c in [
            ("system", "s"),
            ("user", "1"),
            ("assistant", "2"),
            ("user", "3"),
            ("tool", "4"),
            ("assistant", "5"),
            ("user", "6"),
        ]
    ]
    said = {limit: "".join(m["content"] for m in forget(turns, len, limit)) for limit in range(8)}
    assert said == {7: "s123456", 6: "s3456", 5: "s3456", 4: "s6", 3: "s6", 2: "s6", 1: "s6", 0: "s6"}


# ---- on disk


@pytest.mark.parametrize("bundle", ["chat", "jakiro", "static fp32"])
def test_a_conversation_goes_on_where_it_was_saved(bundle: str, bundles: Bundles, tmp_path: Path) -> None:
    session = open_session(bundles(bundle))
    session.chat("hi", max_new_tokens=6)
    session.save(tmp_path / "talk")
    later = open_session(bundles(bundle))
    later.restore(tmp_path / "talk")
    assert later.messages == session.messages
    answers = [s.chat("and", max_new_tokens=6) for s in (session, later)]
    assert answers[0].token_ids == answers[1].token_ids
    assert answers[1].stats.reused_tokens == answers[0].stats.reused_tokens > 0
    assert [p.name for p in tmp_path.iterdir()] == ["talk"]


def test_a_place_that_cannot_be_written_is_said_in_one_line(bundles: Bundles, tmp_path: Path) -> None:
    session = open_session(bundles("chat"))
    for path in (tmp_path / "nowhere" / "talk", tmp_path):
        with pytest.raises(ConversationError, match="cannot be written"):
            session.save(path)
    assert not list(tmp_path.iterdir())


def test_a_message_that_is_none_is_refused(bundles: Bundles) -> None:
    session = open_session(bundles("chat"))
    for wrong in (5, None):
        with pytest.raises(DataError, match="a message of type"):
            session.chat(wrong)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="without tokens"):
        session.generate([])
    assert session.messages == []


@pytest.mark.parametrize("bundle", ["full", "static full"])
def test_a_conversation_that_fills_the_context_is_restored(bundle: str, bundles: Bundles, tmp_path: Path) -> None:
    session = open_session(bundles(bundle))
    session.generate([7, 9, 11, 30] * 31, max_new_tokens=4)
    assert session.runner.length == session.runner.context_length - 1
    session.save(tmp_path / "talk")
    session.restore(tmp_path / "talk")
    answer = session.generate([7, 9, 11, 30] * 31, max_new_tokens=4)
    assert (
        answer.stats.reused_tokens == 123
        and answer.token_ids == cold(session, [7, 9, 11, 30] * 31, max_new_tokens=4).token_ids
    )


def test_an_empty_conversation_is_one_too(bundles: Bundles, tmp_path: Path) -> None:
    session = open_session(bundles("chat"))
    session.save(tmp_path / "talk")
    session.chat("hi", max_new_tokens=3)
    session.restore(tmp_path / "talk")
    assert session.messages == [] and session.runner.length == 0


def test_a_conversation_of_another_bundle_is_refused(bundles: Bundles, tmp_path: Path) -> None:
    session, other = open_session(bundles("chat")), open_session(bundles("fp32"))
    session.chat("hi", max_new_tokens=3)
    session.save(tmp_path / "talk")
    other.generate("hello", max_new_tokens=3)
    before = list(other.runner.tokens)
    with pytest.raises(ConversationError, match="another bundle, adapter or template"):
        other.restore(tmp_path / "talk")
    assert other.runner.tokens == before


def changed(tensors: dict[str, np.ndarray], about: dict[str, Any], how: str) -> tuple[dict[str, np.ndarray], str]:
    """The tensors and messages of a conversation file, bent."""
    messages = json.dumps([{"role": "user", "content": "hi"}])
    if how == "another sha256":
        tensors["rows"][0, 0, 0, 0, 0, 0] += 1
    elif how == "dtype":
        tensors["rows"] = tensors["rows"].astype(np.float16)
    elif how == "shape":
        tensors["rows"] = tensors["rows"][..., :-1]
    elif how == "more tensors":
        tensors["more"] = np.zeros(3)
    elif how == "longer than it says":
        tensors["tokens"] = np.concatenate([tensors["tokens"], tensors["tokens"]])
    elif how == "format":
        about["format"] = 99
    elif how == "key":
        about["key"] = "0" * 64
    elif how == "messages":
        messages = "[1, 2]"
    return tensors, messages


@pytest.mark.parametrize(
    "how", ["another sha256", "dtype", "shape", "more tensors", "longer than it says", "format", "key", "messages"]
)
def test_files_that_lie_are_refused_and_leave_the_session_as_it_was(how: str, bundles: Bundles, tmp_path: Path) -> None:
    from streamspec.runtime import saved_session as saved

    session = open_session(bundles("chat"))
    session.chat("hi", max_new_tokens=3)
    before = (list(session.runner.tokens), list(session.messages))
    session.save(tmp_path / "talk")
    tensors = {name: np.array(value) for name, value in load_file(tmp_path / "talk").items()}
    about: dict[str, Any] = {"format": 1, "key": saved.key(session.manifest), "sha256": ""}
    bent, messages = changed(tensors, about, how)
    about["sha256"] = "0" * 64 if how == "another sha256" else saved._digest(bent, messages)
    save_file(bent, tmp_path / "bent", metadata={"streamspec": json.dumps(about), "messages": messages})
    with pytest.raises(ConversationError):
        session.restore(tmp_path / "bent")
    assert (session.runner.tokens, session.messages) == before


@pytest.mark.parametrize(
    "content", [b"", b"\x00" * 8, b"\xff" * 64, b"\x02\x00\x00\x00\x00\x00\x00\x00{}", b"no such thing"]
)
def test_files_that_are_no_conversation_are_refused(content: bytes, bundles: Bundles, tmp_path: Path) -> None:
    (tmp_path / "talk").write_bytes(content)
    with pytest.raises(ConversationError):
        open_session(bundles("chat")).restore(tmp_path / "talk")
    with pytest.raises(ConversationError, match="no file"):
        open_session(bundles("chat")).restore(tmp_path)


def test_a_conversation_that_was_interrupted_in_a_commit_is_saved_and_restored(
    bundles: Bundles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = open_session(bundles("chat"))
    session.generate("hi there", max_new_tokens=3)
    call: Any = session.runner._call  # type: ignore[attr-defined]
    whole = call.commit

    def interrupted(path: Sequence[int]) -> None:
        whole(path)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(call, "commit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            session.generate("hi there and more", max_new_tokens=3)
    session.save(tmp_path / "talk")
    session.restore(tmp_path / "talk")
    again = open_session(bundles("chat"))
    for text in ("hi there", "hi there and more"):
        assert session.generate(text, max_new_tokens=8).token_ids == again.generate(text, max_new_tokens=8).token_ids


def test_rows_and_tokens_that_no_model_makes_are_refused(bundles: Bundles, tmp_path: Path) -> None:
    from streamspec.runtime import saved_session as saved

    session = open_session(bundles("chat"))
    session.chat("hi", max_new_tokens=3)
    tokens, (rows,) = session.runner.snapshot()
    for bad_tokens, bad_rows in (
        (tokens, np.where(rows == rows.max(), np.nan, rows)),
        ([64] * len(tokens), rows),
        ([-1] * len(tokens), rows),
    ):
        saved.write(tmp_path / "talk", saved.SavedSession(bad_tokens, [bad_rows], []), session.manifest)
        with pytest.raises(ConversationError, match="no model makes"):
            session.restore(tmp_path / "talk")
    session.messages = [{"role": "user", "content": {1, 2}}]
    with pytest.raises(ConversationError, match="no JSON"):
        session.save(tmp_path / "talk")


def test_closing_gives_memory_back_and_the_session_lives_on(bundles: Bundles) -> None:
    session = open_session(bundles("fp32"))
    expected = session.generate("hello", max_new_tokens=8).token_ids
    session.close()
    assert session.runner.length == 0 and session.messages == []
    answer = session.generate("hello", max_new_tokens=8)
    assert answer.token_ids == expected and answer.stats.reused_tokens == 0
