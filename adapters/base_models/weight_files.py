"""The tensors of a Hugging Face folder, as the headers of its safetensors files describe them."""

from __future__ import annotations

from functools import reduce
from pathlib import Path

import torch
from safetensors import safe_open


def stored_dtype(folder: Path) -> torch.dtype:
    """Returns the dtype that holds every floating-point tensor of the folder's files exactly, whatever its config says:
    bfloat16, float16 or float32.
    """
    halves = {"BF16": torch.bfloat16, "F16": torch.float16}
    found = set()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            found |= {tensors.get_slice(name).get_dtype() for name in tensors.keys()}  # noqa: SIM118 - not a dict
    dtypes = [halves.get(name, torch.float32) for name in found if name.startswith(("F", "BF"))]
    return reduce(torch.promote_types, dtypes) if dtypes else torch.float32
