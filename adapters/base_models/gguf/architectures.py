"""The architectures of GGUF files that can be converted: what llama.cpp calls a tensor or a key, and what transformers
calls the same.

A row of ARCHITECTURES states names and fields; `config.py` makes a config of a file by it, `config_rules.py` holds
what a row cannot state. Facts: llama.cpp's converters (`conversion/*.py`) and `src/models/*.cpp`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from streamspec.adapters.base_models.gguf import config_rules as rules
from streamspec.adapters.base_models.gguf.config_rules import Config
from streamspec.adapters.base_models.gguf.keys import REQUIRED, Keys

SOFTMAX_OF_CHOSEN = 3  # llama.cpp's number
RMS, MEAN = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"

# What a GGUF tensor is called in transformers, without `.weight` and `.bias`; {} is the layer.
_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_FUSED = dict.fromkeys(("attn_q", "attn_k", "attn_v", "ffn_gate"), "")  # maps that fused ones stand for
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}


def _names(outer: Mapping[str, str] | None = None, path: str = "model.layers.{}.", **layer: str) -> dict[str, str]:
    """The names of Llama, but for those given; an empty one is left out."""
    inner = {name: value for name, value in (_LAYER | layer).items() if value}
    return {**_OUTER, **(outer or {})} | {f"blk.{{}}.{name}": path + value for name, value in inner.items()}


def _inner(names: Mapping[str, str], **layer: str) -> dict[str, str]:
    """These names, with others in the layers; an empty one is left out."""
    inner = {f"blk.{{}}.{name}": f"model.layers.{{}}.{value}" for name, value in layer.items()}
    return {name: value for name, value in {**names, **inner}.items() if not value.endswith(".")}


@dataclass(frozen=True)
class Architecture:
    """One row of the table. Sizes, the norm's epsilon, positions and ties are read for all alike."""

    model_type: str  # of transformers
    names: Mapping[str, str] = field(default_factory=_names)
    epsilon: tuple[str, str] = (RMS, "rms_norm_eps")
    fields: Mapping[str, tuple[str, Any]] = field(default_factory=dict)  # factors: (key, default), by config field
    sizes: Mapping[str, str] = field(default_factory=dict)  # config fields with other names than Llama's
    fixed: Mapping[str, Any] = field(default_factory=dict)  # config fields that the architecture implies
    biases: Mapping[str, str] = field(default_factory=dict)  # config switch: the tensor whose presence says it
    drafting: bool = False  # there may be layers after the model's own, for drafts, which are left out
    hybrid: bool = False  # layers that have no heads of keys do something else than attend
    permuted: bool = False  # rows of queries and keys are stored in llama.cpp's order of rotary pairs
    one_added: bool = False  # norm weights are stored with one added
    layout: str | None = None  # of some tensors, by name in tensors.LAYOUTS
    head_dim: bool = False  # the config states it always; else where the heads' widths do not add up to the model's
    heads: Callable[[Keys, Config, int], int] | None = None  # reads what the file says of them, of so many
    widths: Callable[[Keys, Config], None] | None = None  # reads the widths of MLPs, which are not those of others
    divided: bool = False  # transformers takes only widths that the heads divide, whatever the size of a head
    rotary: bool = True
    partial: bool = False  # transformers can rotate a part of each head
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # keys and the values that are understood
    harmless: tuple[str, ...] = ()  # further keys that say nothing new
    numbers: Mapping[str, str] = field(default_factory=dict)  # a key with one number a layer: that parameter of a layer
    experts: str | None = None  # config field of their number, where layers have mixtures of experts
    turned: bool = False  # transformers has an expert's maps [in, out], outputs of gate and up in turn
    where: Mapping[str, Architecture] = field(default_factory=dict)  # the row of files with that key, not 0 or false
    joined: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # name: tensors that are one in transformers
    more: Callable[[Keys, Config], None] | None = None  # completes the config


