"""Providers that compute wrongly, as graphs bent to do what such providers do; and right ones of every kind."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from streamspec.bundle.files import read_manifest
from streamspec.bundle.manifest import MODEL
from streamspec.bundle.write_files import finish
from streamspec.draft_tree import MASKED
from streamspec.errors import BundleError
from streamspec.export import export_bundle
from streamspec.runtime import load
from streamspec.runtime.decoding.model_runner import StepRequest
from streamspec.runtime.engine import dynamic_call
from streamspec.runtime.engine.ort_runner import OrtRunner
from streamspec.runtime.kv_cache.host_cache import KeyValueCache
from streamspec.runtime.tuning.self_test import _check_prompt, check_numerics, two_branches
from tests.support.tiny_exports import save_base, tiny_model

Bundles = Callable[[str], Path]
Nodes = list[onnx.NodeProto]


def scalar(name: str, value: float, kind: int = onnx.TensorProto.FLOAT) -> onnx.NodeProto:
    return helper.make_node("Constant", [], [name], value=helper.make_tensor(name, kind, [], [value]))


def without_mask(graph: onnx.GraphProto) -> Nodes:
    """Rows see all rows before them."""
    redirect(graph, "tree_mask", "bent", only="/bias.full/")
    return [
        scalar("none", 0),
        scalar("masked", MASKED),
        helper.make_node("Mul", ["tree_mask", "none"], ["zeros"]),
        helper.make_node("Add", ["zeros", "masked"], ["all_masked"]),
        scalar("first", 1, onnx.TensorProto.INT64),
        helper.make_node("Trilu", ["all_masked", "first"], ["bent"], upper=1),
    ]


def without_positions(graph: onnx.GraphProto) -> Nodes:
    """Rows follow one another."""
    redirect(graph, bounded(graph), "bent")
    axis = helper.make_node("Constant", [], ["axis"], value_ints=[0])
    return [*rows_in_slots(), axis, helper.make_node("Unsqueeze", ["positions", "axis"], ["bent"])]


def bounded(graph: onnx.GraphProto) -> str:
    """The positions, within the context."""
    return next(node.output[0] for node in graph.node if node.op_type == "Min" and "position_ids" in node.input)


def rows_in_slots() -> Nodes:
    """`positions` int64 [n]: the slots of the rows."""
    whole = onnx.TensorProto.INT64
    return [
        scalar("none", 0, whole),
        scalar("one", 1, whole),
        helper.make_node("Size", ["input_ids"], ["rows"]),
        helper.make_node("Range", ["none", "rows", "one"], ["slots"]),
        helper.make_node("Add", ["slots", "past_length"], ["positions"]),
    ]


def without_past(graph: onnx.GraphProto) -> Nodes:
    """Every call is a prompt of its own."""
    join = next(node for node in graph.node if node.op_type == "Concat" and "tree_mask" in node.input)
    seen = join.input[0]
    join.input[0] = "bent"
    return [scalar("masked", MASKED), helper.make_node("Add", [seen, "masked"], ["bent"])]


def redirect(graph: onnx.GraphProto, name: str, to: str, only: str = "") -> None:
    nodes = [node for node in graph.node if name in node.input and only in node.name]
    assert nodes
    for node in nodes:
        for at, used in enumerate(node.input):
            if used == name:
                node.input[at] = to


def bent(bundle: Path, folder: Path, how: Callable[[onnx.GraphProto], Nodes]) -> Path:
    """A copy of the bundle whose graph computes otherwise."""
    shutil.copytree(bundle, folder)
    manifest = read_manifest(folder)
    model = onnx.load(folder / MODEL, load_external_data=False)
    nodes = [*how(model.graph), *model.graph.node]
    del model.graph.node[:]
    model.graph.node.extend(in_order(nodes))
    onnx.save(model, folder / MODEL)
    finish(folder, manifest)
    return folder


def in_order(nodes: Nodes) -> Nodes:
    """Every node after those it reads from."""
    made = {name for node in nodes for name in node.output if name}
    out: Nodes = []
    while nodes:
        ready = [node for node in nodes if not made & set(node.input)]
        assert ready
        out += ready
        nodes = [node for node in nodes if all(node is not one for one in ready)]
        made -= {name for node in ready for name in node.output}
    return out


@pytest.mark.parametrize("how", [without_mask, without_positions, without_past])
@pytest.mark.parametrize("kind", ["fp32", "int8", "int4", "jakiro", "lora", "lettered fp32"])
def test_a_provider_that_ignores_a_part_of_a_tree_is_refused(
    bundles: Bundles, tmp_path: Path, kind: str, how: Any
) -> None:
    wrong = bent(bundles(kind), tmp_path / "bent", how)
    with pytest.raises(BundleError, match="this machine computes a draft tree with logits"):
        load(wrong, threads=1, tree="plain", provider="cpu")


def test_accepted_rows_that_do_not_reach_the_cache_are_found(bundles: Bundles, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(self: KeyValueCache, path: Any, above: Any = None) -> None:
        self.length += len(path)  # as if the graph had written elsewhere

    monkeypatch.setattr(KeyValueCache, "compact", lost)
    with pytest.raises(BundleError, match="computes a step after a draft tree"):
        load(bundles("fp32"), threads=1, tree="plain")


def test_pruned_rows_that_are_moved_as_if_none_were_are_found(
    bundles: Bundles, monkeypatch: pytest.MonkeyPatch
) -> None:
    compact = KeyValueCache.compact
    monkeypatch.setattr(KeyValueCache, "compact", lambda self, path, above=None: compact(self, path))
    with pytest.raises(BundleError, match="pruned at the early exit with keys and values"):
        load(bundles("fp32"), threads=1, tree="plain")


def test_an_early_exit_that_keeps_other_rows_than_it_is_told_to_is_found(
    bundles: Bundles, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = dynamic_call.DynamicCall.run

    def all_kept(self: Any, rows: Any, request: StepRequest, *rest: Any) -> Any:
        return run(self, rows, replace(request, pruning=None), *rest)

    monkeypatch.setattr(dynamic_call.DynamicCall, "run", all_kept)
    with pytest.raises(BundleError, match="pruned at the early exit with rows .* left"):
        load(bundles("fp32"), threads=1, tree="plain")


@pytest.mark.parametrize("kind", ["fp32", "lettered fp32"])  # the second has rows that are no token
def test_choices_that_are_not_the_largest_are_found(
    bundles: Bundles, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    def off(choices: np.ndarray, vocab_size: int) -> np.ndarray:
        return (choices + 1) % vocab_size

    monkeypatch.setattr(dynamic_call, "checked_tokens", off)
    with pytest.raises(BundleError, match="below the largest"):
        load(bundles(kind), threads=1, tree="plain")


@pytest.mark.parametrize("factor", [1.2, 0.0, float("nan")])
def test_a_machine_that_computes_wrongly_is_refused(
    bundles: Bundles, monkeypatch: pytest.MonkeyPatch, factor: float
) -> None:
    forward = OrtRunner.forward
    monkeypatch.setattr(OrtRunner, "forward", lambda self, *args: forward(self, *args) * np.float32(factor))
    with pytest.raises(BundleError, match="computes a prompt"):
        load(bundles("fp32"), threads=1, tree="plain")


@pytest.mark.parametrize("kind", ["fp32", "int8", "int4", "lora", "full", "jakiro", "eagle", "lists"])
def test_an_honest_machine_passes(bundles: Bundles, kind: str) -> None:
    load(bundles(kind), threads=1, tree="plain")


@pytest.mark.parametrize("family", ["mistral", "gemma2", "opt", "gpt2", "phi3"])
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_windows_caps_and_learned_positions_pass(tmp_path: Path, family: str, precision: str) -> None:
    base = save_base(tmp_path / "base", tiny_model(family))
    export_bundle(base.path, None, tmp_path / "bundle", precision, progress=lambda line: None)
    load(tmp_path / "bundle", threads=1, tree="plain")


def test_a_window_that_counts_slots_is_refused(tmp_path: Path) -> None:
    """Positions are right where they enter, wrong where the window asks for them."""

    def slots(graph: onnx.GraphProto) -> Nodes:
        rows = bounded(graph)
        flat = next(node.output[0] for node in graph.node if node.op_type == "Squeeze" and rows in node.input)
        redirect(graph, flat, "positions", only="/bias.6/")
        return rows_in_slots()

    base = save_base(tmp_path / "base", tiny_model("mistral"))
    export_bundle(base.path, None, tmp_path / "bundle", "fp32", progress=lambda line: None)
    with pytest.raises(BundleError, match="a draft tree"):
        load(bent(tmp_path / "bundle", tmp_path / "bent", slots), threads=1, tree="plain")


@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_a_number_that_is_none_fails_wherever_it_stands(odd: float) -> None:
    logits = np.array([[1.0, 0.0, 5.0], [1.0, odd, 5.0], [1.0, 0.0, 5.0]], np.float32)
    with pytest.raises(BundleError, match="logits"):
        _check_prompt(logits, [2] * 3, [5.0] * 3, "cpu")


def test_the_probe_keeps_to_the_rows_of_a_graph_of_one_shape(bundles: Bundles, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    forward = OrtRunner.forward
    monkeypatch.setattr(
        OrtRunner, "forward", lambda self, tokens, *args: seen.append(len(tokens)) or forward(self, tokens, *args)
    )
    session = load(bundles("fp32"), threads=1, tree="plain")
    assert isinstance(session.runner, OrtRunner) and session.manifest.probe
    session.runner.rows = 8
    seen.clear()
    check_numerics(session.runner, session.manifest)
    ids = len(session.manifest.probe.input_ids)
    assert seen == [ids, 7, 4, 1, ids, 1]


def test_the_probe_tree_has_two_branches_in_turns() -> None:
    tree = two_branches(4)
    assert tree.path(6) == (0, 2, 4, 6) and tree.path(5) == (0, 1, 3, 5)
    assert len(two_branches(1)) == 1
