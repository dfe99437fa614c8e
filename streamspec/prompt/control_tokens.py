"""Lets control tokens come from the chat template alone: what a person, a tool or a model wrote is text, also where it
spells one.

Texts are marked before the template renders them: in each one that spells a control token, a character that no text has
stands after the token's first. What is left unmarked in the rendered prompt is the template's own. Such a prompt is
encoded with a copy of the tokenizer in which control tokens have other names; all others are encoded as they are.
`tests/core/prompt/test_control_tokens.py` covers this file.
"""

from __future__ import annotations

import json
import re
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from streamspec.errors import DataError

NAME, MARK = "\ufdd0", "\ufdd1"  # characters that Unicode keeps from texts
FIX = "take it out of the messages"


class ControlTokens:
    """The control tokens of one tokenizer and template. For use from any thread.

    They are the special tokens, and those added ones that the template names, such as `<tool_call>`. Of the latter an
    assistant's messages may have any: a model writes them itself.
    """

    def __init__(self, tokenizer: Any, template: str, read: Callable[[str], Any]) -> None:
        """`tokenizer`: a `tokenizers.Tokenizer`; `read` makes one of its JSON."""
        self._tokenizer, self._read, self._lock = tokenizer, read, threading.Lock()
        added = [token for token in tokenizer.get_added_tokens_decoder().values() if token.content.strip()]
        special = {token.content for token in added if token.special}
        named = {token.content for token in added if token.content in template}
        self._special, self._all = _Texts(special), _Texts(special | named)
        self._ids = {tokenizer.token_to_id(text) for text in self._all.texts}
        self._renamed: Any = None

    def marked(self, value: Any) -> Any:
        """Returns a value for the template with its texts marked, all within it; the same object where none was."""
        return _mapped(value, self._all.mark)

    def marked_messages(self, messages: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Returns the messages of a chat with their texts marked."""
        return [
            _mapped(message, (self._special if message["role"] == "assistant" else self._all).mark)
            for message in messages
        ]

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of a prompt that was rendered of marked texts. Raises DataError where the tokenizer reads
        a control token in a text all the same."""
        if MARK not in text:
            return list(self._tokenizer.encode(text, add_special_tokens=False).ids)
        names = {token: f"{NAME}{i}{NAME}" for i, token in enumerate(self._all.texts)}
        pieces, at, own = [], 0, 0
        for begin, token in self._all.found(text):
            if begin >= at:
                pieces += [text[at:begin], names[token]]
                at, own = begin + len(token), own + 1
        plain = "".join([*pieces, text[at:]]).replace(MARK, "")
        with self._lock:
            self._renamed = self._renamed or self._read(_renamed(self._tokenizer.to_str(), names))
        ids = list(self._renamed.encode(plain, add_special_tokens=False).ids)
        if sum(i in self._ids for i in ids) != own:
            raise DataError("a text that the tokenizer reads as a control token", "text", FIX)
        return ids


class _Texts:
    """The texts of tokens, and where a text has them."""

    def __init__(self, texts: set[str]) -> None:
        self.texts = sorted(texts)
        self._known = texts
        self._lengths = sorted({len(text) for text in texts}, reverse=True)
        self._begins = re.compile(f"[{re.escape(''.join(sorted({text[0] for text in texts})))}]") if texts else None

    def found(self, text: str) -> Iterator[tuple[int, str]]:
        """Yields where a token begins in a text, and the longest that does, also within others."""
        for match in self._begins.finditer(text) if self._begins else ():
            begin = match.start()
            token = next(
                (text[begin : begin + n] for n in self._lengths if text[begin : begin + n] in self._known), None
            )
            if token is not None:
                yield begin, token

    def mark(self, text: str) -> str:
        """Returns a text with a mark after the first character of each token that it has, or that it ends within: the
        template's next words might complete it."""
        places = [begin for begin, _ in self.found(text)]
        stripped = text.rstrip()
        most = self._lengths[0] if self._lengths else 0
        places += [len(stripped) - n for n in range(1, min(most, len(stripped) + 1)) if self._begins_one(stripped[-n:])]
        if not places:
            return text
        if NAME in text or MARK in text:
            raise DataError("a text that spells a control token and has a character U+FDD0 or U+FDD1", "neither", FIX)
        cuts = sorted({begin + 1 for begin in places})
        return MARK.join(text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True))

    def _begins_one(self, text: str) -> bool:
        at = bisect_left(self.texts, text)
        return at < len(self.texts) and self.texts[at].startswith(text)


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """Returns a value with all texts in it changed, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_mapped(key, change): _mapped(inner, change) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_mapped(inner, change) for inner in value]
    return value


def _renamed(tokenizer: str, names: Mapping[str, str]) -> str:
    """Returns a tokenizer's JSON with other names for some of its tokens."""
    written = json.loads(tokenizer)
    model = written["model"]
    for token in written["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    if isinstance(model.get("vocab"), dict):
        model["vocab"] = {names.get(text, text): i for text, i in model["vocab"].items()}
    elif "vocab" in model:
        model["vocab"] = [[names.get(text, text), score] for text, score in model["vocab"]]
    if isinstance(model.get("unk_token"), str):
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    return json.dumps(written, ensure_ascii=False)
