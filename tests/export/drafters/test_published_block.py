"""Published block drafters through the whole path: their drafts are those of layers put together from transformers'
parts, answers are those of plain decoding, and what does not fit is refused before the base is loaded.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RotaryEmbedding, apply_rotary_pos_emb

from streamspec import load
from streamspec.errors import AdapterError
from streamspec.export import Target, export_bundle
from streamspec.export.drafters.published.block_config import read_block_config
from streamspec.export.drafters.published.spec import read_block
from streamspec.export.runners.graph_runner import open_session, stepper
from tests.support.published_blocks import (
    BLOCK,
    LAYERS,
    MASK,
    SLIDING,
    WINDOW,
    WINDOWED,
    block_tensors,
    speculators_block_config,
    zlab_config,
)
from tests.support.published_heads import DRAFTED, HIDDEN, VOCAB, save_head
from tests.support.tiny_exports import save_base, tiny_model

PROMPT = "a prompt that is longer than the windows of these tiny models are, with words of the passage in it"
NESTED = {"block_size": BLOCK, "mask_token_id": MASK, "target_layer_ids": [1, 3, 4]}
WIDE = {"head_dim": 32}
MASKED, ROPE = {"mask_token_id": MASK}, {"rope_type": "default", "rope_theta": 500.0}
LAST = NESTED | {"target_layer_ids": [1, 3, 5]}
ALL_SLIDE = WINDOWED | {"layer_types": SLIDING[:1] * LAYERS}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "z-lab": ("llama", zlab_config({"num_key_value_heads": 3, "head_dim": 32})),
    "biases, the block's size inside": ("qwen3", zlab_config(WIDE | {"attention_bias": True}, dflash_config=NESTED)),
    "windows, the finished state": ("llama", zlab_config(WINDOWED, dflash_config=LAST)),
    "windows that see later rows": ("qwen3", zlab_config(ALL_SLIDE | WIDE, dflash_config=NESTED | {"causal": False})),
    "JetSpec": ("llama", zlab_config(dflash_config=NESTED | {"causal_head": True})),
    "a scaled head": ("gemma2", zlab_config({"head_dim": 24})),
    "speculators": ("llama", speculators_block_config("dflash", WINDOWED)),
    "from the anchor": (
        "qwen3",
        speculators_block_config("dflash", WIDE | ALL_SLIDE, sample_from_anchor=True, sliding_window_non_causal=True),
    ),
    "dspark": ("qwen3", speculators_block_config("dspark", WIDE)),
    "dspark over some tokens": ("llama", speculators_block_config("dspark", draft_vocab_size=DRAFTED)),
    "over convolutions": ("lfm2", speculators_block_config("dspark")),
    "over a state space": ("granitemoehybrid+mamba", zlab_config(dflash_config=MASKED, target_layer_ids=[0, 3, 5])),
    "over halves of layers": (
        "nemotron_h",
        zlab_config({"head_dim": 24}, dflash_config=MASKED, target_layer_ids=[0, 3, 5]),
    ),
    "over experts": (
        "ernie4_5_moe",
        speculators_block_config("dspark", {"rope_parameters": ROPE | {"mrope_section": [4, 2, 2]}}),
    ),
}
TARGET = SimpleNamespace(
    hidden_size=HIDDEN, vocab_size=VOCAB, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2, head_dim=16
)


class BlockOfTransformers:
    """A drafter put together from layers of transformers, run over whole texts without a cache."""

    def __init__(self, model: Any, config: dict[str, Any], values: dict[str, Tensor]) -> None:
        self.model, self.values, self.config = model, values, config
        section = dict(config.get("transformer_layer_config", config))
        fields = {
            name: section[name] for name in section if name not in ("model_type", "dflash_config", "architectures")
        }
        self.shape = AutoConfig.for_model("qwen3", **fields, attn_implementation="eager")
        self.layers = [Qwen3DecoderLayer(self.shape, number).eval() for number in range(LAYERS)]
        for number, layer in enumerate(self.layers):
            begin = f"layers.{number}."
            own = {name.removeprefix(begin): value for name, value in values.items() if name.startswith(begin)}
            layer.load_state_dict(own)
        self.first = 0 if config.get("sample_from_anchor") else 1
        outputs = (config | config.get("dflash_config", {})).get("target_layer_ids", [])
        self.taps = [one + 1 for one in outputs] or config["aux_hidden_state_layer_ids"]

    def sees(self, number: int, length: int) -> Tensor:
        """What public code lets row r of a block after `length` tokens see: vLLM each row its window, speculators all
        rows the window before the block; none a later row, unless it says so."""
        trained, own = "sliding_window_non_causal" in self.config, self.config.get("dflash_config", {})
        slides, size = self.shape.layer_types[number] == "sliding_attention", self.shape.sliding_window
        causal = slides and not (self.config["sliding_window_non_causal"] if trained else not own.get("causal", True))
        causal = own.get("causal_head", causal)
        sees = torch.zeros(BLOCK, length + BLOCK, dtype=torch.bool)
        for row in range(BLOCK):
            at = length + row
            first = 0 if not slides else max(0, length - size if trained else at - size + 1)
            sees[row, first : at + 1 if causal else None] = True
        return sees

    def norm(self, x: Tensor, name: str) -> Tensor:
        return nn.functional.rms_norm(x, x.shape[-1:], self.values[name], self.shape.rms_norm_eps)

    @torch.no_grad()
    def logits(self, text: list[int], root: int) -> Tensor:
        """[gamma, V] after `text`, whose next token is `root`."""
        base = self.model(torch.tensor([text]), output_hidden_states=True)
        joined = torch.cat([base.hidden_states[tap] for tap in self.taps], dim=-1)
        context = self.norm(joined @ self.values["fc.weight"].T, "hidden_norm.weight")
        tokens = torch.tensor([root, *[MASK] * (BLOCK - 1)])
        x = nn.functional.embedding(tokens, self.model.get_input_embeddings().weight)[None]
        length = len(text)
        cos, sin = Qwen3RotaryEmbedding(self.shape)(x, torch.arange(length + BLOCK)[None])
        for number, layer in enumerate(self.layers):
            own, part = layer.input_layernorm(x), layer.self_attn
            every = torch.cat([context, own], dim=1)
            heads = (1, length + BLOCK, -1, self.shape.head_dim)
            padded = torch.cat([torch.zeros_like(context), own], dim=1)
            query = part.q_norm(part.q_proj(padded).view(heads)).transpose(1, 2)
            key, value = part.k_norm(part.k_proj(every).view(heads)).transpose(1, 2), part.v_proj(every).view(heads)
            query, key = apply_rotary_pos_emb(query, key, cos, sin)
            mixed = nn.functional.scaled_dot_product_attention(
                query[:, :, length:], key, value.transpose(1, 2), self.sees(number, length), enable_gqa=True
            )
            x = x + part.o_proj(mixed.transpose(1, 2).flatten(2))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        finished = self.norm(x[0, self.first :], "norm.weight")
        if "d2t" not in self.values:
            return finished @ self.model.lm_head.weight.T
        spread = torch.full((len(finished), VOCAB), -torch.inf)
        spread[:, self.values["d2t"] + torch.arange(len(self.values["d2t"]))] = (
            finished @ self.values["lm_head.weight"].T
        )
        return spread

    def pair(self, before: int, after: Any) -> Tensor:
        """The Markov head's share of the tokens `after` one."""
        first, second = (self.values[f"markov_head.markov_w{side}.weight"] for side in (1, 2))
        if "d2t" in self.values:
            tokens = self.values["d2t"] + torch.arange(len(self.values["d2t"]))
            after = torch.searchsorted(tokens, torch.as_tensor(after))
        return second[after] @ first[before]


