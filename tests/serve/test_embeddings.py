"""`POST /v1/embeddings`: as the `openai` client asks, as a session embeds, under the limits of other requests."""

from __future__ import annotations

import base64
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from streamspec.runtime import Session, load
from streamspec.runtime.embeddings import StatesRunner
from streamspec.serve import Limits
from tests.serve.conftest import TOKEN, Running, until
from tests.support.tiny_bundles import lettered_base, tiny_bundle

TEXTS = ["some text", "another one of more words", "x"]
HIDDEN = 32


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("embeddings")
    return tiny_bundle(folder, base=lettered_base(folder / "base"), embeddings=True)


@pytest.fixture(scope="module")
def alone(bundle: Path) -> Session:
    return load(bundle, threads=1, tree="plain")


@pytest.fixture(scope="module")
def server(bundle: Path) -> Iterator[Running]:
    running = Running(load(bundle, threads=1, tree="plain"), limits=Limits(inputs=4, text=400, timeout=30))
    yield running
    running.stop()


def vectors(found: Any) -> np.ndarray:
    return np.array([one.embedding for one in found.data], np.float32)


def test_the_openai_client_gets_what_a_session_gives(server: Running, alone: Session) -> None:
    ids = [alone.tokenizer.encode(text).ids for text in TEXTS]
    create, expected = server.client().embeddings.create, alone.embed(TEXTS)
    for given in (TEXTS, ids):
        found = create(model="base", input=given)
        assert np.array_equal(vectors(found), expected)  # the client asks for base64
        assert [one.index for one in found.data] == [0, 1, 2] and found.model == "base"
        assert found.usage.prompt_tokens == found.usage.total_tokens == sum(map(len, ids))
    for given in (TEXTS[0], ids[0]):
        assert np.array_equal(vectors(create(model="base", input=given)), expected[:1])
    floats = create(model="base", input=TEXTS, encoding_format="float", dimensions=HIDDEN, user="me")
    assert np.array_equal(vectors(floats), expected)
    last = create(model="base", input=TEXTS, extra_body={"pooling": "last"})
    assert np.array_equal(vectors(last), alone.embed(TEXTS, pooling="last"))


def test_base64_is_of_little_endian_floats(server: Running, alone: Session) -> None:
    with server.http() as client:
        body = {"model": "base", "input": "x", "encoding_format": "base64"}
        answer = client.post("/v1/embeddings", json=body).json()
    raw = base64.b64decode(answer["data"][0]["embedding"])
    assert np.array_equal(np.frombuffer(raw, "<f4"), alone.embed("x")[0])
    assert answer["object"] == "list" and answer["data"][0]["object"] == "embedding"


@pytest.mark.parametrize(
    ("fields", "code", "param", "says"),
    [
        ({"dimensions": 16}, "unsupported_value", "dimensions", "dimensions 16; expected 32, the model's"),
        ({"input": ""}, "invalid_value", "input", "an empty input"),
        ({"input": []}, "invalid_value", "input", "an empty input"),
        ({"input": ["x"] * 5}, "too_large", "input", "5 texts; expected at most 4"),
        ({"input": ["x" * 300, "y" * 200]}, "too_large", "input", "input of 500 characters; expected at most 400"),
        ({"input": [7] * 300}, "context_length_exceeded", "input", "a text of 300 tokens; expected at most 256"),
        ({"input": [10**6]}, "invalid_value", "input", "token ids"),
        ({"input": [-1]}, "invalid_value", "input.0", "greater than or equal to 0"),
        ({"encoding_format": "hex"}, "invalid_value", "encoding_format", "'float' or 'base64'"),
        ({"pooling": "max"}, "invalid_value", "pooling", "'mean' or 'last'"),
        ({"colour": "red"}, "unknown_field", "colour", "unknown field"),
        ({"model": "other"}, "model_not_found", "model", "expected one of base"),
    ],
    ids=str,
)
def test_a_request_at_fault_is_told_the_field(
    server: Running, fields: dict[str, Any], code: str, param: str, says: str
) -> None:
    with server.http() as client:
        answer = client.post("/v1/embeddings", json={"model": "base", "input": "x"} | fields)
    error = answer.json()["error"]
    assert answer.status_code == (404 if code == "model_not_found" else 400)
    assert (error["code"], error["param"]) == (code, param) and says in error["message"]


def test_embeddings_are_counted_and_leave_a_conversation_its_cache(server: Running) -> None:
    client = server.client()
    ask = {"model": "base", "prompt": "once upon a time there was a", "max_tokens": 4}
    first = client.completions.create(**ask)
    before = dict(server.server.pool.counts.totals)
    client.embeddings.create(model="base", input=TEXTS)
    after, until = server.server.pool.counts.totals, time.monotonic() + 10
    while after["prompt_tokens"] == before["prompt_tokens"] and time.monotonic() < until:
        time.sleep(0.01)  # they are counted once the client has its answer
    assert after["prompt_tokens"] > before["prompt_tokens"] and after["new_tokens"] == before["new_tokens"]
    again = client.completions.create(**ask)
    assert again.choices[0].text == first.choices[0].text
    assert again.usage.prompt_tokens_details.cached_tokens == again.usage.prompt_tokens - 1


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Embeddings that wait, text by text, until it is set or they are ended."""
    gate, pooled = threading.Event(), StatesRunner.pooled

    def waits(self: StatesRunner, ids: Any, pooling: str, control: Any) -> np.ndarray:
        while not gate.wait(0.01):
            control.check()
        return pooled(self, ids, pooling, control)

    monkeypatch.setattr(StatesRunner, "pooled", waits)
    yield gate
    gate.set()


def asked(server: Running, seconds: float) -> httpx.Response:
    body = {"model": "base", "input": "x"}
    return httpx.post(
        f"{server.url}/v1/embeddings", json=body, headers={"authorization": f"Bearer {TOKEN}"}, timeout=seconds
    )


def test_a_client_that_leaves_ends_its_request(server: Running, held: threading.Event) -> None:
    pool = server.server.pool
    before = pool.counts.cancelled
    with pytest.raises(httpx.ReadTimeout):
        asked(server, 0.3)
    until(lambda: pool.counts.cancelled == before + 1)
    assert not pool.requests and not any(slot.busy for slot in pool.slots)


def test_one_that_takes_too_long_is_told_so_and_a_full_queue_refuses(bundle: Path, held: threading.Event) -> None:
    session = load(bundle, threads=1, tree="plain")
    server = Running(session, limits=Limits(timeout=1.0, sessions=1, queue=0))
    try:
        answers: list[httpx.Response] = []
        first = threading.Thread(target=lambda: answers.append(asked(server, 10)))
        first.start()
        until(lambda: any(slot.busy for slot in server.server.pool.slots))
        with pytest.raises(openai.RateLimitError, match="requests wait already"):
            server.client().embeddings.create(model="base", input="x")
        first.join()
        assert answers[0].status_code == 503 and answers[0].json()["error"]["code"] == "timeout"
        held.set()
        began = time.monotonic()
        assert asked(server, 10).status_code == 200 and time.monotonic() - began < 5
    finally:
        server.stop()
