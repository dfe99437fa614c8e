"""Writes as nodes what is done around the recurrent states of a layer: what its rows' maps give becomes keys, queries,
values, decays and steps, and what states return becomes its output. `recurrent_state` and `recurrent_streams` compute
the states; tests/export/graphs/test_dynamic_step_graph.py covers it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import inf

import numpy as np

from streamspec.export.layers.decoder import Decoder
from streamspec.export.ops.builder import Scope
from streamspec.export.spec.decoder_spec import StateSizes
from streamspec.layer_cache import RECURRENT, STATE_SPACE

L2_EPS = 1e-6  # below the root of a sum of squares, as transformers has it
SERIES = 8  # terms of a logarithm: float32 takes no more


class StateRule(ABC):
    """What is around the states of one layer, of n rows: keys and queries [1, key heads, n, key width], values and what
    states return [1, heads, n, width], logarithms of decays [1, n, heads], steps [1, heads, n, 1]."""

    solved: bool  # whether a row adds its value's difference from what the state says of its key

    def __init__(self, decoder: Decoder, layer: int) -> None:
        assert decoder.spec.state is not None and decoder.spec.family.recurrent is not None
        self.decoder, self.layer = decoder, layer
        self.sizes: StateSizes = decoder.spec.state
        self.names = decoder.spec.family.recurrent

    @abstractmethod
    def parts(self, g: Scope, mapped: str) -> tuple[str, str, str, str]:
        """Inputs of the convolution [1, n, inputs], gates [1, n, values], decays and steps of mapped rows."""

    @abstractmethod
    def heads(self, g: Scope, convolved: str) -> tuple[str, str, str]:
        """Queries, keys and values of rows [1, n, inputs] after the convolution."""

    @abstractmethod
    def out(self, g: Scope, returned: str, values: str, gate: str) -> str:
        """[1, n, values]: what the output map reads."""

    def activated(self, g: Scope, mixed: str) -> str:
        """The convolution's sums [1, n, inputs] with its bias and under its activation."""
        bias = taps_bias(self.decoder, g, self.layer)
        return g.contrib("QuickGelu", g.op("Add", mixed, bias) if bias else mixed, alpha=1.0)

    def by_head(self, g: Scope, x: str, heads: int, width: int) -> str:
        """x [1, n, heads * width] as [1, heads, n, width]."""
        return g.op("Transpose", g.op("Reshape", x, g.ints(0, 0, heads, width)), perm=[0, 2, 1, 3])

    def softplus(self, g: Scope, x: str) -> str:
        """log(1 + e^(x + bias)) [1, n, heads]. ONNX Runtime computes some functions otherwise in a vector's last lanes;
        products, sums and its exponential are the same everywhere."""
        bias, _ = decay_weights(self.decoder, g, self.layer)
        x = g.op("Add", x, bias)
        above = g.op("Relu", x)
        small = g.op("Exp", g.op("Sub", g.op("Sub", x, above), above))  # e^-|x|
        # log(1 + y) = 2 (z + z^3 / 3 + z^5 / 5 + ..) with z = y / (2 + y), at most 1 / 3
        z = g.op("Div", small, g.op("Add", small, g.number(2.0)))
        square = g.op("Mul", z, z)
        total = g.number(2.0 / (2 * SERIES - 1))
        for odd in range(2 * SERIES - 3, 0, -2):
            total = g.op("Add", g.op("Mul", total, square), g.number(2.0 / odd))
        return g.op("Add", above, g.op("Mul", z, total))

    def decays(self, g: Scope, softplus: str) -> str:
        """-e^A times `softplus` [1, n, heads]: logarithms of decays."""
        return g.op("Mul", softplus, decay_weights(self.decoder, g, self.layer)[1])


class DeltaRule(StateRule):
    """The gated delta rule."""

    solved = True

    def parts(self, g: Scope, mapped: str) -> tuple[str, str, str, str]:
        sizes, largest = self.sizes, self.decoder.spec.largest_step
        widths = g.ints(sizes.inputs, sizes.values, sizes.heads, sizes.heads)
        own, gate, step, decay = g.ops("Split", mapped, widths, out=(None,) * 4, axis=-1)
        steps = self.by_head(g, g.op("Sigmoid", step), sizes.heads, 1)
        steps = steps if largest == 1.0 else g.op("Mul", steps, g.number(largest))
        return own, gate, self.decays(g, self.softplus(g, decay)), steps

    def heads(self, g: Scope, convolved: str) -> tuple[str, str, str]:
        sizes = self.sizes
        widths = g.ints(sizes.keys, sizes.keys, sizes.values)
        q, k, v = g.ops("Split", convolved, widths, out=(None,) * 3, axis=-1)
        return self._unit(g, q, -1.0), self._unit(g, k, -0.5), self.by_head(g, v, sizes.heads, sizes.width)

    def out(self, g: Scope, returned: str, values: str, gate: str) -> str:
        heads = g.op("Transpose", returned, perm=[0, 2, 1, 3])
        weights = self.decoder.norm_weights(g, part_name(self.decoder, self.layer, self.names.norm))
        scaled = g.norm(heads, *weights, eps=self.names.eps or self.decoder.spec.eps)
        flat = g.op("Reshape", scaled, g.ints(0, 0, self.sizes.values))
        return g.op("Mul", flat, g.contrib("QuickGelu", gate, alpha=1.0))

    def _unit(self, g: Scope, x: str, power: float) -> str:
        """x [1, n, keys] as heads [1, key heads, n, key width] of length 1, times the key width to `power` + 1/2."""
        width = self.sizes.key_width
        weight = g.store.once(f"recurrent.unit.{power}", lambda: np.full(width, width**power, np.float32))
        heads = g.op("Reshape", x, g.ints(0, 0, self.sizes.key_heads, width))
        eps = L2_EPS / width
        normed = g.norm(heads, weight, eps=eps)
        return g.op("Transpose", normed, perm=[0, 2, 1, 3])


