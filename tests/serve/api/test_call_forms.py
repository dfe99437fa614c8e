"""Calls in the forms of the families: found in a template, written by the grammar, read from an answer.

The templates here write calls as the published ones do, without the rest of these.
"""

from __future__ import annotations

import json
import re
from itertools import product
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest
from tokenizers import AddedToken

from streamspec.prompt.prompt_format import PromptFormat
from streamspec.runtime.sampling.grammar_state import GrammarState
from streamspec.runtime.text.grammar import Vocabulary
from streamspec.serve.errors import ApiError
from streamspec.serve.tools.call_form import CallForm
from streamspec.serve.tools.call_parser import CallParser, arguments_of
from streamspec.serve.tools.checked_grammars import CheckedGrammars
from streamspec.serve.tools.tools import Tools
from tests.support.byte_tokenizers import byte_level

HEAD = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}<|{{ m.role }}|>\n"
TAIL = "{{ m.content or '' }}{{ calls(m) }}<eos>{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"


def template(call: str, first: str = "", last: str = "", between: str = "") -> str:
    """Of a macro that writes the call `c`."""
    loop = (
        "{% for x in m.tool_calls or [] %}{% set c = x.function %}{% if loop.first %}" + first + "{% else %}" + between
        + "{% endif %}" + call + "{% if loop.last %}" + last + "{% endif %}{% endfor %}"
    )  # fmt: skip
    return "{% macro calls(m) %}" + loop + "{% endmacro %}" + HEAD + TAIL


JSON = "{{ c.arguments | tojson }}"
MISTRAL = '{"name": "{{ c.name }}", "arguments": ' + JSON
MISTRAL_ID = MISTRAL + ', "id": "{{ x.id }}"}'
XML = (
    "<tool_call>\n<function={{ c.name }}>\n{% for k, v in c.arguments | items %}<parameter={{ k }}>\n"
    "{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>"
)
GLM = (
    "<tool_call>{{ c.name }}\n{% for k, v in c.arguments | items %}<arg_key>{{ k }}</arg_key>\n"
    "<arg_value>{{ v if v is string else v | tojson }}</arg_value>\n{% endfor %}</tool_call>"
)
MINIMAX = (
    '<invoke name="{{ c.name }}">\n{% for k, v in c.arguments | items %}<parameter name="{{ k }}">'
    "{{ v if v is string else v | tojson }}</parameter>\n{% endfor %}</invoke>\n"
)
LINES = (  # what ends a value ends in a blank
    "<call>{{ c.name }}{% for k, v in c.arguments | items %}<p={{ k }}>{{ v if v is string else v | tojson }}</p>\n"
    "{% endfor %}</call>"
)
GEMMA = (
    "{% macro v(x) %}{% if x is string %}<|\"|>{{ x }}<|\"|>{% elif x is mapping %}{ {%- for k, y in x | dictsort %}"
    "{{ ',' if not loop.first }}{{ k }}:{{ v(y) }}{% endfor %}}{% elif x is sequence %}[{% for y in x %}"
    "{{ ',' if not loop.first }}{{ v(y) }}{% endfor %}]{% else %}{{ x | tojson }}{% endif %}{% endmacro %}"
)  # fmt: skip
FAMILIES: dict[str, tuple[str, list[str]]] = {
    "hermes": (
        template('<tool_call>\n{"name": "{{ c.name }}", "arguments": ' + JSON + "}\n</tool_call>", between="\n"),
        ["<eos>"],
    ),
    "llama": (template('{"name": "{{ c.name }}", "parameters": ' + JSON + "}"), []),
    "mistral 2": (template(MISTRAL + "}", "[TOOL_CALLS] [", "]", ", "), ["[TOOL_CALLS]"]),
    "mistral 3": (template(MISTRAL_ID, "[TOOL_CALLS] [", "]", ", "), ["[TOOL_CALLS]"]),
    "mistral 7": (template(MISTRAL_ID, "[TOOL_CALLS][", "]", ", "), ["[TOOL_CALLS]"]),
    "mistral 11": (
        template("[TOOL_CALLS]{{ c.name }}[CALL_ID]{{ x.id }}[ARGS]" + JSON),
        ["[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"],
    ),
    "mistral 13": (template("[TOOL_CALLS]{{ c.name }}[ARGS]" + JSON), ["[TOOL_CALLS]", "[ARGS]"]),
    "deepseek": (
        template(
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ c.name }}\n```json\n" + JSON + "\n```<｜tool▁call▁end｜>",
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            "\n",
        ),
        ["<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"],
    ),
    "deepseek 3.1": (
        template(
            "<｜tool▁call▁begin｜>{{ c.name }}<｜tool▁sep｜>" + JSON + "<｜tool▁call▁end｜>",
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
        ),
        [],
    ),
    "qwen coder": (template(XML, between="\n"), []),
    "glm": (template(GLM, between="\n"), ["<tool_call>"]),
    "minimax": (template(MINIMAX, "<minimax:tool_call>\n", "</minimax:tool_call>"), []),
    "tags in lines": (template(LINES, between="\n"), []),
    "gemma 4": (
        GEMMA + template("<|tool_call>call:{{ c.name }}{{ v(c.arguments) }}<tool_call|>"),
        ["<|tool_call>", "<tool_call|>", '<|"|>'],
    ),
}  # fmt: skip
PLACE: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {
                "days": {"anyOf": [{"type": "integer", "minimum": 1, "maximum": 7}, {"type": "null"}]},
                "place": {"type": "string"},
                "unit": {"$ref": "#/$defs/unit"},
                "words": {"type": "array", "items": {"type": "string"}, "maxItems": 2},
            },
            "required": ["days", "place", "unit"],
            "additionalProperties": False,
            "$defs": {"unit": {"enum": ["C", "F"]}},
        },
    },
}
CLOCK: Any = {"type": "function", "function": {"name": "clock"}}
FIRST = {"days": None, "place": 'a "quoted" </x> name', "unit": "C"}
SECOND = {"days": 3, "place": "é\nthen 7", "unit": "F", "words": ["a", "b, c"]}


