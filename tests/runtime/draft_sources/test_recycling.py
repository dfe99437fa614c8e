"""Token recycling: what the model chose after the same tokens before."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamspec.runtime.draft_sources.ngram import NGRAM
from streamspec.runtime.draft_sources.recycling import (
    ADDED,
    ASSUMED,
    BYTES,
    CHOICES,
    DEPTH,
    OFFERED,
    RECYCLING,
    RIVALLED,
    ROWS,
    RecyclingTable,
)
from streamspec.runtime.draft_sources.source import (
    ALONE,
    DRAFTER,
    NO_CLAIM,
    AcceptanceRates,
    Continuations,
    DraftSource,
    Stems,
)
from streamspec.runtime.hardware import native_library, native_recycling
from streamspec.runtime.sampling.grammar_state import GrammarState
from tests.runtime.decoding.test_loop import decode
from tests.support.toy_runner import Setup, ToyMatcher, ToyRunner, adaptive, scripted, varied

PAIR, SINGLE = 0, OFFERED  # levels of what is offered first


def taught(*rows: Sequence[int]) -> RecyclingTable:
    """A table that has seen `before, token, choice` one after the other, at the beginning of a text."""
    table = RecyclingTable()
    for before, token, choice in rows:
        table.begin()
        table.extend([before, token])
        table.chosen([token], [0], [choice], [0])
    table.begin()
    return table


def graft(
    table: RecyclingTable, text: Sequence[int], stems: Stems | None = None, limit: int = DEPTH
) -> Continuations | None:
    table.begin()
    table.extend(text)
    root = Stems([text[-1]], [0], [1.0], [0])
    return table.graft(limit, stems or root, AcceptanceRates(ASSUMED))


def test_what_followed_two_tokens_comes_before_what_followed_the_last() -> None:
    table = taught((1, 2, 7), (3, 2, 8), (1, 2, 9))
    assert table.candidates(1, 2) == ([9, 7, 8], PAIR)
    assert table.candidates(3, 2) == ([8, 9, 7], PAIR)
    assert table.candidates(5, 2) == ([9, 8, 7], SINGLE)
    assert table.candidates(1, 7) == ([], SINGLE)
    assert table.candidates(0, 0) == ([], SINGLE) and taught((0, 0, 0)).candidates(0, 0) == ([0], PAIR)


def test_the_newest_distinct_choices_are_kept() -> None:
    table = taught(*((1, 2, choice) for choice in (3, 4, 5, 6, 5, 5)))
    assert table.candidates(1, 2) == ([5, 6, 4], PAIR) and CHOICES == 3


def test_rows_verified_in_vain_teach_too_but_what_came_is_the_newest() -> None:
    table = RecyclingTable()
    table.extend([1, 2])
    # 2 -> 3 came, and 4 was chosen after it; 5 and 6 were tried after 2 in vain, the last row was pruned
    table.chosen([2, 3, 5, 3, 6], [0, 0, 0, 2, 0], [3, 4, 8, 9, -1], [0, 1])
    assert table.candidates(2, 3)[0] == [4, 9] and table.candidates(5, 3)[0] == [9, 4]
    assert table.candidates(2, 5)[0] == [8] and table.candidates(2, 6)[0] == []
    assert table.candidates(7, 3)[0] == [4, 9]
    table = taught((2, 6, 3), (2, 6, 4), (2, 6, 5))
    table.chosen([2, 6], [0, 0], [7, -1], [0])
    assert table.candidates(2, 6)[0] == [5, 4, 3]


def test_a_new_text_begins_without_tokens_and_with_all_choices() -> None:
    table = taught((1, 2, 7))
    table.extend([2])
    table.chosen([2], [0], [8], [0])
    assert table.candidates(1, 2) == ([7, 8], PAIR) and table.candidates(0, 2) == ([8, 7], PAIR)


def test_continuations_go_on_from_token_to_token() -> None:
    table = taught((1, 2, 3), (2, 3, 4), (3, 4, 5))
    assert graft(table, [1, 2]) == Continuations([3, 4], [-1, 0], [PAIR, PAIR])  # 0.35 ** 3 is too little
    assert graft(table, [1, 2], limit=1) == Continuations([3], [-1], [PAIR])
    assert graft(table, [9, 2]) == Continuations([3, 4], [-1, 0], [SINGLE, PAIR])
    assert graft(table, [1, 9]) is None


def test_learned_rates_decide_how_far_they_go() -> None:
    table, rates = taught((1, 1, 1)), AcceptanceRates(ASSUMED)
    for _ in range(400):
        rates.observe(PAIR, 0, True)
    table.extend([1, 1])
    grown = table.graft(99, Stems([1], [0], [1.0], [0]), rates)
    assert grown is not None and len(grown.tokens) == ADDED and grown.parents == list(range(-1, ADDED - 1))
    few = table.graft(5, Stems([1], [0], [1.0], [0]), rates)
    assert few is not None and len(few.tokens) == 5


def test_what_follows_the_text_is_offered_however_rarely_it_came_true() -> None:
    table, rates = taught((1, 2, 3), (2, 3, 4)), AcceptanceRates(ASSUMED)
    for _ in range(400):
        rates.observe(PAIR, 0, False)
    table.extend([1, 2])
    assert table.graft(9, Stems([2], [0], [1.0], [0]), rates) == Continuations([3], [-1], [PAIR])


def test_it_adds_to_what_others_propose_and_confirms_the_drafter() -> None:
    table = taught((1, 2, 3), (1, 2, 4), (2, 3, 8), (2, 5, 9))
    # The drafter proposes 3 after the text, another source 5
    stems = Stems([2, 3, 5], [0, 0, 0], [1.0, 0.6, 0.4], [0, DRAFTER, 2])
    found = graft(table, [1, 2], stems)
    assert found is not None and found.tokens[:2] == [3, 5] and found.parents[:2] == [-1, -1]
    assert found.levels[:2] == [RIVALLED + 1, NO_CLAIM]  # 3 is what was chosen before 4, and another says 5
    assert sorted(zip(found.tokens[2:], found.parents[2:], strict=True)) == [(8, 0), (9, 1)]  # no 4 beside the drafter
    other = Stems([2, 4], [0, 0], [1.0, 0.6], [0, 2])  # another source's token is its own
    assert graft(table, [1, 2], other) == Continuations([4, 3], [-1, -1], [NO_CLAIM, RIVALLED + 1])


def test_a_session_drafts_from_its_earlier_answers() -> None:
    script = [(7 * i) % 40 for i in range(40)]  # nothing comes twice
    state, taus = adaptive(), []
    for _ in range(3):
        runner = ToyRunner(scripted(3, script), 50, gamma=0, context=200)
        setup = Setup(39, rows=6, sources=(RECYCLING,), adaptive=state)
        tokens, _, run = decode(runner, setup, [48, 49, 47])
        assert tokens == script[:39]
        taus.append(run.stats.new_tokens / (run.stats.steps + run.stats.plain_steps))
    assert taus[0] < 1.1 and taus[2] > 2.5
    fresh = Setup(39, rows=6, sources=(RECYCLING,), adaptive=adaptive())
    _, _, run = decode(ToyRunner(scripted(3, script), 50, gamma=0, context=200), fresh, [48, 49, 47])
    assert run.stats.steps == 0


def test_all_rows_of_all_steps_are_learned_from() -> None:
    class Counting(RecyclingTable):
        rows = 0

        def chosen(self, tokens: Sequence[int], *more: Sequence[int]) -> None:
            self.rows += len(tokens)
            super().chosen(tokens, *more)

    state, source = adaptive(), DraftSource("counting", ASSUMED, lasting=Counting)
    runner = ToyRunner(varied(3, 5), 8, gamma=3, context=200, skill=0.5)
    decode(runner, Setup(80, rows=6, sources=(source,), adaptive=state), [1, 2, 3])
    table = state.calibration.lasting_index(source)
    steps = [rows for rows, _ in runner.calls[1:]]
    assert isinstance(table, Counting) and table.rows == sum(steps) and max(steps) > 1


def test_nothing_is_learned_under_a_grammar() -> None:
    state = adaptive()
    for grammar in (GrammarState(ToyMatcher(8, 3), ()), None):
        setup = Setup(30, rows=6, sources=(RECYCLING,), adaptive=state, grammar=grammar)
        decode(ToyRunner(varied(3, 0), 8, gamma=0, context=60), setup, [1, 2, 3])
        table = state.calibration.lasting_index(RECYCLING)
        assert isinstance(table, RecyclingTable)
        assert any(table.candidates(0, token)[0] for token in range(8)) is (grammar is None)


def test_a_session_keeps_one_table_and_its_size_is_known() -> None:
    state = adaptive().calibration
    assert state.lasting_index(RECYCLING) is state.lasting_index(RECYCLING) is not None
    assert state.lasting_index(NGRAM) is None
    assert adaptive().calibration.lasting_index(RECYCLING) is not state.lasting_index(RECYCLING)
    table = RecyclingTable()
    assert table._pairs.nbytes + table._singles.nbytes == BYTES == 2 * ROWS * CHOICES * 4


def test_tokens_of_any_vocabulary_have_a_row() -> None:
    table = taught((300_000, 299_999, 262_143))
    assert table.candidates(300_000, 299_999) == ([262_143], PAIR)


@pytest.mark.skipif(not native_library.library(), reason=native_library.why_not())
@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_the_native_table_is_the_same(seed: int) -> None:
    assert native_recycling.with_native_table(NGRAM) is NGRAM
    random = np.random.default_rng(seed)
    native = native_recycling.with_native_table(RECYCLING).lasting
    assert native is not None and native is not RECYCLING.lasting
    tables, rates = (RecyclingTable(), native()), AcceptanceRates(ASSUMED)
    vocabulary = int(random.choice([3, 9, 300_000]))

    def tokens(n: int) -> list[int]:
        return (vocabulary - 1 - random.integers(0, min(vocabulary, 9), n)).tolist()

    for _ in range(8):
        if random.random() < 0.1:
            for table in tables:
                table.begin()
        text, n = tokens(int(random.integers(1, 4))), int(random.integers(1, 25))
        parents = [0, *(int(random.integers(0, i)) for i in range(1, n))]
        stems = Stems(tokens(n), parents, random.uniform(0, 1, n).tolist(), random.integers(0, 8, n).tolist())
        choices = [choice - 1 for choice in tokens(n)]
        path = [0, *sorted(set(random.integers(0, n, 3).tolist()) - {0})]
        for table in tables:
            table.extend(text)
        for _ in range(20):
            rates.observe(int(random.integers(len(ASSUMED))), ALONE, bool(random.random() < 0.8))
        limit = int(random.integers(1, 20))
        one, other = (table.graft(limit, stems, rates) for table in tables)
        assert one == other
        for table in tables:
            table.chosen(stems.tokens, stems.parents, choices, path)
        assert tables[0]._pairs == tables[1]._pairs and tables[0]._singles == tables[1]._singles
