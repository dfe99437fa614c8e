"""What layers with a recurrent state share, whichever rows they compute: the way of rows through the rule, and where
the ring has the states after whole blocks of tokens. Covered by the tests of `recurrent_state`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from onnx import TensorProto

from streamspec.export.layers.decoder import Decoder
from streamspec.export.layers.heads import Linear
from streamspec.export.layers.recurrent.state_rules import rule_of
from streamspec.export.ops.builder import Scope
from streamspec.export.quantization.precisions import Rows
from streamspec.layer_cache import STATE_BLOCK
from streamspec.step_graph import PAST_LENGTH


class WholeBlocks:
    """The whole blocks of tokens before a call: `newest` int64 [1], how many; `slots` int64 [1], of the ring."""

    def __init__(self, g: Scope, slots: str) -> None:
        self.slots, self.newest = slots, g.op("Div", PAST_LENGTH, g.ints(STATE_BLOCK))

    def block(self, g: Scope, back: int) -> str:
        """int64 [1]: the first slot of the block that ends `back` blocks before the newest whole one does."""
        at = g.op("Max", g.op("Sub", self.newest, g.ints(1 + back)), g.integer(0))
        return g.remainder(g.op("Mul", at, g.ints(STATE_BLOCK)), self.slots)

    def exists(self, g: Scope, back: int) -> str:
        """float32 [1]: 1 where there is such a block, else 0."""
        return g.op("Cast", g.op("Greater", self.newest, g.ints(back)), to=TensorProto.FLOAT)


class StateLayer(ABC):
    """Nodes of one layer with a recurrent state in place of attention, n rows of which `linear` maps."""

    def __init__(self, g: Scope, decoder: Decoder, layer: int, linear: Linear) -> None:
        self.g, self.decoder, self.layer, self.linear = g, decoder, layer, linear
        self.rule = rule_of(decoder, layer)
        self.sizes = self.rule.sizes
        self.group = self.sizes.heads // self.sizes.key_heads

    def part(self, kind: str) -> str:
        """The name of a part of its cache in the graph."""
        return self.decoder.spec.state_part(self.layer, kind)

    def mix(self, normed: str, rows: Rows) -> str:
        """[1, n, values] of normed rows [1, n, H]: what the output map reads."""
        g, rule = self.g, self.rule
        mapped = self.linear(g, normed, rows, self.layer, self.decoder.spec.family.conv_in)
        own, gate, decays, steps = rule.parts(g, mapped)
        q, k, v = rule.heads(g, rule.activated(g, self.convolved(own, rows)))
        return rule.out(g, self.returned(q, k, v, decays, steps), v, gate)

    @abstractmethod
    def convolved(self, own: str, rows: Rows) -> str:
        """The convolution's sums of rows [1, n, inputs]."""

    @abstractmethod
    def returned(self, q: str, k: str, v: str, decays: str, steps: str) -> str:
        """o [1, heads, n, width] of q and k [1, key heads, n, key width], v [1, heads, n, width], decays [1, n, heads]
        and steps [1, heads, n, 1]."""
