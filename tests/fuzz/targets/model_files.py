"""Tensors, graphs and tokenizers."""

from __future__ import annotations

import contextlib
import json
import tempfile
from functools import cache
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch
from zlib import crc32

import numpy as np

from streamspec.errors import BaseModelError, StreamspecError
from tests.fuzz.mutate import mutate_bytes
from tests.fuzz.targets.gguf_structure import spoilt
from tests.fuzz.targets.target import Target, fail, of_bytes, of_json


def _safetensors() -> list[bytes]:
    from safetensors.numpy import save

    one = {"a": np.arange(6, dtype=np.float16).reshape(2, 3), "b": np.arange(4, dtype=np.int64)}
    return [save(one), save(one, {"format": "pt"}), save({"a": np.zeros(0, np.float32)})]


def run_safetensors(data: bytes, folder: Path) -> object:
    from streamspec.adapters.base_models.resolve import weights_hash
    from streamspec.export.drafters.adapter_section import read_tensors

    (folder / "model.safetensors").write_bytes(data)
    with contextlib.suppress(StreamspecError):
        read_tensors(folder / "model.safetensors")
    return weights_hash(folder)


@cache
def _graphs() -> list[bytes]:
    from onnx import TensorProto, helper

    inner = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["y"])],
        "branch",
        [],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
    )
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"], name="first"),
        helper.make_node("If", ["c"], ["b"], then_branch=inner, else_branch=inner),
        helper.make_node("FusedMatMul", ["a", "w"], ["d"], domain="com.microsoft", alpha=0.5, transB=1),
        helper.make_node("TopK", ["d", "k"], ["e", "f"], axis=-1, to=[1, 2]),
    ]
    outside = TensorProto(name="w", data_type=1, dims=[4, 4], data_location=TensorProto.EXTERNAL)
    for key, value in (("location", "model.onnx.data"), ("offset", "64"), ("length", "64")):
        outside.external_data.add(key=key, value=value)
    weights = [
        outside,
        TensorProto(name="k", data_type=7, dims=[1], int64_data=[3]),
        TensorProto(name="c", data_type=9, dims=[], raw_data=b"\1"),
    ]
    graph = helper.make_graph(
        nodes,
        "step",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])],
        [helper.make_tensor_value_info("e", TensorProto.FLOAT, None)],
        weights,
    )
    return [
        bytes(
            helper.make_model(
                graph,
                opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)],
                ir_version=10,
            ).SerializeToString()
        )
    ]


def run_graph(data: bytes, folder: Path) -> object:
    """What passes must also be what protobuf reads: no operator, domain or place of data that we did not see."""
    import onnx
    from google.protobuf.message import DecodeError

    from streamspec.bundle.onnx_check import check_graph
    from streamspec.bundle.onnx_schema import OPERATORS

    (folder / "model.onnx").write_bytes(data)
    check_graph(folder / "model.onnx", 4096)
    try:
        model = onnx.load_model_from_string(data)
    except DecodeError:
        return None  # ONNX Runtime refuses it as well
    waiting = [model.graph]
    while waiting:
        graph = waiting.pop()
        for node in graph.node:
            if node.op_type not in OPERATORS.get(node.domain, ()):
                fail(f"an operator {node.domain}.{node.op_type} passed")
            waiting += [attribute.g for attribute in node.attribute if attribute.HasField("g")]
        for tensor in graph.initializer:
            if any(entry.key == "location" and entry.value != "model.onnx.data" for entry in tensor.external_data):
                fail(f"external data {tensor.external_data} passed")
    return fail("functions passed") if len(model.functions) else None


@cache
def _tokenizers() -> list[Any]:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    made = Tokenizer(models.BPE(vocab={"<s>": 0, "a": 1, "b": 2, "ab": 3, "\u2581": 4}, merges=[("a", "b")]))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel()]
    )
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581"), normalizers.NFKC()]
    )
    made.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens(["<s>"])
    made.enable_padding()
    made.enable_truncation(8)
    other = Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0), ("b", -2.0)], 0, False))
    other.pre_tokenizer = pre_tokenizers.Metaspace()
    return [json.loads(made.to_str()), json.loads(other.to_str())]


def run_tokenizer(data: bytes, folder: Path) -> object:
    from streamspec.runtime.text.tokenizer import read_tokenizer

    (folder / "tokenizer.json").write_bytes(data)
    tokenizer = read_tokenizer(folder)
    tokenizer.decode(tokenizer.encode("ab ba 12  \u00e9\u2581 abab").ids[:100])
    return tokenizer.decode([0, 1, 2, 3, 4, 9])


@cache
def _ggufs() -> list[bytes]:
    """A tiny model with its tokenizer, quantized in part, and one without tensors."""
    import gguf

    from tests.support.gguf_cases import made
    from tests.support.gguf_files import write_gguf

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    _, architecture, keys, tensors = made("qwen2", num_hidden_layers=1, tie_word_embeddings=True, **sizes)
    kind = gguf.GGMLQuantizationType.Q8_0
    packed = {"blk.0.attn_q.weight": gguf.quantize(tensors["blk.0.attn_q.weight"], kind)}
    with tempfile.TemporaryDirectory() as folder:
        whole, empty = Path(folder, "whole"), Path(folder, "empty")
        write_gguf(whole, architecture, keys, tensors | packed, kinds=dict.fromkeys(packed, kind))
        write_gguf(empty, architecture, keys, {}, {"model": "gpt2", "pre": "smollm", "tokens": ["a", "b"]})
        return [whole.read_bytes(), empty.read_bytes()]


def make_gguf(random: Random) -> bytes:
    """Half of them spoilt in structure, the others in bytes, of these most in the header alone."""
    if random.random() < 0.5:
        return spoilt(random)
    data = random.choice(_ggufs())
    header = len(data) if random.random() < 0.2 else data.find(b"tokenizer.ggml.tokens")
    return mutate_bytes(random, data[:header], [data[:header]]) + data[header:]


def run_gguf(data: bytes, folder: Path) -> object:
    """Some without PyTorch. A key for which transformers raises should have been refused by its name."""
    from streamspec.adapters.base_models import check_folder
    from streamspec.adapters.base_models.gguf import converter

    (folder / "model.gguf").write_bytes(data)
    out = folder / "out"
    out.mkdir(exist_ok=True)
    with patch.object(converter, "has_torch", return_value=crc32(data) % 4 > 0):
        try:
            converter.convert(folder / "model.gguf", out)
        except BaseModelError as error:
            if error.found.startswith("transformers makes no"):
                fail(str(error))
            raise
    return check_folder.check_folder(out, lambda line: None)


MODEL_FILES = {
    "safetensors": Target(of_bytes(_safetensors), run_safetensors),
    "graph": Target(of_bytes(_graphs), run_graph),
    "tokenizer": Target(of_json(_tokenizers), run_tokenizer),
    "gguf": Target(make_gguf, run_gguf),
}
