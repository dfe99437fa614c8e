"""Defines `manifest.json`, the description of a bundle: its fields and their limits.

A manifest is untrusted on load: every field is parsed strictly, and every error names the field.
`streamspec.bundle.files` reads the folder.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field
from typing import Any

from streamspec.bundle.cache_section import COMPACT, read_sizes
from streamspec.bundle.model_section import AGAIN, MAX_LAYERS, ModelInfo, check_model, read_model, without_defaults
from streamspec.bundle.sampling_section import read_sampling
from streamspec.bundle.store_section import StoreInfo, read_store
from streamspec.captured.packed_call import CallSizes
from streamspec.draft_tree import MAX_GAMMA, DraftTree
from streamspec.errors import BundleError, ConfigError
from streamspec.json_fields import Fields, parse_json
from streamspec.layer_cache import dtype_in_words
from streamspec.prompt.prompt_format import KINDS, PromptFormat

FORMAT_VERSION, OLDEST_FORMAT = 5, 4  # 4: tokens can be masked; 5: graphs state what they were made for
MANIFEST, MODEL, TOKENIZER, TEMPLATE = "manifest.json", "model.onnx", "tokenizer.json", "chat_template.jinja"
DYNAMIC, NATIVE_OPS, STATIC, DEVICE = "dynamic", "native", "static", "device"  # flavours of bundles
CHOICE = "choose.onnx"  # of a static bundle: samples tokens where decoding is not greedy
# Session entries of a static graph on the CPU: without them ONNX Runtime picks kernels that round rows to 8 bits.
FLOAT_ROWS = {"session.disable_quant_qdq": "1"}
NATIVE = "native.onnx"  # of a bundle for CPUs: the step graph of native operators, over the data of `model.onnx`
REQUIRED_FILES = (MODEL, TOKENIZER)
DATA = ".data"  # how the names of files of weights end
DRAFT_CANDIDATES, BIGRAM_CANDIDATES = 10, 32  # per stream; a bigram promotes candidates from further down

# Method of training -> the kind of its drafter, None where there is none.
METHODS: dict[str, str | None] = {
    "streaming": "streams",
    "medusa": "heads",
    **dict.fromkeys(("jakiro", "eagle", "eagle-lora", "mtp", "hydra", "eagle3"), "draft layer"),
    **dict.fromkeys(("dflash", "dspark"), "block"),
    "lora": None,
}
OWN_WEIGHTS = "gguf"  # the precision of a GGUF file's own weights
PRECISIONS = ("fp32", "fp16", "int8", "int4", OWN_WEIGHTS)
DRAFT_LAYERS = tuple(method for method, kind in METHODS.items() if kind == "draft layer")
POSITIONS = ("shifted", "same")
MAX_LEVEL = 64  # rows of candidates at one depth
MAX_NODES, MAX_CANDIDATES, MAX_STATIC_ROWS, MAX_WIDTH = 256, 1024, 256, 4096
MAX_PROBE, MAX_LOGIT = 4096, 1e6
MAX_MANIFEST = 2 << 20  # bytes; 16 MB of nested lists would take four seconds to parse
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,126}")


@dataclass(frozen=True)
class BaseInfo:
    """The base model of the bundle. `sha256` is over its weights (docs/reference/adapter-format.md)."""

    id: str
    sha256: str
    model_type: str
    revision: str | None = None


@dataclass(frozen=True)
class DrafterInfo:
    """The drafter: `gamma` streams over the last `ns` layers, or heads or depths of a draft layer (`ns` 0); each
    proposes `candidates` tokens. `levels`, of a draft layer only: rows of candidates at each depth. A draft layer has a
    layer of its own in the KV cache, or none where it attends to the `target_keys`, a block drafter so many `layers`;
    `own_keys`: heads and width of its keys, 0 where they are the model's. `eager`: streams run beside every node,
    without the root token. `exit_layer`: whose input the early exit reads; None: that of the last `ns` layers.
    """

    gamma: int
    ns: int
    candidates: int = DRAFT_CANDIDATES
    positions: str = "shifted"
    root_token: bool = True
    bigram: bool = False
    pruning: bool = False
    levels: tuple[int, ...] = ()
    eager: bool = False
    layers: int = 0
    exit_layer: int | None = None
    own_keys: tuple[int, ...] = (0, 0)
    target_keys: bool = False

    @property
    def own_layers(self) -> int:
        """Layers of its own in the KV cache."""
        return self.layers or int(bool(self.levels) and not self.target_keys)

    def pruned_from(self, layers: int) -> int | None:
        """The first layer of `layers` that pruned rows do not enter; None without an early exit."""
        first = layers - self.ns if self.exit_layer is None else self.exit_layer
        return first if self.pruning else None


@dataclass(frozen=True)
class StaticInfo:
    """A graph of fixed shapes: `rows` rows in every call, `slots` tokens in the KV cache (the whole context)."""

    rows: int
    slots: int


@dataclass(frozen=True)
class SwappableCapacity:
    """Limits of the adapters of a swappable bundle: streams over as many layers as one of `ns` (falling; empty: no
    streams) with `candidates` candidates each; see `DrafterInfo`. An early exit needs the first of `ns`. `draft_vocab`:
    adapters may bring a draft vocabulary of their own.
    """

    ns: tuple[int, ...] = ()
    candidates: int = DRAFT_CANDIDATES
    root_token: bool = False
    bigram: bool = False
    pruning: bool = False
    draft_vocab: bool = False

    def __str__(self) -> str:
        if not self.ns:
            return "a task LoRA alone"
        flags = [name for name in ("root_token", "bigram", "pruning", "draft_vocab") if getattr(self, name)]
        layers = f"streams over {' or '.join(map(str, self.ns))} layers"
        return ", ".join([layers, *(name.replace("_", " ") for name in flags)])


@dataclass(frozen=True)
class DraftTreeInfo:
    """Nodes (parent, rank, probability) in order of falling probability. The tree of n rows is the first n nodes."""

    nodes: tuple[tuple[int, int, float], ...]
    default_rows: int

    def tree(self, rows: int | None = None) -> DraftTree:
        """Returns the tree of `rows` rows (default: `default_rows`), laid out depth-first."""
        return DraftTree.from_nodes(self.nodes, self.default_rows if rows is None else rows)


@dataclass(frozen=True)
class ProbeInfo:
    """The self-test of a bundle: token ids, the greedy token after each of them, and that token's logit."""

    input_ids: tuple[int, ...]
    choices: tuple[int, ...]
    top_logits: tuple[float, ...]


