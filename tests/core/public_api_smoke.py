"""What a type checker sees of the public names. `run.py test` runs mypy on this file; nothing in it is executed."""

from __future__ import annotations

from pathlib import Path
from typing import Any, assert_type

import numpy as np

import streamspec
from streamspec import Completion, Grammar, Sampling, Session, StreamspecError, TrainConfig
from streamspec.bench import Report, compare
from streamspec.bundle.manifest import Manifest
from streamspec.export import PromptFormat, Target
from streamspec.runtime import Stats
from streamspec.runtime.engine.memory_estimate import MemoryEstimate


def load_and_generate(folder: Path) -> None:
    session = streamspec.load(folder, threads=1)
    assert_type(session, Session)
    completion = session.generate("Hello", sampling=Sampling(temperature=0.7, seed=1), grammar=Grammar.choice(["a"]))
    assert_type(session.generate("Hello", temperature=0.7, top_p=0.9, seed=1), Completion)
    assert_type(completion, Completion)
    assert_type(session.generate("Hello", temperature=0.7, top_p=0.9, seed=1), Completion)
    assert_type(completion.text, str)
    assert_type(completion.token_ids, list[int])
    assert_type(completion.stats, Stats)
    assert_type(session.embed(["a", "b"], pooling="last", normalize=False, timeout=3.0), np.ndarray)
    assert_type(streamspec.estimate_memory(folder, sessions=2), MemoryEstimate)


def train_export_and_bench(folder: Path) -> None:
    config = TrainConfig(base="smollm2-135m", data=folder / "train.jsonl", out=folder / "adapter")
    assert_type(streamspec.train(config), dict[str, Any])
    assert_type(streamspec.export("smollm2-135m", config.out, folder / "bundle", target=Target()), Manifest)
    layout = PromptFormat("raw", "\n")
    assert_type(streamspec.export_bundle("smollm2-135m", None, folder / "plain", prompt_format=layout), Manifest)
    assert_type(streamspec.bench(folder / "bundle", folder / "prompts.jsonl", limit=3), Report)
    assert_type(compare(folder / "a.jsonl", folder / "b.jsonl"), dict[str, Any])
    assert_type(streamspec.__version__, str)


def errors_say_what_to_do(error: StreamspecError) -> None:
    assert_type(error.code, str)
    assert_type((error.found, error.expected, error.fix), tuple[str, str, str])
