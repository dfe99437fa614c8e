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

from streamspec.runtime.draft_sources.source import Continuations, DraftSource, Rates

CODES = 0x110000  # characters, as `ngram.CODES`
CONTINUATION, AFTER_EDIT = (
    63,
    12,
)  # tokens offered where the text follows the prediction; of each place where it may go on
SURE = 3  # tokens that agree, after which the text follows the prediction again
ANCHORED = 8  # that must agree for the search to begin where they end
BEGINNING = 4  # that the beginning counts for
MOST_REPLACED = 4  # tokens that are taken to replace as many, or to be inserted
MEASURED = 64  # tokens that agree from here on count as one
# Acceptance by the tokens that agree before, from these counts on; where as many were replaced; inserted.
LENGTHS = (2, 3, 4, 6, 9, 17, 33, MEASURED)
ALONE = (0.40, 0.60, 0.75, 0.85, 0.90, 0.94, 0.96, 0.975, 0.985)
REPLACED, INSERTED = len(ALONE), len(ALONE) + 1


def _rates(alone: float) -> Rates:
    """Returns the rates of a token: a drafter that agrees is a further sign, one that differs is as often right."""
    return alone, max(alone, 0.95), alone * alone


ASSUMED = tuple(map(_rates, (*ALONE, 0.35, 0.15)))


class PredictionIndex:
    """Follows one text through the `prediction`, token ids."""

    def __init__(self, prediction: Sequence[int]) -> None:
        self._tokens = prediction
        self._characters = _as_text(prediction)
        self._in_answer = False
        self._end = ""  # of the answer
        self._at, self._length, self._lost = (
            0,
            BEGINNING,
            0,
        )  # place, tokens that agree before it, tokens since it was left
        self._anchor = 0  # the last place that was certain
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
            if not self._lost and self._at < len(self._tokens) and self._tokens[self._at] == token:
                self._came[self._at] = 1
                self._at, self._length = self._at + 1, self._length + 1
                continue
            if not self._lost and self._length >= ANCHORED:
                self._anchor = self._at
            self._lost += 1
            place = self._place(SURE)
            if place >= 0:
                self._at, self._length = place, self._agreeing(place)
                back = min(self._length, self._lost)  # tokens before them had places of their own
                self._came[place - back : place] = b"\1" * back
                self._lost = 0

    def find(self, limit: int) -> Continuations | None:
        """Returns what follows in the prediction, at most `limit` tokens deep: a chain or, after the text has left it,
        what follows each place where it may go on. None where nothing does."""
        tree = Continuations([], [], [])
        if not self._lost:
            self._add(tree, self._at, self._length, min(limit, CONTINUATION))
        else:
            most = min(limit, AFTER_EDIT)
            for size in range(min(SURE, len(self._end)) - 1, 0, -1):
                if (place := self._place(size)) >= 0:
                    self._add(tree, place, self._agreeing(place), most)
                    break
            if self._lost <= MOST_REPLACED:
                self._add(tree, self._anchor + self._lost, 0, most, REPLACED)
                self._add(tree, self._anchor, 0, most, INSERTED)
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

    def _add(self, tree: Continuations, place: int, length: int, most: int, first: int | None = None) -> None:
        """Adds what follows `place` to `tree`, of which `length` tokens before it agree. `first`: the level of the
        first token, where that says nothing."""
        tokens, parents, levels = tree
        nodes, parent = {(parents[node], token): node for node, token in enumerate(tokens)}, -1
        for depth, token in enumerate(self._tokens[place : place + most]):
            node = nodes.get((parent, token))
            if node is None:
                node = len(tokens)
                tokens.append(token)
                parents.append(parent)
                levels.append(bisect_right(LENGTHS, length + depth) if depth or first is None else first)
            parent = node


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
