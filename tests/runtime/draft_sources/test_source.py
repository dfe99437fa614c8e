"""What several sources found, as one tree, and what is learned of each."""

from __future__ import annotations

import pytest

from streamspec.runtime.draft_sources.source import (
    AGREES,
    ALONE,
    DIFFERS,
    NO_CLAIM,
    AcceptanceRates,
    Continuations,
    Found,
    merged,
    observe,
)


def test_tokens_that_several_propose_are_one_node_as_likely_as_the_surest_says() -> None:
    one = Found(Continuations([7, 8], [-1, 0], [0, 1]), AcceptanceRates([(0.5, 0.6, 0.1), (0.4, 0.4, 0.4)]), 2)
    two = Found(Continuations([9, 7, 6, 8], [-1, -1, 1, 1], [0] * 4), AcceptanceRates([(0.2, 0.7, 0.3)]), 4)
    tree = merged([one, two])
    assert tree is not None
    assert tree.tokens == [7, 8, 9, 6] and tree.parents == [-1, 0, -1, 0]
    assert tree.sources == [6, 6, 4, 4]
    assert tree.rates == pytest.approx([0.5, 0.7, 0.3, 0.4, 0.7, 0.4, 0.2, 0.7, 0.3, 0.2, 0.7, 0.3])
    assert merged([]) is None


def test_each_source_learns_by_level_and_kind_from_what_it_proposed_along_the_text() -> None:
    rates = AcceptanceRates([(0.5, 0.5, 0.5)] * 3)
    found = [Found(Continuations([7, 9, 8, 5], [-1, -1, 0, 1], [0, 1, 2, 2]), rates, 2)]
    for _ in range(200):
        observe(found, [7, 8, 1], [9, None])
    assert rates.of(0)[DIFFERS] > 0.95 and rates.of(1)[AGREES] < 0.05  # 7 came, the drafter said 9
    assert rates.of(2)[ALONE] > 0.95  # 8 came; 5, after 9, was not tried
    assert rates.of(0)[AGREES] == rates.of(1)[DIFFERS] == rates.of(2)[DIFFERS] == 0.5


def test_a_token_that_a_source_passes_through_is_neither_claimed_nor_learned() -> None:
    rates = AcceptanceRates([(0.5, 0.5, 0.5)])
    found = [Found(Continuations([7, 8], [-1, 0], [NO_CLAIM, 0]), rates, 2)]
    tree = merged(found)
    assert tree is not None and tree.sources == [0, 2] and tree.rates == [0, 0, 0, 0.5, 0.5, 0.5]
    other = Found(Continuations([7], [-1], [0]), AcceptanceRates([(0.3, 0.3, 0.3)]), 4)
    both = merged([other, *found])
    assert both is not None and both.sources == [4, 2] and both.rates[:3] == [0.3, 0.3, 0.3]
    for _ in range(200):
        observe(found, [7, 9], [])
    assert rates.of(0)[ALONE] < 0.05 and rates.of(0)[AGREES] == 0.5
