"""Finds how the bundle's chat template writes a call, by rendering calls of a known function.

Families differ in the tags around a call, in whether it is a JSON object with the name or a name before its arguments,
and in how they write these: as JSON, each between tags, or in Gemma 4's quotes. `tests/serve/api/test_call_forms.py`
covers this file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from streamspec.errors import StreamspecError
from streamspec.prompt.thought_tags import tags_of
from streamspec.runtime import Session
from streamspec.serve.errors import invalid

NAME, ID = "probe_function", "callprobe"
FIRST, SECOND = ("probe_argument", "probe value"), ("probe_second", "another value")
ARGUMENTS = dict((FIRST, SECOND))
PROBE = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "A probe.",
        "parameters": {
            "type": "object",
            "properties": {name: {"type": "string", "description": "A text."} for name in ARGUMENTS},
        },
    },
}
ASK = {"role": "user", "content": "Hello"}
WORDS = "Probe words."
TAG = re.compile(r"\s*(<[^<>\s][^<>]*>|\[[A-Z_]+\])")


@dataclass(frozen=True)
class Tagged:
    """Arguments each between tags, texts unquoted: `begin` KEY `colon` VALUE `end`, and `close` after the last."""

    begin: str
    colon: str
    end: str
    close: str


@dataclass(frozen=True)
class Quoted:
    """Arguments as in JSON, with keys as they are and texts between `quote`s."""

    quote: str


@dataclass(frozen=True)
class CallForm:
    """Describes how a template writes calls: `prefix` NAME `middle` ARGUMENTS `suffix`, and `between` in place of the
    last between the arguments of a call and the name of the next; None where an answer has one call only.

    `begin`: what a call begins with after words. `field`: where a call is a JSON object, the name of its arguments;
    else "". `style`: how arguments are written, None for JSON. `specials`: the special tokens of these texts, by their
    ids.
    """

    prefix: str
    middle: str
    suffix: str
    between: str | None
    begin: str
    field: str = ""
    style: Tagged | Quoted | None = None
    specials: tuple[tuple[str, int], ...] = ()

    @property
    def trigger(self) -> str:
        """The tag with which calls begin, wherever they do; "" for none."""
        tag = TAG.match(self.prefix)
        return "" if tag is None else tag[1]

    @classmethod
    def of(cls, session: Session) -> CallForm:
        """Finds the form of the session's template. Raises ApiError for a prompt format that does not know tools."""
        try:
            probes = _Probes(session)
            form = probes.form()
        except StreamspecError as error:
            left_out = "the bundle's chat template leaves out tools; expected one that shows them; send no tools"
            raise invalid(left_out if NAME in error.found else str(error), "tools", "unsupported_value") from None
        if form is None:
            raise invalid(
                "tools: the bundle's chat template writes calls in no known form; expected JSON objects with name and "
                "arguments, or a name before its arguments; leave tools out",
                "tools",
                "unsupported_value",
            )
        return form


