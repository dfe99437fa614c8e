"""Chat templates that try to get out of their sandbox, to run for ever or to fill the memory: each ends in one line,
soon and small.
"""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from streamspec.errors import ConfigError, DataError
from streamspec.prompt import template_sandbox
from streamspec.prompt.prompt_format import MAX_TEMPLATE, PromptFormat

SECONDS, BYTES = 60, 1 << 29  # on a slow and busy machine; all stay below 1 s on a quiet one
DOUBLED = (
    "{% set ns = namespace(x='aaaa') %}{% for i in range(60) %}{% set ns.x = EXPRESSION %}{% endfor %}{{ ns.x|length }}"
)

ESCAPES = {
    "class of a string": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "class by attr": "{{ ''|attr('__class__') }}",
    "class by map": "{{ ['']|map(attribute='__class__')|list|first|attr('mro') }}",
    "class by subscript": "{{ ''['__class__']['__mro__'] }}",
    "globals of a macro": "{% macro m() %}{% endmacro %}{{ m.__globals__['os'] }}",
    "globals of raise_exception": "{{ raise_exception.__globals__.json }}",
    "globals of strftime_now": "{{ strftime_now.__globals__ }}",
    "globals of a filter's caller": "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "globals of namespace": "{{ namespace.__init__.__globals__ }}",
    "globals of joiner by attr": "{{ (joiner|attr('__init__'))|attr('__globals__') }}",
    "the template itself": "{{ self.__dict__ }}",
    "the context": "{{ self._TemplateReference__context.environment }}",
    "loop's context": "{% for x in [1] %}{{ loop._iterator.gi_frame.f_globals }}{% endfor %}",
    "frame of a generator": "{{ (messages|map('upper')).gi_frame.f_back.f_globals }}",
    "code of a macro": "{% macro m() %}{% endmacro %}{{ m._func.__code__ }}",
    "str.format": "{{ '{0.__class__.__mro__}'.format(1) }}",
    "str.format_map": "{{ '{a.__class__}'.format_map({'a': 1}) }}",
    "str.format by attr": "{{ ('{0.__class__}'|attr('format'))(1) }}",
    "format of markup": "{{ ('{0.__class__}'|safe).format(1) }}",
    "an inner format": "{{ ['{0.__class__}']|map('attr', 'format')|list|first }}{{ undefined.x }}",
    "changed messages": "{{ messages.append(1) }}",
    "cleared messages": "{{ messages.clear() }}",
    "changed message": "{{ messages[0].update(role='system') }}",
    "popped message": "{{ messages[0].pop('role') }}",
    "another file": "{% include '/etc/passwd' %}",
    "another template": "{% extends 'x' %}",
    "an import": "{% import 'os' as os %}",
    "a debug tag": "{% debug %}",
    "code": "{% do messages.append(1) %}",
}
ENDLESS = {
    "loops in loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "loops that put out": "{% for i in range(99999) %}{% for j in range(99999) %}a{% endfor %}{% endfor %}",
    "loops that filter": "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
    "loops over text": "{% for i in 'a' * 1000000 %}{% for j in 'a' * 1000000 %}{% endfor %}{% endfor %}",
    "recursive loops": (
        "{% for x in [[1]] recursive %}{% for i in range(9) %}{{ loop }}{% endfor %}{% endfor %}{% "
        "for x in [1, 1] recursive %}{{ loop([1, 1]) }}{% endfor %}"
    ),
    "macros that call themselves twice": (
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}"
    ),
    "a macro that calls itself for ever": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "a block that shows itself": "{% block b %}{{ self.b() }}{% endblock %}",
    "blocks twice": (
        "{% block a %}{{ self.b() }}{{ self.b() }}{% endblock %}{% block b %}{{ self.a() }}{{ self.a() }}{% endblock %}"
    ),
    "callers": (
        "{% macro m(n) %}{% if n %}{% call m(n - 1) %}{% endcall %}{% call m(n - 1) %}{% endcall %}{% endif "
        "%}{% endmacro %}{{ m(60) }}"
    ),
    "many tests": "{{ (range(99999)|list * 10)|select('in', range(99999)|list * 10)|list|length }}",
    "strips with many characters": (
        "{% set x = 'a' * 1000000 %}{{ x.strip('b' * 999999 + 'a')|length }}{{ "
        "x.lstrip('b' * 999999 + 'c' + 'a')|length }}"
    ),
    "searches from the right": "{{ ('a' * 1000000).rfind('b' + 'a' * 500000) }}",
    "powers": "{{ 9 ** 64 ** 64 ** 64 }}",
    "powers in rounding": "{{ 1.5|round(1000000000, 'ceil') }}",
    "a number that squares itself": (
        "{% set ns = namespace(x=3) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}"
    ),
    "comparison of shared lists": (
        "{% set a = namespace(x=[1]) %}{% set b = namespace(x=[1]) %}{% for i in range(60) "
        "%}{% set a.x = [a.x, a.x] %}{% set b.x = [b.x, b.x] %}{% endfor %}{{ a.x == b.x "
        "}}"
    ),
    "keys of shared tuples": (
        "{% set a = namespace(x=(1,)) %}{% for i in range(60) %}{% set a.x = (a.x, a.x) %}{% endfor %}{{ {a.x: 1} }}"
    ),
    "deep keys": (
        "{% set a = namespace(x=(1,)) %}{% for i in range(99999) %}{% set a.x = (a.x,) %}{% endfor %}{{ {a.x: 1} }}"
    ),
    "sorts in loops": (
        "{% set x = range(99999)|list %}{% for i in range(99999) %}{% set y = x|sort(reverse=true) %}{% endfor %}"
    ),
}
GROWING = {
    "a product": "{{ 'x' * 10**10 }}",
    "a product of lists": "{{ [0] * 999999999 }}",
    "a product of lists that there is memory for": "{{ ([0] * 100000000)|length }}",
    "a sum that doubles": DOUBLED.replace("EXPRESSION", "ns.x + ns.x"),
    "a joint that doubles": DOUBLED.replace("EXPRESSION", "ns.x ~ ns.x"),
    "a block that doubles": (
        "{% set ns = namespace(x='aaaa') %}{% for i in range(60) %}{% set ns.x %}{{ ns.x }}{{ "
        "ns.x }}{% endset %}{% endfor %}"
    ),
    "a macro that doubles": (
        "{% macro m(n) %}{% if n %}{{ m(n - 1) * 2 }}{% else %}a{% endif %}{% endmacro %}{{ m(60)|length }}"
    ),
    "a constant in a loop": "{% set x %}{% for i in range(99999) %}" + "a" * 100_000 + "{% endfor %}{% endset %}",
    "a constant in a macro": "{% macro m() %}"
    + "a" * 100_000
    + "{% endmacro %}{% set x = range(99999)|map('string')|list %}{% for i in x %}{% set y = m() ~ m() %}{% endfor %}",
    "a list that doubles": DOUBLED.replace("EXPRESSION", "[ns.x, ns.x]").replace("|length", "|tojson"),
    "a printed list that doubles": DOUBLED.replace("EXPRESSION", "[ns.x, ns.x]").replace("|length", ""),
    "a string of a list that doubles": DOUBLED.replace("EXPRESSION", "[ns.x, ns.x]").replace(
        "|length", "|string|length"
    ),
    "a replacement": DOUBLED.replace("EXPRESSION", "ns.x|replace('a', 'aaaa')"),
    "a replacement by much": "{{ ('a' * 1000000)|replace('a', 'b' * 1000000)|length }}",
    "a replacing method": "{{ ('a' * 1000000).replace('a', 'b' * 1000000)|length }}",
    "a replacement of nothing": "{{ ('a' * 1000000)|replace('', 'b' * 1000000)|length }}",
    "a join": "{{ (['a'] * 1000000)|join('b' * 1000000)|length }}",
    "a joining method": "{{ ('b' * 1000000).join(['a'] * 1000000)|length }}",
    "a join of what is made on the way": "{{ ('a' * 1000000)|map('upper')|join('b' * 1000000)|length }}",
    "a join of shared text": "{{ (['a' * 1000000] * 1000000)|join|length }}",
    "a wide field": "{{ '%300000000d' % 1 }}",
    "a field of asked width": "{{ '%*d' % (300000000, 1) }}",
    "many fields": "{{ ('%(a)s' * 1000000) % {'a': 'b' * 1000000} }}",
    "many wide fields": "{{ ('%999d' * 200000)|format(1) }}",
    "an indent": "{{ ('a\n' * 500000)|indent(64)|indent(64)|indent(64)|indent(64)|length }}",
    "a wide indent": "{{ 'a\nb'|indent(300000000) }}",
    "json with an indent": "{{ [[[[[[[[[[1] * 1000] * 1000] * 1000]]]]]]]|tojson(indent=64)|length }}",
    "padding": "{{ 'a'|center(300000000) }}",
    "padding by a method": "{{ 'a'.ljust(300000000) }}",
    "padding by zeros": "{{ 'a'.zfill(300000000) }}",
    "bytes of a number": "{{ (1).to_bytes(10000000000, 'big') }}",
    "a table": "{{ ('a' * 1000000).translate({97: 'b' * 1000000})|length }}",
    "batches": "{{ [1]|batch(300000000, ' ')|list }}",
    "fields of a date": "{{ strftime_now('%99999999Y') }}",
    "a long date": "{{ strftime_now('%Y' * 1000000) }}",
    "blind text": "{{ lipsum(n=100000) }}",
    "a sum of lists": "{{ ([[1] * 1000] * 1000000)|sum(start=[])|length }}",
    "escapes of escapes": DOUBLED.replace("EXPRESSION", "ns.x|replace('a', '<')|forceescape|string").replace(
        "ns.x|length", "x"
    ),
    "a tower of json": DOUBLED.replace("EXPRESSION", "[ns.x, ns.x]|tojson"),
    "a template of too many characters": "x" * (MAX_TEMPLATE + 1),
}
NESTED = {  # as deep as the characters of a template allow
    "parentheses": "{{ " + "(" * 30_000 + "1" + ")" * 30_000 + " }}",
    "signs": "{{ " + "-" * 60_000 + "1 }}",
    "attributes": "{{ a" + ".b" * 30_000 + " }}",
    "filters": "{{ 'a'" + "|upper" * 10_000 + " }}",
    "blocks": "{% if 1 %}" * 3_000 + "{% endif %}" * 3_000,
    "loops": "{% for i in [1] %}" * 2_000 + "{% endfor %}" * 2_000,
    "lists": "{{ " + "[" * 30_000 + "]" * 30_000 + " }}",
}
NAMES = "".join(f"x{i:05}," for i in range(6000))
HEAVY = {  # to compile: each branch copies what is known of all names
    "names and branches": "{{ [" + NAMES + "] }}" + "{% if 1 %}{% endif %}" * 1050,
    "calls": "{{ [" + "a()," * 16_000 + "] }}",
    "more than any template has": "x" * (1 << 16) + "y",
}
BROKEN = {
    "a syntax error": "{% if %}",
    "a division by nothing": "{{ 1 / 0 }}",
    "an undefined name": "{{ undefined.attribute }}",
    "break outside a loop": "{% break %}",
    "a number beyond all": "{{ 1e999|abs }}",
    "an assertion of Jinja's": "{{ 'abcdef'|truncate(1) }}",
    "half a surrogate pair": "{{ '\\ud800'.nothing() }}",
}


