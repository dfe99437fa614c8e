"""Finds how the bundle's chat template writes a call, by rendering calls of a known function.

Families differ in the tags around a call, in whether it is a JSON object with the name or a name before its arguments,
and in how they write these: as JSON, each between tags, or in Gemma 4's quotes. `tests/serve/api/test_call_forms.py`
covers this file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from streamspec.errors import StreamspecError
from streamspec.prompt.thought_tags import ThoughtTags, tags_of
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
# How gpt-oss writes the beginning of a call, up to its name, and the rest up to its arguments: the recipient stands
# before the channel, as in its template, or after it, as most answers have it.
CHANNELED = (" to=functions.", "<|channel|>commentary json<|message|>")
KINDS = (" <|constrain|>json", " json", " code", "")
CHANNELED_OTHERWISE = (
    *((CHANNELED[0], f"<|channel|>commentary{kind}<|message|>") for kind in KINDS if kind != " json"),
    *(
        (f"<|channel|>{name}{CHANNELED[0]}", f"{kind}<|message|>")
        for name in ("commentary", "analysis")
        for kind in KINDS
    ),
)
TAG = re.compile(r"\s*(<[^<>\s][^<>]*>|\[[A-Z_]+\])")
OF_ID = re.compile(TAG.pattern + ID)  # Mistral's models write an id between name and arguments, or none
LAST_ID = re.compile(rf'\s*,\s*"(\w+)"\s*:\s*"{ID}"(?=\s*\}})')  # or as the last member of a JSON object


@dataclass(frozen=True)
class Tagged:
    """Arguments each between tags, texts unquoted: `begin` KEY `colon` VALUE `end`, and `close` after the last."""

    begin: str
    colon: str
    end: str
    close: str = ""


@dataclass(frozen=True)
class Quoted:
    """Arguments as in JSON, with keys as they are and texts between `quote`s."""

    quote: str


@dataclass(frozen=True)
class CallForm:
    """Describes how a template writes calls: `prefix` NAME `middle` ARGUMENTS `suffix`, and `between` in place of the
    last between the arguments of a call and the name of the next; None where an answer has one call only.

    `begin`: what a call begins with after words. `field`: where a call is a JSON object, the name of its arguments;
    else ""; `id_member`: what it has after these, the call's id, where models write one. `style`: how arguments are
    written, None for JSON. `specials`: the special tokens of these texts, by their ids. `messages`: the tags of the
    messages that answers consist of, None for others.
    """

    prefix: str
    middle: str
    suffix: str
    between: str | None
    begin: str
    field: str = ""
    id_member: str = ""
    style: Tagged | Quoted | None = None
    specials: tuple[tuple[str, int], ...] = ()
    messages: ThoughtTags | None = None

    @property
    def ways(self) -> tuple[tuple[str, str], ...]:
        """What stands before the name of a call, and between it and the arguments: the template's way first, then those
        that the model has as well."""
        if (self.prefix, self.middle) == CHANNELED:
            return (CHANNELED, *CHANNELED_OTHERWISE)
        return tuple(dict.fromkeys((self.prefix, middle) for middle in (self.middle, OF_ID.sub("", self.middle))))

    @property
    def id_field(self) -> str:
        """The name of a call's id in its JSON object; "" for none."""
        member = LAST_ID.match(self.id_member + "}")
        return "" if member is None else member[1]

    @property
    def trigger(self) -> str:
        """The tag with which calls begin, wherever they do; "" for none."""
        tag = TAG.match(self.prefix)
        return "" if tag is None else tag[1]

    @property
    def texts(self) -> tuple[str, ...]:
        """All that a template or a model writes in this form around names and arguments."""
        styled = () if self.style is None else vars(self.style).values()
        heads = () if self.messages is None else (*self.messages.heads, self.messages.end)
        return (*(text for way in self.ways for text in way), self.suffix, self.between or "", *styled, *heads)

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
            found = "tools: the bundle's chat template writes calls in no known form, or in tags that are no tokens"
            expected = "JSON objects with name and arguments, or a name before its arguments; leave tools out"
            raise invalid(f"{found}; expected {expected}", "tools", "unsupported_value")
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
        if shown is None or (form := _split(shown)) is None:
            return None
        form = self._with_next(form, shown)
        if form.field:
            form = self._with_object(form)
        elif isinstance(form.style, Tagged) and (form := self._with_close(form, form.style)) is None:
            return None
        if self.tags is not None and self.tags.heads:
            if (form.prefix, form.middle) != CHANNELED or not self._are_tokens(self.tags):
                return None
            form = replace(form, messages=self.tags)
        form = replace(form, specials=tuple(self._special_in("".join(form.texts))))
        return form if form.begin or form.field else None

    def _with_next(self, form: CallForm, shown: str) -> CallForm:
        """Returns the form with what stands between two calls and begins each, and without the end of the turn."""
        two = self._shown(ARGUMENTS, calls=2) or ""
        found = re.match(f"{re.escape(shown.removesuffix(form.suffix))}(.*?){NAME}", two, re.DOTALL)
        between = None if found is None else found[1]
        begin = form.prefix if between is None else _common_suffix(form.prefix, between).lstrip(">")
        begin = begin.strip() or form.prefix.strip()
        return replace(form, suffix=self._ended(form.suffix), between=between, begin=begin)

    def _are_tokens(self, tags: ThoughtTags) -> bool:
        known = {token for token, _ in self._special_in("".join((tags.begin, tags.end, *tags.heads)))}
        return all(set(re.findall(r"<\|.*?\|>", tag)) <= known for tag in (tags.begin, tags.end, *tags.heads))

    def _with_object(self, form: CallForm) -> CallForm:
        """Returns the form of a JSON object with the id of its call, and without what a template says of it besides,
        which is no model's affair."""
        around, id_member = self._after_words(), LAST_ID.match(form.suffix)
        return replace(
            form,
            id_member="" if id_member is None else id_member[0],
            suffix=form.suffix[form.suffix.find("}") :],
            between=form.between and form.between[form.between.find("}") :],
            begin=_before_object(form.prefix).rpartition("\n")[2].strip() if around is None else around,
        )

    def _with_close(self, form: CallForm, style: Tagged) -> CallForm | None:
        """Returns the form with what closes a call's arguments; None where a call without some is written otherwise."""
        empty, end = self._shown({}), re.match(r"\s*(?:>\s*)?</[^<>]+>", form.suffix)
        if empty is None or self._ended(empty) != form.prefix + NAME + form.middle + form.suffix:
            return None
        close = "" if end is None else end[0]
        between = form.between and form.between[len(close) :]
        return replace(form, suffix=form.suffix[len(close) :], between=between, style=replace(style, close=close))

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
                at = answer.find(NAME)
                if self.tags is not None and self.tags.end in answer[:at]:
                    return answer[:at].rpartition(self.tags.end)[2].lstrip() + answer[at:]
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
        return None if found is None else _before_object(found.prefix)

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


