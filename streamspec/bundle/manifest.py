"""The bundle on disk: its manifest, how it is written, how it is checked.

Everything in a bundle is hostile on load: the manifest is parsed strictly, and sizes and hashes of all other files are
checked before any of them is opened by a parser. Hashes prove integrity, not origin. Knows nothing about graphs.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from streamspec.acceptance_stats import MAX_GAMMA
from streamspec.atomic import new_folder, recover, sha256_file, write_text
from streamspec.draft_tree import DraftTree
from streamspec.errors import BundleError, ConfigError, StreamspecError
from streamspec.json_fields import MAX_JSON, Fields, parse_json
from streamspec.prompt.prompt_format import KINDS, PromptFormat

FORMAT_VERSION = 4  # 2: the graph samples; 3: its logits come with their scale beside them; 4: tokens can be masked
MANIFEST, MODEL, TOKENIZER, TEMPLATE = "manifest.json", "model.onnx", "tokenizer.json", "chat_template.jinja"
CHOICE = "choose.onnx"  # of a static bundle: the choice of tokens where it is not greedy
FLOAT_ROWS = {
    "session.disable_quant_qdq": "1"
}  # session entries of a static graph on the CPU: else kernels that round rows to 8 bits
COMPACT = "compact.onnx"  # of a bundle for a device: moves rows of the cache where it lies
REQUIRED_FILES = (MODEL, TOKENIZER)
DRAFT_CANDIDATES, BIGRAM_CANDIDATES = 10, 32  # per stream; a bigram brings guesses up that stood further down

METHODS = ("streaming", "medusa", "jakiro", "eagle", "mtp", "hydra", "lora")
PRECISIONS = ("fp32", "fp16", "int8", "int4")
DRAFT_LAYERS = ("jakiro", "eagle", "mtp", "hydra")  # methods whose drafter is a layer of its own
POSITIONS = ("shifted", "same")
MAX_LEVEL = 64  # rows of guesses for a place
MAX_NODES, MAX_CANDIDATES = 256, 1024
MAX_STATIC_ROWS = 256
MAX_VOCAB, MAX_CONTEXT, MAX_LAYERS = 1 << 22, 1 << 24, 1024
MAX_PROBE, MAX_LOGIT = 4096, 1e6
MAX_MANIFEST = 2 << 20  # bytes; 16 MB of nested lists take four seconds to read
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,126}")


@dataclass(frozen=True)
class BaseInfo:
    """The base the bundle was made from. `sha256` is over its weights (docs/architecture.md)."""

    id: str
    sha256: str
    model_type: str
    revision: str | None = None


@dataclass(frozen=True)
class ModelInfo:
    """Sizes of the target."""

    layers: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    hidden_size: int
    context_length: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None = None


@dataclass(frozen=True)
class DrafterInfo:
    """The drafter: `gamma` streams over the last `ns` layers, or heads or places of a draft layer (`ns` 0),
    `candidates` guesses each.
    """

    gamma: int
    ns: int
    candidates: int = DRAFT_CANDIDATES
    positions: str = "shifted"
    root_token: bool = True
    bigram: bool = False
    pruning: bool = False
    levels: tuple[
        int, ...
    ] = ()  # of a draft layer: rows of guesses for each place; it has a layer of its own in the cache


@dataclass(frozen=True)
class StaticInfo:
    """A graph of fixed shapes: `rows` of every call, `slots` of its cache, which are the context."""

    rows: int
    slots: int


@dataclass(frozen=True)
class SwappableCapacity:
    """What the adapters of a swappable bundle may have: streams over as many layers as one of `ns` (falling; empty:
    none), `candidates` guesses each; see `DrafterInfo`. An early exit goes with the first of `ns`. `draft_vocab`: they
    propose from a list of their own."""

    ns: tuple[int, ...] = ()
    candidates: int = DRAFT_CANDIDATES
    root_token: bool = False
    bigram: bool = False
    pruning: bool = False
    draft_vocab: bool = False

    def __str__(self) -> str:
        parts = [
            name.replace("_", " ") for name in ("root_token", "bigram", "pruning", "draft_vocab") if getattr(self, name)
        ]
        return (
            ", ".join([f"streams over {' or '.join(map(str, self.ns))} layers", *parts])
            if self.ns
            else "a task LoRA alone"
        )


@dataclass(frozen=True)
class DraftTreeInfo:
    """`nodes`: (parent, rank, probability) in order of falling probability; the tree of n rows is the first n."""

    nodes: tuple[tuple[int, int, float], ...]
    default_rows: int

    def tree(self, rows: int | None = None) -> DraftTree:
        """The tree of `rows` rows (default: `default_rows`), laid out for use."""
        return DraftTree.from_nodes(self.nodes, self.default_rows if rows is None else rows)


@dataclass(frozen=True)
class ProbeInfo:
    """Token ids, the greedy choice after each of them and that choice's logit, checked at load."""

    input_ids: tuple[int, ...]
    choices: tuple[int, ...]
    top_logits: tuple[float, ...]


