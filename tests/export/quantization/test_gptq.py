"""Rounding by GPTQ beside rounding to the nearest."""

from __future__ import annotations

import gc
from weakref import ref

import numpy as np
import pytest

from streamspec.export.quantization import gptq
from streamspec.export.quantization.arithmetic import quantize_blocks, unpack
from streamspec.export.quantization.gptq import moments, ranges, ranges_of, round_to_nearest, round_weight
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
    first, again = (round_weight(weight, second.copy(), BLOCK) for _ in range(2))
    assert all(np.array_equal(*pair) for pair in zip(first, again, strict=True))
    assert np.array_equal(first[1], first[1].astype(np.float16).astype(np.float32))


def test_nothing_of_a_weight_is_held_when_it_is_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    given, spread = [], gptq._spread
    monkeypatch.setattr(gptq, "_spread", lambda second: given.append(ref(second)) or spread(second))
    gc.disable()  # an export may go through several layers before the next search for cycles
    try:
        round_weight(RNG.standard_normal((32, 64)).astype(np.float32), moments(correlated(100, 64)), BLOCK)
        assert len(given) == 1
        assert given[0]() is None
    finally:
        gc.enable()


def test_inputs_that_are_always_zero_do_no_harm() -> None:
    weight, x = RNG.standard_normal((32, 64)).astype(np.float32), correlated(100, 64)
    x[:, 5] = 0
    rounded = dequantize_blocks(*round_weight(weight, moments(x), BLOCK), 64)
    assert (
        np.isfinite(rounded).all() and np.square(x @ (rounded - weight).T).mean() < 0.1 * np.square(x @ weight.T).mean()
    )


def test_wide_inputs_are_factorised_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    second = moments(correlated(400, 96))
    whole, parts = second.copy(), second.copy()
    order = gptq._spread(whole)
    monkeypatch.setattr(gptq, "FACTORED", 40)  # which does not divide 96
    assert np.array_equal(gptq._spread(parts), order)
    np.testing.assert_allclose(np.tril(parts), np.tril(whole), atol=1e-5)
    lower = np.tril(whole).astype(np.float64)
    shrunk = damped(second)[np.ix_(order, order)]
    diagonal = np.linalg.solve(lower, np.linalg.solve(lower, shrunk).T)
    np.testing.assert_allclose(diagonal, np.diag(diagonal.diagonal()), atol=1e-4 * diagonal.max())


def damped(second: np.ndarray) -> np.ndarray:
    """Moments in double precision as they are factorised, up to a factor."""
    shrunk = gptq.SHRINK * second + (1 - gptq.SHRINK) * np.diag(second.diagonal())
    return np.asarray(shrunk + gptq.DAMPING * second.diagonal().mean() * np.eye(len(second)), np.float64)


def test_inputs_are_rounded_as_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPTQ by its definition: each error is spread over the inputs left as the inverse of their moments says."""
    monkeypatch.setattr(gptq, "FACTORED", 40)
    weight, second = RNG.standard_normal((48, 96)).astype(np.float32), moments(correlated(400, 96))
    scales, zeros = ranges(weight.reshape(48, -1, BLOCK), damped(second).diagonal().reshape(-1, BLOCK))
    left, target, codes = list(np.argsort(-second.diagonal())), weight.astype(np.float64), np.empty(weight.shape)
    while left:
        at, inverse = left[0], np.linalg.inv(damped(second)[np.ix_(left, left)])
        scale, zero = scales[:, at // BLOCK], zeros[:, at // BLOCK]
        codes[:, at] = np.clip(np.rint(target[:, at] / scale) + zero, 0, gptq.LARGEST)
        error = target[:, at] - (codes[:, at] - zero) * scale
        target[:, left] -= error[:, None] * inverse[0] / inverse[0, 0]
        left = left[1:]
    packed, found, _ = round_weight(weight, second, BLOCK)
    assert np.array_equal(found, scales)
    assert (unpack(packed).reshape(codes.shape) != codes).mean() < 1e-3


def test_ranges_of_a_few_rows_are_those_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks, shares = RNG.standard_normal((13, 3, BLOCK)).astype(np.float32), RNG.random((3, BLOCK), np.float32)
    monkeypatch.setattr(gptq, "SEARCHED", 4 * blocks[0].size)
    assert all(np.array_equal(*pair) for pair in zip(ranges_of(blocks, shares), ranges(blocks, shares), strict=True))


@pytest.mark.parametrize("inputs", [64, 80])
def test_the_nearest_is_as_close_as_a_longer_search(inputs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = RNG.standard_normal((48, inputs)).astype(np.float32)
    weight[3] = 0
    monkeypatch.setattr(gptq, "SEARCHED", 10 * 96)
    nearest, searched = (
        np.square(dequantize_blocks(*blocks, inputs) - weight).mean()
        for blocks in (round_to_nearest(weight, BLOCK), quantize_blocks(weight, 4, BLOCK))
    )
    assert nearest < 1.04 * searched
    scales = round_to_nearest(weight, BLOCK)[1]
    assert np.array_equal(scales, scales.astype(np.float16).astype(np.float32))
