"""Each field of the manifest has something that holds it; a bundle with one of them changed, its hashes right, is
refused in one line or answers as it did.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from streamspec.bundle.manifest import Manifest
from streamspec.bundle.onnx_check import STEERING
from streamspec.errors import StreamspecError
from streamspec.export import Target
from streamspec.runtime import Pruning, Sampling, load
from tests.support.tiny_bundles import tiny_bundle

GRAPH = "shapes, names and metadata of the graph"
PROBE = "the probe at load"
STATED = "a hash of its section in the graph's metadata"
FILES = "the files"
DRAFTS = "decides what is drafted, never what is answered; and " + STATED
WORDS = "harmless: words for people"
# What holds each field; a name ending in a dot stands for all below.
HELD = {
    "base.id": WORDS,
    "base.sha256": "harmless: adapters of another base are refused by it",
    "base.model_type": WORDS,
    "base.revision": WORDS,
    "method": "the sections streams and trees; and " + STATED,
    "precision": "probes allow the roundings it has; " + STATED,
    "model.layers": GRAPH,
    "model.kv_heads": GRAPH,
    "model.head_dim": GRAPH,
    "model.vocab_size": PROBE,
    "model.hidden_size": "memory estimates read it; " + STATED,
    "model.context_length": GRAPH,
    "model.eos_token_ids": STATED,
    "model.bos_token_id": STATED,
    "model.caches.": GRAPH,
    "model.heads": "memory estimates read it; " + STATED,
    "model.per_layer_width": "memory estimates read it; " + STATED,
    "model.skipped_layers": GRAPH + " without them; and " + STATED,
    "model.skipped_attention": GRAPH + " without it; and " + STATED,
    "model.skipped_mlps": STATED,
    "prompt_format.": STATED,
    "streams.gamma": GRAPH,
    "streams.ns": PROBE + ", pruned",
    "streams.candidates": GRAPH,
    "streams.positions": WORDS + "; and " + STATED,
    "streams.root_token": GRAPH,
    "streams.bigram": GRAPH,
    "streams.pruning": GRAPH,
    "streams.levels": GRAPH,
    "streams.eager": GRAPH,
    "streams.layers": GRAPH,
    "streams.own_keys": GRAPH,
    "streams.exit_layer": PROBE + ", pruned",
    "trees.nodes": DRAFTS,
    "trees.default_rows": DRAFTS,
    "static.": GRAPH,
    "captured.": STATED,
    "probe.": PROBE,
    "recipe": WORDS,
    "drafter": WORDS,
    "swappable.": GRAPH + "; adapters are compared with them; and " + STATED,
    "opset": WORDS,
    "ir_version": WORDS,
    "provider": WORDS,
    "parity": WORDS,
    "weights_bytes": WORDS,
    "block_size": WORDS + "; and " + STATED,
    "store.": FILES + ", read and compared whole; and " + STATED,
    "tools": WORDS,
    "files.": FILES + ", size and sha256",
    "format_version": "only one is read",
}


def fields(kind: Any, where: str = "") -> Iterator[str]:
    """Dotted names of all fields; a map or a list of records counts as one."""
    types = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        inner = [
            one for one in (types[field.name], *typing.get_args(types[field.name])) if dataclasses.is_dataclass(one)
        ]
        if inner and not str(types[field.name]).startswith(("dict", "tuple")):
            yield from fields(inner[0], f"{where}{field.name}.")
        else:
            yield where + field.name


def held(name: str) -> bool:
    return any(name == row or (row.endswith(".") and f"{name}.".startswith(row)) for row in HELD)


def test_every_field_has_a_row_and_every_row_a_field() -> None:
    names = list(fields(Manifest))
    assert [name for name in names if not held(name)] == []
    assert [row for row in HELD if not any(f"{name}.".startswith(row) or name == row for name in names)] == []


def test_a_row_that_speaks_of_the_metadata_is_of_a_section_that_is_there() -> None:
    assert {row.partition(".")[0] for row, holds in HELD.items() if STATED in holds} <= set(STEERING)


KINDS: dict[str, dict[str, Any]] = {
    "pruned": {"full": True, "kind": "chat"},
    "native": {"full": True, "precision": "int8"},
    "layer": {"method": "lists"},
    "static": {"target": Target(static=True, rows=8)},
}


@pytest.fixture(scope="module", params=KINDS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_bundle(tmp_path_factory.mktemp(request.param), **KINDS[request.param])


def answers(bundle: Path, cache: Path) -> list[Any]:
    drafter = json.loads((bundle / "manifest.json").read_text())["streams"]
    pruning = {"pruning": Pruning(2)} if drafter["pruning"] else {}
    session = load(bundle, threads=1, tree=8, cache_dir=cache, **pruning)
    texts, kinds = ("hello there", "a b c d e f"), (Sampling(), Sampling(temperature=1.0, seed=3))
    done = [session.generate(text, max_new_tokens=16, sampling=kind) for text in texts for kind in kinds]
    session.close()
    return [(one.token_ids, one.finish_reason, one.text) for one in done]


OTHERS = {"precision": ["fp32", "int8", "int4"], "kind": ["raw", "chat"], "positions": ["same", "shifted"]}
OTHERS |= {"method": ["medusa", "eagle", "streaming", "jakiro", "lora"], "dtype": ["float16"]}


def bent(name: str, value: Any) -> list[Any]:
    """Neighbouring values."""
    if isinstance(value, bool) or value is None:
        return [not value, 1]
    if isinstance(value, (int, float)):
        return [value + 1, value - 1]
    if isinstance(value, str):
        return [other for other in OTHERS.get(name, [f"{value}x", ""]) if other != value]
    first = [[value[0] + 1, *value[1:]]] if value and isinstance(value[0], int) else []
    return [value[:-1], *first]


def leaves(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(value, dict):
        for name in value:
            yield from leaves(value[name], (*at, name))
    else:
        yield at, value
        if isinstance(value, list) and value and isinstance(value[0], (list, dict)):
            yield from leaves(value[-1], (*at, len(value) - 1))


@pytest.mark.slow
def test_one_changed_field_is_refused_or_changes_no_answer(made: Path, tmp_path: Path) -> None:
    file = made / "manifest.json"
    text = file.read_text()
    good, right, refused, tried = json.loads(text), answers(made, tmp_path), set[str](), 0
    try:
        for path, value in leaves(good):
            if path[0] in ("files", "tools", "parity", "probe", "format_version"):
                continue
            for other in (one for one in bent(str(path[-1]), value) if one != value):
                changed = copy.deepcopy(good)
                at = changed
                for name in path[:-1]:
                    at = at[name]
                at[path[-1]] = other
                file.write_text(json.dumps(changed))
                tried += 1
                try:
                    now = answers(made, tmp_path)
                except StreamspecError as error:
                    assert "\n" not in str(error)
                    refused.add(str(path[0]))
                else:
                    assert now == right, f"{path} {value} -> {other}"
                    assert path[0] not in STEERING, f"{path} {value} -> {other} is not noticed"
    finally:
        file.write_text(text)
    assert {"method", "precision", "model", "prompt_format", "streams", "trees"} <= refused and tried > 60
