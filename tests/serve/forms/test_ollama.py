"""The paths of Ollama's API, with bodies as it defines them. The client `ollama` was run against the same."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from streamspec.errors import ConfigError
from streamspec.runtime import Session
from streamspec.runtime.options import SWITCHES
from streamspec.serve.api.answer import line_of
from streamspec.serve.api.chat_responses import event
from streamspec.serve.errors import ApiError
from streamspec.serve.forms.ollama import read_chat, read_generate
from streamspec.serve.limits import DEFAULT
from tests.serve.conftest import Running, user
from tests.serve.forms.conftest import WEATHER
from tests.support.thinking_sessions import TEMPLATE, thinking

Make = Callable[..., Running]
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "The weather.", "parameters": WEATHER}}
CHAT: Any = {"model": "base", "messages": user("Where?")}


def ask(server: Running, path: str = "/api/chat", **fields: Any) -> Any:
    with server.http() as client:
        answer = client.post(path, json=(CHAT if path == "/api/chat" else {"model": "base"}) | fields)
    assert answer.status_code == 200, answer.text
    if fields.get("stream", True):
        assert answer.headers["content-type"] == "application/x-ndjson"
        return [json.loads(line) for line in answer.text.splitlines()]
    return answer.json()


def chat(**fields: Any) -> Any:
    return read_chat(json.dumps(CHAT | fields).encode(), DEFAULT)


def test_a_chat_streamed_by_default_and_whole(talking: Running) -> None:
    whole = ask(talking, stream=False)
    assert whole["message"] == {"role": "assistant", "content": "Oslo, END.", "thinking": "Rome?"}
    assert (whole["model"], whole["done"], whole["done_reason"]) == ("base", True, "stop")
    assert whole["created_at"].endswith("Z") and whole["eval_count"] > 10 < whole["prompt_eval_count"]
    assert whole["total_duration"] >= whole["prompt_eval_duration"] + whole["eval_duration"] > 1000
    *pieces, last = ask(talking)
    assert "".join(piece["message"]["content"] for piece in pieces) == "Oslo, END."
    assert "".join(piece["message"].get("thinking", "") for piece in pieces) == "Rome?"
    assert [piece["done"] for piece in pieces] == [False] * len(pieces)
    assert (last["done"], last["done_reason"], last["eval_count"]) == (True, "stop", whole["eval_count"])


def test_text_to_a_prompt_and_as_it_is(talking: Running, running: Make) -> None:
    whole = ask(talking, "/api/generate", prompt="Where?", system="Be brief.", stream=False)
    assert (whole["response"], whole["thinking"], whole["done_reason"]) == ("Oslo, END.", "Rome?", "stop")
    *pieces, last = ask(running(), "/api/generate", prompt="one two", raw=True, options={"num_predict": 5})
    assert "".join(piece["response"] for piece in pieces) == "two t" and last["done_reason"] == "length"


def test_options_are_those_of_the_answer() -> None:
    given = {"temperature": 0.5, "top_k": 4, "top_p": 0.5, "min_p": 0.1, "seed": 3, "repeat_penalty": 1.1}
    options = chat(options=given | {"num_predict": 7, "stop": ["END"], "num_ctx": 99, "num_gpu": 1}).options[0]
    assert (options.max_new_tokens, options.stops) == (7, ["END"])
    sampling = options.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.5, 4, 0.5, 0.1)
    assert (sampling.seed, sampling.repetition_penalty) == (3, 1.1)
    assert chat(options={"num_predict": -1}).options[0].max_new_tokens == DEFAULT.max_tokens
    assert chat(options={"seed": -1}).options[0].sampling.seed is None
    assert chat().stream and not chat(stream=False).stream
    # Turns are forgotten for as long an answer as is asked for, or for a short one.
    assert [chat(options={"num_predict": most}).room for most in (7, -1)] == [7, 512] and chat().room == 512
    assert chat(truncate=False).room == 0


def test_how_it_thinks_and_which_form_it_has(talking: Running) -> None:
    assert chat(think=False).options[0].chat_template_kwargs == dict.fromkeys(SWITCHES, False)
    assert chat(think="low").options[0].reasoning_effort == "low"
    assert [chat(**each).thinks for each in ({}, {"think": False}, {"think": "low"})] == [True, False, False]
    assert ask(talking, format={"enum": [1, 2]}, stream=False)["message"]["content"] == "1"
    text = ask(talking, format="json", stream=False, options={"num_predict": 60})["message"]["content"]
    assert text.startswith("{") and chat(format="").options[0].grammar is None


def test_calls_have_arguments_as_objects_and_results_answer_them_in_turn(calling: Running) -> None:
    called = {"index": 0, "name": "get_weather", "arguments": {"place": "Oslo", "unit": "C"}}
    whole = ask(calling, tools=[TOOL], stream=False)["message"]
    assert (whole["content"], [call["function"] for call in whole["tool_calls"]]) == ("I look.", [called])
    *_, before, last = ask(calling, tools=[TOOL])
    assert [call["function"] for call in before["message"]["tool_calls"]] == [called] and last["done"]
    calls = [{"function": {"name": name, "arguments": {}}} for name in ("one", "two", "one")]
    results = [{"role": "tool", "content": str(i), "tool_name": name} for i, name in enumerate(("two", "one"))]
    read = chat(messages=[*user("Hi"), {"role": "assistant", "tool_calls": calls}, *results]).prompt
    assert [message["tool_call_id"] for message in read[2:]] == ["call00002", "call00001"]
    assert len({call["id"] for call in read[1]["tool_calls"]}) == 3
    answered = [*user("Hi"), {k: whole[k] for k in ("role", "content", "thinking", "tool_calls")}]
    answer = ask(calling, tools=[TOOL], messages=[*answered, {"role": "tool", "content": "4 C"}], stream=False)
    assert answer["done"]


def test_models_are_listed_and_shown_and_found_with_their_tag(talking: Running, running: Make) -> None:
    with talking.http() as client:
        (listed,) = client.get("/api/tags").json()["models"]
        assert listed["name"] == listed["model"] == "base:latest" and listed["details"]["quantization_level"] == "int8"
        shown = client.post("/api/show", json={"model": "base:latest"}).json()
        of_go = {"model": "base", "system": "", "template": "", "verbose": False, "options": None, "name": ""}
        assert client.post("/api/show", json=of_go).json() == shown  # Ollama's own client
        assert shown["capabilities"] == ["completion", "tools", "thinking"] and shown["details"] == listed["details"]
        about = shown["model_info"]
        assert about[about["general.architecture"] + ".context_length"] == 600
        assert client.get("/api/version").json()["version"].count(".") == 2
        (loaded,) = client.get("/api/ps").json()["models"]
        assert listed.items() <= loaded.items() and loaded["context_length"] == 600
        for path in ("/api/embed", "/api/embeddings"):
            refused = client.post(path, json={"model": "base", "input": "x"})
            assert refused.status_code == 501 and "expected /v1/embeddings" in refused.json()["error"]
    assert ask(talking, model="base:latest", stream=False)["done"]
    openai = talking.client()  # as Roo Code takes the listed name there
    answer = openai.chat.completions.create(model=listed["name"], messages=user("Hi"), max_tokens=9)
    assert answer.model == openai.models.retrieve(listed["name"]).id == "base"
    assert ask(talking, messages=[], stream=False)["done_reason"] == "load"
    with running().http() as client:
        assert [one["name"] for one in client.get("/api/tags").json()["models"]] == [
            *("base:latest", "alpha:latest", "beta:latest")
        ]


@pytest.mark.parametrize("keep_alive", [0, "0", "0s", 0.0])
def test_a_model_is_unloaded_where_it_does_not_answer(
    keep_alive: Any, talking: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, body = list[str](), {"model": "base", "keep_alive": keep_alive}

    def unload(self: Session) -> None:
        asked.append("unload")
        if len(asked) > 1:
            raise ConfigError("a session in use", "none", "wait")

    monkeypatch.setattr(Session, "unload", unload)
    with talking.http() as client:
        answers = [client.post("/api/generate", json=body) for _ in range(2)]
    assert (answers[0].status_code, answers[0].json()["done_reason"]) == (200, "unload")
    assert answers[1].status_code == 409 and answers[1].json()["error"].startswith("a session in use")
    assert ask(talking, messages=[], keep_alive="10m", stream=False)["done_reason"] == "load" and len(asked) == 2


def test_a_model_that_is_being_loaded_stops_no_other_request(talking: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unload waits for it."""
    begun, loaded = threading.Event(), threading.Event()

    def unload(self: Session) -> None:
        begun.set()
        loaded.wait(20)

    monkeypatch.setattr(Session, "unload", unload)
    with talking.http() as client, ThreadPoolExecutor(1) as beside:
        asked = beside.submit(client.post, "/api/generate", json={"model": "base", "keep_alive": 0})
        assert begun.wait(20)
        with talking.http() as other:
            assert other.get("/health", timeout=10).status_code == 200
        loaded.set()
        assert asked.result().status_code == 200


