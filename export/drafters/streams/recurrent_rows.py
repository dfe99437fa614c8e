"""Writes layers with a recurrent state as nodes for streams: one path of rows after the accepted node, which writes
nothing. What `recurrent_state` says of the rule holds; with S_t the state after the node and of the path's row i

    o_i = e^G_ti S_t^T q_i + sum_(j<=i) e^G_ji (k_j q_i) d_j        d_i = b_i (v_i - e^G_ti S_t^T k_i - sum_(j<i) ..)

S_t itself is never written down: its products are those of the state after the newest whole block before the call, and
of the rows since, which the ring holds. tests/export/graphs/test_dynamic_step_graph.py covers it.
"""

from __future__ import annotations

from onnx import TensorProto

from streamspec.export.drafters.draft_pass import Accepted
from streamspec.export.layers.decoder import Decoder
from streamspec.export.layers.heads import Linear
from streamspec.export.layers.recurrent.state_layer import StateLayer, WholeBlocks
from streamspec.export.layers.short_conv import from_cache, mixed_streams
from streamspec.export.ops.builder import Scope
from streamspec.export.quantization.precisions import Rows
from streamspec.layer_cache import DECAY, INPUT, KEY, STATE, STATE_BLOCK, VALUE
from streamspec.step_graph import PAST_LENGTH, past, present


class NodeStates(WholeBlocks):
    """Nodes shared by all such layers: the c rows since the newest whole block before the call, as the accepted node
    sees them. `since` int64 [c]: their slots in the ring; `seen` float [c, 1]; `after` [c, c]: 1 where row i comes
    after row j; `lower`, `below` [m, m]: 1 where row i of the path comes after row j, in `lower` also itself."""

    def __init__(self, g: Scope, accepted: Accepted, ring: str, rows: Rows, gamma: int) -> None:
        """`ring` int64 [1]: how many slots it has; `rows`: of the path, at most `gamma`."""
        super().__init__(g, ring)
        self.gamma = gamma
        zero, one = g.integer(0), g.ints(1)
        begin = g.op("Mul", self.newest, g.ints(STATE_BLOCK))
        number = g.op("Add", begin, g.arange(g.op("Sub", accepted.visible, begin)))
        self.since = g.remainder(number, ring)
        row = g.op("Sub", number, PAST_LENGTH)
        new, row = g.op("GreaterOrEqual", row, zero), g.op("Max", row, zero)
        position = g.op("Where", new, g.op("Gather", accepted.positions, row, axis=0), number)
        view = g.op("Squeeze", g.op("Gather", accepted.tree_mask, accepted.node, axis=0), g.ints(0))
        sees = g.op("Equal", g.op("Gather", view, row, axis=0), g.number(0))
        sees = g.op("Unsqueeze", g.op("Or", sees, g.op("Not", new)), one)
        self.seen = g.op("Cast", sees, to=TensorProto.FLOAT)
        later = g.op("Greater", g.op("Unsqueeze", position, one), g.op("Unsqueeze", position, g.ints(0)))
        self.after = g.op("Cast", later, to=TensorProto.FLOAT)
        ones = g.op("Expand", g.number(1), g.op("Concat", rows.count, rows.count, axis=0))
        self.lower = g.op("Trilu", ones, upper=0)
        self.below = g.op("Trilu", ones, g.integer(-1), upper=0)


