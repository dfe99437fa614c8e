"""Answers that share calls are those of each alone (also covers `shared_call`, `answer_all` and `share_calls`), and the
calls of threads that come, go and pause are gathered without loss.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamspec.draft_tree import DraftTree
from streamspec.errors import BundleError, ConfigError, DataError, ResourceError
from streamspec.runtime import Chunk, Completion, Sampling, Session, load
from streamspec.runtime.decoding.model_runner import Cancelled
from streamspec.runtime.engine.graph_call import CallRows
from streamspec.runtime.engine.scheduler import FairLock
from streamspec.runtime.engine.shared import call_sharing
from streamspec.runtime.engine.shared.call_sharing import CallSharing
from streamspec.runtime.engine.shared.shared_call import SharedCall, SharedRows
from streamspec.runtime.engine.shared.sharing_gate import SharingGate
from streamspec.runtime.hardware import native_library
from streamspec.runtime.kv_cache import shared_cache
from streamspec.runtime.kv_cache.host_cache import LAZY
from streamspec.runtime.kv_cache.shared_cache import SharedCache
from streamspec.runtime.sampling.sampling_params import GREEDY
from tests.runtime.test_session import saying
from tests.support.served_bundles import shareable_base
from tests.support.tiny_bundles import tiny_bundle

PROMPTS = ["hello", "hello again, and more of it", "x", "other", "hello against", "he", "a b c d e f g h i j k l m n o"]
HOT = Sampling(temperature=1.0, top_p=0.9, seed=5)
KINDS = {"int8": ("int8", True, "raw", True), "int4": ("int4", True, "raw", True), "lora": ("int8", False)}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Bundles of a base whose heads native operators attend over."""
    if why_not := native_library.why_not():
        pytest.skip(f"no native operators here: {why_not}")
    if not LAZY:
        pytest.skip("address space cannot be taken without memory here")
    folder, bundles = tmp_path_factory.mktemp("shared"), dict[str, Path]()

    def make(kind: str) -> Path:
        if not bundles:
            shareable_base(folder / "base")
        if kind not in bundles:
            (folder / kind).mkdir()
            bundles[kind] = tiny_bundle(folder / kind, *KINDS[kind], base=folder / "base")
        return bundles[kind]

    return make


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls are shared whatever they cost, and others waited for as long as on a busy machine they may need."""
    monkeypatch.setattr(SharingGate, "shares", lambda self, sequences: sequences > 1)
    monkeypatch.setattr(call_sharing, "MAX_WAIT", 0.05)
    monkeypatch.setattr(call_sharing, "PATIENCE", 1000.0)


def opened(folder: Path, **options: Any) -> Session:
    return load(folder, **{"threads": 1, "provider": "native", "cache_dir": folder.parent / "cache"} | options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sampling", [GREEDY, HOT], ids=["greedy", "hot"])
@pytest.mark.parametrize("tree", ["auto", 8])
def test_answers_of_a_list_are_those_of_each_alone(
    kind: str, sampling: Sampling, tree: Any, made: Callable[[str], Path], always: None
) -> None:
    alone, shared = opened(made(kind), tree=tree), opened(made(kind), tree=tree, batch=3)
    assert (alone.batch, shared.batch) == (1, 3)
    wanted, found = (s.generate(PROMPTS, max_new_tokens=24, sampling=sampling) for s in (alone, shared))
    assert [(a.token_ids, a.text, a.finish_reason) for a in found] == [
        (a.token_ids, a.text, a.finish_reason) for a in wanted
    ]
    assert sum(a.stats.shared_steps for a in found) > 20 > sum(a.stats.shared_steps for a in wanted) == 0
    assert any("in shared calls" in str(answer.stats) for answer in found)


def test_a_wrong_prompt_of_a_list_is_refused_before_any_is_read(made: Callable[[str], Path]) -> None:
    session = opened(made("lora"), batch=3)
    with pytest.raises(DataError, match="0..63"):
        session.generate([[5], [99999]])
    assert session.runner.length == 0


def test_a_list_that_is_refused_cancels_nobody_elses_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Session, "batch", 2)
    session = saying("one two three")
    stream = session.stream("p")
    next(stream)
    with pytest.raises(ConfigError, match="busy"):
        session.generate(["p", "p"])
    assert [*stream][-1].finish_reason == "eos"


def known(answer: Completion) -> tuple[list[int], str | None, Any]:
    return answer.token_ids, answer.finish_reason, answer.logprobs


def test_threads_that_come_go_end_and_sample_otherwise_answer_as_alone(
    made: Callable[[str], Path], always: None
) -> None:
    first, alone = opened(made("int8"), batch=6), opened(made("int8"))
    ways: list[dict[str, Any]] = [
        {"sampling": GREEDY},
        {"sampling": HOT},
        {"sampling": GREEDY, "max_new_tokens": 5},  # ends early
        {"sampling": Sampling(temperature=1.0, top_p=0.9, seed=9)},
        {"sampling": Sampling(repetition_penalty=1.3)},  # shares nothing
        {"sampling": GREEDY, "logprobs": 2},
    ]
    ways = [{"max_new_tokens": 30} | way for way in ways]
    expected = [[known(alone.generate(p, **way)) for p in PROMPTS[:4]] for way in ways]
    found: dict[int, list[Any]] = {}
    shared = dict[int, int]()

    def work(number: int, own: Session) -> None:
        time.sleep(0.004 * number)
        answers = [own.generate(p, **ways[number]) for p in PROMPTS[:4]]
        found[number] = [known(answer) for answer in answers]
        shared[number] = sum(answer.stats.shared_steps for answer in answers)

    sessions = [first, *(first.another() for _ in ways[1:])]
    threads = [threading.Thread(target=work, args=one) for one in enumerate(sessions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [found[number] for number in range(len(ways))] == expected
    assert sum(shared.values()) > 20 and shared[4] == shared[5] == 0


def test_one_is_cancelled_and_one_is_not_read_while_others_share(made: Callable[[str], Path], always: None) -> None:
    first, alone = opened(made("int8"), batch=4), opened(made("int8"))
    cancelled, paused, *others = first.another(), first.another(), first, first.another()
    sleeper = paused.stream("hello again", max_new_tokens=40)
    begun = [next(sleeper), next(sleeper)]  # and is left for a while
    answers: dict[int, list[int]] = {}

    def cancel() -> None:
        for count, _ in enumerate(cancelled.stream("x", max_new_tokens=40)):
            if count == 3:
                cancelled.cancel()

    def work(number: int) -> None:
        answers[number] = others[number].generate(PROMPTS[number], max_new_tokens=60).token_ids

    threads = [threading.Thread(target=cancel), *(threading.Thread(target=work, args=(n,)) for n in range(2))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [answers[n] for n in range(2)] == [alone.generate(p, max_new_tokens=60).token_ids for p in PROMPTS[:2]]
    rest: list[Chunk] = [*begun, *sleeper]
    assert [t for c in rest for t in c.token_ids] == alone.generate("hello again", max_new_tokens=40).token_ids
    again = cancelled.generate("x", max_new_tokens=40)
    assert again.token_ids == alone.generate("x", max_new_tokens=40).token_ids


def test_places_are_given_back_and_those_beyond_answer_alone(made: Callable[[str], Path], always: None) -> None:
    first = opened(made("lora"), batch=2)
    second, third = first.another(), first.another()
    kinds = [type(s.runner.cache) is SharedCache for s in (first, second, third)]  # type: ignore[attr-defined]
    assert kinds == [True, True, False]
    assert third.generate("x", max_new_tokens=4).token_ids == first.generate("x", max_new_tokens=4).token_ids
    first.close()
    assert type(first.runner.cache) is SharedCache  # type: ignore[attr-defined]
    del second
    assert type(first.another().runner.cache) is SharedCache  # type: ignore[attr-defined]


def test_without_address_space_for_all_caches_nothing_is_shared(
    made: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(size: int, slots: int) -> Any:
        raise ResourceError("no room", "room", "-")

    monkeypatch.setattr(shared_cache, "address_space", refused)
    session = opened(made("lora"), batch=4)
    assert session.batch == 1 and len(session.generate(PROMPTS[:2], max_new_tokens=3)) == 2


def test_an_unloaded_bundle_shares_again(made: Callable[[str], Path], always: None) -> None:
    session = opened(made("lora"), batch=2)
    before = [answer.token_ids for answer in session.generate(PROMPTS, max_new_tokens=40)]
    session.unload()
    after = session.generate(PROMPTS, max_new_tokens=40)
    assert [answer.token_ids for answer in after] == before and sum(a.stats.shared_steps for a in after) > 0


def test_a_call_that_fails_is_everybodys_error_and_the_next_works(
    made: Callable[[str], Path], always: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = opened(made("lora"), batch=2)
    wanted = [answer.token_ids for answer in session.generate(PROMPTS, max_new_tokens=40)]

    def fails(self: SharedCall, calls: list[SharedRows]) -> None:
        raise BundleError("the graph failed", "a graph that runs", "x")

    with monkeypatch.context() as patch:
        patch.setattr(SharedCall, "run", fails)
        with pytest.raises(BundleError, match="the graph failed"):
            session.generate(PROMPTS, max_new_tokens=40)
    assert [answer.token_ids for answer in session.generate(PROMPTS, max_new_tokens=40)] == wanted


def test_ctrl_c_while_the_others_answer_ends_them(
    made: Callable[[str], Path], always: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, joined = opened(made("int8"), batch=2), list[threading.Thread]()
    join, ended = threading.Thread.join, list[bool]()

    def interrupted(thread: threading.Thread, timeout: float | None = None) -> None:
        joined.append(thread)
        if len(joined) == 1:
            raise KeyboardInterrupt
        join(thread, timeout)
        ended.append(not thread.is_alive())

    monkeypatch.setattr(threading.Thread, "join", interrupted)
    with pytest.raises(KeyboardInterrupt):
        session.generate(["hello", "a b c d"], max_new_tokens=400)
    assert ended == [True]


def test_cancel_ends_all_answers_of_a_list_that_share_calls(made: Callable[[str], Path], always: None) -> None:
    session, begun = opened(made("lora"), batch=2), list[list[int]]()
    stream = Session.stream

    def counted(asked: Session, ids: list[int], *given: Any) -> Any:
        begun.append(ids)
        if len(begun) == 6:  # as many as are checked, and two more: those that are answered
            threading.Timer(0.0, session.cancel).start()
        return stream(asked, ids, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Session, "stream", counted)
        answers = session.generate([[5, 6, 7 + n] for n in range(4)], max_new_tokens=100)
    assert [answer.finish_reason for answer in answers].count("cancelled") >= 3
    assert session.generate([5, 6, 7], max_new_tokens=3).finish_reason == "length"


@pytest.mark.parametrize("wrong", [0, 65, True, 2.0, "4"])
def test_a_number_of_answers_that_is_none_is_refused(wrong: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="batch .*; expected a whole number from 1 to 64"):
        load(tmp_path, batch=wrong)


def test_a_graph_of_standard_operators_shares_nothing(made: Callable[[str], Path]) -> None:
    assert opened(made("lora"), provider="cpu", batch=4).batch == 1


class Model:
    """As much of an open model as gathering needs."""

    def __init__(self) -> None:
        self.scheduler = FairLock()


def test_a_call_has_64_rows_at_most_and_those_of_others_wait_for_the_next() -> None:
    sharing = CallSharing(Model(), 8)  # type: ignore[arg-type]
    some = [
        SharedRows(object(), CallRows([5] * count, [0], np.zeros((1, 1)), np.zeros(1), np.zeros(1)), 0, 0, GREEDY)
        for count in (20, 44, 1)
    ]
    sharing._waiting += some
    assert sharing._gathered(some[0]) == some[:2] and sharing._waiting == some[2:]


def test_rows_of_a_call_that_was_interrupted_are_in_no_later_one(monkeypatch: pytest.MonkeyPatch) -> None:
    sharing = CallSharing(Model(), 8)  # type: ignore[arg-type]
    rows = CallRows([5], [0], np.zeros((1, 1)), np.zeros(1), np.zeros(1))
    mine = SharedRows(object(), rows, 0, 0, GREEDY)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sharing._changed, "wait_for", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sharing.run(mine, threading.Event())
    assert not sharing._waiting


def test_an_interrupted_call_is_left_once_it_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread makes it: its rows are written until then."""
    sharing = CallSharing(Model(), 8)  # type: ignore[arg-type]
    rows = CallRows([5], [0], np.zeros((1, 1)), np.zeros(1), np.zeros(1))
    mine, waits = SharedRows(object(), rows, 0, 0, GREEDY), list[bool]()

    def wait_for(over: Callable[[], bool]) -> None:
        if not waits:
            waits.append(over())
            sharing._waiting.remove(mine)
            mine.taken = True
            raise KeyboardInterrupt
        waits.append(over())
        mine.over = True
        waits.append(over())

    monkeypatch.setattr(sharing._changed, "wait_for", wait_for)
    with pytest.raises(KeyboardInterrupt):
        sharing.run(mine, threading.Event())
    assert waits == [True, False, True]


