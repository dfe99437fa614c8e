"""Vocabularies: text and its tokens, stop strings, offsets, and grammars, each held against its definition.

The tokenizers are tiny ones of both kinds, and the files that `STREAMSPEC_FUZZ_TOKENIZERS` names, separated as in PATH
(`--tokenizers` of the command): those of real models.
"""

from __future__ import annotations

import json
import os
import re
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from streamspec.errors import DataError
from tests.fuzz.targets.target import Target, fail, of_json

TOKENIZERS = "STREAMSPEC_FUZZ_TOKENIZERS"
MOST = 64  # tokens of a text, or of an answer
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "old": {"type": "boolean"}, "n": {"type": "integer"}},
    "required": ["name", "old"],
    "additionalProperties": False,
}
SCHEMAS: list[dict[str, Any]] = [
    PERSON,
    {"type": "array", "items": {"enum": ["é", "<|im_end|>", 1, None]}, "minItems": 1, "maxItems": 3},
    {"type": "string", "minLength": 2, "maxLength": 9},
    {"anyOf": [{"const": {"a": "日本"}}, {"type": "integer", "minimum": -20, "maximum": 300}]},
]
PATTERNS = ["[a-z]+@[a-z]{2,5}", "(é|日本|🙂){1,4}", "<\\|im_(start|end)\\|>x?", "[^a-z\\n]{1,9}", " {0,4}[0-9]{3}\\n*"]


@cache
def _files() -> list[str]:
    return [name for name in os.environ.get(TOKENIZERS, "").split(os.pathsep) if name]


@cache
def _made(number: int) -> tuple[Any, Any, list[int]]:
    """A tokenizer of that number, its vocabulary for grammars, and the ids of its added tokens."""
    from tokenizers import Tokenizer

    from streamspec.runtime.text.grammar import Vocabulary
    from tests.support.byte_tokenizers import EOS, byte_fallback, byte_level

    files = _files()
    made = Tokenizer.from_file(files[number]) if files else (byte_level, byte_fallback)[number]()
    special = [token for token, added in made.get_added_tokens_decoder().items() if added.special]
    ends = [special[0]] if special else [EOS]
    return made, Vocabulary(made, made.get_vocab_size(), ends), [*made.get_added_tokens_decoder()]


def _samples() -> list[Any]:
    texts = [
        "Hello, world!\n\n  x = 1",
        "naïve café 日本語 🙂👩‍👩‍👧 a\u0301",
        "<|im_start|>user\nhi<|im_end|>\n<s></s><bos>",
        '{"name": "ab", "old": true}',
        "▁a \u2581 \t\r\n 12345\u200b",
        "\x00\x7f\u0085\ufeffＡ ﬁ",
    ]
    return [
        {
            "tokenizer": number,
            "text": text,
            "ids": [7, 300, 45, 9001, 128_000, 12, 255, 256] * 2,
            "cuts": [1, 2, 1, 3],
            "stops": [text[2:5], "\n\n", "🙂", "end"],
            "walk": number,
            "schema": number % len(SCHEMAS),
            "pattern": number % len(PATTERNS),
            "choices": ["yes", "yes, " + text[:8], "日本"],
        }
        for number, text in enumerate(texts)
    ]


def run_vocabulary(data: bytes, folder: Path) -> object:
    """Reads the fields that have the right type; others are refused, as is what is no JSON."""
    try:
        asked = json.loads(data)
        text, ids, walk = str(asked["text"])[:400], [*map(int, asked["ids"])][:MOST], int(asked["walk"])
        stops = [stop for stop in map(str, asked["stops"]) if stop][:8]
        cuts = [1 + abs(int(cut)) % 9 for cut in asked["cuts"]][:MOST] or [1]
        number, schema, pattern = (abs(int(asked[name])) for name in ("tokenizer", "schema", "pattern"))
        choices = [str(choice)[:200] for choice in asked["choices"]][:8]
        "".join([text, *stops, *choices]).encode()
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
        raise DataError("no text with tokens") from None
    tokenizer, vocabulary, added = _made(number % (len(_files()) or 2))
    drawn = [added[i % len(added)] if i % 11 == 0 else abs(i) % tokenizer.get_vocab_size() for i in ids]
    encoded = tokenizer.encode(text, add_special_tokens=False).ids[:MOST]
    for tokens in (encoded, drawn):
        _check_stream(tokenizer, tokens, cuts, stops)
    _check_bytes(tokenizer, text)
    random = Random(walk)
    _check_schema(vocabulary, tokenizer, SCHEMAS[schema % len(SCHEMAS)], random)
    _check_pattern(vocabulary, tokenizer, PATTERNS[pattern % len(PATTERNS)], random)
    _check_choices(vocabulary, tokenizer, choices)
    return tokenizer


