"""Adapters swapped in a running session: each answers as its merged export would, all or nothing, at no cost in
memory.
"""

from __future__ import annotations

import gc
import json
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import psutil
import pytest
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from streamspec.adapters.base_models.resolve import resolve_base
from streamspec.bundle.files import read_manifest
from streamspec.cli import app
from streamspec.errors import AdapterError, BundleError, ConfigError, StreamspecError
from streamspec.export import adapt, export_bundle, export_swappable
from streamspec.runtime import Sampling, Session, load
from tests.export.test_swappable_bundle import quiet, tuned
from tests.support.forging import edit
from tests.support.tiny_bundles import tiny_adapter, tiny_base

PROMPT = "abcabd"


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Beside their `base`: `tuned` has a task LoRA and streams, `drafts` streams alone, `plain` a task LoRA alone."""
    folder = tmp_path_factory.mktemp("swapping")
    base = tiny_base(folder / "base", chat=True)
    identity, model = resolve_base(base, quiet), AutoModelForCausalLM.from_pretrained(base)
    both = tiny_adapter(folder / "tuned", base, full=True)
    config = (both / "streamspec_config.json").read_bytes()
    tuned(both, identity, model)
    (both / "streamspec_config.json").write_bytes(config)
    drafts = tiny_adapter(folder / "drafts", base, kind="chat")
    return {
        "base": base,
        "tuned": both,
        "drafts": drafts,
        "plain": tuned(folder / "plain", identity, AutoModelForCausalLM.from_pretrained(base), 16),
    }


@pytest.fixture(scope="module")
def exported(adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The bundle of a precision."""

    @cache
    def bundle(precision: str) -> Path:
        out, given = tmp_path_factory.mktemp(precision) / "bundle", ("tuned", "drafts", "plain")
        export_swappable(adapters["base"], [adapters[name] for name in given], out, precision, progress=quiet)
        return out

    return bundle


BOTH = pytest.mark.parametrize("precision", ["fp32", "int8"])  # where graph or tensors are other ones


@pytest.fixture
def precision() -> str:
    return "fp32"


@pytest.fixture
def bundle(exported: Callable[[str], Path], precision: str) -> Path:
    return exported(precision)


@pytest.fixture
def session(bundle: Path) -> Session:
    return load(bundle, threads=1, tree=8)


@pytest.fixture
def copy(bundle: Path, tmp_path: Path) -> Path:
    shutil.copytree(bundle, tmp_path / "copy")
    return tmp_path / "copy"


@BOTH
def test_each_adapter_answers_as_its_merged_export(
    bundle: Path, session: Session, adapters: dict[str, Path], tmp_path: Path
) -> None:
    said = {}
    for name in ("tuned", "drafts", "plain", None):
        session.swap(name)
        export_bundle(
            adapters["base"],
            adapters[name] if name else None,
            tmp_path / str(name),
            read_manifest(bundle).precision,
            progress=quiet,
        )
        merged = load(tmp_path / str(name), threads=1, tree=8)
        ids = merged.encode(PROMPT)
        off = session.score(ids) - merged.score(ids)
        # int8 rounds another sum: as far apart as either is from float32
        assert (
            np.abs(off).max() < 1e-3
            if read_manifest(bundle).precision == "fp32"
            else np.sqrt(np.mean(off**2)) < 0.3 * session.score(ids).std()
        )
        assert (
            session.manifest.prompt_format == merged.manifest.prompt_format
            and session.manifest.trees == merged.manifest.trees
        )
        if read_manifest(bundle).precision == "fp32":
            assert (
                session.generate(PROMPT, max_new_tokens=40).token_ids
                == merged.generate(PROMPT, max_new_tokens=40).token_ids
            )
        said[name] = session.generate(PROMPT, max_new_tokens=40).token_ids
    assert len({tuple(ids) for ids in said.values()}) >= 3


