"""What is kept for another time: conversations, stores of answers, past answers, costs, notes in the cache."""

from __future__ import annotations

import json
import os
import tempfile
from functools import cache
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import numpy as np

from streamspec.bundle.manifest import TOKENIZER, FileInfo, Manifest
from streamspec.errors import DataError
from tests.fuzz.mutate import mutate_bytes, mutate_json
from tests.fuzz.targets.target import Target, fail, of_json
from tests.support.manifests import manifest

STORED, VOCAB = 60, 64  # tokens of a store and of its vocabulary


# ---- conversations


@cache
def _conversations() -> list[bytes]:
    from streamspec.runtime import saved_session as saved

    rows = [np.zeros((2, 2, 1, 1, 3, 8), np.float32)]
    out = []
    with tempfile.TemporaryDirectory() as folder:
        for messages in ([], [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]):
            saved.write(Path(folder, "good"), saved.SavedSession([1, 2, 3], rows, messages), manifest())
            out.append(Path(folder, "good").read_bytes())
    return out


def make_conversation(random: Random) -> bytes:
    """Half of them with a header that is spoilt as JSON and then measured again."""
    data = random.choice(_conversations())
    if random.random() < 0.5:
        return mutate_bytes(random, data, _conversations())
    size = int.from_bytes(data[:8], "little")
    header = mutate_json(random, json.loads(data[8 : 8 + size]))
    return len(header).to_bytes(8, "little") + header + data[8 + size :]


def run_conversation(data: bytes, folder: Path) -> object:
    from streamspec.runtime import saved_session as saved

    (folder / "talk").write_bytes(data)
    return saved.read(folder / "talk", manifest(), 128)


# ---- stores of answers


def make_store(random: Random) -> bytes:
    """A store of few different tokens, some of its positions spoilt."""
    from streamspec.bundle.store_section import encode

    data = bytearray(encode(np.array([random.randrange(random.choice((3, 9))) for _ in range(STORED)]), VOCAB))
    for _ in range(random.choice((0, 0, 1, 1, 2, 40))):
        data[random.randrange(len(data))] = random.choice((0, 1, random.randrange(STORED), 255))
    return bytes(data) if random.random() < 0.95 else bytes(data)[: random.randrange(len(data))]


def run_store(data: bytes, folder: Path) -> object:
    """What is drafted from a store that is taken stands in it, behind an end of the text."""
    from streamspec.bundle.store_section import StoreInfo, decode
    from streamspec.runtime.draft_sources.store import AnswerStore

    tokens, order = decode(data, StoreInfo(STORED, 2), VOCAB)
    known, drafted = tokens.tolist(), 0
    for end in range(1, STORED):
        text = known[max(0, end - 6) : end]
        found = AnswerStore(tokens, order, 2).find([text], 8)
        for node in range(0 if found is None else len(found.tokens)):
            path = [found.tokens[node]]
            while (node := found.parents[node]) >= 0:
                path.insert(0, found.tokens[node])
            looked = [text[-1], *path]
            if not any(known[at : at + len(looked)] == looked for at in range(STORED)):
                fail(f"{looked} is drafted and stands nowhere")
            drafted += 1
    return drafted > 0


# ---- past answers


def _described() -> Manifest:
    made = manifest()
    made.files[TOKENIZER] = FileInfo("0" * 64, 1)
    return made


@cache
def _answers() -> list[bytes]:
    """Two files of answers, one of them with enough to be drafted from."""
    from streamspec.runtime.past_answers import PastAnswers

    out = []
    with tempfile.TemporaryDirectory() as folder:
        for count in (1, 9):
            past = PastAnswers(_described(), Path(folder, str(count)))
            for number in range(count):
                past.add([*range(number + 1, number + 30)])
            out.append(Path(folder, str(count)).read_bytes())
    return out


def make_answers(random: Random) -> bytes:
    """Most of them spoilt behind the header that names the file."""
    data = random.choice(_answers())
    header = 0 if random.random() < 0.1 else data.index(b"\n") + 1
    return data[:header] + mutate_bytes(random, data[header:], [data])


