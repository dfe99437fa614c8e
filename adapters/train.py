"""`streamspec train`: data and a base in, an adapter folder out. Runs the stages of the chosen recipe.

    lora      task LoRA
    joint     one LoRA on all rows, next-token and drafter losses together [+ a last stretch on the model's own answers]
    staged    task LoRA (trained here, given, or none) -> the target answers the prompts again -> the drafter learns
              from that while the target is frozen

Every stage can be interrupted and resumed.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import set_seed

from streamspec.adapters.adapter_writer import copy_task_lora, finish, load_drafter, write_task_lora
from streamspec.adapters.checks import without_answers
from streamspec.adapters.dataset.token_rows import TokenRow
from streamspec.adapters.distributed import processes, sharding
from streamspec.adapters.distributed.processes import say
from streamspec.adapters.drafters.drafting_model import TargetModel
from streamspec.adapters.early_checks import check_early
from streamspec.adapters.last_validation import measure_loss, stage_end
from streamspec.adapters.models import choose_vocabulary, drafter_class, load_target, with_task_lora
from streamspec.adapters.prepare import prepare
from streamspec.adapters.recipe_stages import finish_drafter, fit_drafter, known_answers, own_answers, task_stage
from streamspec.adapters.reporting.quiet import our_words_only
from streamspec.adapters.runs.day import day_of, keep_day
from streamspec.adapters.runs.failures import one_line_failures
from streamspec.adapters.runs.run_folder import WORK
from streamspec.adapters.runs.run_lock import sole_owner
from streamspec.adapters.training.config import TrainConfig, names_of
from streamspec.adapters.training.device import spare_allocator, start_budget
from streamspec.adapters.training.served_layers import Opener
from streamspec.adapters.training_run import Run, preview
from streamspec.errors import DataError

VALIDATION_SHARE = 0.15  # of the time after the task LoRA's: the target's answers to validation prompts are there
ANSWERS_SHARE = 0.4  # of that time: those to training prompts are there

FIT_REFERENCES = 256  # texts of the data that fill up few answers where a drafter's start is fitted


@processes.together()
def train(
    config: TrainConfig,
    began: float | None = None,
    load: Callable[..., Any] | None = None,
    lower_layers: Opener | None = None,
) -> dict[str, Any]:
    """Trains an adapter and writes it to `config.out`.

    Returns the summary that `streamspec train --json` prints: `out`, `method`, `recipe`, `minutes`, `val_loss`, and for
    drafters `tau`, `tau_rows` and `per_stream_accuracy`. Prints progress to stderr. An interrupted run continues with
    `resume=True`. `began`: when the command that this is began, by `time.monotonic()`; its time counts from then on.
    `load`: `streamspec.load`, where `answers_from` is a bundle; `lower_layers`: opens its graph up to a layer, whose
    states training then reads where the bundle has the base's own weights.

    Raises DataError, BaseModelError, ConfigError or AdapterError, before training where possible.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    budget = start_budget(config, began)
    if config.base_bits is None:  # else memory is short: what is freed goes back
        spare_allocator()
    with processes.first_ahead():
        check_early(config)
    alone = sole_owner(config.out / WORK)
    day = day_of(names_of(config.data), config.out, config.answers, config.resume)
    with sharding.as_launched(), our_words_only(), one_line_failures(config.out), alone, budget, day:
        run = prepare(config, budget, load, lower_layers)
        keep_day(config.out, config.answers)
        say(f"example:\n{preview(run)}")
        if config.drafter.model is None:
            summary = train_lora(run)
        elif config.recipe == "joint":
            summary = train_joint(run)
        else:
            summary = train_staged(run)
    if processes.is_first():
        shutil.rmtree(run.work, ignore_errors=True)
    return summary


def train_lora(run: Run) -> dict[str, Any]:
    """The plain fine-tune: the baseline of every comparison."""
    model = task_stage(run, run.config.out).eval()
    until = run.budget.until(kept=run.budget.writing())
    return finish(run, None, measure_loss(run, TargetModel(model), until))


