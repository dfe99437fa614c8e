"""Each field of the manifest has something that holds it; a bundle of any kind with one of them changed, its hashes
right, is refused in one line or answers as it did.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import typing
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import onnx
import pytest
from transformers import AutoModelForCausalLM

from streamspec.adapters.base_models.resolve import resolve_base
from streamspec.bundle.manifest import MODEL, Manifest
from streamspec.bundle.onnx_check import OVER_MODEL, STEERING, digests, shortened
from streamspec.errors import BundleError, StreamspecError
from streamspec.export import Target, export_bundle, export_swappable
from streamspec.export.answer_store import StoreFiles
from streamspec.runtime import Pruning, Sampling, load
from tests.export.drafters.test_dflash import save_drafter
from tests.support.forging import edit, refused, replace_graph, restate, strip
from tests.support.tiny_bundles import tiny_adapter, tiny_base, tiny_bundle
from tests.support.tiny_models import SIZES, tiny_model, tiny_tokenizer

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
    "model.idle_share": "memory estimates read it; " + STATED,
    "model.embeddings": GRAPH,
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
    "streams.target_keys": GRAPH,
    "streams.exit_layer": PROBE + ", pruned",
    "trees.nodes": DRAFTS,
    "trees.default_rows": DRAFTS,
    "static.": GRAPH,
    "captured.": STATED,
    "probe.": PROBE,
    "recipe": WORDS,
    "drafter": WORDS,
    "sampling": "harmless: where conversations begin that say nothing of sampling; bounded",
    "swappable.": GRAPH + "; adapters are compared with them; and " + STATED,
    "opset": WORDS,
    "ir_version": WORDS,
    "provider": WORDS,
    "parity": WORDS,
    "weights_bytes": WORDS,
    "weights_sha256": WORDS + "; one bundle's is compared with another's",
    "block_size": WORDS + "; and " + STATED,
    "store.": FILES + ", read and compared whole; and " + STATED,
    "tools": WORDS,
    "files.sha256": FILES,
    "files.bytes": FILES,
    "format_version": "bounded positions of the graph are of format 5 or later, others of format 4",
}


def fields(kind: Any, where: str = "") -> Iterator[str]:
    """Dotted names of all fields, those of the records in maps and lists, too; of a record within one of its own kind,
    the name alone.
    """
    types = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        inner = [
            one for one in (types[field.name], *typing.get_args(types[field.name])) if dataclasses.is_dataclass(one)
        ]
        if inner and inner[0] is not kind:
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


def streams(folder: Path, **options: Any) -> Path:
    return tiny_bundle(folder, **options)


def windowed(folder: Path) -> Path:
    changes = SIZES["gemma3_text"] | {"initializer_range": 0.4, "eos_token_id": None}
    tiny_model("gemma3_text", **changes).save_pretrained(folder / "base")
    tiny_tokenizer().save_pretrained(folder / "base")
    return tiny_bundle(folder, base=folder / "base")


def block(folder: Path) -> Path:
    base = tiny_base(folder / "base")
    model = AutoModelForCausalLM.from_pretrained(base)
    save_drafter(folder / "adapter", resolve_base(base, lambda line: None), model)
    export_bundle(base, folder / "adapter", folder / "bundle", "fp32", progress=lambda line: None)
    return folder / "bundle"


def swappable(folder: Path) -> Path:
    base = tiny_base(folder / "base")
    export_swappable(base, [tiny_adapter(folder / "one", base)], folder / "bundle", "fp32", progress=lambda line: None)
    return folder / "bundle"


def plain(folder: Path, **options: Any) -> Path:
    base = tiny_base(folder / "base")
    export_bundle(base, None, folder / "bundle", "fp32", progress=lambda line: None, **options)
    return folder / "bundle"


def stored(folder: Path) -> Path:
    (folder / "text.txt").write_text("hello there, there and there again")
    return plain(folder, store=StoreFiles([folder / "text.txt"]))


CAPTURE = Target("cuda", capture=True, row_counts=(1, 4, 8), context=128)
# How a bundle is made, what it is loaded with beside the usual, and the fields that it has of its own kind.
KINDS: dict[str, tuple[Callable[[Path], Path], dict[str, Any], tuple[str, ...]]] = {
    "pruned": (partial(streams, full=True, kind="chat"), {"pruning": Pruning(2)}, STEERING),
    "native": (partial(streams, full=True, precision="int8"), {"pruning": Pruning(2)}, ("precision", "streams.ns")),
    "eager": (partial(streams, full=True, root_token=False, when="eager"), {}, ("streams.eager", "streams.ns")),
    "lists": (partial(streams, method="lists"), {}, ("method", "streams.levels", "streams.gamma")),
    "eagle": (partial(streams, method="eagle"), {}, ("method", "streams.levels", "streams.gamma")),
    "block": (block, {}, ("method", "streams.layers", "streams.gamma")),
    "static": (partial(streams, target=Target(static=True, rows=8)), {}, ("static", "streams.gamma", "model.context")),
    "captured": (partial(streams, target=CAPTURE), {}, ("captured",)),
    "windowed": (windowed, {"pruning": Pruning(2)}, ("model.caches", "model.head", "model.kv_heads", "streams.ns")),
    "swappable": (swappable, {"adapter": "one"}, ("swappable", "method", "streams", "trees")),
    "stored": (stored, {}, ("store",)),
    "short": (
        partial(plain, self_draft="1", embeddings=True),
        {"draft": "self"},
        ("model.skipped_layers", "model.embeddings"),
    ),
}
# Change answers, and are not the graph's: a hash in its metadata is all that holds them.
ANSWERS = "model.eos_token_ids", "model.bos_token_id", "prompt_format.kind", "prompt_format.separator"


@dataclasses.dataclass(frozen=True)
class Made:
    """A bundle; the metadata of its graphs as they were `hashed`, by file; its row's `options` and `own` fields; its
    manifest.
    """

    bundle: Path
    options: dict[str, Any]
    own: tuple[str, ...]
    good: dict[str, Any]
    hashed: list[tuple[str, dict[str, str]]]

    def answers(self, manifest: dict[str, Any]) -> list[Any]:
        """With this manifest, and with its hashes in the graphs' metadata."""
        (self.bundle / "manifest.json").write_text(json.dumps(manifest))
        restate(self.bundle, manifest)
        session = load(self.bundle, threads=1, tree=8, cache_dir=self.bundle.parent, verify=False, **self.options)
        kinds = Sampling(), Sampling(temperature=1.0, seed=3)
        done = [session.generate("hello there", max_new_tokens=16, sampling=kind) for kind in kinds]
        session.close()
        return [(one.token_ids, one.finish_reason, one.text) for one in done]


