"""The total loss of every recipe and method, written out from the model's logits and states; and which rows reach a
stage.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from streamspec.acceptance_stats import ENDED
from streamspec.adapters import models, recipe_stages, training_run
from streamspec.adapters import train as train_module
from streamspec.adapters.dataset.batches import collate
from streamspec.adapters.dataset.token_rows import TokenRow
from streamspec.adapters.drafters.acceptance_eval import record_ranks
from streamspec.adapters.drafters.drafting_model import DraftingModel, DraftRows
from streamspec.adapters.drafters.least_squares import unit_rms
from streamspec.adapters.train import train
from streamspec.adapters.training.config import TrainConfig
from streamspec.adapters.training.trainer import Stage
from tests.support.tiny_models import options, tiny_model, tiny_tokenizer

GAMMA = 3
COUNTED = ("....###..#####", "..#.##.##", ".....#")  # #: a token of an answer; the first two texts have several answers
ROWS = [
    TokenRow([3 + (7 * i * i + 5 * i + 11 * n) % 23 for i in range(len(text))], [c == "#" for c in text])
    for n, text in enumerate(COUNTED)
]
FIGURES = {"gamma": GAMMA, "alpha": 0.3, "alpha_decay": 0.6, "stream_rows": 99, "regenerate_rows": 6, "val_rows": 2}
SMALL = {"bigram_rank": 3, "max_new_tokens": 5, "epochs": 1.0}


@pytest.fixture(scope="module")
def chat_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat")
    tiny_model("llama").save_pretrained(folder)
    tiny_tokenizer(chat=True).save_pretrained(folder)
    return folder


class Watch:
    """Stands in for the training of a stage: moves its parameters, keeps its rows, and computes the loss of `ROWS` as
    the stage does and as this file does.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.totals: dict[str, tuple[float, float]] = {}
        self.rows: dict[str, list[TokenRow]] = {}
        self.vocabulary: Tensor | None = None
        monkeypatch.setattr(training_run, "has_bf16", lambda: False)  # the sums below are in float32
        monkeypatch.setattr(recipe_stages, "run_stage", self.stage)
        monkeypatch.setattr(train_module, "choose_vocabulary", self.choose)

    def choose(self, *given: Any) -> Tensor | None:
        self.vocabulary = models.choose_vocabulary(*given)
        return self.vocabulary

    def stage(self, stage: Stage, config: TrainConfig, *_: Any) -> tuple[list[dict[str, float]], float]:
        torch.manual_seed(4)
        with torch.no_grad():
            for parameter in stage.model.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter) * 0.05)
        stage.model.eval()
        found = float(stage.loss(collate(ROWS), 0.0)["total"].detach())
        self.totals[stage.name] = found, total(stage.model, config, self.vocabulary)
        self.rows[stage.name] = stage.rows
        return [{"loss": found, "step": 1}], 0.0


def answer_tokens(row: TokenRow) -> list[int]:
    return [i for i in range(1, len(row.input_ids)) if row.loss_mask[i]]


@torch.no_grad()
def total(model: Any, config: TrainConfig, vocabulary: Tensor | None) -> float:
    """The loss of `ROWS`, text by text and token by token; logits of the target are transformers' own."""
    target, next_token = [], []
    for row in ROWS:
        with model.drafter_lora(False):
            target.append(model.model(input_ids=torch.tensor([row.input_ids])).logits[0])
        next_token += [-float(target[-1][i - 1].log_softmax(-1)[row.input_ids[i]]) for i in answer_tokens(row)]
    if not isinstance(model, DraftingModel):
        return sum(next_token) / len(next_token)
    options = config.resolved
    if options["last_state_weight"] is None:  # the paper has one for both
        options["last_state_weight"] = options["state_weight"]
    kept = list(range(64)) if vocabulary is None else vocabulary.tolist()
    by_level = options.get("taps") and config.method != "dflash"
    scored = draft_layer(model, options) if by_level else heads(model)
    terms: dict[Any, list[float]] = {j: [] for j in [*range(GAMMA), "branch"]}
    for n, i, depth, state, term in scored["drafts"]:  # the state at `depth` that predicts token i of text n
        row = ROWS[n]
        logits = model.draft_logits(state[None], torch.tensor([depth]), vocabulary)[0].float()
        if model.bigram_in is not None and row.input_ids[i - 1] in kept:
            logits = logits + model.bigram_out @ model.bigram_in[kept.index(row.input_ids[i - 1])]
        drafted = logits.log_softmax(-1)
        if options["labels"] == "kl":
            wanted = target[n][i - 1][kept].log_softmax(-1)
            terms[term].append(float((wanted.exp() * (wanted - drafted)).sum()))
        elif row.input_ids[i] in kept:
            terms[term].append(-float(drafted[kept.index(row.input_ids[i])]))
    means = {term: sum(one) / max(len(one), 1) for term, one in terms.items()}
    weights = [config.alpha_decay**j for j in range(scored["passes"])]
    summed = sum(w * means[j] for j, w in enumerate(weights))
    if not model.frozen:
        learnt = sum(next_token) / len(next_token) + config.alpha * summed
    else:
        learnt = summed / sum(weights) + options["last_weight"] * means["branch"]
    learnt += sum((options[weight] or 0) * value for weight, value in scored.get("beside", {}).items())
    return learnt + (early_exit(model, vocabulary, kept) if config.method == "streaming" else 0.0)


