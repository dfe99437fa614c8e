"""`/v1/responses` with the `openai` client, whose own types check every field of answers and events."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from streamspec.serve.api.chat_requests import read_chat
from streamspec.serve.api.kept_items import MOST_ITEMS, MOST_TEXT, KeptItems
from streamspec.serve.api.responses_request import ONLY, read_responses
from streamspec.serve.errors import ApiError
from streamspec.serve.limits import Limits
from tests.serve.api.conftest import CLOCK, WEATHER
from tests.serve.conftest import Running, user
from tests.support.byte_tokenizers import byte_level

LIMITS = Limits(max_tokens=500, default_tokens=50, messages=4, text=300, grammar=200)
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
TOOLS: Any = [{"type": "function", "strict": True, "parameters": None} | tool["function"] for tool in (WEATHER, CLOCK)]


def ask(server: Running, **fields: Any) -> Any:
    given: Any = {"model": "base", "input": "Rome?", "max_output_tokens": 120} | fields
    response = server.client().responses.create(**given)
    if not fields.get("stream"):
        Response.model_validate(response.to_dict(), strict=True)
    return response


def events(server: Running, **fields: Any) -> list[Any]:
    """Events of a stream; each is valid, the numbers count up, and the whole is what the last one says."""
    found = list(ask(server, stream=True, **fields))
    for i, event in enumerate(found):
        EVENT.validate_python(event.to_dict())
        assert event.sequence_number == i
    assert [event.type for event in found[:2]] == ["response.created", "response.in_progress"]
    return found


def same(one: Any, other: Any) -> bool:
    """Whether two outputs are the same but for their ids."""
    plain = [[item.to_dict() | {"id": "", "call_id": ""} for item in output] for output in (one, other)]
    return plain[0] == plain[1]


def test_the_clients_own_example_says_what_the_chat_says(tool_server: Running) -> None:
    instructions, asked = "You are a coding assistant that talks like a pirate.", "How do I check a type?"
    response = ask(tool_server, instructions=instructions, input=asked, max_output_tokens=20)
    chat = tool_server.client().chat.completions.create(
        model="base", messages=[{"role": "system", "content": instructions}, *user(asked)], max_tokens=20
    )
    assert response.output_text == chat.choices[0].message.content and response.output_text
    assert response.status == "incomplete" and response.incomplete_details.reason == "max_output_tokens"
    assert response.usage.input_tokens == chat.usage.prompt_tokens and response.usage.output_tokens == 20
    assert response.instructions == instructions and response.temperature == 0 and response.store is False
    assert response.streamspec["new_tokens"] == 20 and response.id.startswith("resp_")
    parts = [{"role": "developer", "content": instructions}, {"role": "user", "content": [
        {"type": "input_text", "text": asked}]}]  # fmt: skip
    assert ask(tool_server, input=parts, max_output_tokens=20).output_text == response.output_text


def test_a_streamed_answer_is_the_whole_one(tool_server: Running) -> None:
    whole = ask(tool_server, max_output_tokens=20)
    found = events(tool_server, max_output_tokens=20)
    deltas = [event.delta for event in found if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text and len(deltas) > 2
    kinds = [event.type.removeprefix("response.") for event in found if event.type != "response.output_text.delta"]
    assert kinds == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.done", "content_part.done",
        "output_item.done", "incomplete",
    ]  # fmt: skip
    assert same(found[-1].response.output, whole.output) and found[-1].response.usage.output_tokens == 20
    with tool_server.client().responses.stream(model="base", input="Rome?", max_output_tokens=20) as stream:
        snapshots = [event.snapshot for event in stream if event.type == "response.output_text.delta"]
    assert snapshots[-1] == whole.output_text


def test_an_answer_without_a_word_is_an_empty_message(tool_server: Running) -> None:
    said = ask(tool_server, max_output_tokens=20).output_text
    stopped: Any = {"extra_body": {"stop": [said[0]]}}
    whole = ask(tool_server, **stopped)
    assert whole.output_text == "" and len(whole.output) == 1 and whole.status == "completed"
    assert same(events(tool_server, **stopped)[-1].response.output, whole.output)


def test_the_clients_own_example_of_structured_outputs(tool_server: Running) -> None:
    class CalendarEvent(BaseModel):
        name: str
        date: str
        participants: list[str]

    ends = {str(byte_level().token_to_id(mark)): 100.0 for mark in '"]'}  # or a tiny model's texts would not end
    given: Any = {"model": "base", "input": "Alice and Bob meet on Friday.", "text_format": CalendarEvent}
    client, extra = tool_server.client(), {"logit_bias": ends}
    parsed = client.responses.parse(**given, extra_body=extra)
    with client.responses.stream(**given, extra_body=extra) as stream:
        streamed = stream.get_final_response()
    assert isinstance(parsed.output_parsed, CalendarEvent) and parsed.output_parsed == streamed.output_parsed
    again = client.responses.create(model="base", input=[*parsed.output, *user("Again.")], max_output_tokens=5)
    assert again.usage is not None and again.usage.input_tokens > 5


def test_the_clients_own_example_of_a_conversation_with_tools(tool_server: Running) -> None:
    """The prompt of the second request is that of the same chat."""
    items: list[Any] = user("What is the weather in Rome?")
    choice: Any = {"type": "function", "name": "get_weather"}
    first = ask(tool_server, input=items, tools=TOOLS, tool_choice=choice)
    (call,) = first.output
    said = json.loads(call.arguments)
    assert (call.type, call.name, call.status, first.status) == ("function_call", "get_weather", *["completed"] * 2)
    assert said["place"] in ("Rome", "Oslo") and said["unit"] in ("C", "F")
    items += first.output
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": json.dumps({"degrees": 20})})
    second = ask(tool_server, input=items, tools=TOOLS, instructions="Be brief.", max_output_tokens=8)
    function = {"name": call.name, "arguments": call.arguments}
    messages: Any = [
        {"role": "system", "content": "Be brief."},
        *user("What is the weather in Rome?"),
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": call.call_id, "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": call.call_id, "content": json.dumps({"degrees": 20})},
    ]  # fmt: skip
    chat = tool_server.client().chat.completions.create(
        model="base", messages=messages, tools=[WEATHER, CLOCK], max_tokens=8
    )
    assert second.output_text == chat.choices[0].message.content
    assert second.usage.input_tokens == chat.usage.prompt_tokens
    found = events(tool_server, input=items[:1], tools=TOOLS, tool_choice=choice)
    deltas = [event.delta for event in found if event.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == call.arguments and len(deltas) > 2 and same(found[-1].response.output, first.output)
    assert [e.type.split("response.")[1] for e in found if not e.type.endswith("delta")] == [
        "created", "in_progress", "output_item.added", "function_call_arguments.done", "output_item.done", "completed",
    ]  # fmt: skip
    cut = ask(tool_server, input=items[:1], tools=TOOLS, tool_choice=choice, max_output_tokens=60)
    assert cut.status == cut.output[0].status == "incomplete"


def test_a_pydantic_tool_is_parsed_from_a_stream(tool_server: Running) -> None:
    class Walk(BaseModel):
        again: bool

    tool: Any = openai.pydantic_function_tool(Walk)
    flat: Any = {"type": "function", **tool["function"]}
    with tool_server.client().responses.stream(
        model="base",
        input="Walk.",
        tools=[flat],
        tool_choice="required",
        parallel_tool_calls=False,
        max_output_tokens=99,
    ) as stream:
        (call,) = stream.get_final_response().output
    assert call.type == "function_call" and set(json.loads(call.arguments)) == {"again"}


def test_items_of_earlier_answers_may_be_named_by_their_ids(tool_server: Running, running: Any) -> None:
    """As clients do that take them to be stored, such as Vercel's AI SDK."""
    first = ask(tool_server, tools=TOOLS, tool_choice="required", max_output_tokens=300)
    results: Any = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "4 C"}
        for item in first.output
        if item.type == "function_call"
    ]
    named: Any = [{"type": "item_reference", "id": item.id} for item in first.output]
    items = [item.to_dict() for item in first.output]
    answers = [
        ask(tool_server, input=[*user("Rome?"), *before, *results], tools=TOOLS, max_output_tokens=20)
        for before in (named, items)
    ]
    assert same(answers[0].output, answers[1].output) and results
    assert answers[0].usage.input_tokens == answers[1].usage.input_tokens
    forgotten = ask(tool_server, store=False).output[0].id
    for unknown in (forgotten, "msg_1"):
        with pytest.raises(openai.BadRequestError, match="is not kept; expected the item itself"):
            ask(tool_server, input=[{"type": "item_reference", "id": unknown}])


