#!/usr/bin/env python3
"""Measures two-model speculative decoding (Leviathan et al., arXiv 2211.17192) in the same runtime.

    python benchmarks/two_model.py train --target-adapter DIR --answers FILE --layers 6 --minutes 20 --out draft-base
    streamspec export --base draft-base --out draft-int8
    python benchmarks/two_model.py bench BUNDLE --draft draft-int8 --prompts F.jsonl [--gammas 2 3 4 5]

`train` cuts the first layers, the final norm and the head off the target (base and task LoRA) and trains all but the
embeddings on the target's own answers: FILE of `streamspec train --answers`. `bench` decodes every prompt plainly, with
the bundle's own drafter and with the draft model, in turn, n-grams off; all three must write the same tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from streamspec.data import read_examples
from streamspec.draft_tree import DraftTree, chain
from streamspec.runtime import load
from streamspec.runtime.decoding.draft_proposal import IndependentProposal
from streamspec.runtime.decoding.loop import SpeculativeDecoder
from streamspec.runtime.decoding.model_runner import Pruning, StepResult
from streamspec.runtime.decoding.policy import DecodingPolicy
from streamspec.runtime.decoding.sampling_params import GREEDY, Sampling
from streamspec.runtime.decoding.verify import accept
from streamspec.runtime.engine.ort_runner import OrtRunner
from streamspec.runtime.options import GenerationOptions


class TwoModelEngine:
    """Runs the target with a second model that drafts `gamma` tokens, one call each.

    Implements `streamspec.runtime.decoding.model_runner.ModelRunner`.
    """

    def __init__(self, target: OrtRunner, draft: OrtRunner, gamma: int) -> None:
        self.target, self.draft, self.gamma = target, draft, gamma
        self.context_length = min(target.context_length, draft.context_length)

    @property
    def length(self) -> int:
        return self.target.length

    @property
    def graph_seconds(self) -> float:
        return self.target.graph_seconds + self.draft.graph_seconds

    @property
    def waited_seconds(self) -> float:
        return self.target.waited_seconds + self.draft.waited_seconds

    def generation(self) -> AbstractContextManager[None]:
        return self.target.generation()

    def reset(self) -> None:
        self.begin(())

    def reusable(self, prompt: Sequence[int]) -> int:
        return 0

    def begin(self, prompt: Sequence[int], sampling: Sampling = GREEDY, logits: bool = False) -> int:
        self.target.reset()
        self.target.begin((), sampling, logits)
        self.draft.reset()
        return 0

    def prefill(
        self,
        ids: Sequence[int],
        draft: bool,
        progress: Callable[[int], None] | None = None,
        allowed: np.ndarray | None = None,
    ) -> StepResult:
        found = self.target.prefill(ids, False, progress, allowed)
        self.draft.prefill(ids, draft=False)
        return StepResult(found.choices, 0, self._propose([found.choices[0]])) if draft else found

    def verify(
        self,
        tokens: Sequence[int],
        tree: DraftTree,
        draft: bool,
        pruning: Pruning | None = None,
        priors: np.ndarray | None = None,
        allowed: np.ndarray | None = None,
    ) -> StepResult:
        found = self.target.verify(tokens, tree, draft=False, allowed=allowed)
        node, path = accept(tree, tokens, found.choices)
        known = min(
            len(path), self.draft.length - self.target.length
        )  # the draft model has seen its own draft but the last token
        self.draft.rewind(self.target.length + known)
        unseen = [tokens[i] for i in path[known:]]
        if draft:
            return StepResult(found.choices, node, self._propose([*unseen, found.choices[node]]))
        if unseen:
            self._feed(unseen)
        return found

    def commit(self, path: Sequence[int]) -> None:
        self.target.commit(path)

    def cancel(self) -> None:
        self.target.cancel()

    def _feed(self, tokens: list[int]) -> int:
        """Commits `tokens` to the draft model and returns its choice after the last."""
        tree = chain(len(tokens) - 1)
        choices = self.draft.verify(tokens, tree, draft=False).choices
        self.draft.commit(range(len(tokens)))
        return choices[-1]

    def _propose(self, committed: list[int]) -> IndependentProposal:
        tokens = [self._feed(committed)]
        while len(tokens) < self.gamma:
            tokens.append(self._feed(tokens[-1:]))
        return IndependentProposal(np.array(tokens)[:, None], np.zeros((self.gamma, 1), np.float32))


def decode(
    runner: Any, prompt: list[int], limit: int, policy: DecodingPolicy | None = None
) -> tuple[list[int], float, int]:
    """Returns the tokens (at most `limit`), milliseconds without the prompt, and calls of the target."""
    decoder = SpeculativeDecoder(runner, GenerationOptions(max_new_tokens=limit), policy)
    tokens = [token for done in decoder.run(prompt) for token in done.tokens]
    stats = decoder.stats
    return tokens, 1e3 * stats.decode_seconds, stats.steps + stats.plain_steps


def bench(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns medians over repetitions of milliseconds per sample, and ratios per repetition."""
    session = load(arguments.bundle, threads=arguments.threads, ngram=False, recycling=False)
    small = load(arguments.draft, threads=arguments.threads, tree="plain")
    target, eos = session.runner, session.manifest.model.eos_token_ids
    plain = DecodingPolicy(eos)
    sides: dict[str, Any] = {"plain": None, "own drafter": None} | {
        f"two models, gamma {n}": n for n in arguments.gammas
    }
    texts = [example.opening for example in read_examples(arguments.prompts, arguments.limit)]
    prompts = [session.encode(text) for text in texts]
    spent = {name: [0.0] * arguments.repeats for name in sides}
    calls, written = dict.fromkeys(sides, 0), 0
    for number, prompt in enumerate(prompts):
        for repeat in range(arguments.repeats):
            answers = []
            for name, gamma in sides.items():
                if name == "own drafter":
                    started = session.generate(texts[number], max_new_tokens=arguments.max_new_tokens)
                    found = (
                        started.token_ids,
                        1e3 * started.stats.decode_seconds,
                        started.stats.steps + started.stats.plain_steps,
                    )
                else:
                    engine = target if gamma is None else TwoModelEngine(target, small.runner, gamma)
                    policy = plain if gamma is None else replace(plain, rows=gamma + 1, sources=())
                    found = decode(engine, prompt, arguments.max_new_tokens, policy)
                answers.append(found[0])
                spent[name][repeat] += found[1]
                calls[name] += found[2]
            if any(answer != answers[0] for answer in answers):
                raise SystemExit(f"prompt {number}: the sides write different tokens")
            written += len(answers[0]) - 1
        if time.monotonic() % 10 < 1:
            print(f"{number + 1}/{len(prompts)}", file=sys.stderr, flush=True)
    own = spent["own drafter"]
    return {
        name: {
            "ms per sample": round(statistics.median(some) / len(prompts), 2),
            "tokens per call": round(written / calls[name], 3),
            "own drafter is faster by": [
                round(f(s / o for s, o in zip(some, own, strict=True)), 3) for f in (statistics.median, min, max)
            ],
        }
        for name, some in spent.items()
    }


