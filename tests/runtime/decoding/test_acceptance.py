"""accept / commit, enumerated over all small trees."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np

from streamspec.draft_tree import DraftTree, chain
from streamspec.runtime.decoding.acceptance import SUM_BLOCK, accept, committed_tokens, off_borders
from streamspec.runtime.decoding.draft_tree_search import Draft, Taken


def small_trees(nodes: int, ranks: int) -> Iterator[DraftTree]:
    """All trees with up to `nodes` nodes and ranks below `ranks`."""
    for n in range(1, nodes + 1):
        for parents in product(*(range(i) for i in range(1, n))):
            for below in product(range(ranks), repeat=n - 1):
                try:
                    yield DraftTree((0, *parents), (0, *below))
                except ValueError:
                    continue


def test_accept_equals_its_definition_on_all_small_trees() -> None:
    checked = 0
    for tree in small_trees(4, 2):
        n = len(tree)
        candidates = np.array([[0, 1], [1, 0], [0, 1]])
        tokens = [5, *(candidates[d - 1, r] for d, r in zip(tree.depths[1:], tree.ranks[1:], strict=True))]
        for choices in product(range(3), repeat=n):
            node, path = accept(tree, tokens, choices)
            right = [i for i in range(n) if all(tokens[k] == choices[tree.parents[k]] for k in tree.path(i)[1:])]
            assert node in right and tree.depths[node] == max(tree.depths[i] for i in right)
            assert path == tree.path(node)
            checked += 1
    assert checked > 1000


def test_accepting_repeated_candidates_takes_the_first() -> None:
    tree = DraftTree((0, 0, 0), (0, 0, 1))
    assert accept(tree, [9, 4, 4], [4, 0, 0]) == (1, (0, 1))


def test_commit_stops_at_end_of_text_and_at_the_limit() -> None:
    tokens, choices = [9, 1, 2, 3], [1, 2, 3, 4]
    full = committed_tokens(tokens, choices, (0, 1, 2, 3), eos=(), limit=9)
    assert (full.tokens, full.drafted, full.finish_reason) == ([1, 2, 3, 4], [True, True, True, False], None)
    assert committed_tokens(tokens, choices, (0, 1, 2, 3), eos=(2,), limit=9).tokens == [1, 2]
    assert committed_tokens(tokens, choices, (0, 1, 2, 3), eos=(2,), limit=9).finish_reason == "eos"
    short = committed_tokens(tokens, choices, (0, 1), eos=(), limit=1)
    assert (short.tokens, short.finish_reason) == ([1], "length")
    assert committed_tokens([0, 7], [7, 2], (0, 1), eos=(2,), limit=2).finish_reason == "eos"
    assert committed_tokens([0, 7], [7, 2], (0, 1), eos=(2,), limit=1).finish_reason == "length"


def test_trees_keep_off_summation_borders_and_become_their_first_path() -> None:
    draft = Draft(DraftTree((0, 0, 1, 1, 0, 4, 4), (0, 0, 0, 1, 1, 0, 1)), list(range(7)), [1.0] * 7, [1] * 7, 2.0)
    for length in range(3 * SUM_BLOCK):
        kept = off_borders(draft, length)
        first, last = length // SUM_BLOCK, (length + 6) // SUM_BLOCK
        assert kept.tree == (draft.tree if first == last else chain(2))
        assert kept.tokens == list(range(7 if first == last else 3))


def test_the_path_that_came_is_followed_through_what_a_draft_takes_of_the_nodes() -> None:
    tokens, parents = [0, 5, 8, 6, 7, 6, 9], [0, 0, 0, 1, 1, 2, 2]  # a root, two children, two of each
    taken = Taken(tokens, parents, [0] * 7, [0] * 7, [1.0] * 7, 6, 2.0)  # the last of them is not drafted
    assert [taken.follow(came) for came in ([8, 6, 1], [8, 9], [5, 7], [9], [])] == [2, 1, 2, 0, 0]
    assert taken.pays(np.array([1, 1, 1, 1, 1, 2.0, 9])) and not taken.pays(np.array([1, 1, 1, 1, 1, 2.1, 1]))
