"""Facts of a family in the code of transformers, besides `streamspec.model_families` and the config of a model.

For families that are not here the modules of transformers say what the config does not, and these need PyTorch. Facts:
the `configuration_*.py` and `modeling_*.py` of transformers; tests/export/test_without_torch.py compares every row with
them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from streamspec.adapters.base_models.without_torch import INSTALL
from streamspec.errors import BaseModelError

Values = dict[str, Any]  # fields of a config
FULL, SLIDING = "full_attention", "sliding_attention"
COMMON: Mapping[str, Any] = {  # fields of every family, with the value that most have where a config has none
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "max_position_embeddings": 2048,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "use_cache": True,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "rope_parameters": None,
    "attention_dropout": 0.0,
}
READ: Mapping[str, Any] = {  # further fields that every family's model reads, as what where a config has none
    "head_dim": None,
    "is_causal": True,
    "_attn_implementation": None,
    "per_layer_config": None,
}
UNREAD = frozenset(  # by the model: fields of `COMMON` and of families that matter to training and to defaults alone
    {
        *("bos_token_id", "eos_token_id", "eod_token_id", "initializer_range", "tie_word_embeddings", "use_cache"),
        *("pretraining_tp", "max_window_layers", "use_sliding_window", "no_rope_layer_interval"),
        *("sliding_window_pattern", "block_ff_dim", "full_attn_idxs", "tie_embedding"),
        *("full_attention_interval", "partial_rotary_factor"),
    }
)
_ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
_MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
_BIASED: dict[str, bool | str] = dict.fromkeys(_ATTENTION, "attention_bias")
_BIASED_MLP: dict[str, bool | str] = dict.fromkeys(_MLP, "mlp_bias")


@dataclass(frozen=True)
class FamilyFacts:
    """A family whose norms are root mean squares, whose queries, keys and values are maps of their own, and all of
    whose layers have attention over keys of their own, of one size, or in its place a short convolution or the gated
    delta rule. Experts have no groups, limits, or biases of their maps."""

    class_name: str  # of the causal LM
    fields: Mapping[str, Any]  # its own fields, and those of `COMMON` with another default
    lacks: frozenset[str] = frozenset()  # fields of `COMMON`
    also_read: frozenset[str] = frozenset()  # by its model, without a default
    biases: Mapping[str, bool | str] = field(default_factory=dict)  # of a map: always, or by a config switch
    scaling: str | None = None  # config field s: scores are multiplied by s ** power; None: the size of a head
    power: float = -0.5
    scaled_embedding: bool = False  # by the root of the hidden size
    joint_head_norms: bool = False  # over all heads together
    theta: float = 10_000.0  # of the rotary embedding, where a config has none
    local_theta: tuple[str, float] | None = None  # of layers with a window: config field, and default
    complete: Callable[[Values], None] = lambda values: None  # fills in fields that follow from others
    sparse: Callable[[Any], Sequence[int]] = lambda config: ()  # layers with a mixture of experts, by a whole config
    shared: str = ""  # config field: inner numbers of the MLP beside experts that all rows run through
    router_bias: bool | str = False  # added where experts are chosen: always, or by a config switch
    eps: str = "rms_norm_eps"  # config field
    inner: Callable[[Any], int] = lambda config: config.intermediate_size  # numbers within an MLP
    taps: str = "conv_L_cache"  # config field: rows that a convolution mixes
    turns_in_part: bool = False  # whether its heads turn in part where `partial_rotary_factor` says so


def _every(values: Values, period: int) -> None:
    """Windows in all layers but each `period`-th one."""
    layers = range(1, values["num_hidden_layers"] + 1)
    _kinds(values, [SLIDING if layer % period else FULL for layer in layers])


def _kinds(values: Values, kinds: list[str]) -> None:
    if values["layer_types"] is None:
        values["layer_types"] = kinds


def _switched_windows(values: Values) -> None:
    window = values["sliding_window"] if values["use_sliding_window"] else None
    first = values["max_window_layers"] if window is not None else values["num_hidden_layers"]
    values["sliding_window"] = window
    _kinds(values, [SLIDING if layer >= first else FULL for layer in range(values["num_hidden_layers"])])


def _windows_everywhere(values: Values) -> None:
    kind = FULL if values["sliding_window"] is None else SLIDING
    _kinds(values, [kind] * values["num_hidden_layers"])


def _counted(values: Values) -> None:
    """Experts are counted under two names."""
    count = values["num_local_experts"]
    values["num_experts"] = values["num_local_experts"] = values["num_experts"] if count is None else count


def _sparse_steps(values: Values) -> None:
    """Qwen's mixtures of experts."""
    _counted(values)
    values["sliding_window"] = values["sliding_window"] if values["use_sliding_window"] else None
    values["mlp_only_layers"] = values["mlp_only_layers"] or []


