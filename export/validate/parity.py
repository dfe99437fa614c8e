"""Compares an exported graph with PyTorch: plain rows, a draft tree, drafts, rows of a long text; and makes the probe
of the manifest.

Graphs in floating point must agree to `LIMITS`, quantized ones are reported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from streamspec.bundle.manifest import ProbeInfo
from streamspec.captured.packed_call import DRAW_COLUMNS, pack_draw
from streamspec.draft_tree import DraftTree
from streamspec.errors import BaseModelError, StreamspecError
from streamspec.export.drafters.registry import row_of
from streamspec.export.ops.builder import Array
from streamspec.export.quantization.calibration_text import page
from streamspec.export.reference.draft_reference import DraftedTree, ExpectedDrafts, TreePass
from streamspec.export.reference.long_context import ExpectedLong, expect_long, run_long
from streamspec.export.reference.reference import reference_of, tree_rows
from streamspec.export.runners.captured_runner import CapturedGraph, CapturedGraphRunner
from streamspec.export.runners.graph_runner import AnyRunner, stepper
from streamspec.export.spec.decoder_spec import DecoderSpec
from streamspec.export.spec.draft_spec import DraftSpec
from streamspec.runtime.tuning.self_test import NEAR_DRAWS, SAMPLED, TOLERANCE, drawn_otherwise
from streamspec.step_graph import CHOICES, HIDDEN_STATES, is_cache

# Of the logits' standard deviation, root mean square; fp16 also with keys and values in float16.
LIMITS = {"fp32": 1e-3, "fp16": 0.02}
CONTEXT_ROWS, TREE_ROWS, PROBE_ROWS = 96, 12, 16
PASSAGE = (
    "The lighthouse keeper wrote down the weather every morning, even when nobody asked for it. On the third of "
    "March the wind "
    "turned north and the first ships came in early: two with timber, one with salt, and a small one whose captain "
    "would not say "
    'what he carried. "We will know by evening," she said, and lit the lamp. By evening everybody knew. The price of '
    "salt fell, "
    "the price of timber rose, and the captain, who had brought forty crates of oranges, could name any price he liked."
)


@dataclass
class _Difference:
    """Collects pairs of logit rows."""

    ours: list[Array]
    theirs: list[Array]

    def summary(self) -> dict[str, float | int]:
        """`relative`: rms difference over the reference's standard deviation; `argmax`: share of rows that agree."""
        rows = [
            pair
            for sides in zip(self.ours, self.theirs, strict=True)
            for pair in zip(*map(np.atleast_2d, sides), strict=True)
        ]
        measured = [_compare(*pair) for pair in rows]  # row by row: a vocabulary can be large
        largest, square, spread, agree = (np.asarray(values) for values in zip(*measured, strict=True))
        relative = np.sqrt(square.mean()) / max(float(np.sqrt(spread.mean())), 1e-30)
        return {
            "rows": len(rows),
            "max_abs": _short(largest.max()),
            "relative": _short(relative),
            "argmax": _short(agree.mean()),
        }


def _compare(ours: Array, theirs: Array) -> tuple[float, float, float, bool]:
    """Compares two rows of logits: largest and mean squared difference, the second's variance, whether their largest is
    the same. Those that the reference has none of are left out.
    """
    known = theirs > -np.inf
    ours, reference = ours[known], theirs[known].astype(np.float64)
    off = ours - reference
    return np.abs(off).max(), np.square(off).mean(), reference.var(), ours.argmax() == reference.argmax()


def passage(tokenizer: Any, vocab: int, context_length: int) -> Array:
    """int64: the tokens that graphs are compared on, a context and the rows of a tree."""
    return page(tokenizer, PASSAGE, vocab, min(CONTEXT_ROWS + TREE_ROWS, context_length - 1))


def sample_tree(rows: int, gamma: int, seed: int = 0) -> DraftTree:
    """A random tree of `rows` nodes no deeper than `gamma`."""
    rng = np.random.default_rng(seed)
    parents, ranks, depths, children = [0], [0], [0], [0]
    while len(parents) < rows:
        parent = int(rng.choice([i for i, depth in enumerate(depths) if depth < gamma]))
        parents.append(parent)
        ranks.append(children[parent])
        depths.append(depths[parent] + 1)
        children[parent] += 1
        children.append(0)
    return DraftTree(tuple(parents), tuple(ranks))