@pytest.mark.parametrize("switch", SWITCHES)
def test_a_model_thinks_unless_told_otherwise(switch: str) -> None:
    """Whatever its template does by itself, and calls its switch."""
    closed = TEMPLATE.replace("enable_thinking is defined and enable_thinking is false", f"not {switch}")
    assert closed != TEMPLATE
    server = Running(thinking("<think>\nRome?\n</think>\n\nOslo, END.", template=closed))
    try:
        assert "thinking" in ask(server, stream=False)["message"]
        assert "thinking" not in ask(server, stream=False, think=False)["message"]
    finally:
        server.stop()


def test_log_probabilities_are_of_the_content(talking: Running) -> None:
    found = ask(talking, logprobs=True, stream=False)
    assert "".join(entry["token"] for entry in found["logprobs"]) == found["message"]["content"] == "Oslo, END."


def test_a_stop_string_that_stands_in_calls_is_refused_beside_tools(calling: Running) -> None:
    with calling.http() as client:
        answer = client.post("/api/chat", json=CHAT | {"tools": [TOOL], "options": {"stop": ["x", "<call>"]}})
    assert answer.status_code == 400 and answer.json()["error"].startswith("stop '<call>' beside tools")
    assert ask(calling, options={"stop": ["<call>"]}, stream=False)["message"]["content"] == "I look."


