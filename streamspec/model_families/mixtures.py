"""The supported families with mixtures of experts, by the `model_type` of their Hugging Face configs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from streamspec.model_families.family import EXPERTS_LAYER, Family, Mixture, MtpNames, RecurrentState

# Of training, and sizes that the modules show.
_IGNORED = frozenset(
    {"moe_intermediate_size", "num_experts", "num_local_experts", "output_router_logits", "router_aux_loss_coef"}
)


def _shared(module: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    gate, up, down = (f"{module}.{name}_proj" for name in ("gate", "up", "down"))
    return (gate, up), (down,)


# Of Qwen2 and those after it: which layers are sparse the modules show.
_QWEN = Mixture(normalized="norm_topk_prob", shared=_shared("mlp.shared_expert"), shared_gate="mlp.shared_expert_gate")
_MIXTRAL = Mixture(count="num_local_experts", width="intermediate_size")
_GRANITE = Mixture(
    count="num_local_experts",
    router="block_sparse_moe.router",
    experts="block_sparse_moe.experts",
    width="intermediate_size",
    scores="chosen",
    normalized=False,
)
_GRANITE_SHARED = replace(_GRANITE, shared=(("shared_mlp.input_linear",), ("shared_mlp.output_linear",)))
# Of DeepSeek V3 and those after it.
_DEEPSEEK = Mixture(
    count="n_routed_experts",
    groups=("n_group", "topk_group"),
    scores="sigmoid",
    bias="mlp.gate.e_score_correction_bias",
    normalized="norm_topk_prob",
    added=1e-20,
    scale="routed_scaling_factor",
    shared=_shared("mlp.shared_experts"),
)
_DEEPSEEK_V2 = Mixture(
    count="n_routed_experts", normalized=False, scale="routed_scaling_factor", shared=_shared("mlp.shared_experts")
)
_NEMOTRON = replace(
    _DEEPSEEK,
    router="mixer.gate",
    experts="mixer.experts",
    bias="mixer.gate.e_score_correction_bias",
    latent="moe_latent_size",
    latent_maps=("mixer.fc1_latent_proj", "mixer.fc2_latent_proj"),
    shared=(("mixer.shared_experts.up_proj",), ("mixer.shared_experts.down_proj",)),
)
_ERNIE = Mixture(
    count="moe_num_experts",
    bias="mlp.gate.moe_statics.e_score_correction_bias",
    least="moe_norm_min",
    active="moe_k",
    shared=_shared("mlp.shared_experts"),
)
_GPT_OSS = Mixture(
    count="num_local_experts",
    router="mlp.router",
    width="intermediate_size",
    scores="chosen",
    normalized=False,
    clamp=("swiglu_alpha", "swiglu_limit"),
)
_GEMMA = Mixture(
    router="router.proj",
    experts="experts",
    active="top_k_experts",
    shared=_shared("mlp"),
    around=("post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2"),
    router_scale="router.scale",
    expert_scales="router.per_expert_scale",
)
_LFM2 = Mixture(
    router="feed_forward.gate",
    experts="feed_forward.experts",
    scores="sigmoid",
    bias="feed_forward.expert_bias",
    normalized="norm_topk_prob",
    added=1e-6,
    scale="routed_scaling_factor",
)
_AFTER_LAST = MtpNames(
    layer="model.layers.{}.",
    beside="model.layers.{}.",
    after_last=True,
    embedding_norm="enorm",
    state_norm="hnorm",
    map="eh_proj",
    norm="shared_head.norm",
    copies=("embed_tokens.weight", "shared_head.head.weight"),
)
_ROUTED = "first_k_dense_replace", "n_shared_experts"
_SPARSE = "decoder_sparse_step", "mlp_only_layers", "shared_expert_intermediate_size"


def mixtures(dense: Mapping[str, Family]) -> dict[str, Family]:
    """Returns the rows of the table for mixtures, made of those of `dense` families."""

    def like(family: str, mixture: Mixture, *ignored: str, **changes: Any) -> Family:
        row = dense[family]
        return replace(row, mixture=mixture, ignored=row.ignored | _IGNORED | set(ignored), **changes)

    return {
        "qwen2_moe": like("qwen2", _QWEN, *_SPARSE, "qkv_bias"),
        "qwen3_moe": like("qwen3", Mixture(normalized="norm_topk_prob"), *_SPARSE[:2]),
        "qwen3_next": like(
            "qwen3_5_text",
            _QWEN,
            *_SPARSE,
            conv_in=("linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba"),
            recurrent=RecurrentState(by_key_head=True),
        ),
        "qwen3_5_moe_text": like("qwen3_5_text", replace(_QWEN, normalized=True), *_SPARSE[2:]),
        "olmoe": like(
            "mistral",
            Mixture(width="intermediate_size", normalized="norm_topk_prob"),
            head_norms=("self_attn.q_norm", "self_attn.k_norm"),
            only={"clip_qkv": None, "sliding_window": None},  # one would cut off what the norms give, one is half read
        ),
        "mixtral": like("mistral", _MIXTRAL, "router_jitter_noise"),
        "granitemoe": like("granite", _GRANITE),
        "granitemoeshared": like("granite", _GRANITE_SHARED, "shared_intermediate_size"),
        "granitemoe_swa": like("granite_swa", _GRANITE_SHARED, "shared_intermediate_size"),
        "granitemoehybrid": like("granitemoehybrid", _GRANITE_SHARED),
        "nemotron_h": like(
            "nemotron_h",
            _NEMOTRON,
            "moe_shared_expert_intermediate_size",
            layer_kinds=(*dense["nemotron_h"].layer_kinds, EXPERTS_LAYER),
        ),
        "minimax_m2": like(
            "mistral",
            replace(_MIXTRAL, scores="sigmoid", bias="mlp.e_score_correction_bias"),
            "router_jitter_noise",
            head_norms=dense["qwen3"].head_norms,
        ),
        "mellum": like(
            "qwen3", Mixture(normalized="norm_topk_prob"), "mlp_layer_types", window_switch=None, mtp=MtpNames()
        ),
        "flex_olmo": like("olmo2", Mixture(width="intermediate_size", normalized="norm_topk_prob")),
        "exaone_moe": like(
            "qwen3",
            replace(_DEEPSEEK, count="num_experts"),
            *_ROUTED[:1],
            *("mlp_layer_types", "num_shared_experts", "sliding_window_pattern"),
            window_switch=None,
            local_rotary=True,
            mtp=MtpNames(),
        ),
        "dots1": like("qwen3", _DEEPSEEK, *_ROUTED, window_switch=None),
        "glm4_moe": like(
            "mistral",
            _DEEPSEEK,
            *_ROUTED,
            "num_mtp_layers",
            head_norms=dense["qwen3"].head_norms,
            head_norm_switch="use_qk_norm",
            mtp=_AFTER_LAST,
        ),
        "deepseek_v2": like("youtu", _DEEPSEEK_V2, *_ROUTED, "n_group", "topk_group", only={"topk_method": "greedy"}),
        "deepseek_v3": like(
            "youtu", _DEEPSEEK, *_ROUTED, "num_mtp_layers", "num_nextn_predict_layers", mtp=_AFTER_LAST
        ),
        "glm4_moe_lite": like("youtu", _DEEPSEEK, "n_shared_experts", "mlp_layer_types", mtp=_AFTER_LAST),
        "gemma4_text": like("gemma4_text", _GEMMA, "enable_moe_block"),
        "gpt_oss": like(
            "mistral",
            _GPT_OSS,
            sinks="self_attn.sinks",
            packed="mxfp4",
        ),
        "lfm2_moe": like(
            "lfm2",
            _LFM2,
            "num_dense_layers",
            "use_expert_bias",
            rotary="pos_emb",
        ),
        "hunyuan_v1_moe": like(
            "hunyuan_v1_dense",
            Mixture(
                router="mlp.gate.wg",
                active="moe_topk",
                width="intermediate_size",
                shared=_shared("mlp.shared_mlp"),
            ),
        ),
        "ernie4_5_moe": like(
            "ernie4_5",
            _ERNIE,
            *(f"moe_{name}" for name in ("num_experts", "num_shared_experts", "layer_interval")),
            *("moe_layer_start_index", "moe_layer_end_index"),
            mtp=MtpNames(layer="model.mtp_block.{}.", beside="model.mtp_"),
        ),
    }
