"""The step graph against PyTorch, family by family, and its behaviour as a contract."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from streamspec.draft_tree import MASKED, DraftTree, chain
from streamspec.export.drafters.registry import row_of
from streamspec.export.reference.draft_reference import ParallelReference
from streamspec.export.reference.pytorch_reference import ReferenceModel
from streamspec.export.reference.reference import tree_rows
from streamspec.export.spec.draft_spec import DraftSpec
from streamspec.export.validate.parity import sample_tree
from streamspec.export.weights.model_spec import describe
from streamspec.step_graph import SAMPLING_INPUTS
from tests.support.latent_families import LATENT
from tests.support.mixture_families import MIXTURES
from tests.support.near_families import VARIED
from tests.support.recurrent_families import RECURRENT, WHOLE
from tests.support.tiny_exports import FAMILIES, LAYERS, VOCAB, Built, build, tiny_heads, tiny_model, tiny_streams

RNG = np.random.default_rng(1)
CONTEXT = RNG.integers(3, VOCAB, 11)
TREE = sample_tree(9, gamma=3)
DRAFT = RNG.integers(3, VOCAB, len(TREE))
CLOSE = 2e-5


def run_tree(stepper: Any, tokens: np.ndarray = DRAFT, tree: DraftTree = TREE, **options: Any) -> dict[str, np.ndarray]:
    return stepper.step(tokens, np.asarray(tree.depths), tree.mask(), parents=np.asarray(tree.parents), **options)


def off(ours: np.ndarray, theirs: np.ndarray) -> float:
    return float(np.abs(ours - theirs).max() / theirs.std())


def draft_reference(model: ReferenceModel, streams: DraftSpec | None) -> ParallelReference:
    assert streams is not None
    found = row_of(streams).reference_of(model, streams)
    assert isinstance(found, ParallelReference)
    return found


def check_against_reference(built: Built) -> None:
    """Prompt rows, tree rows, and streams beside the prompt's last row and beside a node."""
    reference = ReferenceModel(built.model, built.streams)
    drafts = draft_reference(reference, built.streams)
    tokens, positions, sees = tree_rows(CONTEXT, DRAFT, TREE)
    truth = reference.states(tokens, positions, sees)
    logits = reference.logits(truth)
    stepper = built.stepper()
    last = len(CONTEXT) - 1
    prompt = stepper.prefill(CONTEXT, streams=3, forced_node=last)
    assert off(prompt["logits"], logits[: len(CONTEXT)]) < CLOSE
    np.testing.assert_array_equal(prompt["choices"], logits[: len(CONTEXT)].argmax(1))
    node, root = 5, 7
    tree = run_tree(stepper, streams=3, forced_node=node, forced_root=root)
    assert off(tree["logits"], logits[len(CONTEXT) :]) < CLOSE
    for out, row, token in ((prompt, last, int(prompt["choices"][last])), (tree, len(CONTEXT) + node, root)):
        expected = drafts.logits(truth, positions, sees, row, token).numpy()
        at = np.take_along_axis(expected, out["candidates"], axis=1)
        assert off(out["candidate_logits"], at) < 10 * CLOSE  # candidates lie close together: their spread is small
        np.testing.assert_array_equal(out["candidates"][:, 0], expected.argmax(1))


@pytest.mark.parametrize(
    ("family", "tied"),
    [*((family, True) for family in (*FAMILIES, *WHOLE, *MIXTURES, *LATENT)), *((family, False) for family in VARIED)],
)
def test_agrees_with_pytorch(family: str, tied: bool, tmp_path: Path) -> None:
    check_against_reference(build(tmp_path, tiny_model(family, tied)))


