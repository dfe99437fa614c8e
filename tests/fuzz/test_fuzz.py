"""A few hundred inputs for each target in every run of the tests; `python -m tests.fuzz` has more."""

from __future__ import annotations

import os

import pytest

pytestmark = pytest.mark.skipif(os.name == "nt", reason="the runner limits memory and time as POSIX does")


@pytest.mark.parametrize(
    "name",
    [
        "manifest",
        "swappable",
        "adapter",
        "lora",
        "acceptance",
        "eagle3",
        "dflash",
        "safetensors",
        "conversation",
        "graph",
        "gguf",
        "tokenizer",
        "template",
        "examples",
        "yaml",
        "schema",
        "pattern",
        "schema_large",
        "pattern_large",
        "request",
        "store",
        "answers",
        "costs",
        "notes",
        "packed",
        "vocabulary",
    ],
)
def test_nothing_but_one_line_comes_out(name: str) -> None:
    from tests.fuzz.__main__ import run_batch

    if name == "request":
        pytest.importorskip("streamspec.serve.api.chat_requests", reason="the server is not installed")
    outcomes, slowest, failures = run_batch(name, 1, range(60 if name.endswith("_large") else 250))
    assert not failures, failures[0][1]
    assert len(outcomes) > 1, "every input had the same outcome: the target tells nothing apart"
    assert slowest < 10


def test_every_target_is_here() -> None:
    from tests.fuzz.targets import TARGETS

    assert {
        mark.args[1][i] for mark in test_nothing_but_one_line_comes_out.pytestmark for i in range(len(TARGETS))
    } == set(TARGETS)
