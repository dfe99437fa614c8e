"""Masks of stream rows: what each sees of the main rows and of its siblings. Covered by the tests of `draft_pass`."""

from __future__ import annotations

from streamspec.draft_tree import MASKED
from streamspec.export.drafters.draft_pass import Accepted
from streamspec.export.layers.attention import window_out
from streamspec.export.ops.builder import Scope
from streamspec.export.quantization.precisions import Rows


class StreamMasks:
    """Additive masks [group * m, visible + m] of stream rows, one per distinct window, shared by all layers. `looking`
    int64 [m]: the positions that windows count from."""

    def __init__(self, accepted: Accepted, stream_ids: str, positions: str, looking: str, rows: Rows) -> None:
        self.accepted, self.stream_ids, self.positions, self.rows = accepted, stream_ids, positions, rows
        self.looking = looking
        self._plain: dict[tuple[bool, bool], str] = {}
        self._made: dict[tuple[int | None, int, bool, bool], str] = {}

    def of(self, g: Scope, window: int | None, group: int, later: bool, beside: bool = True) -> str:
        """`later`: streams see those after them, too; `beside`: their columns come after those of the main rows."""
        key = window, group, later, beside
        if key not in self._made:
            with g.named(f"mask.{window or 'full'}"):
                self._made[key] = g.op("Tile", self._masked(g, window, later, beside), g.ints(group, 1))
        return self._made[key]

    def _masked(self, g: Scope, window: int | None, later: bool, beside: bool) -> str:
        if window is None:
            return self._full(g, later, beside)
        if window in self.accepted.rings:
            ring = self.accepted.rings[window]
            view = g.op("Gather", ring.sees, self.accepted.node, axis=0)
            mask, columns = self._beside(g, view, ring.used, later, beside), [ring.positions]
        else:
            mask, columns = self._full(g, later, beside), [*self.accepted.columns(g)]
        columns += [self.positions] if beside else []
        seen = g.op("Concat", *columns, axis=0) if len(columns) > 1 else columns[0]
        return window_out(g, mask, self.looking, g.op("Unsqueeze", seen, g.ints(0)), window)

    def _full(self, g: Scope, later: bool, beside: bool) -> str:
        """[m, visible + m]: 0 over the past, the accepted node's row of the tree, and among streams."""
        key = later, beside
        if key not in self._plain:
            view = self.accepted.past_mask(g)
            self._plain[key] = self._beside(g, view, self.accepted.visible, later, beside)
        return self._plain[key]

    def _beside(self, g: Scope, view: str, slots: str, later: bool, beside: bool) -> str:
        """[m, slots + m]: the accepted node's `view` [1, slots] for every stream, or that of each [m, slots], then
        streams' of streams."""
        if not self.accepted.several:
            view = g.op("Expand", view, g.op("Concat", self.rows.count, slots, axis=0))
        return g.op("Concat", view, self._own(g, later), axis=1) if beside else view

    def _own(self, g: Scope, later: bool) -> str:
        """[m, m]: which streams each stream sees."""
        masked, zero = g.number(MASKED), g.number(0)
        if later:
            return g.op("Expand", zero, g.op("Concat", self.rows.count, self.rows.count, axis=0))
        hidden = g.op(
            "Less", g.op("Unsqueeze", self.stream_ids, g.ints(1)), g.op("Unsqueeze", self.stream_ids, g.ints(0))
        )
        if self.accepted.several:  # streams of other nodes are not seen
            nodes = (g.op("Unsqueeze", self.accepted.node, g.ints(side)) for side in (1, 0))
            hidden = g.op("Or", hidden, g.op("Not", g.op("Equal", *nodes)))
        return g.op("Where", hidden, masked, zero)
