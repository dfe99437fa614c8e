"""What users write: templates, data, settings, schemas, patterns, requests."""

from __future__ import annotations

import json
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from streamspec.errors import DataError
from tests.fuzz.mutate import mutate_bytes, template
from tests.fuzz.targets.target import Target, fail, of_json


def make_template(random: Random) -> bytes:
    made = template(random).encode()
    return mutate_bytes(random, made, [made]) if random.random() < 0.2 else made


def run_template(data: bytes, folder: Path) -> object:
    from streamspec.prompt.prompt_format import PromptFormat

    messages = [
        {"role": "user", "content": "hi %s <b>\n{0}", "tools": [{"a": [1, 2.5, None]}]},
        {"role": "assistant", "content": "ho"},
    ]
    before = json.dumps(messages)
    PromptFormat("chat").render(messages, data.decode("utf-8", "replace"), {"bos_token": "<s>"})
    return json.dumps(messages) == before or fail("messages were changed")


def _examples() -> list[Any]:
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    return [
        {"text": "abc"},
        {"messages": talk},
        {"prompt": "a", "completion": "b", "references": ["b", "c"], "category": "x"},
        {"prompt": talk[:1], "completion": talk[1:]},
        {"turns": ["a", "b"], "question_id": 5, "reference": ["x"]},
    ]


def run_examples(data: bytes, folder: Path) -> object:
    from streamspec.data import read_examples

    (folder / "d.jsonl").write_bytes(data.replace(b"\r", b"") + b"\n")
    return [(one.opening, one.prompt, one.completion) for one in read_examples(folder / "d.jsonl")]


def make_yaml(random: Random) -> bytes:
    samples = [
        b"base: smollm2-135m\ndata: d.jsonl\nout: o\ngamma: 4\nlr: 1e-3\ntaps: [1, 2]\nmax-minutes: 5\n",
        b"base: &x a\ndata: *x\n",
        b"a: !!python/name:os.system\n? [1]\n: {b: 2001-01-01}\n",
    ]
    return mutate_bytes(random, random.choice(samples), samples)


def run_yaml(data: bytes, folder: Path) -> object:
    from streamspec.adapters.training.config import TrainConfig
    from streamspec.cli.train import read_yaml

    (folder / "c.yaml").write_bytes(data)
    return TrainConfig.from_dict({"base": "a", "data": "b", "out": "c"} | read_yaml(folder / "c.yaml"))


def _schemas() -> list[Any]:
    person = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 9, "pattern": "^[a-z]+$"},
            "age": {"type": "integer", "minimum": 0},
        },
        "required": ["name"],
        "additionalProperties": False,
    }
    return [
        person,
        {"type": "array", "items": person, "minItems": 1, "maxItems": 3},
        {"enum": ["a", 1, None]},
        {"anyOf": [{"type": "number"}, {"const": {"a": 1}}]},
        {"$defs": {"n": {"type": "object", "properties": {"next": {"$ref": "#/$defs/n"}}}}, "$ref": "#/$defs/n"},
        {"type": "string", "format": "date"},
        {"allOf": [{"type": "integer", "multipleOf": 6, "maximum": 5000}, {"multipleOf": 4}]},
        {"type": "object", "properties": {"a": {"type": "number", "multipleOf": 0.25, "minimum": -1}}},
        {"type": "object", "patternProperties": {"^x[0-9]+$": {"type": "null"}}, "maxProperties": 4},
        {"type": "array", "prefixItems": [{"const": [1, {"b": "c"}]}], "items": {"type": "boolean"}},
    ]


@cache
def _vocabulary(size: int) -> Any:
    """A vocabulary of so many tokens; of 49,152 that of SmolLM2, where it has been fetched."""
    from tokenizers import Tokenizer

    from streamspec.paths import cache_dir
    from streamspec.runtime.text.grammar import Vocabulary
    from tests.support.byte_tokenizers import EOS, byte_level_of

    kept = cache_dir() / "bases" / "smollm2-135m" / "tokenizer.json"
    real = size == SMALL and kept.is_file()
    return Vocabulary(Tokenizer.from_file(str(kept)) if real else byte_level_of(size), size, [EOS])


