"""Writes GGUF files of tiny random models with the `gguf` package, as llama.cpp's converters would.

Names of tensors come from that package's own table, so that they are not this project's word for it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

CONTROL, USER_DEFINED, NORMAL, BYTE, UNKNOWN = 3, 4, 1, 6, 2
SPECIAL = ["<pad>", "</s>", "<s>", "<unk>", "<end>"]  # ids 0 to 4: the unknown one is not 0
PAD, EOS, BOS, UNK, EOT = range(5)
MERGES = ["t h", "th e", "Ġ the", "i n", "a n", "an d", "Ġ and", "e r", "1 2", "Ġ Ġ"]
PIECES = ["th", "the", "▁the", "in", "an", "and", "▁and", "er", "▁t", "▁a", "he"]
PERMUTED = {"llama", "granite", "smollm3", "arcee", "mistral3", "olmo", "granitemoe", "granitehybrid"}
PERMUTED |= {"nemotron_h", "nemotron_h_moe"}
XIELU = "xielu."  # keys that are not below the architecture
ONE_ADDED = {"gemma", "gemma2", "gemma3", "nemotron", "qwen35", "qwen35moe", "qwen3next"}


def byte_letters() -> list[str]:
    """The 256 letters of byte-level BPE."""
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


def bpe_vocabulary(pre: str = "smollm") -> dict[str, Any]:
    """Metadata of a byte-level tokenizer."""
    tokens = [*SPECIAL, "<user defined>", *byte_letters(), *("".join(merge.split()) for merge in MERGES)]
    types = [CONTROL] * 5 + [USER_DEFINED] + [NORMAL] * (len(tokens) - 6)
    return {"model": "gpt2", "pre": pre, "tokens": tokens, "token_type": types, "merges": MERGES}


def sentencepiece_vocabulary() -> dict[str, Any]:
    """Metadata of a tokenizer with scores and bytes."""
    letters = ["▁", *(chr(code) for code in range(33, 127))]
    tokens = [*SPECIAL, "  ", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES, *letters]
    types = [CONTROL] * 3 + [UNKNOWN, CONTROL, USER_DEFINED] + [BYTE] * 256 + [NORMAL] * (len(PIECES) + len(letters))
    scores = [-1000.0] * 262 + [-float(rank) for rank in range(len(PIECES) + len(letters))]
    return {"model": "llama", "pre": "default", "tokens": tokens, "token_type": types, "scores": scores}


def tiny_model(model_type: str, seed: int = 0, **fields: Any) -> PreTrainedModel:
    """A random model whose every weight matters."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(model_type, **deepcopy(fields))  # which configs complete
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 0.3 if parameter.dim() > 1 else 0.1
            parameter.add_(torch.randn_like(parameter) * scale)
            if name.endswith(".bias"):
                parameter.add_(0.1)
        if model_type == "youtu":  # as transformers does when it loads one
            model.get_input_embeddings().weight[config.pad_token_id] = 0
        for name, buffer in model.named_buffers():
            if name.endswith("act_fn.beta"):  # Apertus'
                buffer.add_(0.1)
            if name.endswith("layer_scalar"):  # Gemma 4's
                buffer.mul_(0.7)
            if name.endswith(("expert_bias", "correction_bias")):  # LFM2's and Nemotron's
                buffer.add_(torch.randn_like(buffer) * 0.1)
    return model