_GPT2_NAMES = _names(
    {"token_embd": "transformer.wte", "position_embd": "transformer.wpe", "output_norm": "transformer.ln_f"},
    "transformer.h.{}.",
    attn_norm="ln_1",
    attn_qkv="attn.c_attn",
    attn_output="attn.c_proj",
    ffn_norm="ln_2",
    ffn_up="mlp.c_fc",
    ffn_down="mlp.c_proj",
    **_FUSED,
)
_NEOX_NAMES = _names(
    {"token_embd": "gpt_neox.embed_in", "output_norm": "gpt_neox.final_layer_norm", "output": "embed_out"},
    "gpt_neox.layers.{}.",
    attn_qkv="attention.query_key_value",
    attn_output="attention.dense",
    ffn_up="mlp.dense_h_to_4h",
    ffn_down="mlp.dense_4h_to_h",
    **_FUSED,
)
_GEMMA2_NAMES = _names(
    ffn_norm="pre_feedforward_layernorm",
    post_attention_norm="post_attention_layernorm",
    post_ffw_norm="post_feedforward_layernorm",
)
_POST_NORMS = _names(
    None,
    **_HEAD_NORMS,
    attn_norm="",
    ffn_norm="",
    post_attention_norm="post_attention_layernorm",
    post_ffw_norm="post_feedforward_layernorm",
)
_LFM_NAMES = {name: value for name, value in _OUTER.items() if name != "output_norm"} | _names(
    {"token_embd_norm": "model.embedding_norm"},
    attn_norm="operator_norm",
    attn_output="self_attn.out_proj",
    attn_q_norm="self_attn.q_layernorm",
    attn_k_norm="self_attn.k_layernorm",
    ffn_norm="ffn_norm",
    ffn_gate="feed_forward.w1",
    ffn_up="feed_forward.w3",
    ffn_down="feed_forward.w2",
    **{f"shortconv.{name}": f"conv.{name}" for name in ("conv", "in_proj", "out_proj")},
)
_NO_MLP = dict.fromkeys(("ffn_gate", "ffn_up", "ffn_down"), "")
_STACKS = ("ffn_gate_exps", "ffn_up_exps", "ffn_gate_up_exps", "ffn_down_exps")
# How a row's experts are chosen and added up; softmax is llama.cpp's first way of turning a router's outputs to scores.
_SOFTMAX = {"expert_gating_func": (1,), "expert_weights_norm": (True,), "expert_weights_scale": (0.0, 1.0)}


def _mixture(module: str = "mlp", router: str = "gate") -> dict[str, str]:
    return {"ffn_gate_inp": f"{module}.{router}"} | dict.fromkeys(_STACKS, f"{module}.experts")


def _shared(**maps: str) -> dict[str, str]:
    """The MLP that all rows share: its maps in transformers."""
    return {f"ffn_{part}_shexp": name for part, name in maps.items()}


