"""The block drafter against a row-by-row reference, its start, and what it is trained on."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from streamspec.adapters.base_models.hf_decoder import with_cache
from streamspec.adapters.drafters.dflash.config import BlockConfig, check_block_base, taps_of
from streamspec.adapters.drafters.dflash.model import BlockDraftModel
from streamspec.adapters.drafters.drafting_model import DraftRows
from streamspec.adapters.drafters.least_squares import unit_rms
from streamspec.adapters.drafters.streams.model import fit_start
from streamspec.adapters.train import train
from streamspec.adapters.training.config import TrainConfig
from streamspec.cli.inspect import describe
from streamspec.errors import ConfigError
from streamspec.option_fields import flag
from tests.support.tiny_models import SIZES, options, tiny_model

IDS = torch.tensor([[5, 9, 12, 33, 7, 41, 8, 20], [11, 3, 21, 11, 2, 0, 0, 0]])
MASK = (IDS > 0).long()
GAMMA, SCALE = 4, 1.3
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def block(
    family: str = "llama",
    layers: int = 2,
    taps: tuple[int, ...] = (2, 1),
    shake: float = 0.05,
    causal: bool = False,
) -> BlockDraftModel:
    torch.manual_seed(0)
    shape = BlockConfig(GAMMA, layers, SCALE, taps=taps, causal=causal)
    model = BlockDraftModel(tiny_model(family).requires_grad_(False), shape).eval()
    with torch.no_grad():
        for parameter in model.drafter_tensors().values():
            parameter.add_(torch.randn_like(parameter) * shake)
    return model


def text_and_block(model: BlockDraftModel, ids: Tensor, t: int, root: int) -> tuple[Tensor, Tensor]:
    """F [t + 1, H] of the rows up to `t`, and the block's rows [gamma, H] as they begin."""
    width = 32
    entry = model.main_pass(ids[None], torch.ones(1, len(ids), dtype=torch.long)).entry[0]
    context = torch.cat([unit_rms(part) for part in entry.split(width, dim=-1)], dim=-1) @ model.fuse.T
    known = model.root_map @ unit_rms(model.decoder.embedding.weight[root])
    shift = model.stream_embeddings + model.shares[:, 1:] * known
    return context[: t + 1], model.shares[:, :1] * entry[t, :width] + SCALE * shift


