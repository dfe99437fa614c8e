"""The blocks of a GGUF file in tiles: the same codes, scales and minima in another order, so that no weight changes.

Codes have 4, 6 or 8 bits: those of 2 and 3 bits take 4, those of 5 take 6.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from streamspec.errors import ConfigError
from streamspec.export.file_blocks.block_kind import BlockKind, Sides
from streamspec.export.file_blocks.kinds import KINDS
from streamspec.export.native.layout import TILE, pack_blocks, pack_int4, pack_int6, pack_int8, tiled
from streamspec.export.ops.builder import Array
from streamspec.export.quantization.arithmetic import CHUNK, pack
from streamspec.export.spec.weight_source import StoredBlocks
from streamspec.runtime.hardware import native_library

SUPER = 256  # inputs that share a float16 where there are multipliers, else 32
NOTHING = {4: 0, 6: 32, 8: 0}  # the code, by bits, of rows that fill up a tile


@dataclass(frozen=True)
class Tiles:
    """Rows of blocks: uint8 codes as the operator reads them; float16 scales [tiles, supers, 32]; int8 multipliers
    [tiles, blocks, 32]; minima of both kinds."""

    codes: Array
    scales: Array
    multipliers: Array | None = None
    minima: Array | None = None
    minimum_multipliers: Array | None = None


def packed(stored: StoredBlocks, gated: bool = False) -> Tiles:
    """Rows [out, in] in tiles, as `in_parts`."""
    codes, (scales, *others) = in_parts(stored, gated)
    assert scales is not None
    return Tiles(np.concatenate(list(codes)), scales, *others)


def in_parts(stored: StoredBlocks, gated: bool = False) -> tuple[Iterator[Array], list[Array | None]]:
    """Rows [out, in] as `Tiles`: the codes, made some tiles at a time, and all the rest. `gated`: both halves of the
    outputs in turn. Raises ConfigError for bytes that are no such rows, or that hold numbers which tiles do not."""
    kind = KINDS[stored.kind]
    size = stored.columns // kind.weights * kind.layout.itemsize
    if stored.columns % kind.weights or stored.data.shape[1:] != (size,):
        found = f"{stored.kind} rows of {stored.columns} weights in {' '.join(map(str, stored.data.shape[1:]))} bytes"
        raise ConfigError(found, f"{kind.layout.itemsize} for each {kind.weights}", "download the file again")
    blocks = np.ascontiguousarray(stored.data).view(kind.layout)
    step = max(1, CHUNK // stored.columns)
    sides = _joined([kind.sides(blocks[at : at + step]) for at in range(0, len(blocks), step)])
    if not all(np.isfinite(side).all() for side in sides[::2] if side is not None):
        raise ConfigError("a block whose scale is no finite number", "finite numbers", "download the file again")
    order, step = tiled(np.arange(1, len(blocks) + 1), gated) - 1, max(1, step // TILE)
    codes = (_codes(kind, blocks, order[at : at + step]) for at in range(0, len(order), step))
    return codes, [None if side is None else pack_blocks(side.reshape(len(blocks), -1), gated) for side in sides]


def _codes(kind: BlockKind, blocks: Array, order: Array) -> Array:
    """Codes in tiles. `order` [tiles, 32]: the row of each output, -1 where it fills up a tile."""
    library, inputs = native_library.library(), blocks.shape[1] * kind.weights
    if library is None:
        return _packed(kind, blocks, order)
    groups = (inputs // 16, 2, 3, 16, 4) if kind.bits == 6 else (inputs * kind.bits // 32, TILE, 4)
    out = np.empty((len(order), *groups), np.uint8)
    kind.tile_codes(library, blocks, order, out)
    return out


def _packed(kind: BlockKind, blocks: Array, order: Array) -> Array:
    rows = order.reshape(-1)
    codes = kind.codes(blocks[rows]).reshape(len(rows), -1)
    codes[rows < 0] = NOTHING[kind.bits]
    if kind.bits == 8:
        return pack_int8(codes.view(np.int8)).view(np.uint8)
    return pack_int6(codes.view(np.int8) - np.int8(32)) if kind.bits == 6 else pack_int4(pack(codes))


def _joined(parts: Sequence[Sides]) -> list[Array | None]:
    return [None if side[0] is None else np.concatenate(side) for side in zip(*parts, strict=True)]
