"""Weights of a GGUF file's blocks are those that the `gguf` package decodes, whoever decodes them here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from streamspec.errors import BaseModelError
from streamspec.export.weights import checkpoint
from streamspec.export.weights.target import resolve_readable
from streamspec.runtime.hardware import native_library
from tests.support.gguf_cases import in_blocks

WEIGHTS = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.layers.1.mlp.down_proj.weight": "blk.1.ffn_down.weight",
}
Open = Callable[[str], tuple[checkpoint.Checkpoint, dict[str, np.ndarray]]]


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Open:
    """The checkpoint of a tiny file of a kind of blocks, and what `gguf` decodes of it."""

    def open_(kind: str) -> tuple[checkpoint.Checkpoint, dict[str, np.ndarray]]:
        monkeypatch.setenv("STREAMSPEC_CACHE", str(tmp_path / "cache"))
        path, values = in_blocks(tmp_path / f"{kind}.gguf", kind)
        truth = {name: values[stored] for name, stored in WEIGHTS.items()}
        return checkpoint.open_checkpoint(resolve_readable(path, lambda line: None)), truth

    return open_


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K", "Q6_K", "Q8_0", "MXFP4", "F16"])
def test_weights_are_those_of_the_gguf_package(opened: Open, kind: str) -> None:
    found, truth = opened(kind)
    for name, expected in truth.items():
        assert np.array_equal(found.weight(name), expected), name
        some = np.array([3, 1])
        assert np.array_equal(found.table(name)[some], expected[some]), name


def test_blocks_that_decode_otherwise_are_refused(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    if native_library.library() is None:
        pytest.skip("no native operators here")
    found, truth = opened("Q4_K")
    monkeypatch.setattr(checkpoint, "decode", lambda kind, data, out: out.fill(1.5))
    with pytest.raises(BaseModelError, match="Q4_K that decode otherwise than by the gguf package"):
        found.weight(next(iter(truth)))
    monkeypatch.setattr(native_library, "library", lambda: None)  # what the message advises
    name, expected = next(iter(truth.items()))
    assert np.array_equal(found.weight(name), expected)