_QWEN_EXPERTS = (
    _mixture()
    | _shared(**{part: f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")})
    | {"ffn_gate_inp_shexp": "mlp.shared_expert_gate"}
)
_GRANITE_SHARED = {"gate_up": "shared_mlp.input_linear", "down": "shared_mlp.output_linear"}
_JOINED_SHARED = {"ffn_gate_up_shexp": ("ffn_gate_shexp", "ffn_up_shexp")}
_MIXTRAL = Architecture(
    "mixtral",
    _names(None, **_NO_MLP, **_mixture()),
    head_dim=True,
    permuted=True,
    only=_SOFTMAX,
    experts="num_local_experts",
    more=rules.mixtral,
)
_EPSILON = (MEAN, "layer_norm_eps")


def _state(module: str, *more: tuple[str, str]) -> dict[str, str]:
    """The parts of a layer with a recurrent state, and those besides that a kind of state has."""
    parts = {"conv1d": "conv1d", "a": "A_log", "dt": "dt_bias", "norm": "norm", "out": "out_proj"} | dict(more)
    return {f"ssm_{part}": f"{module}.{name}" for part, name in parts.items()}


def _state_space(module: str) -> dict[str, str]:
    return _state(module, ("in", "in_proj"), ("d", "D"))


_ATTENTION_BIAS = {"attention_bias": "attn_output"}
_BIASES = {**_ATTENTION_BIAS, "mlp_bias": "ffn_down"}
_STATE_BIASES = {"mamba_conv_bias": "ssm_conv1d", "mamba_proj_bias": "ssm_in"}
_MAMBA_NAMES = _names(
    {"output_norm": "model.final_layernorm"},
    ffn_norm="pre_ff_layernorm",
    **{f"ffn_{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
    **_state_space("mamba"),
)
_BAMBA = Architecture(
    "bamba",
    _MAMBA_NAMES,
    biases=_BIASES | _STATE_BIASES,
    hybrid=True,
    permuted=True,
    layout="mamba",
    partial=True,
    more=rules.bamba,
)
_GRANITE_SCALES = {
    "attention_multiplier": ("attention.scale", REQUIRED),
    "logits_scaling": ("logit_scale", REQUIRED),
    "embedding_multiplier": ("embedding_scale", 1.0),
    "residual_multiplier": ("residual_scale", 1.0),
}
# Of layers that dense Granite 4 does not have, and the width of its MLP once more; tensors of such layers are refused.
_MIXERS = (
    *(f"ssm.{name}" for name in ("conv_kernel", "state_size", "group_count", "inner_size", "time_step_rank")),
    "expert_shared_feed_forward_length",
)

_GRANITE_HYBRID = Architecture(
    "granitemoehybrid",
    _names(
        None,
        **_NO_MLP | {f"ffn_{part}": name for part, name in _GRANITE_SHARED.items()},
        **_state_space("mamba"),
    ),
    fields=_GRANITE_SCALES,
    fixed={"num_local_experts": 0, "num_experts_per_tok": 0, "position_embedding_type": None},
    biases=_ATTENTION_BIAS | _STATE_BIASES,
    hybrid=True,
    joined={"ffn_gate_up": ("ffn_gate", "ffn_up")},
    permuted=True,
    layout="mamba",
    more=rules.granite_hybrid,
)
_GRANITE_EXPERTS = Architecture(
    "granitemoe",
    _names(None, **_NO_MLP, **_mixture("block_sparse_moe", "router")),
    fields=_GRANITE_SCALES,
    biases=_ATTENTION_BIAS,
    divided=True,
    permuted=True,
    only=_SOFTMAX | {"rope.scaling.finetuned": (True,), "expert_shared_feed_forward_length": (0,)},
    experts="num_local_experts",
)
_NEMOTRON_H = Architecture(
    "nemotron_h",
    _names(
        {"token_embd": "model.embeddings", "output_norm": "model.norm_f"},
        attn_norm="norm",
        **{f"attn_{part}": f"mixer.{part}_proj" for part in "qkv"},
        attn_output="mixer.o_proj",
        ffn_norm="",
        ffn_gate="",
        ffn_up="mixer.up_proj",
        ffn_down="mixer.down_proj",
        **_state_space("mixer"),
    ),
    (MEAN, "layer_norm_epsilon"),
    fixed={"tie_word_embeddings": False},  # which transformers does not tie
    biases={"use_conv_bias": "ssm_conv1d", "use_bias": "ssm_in", "mlp_bias": "ffn_down", **_ATTENTION_BIAS},
    hybrid=True,
    permuted=True,
    layout="mamba",
    head_dim=True,
    rotary=False,
    harmless=("rope.dimension_count", "rope.freq_base", "rope.scaling.finetuned"),
    more=rules.nemotron_h,
)
_QWEN35 = Architecture(
    "qwen3_5_text",
    _names(
        None,
        **_HEAD_NORMS,
        ffn_norm="",
        post_attention_norm="post_attention_layernorm",
        attn_qkv="linear_attn.in_proj_qkv",
        attn_gate="linear_attn.in_proj_z",
        **_state("linear_attn", ("alpha", "in_proj_a"), ("beta", "in_proj_b")),
    ),
    drafting=True,
    one_added=True,
    layout="qwen35",
    head_dim=True,
    partial=True,
    harmless=("rope.dimension_sections",),  # of images; a text's positions are the same in all
    more=rules.qwen35,
)

_GEMMA4 = Architecture(
    "gemma4_text",
    _inner(
        _GEMMA2_NAMES
        | {
            "per_layer_token_embd": "model.embed_tokens_per_layer",
            "per_layer_model_proj": "model.per_layer_model_projection",
            "per_layer_proj_norm": "model.per_layer_projection_norm",
        },
        **_HEAD_NORMS,
        inp_gate="per_layer_input_gate",
        proj="per_layer_projection",
        post_norm="post_per_layer_input_norm",
        layer_output_scale="layer_scalar",
    ),
    layout="gemma4",
    heads=rules.gemma4_heads,
    widths=rules.gemma4_widths,
    partial=True,
    more=rules.gemma4,
)

_DEEPSEEK_EXPERTS = (
    _mixture()
    | {"exp_probs_b": "mlp.gate.e_score_correction_bias"}
    | _shared(**{part: f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")})
)
_LATENT = Architecture(
    "youtu",
    _names(
        None,
        attn_k="",
        attn_v="",
        attn_q_a="self_attn.q_a_proj",
        attn_q_a_norm="self_attn.q_a_layernorm",
        attn_q_b="self_attn.q_b_proj",
        attn_kv_a_mqa="self_attn.kv_a_proj_with_mqa",
        attn_kv_a_norm="self_attn.kv_a_layernorm",
        attn_kv_b="self_attn.kv_b_proj",
    ),
    biases={"attention_bias": "attn_kv_a_mqa"},
    layout="latent",
    heads=rules.latent_heads,
    harmless=("leading_dense_block_count", "expert_shared_count", "expert_feed_forward_length"),
    more=rules.latent,
)

ARCHITECTURES = {
    "llama": Architecture(
        "llama",
        head_dim=True,
        divided=True,
        biases=_BIASES,
        permuted=True,
        more=rules.llama,
        where={"expert_count": _MIXTRAL},
    ),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3", _names(None, **_HEAD_NORMS), head_dim=True, biases=_ATTENTION_BIAS),
    "phi2": Architecture(
        "phi",
        _names(
            {"output_norm": "model.final_layernorm"},
            attn_output="self_attn.dense",
            ffn_up="mlp.fc1",
            ffn_down="mlp.fc2",
            ffn_norm="",
            ffn_gate="",
        ),
        _EPSILON,
        partial=True,
    ),
    "phi3": Architecture(
        "phi3",
        _names(None, attn_qkv="self_attn.qkv_proj", ffn_up="mlp.gate_up_proj", **_FUSED),
        divided=True,
        partial=True,
        more=rules.phi3,
    ),
    "gpt2": Architecture(
        "gpt2",
        _GPT2_NAMES,
        (MEAN, "layer_norm_epsilon"),
        sizes={
            "num_hidden_layers": "n_layer",
            "hidden_size": "n_embd",
            "num_attention_heads": "n_head",
            "max_position_embeddings": "n_positions",
            "intermediate_size": "n_inner",
        },
        divided=True,
        layout="gpt2",
        rotary=False,
        more=rules.gpt2,
    ),
    "gptneox": Architecture(
        "gpt_neox",
        _NEOX_NAMES,
        _EPSILON,
        biases={"attention_bias": "attn_qkv"},
        divided=True,
        layout="gptneox",
        partial=True,
        more=rules.gpt_neox,
    ),
    "stablelm": Architecture(
        "stablelm",
        _names(attn_q_norm="self_attn.q_layernorm.norms", attn_k_norm="self_attn.k_layernorm.norms"),
        _EPSILON,
        biases={"use_qkv_bias": "attn_q", "qk_layernorm": "attn_q_norm"},
        divided=True,
        layout="stablelm",
        partial=True,
        more=rules.parallel,
    ),
    "gemma": Architecture("gemma", head_dim=True, one_added=True),
    "gemma2": Architecture("gemma2", _GEMMA2_NAMES, head_dim=True, divided=True, one_added=True, more=rules.gemma2),
    "gemma3": Architecture(
        "gemma3_text",
        _inner(_GEMMA2_NAMES, **_HEAD_NORMS),
        head_dim=True,
        divided=True,
        one_added=True,
        more=rules.gemma3,
    ),
    "gemma4": replace(
        _GEMMA4,
        where={
            "expert_count": replace(
                _GEMMA4,
                names=_inner(
                    _GEMMA4.names,
                    **dict.fromkeys(_STACKS, "experts"),
                    ffn_gate_inp="router.proj",
                    pre_ffw_norm_2="pre_feedforward_layernorm_2",
                    post_ffw_norm_1="post_feedforward_layernorm_1",
                    post_ffw_norm_2="post_feedforward_layernorm_2",
                    **{"ffn_gate_inp.scale": "router.scale", "ffn_down_exps.scale": "router.per_expert_scale"},
                ),
                fixed={"enable_moe_block": True},
                only=_SOFTMAX,
                experts="num_experts",
            )
        },
    ),
    "starcoder2": Architecture(
        "starcoder2",
        _names(ffn_up="mlp.c_fc", ffn_down="mlp.c_proj", ffn_gate=""),
        (MEAN, "norm_epsilon"),
        biases={"use_bias": "attn_output"},
    ),
    "granite": Architecture(
        "granite",
        fields=_GRANITE_SCALES,
        biases=_BIASES,
        permuted=True,
        only={"rope.scaling.finetuned": (True,)},  # here: whether there are positions at all
        harmless=_MIXERS,
    ),
    "granitehybrid": replace(
        _GRANITE_HYBRID,
        where={
            "rope.scaling.finetuned": _BAMBA,  # which has rotary positions
            "expert_count": replace(
                _GRANITE_HYBRID,
                names=_inner(
                    _GRANITE_HYBRID.names,
                    ffn_gate_up="",
                    ffn_down="",
                    **_mixture("block_sparse_moe", "router"),
                    **_shared(**_GRANITE_SHARED),
                ),
                fixed={"position_embedding_type": None},
                joined=_JOINED_SHARED,
                only=_SOFTMAX,
                experts="num_local_experts",
            ),
        },
    ),
    "smollm3": Architecture("smollm3", biases=_BIASES, permuted=True, more=rules.kept_positions),
    "arcee": Architecture("arcee", _names(ffn_gate=""), head_dim=True, divided=True, biases=_BIASES, permuted=True),
    "nemotron": Architecture(
        "nemotron",
        _names(ffn_gate=""),
        (MEAN, "norm_eps"),
        head_dim=True,
        biases=_BIASES,
        one_added=True,
        partial=True,
        harmless=(RMS,),
    ),
    "seed_oss": Architecture(
        "seed_oss",
        _names(ffn_norm="", post_attention_norm="post_attention_layernorm"),
        head_dim=True,
        biases={"attention_bias": "attn_q", "attention_out_bias": "attn_output", "mlp_bias": "ffn_down"},
    ),
    "ernie4_5": Architecture("ernie4_5", head_dim=True, biases={"use_bias": "attn_output"}),
    "glm4": Architecture(
        "glm4",
        _names(
            post_attention_norm="post_self_attn_layernorm",
            post_ffw_norm="post_mlp_layernorm",
            ffn_up="mlp.gate_up_proj",
            ffn_gate="",
        ),
        head_dim=True,
        biases={"attention_bias": "attn_q"},
        partial=True,
    ),
    "hunyuan-dense": Architecture(
        "hunyuan_v1_dense",
        _names(attn_q_norm="self_attn.query_layernorm", attn_k_norm="self_attn.key_layernorm"),
        head_dim=True,
        biases=_ATTENTION_BIAS,
    ),
    "mistral3": Architecture("ministral3", head_dim=True, permuted=True, more=rules.ministral),
    "apertus": Architecture(
        "apertus",
        _names(None, **_HEAD_NORMS, attn_norm="attention_layernorm", ffn_norm="feedforward_layernorm", ffn_gate=""),
        biases=_ATTENTION_BIAS,
        numbers={f"xielu.{name}": f"mlp.act_fn.{name}" for name in ("alpha_p", "alpha_n", "beta", "eps")},
    ),
    "olmo": Architecture(
        "olmo",
        _names(None, attn_norm="", ffn_norm=""),
        (MEAN, "bare_norm_eps"),
        fields={"clip_qkv": ("attention.clamp_kqv", None)},
        permuted=True,
        more=rules.bare_norms,
    ),
    "olmo2": Architecture("olmo2", _POST_NORMS, biases=_ATTENTION_BIAS, more=rules.olmo),
    "exaone4": Architecture("exaone4", _POST_NORMS, more=rules.exaone),
    "command-r": Architecture(
        "cohere",
        _names(None, **_HEAD_NORMS, ffn_norm=""),
        _EPSILON,
        fields={"logit_scale": ("logit_scale", REQUIRED)},
        biases={"use_qk_norm": "attn_q_norm"},
    ),
    "cohere2": Architecture(
        "cohere2",
        _names(ffn_norm=""),
        _EPSILON,
        fields={"logit_scale": ("logit_scale", REQUIRED)},
        head_dim=True,
        more=rules.cohere,
    ),
    "lfm2": Architecture(
        "lfm2",
        _LFM_NAMES,
        (RMS, "norm_eps"),
        fixed={"block_auto_adjust_ff_dim": False},
        biases={"conv_bias": "shortconv.in_proj"},
        hybrid=True,
        layout="lfm2",
        more=rules.lfm,
    ),
    "qwen3moe": Architecture(
        "qwen3_moe",
        _names(None, **_HEAD_NORMS, **_NO_MLP, **_mixture()),
        fixed={"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
        biases=_ATTENTION_BIAS,
        head_dim=True,
        only=_SOFTMAX,
        experts="num_experts",
    ),
    "qwen2moe": Architecture(
        "qwen2_moe",
        _names(None, **_NO_MLP, **_QWEN_EXPERTS),
        fixed={"norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
        biases={"qkv_bias": "attn_q"},
        layout="qwen2moe",
        only=_SOFTMAX | {"expert_weights_norm": (False,)},
        experts="num_experts",
        more=rules.shared_expert,
    ),
    "olmoe": Architecture(
        "olmoe",
        _names(None, **_HEAD_NORMS, **_NO_MLP, **_mixture()),
        fixed={"norm_topk_prob": False},
        biases=_ATTENTION_BIAS,
        divided=True,
        only=_SOFTMAX | {"expert_weights_norm": (False,)},
        experts="num_experts",
    ),
    "granitemoe": replace(
        _GRANITE_EXPERTS,
        where={
            "expert_shared_feed_forward_length": replace(
                _GRANITE_EXPERTS,
                model_type="granitemoeshared",
                names=_inner(_GRANITE_EXPERTS.names, **_shared(**_GRANITE_SHARED)),
                joined=_JOINED_SHARED,
                only=_SOFTMAX | {"rope.scaling.finetuned": (True,)},
                more=rules.granite_shared,
            )
        },
    ),
    "lfm2moe": Architecture(
        "lfm2_moe",
        _inner(_LFM_NAMES, **_mixture("feed_forward"), exp_probs_b="feed_forward.expert_bias"),
        (RMS, "norm_eps"),
        fixed={"norm_topk_prob": True, "use_expert_bias": True},
        biases={"conv_bias": "shortconv.in_proj"},
        hybrid=True,
        layout="lfm2",
        only={"expert_weights_norm": (True,)},
        experts="num_experts",
        more=rules.lfm_experts,
    ),
    "ernie4_5-moe": Architecture(
        "ernie4_5_moe",
        _names(
            None,
            **_mixture(),
            exp_probs_b="mlp.gate.moe_statics.e_score_correction_bias",
            **{f"ffn_{name}_shexp": f"mlp.shared_experts.{name}_proj" for name in ("gate", "up", "down")},
        ),
        biases={"use_bias": "attn_output"},
        divided=True,
        layout="routed",
        only=_SOFTMAX,
        harmless=("expert_shared_feed_forward_length",),  # the shapes say it
        experts="moe_num_experts",
        more=rules.ernie_experts,
    ),
    "gpt-oss": Architecture(
        "gpt_oss",
        _names(
            None,
            ffn_norm="",
            post_attention_norm="post_attention_layernorm",
            attn_sinks="self_attn.sinks",
            **_NO_MLP,
            **_mixture(router="router"),
        ),
        fixed={"swiglu_alpha": 1.702, "swiglu_limit": 7.0},
        biases=_ATTENTION_BIAS,
        head_dim=True,
        layout="gpt-oss",
        only={"expert_gating_func": (SOFTMAX_OF_CHOSEN,), "expert_weights_scale": (0.0, 1.0)},
        experts="num_local_experts",
        turned=True,
        more=rules.gpt_oss,
    ),
    "falcon-h1": Architecture(  # whose multipliers the file has in the weights
        "falcon_h1",
        _MAMBA_NAMES,
        fixed={"mamba_norm_before_gate": False},
        biases={"mamba_conv_bias": "ssm_conv1d", "mamba_rms_norm": "ssm_norm", "mlp_bias": "ffn_down"},
        layout="mamba",
        head_dim=True,
        more=rules.falcon_h1,
    ),
    "nemotron_h": _NEMOTRON_H,
    "nemotron_h_moe": replace(
        _NEMOTRON_H,
        names=_inner(
            _NEMOTRON_H.names,
            ffn_up="",
            ffn_down="",
            **_mixture("mixer"),
            exp_probs_b="mixer.gate.e_score_correction_bias",
            **_shared(up="mixer.shared_experts.up_proj", down="mixer.shared_experts.down_proj"),
            ffn_latent_down="mixer.fc1_latent_proj",
            ffn_latent_up="mixer.fc2_latent_proj",
        ),
        drafting=True,
        only={"expert_gating_func": (rules.SIGMOID,)},
        experts="n_routed_experts",
        more=rules.nemotron_experts,
    ),
    "deepseek2": replace(
        _LATENT,
        where={
            "expert_count": replace(
                _LATENT,
                model_type="deepseek_v3",
                names=_inner(_LATENT.names, **_DEEPSEEK_EXPERTS),
                drafting=True,
                biases={**_LATENT.biases, "corrected": "exp_probs_b"},
                harmless=(),
                experts="n_routed_experts",
                more=rules.latent_experts,
            )
        },
    ),
    "glm4moe": Architecture(
        "glm4_moe",
        _names(
            None,
            **_HEAD_NORMS,
            ffn_norm="",
            post_attention_norm="post_attention_layernorm",
            **_DEEPSEEK_EXPERTS,
        ),
        biases={"attention_bias": "attn_q", "use_qk_norm": "attn_q_norm"},
        drafting=True,
        head_dim=True,
        partial=True,
        layout="routed",
        only={"expert_gating_func": (rules.SIGMOID,)},
        experts="n_routed_experts",
        more=rules.glm_experts,
    ),
    "dots1": Architecture(
        "dots1",
        _names(None, **_HEAD_NORMS, **_DEEPSEEK_EXPERTS),
        fixed={"sliding_window": None},
        biases=_ATTENTION_BIAS,
        head_dim=True,
        layout="routed",
        only={"expert_gating_func": (rules.SIGMOID,)},
        experts="n_routed_experts",
        more=rules.dense_first,
    ),
    "qwen3next": replace(
        _QWEN35,
        model_type="qwen3_next",
        names=_inner(
            _QWEN35.names,
            **_NO_MLP,
            **_QWEN_EXPERTS,
            attn_qkv="",
            attn_gate="",
            ssm_alpha="",
            ssm_beta="",
            attn_qkvz="linear_attn.in_proj_qkvz",
            ssm_ba="linear_attn.in_proj_ba",
        ),
        fixed={"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
        joined={"attn_qkvz": ("attn_qkv", "attn_gate")},
        layout="qwen3next",
        only=_SOFTMAX,
        experts="num_experts",
        more=rules.qwen35_experts,
    ),
    "qwen35": _QWEN35,
    "qwen35moe": replace(
        _QWEN35,
        model_type="qwen3_5_moe_text",
        names=_inner(_QWEN35.names, **_NO_MLP, **_QWEN_EXPERTS),
        only=_SOFTMAX,
        experts="num_experts",
        more=rules.qwen35_experts,
    ),
}
