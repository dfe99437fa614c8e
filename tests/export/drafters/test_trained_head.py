"""An EAGLE-3 head that is trained here: against transformers' layer, through the whole path, and as others read it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from typer.testing import CliRunner

from streamspec import load
from streamspec.adapters.drafters.draft_layer.config import DraftLayerConfig
from streamspec.adapters.drafters.drafting_model import DraftRows
from streamspec.adapters.drafters.eagle3.model import PairLayerModel, fit_tokens
from streamspec.adapters.drafters.eagle3.options import LAYER_OF
from streamspec.adapters.train import train
from streamspec.cli import app
from streamspec.errors import AdapterError, ConfigError
from streamspec.export import export_bundle
from streamspec.export.drafters.published.write import write_published
from tests.support.tiny_models import options, tiny_model, tiny_tokenizer

IDS = torch.tensor([[5, 9, 12, 33, 7, 41, 8, 20]])
GAMMA = 3


def trained(base: Path, data: Path, out: Path) -> Path:
    train(options(base, data, out, method="eagle3", target_adapter="base", taps="1,3", gamma=GAMMA, epochs=6.0))
    return out


@pytest.fixture(scope="module")
def adapter(base: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(base, data, tmp_path_factory.mktemp("head") / "adapter")


def saved(family: str, folder: Path, **changes: Any) -> Path:
    tiny_model(family, **changes).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def head(family: str) -> PairLayerModel:
    torch.manual_seed(0)
    config = DraftLayerConfig(GAMMA, 1, 1, contrast=False, parallel=False, taps=(1, 3))
    changes = {"sliding_window": None} if family == "mistral" else {}
    model = PairLayerModel(tiny_model(family, **changes).requires_grad_(False), config).eval()
    with torch.no_grad():
        for parameter in model.drafter_tensors().values():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


@pytest.mark.parametrize("family", LAYER_OF)
@torch.no_grad()
def test_passes_equal_those_of_a_layer_of_transformers_over_pairs(family: str) -> None:
    model, t, following = head(family), 4, [11, 3, 21]
    picked = DraftRows(torch.tensor([[t]]), IDS[:, t + 1 : t + 2], torch.tensor([[following]]))
    main = model.main_pass(IDS, torch.ones_like(IDS))
    drafted = model.draft_pass(main, picked)[0, 0]
    layer, embed = model.decoder.layers[-1], model.decoder.embedding.weight
    features = main.entry[0, : t + 1] @ model.from_entry.T
    tokens = IDS[0, 1 : t + 2].tolist()
    for depth in range(GAMMA):
        pairs = torch.cat([model.norm_token(embed[tokens]), model.norm_in(features)], dim=-1)[None]
        where = torch.arange(len(tokens))[None]
        rotary = model.decoder.rotary_embeddings(pairs, where)
        mask = torch.full((len(tokens), len(tokens)), -1e9).triu(1)[None, None]
        mixed = model.attention(pairs, position_embeddings=rotary, attention_mask=mask)[0][0]
        u = features + mixed
        inner = model.norm_mid(u)
        mlp = (
            layer.mlp.act_fn(inner @ model.experts.gate[0].T) * (inner @ model.experts.up[0].T)
        ) @ model.experts.down[0]
        states = u + mlp
        torch.testing.assert_close(drafted[depth], model.norm_out(states[-1]), atol=2e-4, rtol=2e-4)
        tokens, features = [*tokens, following[depth]], torch.cat([features, states[-1:]])


def test_every_tensor_learns_and_the_start_explains_something() -> None:
    model, ids = head("llama"), torch.randint(3, 60, (12, 24))
    assert fit_tokens(model, [(ids, torch.ones_like(ids))]) < 1
    picked = DraftRows(torch.tensor([[2, 4]]), torch.tensor([[7, 9]]), torch.ones(1, 2, GAMMA, dtype=torch.long))
    model.draft_pass(model.main_pass(IDS, torch.ones_like(IDS)), picked).square().sum().backward()
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert len(learning) == len(model.drafter_tensors())
    assert all(parameter.grad is not None and bool(parameter.grad.any()) for parameter in learning)


def test_a_bundle_of_a_trained_head_drafts_what_was_trained(adapter: Path, base: Path, tmp_path: Path) -> None:
    manifest = export_bundle(base, adapter, tmp_path / "bundle", "fp32", progress=lambda line: None)
    assert manifest.method == "eagle3" and manifest.parity["streams"]["relative"] < 1e-4
    session = load(tmp_path / "bundle", threads=1, tree=8, cache_dir=tmp_path)
    steps = tokens = 0
    for prompt in ("ai", "bj", "hp"):
        plain, drafted = (session.generate(prompt, max_new_tokens=24, speculate=one) for one in (False, True))
        assert drafted.token_ids == plain.token_ids
        steps, tokens = steps + drafted.stats.steps, tokens + drafted.stats.step_tokens
    assert tokens > steps


def test_what_is_written_for_others_is_read_as_a_published_head_and_drafts_the_same(
    adapter: Path, base: Path, tmp_path: Path
) -> None:
    out = tmp_path / "published"
    command = ["export", "--base", str(base), "--adapter", str(adapter), "--out", str(out), "--as", "speculators"]
    said = CliRunner().invoke(app, command)
    assert said.exit_code == 0 and "EAGLE-3 head in the format of speculators" in said.output
    config, values = json.loads((out / "config.json").read_text()), load_file(out / "model.safetensors")
    chosen = load_file(adapter / "streamspec.safetensors")["draft_vocab"].sort().values
    assert torch.equal(values["d2t"] + torch.arange(len(chosen)), chosen)
    assert config["eagle_aux_hidden_state_layer_ids"] == [3, 1] and values["t2d"].nonzero()[:, 0].equal(chosen)
    drafts = []
    for name, given in (("own", {"adapter": adapter}), ("theirs", {"adapter": None, "drafter": out})):
        given = {"adapter": given.pop("adapter"), **given}
        export_bundle(base, given.pop("adapter"), tmp_path / name, "fp32", progress=lambda line: None, **given)
        session = load(tmp_path / name, threads=1, tree=8, cache_dir=tmp_path / f"cache-{name}")
        drafts.append([session.generate(p, max_new_tokens=24).stats.step_tokens for p in ("ai", "bj", "hp")])
    assert drafts[0] == drafts[1]


def test_a_head_over_biased_layers_is_one_of_llama_with_all_four_biases(data: Path, tmp_path: Path) -> None:
    base = saved("qwen2", tmp_path / "base")
    adapter, out = trained(base, data, tmp_path / "adapter"), tmp_path / "published"
    layer = write_published(str(base), adapter, out)["transformer_layer_config"]
    assert (layer["model_type"], layer["attention_bias"]) == ("llama", True)
    of_llama = LlamaDecoderLayer(LlamaConfig(**layer), 0).state_dict()
    own = {name.removeprefix("layers.0."): one for name, one in load_file(out / "model.safetensors").items()}
    assert of_llama.keys() == {*own} - {
        "fc.weight",
        "norm.weight",
        "lm_head.weight",
        "d2t",
        "t2d",
        "hidden_norm.weight",
    }
    bundles = {name: tmp_path / name for name in ("own", "theirs")}
    manifest = export_bundle(base, adapter, bundles["own"], "fp32", progress=lambda line: None)
    export_bundle(base, None, bundles["theirs"], "fp32", progress=lambda line: None, drafter=out)
    assert manifest.parity["streams"]["relative"] < 1e-4
    sessions = [load(bundle, threads=1, tree=8, cache_dir=bundle / "cache") for bundle in bundles.values()]
    first, second = ([one.generate(p, max_new_tokens=24).stats.step_tokens for p in ("ai", "bj")] for one in sessions)
    assert first == second


def test_a_head_over_a_window_is_refused(data: Path, tmp_path: Path) -> None:
    base = saved("mistral", tmp_path / "base", sliding_window=8)
    with pytest.raises(ConfigError, match="--method eagle3 over a window of 8 tokens"):
        trained(base, data, tmp_path / "adapter")


def test_what_cannot_be_written_is_refused_by_name(adapter: Path, base: Path, data: Path, tmp_path: Path) -> None:
    train(options(base, data, tmp_path / "eagle", method="eagle", target_adapter="base", epochs=1.0))
    with pytest.raises(ConfigError, match="--as speculators with an adapter of --method eagle; .*--method eagle3"):
        write_published(str(base), tmp_path / "eagle", tmp_path / "out")
    (tmp_path / "out").mkdir()
    with pytest.raises(ConfigError, match="out exists"):
        write_published(str(base), adapter, tmp_path / "out")
    for changes, said in (
        ({"prefix_attention": True}, "--prefix-attention with --method eagle3"),
        ({"block_layers": 2}, "--block-layers with --method eagle3"),
    ):
        with pytest.raises(ConfigError, match=said):
            options(base, data, tmp_path, method="eagle3", **changes)
    config = options(base, data, tmp_path, method="eagle3")
    with pytest.raises(ConfigError, match="--method eagle3 with gemma2; expected llama or mistral or qwen2 or qwen3"):
        config.drafter.check_base(config.resolved, "gemma2", 4)


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"taps": [9]}, r"streams\.taps is \[9\]"),
        ({"layer": {"model_type": "gpt2"}}, r"streams\.layer is .*; expected the configuration of a layer"),
        ({"bigram": 3}, "an EAGLE-3 head with a bigram"),
    ],
)
def test_a_damaged_configuration_is_refused(
    section: dict[str, Any], said: str, adapter: Path, base: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in adapter.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    config = json.loads((copy / "streamspec_config.json").read_text())
    config["streams"] |= section
    (copy / "streamspec_config.json").write_text(json.dumps(config))
    with pytest.raises(AdapterError, match=said):
        export_bundle(base, copy, tmp_path / "bundle", "fp32", progress=lambda line: None)
