"""Keys and values in float16: drafted and plain rows read the same rounded numbers, so their outputs are the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamspec.bundle.files import read_manifest
from streamspec.errors import BundleError, ConfigError, ConversationError
from streamspec.export import Target, export_bundle, export_swappable
from streamspec.export.runners.graph_runner import open_session, stepper
from streamspec.layer_cache import ATTENTION
from streamspec.runtime import Pruning, Sampling, Session, load
from streamspec.runtime import estimate_memory as estimate
from tests.runtime.engine.test_ort_runner import PROMPTS
from tests.support.tiny_bundles import tiny_adapter, tiny_base, tiny_bundle
from tests.support.tiny_models import tiny_model, tiny_tokenizer

HOT = Sampling(temperature=0.9, top_p=0.95, seed=5)
KINDS = "fp32", "int8", "full", "jakiro", "windowed"
CHAIN = np.where(np.tri(6, dtype=bool), 0, -1e4).astype(np.float32)


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a bundle with a cache in float16, by a precision, a drafter or a shape."""
    made: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in made:
            folder, base = tmp_path_factory.mktemp(kind), None
            if kind == "windowed":
                base, changes = folder / "base", {"max_position_embeddings": 640, "sliding_window": 9}
                tiny_model("mistral", initializer_range=0.4, eos_token_id=None, **changes).save_pretrained(base)
                tiny_tokenizer().save_pretrained(base)
            shapes = {"static": Target(static=True, rows=16), "device": Target("cuda")}
            target = shapes.get(kind.split()[0], Target())
            precision, method = ("int8" if kind == "int8" else "fp32"), ("jakiro" if "jakiro" in kind else "")
            if kind == "lfm2":  # inputs of convolutions are rounded too
                tiny_model("lfm2", initializer_range=0.4, eos_token_id=None).save_pretrained(folder / "base")
                tiny_tokenizer().save_pretrained(folder / "base")
                quiet: dict[str, Any] = {"progress": lambda line: None, "kv_cache_dtype": "float16"}
                export_bundle(folder / "base", None, folder / "bundle", "fp32", **quiet)
                made[kind] = folder / "bundle"
            elif kind == "swappable":
                base = tiny_base(folder / "base")
                adapters = [tiny_adapter(folder / "a", base)]
                quiet = {"progress": lambda line: None, "kv_cache_dtype": "float16"}
                export_swappable(base, adapters, folder / "bundle", "fp32", **quiet)
                made[kind] = folder / "bundle"
            else:
                options: dict[str, Any] = {"full": kind == "full", "method": method, "target": target, "base": base}
                made[kind] = tiny_bundle(folder, precision, **options, kv_cache_dtype="float16")
        return made[kind]

    return make


def opened(folder: Path, **options: Any) -> Session:
    return load(folder, threads=1, cache_dir=folder.parent / "cache", **({"tree": 12} | options))


@pytest.mark.parametrize(
    ("kind", "sampling"),
    [
        *((kind, Sampling()) for kind in (*KINDS, "swappable", "static", "static jakiro", "lfm2")),
        *((kind, HOT) for kind in ("int8", "full", "windowed", "static jakiro")),  # drawn in the graph, and beside it
    ],
    ids=lambda value: value if isinstance(value, str) else "sampled" if value == HOT else "greedy",
)
def test_speculative_output_is_plain_output(kind: str, sampling: Sampling, half: Any) -> None:
    session = opened(half(kind), **({"adapter": "a"} if kind == "swappable" else {}))
    steps = tokens = 0
    for prompt in PROMPTS[::2]:
        answers = []
        for speculate in (True, False):
            options: dict[str, Any] = {"max_new_tokens": 40, "sampling": sampling, "speculate": speculate}
            answers.append(session.generate(prompt, **options))
            session.forget()
        assert answers[0].token_ids == answers[1].token_ids
        steps, tokens = steps + answers[0].stats.steps, tokens + answers[0].stats.step_tokens
    assert tokens > steps > 0
    cache: Any = session.runner.cache  # type: ignore[attr-defined]
    kept = {group.cache.kind: data.dtype for group, data in zip(cache.groups, cache.data, strict=True)}
    assert kept.pop(ATTENTION) == np.float16 and all(dtype == np.float32 for dtype in kept.values())


def test_pruned_rows_too(half: Any) -> None:
    session = opened(half("fp32"), pruning=Pruning(rows=3))
    for prompt in PROMPTS:
        plain = session.generate(prompt, max_new_tokens=40, speculate=False)
        assert session.generate(prompt, max_new_tokens=40).token_ids == plain.token_ids


