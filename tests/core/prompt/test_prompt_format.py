from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from streamspec.errors import ConfigError, DataError
from streamspec.prompt import prompt_format
from streamspec.prompt.prompt_format import PromptFormat, render_chat

CHATML = (
    "{%- for message in messages %}\n"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def test_raw_is_the_prompt_and_the_separator() -> None:
    assert PromptFormat("raw", "\n>").render("name[Wok]") == "name[Wok]\n>"
    assert (
        PromptFormat("raw", "|").render([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
        == "a|b|"
    )
    assert PromptFormat("raw").add_special_tokens and not PromptFormat("chat").add_special_tokens


def test_chat_goes_through_the_template_with_a_generation_prompt() -> None:
    expected = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert PromptFormat("chat").render("hi", CHATML) == expected
    assert PromptFormat("chat").render([{"role": "user", "content": "hi"}], CHATML) == expected


def test_templates_see_the_usual_globals() -> None:
    template = (
        "{{ bos_token }}{% generation %}{{ messages | tojson }}{% endgeneration %}{{ eos_token }}"
        "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}{{ strftime_now('%Y') | "
        "length }}"
    )
    text = PromptFormat("chat").render(
        [{"role": "user", "content": "<é>"}], template, {"bos_token": "<s>", "eos_token": "</s>"}
    )
    assert text == '<s>[{"role": "user", "content": "<é>"}]</s>014'


def test_tools_and_documents_are_none_as_in_transformers() -> None:
    template = "{% if tools is not none or documents is not none %}{{ tools[0].name }}{% endif %}{{ tools is defined }}"
    assert PromptFormat("chat").render("hi", template) == "True"


def test_json_is_written_as_the_template_asks() -> None:
    template = (
        "{{ {'b': 1, 'a': ['é']}|tojson }}{{ {'b': 1, 'a': ['é']}|tojson(sort_keys=true, separators=(',', ':')) }}"
    )
    assert PromptFormat("chat").render("hi", template) == '{"b": 1, "a": ["é"]}{"a":["é"],"b":1}'


def test_sums_and_printf_work_as_ever() -> None:
    template = "{{ 'a' ~ 1 ~ missing ~ 'é' }}{{ '%s-%03d'|format('x', 7) }}{{ '%d%%' % 5 }}{{ [1] + [2] }}{{ 1 + 2 }}"
    assert PromptFormat("chat").render("hi", template) == "a1éx-0075%[1, 2]3"


def test_a_template_may_refuse_messages() -> None:
    with pytest.raises(DataError, match="roles must alternate"):
        PromptFormat("chat").render("hi", "{{ raise_exception('roles must\nalternate') }}")


PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}]
CALLED = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}


@pytest.mark.parametrize(
    ("message", "plain"),
    [
        ({"role": "user", "content": PARTS}, {"role": "user", "content": "ab"}),
        ({"role": "tool", "tool_call_id": "x", "content": PARTS},
         {"role": "tool", "tool_call_id": "x", "content": "ab"}),
        ({"role": "developer", "content": "a"}, {"role": "system", "content": "a"}),
        ({"role": "assistant", "content": "a", "refusal": None, "tool_calls": None, "annotations": []},
         {"role": "assistant", "content": "a"}),
        ({"role": "assistant", "content": None, "refusal": "no"}, {"role": "assistant", "content": "no"}),
        ({"role": "assistant", "content": "", "refusal": "no"}, {"role": "assistant", "content": "no"}),
        ({"role": "assistant", "refusal": "no"}, {"role": "assistant", "content": "no"}),
        ({"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
         {"role": "assistant", "content": "no"}),
        ({"role": "user", "content": ""}, {"role": "user", "content": ""}),
    ],
)  # fmt: skip
def test_content_means_the_same_in_all_its_shapes(message: dict[str, object], plain: dict[str, object]) -> None:
    whole = "{{ messages | tojson(sort_keys=true) }}"
    assert PromptFormat("chat").render([message], whole) == PromptFormat("chat").render([plain], whole)
    assert json.loads(PromptFormat("chat").render([message], whole)) == [plain]
    assert PromptFormat("raw", "|").render([message]) == f"{plain['content']}|"


def test_a_message_without_text_is_one_with_calls_or_a_thought() -> None:
    silent = "{% for m in messages %}{{ m.content is none or m.content is undefined }}{{ m.tool_calls }}{% endfor %}"
    for message in (CALLED, CALLED | {"content": None}):
        assert PromptFormat("chat").render([message], silent).startswith("True[{")
        with pytest.raises(DataError, match="tool_calls with the prompt format raw"):
            PromptFormat("raw").render([message])
    thinking = {"role": "assistant", "content": None, "reasoning_content": "hm"}
    assert PromptFormat("raw", "|").render([{"role": "user", "content": "a"}, thinking]) == "a||"


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ([{"type": "image_url", "image_url": {"url": "x"}}], "image_url"),
        ([{"type": "input_audio", "input_audio": {}}], "input_audio"),
        (["a"], "str"),
        ([{"type": "text", "text": None}], "text"),
        (5, "int"),
        (None, "without content"),
    ],
)
def test_content_that_is_no_text_is_refused(content: object, found: str) -> None:
    for kind in ("raw", "chat"):
        with pytest.raises(DataError, match=f"message 0.* {found.split()[-1]}"):
            PromptFormat(kind).render([{"role": "user", "content": content}], CHATML)
    with pytest.raises(DataError, match="message 0 with content and refusal"):
        PromptFormat("raw").render([{"role": "assistant", "content": "a", "refusal": "b"}])


