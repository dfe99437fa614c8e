#!/usr/bin/env python3
"""Measures decoding after long prompts: plain, with a window of the cache as the drafter (MagicDec, arXiv 2408.11049),
with n-grams, and with keys and values in float16:
`python benchmarks/long_context.py OUT --books train.jsonl.gz [--contexts 2000 8000] [--wide NAME] [--threads N]`.

Books (JSON lines with `text`) give the prompts, of as many tokens as a context has; each is read once, then answered by
all sides in turns, and all must write the same tokens. The costs of steps are measured on their own, in turns as well,
over a cache of random rows; from them and from the share of drafts that came true follows the speed-up that the
latency model predicts. `--wide` is a shape of `base_shapes.py` with random weights, for costs at `--wide-context`
tokens alone: what it writes means nothing. Bundles and figures are kept in OUT and not made again.
"""

from __future__ import annotations

import argparse
import gc
import gzip
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from base_shapes import BASES

from streamspec.atomic import write_text
from streamspec.draft_tree import chain
from streamspec.progress import track
from streamspec.runtime import Session, load
from streamspec.runtime.costs.theory import best_gamma, expected_speedup
from streamspec.runtime.decoding.loop import SpeculativeDecoder
from streamspec.runtime.decoding.model_runner import StepRequest
from streamspec.runtime.decoding.policy import AdaptiveState, DecodingPolicy
from streamspec.runtime.draft_model.runner import CANDIDATES, likeliest
from streamspec.runtime.draft_model.window import WindowDraftRunner
from streamspec.runtime.options import GenerationOptions, LoadOptions
from streamspec.runtime.tuning.choose_policy import choose_policy

HERE = Path(__file__).resolve().parent
GAMMAS = (2, 4)  # depths of drafts that are forced
ALPHAS = (0.8, 0.9, 0.95)  # shares of drafts that come true, for predictions without an acceptance of their own
ROUNDS, STEPS = 7, 3  # of steps in turns
DTYPES = ("float32", "float16")
MOST = 8  # tokens of a draft, in predictions


def bundle_of(out: Path, base: str, dtype: str) -> Path:
    """The int8 bundle of a base, or of a shape with random weights, with this K/V; exported if it is not there."""
    bundle = out / f"{Path(base).name}-{dtype}"
    if not (bundle / "manifest.json").exists():
        folder = base
        if base in BASES:
            folder = str(out / base)
            if not (out / base / "tokenizer_config.json").exists():
                subprocess.run([sys.executable, HERE / "big_models.py", "--job", "make", base, folder], check=True)
        options = ["--out", bundle, "--precision", "int8", "--kv-cache-dtype", dtype]
        subprocess.run([sys.executable, "-P", "-m", "streamspec", "export", "--base", folder, *options], check=True)
    return bundle


def window(session: Session) -> WindowDraftRunner:
    assert isinstance(session.runner, WindowDraftRunner)
    return session.runner


def fill(both: WindowDraftRunner, context: int) -> None:
    """Fills the target's cache with `context` random rows, the same in all layers."""
    target, random = both.target, np.random.default_rng(0)
    target.reset()
    both.draft.begin((), logits=True)
    target.cache.reserve(0, context)
    for data in target.cache.data:
        rows = random.normal(size=(*data.shape[1:4], context, data.shape[5])).astype(data.dtype)
        for layer in data:
            layer[..., :context, :] = rows
    target.cache.length, target.tokens = context, [5] * context
    target._call.follow_cache()
    both.draft.follow()


