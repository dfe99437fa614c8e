"""Descriptions of the supported model families: where a Hugging Face causal LM keeps its parts, and how its layers are
put together.

One decoder template reads these descriptions, in training (`adapters/base_models/hf_decoder.py`) and in export
(`export/layers/decoder_spec.py`). Sizes, biases and scales are read from the modules themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any

from streamspec.errors import BaseModelError
from streamspec.model_families.per_layer_input import PerLayerInput
from streamspec.model_families.recurrent import RECURRENT

NEAR = 3  # names in an error


@dataclass(frozen=True)
class Family:
    """Module names are below the causal LM (`stack`), below the stack, or below a layer."""

    stack: str = "model"
    layers: str = "layers"
    embedding: str = "embed_tokens"
    final_norm: str = "norm"
    rotary: str | None = "rotary_emb"  # None: positions enter at the embedding only
    rotary_layers: str | None = None  # config list: true for layers that rotate queries and keys
    rotary_pairs: bool = False  # numbers 2i and 2i + 1 of a head turn together, instead of i and half + i
    query_growth: str | None = None  # rope parameter: queries grow by it with the logarithm of their position
    position_table: str | None = None
    position_offset: int = 0  # of the table's first row in use
    cache_argument: str = "past_key_values"  # of a layer
    layernorm: bool = False  # mean and bias too, instead of the root mean square alone
    one_added: bool = False  # norms multiply by 1 + weight
    bare_norms: float | None = None  # norms have no weights; the epsilon of all
    attention: str = "self_attn"
    attention_norm: str | None = "input_layernorm"  # None: it reads the residual stream as it is
    mlp_norm: str | None = "post_attention_layernorm"
    # The next two, by name: where this config switch is on.
    shares_norm: bool | str = False  # in parallel layers the MLP reads what attention reads
    parallel: bool | str = False  # attention and MLP read the same residual stream
    attention_out_norm: str | None = None  # norms of what a half of the layer adds
    mlp_out_norm: str | None = None
    head_norms: tuple[str, ...] = ()  # of queries and keys: of each head, or of all heads together
    head_norm_switch: str | None = None  # config switch without which these are not there
    head_norms_last: bool = False  # after the rotary embedding
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    out: tuple[str, ...] = ("self_attn.o_proj",)
    up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: tuple[str, ...] = ("mlp.down_proj",)
    gated: bool = True
    activation: str = "silu"  # of the MLP, where no config field says it
    activation_module: str | None = None  # that holds the parameters of an activation, where it may have some
    conv: str | None = None  # short convolution in place of attention, in the layers that have one
    conv_in: tuple[str, ...] = ("conv.in_proj",)
    conv_out: tuple[str, ...] = ("conv.out_proj",)
    clip: str | None = None  # config field: queries, keys and values are cut off at it
    interleaved: bool = False  # the one map of queries, keys and values has them side by side for each head
    layer_kinds: tuple[str, ...] = ("full_attention", "sliding_attention")  # of the config's `layer_types`
    window_switch: str | None = None  # config switch without which windows are off
    local_rotary: bool = False  # where some layers have a window, the others know no positions
    embedding_multiplier: str | None = None  # config fields: of the embedding, of what half a layer adds, of logits
    residual_multiplier: str | None = None
    logit_multiplier: str | None = None
    logit_divisor: str | None = None
    needed: tuple[str, ...] = ()  # config fields without which its Hugging Face model does not run
    shared_kv: str | None = None  # config field: so many last layers attend to the K/V of the last of their kind below
    value_norm: bool = False  # values of each head over their root mean square
    layer_scale: str | None = None  # of a layer: its number that the residual stream is multiplied by
    per_layer_input: PerLayerInput | None = None
    # Config fields of which one value is understood, or those of a tuple.
    only: Mapping[str, Any] = field(default_factory=dict)
    # Config fields, of those that the Hugging Face model reads, that do not change the function computed, or only in
    # ways that the modules show.
    ignored: frozenset[str] = frozenset()

    @property
    def switches(self) -> set[str]:
        """Config fields by which a family's members differ."""
        named = (
            self.parallel,
            self.shares_norm,
            self.head_norm_switch,
            self.window_switch,
            self.rotary_layers,
            self.clip,
            self.embedding_multiplier,
            self.residual_multiplier,
            self.logit_multiplier,
            self.logit_divisor,
            self.shared_kv,
            self.per_layer_input and self.per_layer_input.width,
        )
        return {switch for switch in named if isinstance(switch, str)}

    @property
    def draft_layer_parts(self) -> dict[str, str]:
        """Parts of a decoder layer that a draft layer starts as a copy of, by their names in an adapter."""
        parts = {
            "attention": self.attention,
            "norm_in": self.attention_norm,
            "norm_mid": self.mlp_norm,
            "norm_attention": self.attention_out_norm,
            "norm_mlp": self.mlp_out_norm,
        }
        return {name: module for name, module in parts.items() if module}

    @property
    def all_attention(self) -> bool:
        """True where every layer has attention over keys and values of its own, of one size, as other runtimes take
        for granted."""
        return self.conv is None and self.shared_kv is None


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
_COHERE = Family(
    layernorm=True,
    parallel=True,
    shares_norm=True,
    rotary_pairs=True,
    head_norms=("self_attn.q_norm", "self_attn.k_norm"),
    head_norm_switch="use_qk_norm",
    logit_multiplier="logit_scale",
)
_SUMMARY = ("summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj")

