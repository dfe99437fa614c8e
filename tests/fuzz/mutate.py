"""Hostile variants of good samples: bytes, JSON values and template text. Everything is a function of the generator
given.
"""

from __future__ import annotations

import copy
import json
from random import Random
from typing import Any

LONGEST = 1 << 20  # bytes of an input
NUMBERS = [
    0,
    -1,
    1,
    2,
    3,
    63,
    64,
    127,
    128,
    255,
    256,
    4096,
    65535,
    1 << 31,
    (1 << 31) - 1,
    -(1 << 31),
    1 << 32,
    1 << 40,
    1 << 53,
    1 << 62,
    1 << 63,
    (1 << 64) - 1,
    10**30,
]
VALUES: list[Any] = [
    None,
    True,
    False,
    "",
    "a",
    "0",
    "1",
    "..",
    "/etc/passwd",
    "a\n\x1b[31m",
    "\u202e",
    "😀",
    "é" * 50,
    "x" * 5000,
    "nan",
    "{{ 1 }}",
    "{0.__class__}",
    0.5,
    -0.0,
    1e308,
    -1e-320,
    [],
    {},
    [[]],
    [{}],
    {"a": {}},
    [0] * 300,
    ["a"] * 300,
    {"": 0},
]
RAW = [
    b"NaN",
    b"Infinity",
    b"-Infinity",
    b"1e999",
    b"9" * 5000,
    b'"\\ud800"',
    b'"\\udc00\\ud800"',
    b"[" * 200,
    b'{"a":' * 100,
    b"\xff\xfe",
    b"\xef\xbb\xbf",
    b"\0",
    b"\\u0000",
    b"//",
    b"'",
]


def mutate_bytes(random: Random, data: bytes, corpus: list[bytes]) -> bytes:
    """A few changes: bits, numbers of all widths, pieces removed, doubled, or taken from another sample."""
    out = bytearray(data)
    for _ in range(random.choice((1, 1, 1, 2, 4, 8))):
        at, kind = random.randrange(len(out) + 1), random.randrange(8)
        end = min(len(out), at + random.choice((1, 1, 2, 4, 8, 32, 256)))
        if kind == 0 and at < len(out):
            out[at] ^= 1 << random.randrange(8)
        elif kind == 1 and at < len(out):
            out[at] = random.choice((0, 1, 127, 128, 255, random.randrange(256)))
        elif kind == 2:
            width = random.choice((1, 2, 4, 8))
            number = random.choice(NUMBERS) & ((1 << 8 * width) - 1)
            out[at : at + width] = number.to_bytes(width, random.choice(("little", "big")))
        elif kind == 3:
            del out[at:end]
        elif kind == 4:
            out[at:at] = out[at:end] * random.choice((1, 1, 2, 50))
        elif kind == 5:
            other = random.choice(corpus)
            start = random.randrange(len(other) + 1)
            out[at:end] = other[start : start + random.choice((1, 4, 16, 64, 512))]
        elif kind == 6:
            out[at:at] = random.choice(RAW)
        else:
            out[at:] = b"" if random.random() < 0.5 else out[at:] + out[:at]
    return bytes(out)


def mutate_json(random: Random, value: Any) -> bytes:
    """The JSON text of `value` with a few of its parts replaced, removed, doubled, moved or nested; now and then broken
    as text.
    """
    root = [copy.deepcopy(value)]
    for _ in range(random.choice((1, 1, 1, 2, 3, 6))):
        holder, name = random.choice(_places(root))
        kind = random.randrange(8)
        if kind < 3:
            holder[name] = (
                random.choice(NUMBERS)
                if kind == 0
                else copy.deepcopy(random.choice(VALUES))
                if kind == 1
                else _bent(random, holder[name])
            )
        elif kind == 3 and len(holder) > 1:
            del holder[name]
        elif kind == 4:
            other, key = random.choice(_places(root))
            holder[name] = copy.deepcopy(other[key])
        elif kind == 5:
            for _ in range(random.choice((1, 2, 70))):
                holder[name] = [holder[name]] if random.random() < 0.5 else {"a": holder[name]}
        elif isinstance(holder, dict):
            holder[random.choice(("", "a", "__class__", "../x", "x" * 300, str(name) + " "))] = holder[name]
        else:
            holder += [copy.deepcopy(holder[name])] * random.choice((1, 2, 300))
    text = json.dumps(root[0] if root else None, ensure_ascii=random.random() < 0.5).encode("utf-8", "surrogatepass")
    if random.random() < 0.1:
        at = random.randrange(len(text) + 1)
        text = text[:at] + random.choice(RAW) + text[at:]
    if random.random() < 0.05:
        text = text.replace(b"{", b'{"' + random.choice((b"a", b"format_version", b"model")) + b'": 1, ', 1)
    return text[:LONGEST]