@BOTH
@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=0.8, top_p=0.9, seed=3)], ids=["greedy", "sampled"]
)
def test_drafting_changes_nothing_and_every_return_finds_the_same(session: Session, sampling: Sampling) -> None:
    first: dict[str | None, list[int]] = {}
    for name in ("tuned", "drafts", None, "tuned", "plain", "drafts", None, "plain"):
        session.swap(name)
        assert session.adapter == name
        plain = session.generate(PROMPT, max_new_tokens=40, speculate=False, sampling=sampling)
        drafted = session.generate(PROMPT, max_new_tokens=40, sampling=sampling)
        assert drafted.token_ids == plain.token_ids == first.setdefault(name, plain.token_ids)


def test_the_drafter_is_the_adapters_own(session: Session) -> None:
    session.swap("tuned")
    assert session.runner.gamma == 3 and session.manifest.streams is not None and session.manifest.streams.bigram
    answer = session.generate(PROMPT, max_new_tokens=40)
    assert answer.stats.steps > 0
    learnt = session.adaptive
    session.swap("plain")
    assert session.runner.gamma == 0 and session.manifest.streams is None and session.adaptive is not learnt
    session.swap("drafts")
    assert session.manifest.prompt_format.kind == "chat" and session.encode("ab") != session.encode([0])
    session.swap("tuned")
    assert session.adaptive is learnt and session.manifest.prompt_format.kind == "raw"


def test_without_ngrams_an_adapter_without_streams_decodes_plainly(bundle: Path) -> None:
    session = load(bundle, threads=1, tree=8, ngram=False, recycling=False, adapter="plain")
    assert session.generate(PROMPT, max_new_tokens=20).stats.steps == 0
    session.swap("tuned")
    assert session.generate(PROMPT, max_new_tokens=20).stats.steps > 0


def test_pruning_goes_with_the_adapter_that_has_an_exit(bundle: Path) -> None:
    from streamspec.runtime import Pruning

    session = load(bundle, threads=1, tree=12, ngram=False, recycling=False, adapter="tuned", pruning=Pruning(rows=4))
    assert (
        session.generate(PROMPT, max_new_tokens=40).token_ids
        == session.generate(PROMPT, max_new_tokens=40, speculate=False).token_ids
    )
    session.swap("plain")
    assert session.policy.pruning is None
    with pytest.raises(ConfigError, match="early exit"):
        load(bundle, threads=1, adapter="plain", pruning=Pruning(rows=4))


def test_each_adapter_keeps_what_it_learned_of_costs(bundle: Path, tmp_path: Path) -> None:
    session = load(bundle, threads=1, cache_dir=tmp_path)
    learned = []
    for name in ("tuned", "drafts", "tuned", None):
        session.swap(name)
        learned.append(session.policy.costs)
        assert session.policy.costs is not None
        assert (
            session.generate(PROMPT, max_new_tokens=24).token_ids
            == session.generate(PROMPT, max_new_tokens=24, speculate=False).token_ids
        )
    assert learned[0] is learned[2] and len({id(costs) for costs in learned}) == 3


@pytest.mark.parametrize("precision", ["int8"])  # whose operators keep memory of their own, too
def test_a_hundred_swaps_leave_memory_as_it_was(session: Session) -> None:
    process, names = psutil.Process(), ("tuned", "plain", None, "drafts")

    def swap(times: int) -> int:
        for number in range(times):
            session.swap(names[number % len(names)])
            session.generate(PROMPT, max_new_tokens=4)
        gc.collect()
        return int(process.memory_info().rss)

    def held() -> int:
        return process.num_fds() + len(process.memory_maps(grouped=False))

    before, files = swap(100), held()  # until the allocator has what it needs
    after = [swap(100) for _ in range(3)]
    size = (session._swapper.folder / "adapters" / "tuned" / "adapter.onnx_adapter").stat().st_size  # type: ignore[union-attr]
    grown = min(now - last for last, now in pairwise([before, *after]))  # what is lost, is lost each time
    assert grown < 5 * size + (2 << 20)
    assert held() < files + 25  # 225 adapters were there meanwhile, each of them a mapped file