@dataclass(frozen=True)
class FileInfo:
    """Hash (64 hex digits) and size of one file of the bundle."""

    sha256: str
    bytes: int


@dataclass(frozen=True)
class Manifest:
    """The content of `manifest.json`. `files` is filled in when the bundle is written. `swappable`: the graph holds the
    base alone and takes adapters at run time (`streamspec.bundle.swappable_adapters`). `streams`: the shape of the
    drafter, whatever its method; `drafter`: its name, that of the method or, of a published one, what its publisher
    calls it. Both are None where there is none.
    """

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
    weights_sha256: str | None = None  # of what answers, however it is rounded: the base and the LoRA merged into it
    block_size: int | None = None  # of int4: weights that share a scale
    store: StoreInfo | None = None  # of answers, to draft from
    captured: CallSizes | None = None  # sizes of the graph that a device captures
    sampling: dict[str, Any] = field(default_factory=dict)  # fields of `Sampling` that the base's publisher recommends
    tools: dict[str, str] = field(default_factory=dict)
    files: dict[str, FileInfo] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION

    @property
    def flavour(self) -> str:
        """Static: one shape and primitive operators, for providers that compile; device: operators and a cache for a
        device with memory of its own; native: of any number of rows, with a graph of our own operators too; else
        dynamic."""
        kinds = ((STATIC, self.static), (DEVICE, COMPACT in self.files), (NATIVE_OPS, NATIVE in self.files))
        return next((kind for kind, so in kinds if so), DYNAMIC)

    @property
    def model_file(self) -> str:
        """The graph of standard operators, by its path in the folder."""
        return MODEL

    @property
    def cache_copies(self) -> int:
        """How often a session holds its keys and values."""
        return 1

    @property
    def data_bytes(self) -> int:
        """Size of the weights of all graphs."""
        return sum(info.bytes for name, info in self.files.items() if name.endswith(DATA))

    @property
    def why_plain(self) -> str:
        """Why nothing is drafted unless a number of rows is asked for; '' where drafts are exact."""
        return ""

    @property
    def rounding(self) -> str:
        """The precision in words, such as `int4 in blocks of 32 with K/V in float16`."""
        blocks = f" in blocks of {self.block_size}" if self.block_size else ""
        return self.precision + blocks + dtype_in_words(self.model.caches)

    @property
    def trained(self) -> str:
        """What was trained, in words: a drafter's method and recipe, `lora` for a LoRA in the weights, or none."""
        if METHODS[self.method] is not None or self.weights_sha256 not in (None, self.base.sha256):
            return " / ".join(filter(None, (self.method, self.recipe)))
        return "none: the base alone" if self.weights_sha256 else "none or lora: this older bundle does not tell"

    def check_prunes(self) -> None:
        """Raises ConfigError for a bundle without an early exit."""
        if self.streams is None or not self.streams.pruning:
            raise ConfigError(
                "pruning for a bundle without an early exit", "a bundle trained with --prune-rank", "leave pruning out"
            )

    def to_json(self) -> str:
        """Returns JSON text. Raises ValueError for numbers JSON does not have (NaN, infinities)."""
        content = asdict(self)
        content["model"] = without_defaults(content["model"])
        for section, names in (
            (content, ("store", "captured", "sampling")),
            (content["streams"], ("layers", "own_keys", "target_keys")),
        ):
            for name in names if section else ():  # left out where they say nothing, as they once were in all
                if section[name] in (None, 0, (0, 0), {}):
                    del section[name]
        return json.dumps(content, indent=1, allow_nan=False, ensure_ascii=False)

    @classmethod
    def from_json(cls, data: bytes | str) -> Manifest:
        """Parses a manifest. Raises BundleError, naming the field, for malformed ones and other format versions."""
        text = data.encode() if isinstance(data, str) else data
        raw = Fields(parse_json(text, MANIFEST, most=MAX_MANIFEST), "manifest")
        version = _version(raw)
        method = raw.choice("method", tuple(METHODS))
        model = read_model(raw.nested("model"))
        streams, trees = read_drafts(raw, model)
        _check_drafter(method, streams, trees)
        static = _static(raw.nested("static"), model, streams) if raw.optional("static") else None
        swappable = _swappable(raw.nested("swappable"), model) if raw.optional("swappable") else None
        if swappable is not None and (streams is not None or static is not None or model.embeddings):
            found = "a swappable bundle with streams of its own, fixed shapes or embeddings"
            raise BundleError(found, "streams in its adapters, shapes that change, no embeddings", AGAIN)
        files = _files(raw)
        if static is not None and CHOICE not in files:
            raise BundleError(f"a static bundle without {CHOICE}", f"an entry for {CHOICE} in manifest.files", AGAIN)
        store = read_store(raw, model.vocab_size, {name: info.bytes for name, info in files.items()})
        captured = read_sizes(raw, model.context_length, files)
        precision = raw.choice("precision", PRECISIONS)
        check_model(model, precision, files, NATIVE, CHOICE)
        return cls(
            base=read_base(raw),
            method=method,
            precision=precision,
            model=model,
            prompt_format=read_prompt_format(raw),
            streams=streams,
            trees=trees,
            static=static,
            probe=_probe(raw.nested("probe"), model) if raw.optional("probe") else None,
            recipe=raw.text("recipe", 64) if raw.optional("recipe") else None,
            drafter=raw.text("drafter", 64) if raw.optional("drafter") else None,
            swappable=swappable,
            opset=raw.integer("opset", 1, 100),
            ir_version=raw.integer("ir_version", 1, 100),
            provider=raw.text("provider", 64),
            parity=dict(raw.items("parity", 1000)),
            weights_bytes=raw.integer("weights_bytes", 0, 1 << 50),
            weights_sha256=raw.digest("weights_sha256") if raw.optional("weights_sha256") else None,
            block_size=raw.integer("block_size", 1, 1 << 16) if raw.optional("block_size") else None,
            store=store,
            captured=captured,
            sampling=read_sampling(raw.nested("sampling")) if raw.optional("sampling") else {},
            tools={k: str(v) for k, v in raw.items("tools", 100)},
            files=files,
            format_version=version,
        )