def test_templates_that_take_parts_alone_get_them() -> None:
    template = (
        "{% for m in messages %}{% for part in m.content | selectattr('type', 'equalto', 'text') %}{{ part.text }}"
    )
    assert PromptFormat("chat").render("hi", template + "|" + END) == "hi|"
    for printed, text in (("m.content[0]", "h"), ("m.content | string | upper", "HI")):
        assert PromptFormat("chat").render("hi", f"{{% for m in messages %}}{{{{ {printed} }}}}{{% endfor %}}") == text


@pytest.mark.parametrize("messages", [["hi"], [{"role": "user"}], [{"content": "x"}], [{"role": 1, "content": "x"}]])
def test_malformed_messages_are_refused(messages: list[object]) -> None:
    for kind in ("raw", "chat"):
        with pytest.raises(DataError, match="message 0"):
            PromptFormat(kind).render(messages, CHATML)  # type: ignore[arg-type]


def test_missing_templates_and_unknown_kinds_are_refused() -> None:
    with pytest.raises(ConfigError, match="chat template"):
        PromptFormat("chat").render("hi")
    with pytest.raises(ConfigError, match="raw or chat"):
        PromptFormat("cooked")


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ 'x' * 10**10 }}",
        "{{ 9 ** 64 ** 64 ** 64 }}",
        "{{ [0] * 999999999 }}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{{ undefined.attribute }}",
        "{% if %}",
        "{{ 1 / 0 }}",
        "{% include '/etc/passwd' %}",
        "{{ messages[0].content.format(messages) ~ '{0.__class__.__mro__}'.format(1) }}",
        "x" * (1 << 21),
        "{{ 'a'|center(300000000) }}",
        "{{ 'a'.ljust(300000000) }}",
        "{{ [1]|batch(300000000, ' ')|list }}",
        "{{ 'a\nb'|indent(300000000) }}",
        "{{ messages|tojson(indent=300000000) }}",
        "{{ lipsum(n=100000) }}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{{ 'a' * 1000 }}{% endfor %}{% endfor %}",
        "{% break %}",
        "{{ '%300000000d'|format(1) }}",
        "{{ '%-300000000d' % 1 }}",
        "{{ '%*d' % (300000000, 1) }}",
        "{{ '{:>300000000}'.format(1) }}",
        "{% set ns = namespace(x='aaaa') %}{% for i in range(40) %}{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x }}",
        "{% set ns = namespace(x='aaaa') %}{% for i in range(40) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
    ],
)
def test_hostile_and_broken_templates_fail_in_one_line(template: str) -> None:
    started = time.perf_counter()
    with pytest.raises(ConfigError) as caught:
        PromptFormat("chat").render("hi", template)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 700
    assert time.perf_counter() - started < 20


SCHEMA = {"type": "function", "function": {"name": "weather", "parameters": {}}}
CALL = {"function": {"name": "weather", "arguments": '{"city": "x"}'}}
CALLING = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
NAMES = "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.name }}"
END = "{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (NAMES + "{{ c.function.arguments.city }}{{ m.content is defined }}" + END, "weatherxFalse"),
        (NAMES + "{{ c.function.arguments + '' }}" + END, 'weather{"city": "x"}'),
        ("{% for m in messages if m.content is none %}{{ m.tool_calls[0].function.name }}{% endfor %}", "weather"),
        (NAMES + "{{ m.content + '|' }}" + END, "weather|"),
    ],
    ids=["as transformers", "arguments as text", "content is null", "content is text"],
)  # fmt: skip
def test_calls_are_spelt_as_the_template_takes_them(template: str, text: str) -> None:
    before = json.dumps(CALLING)
    assert PromptFormat("chat").render(CALLING, template) == text
    assert json.dumps(CALLING) == before


def test_reasoning_has_both_of_its_names() -> None:
    template = "{% for m in messages %}{{ m.thinking }}{{ m.reasoning_content }}{% endfor %}"
    for name in ("thinking", "reasoning_content", "reasoning"):
        messages = [{"role": "assistant", "content": "a", name: "hm"}]
        assert PromptFormat("chat").render(messages, template) == "hmhm"


def test_prompts_of_mistrals_newest_version_are_those_of_mistral_common() -> None:
    known = json.loads((Path(__file__).parent / "mistral_v15.json").read_text(encoding="utf-8"))
    for asked in known["prompts"]:
        specials = {"bos_token": "<s>", "eos_token": "</s>", **asked["variables"]}
        rendered = PromptFormat("chat").render(asked["messages"], known["template"], specials, tools=asked["tools"])
        assert rendered == asked["text"]
    with pytest.raises(DataError, match='must be either "none" or "high"'):
        low = {"reasoning_effort": "low"}
        PromptFormat("chat").render(known["prompts"][0]["messages"], known["template"], low)