def family(name: str) -> Any:
    """A session's part that forms are found in, with special tokens as a family has them."""
    written, special = FAMILIES[name]
    tokenizer = byte_level()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    return SimpleNamespace(
        manifest=SimpleNamespace(prompt_format=PromptFormat("chat"), model=SimpleNamespace(eos_token_ids=(0,))),
        template=written,
        tokenizer=tokenizer,
        special_tokens=lambda: {"eos_token": "<eos>"},
    )


def answer_of(session: Any, *calls: tuple[str, Any]) -> str:
    """Renders an answer of calls by the template, without its end."""
    asked = {"role": "user", "content": "?"}
    made = [
        {"id": f"abcdefgh{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(calls)
    ]
    layout, specials = session.manifest.prompt_format, session.special_tokens()
    before = layout.render([asked], session.template, specials, tools=[PLACE, CLOCK])
    messages = [asked, {"role": "assistant", "content": None, "tool_calls": made}]
    after = layout.render(messages, session.template, specials, tools=[PLACE, CLOCK], add_generation_prompt=False)
    assert after.startswith(before)
    return str(after[len(before) :].removesuffix("<eos>"))


def allows(state: GrammarState, tokens: list[int]) -> bool:
    """Tells whether a grammar admits all of a text, and its end."""
    for i, token in enumerate(tokens):
        if not state.after(tuple(tokens[:i])).mask[token]:
            return False
    return bool(state.after(tuple(tokens)).mask[0])


def read(session: Any, tools: Tools, text: str, step: int) -> tuple[str, list[Any], list[Any], CallParser]:
    parser, said, pieces = CallParser(CallForm.of(session), tools), "", list[Any]()
    for i in range(0, len(text), step):
        more, called = parser.push(text[i : i + step], i + step >= len(text))
        said, pieces = said + more, pieces + called
    joined: dict[int, list[str]] = {}
    for piece in pieces:
        one = joined.setdefault(piece["index"], ["", ""])
        one[0] += piece["function"].get("name", "")
        one[1] += piece["function"]["arguments"]
    whole = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in parser.calls]
    assert [(name, json.loads(arguments)) for name, arguments in joined.values()] == whole
    return said, whole, pieces, parser