def _version(raw: Fields) -> int:
    version = raw.integer("format_version", 1, 1 << 31)
    if not OLDEST_FORMAT <= version <= FORMAT_VERSION:
        fix = "update streamspec" if version > FORMAT_VERSION else "export it again"
        raise BundleError(f"a bundle of format {version}", f"format {FORMAT_VERSION}", fix)
    return version


def _check_drafter(method: str, streams: DrafterInfo | None, trees: DraftTreeInfo | None) -> None:
    """Raises BundleError where method, streams and trees contradict each other."""
    drafter = METHODS[method]
    if (drafter is None) != (streams is None) or (streams is None) != (trees is None):
        found = f"streams {'set' if streams else 'null'} and trees {'set' if trees else 'null'}"
        raise BundleError(f"method {method} with {found}", "streams and trees for every method but lora", AGAIN)
    if streams is not None:
        _check_draft_layers(method, streams)
        _check_streams(method, streams)


def _check_draft_layers(method: str, streams: DrafterInfo) -> None:
    """Raises BundleError for layers of the drafter's own that its method does not have."""
    drafter, levels, keys = METHODS[method], list(streams.levels), list(streams.own_keys)
    if len(keys) != 2:
        raise BundleError(f"manifest.streams.own_keys {keys}", "heads and their width", AGAIN)
    if bool(levels) != (drafter == "draft layer"):
        raise BundleError(f"method {method} with levels {levels}", f"levels for {' and '.join(DRAFT_LAYERS)}", AGAIN)
    if levels and (len(levels) != streams.gamma or levels[0] != 1):
        raise BundleError(f"levels {levels}", f"{streams.gamma}, the first of one row", AGAIN)
    if bool(streams.layers) != (drafter == "block"):
        raise BundleError(f"method {method} with {streams.layers} layers of its own", "some for dflash alone", AGAIN)
    if streams.target_keys and not levels:
        raise BundleError(f"method {method} over the target's keys", "a draft layer", AGAIN)