def train(arguments: argparse.Namespace) -> None:
    import torch
    from transformers import AutoTokenizer

    from streamspec.adapters.base_models.resolve import resolve_base
    from streamspec.adapters.dataset.token_rows import joined
    from streamspec.adapters.drafters.drafting_model import TargetModel
    from streamspec.adapters.training.config import TrainConfig
    from streamspec.adapters.training.device import spare_allocator, start_budget
    from streamspec.adapters.training.losses import next_token_loss
    from streamspec.adapters.training.trainer import Stage, run_stage
    from streamspec.bundle.adapter_folder import read_adapter
    from streamspec.export.weights.load_weights import load_model

    spare_allocator()
    torch.manual_seed(0)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    base = resolve_base(arguments.base)
    model = load_model(base, read_adapter(arguments.target_adapter) if arguments.target_adapter else None)
    model.model.layers = model.model.layers[: arguments.layers]
    model.config.num_hidden_layers = arguments.layers
    model.config.layer_types = None
    model.model.layers.requires_grad_(True)
    model.model.norm.requires_grad_(True)
    rows = [
        joined(r["prompt"], r["answer"])
        for r in map(json.loads, arguments.answers.read_text().splitlines())
        if "answer" in r
    ]
    target = TargetModel(model)

    def loss(batch: dict[str, torch.Tensor], draw: float) -> dict[str, torch.Tensor]:
        return {"total": next_token_loss(target, target.main_pass(batch["input_ids"], batch["attention_mask"]), batch)}

    config = TrainConfig(
        base=arguments.base,
        data=arguments.answers,
        out=arguments.out,
        epochs=100,
        batch_size=8,
        clock="cpu",
        max_minutes=arguments.minutes,
    )
    run_stage(
        Stage("draft", target, loss, rows, arguments.lr, config.batch_size, start_budget(config, None).until()),
        config,
        arguments.out / "checkpoints",
    )
    model.save_pretrained(arguments.out)
    AutoTokenizer.from_pretrained(base.path).save_pretrained(arguments.out)
    count = sum(p.numel() for p in model.model.layers.parameters())
    print(json.dumps({"layers": arguments.layers, "parameters": count, "rows": len(rows)}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("train")
    one.add_argument("--base", default="smollm2-135m")
    one.add_argument("--target-adapter", type=Path)
    one.add_argument("--answers", type=Path, required=True)
    one.add_argument("--layers", type=int, default=6)
    one.add_argument("--lr", type=float, default=1e-3)
    one.add_argument("--minutes", type=float, default=20)
    one.add_argument("--threads", type=int)
    one.add_argument("--out", type=Path, required=True)
    one.set_defaults(run=train)
    two = commands.add_parser("bench")
    two.add_argument("bundle", type=Path)
    two.add_argument("--draft", type=Path, required=True)
    two.add_argument("--prompts", type=Path, required=True)
    two.add_argument("--limit", type=int, default=100)
    two.add_argument("--max-new-tokens", type=int, default=96)
    two.add_argument("--repeats", type=int, default=3)
    two.add_argument("--gammas", type=int, nargs="+", default=[2, 3, 4])
    two.add_argument("--threads", type=int)
    two.set_defaults(run=lambda arguments: print(json.dumps(bench(arguments), indent=1)))
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