@pytest.mark.parametrize("name", FAMILIES)
def test_a_familys_own_calls_are_read_and_admitted_by_the_grammar_of_forced_ones(name: str) -> None:
    session, tools = family(name), Tools([PLACE, CLOCK], forced=True)
    form = CallForm.of(session)
    grammar = tools.grammar(form, CheckedGrammars())
    vocabulary = Vocabulary(session.tokenizer, session.tokenizer.get_vocab_size(), (0,))
    for calls in (
        [("get_weather", FIRST)],
        [("clock", {})],
        [("get_weather", SECOND), ("clock", {}), ("get_weather", FIRST)],
    ):
        text = answer_of(session, *calls)
        tokens = session.tokenizer.encode(text, add_special_tokens=False).ids
        assert allows(vocabulary.start(grammar), tokens), text
        for forced in (tools, Tools([PLACE, CLOCK])):
            for step in (1, 2, 7, 1000):
                said, found, _, parser = read(session, forced, text, step)
                assert (said, found) == ("", calls), (step, forced.forced)
                assert parser.reason("stop") == "tool_calls"
    wrong = answer_of(session, ("get_weather", FIRST | {"days": 9}))
    assert not allows(vocabulary.start(grammar), session.tokenizer.encode(wrong, add_special_tokens=False).ids)
    single = Tools([PLACE, CLOCK], forced=True, parallel=False).grammar(form, CheckedGrammars())
    tokens = session.tokenizer.encode(answer_of(session, ("clock", {}), ("clock", {})), add_special_tokens=False).ids
    assert not allows(vocabulary.start(single), tokens)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "llama"])
def test_words_before_a_call_are_content_and_the_grammar_begins_with_the_call(name: str) -> None:
    session, tools = family(name), Tools([PLACE, CLOCK], strict=frozenset({"get_weather"}))
    call = answer_of(session, ("get_weather", SECOND))
    for step in (1, 3, 1000):
        said, found, _, _ = read(session, tools, "Let me [see] <it>: " + call, step)
        assert (said, found) == ("Let me [see] <it>:", [("get_weather", SECOND)])
    vocabulary = Vocabulary(session.tokenizer, session.tokenizer.get_vocab_size(), (0,))
    grammar = tools.grammar(CallForm.of(session), CheckedGrammars())
    ids = [session.tokenizer.encode("Well. " + text, add_special_tokens=False).ids for text in ("", call)]
    assert all(allows(vocabulary.start(grammar), tokens) for tokens in ids)
    wrong = "Well. " + answer_of(session, ("get_weather", FIRST | {"unit": "K"}))
    assert not allows(vocabulary.start(grammar), session.tokenizer.encode(wrong, add_special_tokens=False).ids)
    for strict in (frozenset[str](), tools.strict):  # of a function that may not be called, too
        only = Tools([PLACE, CLOCK], callable=("clock",), strict=strict)
        limited = only.grammar(CallForm.of(session), CheckedGrammars())
        assert not allows(vocabulary.start(limited), ids[1]) and allows(vocabulary.start(limited), ids[0])


def test_a_thought_after_words_is_read_alike_wherever_its_text_is_cut() -> None:
    """JSON after words is no call in this form."""
    session, text = family("llama"), 'Well.<think>Hm</think>{"name": "clock", "parameters": {}}'
    assert all(read(session, Tools([CLOCK]), text, step)[:2] == (text, []) for step in (1, 3, 1000))


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "llama"])
def test_an_answer_keeps_to_its_format_or_calls(name: str) -> None:
    session = family(name)
    form: Any = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
    grammar = Tools([PLACE, CLOCK], content=form).grammar(CallForm.of(session), CheckedGrammars())
    vocabulary = Vocabulary(session.tokenizer, session.tokenizer.get_vocab_size(), (0,))
    for text, right in (('{"a": 1}', True), (answer_of(session, ("clock", {})), True), ("Words", False), ("{}", False)):
        tokens = session.tokenizer.encode(text, add_special_tokens=False).ids
        assert allows(vocabulary.start(grammar), tokens) == right, text


