"""The rules of single architectures beyond their row of the table: each function completes a config.

`tests/adapters/base_models/gguf/test_converter.py` covers it. Facts: llama.cpp's `conversion/*.py` and
`src/models/*.cpp`.
"""

from __future__ import annotations

from typing import Any

from streamspec.adapters.base_models.gguf.keys import LONGEST, REQUIRED, WIDEST, Keys
from streamspec.adapters.base_models.gguf.rope import LARGEST_BASE, proportional

Config = dict[str, Any]
KV_HEADS = "attention.head_count_kv"
STATE = ("conv_kernel", "state_size", "group_count", "time_step_rank", "inner_size")
SOFTMAX, SIGMOID = 1, 2  # llama.cpp's numbers
CLOSE = 1e-9  # of 1e-5, read from fp32


def llama(keys: Keys, config: Config) -> None:
    window = keys.whole("attention.sliding_window", 0, 0, LONGEST)
    if window:  # Mistral's; llama.cpp calls both `llama`
        config |= {"model_type": "mistral", "sliding_window": window}
        config.pop("attention_bias", None)


def mixtral(keys: Keys, config: Config) -> None:
    config["sliding_window"] = keys.whole("attention.sliding_window", 0, 0, LONGEST) or None


def phi3(keys: Keys, config: Config) -> None:
    rope = config["rope_parameters"]
    if rope["rope_type"] not in ("default", "longrope"):
        keys.refuse("rope.scaling.type", rope["rope_type"], "none, or longrope with its tensors, in this architecture")
    original = rope.get("original_max_position_embeddings", config["max_position_embeddings"])
    config |= {
        "original_max_position_embeddings": original,
        "sliding_window": keys.whole("attention.sliding_window", 0, 0, LONGEST) or None,
        "partial_rotary_factor": rope.get("partial_rotary_factor", 1.0),
    }


def _windows(keys: Keys, config: Config, length: Any, pattern: int) -> None:
    """Windows in all layers but each `pattern`-th one, unless the file says it for each layer."""
    window = keys.whole("attention.sliding_window", length, 0, LONGEST)
    layers, key = range(config["num_hidden_layers"]), "attention.sliding_window_pattern"
    stored = keys.raw(key) if keys.has(key) else None
    if isinstance(stored, list):
        if len(stored) != len(layers) or not all(isinstance(slides, bool) for slides in stored):
            keys.refuse(key, stored, f"a number, or true or false for each of {len(layers)} layers")
        sliding = stored
    else:
        each = keys.whole(key, pattern)
        sliding = [(layer + 1) % each != 0 for layer in layers]
    config["layer_types"] = ["sliding_attention" if window and slides else "full_attention" for slides in sliding]
    if window:
        config["sliding_window"] = window


def _gemma_scale(keys: Keys, config: Config, large: int) -> None:
    """Queries are scaled by the head's size, in the largest of the family by the width of a head's part instead."""
    width = config["hidden_size"] // config["num_attention_heads"]
    config["query_pre_attn_scalar"] = width if config["num_hidden_layers"] == large else config["head_dim"]


def gemma2(keys: Keys, config: Config) -> None:
    _windows(keys, config, 4096, 2)
    _gemma_scale(keys, config, large=46)
    config["attn_logit_softcapping"] = keys.real("attn_logit_softcapping", 50.0) or None
    config["final_logit_softcapping"] = keys.real("final_logit_softcapping", 30.0) or None


def gemma3(keys: Keys, config: Config) -> None:
    _windows(keys, config, None, 6)
    _gemma_scale(keys, config, large=62)
    config["final_logit_softcapping"] = keys.real("final_logit_softcapping", 0.0) or None
    config["rope_parameters"] = _rope_by_kind(keys, config)


def _rope_by_kind(keys: Keys, config: Config, theta: float = 10_000.0) -> Config:
    """Positions of global layers, and of those with windows, which are never scaled."""
    local = keys.real("rope.freq_base_swa", theta, 1.0, LARGEST_BASE)
    return {
        "full_attention": config["rope_parameters"],
        "sliding_attention": {"rope_type": "default", "rope_theta": local},
    }


