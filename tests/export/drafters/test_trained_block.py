"""A block drafter in the published form that is trained here: through the whole path, and as others read it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from streamspec import load
from streamspec.adapters.drafters.dflash.config import BlockConfig
from streamspec.adapters.drafters.drafting_model import DraftRows
from streamspec.adapters.drafters.dspark.model import PublishedBlockModel
from streamspec.adapters.train import train
from streamspec.errors import AdapterError, ConfigError
from streamspec.export import export_bundle
from streamspec.export.drafters.published.write import write_published
from tests.support.tiny_models import options, tiny_model, tiny_tokenizer

IDS = torch.tensor([[5, 9, 12, 33, 7, 41, 8, 20]])
GAMMA = 3


def saved(family: str, folder: Path) -> Path:
    tiny_model(family).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("family", "rank", "kind"), [("llama", 0, "dflash"), ("qwen2", 4, "dspark"), ("qwen3", 4, "dspark")]
)
def test_what_is_trained_is_exported_and_what_is_written_for_others_is_read_and_drafts_the_same(
    family: str, rank: int, kind: str, data: Path, tmp_path: Path
) -> None:
    base, adapter, out = saved(family, tmp_path / "base"), tmp_path / "adapter", tmp_path / "published"
    given = {"target_adapter": "base", "taps": "3,1", "block_layers": 2, "bigram_rank": rank, "epochs": 6.0}
    train(options(base, data, adapter, method="dspark", gamma=GAMMA, **given))
    config = write_published(str(base), adapter, out)
    assert (config["speculators_model_type"], config["block_size"]) == (kind, GAMMA)
    assert (
        config["aux_hidden_state_layer_ids"] == [1, 3] and config["transformer_layer_config"]["model_type"] == "qwen3"
    )
    chosen = load_file(adapter / "streamspec.safetensors")["draft_vocab"].sort().values
    written = load_file(out / "model.safetensors")
    assert torch.equal(written["d2t"] + torch.arange(len(chosen)), chosen)
    answers = []
    for name, given in (("own", (adapter, None)), ("theirs", (None, out))):
        said = lambda line: None  # noqa: E731
        made = export_bundle(base, given[0], tmp_path / name, "fp32", progress=said, drafter=given[1])
        assert made.parity["streams"]["relative"] < 1e-4
        session = load(tmp_path / name, threads=1, tree=8, ngram=False, cache_dir=tmp_path / f"{name}-cache")
        answers.append([session.generate(prompt, max_new_tokens=24) for prompt in ("ai", "bj", "hp")])
    own, theirs = ([(one.token_ids, one.stats.step_tokens) for one in side] for side in answers)
    assert own == theirs
    plain = [session.generate(prompt, max_new_tokens=24, speculate=False).token_ids for prompt in ("ai", "bj", "hp")]
    assert [tokens for tokens, _ in own] == plain
    assert sum(one.stats.step_tokens for one in answers[0]) > sum(one.stats.steps for one in answers[0])
    section = json.loads((adapter / "streamspec_config.json").read_text())["streams"]
    assert section["layer"]["attention_bias"] == (family == "qwen2")


def test_every_tensor_learns() -> None:
    torch.manual_seed(0)
    config = BlockConfig(GAMMA, 2, 1.0, taps=(1, 3))
    model = PublishedBlockModel(tiny_model("qwen2").requires_grad_(False), config, (64, 4), mask_token=2)
    torch.nn.init.normal_(model.bigram_out)
    picked = DraftRows(torch.tensor([[2, 4]]), torch.tensor([[7, 9]]), torch.ones(1, 2, GAMMA, dtype=torch.long))
    states = model.draft_pass(model.main_pass(IDS, torch.ones_like(IDS)), picked)
    model.with_bigram(
        model.draft_logits(states.flatten(0, 2), torch.arange(6) % 3, None), torch.arange(6)
    ).square().sum().backward()
    for name, parameter in model.drafter_tensors().items():
        learns = parameter.grad is not None and bool(parameter.grad.any())
        assert learns or name.endswith("k_proj.bias"), name  # a constant of all keys changes no weight of attention


def test_rows_see_no_text_after_theirs() -> None:
    model = PublishedBlockModel(tiny_model("qwen3").requires_grad_(False), BlockConfig(GAMMA, 1, 1.0, taps=(1,)))
    picked = DraftRows(torch.tensor([[3]]), IDS[:, 4:5], torch.ones(1, 1, GAMMA, dtype=torch.long))
    drafted = []
    for ids in (IDS, IDS[:, :5], torch.cat([IDS[:, :5], IDS[:, :3]], dim=1)):
        with torch.no_grad():
            drafted.append(model.draft_pass(model.main_pass(ids, torch.ones_like(ids)), picked))
    torch.testing.assert_close(drafted[1], drafted[0])
    torch.testing.assert_close(drafted[2], drafted[0])


def test_what_it_cannot_be_is_refused_by_name(base: Path, data: Path, tmp_path: Path) -> None:
    config = options(base, data, tmp_path, method="dspark")
    with pytest.raises(ConfigError, match="--method dspark with gemma2; expected llama or mistral or qwen2 or qwen3"):
        config.drafter.check_base(config.resolved, "gemma2", 4)
    for changes, said in (
        ({"taps": "final"}, "--taps final"),
        ({"block_layers": 9}, "block_layers = 9; expected 1..4"),
    ):
        config = options(base, data, tmp_path, method="dspark", **changes)
        with pytest.raises(ConfigError, match=said):
            config.drafter.check_base(config.resolved, "llama", 4)
    with pytest.raises(ConfigError, match="--causal with --method dspark"):
        options(base, data, tmp_path, method="dspark", causal=True)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"taps": [9]}, r"streams\.taps is \[9\]"),
        ({"mask_token": 64}, r"streams\.mask_token is 64"),
        ({"layer": {"model_type": "llama"}}, r"streams\.layer is .*; expected the configuration of layers of qwen3"),
    ],
)
def test_a_damaged_configuration_is_refused(
    changes: dict[str, object], said: str, base: Path, data: Path, tmp_path: Path
) -> None:
    adapter = tmp_path / "adapter"
    train(options(base, data, adapter, method="dspark", target_adapter="base", epochs=0.2))
    file = adapter / "streamspec_config.json"
    config = json.loads(file.read_text())
    config["streams"] |= changes
    file.write_text(json.dumps(config))
    with pytest.raises(AdapterError, match=said):
        export_bundle(base, adapter, tmp_path / "out", "fp32", progress=lambda line: None)
