from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from streamspec.cli import app
from streamspec.runtime import Session, load
from streamspec.runtime.costs.learned_costs import CostRecord, LearnedRowCosts
from streamspec.runtime.tuning import cost_file
from streamspec.runtime.tuning import step_costs as calibrate
from streamspec.runtime.tuning.cost_file import CostKeeper, costs_file, read_record, save_record

Bundles = Callable[[str], Path]
RECORD = CostRecord({1: 0.01, 4: 0.012, 8: 0.0145}, 0.25, (0.3, 0.06, 0.1), 321, 0.02)


def learned(session: Session) -> LearnedRowCosts:
    assert isinstance(session.policy.costs, LearnedRowCosts)
    return session.policy.costs


def answers(session: Session, steps: int) -> None:
    """Answers until so many steps were learned from."""
    costs, letters = learned(session), iter("abcdefghijklmnopqrstuvwxyz" * 20)
    while costs.steps < steps:
        session.generate(next(letters) + "bab", max_new_tokens=40)


def test_a_record_is_read_as_it_was_saved(tmp_path: Path) -> None:
    file = tmp_path / "folder" / "costs.json"
    for record in (RECORD, CostRecord({1: 0.01})):
        save_record(file, record)
        assert read_record(file) == record
    assert [path.name for path in file.parent.iterdir()] == ["costs.json"]


def test_a_calibration_of_0_1_is_read(tmp_path: Path) -> None:
    (tmp_path / "old").write_text('{"format_version": 1, "costs": {"1": 0.01, "8": 0.015}, "least": 0.0}')
    assert read_record(tmp_path / "old") == CostRecord({1: 0.01, 8: 0.015})


def test_a_record_without_the_drafters_growth_is_read(tmp_path: Path) -> None:
    (tmp_path / "old").write_text(
        '{"format_version": 1, "costs": {"1": 0.01}, "least": 0.0, "drafter": 0.2, "context": [0.3, 0.06]}'
    )
    assert read_record(tmp_path / "old") == CostRecord({1: 0.01}, 0.2, (0.3, 0.06, None))


@pytest.mark.parametrize(
    "damage",
    [
        "",
        "{",
        "[]",
        '{"format_version": 1, "costs": {"1": -5}, "least": 0}',
        '{"format_version": 1, "costs": {"x": 1}, "least": 0}',
        '{"format_version": 9, "costs": {"1": 1}, "least": 0}',
        '{"format_version": 1, "costs": {"2": 1}, "least": 0}',
        '{"format_version": 1, "costs": {"1": 1, "65": 2}, "least": 0}',
        '{"format_version": 1, "costs": {"1": 1}, "least": 2}',
        '{"format_version": 1, "costs": {"1": 1}, "least": 1.0}',
        '{"format_version": 1, "costs": {"1": 1}, "least": 0, "steps": -1}',
        '{"format_version": 1, "costs": {"1": 1}, "least": 0, "drafter": "much"}',
        '{"format_version": 1, "costs": {"1": 1}, "least": 0, "drafter": NaN}',
        '{"format_version": 1, "costs": {"1": 1}, "least": 0, "context": 3}',
        '{"format_version": 1, "costs": {"1": 1}, "least": 0, "context": [1]}',
        '{"format_version": 1, "costs": {"1": 1}, "least": 0, "context": [1, 1, 1, 1]}',
        '{"format_version": 1, "costs": {"1": 1}, "least": 0, "context": [1, -1]}',
    ],
)
def test_a_damaged_record_is_none(tmp_path: Path, damage: str) -> None:
    (tmp_path / "file").write_text(damage)
    assert read_record(tmp_path / "file") is None


def test_each_machine_and_provider_and_number_of_threads_has_its_own(
    bundles: Bundles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = load(bundles("fp32"), threads=1, tree="plain").manifest
    files = {costs_file(provider, threads, manifest, tmp_path) for provider in ("cpu", "cuda") for threads in (1, 2)}
    monkeypatch.setattr(cost_file, "cpu_model", lambda: "another")
    assert len(files | {costs_file("cpu", 1, manifest, tmp_path)}) == 5


def test_loading_measures_nothing_and_the_next_process_knows_what_answers_taught(
    bundles: Bundles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*args: object, **options: object) -> None:
        raise AssertionError("measured")

    monkeypatch.setattr(calibrate, "measure", never)
    session = load(bundles("fp32"), threads=1, cache_dir=tmp_path)
    assert not learned(session).sure and not (tmp_path / "calibration").exists()
    answers(session, 60)
    session.close()
    (file,) = (tmp_path / "calibration").iterdir()
    record = read_record(file)
    assert record is not None and 16 <= record.steps <= learned(session).steps
    later = load(bundles("fp32"), threads=1, cache_dir=tmp_path)
    assert learned(later).sure and learned(later).known == record
    assert "learned from" in learned(later).describe()


def test_it_is_saved_soon_and_then_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, file = [100.0], tmp_path / "costs.json"
    monkeypatch.setattr(cost_file.time, "monotonic", lambda: now[0])
    costs = LearnedRowCosts(8, False, keep=CostKeeper(file))
    written: list[int] = []
    for answer in range(40):
        for _ in range(8):
            costs.observe(1 + answer % 4, False, 0.01, 64)
        file.unlink(missing_ok=True)
        costs.end()
        if file.exists():
            written.append(json.loads(file.read_text())["steps"])
        now[0] += 1.0
    assert 4 <= len(written) <= 7 and written[0] < 32
    file.unlink(missing_ok=True)
    costs.end(closing=True)
    assert file.exists() == (costs.steps - written[-1] >= cost_file.FEW_STEPS)


def test_what_is_pruned_by_hand_is_not_kept(bundles: Bundles, tmp_path: Path) -> None:
    from streamspec.runtime import Pruning

    session = load(bundles("fp32"), threads=1, cache_dir=tmp_path, pruning=Pruning(3))
    answers(session, 40)
    session.close()
    assert not (tmp_path / "calibration").exists()


def test_a_folder_that_cannot_be_written_is_no_error(bundles: Bundles, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    session = load(bundles("fp32"), threads=1, cache_dir=tmp_path / "file")
    answers(session, 40)
    session.close()


def test_sessions_over_the_same_weights_learn_together(bundles: Bundles, tmp_path: Path) -> None:
    session = load(bundles("fp32"), threads=1, cache_dir=tmp_path)
    other = session.another()
    answers(other, 20)
    assert learned(session) is learned(other) and learned(session).steps >= 20


def test_the_commands_show_what_was_learned(bundles: Bundles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMSPEC_CACHE", str(tmp_path))
    folder = str(bundles("fp32"))
    options = ["generate", folder, "--prompt", "hello", "--stats", "--max-new-tokens", "4"]
    assert "step costs: not known yet" in CliRunner().invoke(app, options).stderr
    assert "step costs here" not in CliRunner().invoke(app, ["inspect", folder]).stdout
    session = load(folder, cache_dir=tmp_path)
    save_record(costs_file("cpu", session.threads, session.manifest, tmp_path), RECORD)
    words = "plain step 10.00 ms; over it 4 rows 1.20, 8 rows 1.45, the drafter 0.25 of it (learned from 321 steps)"
    shown = json.loads(CliRunner().invoke(app, ["inspect", folder, "--json"]).stdout)
    assert shown["step costs here: cpu"] == words
    assert "learned from 32" in CliRunner().invoke(app, options).stderr
