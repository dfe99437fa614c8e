"""Captured graphs of drafters with layers of their own, from whole exports: they compute what PyTorch does, over keys
that accepted paths moved, and have the device's kernels alone.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest

from streamspec import step_graph as sg
from streamspec.bundle.cache_section import CAPTURED
from streamspec.errors import StreamspecError
from streamspec.export import Target, export_bundle
from tests.export.drafters import test_dflash, test_eagle3, test_published_block
from tests.export.graphs.test_captured_step_graph import harming, misread
from tests.support.device_kernels import check_kernels
from tests.support.tiny_assistants import ASSISTANTS, export_pair, saved_pair
from tests.support.tiny_bundles import tiny_bundle
from tests.support.tiny_exports import tiny_model

TARGET = Target("cuda", capture=True, row_counts=(1, 8), context=96)
Export = Callable[[Path], Any]


def published(module: Any, case: str) -> Export:
    def export(folder: Path) -> Any:
        drafter = module.made(folder, *module.CASES[case])[-1]
        given: dict[str, Any] = {"drafter": drafter, "target": TARGET, "progress": lambda line: None}
        return export_bundle(folder / "base", None, folder / "bundle", "fp32", **given)

    return export


def block(family: str, **shape: Any) -> Export:
    return lambda folder: test_dflash.exported(tiny_model(family), folder, target=TARGET, layers=2, bigram=4, **shape)


def assistant(folder: Path) -> Any:
    saved_pair(folder)
    return export_pair(folder, folder / "bundle", "fp32", target=TARGET)


EXPORTS = {
    "an EAGLE-3 head": published(test_eagle3, "norms"),
    "of another width": published(test_eagle3, "another width, other keys"),
    "dflash": block("llama"),
    "dflash within windows": block("gemma2"),
    "a causal dflash within windows": block("gemma2", causal=True),
    "dspark": published(test_published_block, "dspark"),
    **({"an assistant": assistant} if ASSISTANTS else {}),
}


@pytest.mark.parametrize("case", EXPORTS)
def test_it_drafts_what_was_trained(case: str, tmp_path: Path) -> None:
    manifest = EXPORTS[case](tmp_path)
    assert manifest.parity["captured"]["streams"]["relative"] < 1e-4
    assert manifest.parity["captured"]["streams"]["rows"] == manifest.parity["streams"]["rows"]
    check_kernels(onnx.load(tmp_path / "bundle" / CAPTURED, load_external_data=False))


def test_a_drafters_keys_that_are_not_moved_fail_the_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    harming(monkeypatch, lambda model: misread(model, "", sg.past(4, sg.KEY), sg.past(3, sg.KEY)))
    with pytest.raises(StreamspecError, match="the captured graph's streams logits differ"):
        tiny_bundle(tmp_path, "fp32", method="eagle", target=TARGET)
