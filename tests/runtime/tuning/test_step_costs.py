from __future__ import annotations

import importlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from streamspec.bench import quality
from streamspec.bench.figures import Spread
from streamspec.bench.pruning import TRIED, best
from streamspec.cli import app
from streamspec.runtime import Pruning, Session, load
from streamspec.runtime.decoding.model_runner import ROOT_ONLY
from streamspec.runtime.engine.ort_runner import OrtRunner
from streamspec.runtime.tuning import step_costs as calibrate
from streamspec.runtime.tuning import tune
from streamspec.runtime.tuning.cost_file import costs_file, read_record
from streamspec.runtime.tuning.step_costs import choose_rows

Bundles = Callable[[str], Path]
NODES = [(0, 0, 1.0), (0, 0, 0.8), (1, 0, 0.6), (2, 0, 0.4)]


def test_the_tree_with_the_most_tokens_per_second_wins() -> None:
    chosen = choose_rows({1: 1.0, 2: 1.1, 4: 1.4}, NODES)
    assert chosen.rows == 4 and chosen.expected[4] == pytest.approx(2.8)
    assert chosen.ratio(3) == pytest.approx(1.25)


def test_plain_decoding_wins_where_trees_cost_too_much() -> None:
    assert choose_rows({1: 1.0, 2: 2.1, 4: 3.2}, NODES).rows == 1
    assert choose_rows({1: 1.0, 2: 1.8 / 0.85, 4: 9.0}, NODES).rows == 1
    assert choose_rows({1: 1.0}, NODES).rows == 1
    assert "2.8 tokens per step expected at 3.0x" in choose_rows({1: 1.0, 2: 2.9, 4: 3.0}, NODES).reason


def file_of(session: Session, cache_dir: Path | None = None) -> Path:
    """Where later sessions will look."""
    return costs_file("cpu", session.threads, session.manifest, cache_dir)


