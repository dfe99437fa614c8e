"""Tools: finds how the bundle's chat template writes a call, constrains forced calls to it, parses calls in answers.

The template is asked, by rendering a call of a known name: families differ in the tags around it and in the name of the
arguments. A form that is no JSON object with the name before the arguments is refused.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from streamspec.errors import StreamspecError
from streamspec.prompt.thought_tags import TAGS, tags_of
from streamspec.runtime import Grammar, Session
from streamspec.runtime.text.grammar_schema import BY_NAME, VALUES
from streamspec.serve.api.checked_grammars import CheckedGrammars
from streamspec.serve.errors import ApiError, invalid

NAME, ARGUMENTS = "probe_function", {"probe_argument": "probe value"}
PROBE = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "A probe.",
        "parameters": {
            "type": "object",
            "properties": {"probe_argument": {"type": "string", "description": "A text."}},
        },
    },
}
ASK = {"role": "user", "content": "Hello"}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "callprobe", "type": "function", "function": {"name": NAME, "arguments": ARGUMENTS}}],
}
WORDS = "Probe words."
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
OTHER_ROOTS = {"type", "$ref", "anyOf", "oneOf", "allOf", "const", "enum"}  # a schema without them is an object's
ID = string.ascii_lowercase + string.digits
NEXT = re.compile(r"\s*[,;]?\s*(?=\{)")  # between two calls that share their tags
COLON = re.compile(r"\s*:\s*")
# Tags around thoughts that the runtime left in the text, as the template does not name them; the first may be lacking.
THOUGHT_TAGS, THOUGHT_ENDS = tuple(tags.begin for tags in TAGS), tuple(tags.end for tags in TAGS)


@dataclass(frozen=True)
class Tools:
    """Tools of a request. `schemas`: as they came; `forced`: the functions one of which has to be called, () for none;
    `named`: whether the request names it; `parallel`: whether an answer may have several calls.
    """

    schemas: Sequence[Mapping[str, Any]]
    forced: tuple[str, ...] = ()
    named: bool = False
    parallel: bool = True

    @property
    def names(self) -> list[str]:
        return [tool["function"]["name"] for tool in self.schemas]

    def grammar(self, form: CallForm, grammars: CheckedGrammars) -> Grammar:
        """Returns the grammar of a call of one of the functions `forced`. Raises ApiError for a schema that cannot be
        kept to.
        """
        calls, shared = [], {}
        for i, tool in enumerate(self.schemas):
            function = tool["function"]
            if function["name"] not in self.forced:
                continue
            shared[f"t{i}"] = _moved(_parameters(function), f"#/$defs/t{i}")
            calls.append(
                {
                    "type": "object",
                    "properties": {"name": {"const": function["name"]}, form.arguments: {"$ref": f"#/$defs/t{i}"}},
                    "required": ["name", form.arguments],
                    "additionalProperties": False,
                }
            )
        try:
            return grammars.make("json_schema", {"anyOf": calls, "$defs": shared})
        except StreamspecError as error:
            raise self._fault(grammars) or invalid(str(error), "tools") from None

    def _fault(self, grammars: CheckedGrammars) -> ApiError | None:
        """Returns the error of the first tool whose schema alone cannot be kept to; None where only all together."""
        for i, tool in enumerate(self.schemas):
            function = tool["function"]
            try:
                if function["name"] in self.forced:
                    grammars.make("json_schema", _parameters(function))
            except StreamspecError as error:
                return invalid(f"the parameters of the tool {function['name']}: {error}", f"tools.{i}")
        return None


def _parameters(function: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the schema of a function's arguments."""
    parameters = function.get("parameters", NO_PARAMETERS)
    return dict(parameters) if OTHER_ROOTS & parameters.keys() else {"type": "object", **parameters}