NO_IDS = (
    '[{"name": "get_weather", "arguments": {"days": 5, "place": "{[}] ä", "unit": "F"}}, '
    '{"name": "clock", "arguments": {}}]'
)
IDS = NO_IDS.replace('"F"}}', '"F"}, "id": "abcdefghi"}').replace("{}}]", '{}, "id": "ABCDEFGH1"}]')
OF_MISTRAL = {  # what mistral-common 1.13 writes of CALLED for each version of its tokenizers, ids left out or not
    "mistral 2": ("[TOOL_CALLS] " + NO_IDS,),
    "mistral 3": ("[TOOL_CALLS] " + IDS, "[TOOL_CALLS] " + NO_IDS),
    "mistral 7": ("[TOOL_CALLS]" + IDS, "[TOOL_CALLS]" + NO_IDS),
    "mistral 11": (
        '[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]{"days": 5, "place": "{[}] ä", "unit": "F"}'
        "[TOOL_CALLS]clock[CALL_ID]ABCDEFGH1[ARGS]{}",
        '[TOOL_CALLS]get_weather[ARGS]{"days": 5, "place": "{[}] ä", "unit": "F"}[TOOL_CALLS]clock[ARGS]{}',
    ),
    "mistral 13": (
        '[TOOL_CALLS]get_weather[ARGS]{"days": 5, "place": "{[}] ä", "unit": "F"}[TOOL_CALLS]clock[ARGS]{}',
    ),
}
CALLED = [("get_weather", '{"days": 5, "place": "{[}] ä", "unit": "F"}'), ("clock", "{}")]
CALL_IDS = ["abcdefghi", "ABCDEFGH1"]


@pytest.mark.parametrize("name", OF_MISTRAL)
def test_mistrals_calls_are_read_as_mistral_common_reads_them_wherever_their_text_is_cut(name: str) -> None:
    session, tools = family(name), Tools([PLACE, CLOCK])
    form, forced = CallForm.of(session), Tools([PLACE, CLOCK], forced=True)
    vocabulary = Vocabulary(session.tokenizer, session.tokenizer.get_vocab_size(), (0,))
    state = vocabulary.start(forced.grammar(form, CheckedGrammars()))
    for words, text in product(("", "Let me see:"), OF_MISTRAL[name]):
        has_ids = CALL_IDS[0] in text
        admitted = allows(state, session.tokenizer.encode(text, add_special_tokens=False).ids)
        assert admitted == (has_ids or name not in ("mistral 3", "mistral 7"))
        for given, cut in product((tools, forced) if admitted and not words else (tools,), range(len(words + text))):
            parser = CallParser(form, given)
            said, first = parser.push((words + text)[:cut], False)
            more, second = parser.push((words + text)[cut:], True)
            calls = [(call["function"]["name"], call["function"]["arguments"]) for call in parser.calls]
            assert (said + more, calls) == (words, CALLED), cut
            ids = [call["id"] for call in parser.calls]
            assert ids == [piece["id"] for piece in first + second if "id" in piece]
            assert (ids == CALL_IDS) == has_ids and all(re.fullmatch("[A-Za-z0-9]{9}", i) for i in ids)


@pytest.mark.parametrize("name", ["mistral 3", "mistral 7", "mistral 11"])
def test_an_id_that_another_call_has_already_is_a_new_one(name: str) -> None:
    form, text = CallForm.of(family(name)), OF_MISTRAL[name][0]
    for forced, twice in product((False, True), (False, True)):
        tools = Tools([PLACE, CLOCK], forced=forced, ids=frozenset(() if twice else CALL_IDS[:1]))
        parser = CallParser(form, tools)
        parser.push(text.replace(CALL_IDS[1], CALL_IDS[not twice]), True)
        first, second = (call["id"] for call in parser.calls)
        assert first != second and (first == CALL_IDS[0]) == twice and (second == CALL_IDS[1]) != twice


