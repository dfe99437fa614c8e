"""Whole training runs on a tiny model: every recipe writes a complete folder; interrupted runs go on and end the
same.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from streamspec.adapters import train as train_module
from streamspec.adapters.answers import self_distillation
from streamspec.adapters.checks import joined_words
from streamspec.adapters.dataset.token_rows import TokenRow
from streamspec.adapters.drafters.draft_layer import model as draft_layer
from streamspec.adapters.runs.day import day_of, keep_day
from streamspec.adapters.train import train
from streamspec.adapters.training import trainer
from streamspec.data import Example
from streamspec.errors import AdapterError, BaseModelError, ConfigError, DataError
from streamspec.prompt.prompt_format import PromptFormat
from streamspec.prompt.template_sandbox import TODAY
from tests.support.tiny_models import options, tiny_model, tiny_tokenizer


class Runs:
    """Whole runs of one base and its data, each of them once; how many steps each took."""

    def __init__(self, base: Path, data: Path, folder: Path) -> None:
        self.base, self.data, self.folder = base, data, folder
        self.made: dict[str, tuple[Path, dict[str, Any], int]] = {}

    def __call__(self, **changes: Any) -> tuple[Path, dict[str, Any], int]:
        name = json.dumps(changes)
        if name not in self.made:
            out, steps = self.folder / str(len(self.made)), list[int]()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(trainer.Clock, "on_step_end", counted(steps))
                summary = train(options(self.base, self.data, out, threads=1, **changes))
            self.made[name] = out, summary, len(steps)
        return self.made[name]


def counted(steps: list[int], step: Callable[..., Any] = trainer.Clock.on_step_end) -> Callable[..., Any]:
    return lambda *given, **named: steps.append(1) or step(*given, **named)


@pytest.fixture(scope="module")
def whole(base: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(base, data, tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the answers of `task` are kept, and its states: drafters over it learn of the same."""
    return tmp_path_factory.mktemp("answers") / "answers.jsonl"


@pytest.fixture(scope="module")
def task(base: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("task") / "lora"
    train(options(base, data, out, method="lora", epochs=4.0))
    return out


def test_the_day_that_templates_write_is_that_of_all_files_that_a_name_means(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("{}")
    os.utime(tmp_path / "a.jsonl", (1.6e9, 1.6e9))  # in 2020
    for name in ("*.jsonl", "a.jsonl"):
        with day_of([str(tmp_path / name)], tmp_path / "out", None, False):
            assert written_day() == 2020
    assert TODAY.get() is None


def written_day() -> int:
    today = TODAY.get()
    assert today is not None
    return today.year


def test_a_run_and_a_file_of_answers_keep_the_day_of_their_prompts(tmp_path: Path) -> None:
    data, answers = tmp_path / "a.jsonl", tmp_path / "answers.jsonl"
    data.write_text("{}")
    (tmp_path / "one" / "run").mkdir(parents=True)
    os.utime(data, (1.6e9, 1.6e9))
    with day_of([str(data)], tmp_path / "one", answers, False):
        keep_day(tmp_path / "one", answers)
    os.utime(data, (1.7e9, 1.7e9))  # in 2023: copied, or with more rows
    for out, kept, resume, year in (
        ("one", None, True, 2020),
        ("two", answers, False, 2020),
        ("one", None, False, 2023),
        ("two", tmp_path / "others.jsonl", False, 2023),
    ):
        with day_of([str(data)], tmp_path / out, kept, resume):
            assert written_day() == year
    (tmp_path / "answers.jsonl.day").write_text("damaged")
    with day_of([str(data)], tmp_path / "two", answers, False):
        assert written_day() == 2023


def test_lora_folder_is_peft_loadable_and_learnt_something(task: Path, base: Path) -> None:
    peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), task)
    assert peft.peft_config["default"].r == 4
    config = json.loads((task / "streamspec_config.json").read_text())
    assert config["method"] == "lora" and config["streams"] is None and len(config["base"]["sha256"]) == 64
    log = json.loads((task / "training.json").read_text())["log"]["task"]
    assert log[-1]["loss"] < log[0]["loss"]
    assert not (task / "run").exists()


