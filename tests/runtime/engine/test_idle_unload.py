"""A bundle that nobody uses is put away, and comes back as it was for whoever asks next."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from shutil import copytree

import pytest

from streamspec.errors import BundleError, ConfigError, ResourceError
from streamspec.runtime import Session, load
from streamspec.runtime.engine import loaded_model as graphs
from streamspec.runtime.engine.idle_unload import IdleUnloader

Bundles = Callable[[str], Path]


class Model:
    """Counts, and notices where it is disturbed."""

    def __init__(self) -> None:
        self.unloads = self.reloads = 0
        self.fails = False
        self.unloaded = False
        self.unloader = IdleUnloader(self.unload, self.reload)

    def unload(self) -> None:
        assert not self.unloaded
        time.sleep(0.002)
        self.unloaded, self.unloads = True, self.unloads + 1

    def reload(self) -> None:
        assert self.unloaded
        if self.fails:
            raise BundleError("gone")
        time.sleep(0.002)
        self.unloaded, self.reloads = False, self.reloads + 1


def eventually(true: Callable[[], bool], seconds: float = 5.0) -> bool:
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end:
        time.sleep(0.005)
    return true()


def test_the_timer_of_a_model_that_is_gone_ends() -> None:
    model = Model()
    model.unloader.limit(60)
    timer = model.unloader._timer
    assert timer is not None and timer.is_alive()
    del model
    gc.collect()
    timer.join(5)
    assert not timer.is_alive()


def test_unloading_comes_after_the_last_use_and_not_before() -> None:
    model = Model()
    model.unloader.limit(0.15)
    with model.unloader.in_use():
        time.sleep(0.3)
        with model.unloader.in_use():
            pass
        assert not model.unloaded
    ended = time.monotonic()
    assert eventually(lambda: model.unloaded) and time.monotonic() - ended >= 0.14
    with model.unloader.in_use():
        assert not model.unloaded
    assert (model.unloads, model.reloads) == (1, 1)


def idle_timers() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "streamspec idle"}


def test_without_a_limit_there_is_no_thread_and_no_unloading() -> None:
    model, before = Model(), idle_timers()
    with model.unloader.in_use():
        pass
    assert idle_timers() <= before and not model.unloaded
    model.unloader.unload()
    model.unloader.unload()  # unloaded already
    assert model.unloads == 1


def test_what_is_in_use_is_not_unloaded() -> None:
    model = Model()
    with model.unloader.in_use(), pytest.raises(ConfigError, match="in use"):
        model.unloader.unload()
    assert not model.unloaded


def test_one_that_cannot_reload_says_so_to_each_and_may_recover() -> None:
    model = Model()
    model.unloader.unload()
    model.fails = True
    for _ in range(2):
        with pytest.raises(BundleError), model.unloader.in_use():
            pytest.fail("in use while unloaded")
    model.fails = False
    with model.unloader.in_use():
        assert not model.unloaded


def test_many_threads_find_it_loaded_however_often_it_is_unloaded() -> None:
    model, wrong, before = Model(), [], idle_timers()
    model.unloader.limit(0.001)

    def work() -> None:
        for i in range(60):
            try:
                with model.unloader.in_use():
                    if model.unloaded:
                        wrong.append(i)
                time.sleep(0.002 * (i % 3))
            except BaseException as error:
                wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and eventually(lambda: model.unloaded) and model.unloads == model.reloads + 1 > 2
    assert eventually(lambda: idle_timers() <= before)


def test_what_is_kept_is_not_kept_alive() -> None:
    model = Model()
    model.unloader.limit(100.0)
    there = weakref.ref(model)
    unloader = model.unloader
    del model
    assert there() is None
    unloader.unload()


def test_work_that_nobody_holds_may_end_while_other_work_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    model, done = Model(), threading.Event()
    stop = model.unloader._stop

    def collecting() -> None:
        gc.collect()
        stop()

    def abandoned() -> Iterator[None]:
        with model.unloader.in_use():
            yield

    work_begun = abandoned()
    next(work_begun)
    cycle: list[object] = [work_begun]
    cycle.append(cycle)  # only the collector ends it
    monkeypatch.setattr(model.unloader, "_stop", collecting)
    del work_begun, cycle

    def work() -> None:
        with model.unloader.in_use():
            pass
        done.set()

    threading.Thread(target=work, daemon=True).start()
    assert done.wait(10)
    model.unloader.unload()  # not in use any longer


# ---- sessions


def opened(bundle: Path, tmp_path: Path, **options: object) -> Session:
    return load(bundle, threads=1, cache_dir=tmp_path, tree=4, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["int8", "static full", "jakiro", "lora"])
def test_answers_are_the_same_after_unloading(name: str, bundles: Bundles, tmp_path: Path) -> None:
    session = opened(bundles(name), tmp_path)
    expected = [session.generate(p, max_new_tokens=12).token_ids for p in ("hello", "hello world")]
    for _ in range(2):
        session.unload()
        assert (
            not session.loaded
            and session.generate("hello", max_new_tokens=12).token_ids == expected[0]
            and session.loaded
        )
    session.unload()
    assert session.generate("hello world", max_new_tokens=12).token_ids == expected[1]


def test_a_chat_goes_on_after_unloading(bundles: Bundles, tmp_path: Path) -> None:
    awake, session = opened(bundles("chat"), tmp_path), opened(bundles("chat"), tmp_path, idle=0.05)
    for turn in ("hello", "and now", "again"):
        assert session.chat(turn, max_new_tokens=8).token_ids == awake.chat(turn, max_new_tokens=8).token_ids
        assert eventually(lambda: not session.loaded)
    session.save(tmp_path / "kept")
    session.forget()
    session.restore(tmp_path / "kept")
    assert session.messages == awake.messages
    assert session.chat("more", max_new_tokens=8).token_ids == awake.chat("more", max_new_tokens=8).token_ids


def test_a_bundle_is_opened_again_from_another_folder(
    bundles: Bundles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = bundles("fp32")
    monkeypatch.chdir(folder.parent)
    session = load(folder.name, threads=1, cache_dir="cache", past_answers="answers.bin")
    expected = session.generate("hello", max_new_tokens=9).token_ids
    monkeypatch.chdir(tmp_path)
    session.unload()
    assert session.generate("hello", max_new_tokens=9).token_ids == expected
    session.close()
    assert not any(tmp_path.iterdir()) and (folder.parent / "answers.bin").exists()


def test_all_sessions_of_a_bundle_unload_and_reload_together(bundles: Bundles, tmp_path: Path) -> None:
    first = opened(bundles("fp32"), tmp_path)
    second = first.another()
    expected = [s.generate("hello", max_new_tokens=9).token_ids for s in (first, second)]
    second.unload()
    assert not first.loaded
    third = first.another()
    assert (
        first.loaded
        and third.loaded
        and [s.generate("hello", max_new_tokens=9).token_ids for s in (second, third)] == expected
    )


def test_nothing_of_an_unloaded_graph_stays(bundles: Bundles, tmp_path: Path) -> None:
    session = opened(bundles("fp32"), tmp_path)
    session.generate("hello", max_new_tokens=4)
    session.score([5, 6, 7])
    session.generate("hello", max_new_tokens=4)
    there = weakref.ref(session.runner.model.session)  # type: ignore[attr-defined]
    session.unload()
    gc.collect()
    assert there() is None


def test_nothing_is_unloaded_while_an_answer_is_read(bundles: Bundles, tmp_path: Path) -> None:
    session = opened(bundles("fp32"), tmp_path, idle=0.02)
    stream = session.stream("hello", max_new_tokens=20)
    next(stream)
    time.sleep(0.2)
    assert session.loaded
    with pytest.raises(ConfigError, match="in use"):
        session.unload()
    stream.close()
    assert eventually(lambda: not session.loaded)


def test_files_that_changed_meanwhile_are_refused(bundles: Bundles, tmp_path: Path) -> None:
    folder = copytree(bundles("fp32"), tmp_path / "bundle")
    session = opened(folder, tmp_path)
    session.unload()
    data = folder / "model.onnx.data"
    good = data.read_bytes()
    data.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    for _ in range(2):
        with pytest.raises(BundleError, match="sha256"):
            session.generate("hello")
    data.write_bytes(good)
    assert session.generate("hello", max_new_tokens=3).token_ids


@pytest.mark.parametrize("bundle", ["fp32", "static fp32"])
def test_a_graph_that_not_all_can_take_hold_of_is_not_kept(
    bundle: str, bundles: Bundles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = opened(bundles(bundle), tmp_path)
    sessions = [first, first.another()]
    expected = first.generate("hello", max_new_tokens=4).token_ids
    first.unload()
    caches = [first.runner._empty_cache()]  # type: ignore[attr-defined]

    def scarce(engine: object) -> object:
        if not caches:
            raise ResourceError("no room")
        return caches.pop()

    with monkeypatch.context() as patch, pytest.raises(ResourceError):
        patch.setattr(type(first.runner), "_empty_cache", scarce)
        first.generate("hello")
    assert not first.loaded and first.runner.model.session is None  # type: ignore[attr-defined]
    assert [session.generate("hello", max_new_tokens=4).token_ids for session in sessions] == [expected, expected]


def test_calls_that_begin_as_it_is_unloaded_are_answered(bundles: Bundles, tmp_path: Path) -> None:
    first = opened(bundles("int8"), tmp_path, idle=0.01)
    sessions = [first, *(first.another() for _ in range(3))]
    expected = first.generate("hello", max_new_tokens=6).token_ids
    wrong: list[object] = []

    def work(session: Session) -> None:
        for i in range(8):
            try:
                if session.generate("hello", max_new_tokens=6).token_ids != expected:
                    wrong.append("another answer")
            except BaseException as error:
                wrong.append(error)
            time.sleep(0.01 * (i % 3))

    threads = [threading.Thread(target=work, args=[session]) for session in sessions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_closing_the_only_session_leaves_no_timer(bundles: Bundles, tmp_path: Path) -> None:
    before = idle_timers()
    session = opened(bundles("fp32"), tmp_path, idle=1000)
    session.generate("hello", max_new_tokens=3)
    assert eventually(lambda: len(idle_timers() - before) == 1)  # that of `opened` is cancelled, and ends
    session.close()
    assert eventually(lambda: idle_timers() <= before) and not session.loaded
    assert session.generate("hello", max_new_tokens=3).token_ids
    session.close()


def test_closing_what_is_unloaded_does_not_reload_it(bundles: Bundles, tmp_path: Path) -> None:
    session = opened(bundles("chat"), tmp_path)
    expected = session.chat("hello", max_new_tokens=3).token_ids
    session.unload()
    session.close()
    assert not session.loaded and session.messages == []
    assert session.chat("hello", max_new_tokens=3).token_ids == expected


@pytest.mark.parametrize("how", ["cancelled", "timeout"])
def test_an_answer_can_be_ended_while_its_bundle_reloads(
    how: str, bundles: Bundles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = opened(bundles("fp32"), tmp_path)
    graph = session.runner.model
    opening, ended, form_of = threading.Event(), threading.Event(), graphs.form_of

    def slow(*arguments: object) -> object:
        opening.set()
        assert ended.wait(10)
        return form_of(*arguments)  # type: ignore[arg-type]

    session.unload()
    monkeypatch.setattr(graphs, "form_of", slow)
    running = session.stream("hello", max_new_tokens=100, timeout=0.05 if how == "timeout" else None).start()
    assert opening.wait(10)
    session.cancel() if how == "cancelled" else time.sleep(0.2)
    ended.set()
    answer = running.result(30)
    assert (answer.finish_reason, answer.token_ids) == (how, []) and graph.unloader.loaded
    assert session.generate("hello", max_new_tokens=3).finish_reason == "length"


@pytest.mark.parametrize(
    "left",
    [
        "stream = session.stream('hello', max_new_tokens=100); next(stream)",
        "for _ in range(3): session.another().stream('hello', max_new_tokens=100).start()",
        "def use(): stream\nstream = session.stream('hello', max_new_tokens=100)\nfor _ in range(20): next(stream)",
    ],
)
def test_a_program_ends_in_the_middle_of_an_answer(left: str, bundles: Bundles, tmp_path: Path) -> None:
    code = f"""
from streamspec.runtime import load
session = load({str(bundles("endless fp32"))!r}, threads=1, idle=1000, cache_dir={str(tmp_path)!r})
{left}
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("idle", [0, -1, "soon", True, float("nan"), float("inf")])
def test_senseless_times_are_refused(idle: object, bundles: Bundles) -> None:
    with pytest.raises(ConfigError, match="idle"):
        load(bundles("fp32"), idle=idle)  # type: ignore[arg-type]


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's account of processor time")
def test_an_idle_session_takes_no_processor_time(bundles: Bundles, tmp_path: Path) -> None:
    code = f"""
import time
from streamspec.runtime import load
session = load({str(bundles("int8"))!r}, threads=2, idle=1000, cache_dir={str(tmp_path)!r})
session.generate("hello", max_new_tokens=20)
time.sleep(0.3)  # threads may wait busily for that long
before = time.process_time()
time.sleep(2)
print(time.process_time() - before)
"""
    assert float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout) < 0.02
