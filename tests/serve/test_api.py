"""The API with the real `openai` client over fake sessions: shapes, streams, errors, the queue, disconnects, the way
out.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from streamspec.errors import AdapterError, ConfigError, ResourceError
from streamspec.runtime import Sampling
from streamspec.serve import Server, serve
from streamspec.serve import server as server_module
from tests.serve.conftest import TOKEN, Running, until, user
from tests.serve.test_auth import head
from tests.support.fake_serve_session import FakeServeSession, Shared

Make = Callable[..., Running]


def ask(client: openai.OpenAI, text: str = "say word", model: str = "base", **fields: Any) -> Any:
    return client.chat.completions.create(**{"model": model, "messages": user(text), "max_tokens": 9} | fields)


def test_models_are_the_bundle_and_its_adapters(running: Make) -> None:
    client = running().client()
    assert [model.id for model in client.models.list()] == ["base", "alpha", "beta"]
    assert client.models.retrieve("alpha").owned_by == "streamspec"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("gamma")
    assert caught.value.code == "model_not_found" and caught.value.param == "model"


def test_a_chat(running: Make) -> None:
    answer = ask(running().client())
    assert (
        answer.choices[0].message.content == "word word"
        and answer.choices[0].message.role == "assistant"
        and answer.choices[0].finish_reason == "length"
    )
    assert (
        answer.usage.prompt_tokens,
        answer.usage.completion_tokens,
        answer.usage.total_tokens,
        answer.usage.prompt_tokens_details.cached_tokens,
    ) == (8, 9, 17, 0)
    said = answer.streamspec
    assert (
        said["steps"] == 4
        and said["tokens_per_step"] == 2
        and said["new_tokens"] == 9
        and said["drafted_tokens"] == 4
        and said["finish_reason"] == "length"
        and said["adapter"] is None
    )
    assert {
        "speculation",
        "plain_steps",
        "tokens_per_second",
        "queue_ms",
        "prefill_ms",
        "decode_ms",
        "prompt_tokens",
        "reused_tokens",
    } <= said.keys()


def test_a_completion(running: Make) -> None:
    answer = running().client().completions.create(model="alpha", prompt="say this", max_tokens=6)
    assert (
        answer.choices[0].text == "this t"
        and answer.object == "text_completion"
        and answer.streamspec["adapter"] == "alpha"
    )
    chunks = list(running().client().completions.create(model="alpha", prompt="say this", max_tokens=6, stream=True))
    assert (
        "".join(chunk.choices[0].text for chunk in chunks) == "this t"
        and chunks[-1].choices[0].finish_reason == "length"
    )


def test_several_answers_to_one_prompt(running: Make) -> None:
    server = running(limits={"sessions": 2})
    answer = ask(server.client(), n=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    for choice in answer.choices:
        assert choice.message.content == "word word" and choice.finish_reason == "length"
        assert choice.streamspec["new_tokens"] == 9
    assert answer.usage.prompt_tokens == 8 and answer.usage.completion_tokens == 27
    assert not hasattr(answer, "streamspec") and server.shared and server.shared.most == 1
    texts = ["", "", ""]
    for chunk in ask(server.client(), n=3, stream=True):
        (choice,) = chunk.choices
        assert (choice.delta.role == "assistant") == (not texts[choice.index])
        texts[choice.index] += choice.delta.content
        assert choice.finish_reason is None or chunk.streamspec["new_tokens"] == 9
    assert texts == ["word word"] * 3
    text = server.client().completions.create(model="alpha", prompt="say this", max_tokens=6, n=2)
    assert [choice.text for choice in text.choices] == ["this t"] * 2
    assert "streamspec_new_tokens_total 66\n" in server.http().get("/metrics").text


def test_several_prompts_are_answered_in_order(running: Make) -> None:
    client = running().client()
    asked: Any = {"model": "alpha", "prompt": ["say this", "now that"], "max_tokens": 6, "n": 2}
    answer = client.completions.create(**asked)
    assert [(choice.index, choice.text) for choice in answer.choices] == [
        *enumerate(["this t", "this t", "that t", "that t"])
    ]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (16, 24, 40)
    texts = [""] * 4
    *chunks, last = client.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    for chunk in chunks:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in answer.choices] and last.usage.prompt_tokens == 16
    echoed = client.completions.create(**asked | {"n": 1, "echo": True})
    assert [choice.text for choice in echoed.choices] == ["say thisthis t", "now thatthat t"]


def test_a_suffix_needs_a_model_that_fills_in_the_middle(running: Make) -> None:
    with pytest.raises(openai.BadRequestError, match="tokens to fill in the middle") as caught:
        running().client().completions.create(model="base", prompt="a", suffix="b")
    assert caught.value.param == "suffix"


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_of_a_prediction_are_counted_as_openai_defines(running: Make, stream: bool) -> None:
    """The answer is "word word"; each letter is a token. Accepted are those of the prediction that it has."""
    server = running()
    for predicted, accepted in (("word word", 9), ("word we", 6), ("my word word!", 9), ("other", 0)):
        fields = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        parts = [{"type": "text", "text": predicted[:3]}, {"type": "text", "text": predicted[3:]}]
        for content in (predicted, parts):
            answer = ask(server.client(), prediction={"type": "content", "content": content}, **fields)
            usage = (list(answer)[-1] if stream else answer).usage
            details, rejected = usage.completion_tokens_details, len(predicted) - accepted
            assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (accepted, rejected)
            assert usage.completion_tokens == 9 + rejected and usage.total_tokens == 17 + rejected
            assert server.shared and server.shared.options[-1].prediction == predicted
    usage = ask(server.client(), prediction={"type": "content", "content": "word we"}, n=2).usage
    assert usage.completion_tokens == 2 * 10 and usage.completion_tokens_details.accepted_prediction_tokens == 12
    usage = ask(server.client()).usage
    assert usage.completion_tokens == 9 and usage.completion_tokens_details.rejected_prediction_tokens == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_ends_all_of_its_answers(running: Make, stream: bool) -> None:
    server = running(step=0.01, limits={"sessions": 1})
    with pytest.raises(openai.APITimeoutError):
        answer = ask(server.client(timeout=0.2), n=8, max_tokens=4000, stream=stream)
        for _ in answer if stream else ():
            time.sleep(0.25)
            raise openai.APITimeoutError(httpx.Request("GET", "http://x"))
    if stream:
        answer.close()
    until(lambda: not server.server.pool.requests)
    assert server.shared and len(server.shared.asked) == 1


def test_a_stream_says_of_every_call_what_was_drafted(running: Make) -> None:
    chunks = list(ask(running().client(), stream=True, stream_options={"include_usage": True}))
    *calls, usage = chunks
    assert (
        "".join(chunk.choices[0].delta.content for chunk in calls) == "word word"
        and calls[0].choices[0].delta.role == "assistant"
    )
    assert [chunk.choices[0].finish_reason for chunk in calls] == [None] * 4 + ["length"] and len(
        {chunk.id for chunk in chunks}
    ) == 1
    assert usage.choices == [] and usage.usage.completion_tokens == 9 and all(chunk.usage is None for chunk in calls)
    for chunk in calls:
        assert "".join(chunk.streamspec["tokens"]) == chunk.choices[0].delta.content and len(
            chunk.streamspec["tokens"]
        ) == len(chunk.streamspec["drafted"])
    assert [chunk.streamspec["rows"] for chunk in calls] == [0, 4, 4, 4, 4] and [
        chunk.streamspec["accepted"] for chunk in calls
    ] == [0, 1, 1, 1, 1]
    assert (
        calls[1].streamspec["drafted"] == [True, False]
        and calls[1].streamspec["committed"] == 2
        and "steps" not in calls[1].streamspec
    )
    assert calls[-1].streamspec["steps"] == 4 and calls[-1].streamspec["finish_reason"] == "length"


def test_without_include_usage_a_stream_has_none(running: Make) -> None:
    with running().http() as client:
        text = client.post(
            "/v1/chat/completions", json={"model": "base", "messages": user("say word"), "stream": True}
        ).text
    events = text.split("\n\n")
    assert (
        events[-1] == ""
        and events[-2] == "data: [DONE]"
        and all("usage" not in json.loads(event.removeprefix("data: ")) for event in events[:-2])
    )


def test_the_adapter_is_the_model_that_was_asked_for(running: Make) -> None:
    server = running(limits={"sessions": 2})
    client = server.client()
    for model in ("alpha", "base", "beta", "alpha", "alpha", "base"):
        assert ask(client, model=model).streamspec["adapter"] == (None if model == "base" else model)
    assert {slot.session.adapter for slot in server.server.pool.slots if slot.session} == {"alpha", None}


def test_an_adapter_given_as_a_path_is_swapped_in_once(running: Make) -> None:
    server = running(adapters={"mine": Path("some/adapter")}, limits={"sessions": 1})
    assert [ask(server.client(), model="mine").usage.prompt_tokens_details.cached_tokens for _ in range(2)] == [0, 8]
    assert server.shared and server.shared.swaps == 1


def test_each_session_has_one_thread_which_ends_with_the_server(running: Make) -> None:
    def found() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name == "streamspec-generation"}

    before, server = found(), running(limits={"sessions": 2})
    threads: set[threading.Thread] = set()
    for _ in range(3):
        with ThreadPoolExecutor(4) as clients:
            assert {answer.choices[0].message.content for answer in clients.map(ask, [server.client()] * 4)} == {
                "word word"
            }
        threads |= found() - before
    assert 1 <= len(threads) <= 2
    server.stop()
    until(lambda: not any(thread.is_alive() for thread in threads))


def test_a_conversation_finds_its_cache_also_beside_others(running: Make) -> None:
    server = running(limits={"sessions": 3})
    client = server.client()
    talks = {name: [*user(f"tell me of {name}")] for name in ("ants", "bees", "cats")}
    known = dict.fromkeys(talks, 0)
    for _ in range(3):
        for name, talk in talks.items():
            answer = client.chat.completions.create(model="base", messages=talk, max_tokens=5)
            assert answer.usage.prompt_tokens_details.cached_tokens >= known[name]
            known[name] = answer.usage.prompt_tokens
            talk += [{"role": "assistant", "content": answer.choices[0].message.content}, *user(f"more {name}")]
    assert server.shared and server.shared.swaps == 0


def test_a_conversation_whose_answer_comes_back_otherwise_reuses_the_prompt_before_it(running: Make) -> None:
    client = running(limits={"sessions": 3}).client()
    talk = user("tell me of ants")
    first = ask(client, messages=talk, max_tokens=200).usage.prompt_tokens
    talk += [{"role": "assistant", "content": "In short: ants."}, *user("more ants")]
    assert ask(client, messages=talk).usage.prompt_tokens_details.cached_tokens >= first
    elsewhere = ask(client, messages=user("tell us of bees, at length"))
    assert elsewhere.usage.prompt_tokens_details.cached_tokens == 0


@pytest.mark.parametrize(
    ("fields", "raised", "code"),
    [
        ({"model": "gamma"}, openai.NotFoundError, "model_not_found"),
        ({"n": 9}, openai.BadRequestError, "too_large"),
        ({"extra_body": {"best_of": 2}}, openai.BadRequestError, "unsupported_value"),
        ({"extra_body": {"foo": 1}}, openai.BadRequestError, "unknown_field"),
        ({"messages": user("x" * 5000)}, openai.BadRequestError, "context_length_exceeded"),
        ({"stop": ["refuse"]}, openai.BadRequestError, "config"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_are_the_clients_own(
    running: Make, fields: dict[str, Any], raised: type[openai.APIStatusError], code: str, stream: bool
) -> None:
    server = running()
    with pytest.raises(raised) as caught:
        ask(server.client(), stream=stream, **fields)
    assert caught.value.code == code and caught.value.type == "invalid_request_error"
    until(lambda: not server.server.pool.requests)
    assert ask(server.client()).choices[0].message.content == "word word"


def test_a_wrong_token_is_the_clients_authentication_error(running: Make) -> None:
    with pytest.raises(openai.AuthenticationError):
        ask(running().client(api_key="a-wrong-one"))


def test_an_error_in_a_running_stream_is_its_last_event(running: Make) -> None:
    server = running()
    assert server.shared
    server.shared.fails = RuntimeError("secret detail")
    with pytest.raises(openai.APIError, match="inside the server") as caught:
        list(ask(server.client(), stream=True))
    assert caught.value.code == "internal_error" and "secret" not in str(caught.value.body)
    with pytest.raises(openai.InternalServerError):
        ask(server.client())
    server.shared.fails = AdapterError("alpha is damaged")
    with pytest.raises(openai.InternalServerError, match="alpha is damaged"):
        ask(server.client())
    server.shared.fails = ResourceError("no room for 4096 tokens")
    with pytest.raises(openai.InternalServerError, match="no room") as full:
        ask(server.client())
    assert full.value.status_code == 503 and full.value.code == "memory"
    server.shared.fails = None
    assert ask(server.client()).choices[0].message.content == "word word"


def test_the_queue_is_bounded_in_order_and_says_when_to_come_back(running: Make) -> None:
    server = running(still=True, limits={"sessions": 2, "queue": 3})
    pool, shared = server.server.pool, server.shared
    assert shared
    with ThreadPoolExecutor(8) as threads:
        answers = []
        for i in range(5):
            answers.append(threads.submit(ask, server.client(), f"say number{i}", max_tokens=2))
            until(lambda i=i: len(pool.requests) == i + 1)
        queued = list(pool.waiting)
        assert len(queued) == 3
        with pytest.raises(openai.RateLimitError) as caught:
            ask(server.client())
        assert caught.value.response.headers["retry-after"] == "1" and caught.value.code == "queue_full"
        metrics = server.http().get("/metrics").text
        assert (
            'streamspec_requests_total{result="refused"} 1\n' in metrics
            and "streamspec_waiting_requests 3\n" in metrics
            and 'streamspec_sessions{state="busy"} 2\n' in metrics
        )
        shared.gate.set()
        assert [answer.result(5).choices[0].message.content for answer in answers] == ["nu"] * 5
    assert [job.began for job in queued] == sorted(job.began or 0.0 for job in queued)
    assert sorted(shared.asked) == [f"number{i}" for i in range(5)] and shared.most == 2


def test_a_request_that_finds_no_session_in_time_is_told_so(running: Make) -> None:
    server = running(limits={"sessions": 1, "timeout": 1})
    assert server.shared
    server.shared.swapping = 2.0
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(ask, server.client(), model="alpha")
        until(lambda: server.server.pool.requests)
        with pytest.raises(openai.InternalServerError) as caught:
            ask(server.client())
        assert caught.value.status_code == 503 and caught.value.code == "timeout"
        first.result(5)


def test_an_answer_that_takes_too_long_ends_with_what_there_is(running: Make) -> None:
    answer = ask(running(step=0.05, limits={"timeout": 1}).client(), max_tokens=200)
    assert answer.choices[0].finish_reason == "length" and answer.streamspec["finish_reason"] == "timeout"
    content = answer.choices[0].message.content
    assert "word word".startswith(content[:9]) and content and answer.usage.completion_tokens < 60  # 20 if none waits


def test_what_was_not_begun_in_time_is_no_empty_answer(running: Make) -> None:
    """A client would take scores that are missing for certainty."""
    client = running(still=True, limits={"timeout": 0.3}).client()  # a prompt that is never read to its end
    for asked in ({}, {"echo": True, "logprobs": 1}, {"stream": True}):
        with pytest.raises(openai.InternalServerError, match="no answer within 0.3 s") as caught:
            client.completions.create(model="base", prompt=["say it", "say"], max_tokens=200, **asked)
        assert caught.value.status_code == 503


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("still", [False, True])
def test_a_client_that_goes_frees_its_session(running: Make, stream: bool, still: bool) -> None:
    """Also while the prompt is read (`still`), and those that wait."""
    server = running(step=0.01, still=still, limits={"sessions": 1})
    pool = server.server.pool
    body = json.dumps({"model": "base", "messages": user("say word"), "stream": stream, "max_tokens": 4000}).encode()
    request = (
        head(server, "POST", "/v1/chat/completions")
        + b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
        + body
    )
    clients = [socket.create_connection(("127.0.0.1", server.server.port)) for _ in range(3)]
    for client in clients:
        client.sendall(request)
    until(lambda: len(pool.waiting) == 2)
    for client in reversed(clients):
        client.close()
    until(lambda: not pool.waiting)
    assert server.shared
    server.shared.gate.set()
    until(lambda: not pool.requests and not server.shared.running, 2)
    assert pool.counts.cancelled == 3 and pool.counts.finished == 0
    assert ask(server.client()).choices[0].message.content == "word word"


def test_two_clients_at_once_are_served_alike(running: Make) -> None:
    server = running(step=0.005, limits={"sessions": 2})

    def times(word: str) -> list[float]:
        return [time.monotonic() for _ in ask(server.client(), f"say {word}", stream=True, max_tokens=100)]

    with ThreadPoolExecutor(2) as threads:
        one, two = threads.map(times, ("one", "two"))
    assert max(one[0], two[0]) < min(one[-1], two[-1]) and abs(one[-1] - two[-1]) < 0.5 * (one[-1] - one[0])


def test_one_client_with_many_requests_does_not_push_in(running: Make) -> None:
    """Whoever came first is served first, however many come after."""
    server = running(still=True, limits={"sessions": 1, "queue": 20})
    assert server.shared
    with ThreadPoolExecutor(12) as threads:
        for i in range(12):
            threads.submit(ask, server.client(), f"say {'late' if i == 5 else 'many'}{i}", max_tokens=2)
            until(lambda i=i: len(server.server.pool.requests) == i + 1)
        server.shared.gate.set()
    assert [said[4:] for said in server.shared.asked] == [str(i) for i in range(12)]


@pytest.mark.parametrize("still", [False, True])
def test_stopping_ends_everything_within_a_second_and_tells_the_clients(running: Make, still: bool) -> None:
    server = running(step=0.01, still=still, limits={"sessions": 2})
    raised: list[Any] = []

    def talk(stream: bool) -> None:
        try:
            answer = ask(server.client(), stream=stream, max_tokens=4000)
            raised.append(list(answer) if stream else answer)
        except openai.APIError as error:
            raised.append(error)

    clients = [threading.Thread(target=talk, args=(i % 2 == 0,)) for i in range(4)]
    for client in clients:
        client.start()
    until(lambda: len(server.server.pool.requests) == 4)
    began = time.monotonic()
    server.stop()
    assert time.monotonic() - began < 1.2
    for client in clients:
        client.join(2)
    assert len(raised) == 4 and all(
        isinstance(error, openai.APIError) and "shutting down" in str(error) for error in raised
    )
    with pytest.raises(httpx.ConnectError):
        server.http().get("/health")


def test_a_port_that_is_taken_and_names_that_collide_are_refused() -> None:
    server = Server(FakeServeSession(Shared()), port=0, token=TOKEN)
    with pytest.raises(ConfigError, match=f"port {server.port}.* in use; expected a free port"):
        Server(FakeServeSession(Shared()), port=server.port, token=TOKEN)
    server.socket.close()
    with pytest.raises(ConfigError, match="--name"):
        Server(FakeServeSession(Shared()), port=0, token=TOKEN, name="alpha", adapters={"alpha": "alpha"})
    with pytest.raises(ConfigError, match="a model named"):
        Server(FakeServeSession(Shared()), port=0, token=TOKEN, name="a b")


def test_an_idle_server_counts_what_it_did(running: Make) -> None:
    server = running()
    ask(server.client())
    metrics = server.http().get("/metrics")
    assert metrics.headers["content-type"].startswith("text/plain; version=0.0.4")
    for line in (
        'streamspec_requests_total{result="finished"} 1',
        "streamspec_new_tokens_total 9",
        "streamspec_steps_total 4",
        "streamspec_prompt_tokens_total 8",
        'streamspec_sessions{state="unopened"} 3',
    ):
        assert f"\n{line}\n" in metrics.text


def test_embeddings_are_refused_with_the_reason(running: Make) -> None:
    with pytest.raises(openai.BadRequestError, match="expected a bundle of `streamspec export --embeddings`") as caught:
        running().client().embeddings.create(model="base", input="some text")
    assert (caught.value.code, caught.value.param) == ("no_embeddings", "model")


RECOMMENDED = Sampling(temperature=0.6, top_k=20, repetition_penalty=1.1)


@pytest.mark.parametrize(
    ("fields", "used"),
    [
        ({}, RECOMMENDED),
        ({"temperature": 0}, Sampling()),
        ({"temperature": 0, "extra_body": {"top_k": 5}}, Sampling(top_k=5)),
        ({"temperature": 1.2}, Sampling(temperature=1.2, top_k=20, repetition_penalty=1.1)),
        ({"extra_body": {"top_k": 0}}, Sampling(temperature=0.6, repetition_penalty=1.1)),
        ({"top_p": 0.5}, Sampling(temperature=0.6, top_k=20, top_p=0.5, repetition_penalty=1.1)),
    ],
    ids=str,
)
def test_an_answer_begins_with_the_models_sampling_and_the_requests_own_fields_win(
    running: Make, fields: dict[str, Any], used: Sampling
) -> None:
    server = running(session=recommending(shared := Shared()))
    client = server.client()
    ask(client, **fields)
    client.completions.create(**{"model": "alpha", "prompt": "say this", "max_tokens": 2} | fields)
    response = client.responses.create(**{"model": "base", "input": "say this", "max_output_tokens": 2} | fields)
    assert [options.sampling for options in shared.options] == [used] * 3
    assert (response.temperature, response.top_p) == (used.temperature, used.top_p)


def test_a_seed_counts_up_over_answers_with_the_models_sampling(running: Make) -> None:
    ask(running(session=recommending(shared := Shared())).client(), n=2, seed=7)
    assert [options.sampling for options in shared.options] == [RECOMMENDED.changed(seed=seed) for seed in (7, 8)]


def test_a_model_says_what_its_answers_begin_with(running: Make) -> None:
    client = running(session=recommending(Shared())).client()
    said = {"temperature": 0.6, "top_k": 20, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.1}
    assert client.models.retrieve("alpha").streamspec == {"sampling": said, "thinks": False}


def recommending(shared: Shared) -> FakeServeSession:
    """A session of a base whose publisher recommends a sampling; answers at once."""
    shared.gate.set()
    session = FakeServeSession(shared)
    session.sampling = RECOMMENDED
    return session


def test_serve_replaces_what_a_bundle_recommends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "load", lambda *_, **__: recommending(Shared()))
    monkeypatch.setattr(server_module, "unended_turn_of", lambda session: None)
    monkeypatch.setattr(Server, "run", lambda self: self.socket.close())
    found: list[Sampling] = []
    for sampling in (None, {"temperature": 0}, {"top_k": 3}):
        serve(
            "b", port=0, adapters=[], sampling=sampling, ready=lambda server: found.append(server.pool.first.sampling)
        )
    assert found == [RECOMMENDED, Sampling(), RECOMMENDED.changed(top_k=3)]
    with pytest.raises(ConfigError, match="temperature 500"):
        serve("b", port=0, sampling={"temperature": 500})
    for wrong in ("temprature", "seed"):  # one seed would make the answers of a request alike
        with pytest.raises(ConfigError, match=f"sampling with {wrong}"):
            serve("b", port=0, sampling={wrong: 1})
