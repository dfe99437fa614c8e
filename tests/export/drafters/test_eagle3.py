"""Published EAGLE-3 heads through the whole path: their drafts are those of transformers' own layers, answers are those
of plain decoding, and what does not fit is refused before the base is loaded.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer
from typer.testing import CliRunner

from streamspec import load
from streamspec.adapters.base_models.resolve import resolve_base
from streamspec.cli import app
from streamspec.cli import inspect as inspection
from streamspec.errors import AdapterError, ConfigError, StreamspecError
from streamspec.export import ExportOptions, Target, export_bundle
from streamspec.export.drafters.published.spec import read_head, shared_embedding
from streamspec.export.runners.graph_runner import open_session, stepper
from streamspec.export.weights.model_spec import describe
from tests.export.test_peft_lora import tuned
from tests.support.published_heads import (
    DRAFTED,
    GAMMA,
    HIDDEN,
    VOCAB,
    flat_config,
    save_head,
    speculators_config,
    tensors,
)
from tests.support.tiny_exports import save_adapter, save_base, tiny_model, tiny_streams

LAYERS, FOUR = {"llama": LlamaDecoderLayer, "qwen3": Qwen3DecoderLayer}, {"eagle_aux_hidden_state_layer_ids": [0, 2, 3]}
PROMPT = "a prompt that is longer than the windows of these tiny models are, with words of the passage in it"
NARROW = {
    "hidden_size": 48,
    "num_attention_heads": 6,
    "intermediate_size": 80,
    "num_key_value_heads": 3,
    "head_dim": 32,
}
LINEAR = {"rope_scaling": {"rope_type": "linear", "factor": 4.0}, "head_dim": 32}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "biases, all tokens": ("llama", speculators_config("llama", {"attention_bias": True}, draft_vocab_size=VOCAB)),
    "qwen3": ("qwen3", speculators_config("qwen3", **FOUR)),
    "norms": ("llama", speculators_config("llama", norm_before_residual=True, norm_before_fc=True, **FOUR)),
    "handed on": ("qwen3", speculators_config("qwen3", norm_before_residual=True, norm_output=True, fc_norm=True)),
    "another width, other keys": ("llama", speculators_config("llama", NARROW, target_hidden_size=HIDDEN)),
    "flat": ("llama", flat_config()),
    "over recurrent states": ("qwen3_5_text", speculators_config("llama", **FOUR)),
    "over experts": ("gpt_oss", speculators_config("qwen3", norm_before_residual=True)),
    "flat over qwen3": ("qwen3", flat_config(eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 1]}, **LINEAR)),
}


def taps_of(config: dict[str, Any], layers: int) -> list[int]:
    """As the public code counts: inputs of layers, but outputs of layers in `eagle_config`."""
    if "eagle_config" in config:
        return [tap + 1 for tap in config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]]
    return config.get("eagle_aux_hidden_state_layer_ids") or [2, layers // 2, layers - 3]


class HeadOfTransformers:
    """A head put together from a decoder layer of transformers, run over whole texts without a cache."""

    def __init__(self, model: Any, config: dict[str, Any], values: dict[str, Tensor]) -> None:
        self.model, self.config, self.values = model, config, values
        section = dict(config.get("transformer_layer_config", config))
        kind = section.pop("model_type")
        self.layer_config = AutoConfig.for_model(kind, **section, attn_implementation="eager")
        self.layer = LAYERS[kind](self.layer_config, 0).eval()
        for side in "qkv":
            weight = values[f"layers.0.self_attn.{side}_proj.weight"]
            setattr(self.layer.self_attn, f"{side}_proj", nn.Linear(*reversed(weight.shape), section["attention_bias"]))
        own = {name.removeprefix("layers.0."): value for name, value in values.items() if name.startswith("layers.0.")}
        del own["hidden_norm.weight"]
        missing = self.layer.load_state_dict(own, strict=False).missing_keys
        assert missing in ([], ["self_attn.o_proj.bias"])
        if missing:
            self.layer.self_attn.o_proj.bias.data.zero_()
        self.taps = taps_of(config, model.config.num_hidden_layers)

    def norm(self, x: Tensor, name: str) -> Tensor:
        return nn.functional.rms_norm(x, x.shape[-1:], self.values[name], self.layer_config.rms_norm_eps)

    @torch.no_grad()
    def drafts(self, text: list[int]) -> list[int]:
        """The target's token after `text` and the head's greedy drafts after that."""
        base = self.model(torch.tensor([text]), output_hidden_states=True)
        states = [base.hidden_states[tap] for tap in self.taps]
        if self.config.get("fc_norm"):
            states = [self.norm(state, f"fc_norm.{i}.weight") for i, state in enumerate(states)]
        joined = torch.cat(states, dim=-1)
        if self.config.get("norm_before_fc"):
            joined = self.norm(joined, "input_norm.weight")
        features = joined @ self.values["fc.weight"].T
        tokens = [*text[1:], int(base.logits[0, -1].argmax())]
        drafted = [tokens[-1]]
        for _ in range(GAMMA if "speculators_config" in self.config else 5):
            out = self._run(tokens, features)[:, -1:]
            finished = self.norm(out, "norm.weight")
            features = torch.cat([features, finished if self.config.get("norm_output") else out], dim=1)
            best = int((finished @ self.values["lm_head.weight"].T).argmax())
            tokens.append(best + int(self.values["d2t"][best]))
            drafted.append(tokens[-1])
        return drafted

    def _run(self, tokens: list[int], features: Tensor) -> Tensor:
        embedding = self.values.get("embed_tokens.weight", self.model.get_input_embeddings().weight)
        embedded = self.layer.input_layernorm(embedding[tokens][None])
        normed = self.norm(features, "layers.0.hidden_norm.weight")
        stream = normed if self.config.get("norm_before_residual") else features
        pair = torch.cat([embedded, normed], dim=-1)
        count = len(tokens)
        where = LlamaRotaryEmbedding(self.layer_config)(pair, torch.arange(count)[None])
        mask = torch.full((count, count), torch.finfo(torch.float32).min).triu(1)[None, None]
        mixed = self.layer.self_attn(hidden_states=pair, position_embeddings=where, attention_mask=mask)[0]
        stream = stream + mixed
        return stream + self.layer.mlp(self.layer.post_attention_layernorm(stream))


def made(folder: Path, family: str, config: dict[str, Any], **options: Any) -> tuple[Any, dict[str, Tensor], Path]:
    """A target, the head's tensors and its folder; the base is in `base` beside it."""
    flat = "transformer_layer_config" not in config
    model = tiny_model(family, num_hidden_layers=6)
    save_base(folder / "base", model)
    values = tensors(config, taps=len(taps_of(config, 6)))
    layer = config.get("transformer_layer_config", config)
    if layer["hidden_size"] != HIDDEN:
        values["embed_tokens.weight"] = torch.randn(VOCAB, layer["hidden_size"])
    if config["draft_vocab_size"] == VOCAB:
        del values["d2t"], values["t2d"]
    head = save_head(folder / "head", config, values, flat)
    if flat:
        values = {
            name: value.bfloat16().float() if value.is_floating_point() else value for name, value in values.items()
        }
    return model, {"d2t": torch.zeros(VOCAB, dtype=torch.long)} | values, head