@dataclass(frozen=True)
class CallForm:
    """Describes how a template writes a call.

    `opening`: the text before the JSON object where an answer begins with a call; `shown`: what is
    left of that text after words, without special tokens; `arguments`: the name of the arguments'
    field.
    """

    opening: str
    shown: str
    arguments: str

    @classmethod
    def of(cls, session: Session) -> CallForm:
        """Finds the form of the session's template. Raises ApiError for a prompt format that does
        not know tools."""
        layout, specials = session.manifest.prompt_format, session.special_tokens()

        def render(messages: list[Any], prompt: bool) -> str:
            return layout.render(messages, session.template, specials, tools=[PROBE], add_generation_prompt=prompt)

        try:
            before, after = render([ASK], True), render([ASK, CALL], False)
            spoken = render([ASK, CALL | {"content": WORDS}], False)
        except StreamspecError as error:
            left_out = "the bundle's chat template leaves out tools; expected one that shows them; send no tools"
            raise invalid(left_out if NAME in error.found else str(error), "tools", "unsupported_value") from None
        tags = tags_of(session.template)
        if tags is not None and before.rstrip().endswith(begin := tags.begin.rstrip()):  # which no call belongs to
            before = before.rstrip().removesuffix(begin)
        call = _call_in(after.removeprefix(before)) if after.startswith(before) else None
        if call is None:
            raise invalid(
                "tools: the bundle's chat template writes no calls as JSON objects with name and arguments; expected "
                "a template that does; leave tools out",
                "tools",
                "unsupported_value",
            )
        opening, arguments = call
        if tags is not None and tags.end in opening:
            opening = opening.rpartition(tags.end)[2].lstrip()
        around, _ = _call_in(spoken.partition(WORDS)[2]) or (opening.strip().rpartition("\n")[2], arguments)
        ids = session.tokenizer.encode(around, add_special_tokens=False).ids
        return cls(opening, session.tokenizer.decode(ids).strip(), arguments)


class CallParser:
    """Splits the text of an answer into content and calls, as it comes. `calls`: those so far, in
    OpenAI's shape. What a thought holds is content, also where it looks like a call."""

    def __init__(self, form: CallForm, tools: Tools) -> None:
        self.calls: list[dict[str, Any]] = []
        self._form, self._tools = form, tools
        self._held = ""  # text that is not known to be content
        self._calling = False  # whether what is held begins with a call
        self._thinking = False  # whether what is held begins within a thought
        self._talking = False  # whether words came first where only an answer's beginning can be a call
        self._sent = 0  # characters held that pieces of a forced call have
        self._whole = True  # whether no call was cut short
        call = re.escape(form.shown) + r"\s*(?:\{|\Z)" if form.shown else r"\{"
        self._marks = re.compile("|".join([*map(re.escape, THOUGHT_TAGS + THOUGHT_ENDS), f"(?P<begin>{call})"]))

    def push(self, text: str, last: bool) -> tuple[str, list[dict[str, Any]]]:
        """Returns the content and the pieces of calls that became certain with `text`."""
        self._held += text
        if self._tools.forced:
            return "", self._forced(last)
        content = "" if self._calling else self._content(last)
        if not (self._calling and last):
            return content, []
        content += self._parsed()
        return content, [{"index": i} | call for i, call in enumerate(self.calls)]

    def reason(self, reason: str) -> str:
        """OpenAI's word for why the answer ended, `reason` where it has no whole calls."""
        called = bool(self.calls) and self._whole and not self._tools.named
        return "tool_calls" if called and reason == "stop" else reason

    def _content(self, last: bool) -> str:
        """Takes the content, up to a call, out of the held text."""
        held, end = self._held, 0
        for mark in self._marks.finditer(held):
            if self._begins_call(mark, held[end : mark.start()]):
                self._calling, end = mark[0].endswith("{"), mark.start()
                break
            end = mark.end()
        else:
            begun = max(_overlap(held, tag) for tag in (self._form.shown, *THOUGHT_TAGS, *THOUGHT_ENDS))
            self._hear(held[end : len(held) - begun])
            end = len(held) - begun
        content = held if last and not self._calling else held[:end].rstrip()
        self._held = held[len(content) :]
        return content

    def _begins_call(self, mark: re.Match[str], before: str = "") -> bool:
        """Tells whether a call begins at `mark`, and not within a thought. `before`: the text since the mark before."""
        self._hear(before)
        if mark["begin"] is not None:
            return not (self._thinking or self._talking)
        self._talking = self._talking and not self._ends_thought(mark)
        self._thinking = mark[0] in THOUGHT_TAGS
        return False

    def _hear(self, words: str) -> None:
        self._talking |= not (self._form.shown or self._thinking) and bool(words.strip())

    def _ends_thought(self, mark: re.Match[str]) -> bool:
        """Tells whether all text before `mark` was a thought, whose beginning the answer lacks."""
        return mark[0] in THOUGHT_ENDS and not self._thinking

    def _forced(self, last: bool) -> list[dict[str, Any]]:
        """Returns the pieces of the single call that the grammar admits."""
        held, pieces = self._held[max(0, self._held.find('{"name": ')) :], []  # after a thought the opening comes first
        if not self.calls:
            for name in self._tools.forced:
                head = f'{{"name": {json.dumps(name)}, {json.dumps(self._form.arguments)}: '
                if held.startswith(head):
                    self.calls, self._sent = [_call(name, "")], len(head)
                    pieces.append({"index": 0} | _call(name, "", self.calls[0]["id"]))
        if last:
            self._whole = _json_of(held) is not None
        if self.calls:
            end = len(held) if last and not self._whole else len(held) - 1  # the last brace is not the arguments'
            if end > self._sent:
                more = held[self._sent : end]
                self.calls[0]["function"]["arguments"] += more
                pieces.append({"index": 0, "function": {"arguments": more}})
                self._sent = end
        return pieces

    def _parsed(self) -> str:
        """Parses the calls in the held text, which begins with one. Returns the rest as content: calls of unknown
        tools, and everything from one on that is no JSON; other text after calls is left out."""
        text, content, at, broken = self._held, "", 0, False
        kept: int | None = 0  # where the content goes on
        while mark := self._marks.search(text, at):
            begin, at = mark.start(), mark.end()
            if self._ends_thought(mark):
                self.calls, content, kept, broken = [], "", 0, False
            if not self._begins_call(mark) or broken:
                continue
            found = _members(text, at - 1)
            while found is not None:
                call, at = self._called(found[0]), found[1]
                if call is not None:
                    content, kept = content + ("" if kept is None else text[kept:begin].rstrip()), None
                    self.calls += [call] if self._tools.parallel or not self.calls else []
                elif kept is None:
                    kept = begin
                if (gap := NEXT.match(text, at)) is None:
                    break
                begin = gap.end()
                found = _members(text, begin)
            broken = found is None or not self._form.shown
            kept = begin if found is None and kept is None else kept
        return content if kept is None else content + (text[kept:].rstrip() if self.calls else text[kept:])

    def _called(self, members: Mapping[str, tuple[Any, str]]) -> dict[str, Any] | None:
        """Returns the call that a JSON object is, with its arguments as they are written; None for no call of a
        tool."""
        (name, _), (arguments, written) = (members.get(key, (None, "")) for key in ("name", self._form.arguments))
        if isinstance(arguments, str):  # JSON within JSON
            arguments, written = _json_of(arguments), arguments
        known = name in self._tools.names and isinstance(arguments, dict)
        return _call(name, written) if known else None


