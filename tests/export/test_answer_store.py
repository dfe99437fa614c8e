"""From data, answers and plain text to a bundle's store, and drafts from it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models
from typer.testing import CliRunner

from streamspec.bundle.files import read_manifest
from streamspec.bundle.store_section import STORE, decode
from streamspec.cli import app
from streamspec.cli.inspect import describe
from streamspec.errors import ConfigError, DataError
from streamspec.export import StoreFiles, answer_store, export_bundle
from streamspec.export.answer_store import Text
from streamspec.runtime import load
from tests.support.tiny_bundles import tiny_base

SHA = "a" * 64
CHAT = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "first"}]


def written(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_answers_of_every_shape_are_taken_once(tmp_path: Path) -> None:
    files = [
        written(tmp_path / "a.jsonl", {"prompt": "p", "completion": "one"}, {"prompt": "q", "completion": "one"}),
        written(
            tmp_path / "b.jsonl", {"messages": [*CHAT, {"role": "user", "content": "r"}, CHAT[1] | {"content": "2"}]}
        ),
        written(tmp_path / "c.jsonl", {"text": "a whole text"}),
        written(
            tmp_path / "d.jsonl",
            {"base": SHA, "target": "x", "max_new_tokens": 9},
            {"prompt": [5], "answer": [7, 8, 2]},
        ),
    ]
    (tmp_path / "e.txt").write_text("line\n" * 1000, encoding="utf-8")
    texts = StoreFiles([*files, tmp_path / "e.txt"]).read(SHA)
    assert texts[:-1] == ["one", "first", "2", "a whole text", (7, 8, 2), "line\n" * 400]
    assert texts[-1] == "line\n" * 200


def test_what_cannot_be_a_store_is_refused(tmp_path: Path) -> None:
    kept = written(tmp_path / "kept", {"base": "b" * 64, "target": "x", "max_new_tokens": 9})
    with pytest.raises(DataError, match="answers of the base bbbb"):
        StoreFiles([kept]).read(SHA)
    with pytest.raises(DataError, match="adds no answer"):
        StoreFiles([written(tmp_path / "p.jsonl", {"prompt": "only"})]).read(SHA)
    with pytest.raises(DataError, match="none.jsonl"):
        StoreFiles([tmp_path / "none.jsonl"]).read(SHA)
    with pytest.raises(ConfigError, match="a store of 0 tokens"):
        StoreFiles([kept], 0).read(SHA)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A bundle without a drafter, and the same with a store of its own answers."""
    folder = tmp_path_factory.mktemp("stored")
    base = tiny_base(folder / "base")
    export_bundle(base, None, folder / "plain", "fp32", progress=lambda line: None)
    session = load(folder / "plain", threads=1, ngram=False, recycling=False)
    rows: list[dict[str, object]] = [{"base": session.manifest.base.sha256, "target": "x", "max_new_tokens": 40}]
    for prompt in ([5, 6], [7], [8, 9, 10]):
        rows.append({"prompt": prompt, "answer": session.generate(prompt, max_new_tokens=40).token_ids})
    store = StoreFiles([written(folder / "kept.jsonl", *rows)])
    export_bundle(base, None, folder / "stored", "fp32", progress=lambda line: None, store=store)
    return folder / "plain", folder / "stored"


def test_a_bundle_without_a_drafter_drafts_from_its_store(exported: tuple[Path, Path]) -> None:
    plain, stored = exported
    manifest = read_manifest(stored)
    assert manifest.store is not None
    tokens, _ = decode((stored / STORE).read_bytes(), manifest.store, manifest.model.vocab_size)
    end = manifest.model.eos_token_ids[0]
    assert manifest.store.separator == end and tokens[-1] == end
    with_store, without = (
        load(stored, threads=1, tree=8, ngram=False, recycling=False, store=on) for on in (True, False)
    )
    for prompt in ([5, 6], [7], [8, 9, 10], [11]):
        answers = [session.generate(prompt, max_new_tokens=40) for session in (with_store, without)]
        assert answers[0].token_ids == answers[1].token_ids
        assert answers[1].stats.steps == 0
        if prompt != [11]:
            assert answers[0].stats.tau > 2
    assert read_manifest(plain).store is None and '"store"' not in (plain / "manifest.json").read_text()
    assert dict(describe(stored)[1])["store of answers"].startswith(f"{len(tokens)} tokens")


def test_stores_of_one_content_are_the_same_and_no_larger_than_asked(
    exported: tuple[Path, Path], tmp_path: Path
) -> None:
    plain, stored = exported
    base, files = stored.parent / "base", [stored.parent / "kept.jsonl"]
    export_bundle(base, None, tmp_path / "again", "fp32", progress=lambda line: None, store=StoreFiles(files))
    assert (tmp_path / "again" / STORE).read_bytes() == (stored / STORE).read_bytes()
    export_bundle(base, None, tmp_path / "small", "fp32", progress=lambda line: None, store=StoreFiles(files, 45))
    small = read_manifest(tmp_path / "small").store
    assert small is not None and 0 < small.tokens <= 45
    foreign = written(
        tmp_path / "f.jsonl",
        {"base": read_manifest(plain).base.sha256, "target": "", "max_new_tokens": 1},
        {"prompt": [1], "answer": [10**6]},
    )
    with pytest.raises(DataError, match="tokens 2..1000000 in a store"):
        export_bundle(base, None, tmp_path / "foreign", "fp32", progress=lambda line: None, store=StoreFiles([foreign]))
    assert not (tmp_path / "foreign").exists()


@pytest.mark.parametrize("place", [0, 11, 200])
def test_a_text_that_is_too_long_leaves_room_for_the_others(
    exported: tuple[Path, Path], tmp_path: Path, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = read_manifest(exported[0])
    texts: list[Text] = [(5 + i // 50, 5 + i % 50, 7, 8, 9) for i in range(200)]
    texts.insert(place, (6,) * 2000)
    monkeypatch.setattr(answer_store, "_tokenized", lambda texts, _: iter(texts))
    found = answer_store.add_store(tmp_path, manifest, texts, 1500, Tokenizer(models.BPE()))
    assert found.store is not None and found.store.tokens == 1200
    with pytest.raises(DataError, match="no text of at most 1500 tokens"):
        answer_store.add_store(tmp_path, manifest, [texts[place]], 1500, Tokenizer(models.BPE()))


def test_a_plain_text_without_newlines_is_cut(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("ab cd ef " * 2000)
    pieces = list(answer_store._pieces(tmp_path / "one.txt"))
    assert "".join(pieces) == "ab cd ef " * 2000 and max(map(len, pieces)) <= answer_store.PIECE


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--store-tokens", "5"], "--store-tokens without --store"),
        (["--swappable", "--store", "x"], "--swappable and --store"),
    ],
)
def test_flags_that_do_not_fit_are_refused(flags: list[str], said: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["export", "--base", "none", "--out", str(tmp_path / "out"), *flags])
    assert result.exit_code == 2 and said in result.output