def run_answers(data: bytes, folder: Path) -> object:
    """What was read is drafted from and added to, and the next one that reads the file finds the answer."""
    from streamspec.runtime.past_answers import PastAnswers

    (folder / "answers").write_bytes(data)
    past = PastAnswers(_described(), folder / "answers")
    if past.store is not None:
        past.store.find([[1, 2, 3]], 8)
    past.add([1, 2, 3])
    again = PastAnswers(_described(), folder / "answers")
    if again._tokens[-4:] != [1, 2, 3, 0] or again._tokens != past._tokens:
        fail("an answer that was added is not read")
    return len(again._tokens)


# ---- what the cache keeps


def _costs() -> list[Any]:
    measured = {"1": 0.01, "2": 0.011, "8": 0.02, "16": 0.04}
    first = {"format_version": 1, "costs": measured, "least": 0.0}
    return [
        first,
        first | {"drafter": 0.25, "context": [0.2, 0.04], "steps": 900, "least": 0.125, "score": "both"},
        first | {"costs": {"1": 1e-7, "64": 1e4}, "steps": 0},
    ]


def run_costs(data: bytes, folder: Path) -> object:
    """A record is refused without a word, or gives costs that are numbers and rise, and reads as it is written."""
    from streamspec.runtime.costs.learned_costs import LearnedRowCosts
    from streamspec.runtime.tuning.cost_file import read_record, save_record

    file = folder / "costs.json"
    file.write_bytes(data)
    record = read_record(file)
    if record is None:
        raise DataError("no record")
    save_record(file, record)
    if read_record(file) != record:
        fail("a record that reads otherwise when written again")
    for drafter in (True, False):
        costs = LearnedRowCosts(64, drafter, record)
        for cached in (0, 4096):
            ratios, price = costs.at(cached)
            if not (np.isfinite(ratios).all() and (np.diff(ratios) >= 0).all() and 0 <= price < np.inf):
                fail(f"costs {ratios} and {price}")
        costs.describe()
    return record.steps


def _notes() -> list[Any]:
    """Of a base that was converted, of hashes that were computed, of a download that broke off, of tokens."""
    from streamspec.adapters.base_models.resolve import CONVERTER

    digest = "0" * 64
    base = {"id": "a", "sha256": digest, "model_type": "llama", "revision": None, "converter": CONVERTER}
    return [
        base,
        {"path": "a", "files": [["model.safetensors", 5, 7]], "sha256": digest, "finite": True},
        {"validator": '"abc"', "total": 9},
        {"dtype": "uint16", "rows": 1},
    ]


def run_notes(data: bytes, folder: Path) -> object:
    """What the cache says of a file is taken or left, and what it is about is computed again."""
    from safetensors.numpy import save

    from streamspec.adapters.base_models.resolve import IDENTITY_FILE, _cached_hash, _read_identity
    from streamspec.adapters.dataset.token_rows import ABOUT, IDS, MASK, ROWS, read_rows
    from streamspec.json_fields import read_note
    from streamspec.library.base_bundle import _digest

    base, known = folder / "bases" / "base", 0
    base.mkdir(parents=True, exist_ok=True)
    (base / "model.safetensors").write_bytes(save({"a": np.ones(3, np.float32)}))
    with patch.dict(os.environ, {"STREAMSPEC_CACHE": str(folder)}):
        digests = _cached_hash(base), _digest([base / "model.safetensors"])  # makes the notes
        for note in (*folder.glob("hashes/*.json"), *folder.glob("hashes/*/*.json"), base / IDENTITY_FILE):
            note.write_bytes(data)
        (base / ABOUT).write_bytes(data)
        for name in (IDS, MASK, ROWS):
            (base / name).write_bytes(bytes(64))
        known += _read_identity(base) is not None
        known += bool(read_note(base / ABOUT))
        known += read_rows(base) is not None
        if (_cached_hash(base), _digest([base / "model.safetensors"])) != digests:
            fail("another hash")
    if not known:
        raise DataError("nothing that is known")
    return known


KEPT_FILES = {
    "conversation": Target(make_conversation, run_conversation),
    "answers": Target(make_answers, run_answers),
    "costs": Target(of_json(_costs), run_costs),
    "notes": Target(of_json(_notes), run_notes),
    "store": Target(make_store, run_store),
}
