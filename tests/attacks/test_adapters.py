"""Adapters of strangers: PEFT folders, safetensors files and ONNX Runtime's adapter files that do not hold what they
say.
"""

from __future__ import annotations

import json
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from streamspec.errors import AdapterError, StreamspecError
from streamspec.export import export_bundle
from streamspec.runtime.engine.adapter_tensors import read_tensors

MARK = "streamspec-was-here"


class Touch:
    """What unpickling it would do."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self.file,)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.support.tiny_bundles import tiny_base

    return tiny_base(tmp_path_factory.mktemp("attacked-base") / "base")


@pytest.fixture
def tuned(base: Path, tmp_path: Path) -> Path:
    """A task LoRA with streams over it."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from tests.support.tiny_bundles import tiny_adapter

    folder = tiny_adapter(tmp_path / "adapter", base)
    torch.manual_seed(0)
    get_peft_model(
        AutoModelForCausalLM.from_pretrained(base),
        LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False),
    ).save_pretrained(folder)
    return folder


def refused(base: Path, adapter: Path, match: str | None = None) -> None:
    out = adapter.parent / "bundle"
    with pytest.raises(StreamspecError, match=match) as caught:
        export_bundle(base, adapter, out, "fp32", progress=lambda line: None)
    assert "\n" not in str(caught.value) and not out.exists()


SETTINGS = {
    "a module imported by name": {"megatron_config": {"x": 1}, "megatron_core": "antigravity"},
    "layers copied without end": {"layer_replication": [[0, 4]] * 1000},
    "a rank of a billion": {"r": 10**9},
    "a rank of a billion for one map": {"rank_pattern": {"q_proj": 10**9}},
    "a negative rank": {"r": -1},
    "a rank in words": {"r": "2"},
    "a pattern that takes for ever": {"target_modules": "(([a-z_.0-9])+)+!"},
    "a long pattern": {"target_modules": "a" * 100_000},
    "a pattern of ranks that takes for ever": {"rank_pattern": {"(([a-z_.0-9])+)+!": 2}},
    "numbers computed from the base": {"init_lora_weights": "pissa"},
    "another method of PEFT": {"peft_type": "PROMPT_TUNING"},
    "an unknown method": {"peft_type": "EXEC"},
    "a base that loses singular values": {"kasa_config": {"beta": 1e-4, "gamma": 1e-3}},
    "samples": {"monteclora_config": {"num_samples": 4}},
    "quantization at load": {"loftq_config": {"loftq_bits": 4}},
}


@pytest.mark.parametrize("change", SETTINGS.values(), ids=list(SETTINGS))
def test_a_lora_that_asks_for(change: dict[str, Any], base: Path, tuned: Path) -> None:
    file = tuned / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    refused(base, tuned, "a plain LoRA of ranks")


def test_pickled_weights_are_not_opened(base: Path, tuned: Path) -> None:
    """PEFT takes adapter_model.bin where there is no safetensors file."""
    os.unlink(tuned / "adapter_model.safetensors")
    (tuned / "adapter_model.bin").write_bytes(pickle.dumps(Touch(tuned.parent / MARK)))
    refused(base, tuned, r"adapter_model\.bin, a pickle.*expected adapter_model\.safetensors")
    assert not (tuned.parent / MARK).exists()


def test_a_base_with_pickled_weights_is_not_opened(tmp_path: Path, base: Path) -> None:
    import shutil

    folder = Path(shutil.copytree(base, tmp_path / "base"))
    shutil.move(folder / "model.safetensors", folder / "decoy.safetensors")
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Touch(tmp_path / MARK)))
    with pytest.raises((StreamspecError, OSError)):
        export_bundle(folder, None, tmp_path / "bundle", "fp32", progress=lambda line: None)
    assert not (tmp_path / MARK).exists() and not (tmp_path / "bundle").exists()


def header(described: Any, data: bytes = b"", size: int | None = None) -> bytes:
    text = described if isinstance(described, bytes) else json.dumps(described).encode()
    return struct.pack("<Q", len(text) if size is None else size) + text + data


ONE = {"dtype": "F16", "shape": [2, 2], "data_offsets": [0, 8]}
FILES = {
    "nothing": b"",
    "a header of 2^63 bytes": header({}, size=1 << 63),
    "a header longer than the file": header({"a": ONE}, size=1 << 20),
    "no JSON": header(b"{" * 100),
    "deep JSON": header(b'{"a":' * 100_000),
    "a name twice": header(
        b'{"a":{"dtype":"F16","shape":[4],"data_offsets":[0,8]},"a":{"dtype":"F16","shape":[4],"data_offsets":[0,8]}}',
        bytes(8),
    ),
    "offsets outside": header({"a": ONE | {"data_offsets": [0, 1 << 40]}}, bytes(8)),
    "offsets that run backwards": header({"a": ONE | {"data_offsets": [8, 0]}}, bytes(8)),
    "overlapping tensors": header({"a": ONE, "b": ONE | {"data_offsets": [4, 12]}}, bytes(12)),
    "a hole": header({"a": ONE, "b": ONE | {"data_offsets": [16, 24]}}, bytes(24)),
    "a shape that overflows": header({"a": ONE | {"shape": [1 << 62, 1 << 62]}}, bytes(8)),
    "an unknown type": header({"a": ONE | {"dtype": "PICKLE"}}, bytes(8)),
    "a negative size": header({"a": ONE | {"shape": [-2, -2]}}, bytes(8)),
    "more bytes than tensors": header({"a": ONE}, bytes(64)),
}