def made(folder: Path, family: str, config: dict[str, Any]) -> tuple[Any, dict[str, Tensor], Path]:
    """A target of six layers, the drafter's tensors and its folder; the base is in `base` beside it."""
    model, values = tiny_model(family, num_hidden_layers=6), block_tensors(config)
    save_base(folder / "base", model)
    return model, values, save_head(folder / "drafter", config, values)


def exported(
    folder: Path, drafter: Path, precision: str = "fp32", target: Target | None = None, measure: bool = True
) -> Any:
    return export_bundle(
        folder / "base",
        None,
        folder / "bundle",
        precision,
        drafter=drafter,
        target=target or Target(),
        measure=measure,
        progress=lambda line: None,
    )


@pytest.mark.parametrize("case", CASES)
def test_blocks_draft_what_layers_of_transformers_draft(case: str, tmp_path: Path) -> None:
    family, config = CASES[case]
    model, values, drafter = made(tmp_path, family, config)
    manifest = exported(tmp_path, drafter)
    assert manifest.parity["streams"]["relative"] < 1e-4 and manifest.parity["streams"]["argmax"] == 1.0
    assert (manifest.method, manifest.drafter) == ("dflash", "dflash")
    assert manifest.streams.own_keys == ((3, 32) if case == "z-lab" else (0, 0))
    theirs, rng = BlockOfTransformers(model, config, values), np.random.default_rng(1)
    assert manifest.streams.gamma == BLOCK - theirs.first and manifest.streams.layers == LAYERS
    for count in (manifest.streams.gamma, 2):  # whole blocks, of which fewer depths may be asked for
        text, root = rng.integers(3, VOCAB, 11).tolist(), int(rng.integers(3, VOCAB))
        runner = stepper(open_session(tmp_path / "bundle" / "model.onnx", threads=1), 64)
        runner.prefill(np.array(text[:-1]))
        one = np.zeros(1, np.int64)
        forced = {"forced_node": 0, "forced_root": root}
        out = runner.step(np.array(text[-1:]), one, np.zeros((1, 1), np.float32), parents=one, streams=count, **forced)
        expected = theirs.logits(text, root)
        assert out["candidates"].shape[0] == count
        for row, (ours, logits) in enumerate(zip(out["candidates"], expected, strict=False)):
            assert ours[0] == int(logits.argmax())
            np.testing.assert_allclose(out["candidate_logits"][row], logits[ours], rtol=1e-3, atol=1e-4)
        if manifest.streams.bigram:
            shares = next(value for name, value in out.items() if value.shape == (count, *[ours.shape[0]] * 2))
            np.testing.assert_allclose(shares[0][0], theirs.pair(root, out["candidates"][0]), rtol=1e-3, atol=1e-4)
            after = theirs.pair(int(out["candidates"][0][1]), out["candidates"][1])
            np.testing.assert_allclose(shares[1][1], after, rtol=1e-3, atol=1e-4)


