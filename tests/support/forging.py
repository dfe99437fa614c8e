"""Tools of the attacks: a bundle's files replaced so that its hashes agree again."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from google.protobuf.message import DecodeError

from streamspec.bundle.files import read_manifest
from streamspec.bundle.manifest import MODEL, Manifest
from streamspec.bundle.onnx_check import OVER_MODEL
from streamspec.bundle.swappable_adapters import fingerprint
from streamspec.errors import StreamspecError
from streamspec.export.bundle_writer import state
from streamspec.runtime import load


def edit(bundle: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Changes the manifest, and has the graphs and adapters made for it agree."""
    manifest, adapters = (
        json.loads((bundle / "manifest.json").read_text()),
        list(bundle.glob("adapters/*/adapter.json")),
    )
    before = fingerprint(read_manifest(bundle)) if adapters else ""
    change(manifest)
    restate(bundle, manifest)
    for name in (MODEL, *OVER_MODEL):
        with contextlib.suppress(OSError):
            content = (bundle / name).read_bytes()
            manifest["files"][name] = {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
    (bundle / "manifest.json").write_text(json.dumps(manifest))
    for adapter in adapters:
        adapter.write_text(adapter.read_text().replace(before, fingerprint(read_manifest(bundle))))


def restate(bundle: Path, manifest: dict[str, Any]) -> None:
    """Writes the hashes of a manifest that can be read into the metadata of the graphs that can be."""
    for name in (MODEL, *OVER_MODEL):
        with contextlib.suppress(OSError, DecodeError, StreamspecError):
            state(bundle / name, Manifest.from_json(json.dumps(manifest)))


def strip(bundle: Path, **changes: Any) -> None:
    """Takes all metadata out of the graph, and makes `changes` in the manifest, which agrees."""
    graph = onnx.load(bundle / MODEL, load_external_data=False)
    del graph.metadata_props[:]
    replace_graph(bundle, graph, **changes)


def replace_graph(bundle: Path, graph: onnx.ModelProto, **changes: Any) -> None:
    """Replaces the graph with its metadata as they are; makes `changes` in the manifest, which agrees."""
    content, manifest = graph.SerializeToString(), json.loads((bundle / "manifest.json").read_text())
    manifest["files"][MODEL] = {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
    (bundle / MODEL).write_bytes(content)
    (bundle / "manifest.json").write_text(json.dumps(manifest | changes))


def forge(bundle: Path, name: str, content: bytes) -> None:
    """Replaces a file and makes the manifest agree."""
    (bundle / name).write_bytes(content)
    edit(
        bundle,
        lambda manifest: manifest["files"].update(
            {name: {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}}
        ),
    )


def refused(bundle: Path, match: str, **options: Any) -> None:
    """Loading ends in one line."""
    with pytest.raises(StreamspecError, match=match) as caught:
        load(bundle, threads=1, tree="plain", **options)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1500