@pytest.mark.parametrize("name", ["streamspec.safetensors", "adapter_model.safetensors"])
@pytest.mark.parametrize("content", FILES.values(), ids=list(FILES))
def test_a_safetensors_file_with(content: bytes, name: str, base: Path, tuned: Path) -> None:
    (tuned / name).write_bytes(content)
    refused(base, tuned)


def edited(change: Callable[[dict[str, np.ndarray]], object]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        tensors = load_file(folder / "streamspec.safetensors")
        change(tensors)
        save_file(tensors, folder / "streamspec.safetensors")

    return spoil


TENSORS = {
    "not finite: stream_embeddings": edited(
        lambda t: t.update(stream_embeddings=np.full_like(t["stream_embeddings"], np.nan))
    ),
    "not finite: root_map": edited(lambda t: t.update(root_map=np.full_like(t["root_map"], np.inf))),
    "missing: root_map": edited(lambda t: t.pop("root_map")),
    "unknown: evil": edited(lambda t: t.update(evil=np.zeros(4, np.float16))),
    "of the wrong shape: root_map": edited(lambda t: t.update(root_map=t["root_map"][:3].copy())),
}


@pytest.mark.parametrize("found", TENSORS)
def test_streams_with(found: str, base: Path, tuned: Path) -> None:
    TENSORS[found](tuned)
    refused(base, tuned, found)


def test_a_task_lora_that_is_not_finite(base: Path, tuned: Path) -> None:
    tensors = load_file(tuned / "adapter_model.safetensors")
    save_file(
        {name: np.full_like(value, np.nan) for name, value in tensors.items()}, tuned / "adapter_model.safetensors"
    )
    refused(base, tuned)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("format_version", 99),
        ("format_version", None),
        ("method", "exec"),
        ("method", ["streaming"]),
        ("base", []),
        ("base/sha256", "0" * 64),
        ("streams", None),
        ("streams", []),
        ("streams/gamma", 10**9),
        ("streams/gamma", -1),
        ("streams/gamma", "3"),
        ("streams/ns", 10**9),
        ("streams/scale", 1e300),
        ("streams/scale", "1"),
        ("streams/positions", "up"),
        ("streams/lora", {"rank": 10**9, "alpha": 1.0}),
        ("streams/draft_vocab", 10**9),
        ("streams/bigram", 10**9),
        ("streams/pruning", 10**9),
        ("prompt_format", {}),
        ("prompt_format/kind", "exec"),
        ("prompt_format/separator", 5),
    ],
)
def test_a_configuration_that_lies(path: str, value: Any, base: Path, tuned: Path) -> None:
    file = tuned / "streamspec_config.json"
    data = json.loads(file.read_text())
    *parents, last = path.split("/")
    at = data
    for name in parents:
        at = at[name]
    at[last] = value
    file.write_text(json.dumps(data))
    refused(base, tuned)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"[]",
        b"\xff",
        b'{"gamma": 3, "max_rank": 10, "ranks": 5}',
        b'{"gamma": 3, "max_rank": 1e99, "ranks": []}',
        b"[" * 100_000,
    ],
)
def test_recorded_ranks_that_are_none(content: bytes, base: Path, tuned: Path) -> None:
    (tuned / "acceptance.json").write_bytes(content)
    refused(base, tuned)


# ---- ONNX Runtime's adapter files


@pytest.fixture
def native(tmp_path: Path) -> bytes:
    import onnxruntime

    made = onnxruntime.AdapterFormat()
    made.set_adapter_version(1)
    made.set_model_version(1)
    made.set_parameters({"a": onnxruntime.OrtValue.ortvalue_from_numpy(np.arange(24, dtype=np.float32).reshape(2, 12))})
    made.export_adapter(str(tmp_path / "good"))
    return (tmp_path / "good").read_bytes()


class Input:
    type, shape = "tensor(float)", [2, 12]


def unread(file: Path) -> None:
    from tests.support.manifests import manifest

    with pytest.raises(AdapterError) as caught:
        read_tensors(file, manifest(streams=None, trees=None), {"a": Input})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dims", [(2, 1 << 12), (1 << 40, 1 << 40), (-1, 12), (0, 12), (1, 24)])
def test_an_adapter_file_whose_sizes_lie(dims: tuple[int, int], native: bytes, tmp_path: Path) -> None:
    (tmp_path / "bad").write_bytes(native.replace(struct.pack("<qq", 2, 12), struct.pack("<qq", *dims)))
    unread(tmp_path / "bad")


@pytest.mark.parametrize("size", [0, 3, 8, 40, 100])
def test_an_adapter_file_that_is_cut_off(size: int, native: bytes, tmp_path: Path) -> None:
    (tmp_path / "bad").write_bytes(native[:size])
    unread(tmp_path / "bad")


def test_an_adapter_file_that_points_outside_itself(native: bytes, tmp_path: Path) -> None:
    """Each number of the file in turn is made huge: it is refused, or was one that nobody reads or of the tensor
    itself.
    """
    from tests.support.manifests import manifest

    refusals = 0
    for offset in range(0, len(native) - 4, 4):
        (tmp_path / "bad").write_bytes(native[:offset] + b"\xff\xff\xff\x7f" + native[offset + 4 :])
        try:
            found = read_tensors(tmp_path / "bad", manifest(streams=None, trees=None), {"a": Input})
            assert {name: value.shape() for name, value in found.items()} in ({"a": [2, 12]}, {})
        except AdapterError as error:
            assert "\n" not in str(error)
            refusals += 1
    assert refusals > 10


def test_an_adapter_file_that_is_not_finite(native: bytes, tmp_path: Path) -> None:
    (tmp_path / "bad").write_bytes(native.replace(struct.pack("<f", 5.0), struct.pack("<f", float("nan"))))
    unread(tmp_path / "bad")