def _check_streams(method: str, streams: DrafterInfo) -> None:
    """Raises BundleError for properties of Speculative Streams that contradict each other or the method."""
    drafter = METHODS[method]
    if (streams.ns == 0) != (drafter != "streams") or (streams.pruning and not streams.ns):
        found = f"method {method} with streams over {streams.ns} layers"
        raise BundleError(found, "layers for streaming, and only there", AGAIN)
    if streams.exit_layer is not None and not streams.pruning:
        raise BundleError(f"exit_layer {streams.exit_layer} without pruning", "both or neither", AGAIN)
    if streams.eager and (drafter != "streams" or streams.root_token):
        raise BundleError(f"method {method} with eager streams", "streams without the root token", AGAIN)


def read_base(manifest: Fields) -> BaseInfo:
    """Reads the section `base` of a manifest or of an adapter."""
    raw = manifest.nested("base")
    revision = raw.text("revision", 256) if raw.optional("revision") else None
    return BaseInfo(raw.text("id", 1024), raw.digest("sha256"), raw.text("model_type", 64), revision)


def read_prompt_format(manifest: Fields) -> PromptFormat:
    """Reads the section `prompt_format` of a manifest or of an adapter."""
    raw = manifest.nested("prompt_format")
    return PromptFormat(raw.choice("kind", KINDS), raw.text("separator"))


def read_drafts(manifest: Fields, model: ModelInfo) -> tuple[DrafterInfo | None, DraftTreeInfo | None]:
    """Reads the sections `streams` and `trees` of a manifest or of an adapter."""
    streams = _streams(manifest.nested("streams"), model) if manifest.optional("streams") else None
    return streams, _trees(manifest.nested("trees"), streams) if manifest.optional("trees") else None


