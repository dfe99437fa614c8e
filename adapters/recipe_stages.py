"""The stages of a run: the task LoRA, the target's own answers, the drafter, and the measurement at the end.

A stage that is finished is not repeated when the run is resumed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from streamspec.acceptance_stats import per_stream_accuracy
from streamspec.adapters.adapter_writer import finish_drafting, read_tensors, save_tensors, write_task_lora
from streamspec.adapters.answers.completion_file import Answered, CompletionFile, answered, up_to_end
from streamspec.adapters.answers.request import AnswerJob, AnswerSource
from streamspec.adapters.answers.self_distillation import regenerate
from streamspec.adapters.answers.source import SAMPLE, ask, check_answers_from
from streamspec.adapters.dataset.batches import row_lengths
from streamspec.adapters.dataset.token_rows import TokenRow, TokenRows, joined, spread
from streamspec.adapters.distributed import processes
from streamspec.adapters.distributed.processes import say
from streamspec.adapters.drafters.acceptance_eval import evaluating, record_ranks
from streamspec.adapters.drafters.drafting_model import DraftingModel, DraftTargets, FitStep, TargetModel
from streamspec.adapters.drafters.least_squares import FIT_TOKENS
from streamspec.adapters.drafters.losses import lookup_table, next_token_loss, pick_rows
from streamspec.adapters.last_validation import (
    exact_match,
    last_work,
    learning_seconds,
    measure_drafter,
    measure_loss,
    measure_texts,
    stage_end,
)
from streamspec.adapters.models import with_task_lora
from streamspec.adapters.reporting.periodic_validation import (
    REPORTED_ROWS,
    drafter_figures,
    reported_tau,
    sample,
    target_figures,
)
from streamspec.adapters.reporting.verdict import expected
from streamspec.adapters.runs.budget import ANSWERS, DESCRIBED, ENDLESS, RANKED, TEXTS, Deadline
from streamspec.adapters.runs.stage_plan import StagePlan, StageTime, batch_in_time
from streamspec.adapters.training.device import return_memory
from streamspec.adapters.training.hidden_state_cache import STATES, HiddenStateCache
from streamspec.adapters.training.trainer import Stage, StepLoss, load_trainable, run_stage, trainable_state
from streamspec.adapters.training_run import Run, answers_made_by, file_of_answers, target_of
from streamspec.atomic import sha256_file, write_text

COMPARED = "answers_from"  # part of a run: a sample of the source's answers was compared with the target


def task_stage(run: Run, out: Path, share: float = 1.0) -> PreTrainedModel:
    """Trains the task LoRA on references until `share` of the time is over and writes it to `out` in PEFT's format."""
    peft, model = with_task_lora(run)
    plain = TargetModel(model)
    measure_texts(run, plain)
    if run.config.gradient_checkpointing:
        plain.checkpoint_layers()

    def loss(batch: dict[str, Tensor], draw: float) -> dict[str, Tensor]:
        main = plain.main_pass(batch["input_ids"], batch["attention_mask"])
        return {"total": next_token_loss(plain, main, batch)}

    check, end = partial(target_figures, plain, sample(run.val_rows)), stage_end(run, share)
    batch = planned_batch(run, "task", plain, TEXTS, run.rows, run.config.batch_size, end)
    stage = Stage("task", plain, loss, run.rows, run.config.lr, batch, end, run.budget.note, check)
    log, used = run_stage(stage, run.config, run.work / "checkpoints-task")
    write_task_lora(peft, run.base, out)
    run.state.finish("task", used, log)
    return model


