"""What is fuzzed: for each target a corpus of good samples, how they are spoilt, and what is done with the result.

Nothing but a StreamspecError may come out. Files are written to a folder of the run's own.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tarfile
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from streamspec.errors import DataError, StreamspecError
from tests.fuzz.mutate import mutate_bytes, mutate_json, template
from tests.support.manifests import manifest

Run = Callable[[bytes, Path], object]


@dataclass(frozen=True)
class Target:
    """`make`: an input from a generator. `run`: does with it, and a folder to write to, what a user would."""

    make: Callable[[Random], bytes]
    run: Run


def of_json(samples: Callable[[], list[Any]]) -> Callable[[Random], bytes]:
    """JSON, spoilt as a value or, now and then, as text."""
    kept = cache(lambda: [(value, json.dumps(value).encode()) for value in samples()])

    def make(random: Random) -> bytes:
        value, text = random.choice(kept())
        return (
            mutate_bytes(random, text, [text for _, text in kept()])
            if random.random() < 0.15
            else mutate_json(random, value)
        )

    return make


def of_bytes(samples: Callable[[], list[bytes]]) -> Callable[[Random], bytes]:
    kept = cache(samples)
    return lambda random: mutate_bytes(random, random.choice(kept()), kept())


# ---- manifests and adapters' configurations


def _manifests() -> list[Any]:
    entry = {"sha256": "0" * 64, "bytes": 1}
    good = json.loads(manifest().to_json()) | {"files": dict.fromkeys(("model.onnx", "tokenizer.json"), entry)}
    plain = good | {"method": "lora", "streams": None, "trees": None, "drafter": None}
    room = {"ns": [2, 1], "candidates": 5, "root_token": True, "bigram": True, "pruning": True, "draft_vocab": True}
    fixed = plain | {"static": {"rows": 8, "slots": 128}, "files": good["files"] | {"choose.onnx": entry}}
    return [good, plain, plain | {"swappable": room}, fixed]


def run_manifest(data: bytes, folder: Path) -> object:
    from streamspec.bundle.manifest import Manifest

    made = Manifest.from_json(data)
    return Manifest.from_json(made.to_json()).to_json() == made.to_json() or _fail(
        "a manifest that reads otherwise when written again"
    )


def _swappable() -> list[Any]:
    from dataclasses import replace

    from streamspec.bundle.manifest import FileInfo
    from streamspec.bundle.swappable_adapters import SwappableAdapter, fingerprint

    bundle = _room()
    streams = manifest().streams
    assert streams is not None
    whole = SwappableAdapter(
        bundle.base,
        fingerprint(bundle),
        "streaming",
        bundle.prompt_format,
        "staged",
        streams,
        manifest().trees,
        {"task": 4},
        {"x": 1.0},
        {"torch": "2"},
        FileInfo("0" * 64, 5),
    )
    return [json.loads(one.to_json()) for one in (whole, replace(whole, method="lora", streams=None, trees=None))]


def _room() -> Any:
    from streamspec.bundle.manifest import SwappableCapacity

    return manifest(
        method="lora", streams=None, trees=None, swappable=SwappableCapacity((1,), 5, True, True, True, True)
    )


def run_swappable(data: bytes, folder: Path) -> object:
    from streamspec.bundle.manifest import Manifest
    from streamspec.bundle.swappable_adapters import SwappableAdapter

    return SwappableAdapter.from_json(data, _room()).on(_room()).to_json() and Manifest


def _adapters() -> list[Any]:
    streams = {
        "gamma": 3,
        "ns": 2,
        "scale": 1.0,
        "positions": "shifted",
        "root_token": True,
        "lora": {"rank": 2, "alpha": 2.0},
        "draft_vocab": 48,
        "bigram": 3,
        "pruning": 4,
    }
    shared = {
        "format_version": 1,
        "base": {"id": "x", "sha256": "0" * 64, "model_type": "llama"},
        "prompt_format": {"kind": "raw", "separator": "\n"},
    }
    return [
        shared | {"method": "streaming", "recipe": "joint", "streams": streams},
        shared | {"method": "lora", "recipe": None, "streams": None},
    ]


def run_adapter(data: bytes, folder: Path) -> object:
    from streamspec.bundle.adapter_folder import STREAM_CONFIG, read_adapter

    (folder / STREAM_CONFIG).write_bytes(data)
    return read_adapter(folder)


def _loras() -> list[Any]:
    return [
        {
            "task_type": "CAUSAL_LM",
            "peft_type": "LORA",
            "r": 12,
            "target_modules": ["q_proj"],
            "exclude_modules": None,
            "lora_alpha": 12,
            "rank_pattern": {"a.b": 4},
            "alpha_pattern": {},
            "init_lora_weights": True,
            "layer_replication": None,
            "megatron_config": None,
            "megatron_core": "megatron.core",
            "loftq_config": {},
            "use_dora": False,
            "bias": "none",
        }
    ]


def run_lora(data: bytes, folder: Path) -> object:
    from streamspec.bundle.adapter_folder import TASK_CONFIG, TASK_WEIGHTS, check_task_lora

    (folder / TASK_CONFIG).write_bytes(data)
    (folder / TASK_WEIGHTS).write_bytes(b"")
    return check_task_lora(folder)


def _acceptances() -> list[Any]:
    return [{"gamma": 2, "max_rank": 4, "ranks": [[[0, 1], [-1, 3], [2, -2], [-2, -2]], [[0, 0]]]}]


def run_acceptance(data: bytes, folder: Path) -> object:
    from streamspec.acceptance_stats import Acceptance, node_order

    (folder / "acceptance.json").write_bytes(data)
    found = Acceptance.load(folder / "acceptance.json")
    return node_order(found.ranks, found.gamma)


# ---- files of tensors


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
def _conversation(folder: Path) -> tuple[Any, list[bytes]]:
    from streamspec.runtime import saved_session as saved

    about = manifest()
    rows = [np.zeros((2, 2, 1, 1, 3, 8), np.float32)]
    out = []
    for messages in ([], [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]):
        saved.write(folder / "good", saved.SavedSession([1, 2, 3], rows, messages), about)
        out.append((folder / "good").read_bytes())
    return about, out


def make_conversation(random: Random) -> bytes:
    """Half of them with a header that is spoilt as JSON and then measured again."""
    import tempfile

    _, samples = _conversation(Path(tempfile.gettempdir()))
    data = random.choice(samples)
    if random.random() < 0.5:
        return mutate_bytes(random, data, samples)
    size = int.from_bytes(data[:8], "little")
    header = mutate_json(random, json.loads(data[8 : 8 + size]))
    return len(header).to_bytes(8, "little") + header + data[8 + size :]


def run_conversation(data: bytes, folder: Path) -> object:
    from streamspec.runtime import saved_session as saved

    (folder / "talk").write_bytes(data)
    return saved.read(folder / "talk", manifest(), 128)


# ---- graphs and tokenizers


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
                _fail(f"an operator {node.domain}.{node.op_type} passed")
            waiting += [attribute.g for attribute in node.attribute if attribute.HasField("g")]
        for tensor in graph.initializer:
            if any(entry.key == "location" and entry.value != "model.onnx.data" for entry in tensor.external_data):
                _fail(f"external data {tensor.external_data} passed")
    return _fail("functions passed") if len(model.functions) else None


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


# ---- text of users


def make_template(random: Random) -> bytes:
    made = template(random).encode()
    return mutate_bytes(random, made, [made]) if random.random() < 0.2 else made


def run_template(data: bytes, folder: Path) -> object:
    from streamspec.prompt.prompt_format import PromptFormat

    messages = [
        {"role": "user", "content": "hi %s <b>\n{0}", "tools": [{"a": [1, 2.5, None]}]},
        {"role": "assistant", "content": "ho"},
    ]
    before = json.dumps(messages)
    PromptFormat("chat").render(messages, data.decode("utf-8", "replace"), {"bos_token": "<s>"})
    return json.dumps(messages) == before or _fail("messages were changed")


def _examples() -> list[Any]:
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    return [
        {"text": "abc"},
        {"messages": talk},
        {"prompt": "a", "completion": "b", "references": ["b", "c"], "category": "x"},
        {"prompt": talk[:1], "completion": talk[1:]},
        {"turns": ["a", "b"], "question_id": 5, "reference": ["x"]},
    ]


def run_examples(data: bytes, folder: Path) -> object:
    from streamspec.data import read_examples

    (folder / "d.jsonl").write_bytes(data.replace(b"\r", b"") + b"\n")
    return [(one.opening, one.prompt, one.completion) for one in read_examples(folder / "d.jsonl")]


def make_yaml(random: Random) -> bytes:
    samples = [
        b"base: smollm2-135m\ndata: d.jsonl\nout: o\ngamma: 4\nlr: 1e-3\ntaps: [1, 2]\nmax-minutes: 5\n",
        b"base: &x a\ndata: *x\n",
        b"a: !!python/name:os.system\n? [1]\n: {b: 2001-01-01}\n",
    ]
    return mutate_bytes(random, random.choice(samples), samples)


def run_yaml(data: bytes, folder: Path) -> object:
    from streamspec.adapters.training.config import TrainConfig
    from streamspec.cli.train import read_yaml

    (folder / "c.yaml").write_bytes(data)
    return TrainConfig.from_dict({"base": "a", "data": "b", "out": "c"} | read_yaml(folder / "c.yaml"))


def _schemas() -> list[Any]:
    person = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 9, "pattern": "^[a-z]+$"},
            "age": {"type": "integer", "minimum": 0},
        },
        "required": ["name"],
        "additionalProperties": False,
    }
    return [
        person,
        {"type": "array", "items": person, "minItems": 1, "maxItems": 3},
        {"enum": ["a", 1, None]},
        {"anyOf": [{"type": "number"}, {"const": {"a": 1}}]},
        {"$defs": {"n": {"type": "object", "properties": {"next": {"$ref": "#/$defs/n"}}}}, "$ref": "#/$defs/n"},
        {"type": "string", "format": "date"},
        {"allOf": [{"type": "integer", "multipleOf": 6, "maximum": 5000}, {"multipleOf": 4}]},
        {"type": "object", "properties": {"a": {"type": "number", "multipleOf": 0.25, "minimum": -1}}},
        {"type": "object", "patternProperties": {"^x[0-9]+$": {"type": "null"}}, "maxProperties": 4},
        {"type": "array", "prefixItems": [{"const": [1, {"b": "c"}]}], "items": {"type": "boolean"}},
    ]


@cache
def _vocabulary(size: int) -> Any:
    """A vocabulary of so many tokens; of 49,152 that of SmolLM2, where it has been fetched."""
    from tokenizers import Tokenizer

    from streamspec.paths import cache_dir
    from streamspec.runtime.text.grammar import Vocabulary
    from tests.support.byte_tokenizers import EOS, byte_level_of

    kept = cache_dir() / "bases" / "smollm2-135m" / "tokenizer.json"
    real = size == SMALL and kept.is_file()
    return Vocabulary(Tokenizer.from_file(str(kept)) if real else byte_level_of(size), size, [EOS])


SMALL, LARGE = 49_152, 262_144
STEPS = 12  # tokens that an answer is followed for


def _follow(grammar: Any, size: int) -> int:
    """Follows an answer of tokens drawn from those allowed."""
    state, random, steps = _vocabulary(size).start(grammar), Random(grammar.source), 0
    for steps in range(STEPS):  # noqa: B007
        allowed = state.after()
        if allowed.over or (tokens := np.flatnonzero(allowed.mask)[-2000:]).size == 0:
            break
        if (token := int(random.choice(tokens))) == 0:  # end-of-text
            break
        state.advance([token])
    return steps


def run_schema(data: bytes, folder: Path, size: int = SMALL) -> object:
    from streamspec.runtime.text.grammar import Grammar

    return _follow(Grammar.json_schema(data.decode("utf-8", "replace")), size)


def make_pattern(random: Random) -> bytes:
    samples = [
        rb"[a-z]+@[a-z]+\.(com|org)",
        rb"(\d{3}-){2}\d{4}",
        rb"(?i:yes|no)\s*",
        rb"\p{Lu}\w*[^\x00-\x1f]{0,20}",
        rb"(a|b)*c{1,9}",
    ]
    return mutate_bytes(random, random.choice(samples), samples)


def run_pattern(data: bytes, folder: Path, size: int = SMALL) -> object:
    from streamspec.runtime.text.grammar import Grammar

    return _follow(Grammar.regex(data.decode("utf-8", "replace")), size)


def _requests() -> list[Any]:
    talk = [{"role": "system", "content": "be good"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    items = [
        {"role": "user", "content": "hi"},
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "5"}]},
    ]
    shared = {
        "model": "m",
        "stream": True,
        "stream_options": {"include_usage": True},
        "stop": ["a", "b"],
        "seed": 5,
        "temperature": 0.5,
        "top_p": 0.9,
        "max_tokens": 9,
        "top_k": 3,
        "n": 1,
    }
    return [
        shared | {"messages": talk, "logprobs": True, "top_logprobs": 3, "tools": []},
        {
            "model": "m",
            "messages": talk,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "object", "properties": {"a": {"type": "integer"}}}},
            },
        },
        {"model": "m", "messages": talk, "grammar": {"choice": ["a", "b"]}},
        shared | {"prompt": "abc", "logprobs": 2},
        {"model": "m", "input": "hi", "text": {"format": {"type": "json_object"}}, "top_logprobs": 2},
        {"model": "m", "input": items, "instructions": "Be brief.", "tools": [{"type": "function", "name": "f"}]},
        {"model": "m", "prompt": [1, 2, 3], "grammar": {"regex": "[a-z]+"}},
    ]


def run_request(data: bytes, folder: Path) -> object:
    """Refused with a status and one short line, or understood; a request is read as each path reads it."""
    from streamspec.serve.api.chat_requests import read_chat, read_completion
    from streamspec.serve.api.responses_request import read_responses
    from streamspec.serve.errors import ApiError
    from streamspec.serve.limits import Limits

    understood = 0
    for read in (read_chat, read_completion, read_responses):
        try:
            read(data, Limits())
            understood += 1
        except ApiError as error:
            if not 400 <= error.status < 500 or "\n" in error.message or len(error.message) > 2000:
                raise AssertionError(f"{error.status} {error.message}") from error
    if not understood:
        raise DataError("neither a chat nor a completion nor a response")
    return understood


# ---- stores of answers

STORED, VOCAB = 60, 64  # tokens of a store and of its vocabulary


def make_store(random: Random) -> bytes:
    """A store of few different tokens, some of its positions spoilt."""
    from streamspec.bundle.store_section import encode

    data = bytearray(encode(np.array([random.randrange(random.choice((3, 9))) for _ in range(STORED)]), VOCAB))
    for _ in range(random.choice((0, 0, 1, 1, 2, 40))):
        data[random.randrange(len(data))] = random.choice((0, 1, random.randrange(STORED), 255))
    return bytes(data) if random.random() < 0.95 else bytes(data)[: random.randrange(len(data))]


def run_store(data: bytes, folder: Path) -> object:
    """What is drafted from a store that is taken stands in it, behind an end of the text."""
    from streamspec.bundle.store_section import StoreInfo, decode
    from streamspec.runtime.draft_sources.store import AnswerStore

    tokens, order = decode(data, StoreInfo(STORED, 2), VOCAB)
    known, drafted = tokens.tolist(), 0
    for end in range(1, STORED):
        text = known[max(0, end - 6) : end]
        found = AnswerStore(tokens, order, 2).find([text], 8)
        for node in range(0 if found is None else len(found.tokens)):
            path = [found.tokens[node]]
            while (node := found.parents[node]) >= 0:
                path.insert(0, found.tokens[node])
            looked = [text[-1], *path]
            if not any(known[at : at + len(looked)] == looked for at in range(STORED)):
                _fail(f"{looked} is drafted and stands nowhere")
            drafted += 1
    return drafted > 0


# ---- packed bundles


@cache
def _packed() -> tuple[bytes, ...]:
    """A packed bundle by its parts: the list, headers, contents with their padding, the end."""
    from streamspec.bundle.write_files import write_bundle
    from streamspec.library.archive import BLOCK, pack

    with tempfile.TemporaryDirectory() as folder:
        write_bundle(Path(folder, "b"), {"model.onnx": b"x" * 700, "tokenizer.json": b"{}"}, manifest())
        pack(Path(folder, "b"), Path(folder, "a"))
        data, parts, at = Path(folder, "a").read_bytes(), [], 0
    while any(data[at:]):
        size = int(data[at + 124 : at + 135], 8)
        parts += [data[at : at + BLOCK], data[at + BLOCK : at + BLOCK + -(-size // BLOCK) * BLOCK]]
        at += sum(map(len, parts[-2:]))
    return *parts, data[at:]


def make_packed(random: Random) -> bytes:
    """Spoilt bytes; a spoilt list under a header that fits; or entries whose header is spoilt but for its checksum, in
    another order, or repeated.
    """
    parts, how = list(_packed()), random.random()
    if how < 0.2:
        return mutate_bytes(random, b"".join(parts), [b"".join(_packed())])
    if how < 0.6:
        listing = json.loads(parts[1].rstrip(b"\0"))
        text = mutate_json(random, listing if random.random() < 0.5 else {"format": 1, "files": listing["files"]})
        parts[:2] = [_header("streamspec-files.json", len(text)), text + bytes(-len(text) % 512)]
        return b"".join(parts)
    entry = 2 * random.randrange(len(parts) // 2)
    if how < 0.9:
        field = random.choice(((0, 100), (124, 12), (156, 1), (157, 100), (257, 8), (345, 155)))
        spoilt = bytearray(parts[entry])
        for _ in range(random.choice((1, 1, 3))):
            spoilt[field[0] + random.randrange(field[1])] = random.choice((0, 47, 46, 48, 55, 128, 255, 76, 120))
        spoilt[148:156] = b"%06o\0 " % (sum(spoilt) - sum(spoilt[148:156]) + 256)
        parts[entry] = bytes(spoilt)
    else:
        other = 2 * random.randrange(len(parts) // 2)
        parts[other : other + random.choice((0, 2))] = parts[entry : entry + 2]
    return b"".join(parts)


def _header(name: str, size: int) -> bytes:
    entry = tarfile.TarInfo(name)
    entry.size = size
    return entry.tobuf(tarfile.GNU_FORMAT)


def run_packed(data: bytes, folder: Path) -> object:
    """Whatever comes of it, nothing is written but regular files where they belong, no more bytes than were there."""
    from streamspec.library.archive import unpack
    from streamspec.library.file_list import check_arrived

    shutil.rmtree(folder, ignore_errors=True)
    out = folder / "room" / "out"
    out.mkdir(parents=True)
    (folder / "a.tar").write_bytes(data)
    try:
        files = unpack(folder / "a.tar", out)
        check_arrived(out, files)
    finally:
        there = [one for one in folder.rglob("*") if not one.is_dir() or one.is_symlink()]
        if any(one.is_symlink() or not (out in one.parents or one.name == "a.tar") for one in there):
            _fail(f"{there} were written")
        if sum(one.stat().st_size for one in there) > 2 * len(data):
            _fail("more than there was")
    if {one.relative_to(out).as_posix() for one in out.rglob("*") if one.is_file()} != set(files):
        _fail("not the files of the list")
    return len(files)


def _fail(why: str) -> object:
    raise AssertionError(why)


TARGETS = {
    "manifest": Target(of_json(_manifests), run_manifest),
    "swappable": Target(of_json(_swappable), run_swappable),
    "adapter": Target(of_json(_adapters), run_adapter),
    "lora": Target(of_json(_loras), run_lora),
    "acceptance": Target(of_json(_acceptances), run_acceptance),
    "safetensors": Target(of_bytes(_safetensors), run_safetensors),
    "conversation": Target(make_conversation, run_conversation),
    "graph": Target(of_bytes(_graphs), run_graph),
    "tokenizer": Target(of_json(_tokenizers), run_tokenizer),
    "template": Target(make_template, run_template),
    "examples": Target(of_json(_examples), run_examples),
    "yaml": Target(make_yaml, run_yaml),
    "schema": Target(of_json(_schemas), run_schema),
    "pattern": Target(make_pattern, run_pattern),
    "schema_large": Target(of_json(_schemas), partial(run_schema, size=LARGE)),
    "pattern_large": Target(make_pattern, partial(run_pattern, size=LARGE)),
    "request": Target(of_json(_requests), run_request),
    "store": Target(make_store, run_store),
    "packed": Target(make_packed, run_packed),
}