def test_kept_items_are_bounded() -> None:
    kept = KeptItems()
    kept.add([{"id": str(i), "text": "x" * 1000} for i in range(MOST_ITEMS + 5)])
    assert kept.get("4") is None and kept.get("5") is not None
    kept.add([{"id": "long", "text": "x" * (MOST_TEXT - 3000)}])
    assert kept.get("long") is not None and kept.get(str(MOST_ITEMS)) is None
    kept.add([{"id": "longer", "text": "x" * MOST_TEXT}])
    assert kept.get("longer") is None and kept._text == 0


def test_log_probabilities_are_the_chats(tool_server: Running) -> None:
    chat = tool_server.client().chat.completions.create(
        model="base", messages=user("Rome?"), max_tokens=6, logprobs=True, top_logprobs=2
    )
    given: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "max_output_tokens": 6}
    want = chat.choices[0].logprobs.content  # type: ignore[union-attr]
    whole, found = ask(tool_server, **given), events(tool_server, **given)
    streamed = [one for event in found if event.type == "response.output_text.delta" for one in event.logprobs]
    for got in (whole.output[0].content[0].logprobs, streamed):
        assert [(one.token, one.logprob, len(one.top_logprobs)) for one in got] == [
            (one.token, one.logprob, 2)
            for one in want  # type: ignore[union-attr]
        ]


