"""The rows that a run learns from and those it is measured on. Tests: tests/adapters/dataset/test_tokenize.py."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence

from streamspec.adapters.dataset.formatter import Formatter
from streamspec.adapters.dataset.split import drawn_split
from streamspec.adapters.dataset.token_rows import TokenRows
from streamspec.adapters.dataset.tokenize import tokenize
from streamspec.adapters.training.config import TrainConfig, names_of


def digest(hashes: Mapping[str, str]) -> str:
    """One hash of all data, of its files' hashes in order."""
    found = list(hashes.values())
    if not found:
        return ""
    return found[0] if len(found) == 1 else hashlib.sha256("".join(found).encode()).hexdigest()


def read_rows_of(
    config: TrainConfig,
    formatter: Formatter,
    data: Mapping[str, str],
    val: Mapping[str, str],
    say: Callable[[str], None],
) -> tuple[TokenRows, TokenRows]:
    """Rows of the data and of the validation data, by their hashes `data` and `val`; where no validation data are
    named, drawn from the data.
    """

    def tokenized(names: Sequence[str], hashes: Mapping[str, str], label: str) -> TokenRows:
        tokens = tokenize(names, formatter, config.renamed, digest(hashes), f"tokenizing {label}")
        for line in tokens.notes(label):
            say(line)
        return tokens.rows

    rows = tokenized(names_of(config.data), data, "data")
    if config.val is not None:
        return rows, tokenized(names_of(config.val), val, "validation data")
    return drawn_split(rows, config.val_rows, config.seed, say)
