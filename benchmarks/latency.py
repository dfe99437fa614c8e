#!/usr/bin/env python3
"""Measures how soon a session answers and stops:
`python benchmarks/latency.py BUNDLE --prompts question.jsonl [--limit 24] [--cancels 500]`.

- Time to the first token, speculative over plain, of the same prompts (all turns of a row, answered in a chat), the two
  sides in turn, from an empty cache; and of each further turn with the KV cache of the turns before.
- Cancelling: milliseconds from `cancel` to the end of the answer, at random moments during prefill and during decoding.
- Two sessions at once, in threads: tokens of each until the first has finished; one that decodes beside one that
  prefills a long prompt.

All answers are compared with those of a fresh session. Ratios are medians over prompts with the minimum and the maximum
over the repetitions.
"""

from __future__ import annotations

import argparse
import random
import sys
import threading
import time
from pathlib import Path
from statistics import median

from streamspec.bench.prompts import read_cases
from streamspec.progress import track
from streamspec.runtime import Session, load
from streamspec.runtime.decoding.policy import AdaptiveState

LONG = "The quick brown fox jumps over the lazy dog. "


def first_token(session: Session, prompt: list[int], speculate: bool) -> float:
    """Returns the seconds until the first token after `prompt`, given as tokens, of a session that knows no text."""
    policy = session.policy.unlearned()
    with session.decode_with(policy, AdaptiveState(policy)):
        started = time.perf_counter()
        stream = session.stream(prompt, max_new_tokens=2, speculate=speculate)
        next(stream)
        taken = time.perf_counter() - started
        stream.close()
    return taken


def first_tokens(session: Session, prompts: list[list[int]], repeats: int) -> None:
    ratios, medians = [list[float]() for _ in range(repeats)], dict[bool, list[float]]({True: [], False: []})
    for number, prompt in enumerate(track(prompts, "first tokens", len(prompts))):
        taken: dict[bool, list[float]] = {True: [], False: []}
        for repeat in range(repeats):
            for side in (True, False) if (number + repeat) % 2 else (False, True):
                session.forget()
                taken[side].append(first_token(session, prompt, side))
            ratios[repeat].append(taken[True][-1] / taken[False][-1])
        for side, seconds in taken.items():
            medians[side].append(1e3 * median(seconds))
    each = [median(r) for r in ratios]
    print(
        f"first token, cold: {median(medians[True]):.0f} ms speculative, {median(medians[False]):.0f} ms plain, "
        f"ratio {median(each):.3f} ({min(each):.3f}..{max(each):.3f}), {len(prompts)} prompts of "
        f"{min(map(len, prompts))}..{max(map(len, prompts))} tokens"
    )


def later_turns(session: Session, conversations: list[list[str]], limit: int) -> int:
    """Prints what a known prefix saves; returns how many answers differ from a fresh session's."""
    known, anew, differ, tokens = [], [], 0, []
    other = session.another()
    for turns in track(conversations, "later turns", len(conversations)):
        session.forget()
        for number, said in enumerate(turns):
            other.forget()
            fresh = other.generate([*session.messages, {"role": "user", "content": said}], max_new_tokens=limit)
            answer = session.chat(said, max_new_tokens=limit)
            differ += answer.token_ids != fresh.token_ids
            if number:
                known.append(1e3 * answer.stats.prefill_seconds)
                anew.append(1e3 * fresh.stats.prefill_seconds)
                tokens.append(answer.stats.reused_tokens / answer.stats.prompt_tokens)
    print(
        f"first token of later turns: {median(known):.0f} ms, read anew {median(anew):.0f} ms, "
        f"{100 * median(tokens):.0f} % of the prompt known; {differ} of {sum(map(len, conversations))} answers "
        f"differ from a fresh session's"
    )
    return differ


