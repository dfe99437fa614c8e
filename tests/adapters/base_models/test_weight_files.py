"""The tensors of a base's files: which files count, what dtype they are in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from streamspec.adapters.base_models.weight_files import INDEX, stored_dtype, weight_files, weights_hash


@pytest.mark.parametrize(
    ("stored", "dtype"),
    [
        ([torch.bfloat16, torch.bfloat16], torch.bfloat16),
        ([torch.float16, torch.int64], torch.float16),
        ([torch.bfloat16, torch.float32], torch.float32),
        ([torch.bfloat16, torch.uint8], torch.bfloat16),  # MXFP4
        ([torch.float16, torch.uint8], torch.float32),
        ([torch.bfloat16, torch.float16], torch.float32),
        ([torch.float64, torch.float16], torch.float32),
    ],
)
def test_the_dtype_holds_every_tensor_of_every_file(
    stored: list[torch.dtype], dtype: torch.dtype, tmp_path: Path
) -> None:
    for number, kind in enumerate(stored):
        save_file(
            {"w_scales" if kind == torch.uint8 else "w": torch.zeros(2, dtype=kind)}, tmp_path / f"{number}.safetensors"
        )
    assert f"torch.{stored_dtype(tmp_path)}" == str(dtype)


@pytest.mark.parametrize(
    ("written", "indexed", "read"),
    [
        (["model.safetensors", "consolidated.safetensors"], [], ["model.safetensors"]),  # as of Mistral
        (["model.safetensors", "model-1.safetensors"], ["model-1.safetensors"], ["model.safetensors"]),
        (["model-1.safetensors", "model-2.safetensors", "adapter_model.safetensors"],) + (["model-1.safetensors"],) * 2,
        (["weights.0.safetensors", "weights.1.safetensors"], [], ["weights.0.safetensors", "weights.1.safetensors"]),
    ],
)
def test_copies_beside_the_files_that_transformers_reads_do_not_count(
    written: list[str], indexed: list[str], read: list[str], tmp_path: Path
) -> None:
    for number, name in enumerate(written):
        dtype = torch.float16 if name in read else torch.float8_e4m3fn
        save_file({f"w{number}": torch.zeros(2, dtype=dtype)}, tmp_path / name)
    if indexed:
        names = {f"w{number}": name for number, name in enumerate(indexed)}
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": names}))
    assert [file.name for file in weight_files(tmp_path)] == read
    before = weights_hash(tmp_path)
    assert stored_dtype(tmp_path) == "float16"
    for name in set(written) - set(read):
        (tmp_path / name).unlink()
    assert weights_hash(tmp_path) == before
