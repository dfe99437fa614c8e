"""The server over real bundles: every answer is a cold session's, adapters are models, a real process is stopped and
killed.
"""

from __future__ import annotations

import hashlib
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from streamspec.export import export_swappable
from streamspec.runtime import Sampling, load
from streamspec.serve import Limits, serve
from tests.serve.conftest import TOKEN, Running, until, user
from tests.support.tiny_bundles import tiny_adapter, tiny_base, tiny_bundle
from tests.support.tiny_models import tiny_tokenizer

PROMPTS = ["abcabd", "Hello, hello.", "what is it?", "A B C A B C A B"]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_bundle(tmp_path_factory.mktemp("serve"), kind="chat")


@pytest.fixture(scope="module")
def cold(bundle: Path) -> Callable[..., Any]:
    """`cold(prompt, ...)`: what a session says that has seen nothing before."""
    session = load(bundle, threads=1, tree=8)

    def answer(prompt: Any, **options: Any) -> Any:
        session.close()
        return session.generate(prompt, **options)

    return answer


@pytest.fixture(scope="module")
def server(bundle: Path) -> Iterator[Running]:
    running = Running(load(bundle, threads=1, tree=8), limits=Limits(sessions=2, timeout=60))
    yield running
    running.stop()


def ask(server: Running, messages: Any, **fields: Any) -> Any:
    return server.client().chat.completions.create(**{"model": "base", "messages": messages, "max_tokens": 30} | fields)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("sampled", [False, True])
def test_every_answer_is_a_cold_sessions(
    server: Running, cold: Callable[..., Any], stream: bool, sampled: bool
) -> None:
    """Whatever lies in the caches: prompts come again and again, some with further turns."""
    fields: dict[str, Any] = (
        {"temperature": 0.8, "top_p": 0.9, "seed": 7, "extra_body": {"top_k": 20}} if sampled else {}
    )
    sampling = Sampling(temperature=0.8, top_p=0.9, top_k=20, seed=7) if sampled else Sampling(seed=0)
    reused = 0
    for prompt in [*PROMPTS, *PROMPTS[::-1]]:
        talk = user(prompt)
        for _ in range(2):
            want = cold(talk, max_new_tokens=30, sampling=sampling)
            answer = ask(
                server, talk, stream=stream, **({"stream_options": {"include_usage": True}} if stream else {}), **fields
            )
            if stream:
                *chunks, last = answer
                text, reason, usage = (
                    "".join(chunk.choices[0].delta.content for chunk in chunks),
                    chunks[-1].choices[0].finish_reason,
                    last.usage,
                )
                assert sum(chunk.streamspec["committed"] for chunk in chunks) == len(want.token_ids)
                assert ["".join(chunk.streamspec["tokens"]) for chunk in chunks] == [
                    chunk.choices[0].delta.content for chunk in chunks
                ]
            else:
                text, reason, usage = answer.choices[0].message.content, answer.choices[0].finish_reason, answer.usage
            assert text == want.text and reason == {"eos": "stop", "length": "length"}[want.finish_reason]
            assert (usage.prompt_tokens, usage.completion_tokens) == (want.stats.prompt_tokens, len(want.token_ids))
            reused += usage.prompt_tokens_details.cached_tokens
            talk = [*talk, {"role": "assistant", "content": text}, *user("go on")]
    assert reused > 0


def test_speculation_can_be_switched_off_and_changes_nothing(server: Running) -> None:
    fast, plain = (ask(server, user(PROMPTS[0]), extra_body={"speculate": on}) for on in (True, False))
    assert fast.choices[0].message.content == plain.choices[0].message.content
    assert (
        fast.streamspec["steps"] > 0
        and fast.streamspec["tokens_per_step"] > 1
        and plain.streamspec["steps"] == 0
        and plain.streamspec["plain_steps"] > 0
    )
    assert fast.streamspec["drafted_tokens"] > 0 == plain.streamspec["drafted_tokens"]
    rows = [chunk.streamspec["rows"] for chunk in ask(server, user(PROMPTS[0]), stream=True)]
    assert rows[0] == 0 and max(rows[1:]) > 1


def test_stop_strings_end_the_answer_without_them(server: Running, cold: Callable[..., Any]) -> None:
    whole = cold(user(PROMPTS[1]), max_new_tokens=30).text
    stop = whole[4:6]
    for stream in (False, True):
        answer = ask(server, user(PROMPTS[1]), stop=[stop, "never comes"], stream=stream)
        text = "".join(c.choices[0].delta.content for c in answer) if stream else answer.choices[0].message.content
        assert text == whole[: whole.index(stop)]
    assert ask(server, user(PROMPTS[1]), stop=stop).choices[0].finish_reason == "stop"


def test_a_seed_makes_sampling_repeatable(server: Running) -> None:
    said = [
        ask(server, user(PROMPTS[2]), temperature=1.5, seed=seed).choices[0].message.content for seed in (1, 1, 2, 3)
    ]
    assert said[0] == said[1] and len(set(said)) == 3