def gemma4_heads(keys: Keys, config: Config, heads: int, least: int = 1) -> int:
    """Adds the sizes of heads of local and of global layers, and which are which; returns that of global ones, whose
    positions the other keys tell. `least`: so many layers have keys of their own."""
    _windows(keys, config, REQUIRED, 6)
    if config["layer_types"][-1] != "full_attention":  # transformers makes it one
        keys.refuse("attention.sliding_window_pattern", "true for the last layer", "a last layer without a window")
    sizes = [keys.whole(f"attention.key_length{kind}") for kind in ("", "_swa")]
    for kind, size in zip(("", "_swa"), sizes, strict=True):
        keys.only(f"attention.value_length{kind}", size)
        keys.only(f"rope.dimension_count{kind}", size)
    kinds, (whole, local) = config["layer_types"], _heads_by_kind(keys, config, heads)
    config |= {"head_dim": sizes[1], "global_head_dim": sizes[0], "num_key_value_heads": local}
    kept = range(len(kinds) - keys.whole("attention.shared_kv_layers", 0, 0, len(kinds) - least))
    if kept and set(kinds[: len(kept)]) != set(kinds):
        keys.refuse("attention.shared_kv_layers", len(kinds) - len(kept), "less: a layer of each kind has its own keys")
    # In global layers whose keys are values as well, which alone may have other numbers of them.
    one = [i for i in kept if kinds[i] == "full_attention" and f"blk.{i}.attn_v.weight" not in keys.tensors]
    config["attention_k_eq_v"] = bool(one or not kept)
    if config["attention_k_eq_v"]:
        config["num_global_key_value_heads"] = whole
    elif whole != local:
        found = f"{local} in layers with windows, {whole} in others"
        keys.refuse(KV_HEADS, found, "the same in all layers, where global ones have values of their own")
    config["num_kv_shared_layers"] = len(kinds) - len(kept)
    return int(sizes[0])


def _heads_by_kind(keys: Keys, config: Config, heads: int) -> tuple[int, int]:
    """The key/value heads of global layers, and of local ones, of which there may be none."""
    counts = _by_layer(keys, config, KV_HEADS, heads)
    by_kind = dict(zip(config["layer_types"], counts, strict=True))
    divide = all(type(count) is int and count > 0 and heads % count == 0 for count in counts)
    if not divide or counts != [by_kind[kind] for kind in config["layer_types"]]:
        keys.refuse(KV_HEADS, counts, f"divisors of {heads}, the heads of queries, one for each kind of layer")
    return by_kind["full_attention"], by_kind.get("sliding_attention", counts[0])


def gemma4_widths(keys: Keys, config: Config) -> None:
    """Layers without keys of their own may have MLPs twice as wide."""
    key, kept = "feed_forward_length", config["num_hidden_layers"] - config["num_kv_shared_layers"]
    widths = _by_layer(keys, config, key)
    width = config["intermediate_size"] = widths[0]
    doubled = config["use_double_wide_mlp"] = len(set(widths)) > 1
    whole = type(width) is int and 0 < width <= WIDEST
    if not whole or widths != [width] * kept + [width * (1 + doubled)] * (len(widths) - kept):
        keys.refuse(key, widths, "a number, in layers without keys of their own perhaps twice as large")


def gemma4(keys: Keys, config: Config) -> None:
    config["hidden_size_per_layer_input"] = keys.whole("embedding_length_per_layer_input", 0, 0)
    config["vocab_size_per_layer_input"] = config["vocab_size"]
    config["final_logit_softcapping"] = keys.real("final_logit_softcapping", 0.0) or None
    config["rope_parameters"] = proportional(keys, config["rope_parameters"], config["global_head_dim"])
    config["rope_parameters"] = _rope_by_kind(keys, config)


def gpt2(keys: Keys, config: Config) -> None:
    if (shared := config.pop("num_key_value_heads")) != config["n_head"]:
        keys.refuse(KV_HEADS, shared, f"{config['n_head']}, as many as heads")


def parallel(keys: Keys, config: Config) -> None:
    config["use_parallel_residual"] = keys.switch("use_parallel_residual", True)


def gpt_neox(keys: Keys, config: Config) -> None:
    """No field says which GELU it is: GPT-NeoX 20B's is the approximate one, that of Pythia's models is not."""
    parallel(keys, config)
    if (config["num_hidden_layers"], config["hidden_size"]) == (44, 6144):
        config["hidden_act"] = "gelu_fast"


def kept_positions(keys: Keys, config: Config) -> None:
    """llama.cpp leaves rotary positions out of each fourth layer."""
    config["no_rope_layers"] = [int((layer + 1) % 4 != 0) for layer in range(config["num_hidden_layers"])]