@pytest.mark.parametrize("name", ["mistral 3", "mistral 7"])
def test_a_forced_call_whose_id_comes_last_is_streamed_with_it_and_cut_short_without(name: str) -> None:
    form, text = CallForm.of(family(name)), OF_MISTRAL[name][0]
    ends = [text.index(call_id) + len(call_id) + 1 for call_id in CALL_IDS]
    for cut in range(len(text)):
        parser = CallParser(form, Tools([PLACE, CLOCK], forced=True))
        pieces = parser.push(text[:cut], False)[1]
        assert [piece["id"] for piece in pieces] == [i for i, end in zip(CALL_IDS, ends, strict=True) if end <= cut]
        pieces += parser.push("", True)[1]
        assert [{k: v for k, v in piece.items() if k != "index"} for piece in pieces] == parser.calls
        if cut < ends[0] or cut >= ends[1]:
            assert parser.reason("stop") == ("stop" if cut < ends[0] else "tool_calls")


def closed(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


NODE = {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}}}
SHAPES: dict[str, tuple[Any, Any, Any]] = {  # parameters, arguments that satisfy them, others that do not
    "no value of its type": (closed(a={"type": "integer", "enum": ["1", 2]}), {"a": 2}, {"a": "1"}),
    "bounds beside a list": (closed(a={"enum": ["x", "yes"], "minLength": 2}), {"a": "yes"}, {"a": "x"}),
    "choices beside a type": (
        closed(a={"type": "string", "anyOf": [{"minLength": 3}, {"const": "q"}]}),
        {"a": "q"},
        {"a": "xy"},
    ),
    "joined": (closed(a={"allOf": [{"type": "string"}, {"maxLength": 2}]}), {"a": "xy"}, {"a": "xyz"}),
    "denied": ({"properties": {"a": False, "b": {"type": "integer"}}, "required": ["b"]}, {"b": 1}, {"a": "x", "b": 1}),
    "no property": ({"type": "object", "required": ["a"], "additionalProperties": {"type": "integer"}}, {"a": 1}, {}),
    "tuple": (closed(a={"prefixItems": [{"const": 1}], "items": False, "type": "array"}), {"a": [1]}, {"a": [1, 1]}),
    "recursive": (
        closed(a={"$ref": "#/$defs/node"}) | {"$defs": {"node": NODE}},
        {"a": {"next": {"next": None}}},
        {"a": {"next": 1}},
    ),
    "escaped": (closed(a={"$ref": "#/$defs/x~1y"}) | {"$defs": {"x/y": {"type": "integer"}}}, {"a": 1}, {"a": "x"}),
    "annotations": (
        closed(a={"type": "string", "format": "own", "optional": True}) | {"optional": [], "$comment": "c"},
        {"a": "x"},
        {},
    ),
    "beside a reference": (
        closed(a={"$ref": "#/$defs/s", "maxLength": 2}) | {"$defs": {"s": {"type": "string"}}},
        {"a": "xy"},
        {"a": "xyz"},
    ),
    "listed by a reference": (
        {"$ref": "#/$defs/p", "$defs": {"p": closed(a={"$ref": "#/$defs/e"}), "e": {"enum": ["1", 2]}}},
        {"a": "1"},
        {"a": "3"},
    ),
    "listed in a choice": (
        closed(a={"anyOf": [{"enum": ["7", 8]}, {"type": "integer", "maximum": 6}, {"type": "null"}]}),
        {"a": "7"},
        {"a": "9"},
    ),
    "lists of lists": (
        closed(a={"$ref": "#/$defs/l"}) | {"$defs": {"l": {"type": "array", "items": {"$ref": "#/$defs/l"}}}},
        {"a": [[], [[]]]},
        {"a": [1]},
    ),
    "one choice": (closed(a={"oneOf": [{"type": "integer"}]}), {"a": 1}, {"a": "x"}),
    "objects alone": ({**closed(a={"type": "integer"}), "type": ["object", "null"]}, {"a": 1}, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", ["hermes", "qwen coder", "gemma 4"])
@pytest.mark.parametrize("shape", SHAPES)
def test_arguments_keep_to_schemas_of_every_shape_in_each_way_to_write_them(name: str, shape: str) -> None:
    schema, right, wrong = SHAPES[shape]
    session, tool = family(name), {"type": "function", "function": {"name": "get_weather", "parameters": schema}}
    assert jsonschema.Draft202012Validator(schema).is_valid(right) and not jsonschema.Draft202012Validator(
        schema
    ).is_valid(wrong)
    tools = Tools([tool], forced=True)
    grammar = tools.grammar(CallForm.of(session), CheckedGrammars())
    vocabulary = Vocabulary(session.tokenizer, session.tokenizer.get_vocab_size(), (0,))
    for arguments in (right, wrong):
        text = answer_of(session, ("get_weather", arguments))
        tokens = session.tokenizer.encode(text, add_special_tokens=False).ids
        assert allows(vocabulary.start(grammar), tokens) == (arguments is right), text
    assert read(session, tools, answer_of(session, ("get_weather", right)), 3)[1] == [("get_weather", right)]


STYLED = ["qwen coder", "glm", "minimax", "tags in lines", "gemma 4"]
ANY = {"b": 3, "c": {"d": ["e", None, 1.5], "g": {}}, "l": [], "long name": "<b>\n", "place": "x"}


def admits(name: str, tools: Tools, *texts: str) -> list[bool]:
    """Whether the grammar of the tools admits each of these answers."""
    session = family(name)
    vocabulary = Vocabulary(session.tokenizer, session.tokenizer.get_vocab_size(), (0,))
    state = vocabulary.start(tools.grammar(CallForm.of(session), CheckedGrammars()))
    return [allows(state, session.tokenizer.encode(text, add_special_tokens=False).ids) for text in texts]


@pytest.mark.parametrize("name", [*STYLED, "hermes"])
def test_arguments_that_keep_to_no_schema_are_written_freely(name: str) -> None:
    one = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
    free: Any = {"type": "function", "function": {"name": "f", "parameters": one}}
    session, right = family(name), [("f", ANY), ("get_weather", FIRST), ("f", {})]
    answers = [answer_of(session, *right), answer_of(session, ("get_weather", ANY))]
    assert admits(name, Tools([PLACE, free], strict=frozenset({"get_weather"})), *answers) == [True, False]
    for tools in (Tools([PLACE, free], callable=("f",)), Tools([free], content={"type": "object"})):
        assert admits(name, tools, answer_of(session, ("f", ANY)), answers[0]) == [True, False]
    assert read(session, Tools([PLACE, free]), answers[0], 3)[1] == right


@pytest.mark.parametrize("name", STYLED)
def test_an_open_object_is_written_freely_and_one_without_properties_is_empty(name: str) -> None:
    answers = [answer_of(family(name), ("f", arguments)) for arguments in (ANY, {})]
    for schema, written in (
        ({"type": "object"}, [True, True]),
        ({"type": "object", "additionalProperties": True, "title": "t"}, [True, True]),
        ({"$ref": "#/$defs/o", "$defs": {"o": {"type": "object"}}}, [True, True]),
        ({"type": "object", "properties": {}}, [False, True]),
        ({"type": "object", "additionalProperties": False}, [False, True]),
    ):
        tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
        assert admits(name, Tools([tool], forced=True), *answers) == written, schema


@pytest.mark.parametrize("name", STYLED[:-1])  # objects in Gemma's own quotes have no open keys
def test_text_may_have_what_json_would_escape_and_keys_may_not(name: str) -> None:
    open_keys = {"type": "object", "properties": {"n": {"type": "integer"}}}
    own = open_keys | {"required": ["m"], "additionalProperties": {"type": "integer"}}
    for inner, others in ((open_keys, True), (own, False)):
        schema = closed(o={"anyOf": [inner, {"type": "null"}]}, s={"type": "string"})
        tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
        text = {"s": "\\usepackage{a} C:\\users \\u0041"}
        objects = [{"n": 1, "m": 2}, {"n": "x", "m": 2}, {"m": 2, "z": 3}]
        answers = [answer_of(family(name), ("f", {"o": one} | text)) for one in objects]
        answers.append(answers[0].replace('"n"', '"\\u006e"'))
        assert admits(name, Tools([tool], forced=True), *answers) == [True, False, others, False], inner


TEXTS: list[tuple[dict[str, str], list[str], list[str]]] = [  # keywords, texts that satisfy them, others
    ({"pattern": r"^\d{4}$"}, ["1234"], ["\u0661\u0662\u0663\u0664", "123"]),
    ({"pattern": r"^\w+$"}, ["ab_9"], ["\u00e9", "a b"]),
    ({"pattern": r"^[^\d]\W[\w-]$"}, ["x--", "\u00e9 _"], ["7--", "xx-"]),
    ({"pattern": "^a.b$"}, ["axb"], ["a\rb", "a\u2028b", "a\nb"]),
    ({"pattern": r"^\S\s$"}, ["x\ufeff"], ["x\x85"]),
    ({"pattern": "^(?!x-)[a-z-]+$"}, ["a", "xa"], ["x-a", ""]),
    ({"pattern": "^(?=.{2,3}$)[a-c]+$"}, ["ab", "abc"], ["a", "abca"]),
    ({"pattern": "^(?!(?:ab|a)$)[a-b]+$"}, ["abb", "b"], ["ab", "a"]),
    ({"pattern": "^a|b$"}, ["ax", "xb"], ["xa"]),
    ({"pattern": "(^a|b$)"}, ["ax", "xb"], ["xa"]),
    ({"pattern": r"^a\$"}, ["a$", "a$b"], ["a"]),
    (
        {"format": "uri"},
        ["http://a.b:80/?c=d#e", "urn:a:b", "mailto:a@b.c", "file:///x"],
        ["abc", "a:\\x", "http://a:b"],
    ),
    ({"format": "email"}, ["joe.bloggs@example.com"], ["a@b", ".a@b.c", "a..b@c.d", "a@-b.c", "a b@c.d"]),
]


@pytest.mark.parametrize("name", ["qwen coder", "tags in lines", "gemma 4"])
@pytest.mark.parametrize("case", range(len(TEXTS)))
def test_texts_keep_to_patterns_and_formats_as_json_schema_has_them(name: str, case: int) -> None:
    keywords, right, wrong = TEXTS[case]
    tool = {"type": "function", "function": {"name": "f", "parameters": closed(a={"type": "string", **keywords})}}
    answers = [answer_of(family(name), ("f", {"a": text})) for text in right + wrong]
    assert admits(name, Tools([tool], forced=True), *answers) == [True] * len(right) + [False] * len(wrong)


def test_arguments_between_tags_are_the_models_own_text() -> None:
    session = family("glm")
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"s": {"type": "string"}}}}}
    values = {"a": "1.50", "b": "8E999", "c": '["</arg_value>", "\\ud800"]', "d": "9" * 5000, "s": "\n1\n"}
    tags = "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in values.items())
    parser = CallParser(CallForm.of(session), Tools([tool]))
    parser.push(f"<tool_call>f\n{tags}</tool_call>", True)
    (call,) = parser.calls
    written = ", ".join(f'"{k}": {v}' for k, v in (values | {"s": '"\\n1\\n"'}).items())
    assert call["function"]["arguments"] == "{" + written + "}"
    made = arguments_of(call)
    assert made is not None and json.dumps(made, ensure_ascii=False, allow_nan=False).encode() and made["a"] == 1.5


