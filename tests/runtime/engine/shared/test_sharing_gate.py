"""The gate takes the way that brings more tokens a second, for each number of sequences apart, and measures again."""

from __future__ import annotations

import pytest

from streamspec.runtime.engine.shared.sharing_gate import PERIOD, TRIAL, SharingGate


def steps(gate: SharingGate, sequences: int, count: int, shared: float, alone: float) -> int:
    """Takes steps of a token each, at so many tokens a second either way; returns how many were shared."""
    found = 0
    for _ in range(count):
        way = gate.shares(sequences)
        gate.called(sequences, way, 1 / (shared if way else alone))
        gate.committed(sequences, way, 1)
        found += way
    return found


@pytest.mark.parametrize(
    ("shared", "alone", "wins"), [(2.0, 1.0, True), (1.0, 2.0, False), (1.1, 1.0, True), (1.0, 1.1, False)]
)
def test_the_faster_way_is_taken_but_for_trials(shared: float, alone: float, wins: bool) -> None:
    gate = SharingGate()
    assert steps(gate, 2, 2 * TRIAL, shared, alone) == TRIAL  # both are measured first
    assert gate.shares(2) == wins
    assert steps(gate, 2, PERIOD, shared, alone) == PERIOD * wins
    assert gate.shares(2) != wins  # once more
    assert steps(gate, 2, TRIAL, shared, alone) == TRIAL * (not wins)
    assert gate.shares(2) == wins


def test_a_turn_of_the_tide_is_noticed() -> None:
    gate = SharingGate()
    steps(gate, 4, 2 * TRIAL + PERIOD, 3.0, 1.0)
    steps(gate, 4, TRIAL, 3.0, 20.0)
    assert not gate.shares(4)


def test_numbers_of_sequences_are_apart_and_one_never_shares() -> None:
    gate = SharingGate()
    steps(gate, 2, 2 * TRIAL, 1.0, 2.0)
    assert not gate.shares(2) and gate.shares(3) and not gate.shares(1)
    gate.called(1, False, 1.0)
    gate.committed(1, False, 5)
    assert not gate.shares(1)
