"""Mixtures of experts: rows against PyTorch in chunks and trees, drafted answers against plain ones, and what is
refused. tests/export/graphs compares the reference with transformers.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from transformers import PreTrainedModel

from streamspec import load
from streamspec.adapters.base_models.resolve import resolve_base
from streamspec.adapters.base_models.text_part import load_causal_lm
from streamspec.bundle.files import read_manifest
from streamspec.bundle.manifest import ProbeInfo
from streamspec.draft_tree import MASKED, DraftTree
from streamspec.errors import BaseModelError
from streamspec.export import export_bundle
from streamspec.export.reference.pytorch_reference import ReferenceModel
from streamspec.export.reference.reference import tree_rows
from streamspec.export.runners.graph_runner import GraphRunner, open_session
from streamspec.export.validate.parity import PROBE_ROWS, agreed
from streamspec.runtime import Session
from streamspec.runtime.engine.ort_runner import OrtRunner
from streamspec.runtime.hardware.int8_saturation import X64_PRECISION, products_saturate
from tests.support.gguf_cases import rounded
from tests.support.int4_rows import need_exact_rows, rows_are_exact
from tests.support.latent_families import LATENT
from tests.support.mixture_families import MIXTURES
from tests.support.mxfp4 import pack_experts
from tests.support.tiny_drafters import fresh_drafter, save_random
from tests.support.tiny_exports import VOCAB, build, save_base, tiny_model

# The first with an MLP for all rows, a bias of the choice and a dense first layer; the second with biases, a clamped
# activation, attention sinks and weights in MXFP4; the third with a gate of the MLP for all rows, the fourth with one
# map of its gate and up; the last two attend to narrow states. All in int8, where the graph of native operators is
# compared with that of standard ones; in int4 those between which there are all drafters, kinds of maps and of layers.
TRIED = {
    "ernie4_5_moe": {"fp32": "jakiro", "int8": "eagle", "int4": "medusa"},
    "gpt_oss": {"fp32": "mtp", "int8": "streaming", "int4": "hydra"},
    "qwen2_moe": {"fp32": "eagle", "int8": "jakiro", "int4": "mtp"},
    "granitemoeshared": {"int8": "streaming", "int4": "eagle"},
    "minimax_m2": {"int8": "jakiro"},
    "mellum": {"int8": "hydra", "int4": "streaming"},
    "exaone_moe": {"int8": "mtp", "int4": "jakiro"},
    "hunyuan_v1_moe": {"int8": "medusa"},
    "youtu": {"fp32": "jakiro", "int8": "streaming", "int4": "eagle"},
    "deepseek_v3": {"fp32": "streaming", "int8": "mtp"},
}
ROWS = 64


def random_tree(rows: int, seed: int) -> DraftTree:
    rng, parents, ranks, children = np.random.default_rng(seed), [0], [0], dict[int, int]()
    for node in range(1, rows):
        parent = int(rng.integers(max(0, node - 6), node))
        ranks.append(children.get(parent, 0))
        children[parent] = ranks[-1] + 1
        parents.append(parent)
    return DraftTree(tuple(parents), tuple(ranks))


@pytest.mark.parametrize("family", [*MIXTURES, *LATENT])
def test_rows_of_chunks_and_trees_are_those_of_pytorch(family: str, tmp_path: Path) -> None:
    tiny = tiny_model(family, max_position_embeddings=256)
    steps, reference = build(tmp_path, tiny, streams=False).stepper(128), ReferenceModel(tiny)
    rng, tree = np.random.default_rng(2), random_tree(ROWS, 3)
    context, drafted = (rng.integers(3, VOCAB, count) for count in (23, ROWS))
    expected = reference.logits(reference.states(*tree_rows(context, drafted, tree)))
    found = [steps.prefill(context[at : at + 7])["logits"] for at in range(0, 23, 7)]
    found.append(steps.step(drafted, np.asarray(tree.depths), tree.mask())["logits"])
    assert np.abs(np.concatenate(found) - expected).max() < 1e-4 * expected.std()


def base_of(family: str, folder: Path) -> Path:
    tiny: PreTrainedModel = tiny_model(family, tied=False, eos_token_id=None)
    save_base(folder, tiny)
    if family == "gpt_oss":
        pack_experts(folder, tiny)
    return folder


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    folder, made = tmp_path_factory.mktemp("bundles"), {}
    for family, drafters in TRIED.items():
        path = base_of(family, folder / family)
        base, model = resolve_base(str(path)), load_causal_lm(path, dtype="float32")
        for precision, drafter in drafters.items():
            name = f"{family}-{precision}"
            adapter = save_random(folder / f"{name}-adapter", base, fresh_drafter(model, drafter), drafter)
            made[family, precision] = folder / name
            manifest = export_bundle(
                path, adapter, folder / name, precision, measure=precision == "fp32", progress=lambda line: None
            )
            assert precision != "fp32" or manifest.parity["streams"]["relative"] < 1e-4
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STREAMSPEC_CACHE", str(folder / "cache"))
        for case, kind in OF_FILES.items():
            file, made[case, "gguf"] = rounded(folder / f"{case}.gguf", case, kind), folder / f"{case}-gguf"
            export_bundle(file, None, made[case, "gguf"], "gguf", measure=False, progress=lambda line: None)
    return made


OF_FILES = {"gpt-oss": "MXFP4", "lfm2 with experts": "Q4_0"}
# Maps with biases and a clamp, and attention to narrow states, have nodes of their own in each precision and graph;
# other families differ in their routers, whose nodes are the same in all of them: each in both graphs.
KINDS = [("fp32", "cpu"), ("int8", "cpu"), ("int8", "native"), ("int4", "cpu"), ("int4", "native")]
RUNS = [(family, *kind) for family in ("gpt_oss", "youtu") for kind in KINDS]
RUNS += [(family, "fp32", "cpu") for family in ("ernie4_5_moe", "qwen2_moe", "deepseek_v3")]
NATIVE_INT8 = ("ernie4_5_moe", "mellum", "minimax_m2", "hunyuan_v1_moe", "deepseek_v3")
NATIVE_INT4 = ("qwen2_moe", "granitemoeshared", "exaone_moe")
RUNS += [(family, "int8", "native") for family in NATIVE_INT8] + [(family, "int4", "native") for family in NATIVE_INT4]
RUNS += [(family, "int8", "cpu") for family in (*NATIVE_INT8[2:], *NATIVE_INT4)]
RUNS += [(family, "int4", "cpu") for family in NATIVE_INT8[:2]]
RUNS += [(case, "gguf", provider) for case in OF_FILES for provider in ("cpu", "native")]


@pytest.fixture(scope="module", params=RUNS, ids="-".join)
def session(
    request: pytest.FixtureRequest, bundles: dict[tuple[str, str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Session]:
    family, precision, provider = request.param
    if (precision, provider) == ("int4", "cpu"):
        need_exact_rows()
    folder = tmp_path_factory.mktemp("cache")
    opened = load(bundles[family, precision], threads=1, provider=provider, tree=ROWS, cache_dir=folder)
    yield opened
    opened.close()


def test_a_row_is_the_same_alone_in_chunks_and_in_trees_of_any_size(session: Session) -> None:
    runner = session.runner
    assert isinstance(runner, OrtRunner)
    text = np.random.default_rng(0).integers(3, 90, 40).tolist()

    def chunks(size: int) -> np.ndarray:
        runner.reset()
        found = []
        for at in range(0, len(text), size):
            count = len(text[at : at + size])
            mask = np.triu(np.full((count, count), MASKED, np.float32), k=1)
            found.append(np.array(runner.forward(text[at : at + size], range(count), mask)))
            runner.commit(range(count))
        return np.concatenate(found)

    plain = chunks(1)
    for size in (2, 5, 16, 40):
        np.testing.assert_array_equal(chunks(size), plain)
    for rows in (2, 17, ROWS):
        runner.reset()
        tree = random_tree(rows, rows)
        tokens = np.random.default_rng(rows).integers(3, 90, rows).tolist()
        path = tree.path(rows - 1)
        for place, node in enumerate(path):
            tokens[node] = text[place]
        logits = runner.forward(tokens, tree.depths, tree.mask())
        np.testing.assert_array_equal(logits[list(path)], plain[: len(path)])


def test_drafted_answers_are_plain_ones(session: Session) -> None:
    for seed in range(2):
        prompt = np.random.default_rng(seed).integers(3, 90, 12).tolist() * 2
        plain = session.generate(prompt, max_new_tokens=48, speculate=False)  # past the 64 rows of a call
        drafted = session.generate(prompt, max_new_tokens=48, speculate=True)
        assert drafted.token_ids == plain.token_ids
        assert session.manifest.streams is None or drafted.stats.sources["drafter"].drafted
        assert len(plain.token_ids) > 20  # a file names tokens that end an answer


@pytest.mark.parametrize("family", TRIED)
def test_native_operators_compute_what_standard_ones_do(family: str, bundles: dict[tuple[str, str], Path]) -> None:
    exact = {X64_PRECISION: "1"}  # int8 sums of standard operators saturate on some processors
    graphs = [open_session(bundles[family, "int8"] / name, 1, **exact) for name in ("model.onnx", "native.onnx")]
    off = []
    for seed in range(4, 9):
        tokens = np.random.default_rng(seed).integers(3, VOCAB, 60)
        standard, native = (GraphRunner(graph, 60).prefill(tokens)["logits"] for graph in graphs)
        off.append(np.median(np.abs(native - standard).max(-1)) / standard.std())
    # Further off are rows with a code that is rounded otherwise, and those that read them; where products saturate and
    # are made up for, whole texts, which choose other experts.
    assert np.median(off[:3]) < 1e-3 or (products_saturate() and sorted(off)[1] < 1e-2)


def test_the_self_test_ends_before_a_choice_in_which_two_graphs_differ(tmp_path: Path) -> None:
    base = base_of("lfm2_moe", tmp_path / "base")
    manifest = export_bundle(base, None, tmp_path / "bundle", "int4", measure=False, progress=lambda line: None)
    assert manifest.probe is not None and len(manifest.probe.input_ids) < PROBE_ROWS
    assert len(manifest.probe.input_ids) > 1 or not rows_are_exact()  # else int4 differs from the first token on
    for provider in ("cpu", "native"):
        load(tmp_path / "bundle", threads=1, provider=provider, cache_dir=tmp_path / provider).close()


@pytest.mark.parametrize(("family", "chosen"), [("qwen3_moe", 3 / 8), ("lfm2_moe", 3 / 8)])
def test_a_bundle_states_which_share_a_step_does_not_read(family: str, chosen: float, tmp_path: Path) -> None:
    base = base_of(family, tmp_path / "base")
    manifest = export_bundle(base, None, tmp_path / "bundle", measure=False, progress=lambda line: None)
    initializers = onnx.load(tmp_path / "bundle" / "native.onnx", load_external_data=False).graph.initializer
    sizes = {one.name: int(entry.value) for one in initializers for entry in one.external_data if entry.key == "length"}
    experts = sum(size for name, size in sizes.items() if "experts" in name)
    assert 0.3 < experts / sum(sizes.values()) < 0.95
    assert manifest.model.idle_share == pytest.approx(experts * (1 - chosen) / sum(sizes.values()), abs=1e-4)
    assert read_manifest(tmp_path / "bundle") == manifest


@pytest.mark.parametrize(("row", "token", "logit"), [(2, 0, 3.8), (2, 0, 4.2), (1, 2, 4.2)])
def test_a_probe_ends_before_the_row_that_another_rounding_computes_otherwise(
    row: int, token: int, logit: float
) -> None:
    choices = (0, 1, 0, 2)
    probe = ProbeInfo((5, 6, 7, 8), choices, (4.0,) * 4)
    logits = np.zeros((4, 3), np.float32)
    logits[np.arange(4), list(choices)] = 4.0
    assert agreed(probe, logits) == probe
    assert agreed(probe, logits[:3]).input_ids == (5, 6, 7)
    logits[row, token] = logit
    assert agreed(probe, logits) == ProbeInfo((5, 6, 7, 8)[:row], choices[:row], (4.0,) * row)


@pytest.mark.parametrize(
    ("family", "field", "found"),
    [
        ("qwen3_moe", "moe_intermediate_size", "inner numbers"),
        ("mixtral", "intermediate_size", "inner numbers"),
        ("qwen3_moe", "hidden_size", "outputs"),
    ],
)
def test_experts_of_a_width_without_whole_tiles_are_refused(
    family: str, field: str, found: str, tmp_path: Path
) -> None:
    with pytest.raises(BaseModelError, match=f"experts of 40 {found} .only multiples of 32"):
        save_base(tmp_path, tiny_model(family, **{field: 40}))
