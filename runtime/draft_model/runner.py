"""Runs two models: the target, and a smaller one that drafts by plain decoding, with a KV cache of its own. `window`
has the target itself in place of the smaller one.

To the decoding loop both are a single model with a drafter: a call verifies with the target, then the draft model reads
what was accepted and writes `draft_depth` tokens, one call each, or fewer where it is not sure of them (`early_end`).
It proposes a chain and, at each depth, the next likeliest tokens. Its cache holds its drafts until the next call, and
is taken back to the last token that came true."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Self

import numpy as np

from streamspec.runtime.costs.draft_depth import MAX_DEPTH
from streamspec.runtime.decoding.acceptance import accept
from streamspec.runtime.decoding.draft_proposal import TreeProposal
from streamspec.runtime.decoding.model_runner import StepRequest, StepResult
from streamspec.runtime.engine.loaded_model import LoadedModel
from streamspec.runtime.engine.ort_runner import OrtRunner, shared_prefix
from streamspec.runtime.sampling.sampling_params import GREEDY, Sampling

BLOCK = 128  # logits whose maximum `likeliest` takes first
CANDIDATES = 4  # tokens offered at each depth; the first of them is drafted from


class TwoModelRunner:
    """See `streamspec.runtime.decoding.model_runner.ModelRunner`. Its cache, tokens and logits are the target's."""

    def __init__(self, target: OrtRunner, draft: OrtRunner) -> None:
        self.target, self.draft = target, draft
        self.gamma = MAX_DEPTH
        self._eos = frozenset(target.model.manifest.model.eos_token_ids)
        self._same = 0  # both caches begin with at least so many equal tokens

    # ---- the target's

    @property
    def model(self) -> LoadedModel:
        return self.target.model

    @property
    def threads(self) -> int:
        return self.target.threads

    @property
    def together(self) -> int:
        return 1  # each draft would wait for the others'

    @property
    def context_length(self) -> int:
        return self.target.context_length

    @property
    def length(self) -> int:
        return self.target.length

    @property
    def tokens(self) -> Sequence[int]:
        return self.target.tokens

    def reusable(self, prompt: Sequence[int]) -> int:
        return self.target.reusable(prompt)

    def commit(self, path: Sequence[int]) -> None:
        self.target.commit(path)

    def snapshot(self) -> tuple[list[int], list[np.ndarray]]:
        return self.target.snapshot()

    # ---- both

    @property
    def graph_seconds(self) -> float:
        return self.target.graph_seconds + self.draft.graph_seconds

    @property
    def waited_seconds(self) -> float:
        return self.target.waited_seconds + self.draft.waited_seconds

    def fork(self, context: int | None = None) -> Self:
        return type(self)(self.target.fork(context), self.draft.fork())

    def reset(self) -> None:
        self.target.reset()
        self.draft.reset()
        self._same = 0

    def release(self) -> None:
        self.target.release()
        self.draft.release()
        self._same = 0

    def restore(self, tokens: Sequence[int], rows: Sequence[np.ndarray]) -> None:
        """Restores the target; the draft model reads the text when it next drafts."""
        self.target.restore(tokens, rows)
        self._same = 0

    def score(self, ids: Sequence[int], start: int = 0) -> np.ndarray:
        self._same = 0
        return self.target.score(ids, start)

    def score_chunks(self, ids: Sequence[int], start: int = 0) -> Iterator[np.ndarray]:
        return self.target.score_chunks(ids, start)

    def cancel(self) -> None:
        self.target.cancel()
        self.draft.cancel()

    @contextmanager
    def generation(self) -> Iterator[None]:
        with self.target.generation(), self.draft.generation():
            yield

    def begin(self, prompt: Sequence[int], sampling: Sampling = GREEDY, logits: bool = False, turn: bool = True) -> int:
        known = self.target.begin(prompt, sampling, logits, turn)
        self._same = min(known, self.draft.begin(prompt, GREEDY, logits=True, turn=turn))
        return known

    # ---- calls

    def prefill(self, request: StepRequest, progress: Callable[[int], None] | None = None) -> StepResult:
        result = self.target.prefill(replace(request, run_drafter=False), progress)
        if not request.run_drafter:
            return result
        return result._replace(accepted=0, proposal=self._propose(result.choices, (), request))

    def verify(self, request: StepRequest) -> StepResult:
        if not request.run_drafter:
            return self.target.verify(request)
        result = self.target.verify(replace(request, run_drafter=False))
        node, path = accept(request.tree, request.tokens, result.choices)
        came = [*(request.tokens[i] for i in path), result.choices[node]]
        return result._replace(accepted=node, proposal=self._propose(came, path, request))

    def _propose(self, came: Sequence[int], path: Sequence[int], request: StepRequest) -> TreeProposal | None:
        """Drafts after the target's tokens and `came`: those of rows `path` of its last call, which are about to be
        committed, and the one after them. None beyond the draft model's context, and after a token that it does not
        have."""
        depth, end = request.draft_depth or self.gamma, request.early_end
        logits = self._read(came, path, depth)
        if logits is None:
            return None
        vocabulary = min(self.target.vocab_size, self.draft.vocab_size)
        tokens, scores, confidences, probability = list[np.ndarray](), list[np.ndarray](), list[float](), 1.0
        while True:
            best = likeliest(logits[0, :vocabulary], CANDIDATES)
            tokens.append(best)
            scores.append(logits[0, best])
            drafted = best.item(0)
            if end is not None:
                confidences.append(confidence(logits[0, :vocabulary], float(scores[-1][0])))
                probability *= end.probability(confidences[-1])
            unsure = end is not None and probability < end.min_probability
            if unsure or len(tokens) >= depth or drafted in self._eos:
                break
            logits = self._next(drafted)
        depths = len(tokens)
        # Each row follows the first candidate of the one before.
        proposal = TreeProposal(np.array(tokens), np.array(scores), np.zeros(depths, np.int64), (1,) * depths)
        proposal.confidences = confidences
        return proposal

    def _read(self, came: Sequence[int], path: Sequence[int], depth: int) -> np.ndarray | None:
        """Returns the draft model's logits [1, vocabulary] after `came`, or None (`_propose`), also without room for
        `depth` tokens."""
        unread = self._rewind(came)
        room = self.draft.context_length - self.draft.length - len(unread)
        if room < depth or max(unread) >= self.draft.vocab_size or came[-1] in self._eos:
            return None
        return self.draft.prefill(StepRequest(unread)).logits

    def _next(self, token: int) -> np.ndarray:
        """Its logits [1, vocabulary] after one more token."""
        logits = self.draft.verify(StepRequest([token])).logits
        assert logits is not None
        self.draft.commit((0,))
        return logits

    def _rewind(self, came: Sequence[int]) -> list[int]:
        """Takes the draft model's cache back to what it shares with the target's tokens and `came`. Returns the rest of
        those, one token at least."""
        self._same = min(self._same, self.draft.length)
        text = [*self.target.tokens[self._same :], *came]
        shared = self._same + shared_prefix(self.draft.tokens[self._same :], text[:-1])
        reached = self.draft.cache.reachable(shared)
        self.draft.rewind(reached)
        if reached < self._same:
            text, self._same = [*self.target.tokens, *came], 0
        unread = text[reached - self._same :]
        self._same = min(reached, self.target.length)
        return unread