def fit_drafter(
    run: Run,
    name: str,
    drafter: DraftingModel,
    rows: Sequence[TokenRow],
    vocabulary: Tensor | None,
    lr: float,
    share: float = 1.0,
) -> None:
    """Trains a drafter on `rows` until `share` of the run's time is over; beside a frozen target the main pass needs no
    gradient and no next-token loss.
    """
    config, done = run.config, run.work / f"{name}.safetensors"
    folder = states_folder(run)
    again = config.epochs > 1 or folder != run.work / STATES
    states = None
    if config.recipe == "staged" and again and HiddenStateCache.serves(drafter):
        states = opened_states(run, drafter, folder)
    if run.state.finished(name):
        load_trainable(drafter, read_tensors(done))
        drafter.kept = states
        return
    ahead, unread = list[int](), 1.0
    if states is None:
        measure_drafter(run, drafter, vocabulary)
    else:
        ahead, unread = keep_states(run, name, drafter, states, rows, vocabulary, stage_end(run, share))
    if config.gradient_checkpointing and not drafter.frozen:
        drafter.checkpoint_layers()
    check = partial(drafter_figures, drafter, sample(checked_rows(run, drafter)), vocabulary)
    end = stage_end(run, share)
    loss = drafter_loss(run, drafter, vocabulary)
    batch = planned_batch(run, name, drafter, RANKED, rows, config.drafter_batch, end, unread)
    stage = Stage(name, drafter, loss, rows, lr, batch, end, run.budget.note, check, ahead)
    try:
        log, used = run_stage(stage, config, run.work / f"checkpoints-{name}")
    finally:
        if states is not None:
            states.name()
    save_tensors(trainable_state(drafter), done)
    run.state.finish(name, used, log)


def keep_states(
    run: Run,
    name: str,
    drafter: DraftingModel,
    states: HiddenStateCache,
    rows: Sequence[TokenRow],
    vocabulary: Tensor | None,
    until: Deadline,
) -> tuple[list[int], float]:
    """Computes the target's states of all texts of a stage once: before the first step, or each at its first use where
    the time is over before all are learnt from. Where they take longer than expected, time to learn from each text is
    left, and the others come at their first use. Frees the layers that nobody reads any more. Returns the rows to begin
    with, whose states are there where others have to be computed in steps, and the share of those.
    """
    texts = [run.val_rows, checked_rows(run, drafter), rows]
    known, first = len(states.kept_rows(rows)), run.work / f"ahead-{name}.json"
    complete = processes.from_first(states.keeps(texts))
    if not complete:
        measure_drafter(run, drafter, vocabulary)
    time = StageTime(until.left(), learning_seconds(run, drafter, RANKED, 1 - known / len(rows)))
    before = complete or processes.from_first(time.texts() >= len(rows))
    if not before:
        say(f"{name}: the time is over before each text is learnt from: texts whose states are kept come first")
    learning = learning_seconds(run, drafter, RANKED, 0.0) or 0.0  # from states that are there
    reading = until.before(learning * len(rows))
    drafter.kept, whole = states, states.fill(texts, name, reading, before, run.budget.note)
    kept = states.kept_rows(rows)
    if before and not whole and reading.over():
        say(f"{name}: the states of {len(kept):,} rows are there in the time for them, the others come at first use")
    if processes.is_first() and not first.exists():  # else as when the run began
        write_text(first, json.dumps([] if whole else kept))
    ahead = processes.from_first(json.loads(first.read_text(encoding="utf-8")) if processes.is_first() else [])
    if not whole:
        return ahead, 1 - len(kept) / len(rows)
    freed = drafter.free_layers()
    if run.lower_layers is not None:
        run.lower_layers.close()
    return_memory()
    if freed:
        size = f"{freed / 1e6:,.0f} MB of memory are free"
        say(f"{name}: the target's first {drafter.needed} layers are no longer needed: {size}")
    run.budget.speeds.forget(TEXTS, RANKED, DESCRIBED)
    measure_drafter(run, drafter, vocabulary)
    return ahead, 1.0


def states_folder(run: Run) -> Path:
    """Where the target's states are kept: beside the answers of several runs, or for this run alone."""
    file = run.config.answers
    return run.work / STATES if file is None or not run.config.states_gb else file.with_name(f"{file.name}.{STATES}")


def opened_states(run: Run, drafter: DraftingModel, folder: Path) -> HiddenStateCache:
    """The states of the run's target that `folder` holds; those that a bundle computes are of that bundle. They depend
    on the base's configuration, too: its hash is of the weights alone."""
    if folder == run.work / STATES:
        return HiddenStateCache(drafter, folder)
    target = target_of(run.config, run.base) | {"bits": run.config.base_bits}
    target |= {"config": sha256_file(run.base.path / "config.json")}
    if run.lower_layers is not None and run.source is not None:
        target |= run.source.made_by()
    owner = hashlib.blake2b(str(run.config.out.absolute()).encode(), digest_size=6).hexdigest()
    return HiddenStateCache(drafter, folder, target, f"{owner}-", run.config.states_gb * 1e9)


