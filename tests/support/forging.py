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
from streamspec.bundle.manifest import MODEL
from streamspec.bundle.onnx_check import OVER_MODEL
from streamspec.bundle.swappable_adapters import fingerprint
from streamspec.errors import StreamspecError
from streamspec.runtime import load


def edit(bundle: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Changes the manifest, and has the graph and adapters made for it agree."""
    manifest, adapters = (
        json.loads((bundle / "manifest.json").read_text()),
        list(bundle.glob("adapters/*/adapter.json")),
    )
    before = fingerprint(read_manifest(bundle)) if adapters else ""
    change(manifest)
    for name in (MODEL, *OVER_MODEL):
        with contextlib.suppress(OSError, DecodeError):
            graph = onnx.load(bundle / name, load_external_data=False)
            stated = {one.key: one.value for one in graph.metadata_props if not one.key.startswith("manifest.")}
            onnx.helper.set_model_props(graph, stated)
            onnx.save(graph, bundle / name)
            content = (bundle / name).read_bytes()
            manifest["files"][name] = {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
    (bundle / "manifest.json").write_text(json.dumps(manifest))
    for adapter in adapters:
        adapter.write_text(adapter.read_text().replace(before, fingerprint(read_manifest(bundle))))


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
