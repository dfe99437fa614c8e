"""Measures perplexity in a bundle and in PyTorch, the cost of a precision: of held-out answers, and of a text of our
own (`measured_text`) in every lossy export.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from streamspec.adapters.dataset.token_rows import TokenRow
from streamspec.export.ops.builder import Array
from streamspec.export.reference.reference import Reference, reference_of
from streamspec.export.runners.graph_runner import stepper
from streamspec.progress import track

TOKENS = 1024  # that PyTorch runs in one pass
HEAD_ROWS = 128  # rows of logits at a time: each time the head is read anew
CALL = 128  # rows in a call of a graph
LOSS_ROWS = 16  # of logits in float64


@dataclass(frozen=True)
class Measured:
    """Rows of tokens and PyTorch's losses on them, to compare a graph with."""

    rows: Sequence[TokenRow]
    losses: Array  # float64: of each token that counts, in nats

    def compare(self, losses: Array) -> dict[str, float | int]:
        """The manifest's perplexities, of PyTorch and of a graph with these `losses`. `error`: the standard error of
        their ratio; smaller than either's own, as both read the same tokens.
        """
        off = losses - self.losses
        return {
            "tokens": len(losses),
            "bundle": float(np.exp(losses.mean())),
            "pytorch": float(np.exp(self.losses.mean())),
            "error": float(off.std() / np.sqrt(len(off))),
        }


Scorer = Callable[[Array, Array], Iterable[Array]]  # tokens [T] and rows: logits [.., V] of those rows, in parts


def measure(model: Any, rows: Sequence[TokenRow]) -> Measured:
    """Runs PyTorch in float32 over `rows`, several texts in one pass."""
    reference, packs = reference_of(model), [[rows[0]]]
    for row in rows[1:]:
        if (len(packs[-1]) + 1) * max(len(other.input_ids) for other in (*packs[-1], row)) > TOKENS:
            packs.append([])
        packs[-1].append(row)
    return Measured(rows, np.concatenate([_losses_of_model(reference, pack) for pack in packs]))


def measure_all(model: Any, texts: Mapping[str, Sequence[TokenRow]]) -> dict[str, Measured]:
    """PyTorch's losses on every text that has rows."""
    return {key: measure(model, rows) for key, rows in texts.items() if rows}


def perplexities(session: Any, texts: Mapping[str, Measured]) -> dict[str, dict[str, float | int]]:
    """The perplexity of a step graph on each text, for the manifest's parity."""
    return {key: text.compare(losses_of(text.rows, graph_scorer(session, text.rows))) for key, text in texts.items()}


def losses_of(rows: Sequence[TokenRow], scorer: Scorer) -> Array:
    """The losses of whatever `scorer` runs, over the same tokens as `measure`."""
    losses = []
    for row in track(rows, "texts measured", len(rows)):
        tokens, where = np.asarray(row.input_ids), _before_answer(row)
        targets = iter(tokens[where + 1])
        losses += [_losses(part, np.asarray(list(islice(targets, len(part))))) for part in scorer(tokens, where)]
    return np.concatenate(losses)


def graph_scorer(session: Any, rows: Sequence[TokenRow]) -> Scorer:
    """Scores by a step graph, a few rows in a call: logits of a large vocabulary are never all there at once."""
    steps = stepper(session, max(len(row.input_ids) for row in rows))

    def score(tokens: Array, where: Array) -> Iterator[Array]:
        steps.length = 0
        for start in range(0, len(tokens), CALL):
            chunk = tokens[start : start + CALL]
            scored = where[(where >= start) & (where < start + CALL)] - start
            asked = scored if len(scored) else np.array([len(chunk) - 1])
            logits = steps.prefill(chunk, rows=asked, forced_node=int(asked[-1]))["logits"]
            if len(scored):
                yield logits

    return score


def _losses_of_model(reference: Reference, pack: Sequence[TokenRow]) -> Array:
    longest = max(len(row.input_ids) for row in pack)
    tokens = np.stack([np.pad(np.asarray(row.input_ids), (0, longest - len(row.input_ids))) for row in pack])
    final = reference.texts(tokens)
    final = final.reshape(-1, final.shape[-1])
    where = np.concatenate([text * longest + _before_answer(row) for text, row in enumerate(pack)])
    targets = tokens.reshape(-1)[where + 1]
    return np.concatenate(
        [
            _losses(reference.head(final[where[at : at + HEAD_ROWS]]), targets[at : at + HEAD_ROWS])
            for at in range(0, len(where), HEAD_ROWS)
        ]
    )


def _before_answer(row: TokenRow) -> Array:
    """int64: the tokens after which those of the answer come; before the first token there is none."""
    return np.flatnonzero(row.loss_mask[1:])


def _losses(logits: Array, targets: Array) -> Array:
    """The cross-entropy of each row of logits [r, V] against the tokens `targets` [r], float64."""
    sums = np.empty(len(logits))
    for at in range(0, len(logits), LOSS_ROWS):
        part = logits[at : at + LOSS_ROWS].astype(np.float64)
        largest = part.max(axis=1)
        sums[at : at + LOSS_ROWS] = largest + np.log(np.exp(part - largest[:, None]).sum(axis=1))
    losses: Array = sums - logits[np.arange(len(logits)), targets]
    return losses