def cases(**groups: dict[str, str]) -> list[object]:
    return [
        pytest.param(template, id=f"{kind}: {name}")
        for kind, group in groups.items()
        for name, template in group.items()
    ]


def rendered(template: str) -> str:
    """The text, or the message of the refusal; within the limit of time in either case."""
    started = time.perf_counter()
    try:
        return PromptFormat("chat").render("hi", template)
    except (ConfigError, DataError) as error:
        assert "\n" not in str(error) and len(str(error)) < 700
        return f"refused: {error}"
    finally:
        assert time.perf_counter() - started < SECONDS


@pytest.mark.parametrize("template", cases(escape=ESCAPES))
def test_no_template_gets_out_of_its_sandbox(template: str) -> None:
    text = rendered(template)
    assert text.startswith("refused: ") or text == ""


@pytest.mark.parametrize("template", cases(endless=ENDLESS, broken=BROKEN))
def test_a_template_that_does_not_end_is_refused_soon(template: str) -> None:
    assert rendered(template).startswith("refused: ")


def peak() -> int:
    """The most bytes that this process has held: by the system's account (Linux), as tracing makes every allocation ten
    times dearer."""
    status = Path("/proc/self/status")
    if status.exists():
        return int(next(line for line in status.read_text().splitlines() if line.startswith("VmHWM")).split()[1]) << 10
    tracemalloc.start()  # does nothing where it has been started
    return tracemalloc.get_traced_memory()[1]


