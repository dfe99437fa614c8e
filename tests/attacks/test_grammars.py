"""Schemas and expressions that the grammar library panics over, or that would take it for ever."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest

from streamspec.errors import ConfigError, StreamspecError
from streamspec.runtime import load
from streamspec.runtime.text import grammar
from streamspec.runtime.text.grammar import Grammar, Vocabulary
from tests.support.byte_tokenizers import EOS, byte_level

VOCABULARY = Vocabulary(byte_level(), 257, [EOS])


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "é" * 50},
        {"$ref": "é" * 200},
        {"type": "object", "required": ["é" * 99 + "x" * 300], "properties": {"é" * 99: {"type": "é" * 400}}},
        {"$ref": "#/$defs/" + "é" * 300},
        {"type": "string", "pattern": "(?=" + "é" * 500},
    ],
    ids=["type", "reference", "names", "definition", "pattern"],
)
def test_a_schema_that_is_quoted_in_the_middle_of_a_character(schema: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as caught:
        Grammar.json_schema(schema)
    assert str(caught.value).isprintable()


class PanicException(BaseException):
    pass


def test_a_panic_of_the_library_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    def panics(*_: object, **__: object) -> None:
        raise PanicException("byte index 7 is not a char boundary")

    made = SimpleNamespace(LLMatcher=SimpleNamespace(grammar_from_json_schema=panics))
    monkeypatch.setattr(grammar, "_library", lambda: made)
    with pytest.raises(ConfigError, match="byte index 7"):
        Grammar.json_schema({"type": "object"})


@pytest.mark.parametrize(
    "pattern",
    [
        "((a{1,1000}){1,1000}){1,1000}",
        "(" * 10_000,
        "a{99999999999}",
        "a{" + "9" * 5000 + "}",
        "(?<=a)b",
        r"\p{Nothing}",
        "[z-a]",
        "é" * 9_999 + "(",
    ],
)
def test_an_expression_that_grows_or_is_none(pattern: str) -> None:
    started = time.perf_counter()
    with pytest.raises(ConfigError) as caught:
        Grammar.regex(pattern)
    assert str(caught.value).isprintable() and time.perf_counter() - started < 20


@pytest.mark.parametrize(
    "schema",
    [
        *("", "[", "[" * 100_000, '{"type": "object"', "5", '"a"', '{"a": NaN', "x" * 1_000_000),
        *('{"type": "number", "maximum": 1e999}', '{"multipleOf": Infinity}', '{"default": NaN}'),
    ],
)
def test_a_schema_that_is_no_json(schema: str) -> None:
    with pytest.raises(ConfigError):
        Grammar.json_schema(schema)


WRONG_MULTIPLES = [
    {"type": "object", "properties": {name: {"type": "integer", "multipleOf": 1_000_003} for name in "abcd"}},
    {"type": "integer", "multipleOf": 100_003},
    {"type": "integer", "multipleOf": 0},
    {"type": "number", "multipleOf": -0.5},
    {"type": "number", "multipleOf": 0.100003},
    {"type": "number", "multipleOf": 1e-7},
    {"type": "number", "multipleOf": 1e300},
    {"allOf": [{"type": "integer", "multipleOf": 9_973}, {"multipleOf": 9_967}]},
    {"$defs": {"a": {"type": "number", "multipleOf": 11}}, "$ref": "#/$defs/a", "multipleOf": 0.001},
    {"type": "object", "properties": {f"p{i}": {"type": "integer", "multipleOf": 9_000 + i} for i in range(12)}},
    {"items": [[{"multipleOf": 10_001}]]},
]


@pytest.mark.parametrize("schema", WRONG_MULTIPLES, ids=range(len(WRONG_MULTIPLES)))
def test_a_schema_with_many_remainders_is_refused_before_it_is_built(
    schema: dict[str, object],
) -> None:
    with pytest.raises(ConfigError, match="multipleOf.*; expected"):
        Grammar.json_schema(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "number", "multipleOf": 0.01, "minimum": 0},
        {"allOf": [{"type": "integer", "multipleOf": 60}, {"multipleOf": 100}]},
        {"type": "object", "properties": {f"p{i}": {"type": "number", "multipleOf": 0.25} for i in range(100)}},
        {"type": "object", "properties": {"multipleOf": {"type": "integer", "multipleOf": 10_000}}},
    ],
)
def test_multiples_that_people_write_are_taken(schema: dict[str, object]) -> None:
    state = VOCABULARY.start(Grammar.json_schema(schema))
    assert state.after().mask.any()


def test_the_multiples_that_are_taken_are_those_that_python_counts() -> None:
    grammar = Grammar.json_schema({"allOf": [{"type": "integer", "multipleOf": 9_600}, {"multipleOf": 128}]})
    for number in (0, 9_600, 19_200, 9_601, 128, 28_800 * 7, 4_294_966, 9_600 * 447_393):
        state, text = VOCABULARY.start(grammar), str(number)
        try:
            state.advance([VOCABULARY._tokenizer.token_to_id(digit) for digit in text])
            taken = bool(state.after().mask[EOS])
        except StreamspecError:
            taken = False
        assert taken == (number % 9_600 == 0), number


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Grammars take for ever to build, until it is set."""
    let, match = threading.Event(), Vocabulary._match

    def waiting(self: Vocabulary, grammar: Grammar) -> Any:
        assert let.wait(30)
        return match(self, grammar)

    monkeypatch.setattr(Vocabulary, "_match", waiting)
    yield let
    let.set()