def _check_stream(tokenizer: Any, tokens: list[int], cuts: list[int], stops: list[str]) -> None:
    """However the tokens arrive, the text is that of all at once, up to the stop string that ends first."""
    from streamspec.runtime.text.detokenize import BROKEN, TextStream

    whole = tokenizer.decode(tokens, skip_special_tokens=True)
    if BROKEN in whole:
        return  # bytes that are no text: what stands for them may depend on the pieces
    for given in ([], stops):
        stream, shown, stopped, at, step = TextStream(tokenizer, given), "", False, 0, 0
        while at < len(tokens) and not stopped:
            piece = tokens[at : at + cuts[step % len(cuts)]]
            _, more, stopped = stream.push(piece)
            shown, at, step = shown + more, at + len(piece), step + 1
        if not stopped:
            more, stopped = stream.finish()
            shown += more
        ends = [(found + len(stop), found) for stop in given if (found := whole.find(stop)) >= 0]
        want = whole[: min(ends)[1]] if ends else whole
        if (shown, stopped) != (want, bool(ends)):
            fail(f"{tokens} in pieces of {cuts} with {given!r} gave {shown!r}, {stopped}; all at once {want!r}")


def _check_bytes(tokenizer: Any, text: str) -> None:
    """The bytes of its tokens are those of the text, and each begins where these do."""
    from streamspec.runtime.text.token_bytes import TextOffsets, TokenBytes, spelling

    ids = tokenizer.encode(text, add_special_tokens=False).ids
    known = TokenBytes(tokenizer)
    if spelling(tokenizer) is None or tokenizer.decode(ids, skip_special_tokens=False) != text:
        return  # a normalizer, or characters that the vocabulary lacks
    offsets, before, whole = TextOffsets(known, text), b"", text.encode()
    for token in ids:
        at, want, own = offsets.push(token), len(before.decode("utf-8", "ignore")), known(token)
        if at != want:
            fail(f"token {token} of {text!r} begins at {at}, not {want}")
        before += own or b""
    if before != whole:
        fail(f"the bytes of {ids} are {before!r}, not {whole!r}")


def _walked(vocabulary: Any, tokenizer: Any, grammar: Any, random: Random) -> str | None:
    """The text of an answer of allowed tokens, half of them of the likelier low ids; None where it did not end."""
    state, tokens, ends = vocabulary.start(grammar), list[int](), set(vocabulary._eos)
    for _ in range(MOST):
        allowed = state.after()
        found = np.flatnonzero(allowed.mask)
        if allowed.dead:
            fail(f"{tokens} leads nowhere under {grammar.source!r}")
        if allowed.over or not {*found[:50].tolist()} - ends or (ends & {*found.tolist()} and random.random() < 0.3):
            return str(tokenizer.decode(tokens, skip_special_tokens=False))
        token = int(random.choice(found[:300] if random.random() < 0.5 else found))
        if token in ends:
            return str(tokenizer.decode(tokens, skip_special_tokens=False))
        path = state.after((token,))
        state.advance([token])
        tokens.append(token)
        if not np.array_equal(path.mask, state.after().mask):
            fail(f"after {tokens} the mask of a draft is another than the answer's")
    return None


def _check_schema(vocabulary: Any, tokenizer: Any, schema: dict[str, Any], random: Random) -> None:
    from jsonschema import Draft202012Validator

    from streamspec.runtime.text.grammar import Grammar

    text = _walked(vocabulary, tokenizer, Grammar.json_schema(schema), random)
    if text is not None:
        Draft202012Validator(schema).validate(json.loads(text))


def _check_pattern(vocabulary: Any, tokenizer: Any, pattern: str, random: Random) -> None:
    from streamspec.runtime.text.grammar import Grammar

    text = _walked(vocabulary, tokenizer, Grammar.regex(pattern), random)
    if text is not None and not re.fullmatch(pattern, text):
        fail(f"{text!r} is no {pattern}")


def _check_choices(vocabulary: Any, tokenizer: Any, choices: list[str]) -> None:
    """Each text that may be chosen may be spelt as the tokenizer spells it, and only whole ones may end."""
    from streamspec.runtime.text.grammar import Grammar

    grammar, ends = Grammar.choice(choices), {*vocabulary._eos}
    special = {token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special}
    for text in choices:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        if special & {*ids} or tokenizer.decode(ids, skip_special_tokens=False) != text:
            continue  # text that only other tokens spell
        state = vocabulary.start(grammar)
        for at, token in enumerate(ids):
            allowed = state.after()
            if allowed.over or not allowed.mask[token]:
                fail(f"token {token}, number {at} of {ids}, is not allowed by the choice of {choices!r}")
            state.advance([token])
        last = state.after()
        if not last.over and not any(last.mask[end] for end in ends):
            fail(f"{text!r} may not end under the choice of {choices!r}")


VOCABULARIES = {"vocabulary": Target(of_json(_samples), run_vocabulary)}