FAMILIES = {
    "llama": Family(ignored=frozenset({"pretraining_tp"})),
    "mistral": Family(),
    "qwen2": Family(window_switch="use_sliding_window", ignored=frozenset({"max_window_layers"})),
    "qwen3": Family(
        head_norms=("self_attn.q_norm", "self_attn.k_norm"),
        window_switch="use_sliding_window",
        ignored=frozenset({"max_window_layers"}),
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
    "cwm": Family(ignored=frozenset({"pretraining_tp"})),
    "ernie4_5": Family(rotary_pairs=True, ignored=frozenset({"use_bias"})),
    "gemma": Family(one_added=True, only={"use_bidirectional_attention": None}),
    "glm": _GLM,
    "glm4": replace(_GLM, attention_out_norm="post_self_attn_layernorm", mlp_out_norm="post_mlp_layernorm"),
    "granite": _GRANITE,
    "granitemoehybrid": replace(
        _GRANITE,
        up=("shared_mlp.input_linear",),
        down=("shared_mlp.output_linear",),
        only={"num_local_experts": 0},
        ignored=_GRANITE.ignored
        | {
            "num_experts_per_tok",
            "output_router_logits",
            "position_embedding_type",
            "router_aux_loss_coef",
            "shared_intermediate_size",
            "time_step_limit",
            *(f"mamba_{name}" for name in ("chunk_size", "conv_bias", "d_conv", "d_head", "d_state", "expand")),
            *(f"mamba_{name}" for name in ("n_groups", "n_heads", "proj_bias")),
        },
    ),
    "helium": Family(rotary_pairs=True),
    "hunyuan_v1_dense": Family(
        head_norms=("self_attn.query_layernorm", "self_attn.key_layernorm"),
        head_norms_last=True,
        ignored=frozenset({"eod_token_id", "pretraining_tp"}),
    ),
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
    "gemma4_text": replace(
        _GEMMA,
        one_added=False,
        head_norms=("self_attn.q_norm", "self_attn.k_norm"),
        shared_kv="num_kv_shared_layers",
        value_norm=True,
        layer_scale="layer_scalar",
        per_layer_input=PerLayerInput(),
        only={"enable_moe_block": False, "use_bidirectional_attention": (None, "vision")},  # of images alone
        ignored=frozenset(
            {"attention_k_eq_v", "moe_intermediate_size", "num_experts", "per_layer_config", "top_k_experts"}
            | {"use_double_wide_mlp", "vocab_size_per_layer_input"}
        ),
    ),
    "olmo": Family(layernorm=True, bare_norms=1e-5, clip="clip_qkv"),
    "olmo2": _POST_NORM,
    "olmo3": _POST_NORM,
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
        cache_argument="layer_past",
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


def supported(like: str = "") -> str:
    """The families in a few words, those with names `like` one first."""
    near = get_close_matches(like, FAMILIES, NEAR)
    shown = [*near, *(name for name in FAMILIES if name not in near)][:NEAR]
    return f"{', '.join(shown)} or another of the {len(FAMILIES)} families of docs/reference/families.md"


def family_of(model_type: object, found: str) -> Family:
    """The description of a family by its `model_type`. Raises BaseModelError where there is none, of what was `found`
    to be of it.
    """
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        why = RECURRENT.get(str(model_type))
        raise BaseModelError(
            f"{found} of the family `{model_type}`{f', which has {why}' if why else ''}",
            supported(str(model_type)),
            "choose a base of one of these families",
        )
    return FAMILIES[model_type]


def switched(config: Any, switch: bool | str | None) -> bool:
    """A fact of a family, or the value of the config switch of that name."""
    return bool(getattr(config, switch, False)) if isinstance(switch, str) else bool(switch)


def factor(config: Any, name: str | None) -> float:
    """The number in the config field `name`; 1 for a field that a family does not have."""
    return 1.0 if name is None else float(getattr(config, name))
