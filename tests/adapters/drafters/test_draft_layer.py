"""The draft layer against a row-by-row reference, its start, its experts and its losses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache

from streamspec.adapters.base_models.hf_decoder import HFDecoder, with_cache
from streamspec.adapters.dataset.token_rows import TokenRow
from streamspec.adapters.drafters.draft_layer.config import DraftLayerConfig
from streamspec.adapters.drafters.draft_layer.experts import Experts
from streamspec.adapters.drafters.draft_layer.model import DraftLayerModel, draft_layer_losses
from streamspec.adapters.drafters.draft_layer.start import fit_start
from streamspec.adapters.drafters.drafting_model import DraftRows, DraftTargets
from streamspec.adapters.drafters.layer_copy import copy_last_layer
from streamspec.adapters.drafters.least_squares import unit_rms
from streamspec.adapters.drafters.losses import pick_passes, pick_rows
from streamspec.errors import ConfigError
from tests.support.tiny_models import tiny_model

IDS = torch.tensor([[5, 9, 12, 33, 7, 41, 8, 20], [11, 3, 21, 11, 2, 0, 0, 0]])
MASK = (IDS > 0).long()
GAMMA = 4
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def jakiro(family: str = "llama", **shape: object) -> DraftLayerModel:
    torch.manual_seed(0)
    model = DraftLayerModel(tiny_model(family), DraftLayerConfig(GAMMA, **shape)).eval()  # type: ignore[arg-type]
    with torch.no_grad():
        for name, parameter in model.drafter_tensors().items():
            if "norm" not in name:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def one_by_one(model: DraftLayerModel, ids: Tensor, t: int, following: list[int]) -> list[Tensor]:
    """States at every depth after row `t`: the layer over rows 0..t, then one row for each token that it drafted."""
    with torch.no_grad():
        entry = model.main_pass(ids[None], torch.ones(1, len(ids))).entry[0]
    cache, out, last = DynamicCache(), [], torch.empty(0)
    for module in (model, *model.heads):
        if module.attention is not None:
            module.attention.layer_idx = 0
    shape, embed = model.config, model.decoder.embedding.weight
    states = [torch.cat([unit_rms(m) for m in row.split(32)]) for row in entry]
    rows = [(int(ids[i + 1]), model.from_entry @ states[i]) for i in range(t + 1)]
    for position in range(t + model.passes):
        token, state = rows[position] if position <= t else (following[position - t - 1], out[-1])
        own = min(max(position - t, 0), len(model.heads))
        part = model.heads[own - 1] if own else model
        if position > t:
            one_map = shape.taps == (0,) and not model.heads
            state = model.from_entry @ unit_rms(state) if one_map else part.from_state @ state
        x = part.from_token @ unit_rms(embed[token]) + state + part.bias
        where = torch.tensor([[position]])
        rotary = model.decoder.rotary_embeddings(x[None, None], where)
        u = (
            x
            if (shape.prefix_attention and position > t) or (shape.own_heads and not shape.prefix_attention)
            else x
            + part.attention(
                part.norm_in(x)[None, None],
                position_embeddings=rotary,
                attention_mask=None,
                **with_cache(part.attention, cache),
                cache_position=where[0],
            )[0][0, 0]
        )
        said = part.experts(part.norm_mid(u))
        if position >= t:
            out.append(model.norm_out(u + said.mixture))
            last = u + (said.last if shape.contrast else said.mixture)
    if shape.parallel:
        return [
            *out,
            model.norm_out(model.last_state @ last + model.last_token @ unit_rms(embed[following[GAMMA - 2]])),
        ]
    return [*out[:-1], model.norm_out(model.last_state @ last)] if shape.contrast else out


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("contrast", "parallel", "taps"),
    [(True, True, (2,)), (False, True, (3, 1)), (True, False, (2,)), (False, False, (1,))],
)
@pytest.mark.parametrize("prefix", [False, True])
@torch.no_grad()
def test_depths_equal_the_row_by_row_reference(
    family: str, contrast: bool, parallel: bool, taps: tuple[int, ...], prefix: bool
) -> None:
    model = jakiro(family, contrast=contrast, parallel=parallel, taps=taps, prefix_attention=prefix)
    rows, roots = torch.tensor([[1, 3], [0, 2]]), torch.tensor([[12, 7], [3, 11]])
    labels = torch.randint(1, 60, (2, 2, GAMMA))
    states = model.draft_pass(model.main_pass(IDS, MASK), DraftRows(rows, roots, labels))
    assert states.shape == (2, 2, GAMMA, 32)
    for b in range(2):
        for p in range(2):
            expected = one_by_one(model, IDS[b, : int(MASK[b].sum())], int(rows[b, p]), labels[b, p].tolist())
            torch.testing.assert_close(states[b, p], torch.stack(expected), atol=2e-4, rtol=2e-4)


@torch.no_grad()
def test_heads_of_their_own_equal_the_row_by_row_reference() -> None:
    model = jakiro(experts=1, active=1, contrast=False, parallel=False, prefix_attention=True, own_heads=True)
    labels = torch.randint(1, 60, (1, 1, GAMMA))
    picked = DraftRows(torch.tensor([[3]]), torch.tensor([[7]]), labels)
    states = model.draft_pass(model.main_pass(IDS[:1], MASK[:1]), picked)
    torch.testing.assert_close(
        states[0, 0], torch.stack(one_by_one(model, IDS[0], 3, labels[0, 0].tolist())), atol=2e-4, rtol=2e-4
    )
    model.heads[1].bias.add_(1)  # the third pass's
    moved = model.draft_pass(model.main_pass(IDS[:1], MASK[:1]), picked)
    assert torch.equal(moved[:, :, :2], states[:, :, :2]) and not torch.allclose(moved[:, :, 2], states[:, :, 2])


ONE = {"experts": 1, "active": 1, "contrast": False, "parallel": False}


@pytest.mark.parametrize(
    "shape",
    [
        {**ONE, "taps": (0,)},  # EAGLE
        {"taps": (0, 2)},
        {"taps": (0,), "two_lists": False, "experts": 4},
        {**ONE, "own_heads": True},  # plain Hydra
        {**ONE, "depth": 3, "taps": (0,)},  # DeepSeek-V3
        {**ONE, "depth": 4},
    ],
    ids=str,
)
@torch.no_grad()
def test_other_published_layers_equal_the_row_by_row_reference(shape: dict) -> None:
    model = jakiro("qwen3", **shape)
    labels = torch.randint(1, 60, (1, 1, GAMMA))
    picked = DraftRows(torch.tensor([[3]]), torch.tensor([[7]]), labels)
    states = model.draft_pass(model.main_pass(IDS[:1], MASK[:1]), picked)
    expected = torch.stack(one_by_one(model, IDS[0], 3, labels[0, 0].tolist()))
    torch.testing.assert_close(states[0, 0], expected, atol=2e-4, rtol=2e-4)


@torch.no_grad()
def test_the_finished_state_is_what_the_head_reads() -> None:
    main = jakiro(taps=(0, 2)).main_pass(IDS, MASK)
    assert torch.equal(main.entry[..., :32], main.final)
    assert torch.equal(main.entry[..., 32:], jakiro().main_pass(IDS, MASK).entry)


def test_every_module_learns_its_depth_alone() -> None:
    model = jakiro(**ONE, depth=3)
    batch = {"input_ids": IDS, "attention_mask": MASK, "loss_mask": MASK.bool()}
    picked = pick_rows(batch, GAMMA, 8)
    model.zero_grad()
    depths = draft_layer_losses(model, DraftTargets(model.main_pass(IDS, MASK), picked), passes=3)["depths"]
    assert len(depths) == 3
    depths[1].backward()
    assert bool(model.heads[0].attention.q_proj.weight.grad.any()) and not model.heads[1].bias.grad.any()
    assert bool(model.attention.q_proj.weight.grad.any())  # through the state that it hands on


@torch.no_grad()
def test_plain_hydra_reads_no_earlier_row() -> None:
    plain, prefix = jakiro(**ONE, own_heads=True), jakiro(**ONE, own_heads=True, prefix_attention=True)
    assert not any("attention" in name for name in plain.drafter_tensors())
    for model, alike in ((plain, True), (prefix, False)):
        main = model.main_pass(IDS[:1], MASK[:1])
        picked = DraftRows(torch.tensor([[3]]), torch.tensor([[7]]), torch.tensor([[[8, 9, 10, 11]]]))
        before = model.draft_pass(main, picked)
        main.entry[:, :3] += 1
        assert torch.equal(model.draft_pass(main, picked), before) == alike


@pytest.mark.parametrize("vocabulary", [None, torch.arange(5, 40)])
@torch.no_grad()
def test_two_lists_have_the_mean_probabilities_of_their_experts(vocabulary: Tensor | None) -> None:
    model, other = jakiro(two_lists=True, experts=3), jakiro(experts=3)
    picked = DraftRows(torch.tensor([[3]]), torch.tensor([[7]]), torch.randint(1, 60, (1, 1, GAMMA)))
    main = model.main_pass(IDS[:1], MASK[:1])
    depths = torch.arange(GAMMA)
    probabilities = model.draft_logits(model.draft_pass(main, picked)[0, 0], depths, vocabulary).exp()
    torch.testing.assert_close(probabilities.sum(-1), torch.ones(GAMMA))
    one_list = other.draft_logits(other.draft_pass(main, picked)[0, 0], depths, vocabulary).softmax(-1)
    torch.testing.assert_close(probabilities[-1], one_list[-1])  # the last position's branch has one list
    assert not torch.allclose(probabilities[:-1], one_list[:-1], atol=1e-3)
    # The first depth, by hand.
    seen = {}
    hook = model.experts.register_forward_pre_hook(lambda _, z: seen.setdefault("z", z[0]))
    rest = model.norm_mid.register_forward_pre_hook(lambda _, u: seen.setdefault("u", u[0]))
    model.unroll(main, picked, 1)
    hook.remove(), rest.remove()
    z, u, experts = seen["z"][0, 3], seen["u"][0, 3], model.experts
    scores = torch.nn.functional.linear(z, experts.router)[:3]
    best = scores.argsort(descending=True)[:2]
    weights = scores[best].softmax(0)
    said = [u + (nn.functional.silu(experts.gate[i] @ z) * (experts.up[i] @ z)) @ experts.down[i] for i in best]
    expected = sum(
        w * model.head(model.norm_out(x), vocabulary).softmax(-1) for w, x in zip(weights, said, strict=True)
    )
    torch.testing.assert_close(probabilities[0], expected)


def test_two_lists_learn_together() -> None:
    model = jakiro(two_lists=True)
    batch = {"input_ids": IDS, "attention_mask": MASK, "loss_mask": MASK.bool()}
    optimiser = torch.optim.Adam(list(model.drafter_tensors().values()), lr=3e-3)
    main, seen = model.main_pass(IDS, MASK), []
    for _ in range(60):
        loss = draft_layer_losses(model, DraftTargets(main, pick_rows(batch, GAMMA, 8)))["depths"].mean()
        optimiser.zero_grad()
        loss.backward(retain_graph=True)
        optimiser.step()
        seen.append(float(loss.detach()))
    assert seen[-1] < 0.5 * seen[0]


@torch.no_grad()
def test_only_the_best_experts_count() -> None:
    experts = Experts(copy_last_layer(HFDecoder(tiny_model("llama"))).mlp, 4, 2)
    experts.router.copy_(torch.randn_like(experts.router))
    z = torch.randn(16, 32)
    scores = torch.nn.functional.linear(z, experts.router)
    said = torch.stack(
        [(nn.functional.silu(z @ experts.gate[i].T) * (z @ experts.up[i].T)) @ experts.down[i] for i in range(4)]
    )
    found = experts(z)
    assert found.last is not None
    for row, (mixture, contrast) in enumerate(zip(found.mixture, found.last, strict=True)):
        first, second = scores[row, :4].argsort(descending=True)[:2].tolist()
        a = scores[row, [first, second]].softmax(0)  # of all four, over the sum of the two
        high, low = scores[row, 4:].softmax(0).sort(descending=True).values
        torch.testing.assert_close(mixture, a[0] * said[first, row] + a[1] * said[second, row], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(contrast, high * said[first, row] - low * said[second, row], atol=1e-5, rtol=1e-4)
        assert (
            found.shares[row, [first, second]].tolist() == pytest.approx(a.tolist())
            and (found.shares[row] > 0).sum() == 2
        )
        assert float(found.overlap[row]) == pytest.approx(
            float(torch.cosine_similarity(said[first, row], said[second, row], dim=0)) ** 2, abs=1e-5
        )


def test_learning_lowers_all_losses_and_leaves_the_target_alone() -> None:
    model = jakiro()
    before = {n: p.clone() for n, p in model.model.named_parameters()}
    model.model.requires_grad_(False)
    batch = {"input_ids": IDS, "attention_mask": MASK, "loss_mask": MASK.bool()}
    optimiser = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    seen = []
    for _ in range(60):
        with torch.no_grad():
            main = model.main_pass(IDS, MASK)
        found = draft_layer_losses(model, DraftTargets(main, pick_rows(batch, GAMMA, 8)))
        assert found["depths"].shape == (GAMMA - 1,) and found["last"].shape == ()
        total = found["depths"].mean() + found["last"] + 3 * found["state"]
        optimiser.zero_grad()
        total.backward()
        optimiser.step()
        seen.append(torch.stack([found["depths"].mean(), found["last"], found["state"]]).detach())
    assert bool((seen[-1] < 0.5 * seen[0])[:2].all()) and seen[-1][2] < seen[0][2]
    assert all(torch.equal(p, before[n]) for n, p in model.model.named_parameters())
    assert all(p.grad is not None for p in model.drafter_tensors().values())


def test_the_last_positions_branch_teaches_the_layer_in_its_own_pass_alone() -> None:
    model = jakiro()
    batch = {"input_ids": IDS, "attention_mask": MASK, "loss_mask": MASK.bool()}
    for passes in range(1, model.passes + 1):
        model.zero_grad()
        draft_layer_losses(model, DraftTargets(model.main_pass(IDS, MASK), pick_rows(batch, GAMMA, 8)), passes=passes)[
            "last"
        ].backward()
        assert model.last_state.grad is not None and model.last_token.grad is not None  # type: ignore[union-attr]
        taught = model.experts.down.grad
        assert bool(taught is not None and taught.any()) == (passes == model.passes)


@torch.no_grad()
def test_answers_of_a_single_token_teach_nothing() -> None:
    model = jakiro()
    batch = {"input_ids": IDS, "attention_mask": MASK, "loss_mask": torch.zeros_like(MASK).bool()}
    batch["loss_mask"][0, 7] = batch["loss_mask"][1, 4] = True
    found = draft_layer_losses(model, DraftTargets(model.main_pass(IDS, MASK), pick_rows(batch, GAMMA, 8)))
    assert all(bool((value == 0).all()) for value in found.values())


@torch.no_grad()
def test_training_counts_as_many_passes_as_asked_for() -> None:
    model = jakiro()
    batch = {"input_ids": IDS, "attention_mask": MASK, "loss_mask": MASK.bool()}
    main, picked = model.main_pass(IDS, MASK), pick_rows(batch, GAMMA, 8)
    every = draft_layer_losses(model, DraftTargets(main, picked))
    for passes in (1, 2, 9):
        found = draft_layer_losses(model, DraftTargets(main, picked), passes=passes)
        torch.testing.assert_close(found["depths"], every["depths"][:passes])


def test_passes_are_drawn_in_proportion_to_one_over_their_number() -> None:
    torch.manual_seed(0)
    drawn = torch.bincount(torch.tensor([pick_passes(4, i / 5000) for i in range(5000)]), minlength=5)
    expected = 5000 * torch.tensor([0, 1, 1 / 2, 1 / 3, 1 / 4]) / (25 / 12)
    assert (
        drawn[0] == 0 and float(((drawn - expected)[1:] ** 2 / expected[1:]).sum()) < 16.3
    )  # chi-square, 3 degrees of freedom, 0.1 %
    assert {pick_passes(1, i / 9) for i in range(9)} == {1}


def test_experts_that_pay_for_it_come_to_differ() -> None:
    model = jakiro(experts=4)
    batch = {"input_ids": IDS, "attention_mask": MASK, "loss_mask": MASK.bool()}
    optimiser = torch.optim.Adam(model.experts.parameters(), lr=3e-3)
    main, alike = model.main_pass(IDS, MASK), []
    for _ in range(60):
        loss = draft_layer_losses(model, DraftTargets(main, pick_rows(batch, GAMMA, 8)))["alike"]
        optimiser.zero_grad()
        loss.backward(retain_graph=True)
        optimiser.step()
        alike.append(float(loss.detach()))
    assert min(alike) > -1e-5 and alike[-1] < 0.3 * alike[0]


def test_statistics_say_how_experts_are_used_and_where_branches_agree() -> None:
    model, rows = jakiro(experts=4), [TokenRow(IDS[0].tolist(), [True] * 8)] * 3
    with torch.no_grad():
        model.experts.router.zero_()[2] = 40.0 * torch.ones(32)
        model.experts.router[3] = -40.0 * torch.ones(32)
        model.norm_mid.weight.fill_(1.0)
    found = model.statistics(rows, None)
    shares = found["expert_shares"]
    assert (
        isinstance(shares, list) and sum(shares) == pytest.approx(1, abs=2e-3) and shares[2] + shares[3] > 0.9
    )  # one or the other
    assert 0 <= found["branches_agree"] <= 1 and 0 <= found["expert_overlap"] <= 1  # type: ignore[operator]
    with torch.no_grad():  # a last branch that says what the mixture says agrees with it
        unrolled = model.unroll

        def agreeing(main, picked, _):
            said = unrolled(main, picked, model.passes)
            return said._replace(last=said.mixture[:, :, -1])

        model.unroll = agreeing  # type: ignore[method-assign]
    assert model.statistics(rows, None)["branches_agree"] == 1
    assert jakiro(parallel=False).statistics(rows, None)["branches_agree"] < 1
    plain = jakiro(experts=1, active=1, contrast=False, parallel=False)
    assert "branches_agree" not in plain.statistics(rows, None)


@pytest.mark.parametrize("taps", [(-1,), (2, 5)])
def test_states_of_layers_that_are_not_there_are_refused(taps: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="taps"):
        jakiro(taps=taps)


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"taps": (1, 3)},
        {"parallel": False},
        {"contrast": False},
        {"two_lists": True},
        {"prefix_attention": True, "own_heads": True},
        {"own_heads": True},
        {"taps": (0,)},
        {"depth": 2, "taps": (0,)},
    ],
)
@torch.no_grad()
def test_the_start_foretells_what_the_last_layer_sees_next(shape: dict) -> None:
    torch.manual_seed(0)
    model = DraftLayerModel(tiny_model("llama"), DraftLayerConfig(GAMMA, **shape)).eval()
    ids = torch.randint(3, 60, (48, 12))
    mask = torch.ones_like(ids)
    mask[::2, 9:] = 0
    batch = {"input_ids": ids, "loss_mask": mask.bool()}

    def losses() -> dict[str, Tensor]:
        picked = pick_rows(batch, GAMMA, 4, torch.Generator().manual_seed(0))
        return draft_layer_losses(model, DraftTargets(model.main_pass(ids, mask), picked, labels="kl"))

    before, last = losses()["depths"], losses()["last"]
    left = fit_start(model, [(ids[:24], mask[:24]), (ids[24:], mask[24:])])
    assert 0 < left < 0.9
    assert bool((losses()["depths"] < before).all()) and bool(losses()["last"] < last)
    assert fit_start(model, [(ids[:, :1], mask[:, :1])]) == 1.0  # texts too short to learn from
    assert fit_start(model, [(ids[:, :2], mask[:, :2])]) < 1.0  # or for all but the last depth
    alone = DraftLayerModel(
        tiny_model("llama"), DraftLayerConfig(1, 1, 1, False, False, prefix_attention=True, own_heads=True)
    ).eval()
    assert fit_start(alone, [(ids[:24], mask[:24])]) < 0.9 and not alone.heads
