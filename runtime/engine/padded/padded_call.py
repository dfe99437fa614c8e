"""Calls of step graphs whose row counts are fixed: a call pads its rows to the graph's.

The graph chooses tokens and drafts after those. Where a grammar masks tokens or the graph is
`unsure` of a token that counts, `choose.onnx` chooses on the CPU, from the logits; a proposal after
another token is dropped. The modules `static_call` and `captured_call` bind such graphs; tests
(tests/runtime/engine/padded/test_static_call.py) cover this module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from streamspec import step_graph as sg
from streamspec.bundle.manifest import CHOICE
from streamspec.errors import BundleError
from streamspec.runtime.decoding.acceptance import accept
from streamspec.runtime.decoding.model_runner import StepRequest, StepResult
from streamspec.runtime.engine.graph_call import CallContext, CallRows, checked_tokens


class PaddedOutputs(NamedTuple):
    """The outputs of a call for the graph's n rows, padding included.

    - `choices` int64 [n]: the graph's tokens.
    - `unsure` bool [n]: which of them the sampling may choose otherwise; None: none.
    - `logits`: takes rows int64 [r], returns their logits float32 [r, vocabulary].
    - `drafts`: the drafter's outputs (`DrafterShape.outputs`).
    """

    choices: np.ndarray
    unsure: np.ndarray | None
    logits: Callable[[np.ndarray], np.ndarray]
    drafts: Sequence[np.ndarray]


class PaddedBinding(Protocol):
    """Binds padded rows, the cache and the outputs to a graph."""

    max_rows: int  # of a call
    root_matters: bool  # candidates depend on the token after the accepted node

    def run(self, rows: CallRows, forced_node: int, shrink: bool = False, draws: bool = False) -> PaddedOutputs:
        """Runs the rows. `draws`: the graph samples, where it can. The others: see `GraphCall.run`."""

    def follow_cache(self) -> None:
        """See `GraphCall`."""

    def commit(self, path: Sequence[int]) -> None:
        """See `GraphCall`."""


class PaddedCall:
    """See `streamspec.runtime.engine.graph_call.GraphCall`."""

    prompt_rows: int | None = None
    together = 1

    def __init__(self, context: CallContext, binding: PaddedBinding) -> None:
        self.binding = binding
        self.max_rows: int | None = binding.max_rows
        self._sampling_state = context.sampling_state
        self._drafter = context.drafter
        self._model = context.executor.model
        self._vocab = self._model.manifest.model.vocab_size

    def begin(self) -> None:
        """Nothing is bound: every call packs how tokens are chosen."""

    def follow_cache(self) -> None:
        self.binding.follow_cache()

    def run(self, rows: CallRows, request: StepRequest, forced_node: int = -1, shrink: bool = False) -> StepResult:
        outputs = self.binding.run(rows, forced_node, shrink, draws=request.mask is None)
        chosen, by_graph = self._chosen(rows, request.mask, outputs)
        choices = checked_tokens(chosen, self._vocab)
        logits = outputs.logits(rows.logit_rows) if self._sampling_state.logits else None
        if not request.run_drafter or not outputs.drafts:
            return StepResult(choices, logits=logits)
        accepted, *drafts = outputs.drafts
        node = int(accepted[0])
        at = np.flatnonzero(rows.logit_rows == node)
        if not len(at):
            raise BundleError(
                f"a graph that accepted row {node} of {len(rows.logit_rows)}",
                "one of the rows it was given",
                "export the bundle again",
            )
        other_root = self.binding.root_matters and choices[at[0]] != outputs.choices[node]
        if other_root or (
            not by_graph and rows.tree is not None and accept(rows.tree, rows.tokens, choices)[0] != node
        ):
            return StepResult(choices, logits=logits)
        return StepResult(choices, node, self._drafter.proposal(*drafts), logits)

    def logits(self, rows: CallRows) -> np.ndarray:
        return self.binding.run(rows, forced_node=0).logits(np.arange(len(rows.tokens)))

    def commit(self, path: Sequence[int]) -> None:
        self.binding.commit(path)

    def _chosen(self, rows: CallRows, mask: np.ndarray | None, outputs: PaddedOutputs) -> tuple[np.ndarray, bool]:
        """Returns int64 [r]: the tokens after `logit_rows`, and whether they are those that the graph drafts after."""
        if mask is not None:
            return self._sample(rows, mask, outputs), False
        chosen = outputs.choices[rows.logit_rows]
        if outputs.unsure is None:
            return chosen, True
        unsure = outputs.unsure[rows.logit_rows]
        if unsure.all():
            return self._sample(rows, None, outputs), False
        # Nobody reads the choices of rows off the accepted path.
        path = [0] if rows.tree is None else list(accept(rows.tree, rows.tokens, chosen.tolist())[1])
        if not unsure[path].any():
            return chosen, True
        return np.where(unsure, self._sample(rows, None, outputs), chosen), False

    def _sample(self, rows: CallRows, mask: np.ndarray | None, outputs: PaddedOutputs) -> np.ndarray:
        """Samples on the CPU: int64 [r], the tokens after `logit_rows`, out of those that `mask` allows."""
        logit_rows, state = rows.logit_rows, self._sampling_state
        feed = state.sampling.scalars() | {
            sg.RAW_LOGITS: outputs.logits(logit_rows),
            sg.INPUT_IDS: np.array([rows.tokens], np.int64),
            sg.TREE_MASK: np.ascontiguousarray(rows.mask[logit_rows, : len(rows.tokens)]),
            sg.UNIFORMS: state.uniforms(rows) if state.sampling.random else np.zeros(len(logit_rows), np.float32),
            sg.SEEN: state.seen,
            sg.FREE: np.array([mask is None]),
        }
        if mask is not None:
            feed[sg.ALLOWED] = mask
        try:
            choices: np.ndarray = self._model.sampler.run([sg.CHOICES], feed)[0]
        except Exception as error:
            raise BundleError(
                f"{CHOICE} failed: {error}", "a graph that chooses tokens", "export the bundle again"
            ) from None
        if not isinstance(choices, np.ndarray) or choices.shape != logit_rows.shape or choices.dtype != np.int64:
            raise BundleError(
                f"a {CHOICE} that chose {str(choices)[:100]}", f"{len(logit_rows)} tokens", "export the bundle again"
            )
        return choices