def ministral(keys: Keys, config: Config) -> None:
    """YaRN whose attention factor cancels out, and queries that grow with their position; without both it is the text
    part of Mistral Small 3.1 and later.
    """
    multiplier = keys.real("rope.scaling.yarn_log_multiplier", 0.0)
    if config["rope_parameters"]["rope_type"] == "default" and not multiplier:
        keys.only("attention.temperature_scale", 0.0)
        config |= {"model_type": "mistral", "sliding_window": None}
        return
    if multiplier:
        config["rope_parameters"] |= {"mscale": 1.0, "mscale_all_dim": multiplier}
    config["rope_parameters"]["llama_4_scaling_beta"] = keys.real("attention.temperature_scale", 0.0)
    if config["rope_parameters"]["rope_type"] != "yarn":
        keys.refuse("rope.scaling.type", keys.word("rope.scaling.type", "missing"), "yarn")


def olmo(keys: Keys, config: Config) -> None:
    """OLMo 3 has windows."""
    if not keys.has("attention.sliding_window"):
        return
    _windows(keys, config, None, 4)
    rope = _rope_by_kind(keys, config, config["rope_parameters"]["rope_theta"])
    config |= {"model_type": "olmo3", "rope_parameters": rope}


def bare_norms(keys: Keys, config: Config) -> None:
    """OLMo 1: norms without weights, whose epsilon transformers writes in its code."""
    epsilon = config.pop("bare_norm_eps")
    if abs(epsilon - 1e-5) > CLOSE:
        keys.refuse("attention.layer_norm_epsilon", epsilon, "1e-05")
    config["clip_qkv"] = config["clip_qkv"] or None  # llama.cpp's 0: none


def exaone(keys: Keys, config: Config) -> None:
    """The 32B has windows, and no positions in the layers without; llama.cpp knows it by its layers."""
    config["sliding_window"] = None
    _windows(keys, config, 4096 if config["num_hidden_layers"] == 64 else None, 4)


def cohere(keys: Keys, config: Config) -> None:
    _windows(keys, config, None, 4)


def _each(keys: Keys, config: Config, key: str) -> list[Any]:
    """The values of a key that has one for each layer."""
    values, layers = keys.raw(key), config["num_hidden_layers"]
    if not isinstance(values, list) or len(values) not in (layers, keys.raw("block_count")):
        keys.refuse(key, values, f"{layers} numbers, one for each layer")
    return values[:layers]  # more: of layers that draft


def _by_layer(keys: Keys, config: Config, key: str, default: Any = REQUIRED) -> list[Any]:
    """The values of a key that has one for each layer, or one for all."""
    if isinstance(keys.values.get(key), list):
        return _each(keys, config, key)
    return [keys.whole(key, default)] * config["num_hidden_layers"]


def _kinds(keys: Keys, config: Config, other: str) -> list[str]:
    """Layers with heads of keys attend; those without are of the `other` kind."""
    return ["full_attention" if count else other for count in _each(keys, config, KV_HEADS)]


def lfm(keys: Keys, config: Config) -> None:
    config["layer_types"] = _kinds(keys, config, "conv")
    config["conv_L_cache"] = keys.whole("shortconv.l_cache")


def lfm_experts(keys: Keys, config: Config) -> None:
    """The first layers have an MLP; a sigmoid makes scores of a router's outputs, and the file must say so."""
    lfm(keys, config)
    if (kind := keys.whole("expert_gating_func")) != SIGMOID:
        keys.refuse("expert_gating_func", kind, f"{SIGMOID}, the sigmoid")
    config["num_dense_layers"] = keys.whole("leading_dense_block_count", 0, 0)
    config["routed_scaling_factor"] = keys.real("expert_weights_scale", 1.0) or 1.0  # llama.cpp's 0: none


def ernie_experts(keys: Keys, config: Config) -> None:
    """The first layers, and all but every n-th of the others, have an MLP."""
    config["moe_layer_start_index"] = keys.whole("leading_dense_block_count", 0, 0)
    config["moe_layer_interval"] = keys.whole("interleave_moe_layer_step", 1)
    config["moe_num_shared_experts"] = keys.whole("expert_shared_count", 0, 0)
    config["moe_layer_end_index"] = -1


