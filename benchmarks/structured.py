"""Measures the cost and gain of a grammar: tokens per second of constrained and free answers, plain and speculative,
interleaved.

    python benchmarks/structured.py BUNDLE [--repeat 5] [--threads N]

Prints a table; a difference between plain and speculative is an error.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

from streamspec.runtime import Completion, Grammar, Session, load
from streamspec.runtime.decoding.policy import AdaptiveState

CITY = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "population": {"type": "integer", "minimum": 0, "maximum": 50000000},
        "continent": {"enum": ["Africa", "America", "Asia", "Australia", "Europe"]},
        "capital": {"type": "boolean"},
        "known_for": {"type": "array", "items": {"type": "string", "maxLength": 30}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "population", "continent", "capital", "known_for"],
    "additionalProperties": False,
}
PROMPTS = [
    f"Describe {city} as JSON: name, population, continent, capital, known_for."
    for city in ("Paris", "Tokyo", "Nairobi", "Sydney", "Lima", "Boston")
]
KINDS = {
    "constrained, plain": (True, False),
    "constrained, speculative": (True, True),
    "free, plain": (False, False),
    "free, speculative": (False, True),
}


def answers(session: Session, grammar: Grammar | None, speculate: bool) -> list[Completion]:
    """Answers all prompts as a new process would, which knows no text of another repetition or side."""
    policy = session.policy.unlearned()
    with session.decode_with(policy, AdaptiveState(policy)):
        return [session.generate(prompt, max_new_tokens=96, grammar=grammar, speculate=speculate) for prompt in PROMPTS]


def mask_microseconds(session: Session, grammar: Grammar, tokens: list[int]) -> float:
    """Returns the mean time to compute a mask along a text."""
    state, eos = session.vocabulary.start(grammar), session.manifest.model.eos_token_ids
    began = time.perf_counter()
    for token in tokens:
        state.after()
        if token not in eos:
            state.advance([token])
    return (time.perf_counter() - began) / len(tokens) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--threads", type=int)
    arguments = parser.parse_args()
    session = load(arguments.bundle, threads=arguments.threads)
    began = time.perf_counter()
    grammar = Grammar.json_schema(CITY)
    session.vocabulary.start(grammar)
    first = time.perf_counter() - began
    began = time.perf_counter()
    session.vocabulary.start(grammar)
    again = time.perf_counter() - began
    speeds: dict[str, list[float]] = {name: [] for name in KINDS}
    found: dict[str, list[Completion]] = {}
    for _ in range(arguments.repeat):
        for name, (constrained, speculate) in KINDS.items():
            found[name] = answers(session, grammar if constrained else None, speculate)
            speeds[name].append(
                sum(a.stats.new_tokens - 1 for a in found[name]) / sum(a.stats.decode_seconds for a in found[name])
            )
    for name in ("constrained", "free"):
        if [a.token_ids for a in found[f"{name}, plain"]] != [a.token_ids for a in found[f"{name}, speculative"]]:
            raise SystemExit(f"{name}: speculative answers differ from plain ones")
    print(
        "| answers | tokens/s (min to max) | tokens | forced | ended by themselves | tokens per step "
        "|\n|---|---|---|---|---|---|"
    )
    for name, done in found.items():
        stats = [a.stats for a in done]
        steps = sum(s.steps for s in stats)
        tau = sum(s.step_tokens for s in stats) / steps if steps else 1.0
        middle, low, high = statistics.median(speeds[name]), min(speeds[name]), max(speeds[name])
        forced = sum(s.forced_tokens for s in stats)
        ended = sum(a.finish_reason == "eos" for a in done)
        print(
            f"| {name} | {middle:.0f} ({low:.0f} to {high:.0f}) | {sum(s.new_tokens for s in stats)} | {forced} | "
            f"{ended} of {len(done)} | {tau:.2f} |"
        )
    each = statistics.mean(mask_microseconds(session, grammar, a.token_ids) for a in found["constrained, plain"])
    print(
        f"first use of a grammar {first * 1e3:.0f} ms, each further answer {again * 1e3:.1f} ms; a mask {each:.0f} us"
    )
    print("one answer:", found["constrained, speculative"][0].text)


if __name__ == "__main__":
    main()