def _bent(random: Random, value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return random.choice((value + 1, value - 1, -value, value * 2, value << 32, float(value), str(value)))
    if isinstance(value, float):
        return random.choice((-value, value * 1e10, round(max(-1e300, min(1e300, value))), str(value)))
    if isinstance(value, str):
        return random.choice(
            (value + "x", value[:-1], value.upper(), value * 100, [value], value + "\n", "../" + value)
        )
    if isinstance(value, list):
        return random.choice(
            (value[:-1], value + value, value[::-1], value * 50 if len(value) < 20 else value[:1], {"0": value})
        )
    return random.choice((None, [], 1, "x"))


def _places(value: Any) -> list[tuple[Any, Any]]:
    """(container, key) of everything within a value, at most a few hundred of them."""
    found: list[tuple[Any, Any]] = []
    waiting = [value]
    while waiting and len(found) < 400:
        one = waiting.pop()
        items = list(one.items() if isinstance(one, dict) else enumerate(one))
        found += [(one, key) for key, _ in items]
        waiting += [part for _, part in items if isinstance(part, (dict, list)) and part]
    return found or [([None], 0)]


PIECES = [
    "messages",
    "messages[0]",
    "messages[0]['content']",
    "messages[-1].role",
    "bos_token",
    "missing",
    "1",
    "-1",
    "99999",
    "'a'",
    "'%s'",
    "'a' * 1000",
    "[1, 2]",
    "(1,)",
    "{'a': 1}",
    "none",
    "true",
    "loop",
    "loop.index",
    "loop.last",
    "ns.x",
    "ns",
    "range(9)",
    "range(99999)",
    "self",
    "namespace(x=1)",
    "cycler('a')",
    "m",
    "m(1)",
    "messages|tojson",
    "strftime_now('%Y')",
    "x",
    "''",
]
FILTERS = [
    "abs",
    "attr",
    "batch",
    "capitalize",
    "center",
    "count",
    "default",
    "dictsort",
    "e",
    "escape",
    "first",
    "float",
    "forceescape",
    "format",
    "groupby",
    "indent",
    "int",
    "items",
    "join",
    "last",
    "length",
    "list",
    "lower",
    "map",
    "max",
    "min",
    "reject",
    "rejectattr",
    "replace",
    "reverse",
    "round",
    "safe",
    "select",
    "selectattr",
    "slice",
    "sort",
    "string",
    "strip",
    "striptags",
    "sum",
    "title",
    "tojson",
    "trim",
    "truncate",
    "unique",
    "upper",
    "urlencode",
    "wordcount",
]
METHODS = [
    "strip",
    "split",
    "rsplit",
    "replace",
    "join",
    "upper",
    "lower",
    "items",
    "keys",
    "values",
    "get",
    "startswith",
    "find",
    "rfind",
    "count",
    "index",
    "encode",
    "format",
    "translate",
    "zfill",
    "title",
    "splitlines",
    "append",
    "pop",
    "update",
    "copy",
]
TESTS = ["defined", "none", "string", "mapping", "iterable", "number", "in", "eq", "sameas", "odd"]


def template(random: Random, depth: int = 0) -> str:
    """A template of statements and expressions as they come, mostly well-formed."""
    return "".join(_statement(random, depth) for _ in range(random.randrange(1, 5)))


def _statement(random: Random, depth: int) -> str:
    kind = random.randrange(10) if depth < 4 else random.randrange(3)
    inner, one = (lambda: template(random, depth + 1)), _expression(random, 0)
    return (
        lambda: "text ",
        lambda: "{{ " + one + " }}",
        lambda: "{{- " + one + " -}}",
        lambda: "{% for x in " + one + " %}" + inner() + "{% endfor %}",
        lambda: "{% if " + one + " %}" + inner() + "{% else %}" + inner() + "{% endif %}",
        lambda: "{% set x = " + one + " %}",
        lambda: "{% set ns.x = " + one + " %}",
        lambda: "{% set x %}" + inner() + "{% endset %}",
        lambda: "{% macro m(a) %}" + inner() + "{% endmacro %}",
        lambda: random.choice(
            (
                "{% break %}",
                "{% set ns = namespace(x='ab') %}",
                "{% block b %}" + inner() + "{% endblock %}",
                "{% generation %}" + inner() + "{% endgeneration %}",
                "{% raw %}{{{% endraw %}",
                "{%",
            )
        ),
    )[kind]()


def _expression(random: Random, depth: int) -> str:
    kind = random.randrange(9) if depth < 4 and random.random() < 0.8**depth else 0
    inner = lambda: _expression(random, depth + 1)  # noqa: E731
    return (
        lambda: random.choice(PIECES),
        lambda: random.choice(PIECES),
        lambda: f"{inner()}|{random.choice(FILTERS)}",
        lambda: f"{inner()}|{random.choice(FILTERS)}({inner()}{random.choice(('', ', ' + inner()))})",
        lambda: (
            f"({inner()} {random.choice(('+', '-', '*', '**', '/', '//', '%', '~', '==', '<', 'in', 'and', 'or'))} "
            f"{inner()})"
        ),
        lambda: f"{inner()}.{random.choice(METHODS)}({random.choice(('', inner(), inner() + ', ' + inner()))})",
        lambda: f"{inner()}[{random.choice((inner(), ':1', '::-1', inner() + ':'))}]",
        lambda: f"({inner()} is {random.choice(TESTS)})",
        lambda: f"[{inner()}, {inner()}]",
    )[kind]()