def stored(
    model: PreTrainedModel, architecture: str, drafting: Mapping[str, torch.Tensor] | None = None
) -> dict[str, np.ndarray]:
    """The model's tensors, and those of a layer that drafts, under their GGUF names, laid out as llama.cpp has them."""
    arch = next((key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture), None)
    if arch is None:
        pytest.skip(f"this gguf package has no {architecture}")
    names, around = (
        gguf.get_tensor_name_map(one, model.config.num_hidden_layers + 1) for one in (arch, gguf.MODEL_ARCH.GLM4_MOE)
    )  # the second: of a drafting layer's norms and map, which the package tells for fewer architectures than llama.cpp
    found: dict[str, np.ndarray] = {}
    stacked: dict[str, list[np.ndarray]] = {}
    for name, tensor in {**model.state_dict(), **(drafting or {})}.items():
        stem, _, suffix = name.rpartition(".")
        if (name == "lm_head.weight" and model.config.tie_word_embeddings) or stem.endswith("act_fn"):
            continue  # Apertus' activation is in keys
        if "layernorm.norms" in stem:  # StableLM's norms of each head
            stacked.setdefault(f"{stem.rpartition('.norms')[0]}.{suffix}", []).append(tensor.detach().float().numpy())
            continue
        values, name = laid_out(tensor.detach().float().numpy(), name, model.config, architecture)
        if stem.endswith(".router") and suffix.endswith("scale"):  # Gemma 4's
            part = "ffn_gate_inp.scale" if suffix == "scale" else "ffn_down_exps.scale"
            parts = {f"blk.{stem.split('.')[2]}.{part}": values}
        elif architecture == "gemma4" and stem.endswith(".experts"):  # gate and up in one, as in the checkpoint
            parts = {str(names.get_name(f"{name}.weight", (".weight",))): values}
        elif stem.endswith(".experts"):  # stacked by transformers
            holder = re.sub("block_sparse_moe|mixer", "mlp", stem)  # as the converter writes them
            kind = "bias" if suffix.endswith("_bias") else "weight"
            own = experts(values, suffix, architecture == "gpt-oss").items()
            parts = {f"{names.get_name(f'{holder}.{part}_proj')}.{kind}": part_values for part, part_values in own}
        elif stem.endswith("in_proj_qkvz"):  # of each head of keys, which llama.cpp has one after the other
            keys, width = model.config.linear_num_key_heads, model.config.linear_key_head_dim
            each = model.config.linear_num_value_heads // keys * model.config.linear_value_head_dim
            of_keys = np.split(values.reshape(keys, -1, values.shape[-1]), np.cumsum([width, width, each]), axis=1)
            *first, gates = (part.reshape(-1, values.shape[-1]) for part in of_keys)
            start = f"blk.{stem.split('.')[2]}.attn_"
            parts = {f"{start}qkv.{suffix}": np.concatenate(first), f"{start}gate.{suffix}": gates}
        elif stem.endswith("kv_b_proj"):  # the maps of each head, that of keys turned round
            of_heads = values.reshape(model.config.num_attention_heads, -1, values.shape[-1])
            keys, of_values = np.split(of_heads, [model.config.qk_nope_head_dim], axis=1)
            start = f"blk.{stem.split('.')[2]}.attn_"
            parts = {f"{start}k_b.{suffix}": keys.swapaxes(1, 2), f"{start}v_b.{suffix}": of_values}
        elif "shared_mlp" in stem:  # Granite's, in dense Granite 4 the only MLP
            layer, maps = stem.split(".")[2], ("gate", "up") if stem.endswith("input_linear") else ("down",)
            own = zip(maps, np.split(values, len(maps)), strict=True)
            end = "_shexp" if model.config.num_local_experts else ""
            parts = {f"blk.{layer}.ffn_{part}{end}.{suffix}": part_values for part, part_values in own}
        else:
            ends = ".weight", ".bias"
            known = names.get_name(name, ends) or around.get_name(name, ends) or later(name)
            parts = {str(known): values}
        found |= {path: np.ascontiguousarray(part) for path, part in parts.items()}
    for name, pieces in stacked.items():
        found[str(names.get_name(name, (".weight", ".bias")))] = np.stack(pieces)
    if architecture == "gemma4":  # which part of a head positions turn in global layers
        config = model.config
        wide = config.per_layer_config[config.layer_types.index("full_attention")].head_dim // 2
        turned = int(wide * config.rope_parameters["full_attention"]["partial_rotary_factor"])
        found["rope_freqs.weight"] = np.array([1.0] * turned + [1e30] * (wide - turned), np.float32)
    assert not any(name.startswith("None") for name in found), found.keys()
    return found