ANSWERED = [("z-lab", "int8"), ("dspark over some tokens", "fp32"), ("speculators", "int4")]
OVER = [("over a state space", "int8", False), ("over experts", "int4", False)]


@pytest.mark.parametrize(
    ("case", "precision", "static"), [*((*one, static) for one in ANSWERED for static in (False, True)), *OVER]
)
def test_answers_are_those_of_plain_decoding(case: str, precision: str, static: bool, tmp_path: Path) -> None:
    family, config = CASES[case]
    model, _, drafter = made(tmp_path, family, config)
    measure = (case, precision) in ANSWERED and not static  # of others one graph is compared in brief
    exported(tmp_path, drafter, precision, Target(static=static, rows=8 if static else None), measure)
    session = load(tmp_path / "bundle", threads=1, tree=8, cache_dir=tmp_path)
    for sampling in ({}, {"temperature": 1.0, "seed": 3}):
        plain, drafted = (
            session.generate(PROMPT, max_new_tokens=24, speculate=speculate, **sampling) for speculate in (False, True)
        )
        assert drafted.token_ids == plain.token_ids
        assert drafted.stats.steps > 0 or (static and sampling)  # drafts after the graph's own choice alone
        if precision == "fp32" and not sampling:
            ids = torch.tensor([session.encode(PROMPT)])
            theirs = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
            assert plain.token_ids == theirs[0, ids.shape[1] :].tolist()


