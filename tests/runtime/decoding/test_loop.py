"""Speculative decoding of a toy model gives plain decoding's tokens, whatever the tree, the candidates and the
limits.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamspec.errors import BundleError
from streamspec.runtime.costs.speculation_controller import PROBES
from streamspec.runtime.decoding.loop import SpeculativeDecoder
from streamspec.runtime.decoding.model_runner import Pruning, StepRequest, StepResult
from streamspec.runtime.decoding.planner import Planner
from streamspec.runtime.decoding.step_plan import DrafterPlan
from streamspec.runtime.draft_sources.lookup import MOST_WAITING
from streamspec.runtime.draft_sources.ngram import NGRAM, NgramIndex
from streamspec.runtime.draft_sources.source import DraftSource
from tests.support.toy_runner import Setup, ToyRunner, Untimed, adaptive, hashed, scripted


def decode(runner: ToyRunner, setup: Setup, prompt: list[int]) -> tuple[list[int], str | None, SpeculativeDecoder]:
    decoder, tokens, reason = setup.decoder(runner), [], None
    for done in decoder.run(prompt, setup.grammar):
        assert len(done.tokens) == len(done.drafted) > 0
        tokens += done.tokens
        reason = done.finish_reason
    return tokens, reason, decoder


@settings(max_examples=150, deadline=None)
@given(st.integers(2, 20), st.integers(0, 1000), st.integers(1, 40), st.integers(2, 30), st.floats(0, 1), st.booleans())
def test_speculative_equals_plain(rows: int, seed: int, limit: int, context: int, skill: float, pruned: bool) -> None:
    prompt = [1, 2, 3][: context - 1]
    eos = (5,) if seed % 2 else ()
    rule = hashed(8, seed)
    plain, plain_reason, plain_run = decode(ToyRunner(rule, 8, context=context), Setup(limit, eos), prompt)
    setup = Setup(limit, eos, rows, pruning=Pruning(3) if pruned else None)
    spec, reason, run = decode(ToyRunner(rule, 8, context=context, skill=skill, seed=seed), setup, prompt)
    assert (spec, reason) == (plain, plain_reason)
    assert len(spec) <= min(limit, context - len(prompt))
    assert run.stats.new_tokens == len(spec) == 1 + run.stats.step_tokens + run.stats.plain_steps
    assert plain_run.stats.steps == 0 and plain_run.stats.tau == 1.0


def test_a_perfect_drafter_commits_gamma_plus_one_per_step() -> None:
    runner = ToyRunner(hashed(50, 3), 50, gamma=3, width=1, context=64, skill=1.0)
    _, _, run = decode(runner, Setup(41, (), 4, ngram=False), [1])
    assert run.stats.steps == 10 and run.stats.tau == 4.0 and run.stats.plain_steps == 0
    assert run.stats.call_reduction == pytest.approx(41 / 11)


def test_near_the_end_of_the_context_plain_steps_take_over() -> None:
    runner = ToyRunner(hashed(50, 3), 50, gamma=3, width=1, context=12, skill=1.0)
    tokens, reason, run = decode(runner, Setup(99, (), 4, ngram=False), [1])
    assert len(tokens) == 11 and reason == "length"
    assert run.stats.steps > 0 and run.stats.plain_steps > 0


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 6])
def test_no_draft_is_deeper_than_what_the_answer_may_still_have(limit: int) -> None:
    runner = ToyRunner(hashed(50, 3), 50, gamma=8, width=1, context=200, skill=1.0)
    tokens, _, run = decode(runner, Setup(limit, (), 16, ngram=False), [1])
    assert len(tokens) == limit
    # The rows of a step: the last token, and a draft of those that may come but for the one after it.
    assert [rows for rows, _ in runner.calls[1:]] == [limit - 1] * (limit > 1)
    assert runner.calls[0] == (1, limit > 2)  # else no draft can follow
    assert run.stats.new_tokens == limit


def test_plain_decoding_never_asks_for_streams() -> None:
    runner = ToyRunner(hashed(50), 50)
    decode(runner, Setup(10), [1])
    assert runner.calls == [(1, False)] * 10


def test_a_graph_that_accepts_another_node_is_refused() -> None:
    class Wrong(ToyRunner):
        def verify(self, request: StepRequest) -> StepResult:
            right = super().verify(request)
            return StepResult(right.choices, 99, right.proposal)

    with pytest.raises(BundleError, match="accepted node 99"):
        decode(Wrong(hashed(50), 50), Setup(10, (), 4), [1])


def test_useless_drafts_switch_speculation_off_and_it_is_tried_again() -> None:
    runner = ToyRunner(hashed(50, 3), 50, gamma=3, width=1, context=4000, skill=0.0)
    setup = Setup(500, (), 4, costs=np.full(4, 2.0), adaptive=adaptive(), ngram=False)
    tokens, _, run = decode(runner, setup, [1])
    rows = [n for n, _ in runner.calls[1:]]
    first = rows.index(1)
    assert rows[:first] == [4] * first and first < 12
    again = rows.index(4, first)
    assert again - first > 100 and rows.index(1, again) - again <= 4
    plain, _, _ = decode(ToyRunner(hashed(50, 3), 50, context=4000), Setup(setup.limit), [1])
    assert tokens == plain
    assert "off (accepted 1." in run.stats.speculation and "2.0x step cost" in run.stats.speculation


def test_good_drafts_stay_on() -> None:
    runner = ToyRunner(hashed(50, 3), 50, gamma=3, width=3, context=400, skill=1.0)
    _, _, run = decode(runner, Setup(300, (), 40, costs=np.full(40, 1.5), adaptive=adaptive(), ngram=False), [1])
    # Each of the three first probes of what a plain step takes is one plain step, and another that drafts again.
    assert run.stats.plain_steps <= 1 + 2 * len(PROBES) and run.stats.speculation.startswith("on")


def test_a_step_that_is_timed_does_nothing_but_decode() -> None:
    timed: list[float | None] = []

    class Listening(Untimed):
        def plain_step(self, seconds: float | None = None, drafter: float = 0.0) -> None:
            timed.append(seconds)
            super().plain_step()

    runner = ToyRunner(hashed(50, 3), 50, gamma=3, width=3, context=2000, skill=0.9)
    decode(runner, Setup(1500, (), 8, costs=np.full(8, 1.5), adaptive=adaptive(Listening()), ngram=False), [1])
    plain = [draft for rows, draft in runner.calls[1:] if rows == 1]
    assert len(plain) == len(timed) >= 2 * len(PROBES)
    assert [seconds is None for seconds in timed] == plain


def test_a_paused_step_looks_at_no_source_and_weighs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []

    class Listening(NgramIndex):
        def extend(self, tokens: Iterable[int]) -> None:
            read.extend(tokens)

    class Paused(Untimed):
        def begin(self) -> None:
            self.on, self._budget = False, -1e9

    source = DraftSource("listening", ((0.5, 0.5, 0.5),), Listening)
    weighed: list[int] = []
    monkeypatch.setattr(Planner, "_drafter", lambda *_: weighed.append(1))
    runner = ToyRunner(hashed(50, 3), 50, context=400)
    setup = Setup(MOST_WAITING - 5, rows=8, ngram=False, sources=(source,), adaptive=adaptive(Paused()))
    decoder, text = setup.decoder(runner), [1, 2, 3]
    monkeypatch.setattr(Planner, "plan_prefill", lambda *_: DrafterPlan(False))
    for done in decoder.run([1, 2, 3]):
        assert not read and not weighed
        text += done.tokens
    assert read == text[:-1] and decoder.stats.steps == 0  # what was put off is done at the end


def test_sources_too_rarely_right_to_pay_are_learned_from_plain_steps_too() -> None:
    """Three of four tokens follow from the one before, which n-grams are assumed to find out one time in five."""
    random = np.random.default_rng(0)
    follows = random.integers(100, 400, 400)
    text = [100]
    for _ in range(600):
        text.append(int(follows[text[-1]] if random.random() < 0.75 else random.integers(100, 400)))
    state = adaptive()
    runner = ToyRunner(scripted(3, text), 400, gamma=0, context=900)
    setup = Setup(len(text), rows=64, costs=1 + 0.25 * np.arange(64), adaptive=state)
    assert decode(runner, setup, [1, 2, 3])[0] == text
    assert state.calibration.rates[NGRAM.name].of(1)[0] > 0.45