def drafted_tokens(row: TokenRow) -> Iterator[tuple[int, list[int]]]:
    """Rows t whose next two tokens belong to an answer, with the tokens from t + 2 on that follow without a gap."""
    counted = row.loss_mask
    for t in range(len(counted) - 2):
        if counted[t + 1] and counted[t + 2]:
            end = next((i for i in range(t + 2, len(counted)) if not counted[i]), len(counted))
            yield t, list(range(t + 2, min(end, t + 2 + GAMMA)))


def alone(model: Any, row: TokenRow) -> tuple[Any, DraftRows, list[tuple[int, list[int]]]]:
    """The target's pass over one text, and all rows of it that draft."""
    ids, drafts = row.input_ids, list(drafted_tokens(row))
    labels = [[ids[t + 2 + j] if t + 2 + j < len(ids) else 0 for j in range(GAMMA)] for t, _ in drafts]
    rows, roots = [t for t, _ in drafts], [ids[t + 1] for t, _ in drafts]
    main = model.main_pass(torch.tensor([ids]), torch.ones(1, len(ids), dtype=torch.long))
    return main, DraftRows(*(torch.tensor([part]) for part in (rows, roots, labels))), drafts


def heads(model: Any) -> dict[str, Any]:
    found, pairs = [], []
    for n, row in enumerate(ROWS):
        main, picked, drafts = alone(model, row)
        if drafts:
            states = model.draft_pass(main, picked)[0]
            found += [(n, i, j, states[p, j], j) for p, (_, ahead) in enumerate(drafts) for j, i in enumerate(ahead)]
            pairs += [
                (states[p, j], main.final[0, i - 1]) for p, (_, ahead) in enumerate(drafts) for j, i in enumerate(ahead)
            ]
    beside = {"state_weight": smooth_l1(*map(torch.stack, zip(*pairs, strict=True)))}
    return {"drafts": found, "passes": GAMMA, "beside": beside}


def draft_layer(model: Any, options: dict[str, Any]) -> dict[str, Any]:
    """States of the mixture and of the last position's branch, the distance of the first from the target's own, and
    how alike experts are.
    """
    passes = options["unroll"] or GAMMA - options["parallel"]
    branch = options["contrast"] or options["parallel"]
    depth_of_branch = passes - 1 + options["parallel"]
    found, overlap, shares = [], [], []
    pairs: dict[str, list[tuple[Tensor, Tensor]]] = {"state_weight": [], "last_state_weight": []}  # drafted, target's
    for n, row in enumerate(ROWS):
        main, picked, drafts = alone(model, row)
        if not drafts:
            continue
        out = model.unroll(main, picked, passes)
        for p, (_, ahead) in enumerate(drafts):
            for j, i in enumerate(ahead[:passes]):
                found.append((n, i, j, out.mixture[0, p, j], j))
                pairs["state_weight"].append((out.mixture[0, p, j], main.final[0, i - 1]))  # whose logits predict i
                overlap.append(float(out.overlap[0, p, j]))
                shares.append(out.shares[0, p, j])
            if branch and len(ahead) > depth_of_branch:
                i = ahead[depth_of_branch]
                found.append((n, i, depth_of_branch, out.last[0, p], "branch"))
                pairs["last_state_weight"].append((out.last[0, p], main.final[0, i - 1]))
    beside = {weight: smooth_l1(*map(torch.stack, zip(*some, strict=True))) for weight, some in pairs.items() if some}
    used = torch.stack(shares).mean(0)
    beside["expert_weight"] = sum(overlap) / len(overlap) + len(used) * float((used**2).sum()) - 1
    return {"drafts": found, "passes": passes, "beside": beside}