def test_completions_take_text_as_it_is_and_tokens(server: Running, cold: Callable[..., Any], bundle: Path) -> None:
    ids = list(tiny_tokenizer()("abc abd")["input_ids"])
    want = cold(ids, max_new_tokens=12).text
    client = server.client()
    for prompt in ("abc abd", ids, ["abc abd"], [ids]):
        assert client.completions.create(model="base", prompt=prompt, max_tokens=12).choices[0].text == want
    with pytest.raises(openai.BadRequestError, match="token ids") as caught:
        client.completions.create(model="base", prompt=[5000], max_tokens=1)
    assert (caught.value.code, caught.value.param) == ("invalid_value", "prompt")


def test_a_prompt_beyond_the_context_is_refused_at_once(server: Running) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(server, user("x" * 500))
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages") and "128" in str(
        caught.value
    )
    with pytest.raises(openai.BadRequestError) as caught:
        server.client().completions.create(model="base", prompt="x" * 500)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")


def test_many_clients_at_once_get_what_each_would_alone(server: Running, cold: Callable[..., Any]) -> None:
    asked = [(prompt, seed) for prompt in PROMPTS for seed in (None, 1, 2)] * 2
    random.Random(0).shuffle(asked)
    want = {
        (p, s): cold(
            user(p), max_new_tokens=30, sampling=Sampling(temperature=0 if s is None else 1.0, seed=s or 0)
        ).text
        for p, s in set(asked)
    }

    def one(which: tuple[str, int | None]) -> str:
        prompt, seed = which
        return (
            ask(server, user(prompt), **({} if seed is None else {"temperature": 1.0, "seed": seed}))
            .choices[0]
            .message.content
        )

    with ThreadPoolExecutor(6) as threads:
        assert list(threads.map(one, asked)) == [want[which] for which in asked]
    until(lambda: not server.server.pool.requests)


def test_clients_that_leave_at_random_spoil_nothing(server: Running, cold: Callable[..., Any]) -> None:
    dice = random.Random(1)

    def one(i: int) -> None:
        stream = ask(server, user(PROMPTS[i % 4]), stream=True, max_tokens=60)
        for _, _ in zip(range(dice.randrange(8)), stream, strict=False):
            pass
        stream.close()

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(one, range(24)))
    until(lambda: not server.server.pool.requests)
    for prompt in PROMPTS:
        assert ask(server, user(prompt)).choices[0].message.content == cold(user(prompt), max_new_tokens=30).text


def test_an_idle_server_unloads_its_bundle_and_answers_as_before(bundle: Path, cold: Callable[..., Any]) -> None:
    session = load(bundle, threads=1, tree=8, idle=0.3)
    running = Running(session, limits=Limits(sessions=2))
    try:
        for _ in range(2):
            assert (
                ask(running, user(PROMPTS[1])).choices[0].message.content
                == cold(user(PROMPTS[1]), max_new_tokens=30).text
            )
            until(lambda: not session.loaded)
    finally:
        running.stop()


def test_adapters_are_models(tmp_path: Path) -> None:
    base = tiny_base(tmp_path / "base", chat=True)
    adapters = [tiny_adapter(tmp_path / "chatty", base, kind="chat"), tiny_adapter(tmp_path / "terse", base)]
    export_swappable(base, adapters, tmp_path / "bundle", "fp32", progress=lambda line: None)
    alone = load(tmp_path / "bundle", threads=1, tree=8)
    want = {}
    for name in (None, "chatty", "terse"):
        alone.swap(name)
        for prompt in PROMPTS[:2]:
            want[name, prompt] = alone.generate(user(prompt), max_new_tokens=20).text
    served = load(tmp_path / "bundle", threads=1, tree=8)
    running = Running(served, adapters={name: name for name in served.adapters}, limits=Limits(sessions=2))
    try:
        assert [model.id for model in running.client().models.list()] == ["base", "chatty", "terse"]

        def one(which: tuple[str | None, str]) -> str:
            return ask(running, user(which[1]), model=which[0] or "base", max_tokens=20).choices[0].message.content

        asked = [*want] * 4
        random.Random(2).shuffle(asked)
        with ThreadPoolExecutor(4) as threads:
            assert list(threads.map(one, asked)) == [want[which] for which in asked]
        with running.http() as http:
            for name in ("chatty", "terse", "chatty"):  # in its own format, whatever answered last
                ask(running, user(PROMPTS[0]), model="terse", max_tokens=1)
                body = {"model": name, "messages": user(PROMPTS[0])}
                counted = http.post("/v1/messages/count_tokens", json=body).json()["input_tokens"]
                alone.swap(name)
                assert counted == len(alone.encode(user(PROMPTS[0])))
            tools = {"tools": [{"type": "function", "function": {"name": "f"}}]}
            asked = {"model": "terse", "messages": user(PROMPTS[0])} | tools
            assert "the prompt format raw" in http.post("/v1/chat/completions", json=asked).json()["error"]["message"]
    finally:
        running.stop()
    kept: list[str | None] = []
    serve(
        tmp_path / "bundle",
        port=0,
        adapter="chatty",
        adapters=["terse"],
        ready=lambda server: (kept.append(server.pool.first.adapter), server.stop()),
        threads=1,
        tree=8,
    )
    assert kept == ["chatty"]  # the trial of the others leaves it