def planned_batch(
    run: Run,
    name: str,
    model: TargetModel,
    kind: str,
    rows: Sequence[TokenRow],
    asked: int,
    until: Deadline,
    unread: float = 1.0,
) -> int:
    """Returns the texts that all processes read at once, `asked` by each or fewer, and says what the stage is about to
    do. A run that goes on takes as many as before. `kind`: of validation, whose passes are those of learning; `unread`:
    the share of rows that the target has still to pass over.
    """
    config, part = run.config, f"plan_{name}"
    time = StageTime(until.left(), learning_seconds(run, model, kind, unread))
    if not run.state.finished(part):
        batches = run.in_step(config.accumulate)
        batch = batch_in_time(asked, batches, time)
        plan = StagePlan(len(rows), sum(row_lengths(rows)), len(run.val_rows), batch, batches)
        run.state.finish(part, 0.0, asdict(plan))
    plan = StagePlan(**run.state.log[part])
    fitted = run.state.log.get("start", {}).get("tokens")
    cut = f"; the start is fitted to {fitted:,} tokens instead of {FIT_TOKENS:,}: the time is short" if fitted else ""
    say(f"{name}: {plan.described(asked, config.epochs, time)}{cut}")
    return run.in_step(plan.batch)


def drafter_loss(run: Run, drafter: DraftingModel, vocabulary: Tensor | None) -> StepLoss:
    """Returns the function that computes the losses of a step from its batch and its random number."""
    config, options = run.config, run.options
    lookup = lookup_table(vocabulary, drafter.decoder.embedding.num_embeddings)
    weights = config.alpha_decay ** torch.arange(config.gamma, device=run.device)

    def loss(batch: dict[str, Tensor], draw: float) -> dict[str, Tensor]:
        with torch.set_grad_enabled(not drafter.frozen):
            main = drafter.main_pass(batch["input_ids"], batch["attention_mask"])
        picked = pick_rows(batch, config.gamma, config.stream_rows)
        targets = DraftTargets(main, picked, vocabulary, lookup, options["labels"])
        return drafter.losses(FitStep(batch, targets, weights, options, draw))

    return loss


@contextmanager
def answering(model: PreTrainedModel) -> Iterator[None]:
    """The model as it answers fastest: in eval mode, with SDPA but for scores with a soft cap."""
    attention = model.config._attn_implementation
    if model._supports_sdpa:
        model.set_attn_implementation("sdpa")
    with evaluating(model):
        yield
    model.set_attn_implementation(attention)


def make_answers(
    run: Run, model: PreTrainedModel, prompts: list[list[int]], file: CompletionFile, until: Deadline, name: str
) -> Answered:
    """Answers of the model, or of the source that answers for it, once a sample of those was compared with it."""
    config, source = run.config, run.source
    drawn = (config.answer_temperature, config.answer_top_p, config.seed) if config.answer_temperature else None
    label = f"regenerating ({name})"
    job = AnswerJob(config.max_new_tokens, drawn, until, run.budget.speeds, label, run.budget.note)
    if source is None:
        return regenerate(model, prompts, run.formatter.end_ids, file, job, config.regenerate_batch)
    if not run.state.finished(COMPARED):
        began, some = run.budget.elapsed(), [prompts[i] for i in spread(len(prompts), SAMPLE)]
        sample = CompletionFile(run.work / "compared.jsonl", answers_made_by(config, run.base, source))
        sample.known.clear()  # of an attempt before, perhaps of another source
        greedy = asked_once(source, some, sample, replace(job, sampled=None))
        if not greedy and (not some or processes.from_first(until.over())):
            return answered(prompts, file.known)
        report = check_answers_from(model, greedy, config.answers_from or "")
        run.state.finish(COMPARED, (run.budget.elapsed() - began) / 60, report | source.made_by())
        if drawn is None:
            file.add_new(greedy)
    return asked_once(source, prompts, file, job)


def asked_once(source: AnswerSource, prompts: list[list[int]], file: CompletionFile, job: AnswerJob) -> Answered:
    """Answers of the run's source, which the first process asks for all."""
    if processes.is_first():
        ask(source, prompts, file, job)
    file.known |= processes.from_first(file.known)
    return answered(prompts, file.known)


