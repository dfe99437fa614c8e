from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from streamspec import step_graph
from streamspec.bundle.manifest import DrafterInfo, StaticInfo, SwappableCapacity
from streamspec.runtime.kv_cache.layout import cache_groups
from streamspec.step_graph import COMPACTION, DYNAMIC, SAMPLING, STATIC, GraphFeatures, adapter_inputs, inputs, outputs
from tests.support.manifests import manifest

SAMPLING_NAMES = ["temperature", "top_k", "top_p", "min_p", "repetition_penalty", "uniforms", "seen", "free", "allowed"]
CACHE = [f"{layer}.{kind}" for layer in range(2) for kind in ("key", "value")]


def names(rows: list[step_graph.GraphTensor]) -> list[str]:
    return [row.name for row in rows]


def test_a_graph_of_streams_has_these_inputs_and_outputs_in_this_order() -> None:
    features = GraphFeatures.of_manifest(manifest(streams=DrafterInfo(2, 1, 5, bigram=True, pruning=True)))
    ahead = ["input_ids", "position_ids", "tree_mask", "past_length", "logit_rows", *SAMPLING_NAMES]
    drafting = ["keep_rows", "keep_above", "priors", "parents", "stream_ids", "forced_node", "forced_root"]
    assert names(inputs(DYNAMIC, features)) == ahead + drafting + [f"past_key_values.{name}" for name in CACHE]
    given = ["choices", "raw_logits", "logit_scale", "accepted_node", "candidates", "candidate_logits", "pair_logits"]
    assert names(outputs(DYNAMIC, features)) == given + [f"present.{name}" for name in CACHE]
    assert [row.dims for row in outputs(DYNAMIC, features)[1:7]] == [
        ("s", 257),
        ("s", 1),
        (1,),
        ("m", 5),
        ("m", 5),
        ("m", 5, 5),
    ]
    assert features.exit_layer == 1 and inputs(DYNAMIC, features)[-1].dims == (1, 1, "S", 8)


def test_a_graph_without_a_drafter_lacks_all_that_belongs_to_one() -> None:
    plain = GraphFeatures.of_manifest(manifest(method="lora", streams=None, trees=None, recipe=None, drafter=None))
    taken = {*names(inputs(DYNAMIC, plain)), *names(outputs(DYNAMIC, plain))}
    assert not taken & {"parents", "stream_ids", "forced_node", "forced_root", "accepted_node", "candidates"}


def test_a_draft_layer_has_a_layer_of_the_cache_and_next_ids() -> None:
    features = GraphFeatures.of_manifest(manifest(streams=DrafterInfo(2, 0, 5, "same", levels=(1, 4))))
    assert features.cache_layers == 3 and features.root
    assert "next_ids" in names(inputs(DYNAMIC, features)) and "origins" in names(outputs(DYNAMIC, features))
    assert names(inputs(DYNAMIC, features))[-1] == step_graph.past(2, step_graph.VALUE)


def test_a_draft_layer_over_the_targets_keys_has_neither() -> None:
    features = GraphFeatures.of_manifest(manifest(streams=DrafterInfo(2, 0, 5, levels=(1, 4), target_keys=True)))
    assert features.cache_layers == 2 and names(inputs(DYNAMIC, features))[-1] == step_graph.past(1, step_graph.VALUE)
    assert "next_ids" not in names(inputs(DYNAMIC, features)) and "origins" in names(outputs(DYNAMIC, features))


def test_a_block_drafter_has_layers_of_the_cache_and_proposes_as_streams_do() -> None:
    features = GraphFeatures.of_manifest(manifest(method="dflash", streams=DrafterInfo(2, 0, 5, layers=2)))
    assert features.cache_layers == 4 and features.root
    assert "next_ids" not in names(inputs(DYNAMIC, features)) and "origins" not in names(outputs(DYNAMIC, features))
    assert names(inputs(DYNAMIC, features))[-1] == step_graph.past(3, step_graph.VALUE)


def test_keys_of_a_drafters_own_layers_may_have_sizes_of_their_own() -> None:
    for streams in (
        DrafterInfo(2, 0, 5, layers=2, own_keys=(3, 4)),
        DrafterInfo(2, 0, 5, levels=(1, 4), own_keys=(3, 4)),
    ):
        features = GraphFeatures.of_manifest(manifest(streams=streams))
        dims = {row.name: row.dims for row in inputs(DYNAMIC, features)}
        assert dims[step_graph.past(1, step_graph.KEY)] == (1, 1, "S", 8)
        assert dims[step_graph.past(2, step_graph.KEY)] == (1, 3, "S", 4)
        assert [(group.heads, group.width) for group in cache_groups(features)] == [(1, 8), (3, 4)]


