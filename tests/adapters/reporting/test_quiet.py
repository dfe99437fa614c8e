"""Warnings, log lines and bars of libraries stay away from stderr during a run; errors and our own lines do not."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from transformers.utils import logging as hf

from streamspec.adapters.reporting import quiet
from streamspec.adapters.reporting.quiet import our_words_only
from streamspec.errors import ConfigError, StreamspecWarning
from streamspec.export import bundle_writer, export_bundle, export_swappable, swappable_bundle

ROOT = Path(__file__).parents[3]
OURS = (
    r"note: prompts run into their answers, .*",
    r"\d+ of \d+ rows drawn for validation; --val names a file",
    r"example:",
    r".*\[\[.*</s>\]\]",
    r"(task|streams): \d+ rows with \d+ tokens, \d+ held out, \d+ steps of \d+ rows",
    r"(task|streams): step \d+/\d+, .*",
)


@pytest.fixture
def usual(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python as users start it: nobody asks for warnings."""
    monkeypatch.setattr(sys, "warnoptions", [])


@pytest.mark.usefixtures("usual")
def test_what_libraries_warn_of_is_not_shown(capfd: pytest.CaptureFixture[str]) -> None:
    outside = logging.getLogger("some.library")
    outside.addHandler(logging.StreamHandler(sys.stderr))
    with our_words_only():
        warnings.warn("soon gone", FutureWarning, stacklevel=1)
        outside.warning("a false alarm")
        hf.get_logger("transformers.x").warning("another")
        list(hf.tqdm(range(3), desc="Loading weights"))
        outside.error("a real one")
    assert capfd.readouterr().err.strip().splitlines() == ["a real one"]
    assert hf.is_progress_bar_enabled() and outside.isEnabledFor(logging.WARNING)
    with pytest.warns(FutureWarning):
        warnings.warn("soon gone", FutureWarning, stacklevel=1)


@pytest.mark.usefixtures("usual")
def test_transformers_is_not_imported_for_its_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quiet, "_without_bars", lambda: pytest.fail("imported"))
    monkeypatch.setitem(sys.modules, "transformers", None)
    with our_words_only():
        pass


@pytest.mark.usefixtures("usual")
def test_what_we_warn_of_is_shown() -> None:
    @our_words_only()
    def work() -> None:
        warnings.warn("no longer kept", StreamspecWarning, stacklevel=1)
        warnings.warn("overflow", RuntimeWarning, stacklevel=1)

    with warnings.catch_warnings(record=True) as seen, pytest.warns(StreamspecWarning) as found:
        work()
    assert [str(one.message) for one in (*found, *seen)] == ["no longer kept"]


@pytest.mark.usefixtures("usual")
def test_an_export_shows_no_warning_of_a_library(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def complain(*_: object) -> None:
        warnings.warn("soon gone", FutureWarning, stacklevel=1)
        raise ConfigError("far enough")

    monkeypatch.setattr(bundle_writer, "read_base", complain)
    monkeypatch.setattr(swappable_bundle, "resolve_base", complain)
    with warnings.catch_warnings(record=True) as seen:
        for export, given in ((export_bundle, None), (export_swappable, [])):
            with pytest.raises(ConfigError, match="far enough"):
                export(base, given, tmp_path / "out")
    assert seen == []


def test_who_asks_python_for_warnings_gets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "warnoptions", ["default"])
    with our_words_only(), pytest.warns(FutureWarning):
        warnings.warn("soon gone", FutureWarning, stacklevel=1)


def test_every_line_of_a_run_is_ours(base: Path, data: Path, tmp_path: Path) -> None:
    """The staged recipe has all that libraries warn of: a fresh task LoRA, one merged, generation, two stages."""
    few = tmp_path / "few.jsonl"
    few.write_text("".join(data.read_text().splitlines(keepends=True)[:24]))
    flags = "--recipe staged --gamma 2 --ns 2 --rank 2 --stream-rank 2 --draft-vocab 32 --epochs 1 --val-rows 4"
    flags += " --regenerate-rows 8 --max-new-tokens 6 --max-length 64 --json"
    command = [sys.executable, "-m", "streamspec", "train", "--base", str(base), "--data", str(few)]
    command += ["--out", str(tmp_path / "out"), *flags.split()]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    foreign = [line for line in done.stderr.splitlines() if not any(re.fullmatch(ours, line) for ours in OURS)]
    assert foreign == []
    assert len(done.stdout.splitlines()) == 1
