"""`bench`: plain and speculative decoding of the same prompts, interleaved, in one session; compared token by token.

Contenders take turns on every prompt, in an order that changes from prompt to prompt and from repetition to repetition,
so that a passing disturbance or a warming processor hits all alike.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from streamspec.atomic import write_text
from streamspec.bench.contender import Contender
from streamspec.bench.prompts import read_cases
from streamspec.bench.record import PLAIN, SPECULATIVE, Recorder
from streamspec.bench.report import Report
from streamspec.bench.summary import Summary, judge_all
from streamspec.errors import ConfigError
from streamspec.progress import track
from streamspec.runtime.interface import Pruning
from streamspec.runtime.sampling import GREEDY, Sampling


def bench(
    bundle: str | Path,
    prompts: str | Path,
    limit: int | None = None,
    max_new_tokens: int = 128,
    repeats: int = 5,
    also: Sequence[str | Path] = (),
    rows: Sequence[int] = (),
    prune: Sequence[float] = (),
    tree: int | str = "auto",
    threads: int | None = None,
    save_outputs: str | Path | None = None,
    ngram: bool = True,
    sampling: Sampling = GREEDY,
) -> Report:
    """Measures `bundle` on at most `limit` rows of the JSONL file `prompts`.

    `also`: bundles whose plain decoding takes part, for the speed-up over the fastest plain precision. `rows`: tree sizes
    to force one after the other. `prune`: chances below which rows of a draft stop at the early exit, one after the other. `ngram`: also draft what followed earlier in the text. `sampling`, where random, needs a
    seed, so that all sides draw alike. `save_outputs`: JSONL file for the answers, for `compare`. Raises StreamspecError for
    prompts or bundles that cannot be read.
    """
    _check(limit=limit, max_new_tokens=max_new_tokens, repeats=repeats, rows=min(rows, default=1))
    if any(not 0 < least < 1 for least in prune):
        raise ConfigError(f"chances {list(prune)} to prune at", "chances between 0 and 1", "change --prune")
    if save_outputs is not None and not Path(save_outputs).parent.is_dir():
        raise ConfigError(f"{Path(save_outputs).parent} is no folder", "a folder for the answers", "change --save-outputs")
    cases = read_cases(prompts, limit)
    if sampling.random and sampling.seed is None:
        raise ConfigError("sampling without a seed", "a seed, so that all sides draw alike", "add --seed")
    from streamspec.runtime import load

    session = load(bundle, threads=threads, tree=tree, ngram=ngram)
    if rows and session.manifest.trees is None:
        raise ConfigError("--rows for a bundle without streams", "a bundle that drafts", "leave --rows out")
    contenders = [Contender(PLAIN, session, False, sampling), Contender(SPECULATIVE, session, True, sampling)]
    if prune:
        session.manifest.check_prunes()
    contenders += [Contender(f"{n} rows", session, True, sampling, n) for n in rows]
    contenders += [Contender(f"chance {least:g}", session, True, sampling, pruning=Pruning(least=least)) for least in prune]
    others = [Contender(str(path), load(path, threads=threads, tree="plain"), False, sampling) for path in also]
    record = Recorder(contenders + others, max_new_tokens)
    record.warm_up(cases[0])
    for repetition in range(repeats):
        for number, case in enumerate(track(cases, f"pass {repetition + 1}/{repeats}", len(cases))):
            record.run(case, repetition, number)
    verdicts = judge_all(record)
    report = Summary(record, verdicts, [c.name for c in contenders[2:]], [c.name for c in others]).report(str(bundle))
    if save_outputs is not None:
        lines = [json.dumps(row, ensure_ascii=False) for row in record.outputs]
        write_text(save_outputs, "\n".join(lines) + "\n")
    return report


def _check(**options: int | None) -> None:
    for name, value in options.items():
        if value is not None and value < 1:
            raise ConfigError(f"{name} = {value}", "at least 1", f"change --{name.replace('_', '-')}")