def one_by_one(model: BlockDraftModel, ids: Tensor, t: int, root: int) -> Tensor:
    """States [gamma, H] after row `t` by plain attention of the block's rows over keys of the rows up to it."""
    family, window = model.decoder.family, model.config.window
    context, x = text_and_block(model, ids, t, root)
    where = torch.cat([torch.arange(t + 1), t + 1 + torch.arange(GAMMA)])
    for layer in model.block_layers:
        rows = torch.cat([context, x])
        normed = layer.get_submodule(family.attention_norm)(rows)
        attention = layer.self_attn
        heads, kv = 4, 2
        q, k, v = (
            getattr(attention, f"{side}_proj")(normed).view(len(rows), count, -1).transpose(0, 1)
            for side, count in (("q", heads), ("k", kv), ("v", kv))
        )
        if hasattr(attention, "q_norm"):
            q, k = attention.q_norm(q), attention.k_norm(k)
        cos, sin = (table[0] for table in model.decoder.rotary_embeddings(rows[None], where[None]))
        q, k = (
            y * cos + torch.cat([-y[..., y.shape[-1] // 2 :], y[..., : y.shape[-1] // 2]], -1) * sin for y in (q, k)
        )
        scores = q[:, t + 1 :] @ k.repeat_interleave(2, 0).transpose(1, 2) * attention.scaling
        if window is not None:
            scores = scores.masked_fill(where[t + 1 :, None] - where >= window, -torch.inf)
        if model.config.causal:
            scores = scores.masked_fill(where > where[t + 1 :, None], -torch.inf)
        mixed = (scores.softmax(-1) @ v.repeat_interleave(2, 0)).transpose(0, 1).flatten(1)
        x = x + attention.o_proj(mixed)
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    return model.norm_out(x)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("layers", "taps", "causal"), [(1, (1,), False), (2, (2, 1, 4), False), (2, (2, 1), True)])
@torch.no_grad()
def test_a_block_equals_the_row_by_row_reference(family: str, layers: int, taps: tuple[int, ...], causal: bool) -> None:
    model = block(family, layers, taps, causal=causal)
    rows, roots = torch.tensor([[1, 3], [0, 2]]), torch.tensor([[12, 7], [3, 11]])
    picked = DraftRows(rows, roots, torch.randint(1, 60, (2, 2, GAMMA)))
    states = model.draft_pass(model.main_pass(IDS, MASK), picked)
    assert states.shape == (2, 2, GAMMA, 32)
    for b in range(2):
        for p in range(2):
            expected = one_by_one(model, IDS[b, : int(MASK[b].sum())], int(rows[b, p]), int(roots[b, p]))
            torch.testing.assert_close(states[b, p], expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_causal_block_of_one_layer_is_transformers_own_pass_over_text_and_block(family: str) -> None:
    model, t, root = block(family, 1, (1,), causal=True), 5, 12
    [layer], theirs = model.block_layers, copy.deepcopy(model.model.base_model)
    theirs.config.num_hidden_layers = 1
    if getattr(theirs.config, "layer_types", None):
        theirs.config.layer_types = [theirs.config.layer_types[model.copied[0]]]
    theirs.layers, theirs.norm = torch.nn.ModuleList([layer]), model.norm_out
    rows = torch.cat(text_and_block(model, IDS[0], t, root))
    expected = theirs(inputs_embeds=rows[None], use_cache=False).last_hidden_state[0, t + 1 :]
    picked = DraftRows(torch.tensor([[t]]), torch.tensor([[root]]), torch.zeros(1, 1, GAMMA, dtype=torch.long))
    states = model.draft_pass(model.main_pass(IDS[:1], MASK[:1]), picked)[0, 0]
    torch.testing.assert_close(states, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("causal", [False, True])
@torch.no_grad()
def test_depths_do_not_read_the_tokens_they_predict_and_see_later_rows_unless_causal(causal: bool) -> None:
    model, main = block(causal=causal), block().main_pass(IDS, MASK)
    rows, roots = torch.tensor([[3], [1]]), torch.tensor([[7], [21]])
    states = [model.draft_pass(main, DraftRows(rows, roots, torch.full((2, 1, GAMMA), n))) for n in (4, 9)]
    assert torch.equal(*states)
    model.stream_embeddings[2] += 1  # one row of the block alone
    moved = model.draft_pass(main, DraftRows(rows, roots, torch.zeros(2, 1, GAMMA, dtype=torch.long)))
    same = [torch.equal(moved[:, :, depth], states[0][:, :, depth]) for depth in range(GAMMA)]
    assert same == [causal and depth < 2 for depth in range(GAMMA)]


@pytest.mark.parametrize("family", [name for name in SIZES if name != "gemma4_text"])
@torch.no_grad()
def test_a_drafter_of_one_layer_starts_with_the_keys_of_the_layer_it_copies(family: str) -> None:
    model = block(family, 1, (1,), shake=0)
    [index] = model.copied
    model = block(family, 1, (4 - index,), shake=0)
    cache = model.decoder.new_cache()
    inner = model.model.base_model
    inner(input_ids=IDS[:1], attention_mask=MASK[:1], **with_cache(inner, cache), use_cache=True)
    [kept] = model.context(model.main_pass(IDS[:1], MASK[:1]))
    torch.testing.assert_close(kept.keys, cache.layers[index].keys, atol=5e-5, rtol=5e-5)


@torch.no_grad()
def test_the_start_is_fitted_to_the_states_that_later_rows_read() -> None:
    model, ids = block(shake=0), torch.randint(3, 60, (12, 24))
    mask, before = torch.ones_like(ids), model.stream_embeddings.clone()
    assert fit_start(model, [(ids, mask)]) < 1 and not torch.equal(model.stream_embeddings, before)
    main = model.main_pass(ids, mask)
    rows = torch.arange(0, 24 - GAMMA).expand(12, -1)
    fitted = model.entry_states(model.start_states(main), rows, ids[:, 1 : 25 - GAMMA])
    for depth in range(GAMMA):
        true = main.entry[:, 1 + depth : 25 - GAMMA + depth, :32]
        assert (fitted[:, :, depth] - true).square().mean() < true.square().mean()


def test_every_parameter_outside_the_target_learns_and_the_target_does_not() -> None:
    model = block()
    states = model.draft_pass(
        model.main_pass(IDS, MASK), DraftRows(*torch.ones(2, 2, 1, dtype=torch.long), IDS[:, None])
    )
    states.square().sum().backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in model.drafter_tensors().values())
    learning = {id(p) for p in model.parameters() if p.requires_grad}
    assert learning == {id(p) for p in model.drafter_tensors().values()}


def test_taps_are_the_state_below_the_copied_layers_and_the_thirds_of_the_base() -> None:
    assert taps_of({"taps": None}, 30, 2) == (2, 10, 20) and taps_of({"taps": None}, 4, 1) == (1, 2)
    assert taps_of({"taps": "3,9"}, 30, 2) == (3, 9)
    with pytest.raises(ConfigError, match="taps = final; expected 1..4, the layers of this base"):
        check_block_base({"taps": "final", "block_layers": 1}, "llama", 4)


def test_training_writes_a_complete_folder(base: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    summary = train(
        options(
            base,
            data,
            out,
            method="dflash",
            target_adapter="base",
            block_layers=2,
            causal=True,
            bigram_rank=3,
            state_weight=1.0,
        )
    )
    tensors, training = load_file(out / "streamspec.safetensors"), json.loads((out / "training.json").read_text())
    section = json.loads((out / "streamspec_config.json").read_text())["streams"]
    assert (section["block_layers"], section["taps"], section["biases"]) == (2, [2, 1], [])
    assert (section["causal"], section["bigram"]) == (True, 3)
    assert "2 layers of its own, causal" in str(describe(out))
    assert tensors["fuse"].shape == (32, 64) and tensors["layers.1.mlp.up_proj.weight"].shape == (64, 32)
    assert tensors["bigram_in"].shape[1] == 3
    assert training["log"]["start"]["unexplained"] < 1 and 1 <= summary["tau"] <= 3


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    def config(**changes: object) -> TrainConfig:
        return options(tmp_path, tmp_path, tmp_path, method="dflash", **changes)

    def checked(family: str, layers: int, **changes: object) -> None:
        one = config(**changes)
        one.drafter.check_base(one.resolved, family, layers)

    with pytest.raises(ConfigError, match=r"block_layers = 5; expected 1\.\.4, the layers of this base"):
        checked("llama", 4, block_layers=5)
    with pytest.raises(ConfigError, match=r"taps = 2,7; expected 1\.\.4"):
        checked("llama", 4, taps="2,7")
    with pytest.raises(ConfigError, match="--method dflash with gemma4_text, whose layers share keys"):
        checked("gemma4_text", 4)
    with pytest.raises(ConfigError, match="at most 2, the layers like the last one"):
        BlockDraftModel(tiny_model("gemma3_text"), BlockConfig(GAMMA, 3, taps=(1,)))
    for name, value in (("block_layers", 2), ("causal", True)):
        with pytest.raises(ConfigError, match=f"{flag(name)} with --method eagle; expected --method dflash"):
            options(tmp_path, tmp_path, tmp_path, method="eagle", **{name: value})
    with pytest.raises(ConfigError, match="--method dflash with --recipe joint"):
        config(recipe="joint")