def test_a_failure_in_the_middle_is_an_event(running: Callable[..., Running]) -> None:
    server = running()
    server.shared.fails = RuntimeError("secret")  # type: ignore[union-attr]
    found = events(server)
    assert found[-1].type == "response.failed" and found[-1].response.status == "failed"
    assert found[-1].response.error.code == "server_error" and "secret" not in found[-1].response.error.message


def test_without_a_stream_a_failure_is_a_status(running: Callable[..., Running]) -> None:
    server = running()
    with pytest.raises(openai.BadRequestError) as caught:
        ask(server, input="x" * 5000)
    assert caught.value.param == "input" and caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        server.client().responses.retrieve("resp_1")


def test_an_input_that_is_too_long_loses_its_oldest_turns_on_request(running: Callable[..., Running]) -> None:
    server = running()
    old = [*user("x" * 2500), {"role": "assistant", "content": "y" * 1500}, *user("old"), *user("z" * 90 + " word")]
    for truncation in (None, "disabled"):
        with pytest.raises(openai.BadRequestError) as caught:
            ask(server, input=old, instructions="be brief", truncation=truncation)
        assert caught.value.code == "context_length_exceeded"
    response = ask(server, input=old, instructions="be brief", truncation="auto", max_output_tokens=9)
    assert response.output_text == "word word" and response.truncation == "auto"
    left = len("\n".join(["be brief", "old", "z" * 90 + " word"]))
    assert response.usage.input_tokens == left
    short = ask(server, input="say word", truncation="auto", max_output_tokens=9)
    assert short.usage.input_tokens == len("say word")
    alone = ask(server, input="z" * 4080 + " word", truncation="auto", max_output_tokens=9)  # one turn is left
    assert alone.usage.input_tokens == 4085


def test_fields_without_effect_are_echoed_as_the_api_has_them(running: Callable[..., Running]) -> None:
    given: Any = {"metadata": {"job": "7"}, "store": True, "service_tier": "flex", "prompt_cache_retention": "24h"}
    response = ask(running(), **given, text={"verbosity": "low"})
    assert response.metadata == {"job": "7"} and response.store is False and response.service_tier == "default"
    assert response.text.verbosity == "low" and response.truncation == "disabled"
    said = {"role": "assistant", "content": "a", "phase": "commentary"}
    assert read(input=[said, *user("hi")]).prompt == read(input=[{**said, "phase": None}, *user("hi")]).prompt


def read(**fields: Any) -> Any:
    return read_responses(json.dumps({"model": "m", "input": "hi"} | fields).encode(), LIMITS)


