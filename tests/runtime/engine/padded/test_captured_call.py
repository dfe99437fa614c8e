"""Captured bundles through whole sessions: the CPU stands in for the device, without capture, and everything goes the
device's way. Also covers device_buffers.py and runtime/kv_cache/captured_cache.py.
"""

from __future__ import annotations

import gc
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamspec.bundle.cache_section import CAPTURED
from streamspec.bundle.files import read_manifest
from streamspec.draft_tree import DraftTree, chain
from streamspec.errors import BundleError, ContextOverflow, ProviderError
from streamspec.export import Target
from streamspec.export.graphs import captured_sampler
from streamspec.runtime import Sampling, Session, load
from streamspec.runtime.costs.learned_costs import PaddedRowCosts
from streamspec.runtime.decoding.model_runner import Cancelled, StepRequest
from streamspec.runtime.engine.dynamic_call import DynamicCall
from streamspec.runtime.engine.loaded_model import LoadedModel
from streamspec.runtime.engine.ort_runner import OrtRunner
from streamspec.runtime.engine.padded import captured_call
from streamspec.runtime.engine.padded.captured_call import CapturedBinding
from streamspec.runtime.engine.padded.device_buffers import BoundCall
from streamspec.runtime.engine.padded.padded_call import PaddedCall
from streamspec.runtime.hardware import providers
from streamspec.runtime.hardware.device_thread import DeviceThread
from streamspec.runtime.kv_cache.captured_cache import CapturedCache
from tests.runtime.engine.test_ort_runner import PROMPTS
from tests.support.int4_rows import need_exact_rows
from tests.support.tiny_bundles import tiny_bundle

Bundles = Callable[[str], Path]
SOME = PROMPTS[::2]
FLAT = 3.0  # the temperature at which the likeliest 44 tokens of a tiny model hold about 0.92
HOT = Sampling(temperature=0.9, top_p=0.95, repetition_penalty=1.2, seed=5)

pytestmark = pytest.mark.usefixtures("device")


def open_on(folder: Path, provider: str = "device", **options: Any) -> Session:
    return load(folder, provider=provider, threads=1, **{"tree": 8, **options})


def captures(runner: OrtRunner) -> bool:
    return isinstance(runner._call, PaddedCall) and isinstance(runner._call.binding, CapturedBinding)


def engine_of(session: Session) -> tuple[OrtRunner, CapturedCache]:
    runner = session.runner
    assert isinstance(runner, OrtRunner) and captures(runner)
    assert isinstance(runner.cache, CapturedCache)
    return runner, runner.cache


@pytest.fixture(scope="module")
def plainly(bundles: Bundles) -> Callable[[str, Sampling], list[list[int]]]:
    """What plain decoding of a captured bundle answers to `SOME`; called where there is a device."""

    @cache
    def answers(bundle: str, sampling: Sampling) -> list[list[int]]:
        session = open_on(bundles(f"captured {bundle}"))
        given: dict[str, Any] = {"max_new_tokens": 40, "speculate": False, "sampling": sampling}
        return [session.generate(prompt, **given).token_ids for prompt in SOME]

    return answers


def case(sampling: Sampling, *names: str) -> list[Any]:
    return [pytest.param(name, sampling, id=f"{name}-{'sampled' if sampling == HOT else 'greedy'}") for name in names]


@pytest.mark.parametrize(
    ("bundle", "sampling"),
    [
        *case(Sampling(), "fp32", "fp16", "int8", "int4", "full", "lora", "jakiro", "eagle", "eager"),
        *case(HOT, "fp16", "int8", "full", "jakiro", "eager"),
    ],
)
def test_speculative_output_is_plain_output(bundle: str, sampling: Sampling, bundles: Bundles, plainly: Any) -> None:
    if bundle == "int4":
        need_exact_rows()
    session = open_on(bundles(f"captured {bundle}"))
    engine_of(session)
    steps = tokens = 0
    for rows in (3, 8):  # which are padded, and which are not
        session.policy = replace(session.policy, rows=rows)
        for prompt, plain in zip(SOME, plainly(bundle, sampling), strict=True):
            answer = session.generate(prompt, max_new_tokens=40, sampling=sampling)
            assert answer.token_ids == plain
            steps, tokens = steps + answer.stats.steps, tokens + answer.stats.step_tokens
    assert tokens > steps


