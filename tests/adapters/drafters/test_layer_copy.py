"""A draft layer of every family begins as the target's last layer, and learns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache

from streamspec.adapters.base_models.experts import experts_of
from streamspec.adapters.base_models.hf_decoder import HFDecoder
from streamspec.adapters.drafters.draft_layer.config import DraftLayerConfig
from streamspec.adapters.drafters.draft_layer.model import DraftLayerModel, draft_layer_losses
from streamspec.adapters.drafters.draft_layer.start import fit_start, last_and_true
from streamspec.adapters.drafters.drafting_model import DraftTargets
from streamspec.adapters.drafters.losses import pick_rows
from tests.support.latent_families import LATENT
from tests.support.mixture_families import EXPERTS, MIXTURES
from tests.support.near_families import VARIED
from tests.support.recurrent_families import WHOLE
from tests.support.tiny_models import SIZES, tiny_model

GAMMA = 3
ONE: dict[str, Any] = {"experts": 1, "active": 1, "contrast": False, "parallel": False}
METHODS = {
    "jakiro": {},
    "eagle": ONE,
    "mtp": ONE | {"taps": (1,)},
    "mtp-3": ONE | {"taps": (0,), "depth": 3},
    "hydra": ONE | {"prefix_attention": True, "own_heads": True},
    "hydra-plain": ONE | {"own_heads": True},
}
IDS = torch.arange(3, 51).reshape(4, 12)
MASK = torch.ones_like(IDS)


def drafter(family: str, **shape: Any) -> DraftLayerModel:
    """On a base whose norms and biases are random too."""
    base = tiny_model(family)
    with torch.no_grad():
        for name, parameter in base.named_parameters():
            if parameter.ndim == 1:
                parameter.uniform_(-0.3, 0.3).add_(0.0 if name.endswith("bias") else 1.0)
    decoder = HFDecoder(base.requires_grad_(False))
    window = decoder.window(decoder.last_attention)
    return DraftLayerModel(base, DraftLayerConfig(GAMMA, window=window, **shape)).eval()


def without_experts(model: DraftLayerModel) -> None:
    """The target's experts add nothing, as the channels that a fresh draft layer has in their place."""
    layer, names = model.decoder.layers[model.decoder.last_attention], model.decoder.family.mixture
    if names is not None and experts_of(layer, names.experts) is not None:
        channels = model.decoder.model.config.intermediate_size if names.around else EXPERTS["num_experts_per_tok"] * 64
        assert model.experts.up.shape[0] * model.experts.up.shape[1] == channels
        assert model.experts.up.any() and bool(model.experts.down.any()) == bool(names.around)
        shared = () if names.around else names.shared[1]  # else it is what the layer starts as
        for name, parameter in layer.named_parameters():
            if name.startswith((f"{names.experts}.down_proj", *shared)):
                parameter.zero_()


@pytest.mark.parametrize(
    ("family", "experts"),
    [*((family, 2) for family in (*SIZES, *WHOLE, *MIXTURES, *LATENT)), ("phi", 1), ("gemma2", 1), ("gpt_oss", 1)],
)
@torch.no_grad()
def test_the_layer_computes_what_the_targets_last_layer_computes(family: str, experts: int) -> None:
    model = drafter(family, **(ONE if experts == 1 else {"contrast": False, "parallel": False}))
    if model.experts.router is not None:
        model.experts.router.zero_()  # both experts together are the MLP
    without_experts(model)
    length, last, decoder = IDS.shape[1], model.decoder.last_attention, model.decoder
    hidden, positions = torch.randn(4, length, 32), torch.arange(length).expand(4, -1)
    model.from_token.zero_()
    main = model.main_pass(IDS, MASK)
    model.entries = lambda _: hidden  # type: ignore[method-assign]
    found = model.main_rows(main).mixture
    back = torch.arange(length)[:, None] - torch.arange(length)
    window = decoder.window(last) or length
    mask = torch.zeros(4, 1, length, length).masked_fill((back < 0) | (back >= window), torch.finfo(torch.float32).min)
    rotary = decoder.rotary_embeddings(hidden, positions)
    if decoder.family.conv_beside:  # the drafter's layer has attention alone
        delattr(decoder.layers[last], str(decoder.family.conv))
    expected = decoder.call_layer(last, hidden, mask, positions, rotary, DynamicCache())
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("family", ["llama", "gemma2", "phi"])
@torch.no_grad()
def test_the_last_branch_is_fitted_to_states_before_the_last_norms_weight(family: str) -> None:
    model = drafter(family)
    main = model.main_pass(IDS, MASK)
    _, true = last_and_true(model, main, MASK.bool())
    torch.testing.assert_close(true.pow(2).mean(-1), torch.ones(len(true)), atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(model.norm_out(true), main.final[:, 2:].flatten(0, 1), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", [*VARIED, "qwen3_5_text", "ernie4_5_moe"])
def test_training_lowers_the_losses_of_every_depth(family: str, method: str) -> None:
    model = drafter(family, **METHODS[method])
    left = fit_start(model, [(IDS, MASK)])
    assert 0 <= left < 0.9
    batch = {"input_ids": IDS, "attention_mask": MASK, "loss_mask": MASK.bool()}
    parameters = model.drafter_tensors()
    main, picked = model.train().main_pass(IDS, MASK), pick_rows(batch, GAMMA, 12)
    optimiser, seen = torch.optim.Adam(parameters.values(), lr=1e-2), []
    for _ in range(6):
        found = draft_layer_losses(model, DraftTargets(main, picked))
        optimiser.zero_grad()
        (found["depths"].sum() + found.get("last", 0)).backward()
        optimiser.step()
        seen.append(found["depths"].detach())
    assert bool((seen[-1] < 0.9 * seen[0]).all())
    assert all(value.grad is not None for value in parameters.values())
