"""Tiny bases and adapters of every exportable family, and step graphs made of them."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM

from streamspec.adapters.base_models.resolve import Base, resolve_base
from streamspec.captured.packed_call import CallSizes, captured_features
from streamspec.draft_tree import DraftTree
from streamspec.export.drafters.medusa.spec import MedusaSpec
from streamspec.export.drafters.streams.spec import StreamSpec
from streamspec.export.graphs.captured_step_graph import CapturedStepGraph
from streamspec.export.graphs.dynamic_step_graph import StepGraph
from streamspec.export.graphs.static_step_graph import StaticStepGraph
from streamspec.export.ops.builder import WeightStore
from streamspec.export.quantization.precisions import DEVICE_PRECISIONS, precision
from streamspec.export.quantization.static_precisions import static_precision
from streamspec.export.runners.captured_runner import CapturedGraph
from streamspec.export.runners.graph_runner import AnyRunner, open_session, stepper
from streamspec.export.spec.decoder_spec import DecoderSpec
from streamspec.export.spec.draft_spec import DraftSpec, PruningSpec, graph_features
from streamspec.export.validate.parity import PASSAGE
from streamspec.export.weights.load_weights import ModelSource
from streamspec.export.weights.model_spec import describe
from tests.support.latent_families import LATENT
from tests.support.mixture_families import MIXTURES
from tests.support.near_families import NEAR
from tests.support.recurrent_families import RECURRENT, with_memory

VOCAB, HIDDEN, LAYERS = 96, 64, 4
CAPTURED = CallSizes((1, 8, 16), 64)
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": False},
    "mistral": {"sliding_window": 6},
    "qwen2": {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2},
    "qwen3": {"head_dim": 32},
    "phi": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        "qk_layernorm": True,
    },
    "phi3": {
        "sliding_window": 7,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75},
    },
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": HIDDEN},
    "gpt2": {"n_embd": HIDDEN, "n_layer": LAYERS, "n_head": 4, "n_positions": 128, "n_inner": 96},
    "gemma2": {
        "sliding_window": 6,
        "head_dim": 24,
        "query_pre_attn_scalar": 30,
        "attn_logit_softcapping": 4.0,
        "final_logit_softcapping": 5.0,
    },
    "gemma3_text": {"sliding_window": 6, "sliding_window_pattern": 2, "head_dim": 24, "query_pre_attn_scalar": 30},
    "gemma4_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 6,
        "head_dim": 24,
        "global_head_dim": 32,
        "num_kv_shared_layers": 1,
        "hidden_size_per_layer_input": 32,
        "vocab_size_per_layer_input": VOCAB,
        "use_double_wide_mlp": True,
        "final_logit_softcapping": 5.0,
    },
    "olmo2": {"attention_bias": True},
    "olmo3": {
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    "exaone4": {"sliding_window": 6, "sliding_window_pattern": 2},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm3": {"layer_types": ["conv", "full_attention", "conv", "sliding_attention"], "head_dim": 16}
    | {"sliding_window": 6, "conv_L_cache": 5},
    "stablelm": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        "qk_layernorm": True,
        "use_qkv_bias": True,
    },
    "gpt_neox": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
    **NEAR,
}
OWN_SIZES = {  # settings that a family names otherwise or does not know
    "phi": ("num_key_value_heads",),
    "opt": ("num_key_value_heads", "intermediate_size"),
    "gpt_neox": ("num_key_value_heads",),
    "gpt2": (
        "num_key_value_heads",
        "intermediate_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "max_position_embeddings",
    ),
}


def tiny_model(family: str = "llama", tied: bool = True, seed: int = 0, **changes: Any) -> Any:
    """A random float32 causal LM; norms and biases are random too, so that none can be forgotten."""
    torch.manual_seed(seed)
    settings = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 96,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "initializer_range": 0.15,
        "tie_word_embeddings": tied,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "attn_implementation": "eager",
    }
    if family == "helium":
        settings["head_dim"] = HIDDEN // 4
    for name in OWN_SIZES.get(family, ()):
        del settings[name]
    settings |= (FAMILIES | RECURRENT | MIXTURES | LATENT)[family] | changes
    if "layer_types" in settings and "layer_types" not in changes:
        settings["layer_types"] = (settings["layer_types"] * 2)[: settings["num_hidden_layers"]]
    config = AutoConfig.for_model(family.partition("+")[0], **settings)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "norm" in name or ".ln_" in name:
                value.uniform_(0.5, 1.5)
            elif "act_fn.alpha" in name:
                value.uniform_(-1, 1)
            elif name.endswith("bias"):
                value.normal_(0, 0.1)
            elif name.endswith("sinks"):
                value.normal_(0, 1)
            elif name.endswith(("router.scale", "router.per_expert_scale")):
                value.uniform_(0.5, 1.5)
        for name, value in model.named_buffers():
            if name.endswith("layer_scalar"):
                value.uniform_(0.5, 1.5)
            elif name.endswith(("expert_bias", "e_score_correction_bias")):
                value.normal_(0, 0.3)
    return with_memory(model).requires_grad_(False)


def tiny_streams(
    spec: DecoderSpec,
    gamma: int = 3,
    ns: int = 2,
    lora: bool = True,
    root: bool = True,
    shifted: bool = True,
    draft_vocab: np.ndarray | None = None,
    bigram: int = 0,
    pruning: int = 0,
    shares: bool = True,
    paper: int = 0,
    seed: int = 0,
) -> StreamSpec:
    """Random streams; `paper`: of turned values, from a map of that rank."""
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) * 0.2).astype(np.float32)

    pairs = {
        (layer, module): (draw(4, spec.at(layer).in_width(module)), draw(spec.at(layer).out_width(module), 4))
        for layer in range(spec.layers - ns, spec.layers)
        for module in spec.modules(layer, streams=True)
    }
    size = spec.vocab if draft_vocab is None else len(draft_vocab)
    return StreamSpec(
        bigram=(draw(size, bigram), draw(size, bigram)) if bigram else None,
        gamma=gamma,
        ns=ns,
        scale=1.5,
        shifted=shifted,
        embeddings=draw(gamma, spec.hidden),
        root_map=draw(spec.hidden, spec.hidden) if root else None,
        shares=1 + draw(gamma, 2) if shares else None,
        moved=(draw(paper, spec.hidden), draw(spec.hidden, paper)) if paper else None,
        value_rotation=bool(paper),
        lora=pairs if lora else {},
        draft_vocab=draft_vocab,
        pruning=PruningSpec(draw(pruning, spec.hidden), draw(spec.hidden, pruning)) if pruning else None,
    )


def tiny_heads(
    spec: DecoderSpec, gamma: int = 3, own: bool = False, draft_vocab: np.ndarray | None = None, seed: int = 0
) -> MedusaSpec:
    """Random Medusa heads."""
    rng = np.random.default_rng(seed)
    blocks, biases = (
        rng.standard_normal(shape).astype(np.float32) * 0.2
        for shape in ((gamma, spec.hidden, spec.hidden), (gamma, spec.hidden))
    )
    size = spec.vocab if draft_vocab is None else len(draft_vocab)
    heads = rng.standard_normal((gamma, size, spec.hidden)).astype(np.float32) if own else None
    return MedusaSpec(gamma=gamma, block_weights=blocks, block_biases=biases, heads=heads, draft_vocab=draft_vocab)


@dataclass
class Built:
    """A step graph on disk and open."""

    model: Any
    spec: DecoderSpec
    streams: DraftSpec | None
    path: Path
    session: Any

    def stepper(self, capacity: int = 64) -> AnyRunner:
        return stepper(self.session, capacity)


def build(
    folder: Path,
    model: Any,
    streams: bool | DraftSpec = True,
    kind: str = "fp32",
    mode: str = "merged",
    tree: DraftTree | None = None,
    **session: str,
) -> Built:
    """Exports `model` to `folder` and opens it on one thread."""
    spec = describe(model)
    drafter = tiny_streams(spec) if streams is True else (streams or None)
    candidates = 10 if drafter is None or drafter.draft_vocab is None else min(10, len(drafter.draft_vocab))
    graph = StepGraph(spec, ModelSource(model, spec), precision(kind), drafter, tree, candidates, mode)
    with closing(WeightStore(folder / "model.onnx.data")) as store:
        onnx.save(graph.build(store), folder / "model.onnx")
    return Built(model, spec, drafter, folder, open_session(folder / "model.onnx", threads=1, **session))


def build_static(
    folder: Path,
    model: Any,
    streams: bool | DraftSpec = True,
    kind: str = "fp32",
    mode: str = "merged",
    source: Any = None,
    **session: str,
) -> Built:
    """The same with fixed shapes: 10 rows, 64 slots."""
    spec = describe(model)
    drafter = tiny_streams(spec) if streams is True else (streams or None)
    candidates = 10 if drafter is None or drafter.draft_vocab is None else min(10, len(drafter.draft_vocab))
    graph = StaticStepGraph(
        spec, source or ModelSource(model, spec), static_precision(kind), 10, 64, drafter, candidates, mode
    )
    with closing(WeightStore(folder / "model.onnx.data")) as store:
        onnx.save(graph.build(store), folder / "model.onnx")
    return Built(model, spec, drafter, folder, open_session(folder / "model.onnx", 1, True, **session))


def build_captured(
    folder: Path,
    model: Any,
    streams: bool | DraftSpec = True,
    kind: str = "fp32",
    mode: str = "merged",
    sizes: CallSizes = CAPTURED,
    lacks: frozenset[str] = frozenset(),
) -> Built:
    """The same with a graph for capture."""
    spec = describe(model)
    drafter = tiny_streams(spec) if streams is True else (streams or None)
    candidates = 10 if drafter is None or drafter.draft_vocab is None else min(10, len(drafter.draft_vocab))
    made = DEVICE_PRECISIONS[kind]()
    graph = CapturedStepGraph(spec, ModelSource(model, spec), made, sizes, drafter, candidates, mode, lacks)
    store = WeightStore(folder / "captured.onnx.data")
    onnx.save(graph.build(store), folder / "captured.onnx")
    store.close()
    features = captured_features(graph_features(spec, drafter, candidates), sizes)
    session = CapturedGraph(open_session(folder / "captured.onnx", threads=1), sizes, features)
    return Built(model, spec, drafter, folder, session)


def save_base(folder: Path, model: Any | None = None) -> Base:
    """Writes a HF folder with a word tokenizer and returns it as a base."""
    (model or tiny_model()).save_pretrained(folder)
    write_tokenizer(folder)
    return resolve_base(str(folder), progress=lambda line: None)


def write_tokenizer(folder: Path, vocab: int = VOCAB) -> None:
    """Writes a word tokenizer of `vocab` tokens with a chat template."""
    words = [
        word for word, _ in pre_tokenizers.Whitespace().pre_tokenize_str(PASSAGE)
    ]  # or all parity would be of one token
    names = [*dict.fromkeys(words), *(f"w{i}" for i in range(vocab))][:vocab]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token=names[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))


def save_adapter(folder: Path, base: Base, streams: StreamSpec, **changes: Any) -> Path:
    """Writes `streams` as an adapter folder without a task LoRA; `changes` replace fields of the `streams` section."""
    folder.mkdir(exist_ok=True)
    tensors = {} if streams.value_rotation else {"stream_embeddings": streams.embeddings}
    if streams.moved is not None:
        tensors |= dict(zip(("start_down", "start_up"), streams.moved, strict=True))
    if streams.root_map is not None:
        tensors["root_map"] = streams.root_map
    if streams.pruning is not None:
        tensors |= {"prune_down": streams.pruning.down, "prune_up": streams.pruning.up}
    if streams.shares is not None:
        tensors["shares"] = streams.shares
    for (layer, module), (a, b) in streams.lora.items():
        tensors |= {f"layers.{layer}.{module}.lora_A": a, f"layers.{layer}.{module}.lora_B": b / 2}
    save_file(tensors, folder / "streamspec.safetensors")
    section = {
        "gamma": streams.gamma,
        "ns": streams.ns,
        "scale": streams.scale,
        "positions": "shifted" if streams.shifted else "same",
        "root_token": streams.root_map is not None,
        "lora": {"rank": 4, "alpha": 8.0} if streams.lora else None,
        "draft_vocab": None,
        "shares": streams.shares is not None,
        "pruning": None if streams.pruning is None else len(streams.pruning.down),
        "value_rotation": streams.value_rotation,
        "start_rank": 0 if streams.moved is None else len(streams.moved[0]),
    }
    config = {
        "format_version": 1,
        "method": "streaming",
        "recipe": "staged",
        "base": {"id": base.id, "sha256": base.sha256, "model_type": base.model_type},
        "prompt_format": {"kind": "raw", "separator": "\n"},
        "streams": section | changes,
    }
    (folder / "streamspec_config.json").write_text(json.dumps(config))
    ranks = np.random.default_rng(0).integers(-1, 3, (4, 12, streams.gamma)).tolist()
    (folder / "acceptance.json").write_text(json.dumps({"gamma": streams.gamma, "max_rank": 10, "ranks": ranks}))
    return folder
