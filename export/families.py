"""What the graph needs to know of a decoder, read off a Hugging Face causal LM: sizes, rotary frequencies, which parts exist.

One description per family says only what the modules themselves cannot tell. Knows nothing about ONNX or precisions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamspec.errors import BaseModelError

ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh")
FIXED_ROPE = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class Family:
    """`qk_norm`: queries and keys pass an RMSNorm per head. `window_flag`: config switch without which windows are off."""

    qk_norm: bool = False
    window_flag: str | None = None


FAMILIES = {
    "llama": Family(),
    "mistral": Family(),
    "qwen2": Family(window_flag="use_sliding_window"),
    "qwen3": Family(qk_norm=True, window_flag="use_sliding_window"),
}


@dataclass(frozen=True)
class DecoderSpec:
    """One pre-norm RoPE decoder with RMSNorm and a gated MLP. Weight names are Hugging Face's (`weight_name`)."""

    model_type: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context_length: int
    eps: float
    activation: str
    qk_norm: bool
    tied: bool
    windows: tuple[int | None, ...]  # per layer: how many positions back a row may look, itself included; None: all
    inv_freq: NDArray[np.float32]  # [head_dim / 2], from HF's own rotary embedding
    rope_scale: float  # HF's attention_scaling: cos and sin are multiplied by it
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.heads // self.kv_heads

    def weight_name(self, layer: int, module: str) -> str:
        """`module` as in HF: `self_attn.q_proj`, `mlp.up_proj`, `input_layernorm`, ..."""
        return f"model.layers.{layer}.{module}"

    def out_width(self, module: str) -> int:
        """Output size of a linear map of a layer."""
        kind = module.rsplit(".", 1)[-1]
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        wide = {"q_proj": queries, "k_proj": keys, "v_proj": keys, "gate_proj": self.intermediate, "up_proj": self.intermediate}
        return wide.get(kind, self.hidden)

    def in_width(self, module: str) -> int:
        """Input size of a linear map of a layer."""
        kind = module.rsplit(".", 1)[-1]
        return {"o_proj": self.heads * self.head_dim, "down_proj": self.intermediate}.get(kind, self.hidden)


def describe(model: Any) -> DecoderSpec:
    """DecoderSpec of a loaded HF causal LM. Raises BaseModelError for anything the graph would compute wrongly."""
    config = model.config
    if config.model_type not in FAMILIES:
        raise BaseModelError(
            f"model family `{config.model_type}`", ", ".join(FAMILIES), "export a base of one of these families"
        )
    family = FAMILIES[config.model_type]
    attention = model.model.layers[0].self_attn
    rotary = model.model.rotary_emb
    spec = DecoderSpec(
        model_type=config.model_type,
        layers=len(model.model.layers),
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=attention.head_dim,
        vocab=model.get_input_embeddings().weight.shape[0],
        context_length=config.max_position_embeddings,
        eps=config.rms_norm_eps,
        activation=config.hidden_act,
        qk_norm=family.qk_norm,
        tied=model.get_output_embeddings().weight is model.get_input_embeddings().weight,
        windows=_windows(config, family, len(model.model.layers)),
        inv_freq=rotary.inv_freq.detach().float().cpu().numpy(),
        rope_scale=float(rotary.attention_scaling),
        eos_token_ids=_eos(model),
        bos_token_id=config.bos_token_id,
    )
    _check(spec, str(getattr(rotary, "rope_type", "default")))
    return spec


def _windows(config: Any, family: Family, layers: int) -> tuple[int | None, ...]:
    window = getattr(config, "sliding_window", None)
    if window is None or (family.window_flag and not getattr(config, family.window_flag, False)):
        return (None,) * layers
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * layers
    return tuple(int(window) if kind == "sliding_attention" else None for kind in kinds)


def _eos(model: Any) -> tuple[int, ...]:
    """End tokens: those of the generation config, which often names more than the model's own."""
    generation = getattr(model, "generation_config", None)
    value = getattr(generation, "eos_token_id", None)
    if value is None:
        value = model.config.eos_token_id
    if value is None:
        return ()
    return tuple(value) if isinstance(value, (list, tuple)) else (int(value),)


def _check(spec: DecoderSpec, rope_type: str) -> None:
    if rope_type not in FIXED_ROPE:
        raise BaseModelError(
            f"rotary embedding of type `{rope_type}`", ", ".join(FIXED_ROPE), "its frequencies change with the length"
        )
    if spec.activation not in ACTIVATIONS:
        raise BaseModelError(f"activation `{spec.activation}`", ", ".join(ACTIVATIONS), "export another base")
    if spec.head_dim % 8 or len(spec.inv_freq) * 2 != spec.head_dim:
        raise BaseModelError(
            f"heads of {spec.head_dim} with {len(spec.inv_freq) * 2} rotated", "a multiple of 8, all rotated", "export another base"
        )
