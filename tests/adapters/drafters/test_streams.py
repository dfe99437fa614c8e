"""The multi-stream model against a slow reference written from the equations: one sequence, one row and its streams at
a time.
"""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from transformers import PreTrainedModel

from streamspec.adapters.base_models.hf_decoder import HFDecoder, with_cache
from streamspec.adapters.base_models.token_mixers import recurrent_state
from streamspec.adapters.drafters.drafting_model import IGNORE, DraftRows, DraftTargets, MainPass
from streamspec.adapters.drafters.least_squares import unit_rms
from streamspec.adapters.drafters.losses import draft_losses, lookup_table, pick_rows
from streamspec.adapters.drafters.streams.model import StreamConfig, StreamingModel, fit_start, stream_mask
from streamspec.errors import BaseModelError, ConfigError
from streamspec.export.weights.model_spec import describe
from streamspec.model_families import FAMILIES as ALL_FAMILIES
from tests.support.recurrent_families import RECURRENT, WHOLE
from tests.support.tiny_models import tiny_model

FAMILIES = [*(family for family in ALL_FAMILIES if family not in RECURRENT), *WHOLE]  # which have streams
IDS = torch.tensor([[5, 9, 33, 12, 7, 41, 60, 3, 18], [8, 8, 21, 50, 11, 2, 0, 0, 0]])
MASK = torch.tensor([[1] * 9, [1] * 6 + [0] * 3])


def streaming(
    model: PreTrainedModel, gamma: int = 3, ns: int = 2, frozen: bool = False, **options: object
) -> StreamingModel:
    torch.manual_seed(1)
    return StreamingModel(model, StreamConfig(gamma, ns, scale=0.7, **options), frozen).eval()


class RowByRow:
    """The cache of a reference that appends one row at a time and may see only the columns in `allowed`."""

    def __init__(self, keys: list[torch.Tensor], values: list[torch.Tensor], numbers: list[int]) -> None:
        self.keys, self.values, self.numbers = list(keys), list(values), numbers
        self.is_updated: dict[int, bool] = {}
        self.shared: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self.turn: torch.Tensor | None = None  # a complex number, of the row's values

    def update(self, key: torch.Tensor, value: torch.Tensor, layer: int, *_: object, **__: object):
        i = self.numbers.index(layer)
        if self.turn is not None:
            value = torch.view_as_real(torch.complex(*value.chunk(2, -1)) * self.turn).movedim(-1, -2).flatten(-2)
        self.keys[i] = torch.cat([self.keys[i], key], 2)
        self.values[i] = torch.cat([self.values[i], value], 2)
        return self.keys[i], self.values[i]

    def get_seq_length(self, *_: object) -> int:
        return self.keys[0].shape[2]


@torch.no_grad()
def reference(streams: StreamingModel, ids: torch.Tensor, t: int, root: int) -> torch.Tensor:
    """Streams of row t of one unpadded sequence, stream after stream. The cache holds main rows 0..t and nothing
    later.
    """
    model, decoder = streams.model, HFDecoder(streams.model)
    entry: list[torch.Tensor] = []
    hook = decoder.layers[streams.first].register_forward_pre_hook(
        lambda _, args, kwargs: entry.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
    )
    past = decoder.new_cache()
    with streams.drafter_lora(False), decoder.keys_values(streams.first, past) as (keys, values):
        model(input_ids=ids[None, : t + 1], **with_cache(model, past), use_cache=True)
    hook.remove()
    cache = RowByRow(keys, values, decoder.cache_numbers(streams.first))
    paper = streams.start_up is not None
    for i in decoder.kept_below(streams.first):
        kind = streams.model.config.layer_types[i]
        cache.shared[kind] = keys[i - streams.first], values[i - streams.first]
    outputs = []
    for j in range(streams.config.gamma):
        keep, tell = streams.shares[j]
        cache.turn = torch.exp(1j * torch.tensor(torch.pi * (j + 1) / (streams.config.gamma + 1))) if paper else None
        start = entry[0][:, t]
        if paper:
            start = start + start @ streams.start_down.T @ streams.start_up.T
        state = keep * start + streams.config.scale * streams.stream_embeddings[j]
        if streams.root_map is not None:
            state = state + streams.config.scale * tell * unit_rms(decoder.embedding.weight[root]) @ streams.root_map.T
        position = torch.tensor([[t + 1 + j if streams.config.positions == "shifted" else t]])
        hidden = state[None]
        for i in range(streams.first, len(decoder.layers)):
            columns = t + 1 if i in decoder.kept_below(streams.first) else t + 2 + j
            mask = torch.zeros(1, 1, 1, columns)
            window = decoder.window(i)
            if window is not None:
                where = torch.tensor([*range(t + 1), *(t + 1 + k for k in range(j + 1))])[:columns]
                mask[..., position[0, 0] - where >= window] = torch.finfo(torch.float32).min
            hidden = decoder.call_layer(i, hidden, mask, position, decoder.rotary_embeddings(hidden, position), cache)
        outputs.append(decoder.logits(decoder.finish(hidden))[0, 0])
    return torch.stack(outputs)