def _not_dense(config: Any) -> list[int]:
    every, dense = config.decoder_sparse_step, set(config.mlp_only_layers)
    return [i for i in range(config.num_hidden_layers) if i not in dense and (i + 1) % every == 0]


def _positions_left_out(values: Values) -> None:
    """SmolLM3: each fourth layer knows no positions; only these may have windows."""
    layers, interval = range(values["num_hidden_layers"]), values["no_rope_layer_interval"]
    if values["no_rope_layers"] is None:
        values["no_rope_layers"] = [int((layer + 1) % interval != 0) for layer in layers]
    windows = values["use_sliding_window"] and values["sliding_window"] is not None
    turned = values["no_rope_layers"]
    _kinds(values, [SLIDING if windows and not turned[layer] else FULL for layer in layers])


def _head_of_width(values: Values) -> None:
    if values["head_dim"] is None:
        values["head_dim"] = values["hidden_size"] // values["num_attention_heads"]


def _old_gelu(values: Values) -> None:
    """Gemma's first configs say gelu where its tanh form is meant."""
    if values["hidden_act"] == "gelu":
        values["hidden_act"] = "gelu_pytorch_tanh"


def _tied(values: Values) -> None:
    """LFM2's other name of a field."""
    if (given := values.pop("tie_embedding")) is not None:
        values["tie_word_embeddings"] = given


def _convolutions(values: Values) -> None:
    """LFM2: layers by the numbers of those with attention, and an MLP's width by another name."""
    _tied(values)
    if (given := values.pop("block_ff_dim")) is not None:
        values["intermediate_size"] = given
    layers = range(values["num_hidden_layers"])
    if values["layer_types"] is None:
        chosen = values["full_attn_idxs"]
        values["full_attn_idxs"] = [*layers] if chosen is None else chosen
        _kinds(values, [FULL if layer in values["full_attn_idxs"] else "conv" for layer in layers])


def _states_between(values: Values) -> None:
    """Qwen3.5: each fourth layer has attention."""
    every = values.pop("full_attention_interval")
    _kinds(values, ["linear_attention" if (i + 1) % every else FULL for i in range(values["num_hidden_layers"])])


def _adjusted(config: Any) -> int:
    """LFM2: two thirds of what the config says, times a factor, up to a multiple."""
    inner, step = int(config.intermediate_size), config.block_multiple_of
    if config.block_auto_adjust_ff_dim:
        inner = int(2 * inner / 3)
        if config.block_ffn_dim_multiplier is not None:
            inner = -(-int(config.block_ffn_dim_multiplier * inner) // step) * step
    return inner


_SILU = {"hidden_act": "silu"}
_BIAS = {"attention_bias": False}
_BIASES = {**_BIAS, "mlp_bias": False}
_WINDOWS = {"sliding_window": 4096, "layer_types": None}
_QWEN = {
    **_SILU,
    **_WINDOWS,
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "max_window_layers": 28,
    "num_key_value_heads": 32,
    "bos_token_id": None,
    "eos_token_id": None,
}
_MISTRAL = {
    **_SILU,
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "head_dim": None,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}
_OLMO = {
    **_SILU,
    **_BIAS,
    "vocab_size": 50304,
    "pad_token_id": 1,
    "bos_token_id": None,
    "eos_token_id": 50279,
    "rms_norm_eps": 1e-5,
}
_GEMMA_TOKENS = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2, "tie_word_embeddings": True}
_GEMMA2 = {
    **_BIAS,
    **_WINDOWS,
    **_GEMMA_TOKENS,
    "vocab_size": 256000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "query_pre_attn_scalar": 256,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
}

