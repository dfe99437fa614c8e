"""Keeps the items of lists apart where a schema has `uniqueItems`, which no grammar can say: what would end an item
that the list has already may not come next. tests/schemas/test_unique_items.py covers this module.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from streamspec.schemas.rewriting import IN_LISTS
from streamspec.schemas.schema_logic import BY_NAME, VALUES, Schema, SchemaLogic, frozen

CLOSERS = b",]}"


class UniquePlaces(NamedTuple):
    """Lists that have no item twice, by where they are: under one of some `names` or under `any_name` of an object,
    `within` another list, as the whole text (`root`)."""

    names: frozenset[str] = frozenset()
    any_name: bool = False
    within: bool = False
    root: bool = False


def unique_places(schema: Schema, draft: int) -> UniquePlaces | None:
    """Returns the places of lists that `uniqueItems` may be asked of, None where there are none. A list in the same
    place of which it is not asked has no item twice either."""
    logic, found = SchemaLogic(schema, draft, lambda _: False), _Found()
    if logic.asks(schema, "uniqueItems"):
        found.root = True
    found.look(schema, logic)
    places = UniquePlaces(frozenset(found.names), found.any_name, found.within, found.root)
    return places if any(places) else None


class _Found:
    def __init__(self) -> None:
        self.names: set[str] = set()
        self.any_name = self.within = self.root = False

    def look(self, schema: Schema, logic: SchemaLogic) -> None:
        for key, value in schema.items() if isinstance(schema, dict) else ():
            if key in BY_NAME and isinstance(value, dict):
                for name, each in value.items():
                    if logic.asks(each, "uniqueItems"):
                        self.names |= {name} if key == "properties" else set()
                        self.any_name |= key == "patternProperties"
                    self.look(each, logic)
            elif key in ("items", "additionalItems", *IN_LISTS):
                for each in value if isinstance(value, list) else [value]:
                    self.within |= key in ("items", "additionalItems", "prefixItems") and logic.asks(
                        each, "uniqueItems"
                    )
                    self.look(each, logic)
            elif key == "additionalProperties":
                self.any_name |= logic.asks(value, "uniqueItems")
                self.look(value, logic)
            elif key not in VALUES and isinstance(value, dict | list):  # of another name, that a reference leads to
                for each in value if isinstance(value, list) else [value]:
                    self.look(each, logic)


class SortedTokens:
    """The tokens of a vocabulary, to be found by what they begin with and what they have in them."""

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self.tokens = tokens
        self._order = sorted(range(len(tokens)), key=tokens.__getitem__)
        self.quotes = np.array([token.count(b'"') for token in tokens], np.uint8)
        self.spaces = np.array([token[:1].isspace() for token in tokens], np.bool_)
        self.closes = np.array([any(end in CLOSERS for end in token) for token in tokens], np.bool_)

    def beginning(self, text: bytes) -> Iterable[int]:
        """Yields the tokens that are a beginning of `text`."""
        for end in range(1, len(text) + 1):
            at = bisect_left(self._order, text[:end], key=self.tokens.__getitem__)
            while at < len(self._order) and self.tokens[self._order[at]] == text[:end]:
                yield self._order[at]
                at += 1


class _OpenList(NamedTuple):
    """An open list or object. `seen`: the items of a list that may have none twice, `texts`: as they were written;
    None: any list. `start`: where the item, or the value, begins. `key`: of the value."""

    kind: str
    seen: frozenset[Any] | None = None
    texts: tuple[bytes, ...] = ()
    start: int = 0
    key: str | None = None


class _Reading(NamedTuple):
    """After `size` bytes of text. `quoted`: where the open string begins, -1 for none."""

    size: int = 0
    open: tuple[_OpenList, ...] = ()
    quoted: int = -1
    escaped: bool = False


class UniqueItems:
    """A `Matcher` (`runtime/sampling/grammar_state.py`) of what `inner`, another, allows, without items that a list of
    `places` has already."""

    def __init__(self, inner: Any, places: UniquePlaces, tokens: SortedTokens) -> None:
        """`inner`: of JSON, at its beginning."""
        self._inner, self._places, self._tokens = inner, places, tokens
        self._path, self._text = [_Reading()], bytearray()  # which may be longer than the path says: was tried

    def allowed(self) -> tuple[np.ndarray, bool]:
        mask, ends = self._inner.allowed()
        known: dict[bytes, bool] = {}
        for token in self._strike(mask):
            mask[token] = self._leads_on(token, self._path[-1].size, known)
        return mask, ends

    def consume(self, token: int) -> bool:
        after = self._after(token)
        if after is None or not self._inner.consume(token):
            return False
        self._path.append(after)
        return True

    def back(self, tokens: int) -> None:
        self._inner.back(tokens)
        del self._path[len(self._path) - tokens :]

    def _strike(self, mask: np.ndarray) -> list[int]:
        """Takes tokens out of `mask` that end an item a second time. Returns those that begin one: whether it can
        still become another has to be tried."""
        at, size = self._path[-1], min(len(mask), len(self._tokens.tokens))
        begun = [(each, self._part(each, at).lstrip()) for each in at.open if each.seen is not None]
        risky = []
        for token in map(int, np.flatnonzero(mask[:size] & self._may_end(at, begun, size))):
            if (after := self._after(token)) is None:
                mask[token] = False
            elif after.open and after.open[-1].texts and not self._part(after.open[-1], after).strip():
                risky.append(token)
        for each, part in begun:
            risky += self._going_on(mask[:size], part, [text for text in each.texts if text.startswith(part)])
        return sorted(set(risky))

    def _going_on(self, mask: np.ndarray, part: bytes, texts: list[bytes]) -> Iterator[int]:
        """Yields the tokens of `mask` with which `part` goes on as one of `texts` does."""
        rests = [text[len(part) :] for text in texts]
        begin = (token for rest in rests for token in self._tokens.beginning(rest))
        yield from (token for token in begin if token < len(mask) and mask[token])
        if not part:
            for token in map(int, np.flatnonzero(mask & self._tokens.spaces[: len(mask)])):
                if any(rest.startswith(self._tokens.tokens[token].lstrip()) for rest in rests):
                    yield token

    def _may_end(self, at: _Reading, begun: list[tuple[_OpenList, bytes]], size: int) -> np.ndarray:
        """Returns bool [size]: the tokens that may end an item of the lists in `begun`, with what is there of it."""
        quotes, closes = self._tokens.quotes[:size], self._tokens.closes[:size]
        if not begun:
            return (quotes > 1) & closes
        if at.quoted < 0:
            return closes | (quotes > 1)
        innermost, part = begun[-1]
        if innermost is not at.open[-1]:
            return (quotes > 0) & closes
        known = any(text.startswith(part) for text in innermost.texts) or b"\\" in part
        return quotes > (0 if known else 2)

    def _leads_on(self, token: int, begin: int, known: dict[bytes, bool]) -> bool:
        """Tells whether something may come after a token. `known`: the answers by the text from `begin` on, which says
        what may come however it is cut into tokens."""
        after = self._after(token)
        tried = None if after is None else bytes(self._text[begin : after.size])
        if tried in known:
            return known[tried]
        if tried is None or not self.consume(token):
            return False
        mask, ends = self._inner.allowed()
        risky = self._strike(mask)
        mask[risky] = False
        known[tried] = ends or bool(mask.any()) or any(self._leads_on(each, begin, known) for each in risky)
        self.back(1)
        return known[tried]

    def _part(self, item: _OpenList, at: _Reading) -> bytes:
        """What is written of an item."""
        return bytes(self._text[item.start : at.size])

    def _after(self, token: int) -> _Reading | None:
        """Returns where a token leads, None where it ends an item a second time."""
        at: _Reading | None = self._path[-1]
        assert at is not None
        data = self._tokens.tokens[token] if token < len(self._tokens.tokens) else b""
        del self._text[at.size :]
        self._text += data
        at = at._replace(size=len(self._text))
        for i in range(len(self._text) - len(data), len(self._text)):
            at = self._follow(at, i)
            if at is None:
                return None
        return at

    def _follow(self, at: _Reading, i: int) -> _Reading | None:
        """Reads the byte `i` of the text."""
        char = chr(self._text[i])
        if at.quoted >= 0:
            if at.escaped or char == "\\":
                return at._replace(escaped=not at.escaped)
            if char != '"':
                return at
            inner = at.open[-1] if at.open else None
            if inner is not None and inner.kind == "{" and inner.key is None:
                key = json.loads(self._text[at.quoted : i + 1])
                return at._replace(quoted=-1, open=(*at.open[:-1], inner._replace(key=key)))
            return self._item(at._replace(quoted=-1), i + 1)
        if char == '"':
            return at._replace(quoted=i)
        if char in "[{":
            unique = char == "[" and self._asked(at.open)
            return at._replace(open=(*at.open, _OpenList(char, frozenset() if unique else None, start=i + 1)))
        if char in ",]}" and at.open:
            if bytes(self._text[at.open[-1].start : i]).strip()[:1] not in (b'"', b"[", b"{", b""):
                ended = self._item(at, i)  # a number, or a name such as null
                if ended is None:
                    return None
                at = ended
            if char != ",":
                return self._item(at._replace(open=at.open[:-1]), i + 1)
            return at._replace(open=(*at.open[:-1], at.open[-1]._replace(start=i + 1, key=None)))
        return at

    def _item(self, at: _Reading, end: int) -> _Reading | None:
        """Takes the value that has ended for an item, if a list is open."""
        if not at.open or (inner := at.open[-1]).seen is None:
            return at
        text = bytes(self._text[inner.start : end]).strip()
        if (value := frozen(json.loads(text))) in inner.seen:
            return None
        inner = inner._replace(seen=inner.seen | {value}, texts=(*inner.texts, text))
        return at._replace(open=(*at.open[:-1], inner))

    def _asked(self, lists: Sequence[_OpenList]) -> bool:
        """Whether the list that begins has no item twice."""
        if not lists:
            return self._places.root
        if (inner := lists[-1]).kind == "[":
            return self._places.within
        return self._places.any_name or inner.key in self._places.names