@dataclass(frozen=True)
class FileInfo:
    sha256: str
    bytes: int


@dataclass(frozen=True)
class Manifest:
    """`manifest.json`. `files` is filled in when the bundle is written. `swappable`: the graph is of the base alone and
    takes adapters (`streamspec.bundle.swappable`)."""

    base: BaseInfo
    method: str
    precision: str
    model: ModelInfo
    prompt_format: PromptFormat
    streams: DrafterInfo | None = None
    trees: DraftTreeInfo | None = None
    static: StaticInfo | None = None
    probe: ProbeInfo | None = None
    recipe: str | None = None
    drafter: str | None = None
    swappable: SwappableCapacity | None = None
    opset: int = 21
    ir_version: int = 10
    provider: str = "cpu"
    parity: dict[str, Any] = field(default_factory=dict)
    weights_bytes: int = 0
    block_size: int | None = None  # of int4: weights that share a scale
    tools: dict[str, str] = field(default_factory=dict)
    files: dict[str, FileInfo] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION

    @property
    def rounding(self) -> str:
        """The precision in words."""
        return self.precision + (f" in blocks of {self.block_size}" if self.block_size else "")

    def check_prunes(self) -> None:
        """Raises ConfigError for a bundle without an early exit."""
        if self.streams is None or not self.streams.pruning:
            raise ConfigError(
                "pruning for a bundle without an early exit", "a bundle trained with --prune-rank", "leave pruning out"
            )

    def to_json(self) -> str:
        """JSON text; raises ValueError on numbers JSON does not have (NaN, infinities)."""
        return json.dumps(asdict(self), indent=1, allow_nan=False, ensure_ascii=False)

    @classmethod
    def from_json(cls, data: bytes | str) -> Manifest:
        """Raises BundleError, naming the field, on anything that is not a well-formed manifest of a known version."""
        raw = Fields(
            parse_json(data.encode() if isinstance(data, str) else data, MANIFEST, most=MAX_MANIFEST), "manifest"
        )
        version = raw.integer("format_version", 1, 1 << 31)
        if version > FORMAT_VERSION:
            raise BundleError(f"a bundle of format {version}", f"format {FORMAT_VERSION}", "update streamspec")
        if version < FORMAT_VERSION:
            raise BundleError(f"a bundle of format {version}", f"format {FORMAT_VERSION}", "export it again")
        method = raw.choice("method", METHODS)
        model = _model(raw.nested("model"))
        streams, trees = read_drafts(raw, model)
        if (method == "lora") != (streams is None) or (streams is None) != (trees is None):
            raise BundleError(
                f"method {method} with streams {'set' if streams else 'null'} and trees {'set' if trees else 'null'}",
                "streams and trees for every method but lora",
                "export the bundle again",
            )
        if streams is not None and bool(streams.levels) != (method in DRAFT_LAYERS):
            raise BundleError(
                f"method {method} with levels {list(streams.levels)}",
                f"levels for {' and '.join(DRAFT_LAYERS)}",
                "export the bundle again",
            )
        if streams is not None and streams.levels and (len(streams.levels) != streams.gamma or streams.levels[0] != 1):
            raise BundleError(
                f"levels {list(streams.levels)}", f"{streams.gamma}, the first of one row", "export the bundle again"
            )
        if streams is not None and (
            (streams.ns == 0) != (method != "streaming") or (streams.pruning and not streams.ns)
        ):
            raise BundleError(
                f"method {method} with streams over {streams.ns} layers",
                "layers for streaming, and only there",
                "export the bundle again",
            )
        static = _static(raw.nested("static"), model, streams) if raw.optional("static") else None
        room = _room(raw.nested("swappable"), model) if raw.optional("swappable") else None
        if room is not None and (streams is not None or static is not None):
            raise BundleError(
                "a swappable bundle with streams of its own or fixed shapes",
                "streams in its adapters, shapes that change",
                "export the bundle again",
            )
        files = _files(raw)
        if static is not None and CHOICE not in files:
            raise BundleError(
                f"a static bundle without {CHOICE}",
                f"an entry for {CHOICE} in manifest.files",
                "export the bundle again",
            )
        return cls(
            base=read_base(raw),
            method=method,
            precision=raw.choice("precision", PRECISIONS),
            model=model,
            prompt_format=read_prompt_format(raw),
            streams=streams,
            trees=trees,
            static=static,
            probe=_probe(raw.nested("probe"), model) if raw.optional("probe") else None,
            recipe=raw.text("recipe", 64) if raw.optional("recipe") else None,
            drafter=raw.text("drafter", 64) if raw.optional("drafter") else None,
            swappable=room,
            opset=raw.integer("opset", 1, 100),
            ir_version=raw.integer("ir_version", 1, 100),
            provider=raw.text("provider", 64),
            parity=dict(raw.items("parity", 1000)),
            weights_bytes=raw.integer("weights_bytes", 0, 1 << 50),
            block_size=raw.integer("block_size", 1, 1 << 16) if raw.optional("block_size") else None,
            tools={k: str(v) for k, v in raw.items("tools", 100)},
            files=files,
            format_version=version,
        )


