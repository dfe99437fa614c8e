"""Tools: finds how the bundle's chat template writes a call, constrains forced calls to it, parses calls in answers.

The template is asked, by rendering a call of a known name: families differ in the tags around it and in the name of the
arguments. A form that is no JSON object with the name before the arguments is refused.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from streamspec.errors import StreamspecError
from streamspec.runtime import Grammar, Session
from streamspec.serve.api.checked_grammars import CheckedGrammars
from streamspec.serve.errors import invalid

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
BY_NAME = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}  # schemas by free names
LITERAL = {"const", "enum", "default", "examples"}  # values, no schemas
ID = string.ascii_lowercase + string.digits
NEXT = re.compile(r"\s*[,;]?\s*(?=\{)")  # between two calls that share their tags


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
            parameters = function.get("parameters", NO_PARAMETERS)
            if not OTHER_ROOTS & parameters.keys():
                parameters = {"type": "object"} | parameters
            shared[f"t{i}"] = _moved(parameters, f"#/$defs/t{i}")
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
            raise invalid(str(error), "tools") from None


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
            raise invalid(str(error), "tools", "unsupported_value") from None
        call = _call_in(after.removeprefix(before)) if after.startswith(before) else None
        if call is None:
            raise invalid(
                "tools: the bundle's chat template writes no calls as JSON objects with name and arguments; expected "
                "a template that does; leave tools out",
                "tools",
                "unsupported_value",
            )
        opening, arguments = call
        tags, _ = _call_in(spoken.partition(WORDS)[2]) or (opening.strip().rpartition("\n")[2], arguments)
        ids = session.tokenizer.encode(tags, add_special_tokens=False).ids
        return cls(opening, session.tokenizer.decode(ids).strip(), arguments)


class CallParser:
    """Splits the text of an answer into content and calls, as it comes. `calls`: those so far, in
    OpenAI's shape."""

    def __init__(self, form: CallForm, tools: Tools) -> None:
        self.calls: list[dict[str, Any]] = []
        self._form, self._tools = form, tools
        self._held = ""  # text that is not known to be content
        self._calling = False  # whether what is held begins with a call
        self._talking = False  # whether words came first where only an answer's beginning can be a call
        self._sent = 0  # characters held that pieces of a forced call have
        self._whole = True  # whether no call was cut short

    def push(self, text: str, last: bool) -> tuple[str, list[dict[str, Any]]]:
        """Returns the content and the pieces of calls that became certain with `text`."""
        self._held += text
        if self._tools.forced:
            return "", self._forced(last)
        content = "" if self._calling else self._content(last)
        if not (self._calling and last):
            return content, []
        self.calls = self._parsed()
        if not self.calls:
            return content + self._held, []
        return content, [{"index": i} | call for i, call in enumerate(self.calls)]

    def reason(self, reason: str) -> str:
        """OpenAI's word for why the answer ended, `reason` where it has no whole calls."""
        called = bool(self.calls) and self._whole and not self._tools.named
        return "tool_calls" if called and reason == "stop" else reason

    def _content(self, last: bool) -> str:
        """Takes the content, up to a call, out of the held text."""
        held = self._held
        if self._form.shown:
            call = re.search(re.escape(self._form.shown) + r"\s*(\{|\Z)", held)
            self._calling = call is not None and bool(call[1])
            end = len(held) - _overlap(held, self._form.shown) if call is None else call.start()
        else:  # no tags: a call is an answer that begins with a brace
            self._talking = self._talking or held.lstrip()[:1] not in ("", "{")
            self._calling = not self._talking and bool(held.strip())
            end = len(held) if self._talking else 0
        content = held if last and not self._calling else held[:end].rstrip()
        self._held = held[len(content) :]
        return content

    def _forced(self, last: bool) -> list[dict[str, Any]]:
        """Returns the pieces of the single call that the grammar admits."""
        held, pieces = self._held, []
        if not self.calls:
            for name in self._tools.forced:
                head = f'{{"name": {json.dumps(name)}, {json.dumps(self._form.arguments)}: '
                if held.startswith(head):
                    self.calls, self._sent = [_call(name, "")], len(head)
                    pieces.append({"index": 0} | _call(name, "", self.calls[0]["id"]))
        if last:
            self._whole = _is_json(held)
        if self.calls:
            end = len(held) if last and not self._whole else len(held) - 1  # the last brace is not the arguments'
            if end > self._sent:
                more = held[self._sent : end]
                self.calls[0]["function"]["arguments"] += more
                pieces.append({"index": 0, "function": {"arguments": more}})
                self._sent = end
        return pieces

    def _parsed(self) -> list[dict[str, Any]]:
        """Parses the calls in the held text, which begins with one; none where it turns out to be
        no call of a tool."""
        text, shown, calls = self._held, self._form.shown, list[dict[str, Any]]()
        at: int | None = len(text) - len(text.lstrip()) + len(shown)
        while at is not None and (self._tools.parallel or not calls):
            gap = NEXT.match(text, at)
            try:
                call, end = STRICT.raw_decode(text, gap.end() if gap else at)
            except (ValueError, RecursionError):
                break
            call = call if isinstance(call, dict) else {}
            name, arguments = call.get("name"), call.get(self._form.arguments)
            if name not in self._tools.names or not isinstance(arguments, dict):
                break
            calls.append(_call(name, json.dumps(arguments, ensure_ascii=False)))
            following = text.find(shown, end) if shown else -1
            at = end if NEXT.match(text, end) else following + len(shown) if following >= 0 else None
        return calls


def forced_prompt(form: CallForm, tools: Tools, messages: Any) -> Callable[[Session], list[int]]:
    """Makes the prompt for a session: the messages with the tools, and the opening of a call that is forced."""

    def of(session: Session) -> list[int]:
        ids = session.encode(messages, tools=tools.schemas)
        opening = form.opening if tools.forced else ""
        return ids + list(session.tokenizer.encode(opening, add_special_tokens=False).ids)

    return of


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
            if key in LITERAL and not named
            else _moved(value, root, key in BY_NAME and not named)
            for key, value in schema.items()
        }
    return [_moved(part, root) for part in schema] if isinstance(schema, list) else schema


def _overlap(text: str, tag: str) -> int:
    """Counts the characters at the end of `text` that `tag` may begin with."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _no_number(text: str) -> Any:
    raise ValueError(text)


STRICT = json.JSONDecoder(parse_constant=_no_number)  # NaN is no JSON