def test_a_measurement_is_kept_and_not_repeated(
    bundles: Bundles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = load(bundles("fp32"), threads=1, tree="plain")
    assert isinstance(session.runner, OrtRunner)
    calls: list[int] = []
    measure = calibrate.measure

    def counted(*args: Any, **options: Any) -> tuple[dict[int, float], bool]:
        calls.append(1)
        return measure(*args, budget=60.0, **options)  # however busy this machine is

    monkeypatch.setattr(calibrate, "measure", counted)
    first = calibrate.calibrated(session.runner, session.manifest, tmp_path)
    assert set(first.costs) == {1, 4, 8, 16} and first.rows in first.costs
    assert calibrate.calibrated(session.runner, session.manifest, tmp_path) == first and len(calls) == 1
    found = read_record(file_of(session, tmp_path))
    assert found is not None and found.seconds == first.costs and found.steps == 0


@pytest.mark.parametrize("name", ["fp32", "eager"])
def test_what_tuning_found_of_pruning_holds_for_later_sessions(
    name: str, bundles: Bundles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STREAMSPEC_CACHE", str(tmp_path))
    session = load(bundles(name), threads=1, cache_dir=tmp_path)
    assert session.policy.pruning is None and isinstance(session.runner, OrtRunner)
    tune.keep_min_probability(session.runner, session.manifest, 0.02, "exit")
    later = load(bundles(name), threads=1, cache_dir=tmp_path)
    found = read_record(file_of(session, tmp_path))
    assert later.policy.pruning == Pruning(None, 0.02, "exit") and found is not None and found.min_probability == 0.02
    for _ in range(12):  # what is learned leaves it as it is
        later.generate("hello", max_new_tokens=30)
    later.close()
    after = read_record(file_of(session, tmp_path))
    assert after is not None and (after.min_probability, after.score) == (0.02, "exit") and after.steps > 0
    assert load(bundles(name), threads=1, cache_dir=tmp_path, pruning=Pruning(3)).policy.pruning == Pruning(3)
    tune.tune(session.runner, session.manifest, [8])
    assert load(bundles(name), threads=1, cache_dir=tmp_path).policy.pruning is None


def test_what_is_kept_is_of_one_context(bundles: Bundles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMSPEC_CACHE", str(tmp_path))
    monkeypatch.setattr(tune, "measure", lambda *given: ({1: given[3] / 8, 4: given[3] / 4}, True))
    session = load(bundles("fp32"), threads=1, tree=100)
    assert isinstance(session.runner, OrtRunner) and session.policy.rows == 64  # of any draft
    for contexts in ([8], [16, 32], None):
        found = tune.tune(session.runner, session.manifest, contexts)
        kept = read_record(file_of(session))
        tokens = min(64, calibrate.most_context(session.runner))
        assert kept is not None and kept.seconds == {1: tokens / 8, 4: tokens / 4}
        assert contexts is None or list(found) == contexts


def test_tune_keeps_what_it_found_on_the_prompts(
    bundles: Bundles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dev.jsonl").write_text('{"prompt": "a b c", "completion": "d"}\n' * 2)
    monkeypatch.setenv("STREAMSPEC_CACHE", str(tmp_path))
    monkeypatch.setattr(tune, "BUDGET", 0.2)
    options = ["--prompts", tmp_path / "dev.jsonl", "--max-new-tokens", 8, "--context", 8, "--threads", 1, "--json"]
    done = CliRunner().invoke(app, ["tune", str(bundles("fp32")), *map(str, options)])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout.splitlines()[-1])
    assert [one["name"] for one in found["prune"]["tried"]] == [
        f"{'chance' if one.score == 'both' else one.score} {one.min_probability:g}" for one in TRIED
    ]
    assert not any(one["mismatches"] for one in found["prune"]["tried"])
    kept = read_record(file_of(load(bundles("fp32"), threads=1)))
    assert kept is not None and (kept.min_probability, kept.score) == (found["prune"]["least"], found["prune"]["score"])


def test_pruning_has_to_pay_in_every_repetition() -> None:
    without = Spread(2.0, 1.9, 2.2)
    tried = [Pruning(None, 0.1, "exit"), Pruning(None, 0.2)]
    assert best(without, [Spread(2.1, 1.95, 2.3), Spread(2.0, 2.0, 2.0)], tried) == Pruning()
    assert best(without, [Spread(2.1, 2.05, 2.3), Spread(2.4, 2.3, 2.5)], tried) == tried[1]


def test_pruning_wants_an_early_exit(bundles: Bundles, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["tune", str(bundles("lora")), "--prompts", str(tmp_path / "dev.jsonl")])
    assert done.exit_code == 2 and "without an early exit" in done.stderr


def test_tune_wants_its_packages_before_it_measures(
    bundles: Bundles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dev.jsonl").write_text('{"prompt": "a b c", "completion": "d"}\n')
    monkeypatch.setattr(quality, "_rouge", lambda: importlib.import_module("no_such_package"))
    monkeypatch.setattr(tune, "tune", lambda *_: pytest.fail("measured"))
    done = CliRunner().invoke(app, ["tune", str(bundles("fp32")), "--prompts", str(tmp_path / "dev.jsonl")])
    assert isinstance(done.exception, ModuleNotFoundError)


def test_a_slow_model_is_measured_well_and_once(
    bundles: Bundles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, clock = load(bundles("fp32"), threads=1, tree="plain"), [0.0]
    runner = session.runner
    assert isinstance(runner, OrtRunner)

    def slow(seconds: float) -> Callable[..., float]:
        def taken(*_: Any) -> float:
            clock[0] += seconds
            return seconds

        return taken

    monkeypatch.setattr(runner, "prefill", slow(0.6))
    monkeypatch.setattr(calibrate, "_time_step", slow(0.1))
    monkeypatch.setattr(calibrate.time, "perf_counter", lambda: clock[0])
    first = calibrate.calibrated(runner, session.manifest, tmp_path)
    assert set(first.costs) == {1, 4, 8, 16} and clock[0] < 6
    assert calibrate.calibrated(runner, session.manifest, tmp_path) == first and clock[0] < 6


def test_a_tight_budget_measures_plain_and_the_most_telling_tree(bundles: Bundles) -> None:
    session = load(bundles("fp32"), threads=1, tree="plain")
    assert isinstance(session.runner, OrtRunner)
    costs, complete = calibrate.measure(session.runner, NODES, budget=0.0)
    assert set(costs) == {1, 4} and min(costs.values()) > 0 and not complete


def test_queueing_after_other_sessions_is_no_cost_of_a_step() -> None:
    class Waits:
        vocab_size, waited_seconds = 4, 0.0

        def verify(self, request: object) -> None:
            time.sleep(0.2)
            self.waited_seconds += 0.2

        def commit(self, path: object) -> None: ...

        def rewind(self, length: int) -> None: ...

    assert calibrate._time_step(Waits(), ROOT_ONLY, 3) < 0.1  # type: ignore[arg-type]
