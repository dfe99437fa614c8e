"""Answers in messages, as gpt-oss writes them: thoughts, words and calls over the API, drafted and not, streamed and
whole, with grammars and without."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

from streamspec.errors import DataError
from streamspec.prompt.prompt_format import PromptFormat
from tests.serve.api.conftest import CLOCK, WEATHER
from tests.serve.conftest import Running, user
from tests.support.thinking_sessions import thinking

MARKS = ("<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|constrain|>")
TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name + ': ' + t.function.description }}{% endfor %}"
    "{% if reasoning_effort %}{{ reasoning_effort }}{% endif %}{% for m in messages %}{% if m.role != 'assistant' %}"
    "<{{ m.role }}>{{ m.content }}{% elif m.tool_calls %}{% set c = m.tool_calls[0].function %}"
    "{% if m.thinking and m.content %}{{ raise_exception('both') }}{% endif %}"
    "{% if m.thinking or m.content %}<go><|channel|>analysis<|message|>{{ m.thinking or m.content }}<|end|>{% endif %}"
    "<go> to=functions.{{ c.name }}<|channel|>commentary json<|message|>{{ c.arguments | tojson }}"
    "{% else %}<go><|channel|>final<|message|>{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<go>{% endif %}"
)
NEXT = "<|end|><|start|>assistant"
THOUGHT = f"<|channel|>analysis<|message|>Ask to=functions.get_weather, END.{NEXT}"
SAID = f"<|channel|>commentary<|message|>Let me see.{NEXT}"
FINAL = "<|channel|>final<|message|>"
ARGUMENTS: Any = {"place": "Oslo", "unit": "C"}
CALLS = (
    " to=functions.get_weather<|channel|>commentary json<|message|>",
    " to=functions.get_weather<|channel|>commentary <|constrain|>json<|message|>",
    "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>",
    "<|channel|>commentary to=functions.get_weather<|message|>",
)
NUMBER: Any = {"type": "object", "properties": {"n": {"const": 1}}, "required": ["n"], "additionalProperties": False}
ONE_CALL = (
    "{% for m in messages %}{{ m.content or '' }}"
    "{% if m.tool_calls %}{{ m.tool_calls[0].function.name }}{% endif %}{% endfor %}"
)
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": NUMBER}}


Serve = Callable[..., Running]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Makes servers of a model that answers with a script."""
    made = list[Running]()

    def served(script: str, kind: str = "special") -> Running:
        made.append(Running(thinking(script, kind=kind, template=TEMPLATE, tags=MARKS)))
        return made[-1]

    yield served
    for running in made:
        running.stop()


def told(server: Running, **fields: Any) -> tuple[str, str, list[tuple[str, Any]], str]:
    """An answer's thought, content, calls and reason, the same with drafts and without, streamed and whole."""
    given = {"model": "base", "messages": user("Where?"), "max_tokens": 300, "tools": [WEATHER, CLOCK]} | fields
    extra = given.pop("extra_body", {})
    answers = []
    for speculate in (True, False):
        create, body = server.client().chat.completions.create, {"extra_body": extra | {"speculate": speculate}}
        choice = create(**given, **body).choices[0]
        message = choice.message
        calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]
        answers.append((getattr(message, "reasoning_content", ""), message.content or "", calls, choice.finish_reason))
        thought, text, pieces, reason = "", "", dict[int, list[str]](), None
        for chunk in create(**given, **body, stream=True):
            delta, reason = chunk.choices[0].delta, chunk.choices[0].finish_reason
            thought, text = thought + getattr(delta, "reasoning_content", ""), text + (delta.content or "")
            if given["tools"] is openai.NOT_GIVEN:  # else the text holds calls, too
                of_thought = chunk.streamspec.get("reasoning", {"tokens": []})["tokens"]
                shown = (getattr(delta, "reasoning_content", ""), delta.content or "")
                assert ("".join(of_thought), "".join(chunk.streamspec["tokens"])) == shown
            for call in delta.tool_calls or ():
                one = pieces.setdefault(call.index, ["", ""])
                one[0], one[1] = one[0] + (call.function.name or ""), one[1] + (call.function.arguments or "")
        answers.append((thought, text, [(name, arguments) for name, arguments in pieces.values()], reason))
    assert all(answer == answers[0] for answer in answers), answers
    thought, text, calls, reason = answers[0]
    return thought, text, [(name, json.loads(arguments)) for name, arguments in calls], reason


@pytest.mark.parametrize("call", CALLS)
def test_thought_words_and_call_are_told_apart(serve: Serve, call: str) -> None:
    calling = serve(THOUGHT + SAID + call + json.dumps(ARGUMENTS))
    wanted = ("Ask to=functions.get_weather, END.", "Let me see.", [("get_weather", ARGUMENTS)], "tool_calls")
    assert told(calling) == told(calling, response_format=FORMAT, stop=["END"]) == wanted


