"""Splits an answer into content and calls, as it comes. `tests/serve/api/test_tool_calls.py` covers this file."""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

from streamspec.prompt.thought_tags import TAGS
from streamspec.serve.tools.call_arguments import SURROGATE, arguments_at, json_of, members_at, spaced
from streamspec.serve.tools.call_form import ID, CallForm
from streamspec.serve.tools.tools import Tools

LETTERS = string.ascii_lowercase + string.digits
MARK = "<|"  # with which the tags of messages begin
CALL_ID = re.compile("[A-Za-z0-9]{9}")
NEXT = re.compile(r"\s*[,;]?\s*(?=\{)")  # between two calls that share their tags
# Tags around thoughts that the runtime left in the text, as the template does not name them; the first may be lacking.
THOUGHT_TAGS, THOUGHT_ENDS = tuple(tags.begin for tags in TAGS), tuple(tags.end for tags in TAGS)
_Found = tuple[dict[str, Any] | None, int] | None  # a call, None for no tool's, and where it ends; None for no call


class CallParser:
    """Splits the text of an answer into content and calls, as it comes. `calls`: those so far, in
    OpenAI's shape. What a thought holds is content, also where it looks like a call. `thoughts`: whether the text may
    have some, which the session did not take out of it; else their tags are words."""

    def __init__(self, form: CallForm, tools: Tools, thoughts: bool = True) -> None:
        self.calls: list[dict[str, Any]] = []
        self._form, self._tools = form, tools
        self._held = ""  # text that is not known to be content
        self._calling = False  # whether what is held begins with a call
        self._thinking = False  # whether what is held begins within a thought
        self._talking = False  # whether words came first where only an answer's beginning can be a call
        self._forced = ForcedCalls(form, tools) if tools.forced else None
        call, lead = spaced(form.begin), form.prefix.strip().removesuffix(form.begin)
        if form.field:
            call += r"\s*(?:\{|\Z)" if call else r"\{"
        elif lead:
            call = rf"(?:{spaced(lead)})?\s*{call}"
        elif form.messages:  # words may spell a recipient, too
            call = "|".join(spaced(prefix.strip()) for prefix, _ in form.ways)
            call = rf"(?:{call})(?=[\w-]+(?:\s\w*)?{re.escape(MARK)}|[\w-]*(?:\s\w*)?<?\Z)"
        self._begins = (form.begin,) if form.field else (form.begin, *(prefix for prefix, _ in form.ways))
        self._tags = THOUGHT_TAGS + THOUGHT_ENDS if thoughts else ()
        self._marks = re.compile("|".join([*map(re.escape, self._tags), f"(?P<begin>{call})"]))
        self._head = re.compile(call + r"\s*(?P<name>[A-Za-z0-9_-]+)" + middle_of(form))

    def push(self, text: str, last: bool) -> tuple[str, list[dict[str, Any]]]:
        """Returns the content and the pieces of calls that became certain with `text`."""
        if self._forced is not None:
            pieces = self._forced.push(text, last)
            self.calls = self._forced.calls
            return "", pieces
        self._held += text
        content = "" if self._calling else self._content(last)
        if not (self._calling and last):
            return content, []
        content += self._parsed()
        return content, [{"index": i} | call for i, call in enumerate(self.calls)]

    def reason(self, reason: str) -> str:
        """OpenAI's word for why the answer ended, `reason` where it has no whole calls."""
        whole = self._forced is None or self._forced.whole
        return "tool_calls" if self.calls and whole and not self._tools.named and reason == "stop" else reason

    def _content(self, last: bool) -> str:
        """Takes the content, up to a call, out of the held text."""
        held, end = self._held, 0
        for mark in self._marks.finditer(held):
            if self._begins_call(mark, held[end : mark.start()]):
                self._calling, end = self._is_sure(mark), mark.start()
                break
            end = mark.end()
        else:
            rest = held[end:]  # a tag is read once: a second end of a thought would be one without a beginning
            begun = max(_overlap(rest, tag) for tag in (*self._begins, *self._tags))
            self._hear(rest[: len(rest) - begun])
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

    def _is_sure(self, mark: re.Match[str]) -> bool:
        """Tells whether a call begins at `mark`, whatever follows the text that came."""
        if self._form.messages:
            return MARK in mark.string[mark.end() :]
        return mark[0].endswith("{") or not self._form.field

    def _hear(self, words: str) -> None:
        self._talking |= not (self._form.begin or self._thinking) and bool(words.strip())

    def _ends_thought(self, mark: re.Match[str]) -> bool:
        """Tells whether all text before `mark` was a thought, whose beginning the answer lacks."""
        return mark[0] in THOUGHT_ENDS and not self._thinking

    def _parsed(self) -> str:
        """Parses the calls in the held text, which begins with one. Returns the rest as content: calls of unknown
        tools, and everything from one on that is no JSON; other text after calls is left out."""
        text, content, at, broken = self._held, "", 0, False
        kept: int | None = 0  # where the content goes on
        while mark := self._marks.search(text, at):
            at = mark.end()
            if self._ends_thought(mark):
                self.calls, content, kept, broken = [], "", 0, False
            if not self._begins_call(mark) or broken:
                continue
            for begin, found in self._written(text, mark):
                call, at = found or (None, at)
                broken = found is None or not self._form.begin
                if call is not None:
                    content, kept = content + ("" if kept is None else text[kept:begin].rstrip()), None
                    self.calls += [call] if self._tools.parallel or not self.calls else []
                elif kept is None:
                    kept = begin
        return content if kept is None else content + (text[kept:].rstrip() if self.calls else text[kept:])

    def _written(self, text: str, mark: re.Match[str]) -> Iterator[tuple[int, _Found]]:
        """Yields the calls from `mark` on, objects that share its tags, too: where each begins, and what was found."""
        if not self._form.field:
            yield mark.start(), self._named_at(text, mark.start())
            return
        found = self._object_at(text, mark.end() - 1)
        yield mark.start(), found
        while found is not None and (gap := NEXT.match(text, found[1])) is not None:
            found = self._object_at(text, gap.end())
            yield gap.end(), found

    def _object_at(self, text: str, at: int) -> _Found:
        """Returns the call that the JSON object at `text[at]` is, with its arguments as they are written, None for no
        call of a tool; and where the object ends."""
        found = members_at(text, at)
        if found is None:
            return None
        members, end = found
        fields = ("name", self._form.field, self._form.id_field)
        (name, _), (arguments, written), (said, _) = (members.get(key, (None, "")) for key in fields)
        if isinstance(arguments, str):  # JSON within JSON
            arguments, written = json_of(arguments), arguments
        known = name in self._tools.names and isinstance(arguments, dict)
        return (self._call(name, written, said) if known else None), end

    def _named_at(self, text: str, at: int) -> _Found:
        """The same of a call whose name stands before its arguments."""
        head = self._head.match(text, at)
        if head is None:
            return None
        name, schemas = head["name"], self._tools.parameters
        found = arguments_at(text, head.end(), self._form.style, schemas.get(name))
        if found is None:
            return None
        written, end = found
        rest = re.compile(spaced(self._form.suffix)).match(text, end)
        call = self._call(name, written, _id_in(head)) if name in schemas else None
        return call, end if rest is None else rest.end()

    def _call(self, name: str, arguments: str, said: Any) -> dict[str, Any]:
        return _call(name, arguments, _own_id(said, self._tools, self.calls))