def test_what_a_form_cannot_write_is_refused() -> None:
    loop = {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "string"}]}}, **closed(x={"$ref": "#/$defs/a"})}
    twofold = {f"c{i}": {"anyOf": [{"$ref": f"#/$defs/c{i + 1}"}] * 2} for i in range(10)} | {"c10": {}}
    twofold = closed(x={"$ref": "#/$defs/c0"}) | {"$defs": twofold}
    listed = {"$defs": {"l": {"type": ["string", "array"]}}}
    for name, schema, what in (
        ("glm", closed(**{"a<b": {}}), "a<b"),
        ("gemma 4", closed(**{"a:b": {}}), "a:b"),
        ("gemma 4", loop, "choices"),
        ("glm", closed(x={"$ref": "#/$defs/none"}), "/$defs/none"),
        ("hermes", {"type": "string"}, "no object"),
        ("glm", closed(x={"type": "string", "not": {"const": "x"}}), "not of a text"),
        ("glm", closed(**{" a": {}}), "' a'"),
        ("glm", twofold, "1024 choices"),
        ("glm", closed(x={"$ref": "#/$defs/l", "items": {"type": "string"}}) | listed, "$ref of a text"),
        ("glm", closed(x=["string"]), "object or boolean"),
        ("gemma 4", closed(x={"anyOf": 5}), "anyOf"),
        ("glm", closed(x={"type": "string", "pattern": 5}), "pattern"),
        ("glm", closed(x={"type": "string", "pattern": "(^|,)x"}), "in the parameter 'x', a regular expression"),
        ("gemma 4", closed(x={"type": "string", "pattern": "(^|,)x"}), "in the parameter 'x', a regular expression"),
        ("glm", closed(x={"type": "string", "format": "ipv4"}), "in the parameter 'x', the format 'ipv4'"),
        ("hermes", closed(x={"$ref": "#/required/7"}), "/required/7"),
    ):
        tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
        with pytest.raises(ApiError, match=f"the parameters of the tool f: .*{re.escape(what)}"):
            Tools([tool], forced=True).grammar(CallForm.of(family(name)), CheckedGrammars())


