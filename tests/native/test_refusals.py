"""Native operators refuse what does not fit, in one line of what was found and expected, and never end the process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.native_cases import CASES, HIDDEN, OperatorCase, spoiled

F, H, U = np.float32, np.float16, np.uint8
SPOILED = 600


def fitting(kind: str) -> OperatorCase:
    """40 inputs and 50 outputs; or 6 heads of 32, 2 key heads, 9 rows after 21 of 40 slots."""
    zeros, half = np.zeros, H if kind.endswith("16") else F
    sizes = {"in_features": 40, "out_features": 50}
    heads = {"heads": 6, "kv_heads": 2, "width": 32}
    packed, past = zeros((1, 9, 320), F), {"past": np.array(21)}
    sides = {name: zeros((1, 2, 40, 32), half) for name in ("keys", "values")}
    turns = {"cos": zeros((9, 8), F), "sin": zeros((9, 8), F), "query_norm": zeros(32, F), "key_norm": zeros(32, F)}
    int8 = {"codes": zeros((2, 10, 32, 4), np.int8), "scales": zeros(50, F)}
    int6 = int8 | {"codes": zeros((2, 3, 2, 3, 16, 4), U)}
    stored = {"codes": zeros((2, 32, 32, 4), U)}
    stored |= {name: zeros((2, 1, 32), H) for name in ("scales", "minima")}
    stored |= {name: zeros((2, 8, 32), np.int8) for name in ("multipliers", "minimum_multipliers")}
    of_blocks = {"in_features": 256, "out_features": 50, "bits": 4}
    blocks = {"scales": zeros((2, 2, 32), H), "zeros": zeros((2, 2, 32), U), "shift": zeros(50, F)}
    made = {
        "LinearInt8": ({"x": zeros((3, 40), F)}, int8 | {"shift": zeros(50, F)}, sizes),
        "LinearInt4": (
            {"x": zeros((3, 64), F)},
            {"codes": zeros((2, 8, 32, 4), U), **blocks},
            sizes | {"in_features": 64},
        ),
        "LinearInt6": ({"x": zeros((3, 40), F)}, int6 | {"shift": zeros(50, F)}, sizes),
        **{
            f"ExpertsInt{bits}": (
                {"x": zeros((3, 40), F), "chosen": zeros((3, 2), np.int64), "shares": zeros((3, 2), F)},
                {name: np.concatenate([x, x]) for name, x in {**codes, "shift": zeros(50, F)}.items()},
                sizes | {"maps": 2},
            )
            for bits, codes in ((8, int8), (6, int6))
        },
        "ExpertsInt4": (
            {"x": zeros((3, 64), F), "chosen": zeros((3, 2), np.int64), "shares": zeros((3, 2), F)},
            {name: np.concatenate([x, x]) for name, x in {"codes": zeros((2, 8, 32, 4), U), **blocks}.items()},
            sizes | {"in_features": 64, "maps": 2},
        ),
        "LinearBlocks": ({"x": zeros((3, 256), F)}, stored | {"shift": zeros(50, F)}, of_blocks),
        "ExpertsBlocks": (
            {"x": zeros((3, 256), F), "chosen": zeros((3, 2), np.int64), "shares": zeros((3, 2), F)},
            {name: np.concatenate([x, x]) for name, x in {**stored, "shift": zeros(50, F)}.items()},
            of_blocks | {"maps": 2},
        ),
        "EmbeddingBlocks": ({"ids": zeros((1, 3), np.int64)}, stored, of_blocks),
        "EmbeddingInt8": ({"ids": zeros((1, 3), np.int64)}, int8, sizes),
        "EmbeddingInt6": ({"ids": zeros((1, 3), np.int64)}, int6, sizes),
        "ArgMax": ({"x": zeros((3, 48), F)}, {}, {}),
        "SkipRmsNorm": ({"x": zeros((3, 48), F), "weight": zeros(48, F), "update": zeros((3, 48), F)}, {}, {}),
        "Attention": ({"packed": packed, "bias": zeros((9, 30), F)} | past | sides | turns, {}, heads),
        "DraftAttention": ({"packed": packed, "bias": zeros((9, 30), F)} | sides | turns, {}, heads | {"own": 1}),
    }
    rings = {"keys": (2, 256, 16), "values": (4, 256, 32), "updates": (4, 256, 32), "inputs": (1, 256, 192)}
    rings |= {"decays": (1, 256, 8), "states": (1, 256, 32), "marks": (1, 256, 1)}
    made["GatedDeltaRule"] = (
        {"packed": zeros((1, 9, 328), F), "mask": np.where(np.tri(9), 0, HIDDEN).astype(F)}
        | past
        | {name: zeros((1, *shape), F) for name, shape in rings.items()},
        {"bias": zeros(4, F), "rate": zeros(4, F), "norm": zeros(32, F), "tap0": zeros(192, F), "tap1": zeros(192, F)},
        {"key_heads": 2, "heads": 4, "key_width": 16, "width": 32},
    )
    feeds, constants, attributes = made["GatedDeltaRule"]
    made["StateSpace"] = (
        {name: x for name, x in feeds.items() if name != "updates"} | {"packed": zeros((1, 9, 324), F)},
        constants | {"skip": zeros((4, 1, 1), F), "norm": zeros(128, F), "shift": zeros(192, F)},
        attributes,
    )
    made["ShortConv"] = (
        {"packed": zeros((1, 9, 120), F), "mask": feeds["mask"], "inputs": zeros((1, 1, 12, 40), F)} | past,
        {"tap0": zeros(40, F), "tap1": zeros(40, F)},
        {"ring": 1},
    )
    feeds, constants, attributes = made[kind.removesuffix("Float16")]
    return OperatorCase(kind, feeds, constants, dict[str, Any](attributes))


def z(*shape: int, dtype: Any = F) -> Any:
    return np.zeros(shape, dtype)


# Operator, what is given instead (a float or an int: an attribute), and words of the message.
TABLES = ("EmbeddingInt8", "EmbeddingInt6")
EXPERTS = ("ExpertsInt8", "ExpertsInt6", "ExpertsInt4", "ExpertsBlocks")
LINEAR = ("LinearInt8", "LinearInt6", "LinearInt4")
MAPS = (*LINEAR, *TABLES)
BLOCKS = ("LinearBlocks", "EmbeddingBlocks")
WITHOUT = dict.fromkeys(("multipliers", "minima", "minimum_multipliers"))
CACHED = ("Attention", "AttentionFloat16", "DraftAttention", "DraftAttentionFloat16")
WRITES, READS = CACHED[:2], CACHED[2:]
CONV = ("ShortConv",)
STATES = RULE, SPACE = ("GatedDeltaRule", "StateSpace")
# Two sequences of 4 and 5 rows
SEVERAL = {"keys": "two", "values": "two", "past": np.array([3, 21]), "counts": np.array([4, 5])}
WRONG: list[tuple[tuple[str, ...], dict[str, Any], str]] = [
    (MAPS, {"in_features": 0}, r"in_features 0 and out_features 50, expected 1 to 131072 and 1 to 4194304"),
    (MAPS, {"in_features": 2**40}, "in_features 1099511627776"),
    (MAPS, {"out_features": -5}, "out_features 18446744073709551611, expected"),
    (MAPS, {"out_features": 51}, r" float32 \[50\], expected float32 \[51\]"),
    (MAPS, {"out_features": 65}, r"codes u?int8 \[2, \d+, [^]]* 4\], expected u?int8 \[3, \d+, [^]]* 4\]"),
    (EXPERTS, {"maps": 0}, "maps 0, expected 1 to 4096"),
    (EXPERTS, {"maps": 4097}, "maps 4097, expected 1 to 4096"),
    (EXPERTS, {"maps": 3}, r"codes u?int8 \[4, [^]]*\], expected u?int8 \[6, "),
    (EXPERTS, {"shift": z(50)}, r"a bias float32 \[50\], expected float32 \[100\]"),
    (EXPERTS, {"chosen": np.array([[0, 1], [1, 2], [0, 0]])}, "expert 2, expected 0 to 1"),
    (EXPERTS, {"chosen": np.array([[0, 1], [1, -1], [0, 0]])}, "expert -1, expected 0 to 1"),
    (EXPERTS, {"chosen": z(3, 0, dtype=np.int64), "shares": z(3, 0)}, r"chosen experts int64 \[3, 0\]"),
    (EXPERTS, {"chosen": z(2, 2, dtype=np.int64)}, r"rows float32 \[3, \d+\], expected float32 \[2, \d+\]"),
    (EXPERTS, {"shares": z(3, 1)}, r"shares float32 \[3, 1\], expected float32 \[3, 2\]"),
    (MAPS, {"mix": 12}, r"mix 12 of \d\d inputs, expected 0, or a divisor of 8, 16 or 32"),
    (("LinearInt8", "LinearInt6", *TABLES), {"mix": 16}, "mix 16 of 40 inputs"),
    (MAPS, {"mix": 8.0}, "mix of another type, expected an int"),
    (MAPS, {"in_features": "40"}, "in_features of another type"),
    (MAPS, {"activation": 5}, "activation 5, expected 0 to 4"),
    (MAPS, {"activation": 2**32}, "activation 4294967296, expected"),
    (LINEAR, {"limit": 7.0}, "limit 7.000000, expected 0, or more of a gated map"),
    (LINEAR, {"limit": -1.0}, "limit -1.000000"),
    (LINEAR, {"alpha": float("nan")}, "alpha nan, expected a finite number"),
    (MAPS, {"gated": 1}, "a gated map of 50 outputs, expected a multiple of 32"),
    (("LinearInt4",), {"block_size": 16}, "block_size 16 of 64 inputs, expected a divisor of 32, 64 or 128"),
    (("LinearInt4",), {"block_size": 128}, "block_size 128 of 64 inputs"),
    (("LinearInt4",), {"block_size": -32}, "block_size 18446744073709551584"),
    (("LinearInt4",), {"scales": z(2, 1, 32, dtype=H)}, r"scales float16 \[2, 1, 32\], expected float16 \[2, 2, 32\]"),
    (("LinearInt4",), {"zeros": z(2, 2, 31, dtype=U)}, r"zero points uint8 \[2, 2, 31\], expected uint8 \[2, 2, 32\]"),
    (("LinearInt4",), {"codes": z(2, 8, 32, dtype=U)}, r"codes uint8 \[2, 8, 32\], expected uint8 \[2, 8, 32, 4\]"),
    (("LinearInt8", "EmbeddingInt8"), {"codes": z(2, 10, 32, 4, dtype=U)}, r"tensor\(uint8\)"),
    (("LinearInt8", "LinearInt6", *TABLES), {"scales": z(49)}, r"scales float32 \[49\], expected float32 \[50\]"),
    (("LinearInt8", "LinearInt6", *TABLES), {"scales": z(0)}, r"scales float32 \[0\]"),
    (LINEAR, {"shift": z(50, 1)}, r"a bias float32 \[50, 1\], expected float32 \[50\]"),
    (LINEAR, {"x": z(3, 39)}, r"rows float32 \[3, 39\], expected float32 \[.., \d\d\]"),
    (LINEAR, {"x": np.array(F(1))}, r"rows float32 \[\]"),
    (LINEAR, {"x": z(3, 40, dtype=H)}, r"tensor\(float16\)"),
    (
        ("LinearInt6", "EmbeddingInt6"),
        {"codes": z(2, 2, 2, 3, 16, 4, dtype=U)},
        r"expected uint8 \[2, 3, 2, 3, 16, 4\]",
    ),
    (BLOCKS, {"bits": 5}, "bits 5, expected 4, 6 or 8"),
    (BLOCKS, {"bits": 6}, r"codes uint8 \[2, 32, 32, 4\], expected uint8 \[2, 16, 2, 3, 16, 4\]"),
    (BLOCKS, {"bits": 8}, r"codes uint8 \[2, 32, 32, 4\], expected uint8 \[2, 64, 32, 4\]"),
    (BLOCKS, {"offset": 64}, "offset 64, expected 0 to 63"),
    (BLOCKS, {"offset": -1}, "offset -1"),
    (BLOCKS, {"mix": 8}, "mix 8, expected 0"),
    (BLOCKS, {"block_size": 64}, "block_size 64, expected 32, or 16 with multipliers"),
    (BLOCKS, {"block_size": 16}, r"multipliers int8 \[2, 8, 32\], expected int8 \[2, 16, 32\]"),
    (BLOCKS, {"in_features": 288}, "in_features 288, expected a multiple of 256 where there are multipliers"),
    (BLOCKS, {"in_features": 48, **WITHOUT}, "in_features 48, expected a multiple of 32"),
    (BLOCKS, {"in_features": 512}, r"expected uint8 \[2, 64, 32, 4\]"),
    (BLOCKS, {"out_features": 65}, r"expected uint8 \[3, 32, 32, 4\]"),
    (BLOCKS, {"gated": 1}, "a gated map of 50 outputs, expected a multiple of 32"),
    (BLOCKS, {"minimum_multipliers": None}, "multipliers of scales or of minima alone, expected both, or no minima"),
    (BLOCKS, {"minima": None}, "multipliers of scales or of minima alone"),
    (BLOCKS, {"multipliers": None}, "multipliers of scales or of minima alone"),
    (BLOCKS, {"scales": z(2, 8, 32, dtype=H)}, r"scales float16 \[2, 8, 32\], expected float16 \[2, 1, 32\]"),
    (BLOCKS, {"minima": z(2, 1, 31, dtype=H)}, r"minima float16 \[2, 1, 31\], expected float16 \[2, 1, 32\]"),
    (BLOCKS, {"codes": z(2, 32, 32, 4, dtype=np.int8)}, r"tensor\(int8\)"),
    (("LinearBlocks",), {"x": z(3, 255)}, r"rows float32 \[3, 255\], expected float32 \[.., 256\]"),
    (("LinearBlocks",), {"shift": z(51)}, r"a bias float32 \[51\], expected float32 \[50\]"),
    (("EmbeddingBlocks",), {"ids": np.array([50])}, "id 50, expected -50 to 49"),
    (("EmbeddingInt8",), {"gated": 1, "out_features": 64, "scales": z(64)}, "a gated table, expected gated 0"),
    (TABLES, {"ids": np.array([50])}, "id 50, expected -50 to 49"),
    (TABLES, {"ids": np.array([-51])}, "id -51"),
    (TABLES, {"ids": np.array([-(2**63)])}, "id -9223372036854775808"),
    (TABLES, {"ids": z(3, dtype=np.int32)}, r"tensor\(int32\)"),
    (
        ("SkipRmsNorm",),
        {"x": z(3, 40), "weight": z(40), "update": None},
        r"rows float32 \[3, 40\], expected .* multiple of 16",
    ),
    (("SkipRmsNorm",), {"x": z(3, 0), "weight": z(0), "update": None}, r"rows float32 \[3, 0\]"),
    (("ArgMax",), {"x": z(3, 0)}, r"rows float32 \[3, 0\], expected float32 \[.., 1 or more\]"),
    (("ArgMax",), {"x": np.array(F(1))}, r"rows float32 \[\]"),
    (("ArgMax",), {"x": z(3, 48, dtype=H)}, r"tensor\(float16\)"),
    (("SkipRmsNorm",), {"x": np.array(F(1))}, r"rows float32 \[\]"),
    (("SkipRmsNorm",), {"weight": z(32)}, r"a weight float32 \[32\], expected float32 \[48\]"),
    (("SkipRmsNorm",), {"update": z(2, 48)}, r"an update float32 \[2, 48\], expected float32 \[3, 48\]"),
    (("SkipRmsNorm", *CACHED), {"eps": -1.0}, "eps"),
    (("SkipRmsNorm", *CACHED), {"eps": float("nan")}, "eps nan, expected"),
    (("SkipRmsNorm", *CACHED), {"eps": 1}, "eps of another type, expected a float"),
    (CACHED, {"heads": 300}, r"packed rows float32 \[1, 9, 320\], expected"),
    (CACHED, {"heads": 1026}, "1026 heads, 2 key heads, expected up to 1024 heads, up to 256 to a key head"),
    (CACHED, {"heads": 257, "kv_heads": 1}, "257 heads, 1 key heads"),
    (CACHED, {"heads": -1}, "18446744073709551615 heads"),
    (CACHED, {"heads": 7}, "7 heads, 2 key heads"),
    (CACHED, {"kv_heads": 0}, "6 heads, 0 key heads"),
    (CACHED, {"width": 24}, "a head width of 24, expected a multiple of 16 up to 1024"),
    (CACHED, {"width": 2**40}, "a head width of 1099511627776"),
    (CACHED, {"scale": float("inf")}, "scale inf, expected a finite number"),
    (CACHED, {"cap": -2.0}, "a negative cap"),
    (CACHED, {"norm_last": 0.5}, "norm_last of another type"),
    (CACHED, {"packed": z(1, 9, 16)}, r"packed rows float32 \[1, 9, 16\], expected float32 \[1, 9, 320\]"),
    (CACHED, {"packed": z(2, 9, 320)}, r"packed rows float32 \[2, 9, 320\]"),
    (CACHED, {"packed": z(9, 320)}, r"packed rows float32 \[9, 320\]"),
    (CACHED, {"bias": z(3, 30)}, r"a bias float32 \[3, 30\], expected float32 \[.., 9, \d to 4\d\]"),
    (CACHED, {"bias": z(9, 50)}, r"a bias float32 \[9, 50\]"),
    (CACHED, {"bias": z(9, 0)}, r"a bias float32 \[9, 0\]"),
    (CACHED, {"bias": z(2, 9, 30)}, r"a bias float32 \[2, 9, 30\]"),
    (CACHED, {"bias": z(270)}, r"a bias float32 \[270\]"),
    (CACHED, {"keys": "none"}, r"values float\d\d \[1, 2, 40, 32\], expected float\d\d \[1, 2, 0, 32\]"),
    (CACHED, {"keys": "flat"}, r"keys float\d\d \[1, 80, 32\]"),
    (CACHED, {"values": "narrow"}, r"values float\d\d \[1, 2, 40, 16\], expected float\d\d \[1, 2, 40, 32\]"),
    (CACHED, {"keys": z(1, 2, 40, 32, dtype=np.float64)}, r"tensor\(double\)"),
    (CACHED, {"cos": None}, r"cos nothing, expected float32 \[9, 0\]"),
    (CACHED, {"sin": None}, r"sin nothing, expected float32 \[9, 8\]"),
    (CACHED, {"cos": z(9, 17), "sin": z(9, 17)}, r"cos float32 \[9, 17\], expected up to 16 numbers a row"),
    (CACHED, {"cos": z(8, 8), "sin": z(8, 8)}, r"cos float32 \[8, 8\], expected float32 \[9, 8\]"),
    (CACHED, {"cos": np.array(F(1)), "sin": np.array(F(1))}, r"cos float32 \[\]"),
    (CACHED, {"sinks": z(5)}, r"sinks float32 \[5\], expected float32 \[6\]"),
    (CACHED, {"query_norm": z(31)}, r"a norm of queries float32 \[31\], expected float32 \[32\]"),
    (CACHED, {"key_norm": z(64)}, r"a norm of keys float32 \[64\]"),
    (WRITES, {"past": np.array([32])}, "9 rows after 32 slots, expected as many as a cache of 40 slots has left"),
    (WRITES, {"past": np.array([2**63 - 1])}, "9 rows after 9223372036854775807 slots"),
    (WRITES, {"past": np.array([-1])}, "9 rows after -1 slots"),
    (WRITES, {"past": np.array([1, 2])}, r"a past length int64 \[2\], expected one int64"),
    (WRITES, {"past": z(0, dtype=np.int64)}, r"a past length int64 \[0\]"),
    (WRITES, {"ring": 1, "past": np.array([-1])}, "9 rows after -1 slots"),
    (WRITES, {"ring": 1, "keys": "few", "values": "few", "bias": z(9, 8)}, "9 rows after 21 slots, .* of 8 slots"),
    (WRITES, {"past": np.array(0), "keys": "few", "values": "few", "bias": z(9, 8)}, "9 rows after 0 slots"),
    (WRITES, SEVERAL | {"past": z(3, dtype=np.int64)}, r"past lengths int64 \[3\], expected int64 \[2\]"),
    (WRITES, SEVERAL | {"counts": z(1, dtype=np.int64)}, r"rows of each sequence int64 \[1\], expected int64 \[2\]"),
    (WRITES, SEVERAL | {"counts": np.array([4, 4])}, "8 rows of all sequences, expected 9"),
    (WRITES, SEVERAL | {"counts": np.array([4, 6])}, "6 rows of a sequence after 21 slots, expected up to 5 after up"),
    (WRITES, SEVERAL | {"counts": np.array([-1, 9])}, "-1 rows of a sequence after 3 slots"),
    (WRITES, SEVERAL | {"past": np.array([3, 22])}, "5 rows of a sequence after 22 slots, expected .* up to 21"),
    (WRITES, SEVERAL | {"past": np.array([-1, 2])}, "4 rows of a sequence after -1 slots"),
    (WRITES, SEVERAL | {"past": np.array([3, 36]), "bias": z(9, 49)}, "5 rows of a sequence after 36 slots"),
    (WRITES, SEVERAL | {"bias": z(9, 8)}, "a bias of 8 columns, expected a column of each of 9 rows"),
    (WRITES, SEVERAL | {"bias": z(9, 50)}, r"a bias float32 \[9, 50\], expected float32 \[.., 9, 1 to 49\]"),
    (WRITES, SEVERAL | {"ring": 1}, "a ring of several sequences, expected one"),
    (WRITES, SEVERAL | {"counts": None}, r"keys float\d\d \[2, 2, 40, 32\], expected float\d\d \[1, 2, 40, 32\]"),
    (READS, {"bias": z(9, 8)}, r"a bias float32 \[9, 8\], expected float32 \[.., 9, 9 to 49\]"),
    (STATES, {"heads": 5}, "5 heads, 2 key heads, expected up to 1024 heads, a multiple of key heads"),
    (STATES, {"key_heads": 0}, "4 heads, 0 key heads"),
    (STATES, {"key_width": 24}, "a head width of 24, expected a multiple of 16 up to 1024"),
    (STATES, {"width": 2**40}, "a head width of 1099511627776"),
    (STATES, {"eps": -1.0}, "a negative eps"),
    ((RULE,), {"largest_step": 2.5}, "steps up to 2.5"),
    ((RULE,), {"packed": z(1, 9, 327)}, r"packed rows float32 \[1, 9, 327\], expected float32 \[1, 9, 328\]"),
    ((SPACE,), {"packed": z(1, 9, 328)}, r"packed rows float32 \[1, 9, 328\], expected float32 \[1, 9, 324\]"),
    (STATES, {"packed": z(1, 65, 328)}, "65 rows, expected up to 64"),
    (STATES, {"mask": z(9, 8)}, r"a tree mask float32 \[9, 8\], expected float32 \[9, 9\]"),
    (STATES, {"mask": z(9, 9)}, "a mask of row 0, expected that of a tree: the row itself and what its parent sees"),
    (STATES, {"mask": np.full((9, 9), HIDDEN, F)}, "a mask of row 0"),
    (STATES, {"past": np.array(-1)}, "9 rows after -1 in a ring of 256 slots, expected a ring of 256 slots"),
    (STATES, {"past": np.array([1, 2])}, r"a past length int64 \[2\], expected one int64"),
    (STATES, {"keys": z(1, 2, 26, 16)}, "9 rows after 21 in a ring of 26 slots"),
    (STATES, {"keys": z(1, 2, 300, 16), "past": np.array(292)}, "9 rows after 292 in a ring of 300 slots"),
    (STATES, {"keys": z(2, 256, 16)}, "9 rows after 21 in a ring of 0 slots"),
    (STATES, {"values": z(1, 4, 255, 32)}, r"values float32 \[1, 4, 255, 32\], expected float32 \[1, 4, 256, 32\]"),
    (STATES, {"states": z(1, 1, 256, 31)}, r"states float32 \[1, 1, 256, 31\]"),
    (STATES, {"marks": z(1, 1, 256)}, r"marks float32 \[1, 1, 256\]"),
    (STATES, {"decays": z(1, 1, 256, 8, dtype=H)}, r"tensor\(float16\)"),
    (STATES, {"bias": z(3)}, r"a bias of decays float32 \[3\], expected float32 \[4\]"),
    (STATES, {"rate": z(4, 1)}, r"a rate of decays float32 \[4, 1\]"),
    (STATES, {"norm": z(16)}, r"a norm float32 \[16\]"),
    ((SPACE,), {"norm": z(32)}, r"a norm float32 \[32\], expected float32 \[128\]"),
    ((SPACE,), {"skip": z(4, 1)}, r"a skip float32 \[4, 1\], expected float32 \[4, 1, 1\]"),
    ((SPACE,), {"shift": z(191)}, r"a bias of taps float32 \[191\], expected float32 \[192\]"),
    ((SPACE,), {"least": 2.0, "most": 1.0}, "steps of 2.000000 to 1.000000, expected a least one up to the most"),
    ((SPACE,), {"most": float("nan")}, "steps of 0.000000 to nan"),
    ((SPACE,), {"least": float("inf")}, "least inf, expected a finite number"),
    (STATES, {"tap1": z(191)}, r"a tap float32 \[191\], expected float32 \[192\]"),
    (CONV, {"packed": z(1, 9, 119)}, r"packed rows float32 \[1, 9, 119\], expected float32 \[1, 9, 120\]"),
    (CONV, {"mask": z(9, 8)}, r"a tree mask float32 \[9, 8\], expected float32 \[9, 9\]"),
    (CONV, {"inputs": z(1, 2, 12, 40)}, r"inputs float32 \[1, 2, 12, 40\], expected float32 \[1, 1, 12, 40\]"),
    (CONV, {"inputs": z(12, 40)}, r"inputs float32 \[12, 40\], expected float32 \[1, 1, 0, 0\]"),
    (CONV, {"inputs": z(1, 1, 8, 40)}, "9 rows after 21 in 8 slots, expected slots for all of them"),
    (CONV, {"ring": 0}, "9 rows after 21 in 12 slots"),
    (CONV, {"ring": 0, "inputs": z(1, 1, 29, 40)}, "9 rows after 21 in 29 slots"),
    (CONV, {"past": np.array(-1)}, "9 rows after -1 in 12 slots"),
    (CONV, {"past": np.array([1, 2])}, r"a past length int64 \[2\], expected one int64"),
    (CONV, {"tap1": z(41)}, r"a tap float32 \[41\], expected float32 \[40\]"),
    (READS, {"own": 0}, r"packed rows float32 \[1, 9, 320\], expected float32 \[1, 9, 192\]"),
]
SHAPES = {
    "none": (1, 2, 0, 32),
    "flat": (1, 80, 32),
    "narrow": (1, 2, 40, 16),
    "few": (1, 2, 8, 32),
    "two": (2, 2, 40, 32),
}


@pytest.mark.parametrize("kind", CASES)
def test_what_does_not_fit_is_refused_in_one_line(library: Path, kind: str) -> None:
    assert fitting(kind).run(library)
    tried = 0
    for kinds, changes, words in WRONG:
        if kind in kinds:
            tried += 1
            with pytest.raises(Exception, match=words) as caught:
                with_changes(fitting(kind), changes).run(library)
            assert "\n" not in str(caught.value).strip(), words
    assert tried > (2 if kind == "ArgMax" else 5)


def with_changes(case: OperatorCase, changes: dict[str, Any]) -> OperatorCase:
    half = H if case.half else F
    inputs = {n: z(*SHAPES[x], dtype=half) if isinstance(x, str) and x in SHAPES else x for n, x in changes.items()}
    attributes = {n: x for n, x in inputs.items() if isinstance(x, (int, float, str))}
    case = case.changed(**{n: x for n, x in inputs.items() if n not in attributes})
    return replace(case, attributes=case.attributes | attributes)


@pytest.mark.parametrize("kind", [*MAPS, *BLOCKS])
def test_weights_that_are_computed_are_refused(library: Path, kind: str) -> None:
    case = fitting(kind)
    for name in case.constants:
        rest = {n: x for n, x in case.constants.items() if n != name}
        given = replace(case, feeds=case.feeds | {name: case.constants[name]}, constants=rest)
        with pytest.raises(Exception, match="no constants, expected constants|of minima alone"):
            given.run(library)


def test_what_may_not_fit_is_computed_or_refused_in_one_line(library: Path) -> None:
    refused = 0
    for seed in range(SPOILED):
        rng = np.random.default_rng(seed)
        case = spoiled(CASES[list(CASES)[seed % len(CASES)]](rng), rng)
        try:
            case.run(library, threads=2)
        except Exception as error:
            assert str(error).strip() and "\n" not in str(error).strip()
            refused += 1
    assert SPOILED / 2 < refused < SPOILED
