"""Where a text stands in its grammar: which tokens may follow, which one must, and whether nothing may.

One `GrammarState` belongs to one generation. It looks ahead along the paths of a draft tree and comes back; what it saw
is remembered until the text grows. Knows token ids; the grammar itself is a `Matcher` (`runtime/text/grammar.py`, or a
toy's).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from streamspec.draft_tree import DraftTree
from streamspec.errors import BundleError, ConfigError

Path = tuple[int, ...]
Guess = tuple[int, float, int]  # token, chance, number


class Matcher(Protocol):
    """A grammar that has been followed for some tokens."""

    def allowed(self) -> tuple[np.ndarray, bool]:
        """Bool [vocabulary], the caller's own: text that may follow; and whether the text may end here."""

    def consume(self, token: int) -> bool:
        """Follows one token; False where it is not allowed."""

    def back(self, tokens: int) -> None:
        """Takes the last `tokens` back."""


@dataclass(frozen=True)
class AllowedNext:
    """What may come next. `mask` bool [vocabulary], with end-of-text where the grammar may end; never empty. `forced`:
    the only token there is, unless that is end-of-text. `over`: nothing may come and the vocabulary has no end-of-text;
    `dead`: nothing may come and the text may not end here. `mask` is all True in both, and what it lets by is thrown
    away."""

    mask: np.ndarray
    forced: int | None
    over: bool = False
    dead: bool = False


class GrammarState:
    """See the module. `path` arguments are tokens behind the text so far."""

    def __init__(self, matcher: Matcher, eos: Collection[int]) -> None:
        self._matcher, self._eos = matcher, list(eos)
        self._ahead: Path = ()  # of the text, where the matcher stands
        self._seen: dict[Path, AllowedNext] = {}
        self.forced_tokens = 0  # of the text so far

    def at(self, path: Path = ()) -> AllowedNext:
        """What may follow `path`. Raises ConfigError where the grammar has come to its limits, or the text itself to a
        dead end.
        """
        if path not in self._seen:
            self._go(path)
            mask, ends = self._matcher.allowed()
            mask[self._eos] = ends and bool(self._eos)
            count = int(np.count_nonzero(mask))
            one = int(np.argmax(mask)) if count == 1 else -1
            mask |= not count
            self._seen[path] = AllowedNext(
                mask, None if one < 0 or one in self._eos else one, not count and ends, not count and not ends
            )
        place = self._seen[path]
        if place.dead and not path:
            raise _stuck()
        return place

    def guesses(self, path: Path, guessed: Sequence[Guess]) -> list[tuple[int, float, int | None]]:
        """Of what is `guessed` behind `path` the tokens that may be drafted, as if no other could come; a forced token
        alone, and certain. End-of-text is never drafted: it comes as the target's own last word at no cost."""
        place = self.at(path)
        if place.over or place.dead:
            return []
        if place.forced is not None:
            return [(place.forced, 1.0, next((number for token, _, number in guessed if token == place.forced), None))]
        kept = [guess for guess in guessed if self._draftable(place, guess[0])]
        if len(kept) == len(guessed):
            return [*kept]
        # What is allowed and no guess is as likely as the least of the guesses, all together.
        rest = sum(chance for _, chance, _ in kept) + guessed[-1][1]
        return [(token, chance / max(rest, 1e-9), number) for token, chance, number in kept]

    def allows(self, path: Path, token: int) -> bool:
        """Whether `token` may be drafted behind `path`."""
        return self._draftable(self.at(path), token)

    def masks(self, tree: DraftTree, tokens: Sequence[int] | np.ndarray) -> np.ndarray:
        """Bool [n, vocabulary]: what may follow each node of `tree`, whose root is the text's last token."""
        return np.stack([self.at(tuple(int(tokens[i]) for i in tree.path(node)[1:])).mask for node in range(len(tree))])

    def over_after(self, tokens: Sequence[int]) -> int | None:
        """How many of `tokens` come before the grammar is over, None where it is not; never so where there is
        end-of-text.
        """
        if self._eos:
            return None
        return next((n for n in range(len(tokens) + 1) if self.at(tuple(tokens[:n])).over), None)

    def advance(self, tokens: Sequence[int]) -> None:
        """`tokens` become part of the text. Raises BundleError where one of them is not allowed."""
        for i, token in enumerate(tokens):
            place = self.at(tuple(tokens[:i]))
            if place.dead:
                raise _stuck()
            if not place.mask[token]:
                raise BundleError(
                    f"a graph that chose token {token} although its mask forbids it",
                    "an allowed token",
                    "export the bundle again",
                )
            self.forced_tokens += place.forced is not None
        self._go(tuple(token for token in tokens if token not in self._eos))
        self._ahead, self._seen = (), {}

    def _draftable(self, place: AllowedNext, token: int) -> bool:
        return bool(place.mask[token]) and not place.over and not place.dead and token not in self._eos

    def _go(self, path: Path) -> None:
        """Moves the matcher from where it stands to behind `path`."""
        shared = 0
        while shared < min(len(path), len(self._ahead)) and path[shared] == self._ahead[shared]:
            shared += 1
        if len(self._ahead) > shared:
            self._matcher.back(len(self._ahead) - shared)
        self._ahead = path[:shared]
        for token in path[shared:]:
            if not self._matcher.consume(token):
                raise ConfigError(
                    f"a grammar that refuses token {token}, which it had allowed",
                    "one that can be followed",
                    "simplify the grammar",
                )
            self._ahead = (*self._ahead, token)


def _stuck() -> ConfigError:
    return ConfigError(
        "a grammar that nothing in this vocabulary can go on with", "one that can be satisfied", "correct the grammar"
    )