def test_tools_reach_the_template_or_are_refused_by_name() -> None:
    template = "{% for tool in tools %}{{ tool.function.name }}{% endfor %}{{ add_generation_prompt }}"
    assert PromptFormat("chat").render("a", template, tools=[SCHEMA]) == "weatherTrue"
    assert PromptFormat("chat").render("a", template, tools=[SCHEMA], add_generation_prompt=False) == "weatherFalse"
    with pytest.raises(DataError, match="leaves out the tool weather"):
        PromptFormat("chat").render("a", CHATML, tools=[SCHEMA])
    with pytest.raises(DataError, match="tools with the prompt format raw"):
        PromptFormat("raw").render("a", tools=[SCHEMA])
    with pytest.raises(DataError, match="a tool '{}'"):
        PromptFormat("chat").render("a", template, tools=[{}])


def test_a_template_without_calls_takes_several_as_it_takes_one() -> None:
    both = {"role": "assistant", "content": "b", "tool_calls": [CALL, CALL]}
    assert PromptFormat("chat").render([CALLING[0], both], CHATML).count("b<|im_end|>") == 1


def test_a_chat_with_several_calls_is_rendered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    template = "{% for m in messages %}{{ m.content or '' }}{% for c in m.tool_calls or [] %}{{ c.function.name }}"
    template += "{% endfor %}{% endfor %}"
    both = [{"role": "assistant", "content": None, "tool_calls": [CALL, CALL]}, {"role": "tool", "content": "x" * 99}]
    rendered = list[int]()
    monkeypatch.setattr(
        prompt_format, "render_chat", lambda *a: (text := render_chat(*a), rendered.append(len(text)))[0]
    )
    for turns in (1, 2, 3):
        PromptFormat("chat").render([CALLING[0], *both * turns], template)
    assert sum(length > 99 for length in rendered) == 3 and len(rendered) == 4


def test_words_beside_a_call_are_refused_where_a_template_takes_neither_them_nor_thoughts() -> None:
    template = "{% for m in messages %}{% if m.tool_calls and m.content %}{{ raise_exception('both') }}{% endif %}"
    template += "{{ m.content or m.tool_calls[0].function.name }}{% endfor %}"
    message = {"role": "assistant", "content": "Look", "reasoning_content": "Hm", "tool_calls": [CALL]}
    with pytest.raises(DataError, match="both"):
        PromptFormat("chat").render([CALLING[0], message], template)
    shown = PromptFormat("chat").render([CALLING[0], message], template.replace("{{ m.c", "{{ m.thinking }}{{ m.c"))
    assert "Hm\n\nLook" in shown


def test_a_refusal_of_several_calls_takes_few_renders(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [{**CALL, "id": "same"}] * 2
    both = [{"role": "assistant", "content": None, "thinking": "Hm", "tool_calls": calls}] * 9
    first = "{% for m in messages if m.tool_calls %}{{ m.tool_calls[0].function.name }}{% endfor %}"
    rendered = list[object]()
    monkeypatch.setattr(prompt_format, "render_chat", lambda *a: rendered.append(a) or render_chat(*a))
    with pytest.raises(DataError, match="leaves out a call of weather"):
        PromptFormat("chat").render([CALLING[0], *both], first, tools=[SCHEMA])
    assert len(rendered) <= 4


def test_tools_without_a_description_get_one_where_the_template_needs_it() -> None:
    template = "{% for tool in tools %}{{ tool.function.name + tool.function.description + '|' }}{% endfor %}"
    for more in ({}, {"description": None}, {"function": {}}):
        tool = {"function": {"name": "weather"} | more}
        assert PromptFormat("chat").render("a", template, tools=[tool]) == "weather|"
    flat = {"name": "weather", "description": None}
    assert PromptFormat("chat").render("a", template.replace(".function", ""), tools=[flat]) == "weather|"


def test_arguments_that_spell_half_a_surrogate_pair_are_sent_back_without_it() -> None:
    call = {"function": {"name": "f", "arguments": '{"a": "\\ud800"}'}}
    template = "{% for m in messages if m.tool_calls %}{{ m.tool_calls[0].function | tojson }}{% endfor %}"
    text = PromptFormat("chat").render([{"role": "assistant", "content": None, "tool_calls": [call]}], template)
    assert text == '{"name": "f", "arguments": {"a": "\ufffd"}}'


def test_ids_of_calls_are_text() -> None:
    result = {"role": "tool", "content": "a", "tool_call_id": ["x"]}
    for message in ({**CALLING[1], "tool_calls": [CALL, {**CALL, "id": ["x"]}]}, result):
        for kind in ("raw", "chat"):
            with pytest.raises(DataError, match="message 0 with an id that is no text"):
                PromptFormat(kind).render([message], CHATML)


def test_text_marked_as_safe_leaves_its_neighbours_alone() -> None:
    assert PromptFormat("chat").render("a", "{{ '<b>' ~ ('<i>' | safe) ~ '&' }}") == "<b><i>&"
