"""Short convolutions over trees and in pieces, against Hugging Face's own module over one text."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import Lfm2Config
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv

from streamspec.adapters.base_models.token_mixers.short_conv import last_seen, short_conv
from streamspec.draft_tree import MASKED, DraftTree

TREE = DraftTree((0, 0, 0, 1, 2, 3, 3), (0, 0, 1, 0, 0, 0, 1))
PROMPT, HIDDEN = 4, 8


class Kept:
    """A cache of what came before."""

    def __init__(self) -> None:
        self.rows = torch.empty(1, 1, 0, HIDDEN)

    def update(self, key: torch.Tensor, value: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        assert value.shape[-1] == 0
        self.rows = torch.cat([self.rows, key], dim=2)
        return self.rows, value


def module(taps: int = 3) -> Lfm2ShortConv:
    torch.manual_seed(0)
    config = Lfm2Config(hidden_size=HIDDEN, num_hidden_layers=1, layer_types=["conv"], conv_L_cache=taps)
    return Lfm2ShortConv(config, 0).eval().requires_grad_(False)


def mask(sees: np.ndarray) -> torch.Tensor:
    return torch.where(torch.as_tensor(sees), 0.0, MASKED)[None, None]


@pytest.mark.parametrize("taps", [2, 3, 4])
def test_rows_of_a_tree_are_those_of_each_path_alone(taps: int) -> None:
    conv, states = module(taps), torch.randn(1, PROMPT + len(TREE), HIDDEN)
    kept = Kept()
    short_conv(conv, states[:, :PROMPT], mask(np.tri(PROMPT, dtype=bool)), kept, 0)
    sees = np.concatenate([np.ones((len(TREE), PROMPT), bool), TREE.ancestors], axis=1)
    ours = short_conv(conv, states[:, PROMPT:], mask(sees), kept, 0)
    for node in range(len(TREE)):
        path = [*range(PROMPT), *(PROMPT + step for step in TREE.path(node))]
        expected = conv(states[:, path])[:, -1]
        torch.testing.assert_close(ours[:, node], expected, atol=1e-6, rtol=1e-5)


def test_the_first_rows_of_a_text_have_fewer_before_them() -> None:
    conv, states = module(4), torch.randn(1, 2, HIDDEN)
    ours = short_conv(conv, states, mask(np.tri(2, dtype=bool)), Kept(), 0)
    torch.testing.assert_close(ours, conv(states), atol=1e-6, rtol=1e-5)


def test_last_seen_columns_ascend() -> None:
    sees = np.array([[1, 1, 0, 1, 1, 0], [1, 0, 0, 0, 0, 0]], bool)
    assert last_seen(mask(sees), 3).tolist() == [[[1, 3, 4], [-1, -1, 0]]]
