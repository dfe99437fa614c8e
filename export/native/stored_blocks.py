"""The blocks of a GGUF file in tiles: the same codes, scales and minima in another order, so that no weight changes.

A file's row is a row of blocks of 32 weights, or of 256 in parts of 16 or 32 (ggml's `block_*` in ggml-common.h, which
the `gguf` package decodes in quants.py). In tiles a weight is

    scale * (code - offset) - minimum,   or scale * table[code]

where scale and minimum are float16, of each 32 inputs, or of 256 and times a whole number of each part. Codes have 4, 6
or 8 bits: those of 2 and 3 bits take 4, those of 5 take 6.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from streamspec.errors import ConfigError
from streamspec.export.native.layout import TILE, pack_blocks, pack_int4, pack_int6, pack_int8, tiled
from streamspec.export.ops.builder import Array
from streamspec.export.quantization.arithmetic import CHUNK, pack
from streamspec.export.spec.weight_source import StoredBlocks

SUPER = 256  # inputs that share a float16 where there are multipliers, else 32
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # doubled
FIRST, LAST = 104, 143  # exponents of MXFP4 that float16 holds as 2^(e - 128)


@dataclass(frozen=True)
class Tiles:
    """Rows of blocks: uint8 codes as the operator reads them; float16 scales [tiles, supers, 32]; int8 multipliers
    [tiles, blocks, 32]; minima of both kinds. Before they are packed: [outputs, ..], one code to a byte."""

    codes: Array
    scales: Array
    multipliers: Array | None = None
    minima: Array | None = None
    minimum_multipliers: Array | None = None


@dataclass(frozen=True)
class BlockKind:
    """A type of ggml's. `layout`: of a block in the file; `read`: the parts of blocks [outputs, blocks of the file]."""

    layout: Any
    read: Callable[[Array], Tiles]
    bits: int = 4
    block: int = 32
    offset: int = 0
    table: tuple[int, ...] = ()

    @property
    def weights(self) -> int:
        """Of a block in the file."""
        return SUPER if any(name in self.layout.names for name in ("scales", "scales_l")) else 32

    def pack(self, codes: Array) -> Array:
        """Codes [outputs, inputs], one to a byte, in tiles."""
        if self.bits == 8:
            return pack_int8(codes.view(np.int8)).view(np.uint8)
        return pack_int6(codes.view(np.int8) - np.int8(32)) if self.bits == 6 else pack_int4(pack(codes))


def packed(stored: StoredBlocks, gated: bool = False) -> Tiles:
    """Rows [out, in] in tiles. `gated`: both halves of the outputs in turn. Raises ConfigError for bytes that are no
    such rows, or that hold numbers which tiles do not."""
    kind = KINDS[stored.kind]
    size = stored.columns // kind.weights * kind.layout.itemsize
    if stored.columns % kind.weights or stored.data.shape[1:] != (size,):
        found = f"{stored.kind} rows of {stored.columns} weights in {' '.join(map(str, stored.data.shape[1:]))} bytes"
        raise ConfigError(found, f"{kind.layout.itemsize} for each {kind.weights}", "download the file again")
    parts = [_packed(kind, rows) for rows in _chunks(stored, gated)]
    sides = {one.name: [getattr(part, one.name) for part in parts] for one in fields(Tiles)}
    whole: dict[str, Any] = {name: None if side[0] is None else np.concatenate(side) for name, side in sides.items()}
    return Tiles(**whole)


