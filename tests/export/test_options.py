"""Options of an export: one field each, and what does not go together is refused before anything is read."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from streamspec.cli import app
from streamspec.cli import export as command
from streamspec.errors import ConfigError
from streamspec.export import ExportOptions, HeldOut, StoreFiles, Target, export_bundle
from streamspec.export.options import DELTA, MERGED, ExportKwargs

STATIC, CUDA = Target(static=True), Target("cuda", capture=True)


def test_a_type_checker_knows_every_option_as_a_keyword() -> None:
    assert {*ExportKwargs.__annotations__, "precision"} == {field.name for field in fields(ExportOptions)}


@pytest.mark.parametrize(
    ("options", "refused"),
    [
        ({"streams": "late"}, "streams `late`; expected deferred or eager"),
        ({"stream_weights": "sum"}, "stream weights `sum`; expected merged or delta"),
        ({"streams": "eager", "target": STATIC}, "--streams eager in a static graph; expected deferred"),
        (
            {"streams": "eager", "stream_weights": MERGED},
            "--streams eager with --stream-weights merged; expected delta",
        ),
        ({"quant_method": "gptq"}, "--quant-method gptq in int8; expected gptq or rtn, in int4"),
        ({"quant_method": "awq", "precision": "int4"}, "--quant-method awq in int4; expected gptq or rtn"),
        ({"draft_vocab": 100}, r"--draft-vocab 100; expected 0 \(all tokens\) or at least 1024"),
        ({"kv_cache_dtype": "int8"}, "a K/V cache of 'int8'; expected float32 or float16"),
        ({"self_draft": "3", "target": STATIC}, "--self-draft for fixed shapes"),
        ({"self_draft": "3", "target": CUDA}, "--self-draft for cuda"),
        ({"embeddings": True, "target": STATIC}, "--embeddings for fixed shapes"),
        ({"embeddings": True, "target": CUDA}, "--embeddings for fixed shapes"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_does_not_go_together_is_refused_before_a_base_is_looked_for(
    options: dict[str, Any], refused: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=refused):
        export_bundle("no base of this name", None, tmp_path / "out", options=ExportOptions(**options))


@pytest.mark.parametrize(
    ("options", "stored"),
    [({}, MERGED), ({"stream_weights": DELTA}, DELTA), ({"streams": "eager"}, DELTA)],
    ids=str,
)
def test_eager_streams_are_stored_beside_the_shared_weights(options: dict[str, Any], stored: str) -> None:
    assert ExportOptions(**options).stream_storage == stored


def test_another_kind_of_export_refuses_each_option_of_bundles_by_its_flag(tmp_path: Path) -> None:
    of_bundles: dict[str, dict[str, Any]] = {
        "--val": {"held_out": HeldOut(tmp_path)},
        "--block-size": {"block_size": 32},
        "--quant-method": {"quant_method": "rtn"},
        "--static": {"target": STATIC},
        "--capture": {"target": CUDA},
        "--target openvino": {"target": Target("openvino")},
        "--stream-weights": {"stream_weights": MERGED},
        "--store": {"store": StoreFiles([tmp_path])},
        "--drafter": {"drafter": tmp_path},
        "--draft-vocab": {"draft_vocab": 0},
        "--streams": {"streams": "eager"},
        "--exit-layer": {"exit_layer": 0},
        "--self-draft": {"self_draft": "auto"},
        "--embeddings": {"embeddings": True},
    }
    for flag, options in of_bundles.items():
        with pytest.raises(ConfigError, match=f"--swappable and {flag}; expected one of them; leave one out"):
            ExportOptions(**options).check_unused("--swappable")
    ExportOptions(precision="int4", force=True, kv_cache_dtype="float16", allow_base_mismatch=True).check_unused("--as")


def test_none_is_no_folder_on_the_command_line_either(monkeypatch: pytest.MonkeyPatch) -> None:
    heads = dict[str, Path | None]()
    monkeypatch.setattr(command, "write_bundle", lambda *given: heads.update({str(given[3].drafter): given[3].head}))
    for name in ("none", "folder"):
        words = ["export", "--base", "b", "--out", "o", "--drafter", name]
        assert CliRunner().invoke(app, words).exit_code == 0
    assert heads == {"none": None, "folder": Path("folder")}


def test_keywords_take_precedence_over_the_options_beside_them(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a K/V cache of 'int8'"):
        export_bundle("none", None, tmp_path / "out", options=ExportOptions(), kv_cache_dtype="int8")
    with pytest.raises(ConfigError, match="precision"):
        export_bundle("none", None, tmp_path / "out", "int5", options=ExportOptions(precision="int8"))