def test_timeout_and_cancel_reach_a_grammar_that_is_built(original: Path, held: threading.Event) -> None:
    session = load(original, threads=1, tree="plain")
    options: dict[str, Any] = {"grammar": Grammar.choice(["x"]), "max_new_tokens": 4}
    assert session.generate("a", timeout=0.05, **options).finish_reason == "timeout"
    running = session.stream("a", **options).start()
    running.cancel()
    assert running.result(20).finish_reason == "cancelled"
    assert session.generate("a", max_new_tokens=2).token_ids  # while that one is still being built
    held.set()
    assert session.vocabulary.builds.built <= 1
    session.close()


def test_a_client_that_leaves_while_its_grammar_is_built_frees_its_session(
    original: Path, held: threading.Event
) -> None:
    pytest.importorskip("streamspec.serve", reason="the server is not installed")
    from streamspec.serve import Limits
    from tests.serve.conftest import Running, until, user

    running = Running(load(original, threads=1, tree="plain"), limits=Limits(sessions=1))
    try:
        grammar = {"extra_body": {"grammar": {"choice": ["x"]}}, "model": "base", "max_tokens": 4}
        with pytest.raises(openai.APITimeoutError):
            running.client(timeout=0.5).chat.completions.create(messages=user("a"), **grammar)
        until(lambda: running.server.pool.counts.cancelled == 1 and not running.server.pool.requests)
        answer = running.client().chat.completions.create(messages=user("a"), model="base", max_tokens=2)
        assert answer.choices[0].message.content is not None
    finally:
        held.set()
        running.stop()


LAST = {"$ref": "#/$defs/d0"}


@pytest.mark.parametrize(
    ("keyword", "asked"),
    [
        ("allOf", {"not": LAST}),
        ("anyOf", {"oneOf": [LAST, {"type": "string"}]}),
        ("oneOf", {"properties": {"a": {"items": LAST}}}),
    ],
)
def test_references_that_multiply_are_refused_before_they_are_followed(keyword: str, asked: dict[str, Any]) -> None:
    several = {f"d{i}": {keyword: [{"$ref": f"#/$defs/d{i + 1}"}] * 9, "maxLength": i} for i in range(11)}
    began = time.process_time()
    with pytest.raises(ConfigError):
        Grammar.json_schema({"$defs": several | {"d11": {"type": "string"}}, **asked})
    assert time.process_time() - began < 10