def step_costs(session: Session, context: int) -> dict[str, float]:
    """Milliseconds of a plain step, of steps that verify 1, 2, 4 and 8 draft tokens, and of drafting one: medians."""
    both = window(session)
    fill(both, context)

    def draft() -> None:
        logits = both._read([5], (), 1)
        assert logits is not None
        likeliest(logits[0], CANDIDATES)

    kinds: dict[str, Callable[[], Any]] = {
        "plain": lambda: both.target.verify(StepRequest([5])),
        "draft": draft,
    }
    for gamma in (1, 2, 4, MOST):
        kinds[f"verify {gamma}"] = lambda n=gamma: both.target.verify(StepRequest([5] * (n + 1), chain(n)))
    spent: dict[str, list[float]] = {name: [] for name in kinds}
    for turn in range(ROUNDS + 1):
        for name, run in kinds.items():
            for step in range(STEPS):
                began = time.perf_counter()
                run()
                if turn and step:  # the first follows a call of another kind
                    spent[name].append(1e3 * (time.perf_counter() - began))
    both.reset()
    return {name: median(times) for name, times in spent.items()}


def policies(session: Session, cache_dir: Path) -> dict[str, tuple[Any, DecodingPolicy]]:
    """The sides, each with its runner."""
    both, own = window(session), session.policy
    plain = DecodingPolicy(own.eos)
    ngrams = choose_policy(both.target, session.manifest, LoadOptions(recycling=False, cache_dir=cache_dir))
    alone = replace(own, sources=())
    forced = {f"window, gamma {n}": (both, replace(alone, rows=n + 1, costs=None)) for n in GAMMAS}
    return {
        "plain": (both.target, plain),
        "n-grams": (both.target, ngrams),
        "window": (both, alone),
        **forced,
        "window and n-grams": (both, own),
    }


def answer(runner: Any, prompt: list[int], limit: int, policy: DecodingPolicy, state: AdaptiveState) -> dict[str, Any]:
    """Decodes greedily; the prompt lies in the cache."""
    decoder = SpeculativeDecoder(runner, GenerationOptions(max_new_tokens=limit), policy, state)
    with runner.generation():
        tokens = [token for done in decoder.run(prompt) for token in done.tokens]
    stats = decoder.stats
    return {
        "tokens": tokens,
        "ms": 1e3 * stats.decode_seconds,
        "steps": stats.steps + stats.plain_steps,
        "tried": stats.drafts.tried,
        "accepted": stats.drafts.accepted,
    }


def speeds(session: Session, prompts: list[list[int]], limit: int, cache_dir: Path) -> dict[str, Any]:
    """What every side takes for all prompts. The first is answered once more beforehand, to learn what steps cost; what
    that teaches of its text is forgotten."""
    sides = policies(session, cache_dir)
    total: dict[str, dict[str, float]] = {}
    for number, prompt in enumerate([prompts[0], *prompts]):
        if number < 2:
            states = {name: AdaptiveState(policy) for name, (_, policy) in sides.items()}
        written = set[tuple[int, ...]]()
        for name in list(sides)[number % len(sides) :] + list(sides)[: number % len(sides)]:
            runner, policy = sides[name]
            if runner.reusable(prompt) < len(prompt) - 1:
                answer(runner, prompt, 2, DecodingPolicy(policy.eos), AdaptiveState())  # reads the prompt
            found = answer(runner, prompt, limit, policy, states[name])
            written.add(tuple(found.pop("tokens")))
            found["new"] = len(next(iter(written))) - 1
            if number:
                mine = total.setdefault(name, dict.fromkeys(found, 0.0))
                total[name] = {key: mine[key] + found[key] for key in found}
        if len(written) > 1:
            raise SystemExit(f"text {number}: the sides write different tokens")
    return {name: total[name] for name in sides}


def texts(books: Path, count: int) -> Iterator[str]:
    """Beginnings of so many books."""
    with gzip.open(books, "rt", encoding="utf-8") as lines:
        for line, _ in zip(lines, range(count), strict=False):
            yield json.loads(line)["text"]


def predicted(costs: dict[str, float], alpha: float, gamma: int) -> float:
    return expected_speedup(alpha, gamma, costs["draft"] / costs["plain"], verifying(costs)(gamma))