@pytest.mark.parametrize("kind", ["fp32", "windowed", "lfm2"])
def test_a_row_reads_its_ancestors_rounded_in_the_call_that_makes_them(kind: str, half: Any) -> None:
    """Bit for bit what it reads later."""
    session = open_session(half(kind) / "model.onnx", 1)
    together, apart = stepper(session, 64), stepper(session, 64)
    ids = np.arange(5, 35)
    for steps in (together, apart):
        steps.prefill(ids, forced_node=29)
    once = together.step(ids[:6], np.arange(6), CHAIN)["logits"]
    alone = []
    for token in ids[:6]:
        alone.append(apart.step(np.array([token]), np.zeros(1), CHAIN[:1, :1])["logits"][0])
        apart.length += 1
    np.testing.assert_array_equal(once, np.stack(alone))


def test_a_static_graph_rounds_them_too(half: Any) -> None:
    session = open_session(half("static") / "model.onnx", 1, static=True)
    together, apart = stepper(session, 64), stepper(session, 64)
    ids = np.arange(5, 11)
    once = together.step(ids, np.arange(6), CHAIN)["logits"]
    for at, token in enumerate(ids):
        alone = apart.prefill(np.array([token]))["logits"]
        assert np.abs(alone - once[at]).max() < 1e-5  # 1e-3 where they are not rounded


def test_numbers_too_large_for_the_cache_are_its_largest(tmp_path: Path) -> None:
    """A cache of infinities would make NaN of every masked slot."""
    model = tiny_model("llama", initializer_range=0.5, eos_token_id=None)
    model.model.layers[1].self_attn.v_proj.weight.data *= 1e6
    model.save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    quiet: dict[str, Any] = {"progress": lambda line: None, "kv_cache_dtype": "float16"}
    export_bundle(tmp_path / "base", None, tmp_path / "bundle", "int8", **quiet)
    steps = stepper(open_session(tmp_path / "bundle" / "model.onnx", 1), 32)
    assert np.isfinite(steps.prefill(np.arange(5, 25))["logits"]).all()


def test_it_takes_half_the_memory_and_says_so(half: Any, tmp_path: Path) -> None:
    whole = tiny_bundle(tmp_path)
    session, before = opened(half("fp32")), opened(whole)
    arrays = [sum(data.nbytes for data in s.runner.cache.data) for s in (session, before)]  # type: ignore[attr-defined]
    assert 2 * arrays[0] == arrays[1]
    assert 2 * estimate(half("fp32")).cache == estimate(whole).cache
    assert estimate(half("fp32"), context=100).work > estimate(whole, context=100).work  # what is converted
    manifest = read_manifest(half("fp32"))
    assert manifest.rounding == "fp32 with K/V in float16" and manifest.parity["text"]["bundle"] > 0
    from streamspec.cli.inspect import describe

    assert dict(describe(half("fp32"))[1])["K/V cache"] == "4 layers everything, float16"


def test_a_conversation_goes_on_where_it_was_saved(half: Any, tmp_path: Path) -> None:
    session = opened(half("windowed"))
    ids = np.random.default_rng(0).integers(3, 60, 450).tolist()
    session.generate(ids, max_new_tokens=20)
    session.save(tmp_path / "talk")
    later, text = opened(half("windowed")), [*session.cached_tokens, 9]
    later.restore(tmp_path / "talk")
    answer = later.generate(text, max_new_tokens=30)
    assert answer.token_ids == session.another().generate(text, max_new_tokens=30, speculate=False).token_ids
    assert answer.stats.reused_tokens == len(text) - 1
    with pytest.raises(ConversationError, match="another bundle"):
        opened(half("fp32")).restore(tmp_path / "talk")


def test_a_cache_in_a_devices_memory(half: Any, device: None) -> None:
    there, here = (opened(half("device"), provider=name, tree=8) for name in ("device", "cpu"))
    for prompt in PROMPTS:
        answers = [session.generate(prompt, max_new_tokens=40).token_ids for session in (there, here)]
        assert answers[0] == answers[1] == here.generate(prompt, max_new_tokens=40, speculate=False).token_ids


def test_a_graph_whose_cache_has_another_type_is_refused(half: Any) -> None:
    folder = half("fp32")
    manifest = read_manifest(folder)
    (folder / "manifest.json").write_text(replace(manifest, model=replace(manifest.model, caches=())).to_json())
    try:
        with pytest.raises(BundleError, match="float32 as the manifest says"):
            opened(folder)
    finally:
        (folder / "manifest.json").write_text(manifest.to_json())


def test_other_types_are_refused_before_any_work(tmp_path: Path) -> None:
    for export in (
        lambda: export_bundle("none", None, tmp_path / "b", kv_cache_dtype="int8"),
        lambda: export_swappable("none", [], tmp_path / "b", kv_cache_dtype="int8"),
    ):
        with pytest.raises(ConfigError, match="a K/V cache of 'int8'; expected float32 or float16"):
            export()
