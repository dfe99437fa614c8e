"""Tools with the `openai` client: over a tiny model whose template writes calls, and forms of calls as families have
them.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from streamspec.prompt.prompt_format import PromptFormat
from streamspec.runtime import Session, load
from streamspec.serve.errors import ApiError
from streamspec.serve.tools.call_form import CallForm
from streamspec.serve.tools.call_parser import CallParser
from streamspec.serve.tools.checked_grammars import CheckedGrammars
from streamspec.serve.tools.tools import Tools
from tests.serve.api.conftest import CLOCK, WEATHER
from tests.serve.conftest import Running, user
from tests.support.byte_tokenizers import byte_level
from tests.support.served_bundles import CALLS, HEAD, HERMES
from tests.support.thinking_sessions import GO, TEMPLATE, thinking

LLAMA = HERMES.replace("<tool_call>\n", "").replace("\n</tool_call>", "").replace('"arguments"', '"parameters"')
LISTED = HERMES.replace("<tool_call>\n", "[CALLS][").replace("\n</tool_call>", "]")
THINKING = HERMES.replace(
    "{{ m.content or '' }}", "{% if m.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}{{ m.content or '' }}"
)
HERMES_CALL = '<call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
XML = HEAD + CALLS + "<f={{ c.function.name }}>{% endfor %}{% endfor %}|assistant|"


def allowed(mode: str, *names: str) -> Any:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def ask(tool_server: Running, **fields: Any) -> Any:
    given = {"model": "base", "messages": user("Rome?"), "tools": [WEATHER, CLOCK], "max_tokens": 120} | fields
    return tool_server.client().chat.completions.create(**given)


def test_a_named_function_is_called_within_its_schema(tool_server: Running) -> None:
    choice: Any = {"type": "function", "function": {"name": "get_weather"}}
    answer = ask(tool_server, tool_choice=choice)
    (call,) = answer.choices[0].message.tool_calls
    said = json.loads(call.function.arguments)
    assert call.function.name == "get_weather" and call.type == "function" and call.id.isalnum()
    assert said["place"] in ("Rome", "Oslo") and said["unit"] in ("C", "F") and len(said) == 2
    assert answer.choices[0].message.content is None and answer.choices[0].finish_reason == "stop"
    assert answer.streamspec["drafted_tokens"] > 20
    plain = ask(tool_server, tool_choice=choice, extra_body={"speculate": False})
    assert plain.choices[0].message.tool_calls[0].function == call.function
    name, arguments, pieces = "", "", 0
    for chunk in ask(tool_server, tool_choice=choice, stream=True):
        assert not chunk.choices[0].delta.content
        for piece in chunk.choices[0].delta.tool_calls or ():
            assert piece.index == 0
            name += piece.function.name or ""
            arguments += piece.function.arguments
            pieces += 1
    assert (name, arguments) == ("get_weather", call.function.arguments) and pieces > 2


def test_a_required_call_is_of_one_of_the_tools(tool_server: Running) -> None:
    answer = ask(tool_server, tool_choice="required", n=2, seed=3, temperature=2)
    for choice in answer.choices:
        (call,) = choice.message.tool_calls
        said = json.loads(call.function.arguments)
        assert said == {} if call.function.name == "clock" else {"place", "unit"} == said.keys()
        assert choice.finish_reason == "tool_calls"


def test_a_call_cut_short_has_the_arguments_so_far(tool_server: Running) -> None:
    choice: Any = {"type": "function", "function": {"name": "get_weather"}}
    whole = ask(tool_server, tool_choice=choice).choices[0].message.tool_calls[0].function.arguments
    head = len('<tool_call>\n{"name": "get_weather", "arguments": ')
    for tokens in (head - 5, head + 9, head + len(whole), head + len(whole) + 1):
        answer = ask(tool_server, tool_choice=choice, max_tokens=tokens).choices[0]
        got = "".join(call.function.arguments for call in answer.message.tool_calls or ())
        assert got == whole[: max(0, tokens - head)] and answer.finish_reason == "length"


def test_a_call_that_a_stop_string_cuts_is_no_call_to_make(tool_server: Running) -> None:
    cut = ask(tool_server, tools=[WEATHER], tool_choice="required", stop=['"unit"']).choices[0]
    assert cut.finish_reason == "stop" and cut.message.tool_calls[0].function.arguments.endswith(", ")


def test_the_clients_own_example_of_a_conversation_with_tools(tool_server: Running) -> None:
    """Ask, call, send the result back, ask again; and a function made of a pydantic model, streamed by its helper."""
    messages: list[Any] = user("What is the weather like in Rome?")
    first = ask(tool_server, messages=messages, tool_choice="required").choices[0].message
    messages.append(first)
    for call in first.tool_calls:
        messages.append({"role": "tool", "tool_call_id": call.id, "content": json.dumps({"degrees": 20})})
    second = ask(tool_server, messages=messages, tool_choice="none", max_tokens=8)
    assert second.choices[0].message.tool_calls is None and second.choices[0].message.content is not None

    class Place(BaseModel):
        indoors: bool

    class Walk(BaseModel):
        place: Place
        again: bool

    tool = openai.pydantic_function_tool(Walk)
    with tool_server.client().chat.completions.stream(
        model="base",
        messages=user("Walk."),
        tools=[tool],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=200,
    ) as stream:
        parsed = stream.get_final_completion().choices[0].message.tool_calls
    assert parsed and isinstance(parsed[0].function.parsed_arguments, Walk)


@pytest.mark.parametrize(
    "call",
    [
        '<call>{"name": "NAME", "arguments": ARGUMENTS, "id": "CALL_ID"}',
        "<call>NAME<id>CALL_ID<args>ARGUMENTS",
    ],
)
def test_a_forced_call_has_the_id_that_the_model_wrote_until_it_is_taken(call: str) -> None:
    shown = call.replace("NAME", "{{ c.function.name }}").replace("CALL_ID", "{{ c.id }}")
    template = TEMPLATE.replace(HERMES_CALL, shown.replace("ARGUMENTS", "{{ c.function.arguments | tojson }}"))
    arguments = '{"place": "Oslo", "unit": "C"}'
    script = call.replace("NAME", "get_weather").replace("CALL_ID", "Vv7vODy9m").replace("ARGUMENTS", arguments)
    running = Running(thinking(script, template=template, context=1000))
    try:
        session = running.server.pool.first
        choice: Any = {"type": "function", "function": {"name": "get_weather"}}
        for chosen in ("required", choice):
            message = ask(running, tool_choice=chosen, parallel_tool_calls=False).choices[0].message
            (made,) = message.tool_calls
            assert (made.id, made.function.arguments) == ("Vv7vODy9m", arguments)
            streamed = ask(running, tool_choice=chosen, parallel_tool_calls=False, stream=True)
            pieces = [piece for chunk in streamed for piece in chunk.choices[0].delta.tool_calls or ()]
            assert [piece.id for piece in pieces if piece.id] == ["Vv7vODy9m"]
            assert "".join(piece.function.arguments for piece in pieces) == arguments
        answered: list[Any] = [
            *user("Rome?"), message.to_dict(), {"role": "tool", "tool_call_id": made.id, "content": "4 C"},
        ]  # fmt: skip
        told = session.tokenizer.decode(session.encode(answered, tools=[WEATHER, CLOCK]), skip_special_tokens=False)
        assert GO + script in told
        (again,) = ask(running, messages=answered, tool_choice=choice).choices[0].message.tool_calls
        assert again.id != made.id and len(again.id) == 9
    finally:
        running.stop()


def test_tools_that_make_no_sense_are_refused_by_name(tool_server: Running, running: Any) -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tools": [CLOCK, CLOCK]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"tool_choice": allowed("auto", "get_weather", "other")}, "tool_choice"),
        ({"tool_choice": {"type": "custom"}}, "tool_choice.type"),
        ({"extra_body": {"grammar": {"choice": ["a"]}}}, "tools"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "tool", "content": "x", "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}]}]}, "messages.0.tool_calls"),
        ({"messages": [{"role": "user", "content": "x", "tool_call_id": "a"}]}, "messages.0.tool_call_id"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "nonsense"}}}],
          "tool_choice": "required"}, "tools.0"),
    ]  # fmt: skip
    for fields, param in refused:
        with pytest.raises(openai.BadRequestError) as caught:
            ask(tool_server, **fields)
        assert caught.value.param == param, fields


def test_of_many_tools_the_one_with_the_wrong_schema_is_named() -> None:
    wrong: Any = {"type": "object", "properties": {"a": {"type": "strnig"}}}
    tools: Any = [{"type": "function", "function": {"name": f"f{i}"}} for i in range(32)]
    tools[17]["function"]["parameters"] = wrong
    with pytest.raises(ApiError, match="the parameters of the tool f17: .*strnig") as caught:
        Tools(tools, forced=True).grammar(CallForm.of(fake(HERMES)), CheckedGrammars())
    assert caught.value.param == "tools.17"


def fake(template: str) -> Any:
    tokenizer = byte_level()
    return SimpleNamespace(
        manifest=SimpleNamespace(prompt_format=PromptFormat("chat"), model=SimpleNamespace(eos_token_ids=(0,))),
        template=template,
        tokenizer=tokenizer,
        special_tokens=lambda: {"eos_token": "<eos>"},
    )


def written(template: str) -> tuple[str, str, str | None, str, str]:
    form = CallForm.of(fake(template))
    return form.prefix, form.suffix, form.between, form.begin, form.field


def test_the_template_says_how_calls_are_written() -> None:
    tagged = (
        '<tool_call>\n{"name": "',
        "}\n</tool_call>",
        '}\n</tool_call><tool_call>\n{"name": "',
        "<tool_call>",
        "arguments",
    )
    for template in (HERMES, THINKING, OPENED):
        assert written(template) == tagged
    assert written(LLAMA) == ('{"name": "', "}", '}{"name": "', "", "parameters")
    lines = HERMES.replace("|{{ m.role }}|", "|{{ m.role }}|\n").replace("|assistant|", "|assistant|\n{# </think> #}")
    for template in (lines, lines.replace("{# </think> #}", "<think>\n")):  # whose turns are without the thoughts
        assert CallForm.of(fake(template)).prefix.lstrip() == tagged[0]
    assert CallForm.of(fake(lines)).prefix == tagged[0]
    assert written(LISTED) == ('[CALLS][{"name": "', "}]", '}][CALLS][{"name": "', "[CALLS][", "arguments")
    for without in (XML, "{% for m in messages %}{{ m.content }}{% endfor %}", HERMES.replace("tools or []", "[]")):
        with pytest.raises(ApiError) as caught:
            CallForm.of(fake(without))
        assert caught.value.param == "tools" and caught.value.code == "unsupported_value"
        assert "probe" not in caught.value.message


ONE = '{"name": "get_weather", "arguments": {"place": "Rome"}}'
TWO = '{"name": "clock", "arguments": {}}'
UNKNOWN = '<tool_call>\n{"name": "other", "arguments": {}}'
BOTH = [("get_weather", '{"place": "Rome"}'), ("clock", "{}")]
MENTION = f"I could <tool_call>{ONE}</tool_call> but asking is better"
OTHER = '{"name": "other", "arguments": {"a": "</think><tool_call>"}}'
OPENED = HERMES.replace(
    "{% if add_generation_prompt %}|assistant|", "{% if add_generation_prompt %}|assistant|<think>\n"
)
OPENED = OPENED.replace("|{{ m.role }}|", "|{{ m.role }}|{% if m.role == 'assistant' %}<think>\n</think>{% endif %}")
EXACT = (
    '{"a":1e400, "b": 0.10000000000000000000000000001 ,"c":1E5,"d":-0.0,"e":' + "9" * 5000 + ',"f":"\\ud800\\u00e9é"}'
)
QUOTED = json.dumps('{"a":1e400}')


@pytest.mark.parametrize("step", [1, 3, 1000])
@pytest.mark.parametrize(
    ("template", "text", "content", "calls"),
    [
        (HERMES, "Just text < and <tool", "Just text < and <tool", []),
        (HERMES, f"Let me see.\n<tool_call>\n{ONE}\n</tool_call>", "Let me see.", BOTH[:1]),
        (HERMES, f"<tool_call>\n{ONE}\n</tool_call>\n<tool_call>{TWO}</tool_call>", "", BOTH),
        (HERMES, UNKNOWN, UNKNOWN, []),
        (HERMES, '<tool_call>{"name": "clock", "argu', '<tool_call>{"name": "clock", "argu', []),
        (LLAMA, ONE.replace("arguments", "parameters"), "", BOTH[:1]),
        (LLAMA, f"{ONE} or {TWO}".replace("arguments", "parameters"), "", BOTH[:1]),
        (LLAMA, " So " + ONE, " So " + ONE, []),
        (LLAMA, '{"a": 1} is JSON', '{"a": 1} is JSON', []),
        (LISTED, f"[CALLS] [{ONE}, {TWO}]", "", BOTH),
        (LISTED, "As in [1].\n", "As in [1].\n", []),
        (LISTED, f"As in [1] [CALLS][{TWO}] and so on", "As in [1]", BOTH[1:]),
        (HERMES, '<tool_call>\n{"name": "clock", "arguments": {"a": NaN}}', ..., []),
        (THINKING, f"<think>\nHm.\n</think>\n\n<tool_call>\n{ONE}\n</tool_call>", "<think>\nHm.\n</think>", BOTH[:1]),
        # a call that a thought mentions is none
        (HERMES, f"<think>{MENTION}</think><tool_call>{TWO}</tool_call>", f"<think>{MENTION}</think>", BOTH[1:]),
        (HERMES, f"<think>{MENTION}", ..., []),
        (HERMES, f"{MENTION}</think>\n<tool_call>{TWO}</tool_call>", f"{MENTION}</think>", BOTH[1:]),
        (HERMES, f"[THINK]{MENTION}[/THINK] So. <tool_call>{TWO}", f"[THINK]{MENTION}[/THINK] So.", BOTH[1:]),
        (HERMES, f"<tool_call>{TWO}</tool_call><think>{MENTION}</think>", "", BOTH[1:]),
        (
            LLAMA,
            f"<think>{OTHER}</think> " + TWO.replace("arguments", "parameters"),
            f"<think>{OTHER}</think>",
            BOTH[1:],
        ),
        (LLAMA, f"Hm. {OTHER}</thought> " + TWO.replace("arguments", "parameters"), f"Hm. {OTHER}</thought>", BOTH[1:]),
        # a call of an unknown tool stays text, and so does what is no JSON
        (HERMES, f"{UNKNOWN}</tool_call>\n<tool_call>{ONE}</tool_call>", f"{UNKNOWN}</tool_call>", BOTH[:1]),
        (HERMES, f"<tool_call>{OTHER}</tool_call><tool_call>{ONE}", f"<tool_call>{OTHER}</tool_call>", BOTH[:1]),
        (
            HERMES,
            f"So.<tool_call>{ONE}</tool_call>{UNKNOWN}</tool_call><tool_call>{TWO}</tool_call>",
            f"So.{UNKNOWN}</tool_call>",
            BOTH,
        ),
        (
            HERMES,
            f"<tool_call>{ONE}</tool_call><tool_call>{{'name': '<tool_call>{TWO}'}}",
            f"<tool_call>{{'name': '<tool_call>{TWO}'}}",
            BOTH[:1],
        ),
        (LISTED, f"[CALLS][{OTHER}, {ONE}, {OTHER}, {TWO}]", f"[CALLS][{OTHER},{OTHER},", BOTH),
        (HERMES, f'<tool_call>{TWO[:-1]}, "name": "get_weather"}}', ..., []),
        # arguments are the model's own text
        (HERMES, f'<tool_call>{{"arguments" : {EXACT} , "name":"clock"}}', "", [("clock", EXACT)]),
        (HERMES, f'<tool_call>{{"name": "clock", "arguments": {QUOTED}}}', "", [("clock", '{"a":1e400}')]),
        (HERMES, '<tool_call>{"name": "clock", "arguments": "[1]"}', ..., []),
        (HERMES, '<tool_call>{"name": "clock", "arguments": "{\\"a\\": \\"\\ud800\\"}"}', ..., []),
    ],
)
def test_calls_are_parsed_as_the_text_comes(template: str, text: str, content: str, calls: Any, step: int) -> None:
    tools, form = Tools([WEATHER, CLOCK]), CallForm.of(fake(template))
    parser, said, pieces = CallParser(form, tools), "", list[Any]()
    for i in range(0, len(text), step):
        more, called = parser.push(text[i : i + step], i + step >= len(text))
        said, pieces = said + more, pieces + called
    assert said == (text if content is ... else content) and [piece["index"] for piece in pieces] == [
        *range(len(calls))
    ]
    for found in (parser.calls, pieces):
        assert [(c["function"]["name"], c["function"]["arguments"]) for c in found] == calls
    assert parser.reason("stop") == ("tool_calls" if calls else "stop") and parser.reason("length") == "length"
    single = CallParser(form, Tools([WEATHER, CLOCK], parallel=False))
    single.push(text, True)
    assert len(single.calls) == min(1, len(calls))


def test_an_answer_without_a_call_is_its_text(tool_server: Running, tool_bundle: Path) -> None:
    session: Session = load(tool_bundle, threads=1)
    shown = {name: value for name, value in WEATHER["function"].items() if name != "strict"}  # no template's affair
    tools = [WEATHER | {"function": shown}, CLOCK]
    known = session.generate(session.encode(user("Rome?"), tools=tools), max_new_tokens=20).text
    answer = ask(tool_server, max_tokens=20).choices[0]
    assert answer.message.content == known and answer.message.tool_calls is None
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in ask(tool_server, max_tokens=20, stream=True))
    assert streamed == known