def greedy_chain(bundle: Path, text: list[int]) -> list[int]:
    """The first candidates of a graph's rows, each row after the first candidate of the one before."""
    runner = stepper(open_session(bundle / "model.onnx", threads=1), 192)
    runner.prefill(np.array(text[:-1]), next_ids=np.array(text[1:]))
    one = np.zeros(1, np.int64)
    out = runner.step(np.array(text[-1:]), one, np.zeros((1, 1), np.float32), parents=one, streams=1)
    candidates, origins = out["candidates"], out["origins"]
    row, chain = 0, [int(candidates[0, 0])]
    while followers := [at for at in range(row + 1, len(origins)) if row_of(origins, at, candidates.shape[1]) == row]:
        row = followers[0]
        chain.append(int(candidates[row, 0]))
    return chain


def row_of(origins: Any, at: int, candidates: int) -> int:
    """The row whose first candidate row `at` follows, -1 where it follows another one."""
    starts = [0, *range(1, len(origins), 4)]
    level = max(start for start in starts if start <= at)
    before = starts[starts.index(level) - 1]
    parent, rank = divmod(int(origins[at]), candidates)
    return before + parent if rank == 0 else -1


@pytest.mark.parametrize(
    ("case", "target"), [*((case, Target()) for case in CASES), ("flat over qwen3", Target(static=True, rows=8))]
)
def test_heads_draft_what_layers_of_transformers_draft(case: str, target: Target, tmp_path: Path) -> None:
    family, config = CASES[case]
    model, values, head = made(tmp_path, family, config)
    manifest = export_bundle(
        tmp_path / "base", None, tmp_path / "bundle", "fp32", drafter=head, target=target, progress=lambda line: None
    )
    assert "assumed" in dict(inspection.describe(tmp_path / "bundle")[1])["expected tokens per step"]
    assert manifest.parity["streams"]["relative"] < 1e-4 and manifest.parity["streams"]["argmax"] == 1.0
    assert (manifest.method, manifest.drafter) == ("eagle", "eagle3") and manifest.streams is not None
    assert manifest.streams.own_keys == ((3, 32) if case.endswith("other keys") else (0, 0))
    theirs, rng = HeadOfTransformers(model, config, values), np.random.default_rng(1)
    followed = 0
    for _ in range(3):
        text = rng.integers(3, VOCAB, 11).tolist()
        drafted = theirs.drafts(text)[1:]
        ours = greedy_chain(tmp_path / "bundle", text)
        assert ours == drafted[: len(ours)]
        assert len(drafted) == manifest.streams.gamma
        followed += len(ours)
    assert followed > 6  # else a chain leaves the levels, which go on from the likeliest paths


