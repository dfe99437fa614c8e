#!/usr/bin/env python3
"""Measures the host's time of a decoding step, without the graph:
`python benchmarks/host_time.py BUNDLE --prompts F.jsonl [--limit 8] [--repeats 20] [--profile]`.

Each prompt is answered once by the graph; then the graph's outputs are replayed, so that steps consist of everything
else: drafts, bindings, acceptance, compaction, text, statistics. Before each replayed call memory is read (`--cold`
MiB), as the graph reads its weights: what the host needs has then left the processor's caches, which is most of its
time. Prints microseconds of processor time of a step, the least of the repetitions for each step, means over steps:
plain and speculative decoding. `--profile`: where they go, by Python's profiler, which makes small functions look
expensive. What steps cost stays as it is known: learning it, 13 us a step in warm caches and 60 in cold ones, is not
counted.
"""

from __future__ import annotations

import argparse
import cProfile
import ctypes
import pstats
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from streamspec.bench.prompts import read_cases
from streamspec.runtime import Session, load
from streamspec.runtime.costs.row_costs import RowCosts
from streamspec.runtime.decoding.policy import AdaptiveState

KEPT = 1 << 20  # bytes of an output that is recorded: larger ones are keys and values


class Replayed:
    """A session of ONNX Runtime that records the outputs of its calls, then replays them."""

    def __init__(self, session: Any, cold: int) -> None:
        self.session, self.calls = session, []
        self.playing: Iterator[list[bytes]] | None = None
        self.seconds = 0.0  # of the thread, in here
        self._cold = np.ones(cold, np.uint8)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.session, name)

    def run_with_iobinding(self, io: Any, options: Any) -> None:
        began = time.thread_time()
        self._run(io, options)
        self.seconds += time.thread_time() - began

    def _run(self, io: Any, options: Any) -> None:
        if self.playing is None:
            self.session.run_with_iobinding(io, options)
        outputs = [(value.data_ptr(), value.tensor_size_in_bytes()) for value in io._iobinding.get_outputs()]
        small = [(at, size) for at, size in outputs if size < KEPT]
        if self.playing is None:
            self.calls.append([ctypes.string_at(at, size) for at, size in small])
            return
        self._cold.max(initial=0)
        for (at, size), data in zip(small, next(self.playing), strict=True):
            ctypes.memmove(at, data, size)


def answer(session: Session, prompt: str, speculate: bool, tokens: int) -> list[tuple[int, float]]:
    """Rows and host seconds of each step. Nothing learned from other answers plays a part."""
    graph = session.runner.model.session
    session.runner.rewind(0)
    session.adaptive = AdaptiveState(session.policy)
    session.adaptive.controller.step = lambda *_: None  # type: ignore[method-assign]  # times decide nothing
    out, graph.seconds, began = [], 0.0, time.thread_time()
    for chunk in session.stream(prompt, max_new_tokens=tokens, speculate=speculate):
        out.append((chunk.stats.rows, time.thread_time() - began - graph.seconds))
        graph.seconds, began = 0.0, time.thread_time()
    return out[1:]  # without the prompt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--cold", type=int, default=64, help="MiB read before each call")
    parser.add_argument("--rows", type=int)
    parser.add_argument("--cache-dir", type=Path)
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    session = load(arguments.bundle, threads=1, tree=arguments.rows or "auto", cache_dir=arguments.cache_dir)
    if session.policy.costs is not None:  # what replayed steps take would teach other costs, hence other drafts
        session.policy = replace(session.policy, costs=RowCosts(session.policy.costs.curve))
    prompts = [case.turns[0] for case in read_cases(arguments.prompts, arguments.limit)]
    model = session.runner.model
    model.session = replayed = Replayed(model.session, arguments.cold << 20)
    for speculate in (False, True):
        steps: list[list[tuple[int, float]]] = []
        profile = cProfile.Profile()
        for prompt in prompts:
            replayed.playing, replayed.calls = None, []
            answer(session, prompt, speculate, arguments.max_new_tokens)
            runs = []
            for _ in range(arguments.repeats):
                replayed.playing = iter(replayed.calls)
                runs.append(answer(session, prompt, speculate, arguments.max_new_tokens))
            steps += [[(taken[0][0], min(seconds for _, seconds in taken))] for taken in zip(*runs, strict=True)]
            if arguments.profile:
                replayed.playing = iter(replayed.calls)
                profile.enable()
                answer(session, prompt, speculate, arguments.max_new_tokens)
                profile.disable()
        flat = [step for some in steps for step in some]
        for name, kind in (("plain", [s for r, s in flat if r == 1]), ("tree", [s for r, s in flat if r > 1])):
            if kind:
                print(
                    f"{'speculative' if speculate else 'plain'} decoding: {len(kind)} {name} steps, "
                    f"{1e6 * statistics.mean(kind):.0f} us (median {1e6 * statistics.median(kind):.0f})",
                    flush=True,
                )
        if arguments.profile:
            pstats.Stats(profile).sort_stats("tottime").print_stats(45)


if __name__ == "__main__":
    main()
