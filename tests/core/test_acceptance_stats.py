from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamspec.acceptance_stats import (
    Acceptance,
    node_order,
    per_stream_accuracy,
    simulated_tau,
)
from streamspec.draft_tree import DraftTree, chain, expected_tokens
from streamspec.errors import AdapterError


def completion(length: int, gamma: int, rank: int = 0) -> list[list[int]]:
    """`length` tokens each followed by the candidate number `rank`."""
    return [[rank if t + j < length else -2 for j in range(1, gamma + 1)] for t in range(length)]


def random_ranks(seed: int, gamma: int, count: int = 6) -> list[list[list[int]]]:
    random = np.random.default_rng(seed)
    out = []
    for _ in range(count):
        length = int(random.integers(1, 12))
        rows = random.integers(-1, 3, size=(length, gamma)).tolist()
        out.append([[r if t + j < length else -2 for j, r in enumerate(row, 1)] for t, row in enumerate(rows)])
    return out


def test_perfect_candidates_commit_gamma_plus_one_tokens() -> None:
    ranks = [completion(9, 3)]  # the first token comes from the prefill, eight follow
    assert simulated_tau(ranks, chain(3)) == 4.0
    assert simulated_tau(ranks, chain(1)) == 2.0
    assert simulated_tau(ranks, chain(0)) == 1.0
    assert simulated_tau([completion(9, 3, rank=1)], chain(3)) == 1.0
    assert simulated_tau([completion(9, 3, rank=1)], DraftTree((0, 0, 1, 2), (0, 1, 1, 1))) == 4.0


def test_the_end_of_a_completion_cuts_the_last_step() -> None:
    assert simulated_tau([completion(6, 3)], chain(3)) == 5 / 2  # 4 + 1 tokens
    assert simulated_tau([completion(1, 3)], chain(3)) == 1.0
    assert simulated_tau([], chain(3)) == 1.0


def test_answers_of_one_conversation_are_simulated_one_by_one() -> None:
    two = completion(5, 3) + completion(9, 3)
    assert simulated_tau([two], chain(3)) == simulated_tau([completion(5, 3), completion(9, 3)], chain(3)) == 12 / 3


def test_a_step_stops_at_the_first_wrong_candidate() -> None:
    ranks = [[[0, -1, 0], [-1, 0, 0], [0, 0, -2], [0, -2, -2], [-2, -2, -2]]]
    assert (
        simulated_tau(ranks, chain(3)) == 2.0
    )  # root 0 accepts one candidate, root 2 two without a bonus token: 2 + 2 in 2 steps


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6))
def test_the_first_n_nodes_are_the_best_tree_of_n_nodes(seed: int) -> None:
    gamma, ranks = 2, random_ranks(seed, 2)
    nodes = node_order(ranks, gamma)
    steps = [tuple(row) for c in ranks for row in c if row[0] != -2]
    every = [(0,), (1,), (2,), *((a, b) for a in range(3) for b in range(3))]
    share = {path: sum(s[: len(path)] == path for s in steps) / max(len(steps), 1) for path in every}
    for n in range(1, min(len(nodes), 5) + 1):
        best = max(
            sum(share[p] for p in chosen)
            for chosen in combinations(every, n - 1)
            if all(p[:-1] in ((), *chosen) for p in chosen)
        )
        assert expected_tokens(nodes, n) == pytest.approx(1 + best)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 12))
def test_node_order_is_a_valid_nested_family(seed: int, n: int) -> None:
    nodes = node_order(random_ranks(seed, 3), 3)
    probabilities = [p for _, _, p in nodes]
    assert nodes[0] == (0, 0, 1.0) and probabilities == sorted(probabilities, reverse=True) and min(probabilities) > 0
    assert all(parent < i and p <= probabilities[parent] for i, (parent, _, p) in enumerate(nodes) if i)
    assert DraftTree.from_nodes(nodes, n).depth <= 3
    assert len(node_order(random_ranks(seed, 3), 3, max_nodes=4)) <= 4


def test_a_larger_tree_never_accepts_less_per_position() -> None:
    ranks = random_ranks(5, 3, count=40)
    nodes = node_order(ranks, 3)
    taus = [simulated_tau(ranks, DraftTree.from_nodes(nodes, n)) for n in (1, 4, 16, 64)]
    assert taus[0] == 1.0 and taus == sorted(taus)


def test_accuracy_counts_positions_where_a_token_came() -> None:
    ranks = [[[0, 1], [1, -2], [-2, -2]], [[-1, 0], [0, -2], [-2, -2]]]
    assert per_stream_accuracy(ranks) == [0.5, 0.5]
    assert per_stream_accuracy([]) == []


def test_saved_statistics_come_back(tmp_path: Path) -> None:
    saved = Acceptance(3, 10, random_ranks(1, 3))
    saved.save(tmp_path / "acceptance.json")
    assert Acceptance.load(tmp_path / "acceptance.json") == saved


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"gamma": 0, "max_rank": 3, "ranks": []}',
        '{"gamma": true, "max_rank": 3, "ranks": []}',
        '{"gamma": 2, "max_rank": 3, "ranks": [[[0]]]}',
        '{"gamma": 1, "max_rank": 3, "ranks": [[[3]]]}',
        '{"gamma": 1, "max_rank": 3, "ranks": [[[0.5]]]}',
        '{"gamma": 2, "max_rank": 3, "ranks": [[[-2, 0]]]}',
        '{"gamma": 1, "max_rank": 3, "ranks": {"0": []}}',
        "[" * 100000,
    ],
)
def test_malformed_statistics_are_refused_in_one_line(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(AdapterError) as caught:
        Acceptance.load(tmp_path / "a.json")
    assert "\n" not in str(caught.value)
    json.dumps(str(caught.value))
