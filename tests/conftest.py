"""Shared by all tests: which marked tests run here; a tiny base on disk and data it can learn in seconds."""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import durations


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="only tests that take no longer than half a second")
    parser.addoption("--record-durations", action="store_true", help="write tests/durations.json anew for these tests")


def pytest_configure() -> None:
    """What is hidden from users (`our_words_only`) is an error here as all warnings are."""
    sys.warnoptions.append("error")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    skip_without_the_base(items)
    if config.getoption("quick"):
        left_out = durations.slow(items)
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]
    if hasattr(config, "workerinput"):  # one of several processes
        durations.longest_files_first(items)


def pytest_collection_finish() -> None:
    """Spares every later search for garbage the modules and tests that are there now: training does many."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup() -> None:
    """Spares a search for garbage at each beginning of a training, through all that a process of tests has imported."""
    if (memory := sys.modules.get("accelerate.utils.memory")) is not None:
        memory.clear_device_cache = lambda garbage_collection=False: None  # type: ignore[attr-defined]


def skip_without_the_base(items: list[pytest.Item]) -> None:
    needing = [item for item in items if item.get_closest_marker("base")]
    if os.environ.get("STREAMSPEC_TEST_BASE") == "1" or not needing:
        return
    from streamspec.adapters.base_models.resolve import cached_reference

    if cached_reference() is not None:
        return
    skip = pytest.mark.skip(reason="the reference base is not cached (a download of 93 MB); set STREAMSPEC_TEST_BASE=1")
    for item in needing:
        item.add_marker(skip)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if config.getoption("record_durations"):
        reports = [report for reports in terminalreporter.stats.values() for report in reports]
        durations.record(report for report in reports if isinstance(report, pytest.TestReport))


@pytest.fixture(scope="session", autouse=True)
def unsynced() -> Iterator[None]:
    """Files are not forced to the disk, a dozen for each export: that is for power cuts, which no test has."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.support.tiny_models import tiny_model, tiny_tokenizer

    folder = tmp_path_factory.mktemp("base")
    tiny_model("llama").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Answers that repeat the prompt's letter: learnable in seconds."""
    path = tmp_path_factory.mktemp("data") / "train.jsonl"
    rows = [{"prompt": f"{c}{d}", "completion": c * 5 + d * 4} for c in "abcdefgh" for d in "ijklmnop"]
    path.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    return path


@pytest.fixture(autouse=True)
def no_check_passed_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every load checks all that it may, unless a test says when files last changed."""
    monkeypatch.setattr("streamspec.paths.SETTLED", float("inf"))
