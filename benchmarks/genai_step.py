#!/usr/bin/env python3
"""Compares steps of 1 and 8 rows with onnxruntime-genai's:
`python benchmarks/genai_step.py BUNDLE FOLDER [--rounds 7] [--threads N]`.

FOLDER is the same model in the same precision, written by onnxruntime-genai's model builder or by `streamspec export
--plain-genai`. Both sides start from the same context and step in turns. A figure is the median over rounds of the
median time of a step, without the first ones, with everything around the model call on both sides. Steps of one row
write tokens; steps of 8 rows verify a chain of 8 tokens, of which one is kept (onnxruntime-genai appends 8 tokens and
goes back).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime_genai as genai

from streamspec.bundle.files import read_manifest
from streamspec.draft_tree import chain
from streamspec.runtime.decoding.model_runner import StepRequest
from streamspec.runtime.engine.loaded_model import LoadedModel
from streamspec.runtime.engine.ort_runner import OrtRunner
from streamspec.runtime.hardware.cpu import physical_cores

WARM = 4  # steps that do not count
ROWS = (1, 8)


def ours(engine: OrtRunner, prompt: np.ndarray, rows: int, steps: int) -> tuple[float, list[int]]:
    """Returns the median seconds of a step, and the tokens."""
    engine.reset()
    written = [engine.prefill(StepRequest(prompt.tolist())).choices[-1]]
    tree, taken = chain(rows - 1), []
    for _ in range(steps - 1):
        started = time.perf_counter()
        result = engine.verify(StepRequest(written[-1:] + [1] * (rows - 1), tree))
        engine.commit([0])
        written.append(result.choices[0])
        taken.append(time.perf_counter() - started)
    return statistics.median(taken[WARM:]), written


def theirs(model: genai.Model, prompt: np.ndarray, rows: int, steps: int) -> tuple[float, list[int]]:
    length = len(prompt) + steps + rows
    settings = genai.GeneratorParams(model)
    settings.set_search_options(max_length=length, min_length=length, do_sample=False)
    generator = genai.Generator(model, settings)
    generator.append_tokens(prompt.astype(np.int32))
    generator.generate_next_token()
    filler, taken = np.ones(rows, dtype=np.int32), []
    for number in range(1, steps):
        started = time.perf_counter()
        if rows == 1:
            generator.generate_next_token()
        else:
            generator.append_tokens(filler)
            generator.rewind_to(len(prompt) + number)
        taken.append(time.perf_counter() - started)
    return statistics.median(taken[WARM:]), [int(token) for token in generator.get_sequence(0)[len(prompt) :]]


def open_theirs(folder: Path, threads: int) -> genai.Model:
    config = genai.Config(str(folder))
    config.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": threads}}}}))
    return genai.Model(config)


def compare(bundle: Path, folder: Path | None, rounds: int, steps: int, context: int, threads: int) -> dict[int, Any]:
    """Maps rows to ms of a step, a list of `rounds` for each side, and for one row the first tokens that are equal.
    Without a folder, ours alone."""
    manifest = read_manifest(bundle)
    prompt = np.random.default_rng(0).integers(3, manifest.model.vocab_size, context)
    engine = OrtRunner(LoadedModel(bundle / "model.onnx", manifest, threads=threads))
    sides: dict[str, Callable[[int], tuple[float, list[int]]]] = {
        "ours": lambda rows: ours(engine, prompt, rows, steps)
    }
    if folder is not None:
        model = open_theirs(folder, threads)
        sides["theirs"] = lambda rows: theirs(model, prompt, rows, steps)
    found: dict[int, Any] = {rows: {"ours": [], "theirs": []} for rows in ROWS}
    for number in range(rounds):
        for rows in ROWS:
            texts = {}
            for name in sorted(sides, reverse=bool(number % 2)):
                seconds, texts[name] = sides[name](rows)
                found[rows][name].append(1e3 * seconds)
            if rows == 1:
                pairs = list(zip(*texts.values(), strict=False))
                found[rows]["equal"] = next((i for i, pair in enumerate(pairs) if len(set(pair)) > 1), len(pairs))
    return found


def text(times: dict[str, list[float]]) -> str:
    """One side, the other, and the ratios of the rounds."""
    if not times["theirs"]:
        return f"{statistics.median(times['ours']):.1f}, -"
    ratios = [a / b for a, b in zip(times["ours"], times["theirs"], strict=True)]
    return (
        f"{statistics.median(times['ours']):.1f}, {statistics.median(times['theirs']):.1f}, "
        f"{statistics.median(ratios):.2f} ({min(ratios):.2f}..{max(ratios):.2f})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--threads", type=int, default=physical_cores())
    arguments = parser.parse_args()
    found = compare(**vars(arguments))
    for rows, times in found.items():
        print(f"{rows} rows: ms of streamspec, of onnxruntime-genai, ratio (least..most): {text(times)}")
    print(f"the first {found[1]['equal']} of {arguments.steps} tokens are the same")


if __name__ == "__main__":
    main()
