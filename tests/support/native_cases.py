"""Single calls of native operators: random inputs that fit, of odd shapes, and an ONNX Runtime session for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from streamspec.export.file_blocks.kinds import KINDS
from streamspec.export.native.stored_blocks import packed
from streamspec.export.spec.weight_source import StoredBlocks
from tests.support.gguf_blocks import random_blocks

Array = np.ndarray[Any, np.dtype[Any]]
Random = np.random.Generator
DTYPES: dict[str, Any] = {
    "float32": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "float64": TensorProto.DOUBLE,
    "uint8": TensorProto.UINT8,
    "int8": TensorProto.INT8,
    "int32": TensorProto.INT32,
    "int64": TensorProto.INT64,
}
HIDDEN = -10000.0
# Inputs after packed rows, by name. A cache kind's operator has the same ones.
WRITES, READS = ("packed", "bias", "past", "keys", "values"), ("packed", "bias", "keys", "values")
BESIDE = ("multipliers", "minima", "minimum_multipliers", "table")  # of stored blocks
OPTIONAL = ("cos", "sin", "query_norm", "key_norm")  # and sinks, at the end
RINGS = ("keys", "values", "updates", "inputs", "decays", "states", "marks")  # of recurrent layers
PARTS = {"GatedDeltaRule": RINGS, "StateSpace": tuple(name for name in RINGS if name != "updates")}
TAPS = tuple(f"tap{i}" for i in range(8))
INPUTS = {
    **{f"LinearInt{bits}": ("x", "codes", "scales", "shift") for bits in (8, 6)},
    "LinearInt4": ("x", "codes", "scales", "zeros", "shift"),
    **{f"ExpertsInt{bits}": ("x", "chosen", "shares", "codes", "scales", "shift") for bits in (8, 6)},
    "ExpertsInt4": ("x", "chosen", "shares", "codes", "scales", "zeros", "shift"),
    "LinearBlocks": ("x", "codes", "scales", *BESIDE, "shift"),
    "ExpertsBlocks": ("x", "chosen", "shares", "codes", "scales", *BESIDE, "shift"),
    **{f"EmbeddingInt{bits}": ("ids", "codes", "scales") for bits in (8, 6)},
    "EmbeddingBlocks": ("ids", "codes", "scales", *BESIDE),
    "SkipRmsNorm": ("x", "weight", "update"),
    "ArgMax": ("x",),
    **{f"Attention{half}": (*WRITES, *OPTIONAL, "counts", "sinks") for half in ("", "Float16")},
    **{f"DraftAttention{half}": (*READS, *OPTIONAL, "sinks") for half in ("", "Float16")},
    "GatedDeltaRule": ("packed", "mask", "past", *RINGS, "bias", "rate", "norm", *TAPS),
    "StateSpace": ("packed", "mask", "past", *PARTS["StateSpace"], "bias", "rate", "skip", "norm", "shift", *TAPS),
    "ShortConv": ("packed", "mask", "past", "inputs", *TAPS),
}


@dataclass(frozen=True)
class OperatorCase:
    """A node and its inputs by name; names of `INPUTS` that neither has are left out. `constants` are in the graph."""

    kind: str
    feeds: dict[str, Array]
    constants: dict[str, Array]
    attributes: dict[str, Any]

    @property
    def half(self) -> bool:
        return self.kind.endswith("16")

    @property
    def outputs(self) -> int:
        if self.kind in PARTS:
            return 1 + len(PARTS[self.kind])
        return 3 if self.kind.startswith("Attention") else 2 if {"update", "inputs"} & {*self.feeds} else 1

    def changed(self, **inputs: Array | None) -> OperatorCase:
        """With other inputs, where they are now; None leaves one out."""

        def kept(side: dict[str, Array], new: dict[str, Array | None]) -> dict[str, Array]:
            return {name: x for name, x in (side | new).items() if x is not None}

        constants = {name: x for name, x in inputs.items() if name in self.constants}
        feeds = {name: x for name, x in inputs.items() if name not in self.constants}
        return replace(self, feeds=kept(self.feeds, feeds), constants=kept(self.constants, constants))

    def session(self, library: Path, threads: int = 1) -> onnxruntime.InferenceSession:
        """Memory is not pooled, for a sanitizer to see where each tensor ends."""
        there = self.feeds | self.constants
        order = [name if name in there else "" for name in INPUTS[self.kind]]
        while not order[-1]:
            order.pop()
        names = [f"y{i}" for i in range(self.outputs)]
        first = TensorProto.INT64 if self.kind == "ArgMax" else TensorProto.FLOAT
        half = TensorProto.FLOAT16 if self.half else TensorProto.FLOAT
        graph = helper.make_graph(
            [helper.make_node(self.kind, order, names, domain="streamspec", **self.attributes)],
            "g",
            [helper.make_tensor_value_info(n, DTYPES[str(x.dtype)], [None] * x.ndim) for n, x in self.feeds.items()],
            [helper.make_tensor_value_info(n, half if i else first, None) for i, n in enumerate(names)],
            [numpy_helper.from_array(x, n) for n, x in self.constants.items()],
        )
        opsets = [helper.make_opsetid("", 21), helper.make_opsetid("streamspec", 1)]
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = threads, 4
        options.enable_cpu_mem_arena = options.enable_mem_pattern = False
        options.register_custom_ops_library(str(library))
        model = helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
        return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])

    def run(self, library: Path, threads: int = 1) -> list[Array]:
        """The outputs."""
        return list(self.session(library, threads).run(None, self.feeds))


def outputs_of_tiles(outputs: int, gated: bool) -> Array:
    """Which output each of the 32 of a tile is [tiles, 32]; `outputs` or more where it is none."""
    tiles, lane = np.arange(-(-outputs // 32))[:, None], np.arange(32)[None]
    if not gated:
        return np.asarray(32 * tiles + lane)
    return np.asarray(np.where(lane < 16, 16 * tiles + lane, outputs // 2 + 16 * tiles + lane - 16))


def maybe(rng: Random, percent: int) -> bool:
    return bool(rng.integers(100) < percent)


def floats(rng: Random, *shape: int) -> Array:
    return rng.standard_normal(shape).astype(np.float32)


def rows_of(rng: Random, width: int) -> Array:
    """Rows [.., width] of some leading shape, sometimes one of zeros, one of no numbers, or all large or small."""
    n = int(rng.choice([1, 2, 3, 5, 8, 31, 33, 64]))
    x = floats(rng, n, width) * rng.choice([1.0, 1.0, 1e-3, 100.0]).astype(np.float32)
    if maybe(rng, 15):
        x[rng.integers(n)] = 0.0
    if maybe(rng, 10):
        x[rng.integers(n), rng.integers(width)] = rng.choice([np.nan, np.inf, -np.inf])
    leading = [(n,), (1, n), (1, 1, n)] + [(2, n // 2)] * (n % 2 == 0)
    return x.reshape(*leading[rng.integers(len(leading))], width)


def linear(rng: Random, bits: int) -> OperatorCase:
    block, mix = int(rng.choice([32, 64, 128])), int(rng.choice([0, 0, 8, 16, 32]))
    inputs = block * int(rng.integers(1, 4)) if bits == 4 else (mix or 1) * int(rng.integers(1, 200 // (mix or 1)))
    gated = maybe(rng, 40)
    outputs = 32 * int(rng.integers(1, 4)) if gated else int(rng.integers(1, 100))
    at = outputs_of_tiles(outputs, gated)
    tiles, there = len(at), (at < outputs)[:, None, :]
    size = np.float32(0.01 / np.sqrt(inputs))
    if bits == 8:
        codes = rng.integers(-128, 128, (tiles, -(-inputs // 4), 32, 4)).astype(np.int8) * there[..., None]
        beyond = 4 * np.arange(codes.shape[1])[:, None, None] + np.arange(4) >= inputs
        constants = {"codes": np.where(beyond, np.int8(0), codes), "scales": size * rng.random(outputs, np.float32)}
    elif bits == 6:
        codes = rng.integers(0, 256, (tiles, -(-inputs // 16), 2, 3, 16, 4)).astype(np.uint8)
        constants = {"codes": codes, "scales": 4 * size * rng.random(outputs, np.float32)}
    else:
        packed = rng.integers(0, 256, (tiles, inputs // 8, 32, 4)).astype(np.uint8)
        scales = 16 * size * (0.1 + rng.random((tiles, inputs // block, 32)))
        constants = {
            "codes": packed * there[..., None].astype(np.uint8),
            "scales": (scales * there).astype(np.float16),
        }
        if maybe(rng, 50):
            constants["zeros"] = rng.integers(0, 16, scales.shape).astype(np.uint8) * there.astype(np.uint8)
    if maybe(rng, 50):
        constants["shift"] = floats(rng, outputs)
    attributes = {"in_features": inputs, "out_features": outputs, "mix": mix, "gated": int(gated)}
    attributes |= {"activation": int(rng.integers(5))} | ({"block_size": block} if bits == 4 else {})
    if gated and maybe(rng, 30):
        attributes |= {"activation": 0, "alpha": 1.702, "limit": 0.5}
    return OperatorCase(f"LinearInt{bits}", {"x": rows_of(rng, inputs)}, constants, attributes)


def experts(rng: Random, make: Callable[[Random], OperatorCase]) -> OperatorCase:
    one, maps = make(rng), int(rng.integers(1, 9))
    constants = {name: x for name, x in one.constants.items() if name == "table"}
    for name, x in ((name, x) for name, x in one.constants.items() if name != "table"):
        each = [x // (i + 1) if x.dtype.kind in "iu" else x * x.dtype.type((i + 1) / maps) for i in range(maps)]
        constants[name] = np.concatenate(each).astype(x.dtype)
    n, active = int(rng.choice([1, 2, 7, 33])), int(rng.integers(1, maps + 1))
    chosen = np.stack([rng.permutation(maps)[:active] for _ in range(n)])
    of_choices = maybe(rng, 40)
    shape = (n, active, one.attributes["in_features"]) if of_choices else (n, one.attributes["in_features"])
    feeds = {"x": floats(rng, *shape), "chosen": chosen}
    if maybe(rng, 50):
        feeds["shares"] = floats(rng, n, active)
    return OperatorCase(one.kind.replace("Linear", "Experts"), feeds, constants, one.attributes | {"maps": maps})


def of_blocks(stored: StoredBlocks, gated: bool = False) -> tuple[dict[str, Array], dict[str, Any]]:
    """Constants and attributes of an operator over these rows."""
    kind, tiles = KINDS[stored.kind], packed(stored, gated)
    constants = {name: x for name, x in vars(tiles).items() if x is not None}
    if kind.table:
        constants["table"] = np.array(kind.table, np.int8)
    own = {"in_features": stored.columns, "out_features": len(stored.data), "gated": int(gated)}
    return constants, own | {"bits": kind.bits, "block_size": kind.block, "offset": kind.offset}


def blocks(rng: Random) -> OperatorCase:
    kind, gated = str(rng.choice([*KINDS])), maybe(rng, 40)
    inputs = KINDS[kind].weights * int(rng.integers(1, 3 if KINDS[kind].weights == 256 else 9))
    outputs = 32 * int(rng.integers(1, 4)) if gated else int(rng.integers(1, 100))
    constants, attributes = of_blocks(random_blocks(rng, kind, outputs, inputs, 0.01 / np.sqrt(inputs)), gated)
    if maybe(rng, 50):
        constants["shift"] = floats(rng, outputs)
    attributes["activation"] = int(rng.integers(5))
    return OperatorCase("LinearBlocks", {"x": rows_of(rng, inputs)}, constants, attributes)


def embedding(rng: Random, suffix: str, make: Callable[[Random], OperatorCase]) -> OperatorCase:
    table = make(rng)
    while table.attributes["gated"]:
        table = make(rng)
    constants = {name: x for name, x in table.constants.items() if name != "shift"}
    attributes = {name: x for name, x in table.attributes.items() if name not in ("gated", "activation")}
    outputs = attributes["out_features"]
    shape = [(), (1,), (1, 5), (3, 2), (1, 0)][rng.integers(5)]
    ids = np.asarray(rng.integers(-outputs, outputs, shape), np.int64)
    return OperatorCase(f"Embedding{suffix}", {"ids": ids}, constants, attributes)


def norm(rng: Random) -> OperatorCase:
    x = rows_of(rng, 16 * int(rng.integers(1, 20)))
    feeds = {"x": x, "weight": floats(rng, x.shape[-1])}
    if maybe(rng, 60):
        feeds["update"] = floats(rng, *x.shape)
    return OperatorCase("SkipRmsNorm", feeds, {}, {"eps": float(rng.choice([1e-6, 1e-2, 0.0]))})


def argmax(rng: Random) -> OperatorCase:
    x = rng.integers(-9, 9, (int(rng.choice([1, 2, 9])), int(rng.choice([1, 15, 64, 1023, 1025, 5000])))).astype(
        np.float32
    )
    x = np.where(rng.random(x.shape) < 0.2, rng.choice([np.nan, -np.inf, 30.0]), x * rng.choice([1.0, 0.0, np.nan]))
    if maybe(rng, 20):
        x[:] = rng.choice([-np.inf, np.inf, np.nan])
    return OperatorCase("ArgMax", {"x": x.astype(np.float32)}, {}, {})


def attention(rng: Random, writes: bool, half: bool) -> OperatorCase:
    kv_heads, width = int(rng.integers(1, 4)), 16 * int(rng.choice([1, 2, 4, 5]))
    heads = kv_heads * int(rng.choice([1, 2, 3, 7, 25]))
    n = int(rng.choice([1, 1, 2, 3, 7, 8, 33, 64]))
    own, ring = writes or maybe(rng, 60), writes and maybe(rng, 40)
    slots = (n if writes else not own) + int(rng.choice([0, 1, 15, 16, 40]))  # none left, or many
    past = int(rng.integers(1000)) if ring else int(rng.choice([0, (slots - n) // 2, slots - n]))
    seen = min(slots, past + n) if writes else int(rng.integers(int(not own), slots + 1))
    columns = seen + n * (own and not writes)
    bias = np.where(rng.random((n, columns)) < 0.4, HIDDEN, rng.choice([0.0, -3.0, 2.0], (n, columns)))
    bias[np.arange(n), rng.integers(columns, size=n)] = 0.0  # every row sees something
    feeds = {
        "packed": floats(rng, 1, n, (heads + 2 * kv_heads * own) * width),
        "bias": bias.astype(np.float32).reshape(*[(), (1,), (1, 1)][rng.integers(3)], n, columns),
        **({"past": np.array(past).reshape([(), (1,)][rng.integers(2)])} if writes else {}),
        **{name: floats(rng, 1, kv_heads, slots, width) for name in ("keys", "values")},
    }
    if half:
        if own and maybe(rng, 20):
            feeds["packed"][0, 0, -1] = 1e6  # more than float16 holds; a value
        feeds |= {name: feeds[name].astype(np.float16) for name in ("keys", "values")}
    if maybe(rng, 60):
        angles = rng.random((n, int(rng.integers(1, width // 2 + 1)))) * 6.3
        feeds |= {"cos": np.cos(angles).astype(np.float32), "sin": np.sin(angles).astype(np.float32)}
    for name in ("query_norm", "key_norm"):
        if maybe(rng, 50):
            feeds[name] = floats(rng, width)
    attributes: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads, "width": width}
    attributes |= {"scale": float(width**-0.5), "cap": float(rng.choice([0.0, 0.0, 3.0])), "eps": 1e-5}
    attributes |= {name: int(maybe(rng, 50)) for name in ("interleaved", "norm_last")}
    attributes |= {"ring": int(ring)} if writes else {"own": int(own)}
    if maybe(rng, 40):
        feeds["sinks"] = 3 * floats(rng, heads)
    kind = ("Attention" if writes else "DraftAttention") + "Float16" * half
    return OperatorCase(kind, feeds, {}, attributes)


def random_mask(rng: Random, n: int) -> Array:
    """[n, n] of a tree, sometimes a text."""
    seen, chain = np.eye(n, dtype=bool), maybe(rng, 40)
    for row in range(1, n):
        parent = row - 1 if chain or maybe(rng, 50) else int(rng.integers(-1, row))
        seen[row] |= seen[parent] if parent >= 0 else False
    return np.where(seen, 0.0, HIDDEN).astype(np.float32)


def recurrent(rng: Random, kind: str) -> OperatorCase:
    """Rings whose every block has a state, the newest whole one sometimes none yet."""
    key_heads, n = int(rng.integers(1, 4)), int(rng.choice([1, 1, 2, 5, 9, 33, 64]))
    group = int(rng.choice([1, 2, 3] if kind == "GatedDeltaRule" else [1, 3, 13]))
    heads, past = key_heads * group, int(rng.choice([0, 1, 8, 60, 63, 64, 100, 128, 250, 1000]))
    key_width, width = (16 * int(rng.choice([1, 2, 4, 5])) for _ in range(2))
    channels, taps = 2 * key_heads * key_width + heads * width, int(rng.choice([1, 2, 4, 8]))
    slots = past + n if past + n < 256 and maybe(rng, 50) else 256
    keys = floats(rng, 1, key_heads, slots, key_width)
    decays = np.concatenate([-np.exp(rng.uniform(-6, 1, (slots, heads))), rng.random((slots, heads))], 1)
    feeds = {
        "packed": floats(rng, 1, n, channels + heads * (width + (2 if kind == "GatedDeltaRule" else 1))),
        "mask": random_mask(rng, n),
        "past": np.array(past).reshape([(), (1,)][rng.integers(2)]),
        "keys": keys / np.linalg.norm(keys, axis=-1, keepdims=True),
        "values": floats(rng, 1, heads, slots, width),
        "updates": floats(rng, 1, heads, slots, width),
        "inputs": floats(rng, 1, 1, slots, channels),
        "decays": decays.astype(np.float32)[None, None],
        "states": floats(rng, 1, 1, slots, heads * key_width * width // 64),
        "marks": rng.integers(2, size=(1, 1, slots, 1)).astype(np.float32),
    }
    constants = {"bias": floats(rng, heads), "rate": -np.exp(rng.uniform(-6, 1, heads)).astype(np.float32)}
    constants |= {name: floats(rng, channels) for name in TAPS[:taps]}
    attributes = {"key_heads": key_heads, "heads": heads, "key_width": key_width, "width": width, "eps": 1e-5}
    if kind == "GatedDeltaRule":
        attributes |= {"largest_step": float(rng.choice([1.0, 2.0]))}
        return OperatorCase(kind, feeds, constants | {"norm": floats(rng, width)}, attributes)
    del feeds["updates"]
    constants |= {"skip": floats(rng, heads, 1, 1)}
    constants |= {"norm": floats(rng, heads * width)} if maybe(rng, 70) else {}
    constants |= {"shift": floats(rng, channels)} if maybe(rng, 50) else {}
    limits: dict[str, Any] = {"least": 0.1, "most": 1.5} if maybe(rng, 50) else {}
    return OperatorCase(kind, feeds, constants, attributes | limits)


def convolution(rng: Random) -> OperatorCase:
    """Of the whole text's rows, or in a ring."""
    width, n = int(rng.choice([1, 5, 40, 300, 520])), int(rng.choice([1, 1, 2, 5, 33, 70]))
    taps, past = int(rng.choice([1, 3, 4, 8])), int(rng.choice([0, 1, 2, 60, 1000]))
    ring = maybe(rng, 50)
    slots = max(n, taps) + int(rng.integers(3)) if ring else past + n + int(rng.integers(3))
    feeds = {
        "packed": floats(rng, 1, n, 3 * width),
        "mask": random_mask(rng, n),
        "past": np.array(past).reshape([(), (1,)][rng.integers(2)]),
        "inputs": floats(rng, 1, 1, slots, width),
    }
    weights = {name: floats(rng, width) for name in TAPS[:taps]}
    return OperatorCase("ShortConv", feeds, weights, {"ring": int(ring)})