class _Probes:
    """What a template makes of calls."""

    def __init__(self, session: Session) -> None:
        self._session, self._specials = session, session.special_tokens()
        self.tags = tags_of(session.template)
        self._before = self._render([ASK], True)
        said = self._render([ASK, {"role": "assistant", "content": WORDS}], False)
        self._turn_end = said.rpartition(WORDS)[2]

    def form(self) -> CallForm | None:
        """Returns the form; None for one that is not known here."""
        shown = self._shown(ARGUMENTS)
        found = None if shown is None else _split(shown)
        if shown is None or found is None:
            return None
        prefix, middle, rest, field, style = found
        between, begin = None, prefix
        if (two := self._shown(ARGUMENTS, calls=2)) is not None and two.startswith(shown[: len(shown) - len(rest)]):
            after = two[len(shown) - len(rest) :]
            if NAME in after:
                between = after[: after.index(NAME)]
                begin = _common_suffix(prefix, between).lstrip(">")
        rest = self._ended(rest)
        if field:
            rest = rest[
                rest.find("}") :
            ]  # what a template says of a call besides, such as its id, is no model's affair
            around = self._after_words()
            begin = _before_object(prefix).rpartition("\n")[2] if around is None else around
            between = between and between[between.find("}") :]
        if isinstance(style, Tagged):
            empty = self._shown({})
            head = prefix + NAME + middle
            style = _closed(style, rest) if empty is not None and self._ended(empty) == head + rest else None
            if style is None:
                return None
            rest, between = rest[len(style.close) :], between and between[len(style.close) :]
        if not field and not begin.strip():
            begin = prefix
        texts = (prefix, middle, rest, between or "", *(vars(style).values() if style is not None else ()))
        form = CallForm(
            prefix, middle, rest, between, begin.strip(), field, style, tuple(self._special_in("".join(texts)))
        )
        return form if form.begin or field else None

    def _render(self, messages: list[Any], prompt: bool) -> str:
        layout, template = self._session.manifest.prompt_format, self._session.template
        return layout.render(messages, template, self._specials, tools=[PROBE], add_generation_prompt=prompt)

    def _shown(self, arguments: Any, calls: int = 1, content: str | None = None) -> str | None:
        """Returns an answer of calls; None where the template does not write it after the prompt."""
        call = {"id": ID, "type": "function", "function": {"name": NAME, "arguments": arguments}}
        message = {"role": "assistant", "content": content, "tool_calls": [call] * calls}
        try:
            after = self._render([ASK, message], False)
        except StreamspecError:
            if calls == 1 and content is None:
                raise
            return None
        for before in self._beginnings():
            if after.startswith(before):
                answer = after[len(before) :]
                if self.tags is not None and self.tags.end in answer[: answer.find(NAME)]:
                    answer = (
                        answer[: answer.find(NAME)].rpartition(self.tags.end)[2].lstrip() + answer[answer.find(NAME) :]
                    )
                return answer
        return None

    def _beginnings(self) -> Iterator[str]:
        """Yields the prompt, without a thought that it opens or leaves empty, which no call belongs to."""
        yield self._before
        if self.tags is not None:
            begin, end = re.escape(self.tags.begin.rstrip()), re.escape(self.tags.end)
            yield re.sub(rf"{begin}\s*({end}\s*)?\Z", "", self._before)

    def _after_words(self) -> str | None:
        """Returns what stands between words and the JSON object of a call."""
        spoken = self._shown(ARGUMENTS, content=WORDS)
        at = -1 if spoken is None else spoken.find(WORDS)
        found = None if spoken is None or at < 0 else _split(spoken[at + len(WORDS) :])
        return None if found is None else _before_object(found[0])

    def _ended(self, rest: str) -> str:
        """Returns what follows arguments without the end of the turn."""
        rest = rest.removesuffix(self._turn_end) if self._turn_end else rest
        tokenizer = self._session.tokenizer
        ends = filter(None, map(tokenizer.id_to_token, self._session.manifest.model.eos_token_ids))
        return rest[: min((rest.find(end) for end in ends if end in rest), default=len(rest))]

    def _special_in(self, text: str) -> Iterator[tuple[str, int]]:
        for i, token in self._session.tokenizer.get_added_tokens_decoder().items():
            if token.special and token.content in text:
                yield token.content, i


def _split(text: str) -> tuple[str, str, str, str, Tagged | Quoted | None] | None:
    """Splits the probe's call into what stands before its name, between name and arguments, and after these; with the
    field of the arguments and their style."""
    call = _object_in(text)
    start = text.find(NAME) if call is None else text.index(NAME, call[0])
    if start < 0:
        return None
    prefix, rest = text[:start], text[start + len(NAME) :]
    for brace in re.finditer(r"\{", rest):
        try:
            value, end = json.JSONDecoder().raw_decode(rest, brace.start())
        except ValueError:
            continue
        if value == ARGUMENTS:
            return prefix, rest[: brace.start()], rest[end:], "" if call is None else call[1], None
    marks = [rest.find(word) for word in (*FIRST, *SECOND)]
    if call is not None or -1 in marks or marks != sorted(marks):
        return None
    ends = [at + len(word) for at, word in zip(marks, (*FIRST, *SECOND), strict=True)]
    before, colon, comma, after = rest[: marks[0]], rest[ends[0] : marks[1]], rest[ends[1] : marks[2]], rest[ends[3] :]
    if comma.endswith(","):
        quote = comma.removesuffix(",")
        if quote and before == "{" and colon == ":" + quote and after.startswith(quote + "}"):
            return prefix, "", after[len(quote) + 1 :], "", Quoted(quote)
        return None
    begin = _common_suffix(before, comma)
    value_end = comma[: len(comma) - len(begin)]
    if not begin.strip() or not value_end.strip() or not after.startswith(value_end):
        return None
    return prefix, before[: len(before) - len(begin)], after[len(value_end) :], "", Tagged(begin, colon, value_end, "")


def _closed(style: Tagged, rest: str) -> Tagged:
    """Returns the style with what closes a call's arguments. `rest`: what follows the last."""
    end = re.match(r"\s*(?:>\s*)?</[^<>]+>", rest)
    return Tagged(style.begin, style.colon, style.end, "" if end is None else end[0])


def _object_in(text: str) -> tuple[int, str] | None:
    """Finds a JSON object that is the probe's call. Returns where it begins, and the name of its arguments."""
    for brace in re.finditer(r"\{", text):
        try:
            call, _ = json.JSONDecoder().raw_decode(text, brace.start())
        except ValueError:
            continue
        if isinstance(call, dict) and call.get("name") == NAME:
            keys = list(call)
            arguments = next((key for key, value in call.items() if value == ARGUMENTS), None)
            if arguments is not None and keys.index("name") < keys.index(arguments):
                return brace.start(), arguments
    return None


def _before_object(prefix: str) -> str:
    return prefix.rpartition("{")[0].strip()


def _common_suffix(a: str, b: str) -> str:
    count = next(
        (i for i, (x, y) in enumerate(zip(reversed(a), reversed(b), strict=False)) if x != y), min(len(a), len(b))
    )
    return a[len(a) - count :]
