"""Measures the perplexity of held-out answers in a bundle and in PyTorch: the cost of a precision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from streamspec.adapters.base_models.resolve import Base
from streamspec.adapters.training.data import Formatter, TokenRow
from streamspec.data import Example, read_examples
from streamspec.errors import DataError
from streamspec.export.ops.builder import Array
from streamspec.export.validate.graph_runner import stepper
from streamspec.export.validate.pytorch_reference import ReferenceModel
from streamspec.prompt.prompt_format import PromptFormat

LIMIT = 20  # rows
TOKENS = 1024  # that PyTorch runs in one pass
HEAD_ROWS = 256  # rows of logits at a time: each time the head is read anew


@dataclass(frozen=True)
class HeldOut:
    """Held-out data for `export`: the first `limit` rows of the JSONL file `path`."""

    path: Path
    limit: int = LIMIT

    def read(self) -> list[Example]:
        """Returns the rows that have an answer. Raises DataError if there is none."""
        examples = [example for example in read_examples(self.path, self.limit) if example.completion is not None]
        if not examples:
            raise DataError(
                f"{self.path} has no row with an answer among its first {self.limit}",
                "prompts and answers",
                "name other data with --val",
            )
        return examples

    def rows(self, base: Base, prompt_format: PromptFormat, context_length: int) -> list[TokenRow]:
        """Tokenizes the rows. Raises DataError for a row that the context cannot hold."""
        formatter = Formatter(AutoTokenizer.from_pretrained(base.path), prompt_format)
        rows = [(example, formatter.row(example)) for example in self.read()]
        for example, row in rows:
            if len(row.input_ids) >= context_length:
                raise DataError(
                    f"{example.where} has {len(row.input_ids)} tokens",
                    f"fewer than the context's {context_length}",
                    "leave it out, or choose a larger context",
                )
        return [row for _, row in rows]


def perplexity_of_model(model: Any, rows: Sequence[TokenRow]) -> float:
    """Computes PyTorch's perplexity in float32 over the answers of `rows`, several texts in one pass."""
    reference, packs = ReferenceModel(model), [[rows[0]]]
    for row in rows[1:]:
        if sum(len(other.input_ids) for other in packs[-1]) + len(row.input_ids) > TOKENS:
            packs.append([])
        packs[-1].append(row)
    return float(np.exp(sum(_loss_of_model(reference, pack) for pack in packs) / answer_tokens(rows)))


def perplexity_of_graph(session: Any, rows: Sequence[TokenRow]) -> float:
    """Computes the graph's perplexity over the same answers."""
    steps, total = stepper(session, max(len(row.input_ids) for row in rows)), 0.0
    for row in rows:
        steps.length, where = 0, _before_answer(row)
        logits = steps.prefill(np.asarray(row.input_ids), rows=where, forced_node=int(where[-1]))["logits"]
        total += _loss(logits, np.asarray(row.input_ids)[where + 1])
    return float(np.exp(total / answer_tokens(rows)))


def answer_tokens(rows: Sequence[TokenRow]) -> int:
    """The number of tokens that the perplexity is a mean over."""
    return sum(sum(row.loss_mask) for row in rows)


def _loss_of_model(reference: ReferenceModel, pack: Sequence[TokenRow]) -> float:
    lengths = [len(row.input_ids) for row in pack]
    tokens, text = np.concatenate([row.input_ids for row in pack]), np.repeat(np.arange(len(pack)), lengths)
    positions = np.concatenate([np.arange(length) for length in lengths])
    sees = (text[:, None] == text) & np.tri(len(text), dtype=bool)
    final = reference.states(tokens, positions, sees).final[0]
    starts, total = np.cumsum([0, *lengths]), 0.0
    where = np.concatenate([start + _before_answer(row) for start, row in zip(starts, pack, strict=False)])
    for part in np.split(where, range(HEAD_ROWS, len(where), HEAD_ROWS)):
        total += _loss(reference.decoder.logits(final[part]).numpy(), tokens[part + 1])
    return total


def _before_answer(row: TokenRow) -> Array:
    """int64: the tokens after which those of the answer come."""
    return np.flatnonzero(row.loss_mask) - 1


def _loss(logits: Array, targets: Array) -> float:
    """Sums the cross-entropy of logits [r, V] against the tokens `targets` [r]."""
    scores = logits.astype(np.float64)
    top = scores.max(axis=1)
    return float(
        (top + np.log(np.exp(scores - top[:, None]).sum(axis=1)) - scores[np.arange(len(targets)), targets]).sum()
    )