def gpt_oss(keys: Keys, config: Config) -> None:
    """Each second layer has a window; YaRN's bounds are not rounded to whole numbers."""
    _windows(keys, config, None, 2)
    if config["rope_parameters"]["rope_type"] == "yarn":
        config["rope_parameters"]["truncate"] = False


def _state(keys: Keys) -> dict[str, int]:
    """Sizes of recurrent states, by the keys' names."""
    sizes = {name: keys.whole(f"ssm.{name}") for name in STATE}
    key_heads, heads = sizes["group_count"], sizes["time_step_rank"]
    if heads % key_heads:
        keys.refuse("ssm.time_step_rank", heads, f"a multiple of {key_heads}, the heads of keys")
    if sizes["inner_size"] % heads:
        keys.refuse("ssm.inner_size", sizes["inner_size"], f"a multiple of {heads}, the heads of values")
    return sizes


def _state_space(keys: Keys, config: Config) -> int:
    """Adds the sizes of states of Mamba-2; returns the width of all heads together."""
    sizes = _state(keys)
    config |= {
        "mamba_d_conv": sizes["conv_kernel"],
        "mamba_d_state": sizes["state_size"],
        "mamba_n_groups": sizes["group_count"],
        "mamba_n_heads": sizes["time_step_rank"],
        "mamba_d_head": sizes["inner_size"] // sizes["time_step_rank"],
    }
    return sizes["inner_size"]


def falcon_h1(keys: Keys, config: Config) -> None:
    config["mamba_d_ssm"] = _state_space(keys, config)


def _expanded(keys: Keys, config: Config) -> None:
    """States whose heads together are a multiple of the model's width."""
    inner, width = _state_space(keys, config), config["hidden_size"]
    if inner % width:
        keys.refuse("ssm.inner_size", inner, f"a multiple of {width}, the model's width")
    config["mamba_expand"] = inner // width


def granite_shared(keys: Keys, config: Config) -> None:
    config["shared_intermediate_size"] = keys.whole("expert_shared_feed_forward_length")


def granite_hybrid(keys: Keys, config: Config) -> None:
    """Layers without attention are Mamba-2; their MLP is what all rows of a mixture share."""
    keys.switch("rope.scaling.finetuned", REQUIRED)  # whether there are positions at all: False, else it is a Bamba
    _expanded(keys, config)
    config["layer_types"] = _kinds(keys, config, "linear_attention")
    granite_shared(keys, config)


def bamba(keys: Keys, config: Config) -> None:
    _expanded(keys, config)
    kinds = _kinds(keys, config, "linear_attention")
    config["attn_layer_indices"] = [layer for layer, kind in enumerate(kinds) if kind == "full_attention"]


def nemotron_h(keys: Keys, config: Config, wide: str = "mlp") -> None:
    """A layer attends, is an MLP (or what `wide` says), or keeps a state of Mamba-2 where it has neither heads of keys
    nor a width."""
    kinds, key = _kinds(keys, config, "linear_attention"), "feed_forward_length"
    for layer, width in enumerate(_each(keys, config, key)):
        if width and kinds[layer] == "full_attention":
            keys.refuse(key, width, f"0 in layer {layer}, which has heads of keys")
        kinds[layer] = wide if width else kinds[layer]
    sizes = _state(keys)
    config |= {
        "layers_block_type": kinds,
        "conv_kernel": sizes["conv_kernel"],
        "ssm_state_size": sizes["state_size"],
        "n_groups": sizes["group_count"],
        "mamba_num_heads": sizes["time_step_rank"],
        "mamba_head_dim": sizes["inner_size"] // sizes["time_step_rank"],
    }
    keys.only("attention.layer_norm_rms_epsilon", config["layer_norm_epsilon"])  # llama.cpp reads it if it is there


def nemotron_experts(keys: Keys, config: Config) -> None:
    nemotron_h(keys, config, "moe")
    _routed(keys, config)
    config["moe_shared_expert_intermediate_size"] = keys.whole("expert_shared_feed_forward_length")
    config["moe_latent_size"] = keys.whole("moe_latent_size", None)


def _routed(keys: Keys, config: Config) -> None:
    """How experts are chosen and added up in DeepSeek V3 and those after it."""
    config |= {
        "n_shared_experts": keys.whole("expert_shared_count"),
        "norm_topk_prob": keys.switch("expert_weights_norm", False),
        "routed_scaling_factor": keys.real("expert_weights_scale", 1.0) or 1.0,  # llama.cpp's 0: none
        "n_group": keys.whole("expert_group_count", 1),
        "topk_group": keys.whole("expert_group_used_count", 1),
    }


