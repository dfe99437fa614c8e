"""Training over a GGUF file lets the bundle of its own weights compute an untouched target, as does the command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import streamspec
from streamspec.adapters.training.config import TrainConfig
from streamspec.bundle.files import read_manifest
from streamspec.bundle.manifest import OWN_WEIGHTS
from streamspec.library import train
from streamspec.runtime.hardware import native_library
from tests.support.gguf_cases import quantized
from tests.support.tiny_models import options


def config(base: Path, out: Path, **more: object) -> TrainConfig:
    return TrainConfig(base=str(base), data=["d"], out=out, **({"target_adapter": Path("base")} | more))


@pytest.mark.skipif(bool(native_library.why_not()), reason="no native operators")
def test_its_bundle_computes_an_untouched_target_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMSPEC_CACHE", str(tmp_path / "cache"))
    file = quantized(tmp_path / "model.gguf")
    bundle = train.own_bundle(config(file, tmp_path / "out"))
    assert bundle is not None and read_manifest(Path(bundle)).precision == OWN_WEIGHTS
    assert train.own_bundle(config(file, tmp_path / "out", target_adapter=tmp_path / "lora")) is None
    assert train.own_bundle(config(file, tmp_path / "out", target_adapter=None)) is None
    assert train.own_bundle(config(tmp_path, tmp_path / "out")) is None


def test_without_native_operators_it_says_that_pytorch_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(native_library, "why_not", lambda: "no library for this processor")
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    assert train.own_bundle(config(file, tmp_path / "out")) is None
    assert capsys.readouterr().err == "PyTorch computes the target: no library for this processor\n"


@pytest.mark.skipif(bool(native_library.why_not()), reason="no native operators")
def test_the_call_from_python_computes_what_the_command_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STREAMSPEC_CACHE", str(tmp_path / "cache"))
    file, data = quantized(tmp_path / "model.gguf"), tmp_path / "data.jsonl"
    rows = [{"prompt": "abcdefgh"[i:] + "ij", "completion": " lmnop"[i:]} for i in range(5)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    more = {"recipe": "staged", "target_adapter": "base", "method": "medusa", "val": data, "format": "raw"}
    result = streamspec.train(options(file, data, tmp_path / "out", **more))
    assert "tau" in result and "layers are computed by the bundle's operators" in capsys.readouterr().err
    log = json.loads((tmp_path / "out" / "training.json").read_text())["log"]
    assert log["answers_from"]["answers_from"].startswith("weights ")
