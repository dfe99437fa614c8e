#!/usr/bin/env python3
"""Measures typical acceptance, which changes the text:
`python benchmarks/typical.py BUNDLE --prompts TASK.jsonl [--epsilon 0.09] [--delta 0.3] [--temperature 0.7]`.

A draft token is accepted, too, if the target's probability for it exceeds min(epsilon, delta exp(-H)), H the entropy of
the target's distribution there (Medusa, arXiv 2401.10774, section 3.2). A lossy baseline: the runtime has no such mode.
Prints tokens per step and quality of exact and typical acceptance at the same draft size, and the number of equal
answers. A step takes two calls here, so no times are given.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from streamspec.bench.prompts import read_cases
from streamspec.bench.quality import mean_scores, score
from streamspec.runtime import load
from streamspec.runtime.decoding.loop import SpeculativeDecoder
from streamspec.runtime.decoding.model_runner import StepRequest, StepResult
from streamspec.runtime.decoding.policy import DecodingPolicy
from streamspec.runtime.engine.ort_runner import OrtRunner
from streamspec.runtime.options import GenerationOptions


class TypicalEngine:
    """Wraps a runner and replaces its greedy choice by a draft token where that is typical."""

    def __init__(self, engine: OrtRunner, epsilon: float, delta: float, temperature: float) -> None:
        self._engine, self.epsilon, self.delta, self.temperature = engine, epsilon, delta, temperature

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def verify(self, request: StepRequest) -> StepResult:
        """Commits the accepted path at once; does not support grammars."""
        tokens, tree, draft = request.tokens, request.tree, request.run_drafter
        logits = self._engine.forward(tokens, tree.depths, tree.mask())
        choices = logits.argmax(axis=1)
        scores = logits.astype(np.float64) / self.temperature
        probabilities = np.exp(scores - scores.max(axis=1, keepdims=True))
        probabilities /= probabilities.sum(axis=1, keepdims=True)
        entropy = -(probabilities * np.log(np.maximum(probabilities, 1e-30))).sum(axis=1)
        least = np.minimum(self.epsilon, self.delta * np.exp(-entropy))
        stands = [True] * len(tree)
        for node, parent in list(enumerate(tree.parents))[1:]:
            stands[node] = stands[parent] and bool(
                probabilities[parent, tokens[node]] > least[parent] or choices[parent] == tokens[node]
            )
        longest = max(np.flatnonzero(stands).tolist(), key=tree.depths.__getitem__)
        path = tree.path(longest)
        for parent, node in pairwise(path):
            choices[parent] = tokens[node]
        found = self._engine.prefill(StepRequest([tokens[node] for node in path], run_drafter=draft))
        return StepResult(choices.tolist(), longest if draft else None, found.proposal)

    def commit(self, path: Sequence[int]) -> None:
        """Done."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--epsilon", type=float, default=0.09)
    parser.add_argument("--delta", type=float, default=0.3)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--limit", type=int, default=100)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--threads", type=int)
    arguments = parser.parse_args()
    session = load(arguments.bundle, threads=arguments.threads, tree=arguments.rows)
    assert isinstance(session.runner, OrtRunner)
    typical = TypicalEngine(session.runner, arguments.epsilon, arguments.delta, arguments.temperature)
    texts: dict[str, list[str]] = {}
    scores: dict[str, list[dict[str, float]]] = {}
    counts: dict[str, np.ndarray] = {}
    for case in read_cases(arguments.prompts, arguments.limit):
        for name, engine in (("exact", session.runner), ("typical", typical)):
            policy = DecodingPolicy(session.manifest.model.eos_token_ids, arguments.rows, sources=())
            decoder = SpeculativeDecoder(engine, GenerationOptions(arguments.max_new_tokens), policy)
            tokens = [token for done in decoder.run(session.encode(case.turns[0])) for token in done.tokens]
            text = session.tokenizer.decode(tokens)
            texts.setdefault(name, []).append(text)
            if case.references:
                scores.setdefault(name, []).append(score(text, case.references))
            counts[name] = counts.get(name, 0) + np.array([decoder.stats.step_tokens, decoder.stats.steps])
    same = sum(a == b for a, b in zip(texts["exact"], texts["typical"], strict=True))
    found: dict[str, Any] = {"prompts": len(texts["exact"]), "same answers": same}
    for name, (tokens_, steps) in counts.items():
        found[name] = {"tokens_per_step": round(tokens_ / steps, 3)} | {
            k: round(v, 4) for k, v in mean_scores(scores.get(name, [])).items()
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