ANSWERED = [("norms", "fp32"), ("another width, other keys", "int8"), ("flat", "int4")]
OVER = [("over recurrent states", "int8", Target()), ("over experts", "int4", Target())]
ANSWERING = [*OVER, *((*one, Target()) for one in ANSWERED), *((*one, Target(static=True, rows=8)) for one in ANSWERED)]
ANSWERING += [(*one, Target("cuda")) for one in (("norms", "fp16"), ("another width, other keys", "fp16"))]
MEASURED = [(*one, Target()) for one in ANSWERED]  # of others the one graph is compared in brief, too


@pytest.mark.parametrize(("case", "precision", "target"), ANSWERING)
def test_answers_are_those_of_plain_decoding(case: str, precision: str, target: Target, tmp_path: Path) -> None:
    family, config = CASES[case]
    model, _, head = made(tmp_path, family, config)
    export_bundle(
        tmp_path / "base",
        None,
        tmp_path / "bundle",
        precision,
        drafter=head,
        target=target,
        measure=(case, precision, target) in MEASURED,
        progress=lambda line: None,
    )
    session = load(tmp_path / "bundle", threads=1, tree=8, cache_dir=tmp_path, provider="cpu")
    plain, drafted = (session.generate(PROMPT, max_new_tokens=24, speculate=speculate) for speculate in (False, True))
    assert drafted.token_ids == plain.token_ids and drafted.stats.steps > 0
    if precision == "fp32":
        ids = torch.tensor([session.encode(PROMPT)])
        theirs = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
        assert plain.token_ids == theirs[0, ids.shape[1] :].tolist()


