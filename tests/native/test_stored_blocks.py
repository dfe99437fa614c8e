"""Blocks of GGUF files in tiles keep every weight: looked up, they are what the `gguf` package decodes, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest

from streamspec.errors import ConfigError
from streamspec.export.file_blocks.kinds import KINDS, decode
from streamspec.export.native.layout import TILE
from streamspec.export.native.stored_blocks import packed
from streamspec.runtime.hardware import native_library
from tests.support.gguf_blocks import ggml_type, random_blocks, values
from tests.support.native_cases import Array, OperatorCase, of_blocks


def looked_up(library: Path, stored: object, gated: bool = False) -> Array:
    constants, attributes = of_blocks(stored, gated)  # type: ignore[arg-type]
    case = OperatorCase("EmbeddingBlocks", {"ids": np.arange(attributes["out_features"])}, constants, attributes)
    return case.changed().run(library)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_no_weight_changes(library: Path, kind: str) -> None:
    for seed, (outputs, inputs) in enumerate([(70, 512), (32, 256), (1, 768)]):
        stored = random_blocks(np.random.default_rng(seed), kind, outputs, inputs)
        assert np.array_equal(looked_up(library, stored).view(np.int32), values(stored).view(np.int32))


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4"])
def test_no_weight_changes_of_those_that_gguf_rounds(library: Path, kind: str) -> None:
    weight = np.random.default_rng(0).standard_normal((40, 96)).astype(np.float32)
    weight[3, 32:64] = 0
    stored = replace(random_blocks(np.random.default_rng(0), kind, 40, 96), data=gguf.quantize(weight, ggml_type(kind)))
    found = looked_up(library, stored)
    assert np.array_equal(found.view(np.int32), values(stored).view(np.int32))
    assert np.corrcoef(found.reshape(-1), weight.reshape(-1))[0, 1] > 0.98


@pytest.mark.parametrize("kind", KINDS)
def test_a_gated_map_has_16_rows_of_each_half_in_turn(kind: str) -> None:
    stored = random_blocks(np.random.default_rng(1), kind, 2 * TILE, 256)
    order = np.concatenate([np.arange(16) + start for start in (0, 32, 16, 48)])
    plain = packed(replace(stored, data=stored.data[order]))
    for name, found in vars(packed(stored, gated=True)).items():
        assert found is None or np.array_equal(found, getattr(plain, name)), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gated", [False, True])
def test_tiles_and_weights_are_the_same_without_the_library(
    library: Path, monkeypatch: pytest.MonkeyPatch, kind: str, gated: bool
) -> None:
    stored = random_blocks(np.random.default_rng(3), kind, 64 if gated else 70, 512)
    tiles, weights, again = packed(stored, gated), *(np.empty_like(values(stored)) for _ in range(2))
    decode(KINDS[kind], stored.data, weights)
    monkeypatch.setattr(native_library, "library", lambda: None)
    for name, found in vars(packed(stored, gated)).items():
        expected = getattr(tiles, name)
        assert found is expected is None or (found.dtype == expected.dtype and np.array_equal(found, expected)), name
    decode(KINDS[kind], stored.data, again)
    assert np.array_equal(again.view(np.int32), weights.view(np.int32))
    assert np.array_equal(weights.view(np.int32), values(stored).view(np.int32))


@pytest.mark.parametrize("kind", KINDS)
def test_a_product_is_that_of_the_files_weights(library: Path, kind: str) -> None:
    rng = np.random.default_rng(2)
    stored, x = random_blocks(rng, kind, 70, 512), rng.standard_normal((5, 512)).astype(np.float32)
    x[:, 7] *= 100  # an outlier costs its own block alone
    constants, attributes = of_blocks(stored)
    [found] = OperatorCase("LinearBlocks", {"x": x}, constants, attributes).run(library)
    blocks = x.reshape(5, -1, 32)
    step = np.abs(blocks).max(-1, keepdims=True) * np.float32(1 / 127)
    rounded = (np.rint(blocks / step) * step.astype(np.float64)).reshape(x.shape)
    weights = values(stored).astype(np.float64)
    assert np.abs(found - rounded @ weights.T).max() < 1e-6 * (np.abs(rounded) @ np.abs(weights).T).max()


@pytest.mark.parametrize("kind", KINDS)
def test_an_expert_of_a_stack_has_the_bits_of_its_own_map(library: Path, kind: str) -> None:
    rng = np.random.default_rng(4)
    every = [of_blocks(random_blocks(rng, kind, 40, 512)) for _ in range(3)]
    x, chosen = rng.standard_normal((4, 512)).astype(np.float32), np.array([[2, 0], [0, 1], [1, 2], [2, 1]])
    whole = {name: np.concatenate([constants[name] for constants, _ in every]) for name in every[0][0]}
    whole |= {name: table for name, table in every[0][0].items() if name == "table"}
    [found] = OperatorCase("ExpertsBlocks", {"x": x, "chosen": chosen}, whole, every[0][1] | {"maps": 3}).run(library)
    alone = np.stack([OperatorCase("LinearBlocks", {"x": x}, *one).run(library)[0] for one in every], 1)
    assert np.array_equal(found, np.take_along_axis(alone, chosen[..., None], 1))


def test_rows_that_are_none_are_refused() -> None:
    stored = random_blocks(np.random.default_rng(0), "Q4_K", 4, 512)
    for wrong in (replace(stored, columns=500), replace(stored, columns=256), replace(stored, data=stored.data[:, 1:])):
        with pytest.raises(ConfigError, match="144 for each 256"):
            packed(wrong)
    stored.data[1, :2] = 0xFF
    with pytest.raises(ConfigError, match="no finite number"):
        packed(stored)


def test_exponents_beyond_float16_are_refused_unless_the_block_is_empty(library: Path) -> None:
    stored = random_blocks(np.random.default_rng(0), "MXFP4", 4, 64)
    stored.data[2, 0] = 200
    with pytest.raises(ConfigError, match="MXFP4 block of an exponent beyond float16's; expected 104 to 143"):
        packed(stored)
    stored.data[2, 1:17] &= 0x88
    assert np.array_equal(looked_up(library, stored).view(np.int32), values(stored).view(np.int32))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"bits": 6}, "a table of codes of another width, expected 4 bits"),
        ({"offset": 8}, "offset 8, expected 0 to 63, 0 of 8 bits and of a table"),
        ({"block_size": 16}, "block_size 16, expected 32, or 16 with multipliers"),
    ],
)
def test_a_table_belongs_to_blocks_of_32_codes_of_4_bits(library: Path, changes: dict[str, int], words: str) -> None:
    constants, attributes = of_blocks(random_blocks(np.random.default_rng(0), "IQ4_XS", 32, 256))
    x = np.zeros((1, 256), np.float32)
    with pytest.raises(Exception, match=words):
        OperatorCase("LinearBlocks", {"x": x}, constants, attributes | changes).run(library)
    with pytest.raises(Exception, match=r"a table int8 \[15\], expected int8 \[16\]"):
        OperatorCase("LinearBlocks", {"x": x}, constants | {"table": constants["table"][1:]}, attributes).run(library)
