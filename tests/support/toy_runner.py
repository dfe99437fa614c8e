"""A toy `ModelRunner`: its next token is a hash of all tokens so far, or a script."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from typing import Self

import numpy as np

from streamspec.draft_tree import DraftTree
from streamspec.runtime.costs.drafter_gate import DrafterGate
from streamspec.runtime.costs.row_costs import RowCosts
from streamspec.runtime.costs.speculation_controller import SpeculationController
from streamspec.runtime.decoding.draft_proposal import IndependentProposal
from streamspec.runtime.decoding.loop import SpeculativeDecoder
from streamspec.runtime.decoding.model_runner import ROOT_ONLY, Cancelled, ModelRunner, Pruning, StepRequest, StepResult
from streamspec.runtime.decoding.policy import AdaptiveState, DecodingPolicy
from streamspec.runtime.draft_sources.ngram import NGRAM
from streamspec.runtime.draft_sources.source import DraftSource
from streamspec.runtime.engine.idle_unload import IdleUnloader
from streamspec.runtime.engine.ort_runner import shared_prefix
from streamspec.runtime.options import GenerationOptions
from streamspec.runtime.sampling.grammar_state import GrammarState
from streamspec.runtime.sampling.sampling_params import GREEDY, Sampling

Rule = Callable[[Sequence[int]], int]


def hashed(vocab: int, seed: int = 0) -> Rule:
    """Every token depends on every token before it, so that a wrong context shows."""

    def rule(ids: Sequence[int]) -> int:
        state = seed * 7919 + 17
        for token in ids:
            state = (state * 31 + token + 1) % 1_000_003
        return (state >> 4) % vocab

    return rule


def scripted(prompt: int, script: Sequence[int]) -> Rule:
    """Says `script` whatever was said before; `prompt` is the prompt's length."""
    return lambda ids: script[min(len(ids) - prompt, len(script) - 1)]


def varied(prompt: int, seed: int) -> Rule:
    """Repeats itself with a period of 1 to 7 (odd seeds) or not at all."""
    period = [1, 4, 2, 3, 1, 6, 2][: 1 + seed % 7]
    return scripted(prompt, [period[i % len(period)] for i in range(100)]) if seed % 2 else hashed(4, seed)


class ToyModel:
    """Always loaded, and never shared."""

    sequences, sharing = 1, None

    def __init__(self) -> None:
        self.unloader = IdleUnloader(self.unload, self.reload)

    def unload(self) -> None: ...

    def reload(self) -> None: ...


class ToyRunner:
    """Keeps its cache as token ids. Candidates are right with probability `skill`, at a random rank, and of random
    probabilities.
    """

    threads, together = 1, 1

    def __init__(
        self,
        rule: Rule,
        vocab: int,
        gamma: int = 3,
        width: int = 3,
        context: int = 64,
        skill: float = 0.7,
        seed: int = 0,
    ) -> None:
        self.rule, self.vocab, self.gamma, self.width, self.context_length = rule, vocab, gamma, width, context
        self.skill, self.random = skill, np.random.default_rng(seed)
        self.graph_seconds = self.waited_seconds = 0.0
        self.model = ToyModel()
        self.tokens: list[int] = []
        self.calls: list[tuple[int, bool]] = []
        self.on_call: Callable[[], None] = lambda: None
        self._rows: tuple[list[int], DraftTree] = ([], ROOT_ONLY)
        self._stop = self._wants_logits = False

    @property
    def length(self) -> int:
        return len(self.tokens)

    def reset(self) -> None:
        self.tokens = []

    def release(self) -> None:
        self.reset()

    def fork(self, context: int | None = None) -> Self:
        new = copy(self)
        new.tokens, new.calls, new.context_length = [], [], context or self.context_length
        return new

    def score(self, ids: Sequence[int], start: int = 0) -> np.ndarray:
        raise NotImplementedError

    def snapshot(self) -> tuple[list[int], list[np.ndarray]]:
        return list(self.tokens), [np.zeros((1, 2, 1, 1, self.length, 1), np.float32)]

    def restore(self, tokens: Sequence[int], rows: Sequence[np.ndarray]) -> None:
        self.tokens = list(tokens)

    def reusable(self, prompt: Sequence[int]) -> int:
        return shared_prefix(self.tokens, prompt[:-1])

    def begin(self, prompt: Sequence[int], sampling: Sampling = GREEDY, logits: bool = False, turn: bool = True) -> int:
        same = self.reusable(prompt)
        self.tokens, self.sampling, self._wants_logits = self.tokens[:same], sampling, logits
        return same

    @contextmanager
    def generation(self) -> Iterator[None]:
        self._stop = False
        yield

    def cancel(self) -> None:
        self._stop = True

    def prefill(self, request: StepRequest, progress: Callable[[int], None] | None = None) -> StepResult:
        ids, draft = request.tokens, request.run_drafter
        self._begin(len(ids), draft)
        assert self.length + len(ids) + (self.gamma if draft else 0) <= self.context_length
        self.tokens += ids
        if progress is not None:
            progress(len(ids))
        root = self._choose(self.tokens, request.mask, 0)
        return StepResult(
            [root],
            0 if draft else None,
            self._draft(self.tokens, root) if draft else None,
            self._logits([self.tokens]),
        )

    def verify(self, request: StepRequest) -> StepResult:
        """Where rows may be pruned, a fair coin decides. Of what the mask allows the first from the rule's token on is
        chosen.
        """
        tree, draft, priors = request.tree, request.run_drafter, request.priors
        self._begin(len(tree), draft)
        assert self.length + tree.depth + 1 + (self.gamma if draft else 0) <= self.context_length
        ids = list(request.tokens)
        contexts = [[*self.tokens, *(ids[i] for i in tree.path(node))] for node in range(len(tree))]
        choices = [self._choose(c, request.mask, row) for row, c in enumerate(contexts)]
        if request.pruning is not None:
            assert priors is not None and len(priors) == len(tree) and priors[0] == 0 and (priors <= 0).all()
            for node in range(1, len(tree)):
                if choices[tree.parents[node]] < 0 or self.random.random() < 0.5:
                    choices[node] = -1
        self._rows = ids, tree
        if not draft:
            return StepResult(choices, logits=self._logits(contexts))
        node = max(
            (
                n
                for n in range(len(tree))
                if choices[n] >= 0 and all(ids[i] == choices[tree.parents[i]] for i in tree.path(n)[1:])
            ),
            key=lambda n: (tree.depths[n], -n),
        )
        return StepResult(choices, node, self._draft(contexts[node], choices[node]), self._logits(contexts))

    def commit(self, path: Sequence[int]) -> None:
        self.tokens += [self._rows[0][i] for i in path]

    def _choose(self, context: Sequence[int], allowed: np.ndarray | None, row: int) -> int:
        token = self.rule(context)
        if allowed is None:
            return token
        assert allowed.shape[1] == self.vocab and allowed.any(axis=1).all()
        return next(t % self.vocab for t in range(token, token + self.vocab) if allowed[row, t % self.vocab])

    def _logits(self, contexts: Sequence[Sequence[int]]) -> np.ndarray | None:
        """Of each context, and of nothing else."""
        if not self._wants_logits:
            return None
        return np.stack([np.random.default_rng([*c]).normal(size=self.vocab) for c in contexts]).astype(np.float32)

    def _begin(self, rows: int, draft: bool) -> None:
        self.on_call()
        if self._stop:
            raise Cancelled
        self.calls.append((rows, draft))

    def _draft(self, context: list[int], root: int) -> IndependentProposal:
        ahead, out = [*context, root], np.empty((self.gamma, self.width), np.int64)
        for j in range(self.gamma):
            ahead.append(self.rule(ahead))
            out[j] = self.random.permutation(self.vocab)[: self.width]
            if self.random.random() < self.skill and ahead[-1] not in out[j]:
                out[j, self.random.integers(self.width)] = ahead[-1]
        probabilities = np.sort(self.random.dirichlet(np.ones(self.width), self.gamma))[:, ::-1]
        return IndependentProposal(out, np.log(probabilities))


