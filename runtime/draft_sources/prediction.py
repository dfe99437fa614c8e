"""Drafts from a predicted output: a text that comes with the request and that the answer is expected to repeat but for
some edits, such as a file that is to be changed (OpenAI's `prediction`).

`PredictionIndex` follows the answer through it. Where the answer leaves it, the tokens since then are looked for around
the place: after an insertion the prediction goes on where it was left, after a deletion or a replacement further on.
Words rarely have as many tokens as those in whose place they stand, so until a token comes again the prediction is
taken to go on at the end of a word. The more tokens agree before a place, the surer is the next one, so drafts are as
long as a step has rows.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any

from streamspec.runtime.draft_sources.ngram import CODES
from streamspec.runtime.draft_sources.source import Continuations, DraftSource, Rates

CONTINUATION = 63  # tokens offered where the text follows the prediction,
AFTER_EDIT = 12  # and from each place where it may go on after an edit
SURE = 3  # tokens that agree, after which the text follows the prediction again
ANCHORED = 8  # that must agree for the search to begin where they end
BEGINNING = 4  # that the beginning counts for
MOST_REPLACED = 4  # tokens that are taken to replace as many words as they begin
NEAR = 12  # tokens: a single one that comes again within so many says where the text goes on
ALIKE = 2  # characters with which both words of a correction begin
MEASURED = 64  # tokens that agree from here on count as one
# Acceptance by the tokens that agree before, from these counts on, as observed over edits of functions and documents.
LENGTHS = (2, 3, 4, 6, 9, 17, 33, MEASURED)
ALONE = (0.50, 0.82, 0.86, 0.90, 0.93, 0.94, 0.97, 0.977, 0.986)
# Of the first token after one near the place that came again; after a word in the place of one that begins alike, of
# another one, by its first token and by further ones; of an edit that was made before; of the token in its place.
FOUND, CORRECTED, REPLACED, REPLACED_LONG, REPEATED, KEPT = range(len(ALONE), len(ALONE) + 6)
LONGEST_WORD = 16  # tokens; where more come without a space, words are not told apart
# Letters of scripts without spaces: Thai, Lao, Burmese, Khmer, kana, Chinese characters.
UNSPACED = re.compile(
    r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"
)
LONGEST_EDIT = 8  # tokens, before and after, that are tried again where the same tokens come again
NO_EDIT: tuple[list[int], list[int]] = ([], [])


def _rates(alone: float) -> Rates:
    """Returns the rates of a token: a drafter that agrees is a further sign, one that differs is as often right."""
    return alone, (1 + alone) / 2, alone * alone


ASSUMED = tuple(map(_rates, (*ALONE, 0.8, 0.72, 0.27, 0.17, 0.5, 0.33)))


class PredictionIndex:
    """Follows one answer through the `prediction`, token ids. `text`: gives that of a token to `find`."""

    def __init__(self, prediction: Sequence[int], text: Callable[[int], str] = str) -> None:
        self._tokens, self._text = prediction, text
        self._characters = _as_text(prediction)
        self._in_answer = False
        self._end = ""  # of the answer
        self._at, self._length = 0, BEGINNING  # the place that the text has reached; tokens that agree before it
        self._new: list[int] = []  # tokens since the text has left it there
        self._anchor = 0  # the last place that was certain
        self._edits: dict[int, tuple[list[int], list[int]]] = {}  # by its first token what was replaced, and by what
        self._came = bytearray(len(prediction))

    @property
    def came(self) -> int:
        """Returns how many tokens of the prediction the answer has so far, each counted once."""
        return sum(self._came)

    def extend(self, tokens: Iterable[int]) -> None:
        """Adds tokens: first those of the prompt, which count for nothing, then those of the answer."""
        if self._in_answer:
            self.follow(tokens)
        self._in_answer = True

    def follow(self, tokens: Iterable[int]) -> None:
        """Adds tokens of the answer."""
        for token in tokens:
            self._end = (self._end + _as_text((token,)))[-MEASURED:]
            if not self._new:
                if self._at < len(self._tokens) and self._tokens[self._at] == token:
                    self._came[self._at] = 1
                    self._at, self._length = self._at + 1, self._length + 1
                    continue
                self._anchor = self._at if self._length >= ANCHORED else self._anchor
            self._new.append(token)
            if (place := self._place(SURE)) >= 0:
                self._resume(place)

    def _resume(self, place: int) -> None:
        """Goes on at `place`, and remembers the edit before it."""
        length = self._agreeing(place)
        back = min(length, len(self._new))  # tokens before them had places of their own
        self._came[place - back : place] = b"\1" * back
        old, new = list(self._tokens[self._at : place - back]), self._new[: len(self._new) - back]
        if 0 < len(old) <= LONGEST_EDIT and len(new) <= LONGEST_EDIT:
            self._edits[old[0]] = old, new
        self._at, self._length, self._new = place, length, []

    def find(self, limit: int) -> Continuations | None:
        """Returns what follows in the prediction, at most `limit` tokens deep: with the edits that were made before and
        without them or, after the text has left it, from each place where it may go on. None where nothing follows."""
        tree = Continuations([], [], [])
        if not self._new:
            for edited in (True, False) if self._edits else (False,):
                self._add(tree, self._at, self._length, min(limit, CONTINUATION), edited=edited)
            return tree if tree.tokens else None
        most = min(limit, AFTER_EDIT)
        if (place := self._place(SURE - 1)) >= 0:
            self._add(tree, place, self._agreeing(place), most)
        elif (place := self._near()) >= 0:
            self._add(tree, place, 1, most, FOUND)
        if len(self._new) <= MOST_REPLACED:
            self._add_replaced(tree, most)
        return tree if tree.tokens else None

    def _near(self) -> int:
        """Returns the place after the last token soon after the text has left the prediction; -1 for none."""
        return self._characters.find(self._end[-1], self._at, self._at + len(self._new) + NEAR) + 1 or -1

    def _add_replaced(self, tree: Continuations, most: int) -> None:
        """Adds what follows where the new tokens stand in the place of as many words."""
        begun = sum(map(self._begins_word, self._new))
        left = self._at  # the rest of a word of which the text has the beginning
        if begun and left < len(self._tokens) and not self._begins_word(self._tokens[left]):
            left = self._after_word(left)
        place = left
        for _ in range(max(1, begun)):
            place = self._after_word(place)
        new, old = ("".join(map(self._text, row)).strip() for row in (self._new, self._tokens[left:place]))
        alike = next((i for i, (a, b) in enumerate(zip(new, old, strict=False)) if a != b), min(len(new), len(old)))
        corrected = alike >= ALIKE and 2 * alike >= min(len(new), len(old))
        first = CORRECTED if corrected else REPLACED if len(self._new) == 1 else REPLACED_LONG
        self._add(tree, place, 1, most, first)

    def _after_word(self, place: int) -> int:
        """Returns where the word at `place` ends."""
        last = min(place + LONGEST_WORD, len(self._tokens))
        after = (at for at in range(place + 1, last) if self._begins_word(self._tokens[at]))
        return next(after, max(last, place + 1))

    def _begins_word(self, token: int) -> bool:
        first = self._text(token)[:1]
        return not first.isalnum() or bool(UNSPACED.match(first))

    def _place(self, size: int) -> int:
        """Returns the place after the last `size` tokens in the prediction: the first from the anchor on, or else the
        last before it; -1 where they are not in it."""
        key = self._end[-size:]
        if len(key) < size:
            return -1
        found = self._characters.find(key, self._anchor)
        found = self._characters.rfind(key, 0, self._anchor + size) if found < 0 else found
        return -1 if found < 0 else found + size

    def _agreeing(self, place: int) -> int:
        """Counts the tokens before `place` that equal the end of the answer, up to `MEASURED`."""
        length, most = 0, min(place, len(self._end))
        while length < most and self._characters[place - 1 - length] == self._end[-1 - length]:
            length += 1
        return length

    def _add(
        self, tree: Continuations, place: int, length: int, most: int, first: int = -1, edited: bool = False
    ) -> None:
        """Adds what follows `place` to `tree`, `edited` as before or not; `length` tokens before it agree. `first`: the
        level of the first token, where these say nothing."""
        tokens, parents, levels = tree
        nodes, parent, depth = {(parents[node], token): node for node, token in enumerate(tokens)}, -1, 0
        while depth < most and place < len(self._tokens):
            old, new = self._edits.get(self._tokens[place], NO_EDIT)
            known = bool(old) and self._tokens[place : place + len(old)] == old
            row, place = (new, place + len(old)) if known and edited else ([self._tokens[place]], place + 1)
            for number, token in enumerate(row[: most - depth]):
                level = bisect_right(LENGTHS, length + depth)
                if known and not number:
                    level = REPEATED if edited else KEPT
                node = nodes.get((parent, token))
                if node is None:
                    node = len(tokens)
                    tokens.append(token)
                    parents.append(parent)
                    levels.append(level if depth or first < 0 else first)
                parent, depth = node, depth + 1


def _as_text(tokens: Iterable[int]) -> str:
    """Returns a character for each token, as `NgramIndex` searches them."""
    return "".join([chr(token % CODES) for token in tokens])


def prediction_source(prediction: str, spelled: Callable[[], Any]) -> DraftSource | None:
    """Makes the source of one answer; None for a prediction without tokens. `spelled`: makes a `TokenBytes`."""
    spelling = spelled()
    tokens, text = predicted_tokens(prediction, spelling.tokenizer), lru_cache(None)(spelling.text)
    return DraftSource("prediction", ASSUMED, lambda: PredictionIndex(tokens, text), wakes=True) if tokens else None


def predicted_tokens(prediction: str, tokenizer: Any) -> list[int]:
    """Returns a prediction as the tokens of an answer."""
    return list(tokenizer.encode(prediction, add_special_tokens=False).ids)
