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
from streamspec.export.session import stepper
from streamspec.prompt_format import PromptFormat

LIMIT = 20  # rows
TOKENS = 1024  # of the rows that PyTorch is asked about in one pass
HEAD_ROWS = 128  # rows of logits at a time
NEW_TOKENS = 128  # of an answer


@dataclass(frozen=True)
class HeldOut:
    """`path`: a data file of which the first `limit` rows are asked."""

    path: Path
    limit: int = LIMIT

    def rows(self, base: Base, prompt_format: PromptFormat, context_length: int) -> list[TokenRow]:
        """Those with an answer that fit into the context. Raises DataError where there is none."""
        formatter = Formatter(AutoTokenizer.from_pretrained(base.path), prompt_format)
        rows = [formatter.row(example) for example in read_examples(self.path, self.limit) if example.completion is not None]
        found = [row for row in rows if len(row.input_ids) <= context_length]
        if not found:
            raise DataError(f"{self.path} has no row with an answer among its first {self.limit}", f"answers, and rows of at most {context_length} tokens", "name other data with --val")
        return found


def perplexity_of_model(model: Any, rows: Sequence[TokenRow]) -> float:
    """PyTorch's, in float32, over the answers of `rows`, several side by side in one pass."""
    oracle, packs = Oracle(model), [[rows[0]]]
    for row in rows[1:]:
        if sum(len(other.input_ids) for other in packs[-1]) + len(row.input_ids) > TOKENS:
            packs.append([])
        packs[-1].append(row)
    return float(np.exp(sum(_loss_of_model(oracle, pack) for pack in packs) / answer_tokens(rows)))


def perplexity_of_graph(session: Any, rows: Sequence[TokenRow]) -> float:
    """The graph's over the same answers."""
    steps, total = stepper(session, max(len(row.input_ids) for row in rows)), 0.0
    for row in rows:
        steps.length = 0
        logits = steps.prefill(np.asarray(row.input_ids), forced_node=len(row.input_ids) - 1)["logits"]
        total += _loss(row, logits.__getitem__)
    return float(np.exp(total / answer_tokens(rows)))


def answer_tokens(rows: Sequence[TokenRow]) -> int:
    """How many tokens the perplexity is a mean over."""
    return sum(sum(row.loss_mask) for row in rows)


def _loss_of_model(oracle: Oracle, pack: Sequence[TokenRow]) -> float:
    lengths = [len(row.input_ids) for row in pack]
    text = np.repeat(np.arange(len(pack)), lengths)
    positions = np.concatenate([np.arange(length) for length in lengths])
    sees = (text[:, None] == text) & np.tri(len(text), dtype=bool)
    states = oracle.states(np.concatenate([row.input_ids for row in pack]), positions, sees).final[0].split(lengths)
    return sum(_loss(row, lambda some, own=own: oracle.decoder.logits(own[some]).numpy()) for row, own in zip(pack, states, strict=True))  # type: ignore[misc]


def _loss(row: TokenRow, logits: Callable[[Array], Array]) -> float:
    """Sum over the answer's tokens. `logits(some)`: [len(some), V] behind the tokens `some`."""
    ids, where, total = np.asarray(row.input_ids), np.flatnonzero(row.loss_mask) - 1, 0.0
    for start in range(0, len(where), HEAD_ROWS):
        some = where[start : start + HEAD_ROWS]
        scores = logits(some).astype(np.float64)
        top = scores.max(axis=1)
        total += float((top + np.log(np.exp(scores - top[:, None]).sum(axis=1)) - scores[np.arange(len(some)), ids[some + 1]]).sum())
    return total


def answers(bundle: Path, held_out: HeldOut, tree_rows: int) -> dict[str, float]:
    """`tokens_per_step` with a tree of so many rows and without n-grams (0: no drafter), and `em`, `rouge1`, `rouge2`, `rougeL` where the rows have
    references: of the finished bundle's own greedy answers."""
    from streamspec.bench import bench

    report = bench(bundle, held_out.path, held_out.limit, NEW_TOKENS, repeats=1, tree=tree_rows or "plain", ngram=False)
    drafted = {"tokens_per_step": report.speculative.tokens_per_step} if tree_rows else {}
    return drafted | {name: float(value) for name, value in report.quality.get("plain", {}).items()}
