"""Anthropic's Messages API, with bodies as it defines them. The client `anthropic` was run against the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from streamspec.runtime.options import SWITCHES
from streamspec.serve.errors import ApiError
from streamspec.serve.forms.anthropic import read_counted, read_messages
from streamspec.serve.limits import DEFAULT
from tests.serve.conftest import TOKEN, Running, user
from tests.serve.forms.conftest import WEATHER
from tests.support.thinking_sessions import thinking

Make = Callable[..., Running]
TOOL = {"name": "get_weather", "description": "The weather.", "input_schema": WEATHER}
BODY: Any = {"model": "base", "max_tokens": 300, "messages": user("Where?")}
THOUGHT = {"type": "thinking", "thinking": "Rome?", "signature": ""}
TEXT = {"type": "text", "text": "Oslo, END."}


def ask(server: Running, **fields: Any) -> Any:
    with server.http() as client:
        del client.headers["authorization"]
        headers = {"x-api-key": TOKEN, "anthropic-version": "2023-06-01"}
        answer = client.post("/v1/messages", json=BODY | fields, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(server: Running, **fields: Any) -> list[dict[str, Any]]:
    """Those of a stream; each has its type for a name."""
    with server.http() as client:
        answer = client.post("/v1/messages", json=BODY | fields | {"stream": True})
    pairs = [part.split("\n", 1) for part in answer.text.strip().split("\n\n")]
    read = [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in pairs]
    assert [name for name, _ in read] == [body["type"] for _, body in read]
    return [body for _, body in read]


def gathered(stream: list[dict[str, Any]]) -> list[Any]:
    """The blocks of a stream, put together as clients do: by their index, each begun, continued and ended."""
    blocks, open_block = list[Any](), -1
    for body in stream:
        if body["type"] == "content_block_start":
            assert open_block == -1 and body["index"] == len(blocks)
            blocks, open_block = [*blocks, dict(body["content_block"])], body["index"]
        elif body["type"] == "content_block_delta":
            assert body["index"] == open_block
            (field,) = body["delta"].keys() - {"type"}
            blocks[-1][field] = blocks[-1].get(field, "") + body["delta"][field]
        elif body["type"] == "content_block_stop":
            assert body["index"] == open_block
            open_block = -1
    for block in blocks:
        if "partial_json" in block:
            block["input"] = json.loads(block.pop("partial_json"))
    return blocks


def read(**fields: Any) -> Any:
    return read_messages(json.dumps(BODY | fields).encode(), DEFAULT)


def test_a_message_has_blocks_streamed_and_whole(talking: Running) -> None:
    whole = ask(talking)
    assert whole["content"] == [THOUGHT, TEXT] and whole["id"].startswith("msg_")
    assert (whole["type"], whole["role"], whole["model"]) == ("message", "assistant", "base")
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("end_turn", None)
    stream = events(talking)
    assert gathered(stream) == whole["content"]
    begin, change, stop = stream[0], stream[-2], stream[-1]
    assert (begin["message"]["content"], begin["message"]["stop_reason"]) == ([], None)
    assert change["delta"] == {"stop_reason": "end_turn", "stop_sequence": None} and stop == {"type": "message_stop"}
    usage = change["usage"]
    assert usage["output_tokens"] == whole["usage"]["output_tokens"] > 10
    prompts = [sum(value for name, value in each["usage"].items() if "input" in name) for each in (whole, change)]
    assert prompts[0] == prompts[1] > usage["cache_read_input_tokens"] > 0


def test_it_ends_at_a_stop_string_or_the_most_tokens(talking: Running) -> None:
    for stops, stop in ((["xyz", "END"], "END"), (["o, E", "o, END"], "o, E"), (["."], ".")):
        ended = ask(talking, stop_sequences=stops)
        assert (ended["stop_reason"], ended["stop_sequence"]) == ("stop_sequence", stop)
    assert ask(talking, max_tokens=5)["stop_reason"] == "max_tokens"


def test_the_stop_string_that_ended_it_is_not_that_of_a_thought(talking: Running) -> None:
    assert ask(talking, stop_sequences=["Rome", "Oslo"])["stop_sequence"] == "Oslo"
    assert ask(talking, stop_sequences=["o, E", "Oslo, E"])["stop_sequence"] == "Oslo, E"  # of two that end at once


def test_a_prompt_that_the_template_refuses_is_not_counted(running: Make, caplog: pytest.LogCaptureFixture) -> None:
    template = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    server = running(session=thinking("a", template=template + "{{ m.content }}{% endfor %}"))
    body = {name: BODY[name] for name in ("model", "messages")} | {"system": "Be brief."}
    with server.http() as client:
        answer = client.post("/v1/messages/count_tokens", json=body)
    assert answer.status_code == 400 and "no system" in answer.json()["error"]["message"]
    assert "Exception in ASGI application" not in caplog.text


def test_how_it_thinks(talking: Running) -> None:
    options = read(thinking={"type": "enabled", "budget_tokens": 50}).options[0]
    assert (options.thinking_token_budget, options.chat_template_kwargs) == (50, dict.fromkeys(SWITCHES, True))
    assert read(thinking={"type": "disabled"}).options[0].chat_template_kwargs == dict.fromkeys(SWITCHES, False)
    assert read(output_config={"effort": "max"}).options[0].reasoning_effort == "xhigh"
    assert ask(talking, thinking={"type": "adaptive", "display": "omitted"})["content"] == [TEXT]
    form = {"type": "json_schema", "schema": {"enum": [1, 2]}}
    assert ask(talking, output_config={"format": form})["content"][-1]["text"] == "1"


@pytest.mark.parametrize("choice", [None, {"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_calls_are_blocks(calling: Running, choice: Any) -> None:
    whole = ask(calling, tools=[TOOL], tool_choice=choice)
    said = [] if choice else [{"type": "text", "text": "I look."}]
    call = whole["content"][-1]
    assert whole["content"][:-1] == [THOUGHT, *said] and whole["stop_reason"] == "tool_use"
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "get_weather", {"place": "Oslo", "unit": "C"})
    *before, streamed = gathered(events(calling, tools=[TOOL], tool_choice=choice))
    assert before == whole["content"][:-1] and streamed | {"id": call["id"]} == call


def test_a_call_that_is_cut_short_is_none(calling: Running) -> None:
    cut = ask(calling, tools=[TOOL], tool_choice={"type": "any"}, max_tokens=40)
    assert (cut["content"], cut["stop_reason"]) == ([THOUGHT], "max_tokens")
    none = ask(calling, tools=[TOOL], tool_choice={"type": "none"})
    assert none["content"][-1]["text"].startswith("I look.<call>") and none["stop_reason"] == "end_turn"


def test_blocks_become_the_messages_of_a_chat(calling: Running) -> None:
    turns = [
        *user("Hi"),
        *user("Where?"),
        {
            "role": "assistant",
            "content": [
                THOUGHT,
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "a", "name": "get_weather", "input": {"place": "Oslo"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "4 C"}]},
                {"type": "text", "text": "So?", "cache_control": {"type": "ephemeral"}},
            ],
        },
    ]
    parsed = read(messages=turns, system=[{"type": "text", "text": "Be"}, {"type": "text", "text": " brief."}])
    system, question, said, result, more = parsed.prompt
    assert (system["content"], question["content"], more["content"]) == ("Be brief.", "Hi\nWhere?", "So?")
    assert (said["content"], said["reasoning_content"]) == ("I look.", "Rome?")
    assert json.loads(said["tool_calls"][0]["function"]["arguments"]) == {"place": "Oslo"}
    assert (result["role"], result["tool_call_id"], result["content"]) == ("tool", "a", "4 C")
    assert ask(calling, messages=turns, tools=[TOOL])["stop_reason"] == "tool_use"
    turns[-1]["content"][0] = {"type": "tool_result", "tool_use_id": "a", "is_error": True}
    assert read(messages=turns).prompt[2]["content"] == "Error"


def test_tokens_are_counted(talking: Running) -> None:
    body = {name: BODY[name] for name in ("model", "messages")}
    with talking.http() as client:
        count = client.post("/v1/messages/count_tokens", json=body).json()
    usage = ask(talking)["usage"]
    assert count == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}
    assert read_counted(json.dumps(body).encode(), DEFAULT).model == "base"


def test_how_to_think_is_a_hint_to_a_model_that_does_not(running: Make) -> None:
    """Claude Code sends both for every model it does not know."""
    server = running()
    plain = ask(server, max_tokens=8)
    for fields in ({"thinking": {"type": "adaptive"}}, {"thinking": {"type": "enabled", "budget_tokens": 1024}}, {}):
        answer = ask(server, max_tokens=8, output_config={"effort": "high"}, **fields)
        assert answer["content"] == plain["content"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": None}, "no max_tokens; expected the field"),
        ({"max_token": 5}, "unknown field max_token, did you mean max_tokens?"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop_sequences": [""]}, "stop_sequences strings; expected at most 32"),
        ({"messages": [*user("Hi"), {"role": "assistant", "content": "a"}]}, "a last message of the assistant"),
        ({"messages": [{"role": "user", "content": []}]}, "messages.0 without content"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages.0.content.0.type 'image' of user"),
        ({"messages": [{"role": "user", "contents": ""}]}, "unknown field messages.0.contents, did you mean content?"),
        ({"tools": [{"type": "web_search", "name": "x"}]}, "tools.0.type 'web_search' is not supported"),
        ({"tools": [TOOL | {"inputs": 1}]}, "unknown field tools.0.inputs"),
        ({"tool_choice": {"type": "tool"}, "tools": [TOOL]}, "tool_choice; expected a name with the type tool"),
        ({"mcp_servers": [{}]}, "mcp_servers is not supported; expected [] or null"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": 7}}}},
            "a JSON schema that cannot be used",
        ),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(fields: Any, message: str) -> None:
    with pytest.raises(ApiError) as refused:
        read(**fields)
    assert refused.value.status == 400 and refused.value.message.startswith(message)


def test_errors_have_its_shape(talking: Running, running: Make) -> None:
    with talking.http() as client:
        answer = client.post("/v1/messages", json=BODY | {"model": "nope"})
    assert (answer.status_code, answer.json()["error"]["type"]) == (404, "not_found_error")
    server = running()
    assert server.shared is not None
    server.shared.fails = RuntimeError("secret")
    last = events(server)[-1]
    assert (last["type"], last["error"]["type"]) == ("error", "api_error") and "secret" not in str(last)