def read_base(manifest: Fields) -> BaseInfo:
    """The section `base` of a manifest."""
    raw = manifest.nested("base")
    revision = raw.text("revision", 256) if raw.optional("revision") else None
    return BaseInfo(raw.text("id", 1024), raw.digest("sha256"), raw.text("model_type", 64), revision)


def read_prompt_format(manifest: Fields) -> PromptFormat:
    """The section `prompt_format` of a manifest."""
    raw = manifest.nested("prompt_format")
    return PromptFormat(raw.choice("kind", KINDS), raw.text("separator"))


def read_drafts(manifest: Fields, model: ModelInfo) -> tuple[DrafterInfo | None, DraftTreeInfo | None]:
    """The sections `streams` and `trees` of a manifest."""
    streams = _streams(manifest.nested("streams"), model) if manifest.optional("streams") else None
    return streams, _trees(manifest.nested("trees"), streams) if manifest.optional("trees") else None


def _room(raw: Fields, model: ModelInfo) -> SwappableCapacity:
    ns = raw.integers("ns", 1, model.layers, MAX_LAYERS)
    if list(ns) != sorted(set(ns), reverse=True):
        raise raw.fail("ns", list(ns), "falling numbers of layers")
    return SwappableCapacity(
        ns=ns,
        candidates=raw.integer("candidates", 1, min(MAX_CANDIDATES, model.vocab_size)),
        **{name: raw.flag(name) for name in ("root_token", "bigram", "pruning", "draft_vocab")},
    )


def _model(raw: Fields) -> ModelInfo:
    vocab = raw.integer("vocab_size", 1, MAX_VOCAB)
    return ModelInfo(
        layers=raw.integer("layers", 1, MAX_LAYERS),
        kv_heads=raw.integer("kv_heads", 1, 1024),
        head_dim=raw.integer("head_dim", 1, 4096),
        vocab_size=vocab,
        hidden_size=raw.integer("hidden_size", 1, 1 << 20),
        context_length=raw.integer("context_length", 2, MAX_CONTEXT),
        eos_token_ids=raw.integers("eos_token_ids", 0, vocab - 1, 64),
        bos_token_id=raw.integer("bos_token_id", 0, vocab - 1) if raw.optional("bos_token_id") else None,
    )


def _streams(raw: Fields, model: ModelInfo) -> DrafterInfo:
    return DrafterInfo(
        gamma=raw.integer("gamma", 1, MAX_GAMMA),
        ns=raw.integer("ns", 0, model.layers),
        candidates=raw.integer("candidates", 1, min(MAX_CANDIDATES, model.vocab_size)),
        positions=raw.choice("positions", POSITIONS),
        root_token=raw.flag("root_token"),
        bigram=raw.flag("bigram"),
        pruning=raw.optional("pruning") and raw.flag("pruning"),
        levels=raw.integers("levels", 1, MAX_LEVEL, MAX_GAMMA) if raw.optional("levels") else (),
    )


def _static(raw: Fields, model: ModelInfo, streams: DrafterInfo | None) -> StaticInfo:
    if streams is not None and (streams.levels or streams.pruning):
        raise BundleError(
            "a static graph with a draft layer or an early exit",
            "streams, heads or no drafter",
            "export the bundle again",
        )
    return StaticInfo(
        raw.integer("rows", 2, MAX_STATIC_ROWS), raw.integer("slots", model.context_length, model.context_length)
    )