_LFM2 = {
    "vocab_size": 65536,
    "num_key_value_heads": 8,
    "max_position_embeddings": 128_000,
    "norm_eps": 1e-5,
    "pad_token_id": 0,
    "tie_word_embeddings": True,
    "tie_embedding": None,
    "conv_bias": False,
    "conv_L_cache": 3,
    "layer_types": None,
}
_LFM2_LACKS = frozenset({"rms_norm_eps", "attention_dropout"})
_QWEN35 = {
    **_SILU,
    **_BIAS,
    "vocab_size": 248320,
    "num_attention_heads": 16,
    "max_position_embeddings": 32768,
    "bos_token_id": None,
    "eos_token_id": None,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "layer_types": None,
    "full_attention_interval": 4,
    "partial_rotary_factor": 0.25,
}
_ROUTED = {
    "output_router_logits": False,
    "num_experts_per_tok": 8,
    "norm_topk_prob": False,
    "num_local_experts": None,
}

FACTS: dict[str, FamilyFacts] = {
    "llama": FamilyFacts(
        "LlamaForCausalLM",
        {**_SILU, **_BIASES, "pretraining_tp": 1, "head_dim": None},
        biases=_BIASED | _BIASED_MLP,
        complete=_head_of_width,
    ),
    "mistral": FamilyFacts("MistralForCausalLM", _MISTRAL, complete=_head_of_width),
    "ministral": FamilyFacts("MinistralForCausalLM", _MISTRAL | {"layer_types": None}, complete=_windows_everywhere),
    "qwen2": FamilyFacts(
        "Qwen2ForCausalLM", _QWEN, biases=dict.fromkeys(_ATTENTION[:3], True), complete=_switched_windows
    ),
    "qwen3": FamilyFacts(
        "Qwen3ForCausalLM", {**_QWEN, **_BIAS, "head_dim": 128}, biases=_BIASED, complete=_switched_windows
    ),
    "qwen3_moe": FamilyFacts(
        "Qwen3MoeForCausalLM",
        {
            **_SILU,
            **_BIAS,
            **_ROUTED,
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 24,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "bos_token_id": None,
            "eos_token_id": None,
            "use_sliding_window": False,
            "sliding_window": 4096,
            "decoder_sparse_step": 1,
            "mlp_only_layers": None,
            "num_experts": 128,
            "moe_intermediate_size": 768,
            "router_aux_loss_coef": 0.001,
        },
        also_read=frozenset({"initializer_range"}),  # as experts are made
        biases=_BIASED,
        complete=_sparse_steps,
        sparse=_not_dense,
    ),
    "gemma": FamilyFacts(
        "GemmaForCausalLM",
        {
            **_BIAS,
            **_GEMMA_TOKENS,
            "vocab_size": 256000,
            "hidden_size": 3072,
            "intermediate_size": 24576,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "head_dim": 256,
            "hidden_act": "gelu_pytorch_tanh",
            "max_position_embeddings": 8192,
            "use_bidirectional_attention": None,
        },
        biases=_BIASED,
        scaled_embedding=True,
        complete=_old_gelu,
    ),
    "gemma2": FamilyFacts(
        "Gemma2ForCausalLM",
        _GEMMA2 | {"use_bidirectional_attention": None},
        biases=_BIASED,
        scaling="query_pre_attn_scalar",
        scaled_embedding=True,
        complete=lambda values: _every(values, 2),
    ),
    "vaultgemma": FamilyFacts(
        "VaultGemmaForCausalLM",
        _GEMMA2,
        biases=_BIASED,
        scaling="query_pre_attn_scalar",
        scaled_embedding=True,
        complete=lambda values: _every(values, 2),
    ),
    "gemma3_text": FamilyFacts(
        "Gemma3ForCausalLM",
        _GEMMA2
        | {
            "vocab_size": 262208,
            "max_position_embeddings": 131072,
            "final_logit_softcapping": None,
            "attn_logit_softcapping": None,
            "use_bidirectional_attention": False,
            "sliding_window_pattern": 6,
        },
        also_read=frozenset(
            {"vision_config", "text_config", "layer_norm_eps", "image_size", "patch_size", "mm_tokens_per_image"}
        ),
        biases=_BIASED,
        scaling="query_pre_attn_scalar",
        scaled_embedding=True,
        theta=1_000_000.0,
        local_theta=("rope_local_base_freq", 10_000.0),
        complete=lambda values: _every(values, values["sliding_window_pattern"]),
    ),
    "smollm3": FamilyFacts(
        "SmolLM3ForCausalLM",
        {
            **_SILU,
            **_BIASES,
            "vocab_size": 128256,
            "hidden_size": 2048,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "pad_token_id": 128004,
            "bos_token_id": 128000,
            "eos_token_id": 128001,
            "use_sliding_window": False,
            "sliding_window": None,
            "no_rope_layers": None,
            "no_rope_layer_interval": 4,
            "layer_types": None,
            "tie_word_embeddings": True,
        },
        also_read=frozenset({"use_sliding_window"}),
        biases=_BIASED | _BIASED_MLP,
        theta=2_000_000.0,
        complete=_positions_left_out,
    ),
    "granite": FamilyFacts(
        "GraniteForCausalLM",
        {
            **_SILU,
            **_BIASES,
            "embedding_multiplier": 1.0,
            "logits_scaling": 1.0,
            "residual_multiplier": 1.0,
            "attention_multiplier": 1.0,
        },
        biases=_BIASED | _BIASED_MLP,
        scaling="attention_multiplier",
        power=1.0,
    ),
    "olmo2": FamilyFacts("Olmo2ForCausalLM", _OLMO, biases=_BIASED, joint_head_norms=True),
    "olmo3": FamilyFacts(
        "Olmo3ForCausalLM",
        {**_OLMO, **_WINDOWS},
        biases=_BIASED,
        joint_head_norms=True,
        theta=500_000.0,
        local_theta=("", 500_000.0),
        complete=lambda values: _every(values, 4),
    ),
    "olmoe": FamilyFacts(
        "OlmoeForCausalLM",
        {
            **_OLMO,
            **_ROUTED,
            "hidden_size": 2048,
            "intermediate_size": 2048,
            "num_hidden_layers": 16,
            "num_attention_heads": 16,
            "max_position_embeddings": 4096,
            "clip_qkv": None,
            "num_experts": 64,
            "router_aux_loss_coef": 0.01,
        },
        also_read=frozenset({"initializer_range", "sliding_window"}),
        biases=_BIASED,
        joint_head_norms=True,
        complete=_counted,
        sparse=lambda config: range(config.num_hidden_layers),
    ),
    "lfm2": FamilyFacts(
        "Lfm2ForCausalLM",
        {
            **_LFM2,
            "hidden_size": 2560,
            "intermediate_size": 12288,
            "block_ff_dim": None,
            "block_multiple_of": 256,
            "block_ffn_dim_multiplier": 1.0,
            "block_auto_adjust_ff_dim": True,
            "full_attn_idxs": None,
        },
        lacks=_LFM2_LACKS,
        theta=1_000_000.0,
        complete=_convolutions,
        eps="norm_eps",
        inner=_adjusted,
    ),
    "lfm2_moe": FamilyFacts(
        "Lfm2MoeForCausalLM",
        {
            **_LFM2,
            "hidden_size": 2048,
            "intermediate_size": 7168,
            "moe_intermediate_size": 1792,
            "num_dense_layers": 2,
            "num_experts_per_tok": 4,
            "num_experts": 32,
            "use_expert_bias": True,
            "routed_scaling_factor": 1.0,
            "norm_topk_prob": True,
        },
        lacks=_LFM2_LACKS,
        also_read=frozenset({"initializer_range"}),  # as experts are made
        theta=1_000_000.0,
        complete=_tied,
        sparse=lambda config: range(config.num_dense_layers, config.num_hidden_layers),
        router_bias="use_expert_bias",
        eps="norm_eps",
    ),
    "qwen3_5_text": FamilyFacts(
        "Qwen3_5ForCausalLM",
        _QWEN35 | {"intermediate_size": 12288, "num_key_value_heads": 4},
        biases=_BIASED,
        complete=_states_between,
        taps="linear_conv_kernel_dim",
        turns_in_part=True,
    ),
    "qwen3_5_moe_text": FamilyFacts(
        "Qwen3_5MoeForCausalLM",
        _QWEN35
        | {
            "hidden_size": 2048,
            "num_hidden_layers": 40,
            "num_key_value_heads": 2,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "num_experts_per_tok": 8,
            "num_experts": 256,
            "output_router_logits": False,
            "router_aux_loss_coef": 0.001,
        },
        lacks=frozenset({"intermediate_size"}),
        also_read=frozenset({"initializer_range"}),  # as experts are made
        biases=_BIASED,
        complete=_states_between,
        sparse=lambda config: range(config.num_hidden_layers),
        shared="shared_expert_intermediate_size",
        inner=lambda config: 0,
        taps="linear_conv_kernel_dim",
        turns_in_part=True,
    ),
    "arcee": FamilyFacts(
        "ArceeForCausalLM",
        {
            **_BIASES,
            "hidden_act": "relu2",
            "hidden_size": 2560,
            "intermediate_size": 18432,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "bos_token_id": 128000,
            "eos_token_id": 128001,
            "head_dim": None,
        },
        biases=_BIASED | _BIASED_MLP,
        complete=_head_of_width,
    ),
    "seed_oss": FamilyFacts(
        "SeedOssForCausalLM",
        {
            **_SILU,
            "vocab_size": 155136,
            "intermediate_size": 27648,
            "num_hidden_layers": 64,
            "num_attention_heads": 80,
            "num_key_value_heads": 8,
            "max_position_embeddings": 524288,
            "pad_token_id": 1,
            "bos_token_id": 0,
            "pretraining_tp": 1,
            "attention_bias": True,
            "attention_out_bias": False,
            "attention_dropout": 0.1,
            "residual_dropout": 0.1,
            "mlp_bias": False,
            "head_dim": 128,
        },
        biases=_BIASED | {_ATTENTION[3]: "attention_out_bias"} | _BIASED_MLP,
        complete=_head_of_width,
    ),
    "hunyuan_v1_dense": FamilyFacts(
        "HunYuanDenseV1ForCausalLM",
        {
            **_SILU,
            **_BIAS,
            "vocab_size": 290943,
            "rms_norm_eps": 1e-5,
            "pad_token_id": 0,
            "eod_token_id": 3,
            "pretraining_tp": 1,
            "head_dim": None,
        },
        biases=_BIASED,
    ),
}  # by `model_type`


def facts_of(model_type: str) -> FamilyFacts:
    """The row of a family. Raises BaseModelError for one that needs PyTorch."""
    if model_type not in FACTS:
        raise BaseModelError(
            f"a base of the family `{model_type}` without PyTorch", f"one of {', '.join(FACTS)}", INSTALL
        )
    return FACTS[model_type]


def read_by_model(model_type: str) -> dict[str, list[Any]]:
    """The config fields that the causal LM of a family reads, each with what it is read as where a config has none."""
    facts = facts_of(model_type)
    fields = {*COMMON, *facts.fields} - UNREAD - facts.lacks | facts.also_read
    return {name: [None] for name in fields} | {name: [default] for name, default in READ.items()}
