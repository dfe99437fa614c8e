"""Measures plain and speculative decoding of the same prompts, interleaved, in one session, and
compares their tokens.

Arms take turns on every prompt, in an order that changes from prompt to prompt and from repetition
to repetition, so that a passing disturbance or a warming processor hits all alike.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from streamspec.atomic import write_text
from streamspec.bench.arms import Arm
from streamspec.bench.figures import Report
from streamspec.bench.prompts import BenchPrompt, read_cases
from streamspec.bench.quality import check_packages
from streamspec.bench.recorder import PLAIN, SPECULATIVE, Recorder
from streamspec.bench.report import Summary, compare_all
from streamspec.draft_tree import BOTH
from streamspec.errors import ConfigError, ContextOverflow
from streamspec.progress import track
from streamspec.runtime.decoding.draft_tree_search import MAX_ROWS
from streamspec.runtime.decoding.model_runner import Pruning
from streamspec.runtime.options import LoadKwargs, LoadOptions
from streamspec.runtime.sampling.sampling_params import GREEDY, Sampling

if TYPE_CHECKING:
    from streamspec.runtime import Session


def bench(
    bundle: str | Path,
    prompts: str | Path,
    limit: int | None = None,
    max_new_tokens: int = 128,
    repeats: int = 5,
    also: Sequence[str | Path] = (),
    rows: Sequence[int] = (),
    prune: Sequence[float | Pruning] = (),
    *,
    save_outputs: str | Path | None = None,
    sampling: Sampling = GREEDY,
    options: LoadOptions | None = None,
    **load_options: Unpack[LoadKwargs],
) -> Report:
    """Compares plain and speculative decoding of `bundle` on prompts: speed, exactness and quality.

    - `prompts`: JSONL file; `limit`: number of its rows to use (default: all).
    - `max_new_tokens`: maximum tokens of each answer. `repeats`: passes over all prompts; figures are medians.
    - `also`: bundles whose plain decoding takes part, for the speed-up over the fastest plain precision.
    - `rows`: tree sizes that are measured too, each forced. `prune`: likewise, probabilities below which rows of a
      draft stop at the early exit.
    - `options`, or keywords such as `tree` and `draft`: of `streamspec.runtime.load`. `threads` and `provider` apply to
      all bundles, `prepare_grammar` to none.
    - `sampling`: greedy by default; with a temperature it needs a seed, so that all arms draw alike.
    - `save_outputs`: JSONL file for the answers, to be read by `compare`.

    Returns a `Report`. Raises StreamspecError for prompts or bundles that cannot be read.
    """
    _check(limit=limit, max_new_tokens=max_new_tokens, repeats=repeats, rows=min(rows, default=1))
    pruning = [rule if isinstance(rule, Pruning) else Pruning(min_probability=rule) for rule in prune]
    if save_outputs is not None and not Path(save_outputs).parent.is_dir():
        raise ConfigError(
            f"{Path(save_outputs).parent} is no folder", "a folder for the answers", "change --save-outputs"
        )
    cases = read_cases(prompts, limit)
    check_packages(cases)
    if sampling.random and sampling.seed is None:
        raise ConfigError("sampling without a seed", "a seed, so that all sides draw alike", "add --seed")
    from streamspec.runtime import load

    options = replace(LoadOptions.of(options, **load_options), prepare_grammar=False)
    plain = LoadOptions(options.threads, options.provider, tree="plain", prepare_grammar=False)
    session = load(bundle, options)
    check_rows(rows, session)
    check_length(cases, session)
    if prune:
        session.manifest.check_prunes()
    forced = [Arm(f"{n} rows", session, True, sampling, n) for n in rows]
    forced += [Arm(_name(rule), session, True, sampling, pruning=rule) for rule in pruning]
    others = [Arm(str(path), load(path, plain), False, sampling) for path in also]
    for arm in others:
        check_length(cases, arm.session)
    compared = [Arm(PLAIN, session, False, sampling), Arm(SPECULATIVE, session, True, sampling)]
    check_names([*compared, *forced, *others])
    record = run_passes([*compared, *forced, *others], cases, repeats, max_new_tokens)
    summary = Summary(record, compare_all(record), [arm.name for arm in forced], [arm.name for arm in others])
    report = summary.report(str(bundle))
    if save_outputs is not None:
        lines = [json.dumps(row, ensure_ascii=False) for row in record.outputs]
        write_text(save_outputs, "\n".join(lines) + "\n")
    return report


def _name(pruning: Pruning) -> str:
    probability = pruning.min_probability
    return f"chance {probability:g}" if pruning.score == BOTH else f"{pruning.score} {probability:g}"


def run_passes(arms: list[Arm], cases: Sequence[BenchPrompt], repeats: int, max_new_tokens: int) -> Recorder:
    """Runs every arm on every prompt, `repeats` times, after a warm-up. No pass knows the texts of another."""
    record = Recorder(arms, max_new_tokens)
    record.warm_up(cases[0])
    for repetition in range(repeats):
        for arm in arms:
            arm.begin_pass()
        for number, case in enumerate(track(cases, f"pass {repetition + 1}/{repeats}", len(cases))):
            record.run(case, repetition, number)
    return record


def check_rows(rows: Sequence[int], session: Session) -> None:
    """Raises ConfigError for tree sizes that the bundle cannot verify."""
    if rows and session.manifest.trees is None and not session.policy.max_draft_tokens:
        raise ConfigError("--rows for a bundle without streams", "a bundle that drafts", "leave --rows out")
    static, counts = session.manifest.static, getattr(session.runner, "row_counts", ())
    most = min(static.rows if static else counts[-1] if counts else MAX_ROWS, MAX_ROWS)
    if max(rows, default=0) > most:
        mend = "ask for fewer" + ", or export it with more --rows" * (most < MAX_ROWS)
        raise ConfigError(f"--rows {max(rows)} for steps of {most} rows", f"at most {most}", mend)


def check_names(arms: Sequence[Arm]) -> None:
    """Raises ConfigError where two arms have one name."""
    names = [arm.name for arm in arms]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(
            f"two sides called {twice!r}",
            "every side once, under a name of its own",
            "check --rows, --prune and --also",
        )


def check_length(cases: Sequence[BenchPrompt], session: Session) -> None:
    """Every prompt must leave room for an answer, or an hour's measuring would end at the last one."""
    longest = session.context_length - 1
    for number, case in enumerate(cases):
        tokens = len(session.encode(case.prompt(0, []), tools=case.tools))
        if tokens > longest:
            raise ContextOverflow(
                f"row {number + 1} of the prompts has {tokens} tokens",
                f"at most {longest}",
                "leave it out or shorten it",
            )


def _check(**options: int | None) -> None:
    for name, value in options.items():
        if value is not None and value < 1:
            raise ConfigError(f"{name} = {value}", "at least 1", f"change --{name.replace('_', '-')}")
