from __future__ import annotations

import numpy as np
import pytest

from streamspec.draft_tree import DraftTree, chain


def test_chain_is_causal() -> None:
    tree = chain(3)
    assert len(tree) == 4 and tree.depth == 3 and tree.path(3) == (0, 1, 2, 3)
    assert np.array_equal(tree.mask() == 0, np.tril(np.ones((4, 4), bool)))
    assert tree.mask().dtype == np.float32 and tree.mask().min() == np.float32(-1e4)


def test_a_row_sees_its_ancestors_only() -> None:
    tree = DraftTree((0, 0, 1, 0, 3), (0, 0, 0, 1, 0))
    assert [np.flatnonzero(row).tolist() for row in tree.ancestors] == [[0], [0, 1], [0, 1, 2], [0, 3], [0, 3, 4]]
    assert tree.children == ((1, 3), (2,), (), (4,), ())


def test_from_nodes_puts_the_likeliest_chain_first() -> None:
    nodes = [(0, 0, 1.0), (0, 0, 0.6), (0, 1, 0.3), (1, 2, 0.29), (2, 0, 0.2), (1, 0, 0.1)]
    tree = DraftTree.from_nodes(nodes, 6)
    assert [tree.ranks_to(i) for i in range(6)] == [(), (0,), (0, 2), (0, 0), (1,), (1, 0)]
    assert [tree.ranks_to(i) for i in range(3)] == [DraftTree.from_nodes(nodes, 4).ranks_to(i) for i in range(3)]
    assert len(DraftTree.from_nodes(nodes, 99)) == 6 and len(DraftTree.from_nodes(nodes, 1)) == 1


@pytest.mark.parametrize(
    ("parents", "ranks"),
    [
        ((), ()),
        ((0,), (0, 0)),
        ((1, 0), (0, 0)),
        ((0, 1), (0, 0)),
        ((0, 0, 0), (0, 1, 1)),
        ((0, 0), (0, -1)),
        ((0, -1), (0, 0)),
    ],
)
def test_malformed_trees_are_refused(parents: tuple[int, ...], ranks: tuple[int, ...]) -> None:
    with pytest.raises(ValueError):
        DraftTree(parents, ranks)
