"""What a precision costs where it is used: the perplexity of held-out answers beside PyTorch's, and how well the bundle answers itself.

Nothing here depends on a clock: the same bundle on the same rows gives the same figures. Knows the oracle, the session and `bench`, not how
graphs are built.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from streamspec.adapters.base import Base
from streamspec.adapters.data import Formatter, TokenRow
from streamspec.errors import DataError
from streamspec.examples import read_examples
from streamspec.export.builder import Array
from streamspec.export.oracle import Oracle
from streamspec.export.session import Stepper
from streamspec.prompt_format import PromptFormat

LIMIT = 20  # rows
TOKENS = 4096  # of all rows together, where PyTorch is asked: they go through each layer in one pass
HEAD_ROWS = 128  # rows of logits at a time
NEW_TOKENS = 128  # of an answer


@dataclass(frozen=True)
class HeldOut:
    """`path`: a data file of which the first `limit` rows are asked."""

    path: Path
    limit: int = LIMIT

    def rows(self, base: Base, prompt_format: PromptFormat, context_length: int) -> list[TokenRow]:
        """Those with an answer, as many as fit into `TOKENS`. Raises DataError where there is none."""
        formatter = Formatter(AutoTokenizer.from_pretrained(base.path), prompt_format)
        found: list[TokenRow] = []
        left = min(TOKENS, context_length)
        for example in read_examples(self.path, self.limit):
            if example.completion is None:
                continue
            row = formatter.row(example)
            if len(row.input_ids) > left:
                break
            found.append(row)
            left -= len(row.input_ids)
        if not found:
            raise DataError(f"{self.path} has no short row with an answer", f"answers, and rows of at most {min(TOKENS, context_length)} tokens", "name other data with --val")
        return found


def perplexity_of_model(model: Any, rows: Sequence[TokenRow]) -> float:
    """PyTorch's, in float32, over the answers of `rows`; all of them side by side in one pass."""
    oracle = Oracle(model)
    lengths = [len(row.input_ids) for row in rows]
    text = np.repeat(np.arange(len(rows)), lengths)
    positions = np.concatenate([np.arange(length) for length in lengths])
    sees = (text[:, None] == text) & np.tri(len(text), dtype=bool)
    final = oracle.states(np.concatenate([row.input_ids for row in rows]), positions, sees).final[0]
    starts = np.cumsum([0, *lengths])
    return _perplexity(rows, lambda number, some: oracle.decoder.logits(final[starts[number] + some]).numpy())


def perplexity_of_graph(session: Any, rows: Sequence[TokenRow]) -> float:
    """The graph's over the same answers."""
    stepper = Stepper(session, max(len(row.input_ids) for row in rows))
    states: dict[int, Array] = {}

    def logits(number: int, some: Array) -> Array:
        if number not in states:
            states.clear()
            stepper.length = 0
            ids = np.asarray(rows[number].input_ids)
            states[number] = stepper.prefill(ids, forced_node=len(ids) - 1)["logits"]
        return states[number][some]

    return _perplexity(rows, logits)


def _perplexity(rows: Sequence[TokenRow], logits: Callable[[int, Array], Array]) -> float:
    """`logits(number, some)`: [len(some), V] behind the tokens `some` of row `number`."""
    total, count = 0.0, 0
    for number, row in enumerate(rows):
        ids, where = np.asarray(row.input_ids), np.flatnonzero(row.loss_mask) - 1
        for start in range(0, len(where), HEAD_ROWS):
            some = where[start : start + HEAD_ROWS]
            scores = logits(number, some).astype(np.float64)
            top = scores.max(axis=1)
            total += float((top + np.log(np.exp(scores - top[:, None]).sum(axis=1)) - scores[np.arange(len(some)), ids[some + 1]]).sum())
        count += len(where)
    return float(np.exp(total / count))


def answers(bundle: Path, held_out: HeldOut, tree_rows: int) -> dict[str, float]:
    """`tokens_per_step` with a tree of so many rows and without n-grams (0: no drafter), and `em`, `rouge1`, `rouge2`, `rougeL` where the rows have
    references: of the finished bundle's own greedy answers."""
    from streamspec.bench import bench

    report = bench(bundle, held_out.path, held_out.limit, NEW_TOKENS, repeats=1, tree=tree_rows or "plain", ngram=False)
    drafted = {"tokens_per_step": report.speculative.tokens_per_step} if tree_rows else {}
    return drafted | {name: float(value) for name, value in report.quality.get("plain", {}).items()}