def cancels(session: Session, prompt: list[int], count: int, chance: random.Random) -> int:
    """Prints how soon a cancelled generation ends; returns how many did not end as cancelled."""
    strange = 0
    for place in ("reading", "writing"):
        waits, before = [], strange
        for _ in track(range(count), f"cancelled while {place}", count):
            session.forget()
            running = session.stream(prompt if place == "reading" else prompt[:30], max_new_tokens=400).start()
            while place == "writing" and not running.read():
                time.sleep(0.001)
            time.sleep(chance.uniform(0, 0.3))
            if running.done:
                continue
            asked = time.perf_counter()
            running.cancel()
            answer = running.result(30)
            waits.append(1e3 * (time.perf_counter() - asked))
            strange += answer.finish_reason != "cancelled" or (place == "reading" and bool(answer.token_ids))
        waits.sort()
        at = {p: waits[min(len(waits) - 1, int(len(waits) * p / 100))] for p in (50, 99)}
        print(
            f"cancelled while {place}: {at[50]:.1f} ms (median), {at[99]:.1f} (p99), {waits[-1]:.1f} (most) of "
            f"{len(waits)}; {strange - before} ended otherwise"
        )
    return strange


def two_at_once(session: Session, prompts: list[list[int]], long: list[int], limit: int) -> int:
    """Prints how two sessions share; returns how many answers differ from those given alone."""
    alone = [session.another().generate(prompt, max_new_tokens=limit).token_ids for prompt in prompts]
    shares, slower, differ = [], [], 0
    for i in range(0, len(prompts) - 1, 2):
        came: list[int] = []
        answers: dict[int, list[int]] = {i: [], i + 1: []}

        def work(which: int, own: Session, came: list[int] = came, answers: dict[int, list[int]] = answers) -> None:
            for chunk in own.stream(prompts[which], max_new_tokens=limit):
                answers[which] += chunk.token_ids
                came.append(which)

        threads = [threading.Thread(target=work, args=(which, session.another())) for which in answers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        end = min(max(at for at, who in enumerate(came) if who == which) for which in answers)
        calls = [came[: end + 1].count(which) for which in answers]
        if sum(calls) >= 20:
            shares.append(min(calls) / sum(calls))
        differ += sum(answers[which] != alone[which] for which in answers)
    print(
        f"two that write: the one with fewer calls had {100 * median(shares):.0f} % of them (least "
        f"{100 * min(shares):.0f} %); {differ} answers differ from those given alone"
    )
    reader, writer = session.another(), session.another()
    running, gaps, last = reader.stream(long, max_new_tokens=1).start(), list[float](), time.perf_counter()
    for _ in writer.stream(prompts[0], max_new_tokens=limit, speculate=False):
        gaps.append(1e3 * (time.perf_counter() - last))
        last = time.perf_counter()
        slower.append(not running.done)
    running.result(120)
    beside = sorted(gap for gap, still in zip(gaps, slower, strict=True) if still) or [0.0]
    print(
        f"one that writes beside one that reads {len(long)} tokens: {median(beside):.0f} ms between tokens, most "
        f"{beside[-1]:.0f}, {len(beside)} tokens before the other had its first"
    )
    return differ


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cancels", type=int, default=500)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int)
    arguments = parser.parse_args()
    session = load(arguments.bundle, threads=arguments.threads)
    cases = read_cases(arguments.prompts, arguments.limit)
    conversations = [[turn for turn in case.turns if isinstance(turn, str)] for case in cases]
    prompts = [session.encode([{"role": "user", "content": "\n".join(said)}]) for said in conversations]
    long = session.encode([{"role": "user", "content": LONG * 150}])
    first_tokens(session, [*prompts, long], arguments.repeats)
    differ = later_turns(session, [c for c in conversations if len(c) > 1], arguments.max_new_tokens)
    strange = cancels(session, long, arguments.cancels, random.Random(0))
    differ += two_at_once(session, prompts, long, arguments.max_new_tokens)
    sys.exit(bool(differ or strange))


if __name__ == "__main__":
    main()