def test_a_head_beside_a_lora_reads_the_states_of_both(tmp_path: Path) -> None:
    family, config = CASES["norms"]
    model, values, head = made(tmp_path, family, config)
    lora = tuned(tmp_path / "lora", tmp_path / "base")
    merged = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), lora).merge_and_unload()
    manifest = export_bundle(
        tmp_path / "base", lora, tmp_path / "bundle", "fp32", drafter=head, progress=lambda line: None
    )
    assert manifest.parity["streams"]["argmax"] == 1.0
    text = np.random.default_rng(1).integers(3, VOCAB, 11).tolist()
    with_lora, without = (HeadOfTransformers(one, config, values).drafts(text)[1:] for one in (merged, model))
    ours = greedy_chain(tmp_path / "bundle", text)
    assert ours == with_lora[: len(ours)] and len(ours) > 1 and ours != without[: len(ours)]


def test_a_head_with_the_targets_own_embedding_shares_it(tmp_path: Path) -> None:
    config, table = speculators_config("llama"), torch.randn(VOCAB, HIDDEN)
    spec = read_head(save_head(tmp_path, config, tensors(config) | {"embed_tokens.weight": table}), TARGET)
    shared = {name for name in spec.tensors if name != "embed_tokens.weight"}
    assert set(shared_embedding(spec, table.numpy()).tensors) == shared
    table[VOCAB - 1, 0] += 1
    assert shared_embedding(spec, table.numpy()) is spec


CONFIGS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"speculators_model_type": "eagle"}, {}, "a speculator of type 'eagle'; expected eagle3"),
    ({"some_switch": 3}, {}, "some_switch = 3"),
    ({}, {"some_scale": 2.0}, r"transformer_layer_config\.some_scale = 2\.0"),
    ({}, {"num_hidden_layers": 2}, r"transformer_layer_config\.num_hidden_layers = 2"),
    ({}, {"model_type": "deepseek_v3"}, r"a layer of 'deepseek_v3' \(only llama, qwen3\)"),
    ({"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, {}, "architectures Eagle3DeepseekV2ForCausalLM"),
    ({"architectures": 5}, {}, "architectures is 5; expected a list"),
    ({"eagle_config": [1]}, {}, r"eagle_config is \[1\]; expected an object"),
    ({"truncated_vocab_size": 5}, {}, f"truncated_vocab_size is 5; expected {DRAFTED}"),
    (
        {"num_aux_hidden_states": 2, "eagle_aux_hidden_state_layer_ids": [1, 2, 4]},
        {},
        "num_aux_hidden_states is 2; expected 3",
    ),
    ({}, {"layer_types": ["sliding_attention"]}, "layer_types = "),
    ({}, {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 2.0}}, "of type 'dynamic'"),
    ({}, {"hidden_act": "swish2"}, "hidden_act = 'swish2'"),
    ({"norm_output": "yes"}, {}, "norm_output is yes; expected true or false"),
    ({"draft_vocab_size": 4000}, {}, "draft_vocab_size is 4000; expected a whole number 1..96"),
    ({"eagle_aux_hidden_state_layer_ids": [1, 2, 6]}, {}, "states of layer 6 of 6"),
    (
        {"target_hidden_size": 128},
        {},
        r"hidden size 128, not 64 \(it names maker/model\); expected a drafter of this base",
    ),
    ({}, {"vocab_size": 128}, "vocabulary 128, not 96"),
    ({"eagle_config": {"use_aux_hidden_state": False}}, {}, r"eagle_config\.use_aux_hidden_state = False"),
    ({"eagle_config": {"parallel_draft_step": 2}}, {}, r"eagle_config\.parallel_draft_step = 2"),
    ({"eagle_config": {"next_layer_regular": False}}, {}, r"eagle_config\.next_layer_regular = False"),
    ({"eagle_config": {"use_input_layernorm_in_first_layer": False}}, {}, r"_in_first_layer = False"),
    ({}, {"rope_parameters": None, "rope_theta": None}, "rope_theta = None"),
    ({}, {"rope_parameters": {"rope_theta": 0, "rope_type": "default"}}, "rope_theta = 0"),
    ({}, {"hidden_size": "64"}, "hidden_size is 64; expected a whole number"),
    ({}, {"rms_norm_eps": -1.0}, r"rms_norm_eps = -1\.0"),
]


