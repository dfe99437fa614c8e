"""Reads and writes adapters of a swappable bundle: a folder each, in the bundle's `adapters/` or anywhere else.

`adapter.json` describes the adapter, the graph it was made for, and the size and hash of its tensors' file;
`adapter.onnx_adapter` holds the tensors in ONNX Runtime's own format. Both are untrusted on load.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from streamspec.atomic import sha256_file, write_text
from streamspec.bundle.adapter_folder import STREAM_CONFIG, TASK_CONFIG
from streamspec.bundle.files import check_files, read_small, regular_file
from streamspec.bundle.manifest import (
    MODEL,
    BaseInfo,
    DrafterInfo,
    DraftTreeInfo,
    FileInfo,
    Manifest,
    plain_name,
    read_base,
    read_drafts,
    read_prompt_format,
)
from streamspec.errors import AdapterError, BundleError, ConfigError
from streamspec.json_fields import Fields, parse_json
from streamspec.prompt.prompt_format import PromptFormat

FORMAT_VERSION = 1
ADAPTERS, ADAPTER, TENSORS = "adapters", "adapter.json", "adapter.onnx_adapter"
SCALES = "smoothing.safetensors"  # beside the graph: what further adapters are converted with
METHODS = {"streaming": "streams", "lora": None}  # of `manifest.METHODS`: what a swappable graph has inputs for
AGAIN = "make it again with `streamspec adapt`"


@dataclass(frozen=True)
class SwappableAdapter:
    """The content of `adapter.json`. `graph`: fingerprint of the graph that the tensors fit; `ranks`: LoRA ranks of its
    parts, for people to read; `file`: size and hash of the tensors.
    """

    base: BaseInfo
    graph: str
    method: str
    prompt_format: PromptFormat
    recipe: str | None = None
    streams: DrafterInfo | None = None
    trees: DraftTreeInfo | None = None
    ranks: dict[str, int] = field(default_factory=dict)
    parity: dict[str, Any] = field(default_factory=dict)
    tools: dict[str, str] = field(default_factory=dict)
    file: FileInfo | None = None
    format_version: int = FORMAT_VERSION

    def on(self, bundle: Manifest) -> Manifest:
        """Returns the manifest of the bundle with this adapter in it."""
        drafter = self.method if self.streams else None
        return replace(
            bundle,
            method=self.method,
            recipe=self.recipe,
            drafter=drafter,
            prompt_format=self.prompt_format,
            streams=self.streams,
            trees=self.trees,
            files=bundle.files | ({TENSORS: self.file} if self.file else {}),
        )

    def to_json(self) -> str:
        """Returns JSON text. Raises ValueError for numbers JSON does not have."""
        content = asdict(self)
        if content["streams"]:
            for name in ("own_keys", "target_keys"):  # streams have none, and what says nothing is refused
                del content["streams"][name]
        return json.dumps(content, indent=1, allow_nan=False, ensure_ascii=False)

    @classmethod
    def from_json(cls, data: bytes | str, bundle: Manifest) -> SwappableAdapter:
        """Parses an adapter of `bundle`. Raises AdapterError for another base or graph than the bundle's and, naming
        the field, for anything malformed or beyond the bundle's capacity.
        """
        raw = Fields(
            parse_json(data.encode() if isinstance(data, str) else data, ADAPTER, AdapterError, AGAIN),
            "adapter",
            AdapterError,
            AGAIN,
        )
        version = raw.integer("format_version", 1, 1 << 31)
        if version != FORMAT_VERSION:
            raise AdapterError(
                f"a swappable adapter of format {version}",
                f"format {FORMAT_VERSION}",
                "update streamspec" if version > FORMAT_VERSION else AGAIN,
            )
        base, graph = read_base(raw), raw.digest("graph")
        _check_fits(base, graph, bundle)
        method = raw.choice("method", tuple(METHODS))
        streams, trees = read_drafts(raw, bundle.model)
        _check_drafter(method, streams, trees, bundle)
        tensors = raw.nested("file")
        return cls(
            base=base,
            graph=graph,
            method=method,
            prompt_format=read_prompt_format(raw),
            recipe=raw.text("recipe", 64) if raw.optional("recipe") else None,
            streams=streams,
            trees=trees,
            ranks={name: raw.nested("ranks").integer(name, 0, 1 << 20) for name, _ in raw.items("ranks", 16)},
            parity=dict(raw.items("parity", 1000)),
            tools={name: str(value) for name, value in raw.items("tools", 100)},
            file=FileInfo(tensors.digest("sha256"), tensors.integer("bytes", 0, 1 << 40)),
        )


def _check_fits(base: BaseInfo, graph: str, bundle: Manifest) -> None:
    """Raises AdapterError for an adapter of another base or graph than the bundle's."""
    if base.sha256 != bundle.base.sha256:
        raise AdapterError(
            f"an adapter of {base.id} (weights {base.sha256[:12]})",
            f"one of {bundle.base.id} (weights {bundle.base.sha256[:12]})",
            "use it with a bundle of its base",
        )
    if graph != fingerprint(bundle):
        raise AdapterError(
            f"an adapter for the graph {graph[:12]}", f"one for {fingerprint(bundle)[:12]}, the bundle's", AGAIN
        )