class Adding:
    """A call that chooses the number after each token; some fail."""

    def __init__(self) -> None:
        self.sizes, self.inside = list[int](), 0

    def run(self, calls: list[SharedRows]) -> None:
        self.inside += 1
        assert self.inside == 1 and len({call.sampling.shared_call_key for call in calls}) == 1
        self.sizes.append(len(calls))
        time.sleep(0.0005)
        self.inside -= 1
        if any(call.rows.tokens[0] % 97 == 0 for call in calls):
            raise BundleError("97", "another", "-")
        for call in calls:
            call.choices = [token + 1 for token in call.rows.tokens]


def test_no_call_is_lost_made_twice_or_given_to_another() -> None:
    sharing, adding = CallSharing(Model(), 8), Adding()  # type: ignore[arg-type]
    sharing._places, sharing._call = object(), adding  # type: ignore[assignment]
    ended, faults = list[int](), list[str]()

    def work(number: int) -> None:
        rng, me, cancelled = random.Random(number), object(), threading.Event()
        sampling = Sampling(temperature=float(number % 2))
        for count in range(150):
            tokens = [1000 * number + count] * rng.randint(1, 20)
            rows = CallRows(tokens, tokens, np.zeros((1, 1)), np.zeros(1), np.zeros(1), None, DraftTree((0,), (0,)))
            mine = SharedRows(me, rows, number, 0, sampling)
            sharing.sequences(me, mine.sampling.shared_call_key)
            if rng.random() < 0.1:
                threading.Timer(rng.random() / 1000, lambda: (cancelled.set(), sharing.recheck())).start()
            try:
                sharing.run(mine, cancelled)
                if mine.choices != [token + 1 for token in tokens]:
                    faults.append(f"{mine}")
            except (BundleError, Cancelled):
                pass
            cancelled.clear()
            if rng.random() < 0.1:
                sharing.leave(me)
                time.sleep(0.002 * rng.random())
        sharing.leave(me)
        ended.append(number)

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(ended) == list(range(6)) and not faults
    assert max(adding.sizes) >= 3 and not sharing._waiting and not sharing._decoding