def test_what_cannot_be_enforced_is_left_out_of_the_functions_that_are_not_strict() -> None:
    text = {"type": "string"}
    values = {
        "a": text | {"not": {"const": "x"}},
        "b": text | {"format": "ipv4", "maxLength": 8},
        "c": text | {"pattern": "(^|,)x", "minLength": 1},
        "d": text | {"enum": ["k", "l"], "pattern": "k"},
        "e": {"type": "array", "contains": {}, "maxContains": 3},
    }
    schema = closed(**values) | {"minProperties": 2}
    loose: Any = {"type": "function", "function": {"name": "f", "parameters": schema}}
    right = {"a": "x", "b": "abc", "c": "y", "d": "l", "e": []}
    gone = ["a/not", "b/format", "c/minLength", "c/pattern", "d/pattern"]
    for name in ("glm", "gemma 4"):
        session = family(name)
        tools = Tools([PLACE, loose], forced=True, lenient=frozenset({"f"}))
        grammar = tools.grammar(CallForm.of(session), CheckedGrammars())
        paths = {"#/contains", "#/minProperties", *(f"#/properties/{key}" for key in gone)}
        assert grammar is not None and set(grammar.left_out) == paths
        calls = [
            ("f", right),
            ("f", right | {"b": "a" * 9}),
            ("f", right | {"d": "m"}),
            ("get_weather", FIRST | {"days": 9}),
        ]
        answers = [answer_of(session, call) for call in calls]
        assert admits(name, tools, *answers) == [True, False, False, False]
        with pytest.raises(ApiError, match="the parameters of the tool f: "):
            Tools([loose, PLACE], forced=True, lenient=frozenset({"get_weather"})).grammar(
                CallForm.of(session), CheckedGrammars()
            )