def test_a_swap_while_a_prompt_is_encoded_is_noticed(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """By another thread, in the midst of asking."""
    session.swap("tuned")
    encode = session.encode

    def swapping(prompt: Any, **variables: Any) -> list[int]:
        ids = encode(prompt, **variables)
        session.swap("drafts")
        return ids

    monkeypatch.setattr(session, "encode", swapping)
    with pytest.raises(ConfigError, match="before the adapter was swapped"):
        session.generate(PROMPT, max_new_tokens=4)


def refused(session: Session, adapter: str | Path, error: type[StreamspecError], match: str) -> None:
    """In one line, and the adapter of before goes on."""
    before, in_use = (
        session.generate(PROMPT, max_new_tokens=20).token_ids,
        (session.adapter, session.manifest, session.adaptive, session.policy.rows),
    )
    with pytest.raises(error, match=match) as caught:
        session.swap(adapter)
    assert (
        "\n" not in str(caught.value)
        and (session.adapter, session.manifest, session.adaptive, session.policy.rows) == in_use
    )
    assert session.generate(PROMPT, max_new_tokens=20).token_ids == before


@pytest.fixture
def working(copy: Path) -> Iterator[Session]:
    """A session of a copied bundle with `plain` in use."""
    yield load(copy, threads=1, tree=8, adapter="plain")


def rewrite(folder: Path, change: Any) -> None:
    """Changes an adapter's tensors and makes its manifest agree."""
    import hashlib

    file = folder / "adapter.onnx_adapter"
    values = {
        name: value.numpy().copy() for name, value in ort.AdapterFormat.read_adapter(str(file)).get_parameters().items()
    }
    values = change(values) or values
    packed = ort.AdapterFormat()
    packed.set_adapter_version(1)
    packed.set_model_version(1)
    packed.set_parameters({name: ort.OrtValue.ortvalue_from_numpy(value) for name, value in values.items()})
    packed.export_adapter(str(file))
    described = json.loads((folder / "adapter.json").read_text())
    described["file"] = {"sha256": hashlib.sha256(file.read_bytes()).hexdigest(), "bytes": file.stat().st_size}
    (folder / "adapter.json").write_text(json.dumps(described))


def test_what_is_not_there_or_damaged_is_refused(working: Session, copy: Path) -> None:
    refused(working, "nobody", AdapterError, "no adapter 'nobody'; expected drafts, plain, tuned")
    refused(working, "../adapters/tuned/..", AdapterError, "no adapter")
    file = copy / "adapters" / "tuned" / "adapter.onnx_adapter"
    good = file.read_bytes()
    file.write_bytes(good[:-1])
    refused(working, "tuned", AdapterError, "bytes; expected")
    file.write_bytes(good[:-9] + bytes([good[-9] ^ 1]) + good[-8:])
    refused(working, "tuned", AdapterError, "sha256")
    file.unlink()
    refused(working, "tuned", AdapterError, "has no adapter.onnx_adapter")
    file.symlink_to("/dev/zero")
    refused(working, "tuned", AdapterError, "link out of the folder")


@BOTH
@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda t: t.update(other=np.zeros(1, np.float32)), "unknown other"),
        (lambda t: t.pop("streams.embeddings") is None, "no streams.embeddings"),
        (
            lambda t: t.update({"streams.embeddings": t["streams.embeddings"][:, :2]}),
            "streams.shares.0|streams.embeddings has the shape",
        ),
        (lambda t: t.update({"streams.shares.0": t["streams.shares.0"].astype(np.float64)}), "tensor.double"),
        (lambda t: t.update({"streams.root_map": np.full_like(t["streams.root_map"], np.nan)}), "not finite"),
        (lambda t: t.update({"streams.begin": np.array([7])}), "streams.begin 7"),
        (lambda t: t.update({"streams.shift": np.array([0])}), "streams.shift 0"),
        (lambda t: t.update({"streams.draft_vocab": t["streams.draft_vocab"] + 50}), "outside 0..63"),
        (
            lambda t: t.update({"model.layers.1.mlp.down_proj.task.B": np.zeros((3, 32), np.float32)}),
            "has the shape|graph failed",
        ),
        (lambda t: t.update({"model.layers.1.mlp.gate_proj+up_proj.task.ranks": np.array([1, 1])}), "graph failed"),
    ],
    ids=range(10),
)
def test_tensors_that_do_not_fit_are_refused(working: Session, copy: Path, change: Any, match: str) -> None:
    rewrite(copy / "adapters" / "tuned", lambda tensors: (change(tensors), tensors)[1])
    refused(working, "tuned", StreamspecError, match)


