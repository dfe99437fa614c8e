"""Chooses tokens in ways that graphs do not know: adjusted logits and log-probabilities. Masks, of grammars and
thinking budgets, are made here and applied by the graph.

tests/runtime/sampling/test_grammar_state.py and tests/runtime/sampling/test_sampling_params.py cover this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from streamspec.draft_tree import DraftTree
from streamspec.runtime.decoding.acceptance import Committed, accept
from streamspec.runtime.decoding.model_runner import ROOT_ONLY, ModelRunner, StepResult
from streamspec.runtime.sampling.grammar_state import GrammarState
from streamspec.runtime.sampling.sampling_params import AdjustedSampler, Logprob, logprob, prompt_logprobs

if TYPE_CHECKING:
    from streamspec.runtime.options import GenerationOptions


class TokenChoice:
    """Chooses the tokens of one answer. `options`: of the call; `grammar`: what limits it, in its first state,
    or None."""

    def __init__(self, options: GenerationOptions, grammar: GrammarState | None) -> None:
        self._options = options
        self._grammar = grammar
        self._sampler: AdjustedSampler | None = None  # chooses in the graph's place
        self._prompt_logprobs: list[Logprob] | None = None
        self.reused = 0  # tokens of the prompt that the cache held before this answer

    @property
    def constrained(self) -> bool:
        return self._grammar is not None

    @property
    def forced_tokens(self) -> int:
        """Tokens so far for which the grammar allowed a single choice."""
        return 0 if self._grammar is None else self._grammar.forced_tokens

    def begin(self, prompt: Sequence[int], runner: ModelRunner) -> int:
        """Begins the answer on `runner`. Returns how many of the prompt's tokens its cache holds already."""
        options = self._options
        if options.prompt_logprobs is not None:
            chunks = runner.score_chunks(prompt)  # the cache holds the prompt then
            self._prompt_logprobs = prompt_logprobs(prompt, chunks, options.prompt_logprobs)
        sampling = options.sampling.for_answer()
        self._sampler = AdjustedSampler(sampling, prompt) if sampling.adjusted else None
        logits = options.logprobs is not None or sampling.adjusted
        held = runner.begin(prompt, sampling, logits, not options.within_turn)
        self.reused = 0 if options.prompt_logprobs is not None else held
        return held

    def mask(self, tokens: Sequence[int] = (-1,), tree: DraftTree = ROOT_ONLY) -> np.ndarray | None:
        """Returns bool [n, vocabulary]: the tokens that may follow each row; None for all."""
        return None if self._grammar is None else self._grammar.tree_masks(tree, tokens)

    def choose(
        self,
        result: StepResult,
        mask: np.ndarray | None,
        tokens: Sequence[int] = (-1,),
        tree: DraftTree = ROOT_ONLY,
    ) -> StepResult:
        """Chooses on the host, along the accepted path, where a sampling parameter is not in the graph (`ADJUSTMENTS`).
        The drafter's proposal stays where the graph has accepted the same path and chosen the same token after it.
        """
        sampler, logits = self._sampler, result.logits
        if sampler is None:
            return result
        assert logits is not None
        choices, reached = list(result.choices), list[int]()
        for node, parent in enumerate(tree.parents):
            if not node or (parent in reached and tokens[node] == choices[parent]):
                reached.append(node)
                path = [tokens[i] for i in tree.path(node)[1:]]
                choices[node] = sampler.choose(logits[node], path, None if mask is None else mask[node])
        node, _ = accept(tree, tokens, choices)
        if result.choices[node] == choices[node] and (len(tree) == 1 or result.accepted == node):
            return result._replace(choices=choices)
        return StepResult(choices, logits=logits, dropped=0 if result.proposal is None else result.proposal.depths)

    def finish(self, committed: Committed, result: StepResult, path: Sequence[int]) -> Committed:
        """Ends the text where the grammar does, and adds log-probabilities, from the logits of the rows of `path`."""
        if self._grammar is not None:
            over = self._grammar.over_after(committed.tokens)
            if over is not None:
                committed = Committed(committed.tokens[:over], committed.drafted[:over], "stop")
        if self._prompt_logprobs is not None:
            committed = replace(committed, prompt_logprobs=self._prompt_logprobs)
            self._prompt_logprobs = None
        count = self._options.logprobs
        if count is None or result.logits is None:
            return committed
        rows = zip(path, committed.tokens, strict=False)
        return replace(committed, logprobs=[logprob(result.logits[row], token, count) for row, token in rows])

    def advance(self, tokens: Sequence[int]) -> None:
        """Adds `tokens` to the text."""
        if self._sampler is not None:
            self._sampler.extend(tokens)
        if self._grammar is not None:
            self._grammar.advance(tokens)
