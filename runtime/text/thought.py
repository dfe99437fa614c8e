"""Finds what a model thinks before it answers, token by token, and keeps it apart from the text of the answer.

The tags around a thought (`streamspec.prompt.thought_tags`) may be tokens of their own or be spelled in
several, and the prompt may have opened the thought. Tags are found in the tokens' bytes, so that a text and a grammar
(`thought_matcher`) see the border at the same token.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

from streamspec.errors import ConfigError
from streamspec.prompt.thought_tags import ThoughtTags, tags_of
from streamspec.runtime.text.token_bytes import TokenBytes

BEFORE, WITHIN, AFTER = range(3)  # a thought may begin; goes on; is over, or there was none
TAIL = 32  # tokens at the end of a prompt that its last tag lies in


class Place(NamedTuple):
    """Where an answer is. `held`: its bytes, BEFORE; else the beginning of the end tag. `run`: tokens that these
    came in; `inside`: tokens of the thought, tags not included. An answer of messages is BEFORE each of them."""

    phase: int
    held: bytes = b""
    run: int = 0
    inside: int = 0


class Thought:
    """The tags of a chat template in the tokens of a vocabulary. For use from any thread."""

    def __init__(self, tags: ThoughtTags, tokenizer: Any) -> None:
        """`tokenizer`: a `tokenizers.Tokenizer`."""
        self.tokenizer = tokenizer
        self._bytes = TokenBytes(tokenizer)
        self._begin, self._end, *self._heads = (text.encode() for text in (tags.begin, tags.end, *tags.heads))
        self.begin, self.end, *heads = (self.ids(text) for text in (tags.begin, tags.end, *tags.heads))
        self.heads, self._efforts = tuple(heads), tags.efforts
        self.again = self.begin[0] if tags.again and len(self.begin) == len(self.end) == 1 else None  # begins another
        self.between = "\n\n" if heads else "\n"  # two thoughts
        self._marks = tuple(self.bytes_of(ids[0]) for ids in (self.begin, self.end, *heads) if ids)
        self._beyond: dict[bytes, list[int]] = {}
        self._thinking: dict[bytes, list[int]] = {}
        self.shown_end = tokenizer.decode(self.end)  # what is left of the end tag in a text

    @classmethod
    def of(cls, template: str | None, tokenizer: Any) -> Thought | None:
        """Returns the tags that a chat template names; None for none, or for some that the vocabulary cannot spell."""
        tags = tags_of(template)
        made = None if tags is None else cls(tags, tokenizer)
        return made if made is not None and made._spelt else None

    @property
    def _spelt(self) -> bool:
        spelt = ((self._begin, self.begin), (self._end, self.end), *zip(self._heads, self.heads, strict=True))
        return all(tag in b"".join(map(self.bytes_of, ids)) for tag, ids in spelt)

    def check_effort(self, effort: Any) -> None:
        """Raises ConfigError for a `reasoning_effort` that the template has no word for."""
        if self._efforts and effort not in (None, *self._efforts):
            raise ConfigError(f"reasoning_effort {effort!r:.40}", " or ".join(self._efforts), "choose one of them")

    def ids(self, text: str) -> tuple[int, ...]:
        """Returns the tokens of a text, in which special tokens are themselves."""
        return tuple(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def after(self, prompt: Sequence[int]) -> Place:
        """Returns where an answer begins: within a thought that the prompt opens, or after one that it closes."""
        end = b"".join(map(self.bytes_of, prompt[-TAIL:])).rstrip()
        if end.endswith(self._begin.rstrip()):
            return Place(WITHIN)
        return Place(AFTER if end.endswith(tuple(self._heads) or self._end) else BEFORE)

    def bytes_of(self, token: int) -> bytes:
        """Returns the bytes of a token, special ones included."""
        return self._bytes(token) or b""

    def beyond(self, held: bytes) -> list[int]:
        """Returns the tokens that end a thought whose last bytes are `held` and go on with the answer, which a grammar
        would not see. Blanks belong to neither, but after tags without a beginning."""
        if not held and len(self.end) == 1:
            return []
        if held not in self._beyond:
            rest = self._end[len(held) :]
            self._beyond[held] = [
                i
                for i, token in enumerate(self._vocabulary)
                if (token.startswith(rest) and (token[len(rest) :].strip() or (not self._begin and token != rest)))
                or (self._end in token and token != rest)
            ]
        return self._beyond[held]

    def thinking(self, held: bytes) -> list[int]:
        """Returns the tokens with which a message that begins with `held` can be a thought alone."""
        if held not in self._thinking:
            self._thinking[held] = [
                i
                for i, token in enumerate(self._vocabulary)
                if token
                and _along(held + token, self._begin)
                and not any(_along(held + token, head) for head in self._heads)
            ]
        return self._thinking[held]

    @cached_property
    def _vocabulary(self) -> list[bytes]:
        return [self.bytes_of(token) for token in range(self.tokenizer.get_vocab_size())]

    def step(self, place: Place, token: int) -> tuple[Place, bytes | None]:
        """Returns where the answer is after one more token, and the token's bytes after a tag; None where none ends."""
        if place.phase == AFTER and not self._heads:
            return (Place(WITHIN, inside=place.inside), b"") if token == self.again else (place, None)
        data = place.held + self.bytes_of(token)
        if place.phase == WITHIN:
            return self._within(place, data)
        if place.phase == AFTER:
            return self._message(place, data)
        said = data.lstrip()
        for tag, phase in ((self._begin, WITHIN), *((head, AFTER) for head in self._heads)):
            if tag and said.startswith(tag):
                return Place(phase, inside=place.inside), said[len(tag) :]
        if said and len(self.begin) == 1 and not self._heads:  # the tag is a token, which this is not
            return Place(AFTER, inside=place.inside), None
        if any(tag.startswith(said) for tag in (self._begin, *self._heads)) and self._marked(said):
            return place._replace(held=data, run=place.run + 1), None
        return Place(AFTER, inside=place.inside), None

    def _message(self, place: Place, data: bytes) -> tuple[Place, bytes | None]:
        """The same within a message that is text. Its end tag begins with a token."""
        if data.startswith(self._end):
            return Place(BEFORE, inside=place.inside), data[len(self._end) :]
        parts = (data, data[len(place.held) :])
        held = next((part for part in parts if part and self._end.startswith(part) and self._marked(part)), b"")
        return place._replace(held=held), None

    def _marked(self, data: bytes) -> bool:
        """Tells whether `data` may begin a tag: those of messages begin with a token, not with a part of its text."""
        return not (self._heads and data) or data.startswith(self._marks)

    def _within(self, place: Place, data: bytes) -> tuple[Place, bytes | None]:
        """`data`: the bytes of a token after those that are held."""
        at = data.find(self._end)
        if at >= 0:
            run = place.run if at < len(place.held) else 0
            return Place(BEFORE if self._heads else AFTER, inside=place.inside - run), data[at + len(self._end) :]
        kept = next((n for n in range(min(len(data), len(self._end) - 1), 0, -1) if data.endswith(self._end[:n])), 0)
        run = place.run if kept > len(data) - len(place.held) else 0
        return Place(WITHIN, data[len(data) - kept :], run + 1 if kept else 0, place.inside + 1), None


def _along(text: bytes, tag: bytes) -> bool:
    """Tells whether one of them begins with the other."""
    return tag.startswith(text) or text.startswith(tag)
