"""Says which tokens the slots of a ring hold: the cache of a layer that keeps no more than its window needs.

Row number t of the sequence (a token, then the rows of the call) lies in slot t modulo the slots, so a slot holds the
newest of its rows. Whoever computes a row finds its keys in the same slots: sums come out the same, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

from streamspec.draft_tree import MASKED
from streamspec.export.ops.builder import Scope
from streamspec.export.ops.static_scope import StaticScope
from streamspec.step_graph import PAST_LENGTH


@dataclass(frozen=True)
class Ring:
    """Nodes shared by all layers of one window, over the keys that a call of n rows sees. `used` int64 [1]: how many;
    `positions` int64 [used]: of each; `sees` [n, used]: 0 where row i sees key j, its window aside."""

    used: str
    positions: str
    sees: str


def ring_after(g: Scope, slots: str, visible: str, positions: str, tree_mask: str) -> Ring:
    """The ring after the rows of a call are in it, at int64 `positions` [n], under `tree_mask` [n, n]. `slots`,
    `visible` int64 [1]: of the ring, and rows of the sequence with those of the call, L + n."""
    zero, used = g.integer(0), g.op("Min", visible, slots)
    each = g.arange(used)
    rounds = g.op("Div", g.op("Sub", g.op("Sub", visible, g.ints(1)), each), slots)
    number = g.op("Add", each, g.op("Mul", rounds, slots))  # the newest row of each slot
    past = g.op("Sub", visible, g.op("Shape", tree_mask, start=1))
    row = g.op("Sub", number, past)
    new, row = g.op("GreaterOrEqual", row, zero), g.op("Max", row, zero)
    return Ring(
        used=used,
        positions=g.op("Where", new, g.op("Gather", positions, row, axis=0), number),
        sees=g.op("Where", new, g.op("Gather", tree_mask, row, axis=1), g.number(0)),
    )


def ring_beside(g: StaticScope, slots: int, rows: int, positions: str, tree_mask: str) -> Ring:
    """A ring of `slots` slots that is only read, then the call's `rows` rows apart from it."""
    each, size = g.ints(*range(slots)), g.ints(slots)
    filled, zero = g.op("Less", each, PAST_LENGTH), g.integer(0)
    rounds = g.op("Div", g.op("Sub", g.op("Sub", PAST_LENGTH, g.ints(1)), each), size)
    number = g.op("Add", each, g.op("Mul", g.op("Where", filled, rounds, zero), size))
    past = g.op("Unsqueeze", g.op("Where", filled, g.number(0), g.number(MASKED)), g.ints(0))
    return Ring(
        used=g.ints(slots + rows),
        positions=g.op("Concat", number, positions, axis=0),
        sees=g.op("Concat", g.op("Expand", past, g.ints(rows, slots)), tree_mask, axis=1),
    )