def _check_drafter(method: str, streams: DrafterInfo | None, trees: DraftTreeInfo | None, bundle: Manifest) -> None:
    """Raises AdapterError where method, streams and trees contradict each other or exceed the bundle's capacity."""
    capacity = bundle.swappable
    assert capacity is not None
    if (streams is None) != (METHODS[method] is None) or (streams is None) != (trees is None):
        raise AdapterError(
            f"method {method} with streams {'set' if streams else 'null'} and trees {'set' if trees else 'null'}",
            "both for streaming, and only there",
            AGAIN,
        )
    if streams is not None and (
        streams.levels
        or streams.layers
        or streams.ns not in capacity.ns
        or streams.candidates != capacity.candidates
        or streams.bigram > capacity.bigram
        or streams.root_token > capacity.root_token
        or streams.pruning > (capacity.pruning and streams.ns == capacity.ns[0])
    ):
        raise AdapterError(f"an adapter with {streams}", f"no more than the bundle has room for ({capacity})", AGAIN)


def fingerprint(bundle: Manifest) -> str:
    """Hashes a bundle's graph and weights, which an adapter's tensors are made for: 64 hex digits."""
    parts = [f"{name} {info.sha256}" for name, info in sorted(bundle.files.items()) if name.startswith(MODEL)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def check_swappable(bundle: Manifest) -> None:
    """Raises ConfigError for a bundle that takes no adapters."""
    if bundle.swappable is None:
        raise ConfigError(
            "a bundle that takes no adapters",
            "one of `streamspec export --swappable`",
            "export it so, or leave the adapter out",
        )


def names(bundle: Path) -> list[str]:
    """Lists the adapters in a bundle's own folder, sorted by name."""
    try:
        return sorted(
            path.name for path in (bundle / ADAPTERS).iterdir() if plain_name(path.name) and (path / ADAPTER).is_file()
        )
    except OSError:
        return []


def find(bundle: Path, adapter: str | Path) -> Path:
    """Finds the folder of an adapter by its name in the bundle or by its path. Raises AdapterError."""
    if isinstance(adapter, str) and plain_name(adapter) and (bundle / ADAPTERS / adapter / ADAPTER).is_file():
        return bundle / ADAPTERS / adapter
    if (Path(adapter) / ADAPTER).is_file():
        return Path(adapter)
    if any((Path(adapter) / name).is_file() for name in (STREAM_CONFIG, TASK_CONFIG)):
        raise AdapterError(
            f"{adapter} is an adapter as it was trained",
            "one converted for this bundle",
            f"streamspec adapt {bundle} {adapter}",
        )
    known = names(bundle)
    raise AdapterError(
        f"no adapter {str(adapter)!r}",
        f"{', '.join(known) or 'a folder of `streamspec adapt`'}",
        "correct the name or the path",
    )


def read(folder: Path, bundle: Manifest, hashes: bool = True) -> SwappableAdapter:
    """Reads the adapter in `folder` and checks the size and hash of its tensors. Raises AdapterError."""
    try:
        adapter = SwappableAdapter.from_json(read_small(folder, ADAPTER, AGAIN), bundle)
        assert adapter.file is not None
        check_files({TENSORS: regular_file(folder, TENSORS, AGAIN)}, {TENSORS: adapter.file}, hashes, AGAIN)
    except BundleError as error:
        raise AdapterError(f"{folder}: {error.found}", error.expected, AGAIN) from None
    return adapter


def write(folder: Path, adapter: SwappableAdapter, bundle: Manifest) -> SwappableAdapter:
    """Writes `adapter.json` beside the tensors in `folder`. Returns it with `file` filled in."""
    tensors = folder / TENSORS
    complete = replace(adapter, file=FileInfo(sha256_file(tensors), tensors.stat().st_size))
    text = complete.to_json()
    SwappableAdapter.from_json(text, bundle)  # never write an adapter that would be refused on load
    write_text(folder / ADAPTER, text)
    return complete
