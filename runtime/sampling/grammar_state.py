"""Follows a text through its grammar (constrained decoding): which tokens may come next, which one must, whether none
may.

One `GrammarState` belongs to one generation. It looks ahead along the paths of a draft tree and comes back; results are
cached until the text grows. Works on token ids; the grammar itself is a `Matcher` (`runtime/text/grammar.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from streamspec.draft_tree import DraftTree
from streamspec.errors import BundleError, ConfigError

Path = tuple[int, ...]
Candidate = tuple[int, float, int]  # token, probability, number


class GrammarLimit(ConfigError):
    """Following a grammar takes more than it may: here, or along a draft that may never be part of the text."""


class Matcher(Protocol):
    """A grammar that has been followed for some tokens. `allowed` and `consume` raise GrammarLimit; once the tokens
    that led there are taken back, it goes on."""

    def allowed(self) -> tuple[np.ndarray, bool]:
        """Returns a new bool [vocabulary], the tokens that may follow, and whether the text may end here."""

    def consume(self, token: int) -> bool:
        """Follows one token; False where it is not allowed."""

    def back(self, tokens: int) -> None:
        """Takes the last `tokens` back."""


@dataclass(frozen=True)
class AllowedNext:
    """The tokens that may come next. `mask` bool [vocabulary], with end-of-text where the grammar may end; never empty.
    `forced`: the only token there is, unless that is end-of-text. `over`: nothing may come and the vocabulary has no
    end-of-text; `dead`: nothing may come and the text may not end here. `mask` is all True in both, and the token it
    lets through is dropped."""

    mask: np.ndarray
    forced: int | None
    over: bool = False
    dead: bool = False


class GrammarState:
    """Follows one text. `path` arguments are tokens after the text so far."""

    def __init__(self, matcher: Matcher, eos: Collection[int]) -> None:
        self._matcher, self._eos = matcher, list(eos)
        self._ahead: Path = ()  # tokens after the text that the matcher has consumed
        self._cached: dict[Path, AllowedNext] = {}
        self.forced_tokens = 0  # of the text so far
        self.limited = False  # a draft has met the grammar's limits: nothing more is drafted in this text

    def after(self, path: Path = ()) -> AllowedNext:
        """Returns the tokens that may follow `path`, none where they cannot be known. Raises ConfigError where the text
        itself reaches the grammar's limits or a dead end.
        """
        try:
            return self._after(path)
        except GrammarLimit:
            if not path:
                raise
            self.limited = True
            return AllowedNext(np.ones_like(self.after().mask), None, dead=True)

    def _after(self, path: Path) -> AllowedNext:
        if path not in self._cached:
            if path and self.limited:
                raise GrammarLimit("a draft in a text whose drafts met limits", "none", "draft nothing")
            self._go(path)
            mask, ends = self._matcher.allowed()
            mask[self._eos] = ends and bool(self._eos)
            count = int(np.count_nonzero(mask))
            only = int(np.argmax(mask)) if count == 1 else -1
            mask |= not count
            self._cached[path] = AllowedNext(
                mask, None if only < 0 or only in self._eos else only, not count and ends, not count and not ends
            )
        allowed = self._cached[path]
        if allowed.dead and not path:
            raise _stuck()
        return allowed

    def follows(self, tree: DraftTree, tokens: Sequence[int]) -> bool:
        """Tells whether what may follow each node of `tree` is known, whose root is the text's last token."""
        for node in range(len(tree)):
            self.after(tuple(int(tokens[i]) for i in tree.path(node)[1:]))
        return not self.limited

    def filter(self, path: Path, candidates: Sequence[Candidate]) -> list[tuple[int, float, int | None]]:
        """Returns the `candidates` after `path` that may be drafted, with probabilities as if no other token could
        come; a forced token alone, and certain. End-of-text is never drafted: it comes as the target's own token at no
        cost."""
        allowed = self.after(path)
        if allowed.over or allowed.dead:
            return []
        if (forced := allowed.forced) is not None:
            return [(forced, 1.0, next((number for token, _, number in candidates if token == forced), None))]
        allowed_candidates = [candidate for candidate in candidates if self._draftable(allowed, candidate[0])]
        if len(allowed_candidates) == len(candidates):
            return [*allowed_candidates]
        # Tokens that are allowed and no candidates are as likely as the least of the candidates, all together.
        rest = sum(probability for _, probability, _ in allowed_candidates) + candidates[-1][1]
        return [(token, probability / max(rest, 1e-9), number) for token, probability, number in allowed_candidates]

    def allows(self, path: Path, token: int) -> bool:
        """Tells whether `token` may be drafted after `path`."""
        return self._draftable(self.after(path), token)

    def tree_masks(self, tree: DraftTree, tokens: Sequence[int] | np.ndarray) -> np.ndarray:
        """Returns bool [n, vocabulary]: the tokens that may follow each node of `tree`, whose root is the text's last
        token."""
        return np.stack(
            [self.after(tuple(int(tokens[i]) for i in tree.path(node)[1:])).mask for node in range(len(tree))]
        )

    def over_after(self, tokens: Sequence[int]) -> int | None:
        """Counts how many of `tokens` come before the grammar is over, None where it is not; never so where there is
        end-of-text.
        """
        if self._eos:
            return None
        return next((n for n in range(len(tokens) + 1) if self.after(tuple(tokens[:n])).over), None)

    def advance(self, tokens: Sequence[int]) -> None:
        """Makes `tokens` part of the text. Raises BundleError where one of them is not allowed."""
        for i, token in enumerate(tokens):
            allowed = self._after(tuple(tokens[:i]))
            if allowed.dead:
                raise _stuck()
            if not allowed.mask[token]:
                raise BundleError(
                    f"a graph that chose token {token} although its mask forbids it",
                    "an allowed token",
                    "export the bundle again",
                )
            self.forced_tokens += allowed.forced is not None
        self._go(tuple(token for token in tokens if token not in self._eos))
        self._ahead, self._cached = (), {}

    def _draftable(self, allowed: AllowedNext, token: int) -> bool:
        return bool(allowed.mask[token]) and not allowed.over and not allowed.dead and token not in self._eos

    def _go(self, path: Path) -> None:
        """Moves the matcher to the end of `path`."""
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
