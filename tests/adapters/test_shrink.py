"""Adapters cut to a lower rank: the closest LoRA of that rank, a folder as good as any other, nothing half-written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from streamspec.adapters.adapter_writer import read_tensors
from streamspec.adapters.shrink import cut, shrink
from streamspec.adapters.train import train
from streamspec.bundle.adapter_folder import STREAM_WEIGHTS
from streamspec.cli import app
from streamspec.errors import AdapterError, ConfigError
from streamspec.export.drafters import adapter_section
from tests.support.tiny_models import options


@pytest.fixture(scope="module")
def adapter(base: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("staged") / "adapter"
    train(options(base, data, out, recipe="staged", rank=6, lora_alpha=12.0, stream_rank=5))
    return out


def test_the_cut_is_the_closest_product_of_that_rank() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(8, 20), torch.randn(30, 8)
    out, share = cut({"x.lora_A": a, "x.lora_B": b, "other": torch.ones(2)}, 3, {"x.lora_A": 0.5})
    left, values, right = torch.linalg.svd(0.5 * b @ a)
    nearest = (left[:, :3] * values[:3]) @ right[:3]
    assert out["x.lora_A"].shape == (3, 20) and out["x.lora_B"].shape == (30, 3)
    assert torch.allclose(out["x.lora_B"] @ out["x.lora_A"], nearest, atol=1e-4)
    assert share == pytest.approx(float((values[:3] ** 2).sum() / (values**2).sum()), abs=1e-4)
    assert torch.equal(out["other"], torch.ones(2))


@pytest.mark.parametrize(("inputs", "outputs"), [(20, 3), (3, 20)])
def test_a_map_narrower_than_the_rank_is_kept_whole(inputs: int, outputs: int) -> None:
    a, b = torch.randn(8, inputs), torch.randn(outputs, 8)
    out, share = cut({"x.lora_A": a, "x.lora_B": b}, 5, {"x.lora_A": 1.0})
    assert out["x.lora_A"].shape == (5, inputs) and out["x.lora_B"].shape == (outputs, 5)
    assert torch.allclose(out["x.lora_B"] @ out["x.lora_A"], b @ a, atol=1e-4) and share == 1.0


def test_a_lora_of_low_rank_comes_back_whole() -> None:
    torch.manual_seed(1)
    a, b = torch.randn(2, 20), torch.randn(30, 2)
    tensors = {
        "x.lora_A.weight": torch.cat([a, a]),
        "x.lora_B.weight": torch.cat([b, b], 1),
    }  # 2 b a, written with rank 4
    out, share = cut(tensors, 2, {"x.lora_A.weight": 1.0})
    assert share == pytest.approx(1.0, abs=1e-4)
    assert torch.allclose(out["x.lora_B.weight"] @ out["x.lora_A.weight"], 2 * b @ a, atol=1e-4)


def test_a_shrunk_folder_is_an_adapter_like_any_other(adapter: Path, base: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "small"
    kept = shrink(adapter, out, 3)
    assert set(kept) == {"task LoRA", "streams' LoRA"} and all(0 < share <= 1 for share in kept.values())
    peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), out)
    assert (peft.peft_config["default"].r, peft.peft_config["default"].lora_alpha) == (3, 3)  # alpha 12 is folded in
    assert json.loads((out / "streamspec_config.json").read_text())["streams"]["lora"] == {"rank": 3, "alpha": 3.0}
    assert json.loads((out / "training.json").read_text())["shrunk"] == {"rank": 3, "kept": kept}
    before, after = load_file(adapter / "streamspec.safetensors"), load_file(out / "streamspec.safetensors")
    assert torch.equal(before["stream_embeddings"], after["stream_embeddings"])
    # Training goes on from it, at a higher rank too: what is new starts without effect.
    log = train(
        options(base, data, tmp_path / "on", recipe="staged", target_adapter=out, warm_start=out, stream_rank=5)
    )
    assert log["tau"] >= 1


def test_what_cannot_be_cut_is_refused_and_leaves_nothing(adapter: Path, tmp_path: Path) -> None:
    out = tmp_path / "small"
    with pytest.raises(ConfigError, match="less than the rank of a LoRA"):
        shrink(adapter, out, 6)
    for rank in (0, -1):
        with pytest.raises(ConfigError, match=f"rank = {rank}; expected at least 1"):
            shrink(adapter, out, rank)
    with pytest.raises(AdapterError, match="inside the adapter"):
        shrink(adapter, adapter / "small", 2)
    with pytest.raises(AdapterError, match=r"streamspec_config\.json"):
        shrink(tmp_path, adapter.parent / "other", 2)
    dora = tmp_path / "dora"
    shutil.copytree(adapter, dora)
    config = json.loads((dora / "adapter_config.json").read_text())
    (dora / "adapter_config.json").write_text(json.dumps(config | {"use_dora": True}))
    with pytest.raises(AdapterError, match="DoRA"):
        shrink(dora, out, 2)
    (dora / "adapter_config.json").write_text("{}")
    with pytest.raises(AdapterError, match="a whole adapter"):
        shrink(dora, out, 2)
    (dora / "adapter_config.json").write_text(json.dumps(config))
    (dora / "adapter_model.safetensors").write_bytes(b"torn")
    with pytest.raises(AdapterError, match="a safetensors file"):
        shrink(dora, out, 2)
    (dora / "adapter_config.json").unlink()
    (dora / "adapter_model.safetensors").unlink()
    described = json.loads((dora / "streamspec_config.json").read_text())
    (dora / "streamspec_config.json").write_text(json.dumps(described | {"method": "lora", "streams": None}))
    with pytest.raises(ConfigError, match="less than the rank of a LoRA"):
        shrink(dora, out, 2)
    assert not out.exists() and not list(tmp_path.glob(".small*"))
    with pytest.raises(AdapterError, match="there already"):
        shrink(adapter, dora, 2)


def test_only_what_has_a_higher_rank_is_cut(adapter: Path, tmp_path: Path) -> None:
    assert set(shrink(adapter, tmp_path / "o", 5)) == {"task LoRA"}
    assert (tmp_path / "o" / "streamspec.safetensors").read_bytes() == (adapter / "streamspec.safetensors").read_bytes()


def test_a_drafter_in_8_bits_is_read_as_the_nearest_values(adapter: Path, base: Path, tmp_path: Path) -> None:
    out = tmp_path / "small"
    assert shrink(adapter, out, bits=8) == {}
    kept, before = load_file(out / STREAM_WEIGHTS), load_file(adapter / STREAM_WEIGHTS)
    rounded = {name.removesuffix(".scale") for name in kept if name.endswith(".scale")}
    assert rounded and all(kept[name].dtype == torch.int8 for name in rounded)
    for read in (read_tensors(out / STREAM_WEIGHTS), adapter_section.read_tensors(out / STREAM_WEIGHTS)):
        assert set(read) == set(before)
        for name, value in before.items():
            near = torch.as_tensor(read[name]).float() - value.float()
            step = value.float().abs().amax(-1, keepdim=True) / 127 if name in rounded else torch.zeros(1)
            assert (near.abs() <= 0.51 * step + 1e-3 * value.float().abs()).all(), name
    assert json.loads((out / "training.json").read_text())["shrunk"]["bits"] == 8
    bare = {name: value for name, value in kept.items() if not name.endswith(".scale")}
    save_file(bare, out / STREAM_WEIGHTS)
    for reader in (read_tensors, adapter_section.read_tensors):
        with pytest.raises(AdapterError, match="is int8 and has no"):
            reader(out / STREAM_WEIGHTS)
    save_file(bare | {"root_map.scale": torch.ones(3)}, out / STREAM_WEIGHTS)
    with pytest.raises(AdapterError, match="without int8 rows"):
        adapter_section.read_tensors(out / STREAM_WEIGHTS)
    with pytest.raises(ConfigError, match="bits of 8"):
        shrink(adapter, tmp_path / "other", bits=4)


def test_command_says_what_it_kept(adapter: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["shrink", str(adapter), "--rank", "2", "--out", str(tmp_path / "o"), "--json"])
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout.splitlines()[-1])
    assert (
        result["rank"] == 2
        and result["bytes"] < result["bytes_before"]
        and set(result["kept"]) == {"task LoRA", "streams' LoRA"}
    )