def train_joint(run: Run) -> dict[str, Any]:
    """The joint recipe (arXiv 2402.11131, section 3.2.4): one LoRA for main and draft rows. Medusa's heads learn alone
    first (Medusa-2).
    """
    config = run.config
    peft, model = with_task_lora(run)
    vocabulary = choose_vocabulary(run, run.rows)
    drafter = drafter_class(config).fresh(run, model, vocabulary, frozen=False)
    if config.begins_with is not None:
        load_drafter(config.begins_with, drafter)
    elif config.drafter.learns_alone is not None:
        drafter.frozen = True  # the task LoRA is nothing yet: switched off or on, the target is the base
        alone = config.resolved[config.drafter.learns_alone]
        fit_drafter(run, "heads", drafter, run.rows, vocabulary, config.stream_lr, alone)
        drafter.frozen = False
    joint = 1 - config.distill_share * config.self_distill
    fit_drafter(run, "joint", drafter, run.rows, vocabulary, config.lr, joint)
    if config.self_distill:
        until = stage_end(run, joint + (1 - joint) / 2)
        rows = own_answers(run, model, run.prompts, config.regenerate_rows, "train", until) or run.rows
        fit_drafter(run, "distill", drafter, rows, vocabulary, config.lr / 2)
    write_task_lora(peft, run.base, config.out)
    return finish_drafter(run, drafter, model, vocabulary)


def answered_or_refused(
    run: Run, name: str, rows: Sequence[TokenRow], own: Sequence[TokenRow] = ()
) -> Sequence[TokenRow]:
    """Those of the rows that are more than a prompt, else the target's `own`. Raises DataError where that is none: a
    resumed run with more time then asks again for the answers of this `name`."""
    found = [row for row in rows if not without_answers([row])] or own
    if not found:
        run.state.reopen(f"regenerated_{name}")
        raise DataError("prompts without answers, and no time to answer one", "answers", "raise --max-minutes")
    return found


def train_staged(run: Run) -> dict[str, Any]:
    """The lossless recipe: the target is finished before the drafter starts, which cannot change it."""
    config, state = run.config, run.state
    task, used = config.target_lora, 0.0  # the share of the time
    if config.target_adapter is None:
        task, used = run.work / "task", config.task_share
        if not state.finished("task"):
            task_stage(run, task, used)
    model = load_target(run, task)
    # Its answers stay the same, so their time is known before the drafter begins.
    until = run.budget.until(used + VALIDATION_SHARE * (1 - used), of_left=VALIDATION_SHARE)
    validating = own_answers(run, model, run.val_prompts, config.val_rows, "val", until)
    if config.answers_itself:
        run.val_rows = answered_or_refused(run, "val", run.val_rows, validating)
    rows: Sequence[TokenRow] = run.rows
    if config.regenerate_rows:
        none = not known_answers(run, run.prompts, config.regenerate_rows, "train")
        until = run.budget.until(used + ANSWERS_SHARE * (1 - used), of_left=ANSWERS_SHARE * none)
        rows = own_answers(run, model, run.prompts, config.regenerate_rows, "train", until)
        if not rows:
            rows = answered_or_refused(run, "train", run.rows) if config.answers_itself else run.rows
    vocabulary = choose_vocabulary(run, run.rows, rows)
    if rows is not run.rows:  # what its start is fitted to
        run.rows = [*rows, *run.rows[:FIT_REFERENCES]]
    set_seed(config.seed)  # a resumed run begins here as well
    network = drafter_class(config)
    network.prepare_target(run, model)
    drafter = network.fresh(run, model, vocabulary, frozen=True)
    if config.begins_with is not None:
        load_drafter(config.begins_with, drafter)
    fit_drafter(run, "streams", drafter, rows, vocabulary, config.stream_lr)
    if task is not None:
        copy_task_lora(task, config.out)
    return finish_drafter(run, drafter, model, vocabulary)
