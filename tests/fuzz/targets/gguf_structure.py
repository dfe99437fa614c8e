"""GGUF files of every architecture whose structure is spoilt: keys of other types, out of range, absent or of another
architecture; tensors of other shapes, names and quantizations, or absent. The bytes themselves are well-formed.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any

from tests.fuzz.mutate import NUMBERS

ALIGNMENT = 32
WORDS = ["", "x", "linear", "yarn", "longrope", "none", "llama", "gpt2", "x" * 5000, "\n\x1b[31m", "$A", "a:b"]
FLOATS = [0.0, -1.0, 0.5, 1.0, 1e-30, 1e30, math.inf, -math.inf, math.nan]
F32, F16, Q8_0, I32 = 0, 1, 8, 26  # ggml's numbers
BLOCKS = {F32: (1, 4), F16: (1, 2), Q8_0: (32, 34), I32: (1, 4)}  # values, bytes


@dataclass
class Stored:
    """A tensor: `shape` with rows first, and the bytes of its values."""

    name: str
    shape: list[int]
    kind: int
    data: bytes


@dataclass
class Structure:
    """What a file holds: metadata by whole names, tensors in order."""

    metadata: dict[str, Any]
    tensors: list[Stored]

    def copy(self) -> Structure:
        """A structure that can be changed."""
        values = {key: list(value) if isinstance(value, list) else value for key, value in self.metadata.items()}
        return Structure(values, [Stored(one.name, list(one.shape), one.kind, one.data) for one in self.tensors])


@cache
def structures() -> list[Structure]:
    """Good ones of all architectures, with a tokenizer of either kind."""
    from tests.support import gguf_files as files
    from tests.support.gguf_cases import CASES, made

    found = []
    for number, case in enumerate(CASES):
        _, architecture, keys, tensors = made(case)
        vocabulary = files.sentencepiece_vocabulary() if number % 2 else files.bpe_vocabulary()
        rows = len(vocabulary["tokens"])
        for name in {"token_embd.weight", "output.weight"} & tensors.keys():
            tensors[name] = tensors[name].repeat(2, axis=0)[:rows]
        metadata = {"general.architecture": architecture, "tokenizer.chat_template": "{{ messages[0].content }}"}
        metadata |= {key if key.startswith(files.XIELU) else f"{architecture}.{key}": v for key, v in keys.items()}
        metadata |= {f"tokenizer.ggml.{key}": v for key, v in (vocabulary | files.special_keys()).items()}
        stored = [Stored(name, list(v.shape), F32, v.astype("<f4").tobytes()) for name, v in tensors.items()]
        found.append(Structure(metadata, stored))
    return found


def spoilt(random: Random) -> bytes:
    """The file of a good structure with a few changes."""
    made = random.choice(structures()).copy()
    other = random.choice(structures())
    for _ in range(random.choice((1, 1, 1, 2, 3, 6))):
        if random.random() < 0.75:
            _change_key(random, made.metadata, other.metadata)
        elif made.tensors:
            _change_tensor(random, made.tensors, other.tensors)
    return written(made)


def _change_key(random: Random, metadata: dict[str, Any], other: dict[str, Any]) -> None:
    kind, key = random.randrange(12), random.choice(list(metadata))
    if kind < 4:
        metadata[key] = _bent(random, metadata[key])
    elif kind < 8:
        metadata[key] = random.choice(
            (random.choice(NUMBERS), random.choice(FLOATS), random.choice(WORDS), random.random() < 0.5, [])
        )
    elif kind == 8 and len(metadata) > 1:
        del metadata[key]
    elif kind == 9:  # a key that another architecture has
        name, value = random.choice(list(other.items()))
        own = str(metadata.get("general.architecture"))
        metadata[name.replace(str(other["general.architecture"]), own, 1)] = value
    elif kind == 10:
        metadata[key] = random.choice(list(metadata.values()))
    else:  # the same file, said to be of another architecture
        own, name = str(metadata.get("general.architecture")), str(other["general.architecture"])
        for old in [old for old in metadata if old.startswith(own + ".")]:
            metadata[name + old.removeprefix(own)] = metadata.pop(old)
        metadata["general.architecture"] = name


def _bent(random: Random, value: Any) -> Any:
    """A value near `value`, or of a type near its type."""
    if isinstance(value, bool):
        return random.choice((not value, int(value), str(value), [value] * 2))
    if isinstance(value, (int, float)) and math.isfinite(value):
        layers = [value] * random.choice((1, 2, 4, 7))
        choices = (value + 1, value - 1, -value, value * 2, value // 2, value * (1 << 20), float(value), str(value))
        return random.choice((*choices, layers, [*layers[1:], 0]))
    if isinstance(value, list) and value:
        at, longer = random.randrange(len(value)), random.choice((2, 50) if len(value) < 20 else (2,))
        one = random.choice((value[0], value[-1], 0, -1, "", 1e9, math.nan, 1 << 31))
        return random.choice((value[:-1], value * longer, value[::-1], value[0], [*value[:at], one, *value[at + 1 :]]))
    return random.choice((f"{value}x", str(value).upper(), str(value) * 100, 0, [str(value)]))


def _change_tensor(random: Random, tensors: list[Stored], other: list[Stored]) -> None:
    kind, one = random.randrange(8), random.choice(tensors)
    if kind == 0:
        tensors.remove(one)
    elif kind == 1:
        one.name = random.choice(random.choice((tensors, other))).name
    elif kind == 2:
        tensors.append(random.choice(other))
    elif kind == 3:
        one.kind = random.choice(list(BLOCKS))
    elif kind == 4:
        one.shape.reverse()
    elif kind == 5:
        one.shape = random.choice(([*one.shape, 1], [1, *one.shape], one.shape[1:], [math.prod(one.shape)])) or [1]
    elif kind == 6:
        at = random.randrange(len(one.shape))
        one.shape[at] = random.choice((1, one.shape[at] * 2, max(1, one.shape[at] // 2), one.shape[at] + 1))
    else:
        one.data = struct.pack("<f", random.choice(FLOATS)) * (len(one.data) // 4)


def written(made: Structure) -> bytes:
    """The file in version 3 of the format, as `gguf.file` reads it. Values that are missing are 0."""
    out = bytearray(b"GGUF" + struct.pack("<IQQ", 3, len(made.tensors), len(made.metadata)))
    for key, value in made.metadata.items():
        kind, data = _typed(value)
        out += _text(key) + struct.pack("<I", kind) + data
    data = bytearray()
    for one in made.tensors:
        block, size = BLOCKS[one.kind]
        needed = math.prod(one.shape) // block * size
        out += _text(one.name) + struct.pack("<I", len(one.shape))
        out += struct.pack(f"<{len(one.shape)}QIQ", *one.shape[::-1], one.kind, len(data))
        data += one.data[:needed].ljust(-(-needed // ALIGNMENT) * ALIGNMENT, b"\0")
    return bytes(out.ljust(-(-len(out) // ALIGNMENT) * ALIGNMENT, b"\0") + data)


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _typed(value: Any) -> tuple[int, bytes]:
    """GGUF's number of the type that fits a value, and its bytes; a list is of the type of its first."""
    if isinstance(value, bool):
        return 7, struct.pack("<?", value)
    if isinstance(value, int):
        for kind, form in ((4, "I"), (5, "i"), (10, "Q"), (11, "q")):
            try:
                return kind, struct.pack("<" + form, value)
            except struct.error:
                continue
        return 12, struct.pack("<d", value)
    if isinstance(value, float):
        return (6, struct.pack("<f", value)) if not math.isfinite(value) or abs(value) < 3e38 else (12, b"\0" * 8)
    if isinstance(value, str):
        return 8, _text(value)
    kinds = [_typed(item) for item in value] or [(4, b"")]
    same = [data for kind, data in kinds if kind == kinds[0][0]] if value else []
    return 9, struct.pack("<IQ", kinds[0][0], len(same)) + b"".join(same)