def smooth_l1(drafted: Tensor, target: Tensor) -> float:
    """Equations 9 and 10 of the Jakiro paper, over the spread of the target's states."""
    apart = ((drafted.double() - target.double()) / target.double().std()).abs()
    return float(torch.where(apart < 1, apart**2 / 2, apart - 0.5).mean())


def early_exit(model: Any, vocabulary: Tensor | None, kept: list[int]) -> float:
    losses = []
    for row in ROWS:
        main, _, drafts = alone(model, row)
        for t, _ in drafts:
            unit = unit_rms(main.entry[0, t])
            logits = model.head(model.decoder.finish(unit + model.prune_up @ (model.prune_down @ unit)), vocabulary)
            if row.input_ids[t + 1] in kept:
                losses.append(-float(logits.log_softmax(-1)[kept.index(row.input_ids[t + 1])]))
    return sum(losses) / max(len(losses), 1)


JAKIRO = {"method": "jakiro", "random_unroll": False, "last_weight": 0.4, "state_weight": 7.0, "expert_weight": 0.2}
CASES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "lora": ({"method": "lora"}, ("task",)),
    "streaming joint": ({"recipe": "joint", "self_distill": True}, ("joint", "distill")),
    "streaming staged": ({"recipe": "staged"}, ("task", "streams")),
    "streaming staged kl": ({"recipe": "staged", "target_adapter": "base", "labels": "kl"}, ("streams",)),
    "medusa joint": ({"method": "medusa", "recipe": "joint"}, ("heads", "joint")),
    "medusa staged": ({"method": "medusa", "target_adapter": "base", "own_heads": True}, ("streams",)),
    "jakiro": (JAKIRO | {"target_adapter": "base", "last_state_weight": 3.0}, ("streams",)),
    "jakiro one pass": (JAKIRO | {"target_adapter": "base", "unroll": 1, "experts": 3}, ("streams",)),
    "jakiro serial": (JAKIRO | {"target_adapter": "base", "parallel": False}, ("streams",)),
    "eagle": ({"method": "eagle", "target_adapter": "base", "random_unroll": False}, ("streams",)),
    "mtp": ({"method": "mtp", "target_adapter": "base"}, ("streams",)),
    "hydra": ({"method": "hydra", "target_adapter": "base"}, ("streams",)),
    "eagle3": ({"method": "eagle3", "target_adapter": "base", "random_unroll": False}, ("streams",)),
    "dflash": ({"method": "dflash", "target_adapter": "base", "state_weight": 4.0}, ("streams",)),
}


