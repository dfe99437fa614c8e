"""Reads a GGUF file's header: its metadata and where each tensor lies. Every length is checked before it is used.

The format: the page gguf.md of https://github.com/ggml-org/ggml. A model in several files
(`name-00001-of-00003.gguf`) is read as one, given any of them.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from streamspec.adapters.base_models.gguf.keys import Keys
from streamspec.errors import BaseModelError

AGAIN = "fetch the file again"
VERSIONS = (2, 3)
SPLIT_NAME = re.compile(r"(?P<stem>.+)-(?P<part>\d{5})-of-(?P<parts>\d{5})\.gguf")
MAX_PARTS = 512
MAX_ENTRIES = 1 << 20  # of metadata and of tensors; the largest model published has some thousands

# GGUF's value types by number: struct format of one value, or what is read otherwise.
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
LENGTH = struct.Struct("<Q")  # of a text


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as it lies in a file. `shape` has rows first, as numpy and torch count."""

    name: str
    shape: tuple[int, ...]
    kind: int  # ggml's number of the quantization
    file: Path
    offset: int  # of the first byte, in the file
    size: int  # bytes

    at_once: ClassVar[int] = 1 << 18  # values that are de-quantized: 1 MB of fp32, which a processor's cache holds

    @property
    def kind_name(self) -> str:
        """ggml's name of the quantization, such as Q4_K."""
        from gguf import GGMLQuantizationType

        return GGMLQuantizationType(self.kind).name

    @property
    def alike(self) -> bool:
        """Whether all rows are of the same kind."""
        return True

    @property
    def data(self) -> NDArray[np.uint8]:
        """Its bytes [rows, bytes of a row], mapped; the system has them back when the array is gone."""
        rows = math.prod(self.shape[:-1])
        return np.memmap(self.file, np.uint8, "r", self.offset, (rows, self.size // rows))

    def chunks(self) -> Iterator[NDArray[np.float32]]:
        """Yields the values in order, de-quantized, some whole rows at a time: [rows, last dimension] fp32."""
        step = max(1, self.at_once // self.shape[-1])
        for first in range(0, math.prod(self.shape[:-1]), step):
            yield self.rows(slice(first, first + step))

    def rows(self, rows: slice | NDArray[np.int64]) -> NDArray[np.float32]:
        """Some rows, de-quantized: [rows, last dimension] fp32."""
        chosen = self.data[rows]
        out = np.empty((len(chosen), self.shape[-1]), np.float32)
        step = max(1, self.at_once // self.shape[-1])
        for first in range(0, len(chosen), step):
            self._dequantize(chosen[first : first + step], out[first : first + step])
        return out

    def values(self) -> NDArray[np.float32]:
        """The whole tensor, de-quantized: fp32 of `shape`."""
        return self.rows(slice(None)).reshape(self.shape)

    def _dequantize(self, data: NDArray[np.uint8], out: NDArray[np.float32]) -> None:
        from gguf import GGMLQuantizationType, dequantize

        with np.errstate(invalid="ignore", over="ignore"):  # whoever uses them refuses NaN and infinity
            out[:] = dequantize(np.ascontiguousarray(data), GGMLQuantizationType(self.kind)).reshape(out.shape)


@dataclass(frozen=True)
class JoinedTensor(StoredTensor):
    """Tensors of one width as one: the rows of the first, then those of the next."""

    parts: tuple[StoredTensor, ...]

    @property
    def data(self) -> NDArray[np.uint8]:
        """As of one tensor, in memory; the parts must be of one kind (`alike`)."""
        return np.concatenate([part.data for part in self.parts])

    @property
    def alike(self) -> bool:
        """Whether all rows are of the same kind."""
        return len({part.kind for part in self.parts}) == 1

    def chunks(self) -> Iterator[NDArray[np.float32]]:
        """As of one tensor."""
        for part in self.parts:
            yield from part.chunks()

    def rows(self, rows: slice | NDArray[np.int64]) -> NDArray[np.float32]:
        """As of one tensor."""
        return np.concatenate([part.rows(slice(None)) for part in self.parts])[rows]


@dataclass(frozen=True)
class LatentTensor(JoinedTensor):
    """Of heads that attend to narrow states the maps of keys, turned round [heads, rank, still], and of values [heads,
    values, rank], as one [heads * (still + values), rank]: what transformers calls `kv_b_proj`."""

    alike = False

    def chunks(self) -> Iterator[NDArray[np.float32]]:
        """All at once."""
        yield self.values()

    def rows(self, rows: slice | NDArray[np.int64]) -> NDArray[np.float32]:
        """As of one tensor."""
        keys, values = (part.values() for part in self.parts)
        return np.concatenate([keys.swapaxes(1, 2), values], axis=1).reshape(self.shape)[rows]


@dataclass
class GgufFile:
    """The metadata and the tensors of a GGUF model, of all its files together."""

    path: Path
    metadata: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, StoredTensor] = field(default_factory=dict)

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the model family."""
        return str(self.below("general").word("architecture"))

    def below(self, prefix: str) -> Keys:
        """The keys below `prefix`."""
        return Keys(self.metadata, self.path.name, prefix, self.tensors.keys())


def is_gguf(path: Path) -> bool:
    """True where the file begins as a GGUF file does, whatever its name."""
    try:
        with path.open("rb") as stream:
            return stream.read(4) == b"GGUF"
    except OSError:
        return False


def parts_of(path: Path) -> list[Path]:
    """The files of the model that `path` belongs to, in order. Raises BaseModelError where one is missing."""
    match = SPLIT_NAME.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match["parts"])
    if not 1 <= count <= MAX_PARTS:
        raise BaseModelError(f"{path.name} is one of {count} parts", f"1 to {MAX_PARTS}", "check the file's name")
    parts = [path.with_name(f"{match['stem']}-{number:05d}-of-{count:05d}.gguf") for number in range(1, count + 1)]
    if missing := [file.name for file in parts if not file.is_file()]:
        raise BaseModelError(
            f"{missing[0]} is missing beside {path.name} ({len(missing)} of {count} parts)",
            f"all {count} parts in one folder",
            "fetch the missing parts",
        )
    return parts


def read_gguf(path: Path) -> GgufFile:
    """Reads the headers of all parts. Raises BaseModelError for a file that is damaged, cut off or not understood. The
    last one read is kept until its files change.
    """
    states = [(part, part.stat()) for part in parts_of(path)]
    return _read_parts(tuple((part, state.st_size, state.st_mtime_ns) for part, state in states))


def forget() -> None:
    """Frees the file that was read last: its vocabulary takes tens of megabytes."""
    _read_parts.cache_clear()


@lru_cache(maxsize=1)
def _read_parts(parts: tuple[tuple[Path, int, int], ...]) -> GgufFile:
    path = parts[0][0]
    model = GgufFile(path)
    for number, (file, *_) in enumerate(parts):
        read = _read_file(file)
        _check_split(read, number, len(parts))
        if number == 0:
            model.metadata = read.metadata
        if repeated := sorted(model.tensors.keys() & read.tensors.keys()):
            raise BaseModelError(f"{file.name} repeats the tensor {repeated[0]}", "each tensor in one part", AGAIN)
        model.tensors |= read.tensors
    expected = model.below("split").whole("tensors.count", len(model.tensors), 0, MAX_ENTRIES)
    if expected != len(model.tensors):
        raise BaseModelError(f"{path.name}: {len(model.tensors)} tensors in {len(parts)} parts", str(expected), AGAIN)
    return model


def _check_split(read: GgufFile, number: int, parts: int) -> None:
    keys = read.below("split")
    index, count = keys.whole("no", 0, 0), keys.whole("count", 0, 0) or 1
    if (index, count) != (number, parts):
        raise BaseModelError(
            f"{read.path.name} says it is part {index + 1} of {count}",
            f"part {number + 1} of {parts}, as its name says",
            "give the file the name it was published with, beside the other parts",
        )


def _read_file(path: Path) -> GgufFile:
    size = path.stat().st_size
    with path.open("rb") as stream:
        if size < 24 or stream.read(4) != b"GGUF":
            found = "is cut off" if is_gguf(path) else "is no GGUF file"
            raise BaseModelError(f"{path} {found}", "the magic number GGUF and a header at its start", AGAIN)
        with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            reader = _HeaderReader(path, data)
            try:
                return _read_header(path, reader)
            finally:
                reader.data = b""


def _read_header(path: Path, reader: _HeaderReader) -> GgufFile:
    version = reader.number("I")
    if version not in VERSIONS:
        if version & 0xFFFF == 0:
            raise BaseModelError(f"{path.name} is a big-endian GGUF file", "little-endian", "convert it to this order")
        raise BaseModelError(
            f"{path.name} is of GGUF version {version}", f"version {VERSIONS[0]} or {VERSIONS[1]}", "convert it again"
        )
    tensors, entries = reader.count("Q", 24), reader.count("Q", 12)
    if max(tensors, entries) > MAX_ENTRIES:
        raise BaseModelError(
            f"{path.name} claims {tensors} tensors and {entries} keys", f"at most {MAX_ENTRIES}", AGAIN
        )
    model = GgufFile(path)
    for _ in range(entries):
        key = reader.text()
        if key in model.metadata:
            raise BaseModelError(f"{path.name} has the key {key} twice", "each key once", AGAIN)
        model.metadata[key] = reader.value(reader.number("I"))
    described = [_describe(reader) for _ in range(tensors)]
    alignment = model.below("general").whole("alignment", 32, high=1 << 20)
    start = -(-reader.at // alignment) * alignment
    for name, shape, kind, offset in described:
        if name in model.tensors:
            raise BaseModelError(f"{path.name} has the tensor {name} twice", "each tensor once", AGAIN)
        model.tensors[name] = StoredTensor(name, shape, kind, path, start + offset, _bytes_of(path, name, shape, kind))
    _check_whole(path, model.tensors, len(reader.data))
    return model


def _describe(reader: _HeaderReader) -> tuple[str, tuple[int, ...], int, int]:
    """Name, shape, kind and offset of the next tensor."""
    name = reader.text()
    dimensions = reader.number("I")
    if not 1 <= dimensions <= 4:
        raise BaseModelError(f"tensor {name} has {dimensions} dimensions", "1 to 4", AGAIN)
    shape = tuple(reader.number("Q") for _ in range(dimensions))[::-1]
    if not all(0 < size < 1 << 40 for size in shape):
        raise BaseModelError(f"tensor {name} has the shape {list(shape)}", "sizes above 0", AGAIN)
    return name, shape, reader.number("I"), reader.number("Q")


def _bytes_of(path: Path, name: str, shape: tuple[int, ...], kind: int) -> int:
    """Bytes of a tensor. Raises BaseModelError for a quantization that cannot be read."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

    try:
        block, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        dequantize(np.zeros((1, size), np.uint8), GGMLQuantizationType(kind))
    except (ValueError, KeyError, NotImplementedError):
        known = [label for label, value in GGMLQuantizationType.__members__.items() if value == kind]
        raise BaseModelError(
            f"{path.name}: tensor {name} is quantized as {known[0] if known else f'type {kind}'}",
            "a quantization that the installed `gguf` package can read",
            "update `gguf`, or take another quantization of this model",
        ) from None
    if shape[-1] % block:
        raise BaseModelError(f"{path.name}: rows of {name} have {shape[-1]} values", f"a multiple of {block}", AGAIN)
    return math.prod(shape) // block * size


def _check_whole(path: Path, tensors: dict[str, StoredTensor], size: int) -> None:
    """Raises BaseModelError for tensors that overlap or lie outside of the file."""
    end, before = 0, ""
    for tensor in sorted(tensors.values(), key=lambda tensor: tensor.offset):
        if tensor.offset < end:
            raise BaseModelError(f"{path.name}: the tensors {before} and {tensor.name} overlap", "none that do", AGAIN)
        end, before = tensor.offset + tensor.size, tensor.name
    if end > size:
        raise BaseModelError(f"{path.name} is cut off: it has {size} bytes", f"{end} (tensor {before})", AGAIN)


class _HeaderReader:
    """Takes one value after the other. Raises BaseModelError where the file ends first."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data: mmap.mmap | bytes = data
        self.at = 4  # after the magic number

    def _take(self, size: int) -> int:
        start = self.at
        if size > len(self.data) - start:
            raise BaseModelError(
                f"{self.path.name} is cut off or damaged: its header goes on after byte {len(self.data)}",
                "a whole GGUF file",
                AGAIN,
            )
        self.at = start + size
        return start

    def number(self, form: str) -> Any:
        return struct.unpack_from("<" + form, self.data, self._take(struct.calcsize("<" + form)))[0]

    def count(self, form: str, entry_bytes: int) -> int:
        """A number of entries of at least `entry_bytes` each, which must fit into the rest of the file."""
        count = int(self.number(form))
        if count * entry_bytes > len(self.data) - self.at:
            self._take(len(self.data))  # raises
        return count

    def text(self) -> str:
        size = LENGTH.unpack_from(self.data, self._take(LENGTH.size))[0]
        start = self._take(size)
        try:
            return self.data[start : start + size].decode("utf-8")
        except UnicodeDecodeError:
            raise BaseModelError(
                f"{self.path.name} is damaged: no text at byte {start}", "text in UTF-8", AGAIN
            ) from None

    def value(self, kind: int, nested: bool = False) -> Any:
        if kind in SCALARS:
            return self.number(SCALARS[kind])
        if kind == STRING:
            return self.text()
        if kind != ARRAY or nested:
            raise BaseModelError(f"{self.path.name} is damaged: a value of type {kind}", "a type of GGUF", AGAIN)
        item = self.number("I")
        if item in SCALARS:
            form, size = SCALARS[item], struct.calcsize("<" + SCALARS[item])
            count = self.count("Q", size)
            return list(struct.unpack_from(f"<{count}{form}", self.data, self._take(count * size)))
        count = self.count("Q", LENGTH.size)
        if item == STRING:  # the hundred thousands of a vocabulary
            return [self.text() for _ in range(count)]
        return [self.value(item, nested=True) for _ in range(count)]