TARGET = SimpleNamespace(
    hidden_size=HIDDEN, vocab_size=VOCAB, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2, head_dim=16
)


def refused(head: Path, pattern: str) -> None:
    """Refuses the head in one line."""
    with pytest.raises(AdapterError, match=pattern) as caught:
        read_head(head, TARGET)
    assert "\n" not in str(caught.value)


PUBLISHED: dict[str, dict[str, Any]] = {  # fields that heads of these makers have
    "speculators 0.4": speculators_config("llama", has_no_defaults_at_init=False, base_model_ep_plan=None),
    "AngelSlim": flat_config(
        tie_word_embeddings=True, modal_type="VLM", image_token_id=5, vision_start_token_id=6, use_mrope=False
    ),
    "nebius": flat_config(truncated_vocab_size=DRAFTED, num_aux_hidden_states=None, additional_fc=False),
}


@pytest.mark.parametrize("maker", PUBLISHED)
def test_fields_that_change_nothing_are_read_over(maker: str, tmp_path: Path) -> None:
    config = PUBLISHED[maker]
    own = tensors(config)
    assert read_head(save_head(tmp_path, config, own), TARGET).draft_vocab is not None
    del own["lm_head.weight"]
    refused(save_head(tmp_path, config, own), "missing: lm_head.weight")


@pytest.mark.parametrize(("changes", "layer", "pattern"), CONFIGS, ids=lambda x: str(x)[:40])
def test_a_configuration_that_is_not_understood_is_refused_by_name(
    changes: dict[str, Any], layer: dict[str, Any], pattern: str, tmp_path: Path
) -> None:
    values = tensors(speculators_config("llama"))
    refused(save_head(tmp_path, speculators_config("llama", layer, **changes), values), pattern)


def test_tensors_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    config, values = speculators_config("llama"), tensors(speculators_config("llama"))
    head = save_head(tmp_path / "head", config, values)

    def faulty(pattern: str, **changed: Tensor | None) -> None:
        named = {name.replace("__", "."): value for name, value in changed.items()}
        kept = {name: value for name, value in (values | named).items() if value is not None}
        refused(save_head(head, config, kept), pattern)

    faulty("missing: fc.weight", fc__weight=None)
    faulty(r"of the wrong shape: norm.weight \(32,\), not \(64,\)", norm__weight=torch.ones(32))
    faulty("unknown: extra.weight", extra__weight=torch.ones(3))
    faulty("missing: d2t", d2t=None)
    faulty("not finite: norm.weight", norm__weight=torch.full((HIDDEN,), torch.nan))
    faulty("d2t does not name 40 tokens", d2t=torch.full((DRAFTED,), VOCAB))
    faulty("t2d and d2t name other tokens", t2d=torch.zeros(VOCAB, dtype=torch.bool))
    faulty(r"norm\.weight \(F8_E4M3\)", norm__weight=torch.ones(HIDDEN).to(torch.float8_e4m3fn))
    narrow = speculators_config("llama", NARROW, target_hidden_size=HIDDEN)
    refused(save_head(head, narrow, tensors(narrow)), "missing: embed_tokens.weight")
    save_head(head, config, values)
    (head / "model.safetensors").write_bytes(b"nothing")
    refused(head, "cut off or damaged")
    (head / "model.safetensors").rename(head / "pytorch_model.bin")
    refused(head, "only pytorch_model.bin; .*load its pickle where you trust it")
    refused(tmp_path / "nowhere", "expected the folder of a published drafter")


