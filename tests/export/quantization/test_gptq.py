"""Rounding by GPTQ beside rounding to the nearest."""

from __future__ import annotations

import numpy as np
import pytest

from streamspec.export.quantization.arithmetic import quantize_blocks
from streamspec.export.quantization.gptq import moments, round_weight
from tests.support.packed_blocks import dequantize_blocks

RNG = np.random.default_rng(5)
BLOCK = 32


def correlated(rows: int, inputs: int) -> np.ndarray:
    """Rows whose inputs share few causes."""
    causes = RNG.standard_normal((rows, 8)) @ RNG.standard_normal((8, inputs))
    return (causes + 0.3 * RNG.standard_normal((rows, inputs))).astype(np.float32)


@pytest.mark.parametrize("inputs", [64, 80])
def test_outputs_are_closer_than_rounded_to_the_nearest(inputs: int) -> None:
    weight, x = RNG.standard_normal((48, inputs)).astype(np.float32), correlated(400, inputs)
    test, exact = x[200:], x[200:] @ weight.T
    errors = [
        np.square(test @ dequantize_blocks(*blocks, inputs).T - exact).mean()
        for blocks in (round_weight(weight, moments(x[:200]), BLOCK), quantize_blocks(weight, 4, BLOCK))
    ]
    assert errors[0] < 0.6 * errors[1]


def test_scales_are_numbers_of_float16_and_the_same_twice() -> None:
    weight, second = RNG.standard_normal((32, 64)).astype(np.float32), moments(correlated(100, 64))
    first, again = (round_weight(weight, second, BLOCK) for _ in range(2))
    assert all(np.array_equal(*pair) for pair in zip(first, again, strict=True))
    assert np.array_equal(first[1], first[1].astype(np.float16).astype(np.float32))


def test_inputs_that_are_always_zero_do_no_harm() -> None:
    weight, x = RNG.standard_normal((32, 64)).astype(np.float32), correlated(100, 64)
    x[:, 5] = 0
    rounded = dequantize_blocks(*round_weight(weight, moments(x), BLOCK), 64)
    assert (
        np.isfinite(rounded).all() and np.square(x @ (rounded - weight).T).mean() < 0.1 * np.square(x @ weight.T).mean()
    )
