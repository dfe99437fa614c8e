"""The tensors of a base's files: what dtype they are in."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from streamspec.adapters.base_models.weight_files import stored_dtype


@pytest.mark.parametrize(
    ("stored", "dtype"),
    [
        ([torch.bfloat16, torch.bfloat16], torch.bfloat16),
        ([torch.float16, torch.int64], torch.float16),
        ([torch.bfloat16, torch.float32], torch.float32),
        ([torch.bfloat16, torch.float16], torch.float32),
        ([torch.float64, torch.float16], torch.float32),
    ],
)
def test_the_dtype_holds_every_tensor_of_every_file(
    stored: list[torch.dtype], dtype: torch.dtype, tmp_path: Path
) -> None:
    for number, kind in enumerate(stored):
        save_file({"w": torch.zeros(2, dtype=kind)}, tmp_path / f"{number}.safetensors")
    assert f"torch.{stored_dtype(tmp_path)}" == str(dtype)
