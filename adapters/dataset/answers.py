"""Finds the answers of a conversation: what the chat template writes for each assistant turn, after the prompt that
generation would begin with. Tests: tests/adapters/dataset/test_formatter.py.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from streamspec.data import Message
from streamspec.errors import DataError, StreamspecError
from streamspec.prompt.control_tokens import ControlTokens
from streamspec.prompt.prompt_format import THOUGHTS, PromptFormat, function_name
from streamspec.prompt.thought_tags import tags_of

PROBE = "ok"  # an answer that no template changes
Tools = Sequence[Mapping[str, Any]] | None


@dataclass(frozen=True)
class Turn:
    """A prompt as generation renders it, and the answer to it; `open_end`: the end-of-text token is to follow."""

    prompt: str
    answer: str
    open_end: bool


class ChatTurns:
    """Turns of conversations in the words of one chat template."""

    def __init__(
        self,
        layout: PromptFormat,
        template: str,
        specials: Mapping[str, str],
        ends: Sequence[str],
        control: ControlTokens | None = None,
    ) -> None:
        """`ends`: the texts of the tokens at which generation stops. `control`: encodes the turns' texts, which it has
        marked; None: they are not told apart from the template."""
        self.control = control
        self.layout, self.template, self.specials, self.ends = layout, template, specials, ends
        self.tail = self._tail()
        tail = self.tail or ""
        self.end = min((end for end in ends if end in tail), key=tail.index, default="")  # that it writes of `ends`
        self.tags = tags_of(template)
        self.thoughts = Counter[str]()  # answers so far with a thought that is "kept", or that the template "dropped"
        self.odd_beginning: str | None = None  # how prompts end where the template writes answers otherwise

    def prompt(self, messages: Sequence[Message], tools: Tools = None) -> str:
        """The text that generation begins with."""
        return self.layout.render(messages, self.template, self.specials, tools=tools, control=self.control)

    def turn(self, messages: Sequence[Message], tools: Tools, where: str) -> Turn:
        """The last message of `messages` as an answer to those before it. Raises DataError where the template leaves
        out tools, calls or results, or cannot write this answer after its own prompt.
        """
        turn = self._turn(messages, tools, where)
        if thought := self._thought(messages[-1]):
            self.thoughts["kept" if thought in turn.answer else "dropped"] += 1
        return turn

    def _thought(self, answer: Message) -> str:
        """Returns what the data say was thought before an answer, in a field of its own or in tags."""
        thought = next((answer[name] for name in THOUGHTS if answer.get(name)), "")
        if not thought and self.tags is not None:
            thought = (answer["content"] or "").rpartition(self.tags.end)[0].rpartition(self.tags.begin)[2]
        return str(thought).strip()

    def opening(self, messages: Sequence[Message], tools: Tools, where: str) -> str:
        """The text that generation begins with, for a row of data. Raises DataError where the template leaves out
        tools, calls or results.
        """
        try:
            prompt = self.prompt(messages, tools)
        except DataError as error:
            raise DataError(f"{where}: {error.found}", error.expected, error.fix) from None
        self._check_results(prompt, messages, tools, where)
        return prompt

    def _turn(self, messages: Sequence[Message], tools: Tools, where: str) -> Turn:
        *before, answer = messages
        prompt = self.opening(before, tools, where)
        whole = self.layout.render(
            messages, self.template, self.specials, tools=tools, add_generation_prompt=False, control=self.control
        )
        calls = answer.get("tool_calls") or ()
        if whole.startswith(prompt):
            text = whole[len(prompt) :]
            missing = [name for name in map(function_name, calls) if name not in text]
            if missing:
                self._refuse(where, f"leaves out the tool call {missing[0]}")
            return self._ended(prompt, text)
        if calls or any(answer.get(name) for name in THOUGHTS):
            self._refuse(where, "writes an answer with tool calls or reasoning otherwise than its prompt begins one")
        self.odd_beginning = prompt[-20:]
        marked = answer if self.control is None else self.control.marked_messages([answer])[0]
        return Turn(prompt, self._within(prompt, marked["content"]) + self.end, not self.end)

    def _within(self, prompt: str, content: str) -> str:
        """The content without the tag by which its prompt has begun a thought."""
        begin, opened = self.tags.begin.rstrip() if self.tags else "", prompt.rstrip()
        if not begin or not opened.endswith(begin) or not content.lstrip().startswith(begin):
            return content
        return content.lstrip()[len(begin) :].removeprefix(prompt[len(opened) :])

    def _ended(self, prompt: str, text: str) -> Turn:
        """The answer up to the first token at which generation stops: templates write more, such as a newline."""
        if self.tail is not None and text.endswith(self.tail):
            body, tail = text[: len(text) - len(self.tail)], self.tail
            return Turn(prompt, body + tail[: tail.index(self.end) + len(self.end)], not self.end)
        stop = max((text.rfind(end) + len(end) for end in self.ends if end in text), default=0)
        return Turn(prompt, text[:stop] if stop else text, not stop)

    def _tail(self) -> str | None:
        """Returns the text that the template writes after an answer; None where it does not take the probe."""
        probe = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": PROBE}]
        try:
            text = self.layout.render(probe, self.template, self.specials, add_generation_prompt=False)
        except StreamspecError:
            return None
        _, found, tail = text.rpartition(PROBE)
        return tail if found else None

    def _check_results(self, prompt: str, before: Sequence[Message], tools: Tools, where: str) -> None:
        for i, message in enumerate(before):
            if message["role"] != "tool":
                continue
            text = message["content"].strip()
            if text not in prompt and json.dumps(text, ensure_ascii=False)[1:-1] not in prompt:
                changed = [*before[:i], {**message, "content": f"{message['content']}."}, *before[i + 1 :]]
                if self.prompt(changed, tools) == prompt:
                    self._refuse(where, "leaves out messages of the role tool")

    def _refuse(self, where: str, why: str) -> None:
        raise DataError(
            f"{where}: the chat template {why}", "a template that knows tools", "choose such a base, or drop these rows"
        )