def _split(text: str) -> CallForm | None:
    """Splits the probe's call into what stands before its name, between name and arguments, and after these; with the
    field of the arguments and their style."""
    at, field = next(((at, field) for at, call, _ in _objects(text) if (field := _field_of(call))), (0, ""))
    start = text.find(NAME, at)
    if start < 0:
        return None
    prefix, rest = text[:start], text[start + len(NAME) :]
    for brace, value, end in _objects(rest):
        if value == ARGUMENTS:
            return CallForm(prefix, rest[:brace], rest[end:], None, prefix, field)
    return None if field else _not_json(prefix, rest)


def _not_json(prefix: str, rest: str) -> CallForm | None:
    """The same of a call whose arguments, at the beginning of `rest`, are no JSON."""
    marks = [rest.find(word) for word in (*FIRST, *SECOND)]
    if -1 in marks or marks != sorted(marks):
        return None
    ends = [at + len(word) for at, word in zip(marks, (*FIRST, *SECOND), strict=True)]
    before, colon, comma, after = rest[: marks[0]], rest[ends[0] : marks[1]], rest[ends[1] : marks[2]], rest[ends[3] :]
    if comma.endswith(","):
        quote = comma.removesuffix(",")
        if quote and before == "{" and colon == ":" + quote and after.startswith(quote + "}"):
            return CallForm(prefix, "", after[len(quote) + 1 :], None, prefix, style=Quoted(quote))
        return None
    begin = _common_suffix(before, comma)
    style = Tagged(begin, colon, end=comma.removesuffix(begin))
    if not begin.strip() or not style.end.strip() or not after.startswith(style.end):
        return None
    return CallForm(prefix, before.removesuffix(begin), after.removeprefix(style.end), None, prefix, style=style)


def _objects(text: str) -> Iterator[tuple[int, dict[str, Any], int]]:
    """Yields the JSON objects of a text, each between where it begins and where it ends."""
    for brace in re.finditer(r"\{", text):
        try:
            value, end = json.JSONDecoder().raw_decode(text, brace.start())
        except ValueError:
            continue
        yield brace.start(), value, end


def _field_of(call: dict[str, Any]) -> str:
    """Returns the name of the arguments in a JSON object, if it is the probe's call and its name comes first; else
    ""."""
    keys = list(call) if call.get("name") == NAME else []
    return next((key for key in keys[keys.index("name") :] if call[key] == ARGUMENTS), "") if keys else ""


def _before_object(prefix: str) -> str:
    return prefix.rpartition("{")[0].strip()


def _common_suffix(a: str, b: str) -> str:
    count = next(
        (i for i, (x, y) in enumerate(zip(reversed(a), reversed(b), strict=False)) if x != y), min(len(a), len(b))
    )
    return a[len(a) - count :]
