"""The arithmetic of weight quantization, on numpy arrays.

Weights are [out, in] as in Hugging Face. Rows are treated independently and in chunks, so the peak is one chunk of
floats.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from streamspec.export.ops.builder import Array
from streamspec.export.spec.weight_source import Table

# codes of weights that are inputs: no x86 kernel's sum of two products with uint8 leaves 16 bits, and ONNX Runtime
# mends constants only
NO_SATURATION = 63
TINY = np.finfo(np.float32).tiny
CHUNK = 1 << 22  # weights handled at a time
SPREAD = 1 << 12  # blocks mixed at a time, which a processor's cache holds
HADAMARD = (32, 16, 8)  # inputs that are mixed, the first that divides a width
SHRINK = (1.0, 0.95, 0.9, 0.85)  # block ranges tried by `quantize_blocks`


@dataclass(frozen=True)
class Simulation:
    """Simulates the rounding of a weight and of rows, as float arrays; `powers` of a to try; `peaks`:
    SmoothQuant's form of s. `mixes`: inputs with outliers in single rows are mixed in blocks (`hadamard`), or, in
    `everything`, all inputs of linear maps. `block`: weights are rounded to 4 bits in such blocks, on a text (`gptq`)
    unless `nearest`. `outputs`: about so many rows of a weight are compared in the choice of a power, 0: all.
    """

    weight: Callable[[Array], Array]
    rows: Callable[[Array], Array]
    powers: tuple[float, ...]
    peaks: bool
    mixes: bool = False
    everything: bool = False
    block: int = 0
    nearest: bool = False
    outputs: int = 0

    @property
    def on_text(self) -> bool:
        """Whether weights are rounded on a text."""
        return self.block > 0 and not self.nearest

    def mixed(self, block: int) -> Simulation:
        """The simulation for inputs mixed in blocks of `block`."""
        return replace(
            self,
            weight=lambda weight: self.weight(unmixed(weight, block)),
            rows=lambda x: self.rows(hadamard(x, block)),
        )


def mixed_inputs(width: int) -> int:
    """The size of blocks in which an input of `width` can be mixed; 0 for none."""
    return next((block for block in HADAMARD if width % block == 0), 0)


def hadamard(x: Array, block: int) -> Array:
    """Mixes every `block` (a power of two) neighbours of the last axis: times Sylvester's matrix of +-1, in a fixed
    order of sums. A spike in one place becomes `block` values of its size. QuaRot, arXiv 2404.00456.
    """
    flat = np.asarray(x, np.float32).reshape(-1, block)
    out = np.empty_like(flat)
    for at in range(0, len(flat), SPREAD):
        rows = np.ascontiguousarray(flat[at : at + SPREAD].T)  # [block, n], so that sums run along memory
        spare, half = np.empty_like(rows), 1
        while half < block:
            pairs, sums = (side.reshape(-1, 2, half, side.shape[1]) for side in (rows, spare))
            np.add(pairs[:, 0], pairs[:, 1], out=sums[:, 0])
            np.subtract(pairs[:, 0], pairs[:, 1], out=sums[:, 1])
            rows, spare, half = spare, rows, 2 * half
        out[at : at + SPREAD] = rows.T
    return out.reshape(x.shape)


def unmixed(weight: Array, block: int) -> Array:
    """A weight [out, in] that gives for mixed inputs what it gave for plain ones. The matrix is its own inverse but for
    a factor, a power of two.
    """
    plain = hadamard(weight, block)
    plain /= np.float32(block)
    return plain


def quantize_rows(weight: Array | Table, largest: int = 127, block: int = 0) -> tuple[Array, Array]:
    """int8 weights up to +-`largest` and float32 scales [out]: symmetric, plain absmax per output channel. `block`: for
    inputs mixed in such blocks.
    """
    out = np.empty(weight.shape, np.int8)
    scales = np.empty(weight.shape[0], np.float32)
    for rows in _chunks(weight):
        part = np.asarray(weight[rows], np.float32)
        part = unmixed(part, block) if block else part
        scale = np.maximum(np.abs(part).max(axis=1) / np.float32(largest), TINY)
        out[rows] = np.clip(np.rint(part / scale[:, None]), -largest, largest)
        scales[rows] = scale
    return out, scales


def dequantize_rows(codes: Array, scales: Array) -> Array:
    """Float weights of `quantize_rows`; rows of activations are quantized the same way."""
    return codes.astype(np.float32) * scales[:, None]


def quantize_blocks(
    weight: Array | Table, bits: int, block: int, importance: Array | None = None
) -> tuple[Array, Array, Array | None]:
    """MatMulNBits layout: packed [out, blocks, block*bits/8], scales [out, blocks], packed zero points (4 bits) or
    None.

    4 bits: asymmetric; per block the best of a few shrunken ranges and both neighbouring zero points, then the scale
    that minimises the squared error for those codes, each weighted by its input's `importance` [in]. 8 bits: symmetric
    around 128, the operator's default zero point.
    """
    count = -(-weight.shape[1] // block)
    packed = np.empty((weight.shape[0], count, block * bits // 8), np.uint8)
    scales = np.empty((weight.shape[0], count), np.float32)
    zeros = np.empty((weight.shape[0], -(-count // 2)), np.uint8) if bits == 4 else None
    shares = np.ones(weight.shape[1], np.float32) if importance is None else np.asarray(importance, np.float32)
    shares = np.pad(shares, (0, count * block - len(shares))).reshape(count, block)
    for rows in _chunks(weight):
        part = np.asarray(weight[rows], np.float32)
        padded = np.pad(part, ((0, 0), (0, count * block - part.shape[1]))).reshape(len(part), count, block)
        if zeros is None:
            scale = np.maximum(np.abs(padded).max(axis=2) / np.float32(127), TINY)
            packed[rows] = np.clip(np.rint(padded / scale[:, :, None]), -127, 127) + 128
        else:
            codes, scale, zero = _best_blocks(padded, shares)
            packed[rows] = pack(codes)
            zeros[rows] = pack(np.pad(zero, ((0, 0), (0, count % 2))))
        scales[rows] = scale
    return packed, scales, zeros


def round_blocks(weight: Array, block: int) -> Array:
    """Rounds `weight` to 4 bits with one range and one zero point per block, without a search. For comparing
    scalings.
    """
    count = -(-weight.shape[1] // block)
    padded = np.pad(weight, ((0, 0), (0, count * block - weight.shape[1]))).reshape(len(weight), count, block)
    low = np.minimum(padded.min(axis=2, keepdims=True), 0)
    step = np.maximum(np.maximum(padded.max(axis=2, keepdims=True), 0) - low, TINY) / np.float32(15)
    zero = np.rint(-low / step)
    levels = np.clip(np.rint(padded / step) + zero, 0, 15) - zero
    return (levels * step).reshape(len(weight), -1)[:, : weight.shape[1]]


def pack(codes: Array) -> Array:
    """4-bit codes [.., 2 n], uint8, as bytes [.., n]."""
    packed: Array = codes[..., 0::2] | codes[..., 1::2] << 4
    return packed


def unpack(packed: Array) -> Array:
    """The 4-bit codes in `packed` [.., n] uint8, as uint8 [.., 2 n]."""
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)


def _best_blocks(blocks: Array, shares: Array) -> tuple[Array, Array, Array]:
    """4-bit codes, scales and zero points of blocks [rows, count, block], each block at its smallest squared error,
    weighted by `shares` [count, block].
    """
    low = np.minimum(blocks.min(axis=2), 0)
    span = np.maximum(np.maximum(blocks.max(axis=2), 0) - low, TINY)
    shape = span.shape
    best = np.full(shape, np.inf, np.float32)
    codes = np.zeros(blocks.shape, np.uint8)
    scales = np.ones(shape, np.float32)
    zeros = np.zeros(shape, np.uint8)
    for factor in SHRINK:
        step = span * np.float32(factor / 15)
        for rounding in (np.floor, np.ceil):
            zero = np.clip(rounding(-low * np.float32(factor) / step), 0, 15)[:, :, None]
            code = np.clip(np.rint(blocks / step[:, :, None]) + zero, 0, 15)
            level = code - zero
            counted = shares * level
            fitted = (blocks * counted).sum(axis=2) / np.maximum((level * counted).sum(axis=2), TINY)
            error = (shares * np.square(blocks - fitted[:, :, None] * level)).sum(axis=2)
            better = error < best
            best[better], scales[better] = error[better], fitted[better]
            codes[better], zeros[better] = code[better].astype(np.uint8), zero[better][:, 0].astype(np.uint8)
    return codes, scales, zeros


def _chunks(weight: Array | Table) -> list[slice]:
    step = max(1, CHUNK // max(1, weight.shape[1]))
    return [slice(start, start + step) for start in range(0, weight.shape[0], step)]
