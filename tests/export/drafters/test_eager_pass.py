"""Eager streams: the candidates of deferred ones in every tree, over windows and after an early exit; same answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamspec.draft_tree import DraftTree
from streamspec.errors import ConfigError
from streamspec.export.drafters.streams.eager_pass import eager
from streamspec.export.validate.parity import sample_tree
from streamspec.export.weights.model_spec import describe
from tests.support.near_families import VARIED
from tests.support.tiny_exports import VOCAB, Built, build, tiny_heads, tiny_model, tiny_streams

GAMMA, ROWS, PROMPT = 3, 9, 11
CONVOLUTIONS = ("lfm2", "lfm3")
Outputs = dict[str, np.ndarray]


def pair(folder: Path, family: str = "llama", kind: str = "fp32", **shape: Any) -> list[Built]:
    """The same streams in a deferred and in an eager graph."""
    model = tiny_model(family)
    spec = describe(model)
    streams = tiny_streams(spec, GAMMA, **({"root": False, "bigram": 4} | shape))
    built = []
    for name, drafter in (("deferred", streams), ("eager", eager(streams, spec))):
        (folder / name).mkdir()
        built.append(build(folder / name, model, drafter, kind, "delta"))
    return built


def drafted(tree: DraftTree, root: int, last: Outputs) -> np.ndarray:
    """The root and what the last step proposed for the nodes after it."""
    nodes = zip(tree.depths[1:], tree.ranks[1:], strict=True)
    return np.array([root, *(last["candidates"][depth - 1, rank] for depth, rank in nodes)])


def answer(built: Built, steps: int = 6, **options: Any) -> list[Outputs]:
    """A prompt and steps over trees of the last step's candidates, each committed as the graph accepts it; the third
    drafts nothing, as a plain step."""
    stepper = built.stepper()
    outs = [stepper.prefill(np.random.default_rng(5).integers(3, VOCAB, PROMPT), streams=GAMMA, forced_node=PROMPT - 1)]
    root, last = int(outs[0]["choices"][-1]), outs[0]
    for step in range(steps):
        tree = sample_tree(ROWS, gamma=GAMMA, seed=step)
        tokens, node = drafted(tree, root, last), -1 if step % 2 else 4
        rows = np.asarray(tree.depths), tree.mask()
        more = {"parents": np.asarray(tree.parents), "streams": 0 if step == 2 else GAMMA, "forced_node": node}
        out = stepper.step(tokens, *rows, **more, **options)
        node = max(0, int(out["accepted_node"][0]))
        for buffer in stepper.buffers.values():
            path = [stepper.length + row for row in tree.path(node)]
            buffer[:, :, stepper.length : stepper.length + len(path)] = buffer[:, :, path]
        stepper.length += len(tree.path(node))
        root, last = int(out["choices"][node]), out if step != 2 else last
        outs.append(out | {f"cache.{name}": buffer.copy() for name, buffer in stepper.buffers.items()})
    return outs


def check_equal(deferred: list[Outputs], eager: list[Outputs], close: float = 1e-4) -> None:
    for ours, theirs in zip(eager, deferred, strict=True):
        assert set(ours) == set(theirs)
        for name in ("choices", "accepted_node", "candidates"):
            np.testing.assert_array_equal(ours[name], theirs[name])
        for name in set(ours) - {"raw_logits", "choices", "accepted_node", "candidates"}:
            np.testing.assert_allclose(ours[name], theirs[name], atol=close, err_msg=name)


@pytest.mark.parametrize("family", [name for name in VARIED if name not in CONVOLUTIONS])
def test_eager_candidates_are_the_deferred_ones_step_after_step(family: str, tmp_path: Path) -> None:
    check_equal(*map(answer, pair(tmp_path, family)))


@pytest.mark.parametrize(
    "shape",
    [
        {"lora": False},
        {"bigram": 0, "shifted": False},
        {"draft_vocab": np.arange(5, 40), "bigram": 4},
        {"ns": 4, "shares": False},
        {"pruning": 4},
        {"paper": 3},
    ],
)
def test_eager_candidates_are_the_deferred_ones_in_every_shape_of_streams(
    shape: dict[str, Any], tmp_path: Path
) -> None:
    check_equal(*map(answer, pair(tmp_path, **shape)))


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gemma4_text"])
def test_rows_pruned_at_the_early_exit_take_their_streams_along(family: str, tmp_path: Path) -> None:
    tree = sample_tree(ROWS, gamma=GAMMA, seed=3)
    graphs = pair(tmp_path, family, pruning=4)
    for keep in (1, 4, 6):
        outs = []
        for built in graphs:
            stepper = built.stepper()
            first = stepper.prefill(np.arange(3, 14), streams=GAMMA, forced_node=10)
            rows = drafted(tree, int(first["choices"][-1]), first), np.asarray(tree.depths), tree.mask()
            kept = {"keep_rows": keep, "priors": -0.3 * np.asarray(tree.depths)}
            outs.append([stepper.step(*rows, parents=np.asarray(tree.parents), streams=GAMMA, **kept)])
            assert (outs[-1][0]["choices"] >= 0).sum() == keep
        check_equal(*outs)


@pytest.mark.parametrize("kind", ["int8", "int4", "fp16"])
def test_streams_behind_the_nodes_change_no_bit_of_the_nodes(kind: str, tmp_path: Path) -> None:
    built = pair(tmp_path, kind=kind)[1]
    tree = sample_tree(ROWS, gamma=GAMMA, seed=3)
    outs = []
    for streams in (0, GAMMA):
        stepper = built.stepper()
        stepper.prefill(np.arange(3, 14), streams=streams, forced_node=10, rows=np.array([10]))
        rows = np.arange(20, 20 + ROWS), np.asarray(tree.depths), tree.mask()
        outs.append(stepper.step(*rows, parents=np.asarray(tree.parents), streams=streams))
        outs[-1] |= {str(number): buffer for number, buffer in enumerate(stepper.buffers.values())}
    for name in {"choices", "logits"} | {name for name in outs[0] if name.isdecimal()}:
        np.testing.assert_array_equal(outs[0][name], outs[1][name], err_msg=name)


@pytest.mark.parametrize(
    ("family", "drafter", "found"),
    [
        ("llama", lambda spec: None, "no streams"),
        ("llama", tiny_heads, "no streams"),
        ("llama", tiny_streams, "read the root"),
        ("lfm2", lambda spec: tiny_streams(spec, root=False), "short convolutions"),
    ],
)
def test_what_cannot_be_eager_is_refused_by_name(family: str, drafter: Any, found: str) -> None:
    spec = describe(tiny_model(family))
    with pytest.raises(ConfigError, match=found):
        eager(drafter(spec), spec)