@pytest.mark.parametrize(
    "changes", [{"recipe": "joint"}, {"recipe": "joint", "self_distill": True}, {"recipe": "staged"}]
)
def test_streaming_recipes_write_a_complete_folder(whole: Runs, changes: dict) -> None:
    out, summary, _ = whole(**changes)
    tensors = load_file(out / "streamspec.safetensors")
    config = json.loads((out / "streamspec_config.json").read_text())
    acceptance = json.loads((out / "acceptance.json").read_text())
    assert tensors["stream_embeddings"].shape == (2, 32) and tensors["root_map"].shape == (32, 32)
    assert any(".lora_A" in name for name in tensors) == (changes["recipe"] == "staged")
    assert (out / "adapter_model.safetensors").exists() and config["method"] == "streaming"
    assert config["streams"]["draft_vocab"] == len(tensors["draft_vocab"])
    assert all(len(r) == 2 for ranks in acceptance["ranks"] for r in ranks)
    assert 1 <= summary["tau"] <= 3 and len(summary["per_stream_accuracy"]) == 2


@pytest.mark.parametrize(("recipe", "own_heads"), [("joint", True), ("staged", False)])
def test_medusa_recipes_write_a_complete_folder(
    base: Path, data: Path, tmp_path: Path, recipe: str, own_heads: bool
) -> None:
    summary = train(options(base, data, tmp_path / "out", method="medusa", recipe=recipe, own_heads=own_heads))
    tensors = load_file(tmp_path / "out" / "streamspec.safetensors")
    config = json.loads((tmp_path / "out" / "streamspec_config.json").read_text())
    assert config["method"] == "medusa" and config["streams"]["own_heads"] == own_heads
    assert tensors["block_weights"].shape == (2, 32, 32) and bool(tensors["block_weights"].any())
    assert own_heads == ("heads" in tensors) and not any("lora" in name for name in tensors)
    log = json.loads((tmp_path / "out" / "training.json").read_text())["log"]
    assert ("heads" in log, "joint" in log) == (recipe == "joint",) * 2  # Medusa-2 warms its heads up
    assert 1 <= summary["tau"] <= 3


