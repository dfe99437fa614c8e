"""The types of blocks that GGUF files hold, by ggml's names.

A row is one of blocks of 32 weights, or of 256 in parts of 16 or 32 (ggml's `block_*` in ggml-common.h, which the
`gguf` package decodes in quants.py). A weight is

    scale * (code - offset) - minimum,   or scale * table[code]

where scale and minimum are float16, of each 32 inputs, or of 256 and times a whole number of each part.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from streamspec.errors import ConfigError
from streamspec.export.file_blocks.block_kind import Bits, BlockKind, Sides
from streamspec.export.ops.builder import Array

IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # doubled
FIRST, LAST = 104, 143  # exponents of MXFP4 that float16 holds as 2^(e - 128)


def decode(kind: BlockKind, data: Array, out: Array) -> None:
    """Writes the weights of rows uint8 [rows, bytes] as ggml decodes them: `out` float32 [rows, inputs], contiguous."""
    blocks = np.ascontiguousarray(data).view(kind.layout)
    scales, multipliers, minima, minimum_multipliers = kind.sides(blocks)

    def factor(scale: Array, own: Array | None) -> Array:
        wide = scale.astype(np.float32)
        return wide if own is None else wide[..., None] * own.astype(np.float32)

    least = None if minima is None else factor(minima, minimum_multipliers)
    kind.decode(blocks, factor(scales, multipliers), least, out)


def _bits(values: Array, shifts: tuple[int, ...], mask: int) -> Array:
    """[.., n] as [.., shifts, n]."""
    return np.asarray(values[..., None, :] >> np.array(shifts, values.dtype)[:, None] & values.dtype.type(mask))


# ---- blocks of 32


def _plain(blocks: Array) -> Sides:
    return blocks["d"], None, -blocks["m"] if "m" in (blocks.dtype.names or ()) else None, None


def _mxfp4(blocks: Array) -> Sides:
    exponents = blocks["e"].astype(np.int32)
    empty = ((blocks["qs"] & 0x77) == 0).all(-1)  # whatever its exponent
    if not (empty | (exponents >= FIRST) & (exponents <= LAST)).all():
        raise ConfigError(
            "an MXFP4 block of an exponent beyond float16's", f"{FIRST} to {LAST}", "use --precision int8"
        )
    scales = np.ldexp(np.float32(1), np.clip(exponents, FIRST, LAST) - 128)
    return np.where(empty, 0, scales).astype(np.float16), None, None, None


# ---- blocks of 256


def _q2_k(blocks: Array) -> Sides:
    both = _bits(blocks["scales"], (0, 4), 15).astype(np.int8)
    return blocks["d"], both[..., 0, :], blocks["m"], both[..., 1, :]


def _q3_k(blocks: Array) -> Sides:
    scales = _bits(blocks["scales"][..., :8], (0, 4), 15).reshape(*blocks.shape, 16)
    top = _bits(blocks["scales"][..., 8:], (0, 2, 4, 6), 3).reshape(*blocks.shape, 16)
    return blocks["d"], (scales | top << 4).astype(np.int8) - np.int8(32), None, None


def _q4_k(blocks: Array) -> Sides:
    """Multipliers of scales and of minima have six bits each, in 12 bytes."""
    d, m, both = np.split(blocks["scales"], 3, axis=-1)
    scales = np.concatenate([d & 63, both & 15 | d >> 2 & 48], axis=-1).astype(np.int8)
    minima = np.concatenate([m & 63, both >> 4 | m >> 2 & 48], axis=-1).astype(np.int8)
    return blocks["d"], scales, blocks["m"], minima


def _q6_k(blocks: Array) -> Sides:
    return blocks["d"], blocks["scales"], None, None


def _iq4_xs(blocks: Array) -> Sides:
    low = _bits(blocks["scales_l"][..., None], (0, 4), 15).reshape(*blocks.shape, 8)
    top = blocks["scales_h"][..., None] >> np.arange(0, 16, 2, dtype=np.uint16) & np.uint16(3)
    return blocks["d"], (low | (top << 4).astype(np.uint8)).astype(np.int8) - np.int8(32), None, None


def _layout(*parts: tuple[str, str, int]) -> np.dtype[Any]:
    return np.dtype([(name, kind, (count,)) if count > 1 else (name, kind) for name, kind, count in parts])


D, M = ("d", "<f2", 1), ("m", "<f2", 1)
QS, QH, QH5 = ("qs", "u1", 16), ("qh", "u1", 32), ("qh", "u1", 4)
SIXES = ("scales", "u1", 12)
FOURS, FIFTHS, HIGH = Bits("qs", 4, 16), Bits("qh", 1, 0), Bits("qh", 1, 32)
KINDS = {
    "Q4_0": BlockKind(_layout(D, QS), _plain, FOURS, offset=8),
    "Q4_1": BlockKind(_layout(D, M, QS), _plain, FOURS),
    "Q5_0": BlockKind(_layout(D, QH5, QS), _plain, FOURS, FIFTHS, bits=6, offset=16),
    "Q5_1": BlockKind(_layout(D, M, QH5, QS), _plain, FOURS, FIFTHS, bits=6),
    "Q8_0": BlockKind(_layout(D, ("qs", "u1", 32)), _plain, Bits("qs", 8, 32), bits=8),
    "Q2_K": BlockKind(_layout(("scales", "u1", 16), ("qs", "u1", 64), D, M), _q2_k, Bits("qs", 2, 32), block=16),
    "Q3_K": BlockKind(_layout(QH, ("qs", "u1", 64), SIXES, D), _q3_k, Bits("qs", 2, 32), HIGH, block=16, offset=4),
    "Q4_K": BlockKind(_layout(D, M, SIXES, ("qs", "u1", 128)), _q4_k, Bits("qs", 4, 32)),
    "Q5_K": BlockKind(_layout(D, M, SIXES, QH, ("qs", "u1", 128)), _q4_k, Bits("qs", 4, 32), HIGH, bits=6),
    "Q6_K": BlockKind(
        _layout(("qs", "u1", 128), ("qh", "u1", 64), ("scales", "i1", 16), D),
        _q6_k,
        Bits("qs", 4, 64),
        Bits("qh", 2, 32),
        bits=6,
        block=16,
        offset=32,
    ),
    "IQ4_NL": BlockKind(_layout(D, QS), _plain, FOURS, table=IQ4),
    "IQ4_XS": BlockKind(
        _layout(D, ("scales_h", "<u2", 1), ("scales_l", "u1", 4), ("qs", "u1", 128)), _iq4_xs, FOURS, table=IQ4
    ),
    "MXFP4": BlockKind(_layout(("e", "u1", 1), QS), _mxfp4, FOURS, table=E2M1),
}
