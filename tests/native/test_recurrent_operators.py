"""GatedDeltaRule and StateSpace over a text: rows in trees and chunks, and transformers' own modules. `test_operators`
compares single calls with float64."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GraniteMoeHybridConfig, OlmoHybridConfig, Qwen3_5TextConfig
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import GraniteMoeHybridMambaLayer
from transformers.models.olmo_hybrid.modeling_olmo_hybrid import OlmoHybridGatedDeltaNet
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from tests.support.native_cases import HIDDEN, PARTS, Array, OperatorCase, Random, floats, random_mask

TOKENS, SLOTS = 330, 256
RULE, SPACE = PARTS
SIZES = {"key_heads": 2, "heads": 4, "key_width": 32, "width": 80}
CHANNELS = 2 * 2 * 32 + 4 * 80
PACKED = {RULE: CHANNELS + 4 * 82, SPACE: CHANNELS + 4 * 81}


class Text:
    """A sequence whose rows go through the operator, and its rings."""

    def __init__(
        self,
        library: Path,
        kind: str,
        constants: dict[str, Array],
        threads: int = 1,
        attributes: dict[str, float] | None = None,
    ) -> None:
        widths = {"keys": (2, 32), "values": (4, 80), "updates": (4, 80), "inputs": (1, CHANNELS)}
        widths |= {"decays": (1, 2 * 4), "states": (1, 4 * 32 * 80 // 64), "marks": (1, 1)}
        self.rings = {name: np.zeros((1, widths[name][0], SLOTS, widths[name][1]), np.float32) for name in PARTS[kind]}
        self.length = 0
        inputs = {"packed": np.zeros((1, 1, 1), np.float32), "mask": np.zeros((1, 1), np.float32), "past": np.array(0)}
        case = OperatorCase(kind, inputs | self.rings, constants, SIZES | {"eps": 1e-6} | (attributes or {}))
        self.session = case.session(library, threads)

    def rows(self, packed: Array, mask: Array | None = None) -> Array:
        """[n, values] of rows [n, ..], of a text without a mask; commits none."""
        n = len(packed)
        mask = np.where(np.tri(n), 0.0, HIDDEN).astype(np.float32) if mask is None else mask
        feeds = {"packed": packed[None], "mask": mask, "past": np.array(self.length), **self.rings}
        y, *rings = self.session.run(None, feeds)
        self.rings = dict(zip(self.rings, rings, strict=True))
        return np.asarray(y[0])

    def commit(self, path: Sequence[int]) -> None:
        """Keeps rows of the last call, moved to the slots after the committed ones."""
        for i, row in enumerate(path):
            for ring in self.rings.values():
                ring[:, :, (self.length + i) % SLOTS] = ring[:, :, (self.length + row) % SLOTS]
        self.length += len(path)


def random_weights(rng: Random, kind: str) -> dict[str, Array]:
    """Heads that remember from a few to hundreds of tokens."""
    taps = {f"tap{i}": floats(rng, CHANNELS) for i in range(4)}
    rate = -np.exp(rng.uniform(-6, 1, 4)).astype(np.float32)
    norm = {"norm": floats(rng, 80)}
    if kind == SPACE:
        norm = {"norm": floats(rng, 320), "skip": floats(rng, 4, 1, 1), "shift": floats(rng, CHANNELS)}
    return {"bias": floats(rng, 4), "rate": rate} | norm | taps


@pytest.fixture(params=PARTS, scope="module")
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def weights(kind: str) -> dict[str, Array]:
    return random_weights(np.random.default_rng(0), kind)


@pytest.fixture(scope="module")
def packed(kind: str) -> Array:
    return floats(np.random.default_rng(1), TOKENS, PACKED[kind])


@pytest.fixture(scope="module")
def plain(library: Path, kind: str, weights: dict[str, Array], packed: Array) -> Array:
    text = Text(library, kind, weights)
    found = []
    for row in packed:
        found.append(text.rows(row[None]))
        text.commit([0])
    return np.concatenate(found)


def test_chunks_of_any_size_have_the_bits_of_rows_alone(
    library: Path, kind: str, weights: dict[str, Array], packed: Array, plain: Array
) -> None:
    for seed, most in enumerate((64, 64, 9)):
        rng, text = np.random.default_rng(seed), Text(library, kind, weights, threads=2)
        while text.length < TOKENS:
            n = 64 if seed == 0 else int(rng.integers(1, most + 1))
            rows = packed[text.length : text.length + n]
            np.testing.assert_array_equal(text.rows(rows), plain[text.length : text.length + n])
            text.commit(range(len(rows)))


def test_rows_of_trees_have_the_bits_of_rows_alone(
    library: Path, kind: str, weights: dict[str, Array], packed: Array, plain: Array
) -> None:
    rng, text, compared = np.random.default_rng(0), Text(library, kind, weights, threads=2), 0
    while text.length < TOKENS - 64:
        rows = int(rng.integers(1, 65))
        mask = random_mask(rng, rows)
        places = np.flatnonzero(mask[int(rng.integers(rows))] == 0)
        drafted = floats(rng, rows, packed.shape[1])
        drafted[places] = packed[text.length : text.length + len(places)]
        found = text.rows(drafted, mask)
        np.testing.assert_array_equal(found[places], plain[text.length : text.length + len(places)])
        compared += len(places)
        text.commit(places[: int(rng.integers(1, len(places) + 1))])
    assert compared > 300


def test_a_text_goes_on_bit_for_bit_after_going_back(
    library: Path, kind: str, weights: dict[str, Array], packed: Array, plain: Array
) -> None:
    text = Text(library, kind, weights)
    for at in range(0, 190, 38):
        text.rows(packed[at : at + 38])
        text.commit(range(38))
    for count in (1, 3, 62, 2, 40):  # other tokens, most of which end a block
        for rows in np.split(floats(np.random.default_rng(count), count, packed.shape[1]), [count // 2]):
            text.rows(rows)
            text.commit(range(len(rows)))
        text.length -= count
        found = text.rows(packed[190:240])
        np.testing.assert_array_equal(found, plain[190:240])
    text.commit(range(50))
    np.testing.assert_array_equal(text.rows(packed[240:300]), plain[240:300])


QWEN = Qwen3_5GatedDeltaNet, Qwen3_5TextConfig, [f"in_proj_{name}" for name in ("qkv", "z", "b", "a")]
OLMO = OlmoHybridGatedDeltaNet, OlmoHybridConfig, [f"{name}_proj" for name in "qkvgba"]


@pytest.mark.parametrize(
    ("made", "norm", "out", "own"),
    [(QWEN, "norm", "out_proj", {}), (OLMO, "o_norm", "o_proj", {"largest_step": 2.0, "eps": 1e-5})],
)
def test_the_rule_is_that_of_transformers(
    made: tuple[Any, Any, list[str]], norm: str, out: str, own: dict[str, float], library: Path
) -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    sizes |= {"linear_key_head_dim": 32, "linear_value_head_dim": 80}
    module = made[0](made[1](hidden_size=48, **sizes), 0).eval().requires_grad_(False)
    agree(library, RULE, module, made[2], {}, (norm, out), own)


def test_the_state_space_is_that_of_transformers(library: Path) -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"mamba_n_groups": 2, "mamba_n_heads": 4, "mamba_d_state": 32, "mamba_d_head": 80}
    sizes["mamba_chunk_size"] = 16  # its sums of decays run over a chunk, in float32
    config = GraniteMoeHybridConfig(
        hidden_size=160, num_hidden_layers=1, layer_types=["linear_attention"], rms_norm_eps=1e-6, **sizes
    )
    module = GraniteMoeHybridMambaLayer(config, 0).eval().requires_grad_(False)
    module.conv1d.bias.normal_(0, 0.1)
    agree(library, SPACE, module, ["in_proj"], {"skip": module.D[:, None, None], "shift": module.conv1d.bias})


def agree(
    library: Path,
    kind: str,
    module: Any,
    maps: Sequence[str],
    constants: dict[str, torch.Tensor],
    parts: tuple[str, str] = ("norm", "out_proj"),
    own: dict[str, float] | None = None,
) -> None:
    """Whether the operator computes what the output map of the module reads from what its input maps give. `parts`: its
    norm and its output map; `own`: attributes."""
    norm, out = (module.get_submodule(name) for name in parts)
    for weight, low, high in ((module.A_log, -6, 1), (module.dt_bias, -2, 2), (norm.weight, 0.5, 1.5)):
        weight.uniform_(low, high)
    mapped, wanted = dict[str, torch.Tensor](), list[torch.Tensor]()
    for name in maps:
        module.get_submodule(name).register_forward_hook(lambda _, args, out, name=name: mapped.update({name: out[0]}))
    out.register_forward_hook(lambda _, args, out: wanted.append(args[0][0]))
    module(torch.randn(1, TOKENS, module.get_submodule(maps[0]).in_features))
    constants = constants | {"bias": module.dt_bias, "rate": -module.A_log.exp(), "norm": norm.weight}
    constants |= {f"tap{i}": module.conv1d.weight[:, 0, -1 - i] for i in range(4)}
    text = Text(library, kind, {name: np.ascontiguousarray(x.numpy()) for name, x in constants.items()}, 1, own)
    packed, found = torch.cat([mapped[name] for name in maps], 1).numpy(), []
    for at in range(0, TOKENS, 50):
        found.append(text.rows(packed[at : at + 50]))
        text.commit(range(len(found[-1])))
    expected = wanted[0].numpy()
    off = np.abs(np.concatenate(found) - expected).max() / expected.std()
    assert off < 1e-4, off