class ForcedCalls:
    """Follows calls that a grammar admits: `push` the answer's text. `whole`: whether none was cut short. A call whose
    id stands after its arguments comes in one piece."""

    def __init__(self, form: CallForm, tools: Tools) -> None:
        self.calls: list[dict[str, Any]] = []
        self.whole = True
        self._form, self._tools, self._schemas = form, tools, tools.parameters
        self._text, self._at = "", 0
        self._shown, self._named = 0, 0  # calls that came in one piece, and those whose ids are read
        self._within: _JsonEnd | None = None  # arguments of the last call that are JSON and not at their end
        names = "|".join(map(re.escape, sorted(self._schemas, key=len, reverse=True)))
        lead = "|".join(re.escape(prefix.strip()) for prefix, _ in form.ways)
        if form.between:
            lead += "|" + re.escape(form.between)
        self._head = re.compile(rf"\s*(?:{lead})(?P<name>{names}){middle_of(form)}")
        self._id_member = re.compile(_with_id(form.id_member)) if form.id_member else None

    def push(self, text: str, last: bool) -> list[dict[str, Any]]:
        """Returns the pieces of calls that became certain with `text`."""
        self._text += text
        pieces = list[dict[str, Any]]()
        while piece := self._json_piece() if self._within else self._next(last):
            pieces.append(piece)
        if last:
            named = self._id_member is None or self._named == len(self.calls)
            self.whole = bool(self.calls) and named and self._within is None and not self._begun
        return pieces if self._id_member is None else self._at_once(len(self.calls) if last else self._named)

    def _at_once(self, until: int) -> list[dict[str, Any]]:
        """Returns the calls up to this one that were not yet returned."""
        begin, self._shown = self._shown, until
        return [{"index": i} | deepcopy(self.calls[i]) for i in range(begin, until)]

    @property
    def _begun(self) -> bool:
        """Whether another call begins in what follows the last one."""
        return len(self._text[self._at :].strip()) > len(self._form.suffix.strip())

    def _next(self, last: bool) -> dict[str, Any] | None:
        if self._id_member is not None and self._named < len(self.calls):
            if (member := self._id_member.match(self._text, self._at)) is None:
                return None
            self.calls[-1]["id"] = _own_id(member["id"], self._tools, self.calls[:-1])
            self._at, self._named = member.end(), len(self.calls)
        head = self._head.match(self._text, self._at)
        if head is None:
            return None
        name, written = head["name"], ""
        if self._form.style is None:
            self._at, self._within = head.end(), _JsonEnd()
        elif (found := arguments_at(self._text, head.end(), self._form.style, self._schemas[name])) is not None:
            written, self._at = found
        else:
            return None
        self.calls.append(_call(name, written, _own_id(_id_in(head), self._tools, self.calls)))
        return {"index": len(self.calls) - 1} | deepcopy(self.calls[-1])  # arguments may grow

    def _json_piece(self) -> dict[str, Any] | None:
        assert self._within is not None
        end, over = self._within.of(self._text, self._at)
        more, self._at = self._text[self._at : end], end
        self._within = None if over else self._within
        if not more:
            return None
        self.calls[-1]["function"]["arguments"] += more
        return {"index": len(self.calls) - 1, "function": {"arguments": more}}


