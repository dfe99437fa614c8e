"""Following a grammar through draft trees: a toy model under a toy grammar says the same whatever was drafted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamspec.draft_tree import DraftTree
from streamspec.errors import BundleError, ConfigError
from streamspec.runtime.decoding.draft_proposal import IndependentProposal
from streamspec.runtime.decoding.draft_tree_search import build_draft_tree
from streamspec.runtime.decoding.loop import SpeculativeDecoder
from streamspec.runtime.decoding.model_runner import StepRequest, StepResult
from streamspec.runtime.sampling.grammar_state import GrammarState
from streamspec.runtime.sampling.sampling_params import Logprob
from tests.support.toy_runner import Setup, ToyMatcher, ToyRunner, Untimed, adaptive, hashed

VOCAB = 8


def decode(
    runner: ToyRunner, setup: Setup, prompt: list[int]
) -> tuple[list[int], str | None, list[Logprob], SpeculativeDecoder]:
    decoder, tokens, reason, said = setup.decoder(runner), [], None, []
    for done in decoder.run(prompt, setup.grammar):
        tokens, reason, said = tokens + done.tokens, done.finish_reason, said + done.logprobs
        assert len(done.tokens) == len(done.drafted) == len(done.logprobs)
    return tokens, reason, said, decoder


@settings(max_examples=150, deadline=None)
@given(st.integers(2, 20), st.integers(0, 10000), st.integers(1, 40), st.integers(5, 40), st.booleans(), st.booleans())
def test_speculative_equals_plain_under_a_grammar(
    rows: int, seed: int, limit: int, context: int, ends: bool, ngram: bool
) -> None:
    prompt, rule, eos = [1, 2, 3], hashed(VOCAB, seed), (5,) if ends else ()

    def run(setup: Setup) -> tuple[list[int], str | None, list[Logprob], SpeculativeDecoder]:
        setup.grammar, setup.logprobs, setup.ngram = GrammarState(ToyMatcher(VOCAB, seed), eos), 2, ngram
        return decode(
            ToyRunner(rule, VOCAB, gamma=3 * (seed % 4 > 0), context=context, skill=0.8, seed=seed), setup, prompt
        )

    *plain, _ = run(Setup(limit, eos))
    *spec, decoder = run(Setup(limit, eos, rows))
    assert spec == plain
    tokens, reason, _ = plain
    matcher = ToyMatcher(VOCAB, seed)
    forced = 0
    for token in tokens[: -1 if reason == "eos" else None]:
        mask, may_end = matcher.allowed()
        mask[list(eos)] = False
        assert token not in eos and matcher.consume(token)
        forced += mask.sum() == 1 and not (may_end and eos)
    mask, may_end = matcher.allowed()
    assert reason == "length" or may_end
    assert reason != "stop" or (not eos and not mask.any())
    assert decoder.stats.forced_tokens == forced
    assert decoder.stats.new_tokens == len(tokens)


class Chain:
    """Only 1, 2, 3, ... may follow, up to `last`; then anything below `last`, or the end."""

    def __init__(self, last: int) -> None:
        self.last, self.text = last, list[int]()

    def allowed(self) -> tuple[np.ndarray, bool]:
        at = len(self.text)
        mask = np.arange(50) == at + 1 if at < self.last else np.arange(50) < self.last
        return mask, at >= self.last

    def consume(self, token: int) -> bool:
        self.text.append(token)
        return True

    def back(self, tokens: int) -> None:
        del self.text[-tokens:]


def test_forced_tokens_are_drafted_without_a_drafter() -> None:
    runner = ToyRunner(hashed(50, 3), 50, gamma=0, context=64)
    tokens, _, _, run = decode(
        runner, Setup(21, (), 8, grammar=GrammarState(Chain(20), ()), ngram=False, logprobs=0), [7]
    )
    assert tokens[:20] == list(range(1, 21))
    assert [rows for rows, _ in runner.calls] == [1, 8, 8, 4] and run.stats.forced_tokens == 20


def test_forced_tokens_are_drafted_while_speculation_pauses_and_do_not_end_the_pause() -> None:
    controller = Untimed()
    while controller.on:
        controller.step(1, 5.0)
    runner = ToyRunner(hashed(50, 3), 50, gamma=3, context=64)
    setup = Setup(
        23, (), 8, costs=np.full(8, 1.5), adaptive=adaptive(controller), grammar=GrammarState(Chain(20), ()), logprobs=0
    )
    decode(runner, setup, [7])
    assert [rows for rows, _ in runner.calls] == [1, 8, 8, 4, 1, 1] and not controller.on
    assert not any(streams for _, streams in runner.calls[1:])


def test_a_forced_chain_ends_with_the_context() -> None:
    runner = ToyRunner(hashed(50, 3), 50, gamma=0, context=12)
    tokens, reason, _, _ = decode(runner, Setup(99, (), 8, grammar=GrammarState(Chain(20), ()), logprobs=0), [7])
    assert (tokens, reason) == (list(range(1, 12)), "length")


def test_only_what_the_grammar_allows_is_drafted() -> None:
    state = GrammarState(ToyMatcher(VOCAB, 3), (5,))
    proposal = IndependentProposal(
        np.array([np.random.default_rng(i).permutation(VOCAB) for i in range(4)]), np.zeros((4, VOCAB))
    )
    made = build_draft_tree(0, proposal, None, 30, grammar_state=state)
    assert len(made.tree) > 5
    for node in range(1, len(made.tree)):
        path = [int(made.tokens[i]) for i in made.tree.path(node)[1:]]
        matcher = ToyMatcher(VOCAB, 3)
        assert all(token != 5 and matcher.consume(token) for token in path)
    masks = state.tree_masks(made.tree, made.tokens)
    assert masks.shape == (len(made.tree), VOCAB) and masks.any(axis=1).all()


def test_what_is_learnt_of_drafts_is_not_learnt_under_a_grammar() -> None:
    setup = Setup(40, (), 8, grammar=GrammarState(ToyMatcher(50, 1), ()), logprobs=0)
    before = setup.adaptive.calibration.sharpness
    decode(ToyRunner(hashed(50, 3), 50), setup, [1, 2, 3])
    assert setup.adaptive.calibration.sharpness == before


def test_a_graph_that_ignores_its_mask_is_refused() -> None:
    class Deaf(ToyRunner):
        def prefill(self, request: StepRequest, progress: Any = None) -> StepResult:
            return super().prefill(replace(request, mask=None))

    with pytest.raises(BundleError, match="chose token 0 although its mask"):
        decode(Deaf(lambda ids: 0, 50), Setup(5, grammar=GrammarState(Chain(20), ()), logprobs=0), [1])


def test_a_dead_end_is_refused() -> None:
    class Dead(Chain):
        def allowed(self) -> tuple[np.ndarray, bool]:
            return np.zeros(50, np.bool_), False

    with pytest.raises(ConfigError, match="nothing in this vocabulary"):
        GrammarState(Dead(3), (2,)).after()


def test_masks_are_those_after_each_path() -> None:
    state = GrammarState(Chain(2), (49,))
    tree = DraftTree((0, 0, 1), (0, 0, 0))
    assert [np.flatnonzero(mask).tolist() for mask in state.tree_masks(tree, [9, 1, 2])] == [[1], [2], [0, 1, 49]]
    state.advance([1, 2])
    assert np.flatnonzero(state.after().mask).tolist() == [0, 1, 49]