@dataclass
class Expected:
    """PyTorch's results for a context and a tree after it, so that the model need not be there when a graph is
    compared.
    """

    case: DraftedTree
    logits: Array  # [T, V] of all rows
    finished: Array  # [T, H] of the same: the states that they are of
    drafts: ExpectedDrafts | None
    long: ExpectedLong | None = None


def expect(
    model: Any,
    draft_spec: DraftSpec | None,
    tokens: Array,
    max_rows: int = TREE_ROWS,
    spec: DecoderSpec | None = None,
    say: Callable[[str], None] = lambda line: None,
    long: bool = True,
) -> Expected:
    """Runs PyTorch once over a context and a tree, and with the model's `spec` over a `long` text. `max_rows`: rows of
    a tree that the graph can take; `say` gets a line of progress."""
    reference = reference_of(model, draft_spec)
    rows = min(TREE_ROWS, max_rows)
    drafted = tokens[-rows:]
    case = DraftedTree(tokens[:-rows], drafted, sample_tree(len(drafted), draft_spec.gamma if draft_spec else 4))
    every, positions, sees = tree_rows(case.context, drafted, case.tree)
    output = reference.states(every, positions, sees)
    drafts = None
    if draft_spec is not None:
        drafts = row_of(draft_spec).reference_of(reference, draft_spec).expect(case, TreePass(output, positions, sees))
    beyond = expect_long(reference, spec, tokens, say) if spec and long else None
    logits = reference.logits(output)
    if not np.isfinite(logits).all():
        raise BaseModelError(
            "this base's own logits are not finite",
            "numbers",
            "check its config (rope_theta, soft caps, epsilon), or fetch the base again",
        )
    absent = list(spec.absent) if spec else []
    for every in (logits, beyond.logits) if beyond is not None else (logits,):
        every[:, absent] = -np.inf  # a graph never chooses these
    return Expected(case, logits, reference.finished(output), drafts, beyond)


def check_parity(
    session: Any, expected: Expected, precision: str, adapter: Mapping[str, Array] | None = None
) -> dict[str, Any]:
    """The manifest's parity report, with `adapter`'s tensors where the graph is swappable. Raises StreamspecError where
    a float32 graph differs or any graph gives no numbers.
    """
    context = expected.case.context
    steps = stepper(session, len(context) + len(expected.case.drafted), adapter)
    prompt = steps.prefill(context, forced_node=len(context) - 1)
    verified = expected.case.step(steps)
    report: dict[str, Any] = {
        "precision": precision,
        "plain": _Difference([prompt["logits"]], [expected.logits[: len(context)]]).summary(),
        "tree": _Difference([verified["logits"]], [expected.logits[len(context) :]]).summary(),
    }
    if HIDDEN_STATES in prompt:
        both = [prompt[HIDDEN_STATES], verified[HIDDEN_STATES]]
        measured = _Difference(both, np.split(expected.finished, [len(context)])).summary()
        report["states"] = {name: value for name, value in measured.items() if name != "argmax"}  # they choose nothing
    if expected.drafts is not None:
        report["streams"] = _drafts(session, steps, expected.drafts, expected)
    if (long := expected.long) is not None and (text := long.text) is not None:
        ours = run_long(stepper(session, len(text.computed), adapter), text, long.tokens)
        report["long"] = _Difference([ours], [long.logits]).summary() | {"where": str(text)}
    if long is not None and long.left_out:
        report["not_compared"] = long.left_out
    half = any(value.type == "tensor(float16)" for value in session.get_inputs() if is_cache(value.name))
    kind = "captured" if isinstance(session, CapturedGraph) else "exported"
    _judge(report, precision, LIMITS.get("fp16" if half and precision in LIMITS else precision, np.inf), kind)
    return report