def grow(templates: Iterable[str]) -> list[tuple[str, int]]:
    """What becomes of each template, and the peak after it, beyond that before all; at last those of a list that is
    larger by 80 MB."""
    rendered("")
    before, found = peak(), list[tuple[str, int]]()
    for template in templates:
        found.append((rendered(template), peak() - before))
    held = len([0] * ((found[-1][1] + 80_000_000) // 8))
    return [*found, (str(held), peak() - before)]


@pytest.fixture(scope="module")
def grown() -> list[tuple[str, int]]:
    """See `grow`: of `GROWING`, in a process of its own, whose peak nothing else raises."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(grow, list(GROWING.values())).result(timeout=SECONDS * len(GROWING))


@pytest.mark.parametrize("number", range(len(GROWING)), ids=list(GROWING))
def test_a_template_that_grows_is_refused_while_it_is_small(grown: list[tuple[str, int]], number: int) -> None:
    text, held = grown[number]
    assert text.startswith("refused: ") and held < BYTES


def test_memory_that_is_held_for_a_moment_is_noticed(grown: list[tuple[str, int]]) -> None:
    assert grown[-1][1] > grown[-2][1] + 50_000_000


@pytest.mark.parametrize("template", cases(nested=NESTED))
def test_a_deeply_nested_template_harms_nothing(template: str) -> None:
    assert len(template) < MAX_TEMPLATE and rendered(template).startswith("refused: ")
    assert isinstance(template_sandbox._compile(template), str)  # why there is none: it is not tried again


@pytest.mark.parametrize("template", cases(heavy=HEAVY))
def test_a_template_that_is_heavy_to_compile_is_refused_before(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox._Environment, "_generate", None)
    assert "more than 8000" in rendered(template) or "at most 65536" in rendered(template)


def test_a_template_that_fails_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    parse = template_sandbox._Environment._parse

    def counted(self: Any, source: str, *rest: Any) -> Any:
        compiled.append(source)
        return parse(self, source, *rest)

    monkeypatch.setattr(template_sandbox._Environment, "_parse", counted)
    broken = "{{ 'never seen before' }}{% if %}"
    assert rendered(broken) == rendered(broken)
    assert compiled == [broken]


def test_the_messages_are_as_they_were() -> None:
    messages = [{"role": "user", "content": "hi"}]
    with pytest.raises(ConfigError):
        PromptFormat("chat").render(messages, "{{ messages[0].update(role='system') }}")
    assert messages == [{"role": "user", "content": "hi"}]


def test_long_conversations_have_room() -> None:
    """A template as models have them, a conversation of 4 MB, and one of 2,000 turns."""
    template = (
        "{% for message in messages %}{% if message['role'] not in ['user', 'assistant', 'system'] %}{{ "
        "raise_exception('role') }}{% endif %}"
        "{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nBe good<|im_end|>\n' }}{% "
        "endif %}"
        "{% set content = message['content'] | trim %}{% if '</think>' in content %}{% set content = "
        "content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
        "{{ '<|im_start|>' + message['role'] + '\n' + content | replace('<s>', '') + '<|im_end|>' + '\n' }}{% endfor %}"
    )
    long = [{"role": "user", "content": "a" * (1 << 21)}, {"role": "assistant", "content": "b" * (1 << 21)}]
    many = [{"role": role, "content": "hello there"} for _ in range(1000) for role in ("user", "assistant")]
    for messages in (long, many):
        assert "refused" not in PromptFormat("chat").render(messages, template)


def test_templates_of_forty_thousand_characters_have_room() -> None:
    """The longest of published models have as many, at a tenth as many nodes."""
    line = "{% if messages[0].role == 'user' and add_generation_prompt %}{{ '<start>' + messages[0].role }}{% endif %}"
    assert "refused" not in rendered(line * (40_000 // len(line)))