class StateSpaceRule(StateRule):
    """Mamba-2: k, q and v are its B, C and x, the steps are the softplus of dt."""

    solved = False

    def parts(self, g: Scope, mapped: str) -> tuple[str, str, str, str]:
        sizes, (least, most) = self.sizes, self.decoder.spec.step_limits
        widths = g.ints(sizes.values, sizes.inputs, sizes.heads)
        gate, own, step = g.ops("Split", mapped, widths, out=(None,) * 3, axis=-1)
        steps = self.softplus(g, step)
        steps = g.op("Max", steps, g.number(least)) if least > 0 else steps
        steps = g.op("Min", steps, g.number(most)) if most < inf else steps
        return own, gate, self.decays(g, steps), self.by_head(g, steps, sizes.heads, 1)

    def heads(self, g: Scope, convolved: str) -> tuple[str, str, str]:
        sizes = self.sizes
        widths = g.ints(sizes.values, sizes.keys, sizes.keys)
        v, k, q = g.ops("Split", convolved, widths, out=(None,) * 3, axis=-1)
        k, q = (self.by_head(g, side, sizes.key_heads, sizes.key_width) for side in (k, q))
        return q, k, self.by_head(g, v, sizes.heads, sizes.width)

    def out(self, g: Scope, returned: str, values: str, gate: str) -> str:
        spec, skipped = self.decoder.spec, g.op("Mul", values, skip_weight(self.decoder, g, self.layer))
        out = g.op("Transpose", g.op("Add", returned, skipped), perm=[0, 2, 1, 3])
        flat = g.op("Reshape", out, g.ints(0, 0, self.sizes.values))
        gate = g.contrib("QuickGelu", gate, alpha=1.0)
        if spec.norm_first:
            return g.op("Mul", self._normed(g, flat), gate)
        gated = g.op("Mul", flat, gate)
        return self._normed(g, gated) if spec.state_norm else gated

    def _normed(self, g: Scope, x: str) -> str:
        """x [1, n, values] over the root mean square of its part of each key head, times the norm's weight."""
        sizes = self.sizes
        weights = self.decoder.norm_weights(g, part_name(self.decoder, self.layer, self.names.norm))
        width = sizes.values // sizes.key_heads
        ones = g.store.once("state_space.ones", lambda: np.ones(width, np.float32))
        parts = g.op("Reshape", x, g.ints(0, 0, sizes.key_heads, width))
        scaled = g.norm(parts, ones, eps=self.decoder.spec.eps)
        return g.op("Mul", g.op("Reshape", scaled, g.ints(0, 0, sizes.values)), *weights)


RULES: dict[str, type[StateRule]] = {RECURRENT: DeltaRule, STATE_SPACE: StateSpaceRule}


def rule_of(decoder: Decoder, layer: int) -> StateRule:
    """What is around the states of a layer."""
    assert decoder.spec.family.recurrent is not None
    return RULES[decoder.spec.family.recurrent.kind](decoder, layer)


def skip_weight(decoder: Decoder, g: Scope, layer: int) -> str:
    """[heads, 1, 1]: how much of its values a row of a state space returns as they are."""
    assert decoder.spec.family.recurrent is not None
    name = part_name(decoder, layer, decoder.spec.family.recurrent.skip)
    return g.store.once(name, lambda: decoder.source.weight(name)[:, None, None])


def taps_bias(decoder: Decoder, g: Scope, layer: int) -> str:
    """The bias [inputs] of the convolution; '' where it has none."""
    assert decoder.spec.family.recurrent is not None
    name = f"{part_name(decoder, layer, decoder.spec.family.recurrent.taps)}.bias"
    bias = decoder.source.bias(name)
    return "" if bias is None else g.store.once(name, lambda: bias)


def decay_weights(decoder: Decoder, g: Scope, layer: int) -> tuple[str, str]:
    """Of the logarithms of decays, -e^A softplus(x + bias): the bias, and -e^A, [heads] each."""
    recurrent, source = decoder.spec.family.recurrent, decoder.source
    assert recurrent is not None
    bias, rate = (part_name(decoder, layer, part) for part in (recurrent.decay_bias, recurrent.decay))
    g.store.once(bias, lambda: source.weight(bias))
    g.store.once(rate, lambda: -np.exp(source.weight(rate)))
    return bias, rate


def part_name(decoder: Decoder, layer: int, part: str) -> str:
    """The weight `part` of a layer with a state."""
    return decoder.spec.weight_name(layer, f"{decoder.spec.family.conv}.{part}")