def test_a_static_graph_has_numbers_alone_for_dimensions() -> None:
    features = GraphFeatures.of_manifest(manifest(static=StaticInfo(10, 64)))
    rows = [*inputs(STATIC, features), *outputs(STATIC, features)]
    assert all(isinstance(dim, int) for row in rows for dim in row.dims)
    assert names(outputs(STATIC, features))[-4:] == [f"new.{name}" for name in CACHE]
    assert inputs(STATIC, features)[2].dims == (10, 10) and outputs(STATIC, features)[3].dims == (2, 5)


def test_a_swappable_graph_has_the_inputs_that_its_capacity_names() -> None:
    room = SwappableCapacity((1,), 5, root_token=True, bigram=False, pruning=True, draft_vocab=True)
    bundle = manifest(method="lora", streams=None, trees=None, recipe=None, drafter=None, swappable=room)
    features = GraphFeatures.of_manifest(bundle)
    wanted = ["streams.begin", "streams.shift", "streams.embeddings", "streams.shares.0", "streams.shares.1"]
    wanted += ["streams.root_map", "prune.down", "prune.up", "streams.draft_vocab"]
    wanted += ["streams.head.int8", "streams.head.scale"]
    assert names(adapter_inputs(features)) == wanted
    taken = inputs(DYNAMIC, features, adapter_inputs(features))
    assert names(taken)[-5] == "streams.head.scale" and names(taken)[-4] == "past_key_values.0.key"


def test_the_graphs_beside_the_step_graph() -> None:
    features = GraphFeatures.of_manifest(manifest())
    moved = names(inputs(COMPACTION, features))
    assert moved == ["rows", "start", *(f"past_key_values.{name}" for name in CACHE)]
    assert names(inputs(SAMPLING, features)) == ["raw_logits", "input_ids", "tree_mask", *SAMPLING_NAMES]
    assert names(outputs(SAMPLING, features)) == ["choices"]


def test_defaults_have_the_dtype_and_shape_of_their_inputs() -> None:
    features = GraphFeatures.of_manifest(manifest())
    rows = {row.name: row for row in inputs(DYNAMIC, features)}
    assert rows["top_k"].filled(0).tolist() == [0] and str(rows["top_k"].filled(0).dtype) == "int64"
    assert rows["seen"].filled(0).shape == (257,) and rows["allowed"].filled(1).tolist() == [[True]]
    assert rows["stream_ids"].filled(0).shape == (0,) and rows["parents"].filled(0).tolist() == [0]


# ---- the names are written in the table alone

FOLDERS = ("export", "runtime", "streamspec")
ORDINARY = {  # also ordinary words, keys of JSON, or options: not looked for
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "uniforms", "seen", "free", "allowed"),
    *("parents", "choices", "candidates", "origins", "priors", "rows", "start"),
}
ALLOWED = {  # a key of the manifest's probe, a field of a config, an argument of transformers' layers, an id
    ("export/drafters/layer_reference.py", "hidden_states"),
    ("streamspec/bundle/manifest.py", "input_ids"),
    ("streamspec/model_families/families.py", "logit_scale"),
    ("streamspec/serve/forms/ollama.py", "call"),
}


def names_of_the_table() -> set[str]:
    rows = [row for sides in step_graph.INTERFACES.values() for side in sides for row in side]
    return {row.name for row in [*rows, *step_graph.ADAPTER_INPUTS] if "{" not in row.name} - ORDINARY


def literals(file: Path) -> Iterator[tuple[int, str]]:
    """Strings of a module that are not documentation."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            yield node.lineno, node.value


@pytest.mark.parametrize("folder", FOLDERS)
def test_names_of_the_graph_are_written_in_the_table_alone(folder: str) -> None:
    root, names = Path(__file__).parents[2], names_of_the_table()
    prefixes = ("past_key_values.", "present.", "new.")
    found = []
    for file in sorted((root / folder).rglob("*.py")):
        path = file.relative_to(root).as_posix()
        if path == "streamspec/step_graph.py":
            continue
        for line, text in literals(file):
            if (text in names and (path, text) not in ALLOWED) or text.startswith(prefixes):
                found.append(f"{path}:{line}: {text!r}")
    assert not found, "take these names from streamspec.step_graph:\n" + "\n".join(found)
