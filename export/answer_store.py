"""Makes a bundle's store of answers, which the runtime drafts from, of data, answers of training and plain text."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from streamspec.bundle.manifest import Manifest
from streamspec.bundle.store_section import MAX_TOKENS, STORE, StoreInfo, encode
from streamspec.data import Example, read_examples
from streamspec.errors import ConfigError, DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENS = 300_000  # 1.8 MB; more bring little (docs/lab/decisions)
PLAIN = (".txt", ".md")  # how names of plain text end
PIECE = 2000  # characters of a plain text that stay together, about
BATCH = 1000  # texts tokenised at a time
LONG = 8  # a text of more than this part of a store that no longer fits is left out, a shorter one ends it
SEED = 0  # of the order in which texts are taken

Text = str | tuple[int, ...]  # or its token ids


@dataclass(frozen=True)
class StoreFiles:
    """Files whose texts go into a store of at most `most` tokens, taken at random where there are more.

    - JSON lines as `train` takes them (`streamspec.data`): the answers, every turn of the assistant, or whole texts;
    - a file of answers that `train` keeps: their token ids, of this base;
    - plain text (.txt, .md).
    """

    paths: Sequence[str | Path]
    most: int = TOKENS

    def read(self, base_sha256: str) -> list[Text]:
        """Returns each text once. Raises DataError for files that cannot be read, of another base or without answers,
        ConfigError for a number of tokens that no store has."""
        if not 1 <= self.most <= MAX_TOKENS:
            raise ConfigError(f"a store of {self.most} tokens", f"1 to {MAX_TOKENS}", "correct --store-tokens")
        texts = dict[Text, None]()
        for path in map(Path, self.paths):
            known = len(texts)
            texts |= dict.fromkeys(text for text in _texts(path, base_sha256) if text)
            if len(texts) == known:
                raise DataError(f"{path} adds no answer", "rows with answers", "name other data with --store")
        return list(texts)


def add_store(folder: Path, manifest: Manifest, texts: Sequence[Text], most: int, tokenizer: Tokenizer) -> Manifest:
    """Writes the store of `texts` into the bundle's folder; returns the manifest with it. Raises DataError for tokens
    that the model does not have, and where no text fits."""
    model = manifest.model
    if not model.eos_token_ids:
        raise ConfigError("a store for a base without an end of text", "an end-of-text token", "leave --store out")
    separator, ids, count = model.eos_token_ids[0], list[tuple[int, ...]](), 0
    for text in _tokenized(texts, tokenizer):
        text = text if text[-1:] == (separator,) else (*text, separator)
        if count + len(text) > most:
            if len(text) > most // LONG:
                continue
            break
        ids.append(text)
        count += len(text)
    if not ids:
        raise DataError(f"no text of at most {most} tokens", "shorter ones", "raise --store-tokens")
    tokens = np.concatenate(ids)
    if not 0 <= tokens.min() <= tokens.max() < model.vocab_size:
        raise DataError(
            f"tokens {tokens.min()}..{tokens.max()} in a store",
            f"0..{model.vocab_size - 1}",
            "name answers of this base with --store",
        )
    (folder / STORE).write_bytes(encode(tokens, model.vocab_size))
    return replace(manifest, store=StoreInfo(len(tokens), separator))


def _tokenized(texts: Sequence[Text], tokenizer: Tokenizer) -> Iterator[tuple[int, ...]]:
    """Token ids of the texts, in an order drawn once for all."""
    drawn = list(texts)
    random.Random(SEED).shuffle(drawn)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    for start in range(0, len(drawn), BATCH):
        batch = drawn[start : start + BATCH]
        encoded = iter(tokenizer.encode_batch([t for t in batch if isinstance(t, str)], add_special_tokens=False))
        yield from (tuple(next(encoded).ids) if isinstance(text, str) else text for text in batch)


def _texts(path: Path, base_sha256: str) -> Iterator[Text]:
    if path.suffix in PLAIN:
        yield from _pieces(path)
    elif (kept := _kept_answers(path, base_sha256)) is not None:
        yield from kept
    else:
        for example in read_examples(path):
            yield from _answers(example)


def _answers(example: Example) -> Iterator[str]:
    """Yields the texts of this row that a model would write."""
    if isinstance(example.completion, str):
        yield example.completion
    for turns in (example.prompt, example.completion):
        if isinstance(turns, list):
            yield from (turn["content"] for turn in turns if turn["role"] == "assistant")


def _kept_answers(path: Path, base_sha256: str) -> list[Text] | None:
    """The answers of `answers.completion_file.CompletionFile`; None for a file of another kind."""
    try:
        with path.open(encoding="utf-8") as file:
            made_by = json.loads(file.readline(1 << 16))
            if not isinstance(made_by, dict) or not {"base", "target", "max_new_tokens"} <= set(made_by):
                return None
            if made_by["base"] != base_sha256:
                raise DataError(
                    f"{path}: answers of the base {str(made_by['base'])[:12]}",
                    f"of {base_sha256[:12]}, which is exported",
                    "name answers of this base with --store",
                )
            rows = [json.loads(line) for line in file if line.endswith("\n")]  # the last one may be cut off
            return [tuple(int(token) for token in row["answer"]) for row in rows]
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}", "a readable file", "check --store") from None
    except (ValueError, TypeError, KeyError):
        return None


def _pieces(path: Path) -> Iterator[str]:
    """A plain text in pieces of whole lines, long ones cut."""
    try:
        piece, size = list[str](), 0
        with path.open(encoding="utf-8") as file:
            while line := file.readline(PIECE):
                piece.append(line)
                size += len(line)
                if size >= PIECE:
                    yield "".join(piece)
                    piece, size = [], 0
        yield "".join(piece)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: {error}", "a readable text in UTF-8", "check --store") from None