REFUSED: list[tuple[dict[str, Any], str]] = [
    (zlab_config(some_switch=3), "some_switch = 3"),
    (zlab_config(dflash_config=NESTED | {"conv_kernel_size": 3}), r"dflash_config\.conv_kernel_size = 3"),
    (zlab_config(dflash_config=5), "dflash_config is no object"),
    (zlab_config({"layer_types": SLIDING}), "sliding_window is None; expected a number of tokens, 5 or more"),
    (zlab_config(WINDOWED | {"sliding_window": 4}), "sliding_window is 4; expected a number of tokens, 5 or more"),
    (zlab_config({"layer_types": ["chunked_attention", SLIDING[1]]}), r"layer_types = \['chunked_attention'"),
    (zlab_config(dflash_config=NESTED | {"attention_sink_bias": True}), r"dflash_config\.attention_sink_bias = True"),
    (zlab_config(dflash_config=NESTED | {"use_swa": 1}), r"dflash_config\.use_swa is 1; expected true or false"),
    (zlab_config(dflash_config=NESTED | {"causal_head": 1}), r"dflash_config\.causal_head is 1; expected true or"),
    (zlab_config({"model_type": "llama"}), "model_type = 'llama'"),
    (zlab_config(is_causal="no"), "is_causal = 'no'"),
    (zlab_config(final_logit_softcapping=30.0), r"final_logit_softcapping = 30\.0"),
    (zlab_config(architectures=["DFlash2DraftModel"]), "architectures DFlash2DraftModel"),
    (zlab_config(architectures=5), "architectures is 5; expected a list"),
    (zlab_config({"layer_types": 5}), "layer_types is 5; expected a list"),
    (zlab_config(num_target_layers=36), "num_target_layers 36, not 6"),
    (zlab_config(block_size=1), "block_size is 1; expected 2 or more"),
    (zlab_config(block_size=400), "block_size is 400; expected a whole number"),
    (zlab_config(dflash_config=NESTED | {"mask_token_id": VOCAB}), r"mask_token_id is 96; expected a token 0\.\.95"),
    (zlab_config(dflash_config=NESTED | {"target_layer_ids": [1, 6]}), "states of layer 7 of 6"),
    (speculators_block_config("dflash", aux_hidden_state_layer_ids=[1, 3, 6]), "states of layer 6 of 6"),
    (zlab_config(dflash_config={"mask_token_id": 1}), "target_layer_ids is None; expected a list"),
    (zlab_config(dflash_config={"mask_token_id": 1}, target_layer_ids=[1, 6]), "states of layer 7 of 6"),
    (zlab_config({"rope_parameters": ROPE | {"partial_rotary_factor": 0.25}}), r"\.partial_rotary_factor = 0\.25"),
    (zlab_config({"rope_parameters": ROPE | {"interleaved": True}}), r"rope_parameters\.interleaved = True"),
    (zlab_config({"hidden_size": 128}), "hidden size 128, not 64"),
    (zlab_config({"num_hidden_layers": 0}), "num_hidden_layers is 0"),
    (speculators_block_config("dspark", markov_head_type="rnn"), "markov_head_type = 'rnn'"),
    (speculators_block_config("dflash", projector_type="domino"), "projector_type = 'domino'"),
    (speculators_block_config("dflash", target_hidden_size=128), "target_hidden_size is 128; expected 64"),
    (speculators_block_config("dflash", sample_from_anchor="no"), "sample_from_anchor is no; expected true or false"),
    (speculators_block_config("dflash", {"some_scale": 2.0}), r"transformer_layer_config\.some_scale = 2\.0"),
    (speculators_block_config("dflash", speculators_model_type="dflash2"), "speculators_model_type 'dflash2'"),
]


