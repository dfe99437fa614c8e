"""Bundles whose layers keep a recurrent state: long texts, trees across blocks of states, going back, saved
conversations. tests/export/graphs compares their graphs with PyTorch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from peft import PeftModel

from streamspec import load
from streamspec.adapters.base_models.resolve import resolve_base
from streamspec.adapters.train import train
from streamspec.bundle.manifest import MODEL, NATIVE
from streamspec.draft_tree import MASKED, DraftTree
from streamspec.export import export_bundle
from streamspec.export.drafters.registry import row_of
from streamspec.export.native.operators import NativeOps
from streamspec.export.native.precisions import TiledInt8
from streamspec.export.reference.pytorch_reference import ReferenceModel
from streamspec.export.reference.reference import tree_rows
from streamspec.export.runners.graph_runner import open_session, stepper
from streamspec.export.spec.decoder_spec import StateSizes
from streamspec.export.weights.model_spec import describe
from streamspec.layer_cache import ATTENTION, RECURRENT, STATE_BLOCK, STATE_SPACE, STATE_WINDOW, SUM_BLOCK, WITH_STATE
from streamspec.runtime import Completion, Session
from streamspec.runtime.engine.ort_runner import OrtRunner
from streamspec.runtime.hardware.int8_saturation import products_saturate
from tests.support import gguf_cases, tiny_exports
from tests.support.tiny_drafters import fresh_drafter, save_random
from tests.support.tiny_models import options, tiny_model, tiny_tokenizer

DELTA, MAMBA, OLMO, HALVED, BOTH = "qwen3_5_text", "granitemoehybrid+mamba", "olmo_hybrid", "nemotron_h", "falcon_h1"
GRANITE, NEMOTRON = f"{MAMBA.removesuffix('mamba')}experts", f"{HALVED}+experts"
FAMILIES = DELTA, MAMBA, OLMO, HALVED, BOTH, GRANITE, NEMOTRON
NORMED, GATED = f"{BOTH}+normed", f"{BOTH}+gated_last"  # with a norm before or after the gates
NEXT, LATENT = "qwen3_next", f"{HALVED}+latent"  # with experts, too
OF_FILES = {"granite 4, hybrid": "eagle", "nemotron-h": "medusa"}  # GGUF files and drafters over their own weights
# A prompt past a ring's 256 slots, and an answer across four blocks of states and the ring's second end.
CONTEXT, PROMPT, NEW = 2048, 300, 231
TEXT = "".join(np.random.default_rng(0).choice(list("abcdefghijkl "), PROMPT))
# Each with a drafter of another kind, whose drafts are checked and whose keys are moved with those of the layers.
MADE = {(DELTA, "fp32"): "streaming", (DELTA, "int8"): "eagle", (MAMBA, "fp32"): "hydra", (MAMBA, "int4"): "streaming"}
MADE |= {(OLMO, "fp32"): "eagle", (OLMO, "int4"): "streaming"}
MADE |= {(NEXT, "int8"): "medusa", (HALVED, "fp32"): "medusa"}
MADE |= {(BOTH, "fp32"): "eagle", (BOTH, "int8"): "jakiro", (NORMED, "int8"): "streaming", (GATED, "int4"): "mtp"}
MADE |= {(GRANITE, "fp32"): "jakiro", (GRANITE, "int8"): "eagle"}
MADE |= {(NEMOTRON, "fp32"): "medusa", (LATENT, "int4"): "medusa"}
MADE |= {(case, "gguf"): drafter for case, drafter in OF_FILES.items()}
HALVED_KEYS = (BOTH, "int8"), (NORMED, "int8")  # with keys and values in float16, as those of files' weights have
# Whose graph of standard operators no session runs here: another bundle's of the same layers or precision is.
BRIEF = (
    (MAMBA, "int4"),
    (NEXT, "int8"),
    (NORMED, "int8"),
    (GATED, "int4"),
    (LATENT, "int4"),
    ("granite 4, hybrid", "gguf"),
)


def model(family: str = DELTA) -> torch.nn.Module:
    if family in OF_FILES:
        return gguf_cases.made(family)[0]
    return tiny_model(family, max_position_embeddings=CONTEXT, initializer_range=0.1, eos_token_id=None)


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {family: tmp_path_factory.mktemp("recurrent") for family in (*FAMILIES, NEXT, LATENT, NORMED, GATED)}
    for family, folder in folders.items():
        model(family).save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
    for case in OF_FILES:
        file = tmp_path_factory.mktemp("recurrent") / "model.gguf"
        folders[case] = gguf_cases.rounded(file, case, "Q8_0", max_position_embeddings=CONTEXT)
    return folders


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STREAMSPEC_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def bundles(
    bases: dict[str, Path], tmp_path_factory: pytest.TempPathFactory, cache: None
) -> dict[tuple[str, str], Path]:
    folders = {made: tmp_path_factory.mktemp("bundles") / "bundle" for made in MADE}
    for (family, precision), folder in folders.items():
        base, drafter = resolve_base(str(bases[family])), MADE[family, precision]
        adapter = save_random(folder.parent / "adapter", base, fresh_drafter(model(family), drafter), drafter)
        quiet: dict[str, Any] = {"measure": (family, precision) not in BRIEF, "progress": lambda line: None}
        half = (family, precision) in HALVED_KEYS
        quiet |= {"kv_cache_dtype": "float16"} if half else {}
        manifest = export_bundle(bases[family], adapter, folder, precision, **quiet)
        assert manifest.method == drafter and (precision != "fp32" or manifest.parity["streams"]["relative"] < 1e-4)
        caches = [cache.beside or cache for cache in manifest.model.caches]
        states = 2 if family in OF_FILES else 4 if family.startswith(BOTH) else 3
        assert [cache.window for cache in caches if cache.kind in WITH_STATE] == [STATE_WINDOW] * states
        assert {cache.dtype for cache in caches if cache.kind in WITH_STATE} == {"float32"}
        keys = {cache.dtype for cache in manifest.model.caches if cache.kind == ATTENTION}
        assert keys == {"float16" if half or precision == "gguf" else "float32"}
    return folders


RUNS = [
    (DELTA, "fp32", "cpu"),
    (DELTA, "int8", "native"),
    (MAMBA, "int4", "native"),
    (OLMO, "int4", "native"),
    (NEXT, "int8", "native"),
    (HALVED, "fp32", "cpu"),
    (BOTH, "int8", "cpu"),
    (NORMED, "int8", "native"),
    (GATED, "int4", "native"),
    (GRANITE, "int8", "cpu"),
    (LATENT, "int4", "native"),
    ("granite 4, hybrid", "gguf", "native"),
    ("nemotron-h", "gguf", "cpu"),
]


# A conversation that goes back or is saved is the same whatever the precision: one run of each kind of layers' caches.
TALKS = [(DELTA, "int8", "native"), *(run for run in RUNS if run[0] in (MAMBA, HALVED, BOTH, "granite 4, hybrid"))]
a_session_of_each_cache = pytest.mark.parametrize("session", TALKS, indirect=True, ids="-".join, scope="module")


@pytest.fixture(scope="module", params=RUNS, ids="-".join)
def session(
    request: pytest.FixtureRequest, bundles: dict[tuple[str, str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Session]:
    family, precision, provider = request.param
    opened = load(
        bundles[family, precision], threads=1, provider=provider, tree=64, cache_dir=tmp_path_factory.mktemp("cache")
    )
    yield opened
    opened.close()


def runner_of(session: Session) -> OrtRunner:
    runner = session.runner
    assert isinstance(runner, OrtRunner)
    runner.reset()
    return runner


LONG = np.random.default_rng(0).integers(3, 60, 600).tolist()


@pytest.fixture(scope="module")
def plain(session: Session) -> np.ndarray:
    """Logits of every token of LONG, read one at a time from an empty cache."""
    runner, rows = runner_of(session), []
    for token in LONG:
        rows.append(runner.forward([token], [0], np.zeros((1, 1), np.float32))[0])
        runner.commit([0])
    return np.stack(rows)


def plain_chunk(runner: OrtRunner, chunk: list[int]) -> np.ndarray:
    """Logits of the next tokens, read in one call."""
    mask = np.triu(np.full((len(chunk), len(chunk)), MASKED, np.float32), k=1)
    logits = runner.forward(chunk, range(len(chunk)), mask)
    runner.commit(range(len(chunk)))
    return logits


def random_tokens(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, 60, count).tolist()


def tree_with(path: int, rows: int, rng: np.random.Generator) -> tuple[DraftTree, list[int]]:
    """A random tree of `rows` nodes, some of which are a path of `path` from the root on; and these."""
    places = [0, *sorted(rng.choice(np.arange(1, rows), path - 1, replace=False).tolist())]
    parents, ranks, children = [0], [0], {0: 0}
    for node in range(1, rows):
        parent = places[places.index(node) - 1] if node in places else int(rng.integers(node))
        ranks.append(children.get(parent, 0))
        children[parent] = ranks[-1] + 1
        parents.append(parent)
    return DraftTree(tuple(parents), tuple(ranks)), places


def test_a_layer_is_one_native_operator_where_its_heads_are_whole_vectors(bundles: dict[tuple[str, str], Path]) -> None:
    for family, precision, kind in ((DELTA, "int8", "GatedDeltaRule"), (MAMBA, "int4", "StateSpace")):
        graph = onnx.load(bundles[family, precision] / "native.onnx", load_external_data=False).graph
        assert [node.op_type for node in graph.node].count(kind) == 3
    ops = NativeOps(TiledInt8())
    assert ops.remembers(RECURRENT, StateSizes(2, 6, 16, 32), 8)
    assert not ops.remembers(RECURRENT, StateSizes(2, 6, 8, 32), 4)
    assert ops.remembers(STATE_SPACE, StateSizes(2, 6, 16, 32), 4)
    assert not ops.remembers(RECURRENT, StateSizes(2, 6, 16, 32), 9)


def test_rows_of_trees_are_those_of_plain_decoding_bit_for_bit(session: Session, plain: np.ndarray) -> None:
    runner, text, rng, compared = runner_of(session), LONG, np.random.default_rng(1), 0
    while runner.length < len(text) - STATE_BLOCK:
        at = runner.length
        room = SUM_BLOCK - at % SUM_BLOCK  # the runtime keeps trees off these borders
        rows = int(min(room, rng.integers(1, STATE_BLOCK + 1)))
        path = int(rng.integers(1, min(rows, 12) + 1))
        tree, places = tree_with(path, rows, rng)
        tokens = random_tokens(rows, seed=at)
        for depth, node in enumerate(places):
            tokens[node] = text[at + depth]
        offsets, mask = tree.depths, tree.mask()
        logits = runner.forward(tokens, offsets, mask)
        for depth, node in enumerate(places):
            assert np.array_equal(logits[node], plain[at + depth]), (at, rows, node)
            compared += 1
        runner.commit(places[: int(rng.integers(1, path + 1))])
    assert compared > 400


@pytest.mark.parametrize("rows", [7, STATE_BLOCK])
def test_a_prompt_in_chunks_of_any_size_is_that_of_plain_decoding(
    rows: int, session: Session, plain: np.ndarray
) -> None:
    runner, text = runner_of(session), LONG[:420]
    for at in range(0, len(text), rows):
        chunk = text[at : at + rows]
        assert np.array_equal(plain_chunk(runner, chunk), plain[at : at + len(chunk)])


@pytest.fixture(scope="module")
def talk(session: Session, tmp_path_factory: pytest.TempPathFactory) -> tuple[tuple[Completion, Completion], Path]:
    """A plain answer to TEXT, a drafted one, and the conversation that was saved after it."""
    plain, drafted = (session.generate(TEXT, max_new_tokens=NEW, speculate=speculate) for speculate in (False, True))
    saved = tmp_path_factory.mktemp("saved") / "conversation"
    session.save(saved)
    return (plain, drafted), saved


def test_hundreds_of_drafted_tokens_are_plain_ones(
    session: Session, talk: tuple[tuple[Completion, Completion], Path]
) -> None:
    compared, (plain, drafted) = 0, talk[0]
    for seed in range(1, 40):
        assert drafted.token_ids == plain.token_ids
        assert len(plain.token_ids) == 1 or drafted.stats.sources["drafter"].drafted
        compared += len(plain.token_ids)
        if compared > 200:
            return
        text = "".join(np.random.default_rng(seed).choice(list("abcdefghijkl "), PROMPT))
        plain, drafted = (session.generate(text, max_new_tokens=NEW, speculate=one) for one in (False, True))
    raise AssertionError(f"only {compared} tokens")


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_those_of_hugging_face(family: str, bundles: dict[tuple[str, str], Path], tmp_path: Path) -> None:
    session = load(bundles[family, "fp32"], threads=1, cache_dir=tmp_path)
    answer = session.generate(TEXT, max_new_tokens=NEW, speculate=False).token_ids
    prompt = session.encode(TEXT)
    with torch.no_grad():
        expected = model(family)(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].argmax(1)
    assert answer == expected.tolist()


@a_session_of_each_cache
def test_answers_after_going_back_are_those_of_a_new_session(
    session: Session, talk: tuple[tuple[Completion, Completion], Path]
) -> None:
    """One after the other: within a block, by a block, and further than a ring reaches."""
    session.restore(talk[1])
    answers: list[tuple[list[int], list[int]]] = []
    for back in (60, 3, 500):
        kept = session.cached_tokens[: len(session.cached_tokens) - back]
        prompt = [*kept, 5, 9, 7]
        answers.append((prompt, session.generate(prompt, max_new_tokens=80, speculate=True).token_ids))
    for prompt, ours in answers:
        runner_of(session)
        assert ours == session.generate(prompt, max_new_tokens=80, speculate=False).token_ids


@a_session_of_each_cache
def test_after_a_dropped_thought_only_the_turn_is_read_again(session: Session) -> None:
    runner_of(session)
    ids = session.encode(TEXT)
    # Further back than a state can be gone back from.
    said = session.generate(ids, max_new_tokens=STATE_BLOCK + 10).token_ids
    shorter = [*ids, 5 if said[0] != 5 else 6, 9, 7]
    answer = session.generate(shorter, max_new_tokens=20)
    drafter = session.manifest.streams  # keys of a draft layer depend on the token after them
    assert drafter is not None and answer.stats.reused_tokens == len(ids) - bool(drafter.levels)
    runner_of(session)
    assert answer.token_ids == session.generate(shorter, max_new_tokens=20, speculate=False).token_ids


@a_session_of_each_cache
def test_a_saved_conversation_goes_on(session: Session, talk: tuple[tuple[Completion, Completion], Path]) -> None:
    (_, drafted), saved = talk
    runner_of(session)
    session.restore(saved)
    cached = list(session.cached_tokens)
    whole = [*session.encode(TEXT), *drafted.token_ids]
    assert cached[: len(whole)] == whole[: len(cached)] and len(cached) >= len(whole) - 1  # drafts after its end, too
    prompt = [*cached, 5, 9, 7]
    found = session.generate(prompt, max_new_tokens=110)
    assert found.stats.reused_tokens > len(cached) - 2
    runner_of(session)
    assert found.token_ids == session.generate(prompt, max_new_tokens=110, speculate=False).token_ids


@pytest.mark.parametrize(("first", "second"), [("cpu", "native"), ("native", "cpu")])
def test_a_conversation_goes_on_in_the_other_graph(
    first: str, second: str, bundles: dict[tuple[str, str], Path], tmp_path: Path
) -> None:
    text = random_tokens(460)
    runners = [
        runner_of(load(bundles[DELTA, "int8"], threads=1, provider=name, cache_dir=tmp_path))
        for name in (first, second)
    ]
    for at in range(0, 437, 23):  # 437: five tokens of a run, after a block that has no state yet at 448
        plain_chunk(runners[0], text[at : at + 23])
        plain_chunk(runners[1], text[at : at + 23])
    expected = plain_chunk(runners[1], text[437:460])
    runners[1].restore(*runners[0].snapshot())
    found = plain_chunk(runners[1], text[437:460])
    assert np.abs(found - expected).max() < (0.15 if products_saturate() else 0.05) * expected.std()  # Zen 1: 0.08


# Family, whether its embeddings are tied, and changes of the tiny model.
SHAPES: list[tuple[str, bool, dict[str, int]]] = [
    *((DELTA, True, {}), (DELTA, False, {}), (MAMBA, True, {}), ("bamba", False, {})),
    *((OLMO, False, {}), (NEXT, False, {}), ("qwen3_5_moe_text", False, {}), (HALVED, False, {})),
    *((BOTH, False, {}), (NORMED, True, {}), (GATED, False, {}), (GRANITE, True, {}), (NEMOTRON, False, {})),
    *((LATENT, True, {}), (HALVED, True, {"conv_kernel": 1})),
]


@pytest.fixture(scope="module", params=SHAPES, ids=str)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tiny_exports.Built:
    family, tied, own = request.param
    tiny = tiny_exports.tiny_model(family, tied, max_position_embeddings=CONTEXT, **own)
    return tiny_exports.build(tmp_path_factory.mktemp("graph"), tiny, streams=False)


def test_rows_are_those_of_hugging_face_at_every_position(built: tiny_exports.Built) -> None:
    steps, count = built.stepper(540), 540
    tokens = np.random.default_rng(0).integers(3, tiny_exports.VOCAB, count)
    expected = built.model(torch.as_tensor(tokens)[None]).logits[0].numpy()
    found = np.concatenate([steps.prefill(tokens[at : at + 24])["logits"] for at in range(0, count, 24)])
    assert np.abs(found - expected).max() < 1e-4 * expected.std()
    steps.length = 0
    np.testing.assert_array_equal(steps.prefill(tokens)["logits"], found)


def test_rows_of_a_tree_are_those_of_pytorch(built: tiny_exports.Built) -> None:
    steps, reference = built.stepper(256), ReferenceModel(built.model)
    rng, length = np.random.default_rng(2), 150
    tree, _ = tree_with(9, 40, rng)
    context, drafted = (rng.integers(3, tiny_exports.VOCAB, count) for count in (length, 40))
    expected = reference.logits(reference.states(*tree_rows(context, drafted, tree)))[length:]
    steps.prefill(context)
    found = steps.step(drafted, np.asarray(tree.depths), tree.mask())["logits"]
    assert np.abs(found - expected).max() < 1e-4 * expected.std()


STREAMED = [(DELTA, {}), (OLMO, {}), (MAMBA, {}), (NORMED, {}), (GATED, {}), (DELTA, {"linear_conv_kernel_dim": 1})]


@pytest.mark.parametrize(("family", "own"), STREAMED, ids=str)
def test_streams_start_from_the_state_of_their_row_at_every_position(
    family: str, own: dict[str, int], tmp_path: Path
) -> None:
    """Along a text, across blocks of states and the ring's end, and after a node of a tree across a block's end."""
    made = tiny_exports.tiny_model(family, max_position_embeddings=CONTEXT, **own)
    built = tiny_exports.build(tmp_path, made, tiny_exports.tiny_streams(describe(made), gamma=9))
    steps, rng, length = built.stepper(512), np.random.default_rng(3), 310
    tree, path = tree_with(12, 40, rng)
    context, drafted = (rng.integers(3, tiny_exports.VOCAB, count) for count in (length, 40))
    reference = ReferenceModel(built.model, built.streams)
    drafts = row_of(built.streams).reference_of(reference, built.streams)
    tokens, positions, sees = tree_rows(context, drafted, tree)
    truth = reference.states(tokens, positions, sees)

    def compare(out: Any, row: int, token: int) -> None:
        expected = drafts.logits(truth, positions, sees, row, token).numpy()
        found = np.take_along_axis(expected, out["candidates"], axis=1)
        assert np.abs(found - out["candidate_logits"]).max() < 1e-4 * expected.std()
        np.testing.assert_array_equal(out["candidates"][:, 0], expected.argmax(1))

    for at in range(0, length, 31):  # the last ends ten tokens before a block
        out = steps.prefill(context[at : at + 31], streams=9, forced_node=30)
        compare(out, at + 30, int(out["choices"][30]))
    parents = np.asarray(tree.parents)
    out = steps.step(
        drafted, np.asarray(tree.depths), tree.mask(), parents=parents, streams=9, forced_node=path[-1], forced_root=7
    )
    compare(out, length + path[-1], 7)
    steps.length = 0  # where the ring still has states of what was there
    out = steps.prefill(context[:31], streams=9, forced_node=30)
    compare(out, 30, int(out["choices"][30]))


@pytest.mark.parametrize(
    "case", [case for case in MADE if MADE[case] == "streaming" and case[1] != "fp32"], ids="-".join
)
def test_streams_draft_alike_in_both_graphs(case: tuple[str, str], bundles: dict[tuple[str, str], Path]) -> None:
    folder = bundles[case]
    graphs = [stepper(open_session(folder / name, threads=1), 512) for name in (MODEL, NATIVE)]
    same, text = [], np.asarray(random_tokens(310))
    for at in range(0, 310, 31):
        standard, native = (steps.prefill(text[at : at + 31], streams=3, forced_node=30) for steps in graphs)
        same += (standard["candidates"][:, 0] == native["candidates"][:, 0]).tolist()
    assert np.mean(same) > 0.8  # they round otherwise


def test_multipliers_are_not_rounded_to_the_dtype_of_the_files(tmp_path: Path) -> None:
    """transformers rounds its vector of those of a state space to it."""
    rounded = model(BOTH).bfloat16()
    rounded.save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    manifest = export_bundle(tmp_path / "base", None, tmp_path / "bundle", "fp32", progress=lambda line: None)
    assert manifest.parity["plain"]["relative"] < 1e-5
    ids = random_tokens(80)
    exact = type(rounded).from_pretrained(tmp_path / "base", dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        expected = exact(torch.tensor([ids])).logits[0].numpy()
    session = load(tmp_path / "bundle", threads=1, cache_dir=tmp_path)
    known = np.isfinite(ours := session.score(ids))
    assert np.abs(ours[known] - expected[known]).max() < 1e-4 * expected.std()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_fine_tuned_base_is_what_peft_computes(family: str, bases: dict[str, Path], tmp_path: Path) -> None:
    base = bases[family]
    rows = [{"prompt": text, "completion": text.upper()} for text in ("ab ba", "cab", "a bc", "bb", "cc a", "ac") * 2]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    brief = {"epochs": 1.0, "val_rows": 2, "save_steps": 1000}
    train(options(base, tmp_path / "data.jsonl", tmp_path / "adapter", method="lora", **brief))
    quiet: dict[str, Any] = {"measure": False, "progress": lambda line: None}
    export_bundle(base, tmp_path / "adapter", tmp_path / "bundle", "fp32", **quiet)
    session = load(tmp_path / "bundle", threads=1, cache_dir=tmp_path)
    ids = session.encode(TEXT)[:200]  # past three blocks of states
    tuned = PeftModel.from_pretrained(model(family), tmp_path / "adapter").eval()
    with torch.no_grad():
        expected = tuned(torch.tensor([ids])).logits[0].numpy()
        with tuned.disable_adapter():
            untuned = tuned(torch.tensor([ids])).logits[0].numpy()
    known = np.isfinite(ours := session.score(ids))
    assert np.abs(ours[known] - expected[known]).max() < 1e-4 * expected.std()
    assert np.abs(untuned - expected).max() > 1e-2 * expected.std()
