"""Drafts from a predicted output: a text that comes with the request and that the answer is expected to repeat but for
some edits, such as a file that is to be changed (OpenAI's `prediction`).

`PredictionIndex` follows the answer through it. Where the answer leaves it, the tokens since then are looked for around
the place: after an insertion the prediction goes on where it was left, after a deletion or a replacement further on.
The more tokens agree before a place, the surer is the next one, so drafts are as long as a step has rows.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any

from streamspec.runtime.draft_sources.ngram import CODES
from streamspec.runtime.draft_sources.source import Continuations, DraftSource, Rates

CONTINUATION = 63  # tokens offered where the text follows the prediction,
AFTER_EDIT = 12  # and from each place where it may go on after an edit
SURE = 3  # tokens that agree, after which the text follows the prediction again
ANCHORED = 8  # that must agree for the search to begin where they end
BEGINNING = 4  # that the beginning counts for
MOST_REPLACED = 4  # tokens that are taken to replace as many, or to be inserted
MOST_INSERTED = 16  # tokens after which a single one that agrees says nothing
MEASURED = 64  # tokens that agree from here on count as one
# Acceptance by the tokens that agree before, from these counts on; after as many other tokens; after inserted ones; of
# an edit that was made before; of the token in the place of one.
LENGTHS = (2, 3, 4, 6, 9, 17, 33, MEASURED)
ALONE = (0.40, 0.60, 0.75, 0.85, 0.90, 0.94, 0.96, 0.975, 0.985)
REPLACED, INSERTED, REPEATED, KEPT = range(len(ALONE), len(ALONE) + 4)
LONGEST_EDIT = 8  # tokens, before and after, that are tried again where the same tokens come again
NO_EDIT: tuple[list[int], list[int]] = ([], [])


def _rates(alone: float) -> Rates:
    """Returns the rates of a token: a drafter that agrees is a further sign, one that differs is as often right."""
    return alone, (1 + alone) / 2, alone * alone


ASSUMED = tuple(map(_rates, (*ALONE, 0.35, 0.15, 0.7, 0.25)))


class PredictionIndex:
    """Follows one text through the `prediction`, token ids."""

    def __init__(self, prediction: Sequence[int]) -> None:
        self._tokens = prediction
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
        doubt = int(len(self._new) > MOST_INSERTED)  # tokens that agree and say nothing
        for size in range(min(SURE, len(self._end)) - 1, doubt, -1):
            if (place := self._place(size)) >= 0:
                self._add(tree, place, self._agreeing(place) - doubt, most)
                break
        if len(self._new) <= MOST_REPLACED:
            self._add(tree, self._at + len(self._new), 0, most, REPLACED)
            self._add(tree, self._at, 0, most, INSERTED)
        return tree if tree.tokens else None

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


def prediction_source(prediction: str, tokenizer: Any) -> DraftSource | None:
    """Makes the source of one answer; None for a prediction without tokens."""
    tokens = predicted_tokens(prediction, tokenizer)
    return DraftSource("prediction", ASSUMED, lambda: PredictionIndex(tokens), wakes=True) if tokens else None


def predicted_tokens(prediction: str, tokenizer: Any) -> list[int]:
    """Returns a prediction as the tokens of an answer."""
    return list(tokenizer.encode(prediction, add_special_tokens=False).ids)