def _call(name: str, arguments: str, id: str | None = None) -> dict[str, Any]:
    return {
        "id": id or "".join(secrets.choice(ID) for _ in range(9)),  # other lengths some templates refuse
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def _call_in(text: str) -> tuple[str, str] | None:
    """Finds the probe's call. Returns the text before it, and the name of its arguments."""
    for brace in re.finditer(r"\{", text):
        try:
            call, _ = json.JSONDecoder().raw_decode(text, brace.start())
        except ValueError:
            continue
        if isinstance(call, dict) and call.get("name") == NAME:
            keys = list(call)
            arguments = next((key for key, value in call.items() if value == ARGUMENTS), None)
            if arguments is not None and keys.index("name") < keys.index(arguments):
                return text[: brace.start()], arguments
    return None


def _moved(schema: Any, root: str, named: bool = False) -> Any:
    """Returns the schema with its references to itself pointing to `root`, where it lies now.
    `named`: `schema` is an object of schemas under free names."""
    if isinstance(schema, dict):
        return {
            key: root + value[1:]
            if key == "$ref" and not named and isinstance(value, str) and value.startswith("#")
            else value
            if key in VALUES and not named
            else _moved(value, root, key in BY_NAME and not named)
            for key, value in schema.items()
        }
    return [_moved(part, root) for part in schema] if isinstance(schema, list) else schema


def _overlap(text: str, tag: str) -> int:
    """Counts the characters at the end of `text` that `tag` may begin with."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0)


def _members(text: str, at: int) -> tuple[dict[str, tuple[Any, str]], int] | None:
    """Returns the members of the JSON object at `text[at]`, each as a value and as it is written, and where the object
    ends; None for what is no such object, or has a key twice."""
    members = dict[str, tuple[Any, str]]()
    try:
        _, end = STRICT.raw_decode(text, at)
        while (quote := text.find('"', at, end)) >= 0:
            key, at = STRICT.raw_decode(text, quote)
            colon = COLON.match(text, at)
            assert colon is not None
            start = colon.end()
            value, at = STRICT.raw_decode(text, start)
            if key in members:
                return None
            members[key] = value, text[start:at]
    except (ValueError, RecursionError):
        return None
    return members, end


def _json_of(text: str) -> Any:
    """Returns the value of JSON text, None for any other."""
    try:
        text.encode()  # halves of surrogate pairs are no text
        return STRICT.decode(text)
    except (ValueError, RecursionError):
        return None


def _no_number(text: str) -> Any:
    raise ValueError(text)


STRICT = json.JSONDecoder(parse_int=float, parse_constant=_no_number)  # NaN is no JSON; whole numbers of any length are