def test_what_model_optimizer_writes_is_read(tmp_path: Path) -> None:
    """Its whole template, as its EAGLE-3 recipe fills it in."""
    config = flat_config(
        rope_scaling={
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 256,
            "rope_type": "llama3",
        },
        eagle_config={
            **FOUR,
            "use_aux_hidden_state": True,
            "use_input_layernorm_in_first_layer": True,
            "use_last_layernorm": True,
            "use_mtp_layernorm": False,
            "next_layer_regular": True,
            "parallel_draft_step": 1,
            "parallel_draft_heads_num_layers": None,
        },
    )
    head = save_head(tmp_path, config, tensors(config), flat=True)
    assert read_head(head, TARGET).head.taps == (1, 3, 4)
    config["eagle_config"]["parallel_draft_heads_num_layers"] = 1
    assert read_head(save_head(tmp_path, config, tensors(config), flat=True), TARGET).head.taps == (1, 3, 4)


def test_what_specforge_takes_over_from_its_targets_changes_nothing(tmp_path: Path) -> None:
    """A step of sparse layers (Qwen3-Next), and positions in pictures (Qwen2.5-VL), which are the same in a text."""
    left = {"decoder_sparse_step": 1, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
    made = []
    for number, config in enumerate((flat_config(), flat_config(**left))):
        head = save_head(tmp_path / str(number), config, tensors(config), flat=True)
        made.append(read_head(head, TARGET).decoder("float32").rotaries[0])
    plain, pictures = made
    assert np.array_equal(plain.inv_freq, pictures.inv_freq) and plain.scale == pictures.scale


def test_names_of_the_target_beside_a_head_are_left_alone(tmp_path: Path) -> None:
    config, values = speculators_config("llama"), tensors(speculators_config("llama"))
    beside = {"verifier_norm.weight": torch.ones(HIDDEN), "layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    head = save_head(tmp_path / "head", config, values | beside)
    assert not set(read_head(head, TARGET).tensors) & set(beside)
    save_file(values | {"midlayer.hidden_norm.weight": torch.ones(HIDDEN)}, head / "model.safetensors")
    refused(head, "layers.0.hidden_norm.weight and midlayer.hidden_norm.weight")


def test_what_does_not_go_together_is_refused_before_the_base_is_loaded(tmp_path: Path) -> None:
    config = speculators_config("llama", **FOUR)
    model, _, head = made(tmp_path, "llama", config)
    adapter = save_adapter(tmp_path / "adapter", resolve_base(str(tmp_path / "base")), tiny_streams(describe(model)))
    other = save_head(tmp_path / "other", speculators_config("llama", {"vocab_size": 128}), tensors(config))
    for given, drafter, target, pattern in (
        (adapter, head, Target(), "which has a drafter; expected one drafter"),
        (None, other, Target(), "vocabulary 128, not 96"),
    ):
        said: list[str] = []
        with pytest.raises(StreamspecError, match=pattern):
            export_bundle(
                tmp_path / "base", given, tmp_path / "out", "fp32", drafter=drafter, target=target, progress=said.append
            )
        assert "loading the base" not in said and not (tmp_path / "out").exists()
    with pytest.raises(ConfigError, match="--swappable and --drafter"):
        ExportOptions(drafter=head).check_unused("--swappable")


def test_export_takes_a_head_on_the_command_line(tmp_path: Path) -> None:
    config = speculators_config("llama", **FOUR)
    _, _, head = made(tmp_path, "llama", config)
    out = tmp_path / "bundle"
    run = CliRunner().invoke(
        app,
        ["export", "--base", str(tmp_path / "base"), "--drafter", str(head), "--out", str(out), "--precision", "fp32"],
    )
    assert run.exit_code == 0, run.output
    assert json.loads((out / "manifest.json").read_text())["drafter"] == "eagle3"