def later(name: str) -> str | None:
    """What newer versions of the `gguf` package say of the latents of experts."""
    part = {"fc1_latent_proj": "ffn_latent_down", "fc2_latent_proj": "ffn_latent_up"}.get(name.split(".")[-2])
    return part and f"blk.{name.split('.')[2]}.{part}.weight"


def laid_out(values: np.ndarray, name: str, config: Any, architecture: str) -> tuple[np.ndarray, str]:
    """A tensor as llama.cpp has it, and the name that its own has in the `gguf` package's table."""
    stem, _, suffix = name.rpartition(".")
    heads = config.num_attention_heads
    if architecture in PERMUTED and stem.endswith(("q_proj", "k_proj")):
        count = heads if stem.endswith("q_proj") else config.num_key_value_heads
        values = values.reshape(count, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
    if architecture == "falcon-h1":
        values = values * multiplier(name, config)
    if architecture.startswith("nemotron_h"):
        name = name.replace("model.", "backbone.", 1)  # of the file that is published
    if ".linear_attn." in name or ".mamba." in name or ".mixer." in name:
        if architecture == "qwen3next":  # in the order of the checkpoint
            values = values.squeeze(1) if name.endswith("conv1d.weight") else values
            values = -np.exp(values) if name.endswith("A_log") else values
            return values, name.replace("dt_bias", "dt_proj.bias")
        return (recurrent if ".linear_attn." in name else state_space)(values, name, config)
    if architecture in ONE_ADDED and name.endswith("norm.weight"):
        values = values + np.float32(1)
    if architecture == "gpt2" and stem.endswith(("c_attn", "c_proj", "c_fc")) and suffix == "weight":
        values = values.T
    if architecture == "gptneox" and stem.endswith("query_key_value"):
        values = values.reshape(heads, 3, -1, *values.shape[1:]).swapaxes(0, 1).reshape(values.shape)
    if stem.endswith("conv.conv"):  # LFM2's
        values = values.squeeze(1)
    if suffix in ("sinks", "layer_scalar", "expert_bias"):
        return values, f"{name}.{'bias' if suffix == 'expert_bias' else 'weight'}"
    if suffix == "e_score_correction_bias":
        return values.reshape(-1), f"{stem.replace('gate.', '')}.e_score_correction.bias"
    # of the file that is published
    return values, name.replace("block_sparse_moe.router", "block_sparse_moe.router.layer")


def experts(values: np.ndarray, stack: str, turned: bool) -> dict[str, np.ndarray]:
    """The maps or biases in a stack of transformers. `turned`: maps are [in, out], outputs of gate and up in turn."""
    values = values.swapaxes(1, 2) if turned and values.ndim == 3 else values
    if stack.startswith(("down", "up")):
        return {stack.partition("_")[0]: values}
    gate, up = (values[:, ::2], values[:, 1::2]) if turned else np.split(values, 2, axis=1)
    return {"gate": gate, "up": up}


def recurrent(values: np.ndarray, name: str, config: Any) -> tuple[np.ndarray, str]:
    """A tensor of Qwen3.5's layers with a state, and its name: value heads are in the order in which llama.cpp repeats
    key heads, the first of each, then the second of each."""
    keys, heads = config.linear_num_key_heads, config.linear_num_value_heads
    part, width = name.split(".")[4], config.linear_value_head_dim
    order = np.arange(heads).reshape(keys, -1).T.reshape(-1)  # of heads, in the file
    rows = (order[:, None] * width + np.arange(width)).reshape(-1)
    first = 2 * keys * config.linear_key_head_dim
    if part in ("in_proj_qkv", "conv1d"):
        values = values.squeeze(1) if part == "conv1d" else values
        return np.concatenate([values[:first], values[first:][rows]]), name
    if part == "in_proj_z":
        return values[rows], name
    if part == "out_proj":
        return values[:, rows], name
    if part == "A_log":
        return -np.exp(values[order]), name
    if part == "dt_bias":
        return values[order], name.replace("dt_bias", "dt_proj.bias")
    return (values[order] if part in ("in_proj_a", "in_proj_b") else values), name


def multiplier(name: str, config: Any) -> np.ndarray:
    """What llama.cpp's converter multiplies a tensor of Falcon-H1 by: a number, or one for each row."""
    keys, (gate, down) = config.mamba_n_groups * config.mamba_d_state, config.mlp_multipliers
    parts = config.mamba_d_ssm, config.mamba_d_ssm, keys, keys, config.mamba_n_heads
    given = {
        "q_proj": config.attention_in_multiplier,
        "k_proj": config.key_multiplier * config.attention_in_multiplier,
        "v_proj": config.attention_in_multiplier,
        "o_proj": config.attention_out_multiplier,
        "in_proj": np.repeat(config.ssm_multipliers, parts)[:, None] * config.ssm_in_multiplier,
        "out_proj": config.ssm_out_multiplier,
        "gate_proj": gate,
        "down_proj": down,
        "embed_tokens": config.embedding_multiplier,
        "lm_head": config.lm_head_multiplier,
    }
    return np.asarray(given.get(name.split(".")[-2], 1.0), np.float32)


def state_space(values: np.ndarray, name: str, config: Any) -> tuple[np.ndarray, str]:
    """A tensor of a layer of Mamba-2, and its name."""
    part, groups = ".".join(name.split(".")[4:]), "n_groups" if ".mixer." in name else "mamba_n_groups"
    if part == "conv1d.weight":
        values = values.squeeze(1)
    elif part == "norm.weight":
        values = values.reshape(getattr(config, groups), -1)
    elif part in ("A_log", "D"):
        values = (-np.exp(values) if part == "A_log" else values)[:, None]
    return values, name.replace(".dt_bias", ".dt_proj.bias").replace("correction_bias", "correction.bias")


def sizes(model: PreTrainedModel, **more: Any) -> dict[str, Any]:
    """The keys that every architecture has, below its name."""
    config = model.config
    keys = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": getattr(config, "intermediate_size", None) or config.n_inner,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": more.get("attention.head_count_kv") or getattr(config, "num_key_value_heads", None),
    }
    for key, names in {
        "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "norm_eps"),
        "attention.layer_norm_epsilon": ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"),
    }.items():
        keys[key] = next((getattr(config, name) for name in names if hasattr(config, name)), None)
    for name, tensor in model.state_dict().items():
        if ".act_fn." in name:
            keys.setdefault(f"{XIELU}{name.rpartition('.')[2]}", []).append(tensor.item())
    return {key: value for key, value in (keys | more).items() if value is not None}


