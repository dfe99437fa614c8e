"""Tiny random Llama bundles through the real exporter, made on the spot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from streamspec.acceptance_stats import Acceptance
from streamspec.adapters.base_models.resolve import resolve_base
from streamspec.adapters.drafters.draft_layer.config import DraftLayerConfig
from streamspec.adapters.drafters.draft_layer.model import DraftLayerModel
from streamspec.export import Target, export_bundle
from streamspec.export.deployment_target import PLAIN_CPU
from tests.support.byte_tokenizers import bytes_and_words
from tests.support.tiny_models import tiny_model, tiny_tokenizer

HIDDEN, GAMMA, VOCAB = 32, 3, 64
LINEAR = {  # rows and columns
    "self_attn.q_proj": (32, 32),
    "self_attn.k_proj": (16, 32),
    "self_attn.v_proj": (16, 32),
    "self_attn.o_proj": (32, 32),
    "mlp.gate_proj": (64, 32),
    "mlp.up_proj": (64, 32),
    "mlp.down_proj": (32, 64),
}


def tiny_base(folder: Path, chat: bool = False) -> Path:
    """A Hugging Face folder: 4 layers, hidden 32, vocabulary 64, context 128."""
    torch.set_num_threads(1)
    tiny_model("llama", initializer_range=0.5).save_pretrained(folder)
    tiny_tokenizer(chat).save_pretrained(folder)
    return folder


def lettered_base(folder: Path, eos: bool = True) -> Path:
    """As `tiny_base`, with a tokenizer that can write anything: all bytes, and words that JSON is made of. Context
    256.
    """
    torch.set_num_threads(1)
    words = ('{"', '"}', '",', "true", "false", "null", 'Ġ"', '":', "na", "name", "me", "12")
    tokenizer = bytes_and_words(["<pad>", "<s>", "</s>"], words)
    named = {"bos_token": "<s>", "pad_token": "<pad>"} | ({"eos_token": "</s>"} if eos else {})
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named).save_pretrained(folder)
    size = tokenizer.get_vocab_size() + 5  # a model's vocabulary may be larger than its tokenizer's
    changes = {"vocab_size": size, "max_position_embeddings": 256, "initializer_range": 0.5}
    tiny_model("llama", **changes | ({} if eos else {"eos_token_id": None})).save_pretrained(folder)
    return folder


def tiny_adapter(
    folder: Path,
    base: Path,
    streams: bool = True,
    kind: str = "raw",
    full: bool = False,
    root_token: bool = True,
    exits: tuple[int, ...] = (),
) -> Path:
    """Random streams; `full`: with a LoRA of their own, a draft vocabulary and a bigram. The recorded ranks make a tree
    of many first-level candidates, so that some come true at random.
    """
    random = np.random.default_rng(0)
    identity = resolve_base(base, lambda line: None)
    folder.mkdir()
    described = {
        "gamma": GAMMA,
        "ns": 2,
        "scale": 1.0,
        "positions": "shifted",
        "root_token": root_token,
        "lora": None,
        "draft_vocab": None,
        "pruning": 4,
    }
    config = {
        "format_version": 1,
        "method": "streaming" if streams else "lora",
        "recipe": "joint" if streams else None,
        "base": {"id": identity.id, "sha256": identity.sha256, "model_type": "llama"},
        "prompt_format": {"kind": kind, "separator": "\n"},
        "streams": described if streams else None,
    }
    (folder / "streamspec_config.json").write_text(json.dumps(config))
    if streams:
        tensors = {
            "stream_embeddings": random.normal(size=(GAMMA, HIDDEN)),
            "root_map": random.normal(size=(HIDDEN, HIDDEN)) * 0.2,
            "prune_down": random.normal(size=(4, HIDDEN)) * 0.2,
            "prune_up": random.normal(size=(HIDDEN, 4)) * 0.2,
        }
        if exits:
            described["exit_layers"] = list(exits)
            tensors |= {name: np.stack([tensors[name]] * len(exits)) for name in ("prune_down", "prune_up")}
        if not root_token:
            del tensors["root_map"]
        if full:
            described |= {"lora": {"rank": 2, "alpha": 2.0}, "draft_vocab": 48, "bigram": 3}
            tensors |= {"bigram_in": random.normal(size=(48, 3)), "bigram_out": random.normal(size=(48, 3))}
            for layer in (2, 3):
                for module, (out, width) in LINEAR.items():
                    name = f"layers.{layer}.{module}.lora_"
                    tensors |= {
                        f"{name}A": random.normal(size=(2, width)) * 0.2,
                        f"{name}B": random.normal(size=(out, 2)) * 0.2,
                    }
        vocabulary = {"draft_vocab": np.sort(random.permutation(VOCAB)[:48])} if full else {}
        (folder / "streamspec_config.json").write_text(json.dumps(config))
        save_file({k: v.astype(np.float16) for k, v in tensors.items()} | vocabulary, folder / "streamspec.safetensors")
        ranks = random.integers(0, 10, size=(200, GAMMA)).tolist()
        Acceptance(GAMMA, 10, [ranks]).save(folder / "acceptance.json")
    return folder


def draft_layer(folder: Path, base: Path, method: str) -> Path:
    """An untrained draft layer, dealt from the base's last one."""
    adapter = tiny_adapter(folder, base)
    torch.manual_seed(0)
    shape = (
        DraftLayerConfig(GAMMA, 1, 1, False, False)
        if method == "eagle"
        else DraftLayerConfig(GAMMA, two_lists=method == "lists")
    )
    method = "eagle" if method == "eagle" else "jakiro"
    layer = DraftLayerModel(AutoModelForCausalLM.from_pretrained(base), shape)
    config = json.loads((adapter / "streamspec_config.json").read_text())
    config |= {"method": method, "recipe": "staged", "streams": layer.described() | {"draft_vocab": None}}
    (adapter / "streamspec_config.json").write_text(json.dumps(config))
    save_file(
        {k: v.detach().half().numpy() for k, v in layer.drafter_tensors().items()}, adapter / "streamspec.safetensors"
    )
    return adapter


def tiny_bundle(
    folder: Path,
    precision: str = "fp32",
    streams: bool = True,
    kind: str = "raw",
    full: bool = False,
    method: str = "",
    target: Target = PLAIN_CPU,
    base: Path | None = None,
    kv_cache_dtype: str = "float32",
    root_token: bool = True,
    when: str = "deferred",
    embeddings: bool = False,
) -> Path:
    """A bundle of a tiny base and a random adapter. `when`: its streams run."""
    base = base or tiny_base(folder / "base", chat=kind == "chat")
    adapter = (
        draft_layer(folder / "adapter", base, method)
        if method
        else tiny_adapter(folder / "adapter", base, streams, kind, full, root_token)
    )
    options: dict[str, Any] = {"target": target, "kv_cache_dtype": kv_cache_dtype, "streams": when}
    options["embeddings"] = embeddings
    export_bundle(base, adapter, folder / "bundle", precision, progress=lambda line: None, **options)
    return folder / "bundle"
