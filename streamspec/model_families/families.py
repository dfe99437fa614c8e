"""The supported model families, by the `model_type` of their Hugging Face configs (`family.Family`)."""

from __future__ import annotations

from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from streamspec.errors import BaseModelError
from streamspec.model_families.family import (
    BOTH_LAYER,
    MLP_LAYER,
    STATE_LAYER,
    Family,
    LatentAttention,
    MapMultipliers,
    MtpNames,
    PerLayerInput,
    RecurrentState,
    StateSpace,
)
from streamspec.model_families.mixtures import mixtures
from streamspec.model_families.not_computed import NOT_COMPUTED

NEAR = 3  # names in an error

_GEMMA = Family(
    one_added=True,
    attention_out_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_out_norm="post_feedforward_layernorm",
)
_POST_NORM = Family(
    attention_norm=None,
    attention_out_norm="post_attention_layernorm",
    mlp_norm=None,
    mlp_out_norm="post_feedforward_layernorm",
    head_norms=("self_attn.q_norm", "self_attn.k_norm"),
)
_GLM = Family(up=("mlp.gate_up_proj",), rotary_pairs=True)
_GRANITE = Family(
    embedding_multiplier="embedding_multiplier",
    residual_multiplier="residual_multiplier",
    logit_divisor="logits_scaling",
    ignored=frozenset({"attention_multiplier"}),
)
_MAMBA = Family(
    conv="mamba",
    conv_in=("mamba.in_proj",),
    conv_out=("mamba.out_proj",),
    recurrent=StateSpace(),
    layer_kinds=("full_attention", STATE_LAYER),
    ignored=frozenset(
        {
            "time_step_limit",
            *(f"mamba_{name}" for name in ("chunk_size", "conv_bias", "d_conv", "d_head", "d_state", "expand")),
            *(f"mamba_{name}" for name in ("n_groups", "n_heads", "proj_bias")),
        }
    ),
)
_COHERE = Family(
    layernorm=True,
    parallel=True,
    shares_norm=True,
    rotary_pairs=True,
    head_norms=("self_attn.q_norm", "self_attn.k_norm"),
    head_norm_switch="use_qk_norm",
    logit_multiplier="logit_scale",
)
_DELTA_SIZES = frozenset(
    f"linear_{name}"
    for name in ("conv_kernel_dim", "key_head_dim", "value_head_dim", "num_key_heads", "num_value_heads")
)
_SUMMARY = ("summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj")

_LATENT = Family(
    qkv=tuple(f"self_attn.{name}" for name in ("q_proj", "q_a_proj", "kv_a_proj_with_mqa")),
    latent_attention=LatentAttention(),
    ignored=frozenset({"pretraining_tp", "q_lora_rank", "qk_head_dim"}),
)

_GEMMA4 = replace(
    _GEMMA,
    one_added=False,
    head_norms=("self_attn.q_norm", "self_attn.k_norm"),
    shared_kv="num_kv_shared_layers",
    value_norm=True,
    layer_scale="layer_scalar",
    only={"use_bidirectional_attention": (None, "vision")},  # of images alone
    ignored=frozenset(
        {"attention_k_eq_v", "global_head_dim", "num_global_key_value_heads", "per_layer_config"}
        | {"use_double_wide_mlp", "vocab_size_per_layer_input"}
    ),
)

