"""Thoughts over the API, with the `openai` client and its types: apart from the content, streamed and whole, drafted
and not.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types import CompletionUsage
from openai.types.chat import ChatCompletion
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from streamspec.serve.api.chat_requests import read_chat, read_completion
from streamspec.serve.api.responses_request import read_responses
from streamspec.serve.errors import ApiError
from streamspec.serve.limits import Limits
from tests.serve.api.conftest import WEATHER
from tests.serve.conftest import Running, user
from tests.support.thinking_sessions import OPENED, TEMPLATE, thinking

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
CALL_ARGUMENTS = '{"place": "Oslo", "unit": "C"}'
CALL = f'{{"name": "get_weather", "arguments": {CALL_ARGUMENTS}}}'
SAYS = f"<think>\nRome? No END: Oslo. {CALL}\n</think>\n\nIt is Oslo, END."
THOUGHT, SAID = f"Rome? No END: Oslo. {CALL}", "It is Oslo, END."
NUMBER: Any = {
    "type": "object",
    "properties": {"n": {"enum": [1, 2]}},
    "required": ["n"],
    "additionalProperties": False,
}


def served(script: str, **made: Any) -> Running:
    return Running(thinking(script, **made))


@pytest.fixture(scope="module", params=[("added", TEMPLATE), ("special", OPENED), ("spelled", TEMPLATE)])
def server(request: pytest.FixtureRequest) -> Iterator[Running]:
    kind, template = request.param
    running = served(SAYS, kind=kind, template=template)
    yield running
    running.stop()


def ask(server: Running, **fields: Any) -> Any:
    given = {"model": "base", "messages": user("Where?"), "max_tokens": 300} | fields
    return server.client().chat.completions.create(**given)


def test_a_session_is_free_after_a_request_without_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    session = thinking(SAYS)
    server, start = Running(session, limits=Limits(sessions=1, timeout=1)), session.vocabulary.start

    def slow(grammar: Any, check: Any = lambda: None, *rest: Any) -> Any:
        time.sleep(1.2)
        check()
        return start(grammar, check, *rest)

    gc.disable()  # whose collection would free it, too, some time
    try:
        with monkeypatch.context() as patch:
            patch.setattr(session.vocabulary, "start", slow)
            with pytest.raises(openai.InternalServerError, match="no answer within"):
                ask(server, extra_body={"thinking_token_budget": 5})
        assert ask(server, max_tokens=20).choices[0].message.reasoning_content
    finally:
        gc.enable()
        server.stop()


def test_the_thought_is_reasoning_content_streamed_and_whole(server: Running) -> None:
    whole = ask(server)
    ChatCompletion.model_validate(whole.to_dict())
    message = whole.choices[0].message
    assert (message.reasoning_content, message.content) == (THOUGHT, SAID)
    usage: CompletionUsage = whole.usage
    assert usage.completion_tokens_details is not None
    assert usage.completion_tokens_details.reasoning_tokens == whole.streamspec["reasoning_tokens"]
    assert len(THOUGHT) <= usage.completion_tokens_details.reasoning_tokens <= usage.completion_tokens - len(SAID)
    for speculate in (True, False):
        thought, text, order = "", "", []
        for chunk in ask(server, stream=True, extra_body={"speculate": speculate}):
            delta = chunk.choices[0].delta
            more = getattr(delta, "reasoning_content", None) or ""
            thought, text = thought + more, text + (delta.content or "")
            order += ["thought"] * bool(more) + ["text"] * bool(delta.content)
            pieces = chunk.streamspec
            assert "".join(pieces["tokens"]) == (delta.content or "")
            assert "".join(pieces.get("reasoning", {"tokens": []})["tokens"]) == more
        assert (thought, text) == (THOUGHT, SAID) and order == sorted(order, reverse=True) and "thought" in order
    plain = ask(server, extra_body={"speculate": False})
    assert plain.choices[0].message == message and plain.usage.completion_tokens == usage.completion_tokens


def test_after_a_turn_with_tools_only_that_turn_is_read_again() -> None:
    dropping = TEMPLATE.replace(
        "{% if m.reasoning_content %}",
        "{% if m.reasoning_content and not messages[loop.index0:] | selectattr('role', 'equalto', 'user') | list %}",
    )
    server = served(f"<think>{'Which one? ' * 20}</think>\n\n<call>{CALL}", template=dropping, context=2000)
    session = server.server.pool.first
    chat = [{"role": "system", "content": "Be brief. " * 30}, *user("Where?")]
    question = len(session.encode(chat)) - 1  # without the beginning of an answer
    for result in ("4 C", "5 C", None):
        said = ask(server, messages=chat, tools=[WEATHER]).choices[0].message
        chat.append({name: said.to_dict()[name] for name in ("role", "reasoning_content", "tool_calls")})
        if result is not None:
            chat.append({"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": result})
    answer = ask(server, messages=[*chat, *user("And now?")], tools=[WEATHER])
    assert answer.usage.prompt_tokens_details.cached_tokens >= question
    assert [slot.session for slot in server.server.pool.slots[1:]] == [None] * 3  # not taken for another conversation
    server.stop()


@pytest.mark.parametrize(
    "words", ["Write <think> first.", "Close it: </think>", "[THINK] or <thought>", "a</reasoning>b"]
)
def test_a_call_after_words_that_mention_a_tag_of_thoughts_is_made(words: str) -> None:
    server = served(f"<think>Hm.</think>\n\n{words}<call>{CALL}")
    message = ask(server, tools=[WEATHER]).choices[0].message
    chunks = [chunk.choices[0].delta for chunk in ask(server, tools=[WEATHER], stream=True)]
    server.stop()
    assert (message.reasoning_content, message.content) == ("Hm.", words)
    assert [call.function.arguments for call in message.tool_calls] == [CALL_ARGUMENTS]
    assert "".join(delta.content or "" for delta in chunks) == words
    assert sum(len(delta.tool_calls or ()) for delta in chunks) == 1


def test_stop_strings_and_logprobs_are_the_contents(server: Running) -> None:
    stopped = ask(server, stop=["END"], logprobs=True, n=2)
    for choice in stopped.choices:
        assert choice.message.reasoning_content == THOUGHT and choice.message.content == "It is Oslo, "
        assert choice.finish_reason == "stop"
        assert "".join(entry.token for entry in choice.logprobs.content) == "It is Oslo, END"


def test_a_budget_an_effort_and_the_templates_switch(server: Running) -> None:
    cut = ask(server, extra_body={"thinking_token_budget": 5}).usage.completion_tokens_details.reasoning_tokens
    assert cut == 5
    for off in (
        {"reasoning_effort": "none"},
        {"extra_body": {"enable_thinking": False}},
        {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}},
    ):
        answer = ask(server, **off)
        assert answer.usage.completion_tokens_details.reasoning_tokens == 0
        assert not hasattr(answer.choices[0].message, "reasoning_content")
    assert ask(server, reasoning_effort="high").choices[0].message.reasoning_content == THOUGHT
    with pytest.raises(openai.BadRequestError, match="enable_thinkng"):
        ask(server, extra_body={"chat_template_kwargs": {"enable_thinkng": False}})


def test_a_schema_and_a_forced_call_come_after_the_thought(server: Running) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": NUMBER}}
    answer = ask(server, response_format=form).choices[0]
    assert answer.message.reasoning_content == THOUGHT and json.loads(answer.message.content)["n"] in (1, 2)
    for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
        chosen = ask(server, tools=[WEATHER], tool_choice=choice, logprobs=True).choices[0]
        written, called = "".join(entry.token for entry in chosen.logprobs.content), chosen.message
        assert written.startswith('<call>{"name": "get_weather"')
        assert called.reasoning_content == THOUGHT and called.content is None
        arguments = called.tool_calls[0].function.arguments
        assert json.loads(arguments)["place"] in ("Rome", "Oslo")
        pieces = list(ask(server, tools=[WEATHER], tool_choice=choice, stream=True))
        calls = [call for chunk in pieces for call in chunk.choices[0].delta.tool_calls or ()]
        assert "".join(call.function.arguments for call in calls) == arguments
        assert "".join(getattr(p.choices[0].delta, "reasoning_content", "") for p in pieces) == THOUGHT


def test_a_thought_of_mistrals_after_words_is_none_of_the_content_and_its_calls_are_none() -> None:
    template = TEMPLATE.replace("<think>", "[THINK]").replace("</think>", "[/THINK]")
    script = f"[THINK]Hm.[/THINK]Well, [THINK]<call>{CALL}[/THINK]now.<call>{CALL}"
    running = served(script, kind="special", template=template, tags=("[THINK]", "[/THINK]"))
    try:
        for speculate in (True, False):
            loose = {**WEATHER, "function": {**WEATHER["function"], "strict": None}}
            given: Any = {"tools": [loose], "extra_body": {"speculate": speculate}}
            message = ask(running, **given).choices[0].message
            assert (message.reasoning_content, message.content) == (f"Hm.\n<call>{CALL}", "Well, now.")
            assert len(message.tool_calls) == 1
            deltas = [chunk.choices[0].delta for chunk in ask(running, **given, stream=True)]
            assert "".join(delta.content or "" for delta in deltas) == message.content
            assert "".join(getattr(d, "reasoning_content", None) or "" for d in deltas) == message.reasoning_content
            (call,) = [call for delta in deltas for call in delta.tool_calls or ()]
            assert call.function.arguments == message.tool_calls[0].function.arguments == CALL_ARGUMENTS
    finally:
        running.stop()


def test_a_call_that_a_thought_mentions_is_none() -> None:
    running = served(f"<think><call>{CALL}</think>\n<call>{CALL}")
    try:
        message = ask(running, tools=[WEATHER]).choices[0].message
        assert message.reasoning_content == f"<call>{CALL}" and len(message.tool_calls) == 1 and message.content is None
        only = served(f"<think><call>{CALL}</think>\nNo.")
        assert ask(only, tools=[WEATHER]).choices[0].message.tool_calls is None
        only.stop()
    finally:
        running.stop()


def test_completions_have_the_text_as_it_is() -> None:
    running = served("<think>Hm.</think>So.")
    try:
        done = running.client().completions.create(model="base", prompt="<go>", max_tokens=50)
        assert done.choices[0].text == "<think>Hm.</think>So."
    finally:
        running.stop()


def test_responses_have_an_item_of_the_thought(server: Running) -> None:
    client: Any = server.client()
    whole = client.responses.create(model="base", input="Where?", max_output_tokens=300, reasoning={"effort": "high"})
    Response.model_validate(whole.to_dict(), strict=True)
    thought, said = whole.output
    assert (thought.type, thought.content[0].text, thought.summary) == ("reasoning", THOUGHT, [])
    assert said.content[0].text == whole.output_text == SAID and whole.reasoning.effort == "high"
    details = whole.usage.output_tokens_details
    assert 0 < details.reasoning_tokens < whole.usage.output_tokens
    events = list(client.responses.create(model="base", input="Where?", max_output_tokens=300, stream=True))
    for event in events:
        EVENT.validate_python(event.to_dict())
    assert "".join(e.delta for e in events if e.type == "response.reasoning_text.delta") == THOUGHT
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == SAID
    kinds = list(dict.fromkeys(e.type.removeprefix("response.") for e in events))
    assert kinds[2:6] == ["output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done"]
    assert [item.to_dict() | {"id": ""} for item in events[-1].response.output] == [
        item.to_dict() | {"id": ""} for item in whole.output
    ]
    # back in, as they came
    again = client.responses.create(
        model="base", max_output_tokens=300, input=[*user("Where?"), *whole.output, *user("Sure?")]
    )
    assert again.output_text == SAID


def test_earlier_thoughts_reach_the_template() -> None:
    session = thinking("So.")
    thought = {"role": "assistant", "content": "A.", "reasoning_content": "Hm."}
    for body in (
        {"model": "m", "messages": [*user("a"), thought, *user("b")]},
        {
            "model": "m",
            "messages": [*user("a"), {"role": "assistant", "content": "A.", "reasoning": "Hm."}, *user("b")],
        },
    ):
        prompt = read_chat(json.dumps(body).encode(), Limits()).prompt
        assert "<think>Hm.</think>A." in session.tokenizer.decode(session.encode(prompt), skip_special_tokens=False)
    item = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
    body = {"model": "m", "input": [*user("a"), item, {"role": "assistant", "content": "A."}, *user("b"), item, call]}
    messages = read_responses(json.dumps(body).encode(), Limits()).prompt
    assert messages[1] == thought and messages[3]["reasoning_content"] == "Hm." and messages[3]["tool_calls"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"reasoning_effort": "most"}, "reasoning_effort"),
        ({"thinking_token_budget": -1}, "thinking_token_budget"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"enable_thinking": 1}, "enable_thinking"),
        ({"messages": [{"role": "user", "content": "a", "reasoning_content": "b"}]}, "messages.0.reasoning_content"),
    ],
)
def test_wrong_fields_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        read_chat(json.dumps({"model": "m", "messages": user("a")} | fields).encode(), Limits())
    assert caught.value.param == param


def test_completions_and_responses_refuse_in_their_own_words() -> None:
    with pytest.raises(ApiError) as caught:
        read_completion(b'{"model": "m", "prompt": "a", "reasoning_effort": "low"}', Limits())
    assert caught.value.param == "reasoning_effort"
    with pytest.raises(ApiError) as caught:
        read_responses(b'{"model": "m", "input": "a", "reasoning": {"effort": "most"}}', Limits())
    assert caught.value.param == "reasoning.effort"
    read_responses(b'{"model": "m", "input": "a", "reasoning": {"summary": "auto"}}', Limits())