@dataclass
class Setup:
    """How a toy is decoded: what a call's options, a session's policy and its adaptive state hold together."""

    limit: int
    eos: Collection[int] = ()
    rows: int = 1
    costs: np.ndarray | None = None
    ngram: bool = True
    sources: tuple[DraftSource, ...] = ()  # besides n-grams
    pruning: Pruning | None = None
    grammar: GrammarState | None = None
    logprobs: int | None = None
    adaptive: AdaptiveState = field(default_factory=AdaptiveState)

    def decoder(self, runner: ModelRunner) -> SpeculativeDecoder:
        options = GenerationOptions(max_new_tokens=self.limit, logprobs=self.logprobs)
        costs = None if self.costs is None else RowCosts(self.costs)
        sources = self.sources + ((NGRAM,) if self.ngram else ())
        policy = DecodingPolicy(self.eos, self.rows, costs, sources, self.pruning)
        return SpeculativeDecoder(runner, options, policy, self.adaptive)


def adaptive(controller: SpeculationController | None = None, gate: DrafterGate | None = None) -> AdaptiveState:
    """A state with parts that a test looks at; a controller that believes the costs it is given."""
    state = AdaptiveState()
    state.controller, state.gate = controller or Untimed(), gate
    return state


class Untimed(SpeculationController):
    """Believes in the costs it is given: a toy's own times say nothing."""

    def step(self, committed: int, cost: float | None, seconds: float | None = None) -> None:
        super().step(committed, cost)

    def plain_step(self, seconds: float | None = None, drafter: float = 0.0) -> None:
        super().plain_step()


class ToyMatcher:
    """A grammar of token ids: which may follow, and whether the text may end, is a hash of the tokens so far."""

    def __init__(self, vocab: int, seed: int, never: int = 5) -> None:
        self.vocab, self.seed, self.never, self.text = vocab, seed, never, list[int]()

    def allowed(self) -> tuple[np.ndarray, bool]:
        random = np.random.default_rng([self.seed, *self.text])
        kind = random.integers(6)
        mask = random.random(self.vocab) < 0.5
        if kind < 3:  # one token alone
            mask = np.arange(self.vocab) == random.integers(self.vocab)
        if kind == 5 and len(self.text) > 3:
            mask[:] = False
        mask[self.never] = False
        return mask, kind >= 4 or not mask.any()

    def consume(self, token: int) -> bool:
        fits = bool(self.allowed()[0][token])
        self.text += [token] * fits
        return fits

    def back(self, tokens: int) -> None:
        assert 0 < tokens <= len(self.text)
        del self.text[-tokens:]
