"""Held-out data, on which an export measures what its precision costs. Covered by the tests of `bundle_writer`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from streamspec.adapters.base_models.resolve import Base
from streamspec.adapters.dataset.formatter import Formatter
from streamspec.adapters.dataset.token_rows import TokenRow
from streamspec.data import Example, read_examples
from streamspec.errors import DataError
from streamspec.prompt.prompt_format import PromptFormat

LIMIT = 20  # rows


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

    def rows(
        self, base: Base, prompt_format: PromptFormat, context_length: int, adapter: Path | None = None
    ) -> list[TokenRow]:
        """Tokenizes the rows, with the template beside `adapter` if there is one. Raises DataError for a row that the
        context cannot hold.
        """
        formatter = Formatter.of(base, prompt_format, adapter)
        rows = [(example, row) for example in self.read() for row in formatter.rows(example)]
        for example, row in rows:
            if len(row.input_ids) >= context_length:
                raise DataError(
                    f"{example.where} has {len(row.input_ids)} tokens",
                    f"fewer than the context's {context_length}",
                    "leave it out, or choose a larger context",
                )
        compared = [row for _, row in rows if any(row.loss_mask[1:])]
        if not compared:
            raise DataError(f"{self.path}: answers of one token after no prompt", "more", "name other data with --val")
        return compared
