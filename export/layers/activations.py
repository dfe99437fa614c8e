"""Writes the MLP's activation functions as nodes, by the names of `DecoderSpec.activation`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from streamspec.export.ops.builder import Scope

if TYPE_CHECKING:
    from streamspec.export.layers.decoder import Decoder

Parameter = Callable[[str], float]  # a number of the layer's activation module, by its name there


def activate(decoder: Decoder, g: Scope, x: str, layer: int) -> str:
    """x of any shape through the activation function of a layer's MLP."""

    def parameter(name: str) -> float:
        module = decoder.spec.weight_name(layer, str(decoder.spec.family.activation_module))
        return float(decoder.source.weight(f"{module}.{name}").item())

    return FUNCTIONS[decoder.spec.activation](g, x, parameter)


def clamped_swiglu(g: Scope, gate: str, up: str, alpha: float, limit: float) -> str:
    """(u + 1) v sigmoid(alpha v): u is `up` within -limit and limit, v `gate` up to it."""
    most, least = g.number(limit), g.number(-limit)
    within = g.op("Max", g.op("Min", up, most), least)
    acted = g.contrib("QuickGelu", g.op("Min", gate, most), alpha=alpha)
    return g.op("Mul", g.op("Add", within, g.number(1.0)), acted)


def _squared(g: Scope, x: str) -> str:
    above = g.op("Relu", x)
    return g.op("Mul", above, above)


def _xielu(g: Scope, x: str, parameter: Parameter) -> str:
    """beta x + a max(x, 0)^2 + b (exp(m) - 1 - m) with m = min(x, 0), a and b of the layer (arXiv 2411.13010)."""
    above, below, slope = (parameter(name) for name in ("alpha_p", "alpha_n", "beta"))
    numbers = np.logaddexp(0, above), slope + np.logaddexp(0, below), slope
    a, b, beta = (g.number(float(number)) for number in numbers)
    positive = g.op("Relu", x)
    negative = g.op("Sub", x, positive)
    half = g.op("Tanh", g.op("Mul", negative, g.number(0.5)))
    grown = g.op("Div", g.op("Add", half, half), g.op("Sub", g.number(1.0), half))  # exp(m) - 1
    curved = g.op("Mul", g.op("Sub", grown, negative), b)
    squared = g.op("Mul", g.op("Mul", positive, positive), a)
    return g.op("Add", g.op("Add", squared, curved), g.op("Mul", x, beta))


FUNCTIONS: dict[str, Callable[[Scope, str, Parameter], str]] = {
    "silu": lambda g, x, _: g.contrib("QuickGelu", x, alpha=1.0),
    "gelu": lambda g, x, _: g.contrib("Gelu", x),
    "gelu_tanh": lambda g, x, _: g.contrib("FastGelu", x),
    "relu": lambda g, x, _: g.op("Relu", x),
    "relu2": lambda g, x, _: _squared(g, x),
    "xielu": _xielu,
}