def test_no_line_has_what_readers_of_lines_take_for_an_end() -> None:
    text = "a\u2028b\u2029c\x85d"
    for line in (line_of({"text": text}), event({"text": text}).strip()):
        assert len(line.decode().splitlines()) == 1
        assert json.loads(line.decode().removeprefix("data: ")) == {"text": text}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"option": {}}, "unknown field option, did you mean options?"),
        ({"options": {"temprature": 1}}, "unknown field options.temprature, did you mean temperature?"),
        ({"options": {"temperature": 5}}, "options.temperature: input should be less than or equal to 2"),
        ({"options": {"num_predict": 5.5}}, "options.num_predict"),
        ({"tool_choice": "required"}, "tool_choice without tools"),
        ({"options": {"mirostat": 2}}, "options.mirostat is not supported; expected 0 or null"),
        ({"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, "messages.0.images is not supported"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0 answers no call; expected one before it"),
        ({"format": "yaml"}, "format"),
        ({"tools": [{"function": {"name": "a b"}}]}, "tools.0.function.name"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(fields: Any, message: str) -> None:
    with pytest.raises(ApiError) as refused:
        chat(**fields)
    assert refused.value.status == 400 and refused.value.message.startswith(message)


def test_errors_are_a_text(talking: Running) -> None:
    with talking.http() as client:
        answer = client.post("/api/chat", json={**CHAT, "model": "nope"})
    assert (answer.status_code, answer.json()) == (404, {"error": "the model 'nope'; expected one of base"})
    with pytest.raises(ApiError, match="think beside raw"):
        read_generate(json.dumps({"model": "base", "prompt": "x", "raw": True, "think": True}).encode(), DEFAULT)


def test_a_stream_that_fails_ends_with_its_error(running: Make) -> None:
    server = running()
    assert server.shared is not None
    server.shared.fails = RuntimeError("secret")
    assert ask(server)[-1] == {"error": "an error inside the server; see its log"}