def _trees(raw: Fields, streams: DrafterInfo | None) -> DraftTreeInfo:
    if streams is None:
        raise BundleError("manifest.trees without manifest.streams", "both or neither", "export the bundle again")
    nodes: list[tuple[int, int, float]] = []
    depths: list[int] = []
    seen: set[tuple[int, int]] = set()
    for i, entry in enumerate(raw.array("nodes", MAX_NODES)):
        if not isinstance(entry, list) or len(entry) != 3:
            raise raw.fail(f"nodes[{i}]", entry, "[parent, rank, probability]")
        node = Fields(dict(zip(("parent", "rank", "probability"), entry, strict=True)), f"manifest.trees.nodes[{i}]")
        parent = node.integer("parent", 0, max(i - 1, 0))
        rank = node.integer("rank", 0, streams.candidates - 1 if i else 0)
        # A node is reached through its parent: the list would not be in order of probability otherwise.
        probability = node.number("probability", 0.0, nodes[parent][2] if i else 1.0)
        depths.append(depths[parent] + 1 if i else 0)
        if depths[-1] > streams.gamma:
            raise raw.fail(f"nodes[{i}]", f"at depth {depths[-1]}", f"depth {streams.gamma} or less, one per stream")
        if (parent, rank) in seen:
            raise raw.fail(f"nodes[{i}]", entry, "siblings with distinct ranks")
        if i:  # the root is its own parent, and a first child may be (0, 0) as well
            seen.add((parent, rank))
        nodes.append((parent, rank, probability))
    if not nodes:
        raise raw.fail("nodes", [], "at least the root")
    return DraftTreeInfo(tuple(nodes), raw.integer("default_rows", 1, MAX_NODES))


def _probe(raw: Fields, model: ModelInfo) -> ProbeInfo:
    last = model.vocab_size - 1
    ids, choices = raw.integers("input_ids", 0, last, MAX_PROBE), raw.integers("choices", 0, last, MAX_PROBE)
    logits = raw.numbers("top_logits", -MAX_LOGIT, MAX_LOGIT, MAX_PROBE)
    if not len(ids) == len(choices) == len(logits) or len(ids) > model.context_length:
        raise BundleError(
            f"manifest.probe has {len(ids)} ids, {len(choices)} choices and {len(logits)} logits",
            "equally many, within the context",
            "export the bundle again",
        )
    return ProbeInfo(ids, choices, logits)


def _files(raw: Fields) -> dict[str, FileInfo]:
    out: dict[str, FileInfo] = {}
    for name, value in raw.items("files", 1000):
        _check_name(name)
        info = Fields(value, f"manifest.files[{name}]")
        out[name] = FileInfo(info.digest("sha256"), info.integer("bytes", 0, 1 << 50))
    for name in REQUIRED_FILES:
        if name not in out:
            raise BundleError(f"manifest.files does not list {name}", f"an entry for {name}", "export the bundle again")
    return out


def _check_name(name: str) -> None:
    if not plain_name(name) or name == MANIFEST:
        raise BundleError(f"a file named {name[:100]!r}", "a plain file name", "do not use this bundle")


def plain_name(name: str) -> bool:
    """Whether a file or folder may be called so: no path leads out of where it lies."""
    return _NAME.fullmatch(name) is not None


def read_manifest(path: str | Path) -> Manifest:
    """The manifest of the bundle in folder `path`. Raises BundleError."""
    folder = Path(path)
    if not folder.is_dir():
        raise BundleError(f"{folder} is no folder", "a bundle folder", "check the path")
    return Manifest.from_json(
        read_small(folder, MANIFEST, "check the path; a bundle is what `streamspec export` writes", MAX_MANIFEST)
    )