@pytest.mark.parametrize("case", CASES)
def test_the_total_of_every_stage_is_what_the_recipe_says(
    case: str, base: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes, stages = CASES[case]
    watch = Watch(monkeypatch)
    train(options(base, data, tmp_path / "out", **(FIGURES | SMALL | changes)))
    assert tuple(watch.totals) == stages
    for name, (found, expected) in watch.totals.items():
        assert found == pytest.approx(expected, rel=1e-4), name


def test_a_frozen_targets_drafter_learns_from_the_targets_own_answers(
    base: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = Watch(monkeypatch)
    references = [
        tiny_tokenizer()(row["prompt"] + row["completion"])["input_ids"] + [2]
        for row in map(json.loads, data.read_text().splitlines())
    ]
    plain = AutoModelForCausalLM.from_pretrained(base)
    for method, stages in (("streaming", ("streams",)), ("eagle", ("streams",)), ("medusa", ("streams",))):
        out = tmp_path / method
        train(options(base, data, out, method=method, target_adapter="base", **FIGURES, **SMALL))
        for row in (row for stage in stages for row in watch.rows[stage]):
            start = row.loss_mask.index(True)
            prompt, answer = row.input_ids[:start], row.input_ids[start:]
            own = plain.generate(torch.tensor([prompt]), max_new_tokens=5, do_sample=False, pad_token_id=0)[0]
            assert own.tolist() == row.input_ids and all(row.loss_mask[start:]) and row.input_ids not in references
            assert 0 < len(answer) <= 5
        assert len(watch.rows["streams"]) == FIGURES["regenerate_rows"]
    train(options(base, data, tmp_path / "as-is", target_adapter="base", **(FIGURES | SMALL | {"regenerate_rows": 0})))
    assert all(row.input_ids in references for row in watch.rows["streams"])


def test_joint_learns_references_first_and_own_answers_at_last(
    base: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = Watch(monkeypatch)
    train(options(base, data, tmp_path / "out", recipe="joint", self_distill=True, **FIGURES, **SMALL))
    texts = {name: {tuple(row.input_ids) for row in rows} for name, rows in watch.rows.items()}
    assert len(texts["joint"]) > 30 and len(watch.rows["distill"]) == FIGURES["regenerate_rows"]
    assert not texts["joint"] & texts["distill"]
    assert {text[:2] for text in texts["distill"]} <= {text[:2] for text in texts["joint"]}  # the same prompts


def test_of_a_conversation_every_answer_reaches_the_stage(
    chat_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, watch = tmp_path / "chat.jsonl", Watch(monkeypatch)
    for letter in "abcde":
        said = [("user", letter), ("assistant", "cd"), ("user", "ef"), ("assistant", "gh")]
        row = {"messages": [{"role": role, "content": text} for role, text in said]}
        with data.open("a") as file:
            file.write(json.dumps(row) + "\n")
    train(options(chat_base, data, tmp_path / "out", format="chat", recipe="joint", **FIGURES, **SMALL))
    tokenizer = tiny_tokenizer(chat=True)
    for one in watch.rows["joint"]:
        learnt = [token for token, counts in zip(one.input_ids, one.loss_mask, strict=True) if counts]
        assert tokenizer.decode(learnt) == "cd</s>gh</s>"


def test_ranks_end_with_an_answer_and_do_not_pass_a_gap(
    base: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(
        recipe_stages, "record_ranks", lambda *given, **named: seen.append(given) or record_ranks(*given, **named)
    )
    train(options(base, data, tmp_path / "out", target_adapter="base", **FIGURES, **SMALL))
    drafter, vocabulary = seen[0][0], seen[0][2]
    for row, ranks in zip(ROWS, record_ranks(drafter, ROWS, vocabulary), strict=True):
        ahead = dict(drafted_tokens(row))
        positions = [t for t in range(len(row.input_ids) - 1) if row.loss_mask[t + 1]]
        assert len(ranks) == len(positions)
        for t, found in zip(positions, ranks, strict=True):
            assert sum(rank != ENDED for rank in found) == len(ahead.get(t, []))


@pytest.mark.parametrize("ns", [1, 3])
def test_streams_work_at_the_scale_of_the_states_they_are_added_to(
    base: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ns: int
) -> None:
    Watch(monkeypatch)
    rows = [{"prompt": "ab", "completion": "cdefghij"[: 1 + i // 2] * (1 + i % 3)} for i in range(16)]
    some = tmp_path / "rows.jsonl"  # as many as are measured
    some.write_text("".join(json.dumps(row) + "\n" for row in rows))
    shape = FIGURES | SMALL | {"ns": ns, "regenerate_rows": 0}
    train(options(base, some, tmp_path / "out", val=data, target_adapter="base", **shape))
    plain = AutoModelForCausalLM.from_pretrained(base)
    sizes = []
    for row in rows:
        ids = tiny_tokenizer()(row["prompt"] + row["completion"])["input_ids"] + [2]
        with torch.no_grad():
            states = plain(torch.tensor([ids]), output_hidden_states=True).hidden_states[4 - ns][0]
        sizes += states.square().mean(-1).sqrt().tolist()
    median = sorted(sizes)[(len(sizes) - 1) // 2]
    described = json.loads((tmp_path / "out" / "streamspec_config.json").read_text())["streams"]
    assert described["scale"] == pytest.approx(median, rel=1e-5) and abs(median - 1) > 0.05
    tensors = load_file(tmp_path / "out" / "streamspec.safetensors")
    assert tensors["stream_embeddings"].shape == (GAMMA, 32)