def test_fields_reach_the_runtime_as_those_of_a_chat() -> None:
    schema: Any = {"type": "object", "properties": {"a": {"type": "null"}}}
    form = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    shared: Any = {
        "model": "m",
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "seed": 5,
        "stop": "x",
        "speculate": False,
    }
    given = read(
        **shared, max_output_tokens=9, text={"format": form, "verbosity": "medium"}, top_logprobs=3, stream=True
    )
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    chat = {"messages": user("hi"), "max_tokens": 9, "response_format": form, "logprobs": True, "top_logprobs": 3}
    want = read_chat(json.dumps(shared | chat | {"stream": True}).encode(), LIMITS)
    assert (given.prompt, given.options, given.stream) == (want.prompt, want.options, True)
    assert read().options == read_chat(json.dumps({"model": "m", "messages": user("hi")}).encode(), LIMITS).options
    assert read(include=["message.output_text.logprobs"]).options[0].logprobs == 0


def test_a_refusal_is_what_the_answer_said() -> None:
    said = {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
    assert read(input=[*user("hi"), said]).prompt[1] == {"role": "assistant", "content": "No."}


def test_words_and_calls_of_one_answer_are_one_message() -> None:
    said = {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed", "phase": None, "content": [
        {"type": "output_text", "text": "Let me ", "annotations": [], "logprobs": []},
        {"type": "output_text", "text": "see."}]}  # fmt: skip
    call = {
        "type": "function_call",
        "call_id": "a",
        "name": "f",
        "arguments": "{}",
        "id": "fc_1",
        "status": "completed",
    }
    call["caller"] = None  # type: ignore[assignment]
    messages = read(input=[said, call, call | {"call_id": "b"}]).prompt
    assert [message["role"] for message in messages] == ["assistant"] and messages[0]["content"] == "Let me see."
    assert [one["id"] for one in messages[0]["tool_calls"]] == ["a", "b"]


def test_tools_that_are_no_functions_are_offered_in_vain(tool_server: Running) -> None:
    others: Any = [{"type": "web_search"}, *TOOLS, {"type": "namespace", "name": "a", "tools": TOOLS}]
    answers = [ask(tool_server, tools=tools, max_output_tokens=20) for tools in (TOOLS, others)]
    assert answers[0].output_text == answers[1].output_text
    assert answers[0].usage == answers[1].usage and len(answers[1].tools) == len(TOOLS)
    assert answers[1].streamspec["left_out"] == ["tools.0 (web_search)", f"tools.{len(TOOLS) + 1} (namespace)"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": user("hi")}, "messages"),
        ({"input": None}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["hi"]}, "input.0.type"),
        ({"input": [{"type": "image_generation_call", "id": "x"}]}, "input.0.type"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input.0.id"),
        ({"input": [*user("a"), {"role": "user"}]}, "input.1.content"),
        ({"input": [{"role": "tool", "content": "a"}]}, "input.0.role"),
        ({"input": [{"role": "user", "content": "a", "foo": 1}]}, "input.0.foo"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input.0.content.0.type",
        ),
        (
            {
                "input": [
                    {
                        "type": "function_call_output",
                        "call_id": "a",
                        "output": [{"type": "input_image", "image_url": "x"}],
                    }
                ]
            },
            "input.0.output.0.type",
        ),
        ({"input": [{"type": "function_call", "call_id": "", "name": "f", "arguments": ""}]}, "input.0.call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "a"}]}, "input.0.output"),
        ({"input": [{"type": "function_call_output", "call_id": "a", "output": "x", "caller": {}}]}, "input.0.caller"),
        ({"input": user("a") * 5}, "input"),
        ({"input": user("a") * 4, "instructions": "x"}, "input"),
        ({"input": "x" * 301}, "input"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"n": 2}, "n"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
        ({"text": {"format": {"type": "json_object", "schema": {}}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "schema": {"type": "nonsense"}}}}, "text.format.schema"),
        ({"text": {"verbosity": "none"}}, "text.verbosity"),
        ({"truncation": "middle"}, "truncation"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"input": [{"role": "assistant", "content": "a", "phase": "end"}]}, "input.0.phase"),
        ({"tools": [{"type": "functoin"}]}, "tools.0.type"),
        ({"tools": [{"type": ["web_search"]}]}, "tools.0.type"),
        ({"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools.0.name"),
        ({"tools": [{"type": "function", "name": "f", "defer_loading": True}]}, "tools.0.defer_loading"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"include": ["file_search_call.results"]}, "include.0"),
        ({"stream_options": {"include_usage": True}}, "stream_options.include_usage"),
        *(({name: "odd"}, name) for name in ONLY),
    ],
)
def test_what_is_not_done_is_refused_by_this_paths_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        read(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert param.split(".")[-1] in caught.value.message or param.startswith("input")