@pytest.mark.parametrize("sampling", [Sampling(), HOT], ids=["greedy", "sampled"])
@pytest.mark.parametrize("bundle", ["fp32", "full", "lora", "eagle", "jakiro", "eager"])
def test_answers_are_those_of_the_ordinary_graph(
    bundle: str, sampling: Sampling, bundles: Bundles, plainly: Any
) -> None:
    here = open_on(bundles(f"captured {bundle}"), "cpu")
    assert isinstance(here.runner, OrtRunner) and isinstance(here.runner._call, DynamicCall)
    for prompt, there in zip(SOME, plainly(bundle, sampling), strict=True):
        assert here.generate(prompt, max_new_tokens=40, sampling=sampling).token_ids == there


def test_a_call_is_one_copy_in_and_one_out_over_addresses_that_never_change(
    bundles: Bundles, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = open_on(bundles("captured full"))
    runner, cache = engine_of(session)
    calls = [*cache.calls.values()]
    seen: list[str] = []
    rows: set[int] = set()
    for name in ("send", "send_draw", "result", "logits"):
        whole = getattr(BoundCall, name)
        monkeypatch.setattr(
            BoundCall, name, lambda self, *given, name=name, whole=whole: (seen.append(name), whole(self, *given))[1]
        )

    class Watched:
        """The session: no binding is made, and every run has the same addresses and shapes as the first of its kind."""

        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def run_with_iobinding(self, io: Any, options: Any) -> None:
            call, run = next((call, run) for call in calls for run in (call.greedy, call.sampled) if run.io is io)
            assert run.options is options
            seen.append("run")
            rows.add(len(call.packed))
            self.inner.run_with_iobinding(io, options)

    def bound() -> list[tuple[int, list[int]]]:
        values = [value for parts in cache.data for value in parts]
        values += [value for call in calls for value in (*call.device, call.seen)]
        values += [run.on_device for call in calls for run in (call.greedy, call.sampled)]
        return [(value.data_ptr(), value.shape()) for value in values]

    before = bound()
    runner.model.session = Watched(runner.model.session)
    for sampling, each in ((Sampling(), ["send", "run", "result"]), (HOT, ["send", "send_draw", "run", "result"])):
        for prompt in SOME:
            session.generate(prompt, max_new_tokens=20, sampling=sampling)
        assert bound() == before
        assert seen == each * (len(seen) // len(each)) and len(seen) > 20
        seen.clear()
    assert {1, 8} <= rows


def counting(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is done from now on: "copied" logits, "proposed" and "dropped" drafts."""
    seen: list[str] = []
    copied, run = BoundCall.logits, PaddedCall.run

    def ran(self: PaddedCall, rows: Any, request: StepRequest, *given: Any) -> Any:
        result = run(self, rows, request, *given)
        if request.run_drafter:
            seen.append("dropped" if result.proposal is None else "proposed")
        return result

    monkeypatch.setattr(BoundCall, "logits", lambda self: (seen.append("copied"), copied(self))[1])
    monkeypatch.setattr(PaddedCall, "run", ran)
    return seen


@pytest.mark.parametrize("bundle", ["full", "eagle"])
def test_a_draft_follows_the_token_that_was_drawn(
    bundle: str, bundles: Bundles, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = open_on(bundles(f"captured {bundle}"))
    seen = counting(monkeypatch)
    for prompt in SOME:
        session.generate(prompt, max_new_tokens=40, sampling=HOT)
    assert len(seen) > 20 and {*seen} == {"proposed"}


def test_a_threshold_beyond_what_is_sorted_is_found_on_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(captured_sampler, "RANKED", 44)  # of 64; the self-test's top-k is 40
    folder = tiny_bundle(tmp_path, "fp32", target=Target("cuda", capture=True, row_counts=(1, 4, 8), context=128))
    there, here = (open_on(folder, name) for name in ("device", "cpu"))
    seen = counting(monkeypatch)
    for sampling in (Sampling(temperature=FLAT, top_p=0.92, seed=7), Sampling(temperature=1.0, top_k=50, seed=7)):
        for prompt in SOME:
            wanted = here.generate(prompt, max_new_tokens=40, sampling=sampling).token_ids
            assert there.generate(prompt, max_new_tokens=40, sampling=sampling).token_ids == wanted
            plain = there.generate(prompt, max_new_tokens=40, sampling=sampling, speculate=False)
            assert plain.token_ids == wanted
        assert {"copied", "proposed"} <= {*seen}  # where the draws agree the draft is kept
        seen.clear()


def test_a_graph_that_draws_wrongly_gives_way_to_the_ordinary_one(
    bundles: Bundles, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = captured_call.pack_draw
    monkeypatch.setattr(captured_call, "pack_draw", lambda *given: packed(*given[:3], 0 * given[3]))
    session = open_on(bundles("captured fp32"))
    assert isinstance(session.runner, OrtRunner) and isinstance(session.runner._call, DynamicCall)
    assert "computes a sampled step with" in str(session.provider)


def test_the_cache_after_accepted_drafts_is_the_plain_one(bundles: Bundles) -> None:
    runner, cache = engine_of(open_on(bundles("captured fp32")))
    runner.reset()
    runner.prefill(StepRequest([5, 6, 7]))
    runner.verify(StepRequest([9, 10, 11, 12], DraftTree((0, 0, 0, 2), (0, 0, 1, 0))))
    runner.commit((0, 2, 3))
    late = cache.rows()  # what the next call will move
    after = runner.forward([13], [0], np.zeros((1, 1), np.float32))
    moved = cache.rows()
    logits = runner.score([5, 6, 7, 9, 11, 12, 13])
    for before, at, plain in zip(late, moved, cache.rows(), strict=True):
        np.testing.assert_array_equal(before, at)
        assert np.abs(at - plain[..., :6, :]).max() < 1e-4
    assert np.abs(after - logits[-1:]).max() < 1e-3


def test_a_turn_taken_back_forgets_the_rows_that_were_to_move(bundles: Bundles) -> None:
    runner, _ = engine_of(open_on(bundles("captured fp32")))
    for kept in range(3, 7):
        runner.reset()
        runner.prefill(StepRequest([5, 6, 7]))
        runner.verify(StepRequest([9, 10, 11, 12], DraftTree((0, 0, 0, 2), (0, 0, 1, 0))))
        runner.commit((0, 2, 3))
        runner.rewind(kept)
        again = runner.forward([20, 21], [0, 1], chain(1).mask())
        expected = runner.score([*[5, 6, 7, 9, 11, 12][:kept], 20, 21])[-2:]
        assert np.abs(again - expected).max() < 1e-3


def test_padding_is_never_accepted_and_changes_nothing(bundles: Bundles) -> None:
    runner, _ = engine_of(open_on(bundles("captured full")))
    results = []
    for rows in (2, 3, 8):  # padded to 4, 4 and 8
        runner.reset()
        runner.prefill(StepRequest([5, 6, 7]))
        tokens = [9, 10, 0, 0, 0, 0, 0, 0][:rows]
        result = runner.verify(StepRequest(tokens, chain(rows - 1), run_drafter=True))
        assert result.accepted is not None and result.accepted < rows
        results.append(runner.forward(tokens, range(rows), chain(rows - 1).mask())[:2])
    for other in results[1:]:
        np.testing.assert_allclose(results[0], other, atol=1e-4)


def test_text_runs_up_to_the_last_token_of_the_context(bundles: Bundles) -> None:
    session, plain = open_on(bundles("captured fp32")), open_on(bundles("captured fp32"), "cpu")
    for room in (1, 2, 5, 12):
        prompt = ([7, 9, 11, 30] * 32)[: 128 - room]
        wanted = plain.generate(prompt, max_new_tokens=50).token_ids
        assert session.generate(prompt, max_new_tokens=50).token_ids == wanted
    with pytest.raises(ContextOverflow):
        session.generate([7] * 128)


def test_a_cancelled_answer_leaves_a_cache_that_goes_on(bundles: Bundles) -> None:
    session, fresh = open_on(bundles("captured full")), open_on(bundles("captured full"))
    for stop in range(1, 12, 2):
        stream = session.stream(SOME[0], max_new_tokens=30)
        for number, _ in enumerate(stream):
            if number == stop:
                session.cancel()
                break
        stream.close()
        longer = SOME[0] + " and more"
        assert session.generate(longer, max_new_tokens=20).token_ids == (
            fresh.generate(longer, max_new_tokens=20).token_ids
        )


def test_a_cancellation_waits_for_the_call_under_way(bundles: Bundles) -> None:
    """A call that ends halfway has moved the rows of some layers and not of others."""
    runner, cache = engine_of(open_on(bundles("captured fp32")))
    runner.reset()
    runner.prefill(StepRequest([5, 6, 7]))
    runner.cancel()
    assert not any(run.options.terminate for call in cache.calls.values() for run in (call.greedy, call.sampled))
    with pytest.raises(Cancelled):
        runner.prefill(StepRequest([8]))


def test_rows_that_a_failed_call_was_to_move_are_read_again(bundles: Bundles, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, cache = engine_of(open_on(bundles("captured fp32")))
    runner.reset()
    runner.prefill(StepRequest([5, 6, 7]))
    runner.verify(StepRequest([9, 10, 11, 12], DraftTree((0, 0, 0, 2), (0, 0, 1, 0))))
    runner.commit((0, 2, 3))

    def fails(*_: Any, **__: Any) -> None:
        raise BundleError("the graph failed", "a graph that runs", "export it again")

    with monkeypatch.context() as broken, pytest.raises(BundleError):
        broken.setattr(runner._executor, "run_there", fails)
        runner.forward([13], [0], np.zeros((1, 1), np.float32))
    ids = [5, 6, 7, 9, 11, 12, 13]
    assert cache.length == 4 and runner.reusable(ids) == 4
    runner.begin(ids)
    again = runner.forward(ids[4:], range(3), chain(2).mask())
    assert np.abs(again - runner.score(ids)[4:]).max() < 1e-3


def test_a_saved_conversation_holds_rows_that_were_yet_to_move(bundles: Bundles, tmp_path: Path) -> None:
    session, other = open_on(bundles("captured full")), open_on(bundles("captured full"))
    text = session.generate(SOME[0], max_new_tokens=20).text
    session.save(tmp_path / "saved")
    other.restore(tmp_path / "saved")
    ids = session.encode(SOME[0] + text + "xy")
    assert other.runner.reusable(ids) > 3
    assert other.generate(ids, max_new_tokens=20).token_ids == session.generate(ids, max_new_tokens=20).token_ids


def test_buffers_of_a_sequence_that_is_gone_serve_the_next(bundles: Bundles) -> None:
    session = open_on(bundles("captured fp32"))
    runner, _ = engine_of(session)
    model, wanted = runner.model, session.generate(SOME[0], max_new_tokens=20).token_ids
    second = session.another()
    held = engine_of(second)[1].data
    assert held is not engine_of(session)[1].data
    second.generate(SOME[1], max_new_tokens=20)
    del second
    gc.collect()
    assert len(model.spare_buffers) == 1
    third = session.another()
    assert engine_of(third)[1].data is held and not model.spare_buffers
    assert third.generate(SOME[0], max_new_tokens=20).token_ids == wanted


def test_a_graph_with_nodes_on_the_cpu_gives_way_to_the_ordinary_one(
    bundles: Bundles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        providers.PROVIDERS, "device", replace(providers.PROVIDERS["device"], capture={"some": "setting"})
    )
    asked: list[bool] = []
    monkeypatch.setattr(
        "streamspec.runtime.engine.loaded_model.prepare",
        lambda ort, here, options, threads, capture: (asked.append(capture), [providers.CPU.ort])[1],
    )
    for left, captured in ((0, True), (3, False)):
        monkeypatch.setattr("streamspec.runtime.engine.loaded_model.check_placement", lambda *_, left=left: left)
        session = open_on(bundles("captured fp32"))
        assert isinstance(session.runner, OrtRunner) and captures(session.runner) == captured
        said = str(session.provider)
        assert ("captured" in said) and ("not captured: provider device leaves 3 nodes" in said) != captured
        assert session.generate(SOME[0], max_new_tokens=5).token_ids
    assert asked[0] and not asked[-1]


def test_each_row_count_of_each_sequence_has_a_graph_of_its_own(
    bundles: Bundles, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = open_on(bundles("captured fp32"))
    runner, cache = engine_of(session)

    def ids(cache: CapturedCache) -> list[str]:
        runs = [run for call in cache.calls.values() for run in (call.greedy, call.sampled)]
        return [run.options.get_run_config_entry("gpu_graph_id") for run in runs]

    assert ids(cache) == ["-1"] * 6  # the CPU captures nothing
    runner.model.captures = True
    assert ids(engine_of(session.another())[1]) == ["1", "2", "3", "4", "5", "6"]
    assert ids(engine_of(session.another())[1]) == ["1", "2", "3", "4", "5", "6"]  # those of the sequence before


def test_drafts_are_as_large_as_a_row_count_where_rows_up_to_it_are_free(bundles: Bundles, tmp_path: Path) -> None:
    session = open_on(bundles("captured full"), tree="auto", cache_dir=tmp_path)
    costs = session.policy.costs
    assert session.policy.rows == 8 and isinstance(costs, PaddedRowCosts)
    assert len({*costs.curve[1:4]}) == 1 and len({*costs.curve[4:8]}) == 1 and costs.curve[0] == 1
    for _ in range(6):
        session.generate(SOME[0], max_new_tokens=40)
    assert len({*costs.curve[1:4]}) == 1 and len({*costs.curve[4:8]}) == 1 and costs.price == 0
    assert {*costs.record().seconds} <= {1, 4, 8}


class RunByThread:
    """A session as ONNX Runtime runs one that captures: in a thread that has not run a graph before its first run is
    two runs, a capture and its replay."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.known, self.threads = inner, threading.local(), set[int]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def run_with_iobinding(self, io: Any, options: Any) -> None:
        ids = self.known.__dict__.setdefault("ids", set())
        graph = options.get_run_config_entry("gpu_graph_id")
        for _ in range(1 if graph in ids else 3):
            self.inner.run_with_iobinding(io, options)
        ids.add(graph)
        self.threads.add(threading.get_ident())


class Settings(dict[str, str]):
    """Of a device that captures without any."""

    def __bool__(self) -> bool:
        return True


def test_graphs_are_captured_and_run_in_one_thread_whoever_asks(
    bundles: Bundles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the first step of a thread moved rows, it would move them three times."""
    capturing = replace(providers.PROVIDERS["device"], capture=Settings())
    monkeypatch.setitem(providers.PROVIDERS, "device", capturing)
    opening = LoadedModel._open
    made: list[RunByThread] = []

    def opened(model: LoadedModel, path: Path) -> Any:
        session = opening(model, path)
        if path.name != CAPTURED:
            return session
        made.append(RunByThread(session))
        return made[-1]

    expected = [open_on(bundles("captured full")).generate(prompt, max_new_tokens=20).token_ids for prompt in SOME]
    monkeypatch.setattr(LoadedModel, "_open", opened)
    session = open_on(bundles("captured full"))
    model = engine_of(session)[0].model
    found = [session.generate(prompt, max_new_tokens=20).token_ids for prompt in SOME]
    for prompt in SOME:
        with ThreadPoolExecutor(1) as other:
            found.append(other.submit(session.generate, prompt, max_new_tokens=20).result().token_ids)
        found.append(model.on_device(threading.get_ident) and session.generate(prompt, max_new_tokens=20).token_ids)
    assert model.captures and [*found[: len(SOME)]] == expected
    assert found[len(SOME) :] == [tokens for tokens in expected for _ in range(2)]
    assert made[-1].threads == {model.on_device(threading.get_ident)} != {threading.get_ident()}


def test_a_device_that_cannot_capture_is_told_in_one_line(bundles: Bundles, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("CUDA failure 900: operation not permitted when stream is capturing")

    monkeypatch.setattr(BoundCall, "run", fails)
    model = LoadedModel(bundles("captured fp32") / CAPTURED, read_manifest(bundles("captured fp32")), 1, "device")
    with pytest.raises(ProviderError, match="cannot capture the graph: CUDA failure 900"):
        OrtRunner(model)
    session = open_on(bundles("captured fp32"))  # the graph that is not captured, with the reason
    assert not captures(session.runner) and "CUDA failure 900" in str(session.provider)  # type: ignore[arg-type]


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_ctrl_c_is_raised_once_the_device_is_done() -> None:
    thread, ended = DeviceThread(), threading.Event()

    def work() -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        time.sleep(0.2)
        ended.set()

    with pytest.raises(KeyboardInterrupt):
        thread.run(work)
    assert ended.is_set() and thread.run(lambda: 5) == 5