@pytest.mark.parametrize("family", [*FAMILIES, *RECURRENT, *MIXTURES, *LATENT])
def test_reference_agrees_with_hugging_face(family: str) -> None:
    model = tiny_model(family)
    expected = model(torch.as_tensor(CONTEXT)[None]).logits[0].numpy()
    reference = ReferenceModel(model)
    ours = reference.logits(reference.states(CONTEXT, np.arange(len(CONTEXT)), np.tri(len(CONTEXT), dtype=bool)))
    assert off(ours, expected) < 1e-5


@pytest.mark.parametrize("family", [*FAMILIES, *RECURRENT, *MIXTURES, *LATENT])
def test_tree_rows_of_the_reference_are_those_of_each_path_alone(family: str) -> None:
    model = tiny_model(family)
    reference = ReferenceModel(model)
    ours = reference.logits(reference.states(*tree_rows(CONTEXT, DRAFT, TREE)))
    for node in set(range(len(TREE))) - set(TREE.parents):  # leaves
        path = np.array(TREE.path(node))
        expected = model(torch.as_tensor([*CONTEXT, *DRAFT[path]])[None]).logits[0].numpy()
        assert off(ours[len(CONTEXT) + path], expected[len(CONTEXT) :]) < 1e-4


ROPE = {"rope_theta": 10000.0, "original_max_position_embeddings": 64}
SHORT = {"short_factor": [1.0 + i / 8 for i in range(8)], "long_factor": [4.0] * 8}


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"rope_parameters": ROPE | {"rope_type": "linear", "factor": 2.0}}),
        (
            "llama",
            {
                "rope_parameters": ROPE
                | {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
            },
        ),
        ("llama", {"rope_parameters": ROPE | {"rope_type": "yarn", "factor": 4.0}}),
        ("llama", {"rope_parameters": ROPE | {"rope_type": "dynamic", "factor": 4.0}}),
        ("llama", {"head_dim": 32, "mlp_bias": True, "hidden_act": "gelu_pytorch_tanh"}),
        ("llama", {"num_key_value_heads": 1}),
        ("phi", {"qk_layernorm": False, "hidden_act": "relu"}),
        (
            "phi3",
            {
                "sliding_window": None,
                "rope_parameters": ROPE
                | SHORT
                | {"rope_type": "longrope", "factor": 2.0, "partial_rotary_factor": 1.0},
            },
        ),
        ("gpt2", {"scale_attn_weights": False, "activation_function": "gelu"}),
        ("opt", {"enable_bias": False}),
        ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
        ("gemma3_text", {"final_logit_softcapping": 5.0}),
        (
            "olmo3",
            {
                "num_key_value_heads": 4,
                "rope_parameters": {
                    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
                    "full_attention": ROPE | {"rope_type": "yarn", "factor": 8.0, "attention_factor": 1.2},
                },
            },
        ),
        ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * LAYERS}),
        ("stablelm", {"use_parallel_residual": True, "qk_layernorm": False, "num_key_value_heads": 4}),
        ("gpt_neox", {"use_parallel_residual": False, "attention_bias": False}),
        ("gemma", {"num_key_value_heads": 1}),
        ("ministral3", {"sliding_window": 6}),
        ("hunyuan_v1_dense", {"rope_parameters": ROPE | {"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0}}),
        ("nemotron", {"attention_bias": False, "mlp_bias": False, "num_key_value_heads": 4}),
        ("granitemoehybrid", {"position_embedding_type": None}),
        ("smollm3", {"no_rope_layers": [0, 1, 1, 1], "use_sliding_window": False}),
    ],
)
def test_configurations_of_the_wild_agree_with_pytorch(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    check_against_reference(build(tmp_path, tiny_model(family, **changes), mode="delta"))


@pytest.mark.parametrize(
    "options", [{"lora": False}, {"root": False}, {"shifted": False}, {"shares": False}, {"ns": LAYERS}, {"paper": 3}]
)
def test_variants_of_streams_agree_with_pytorch(options: dict[str, Any], tmp_path: Path) -> None:
    model = tiny_model()
    check_against_reference(build(tmp_path, model, tiny_streams(describe(model), **options)))


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("trimmed", [True, False])
def test_medusa_heads_agree_with_pytorch(own: bool, trimmed: bool, tmp_path: Path) -> None:
    model = tiny_model()
    vocabulary = RNG.permutation(VOCAB)[:30] if trimmed else None
    built = build(tmp_path, model, tiny_heads(describe(model), own=own, draft_vocab=vocabulary))
    reference = ReferenceModel(model, built.streams)
    drafts = draft_reference(reference, built.streams)
    tokens, positions, sees = tree_rows(CONTEXT, DRAFT, TREE)
    truth = reference.states(tokens, positions, sees)
    stepper = built.stepper()
    prompt = stepper.prefill(CONTEXT, streams=3, forced_node=len(CONTEXT) - 1)
    tree = run_tree(stepper, streams=3, forced_node=5)
    for out, row in ((prompt, len(CONTEXT) - 1), (tree, len(CONTEXT) + 5)):
        expected = drafts.logits(truth, positions, sees, row, 0).numpy()
        if vocabulary is not None:
            expected[:, np.setdiff1d(np.arange(VOCAB), vocabulary)] = -np.inf
        best = np.sort(expected, axis=1)[:, ::-1][:, :10]
        assert off(out["candidate_logits"], best) < 10 * CLOSE
        np.testing.assert_array_equal(out["candidates"], np.argsort(-expected, axis=1)[:, :10])


def test_low_rank_products_equal_merged_weights(tmp_path: Path) -> None:
    check_against_reference(build(tmp_path, tiny_model("qwen3"), mode="delta"))


def test_trimmed_head_proposes_only_its_tokens(tmp_path: Path) -> None:
    model = tiny_model()
    vocabulary = np.array([40, 3, 77, 12, 55, 8, 90])
    built = build(tmp_path, model, tiny_streams(describe(model), draft_vocab=vocabulary))
    out = built.stepper().prefill(CONTEXT, streams=3, forced_node=len(CONTEXT) - 1)
    assert out["candidates"].shape == (3, 7)
    reference = ReferenceModel(model, built.streams)
    drafts = draft_reference(reference, built.streams)
    n = len(CONTEXT)
    truth = reference.states(CONTEXT, np.arange(n), np.tri(n, dtype=bool))
    expected = drafts.logits(truth, np.arange(n), np.tri(n, dtype=bool), n - 1, int(out["choices"][-1])).numpy()
    np.testing.assert_array_equal(out["candidates"], vocabulary[np.argsort(-expected[:, vocabulary], axis=1)])


@pytest.mark.parametrize("trimmed", [True, False])
def test_pairs_are_what_each_candidate_adds_to_those_of_the_next_stream(tmp_path: Path, trimmed: bool) -> None:
    model = tiny_model()
    vocabulary = np.array([40, 3, 77, 12, 55, 8, 90, 21, 60, 33, 5, 71]) if trimmed else np.arange(VOCAB)
    streams = tiny_streams(describe(model), draft_vocab=vocabulary if trimmed else None, bigram=4, root=False)
    stepper = build(tmp_path, model, streams).stepper()
    number = {int(token): i for i, token in enumerate(vocabulary)}
    before, after = streams.bigram  # type: ignore[misc]
    for root in (int(vocabulary[2]), 44):
        out = stepper.prefill(CONTEXT, streams=3, forced_node=len(CONTEXT) - 1, forced_root=root)
        stepper.length = 0
        ranked = [[number[int(token)] for token in row] for row in out["candidates"]]
        start = before[number[root]] if root in number else np.zeros(4, np.float32)
        np.testing.assert_allclose(out["pair_logits"][0], np.tile(after[ranked[0]] @ start, (10, 1)), atol=1e-5)
        for stream in (1, 2):
            expected = before[ranked[stream - 1]] @ after[ranked[stream]].T
            np.testing.assert_allclose(out["pair_logits"][stream], expected, atol=1e-5)


def test_scaled_rotary_embedding_agrees_with_pytorch(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0}
    check_against_reference(build(tmp_path, tiny_model("llama", rope_parameters=rope)))


def test_acceptance_is_the_deepest_node_whose_whole_path_is_right(tmp_path: Path) -> None:
    stepper = build(tmp_path, tiny_model()).stepper()
    stepper.prefill(CONTEXT, forced_node=len(CONTEXT) - 1)
    rng = np.random.default_rng(2)
    depths = set()
    for trial in range(12):
        tokens = rng.integers(3, VOCAB, len(TREE))
        for node in range(1, len(TREE)):  # make some paths right, in node order
            choices = run_tree(stepper, tokens)["choices"]
            if rng.random() < trial / 12:
                tokens[node] = choices[TREE.parents[node]]
        out = run_tree(stepper, tokens, streams=3)
        right = [
            all(tokens[i] == out["choices"][TREE.parents[i]] for i in TREE.path(node)[1:]) for node in range(len(TREE))
        ]
        best = max(TREE.depths[node] for node in range(len(TREE)) if right[node])
        accepted = int(out["accepted_node"][0])
        assert right[accepted] and TREE.depths[accepted] == best
        depths.add(best)
    assert len(depths) > 2


def test_streams_follow_the_accepted_node_and_its_choice(tmp_path: Path) -> None:
    stepper = build(tmp_path, tiny_model()).stepper()
    stepper.prefill(CONTEXT, forced_node=len(CONTEXT) - 1)
    free = run_tree(stepper, streams=3)
    node = int(free["accepted_node"][0])
    forced = run_tree(stepper, streams=3, forced_node=node, forced_root=int(free["choices"][node]))
    np.testing.assert_array_equal(free["candidate_logits"], forced["candidate_logits"])


@pytest.mark.parametrize("kind", ["fp32", "int8", "int4"])
def test_without_stream_rows_nothing_changes_for_main_rows(kind: str, tmp_path: Path) -> None:
    stepper = build(tmp_path, tiny_model(), kind=kind).stepper()
    stepper.prefill(CONTEXT, forced_node=len(CONTEXT) - 1)
    with_streams, without = run_tree(stepper, streams=3), run_tree(stepper)
    assert without["candidates"].shape == (0, 10) and without["candidate_logits"].shape == (0, 10)
    assert without["accepted_node"] == -1
    for name in ("logits", "choices"):
        np.testing.assert_array_equal(with_streams[name], without[name])


def test_without_stream_rows_no_stream_node_runs(tmp_path: Path) -> None:
    import onnxruntime as ort

    build(tmp_path, tiny_model())
    options = ort.SessionOptions()
    options.enable_profiling, options.log_severity_level = True, 3
    options.profile_file_prefix = str(tmp_path / "profile")
    from streamspec.export.runners.graph_runner import GraphRunner

    stepper = GraphRunner(
        ort.InferenceSession(str(tmp_path / "model.onnx"), options, providers=["CPUExecutionProvider"]), 32
    )
    stepper.prefill(CONTEXT, forced_node=len(CONTEXT) - 1)
    trace = Path(stepper.session.end_profiling()).read_text()
    assert "layers.3/" in trace and "streams/layers.3/" not in trace


def test_plain_graph_has_no_drafting_interface(tmp_path: Path) -> None:
    built = build(tmp_path, tiny_model(), streams=False)
    stepper = built.stepper()
    assert not stepper.names & {"parents", "stream_ids", "forced_node", "forced_root"}
    assert list(stepper.outputs) == ["choices", "raw_logits", "logit_scale"]
    out = stepper.prefill(CONTEXT, rows=np.array([len(CONTEXT) - 1]))
    assert out["logits"].shape == (1, VOCAB)


def test_compacted_cache_equals_a_cache_without_the_tree(tmp_path: Path) -> None:
    built = build(tmp_path, tiny_model("mistral"))
    tree, plain = built.stepper(), built.stepper()
    for stepper in (tree, plain):
        stepper.prefill(CONTEXT, forced_node=len(CONTEXT) - 1)
    run_tree(tree)
    path = np.array(TREE.path(max(range(len(TREE)), key=lambda i: (TREE.depths[i], i))))
    assert (np.diff(path) > 1).any()  # the path really is gapped
    for rows in tree.buffers.values():
        rows[..., len(CONTEXT) : len(CONTEXT) + len(path), :] = rows[..., len(CONTEXT) + path, :]
        rows[..., len(CONTEXT) + len(path) :, :] = 1e9  # whatever else the tree left over must not matter
    tree.length += len(path)
    plain.prefill(DRAFT[path], forced_node=len(path) - 1)
    for name, rows in tree.buffers.items():
        kept, expected = rows[..., : tree.length, :], plain.buffers[name][..., : plain.length, :]
        np.testing.assert_allclose(kept, expected, atol=1e-5)
    follow = chain(3)
    ours, theirs = (run_tree(s, DRAFT[:4], follow, streams=3) for s in (tree, plain))
    np.testing.assert_allclose(ours["logits"], theirs["logits"], atol=1e-4)
    np.testing.assert_allclose(ours["candidate_logits"], theirs["candidate_logits"], atol=1e-4)


def test_prompt_in_chunks_equals_prompt_at_once(tmp_path: Path) -> None:
    built = build(tmp_path, tiny_model("qwen2"))
    once, parts = built.stepper(), built.stepper()
    whole = once.prefill(CONTEXT, rows=np.array([10]), streams=3, forced_node=10)
    parts.prefill(CONTEXT[:6], rows=np.array([5]), forced_node=5)
    rest = parts.prefill(CONTEXT[6:], rows=np.array([4]), streams=3, forced_node=4)
    np.testing.assert_allclose(whole["logits"], rest["logits"], atol=1e-4)
    np.testing.assert_allclose(whole["candidate_logits"], rest["candidate_logits"], atol=1e-4)


def test_exported_tree_is_the_default_of_mask_and_parents(tmp_path: Path) -> None:
    built = build(tmp_path, tiny_model(), tree=TREE)
    assert {v.name for v in built.session.get_overridable_initializers()} == {
        "tree_mask",
        "parents",
        *(row.name for row in SAMPLING_INPUTS),
    }
    feed: dict[str, Any] = {
        "input_ids": DRAFT[None],
        "position_ids": np.asarray(TREE.depths, np.int64)[None],
        "past_length": np.array([0]),
        "logit_rows": np.arange(len(TREE)),
        "stream_ids": np.arange(3),
        "forced_node": np.array([-1]),
        "forced_root": np.array([-1]),
    }
    feed |= {
        name: np.zeros((1, 2, 32, 16), np.float32) for name in built.stepper().names if name.startswith("past_key")
    }
    by_default = built.session.run(["raw_logits", "accepted_node"], feed)
    given = built.session.run(
        ["raw_logits", "accepted_node"],
        feed | {"tree_mask": TREE.mask(), "parents": np.asarray(TREE.parents, np.int64)},
    )
    chained = built.session.run(
        ["raw_logits", "accepted_node"], feed | {"tree_mask": np.where(np.tri(9), 0, MASKED).astype(np.float32)}
    )
    np.testing.assert_array_equal(by_default[0], given[0])
    assert np.abs(chained[0] - given[0]).max() > 1e-3


def test_lengths_end_where_frequencies_would_change() -> None:
    assert describe(tiny_model()).context_length == 128
    for kind in ({"rope_type": "longrope", "factor": 2.0, **SHORT}, {"rope_type": "dynamic", "factor": 2.0}):
        assert describe(tiny_model("llama", rope_parameters=ROPE | kind)).context_length == 64