class Process:
    """`streamspec serve` as users start it."""

    def __init__(self, bundle: Path, *options: str, **environment: str) -> None:
        command = [sys.executable, "-m", "streamspec", "serve", str(bundle), "--port", "0", "--threads", "1", *options]
        kept = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job's children ignore it
        try:
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | environment
            )
        finally:
            signal.signal(signal.SIGINT, kept)
        assert self.process.stdout is not None
        self.line = self.process.stdout.readline()
        self.url = self.line.split("/v1")[0]

    def client(self, token: str) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=token, max_retries=0, timeout=20)


@pytest.fixture
def start(bundle: Path, tmp_path: Path) -> Iterator[Callable[..., Process]]:
    """`start("--log", NAME=value)`: a process over the bundle, with a cache in `tmp_path`. Whatever becomes of the
    test, none is left.
    """
    started: list[Process] = []

    def one(*options: str, **environment: str) -> Process:
        started.append(Process(bundle, *options, STREAMSPEC_CACHE=str(tmp_path), **environment))
        return started[-1]

    yield one
    for served in started:
        with served.process:  # closes its pipes and waits
            served.process.kill()


def leave_asking(client: openai.OpenAI) -> None:
    with suppress(openai.APIError):
        client.chat.completions.create(model="bundle", messages=user("hi"), max_tokens=120)


def files(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_process_within_a_second(start: Callable[..., Process], how: signal.Signals) -> None:
    served = start("--log")
    found = re.fullmatch(r"(http://127\.0\.0\.1:\d+)/v1; token: (\S+); page: (\S+)/#token=(\S+)\n", served.line)
    assert found and found[1] == found[3] and found[2] == found[4]
    stream = served.client(found[2]).chat.completions.create(
        model="bundle", messages=user("hi"), max_tokens=100, stream=True
    )
    next(iter(stream))
    began = time.monotonic()
    served.process.send_signal(how)
    out, err = served.process.communicate(timeout=10)
    assert time.monotonic() - began < 2  # one of them Python's own way out
    assert served.process.returncode == (130 if how == signal.SIGINT else -signal.SIGTERM)
    assert out == "" and "Traceback" not in err and "POST /v1/chat/completions 200" in err and found[2] not in err


@pytest.mark.slow
def test_a_killed_server_leaves_bundle_and_cache_as_they_were(
    start: Callable[..., Process], bundle: Path, tmp_path: Path
) -> None:
    """Killed at its start and in the middle of answers, again and again: nothing is lost, the next one starts and
    answers alike.
    """
    before, said = files(bundle), set()
    for pause in (0.0, 0.05, 0.2):
        served = start("--token", TOKEN)
        client = served.client(TOKEN)
        said.add(
            client.chat.completions.create(model="bundle", messages=user("hi"), max_tokens=20)
            .choices[0]
            .message.content
        )
        threading.Thread(target=leave_asking, args=(client,), daemon=True).start()
        time.sleep(pause)
        served.process.kill()
        served.process.communicate()
        assert files(bundle) == before
    assert len(said) == 1 and not [name for name in files(tmp_path) if "tmp" in name]
    assert load(bundle, threads=1, cache_dir=tmp_path).generate(user("hi"), max_new_tokens=20).text == said.pop()


@pytest.mark.slow
def test_a_token_that_is_given_is_not_printed(start: Callable[..., Process]) -> None:
    served = start("--no-page", STREAMSPEC_TOKEN=TOKEN)
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/v1\n", served.line)
    assert (
        httpx.get(f"{served.url}/v1/models", headers={"authorization": f"Bearer {TOKEN}"}).json()["data"][0]["id"]
        == "bundle"
    )
    assert httpx.get(f"{served.url}/", headers={"authorization": f"Bearer {TOKEN}"}).status_code == 404
    served.process.terminate()
    out, err = served.process.communicate(timeout=10)
    assert out == "" and err == ""


@pytest.mark.slow
def test_a_kept_token_is_not_printed_but_made(start: Callable[..., Process], tmp_path: Path) -> None:
    path = tmp_path / "token"
    served = start("--token-file", str(path), "--allow-origin", "https://app.example", STREAMSPEC_TOKEN=TOKEN)
    token = path.read_text().strip()
    assert served.line == f"{served.url}/v1; token in {path}; page: {served.url}/\n" and token != TOKEN
    asked = {"authorization": f"Bearer {token}", "origin": "https://app.example"}
    answer = httpx.get(f"{served.url}/v1/models", headers=asked)
    assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == "https://app.example"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--host", "0.0.0.0"], "this machine alone"),
        (["--token", "x"], "the token"),
        (["--use", "gamma"], "takes no adapters"),
        (["--name", "a b"], "a model named"),
    ],
)
def test_wrong_options_are_one_line(start: Callable[..., Process], options: list[str], says: str) -> None:
    served = start(*options)
    out, err = served.process.communicate(timeout=60)
    assert served.process.returncode == 2 and out == "" and says in err and len(err.strip().splitlines()) == 1
