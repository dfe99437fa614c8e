"""Rounds weights to 4 bits so that what one weight loses the others make up for, on the inputs of a text.

GPTQ (arXiv 2210.17323): weights are rounded input by input, the input that is largest on average first, and each error
is spread over the inputs that are still to come as the second moments H = mean(x x^T) say. A block's scale is chosen
before, where the squared errors that its inputs weigh are least.

`round_to_nearest` knows no text: ranges are chosen in the same way, every input counts the same.

Which share of an error goes where takes one factorisation, H = U D U^T, without H's inverse (QuIP, arXiv 2307.13304,
theorem 6: the same roundings as GPTQ's).

A text of a few thousand tokens says more about single inputs than about pairs: what it says of pairs is shrunk.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from streamspec.export.ops.builder import Array
from streamspec.export.quantization.arithmetic import pack
from streamspec.export.spec.weight_source import Blocks

LARGEST = 15  # code
SHRINK = 0.7  # of the moments of two different inputs
DAMPING = 0.01  # of the mean square, added to every input's
RANGES = (1.0, 0.9, 0.8)  # of what a block's weights span
COLUMNS = 8  # inputs that are rounded one after the other; the errors of more reach the others as one product
ROWS = 1 << 13  # outputs at a time
FACTORED = 1 << 8  # inputs whose moments are factorised together, in double precision: more cost the cube
MOVED = 1 << 11  # columns of moments at a time, whose rows change places
SEARCHED = 1 << 17  # weights whose ranges are searched together, which a processor's cache holds
TINY = np.float32(1e-12)


def moments(x: Array) -> Array:
    """float32 [in, in]: sums of the products of inputs x [rows, in]."""
    rows: Array = np.ascontiguousarray(x, np.float32)
    return rows.T @ rows  # one factor is the other transposed, so BLAS computes half of it


def round_weight(weight: Array, second: Array, block: int) -> Blocks:
    """Bytes [out, blocks, block / 2], scales [out, blocks] (float32 that float16 holds) and zero points
    [out, blocks / 2], two to a byte, as MatMulNBits reads them, of a weight [out, in] whose inputs have the second
    moments float32 [in, in], over which this writes; in blocks of `block`.
    """
    if spare := -weight.shape[1] % block:
        weight, second = np.pad(weight, ((0, 0), (0, spare))), np.pad(second, (0, spare))
    power = second.diagonal().copy()
    order = _spread(second)
    parts = [
        _round_rows(np.asarray(weight[at : at + ROWS], np.float32), power, order, second, block)
        for at in range(0, len(weight), ROWS)
    ]
    codes, scales, zeros = (np.concatenate(side) for side in zip(*parts, strict=True))
    return pack(codes.reshape(len(weight), -1, block)), scales, pack(np.pad(zeros, ((0, 0), (0, zeros.shape[1] % 2))))


def round_to_nearest(weight: Array, block: int) -> Blocks:
    """As `round_weight`, each weight by itself and without a text, at about a twentieth of the time."""
    rows, count = len(weight), -(-weight.shape[1] // block)
    codes, scales = np.empty((rows, count, block // 2), np.uint8), np.empty((rows, count), np.float32)
    zeros = np.zeros((rows, count + count % 2), np.uint8)
    step = max(1, SEARCHED // (count * block))
    for at in range(0, rows, step):
        part, spare = weight[at : at + step], count * block - weight.shape[1]
        part = np.pad(part, ((0, 0), (0, spare))) if spare else part
        blocks = np.ascontiguousarray(part.reshape(-1, block).T)  # [block, n], so that sums run along memory
        scale, zero = _nearest_ranges(blocks)
        inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale != 0)
        levels = np.clip(np.rint(blocks * inverse), -zero, LARGEST - zero) + zero
        codes[at : at + step] = pack(np.ascontiguousarray(levels.T).astype(np.uint8)).reshape(-1, count, block // 2)
        scales[at : at + step], zeros[at : at + step, :count] = scale.reshape(-1, count), zero.reshape(-1, count)
    return codes, scales, pack(zeros)


def _nearest_ranges(blocks: Array) -> tuple[Array, Array]:
    """Scales and zero points [n] of blocks [block, n], as `ranges` where all inputs count the same; but with one zero
    point for each range, which is half the work and 0.6 % more squared error.
    """
    lowest = np.minimum(blocks.min(axis=0), 0)
    span = np.maximum(np.maximum(blocks.max(axis=0), 0) - lowest, TINY)
    zero = np.clip(np.rint(lowest * (np.float32(-LARGEST) / span)), 0, np.float32(LARGEST))
    smallest, scales = np.full_like(span, np.inf), np.zeros_like(span)
    level, spare = np.empty_like(blocks), np.empty_like(blocks)
    for share in RANGES:
        np.rint(np.multiply(blocks, np.float32(LARGEST) / (np.float32(share) * span), out=level), out=level)
        np.minimum(np.maximum(level, -zero, out=level), np.float32(LARGEST) - zero, out=level)
        product = np.multiply(blocks, level, out=spare).sum(axis=0)
        square = np.maximum(np.square(level, out=spare).sum(axis=0), TINY)
        scale, error = _fitted(product, square)
        better = error < smallest
        smallest, scales = np.where(better, error, smallest), np.where(better, scale, scales)
    return scales, zero


def _fitted(product: Array, square: Array) -> tuple[Array, Array]:
    """The best scale of levels, as float16 holds it, and the squared error that it leaves but for a constant."""
    with np.errstate(over="ignore", invalid="ignore"):  # of a scale that float16 cannot hold
        scale = (product / square).astype(np.float16).astype(np.float32)
        return scale, scale * (scale * square - 2 * product)


def _spread(second: Array) -> Array:
    """The order of inputs, the largest last. Moments [in, in] become U^T in that order, with ones on its diagonal: an
    error of input i adds U^T[i, j] of itself to what input j < i is rounded from. U D U^T are the moments, shrunk, of
    inputs in the other order. What lies above the diagonal says nothing.
    """
    power, mean = second.diagonal().copy(), np.maximum(second.diagonal().mean(), TINY)
    second *= np.float32(SHRINK) / mean
    np.fill_diagonal(second, power / mean + np.float32(DAMPING))
    order = np.argsort(-second.diagonal(), kind="stable")[::-1]
    for at in range(0, len(second), FACTORED):
        second[at : at + FACTORED] = np.take(second[at : at + FACTORED], order, axis=1)
    for at in range(0, len(second), MOVED):
        second[:, at : at + MOVED] = second[order, at : at + MOVED]
    _factorise(second)
    second /= second.diagonal().copy()
    return order


def _factorise(square: Array) -> None:
    """Puts the Cholesky factor L of a symmetric matrix into its lower half, a block of columns after the other: LAPACK
    would take three more matrices of this size, in double precision, in which these blocks are factorised.
    """
    for at in range(0, len(square), FACTORED):
        here, below = slice(at, at + FACTORED), slice(at + FACTORED, None)
        if at:
            square[at:, here] -= square[at:, :at] @ square[here, :at].T
        square[here, here] = np.linalg.cholesky(square[here, here])
        if at + FACTORED < len(square):
            inverse = np.linalg.inv(square[here, here])
            square[below, here] = square[below, here] @ inverse.T


def _round_rows(weight: Array, power: Array, order: Array, spread: Array, block: int) -> tuple[Array, Array, Array]:
    rows, width = weight.shape
    shares = (power + power.mean() * np.float32(DAMPING)).reshape(-1, block)
    scales, zeros = ranges_of(weight.reshape(rows, -1, block), shares)
    steps, low = np.ascontiguousarray(scales.T), -np.ascontiguousarray(zeros.T)
    high = low + np.float32(LARGEST)
    inverse = np.divide(1, steps, out=np.zeros_like(steps), where=steps != 0)
    exact = np.ascontiguousarray(np.take(weight, order, axis=1).T)
    inputs = _Inputs(exact, exact.copy(), spread, (order // block).tolist(), steps, inverse, low, high)
    inputs.round(0, width)
    codes = np.empty_like(exact)
    codes[order] = exact
    codes = codes.reshape(-1, block, rows) - low[:, None]
    return codes.reshape(width, rows).T.astype(np.uint8), scales, zeros.astype(np.uint8)


class _Inputs(NamedTuple):
    """Inputs in the order of `_spread`, of some rows. A class, as a function within a function that calls itself would
    hold what it reads until the next search for cycles: many layers' arrays.
    """

    exact: Array  # [in, rows]; levels take its place
    target: Array  # [in, rows] what is rounded: the weights and the errors that reach them; errors take its place
    spread: Array  # [in, in] as `_spread` leaves it
    where: list[int]  # block of each input
    steps: Array  # [blocks, rows], as all below
    inverse: Array
    low: Array
    high: Array

    def round(self, start: int, stop: int) -> None:
        """Rounds inputs `start` to `stop`, the later half first."""
        if stop - start > COLUMNS:
            middle = (start + stop + 1) // 2
            self.round(middle, stop)
            self.target[start:middle] += self.spread[middle:stop, start:middle].T @ self.target[middle:stop]
            self.round(start, middle)
            return
        for i in reversed(range(start, stop)):
            at, level, error = self.where[i], self.exact[i], self.target[i]
            rounded = np.rint(error * self.inverse[at])
            np.minimum(np.maximum(rounded, self.low[at], out=rounded), self.high[at], out=rounded)
            np.subtract(level, rounded * self.steps[at], out=error)
            level[:] = rounded
            for j in range(start, i):
                self.target[j] += self.spread[i, j] * error


def ranges_of(blocks: Array, shares: Array) -> tuple[Array, Array]:
    """As `ranges`, some rows at a time."""
    step = max(1, SEARCHED // max(1, blocks[0].size))
    parts = [ranges(blocks[at : at + step], shares) for at in range(0, len(blocks), step)]
    scales, zeros = (np.concatenate(side) for side in zip(*parts, strict=True))
    return scales, zeros


def ranges(blocks: Array, shares: Array) -> tuple[Array, Array]:
    """Scales and zero points [rows, count] of blocks [rows, count, block], the best of a few ranges for squared errors
    that weigh `shares` [count, block]; each scale is fitted to its codes and rounded to float16.
    """
    lowest = np.minimum(blocks.min(axis=-1), 0)
    span = np.maximum(np.maximum(blocks.max(axis=-1), 0) - lowest, TINY)
    smallest_error, scales, zeros = np.full_like(span, np.inf), np.zeros_like(span), np.zeros_like(span)
    weighed, level = blocks * shares, np.empty_like(blocks)
    for rounding in (np.floor, np.ceil):
        zero = np.clip(rounding(lowest * (np.float32(-LARGEST) / span)), 0, np.float32(LARGEST))
        low, high = -zero[..., None], np.float32(LARGEST) - zero[..., None]
        for share in RANGES:
            np.multiply(blocks, (np.float32(LARGEST) / (np.float32(share) * span))[..., None], out=level)
            np.rint(level, out=level)
            np.minimum(np.maximum(level, low, out=level), high, out=level)
            product = np.einsum("rcb,rcb->rc", weighed, level)
            np.square(level, out=level)
            square = np.maximum(np.einsum("rcb,cb->rc", level, shares), TINY)
            scale, error = _fitted(product, square)
            better = error < smallest_error
            smallest_error = np.where(better, error, smallest_error)
            scales, zeros = np.where(better, scale, scales), np.where(better, zero, zeros)
    return scales, zeros