def _chunks(stored: StoredBlocks, gated: bool) -> Iterator[Array]:
    """Bytes of the rows of some tiles at a time, in the order of tiles."""
    step = max(1, CHUNK // (TILE * stored.columns))
    if gated:
        tiles = tiled(stored.data, gated)
        yield from (tiles[at : at + step].reshape(-1, tiles.shape[2]) for at in range(0, len(tiles), step))
    else:
        yield from (stored.data[at : at + step * TILE] for at in range(0, len(stored.data), step * TILE))


def _packed(kind: BlockKind, data: Array) -> Tiles:
    blocks = np.ascontiguousarray(data).view(kind.layout)
    parts = kind.read(blocks)
    if not all(np.isfinite(side).all() for side in (parts.scales, parts.minima) if side is not None):
        raise ConfigError("a block whose scale is no finite number", "finite numbers", "download the file again")

    def side(values: Array | None) -> Array | None:
        return None if values is None else pack_blocks(values.reshape(len(data), -1))

    codes = kind.pack(np.ascontiguousarray(parts.codes, np.uint8).reshape(len(data), -1))
    return Tiles(
        codes, pack_blocks(parts.scales), *map(side, (parts.multipliers, parts.minima, parts.minimum_multipliers))
    )


# ---- blocks of 32


def _bits(values: Array, shifts: tuple[int, ...], mask: int) -> Array:
    """[.., n] as [.., shifts, n]."""
    return np.asarray(values[..., None, :] >> np.array(shifts, values.dtype)[:, None] & values.dtype.type(mask))


def _has(blocks: Array, part: str) -> bool:
    return part in (blocks.dtype.names or ())


def _fives(blocks: Array) -> Array:
    top = blocks["qh"][..., None] >> np.arange(32, dtype=np.uint32) & np.uint32(1)
    return np.asarray(_bits(blocks["qs"], (0, 4), 15).reshape(top.shape) | (top << 4).astype(np.uint8))


def _plain(blocks: Array) -> Tiles:
    return Tiles(_bits(blocks["qs"], (0, 4), 15), blocks["d"], minima=-blocks["m"] if _has(blocks, "m") else None)


def _plain5(blocks: Array) -> Tiles:
    return Tiles(_fives(blocks), blocks["d"], minima=-blocks["m"] if _has(blocks, "m") else None)


def _mxfp4(blocks: Array) -> Tiles:
    codes, exponents = _bits(blocks["qs"], (0, 4), 15), blocks["e"].astype(np.int32)
    empty = ((codes & 7) == 0).all((-1, -2))  # whatever its exponent
    if not (empty | (exponents >= FIRST) & (exponents <= LAST)).all():
        raise ConfigError(
            "an MXFP4 block of an exponent beyond float16's", f"{FIRST} to {LAST}", "use --precision int8"
        )
    scales = np.ldexp(np.float32(1), np.clip(exponents, FIRST, LAST) - 128)
    return Tiles(codes, np.where(empty, 0, scales).astype(np.float16))


# ---- blocks of 256


def _q2_k(blocks: Array) -> Tiles:
    codes = _bits(blocks["qs"].reshape(*blocks.shape, 2, 32), (0, 2, 4, 6), 3)
    both = _bits(blocks["scales"], (0, 4), 15).astype(np.int8)
    return Tiles(codes, blocks["d"], both[..., 0, :], blocks["m"], both[..., 1, :])


def _q3_k(blocks: Array) -> Tiles:
    low = _bits(blocks["qs"].reshape(*blocks.shape, 2, 32), (0, 2, 4, 6), 3).reshape(*blocks.shape, 8, 32)
    codes = low | _bits(blocks["qh"], tuple(range(8)), 1) << 2
    scales = _bits(blocks["scales"][..., :8], (0, 4), 15).reshape(*blocks.shape, 16)
    top = _bits(blocks["scales"][..., 8:], (0, 2, 4, 6), 3).reshape(*blocks.shape, 16)
    return Tiles(codes, blocks["d"], (scales | top << 4).astype(np.int8) - np.int8(32))


def _sixes(scales: Array) -> tuple[Array, Array]:
    """Multipliers [.., 8] of scales and of minima, six bits each in [.., 12] bytes."""
    d, m, both = np.split(scales, 3, axis=-1)
    low = np.concatenate([d & 63, both & 15 | d >> 2 & 48], axis=-1)
    return low.astype(np.int8), np.concatenate([m & 63, both >> 4 | m >> 2 & 48], axis=-1).astype(np.int8)


def _q4_k(blocks: Array) -> Tiles:
    codes = _bits(blocks["qs"].reshape(*blocks.shape, 4, 32), (0, 4), 15).reshape(*blocks.shape, 8, 32)
    if _has(blocks, "qh"):
        codes = codes | _bits(blocks["qh"], tuple(range(8)), 1) << 4
    multipliers, minimum_multipliers = _sixes(blocks["scales"])
    return Tiles(codes, blocks["d"], multipliers, blocks["m"], minimum_multipliers)


def _q6_k(blocks: Array) -> Tiles:
    low = _bits(blocks["qs"].reshape(*blocks.shape, 2, 64), (0, 4), 15).reshape(*blocks.shape, 8, 32)
    top = _bits(blocks["qh"].reshape(*blocks.shape, 2, 32), (0, 2, 4, 6), 3).reshape(*blocks.shape, 8, 32)
    return Tiles(low | top << 4, blocks["d"], blocks["scales"])


def _iq4_xs(blocks: Array) -> Tiles:
    codes = _bits(blocks["qs"].reshape(*blocks.shape, 8, 16), (0, 4), 15)
    low = _bits(blocks["scales_l"][..., None], (0, 4), 15).reshape(*blocks.shape, 8)
    top = blocks["scales_h"][..., None] >> np.arange(0, 16, 2, dtype=np.uint16) & np.uint16(3)
    return Tiles(codes, blocks["d"], (low | (top << 4).astype(np.uint8)).astype(np.int8) - np.int8(32))


def _layout(*parts: tuple[str, str, int]) -> np.dtype[Any]:
    return np.dtype([(name, kind, (count,)) if count > 1 else (name, kind) for name, kind, count in parts])


D, M, QH5 = ("d", "<f2", 1), ("m", "<f2", 1), ("qh", "<u4", 1)
QS, QH = ("qs", "u1", 16), ("qh", "u1", 32)
SIXES = ("scales", "u1", 12)
KINDS = {
    "Q4_0": BlockKind(_layout(D, QS), _plain, offset=8),
    "Q4_1": BlockKind(_layout(D, M, QS), _plain),
    "Q5_0": BlockKind(_layout(D, QH5, QS), _plain5, bits=6, offset=16),
    "Q5_1": BlockKind(_layout(D, M, QH5, QS), _plain5, bits=6),
    "Q8_0": BlockKind(_layout(D, ("qs", "u1", 32)), lambda blocks: Tiles(blocks["qs"], blocks["d"]), bits=8),
    "Q2_K": BlockKind(_layout(("scales", "u1", 16), ("qs", "u1", 64), D, M), _q2_k, block=16),
    "Q3_K": BlockKind(_layout(QH, ("qs", "u1", 64), SIXES, D), _q3_k, block=16, offset=4),
    "Q4_K": BlockKind(_layout(D, M, SIXES, ("qs", "u1", 128)), _q4_k),
    "Q5_K": BlockKind(_layout(D, M, SIXES, QH, ("qs", "u1", 128)), _q4_k, bits=6),
    "Q6_K": BlockKind(
        _layout(("qs", "u1", 128), ("qh", "u1", 64), ("scales", "i1", 16), D), _q6_k, bits=6, block=16, offset=32
    ),
    "IQ4_NL": BlockKind(_layout(D, QS), _plain, table=IQ4),
    "IQ4_XS": BlockKind(
        _layout(D, ("scales_h", "<u2", 1), ("scales_l", "u1", 4), ("qs", "u1", 128)), _iq4_xs, table=IQ4
    ),
    "MXFP4": BlockKind(_layout(("e", "u1", 1), QS), _mxfp4, table=E2M1),
}
