"""The safetensors files of a Hugging Face folder: whole, finite, of which dtype, and what identifies their tensors."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from streamspec.errors import BaseModelError
from streamspec.json_fields import MAX_JSON, parse_object

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
READ_BYTES = 1 << 26
SCALES, LARGEST = "_scales", 252  # exponents of MXFP4's blocks; 6, its largest number, is infinite beyond
BOUNDS = ("_min", "_max")  # numbers that a map of an image or audio tower clips at, infinite for nowhere
# Numbers with all bits of their exponent set are infinite or NaN: the integers to read them as, and these bits.
EXPONENTS = {
    "F64": ("<u8", 0x7FF << 52),
    "F32": ("<u4", 0xFF << 23),
    "BF16": ("<u2", 0xFF << 7),
    "F16": ("<u2", 0x1F << 10),
}
HEAD = "lm_head.weight"  # the output map, as transformers calls it
BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}


@dataclass(frozen=True)
class SafeTensor:
    """A tensor of a file, as the file's header describes it."""

    name: str
    dtype: str  # F32, BF16, ...
    shape: list[int]
    file: Path
    start: int  # of its bytes in the file
    size: int

    def read(self) -> Iterator[bytes]:
        """Yields its bytes, `READ_BYTES` at a time."""
        with self.file.open("rb") as stream:
            stream.seek(self.start)
            for at in range(0, self.size, READ_BYTES):
                yield stream.read(min(READ_BYTES, self.size - at))


def weight_files(folder: Path) -> list[Path]:
    """Returns the safetensors files that transformers reads: `model.safetensors`, else those that the index names, else
    all; not copies in other layouts beside them. Raises BaseModelError where there are none, or not all of the index.
    """
    if (folder / WHOLE).is_file():
        return [folder / WHOLE]
    indexed = _indexed(folder)
    if missing := sorted(name for name in indexed if not (folder / name).is_file()):
        raise BaseModelError(
            f"{folder} lacks {len(missing)} of the {len(indexed)} files that {INDEX} names: {', '.join(missing[:3])}",
            "every shard",
            "fetch the base again",
        )
    if files := sorted(folder / name for name in indexed) or sorted(folder.glob("*.safetensors")):
        return files
    others = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in folder.glob(pattern))
    convert = "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(FOLDER) of transformers"
    raise BaseModelError(
        f"{folder} holds no *.safetensors" + (f", only {', '.join(others[:3])}" if others else ""),
        "weights in safetensors files",
        f"convert them where you trust them: {convert}"  # pickles can run code
        if any(name.startswith("pytorch_model") for name in others)
        else "fetch the model in the layout of transformers",
    )


def check_names(folder: Path) -> None:
    """Raises BaseModelError for safetensors files under names that transformers does not look for."""
    files = weight_files(folder)
    if not (folder / WHOLE).is_file() and not (folder / INDEX).is_file():
        advice = f"rename it to {WHOLE}, if it is the whole model" if len(files) == 1 else f"fetch {INDEX}, too"
        found = f"{folder} holds {', '.join(file.name for file in files[:3])} and no {INDEX}"
        raise BaseModelError(found, f"{WHOLE}, or {INDEX}", advice)


def _indexed(folder: Path) -> set[str]:
    """Files that the folder's index names; nothing where there is no index."""
    index = folder / INDEX
    if not index.is_file():
        return set()
    names = parse_object(index.read_bytes(), str(index), BaseModelError, "fetch the base again").get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) and "/" not in name for name in names.values()):
        raise BaseModelError(f"{index} has no weight_map", "the file of each tensor", "fetch the base again")
    return set(names.values())


def stored_tensors(folder: Path) -> list[SafeTensor]:
    """Returns the tensors of all files, in name order. Raises BaseModelError for a file that is cut off or damaged."""
    return sorted(
        (tensor for file in weight_files(folder) for tensor in _tensors_of(file)), key=lambda tensor: tensor.name
    )


def _tensors_of(file: Path) -> list[SafeTensor]:
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        header_bytes = stream.read(min(size, MAX_JSON + 1))
    try:
        header = parse_object(header_bytes, str(file), BaseModelError, "fetch the base again")
        header.pop("__metadata__", None)
        tensors = [_described(name, described, file, 8 + size) for name, described in header.items()]
        whole = file.stat().st_size == max(tensor.start + tensor.size for tensor in tensors)
    except (BaseModelError, ValueError, TypeError, LookupError):
        whole = False
    if not whole:
        raise BaseModelError(f"{file} is cut off or damaged", "a whole safetensors file", "fetch the base again")
    return tensors


def _described(name: str, described: dict[str, Any], file: Path, data: int) -> SafeTensor:
    """Raises ValueError, TypeError or LookupError for a description that makes no sense."""
    dtype, shape, (first, last) = described["dtype"], described["shape"], described["data_offsets"]
    if not (
        type(first) is int
        and type(last) is int
        and 0 <= first <= last
        and isinstance(dtype, str)
        and isinstance(shape, list)
        and (dtype not in BYTES or BYTES[dtype] * math.prod(shape) == last - first)
    ):
        raise ValueError(described)
    return SafeTensor(name, dtype, shape, file, data + first, last - first)


def weights_hash(folder: Path) -> str:
    """sha256 (hex) over all tensors of the folder's `*.safetensors` files: name, dtype, shape and bytes, in name order.
    Raises BaseModelError for numbers that are not finite.

    Tensors rather than files, so that sharding and the writer's version do not change a base's identity.
    """
    digest = hashlib.sha256()
    for tensor in stored_tensors(folder):
        digest.update(json.dumps([tensor.name, tensor.dtype, tensor.shape]).encode())
        for data in tensor.read():
            digest.update(data)
            _check_finite(tensor, data)
    return digest.hexdigest()


def _is_scales(tensor: SafeTensor) -> bool:
    """Whether these are exponents of MXFP4, whose numbers bfloat16 holds exactly."""
    return tensor.dtype == "U8" and tensor.name.endswith(SCALES)


def _check_finite(tensor: SafeTensor, data: bytes) -> None:
    if _is_scales(tensor):
        bad = np.flatnonzero(np.frombuffer(data, np.uint8) > LARGEST)
    elif tensor.dtype not in EXPONENTS or (not tensor.shape and tensor.name.endswith(BOUNDS)):
        return
    else:
        integers, exponent = EXPONENTS[tensor.dtype]
        bad = np.flatnonzero((np.frombuffer(data, integers) & exponent) == exponent)
    if len(bad):
        raise BaseModelError(
            f"{tensor.name} in {tensor.file} holds {len(bad)} numbers that are infinite or NaN",
            "finite weights",
            "fetch the base again, or merge or train it again",
        )


def stored_dtype(folder: Path) -> str:
    """Returns the dtype, by torch's name, that holds every floating-point tensor of the folder's files exactly,
    whatever its config says: `bfloat16`, `float16` or `float32`.
    """
    known = {("BF16" if _is_scales(tensor) else tensor.dtype) for tensor in stored_tensors(folder)}
    dtypes = {dtype for dtype in known if dtype.startswith(("F", "BF"))}
    return {frozenset({"BF16"}): "bfloat16", frozenset({"F16"}): "float16"}.get(frozenset(dtypes), "float32")
