"""Finds the graph of a decoder's folder, and describes both as a bundle: sizes by the graph's inputs, the rest by the
configuration beside it (`config.json` of transformers, `genai_config.json` of onnxruntime-genai).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from streamspec.atomic import sha256_file
from streamspec.bundle.files import regular_file
from streamspec.bundle.manifest import TOKENIZER, BaseInfo, FileInfo, Manifest
from streamspec.bundle.model_section import MAX_CONTEXT, MAX_LAYERS, MAX_VOCAB, ModelInfo
from streamspec.errors import BundleError
from streamspec.json_fields import Fields, parse_object
from streamspec.layer_cache import ATTENTION, KEY, LayerCache
from streamspec.paths import PassedChecks
from streamspec.prompt.prompt_format import PromptFormat
from streamspec.prompt.template_file import TEMPLATE, chat_template, special_token, tokenizer_settings
from streamspec.runtime.onnx_decoder.graph_file import GraphFile, read_graph_file
from streamspec.runtime.onnx_decoder.interface import LOGITS, check_shape, check_tensors
from streamspec.runtime.onnx_decoder.manifest import DecoderManifest
from streamspec.step_graph import CACHE_KINDS, past

CONFIG, GENAI, GENERATION = "config.json", "genai_config.json", "generation_config.json"
MODEL, FOLDERS = "model.onnx", ("", "onnx")  # where hubs keep graphs
CORRECT = "correct the configuration, or export the model again"
# Names of one field in the configurations of different families.
CONTEXT = ("max_position_embeddings", "n_positions", "n_ctx", "seq_length", "max_seq_len")
HIDDEN, HEADS = ("hidden_size", "n_embd", "d_model"), ("num_attention_heads", "n_head", "n_heads")
KV_HEADS, WIDTH = ("num_key_value_heads", "num_kv_heads", *HEADS), ("head_dim", "head_size")


def find(path: Path) -> Path | None:
    """Returns the folder that a graph file, or a folder with one, stands for; None without a configuration or graph."""
    if path.suffix == ".onnx" and path.is_file():
        return next((folder for folder in path.absolute().parents[:2] if _configured(folder)), None)
    return path if _configured(path) and graphs(path) else None


def describe(path: Path) -> DecoderManifest:
    """Reads the configuration and the graph. Raises BundleError for a folder of no decoder of text, for one without a
    tokenizer, for several graphs to choose from, and for a graph with other inputs and outputs."""
    folder = find(path)
    assert folder is not None
    config = _Configuration(folder)
    name = path.absolute().relative_to(folder.absolute()).as_posix() if path != folder else _graph(folder, config)
    graph = read_graph_file(folder, name)
    check_tensors(name, {key: tensor.dtype for key, tensor in graph.inputs.items()}, [*graph.outputs], graph.layers)
    template = chat_template(folder)
    parent = (folder / name).parent.relative_to(folder)
    files = [name, *((parent / other).as_posix() for other in sorted(graph.external)), TOKENIZER]
    found = {each: _file(folder, each) for each in files + [TEMPLATE] * (folder / TEMPLATE).is_file()}
    weights = hashlib.sha256("\n".join(found[each].sha256 for each in files[:-1]).encode()).hexdigest()
    return DecoderManifest(
        base=BaseInfo(folder.resolve().name, weights, config.model_type),
        method="lora",
        precision=graph.precision,
        model=config.model(graph),
        prompt_format=PromptFormat("raw" if template is None else "chat"),
        opset=graph.opset,
        ir_version=graph.ir_version,
        weights_bytes=sum(graph.weights.values()),
        weights_sha256=weights,
        tools=dict([graph.producer]),
        files=found,
        graph=name,
        template="" if template is None else template.decode(errors="replace"),
        weights_held=sum(graph.weights.values()),
        shares_cache=graph.shares_cache,
        rounds_together=graph.rounds_together,
    )


@contextmanager
def checked(folder: Path, manifest: Manifest, hashes: bool, passed: PassedChecks | None = None) -> Iterator[None]:
    """Raises BundleError where a file is no longer what it was when the folder was described."""
    for name, info in manifest.files.items():
        now = _file(folder, name) if hashes else None
        size = (folder / name).stat().st_size if now is None else now.bytes
        if size != info.bytes or now not in (None, info):
            raise BundleError(f"{name} has changed", "the file that was loaded", "load the folder again")
    yield


def template(folder: Path, manifest: Manifest) -> str | None:
    """Returns the chat template."""
    assert isinstance(manifest, DecoderManifest)
    return manifest.template or None


def graphs(folder: Path) -> list[str]:
    """Returns the graphs of a folder by their paths in it."""
    return [
        file.relative_to(folder).as_posix()
        for inner in FOLDERS
        for file in sorted((folder / inner).glob("*.onnx"))
        if file.is_file()
    ]


def _configured(folder: Path) -> bool:
    return (folder / GENAI).is_file() or (folder / CONFIG).is_file()


def _graph(folder: Path, config: _Configuration) -> str:
    """Returns the graph that the configuration names, or that is called `MODEL`, or that is the only one."""
    found = graphs(folder)
    wanted = [config.graph, MODEL, f"onnx/{MODEL}"]
    name = next((name for name in wanted if name in found), found[0] if len(found) == 1 else None)
    if name is None:
        names = ", ".join(found[:8])
        raise BundleError(f"{folder} with {len(found)} graphs: {names}", f"one called {MODEL}", "name one by its path")
    return name


class _Configuration:
    """The fields of either configuration. Raises BundleError for a model that is no decoder of text."""

    def __init__(self, folder: Path) -> None:
        genai = (folder / GENAI).is_file()
        self._folder = folder
        self._raw = _read(folder, GENAI if genai else CONFIG)
        fields = self._raw.nested("model") if genai else self._raw
        inner = fields.nested("decoder") if genai else fields
        if fields.values.get("is_encoder_decoder") or "encoder" in fields.values:
            raise BundleError(f"{folder} holds a model with an encoder", "a decoder of text", "choose another model")
        self.graph = inner.text("filename", 256) if genai and inner.optional("filename") else ""
        name = "type" if genai else "model_type"
        self.model_type = fields.text(name, 64) if fields.optional(name) else "unknown"
        self._fields = Fields({**inner.values, **fields.values}, self._raw.where, BundleError, CORRECT)
        self._context = ("context_length",) if genai else CONTEXT

    def model(self, graph: GraphFile) -> ModelInfo:
        """Returns the sizes of a graph's model."""
        vocab = graph.outputs[LOGITS].dims[-1:]
        size = vocab[0] if vocab and isinstance(vocab[0], int) else self._size("vocab_size", MAX_VOCAB)
        if graph.layers > MAX_LAYERS:
            raise BundleError(f"{graph.layers} layers", f"at most {MAX_LAYERS}", CORRECT)
        sizes = [self._cache_size(graph, layer) for layer in range(graph.layers)]
        dtype, (heads, width) = graph.inputs[past(0, KEY)].dtype, sizes[0]
        caches = tuple(LayerCache(ATTENTION, None, dtype, *(own if own != sizes[0] else (0, 0))) for own in sizes)
        return ModelInfo(
            layers=graph.layers,
            kv_heads=heads,
            head_dim=width,
            vocab_size=size,
            hidden_size=self._size(*HIDDEN, 1 << 20),
            context_length=self._size(*self._context, MAX_CONTEXT),
            eos_token_ids=self._ends(size),
            bos_token_id=self._token("bos_token", size),
            caches=() if set(caches) == {LayerCache()} else caches,
            heads=self._size(*HEADS, 1024),
        )

    def _size(self, *names: Any) -> int:
        """Returns the first of the fields `names` that is there; their maximum comes last."""
        *names_, most = names
        name = next((name for name in names_ if self._fields.optional(name)), names_[0])
        return self._fields.integer(name, 1, most)

    def _cache_size(self, graph: GraphFile, layer: int) -> tuple[int, int]:
        """Returns the heads of a layer's keys and values and their width; by the configuration where the graph has only
        symbols for them."""
        dims = graph.inputs[past(layer, KEY)].dims
        heads, width = (dims[1], dims[3]) if len(dims) == 4 else ("", "")
        if not isinstance(heads, int):
            heads = self._size(*KV_HEADS, 1024)
        if not isinstance(width, int):
            stated = any(self._fields.optional(name) for name in WIDTH)
            width = self._size(*WIDTH, 4096) if stated else self._size(*HIDDEN, 1 << 20) // self._size(*HEADS, 1024)
        for kind in CACHE_KINDS:
            check_shape(past(layer, kind), graph.inputs[past(layer, kind)].dims, heads, width)
        return heads, width

    def _token(self, name: str, vocab: int) -> int | None:
        """Returns the id of a special token, by the tokenizer's settings where they name it."""
        settings = tokenizer_settings(self._folder)
        text = special_token(self._folder, name)
        for number, token in dict(settings.get("added_tokens_decoder") or {}).items():
            if isinstance(token, dict) and token.get("content") == text is not None and str(number).isdecimal():
                return int(number) if int(number) < vocab else None
        if name in settings and text is None:
            return None
        value = self._fields.values.get(f"{name}_id")
        return value if type(value) is int and 0 <= value < vocab else None

    def _ends(self, vocab: int) -> tuple[int, ...]:
        """Returns the tokens that end answers: the tokenizer's, then those of the generation config or the model's."""
        generation = _read(self._folder, GENERATION).values if (self._folder / GENERATION).is_file() else {}
        named = generation.get("eos_token_id") or self._fields.values.get("eos_token_id")
        listed = [*([self._token("eos_token", vocab)]), *(named if isinstance(named, list) else [named])]
        return tuple(dict.fromkeys(token for token in listed if type(token) is int and 0 <= token < vocab))


def _read(folder: Path, name: str) -> Fields:
    regular_file(folder, name, CORRECT)
    return Fields(parse_object((folder / name).read_bytes(), name, BundleError, CORRECT), name, BundleError, CORRECT)


def _file(folder: Path, name: str) -> FileInfo:
    file = folder / name
    path = regular_file(file.parent, file.name, f"copy it into {folder}, as a file of its own")
    about = path.stat()
    return FileInfo(_digest(path, about.st_size, about.st_mtime_ns, about.st_ino), about.st_size)


@lru_cache(maxsize=64)
def _digest(path: Path, *state: int) -> str:
    """Hashes a file, once for each of its states."""
    return sha256_file(path)
