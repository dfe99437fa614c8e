"""Rounds weights to 4 bits so that what one weight loses the others make up for, on the inputs of a text.

GPTQ (arXiv 2210.17323): weights are rounded input by input, the input that is largest on average first, and each error
is spread over the inputs that are still to come as the second moments H = mean(x x^T) say. A block's scale is chosen
before, where the squared errors that its inputs weigh are least.

Which share of an error goes where takes one factorisation, H = U D U^T, without H's inverse (QuIP, arXiv 2307.13304,
theorem 6: the same roundings as GPTQ's).

A text of a few thousand tokens says more about single inputs than about pairs: what it says of pairs is shrunk.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from streamspec.export.quantization.arithmetic import Array, Blocks

LARGEST = 15  # code
SHRINK = 0.7  # of the moments of two different inputs
DAMPING = 0.01  # of the mean square, added to every input's
RANGES = (1.0, 0.9, 0.8)  # of what a block's weights span
COLUMNS = 32  # inputs whose errors reach the others at once
ROWS = 1 << 13  # outputs at a time
TINY = 1e-12


def moments(x: Array) -> Array:
    """float32 [in, in]: sums of the products of inputs x [rows, in]."""
    rows: Array = np.ascontiguousarray(x, np.float32)
    return rows.T @ rows  # one factor is the other transposed, so BLAS computes half of it


def round_weight(weight: Array, second: Array, block: int) -> Blocks:
    """Bytes [out, blocks, block / 2], scales [out, blocks] (float32 that float16 holds) and zero points
    [out, blocks / 2], two to a byte, as MatMulNBits reads them, of a weight [out, in] whose inputs have the second
    moments [in, in]; in blocks of `block`.
    """
    if spare := -weight.shape[1] % block:
        weight, second = np.pad(weight, ((0, 0), (0, spare))), np.pad(second, (0, spare))
    order, spread = _spread(torch.from_numpy(second))
    parts = [
        _round_rows(torch.from_numpy(np.ascontiguousarray(weight[at : at + ROWS])), second, order, spread, block)
        for at in range(0, len(weight), ROWS)
    ]
    codes, scales, zeros = (torch.cat(side).numpy() for side in zip(*parts, strict=True))
    return pairs(codes.reshape(len(weight), -1, block)), scales, pairs(np.pad(zeros, ((0, 0), (0, zeros.shape[1] % 2))))


def pairs(codes: Array) -> Array:
    """4-bit codes [.., 2 n], uint8, as bytes [.., n]."""
    packed: Array = codes[..., 0::2] | codes[..., 1::2] << 4
    return packed


def _spread(second: Tensor) -> tuple[Tensor, Tensor]:
    """The order of inputs, and U [in, in] in that order, with ones on its diagonal: an error of input i adds U[i, j] of
    itself to what input j > i is rounded from. U D U^T are the moments, shrunk.
    """
    mean = second.diagonal().mean().clamp(min=TINY)
    shrunk = second * (SHRINK / mean)
    shrunk.diagonal().copy_(second.diagonal() / mean + DAMPING)
    order = torch.argsort(shrunk.diagonal(), descending=True, stable=True)
    last_first = order.flip(0)
    upper = torch.linalg.cholesky(shrunk[last_first][:, last_first]).flip(0, 1)
    return order, upper / upper.diagonal()


def _round_rows(
    weight: Tensor, second: Array, order: Tensor, spread: Tensor, block: int
) -> tuple[Tensor, Tensor, Tensor]:
    rows, width = weight.shape
    power = torch.from_numpy(second).diagonal()
    scales, zeros = ranges(weight.reshape(rows, -1, block), (power + power.mean() * DAMPING).reshape(-1, block))
    steps, low = scales.T.contiguous(), -zeros.T.contiguous()
    high = low + LARGEST
    inverse = torch.where(steps == 0, 0.0, 1 / steps)
    exact, levels = weight.T[order].contiguous(), torch.empty(width, rows)
    wanted = exact.clone()
    where = (order // block).tolist()
    for start in range(0, width, COLUMNS):
        stop = min(start + COLUMNS, width)
        errors = torch.empty(stop - start, rows)
        for i in range(start, stop):
            at, level, error = where[i], levels[i], errors[i - start]
            torch.mul(wanted[i], inverse[at], out=level)
            torch.clamp(level.round_(), low[at], high[at], out=level)
            torch.addcmul(exact[i], level, steps[at], value=-1, out=error)
            if i + 1 < stop:
                wanted[i + 1 : stop].addr_(spread[i, i + 1 : stop], error)
        if stop < width:
            wanted[stop:].addmm_(spread[start:stop, stop:].T, errors)
    codes = torch.empty_like(levels)
    codes[order] = levels
    codes = codes.reshape(-1, block, rows) - low[:, None]
    return codes.reshape(width, rows).T.to(torch.uint8), scales, zeros.to(torch.uint8)


def ranges(blocks: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and zero points [rows, count] of blocks [rows, count, block], the best of a few ranges for squared errors
    that weigh `shares` [count, block]; each scale is fitted to its codes and rounded to float16.
    """
    lowest = blocks.amin(-1).clamp_(max=0)
    span = (blocks.amax(-1).clamp_(min=0) - lowest).clamp_(min=TINY)
    least, scales, zeros = torch.full_like(span, torch.inf), torch.zeros_like(span), torch.zeros_like(span)
    weighed = blocks * shares
    for rounding in (torch.floor, torch.ceil):
        zero = rounding(lowest * (-LARGEST / span)).clamp_(0, LARGEST)
        low, high = -zero[..., None], LARGEST - zero[..., None]
        for share in RANGES:
            level = (blocks * (LARGEST / (share * span))[..., None]).round_()
            torch.clamp(level, low, high, out=level)
            product = (weighed * level).sum(-1)
            square = level.square_().mul_(shares).sum(-1).clamp_(min=TINY)
            scale = (product / square).half().float()
            error = scale * (scale * square - 2 * product)
            better = error < least
            least = torch.where(better, error, least)
            scales, zeros = torch.where(better, scale, scales), torch.where(better, zero, zeros)
    return scales, zeros