FAMILIES = {
    "llama": Family(ignored=frozenset({"pretraining_tp"})),
    "mistral": Family(),
    "qwen2": Family(window_switch="use_sliding_window", ignored=frozenset({"max_window_layers"})),
    "qwen3": Family(
        head_norms=("self_attn.q_norm", "self_attn.k_norm"),
        window_switch="use_sliding_window",
        ignored=frozenset({"max_window_layers"}),
    ),
    "youtu": replace(
        _LATENT,
        rotary_pairs=True,
        only={"rope_interleave": True},
        ignored=_LATENT.ignored | {"embedding_initializer_range"},
    ),
    "minicpm3": replace(
        _LATENT,
        residual_depth="scale_depth",
        logit_divisor="logits_scaling",
        ignored=_LATENT.ignored | {"dim_model_base", "scale_emb"},
    ),
    "phi": Family(
        final_norm="final_layernorm",
        layernorm=True,
        parallel=True,
        shares_norm=True,
        out=("self_attn.dense",),
        up=("mlp.fc1",),
        down=("mlp.fc2",),
        gated=False,
        head_norms=("self_attn.q_layernorm", "self_attn.k_layernorm"),
        head_norm_switch="qk_layernorm",
        ignored=frozenset({"embd_pdrop", "resid_pdrop"}),
    ),
    "phi3": Family(
        qkv=("self_attn.qkv_proj",),
        up=("mlp.gate_up_proj",),
        ignored=frozenset({"embd_pdrop", "resid_pdrop", "original_max_position_embeddings"}),
    ),
    "opt": Family(
        stack="model.decoder",
        final_norm="final_layer_norm",
        rotary=None,
        position_table="embed_positions",
        position_offset=2,
        layernorm=True,
        attention_norm="self_attn_layer_norm",
        mlp_norm="final_layer_norm",
        out=("self_attn.out_proj",),
        up=("fc1",),
        down=("fc2",),
        gated=False,
        only={"do_layer_norm_before": True, "_remove_final_layer_norm": False, "layer_norm_elementwise_affine": True},
        ignored=frozenset({"dropout", "enable_bias", "ffn_dim", "init_std", "layerdrop", "word_embed_proj_dim"}),
    ),
    "gpt2": Family(
        stack="transformer",
        layers="h",
        embedding="wte",
        final_norm="ln_f",
        rotary=None,
        position_table="wpe",
        layernorm=True,
        attention="attn",
        attention_norm="ln_1",
        mlp_norm="ln_2",
        qkv=("attn.c_attn",),
        out=("attn.c_proj",),
        up=("mlp.c_fc",),
        down=("mlp.c_proj",),
        gated=False,
        only={"add_cross_attention": False, "scale_attn_by_inverse_layer_idx": False},
        ignored=frozenset(
            {
                "attn_pdrop",
                "embd_pdrop",
                "resid_pdrop",
                "layer_norm_epsilon",
                "n_embd",
                "n_head",
                "n_inner",
                "n_layer",
                "n_positions",
                "reorder_and_upcast_attn",
                "scale_attn_weights",
                *_SUMMARY,
            }
        ),
    ),
    "apertus": Family(
        attention_norm="attention_layernorm",
        mlp_norm="feedforward_layernorm",
        head_norms=("self_attn.q_norm", "self_attn.k_norm"),
        up=("mlp.up_proj",),
        gated=False,
        activation_module="mlp.act_fn",
        ignored=frozenset({"dtype"}),  # in which transformers starts the activation's parameters
    ),
    "arcee": Family(up=("mlp.up_proj",), gated=False),
    "bamba": replace(
        _MAMBA,
        tuples=2,
        final_norm="final_layernorm",
        mlp_norm="pre_ff_layernorm",
        up=("feed_forward.gate_proj", "feed_forward.up_proj"),
        down=("feed_forward.down_proj",),
        ignored=_MAMBA.ignored | {"attn_layer_indices", "num_logits_to_keep", "z_loss_coefficient"},
    ),
    "cwm": Family(ignored=frozenset({"pretraining_tp"})),
    "ernie4_5": Family(rotary_pairs=True, ignored=frozenset({"use_bias"})),
    "exaone": Family(),
    "falcon_h1": replace(
        _MAMBA,
        tuples=1,
        final_norm="final_layernorm",
        mlp_norm="pre_ff_layernorm",
        up=("feed_forward.gate_proj", "feed_forward.up_proj"),
        down=("feed_forward.down_proj",),
        conv_beside=True,
        recurrent=StateSpace(normed="mamba_rms_norm", norm_first="mamba_norm_before_gate"),
        untuned=("mamba.out_proj",),
        layer_kinds=(BOTH_LAYER,),
        embedding_multiplier="embedding_multiplier",
        logit_multiplier="lm_head_multiplier",
        map_multipliers={
            "self_attn.q_proj": MapMultipliers("attention_in_multiplier"),
            "self_attn.k_proj": MapMultipliers("attention_in_multiplier", "key_multiplier"),
            "self_attn.v_proj": MapMultipliers("attention_in_multiplier"),
            "self_attn.o_proj": MapMultipliers(outputs="attention_out_multiplier"),
            "mamba.in_proj": MapMultipliers("ssm_in_multiplier", "ssm_multipliers"),
            "mamba.out_proj": MapMultipliers(outputs="ssm_out_multiplier"),
            "feed_forward.gate_proj": MapMultipliers(outputs="mlp_multipliers.0"),
            "feed_forward.down_proj": MapMultipliers(outputs="mlp_multipliers.1"),
        },
        ignored=_MAMBA.ignored | {"mamba_d_ssm", "num_logits_to_keep", "projectors_bias"},
    ),
    "gemma": Family(one_added=True, only={"use_bidirectional_attention": None}),
    "glm": _GLM,
    "glm4": replace(_GLM, attention_out_norm="post_self_attn_layernorm", mlp_out_norm="post_mlp_layernorm"),
    "granite": _GRANITE,
    "granitemoehybrid": replace(
        _MAMBA,
        embedding_multiplier=_GRANITE.embedding_multiplier,
        residual_multiplier=_GRANITE.residual_multiplier,
        logit_divisor=_GRANITE.logit_divisor,
        up=("shared_mlp.input_linear",),
        down=("shared_mlp.output_linear",),
        ignored=_GRANITE.ignored | _MAMBA.ignored | {"position_embedding_type", "shared_intermediate_size"},
    ),
    "helium": Family(rotary_pairs=True),
    "hunyuan_v1_dense": Family(
        head_norms=("self_attn.query_layernorm", "self_attn.key_layernorm"),
        head_norms_last=True,
        ignored=frozenset({"eod_token_id", "pretraining_tp"}),
    ),
    "granite_swa": replace(_GRANITE, rotary="rotary_embs", rotary_layers="layer_rope_theta", sinks="self_attn.sinks"),
    "hyperclovax": replace(
        _GRANITE,
        logit_divisor=None,
        logit_multiplier="logits_scaling",
        attention_out_norm="post_norm1",
        mlp_out_norm="post_norm2",
        only={"use_post_norm": True},
    ),
    "iquestcoder": Family(),
    "jais2": Family(layernorm=True, up=("mlp.up_proj",), gated=False),
    "internlm3": Family(ignored=frozenset({"bias", "qkv_bias"})),
    "ministral": Family(),
    "ministral3": Family(query_growth="llama_4_scaling_beta"),
    "nemotron": Family(layernorm=True, one_added=True, up=("mlp.up_proj",), gated=False),
    "nemotron_h": Family(
        embedding="embeddings",
        final_norm="norm_f",
        rotary=None,
        attention="mixer",
        attention_norm="norm",
        mlp_norm="norm",
        qkv=("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
        out=("mixer.o_proj",),
        up=("mixer.up_proj",),
        down=("mixer.down_proj",),
        gated=False,
        activation="relu2",
        conv="mixer",
        conv_in=("mixer.in_proj",),
        conv_out=("mixer.out_proj",),
        recurrent=StateSpace(
            heads=("n_groups", "mamba_num_heads"),
            widths=("ssm_state_size", "mamba_head_dim"),
            activation="mamba_hidden_act",
        ),
        untuned=("mixer.out_proj",),
        layer_kinds=("full_attention", STATE_LAYER, MLP_LAYER),
        ignored=frozenset(
            {
                *("chunk_size", "conv_kernel", "layer_norm_epsilon", "layers_block_type", "num_logits_to_keep"),
                *("mamba_head_dim", "mamba_hidden_act", "mamba_num_heads", "n_groups", "ssm_state_size"),
                *("rescale_prenorm_residual", "use_bias", "use_conv_bias", "use_mamba_kernels"),
                *(f"time_step_{name}" for name in ("floor", "max", "min")),
            }
        ),
    ),
    "vaultgemma": replace(_GEMMA, attention_out_norm=None, mlp_out_norm=None),
    "seed_oss": Family(ignored=frozenset({"attention_out_bias", "pretraining_tp", "residual_dropout"})),
    "smollm3": Family(
        rotary_layers="no_rope_layers",
        ignored=frozenset({"max_window_layers", "no_rope_layer_interval", "pretraining_tp", "use_sliding_window"}),
    ),
    "starcoder2": Family(
        layernorm=True,
        up=("mlp.c_fc",),
        down=("mlp.c_proj",),
        gated=False,
        ignored=frozenset({"embedding_dropout", "residual_dropout", "use_bias"}),
    ),
    "gemma2": replace(_GEMMA, only={"use_bidirectional_attention": None}),
    "gemma3_text": replace(
        _GEMMA,
        head_norms=("self_attn.q_norm", "self_attn.k_norm"),
        only={"use_bidirectional_attention": False, "attn_logit_softcapping": None},
        ignored=frozenset({"_sliding_window_pattern", "sliding_window_pattern"}),
    ),
    "gemma4_text": replace(_GEMMA4, per_layer_input=PerLayerInput()),
    "gemma4_unified_text": _GEMMA4,
    "olmo": Family(layernorm=True, bare_norms=1e-5, clip="clip_qkv"),
    "olmo2": _POST_NORM,
    "olmo3": _POST_NORM,
    "olmo_hybrid": replace(
        _POST_NORM,
        conv="linear_attn",
        conv_in=tuple(f"linear_attn.{name}_proj" for name in "qkvgba"),
        conv_out=("linear_attn.o_proj",),
        conv_norms=("input_layernorm", "post_attention_layernorm"),
        recurrent=RecurrentState(norm="o_norm", eps=1e-5, doubled="linear_allow_neg_eigval"),
        layer_kinds=("full_attention", STATE_LAYER),
        ignored=_DELTA_SIZES
        | {f"linear_{name}" for name in ("a_log_max", "a_log_min", "dt_init_floor", "dt_max", "dt_min")},
    ),
    "exaone4": replace(_POST_NORM, local_rotary=True, ignored=frozenset({"sliding_window_pattern"})),
    "cohere": _COHERE,
    "cohere2": replace(_COHERE, head_norms=(), head_norm_switch=None, local_rotary=True, needed=("sliding_window",)),
    "lfm2": Family(
        final_norm="embedding_norm",
        attention_norm="operator_norm",
        mlp_norm="ffn_norm",
        head_norms=("self_attn.q_layernorm", "self_attn.k_layernorm"),
        out=("self_attn.out_proj",),
        up=("feed_forward.w1", "feed_forward.w3"),
        down=("feed_forward.w2",),
        conv="conv",
        layer_kinds=("full_attention", "conv"),
        only={"conv_bias": False},
        ignored=frozenset(
            {
                "block_auto_adjust_ff_dim",
                "block_ffn_dim_multiplier",
                "block_multiple_of",
                "conv_L_cache",
                "full_attn_idxs",
                "norm_eps",
            }
        ),
    ),
    "lfm3": Family(
        final_norm="embedding_norm",
        attention_norm="operator_norm",
        mlp_norm="ffn_norm",
        attention_out_norm="post_operator_norm",
        mlp_out_norm="post_ffn_norm",
        head_norms=("self_attn.q_norm", "self_attn.k_norm"),
        head_gate="self_attn.g_proj",
        qkv=tuple(f"self_attn.{name}_proj" for name in "qgkv"),
        up=("feed_forward.w1", "feed_forward.w3"),
        down=("feed_forward.w2",),
        conv="conv",
        layer_kinds=("full_attention", "conv", "sliding_attention"),
        only={"conv_bias": False, "use_sandwich_norm": True},
        ignored=frozenset({"conv_L_cache", "use_attention_gate"}),
    ),
    "qwen3_5_text": Family(
        one_added=True,
        head_norms=("self_attn.q_norm", "self_attn.k_norm"),
        gated_queries=True,
        conv="linear_attn",
        conv_in=tuple(f"linear_attn.in_proj_{name}" for name in ("qkv", "z", "b", "a")),
        conv_out=("linear_attn.out_proj",),
        recurrent=RecurrentState(),
        mtp=MtpNames(),
        layer_kinds=("full_attention", STATE_LAYER),
        ignored=_DELTA_SIZES,
    ),
    "stablelm": Family(
        layernorm=True,
        parallel="use_parallel_residual",
        shares_norm="use_parallel_residual",
        head_norms=("self_attn.q_layernorm", "self_attn.k_layernorm"),
        head_norm_switch="qk_layernorm",
        ignored=frozenset({"hidden_dropout", "use_qkv_bias"}),
    ),
    "gpt_neox": Family(
        stack="gpt_neox",
        embedding="embed_in",
        final_norm="final_layer_norm",
        layernorm=True,
        attention="attention",
        parallel="use_parallel_residual",
        qkv=("attention.query_key_value",),
        out=("attention.dense",),
        up=("mlp.dense_h_to_4h",),
        down=("mlp.dense_4h_to_h",),
        gated=False,
        interleaved=True,
        ignored=frozenset({"classifier_dropout", "hidden_dropout", "is_decoder", "rotary_pct", "rotary_emb_base"}),
    ),
}
FAMILIES |= mixtures(FAMILIES)

_MAMBA_2 = "layers with a recurrent state (Mamba-2)"
# By `model_type`: why a family with recurrent states is refused. Those of others are computed: a `recurrent` row.
RECURRENT_NOT_COMPUTED = {
    "mamba2": f"{_MAMBA_2} and none of attention",
    "zamba2": f"{_MAMBA_2}, and attention that layers share",
}


def supported(like: str = "") -> str:
    """The families in a few words, those with names `like` one first."""
    near = get_close_matches(like, FAMILIES, NEAR)
    shown = [*near, *(name for name in FAMILIES if name not in near)][:NEAR]
    return f"{', '.join(shown)} or another of the {len(FAMILIES)} families that the documentation lists"


def family_of(model_type: object, found: str) -> Family:
    """The description of a family by its `model_type`. Raises BaseModelError where there is none, of what was `found`
    to be of it.
    """
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        why = (RECURRENT_NOT_COMPUTED | NOT_COMPUTED).get(str(model_type))
        raise BaseModelError(
            f"{found} of the family `{model_type}`{f', which has {why}' if why else ''}",
            supported(str(model_type)),
            "choose a base of one of these families",
        )
    return FAMILIES[model_type]


def turned_back(config: Any) -> bool:
    """Tells whether the weights of a checkpoint with this config are packed so that transformers turns them back."""
    settings, family = getattr(config, "quantization_config", None), FAMILIES.get(config.model_type)
    packed = None if family is None else family.packed
    return packed is not None and isinstance(settings, dict) and settings.get("quant_method") == packed