def together(cases: Sequence[OperatorCase], rng: Random) -> OperatorCase:
    """One call of attention for sequences of equal sizes, each with a cache of its own; bias that nobody reads is no
    number."""
    n, past = ([case.feeds[name].reshape(-1) for case in cases] for name in ("counts", "past"))
    ends, slots = np.cumsum(n), cases[0].feeds["keys"].shape[2]
    longest = int(rng.integers(max(past)[0], slots + 1))
    bias = np.full((int(ends[-1]), longest + int(ends[-1])), np.nan, np.float32)
    for case, count, before, end in zip(cases, n, past, ends, strict=True):
        own, begin = case.feeds["bias"].reshape(int(count[0]), -1), end - int(count[0])
        bias[begin:end, : before[0]] = own[:, : before[0]]
        bias[begin:end, longest + begin : longest + end] = own[:, before[0] :]
    joined = {name: np.concatenate([case.feeds[name] for case in cases], axis) for name, axis in JOINED.items()}
    turns = {
        name: np.concatenate([case.feeds[name] for case in cases]) for name in ("cos", "sin") if name in cases[0].feeds
    }
    return cases[0].changed(bias=bias, counts=np.concatenate(n), past=np.concatenate(past), **joined, **turns)


JOINED = {"packed": 1, "keys": 0, "values": 0}
CASES: dict[str, Callable[[Random], OperatorCase]] = {
    "LinearInt8": lambda rng: linear(rng, 8),
    "LinearInt6": lambda rng: linear(rng, 6),
    "LinearInt4": lambda rng: linear(rng, 4),
    **{f"ExpertsInt{bits}": lambda rng, bits=bits: experts(rng, lambda rng: linear(rng, bits)) for bits in (8, 6, 4)},
    "LinearBlocks": blocks,
    "ExpertsBlocks": lambda rng: experts(rng, blocks),
    "EmbeddingInt8": lambda rng: embedding(rng, "Int8", lambda rng: linear(rng, 8)),
    "EmbeddingInt6": lambda rng: embedding(rng, "Int6", lambda rng: linear(rng, 6)),
    "EmbeddingBlocks": lambda rng: embedding(rng, "Blocks", blocks),
    "SkipRmsNorm": norm,
    "ArgMax": argmax,
    "Attention": lambda rng: attention(rng, True, False),
    "AttentionFloat16": lambda rng: attention(rng, True, True),
    "DraftAttention": lambda rng: attention(rng, False, False),
    "DraftAttentionFloat16": lambda rng: attention(rng, False, True),
    **{kind: lambda rng, kind=kind: recurrent(rng, kind) for kind in PARTS},
    "ShortConv": convolution,
}


