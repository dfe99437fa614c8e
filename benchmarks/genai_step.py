#!/usr/bin/env python3
"""Compares a plain step with onnxruntime-genai's:
`python benchmarks/genai_step.py BUNDLE FOLDER [--rounds 7] [--threads N]`.

FOLDER is the same model by `streamspec export --plain-genai`, in the same precision. Both write `--tokens` tokens after
the same prompt, in turns. The figure is the median time of a token, without the first ones, with everything around the
model call on both sides.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime_genai as genai

from streamspec.bundle.files import read_manifest
from streamspec.runtime.decoding.model_runner import ROOT_ONLY
from streamspec.runtime.engine.loaded_model import LoadedModel
from streamspec.runtime.engine.ort_runner import OrtRunner
from streamspec.runtime.hardware.cpu import physical_cores

WARM = 4  # tokens that do not count


def ours(engine: OrtRunner, prompt: np.ndarray, tokens: int) -> tuple[float, list[int]]:
    """Returns the median seconds of a token, and the tokens."""
    engine.reset()
    written = [int(engine.prefill(prompt.tolist(), draft=False).choices[-1])]
    taken = []
    for _ in range(tokens - 1):
        started = time.perf_counter()
        result = engine.verify(np.array(written[-1:]), ROOT_ONLY, draft=False)
        engine.commit([0])
        written.append(int(result.choices[0]))
        taken.append(time.perf_counter() - started)
    return statistics.median(taken[WARM:]), written


def theirs(model: Any, prompt: np.ndarray, tokens: int) -> tuple[float, list[int]]:
    length = len(prompt) + tokens
    settings = genai.GeneratorParams(model)
    settings.set_search_options(max_length=length, min_length=length, do_sample=False)
    generator = genai.Generator(model, settings)
    generator.append_tokens(prompt.astype(np.int32))
    generator.generate_next_token()
    taken = []
    while not generator.is_done():
        started = time.perf_counter()
        generator.generate_next_token()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken[WARM:]), [int(token) for token in generator.get_sequence(0)[len(prompt) :]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--threads", type=int, default=physical_cores())
    arguments = parser.parse_args()
    manifest = read_manifest(arguments.bundle)
    prompt = np.random.default_rng(0).integers(3, manifest.model.vocab_size, arguments.context)
    config = genai.Config(str(arguments.folder))
    config.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": arguments.threads}}}}))
    model = genai.Model(config)
    engine = OrtRunner(LoadedModel(arguments.bundle / "model.onnx", manifest, threads=arguments.threads))
    sides = {
        "ours": lambda: ours(engine, prompt, arguments.tokens),
        "theirs": lambda: theirs(model, prompt, arguments.tokens),
    }
    found: dict[str, list[float]] = {name: [] for name in sides}
    texts: dict[str, list[int]] = {}
    for number in range(arguments.rounds):
        for name in sorted(sides, reverse=bool(number % 2)):
            seconds, texts[name] = sides[name]()
            found[name].append(1e3 * seconds)
    ratios = [a / b for a, b in zip(found["ours"], found["theirs"], strict=True)]
    alike = next(
        (i for i, pair in enumerate(zip(*texts.values(), strict=True)) if len(set(pair)) > 1), arguments.tokens
    )
    print(
        f"{manifest.precision}, {arguments.threads} threads: a plain step {statistics.median(found['ours']):.2f} ms, "
        f"onnxruntime-genai "
        f"{statistics.median(found['theirs']):.2f} ms, ratio {statistics.median(ratios):.3f} "
        f"({min(ratios):.3f}..{max(ratios):.3f}); "
        f"the first {alike} of {arguments.tokens} tokens are the same"
    )


if __name__ == "__main__":
    main()
