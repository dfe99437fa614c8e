"""Writes small ONNX decoders in the form of other exporters, and computes the same in numpy by definition."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tests.support.tiny_exports import VOCAB, write_tokenizer

LAYERS, HEADS, WIDTH, HIDDEN, CONTEXT = 2, 2, 8, 16, 200
TYPES = {np.float32: TensorProto.FLOAT, np.float16: TensorProto.FLOAT16}


def random_weights(seed: int = 0) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    shapes = {"embedding": (VOCAB, HIDDEN), "positions": (CONTEXT, HIDDEN), "head": (HIDDEN, VOCAB)}
    shapes |= {f"{layer}.{name}": (HIDDEN, HIDDEN) for layer in range(LAYERS) for name in "qkvo"}
    return {name: draw.normal(0, 0.4, shape).astype(np.float32) for name, shape in shapes.items()}


def logits_of(weights: dict[str, np.ndarray], ids: Sequence[int], window: int = CONTEXT) -> np.ndarray:
    """Returns float64 [n, V]: attention over the `window` tokens up to each, itself included."""
    w = {name: value.astype(np.float64) for name, value in weights.items()}
    states = w["embedding"][list(ids)] + w["positions"][: len(ids)]
    at = np.arange(len(ids))
    hidden = (at[None, :] > at[:, None]) | (at[None, :] <= at[:, None] - window)
    for layer in range(LAYERS):
        q, k, v = ((states @ w[f"{layer}.{name}"]).reshape(-1, HEADS, WIDTH).transpose(1, 0, 2) for name in "qkv")
        scores = np.where(hidden, -np.inf, q @ k.transpose(0, 2, 1) / np.sqrt(WIDTH))
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = (shares / shares.sum(-1, keepdims=True)) @ v
        states = states + mixed.transpose(1, 0, 2).reshape(-1, HIDDEN) @ w[f"{layer}.o"]
    return states @ w["head"]


def greedy(weights: dict[str, np.ndarray], prompt: Sequence[int], count: int, window: int = CONTEXT) -> list[int]:
    text = list(prompt)
    for _ in range(count):
        text.append(int(np.argmax(logits_of(weights, text, window)[-1])))
    return text[len(prompt) :]


class _Nodes:
    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.held: list[onnx.TensorProto] = []

    def op(self, kind: str, *inputs: str, out: str | None = None, **attributes: Any) -> str:
        name = out or f"t{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [name], **attributes))
        return name

    def hold(self, value: Any, dtype: Any = np.int64) -> str:
        name = f"c{len(self.held)}"
        self.held.append(numpy_helper.from_array(np.asarray(value, dtype), name))
        return name


def graph(
    weights: dict[str, np.ndarray],
    *,
    shared: bool = False,
    dtype: Any = np.float32,
    window: int = CONTEXT,
    kept: bool = False,
    merged: bool = False,
    causal: bool = True,
    symbols: bool = False,
) -> onnx.ModelProto:
    """Writes the decoder. `shared`: by GroupQueryAttention, else by matrix products; `kept`: with the input
    num_logits_to_keep, `merged`: with use_cache_branch, which decides nothing; without `causal` rows of a call see each
    other; `symbols`: heads and width have names."""
    g = _Nodes()
    held = {name: g.hold(value, dtype) for name, value in weights.items()}
    states = g.op("Gather", held["embedding"], "input_ids")
    states = g.op("Add", states, g.op("Gather", held["positions"], "position_ids"))
    rows, total = g.op("Shape", "input_ids", start=1), g.op("Shape", "attention_mask", start=1)
    if shared:
        whole = g.op("ReduceSum", "attention_mask", g.hold([1]), keepdims=0)
        lengths = [
            g.op("Cast", g.op("Sub", whole, g.hold([1])), to=TensorProto.INT32),
            g.op("Cast", g.op("Squeeze", total), to=TensorProto.INT32),
        ]
    else:
        size = [g.op("Squeeze", one) for one in (rows, total)]
        keys = g.op("Range", g.hold(0), size[1], g.hold(1))
        own = g.op("Unsqueeze", g.op("Range", g.op("Sub", size[1], size[0]), size[1], g.hold(1)), g.hold([1]))
        seen = g.op("LessOrEqual", keys, own if causal else g.op("Sub", size[1], g.hold(1)))
        near = g.op("Greater", keys, g.op("Sub", own, g.hold(window)))
        hidden = g.op("Where", g.op("And", seen, near), g.hold(0, dtype), g.hold(-30000, dtype))
    for layer in range(LAYERS):
        q, k, v = (g.op("MatMul", states, held[f"{layer}.{name}"]) for name in "qkv")
        cache = [f"past_key_values.{layer}.{kind}" for kind in ("key", "value")]
        new = [f"present.{layer}.{kind}" for kind in ("key", "value")]
        if shared:
            attributes = {"num_heads": HEADS, "kv_num_heads": HEADS, "local_window_size": window}
            node = helper.make_node(
                "GroupQueryAttention", [q, k, v, *cache, *lengths], [f"mixed{layer}", *new], domain="com.microsoft"
            )
            node.attribute.extend(helper.make_attribute(name, value) for name, value in attributes.items())
            g.nodes.append(node)
            mixed = f"mixed{layer}"
        else:
            split = g.hold([0, 0, HEADS, WIDTH])
            q, k, v = (g.op("Transpose", g.op("Reshape", one, split), perm=[0, 2, 1, 3]) for one in (q, k, v))
            k, v = (g.op("Concat", old, one, axis=2, out=out) for old, one, out in zip(cache, (k, v), new, strict=True))
            scores = g.op("MatMul", q, g.op("Transpose", k, perm=[0, 1, 3, 2]))
            scores = g.op("Add", g.op("Mul", scores, g.hold(WIDTH**-0.5, dtype)), hidden)
            mixed = g.op("Transpose", g.op("MatMul", g.op("Softmax", scores, axis=-1), v), perm=[0, 2, 1, 3])
            mixed = g.op("Reshape", mixed, g.hold([0, 0, HIDDEN]))
        states = g.op("Add", states, g.op("MatMul", mixed, held[f"{layer}.o"]))
    if kept:
        first = g.op("Sub", rows, g.op("Reshape", "num_logits_to_keep", g.hold([1])))
        states = g.op("Slice", states, first, rows, g.hold([1]))
    g.op("MatMul", states, held["head"], out="logits")
    inputs = [
        helper.make_tensor_value_info(name, TensorProto.INT64, shape)
        for name, shape in (("input_ids", ["b", "n"]), ("attention_mask", ["b", "s"]), ("position_ids", ["b", "n"]))
    ]
    inputs += [helper.make_tensor_value_info("num_logits_to_keep", TensorProto.INT64, [])] * kept
    inputs += [helper.make_tensor_value_info("use_cache_branch", TensorProto.BOOL, [1])] * merged
    sizes = ["heads", "width"] if symbols else [HEADS, WIDTH]
    caches = [
        [
            helper.make_tensor_value_info(name.format(layer, kind), TYPES[dtype], ["b", sizes[0], slots, sizes[1]])
            for layer in range(LAYERS)
            for kind in ("key", "value")
        ]
        for name, slots in (("past_key_values.{}.{}", "past"), ("present.{}.{}", "s"))
    ]
    outputs = [helper.make_tensor_value_info("logits", TYPES[dtype], ["b", "r", VOCAB])]
    made = helper.make_graph(g.nodes, "decoder", [*inputs, *caches[0]], [*outputs, *caches[1]], g.held)
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(made, opset_imports=opsets, ir_version=10, producer_name="another", producer_version="1")


def config() -> dict[str, Any]:
    sizes = {"hidden_size": HIDDEN, "num_attention_heads": HEADS, "max_position_embeddings": CONTEXT}
    return {"model_type": "llama", "vocab_size": VOCAB, "eos_token_id": VOCAB - 1, "bos_token_id": 0, **sizes}


def genai_config() -> dict[str, Any]:
    """The configuration of onnxruntime-genai."""
    decoder = {"head_size": WIDTH, "hidden_size": HIDDEN, "num_attention_heads": HEADS, "num_key_value_heads": HEADS}
    model = {"type": "llama", "vocab_size": VOCAB, "context_length": CONTEXT, "eos_token_id": [VOCAB - 1]}
    return {"model": {**model, "bos_token_id": 0, "decoder": {**decoder, "filename": "model.onnx"}}, "search": {}}


def write_decoder(
    folder: Path, weights: dict[str, np.ndarray], name: str = "model.onnx", external: bool = False, **form: Any
) -> Path:
    """Writes a folder with the decoder, `config.json` and a tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).parent.mkdir(exist_ok=True)
    model = graph(weights, **form)
    onnx.save(model, folder / name, save_as_external_data=external, location="weights.bin", size_threshold=0)
    (folder / "config.json").write_text(json.dumps(config()))
    write_tokenizer(folder)
    return folder