@pytest.fixture(scope="module", params=KINDS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    make, options, own = KINDS[request.param]
    bundle = make(tmp_path_factory.mktemp(request.param))
    hashed = [
        (file.name, {one.key: one.value for one in onnx.load(file, load_external_data=False).metadata_props})
        for name in (MODEL, *OVER_MODEL)
        if (file := bundle / name).exists()
    ]
    edit(bundle, lambda manifest: None)
    good = json.loads((bundle / "manifest.json").read_text())
    return Made(bundle, options, own, good, hashed)


OTHERS = {"precision": ["fp32", "int8", "int4"], "kind": ["raw", "chat"], "positions": ["same", "shifted"]}
OTHERS |= {"method": ["medusa", "eagle", "streaming", "jakiro", "lora", "dflash"], "dtype": ["float16"]}


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


def changed(good: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """What was changed, and the manifest with it, for each field that decides what is computed."""
    for path, value in leaves({name: good.get(name) for name in STEERING}):
        for other in (one for one in bent(str(path[-1]), value) if one != value):
            new = copy.deepcopy(good)
            at = new
            for name in path[:-1]:
                at = at[name]
            at[path[-1]] = other
            yield ".".join(map(str, path)), new


def test_what_decides_what_is_computed_does_not_change_without_its_hash(made: Made) -> None:
    good = Manifest.from_json(json.dumps(made.good))
    for name, stated in made.hashed:
        assert digests(shortened(good) if name.startswith("short") else good).items() <= stated.items(), name
    right = digests(good)
    for what, manifest in changed(made.good):
        with contextlib.suppress(BundleError):
            section = f"manifest.{what.partition('.')[0]}"
            assert digests(Manifest.from_json(json.dumps(manifest)))[section] != right[section], what


def test_end_tokens_that_are_not_the_graphs_are_refused_by_their_hash(bundle: Path) -> None:
    file = bundle / "manifest.json"
    file.write_text(file.read_text().replace('"eos_token_ids": [\n   2\n', '"eos_token_ids": [\n   3\n'))
    refused(bundle, r"manifest\.model is not what the graph was made for")


@pytest.mark.parametrize("section", [f"manifest.{name}" for name in STEERING])
def test_a_graph_that_states_no_hash_of_a_section_is_refused(bundle: Path, section: str) -> None:
    graph = onnx.load(bundle / MODEL, load_external_data=False)
    left = {one.key: one.value for one in graph.metadata_props if one.key != section}
    onnx.helper.set_model_props(graph, left)
    replace_graph(bundle, graph)
    refused(bundle, f"{section} is not what the graph states; expected the manifest of its export")


@pytest.mark.parametrize("version", [4, 5])
def test_without_its_metadata_a_graph_takes_no_other_manifest(bundle: Path, version: int) -> None:
    """Nor is it one of before, when graphs stated nothing."""
    model = json.loads((bundle / "manifest.json").read_text())["model"]
    end = {"model": model | {"eos_token_ids": [3]}}
    context = {"model": model | {"context_length": 4096}}
    for changes in ({}, end, context):
        strip(bundle, format_version=version, **changes)
        found = "is not what the graph states" if changes is not context else "for a context of 128 tokens"
        refused(bundle, r"model\.onnx: a graph of format 5 or later" if version == 4 else found)


def test_one_changed_field_is_refused_or_changes_no_answer_without_any_hash(made: Made) -> None:
    right, noticed, harmless = made.answers(made.good), set[str](), set[str]()
    for what, manifest in changed(made.good):
        if not what.startswith(made.own) or what.startswith((*ANSWERS, "trees.nodes")):
            continue
        try:
            assert made.answers(manifest) == right, what
            harmless.add(what)
        except StreamspecError as error:
            assert "\n" not in str(error)
            noticed.add(what)
    assert noticed and not [what for what in harmless if what.startswith("model.caches")], "sizes of the cache"