SMALL, LARGE = 49_152, 262_144
STEPS = 12  # tokens that an answer is followed for


def _follow(grammar: Any, size: int) -> int:
    """Follows an answer of tokens drawn from those allowed."""
    state, random, steps = _vocabulary(size).start(grammar), Random(grammar.source), 0
    for steps in range(STEPS):  # noqa: B007
        allowed = state.after()
        if allowed.over or (tokens := np.flatnonzero(allowed.mask)[-2000:]).size == 0:
            break
        if (token := int(random.choice(tokens))) == 0:  # end-of-text
            break
        state.advance([token])
    return steps


def run_schema(data: bytes, folder: Path, size: int = SMALL) -> object:
    from streamspec.runtime.text.grammar import Grammar

    return _follow(Grammar.json_schema(data.decode("utf-8", "replace")), size)


def make_pattern(random: Random) -> bytes:
    samples = [
        rb"[a-z]+@[a-z]+\.(com|org)",
        rb"(\d{3}-){2}\d{4}",
        rb"(?i:yes|no)\s*",
        rb"\p{Lu}\w*[^\x00-\x1f]{0,20}",
        rb"(a|b)*c{1,9}",
    ]
    return mutate_bytes(random, random.choice(samples), samples)


def run_pattern(data: bytes, folder: Path, size: int = SMALL) -> object:
    from streamspec.runtime.text.grammar import Grammar

    return _follow(Grammar.regex(data.decode("utf-8", "replace")), size)


def _requests() -> list[Any]:
    talk = [{"role": "system", "content": "be good"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    items = [
        {"role": "user", "content": "hi"},
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "5"}]},
    ]
    shared = {
        "model": "m",
        "stream": True,
        "stream_options": {"include_usage": True},
        "stop": ["a", "b"],
        "seed": 5,
        "temperature": 0.5,
        "top_p": 0.9,
        "max_tokens": 9,
        "top_k": 3,
        "n": 1,
    }
    return [
        shared | {"messages": talk, "logprobs": True, "top_logprobs": 3, "tools": []},
        {
            "model": "m",
            "messages": talk,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "object", "properties": {"a": {"type": "integer"}}}},
            },
        },
        {"model": "m", "messages": talk, "grammar": {"choice": ["a", "b"]}},
        shared | {"prompt": "abc", "logprobs": 2},
        {"model": "m", "input": "hi", "text": {"format": {"type": "json_object"}}, "top_logprobs": 2},
        {"model": "m", "input": items, "instructions": "Be brief.", "tools": [{"type": "function", "name": "f"}]},
        {"model": "m", "prompt": [1, 2, 3], "grammar": {"regex": "[a-z]+"}},
    ]


def run_request(data: bytes, folder: Path) -> object:
    """Refused with a status and one short line, or understood; a request is read as each path reads it."""
    from streamspec.serve.api.chat_requests import read_chat, read_completion
    from streamspec.serve.api.responses_request import read_responses
    from streamspec.serve.errors import ApiError
    from streamspec.serve.limits import Limits

    understood = 0
    for read in (read_chat, read_completion, read_responses):
        try:
            read(data, Limits())
            understood += 1
        except ApiError as error:
            if not 400 <= error.status < 500 or "\n" in error.message or len(error.message) > 2000:
                raise AssertionError(f"{error.status} {error.message}") from error
    if not understood:
        raise DataError("neither a chat nor a completion nor a response")
    return understood


USER_TEXT = {
    "template": Target(make_template, run_template),
    "examples": Target(of_json(_examples), run_examples),
    "yaml": Target(make_yaml, run_yaml),
    "schema": Target(of_json(_schemas), run_schema),
    "pattern": Target(make_pattern, run_pattern),
    "schema_large": Target(of_json(_schemas), partial(run_schema, size=LARGE)),
    "pattern_large": Target(make_pattern, partial(run_pattern, size=LARGE)),
    "request": Target(of_json(_requests), run_request),
}