class _JsonEnd:
    """Finds the end of a JSON object whose text comes in pieces."""

    def __init__(self) -> None:
        self._depth, self._in_text, self._escaped = 0, False, False

    def of(self, text: str, at: int) -> tuple[int, bool]:
        """Returns where the piece `text[at:]` of it ends, and whether the object does."""
        for i in range(at, len(text)):
            letter = text[i]
            if self._in_text:
                self._in_text = self._escaped or letter != '"'
                self._escaped = letter == "\\" and not self._escaped
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
                if not self._depth:
                    return i + 1, True
            else:
                self._in_text = letter == '"'
        return len(text), False


def middle_of(form: CallForm) -> str:
    """Returns an expression of what stands between the name and the arguments of a call."""
    middles = "|".join(dict.fromkeys(_with_id(middle) for _, middle in form.ways))
    return f"(?:{middles})" + (r"\s*(?=\{)" if form.style is None else "")


def arguments_of(call: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the arguments of a call as an object of valid Unicode; None of one that was cut short."""
    written = json.dumps(json_of(call["function"]["arguments"]), ensure_ascii=False)
    arguments = json_of(SURROGATE.sub("\ufffd", written))
    return arguments if isinstance(arguments, dict) else None


def _with_id(text: str) -> str:
    """Returns an expression of a text of the form, in which a call's id is any."""
    return spaced(text).replace(ID, "(?P<id>[A-Za-z0-9]*)", 1)


def _id_in(head: re.Match[str]) -> str | None:
    return head.groupdict().get("id")


def _own_id(said: Any, tools: Tools, calls: list[dict[str, Any]]) -> str:
    """Returns the id that the model wrote of a call, if no other call has it; else a new one. `calls`: those before."""
    if isinstance(said, str) and CALL_ID.fullmatch(said) and said not in {*tools.ids, *(call["id"] for call in calls)}:
        return said
    return "".join(secrets.choice(LETTERS) for _ in range(9))  # other lengths some templates refuse


def _call(name: str, arguments: str, id_: str) -> dict[str, Any]:
    return {
        "id": id_,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def _overlap(text: str, tag: str) -> int:
    """Counts the characters at the end of `text` that `tag` may begin with, whatever blanks it has."""
    bare, most = "".join(tag.split()), len(tag) + 8
    tails = ((n, text[-n:]) for n in range(min(most, len(text)), 0, -1))
    return next((n for n, tail in tails if tail.strip()[:1] == tail[:1] and bare.startswith("".join(tail.split()))), 0)