def spoiled(case: OperatorCase, rng: Random) -> OperatorCase:
    """With one input or attribute that may not fit: another size, type, rank, or a number out of range."""
    names = [*case.feeds, *case.constants, *case.attributes]
    name = str(rng.choice(names))
    if name in case.attributes:
        others = [-1, 0, 1, 7, 8, 33, 2**40, -(2**62), 0.5, float("nan"), float("inf"), "text"]
        return replace(case, attributes=case.attributes | {name: others[rng.integers(len(others))]})
    x = (case.feeds | case.constants)[name]
    kind = rng.integers(6)
    if kind == 0:
        return case.changed(**{name: None})
    if kind == 1:
        with np.errstate(invalid="ignore"):
            return case.changed(**{name: x.astype(str(rng.choice(list(DTYPES))))})
    if kind == 2:
        return case.changed(**{name: x[None]})
    if kind == 3:
        return case.changed(**{name: x.reshape(-1)})
    if x.dtype == np.int64:
        return case.changed(**{name: x + rng.choice([-(2**62), -1, 1, 33, 1000, 2**62])})
    if x.ndim == 0:
        return case.changed(**{name: np.zeros((0,), x.dtype)})
    axis = int(rng.integers(x.ndim))
    sizes = [0, 1, x.shape[axis] - 1, x.shape[axis] + 1, 2 * x.shape[axis]]
    wanted = [*x.shape]
    wanted[axis] = max(0, sizes[rng.integers(len(sizes))])
    return case.changed(**{name: np.resize(x, wanted) if x.size else np.zeros(wanted, x.dtype)})