def _drafts(session: Any, steps: AnyRunner, drafts: ExpectedDrafts, truth: Expected) -> dict[str, float | int]:
    """Drafts beside a few nodes of the tree, compared on the graph's candidates and on the first of them."""
    difference, agreed = _Difference([], []), []
    for candidates, ours, logits in drafts.compare(session, steps, truth.case):
        difference.ours.append(ours)
        difference.theirs.append(logits[candidates])
        agreed.append(logits.argmax() == candidates[0])
    # Candidates lie close together: their own spread says nothing about the scale of the logits.
    off = np.stack(difference.ours) - np.stack(difference.theirs)
    relative = _short(np.sqrt(np.square(off).mean()) / max(float(truth.logits[truth.logits > -np.inf].std()), 1e-30))
    return difference.summary() | {"relative": relative, "argmax": _short(np.mean(agreed))}


def _judge(report: dict[str, Any], precision: str, limit: float, kind: str) -> None:
    """Raises StreamspecError where a part of the report differs by more than `limit`. `kind`: of graph."""
    for part in ("plain", "tree", "states", "streams", "long"):
        relative = report.get(part, {}).get("relative", 0.0)
        numbers = part if part == "states" else f"{part} logits"
        if precision == "fp16" and not np.isfinite(relative):
            raise StreamspecError(
                f"the {kind} graph's {numbers} are not finite",
                "numbers that half precision can hold",
                "use --precision int8 or fp32",
            )
        if not np.isfinite(relative) or relative > limit:
            raise StreamspecError(
                f"the {kind} graph's {numbers} differ from the reference by {relative:.2g} of their spread",
                f"at most {min(limit, 1):g}",
                "report this base: its graph is not computed correctly",
            )


def make_probe(session: Any, tokens: Sequence[int] | Array) -> ProbeInfo:
    """Greedy choices and their logits over a short prompt, as this graph computes them here."""
    ids = np.asarray(tokens, np.int64)[:PROBE_ROWS]
    out = stepper(session, len(ids)).prefill(ids, forced_node=len(ids) - 1)
    return ProbeInfo(
        tuple(int(i) for i in ids),
        tuple(int(c) for c in out[CHOICES]),
        tuple(_short(v) for v in out["logits"].max(axis=1)),
    )


def agreed(probe: ProbeInfo, logits: Array) -> ProbeInfo:
    """The rows of a probe before the first whose `logits` [rows, V], rounded otherwise, are off: where two experts
    nearly tie, other roundings choose others."""
    choices, recorded = list(probe.choices)[: len(logits)], np.asarray(probe.top_logits)[: len(logits)]
    top = logits[np.arange(len(choices)), choices]
    off = np.maximum(np.abs(top - recorded), logits.max(axis=1) - top)
    apart = np.flatnonzero(off > TOLERANCE / 2 * np.abs(probe.top_logits).max())
    count = int(apart[0]) if len(apart) else len(choices)
    return ProbeInfo(probe.input_ids[:count], probe.choices[:count], probe.top_logits[:count])


def _short(value: Any) -> float:
    return float(f"{float(value):.6g}")


def check_sampled(graph: CapturedGraph, case: DraftedTree) -> dict[str, int]:
    """Draws the tokens of the tree; `rows`, and how many of them are the `same` as drawn from the graph's own logits in
    double precision. Raises StreamspecError where the graph draws others."""
    steps, sampling = CapturedGraphRunner(graph), SAMPLED
    context, drafted, tree = case.context, case.drafted, case.tree
    steps.prefill(context)
    count = graph.sizes.padded(len(drafted))
    draw, seen = np.zeros((1 + count, DRAW_COLUMNS), np.float32), np.zeros(graph.features.vocab, np.bool_)
    seen[context] = True
    uniforms = np.array([sampling.uniform(len(context) + depth + 1) for depth in tree.depths])
    pack_draw(draw, [*sampling.scalars().values()], np.arange(len(drafted)), uniforms)
    out = case.step(steps, draw=draw, seen=seen)
    other = drawn_otherwise(context.tolist(), tree, drafted.tolist(), out["logits"], out[CHOICES].tolist())
    if len(other) > len(tree) // NEAR_DRAWS:
        raise StreamspecError(
            f"the captured graph draws {len(other)} of {len(tree)} tokens otherwise than its logits say",
            "the same tokens",
            "report this base: its graph is not computed correctly",
        )
    return {"rows": len(tree), "same": len(tree) - len(other)}