def read_small(folder: Path, name: str, fix: str, most: int = MAX_JSON) -> bytes:
    """The file `name` of `folder`, if it is one by its kind and has no more bytes than `most`. Raises BundleError.

    It is looked at once more when it is open, and no more of it is read: one that is exchanged in between neither
    blocks nor fills the memory.
    """
    file = regular_file(folder, name, fix)
    try:
        handle = os.open(file, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        with open(handle, "rb") as stream:
            info = os.fstat(handle)
            data = stream.read(most + 1) if stat.S_ISREG(info.st_mode) else None
    except OSError as error:
        raise BundleError(f"{file}: {error.strerror}", "a readable file", fix) from None
    if data is None or len(data) > most:
        raise BundleError(f"{name} has {info.st_size} bytes", f"a file of at most {most}", "do not use this bundle")
    return data


def verify_files(path: str | Path, manifest: Manifest | None = None, hashes: bool = True) -> Manifest:
    """Checks every file the manifest lists: there, regular, inside the folder, of the right size, of the right sha256.

    All sizes are checked before the first hash. `hashes=False` stops there. Raises BundleError; returns the manifest.
    """
    folder = Path(path)
    manifest = manifest or read_manifest(folder)
    fix = "copy the bundle again or export it again"
    files = {name: regular_file(folder, name, fix) for name in manifest.files}
    check_files(files, manifest.files, hashes, fix)
    return manifest


def check_files(files: Mapping[str, Path], expected: Mapping[str, FileInfo], hashes: bool, fix: str) -> None:
    """All sizes, then, where wanted, all hashes. Raises BundleError."""
    for name, info in expected.items():
        size = files[name].stat().st_size
        if size != info.bytes:
            raise BundleError(f"{name} has {size} bytes", f"{info.bytes} bytes as the manifest says", fix)
    for name, info in expected.items() if hashes else ():
        try:
            found = sha256_file(files[name])
        except OSError as error:
            raise BundleError(f"{files[name]}: {error.strerror}", "a readable file", fix) from None
        if found != info.sha256:
            raise BundleError(f"{name} has sha256 {found[:12]}", f"{info.sha256[:12]} as the manifest says", fix)


def regular_file(folder: Path, name: str, fix: str) -> Path:
    """The file `name`, if it is a regular file that really lies in `folder`."""
    path = folder / name
    try:
        mode = path.stat().st_mode  # follows links; a pipe or device must not be opened
        inside = path.resolve(strict=True).parent == folder.resolve(strict=True)
    except (OSError, RuntimeError):  # RuntimeError: a loop of links
        raise BundleError(f"{folder} has no {name}", f"the file {name}", fix) from None
    if not stat.S_ISREG(mode) or not inside:
        raise BundleError(
            f"{name} is a link out of the folder or no regular file", "a regular file", "do not use this bundle"
        )
    return path


@contextlib.contextmanager
def bundle_folder(directory: str | Path, force: bool = False) -> Iterator[Path]:
    """Yields an empty folder to write a bundle into; on a clean exit it becomes `directory`, whole or not at all.

    Write the other files first, then call `finish(folder, manifest)`. Whatever goes wrong, Ctrl-C included, the
    previous state of `directory` stays. Raises BundleError where `directory` exists: an older bundle needs `force`, and
    a folder that is neither empty nor a bundle is never replaced.
    """
    target = Path(directory)
    recover(Path(os.path.realpath(target)))
    _check_replaceable(target, force)
    with new_folder(target, check=_check_finished) as staging:
        yield staging


def finish(folder: Path, manifest: Manifest) -> Manifest:
    """Hashes all files of `folder` and writes the manifest last. Returns it with `files` filled in."""
    files: dict[str, FileInfo] = {}
    for path in sorted(folder.iterdir()):
        if path.name == MANIFEST:
            continue
        _check_name(path.name)
        files[path.name] = FileInfo(sha256_file(path), path.stat().st_size)
    complete = replace(manifest, files=files)
    text = complete.to_json()
    Manifest.from_json(text)  # a manifest that we would refuse to load must not be written
    write_text(folder / MANIFEST, text)
    return complete


def write_bundle(
    directory: str | Path, files: Mapping[str, Path | bytes | str], manifest: Manifest, force: bool = False
) -> Manifest:
    """Writes a bundle from `files` (name -> source path to copy, bytes, or text). Errors as in `bundle_folder`."""
    with bundle_folder(directory, force) as folder:
        for name, content in files.items():
            _check_name(name)
            if isinstance(content, Path):
                shutil.copyfile(content, folder / name)
            else:
                (folder / name).write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
        return finish(folder, manifest)


def _check_finished(folder: Path) -> None:
    if not (folder / MANIFEST).is_file():
        raise BundleError("a bundle without a manifest", f"{MANIFEST}, written last", "call finish() before leaving")


def _check_replaceable(target: Path, force: bool) -> None:
    if not os.path.lexists(target):
        return
    if not target.is_dir():
        raise BundleError(f"{target} is a file", "a folder to create", "choose another --out")
    if not any(target.iterdir()):
        return
    try:
        parse_json((target / MANIFEST).read_bytes(), MANIFEST)["format_version"]
    except (OSError, StreamspecError, LookupError, TypeError):  # other programs have a manifest.json as well
        raise BundleError(f"{target} is neither empty nor a bundle", "a new folder", "choose another --out") from None
    if not force:
        raise BundleError(f"{target} already holds a bundle", "a new folder", "choose another --out or pass --force")