@pytest.mark.parametrize("method", ["jakiro", "eagle", "mtp", "hydra"])
def test_draft_layers_write_a_complete_folder(
    base: Path, data: Path, task: Path, answers: Path, tmp_path: Path, method: str
) -> None:
    over: dict[str, Any] = {"target_adapter": task, "answers": answers, "taps": "2,1"}
    unroll = {"unroll": 1} if method in ("jakiro", "eagle") else {}
    summary = train(options(base, data, tmp_path / "out", method=method, **over, **unroll))
    tensors = load_file(tmp_path / "out" / "streamspec.safetensors")
    config = json.loads((tmp_path / "out" / "streamspec_config.json").read_text())
    experts = 2 if method == "jakiro" else 1
    assert config["method"] == method and config["recipe"] == "staged" and config["streams"]["experts"] == experts
    assert config["streams"]["contrast"] == config["streams"]["parallel"] == (method == "jakiro") and config["streams"][
        "taps"
    ] == [2, 1]
    assert tensors["experts.gate"].shape == (experts, 64 // experts, 32) and tensors["from_entry"].shape == (32, 64)
    assert sum(name.startswith("heads.") for name in tensors) == (
        7 * (config["streams"]["gamma"] - 1) if method == "hydra" else 0
    )
    assert config["streams"]["prefix_attention"] == config["streams"]["own_heads"] == (method == "hydra")
    assert json.loads((tmp_path / "out" / "training.json").read_text())["log"]["start"]["unexplained"] < 1
    assert 1 <= summary["tau"] <= 3


def test_auto_writes_the_adapter_of_the_method_it_chose(base: Path, data: Path, task: Path, tmp_path: Path) -> None:
    train(options(base, data, tmp_path / "out", method="auto", target_adapter=task, ns=1, epochs=0.1))
    for name, saved in (("streamspec_config.json", None), ("training.json", "config")):
        config = json.loads((tmp_path / "out" / name).read_text())
        config = config[saved] if saved else config
        assert (config["method"], config["recipe"]) == ("streaming", "staged")


def test_staged_copies_the_given_target_untouched(base: Path, data: Path, task: Path, tmp_path: Path) -> None:
    train(options(base, data, tmp_path / "out", recipe="staged", target_adapter=task, epochs=0.1))
    assert (tmp_path / "out" / "adapter_model.safetensors").read_bytes() == (
        task / "adapter_model.safetensors"
    ).read_bytes()


@pytest.mark.parametrize("changes", [{"separator": " -> "}, {"separator": "\n"}])
def test_a_prompt_format_that_is_not_the_targets_is_refused(
    base: Path, data: Path, task: Path, tmp_path: Path, changes: dict
) -> None:
    with pytest.raises(ConfigError, match="the prompt format of .*; give --format raw --separator '', or neither"):
        train(options(base, data, tmp_path / "out", recipe="staged", target_adapter=task, **changes))
    assert not (tmp_path / "out").exists()


def test_over_a_target_the_prompt_format_is_the_targets(base: Path, data: Path, tmp_path: Path) -> None:
    task, out = tmp_path / "task", tmp_path / "out"
    train(options(base, data, task, method="lora", separator=" : ", epochs=0.1))
    train(options(base, data, out, recipe="staged", target_adapter=task, epochs=0.1))
    for folder in (task, out):
        config = json.loads((folder / "streamspec_config.json").read_text())
        assert config["prompt_format"] == {"kind": "raw", "separator": " : "}
        assert json.loads((folder / "training.json").read_text())["config"]["separator"] == " : "


@pytest.mark.parametrize(
    ("pairs", "changes", "warns"),
    [
        ([("Age", "Twelve"), ("b:", " c")], {}, False),
        ([("Age", "Twelve"), ("b", "c")], {}, True),
        ([("Age ", "Twelve")], {}, False),
        ([("Age", "Twelve")], {"separator": "\n"}, False),
        ([("Age", "Twelve")], {"kind": "chat"}, False),
    ],
)
def test_prompts_that_run_into_their_answers_are_pointed_out(
    pairs: list[tuple[str, str]], changes: dict[str, str], warns: bool
) -> None:
    examples = [Example("strings", prompt, completion) for prompt, completion in pairs]
    warning = joined_words(examples, PromptFormat(**changes))
    assert warns == (warning is not None) and (warning is None or "'AgeTwelve'" in warning)


def test_staged_on_the_untouched_base_has_no_task_lora(base: Path, data: Path, tmp_path: Path) -> None:
    train(options(base, data, tmp_path / "out", recipe="staged", target_adapter="base", epochs=0.1))
    assert not (tmp_path / "out" / "adapter_model.safetensors").exists()


def test_an_untouched_base_answers_prompts_alone(
    base: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, small = tmp_path / "prompts.jsonl", {"epochs": 1.0, "draft_vocab": 0}
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    prompts.write_text("".join(json.dumps({"prompt": row["prompt"]}) + "\n" for row in rows))
    learnt = []
    monkeypatch.setattr(train_module, "fit_drafter", lambda run, name, drafter, rows, *_: learnt.append((rows, run)))
    for name in (data, prompts):
        summary = train(options(base, name, tmp_path / name.stem, target_adapter="base", **small))
    (with_answers, _), (alone, run) = learnt
    assert alone == with_answers and run.val_rows and all(sum(row.loss_mask) > 1 for row in run.val_rows)
    assert "tau" in summary and "val_em" not in summary
    with pytest.raises(DataError, match="has no completion"):
        train(options(base, prompts, tmp_path / "joint", **small))
    monkeypatch.setattr(train_module, "own_answers", lambda *_: [])
    with pytest.raises(DataError, match=r"no time to answer one.*--max-minutes"):
        train(options(base, prompts, tmp_path / "late", target_adapter="base", **small))


def test_answers_that_had_no_time_are_asked_for_again_with_more(
    base: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    prompts.write_text("".join(json.dumps({"prompt": row["prompt"]}) + "\n" for row in rows))
    given = {"target_adapter": "base", "epochs": 0.2, "draft_vocab": 0}
    with pytest.raises(DataError, match="no time to answer one"):
        train(options(base, prompts, tmp_path / "out", max_minutes=1e-4, **given))
    assert "tau" in train(options(base, prompts, tmp_path / "out", resume=True, **given))


def test_prompts_alone_among_answered_rows_teach_no_empty_answer() -> None:
    prompt, answered = TokenRow([5, 6, 2], [False, False, True]), TokenRow([5, 6, 7, 2], [False, False, True, True])
    run: Any = None
    assert train_module.answered_or_refused(run, "val", [prompt, answered], [prompt]) == [answered]
    assert train_module.answered_or_refused(run, "val", [prompt], [prompt]) == [prompt]  # its own answer is empty


def test_adapter_of_another_base_is_refused(data: Path, task: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    tiny_model("llama", seed=5).save_pretrained(other)
    tiny_tokenizer().save_pretrained(other)
    with pytest.raises(AdapterError, match=r"was trained on .* expected "):
        train(options(other, data, tmp_path / "out", recipe="staged", target_adapter=task))


def test_a_base_that_cannot_have_the_draft_layer_is_refused_at_once(base: Path, data: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"taps = 2,9; expected 1\.\.4"):
        train(options(base, data, tmp_path / "out", method="eagle", target_adapter="base", taps="2,9"))
    assert not (tmp_path / "out").exists()


def test_a_base_without_an_end_of_text_is_refused(base: Path, data: Path, tmp_path: Path) -> None:
    shutil.copytree(base, tmp_path / "endless")
    settings = json.loads((base / "tokenizer_config.json").read_text())
    (tmp_path / "endless" / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": None}))
    config = json.loads((base / "config.json").read_text())
    (tmp_path / "endless" / "config.json").write_text(json.dumps(config | {"eos_token_id": None}))
    with pytest.raises(BaseModelError, match="end-of-text"):
        train(options(tmp_path / "endless", data, tmp_path / "out", method="lora"))


def test_an_adapter_called_base_is_not_the_untouched_base(
    base: Path, data: Path, task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(task, tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="whole path"):
        train(options(base, data, tmp_path / "out", recipe="staged", target_adapter="base"))


def test_a_run_goes_on_only_with_the_data_it_began_with(
    base: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(train_module, "train_lora", lambda _: interrupt())
        train(options(base, data, tmp_path / "out", method="lora"))
    other = tmp_path / "elsewhere" / data.name
    other.parent.mkdir()
    other.write_text("".join(data.read_text().splitlines(keepends=True)[1:]))
    with pytest.raises(ConfigError, match=r"--data .* as when the run began"):
        train(options(base, other, tmp_path / "out", method="lora", resume=True))
    train(options(base, data, tmp_path / "out", method="lora", resume=True))


def interrupt() -> None:
    raise KeyboardInterrupt


def test_existing_output_and_too_long_rows_are_refused(base: Path, data: Path, task: Path, tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="finished adapter"):
        train(options(base, data, task, method="lora", resume=True))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    for resume in (False, True):
        with pytest.raises(AdapterError, match="neither empty nor an unfinished run"):
            train(options(base, data, tmp_path / "full", method="lora", resume=resume))
    with pytest.raises(AdapterError, match="is a file"):
        train(options(base, data, tmp_path / "full" / "x", method="lora"))
    with pytest.raises(DataError, match="no row of at most 3 tokens"):
        train(options(base, data, tmp_path / "out", method="lora", max_length=3))


def test_more_msa_layers_than_the_base_has_are_refused_before_any_training(
    base: Path, data: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="ns = 5.*1..4"):
        train(options(base, data, tmp_path / "out", recipe="staged", ns=5))
    assert not (tmp_path / "out").exists()


def test_prompts_that_leave_no_room_for_answers_are_refused_before_any_training(
    base: Path, data: Path, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match="leaves room for 63 tokens within 64"):
        train(options(base, data, tmp_path / "out", max_new_tokens=63))
    assert not (tmp_path / "out").exists()


def test_of_text_rows_the_target_continues_the_beginning(base: Path, tmp_path: Path) -> None:
    data = tmp_path / "text.jsonl"
    rows = [""] + [c * 5 + d * 8 for c in "abcdefgh" for d in "ijkl"]  # the first has nothing to learn
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in rows))
    train(options(base, data, tmp_path / "out", recipe="staged", target_adapter="base", draft_vocab=5))
    config = json.loads((tmp_path / "out" / "training.json").read_text())
    assert config["log"]["regenerated_train"]["completions"] >= 20
    assert json.loads((tmp_path / "out" / "acceptance.json").read_text())["ranks"]


def test_every_early_exit_learns_and_is_kept(base: Path, data: Path, tmp_path: Path) -> None:
    shape = {"recipe": "staged", "target_adapter": "base", "ns": 1, "exit_layer": "1", "prune_rank": 2}
    train(options(base, data, tmp_path / "first", **shape))
    folder = tmp_path / "first"
    assert json.loads((folder / "streamspec_config.json").read_text())["streams"]["exit_layers"] == [1]
    up = load_file(folder / "streamspec.safetensors")["prune_up"]
    assert up.shape[0] == 1 and up.abs().max() > 0
    with pytest.raises(ConfigError, match=r"exit_layer = 1"):
        train(options(base, data, tmp_path / "o1", **shape | {"warm_start": folder, "exit_layer": None}))


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"exit_layer": "9", "ns": 1}, r"exit_layer = 9; expected 1\.\."),
        ({"exit_layer": "1", "ns": 1, "prune_rank": 0}, "--prune-rank 0"),
        ({"exit_layer": "one"}, "exit_layer = 'one'"),
        ({"exit_layer": "1", "method": "medusa"}, "exit.layer"),
    ],
)
def test_exits_that_cannot_be_trained_are_refused(
    changes: dict[str, object], found: str, base: Path, data: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=found):
        train(options(base, data, tmp_path / "out", **changes))


def test_streams_start_only_from_streams_of_their_own_shape(base: Path, data: Path, tmp_path: Path) -> None:
    first = tmp_path / "first"
    train(options(base, data, first, recipe="staged", target_adapter="base"))
    again = {"recipe": "staged", "target_adapter": "base", "warm_start": first}
    with pytest.raises(ConfigError, match=r"gamma = 2.*expected 3"):
        train(options(base, data, tmp_path / "out", **again, gamma=3))
    train(options(base, data, tmp_path / "out", **again, ns=1))  # the last of two layers
    saved = [json.loads((f / "streamspec_config.json").read_text())["streams"] for f in (first, tmp_path / "out")]
    assert saved[0]["scale"] == saved[1]["scale"] and [s["ns"] for s in saved] == [2, 1]
    with pytest.raises(ConfigError, match=r"ns = 1.*expected 2"):
        train(options(base, data, tmp_path / "more", **(again | {"warm_start": tmp_path / "out"})))
    for changes, found in (({"stream_rank": 2}, "stream_rank = 4"), ({"prune_rank": 3}, "prune_rank = 8")):
        with pytest.raises(ConfigError, match=found):
            train(options(base, data, tmp_path / "o1", **again, **changes))
    with pytest.raises(AdapterError, match=r"no streamspec\.safetensors.*check --warm-start"):
        train(options(base, data, tmp_path / "o2", **(again | {"warm_start": tmp_path})))


def test_answers_outlive_a_run_and_serve_the_next_drafter(
    base: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = {"recipe": "staged", "target_adapter": "base", "answers": tmp_path / "answers.jsonl"}
    train(options(base, data, tmp_path / "streams", **kept))
    lines = (tmp_path / "answers.jsonl").read_text()
    monkeypatch.setattr(self_distillation, "answer_batch", lambda *_: pytest.fail("answered again"))
    train(options(base, data, tmp_path / "heads", method="medusa", **kept))
    assert (tmp_path / "answers.jsonl").read_text() == lines
    with pytest.raises(DataError, match=r"max_new_tokens 12; expected .*max_new_tokens 9"):
        train(options(base, data, tmp_path / "other", **kept, max_new_tokens=9))
    (tmp_path / "answers.jsonl").write_text(lines + '{"prompt": [1]}\n')
    with pytest.raises(DataError, match=r"KeyError 'answer'; expected a file of answers"):
        train(options(base, data, tmp_path / "other", **kept))


SCRIPT = """
import sys
from pathlib import Path
sys.path.insert(0, {root!r})
from tests.adapters.test_train import options, train
train(options(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), **{changes!r}))
"""


def ends_as(whole: Path, cut: Path) -> bool:
    """Whether two runs wrote the same tensors and the same parts of a log."""
    for file in sorted(whole.glob("*.safetensors")):
        one, other = load_file(file), load_file(cut / file.name)
        if one.keys() != other.keys() or not all(torch.equal(one[name], other[name]) for name in one):
            return False
    logs = [json.loads((folder / "training.json").read_text())["log"] for folder in (whole, cut)]
    return bool(logs[0].keys() == logs[1].keys())


def test_killed_run_resumes_and_ends_like_an_uninterrupted_one(
    whole: Runs, base: Path, data: Path, tmp_path: Path
) -> None:
    """In its second stage. What a kill leaves of files and locks is tested in runs/test_run_lock.py and, of answers, in
    answers/test_self_distillation.py.
    """
    changes = {"threads": 1, "recipe": "staged"}
    script = SCRIPT.format(root=str(Path(__file__).parents[2]), changes=changes)
    command = [sys.executable, "-c", script, str(base), str(data), str(tmp_path / "cut")]
    victim = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 90
    sign = "run/checkpoints-streams/checkpoint-*/complete"
    while not list((tmp_path / "cut").glob(sign)) and time.monotonic() < deadline:
        time.sleep(0.01)
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    assert not (tmp_path / "cut" / "training.json").exists(), "the run ended before it could be killed"
    with pytest.raises(ConfigError, match=r"--seed 5; expected 0 as when the run began"):
        train(options(base, data, tmp_path / "cut", resume=True, seed=5, **changes))
    train(options(base, data, tmp_path / "cut", resume=True, **changes))
    assert ends_as(whole(recipe="staged")[0], tmp_path / "cut")


@pytest.mark.parametrize(
    ("changes", "sign"),
    [
        ({"method": "lora"}, "checkpoints-task/checkpoint-*/complete"),
        ({"recipe": "joint", "self_distill": True}, "answers-train.jsonl"),
        ({"method": "eagle"}, "checkpoints-streams/checkpoint-*/complete"),
    ],
)
def test_interrupted_run_resumes_and_ends_like_an_uninterrupted_one(
    whole: Runs,
    base: Path,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, object],
    sign: str,
) -> None:
    """Cut at the first batch of answers or step of training after there is a sign of what it is about."""
    finished, _, all_steps = whole(**changes)
    changes, steps = {"threads": 1} | changes, list[int]()
    monkeypatch.setattr(trainer.Clock, "on_step_end", counted(steps))

    def cut(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any, **named: Any) -> Any:
            return interrupt() if list((tmp_path / "cut" / "run").glob(sign)) else call(*given, **named)

        return run

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(trainer.Clock, "on_step_end", cut(trainer.Clock.on_step_end))
        patch.setattr(self_distillation, "answer_batch", cut(self_distillation.answer_batch))
        train(options(base, data, tmp_path / "cut", **changes))
    steps.clear()
    train(options(base, data, tmp_path / "cut", resume=True, **changes))
    assert ends_as(finished, tmp_path / "cut") and len(steps) < all_steps


@pytest.mark.parametrize(
    ("method", "changes", "seen"),
    [
        ("eagle", {}, {1, 2}),
        ("jakiro", {"parallel": False, "contrast": False}, {1, 2}),
        ("eagle", {"random_unroll": False}, {2}),
        ("eagle", {"unroll": 1}, {1}),
        ("hydra", {}, {2}),
        ("mtp", {}, {1}),
    ],
)
def test_steps_draw_how_many_passes_they_unroll(
    method: str,
    changes: dict[str, object],
    seen: set[int],
    base: Path,
    data: Path,
    task: Path,
    answers: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    passes: set[int] = set()
    losses = draft_layer.draft_layer_losses
    monkeypatch.setattr(draft_layer, "draft_layer_losses", lambda *given: passes.add(given[-1]) or losses(*given))
    changes = {"target_adapter": task, "answers": answers} | changes
    train(options(base, data, tmp_path / "out", method=method, epochs=3, **changes))
    assert passes == seen