def test_a_thought_after_words_may_name_a_function(serve: Serve) -> None:
    again = f"<|channel|>analysis<|message|> to=functions.get_weather json, so.{NEXT}"
    server = serve(SAID + again + CALLS[2] + json.dumps(ARGUMENTS))
    wanted = ("to=functions.get_weather json, so.", "Let me see.", [("get_weather", ARGUMENTS)], "tool_calls")
    assert told(server) == wanted
    assert told(server, extra_body={"thinking_token_budget": 3})[0] == "to"


@pytest.mark.parametrize("call", CALLS[:3:2])
def test_forced_calls_begin_after_the_thought_and_keep_to_their_schema(serve: Serve, call: str) -> None:
    server = serve(THOUGHT + call + json.dumps(ARGUMENTS))
    thought = "Ask to=functions.get_weather, END."
    assert told(server, tool_choice="required") == (thought, "", [("get_weather", ARGUMENTS)], "tool_calls")
    clock: Any = {"type": "function", "function": {"name": "clock"}}
    assert told(server, tool_choice=clock) == (thought, "", [("clock", {})], "stop")
    allowed: Any = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [clock]}}
    assert all(name == "clock" for name, _ in told(server, tool_choice=allowed)[2])
    assert told(server, tool_choice="required", reasoning_effort="none")[0] == ""


def test_words_that_spell_a_recipient_are_content_and_schemas_are_the_final_messages(serve: Serve) -> None:
    words = "Write to=functions.get_weather, or a<b, <| to=functions. END <"
    server = serve(THOUGHT + FINAL + words)
    assert told(server) == told(server, tools=[{**CLOCK}]) == ("Ask to=functions.get_weather, END.", words, [], "stop")
    assert json.loads(told(server, response_format=FORMAT)[1]) == {"n": 1}
    assert json.loads(told(server, tools=openai.NOT_GIVEN, response_format=FORMAT)[1]) == {"n": 1}
    budget = told(server, tools=openai.NOT_GIVEN, extra_body={"thinking_token_budget": 3})
    assert budget[0] == "Ask"
    with pytest.raises(openai.BadRequestError, match="reasoning_effort 'minimal'; expected none or low"):
        told(server, reasoning_effort="minimal")


def test_words_beside_a_strict_tool_of_open_keys_may_have_what_json_would_escape(serve: Serve) -> None:
    tool = {**WEATHER, "function": {"strict": True, **WEATHER["function"]}}
    parameters = {key: value for key, value in tool["function"]["parameters"].items() if key != "additionalProperties"}
    tool["function"]["parameters"] = parameters
    words = r"Write \usepackage{a} or C:\users."
    assert told(serve(FINAL + words), tools=[tool])[1] == words
    call = CALLS[0] + json.dumps(ARGUMENTS | {"more": 1})
    assert told(serve(call), tools=[tool])[2] == [("get_weather", ARGUMENTS | {"more": 1})]


def test_pieces_of_several_messages_are_their_text(serve: Serve) -> None:
    server = serve(THOUGHT + SAID + THOUGHT + FINAL + "Hello you<")
    thought = "Ask to=functions.get_weather, END."
    wanted = (f"{thought}\n\n{thought}", "Let me see.\n\nHello you<", [], "stop")
    assert told(server, tools=openai.NOT_GIVEN) == wanted


def test_tags_that_are_no_tokens_are_refused(serve: Serve) -> None:
    server = serve("So.", kind="spelled")
    with pytest.raises(openai.BadRequestError, match="no tokens"):
        told(server)


def call(name: str, number: int) -> Any:
    return {"id": f"id{number}", "type": "function", "function": {"name": name, "arguments": "{}"}}


def test_a_template_of_one_call_in_a_message_shows_several_one_after_another() -> None:
    both = {
        "role": "assistant",
        "content": "Hm",
        "reasoning_content": "Two.",
        "tool_calls": [call("a", 0), call("a", 1)],
    }
    results = [{"role": "tool", "tool_call_id": f"id{i}", "content": f"result {i}"} for i in (1, 0)]
    shown = PromptFormat("chat").render([*user("?"), both, *results], TEMPLATE, tools=[CLOCK])
    one = " to=functions.a<|channel|>commentary json<|message|>{}<tool>result "
    assert shown == f"clock: <user>?<go><|channel|>analysis<|message|>Two.\n\nHm<|end|><go>{one}0<go>{one}1<go>"
    again = [{**both, "content": None, "tool_calls": [call("a", 0), call("a", 0)]}]
    with pytest.raises(DataError, match="leaves out a call of a"):
        PromptFormat("chat").render([*user("?"), *again], TEMPLATE)
    nameless = [{"role": "assistant", "content": None, "tool_calls": [{"function": {"name": n}} for n in "ab"]}]
    for results, order in ((["1", "2"], "a1b2"), (["1 and 2"], "ab1 and 2"), ([], "ab")):
        asked = [*user("?"), *nameless, *({"role": "tool", "content": result} for result in results)]
        shown = PromptFormat("chat").render(asked, ONE_CALL)
        assert shown == f"?{order}"
