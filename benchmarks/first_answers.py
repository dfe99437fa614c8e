#!/usr/bin/env python3
"""Measures the first answer that a session gives, where drafts have least to show and most to lose:
`python benchmarks/first_answers.py BUNDLE --books train.jsonl.gz [--contexts 100 1000 7800] [--texts 20]`.

Each text, a passage of a book, is read once and then answered plainly and with drafts, in turns; every answer begins
with what a new process knows: what steps cost on this machine, nothing of texts. With `--temperature` answers
surprise, and drafts fail. Shown are speed-ups of decoding: median, worst, and the share of answers that are slower than
plain decoding by more than two hundredths.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
from pathlib import Path
from statistics import median

from streamspec.progress import track
from streamspec.runtime import Sampling, Session, load
from streamspec.runtime.decoding.policy import AdaptiveState, DecodingPolicy

SLOWER = 0.98


def passages(books: Path, session: Session, tokens: int, count: int) -> list[list[int]]:
    """`count` passages of so many tokens, each from another book where there are enough."""
    rng, found = random.Random(tokens), list[list[int]]()
    with gzip.open(books, "rt", encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for line in lines]
    rng.shuffle(texts)
    for number in range(20 * max(count, len(texts))):
        if len(found) == count:
            return found
        text = texts[number % len(texts)]
        start = rng.randrange(max(1, len(text) - 8 * tokens))
        ids = session.tokenizer.encode(text[start : start + 8 * tokens]).ids[:tokens]
        if len(ids) == tokens:
            found.append(ids)
    raise SystemExit(f"{books} has {len(found)} texts of {tokens} tokens; expected {count}")


def answer(
    session: Session, prompt: list[int], limit: int, sampling: Sampling, policy: DecodingPolicy
) -> tuple[list[int], float, float]:
    """Tokens, tokens per second and tokens per step of a first answer; the prompt lies in the cache."""
    with session.decode_with(policy, AdaptiveState(policy)):
        done = session.generate(prompt, max_new_tokens=limit, sampling=sampling)
    return done.token_ids, done.stats.tokens_per_second, done.stats.tau


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--books", type=Path, required=True)
    parser.add_argument("--contexts", type=int, nargs="+", default=[100, 1000, 7800])
    parser.add_argument("--texts", type=int, default=20)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--threads", type=int)
    given = parser.parse_args()
    session = load(given.bundle, threads=given.threads)
    plain, own = DecodingPolicy(session.policy.eos), session.policy
    print(
        "| context | texts | tokens per step | speed-up: median (worst..best) | slower than 0.98 | plain, ms a token |"
    )
    print("|---|---|---|---|---|---|")
    for context in given.contexts:
        prompts, rows = passages(given.books, session, context, given.texts), list[tuple[float, float, float]]()
        for number, prompt in enumerate(track(prompts, f"{context} tokens", len(prompts))):
            sampling = Sampling(temperature=given.temperature, seed=number)
            session.generate(prompt, max_new_tokens=1)  # reads it
            drafts = own.unlearned()
            sides = [plain, drafts] if number % 2 else [drafts, plain]
            found = {id(side): answer(session, prompt, given.max_new_tokens, sampling, side) for side in sides}
            (tokens, slow, _), (others, fast, tau) = found[id(plain)], found[id(drafts)]
            if tokens != others:
                raise SystemExit(f"context {context}, text {number}: other tokens with drafts than without")
            rows.append((fast / slow, tau, 1e3 / slow))
        ups = [row[0] for row in rows]
        print(
            f"| {context} | {len(rows)} | {median(row[1] for row in rows):.2f} | "
            f"{median(ups):.2f} ({min(ups):.2f}..{max(ups):.2f}) | {sum(up < SLOWER for up in ups)} | "
            f"{median(row[2] for row in rows):.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
