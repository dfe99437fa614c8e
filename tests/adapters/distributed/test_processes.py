"""Two processes train what one process trains with twice the batch."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from tests.support import two_processes

pytestmark = pytest.mark.slow  # all but one share runs of a minute

WORDS = ("ab", "cde", "fgh ij", "k", "lmno", "pq rs")


class Runs(NamedTuple):
    one: Path
    two: Path
    printed: list[tuple[str, str]]  # stdout and stderr of each of two processes
    divided: Path  # of two that share weights
    said: list[tuple[str, str]]


@pytest.fixture(scope="module")
def runs(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """All cases, on one process and on two, on texts of many lengths: a mean of means is not the mean."""
    folder = tmp_path_factory.mktemp("processes")
    drawn, data = random.Random(0), folder / "data.jsonl"
    sides = ([" ".join(drawn.choices(WORDS, k=drawn.randint(1, most))) for most in (5, 8)] for _ in range(45))
    data.write_text("".join(json.dumps({"prompt": p, "completion": c}) + "\n" for p, c in sides))
    workers = two_processes.spawn(2, base, data, folder / "two")
    workers += two_processes.spawn(2, base, data, folder / "divided", **two_processes.FSDP)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(two_processes.trainer, "has_bf16", None)
        patched.setattr(two_processes.training_run, "has_bf16", None)
        for name in two_processes.CASES:
            two_processes.run(name, base, data, folder / "one" / name)
        printed = [worker.communicate(timeout=900) for worker in workers]
        ends = [worker.returncode for worker in workers]
        if ends != [0, 7, 0, 0]:
            pytest.fail("\n".join(errors[-4000:] for _, errors in printed), pytrace=False)
        again = {"batch_size": two_processes.CASES["lora"][0] // 2, "resume": True}
        two_processes.run("lora", base, data, folder / "two" / "cut", **again)
    return Runs(folder / "one", folder / "two", printed[:2], folder / "divided", printed[2:])


def assert_same_tensors(found: Path, wanted: Path) -> None:
    files = sorted(wanted.glob("*.safetensors"))
    for file in files:
        one, two = load_file(file), load_file(found / file.name)
        assert one.keys() == two.keys() and one
        apart = torch.cat([(two[tensor] - value).abs().flatten() for tensor, value in one.items()])
        # Adam moves a weight whose gradient is next to nothing by the whole rate, to whichever side it rounds
        assert (apart > 1e-3).float().mean() < 0.05 and apart.max() < 1e-2, file
    assert files


@pytest.mark.parametrize("name", two_processes.CASES)
def test_two_processes_give_the_adapter_of_one_with_twice_the_batch(runs: Runs, name: str) -> None:
    assert_same_tensors(runs.two / name, runs.one / name)
    found, wanted = (json.loads((folder / name / "training.json").read_text()) for folder in (runs.two, runs.one))
    assert (found["processes"], wanted["processes"]) == (2, 1)
    for part, log in wanted["log"].items():
        if isinstance(log, list):  # of losses
            kept = [{k: v for k, v in one.items() if k not in ("minutes", "grad_norm")} for one in log]
            for ours, theirs in zip(found["log"][part], kept, strict=True):
                assert {k: ours[k] for k in theirs} == pytest.approx(theirs, abs=5e-3)


@pytest.mark.parametrize("name", two_processes.DIVIDED)
def test_processes_that_share_the_weights_of_layers_give_it_too(runs: Runs, name: str) -> None:
    assert_same_tensors(runs.divided / name, runs.one / name)
    assert_same_figures(runs.divided / name, runs.one / name)


def test_processes_say_which_layers_they_share(runs: Runs) -> None:
    said = [line for line in runs.said[0][1].splitlines() if "share the weights" in line]
    counts = (3, 2, 2, 2, 3)  # a LoRA alone, joint, a task LoRA and the target of its streams, that of a draft layer
    assert said == [f"2 processes share the weights of the first {count} of 4 layers" for count in counts]


@pytest.mark.parametrize("name", two_processes.CASES)
def test_answers_and_measurements_of_two_processes_are_those_of_one(runs: Runs, name: str) -> None:
    assert_same_figures(runs.two / name, runs.one / name)


def assert_same_figures(two: Path, one: Path) -> None:
    found, wanted = (json.loads((folder / "training.json").read_text()) for folder in (two, one))
    assert found["metrics"].keys() == wanted["metrics"].keys()
    for metric, value in wanted["metrics"].items():
        assert found["metrics"][metric] == pytest.approx(value, abs=2e-3), metric
    for part, log in wanted["log"].items():
        if "regenerated" in part:
            assert (found["log"][part]["completions"], found["log"][part]["tokens"]) == (
                log["completions"],
                log["tokens"],
            )
    if one.name != "lora":
        assert (two / "acceptance.json").read_text() == (one / "acceptance.json").read_text()


def test_one_process_writes_and_prints(runs: Runs) -> None:
    two, one = ({p.relative_to(folder) for p in folder.rglob("*")} for folder in (runs.two, runs.one))
    assert {path for path in two if path.parts[0] != "cut"} == one
    (_, first), (_, second) = runs.printed
    assert "example:" in first and "step" in first and second == ""


def test_a_run_goes_on_with_another_number_of_processes(runs: Runs) -> None:
    assert all("cut" in out for out, _ in runs.printed)
    assert_same_tensors(runs.two / "cut", runs.one / "lora")
    assert json.loads((runs.two / "cut" / "training.json").read_text())["processes"] == 2


def test_a_process_that_loses_another_one_says_so_in_one_line(runs: Runs) -> None:
    assert runs.printed[0][0].splitlines()[-1].startswith("process 0 lost another one of the run; expected")


def test_what_all_processes_refuse_is_said_once(tmp_path: Path) -> None:
    options = ["--base", "smollm2-135m", "--data", tmp_path / "none.jsonl", "--out", tmp_path / "out"]
    workers = two_processes.spawn(2, "train", *options, module="streamspec")
    printed = [worker.communicate(timeout=60) for worker in workers]
    assert [worker.returncode for worker in workers] == [2, 2]
    assert [error.count("\n") for _, error in printed] == [1, 0] and [out for out, _ in printed] == ["", ""]