class RecurrentStreams(StateLayer):
    """Nodes of one such layer for the rows of a path, m of them."""

    def __init__(
        self, g: Scope, decoder: Decoder, layer: int, linear: Linear, accepted: Accepted, states: NodeStates
    ) -> None:
        super().__init__(g, decoder, layer, linear)
        self.accepted, self.states = accepted, states

    def convolved(self, own: str, rows: Rows) -> str:
        """The convolution's sums of a path's rows [1, m, inputs]."""
        g, back = self.g, self.decoder.spec.conv_widths[self.layer] - 1
        main = from_cache(self._ring(INPUT))(g, self.accepted.last_numbers(g, back)) if back else ""
        return mixed_streams(self.decoder, g, own, rows, main, self.layer)

    def _ring(self, kind: str) -> str:
        return present(self.layer, self.part(kind))

    def returned(self, q: str, k: str, v: str, decays: str, steps: str) -> str:
        """o [1, heads, m, width] of a path's rows."""
        g, states = self.g, self.states
        both = g.op("Concat", k, q, axis=2)
        since = g.op("CumSum", g.op("Unsqueeze", g.op("Transpose", decays, perm=[0, 2, 1]), g.ints(3)), g.integer(2))
        from_node = self._from_node(both)
        of_keys, of_queries = (
            g.op("Mul", side, g.op("Exp", since))
            for side in g.ops("Split", from_node, out=(None, None), axis=2, num_outputs=2)
        )
        # Of pairs in the path, row i and column j: how j fades to i, and products.
        back = g.op("Sub", since, g.op("Transpose", since, perm=[0, 1, 3, 2]))
        fading = g.op("Exp", g.op("Mul", back, states.lower))
        products = g.contrib("FusedMatMul", both, k, transB=1)  # [1, key heads, 2 m, m]
        products = self._each_head(products)
        with_keys, with_queries = (
            g.op("Mul", side, fading) for side in g.ops("Split", products, out=(None, None), axis=2, num_outputs=2)
        )
        if self.rule.solved:
            added = g.op("Mul", steps, g.op("Sub", v, of_keys))
            added = self._solved(g.op("Mul", g.op("Mul", with_keys, states.below), steps), added)
        else:
            added = g.op("Mul", steps, v)
        return g.op("Add", of_queries, g.op("MatMul", g.op("Mul", with_queries, states.lower), added))

    def _from_node(self, both: str) -> str:
        """S_t^T k and S_t^T q [1, heads, 2 m, width] of rows [1, key heads, 2 m, key width]."""
        g, sizes, states = self.g, self.sizes, self.states
        keys, logs, added = (g.op("Gather", self._ring(kind), states.since, axis=2) for kind in (KEY, DECAY, VALUE))
        logs = g.op("Squeeze", g.op("Slice", logs, g.ints(0), g.ints(sizes.heads), g.ints(3)), g.ints(0, 1))
        logs = g.op("Mul", logs, states.seen)  # [c, heads]
        each = g.op("Exp", g.contrib("FusedMatMul", states.after, logs, transA=1))
        each = g.op("Transpose", g.op("Mul", each, states.seen))  # [heads, c]
        whole = g.op("Exp", g.op("ReduceSum", logs, g.ints(0), keepdims=0))  # [heads]
        products = self._each_head(g.contrib("FusedMatMul", both, keys, transB=1))  # [1, heads, 2 m, c]
        rows = g.op("MatMul", g.op("Mul", products, g.op("Unsqueeze", each, g.ints(0, 2))), added)
        at = states.block(g, 0)
        state = g.op("Slice", self._ring(STATE), at, g.op("Add", at, g.ints(STATE_BLOCK)), g.ints(2))
        state = g.op("Reshape", state, g.ints(1, sizes.key_heads, self.group, sizes.key_width, sizes.width))
        before = g.op("MatMul", g.op("Unsqueeze", both, g.ints(2)), state)
        before = g.op("Reshape", before, g.ints(1, sizes.heads, -1, sizes.width))
        whole = g.op("Mul", g.op("Reshape", whole, g.ints(1, sizes.heads, 1, 1)), states.exists(g, 0))
        return g.op("Add", rows, g.op("Mul", before, whole))

    def _each_head(self, x: str) -> str:
        """[1, heads, a, b] of x [1, key heads, a, b]."""
        g, sizes = self.g, self.sizes
        if self.group == 1:
            return x
        shape = g.op("Concat", g.ints(1, sizes.key_heads, self.group), g.op("Shape", x, start=2), axis=0)
        spread = g.op("Expand", g.op("Unsqueeze", x, g.ints(2)), shape)
        return g.op("Reshape", spread, g.op("Concat", g.ints(1, sizes.heads), g.op("Shape", x, start=2), axis=0))

    def _solved(self, a: str, right: str) -> str:
        """(1 + A)^-1 w [1, heads, m, width] of A [1, heads, m, m], which is zero but below its diagonal: the product
        (1 - A) (1 + A^2) (1 + A^4) .. w, up to the power that is zero for `gamma` rows."""
        g = self.g
        powers = [g.op("Mul", a, g.number(-1.0))]
        while 2 ** len(powers) < self.states.gamma:
            powers.append(g.op("MatMul", powers[-1], powers[-1]))
        for power in reversed(powers):
            right = g.op("Add", right, g.op("MatMul", power, right))
        return right


def slots_of(g: Scope, decoder: Decoder, layer: int) -> str:
    """int64 [1]: how many slots the ring of a layer has."""
    return g.op("Shape", past(layer, decoder.spec.state_part(layer, KEY)), start=2, end=3)
