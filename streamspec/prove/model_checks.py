"""Compares, bit for bit, rows that a model computes alone with the same rows among others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle, islice
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from streamspec.draft_tree import DraftTree
from streamspec.errors import ConfigError
from streamspec.progress import track
from streamspec.prove.check import Check
from streamspec.runtime.decoding.acceptance import off_borders
from streamspec.runtime.decoding.draft_tree_search import Draft
from streamspec.runtime.decoding.model_runner import ROOT_ONLY, StepRequest
from streamspec.runtime.engine.ort_runner import OrtRunner
from streamspec.runtime.sampling.sampling_params import GREEDY

if TYPE_CHECKING:
    from streamspec.runtime import Session

CONTEXTS = (0, 120, 1000, 4000)  # tokens in the cache, as far as the bundle's context has room for them
WINDOW = 64  # rows that are compared after them
WIDTHS = (2, 3, 4, 5, 8, 13, 16, 32, 64)  # rows of a call
OTHER = 7919  # added to a token makes one that the text does not have there


class _Call(NamedTuple):
    """Rows of one call: `tokens` of `tree`, of which `path` is text and is committed."""

    tokens: list[int]
    tree: DraftTree
    path: list[int]


def chain(text: list[int], width: int, vocab: int) -> _Call:
    """The next `width` tokens of the text below each other."""
    return branched(text[:width], 1, vocab)


def rejected(text: list[int], width: int, vocab: int) -> _Call:
    """A chain that leaves the text in its middle."""
    kept = (width + 1) // 2
    call = chain([*text[:kept], *((token + OTHER) % vocab for token in text[kept:width])], width, vocab)
    return call._replace(path=call.path[:kept])


def tree(text: list[int], width: int, vocab: int) -> _Call:
    """A tree in which each token of the text has a sibling on either side."""
    return branched(text[: 1 + (width - 1) // 3], 3, vocab)


def branched(text: list[int], children: int, vocab: int) -> _Call:
    """A tree of which each level has `children` nodes, the middle one of the text."""
    tokens, parents, ranks, path = [text[0]], [0], [0], [0]
    for token in text[1:]:
        parent = path[-1]
        for rank in range(children):
            if rank == children // 2:
                path.append(len(tokens))
            tokens.append((token + OTHER * (rank - children // 2)) % vocab)
            parents.append(parent)
            ranks.append(rank)
    return _Call(tokens, DraftTree(tuple(parents), tuple(ranks)), path)


KINDS = {"rows in chains": chain, "rows in chains cut short": rejected, "rows in draft trees": tree}
PROMPT = "rows of prompts"  # their keys and values


class _Rows:
    """Rows of a text but its last token, each computed by a call of its own: `logits` float32 [WINDOW, vocabulary], and
    `cache`, keys and values of the whole text (`SequenceRows.rows`). `context`: tokens of the text before them."""

    def __init__(self, runner: OrtRunner, text: list[int], context: int) -> None:
        self.runner, self.text, self.context = runner, text, context
        self.begin(context)
        self.logits = np.concatenate([self.step(_Call([token], ROOT_ONLY, [0])) for token in text[context:-1]])
        self.cache = self.cached()

    def begin(self, length: int) -> None:
        """Leaves the first `length` tokens in the cache."""
        before = self.text[:length]
        known = self.runner.begin([*before, self.text[length]], GREEDY, logits=True)
        if known < length:
            self.runner.prefill(StepRequest(before[known:]))

    def cached(self) -> list[np.ndarray]:
        """Returns keys and values after the last token, whose call computes what is due of recurrent states."""
        self.step(_Call([self.text[-1]], ROOT_ONLY, [0]))
        return self.runner.snapshot()[1]

    def step(self, call: _Call) -> np.ndarray:
        """Verifies and commits. Returns the logits float32 [len(path), vocabulary]."""
        logits = self.runner.verify(StepRequest(call.tokens, call.tree)).logits
        assert logits is not None
        found = logits[call.path]  # a copy: the next call reuses the memory
        self.runner.commit(call.path)
        return found

    def compare(self, check: Check, width: int) -> None:
        """Computes the rows `width` at a time, in calls of the kind that `check` names."""
        self.begin(self.context)
        at, where = 0, f"{self.context} tokens before, {width} rows"
        while at < WINDOW:
            call = self._call(KINDS[check.name], at, min(width, WINDOW - at))
            found, expected = self.step(call), self.logits[at : at + len(call.path)]
            other = (found.view(np.uint32) != expected.view(np.uint32)).any(axis=1)
            check.add(len(found), int(other.sum()), f"{where}, row {at + int(np.argmax(other))}")
            apart = np.subtract(found, expected, out=np.zeros_like(found), where=found != expected)
            check.largest = max(check.largest or 0.0, float(np.abs(apart).max()))
            at += len(call.path)
        self._compare_cache(check, where, WINDOW)

    def _call(self, made: Callable[[list[int], int, int], _Call], at: int, width: int) -> _Call:
        """Returns the next call; a chain where the runtime, too, makes no tree (`off_borders`)."""
        text, vocab = self.text[self.context + at :], self.runner.vocab_size
        call = made(text, width, vocab)
        drafted = Draft(call.tree, call.tokens, [1.0] * len(call.tokens), [0] * len(call.tokens), 1.0)
        return call if off_borders(drafted, self.context + at) is drafted else chain(text, width, vocab)

    def compare_prompt(self, check: Check) -> None:
        """Reads the text as a prompt, as many rows at once as prompts are read with."""
        length, features = len(self.text) - 1, self.runner.model.features
        self.runner.reset()
        self.begin(length)
        check.compared += length
        # What a draft layer keeps of a token is of the next one: here the text's, else the model's choice.
        self._compare_cache(check, f"{length} tokens", length, features.layers if features.next_tokens else None)

    def _compare_cache(self, check: Check, where: str, newest: int, layers: int | None = None) -> None:
        """Compares keys and values of the `newest` rows, of the first `layers` or all."""
        kept = zip(self.runner.cache.groups, self.cache, self.cached(), strict=True)
        for number, (group, expected, found) in enumerate(kept):
            for layer, one, other in zip(group.layers, expected, found, strict=True):
                same = one[..., -newest - 1 :, :].tobytes() == other[..., -newest - 1 :, :].tobytes()
                if layers is None or layer < layers:
                    check.add(0, not same, f"{where}, keys and values, layer {layer} of group {number}")


def model_checks(session: Session, texts: Sequence[Sequence[int]]) -> list[Check]:
    """Compares rows in chains, in trees and in prompts with the same rows alone.

    `texts`: token ids, joined and repeated to fill the contexts.
    """
    runner, room = getattr(session.runner, "target", session.runner), session.context_length - WINDOW - 1
    if room < 0:
        raise ConfigError(f"a context of {session.context_length}", f"at least {WINDOW + 1}", "give a larger --context")
    assert isinstance(runner, OrtRunner)
    widest = runner.rows or (runner.row_counts[-1] if runner.row_counts else WIDTHS[-1])
    widths = [width for width in WIDTHS if width <= widest]
    checks, prompts = [Check(name, "rows") for name in KINDS], Check(PROMPT, "tokens")
    contexts = [context for context in CONTEXTS if context <= room]
    with runner.generation():
        for context in track(contexts, "rows", len(contexts)):
            text = list(islice(cycle([token for each in texts for token in each]), context + WINDOW + 1))
            rows = _Rows(runner, text, context)
            for width in widths:
                for check in checks:
                    rows.compare(check, width)
            rows.compare_prompt(prompts)
        runner.reset()
    return [*checks, prompts]