def special_keys(**more: Any) -> dict[str, Any]:
    """Special tokens, below `tokenizer.ggml`; None leaves one out."""
    keys = {
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "unknown_token_id": UNK,
        "padding_token_id": PAD,
        "add_bos_token": True,
        "add_space_prefix": False,
    }
    return {key: value for key, value in (keys | more).items() if value is not None}


def write_gguf(
    path: Path,
    architecture: str,
    keys: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    vocabulary: Mapping[str, Any] | None = None,
    specials: Mapping[str, Any] | None = None,
    others: Mapping[str, Any] | None = None,
    split: int = 0,
    kinds: Mapping[str, Any] | None = None,
) -> Path:
    """Writes the file; `split` tensors go into each part of a model in parts, whose last file is returned. `kinds` are
    the quantizations of tensors that are given as raw bytes.
    """
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=split)
    words = {key if key.startswith(XIELU) else f"{architecture}.{key}": value for key, value in keys.items()}
    tokens = dict(vocabulary or bpe_vocabulary()) | dict(special_keys() if specials is None else specials)
    words |= {f"tokenizer.ggml.{key}": value for key, value in tokens.items()} | dict(others or {})
    for key, value in words.items():
        add_key(writer, key, value)
    for name, values in tensors.items():
        writer.add_tensor(name, values, raw_dtype=None if kinds is None else kinds.get(name))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path if not split else sorted(path.parent.glob(f"{path.stem}-*-of-*.gguf"))[-1]


def add_key(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Adds a key with the type that the value has."""
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    if type(value) in kinds:
        kinds[type(value)](key, value)
    else:
        writer.add_array(key, list(value))