@pytest.mark.parametrize("name", ["hermes", "glm"])
def test_of_functions_and_content_each_is_lenient_for_itself(name: str) -> None:
    schema = closed(l={"type": "array", "items": {"type": "integer"}, "uniqueItems": True})
    first, second = ({"type": "function", "function": {"name": each, "parameters": schema}} for each in "fg")
    form = CallForm.of(family(name))
    for lenient, content, refused in (
        (frozenset("fg"), True, ""),
        (frozenset("f"), True, "the parameters of the tool g|uniqueItems"),
        (frozenset("fg"), False, "uniqueItems"),
    ):
        tools = Tools([first, second], strict=frozenset("fg"), content=schema, lenient=lenient, lenient_content=content)
        if refused:
            with pytest.raises(ApiError, match=refused):
                tools.grammar(form, CheckedGrammars())
        else:
            grammar = tools.grammar(form, CheckedGrammars())
            assert grammar is not None and grammar.left_out == ("uniqueItems",)


def test_calls_are_read_whatever_stands_for_the_schema_of_their_arguments() -> None:
    session = family("glm")
    text = answer_of(session, ("f", {"a": 1}))
    for wrong in ({"properties": None}, {"properties": {"a": {"type": 5}}}, closed(a={"$ref": "#/required/7"})):
        tool = {"type": "function", "function": {"name": "f", "parameters": wrong}}
        assert read(session, Tools([tool]), text, 3)[1] == [("f", {"a": 1})]


def test_a_format_beside_calls_that_begin_like_it_is_refused() -> None:
    with pytest.raises(ApiError, match="response_format"):
        Tools([CLOCK], content={"type": "object"}).grammar(CallForm.of(family("llama")), CheckedGrammars())