@pytest.mark.parametrize(("config", "pattern"), REFUSED, ids=lambda x: x[:40] if isinstance(x, str) else "")
def test_a_configuration_that_is_not_understood_is_refused_by_name(
    config: dict[str, Any], pattern: str, tmp_path: Path
) -> None:
    refused(save_head(tmp_path / "drafter", config, block_tensors(zlab_config())), pattern)


@pytest.mark.parametrize(("tokens", "gamma", "from_anchor"), [(BLOCK - 1, BLOCK - 1, False), (BLOCK, BLOCK, True)])
def test_dspark_of_before_the_switch_says_by_its_tokens_whether_the_first_row_drafts(
    tokens: int, gamma: int, from_anchor: bool, tmp_path: Path
) -> None:
    config = speculators_block_config("dspark")
    del config["sample_from_anchor"]
    config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] = tokens
    block = read_block_config(save_head(tmp_path / "drafter", config, {}))
    assert (block.gamma, block.from_anchor) == (gamma, from_anchor)


def test_windows_and_causal_layers_are_those_of_the_public_code(tmp_path: Path) -> None:
    def read(config: dict[str, Any]) -> tuple[Any, Any]:
        block = read_block_config(save_head(tmp_path / "drafter", config, {}))
        return block.windows, block.causal

    swa = NESTED | {"use_swa": True, "swa_window_size": WINDOW}
    assert read(zlab_config()) == ((None, None), (False, False))
    assert read(zlab_config(dflash_config=swa)) == ((WINDOW, WINDOW), (False, False))
    assert read(zlab_config(WINDOWED)) == ((WINDOW, None), (True, False))
    assert read(zlab_config(WINDOWED, is_causal=True)) == ((WINDOW, None), (True, True))
    assert read(zlab_config(WINDOWED, is_causal=False, dflash_config=NESTED | {"causal": True}))[1] == (False, False)
    for of_jetspec in (True, False):
        assert read(zlab_config(WINDOWED, dflash_config=NESTED | {"causal_head": of_jetspec}))[1] == (of_jetspec,) * 2
    both = NESTED | {"causal": False, "causal_head": True}
    assert read(zlab_config(dflash_config=both))[1] == (False, False)
    assert read(speculators_block_config("dflash", WINDOWED)) == ((WINDOW, None), (True, False))
    assert read(speculators_block_config("dspark", WINDOWED, sliding_window_non_causal=True))[1] == (False, False)


def refused(folder: Path, pattern: str) -> None:
    """Refuses the drafter in one line."""
    with pytest.raises(AdapterError, match=pattern) as caught:
        read_block(folder, TARGET)
    assert "\n" not in str(caught.value)


def test_tensors_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    config = speculators_block_config("dflash")
    values = block_tensors(config)
    for name, value, pattern in (
        ("hidden_norm.weight", None, "missing: hidden_norm.weight"),
        ("layers.1.mlp.up_proj.weight", torch.ones(3, 3), r"layers\.1\.mlp\.up_proj\.weight \(3, 3\), not \(96, 64\)"),
        ("layers.2.input_layernorm.weight", torch.ones(HIDDEN), r"unknown: layers\.2\.input_layernorm"),
        ("norm.weight", torch.full((HIDDEN,), torch.nan), r"not finite: norm\.weight"),
        ("lm_head.weight", None, r"missing: lm_head\.weight"),
        ("d2t", None, "missing: d2t"),
    ):
        changed = {key: one for key, one in (values | {name: value}).items() if one is not None}
        refused(save_head(tmp_path / "drafter", config, changed), pattern)