def beside(rows: torch.Tensor, roots: torch.Tensor) -> DraftRows:
    return DraftRows(rows, roots, torch.empty(*rows.shape, 0, dtype=torch.int64))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("options", [{}, {"root_token": False}, {"value_rotation": True, "start_rank": 3}])
def test_streams_equal_the_row_by_row_reference(family: str, options: dict) -> None:
    streams = streaming(tiny_model(family), **options)
    if streams.start_up is not None:
        nn.init.normal_(streams.start_up, std=0.3)
    rows, roots = torch.tensor([[2, 4], [1, 3]]), torch.tensor([[12, 41], [21, 11]])
    with torch.no_grad():
        logits = streams.head(streams.draft_pass(streams.main_pass(IDS, MASK), beside(rows, roots)))
    for b in range(2):
        length = int(MASK[b].sum())
        for p in range(2):
            expected = reference(streams, IDS[b, :length], int(rows[b, p]), int(roots[b, p]))
            torch.testing.assert_close(logits[b, p], expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("family", ["qwen3_5_text", "olmo_hybrid", "granitemoehybrid+mamba", "falcon_h1+normed"])
def test_streams_start_from_the_states_of_long_texts(family: str) -> None:
    """Over rows before, at and after the ends of the chunks in which what the texts add to states is solved."""
    streams = streaming(tiny_model(family, max_position_embeddings=512), gamma=5)
    ids = torch.randint(3, 60, (2, 150), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, 131:] = 0
    rows, roots = torch.tensor([[0, 62, 63, 64, 147], [127, 128, 129, 1, 2]]), torch.randint(3, 60, (2, 5))
    with torch.no_grad():
        logits = streams.head(streams.draft_pass(streams.main_pass(ids, mask), beside(rows, roots)))
        for b, p in ((b, p) for b in range(2) for p in range(5)):
            expected = reference(streams, ids[b], int(rows[b, p]), int(roots[b, p]))
            torch.testing.assert_close(logits[b, p], expected, atol=5e-4, rtol=5e-4)


@pytest.mark.parametrize("family", WHOLE)
def test_streams_over_states_in_bfloat16_are_near_those_in_float32(family: str) -> None:
    """Outside of autocast, as they are judged."""
    streams, rows, roots = streaming(tiny_model(family)), torch.tensor([[2, 4], [1, 3]]), torch.full((2, 2), 12)
    with torch.no_grad():
        exact = streams.draft_pass(streams.main_pass(IDS, MASK), beside(rows, roots))
        streams.model.bfloat16()
        for module in streams.model.modules():
            if hasattr(module, "mup_vector"):
                module.mup_vector = module.mup_vector.float()  # as training has it
        main = streams.main_pass(IDS, MASK)
        rounded = streams.draft_pass(main, beside(rows, roots))
    assert rounded.dtype == torch.bfloat16 and {key.dtype for key in main.keys} == {torch.bfloat16}
    assert (rounded.float() - exact).norm() < 0.3 * exact.norm()  # experts may be others


def test_early_exits_read_the_inputs_of_their_layers_and_streams_are_as_without() -> None:
    model = tiny_model("llama")
    torch.manual_seed(1)
    config = StreamConfig(3, 2, scale=0.7)
    several = StreamingModel(model, config, False, prune_rank=3, exit_layers=(1, 2)).eval()
    with torch.no_grad():
        states = model(IDS, attention_mask=MASK, output_hidden_states=True).hidden_states
        main = several.main_pass(IDS, MASK)
        one = streaming(model)
        one.load_state_dict(several.state_dict(), strict=False)
        picked = beside(torch.tensor([[2, 4], [1, 3]]), torch.tensor([[12, 41], [21, 11]]))
        assert torch.equal(several.draft_pass(main, picked), one.draft_pass(one.main_pass(IDS, MASK), picked))
        several.prune_up[1].normal_()
        for layer in (1, 2):
            assert torch.equal(several.entered(main, layer), states[layer])
        plain, moved = (several.exit_states(states[1], number) for number in (0, 1))
    assert not torch.allclose(plain, moved, atol=1e-2)
    assert several.drafter_tensors()["prune_down"].shape == (2, 3, states[0].shape[-1])
    assert several.described()["exit_layers"] == [1, 2] and "exit_layers" not in one.described()


def test_same_positions_option_moves_rotary_models_only() -> None:
    rows, roots = torch.tensor([[4], [3]]), torch.tensor([[41], [11]])
    for family, differs in (("llama", True), ("gpt2", False)):
        shifted, same = (streaming(tiny_model(family), positions=p) for p in ("shifted", "same"))
        with torch.no_grad():
            outputs = [s.draft_pass(s.main_pass(IDS, MASK), beside(rows, roots)) for s in (shifted, same)]
        assert torch.allclose(*outputs, atol=1e-5) != differs
        expected = reference(same, IDS[0], 4, 41)
        torch.testing.assert_close(same.head(outputs[1])[0, 0], expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_main_rows_are_bit_for_bit_those_of_the_plain_model_with_a_stream_lora_attached(family: str) -> None:
    model = tiny_model(family)
    with torch.no_grad():
        before = model(input_ids=IDS, attention_mask=MASK).logits
    decoder = HFDecoder(model)
    spec, names = describe(model), decoder.linear_names(2)
    assert set(names) == {f"{layer}.{name}" for layer in (2, 3) for name in spec.modules(layer, streams=True)}
    lora = LoraConfig(r=4, target_modules=names, init_lora_weights=False)
    inject_adapter_in_model(lora, decoder.layers, adapter_name="streams")
    streams = streaming(model, frozen=True)
    rows, roots = torch.tensor([[2], [1]]), torch.tensor([[12], [21]])
    with torch.no_grad():
        main = streams.main_pass(IDS, MASK)
        assert torch.equal(streams.head(main.final), before)
        with_lora = streams.draft_pass(main, beside(rows, roots))
        with streams.drafter_lora(False):
            without = streams.draft_pass(main, beside(rows, roots))
    assert not torch.allclose(with_lora, without, atol=1e-3), "the stream LoRA must act on stream rows"


@pytest.mark.parametrize("frozen", [True, False])
def test_what_a_text_adds_to_states_learns_with_the_target_alone(frozen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.Tensor] = []
    updates = recurrent_state._updates
    monkeypatch.setattr(recurrent_state, "_updates", lambda *given: made.append(updates(*given)) or made[-1])
    streams = streaming(tiny_model("qwen3_5_text").requires_grad_(not frozen), frozen=frozen)
    picked = beside(torch.tensor([[2], [1]]), torch.tensor([[12], [21]]))
    assert streams.draft_pass(streams.main_pass(IDS, MASK), picked).requires_grad
    assert made and all(one.requires_grad != frozen for one in made)


def test_mask_equals_brute_force() -> None:
    rows, gamma, length = torch.tensor([[1, 4, 5]]), 2, 7
    positions = (rows[:, :, None] + torch.arange(1, gamma + 1)).reshape(1, -1)
    for window in (None, 3):
        mask = stream_mask(rows, length, gamma, positions, window, torch.float32)[0, 0]
        for r in range(6):
            t, j = int(rows[0, r // gamma]), r % gamma
            for c in range(length + 6):
                if c < length:
                    seen, where = c <= t, c
                else:
                    seen, where = (
                        (c - length) // gamma == r // gamma and (c - length) % gamma <= j,
                        int(positions[0, c - length]),
                    )
                if window is not None:
                    seen = seen and int(positions[0, r]) - where < window
                assert bool(mask[r, c] == 0) == seen, (window, r, c)


def test_gradients_reach_streams_and_not_the_target() -> None:
    streams = streaming(tiny_model("llama").requires_grad_(False))
    batch = {"input_ids": IDS, "attention_mask": MASK, "loss_mask": MASK.bool() & (torch.arange(9) > 2)}
    picked = pick_rows(batch, 3, 32)
    losses = draft_losses(streams, DraftTargets(streams.main_pass(IDS, MASK), picked))
    losses.sum().backward()
    assert streams.stream_embeddings.grad.abs().sum() > 0 and streams.root_map.grad.abs().sum() > 0
    assert all(p.grad is None for p in streams.model.parameters())


@pytest.mark.parametrize("trimmed", [True, False])
def test_the_bigram_conditions_each_stream_on_the_true_token_before(trimmed: bool) -> None:
    model = tiny_model("llama").requires_grad_(False)
    vocabulary = torch.tensor([7, 41, 60, 3, 18, 33]) if trimmed else None
    size = 6 if trimmed else model.config.vocab_size
    torch.manual_seed(3)
    streams = StreamingModel(model, StreamConfig(3, 2, scale=0.7), False, bigram=(size, 4)).eval()
    torch.nn.init.normal_(streams.bigram_out)
    batch = {"input_ids": IDS, "attention_mask": MASK, "loss_mask": MASK.bool() & (torch.arange(9) > 2)}
    picked = pick_rows(batch, 3, 32)
    lookup = lookup_table(vocabulary, model.config.vocab_size)
    main = streams.main_pass(IDS, MASK)
    found = draft_losses(streams, DraftTargets(main, picked, vocabulary, lookup))
    names = list(range(size)) if vocabulary is None else vocabulary.tolist()
    logits = streams.head(streams.draft_pass(main, picked), vocabulary)
    for stream in range(3):
        losses = []
        for b in range(2):
            for p in range(picked.rows.shape[1]):
                label = int(picked.labels[b, p, stream])
                before = int(picked.roots[b, p] if stream == 0 else picked.labels[b, p, stream - 1])
                if label in names:
                    row = logits[b, p, stream]
                    if before in names:
                        row = row + streams.bigram_out @ streams.bigram_in[names.index(before)]
                    losses.append(-row.log_softmax(-1)[names.index(label)])
        torch.testing.assert_close(found[stream], torch.stack(losses).mean())
    found.sum().backward()
    assert streams.bigram_in.grad.abs().sum() > 0


@pytest.mark.parametrize("kind", ["kl", "tv", "topk"])
def test_soft_labels_are_what_the_main_stream_expects_in_the_same_place(kind: str) -> None:
    model = tiny_model("llama").requires_grad_(False)
    streams = streaming(model)
    vocabulary = torch.arange(
        1, model.config.vocab_size
    )  # all but one, so that nothing is skipped for want of a number
    lookup = lookup_table(vocabulary, model.config.vocab_size)
    batch = {"input_ids": IDS, "attention_mask": MASK, "loss_mask": MASK.bool() & (torch.arange(9) > 2)}
    picked = pick_rows(batch, 3, 32)
    main = streams.main_pass(IDS, MASK)
    found = draft_losses(streams, DraftTargets(main, picked, vocabulary, lookup, kind))
    given = streams.head(streams.draft_pass(main, picked), vocabulary).softmax(-1)
    expected = streams.head(main.final, vocabulary).softmax(-1)
    for stream in range(3):
        losses = []
        for b in range(2):
            for p in range(picked.rows.shape[1]):
                if picked.labels[b, p, stream] > 0:
                    row = int(picked.rows[b, p]) + stream + 1
                    assert IDS[b, row + 1] == picked.labels[b, p, stream]
                    want, have = expected[b, row], given[b, p, stream]
                    ten = want.argsort(descending=True)[:10]
                    losses.append(
                        {
                            "kl": (want * (want / have).log()).sum(),
                            "tv": (want - have).abs().sum() / 2,
                            "topk": -(want * have.log())[ten].sum(),
                        }[kind]
                    )
        torch.testing.assert_close(found[stream], torch.stack(losses).mean())


def test_picked_rows_are_followed_by_their_root_and_labels() -> None:
    loss_mask = MASK.bool() & (torch.arange(9) > 2)
    picked = pick_rows({"input_ids": IDS, "loss_mask": loss_mask}, 3, 32)
    for b in range(2):
        for p, t in enumerate(picked.rows[b].tolist()):
            labels = picked.labels[b, p].tolist()
            if all(x == IGNORE for x in labels):
                continue
            assert loss_mask[b, t + 1] and picked.roots[b, p] == IDS[b, t + 1]
            for j, label in enumerate(labels):
                k = t + 2 + j
                assert label == (int(IDS[b, k]) if k < 9 and loss_mask[b, k] else IGNORE)
    assert sorted(picked.rows[0].tolist()) == [2, 3, 4, 5, 6], "every row with a root and a further token, and no other"


def test_out_of_range_ns_and_unknown_family_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="ns = 5.*1..4"):
        streaming(tiny_model("llama"), ns=5)
    model = tiny_model("llama")
    model.config.model_type = "mamba"
    with pytest.raises(BaseModelError, match="mamba.*expected .*llama.*families that"):
        HFDecoder(model)


@pytest.mark.parametrize("root_token", [True, False])
@torch.no_grad()
def test_the_start_foretells_the_states_ahead(root_token: bool) -> None:
    streams = streaming(tiny_model("llama"), root_token=root_token)
    torch.manual_seed(0)
    ids = torch.randint(3, 60, (32, 12))
    mask = torch.ones_like(ids)
    mask[::2, 9:] = 0

    def error(stream: int) -> float:
        main = streams.main_pass(ids, mask)
        rows = torch.arange(0, 8 - stream).expand(len(ids), -1)
        roots = ids.gather(1, rows + 1)
        made = streams.entry_states(main.entry, rows, roots)[:, :, stream]
        wanted = main.entry.gather(1, (rows + 1 + stream)[:, :, None].expand(-1, -1, 32))
        return float((made - wanted).pow(2).sum() / (wanted - wanted.mean((0, 1))).pow(2).sum())

    before = [error(j) for j in range(3)]
    left = fit_start(streams, [(ids[:16], mask[:16]), (ids[16:], mask[16:])])
    after = [error(j) for j in range(3)]
    assert all(
        b < a and b < 1.1 for a, b in zip(before, after, strict=True)
    )  # no worse than the mean, and streams see further
    assert after[0] < (0.95 if root_token else 1.1) and 0 < left < 1
    streams.root_map.normal_() if streams.root_map is not None else None
    assert fit_start(streams, [(ids[:, :1], mask[:, :1])]) == 1.0  # too short a text to learn from


@torch.no_grad()
def test_massive_activations_do_not_rule_the_start() -> None:
    streams = streaming(tiny_model("llama"))
    torch.manual_seed(0)
    ids = torch.randint(3, 60, (32, 12))
    streams.config.scale = float(streams.main_pass(ids, torch.ones_like(ids)).entry.pow(2).mean().sqrt())
    calm = fit_start(streams, [(ids, torch.ones_like(ids))])
    shares = streams.shares.clone()
    main_pass = streams.main_pass

    def shouting(*arguments: torch.Tensor) -> MainPass:
        main = main_pass(*arguments)
        main.entry[:, 0] *= 1000  # as the first token of many models does
        return main

    streams.main_pass = shouting  # type: ignore[method-assign]
    assert fit_start(streams, [(ids, torch.ones_like(ids))]) == pytest.approx(calm, abs=0.05)
    torch.testing.assert_close(streams.shares, shares, atol=0.05, rtol=0.1)


@pytest.mark.parametrize("options", [{"value_rotation": True}, {"start_rank": 3}])
def test_the_papers_variants_learn_what_they_say(options: dict) -> None:
    streams = streaming(tiny_model("llama").requires_grad_(False), frozen=True, **options)
    ids = torch.randint(3, 60, (4, 12))
    batch = {"input_ids": ids, "loss_mask": torch.ones_like(ids, dtype=torch.bool)}
    own = {n: p for n, p in streams.named_parameters() if p.requires_grad}
    optimiser, losses = torch.optim.Adam(own.values(), lr=1e-2), []
    for _ in range(30):
        main, picked = streams.main_pass(ids, torch.ones_like(ids)), pick_rows(batch, 3, 16)
        loss = draft_losses(streams, DraftTargets(main, picked)).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.85 * losses[0]
    rotated = "value_rotation" in options
    assert ("stream_embeddings" in own) == ("stream_embeddings" in streams.drafter_tensors()) == (not rotated)
    assert ("start_up" in own) == ("start_up" in streams.drafter_tensors()) == ("start_rank" in options)
    if rotated:
        fit_start(streams, [(ids, torch.ones_like(ids))])
        assert not streams.stream_embeddings.any()