def likeliest(logits: np.ndarray, count: int) -> np.ndarray:
    """Token ids int64 [at most count] of the largest of `logits` float32 [vocabulary], the largest first; of equals the
    lower id first.

    They lie in the blocks with the largest maxima, which one fast pass finds.
    """
    size = len(logits)
    count = min(count, size)
    whole = size // BLOCK * BLOCK
    ids = np.arange(whole, size)
    if whole:
        maxima = logits[:whole].reshape(-1, BLOCK).max(axis=1)
        blocks = np.argsort(-maxima, kind="stable")[:count] if len(maxima) <= count else _largest(maxima, count)
        ids = np.concatenate(((blocks[:, None] * BLOCK + np.arange(BLOCK)).ravel(), ids))
        ids.sort()
    return np.asarray(ids[np.argsort(-logits[ids], kind="stable")[:count]], np.int64)


def confidence(logits: np.ndarray, largest: float) -> float:
    """Returns the probability of the likeliest token, whose logit is the `largest` of `logits` float32 [vocabulary]."""
    return 1 / float(np.exp(logits - np.float32(largest)).sum())


def _largest(values: np.ndarray, count: int) -> np.ndarray:
    """Returns the indices of `count` largest values, the lower ones of equals."""
    threshold = np.partition(values, len(values) - count)[len(values) - count]
    above, equal = np.flatnonzero(values > threshold), np.flatnonzero(values == threshold)
    return np.concatenate((above, equal[: count - len(above)]))