def glm_experts(keys: Keys, config: Config) -> None:
    dense_first(keys, config)


def dense_first(keys: Keys, config: Config) -> None:
    """The same after some layers with an MLP."""
    _routed(keys, config)
    config["first_k_dense_replace"] = keys.whole("leading_dense_block_count", 0, 0)


def latent_heads(keys: Keys, config: Config, heads: int) -> int:
    """Adds the sizes of heads that attend to states; returns how much of a key positions turn. Newer files hold the
    maps of heads as they are applied, and say the sizes of what is kept beside those of a head."""
    config["num_key_value_heads"], rank = heads, keys.whole("attention.kv_lora_rank")
    turned, length = keys.whole("rope.dimension_count"), "attention.key_length_mla"
    if keys.has(length):
        for name, kept in (("head_count_kv", 1), ("key_length", rank + turned), ("value_length", rank)):
            keys.only(f"attention.{name}", kept)
        values = keys.whole("attention.value_length_mla")
    else:
        length = "attention.key_length"
        keys.only(KV_HEADS, heads)
        values = keys.whole("attention.value_length")
    if (width := keys.whole(length)) <= turned:
        keys.refuse(length, width, f"more than {turned}, the part of it that positions turn")
    config |= {
        "kv_lora_rank": rank,
        "q_lora_rank": keys.whole("attention.q_lora_rank", None),
        "qk_rope_head_dim": turned,
        "qk_nope_head_dim": width - turned,
        "v_head_dim": values,
    }
    return int(turned)


def latent(keys: Keys, config: Config) -> None:
    """YaRN's factor of scores, in transformers of what a multiplier of its logarithm gives."""
    if (multiplier := keys.real("rope.scaling.yarn_log_multiplier", 0.0)) and "factor" in config["rope_parameters"]:
        both = dict.fromkeys(("mscale", "mscale_all_dim"), float(f"{10 * multiplier:.6g}"))
        config["rope_parameters"] |= both


def latent_experts(keys: Keys, config: Config) -> None:
    """DeepSeek V2, of which files need not say how scores are made, or V3 and those after it."""
    latent(keys, config)
    dense_first(keys, config)
    corrected = config.pop("corrected")
    if (kind := keys.whole("expert_gating_func", SIGMOID if corrected else SOFTMAX)) == SIGMOID:
        return
    if kind != SOFTMAX:
        keys.refuse("expert_gating_func", kind, f"{SOFTMAX} or {SIGMOID}, softmax or sigmoid")
    config |= {"model_type": "deepseek_v2", "topk_method": "greedy"}
    if (width := config["hidden_size"]) % (heads := config["num_attention_heads"]):
        keys.refuse("embedding_length", width, f"a multiple of {heads}, the heads")
    for key, name in (("expert_group_count", "n_group"), ("expert_group_used_count", "topk_group")):
        keys.only(key, 1)
        config.pop(name)
    keys.only("expert_weights_norm", False)


def qwen35(keys: Keys, config: Config) -> None:
    """Each fourth layer attends, the others keep a recurrent state."""
    layers, sizes = config["num_hidden_layers"], _state(keys)
    key_heads, heads = sizes["group_count"], sizes["time_step_rank"]
    config["linear_conv_kernel_dim"] = sizes["conv_kernel"]
    config["linear_num_key_heads"], config["linear_key_head_dim"] = key_heads, sizes["state_size"]
    config["linear_num_value_heads"], config["linear_value_head_dim"] = heads, sizes["inner_size"] // heads
    interval, key = keys.whole("full_attention_interval", 4), "attention.recurrent_layers"
    kept = keys.raw(key) if keys.has(key) else [(layer + 1) % interval != 0 for layer in range(layers)]
    if not isinstance(kept, list) or len(kept) < layers or not all(isinstance(keeps, bool) for keeps in kept):
        keys.refuse(key, kept, f"true or false for each of {layers} layers")
    config["layer_types"] = ["linear_attention" if keeps else "full_attention" for keeps in kept[:layers]]


def shared_expert(keys: Keys, config: Config) -> None:
    config["shared_expert_intermediate_size"] = keys.whole("expert_shared_feed_forward_length")


def qwen35_experts(keys: Keys, config: Config) -> None:
    qwen35(keys, config)
    shared_expert(keys, config)