@pytest.mark.parametrize("content", [b"", b"no adapter at all", b"\x00" * 4096])
def test_a_file_that_is_no_adapter_is_refused(working: Session, copy: Path, content: bytes) -> None:
    import hashlib

    folder = copy / "adapters" / "tuned"
    (folder / "adapter.onnx_adapter").write_bytes(content)
    described = json.loads((folder / "adapter.json").read_text())
    described["file"] = {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
    (folder / "adapter.json").write_text(json.dumps(described))
    refused(working, "tuned", AdapterError, "expected an adapter of ONNX Runtime")


@pytest.mark.parametrize(
    ("path", "value", "match"),
    [
        ("base/sha256", "0" * 64, "an adapter of .* expected one of "),
        ("graph", "0" * 64, "for the graph 000000000000"),
        ("graph", "x", "sha256 of 64"),
        ("format_version", 2, "update streamspec"),
        ("format_version", "1", "whole number"),
        ("method", "medusa", "streaming or lora"),
        ("method", "lora", "method lora with streams set"),
        ("streams", None, "trees without"),
        ("trees", None, "trees null"),
        ("streams/ns", 3, "no more than the bundle has room for"),
        ("streams/candidates", 33, "no more than"),
        ("streams/gamma", 900, "gamma is 900"),
        ("streams/levels", [1, 4, 4], "no more than"),
        ("trees/nodes", [[0, 0, 1.0], [5, 0, 0.5]], "nodes"),
        ("prompt_format/kind", "shell", "raw or chat"),
        ("file/bytes", -1, "bytes is -1"),
        ("file/sha256", None, "sha256"),
        ("ranks", {"task": -1}, "task is -1"),
        ("file", 3, "an object"),
    ],
)
def test_manifests_that_lie_are_refused(working: Session, copy: Path, path: str, value: Any, match: str) -> None:
    file = copy / "adapters" / "tuned" / "adapter.json"
    described = json.loads(file.read_text())
    *parents, last = path.split("/")
    at = described
    for name in parents:
        at = at[name]
    at[last] = value
    file.write_text(json.dumps(described))
    refused(working, "tuned", AdapterError, match)


def test_an_adapter_of_another_base_is_refused_by_its_hash(
    working: Session, adapters: dict[str, Path], tmp_path: Path
) -> None:
    from tests.support.tiny_models import tiny_model, tiny_tokenizer

    other = tmp_path / "other"
    tiny_model("llama", seed=9).save_pretrained(other)
    tiny_tokenizer(True).save_pretrained(other)
    export_swappable(
        other,
        [tuned(tmp_path / "theirs", resolve_base(other, quiet), AutoModelForCausalLM.from_pretrained(other))],
        tmp_path / "elsewhere",
        "fp32",
        progress=quiet,
    )
    refused(
        working,
        tmp_path / "elsewhere" / "adapters" / "theirs",
        AdapterError,
        "an adapter of other .*use it with a bundle of its base",
    )


def test_while_a_generation_runs_nothing_is_swapped(session: Session) -> None:
    session.swap("tuned")
    running = session.stream(PROMPT, max_new_tokens=30)
    next(running)
    with pytest.raises(ConfigError, match="busy"):
        session.swap("plain")
    rest = [token for chunk in running for token in chunk.token_ids]
    assert rest and session.adapter == "tuned"
    late = session.stream(PROMPT)
    session.swap("plain")
    with pytest.raises(ConfigError, match="before the adapter was swapped"):
        next(late)
    assert session.generate(PROMPT, max_new_tokens=4).token_ids


def test_a_bundle_with_its_adapter_merged_swaps_nothing(adapters: dict[str, Path], tmp_path: Path) -> None:
    export_bundle(adapters["base"], None, tmp_path / "merged", "fp32", progress=quiet)
    with pytest.raises(ConfigError, match="takes no adapters"):
        load(tmp_path / "merged", threads=1, adapter="tuned")
    session = load(tmp_path / "merged", threads=1, tree="plain")
    assert session.adapters == []
    with pytest.raises(ConfigError, match="takes no adapters"):
        session.swap("tuned")


def test_chats_need_a_template(copy: Path) -> None:
    def without_template(manifest: dict[str, Any]) -> None:
        del manifest["files"]["chat_template.jinja"]
        manifest["prompt_format"] = {"kind": "raw", "separator": "\n"}

    edit(copy, without_template)
    refused(load(copy, threads=1, tree=8), "drafts", AdapterError, "a bundle with chat_template.jinja")


def test_the_graph_must_take_what_its_room_promises(copy: Path) -> None:
    manifest = json.loads((copy / "manifest.json").read_text())
    for room in ({"ns": [2, 3]}, {"ns": [9]}, {"candidates": 0}, {"bigram": 1}):
        (copy / "manifest.json").write_text(json.dumps(manifest | {"swappable": manifest["swappable"] | room}))
        with pytest.raises(BundleError, match="swappable"):
            load(copy, threads=1)


@pytest.mark.parametrize("ns", [1, 3])
def test_stream_layers_that_bundle_and_adapter_both_misstate_are_refused(copy: Path, ns: int) -> None:
    """Rows that the early exit drops would be dropped in other layers of the cache than the graph drops them in."""
    edit(copy, lambda manifest: manifest["swappable"].update(ns=[ns]))
    file = copy / "adapters" / "tuned" / "adapter.json"
    described = json.loads(file.read_text())
    described["streams"]["ns"] = ns
    file.write_text(json.dumps(described))
    refused(
        load(copy, threads=1, tree=8), "tuned", BundleError, "pruned from layer . on as streams.ns and exit_layer say"
    )


@BOTH
def test_from_the_command_line(copy: Path, adapters: dict[str, Path]) -> None:
    def run(*arguments: object) -> str:
        done = CliRunner().invoke(app, [str(argument) for argument in arguments])
        assert done.exit_code == 0, (done.output, done.exception)
        return done.stdout

    shutil.rmtree(copy / "adapters" / "plain")
    assert "adapter: plain" not in run("inspect", copy)
    run("adapt", copy, adapters["plain"], "--name", "later", "--base", adapters["base"])
    assert "adapter: later" in run("inspect", copy)
    text = run(
        "generate", copy, "--prompt", PROMPT, "--use", "later", "--rows", 4, "--threads", 1, "--max-new-tokens", 12
    )
    beside = copy.parent / "beside"
    run("adapt", copy, adapters["plain"], "--out", beside, "--base", adapters["base"])
    assert (
        run("generate", copy, "--prompt", PROMPT, "--use", beside, "--rows", 4, "--threads", 1, "--max-new-tokens", 12)
        == text
    )
    prompts = copy.parent / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": PROMPT, "completion": "x"}) + "\n")
    result = json.loads(
        run(
            "bench",
            copy,
            "--prompts",
            prompts,
            "--use",
            "tuned",
            "--tree",
            4,
            "--repeats",
            1,
            "--max-new-tokens",
            12,
            "--threads",
            1,
            "--json",
        ).splitlines()[-1]
    )
    assert result["mismatches"] == 0 and result["identical"] == 1


def test_adding_an_adapter_is_all_or_nothing(
    copy: Path, adapters: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("streamspec.export.swappable_bundle.write", fail)
    with pytest.raises(KeyboardInterrupt):
        adapt(copy, adapters["plain"], "new", base=adapters["base"], progress=quiet)
    assert sorted(path.name for path in (copy / "adapters").iterdir()) == ["drafts", "plain", "tuned"]