def _swappable(raw: Fields, model: ModelInfo) -> SwappableCapacity:
    ns = raw.integers("ns", 1, model.layers, MAX_LAYERS)
    if list(ns) != sorted(set(ns), reverse=True):
        raise raw.fail("ns", list(ns), "falling numbers of layers")
    return SwappableCapacity(
        ns=ns,
        candidates=raw.integer("candidates", 1, min(MAX_CANDIDATES, model.vocab_size)),
        **{name: raw.flag(name) for name in ("root_token", "bigram", "pruning", "draft_vocab")},
    )


def _streams(raw: Fields, model: ModelInfo) -> DrafterInfo:
    ns = raw.integer("ns", 0, model.layers)
    return DrafterInfo(
        gamma=raw.integer("gamma", 1, MAX_GAMMA),
        ns=ns,
        candidates=raw.integer("candidates", 1, min(MAX_CANDIDATES, model.vocab_size)),
        positions=raw.choice("positions", POSITIONS),
        root_token=raw.flag("root_token"),
        bigram=raw.flag("bigram"),
        pruning=raw.optional("pruning") and raw.flag("pruning"),
        levels=raw.integers("levels", 1, MAX_LEVEL, MAX_GAMMA) if raw.optional("levels") else (),
        eager=raw.optional("eager") and raw.flag("eager"),
        layers=raw.integer("layers", 0, MAX_LAYERS) if raw.optional("layers") else 0,
        exit_layer=raw.integer("exit_layer", 1, max(1, model.layers - ns)) if raw.optional("exit_layer") else None,
        own_keys=raw.integers("own_keys", 1, MAX_WIDTH, 2) if raw.optional("own_keys") else (0, 0),
        target_keys=raw.optional("target_keys") and raw.flag("target_keys"),
    )


def _static(raw: Fields, model: ModelInfo, streams: DrafterInfo | None) -> StaticInfo:
    if streams is not None and (streams.pruning or streams.eager):
        raise BundleError("a static graph with an early exit or with eager streams", "neither", AGAIN)
    return StaticInfo(
        raw.integer("rows", 2, MAX_STATIC_ROWS), raw.integer("slots", model.context_length, model.context_length)
    )


def _trees(raw: Fields, streams: DrafterInfo | None) -> DraftTreeInfo:
    if streams is None:
        raise BundleError("manifest.trees without manifest.streams", "both or neither", AGAIN)
    nodes: list[tuple[int, int, float]] = []
    depths: list[int] = []
    seen: set[tuple[int, int]] = set()
    for i, entry in enumerate(raw.array("nodes", MAX_NODES)):
        if not isinstance(entry, list) or len(entry) != 3:
            raise raw.fail(f"nodes[{i}]", entry, "[parent, rank, probability]")
        node = Fields(dict(zip(("parent", "rank", "probability"), entry, strict=True)), f"manifest.trees.nodes[{i}]")
        parent = node.integer("parent", 0, max(i - 1, 0))
        rank = node.integer("rank", 0, streams.candidates - 1 if i else 0)
        # A path is never more probable than its prefix: nodes stand in order of falling probability.
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
        found = f"manifest.probe has {len(ids)} ids, {len(choices)} choices and {len(logits)} logits"
        raise BundleError(found, "equally many, within the context", AGAIN)
    return ProbeInfo(ids, choices, logits)


def _files(raw: Fields) -> dict[str, FileInfo]:
    out: dict[str, FileInfo] = {}
    for name, value in raw.items("files", 1000):
        check_name(name)
        info = Fields(value, f"manifest.files[{name}]")
        out[name] = FileInfo(info.digest("sha256"), info.integer("bytes", 0, 1 << 50))
    for name in REQUIRED_FILES:
        if name not in out:
            raise BundleError(f"manifest.files does not list {name}", f"an entry for {name}", AGAIN)
    return out


def check_name(name: str) -> None:
    """Raises BundleError for a name that a bundle's file may not have."""
    if not plain_name(name) or name == MANIFEST:
        raise BundleError(f"a file named {name[:100]!r}", "a plain file name", "do not use this bundle")


def plain_name(name: str) -> bool:
    """Whether a file or folder may have this name: a single component, no path out of its folder."""
    return _NAME.fullmatch(name) is not None