def own_answers(
    run: Run, model: PreTrainedModel, asked: TokenRows, count: int, name: str, until: Deadline = ENDLESS
) -> list[TokenRow]:
    """Rows with the model's own completions, as many as are done by `until`, perhaps none; `text` rows give it their
    beginning to continue.
    """
    prompts, file = asked.prompts(run.config.longest_prompt, count), kept_answers(run, name)
    finished, used = run.state.finished(f"regenerated_{name}"), run.work / f"answered-{name}.json"
    if finished:  # cut by time, perhaps: go on with the same answers
        prompts = [prompts[i] for i in json.loads(used.read_text(encoding="utf-8"))]
    began = run.budget.elapsed()
    found = answered(prompts, file.known)
    if not finished or len(found) < len(prompts):
        with answering(model):
            found = make_answers(run, model, prompts, file, ENDLESS if finished else until, name)
    if not finished:
        reached = {tuple(prompt) for prompt, _ in found}
        if processes.is_first():
            write_text(used, json.dumps([i for i, prompt in enumerate(prompts) if tuple(prompt) in reached]))
        finish_answers(run, name, found, len(prompts), run.budget.elapsed() - began)
    return [joined(prompt, up_to_end(answer, run.formatter.end_ids)) for prompt, answer in found]


def finish_answers(run: Run, name: str, found: Answered, count: int, seconds: float) -> None:
    """Says how many of `count` prompts were answered in the time for it, and records that they are."""
    if len(found) < count:
        instead = "" if found else ": references, if any, are taken instead"
        say(f"regenerating ({name}): {len(found)} of {count} prompts in the time for it{instead}")
    tokens = sum(len(answer) for _, answer in found)
    log = {"completions": len(found), "tokens": tokens, "seconds": round(seconds, 1)}
    run.state.finish(f"regenerated_{name}", seconds / 60, log)


def kept_answers(run: Run, name: str) -> CompletionFile:
    """The file that keeps the answers of this name."""
    file = run.config.answers or run.work / f"answers-{name}.jsonl"
    return file_of_answers(file, run.config, run.base, run.source)


def checked_rows(run: Run, drafter: DraftingModel) -> Sequence[TokenRow]:
    """The rows that validate a drafter while it trains: the target's own answers where it stays the same and they are
    there, else the references.
    """
    return (known_answers(run, run.val_prompts, run.config.val_rows, "val") if drafter.frozen else []) or run.val_rows


def known_answers(run: Run, asked: TokenRows, count: int, name: str) -> list[TokenRow]:
    """As `own_answers`, those that are there."""
    found = answered(asked.prompts(run.config.longest_prompt, count), kept_answers(run, name).known)
    return [joined(prompt, up_to_end(answer, run.formatter.end_ids)) for prompt, answer in found]


def finish_drafter(
    run: Run, drafter: DraftingModel, model: PreTrainedModel, vocabulary: Tensor | None
) -> dict[str, Any]:
    """Measures drafts on the target's own validation answers, as many as there is time for, and writes the adapter."""
    drafter.eval()
    work = last_work(run)
    measured = measure_loss(run, drafter, run.budget.until_done(TEXTS, work))
    work.pop(TEXTS)
    with drafter.drafter_lora(False):
        asked, until = (run.val_prompts, run.config.val_rows, "val"), run.budget.until_done(ANSWERS, work)
        # A target whose layers are gone is not asked again, whatever else wrote to the file of answers.
        there = known_answers(run, *asked) if drafter.frozen else []
        answers = there or own_answers(run, model, *asked, until)
    rows: Sequence[TokenRow] = answers or run.val_rows
    rest: dict[str, float] = {RANKED: len(rows), DESCRIBED: len(rows)}
    ranks = record_ranks(drafter, rows, vocabulary, until=run.budget.until_done(RANKED, rest))
    if len(ranks) < len(rows):
        say(f"measuring acceptance: {len(ranks)} of {len(rows)} answers in the time left")
    metrics = {
        "tau": reported_tau(ranks, drafter.gamma),
        "tau_rows": REPORTED_ROWS,
        "per_stream_accuracy": [round(float(a), 3) for a in per_stream_accuracy(ranks)],
        "val_answers": min(len(answers), len(ranks)),
        "val_ranked": len(ranks),
        "expected": expected(ranks, run.config.method, run.config.resolved, run.ns, len(drafter.decoder.layers)),
    }
    statistics = drafter.statistics(rows[: len(ranks)], vocabulary)
    metrics |= exact_match(run, answers) | measured
    return finish_drafting(run, drafter, vocabulary, ranks, metrics | statistics)
