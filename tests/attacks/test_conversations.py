"""Saved conversations that are not what they say."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from streamspec.bundle.manifest import BaseInfo
from streamspec.errors import ConversationError
from streamspec.prompt.prompt_format import PromptFormat
from streamspec.runtime import saved_session as saved
from tests.attacks.test_adapters import FILES
from tests.support.manifests import manifest

LAYERS, CONTEXT = 2, 16


@pytest.fixture
def talk(tmp_path: Path) -> Path:
    rows = np.arange(LAYERS * 2 * 3 * 8, dtype=np.float32).reshape(LAYERS, 2, 1, 1, 3, 8)
    saved.write(
        tmp_path / "talk", saved.SavedSession([1, 2, 3], [rows], [{"role": "user", "content": "hi"}]), manifest()
    )
    return tmp_path / "talk"


def refused(file: Path, about: Any = None, match: str | None = None) -> None:
    with pytest.raises(ConversationError, match=match) as caught:
        saved.read(file, about or manifest(), CONTEXT)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 2000


def forge(file: Path, change: Callable[[dict[str, np.ndarray], dict[str, str]], object]) -> None:
    """Changes tensors and metadata, and makes the file's own hash agree."""
    with safe_open(file, framework="np") as found:
        about, tensors = dict(found.metadata()), {name: found.get_tensor(name) for name in found.keys()}  # noqa: SIM118
    change(tensors, about)
    if about.get("streamspec", "").startswith('{"format": 1,'):
        described = json.loads(about["streamspec"])
        about["streamspec"] = json.dumps(described | {"sha256": saved._digest(tensors, about.get("messages", ""))})
    save_file(tensors, file, metadata=about)


def test_the_conversation_as_it_was_is_taken(talk: Path) -> None:
    assert saved.read(talk, manifest(), CONTEXT).tokens == [1, 2, 3]


@pytest.mark.parametrize("drafts", [False, True])
def test_a_conversation_of_version_0_1_is_taken(drafts: bool, talk: Path, tmp_path: Path) -> None:
    """Its key was of manifests without fields that came later."""
    about = manifest(weights_sha256=None, **({} if drafts else {"streams": None, "trees": None}))
    content = json.loads(about.to_json())
    assert content.pop("weights_sha256") is None and bool(content["streams"]) is drafts
    for name in ("eager", "exit_layer") if drafts else ():
        del content["streams"][name]
    text = json.dumps(content, indent=1, allow_nan=False, ensure_ascii=False)
    stated = {"format": 1, "key": hashlib.sha256(text.encode()).hexdigest(), "sha256": ""}
    forge(talk, lambda _, metadata: metadata.update(streamspec=json.dumps(stated)))
    assert saved.read(talk, about, CONTEXT).tokens == [1, 2, 3]
    refused(talk, replace(about, weights_sha256="ab" * 32), match="another bundle")


def test_messages_that_no_file_holds_are_refused(tmp_path: Path) -> None:
    rows = np.zeros((LAYERS, 2, 1, 1, 3, 8), np.float32)
    for wrong in ({1, 2}, "\udcff"):
        with pytest.raises(ConversationError, match="messages that are no JSON"):
            saved.write(tmp_path / "x", saved.SavedSession([1, 2, 3], [rows], [{"name": wrong}]), manifest())


@pytest.mark.parametrize(
    "other",
    [
        manifest(base=BaseInfo("tiny", "cd" * 32, "llama")),
        manifest(prompt_format=PromptFormat("raw", "|")),
        manifest(precision="fp32"),
        manifest(model=replace(manifest().model, eos_token_ids=(1,))),
        manifest(drafter="other"),
    ],
    ids=["base", "prompt format", "precision", "end of text", "drafter"],
)
def test_a_conversation_of_another_model_is_refused(other: Any, talk: Path) -> None:
    refused(talk, other, "another bundle, adapter or template")


@pytest.mark.parametrize(
    "change",
    {
        "rows that are not finite": lambda t, a: t["rows"].fill(np.nan),
        "tokens outside the vocabulary": lambda t, a: t["tokens"].fill(1 << 40),
        "negative tokens": lambda t, a: t["tokens"].fill(-1),
        "tokens without rows": lambda t, a: t.update(tokens=np.arange(9)),
        "too long a text": lambda t, a: t.update(
            tokens=np.zeros(17, np.int64), rows=np.zeros((2, 2, 1, 1, 17, 8), np.float32)
        ),
        "rows of another layer": lambda t, a: t.update(rows=t["rows"][:1].copy()),
        "rows of another type": lambda t, a: t.update(rows=t["rows"].astype(np.float64)),
        "a tensor too much": lambda t, a: t.update(evil=np.zeros(3)),
        "no tokens": lambda t, a: t.pop("tokens"),
        "no description": lambda t, a: a.pop("streamspec"),
        "no messages": lambda t, a: a.pop("messages"),
        "messages without roles": lambda t, a: a.update(messages='[{"content": "x"}]'),
        "messages that are no list": lambda t, a: a.update(messages='{"role": "user"}'),
        "messages without end": lambda t, a: a.update(messages="[" * 100_000),
        "messages with NaN": lambda t, a: a.update(messages='[{"role": "user", "content": NaN}]'),
        "another format": lambda t, a: a.update(streamspec='{"format": 99, "key": "", "sha256": ""}'),
        "a description that is a list": lambda t, a: a.update(streamspec="[]"),
        "a description of depth": lambda t, a: a.update(streamspec='{"a":' * 10_000),
    }.items(),
    ids=lambda item: item[0],
)
def test_a_conversation_with(change: Any, talk: Path) -> None:
    forge(talk, change[1])
    refused(talk)


def test_a_conversation_that_was_tampered_with_is_refused(talk: Path) -> None:
    data = bytearray(talk.read_bytes())
    data[-1] ^= 1
    talk.write_bytes(data)
    refused(talk, None, "another sha256")


@pytest.mark.parametrize("content", FILES.values(), ids=list(FILES))
def test_a_conversation_whose_file_has(content: bytes, talk: Path) -> None:
    talk.write_bytes(content)
    refused(talk)


def test_a_conversation_that_is_no_file(talk: Path) -> None:
    talk.unlink()
    talk.mkdir()
    refused(talk, None, "is no file")
