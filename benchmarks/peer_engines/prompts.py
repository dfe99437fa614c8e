"""Chooses prompts of a task as token ids: those measured, others to tune on, and one of 500 tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LONG = 500  # tokens of the prompt whose reading is timed


@dataclass(frozen=True)
class Task:
    """`measured`, `tuning`: prompts as token ids; `long`: `LONG` tokens of such text; `limit`: tokens of an answer."""

    name: str
    measured: list[list[int]]
    tuning: list[list[int]]
    long: list[int]
    limit: int

    @property
    def context(self) -> int:
        """Tokens that prompt and answer take at most, rounded up."""
        longest = max(map(len, [*self.measured, *self.tuning, self.long]))
        return -(-(longest + self.limit) // 256) * 256


LIMITS = {"e2e": 96, "wikisql": 96, "chat": 128}


def spread(rows: Sequence[Any], count: int) -> list[Any]:
    """`count` of the rows at even distances: neighbours in a file are often alike."""
    if count >= len(rows):
        return list(rows)
    return [rows[i * len(rows) // count] for i in range(count)]


def by_category(rows: Sequence[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """The first row of each category, at most `count`."""
    firsts: dict[str, dict[str, Any]] = {}
    for row in rows:
        firsts.setdefault(row["category"], row)
    return list(firsts.values())[:count]


def texts_of(task: str, data: Path, count: int, tuning: int) -> tuple[list[str], list[str]]:
    """Prompts to measure and to tune on, from files that no training reads."""
    from streamspec.data import read_examples

    if task == "chat":
        rows = [
            {"category": str(row.extra["category"]), "text": row.extra["turns"][0]}
            for row in read_examples(data / "spec_bench" / "question.jsonl")
        ]
        measured = by_category(rows, count)
        others = [row for row in rows if row not in measured]
        return [row["text"] for row in measured], [row["text"] for row in by_category(others, tuning)]
    test, dev = ([str(row.prompt) for row in read_examples(data / task / f"{part}.jsonl")] for part in ("test", "dev"))
    measured_texts = spread(test, count)
    return measured_texts, spread([text for text in dict.fromkeys(dev) if text not in set(test)], tuning)


def task_of(name: str, data: Path, folder: Path, count: int, tuning: int) -> Task:
    """Prompts of a task, rendered and encoded as the bundle in `folder` does."""
    from streamspec.bundle.files import read_manifest
    from streamspec.runtime.text.tokenizer import read_template, read_tokenizer

    manifest = read_manifest(folder)
    tokenizer, template, layout = read_tokenizer(folder), read_template(folder, manifest), manifest.prompt_format
    eos = manifest.model.eos_token_ids
    named = {"bos_token": manifest.model.bos_token_id, "eos_token": eos[0] if eos else None}
    specials = {key: tokenizer.id_to_token(i) or "" for key, i in named.items() if i is not None}

    def encode(text: str) -> list[int]:
        rendered = layout.render(text, template, specials)
        return list(tokenizer.encode(rendered, add_special_tokens=layout.add_special_tokens).ids)

    measured, others = texts_of(name, data, count, tuning)
    filler, words = list[int](), [*others, *measured]
    for text in (words[i % len(words)] for i in range(LONG)):
        if len(filler) >= LONG:
            break
        filler += encode(text)
    return Task(name, list(map(encode, measured)), list(map(encode, others)), filler[:LONG], LIMITS[name])