def verifying(costs: dict[str, float]) -> Callable[[int], float]:
    known = [1, 2, 4, MOST]
    return lambda gamma: float(np.interp(gamma, known, [costs[f"verify {n}"] for n in known])) / costs["plain"]


def show(figures: dict[str, Any]) -> None:
    first = " | ".join(f"alpha {alpha}: best gamma, speed-up" for alpha in ALPHAS)
    print(f"\n| bundle | context | plain step, ms | draft token, ms | verifying 4, ms | {first} |")
    print("|---|---|---|---|---|" + "---|" * len(ALPHAS))
    for key, costs in figures.items():
        if not key.endswith("costs"):
            continue
        price = costs["draft"] / costs["plain"]
        best = [best_gamma(alpha, price, MOST, verifying(costs)) for alpha in ALPHAS]
        cells = [f"{n}, {predicted(costs, alpha, n):.2f}" for alpha, n in zip(ALPHAS, best, strict=True)]
        times = " | ".join(f"{costs[name]:.2f}" for name in ("plain", "draft", "verify 4"))
        print(f"| {' | '.join(key.split()[:2])} | {times} | {' | '.join(cells)} |")
    print("\n| bundle | context | side | ms a step | tokens a step | alpha | speed-up | predicted |")
    print("|---|---|---|---|---|---|---|---|")
    for key, sides in figures.items():
        if not key.endswith("speeds"):
            continue
        costs, plain = figures[key.replace("speeds", "costs")], sides["plain"]
        for name, side in sides.items():
            alpha = side["accepted"] / side["tried"] if side["tried"] else None
            gamma = int(name.rpartition(" ")[2]) if "gamma" in name else 0
            theory = f"{predicted(costs, alpha, gamma):.2f}" if gamma and alpha is not None else "-"
            share = "-" if alpha is None else f"{alpha:.2f}"
            step, tokens = side["ms"] / side["steps"], side["new"] / side["steps"]
            faster = plain["ms"] / plain["new"] / (side["ms"] / side["new"])
            cells = f"{step:.2f} | {tokens:.2f} | {share} | {faster:.2f} | {theory}"
            print(f"| {' | '.join(key.split()[:2])} | {name} | {cells} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--books", type=Path, required=True)
    parser.add_argument("--base", default="smollm2-135m")
    parser.add_argument("--contexts", type=int, nargs="+", default=[2000, 8000])
    parser.add_argument("--wide", choices=BASES, help="a shape with random weights, for costs at --wide-context")
    parser.add_argument("--wide-context", type=int, default=32000)
    parser.add_argument("--texts", type=int, default=2)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--draft", default="window", help="window or window:N")
    parser.add_argument("--threads", type=int)
    arguments = parser.parse_args()
    out = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    record = out / "figures.json"
    figures: dict[str, Any] = json.loads(record.read_text()) if record.exists() else {}
    cases = [(arguments.base, context) for context in arguments.contexts]
    if arguments.wide:
        cases += [(arguments.wide, context) for context in (*arguments.contexts, arguments.wide_context)]
    for base, context in track(cases, "contexts", len(cases)):
        for dtype in DTYPES:
            name, real = f"{Path(base).name}-{dtype} {context}", base == arguments.base
            if f"{name} costs" in figures and (f"{name} speeds" in figures or not real):
                continue
            options: dict[str, Any] = {"threads": arguments.threads, "cache_dir": out / "cache"}
            session = load(bundle_of(out, base, dtype), draft=arguments.draft, **options)
            figures[f"{name} costs"] = step_costs(session, context)
            if real:
                books = texts(arguments.books, arguments.texts)
                prompts = [session.encode(session.tokenizer.encode(text).ids[:context]) for text in books]
                figures[f"{name} speeds"] = speeds(session, prompts, arguments.max_new_tokens, out / "cache")
            write_text(record, json.dumps(figures))
            del session
            gc.collect()
    show(figures)


if __name__ == "__main__":
    main()
