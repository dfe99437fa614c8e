"""The last validation: the time that it takes, measured on a few rows where time is limited and kept free by the
stages; next-token loss and exact match.

The time is tested by tests/adapters/runs/test_budget.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from streamspec.adapters.answers.completion_file import up_to_end
from streamspec.adapters.answers.self_distillation import answer_batch
from streamspec.adapters.checks import without_answers
from streamspec.adapters.dataset.token_rows import TokenRow
from streamspec.adapters.distributed import processes
from streamspec.adapters.distributed.processes import say
from streamspec.adapters.drafters.acceptance_eval import evaluating, record_ranks, validation_loss
from streamspec.adapters.drafters.drafting_model import DraftingModel, TargetModel
from streamspec.adapters.runs.budget import ANSWERS, DESCRIBED, MOST_KEPT, RANKED, TEXTS, Deadline
from streamspec.adapters.runs.stage_plan import LEARNING
from streamspec.adapters.training_run import Run

VALIDATION_ANSWERS = "regenerated_val"  # part of a run
PER_MINUTE = 2  # rows measured for each minute of the budget
FEWEST, MOST = 2, 8  # of them
PROBE_TOKENS = 8  # of an answer whose time is measured


def measured_rows(run: Run) -> tuple[int, Sequence[TokenRow]]:
    """The rows to measure the speed of the last validation on, and how many each process takes; none where time is not
    limited or nearly over.
    """
    minutes = run.config.max_minutes
    late = processes.from_first(run.budget.until(1 - MOST_KEPT).over())
    each = 0 if minutes is None or late else min(max(int(PER_MINUTE * minutes), FEWEST), MOST)
    return each, run.val_rows[: each * processes.count()]


def measure(run: Run, name: str, count: int, work: Callable[[], object]) -> None:
    """Measures how long `count` units of the `work` of this name take."""
    began = run.budget.now()
    work()
    run.budget.speeds.measured(name, count, run.budget.now() - began)


def measure_texts(run: Run, model: TargetModel) -> None:
    """Measures how long the loss of a validation text takes, where that is not known."""
    each, rows = measured_rows(run)
    if rows and run.budget.speeds.cost(TEXTS, 1) is None:
        with evaluating(model):
            measure(run, TEXTS, len(rows), lambda: validation_loss(model, rows, each))


def measure_drafter(run: Run, drafter: DraftingModel, vocabulary: Tensor | None) -> None:
    """Measures how long the parts of the last validation take, those that are not known."""
    each, rows = measured_rows(run)
    if not rows:
        return
    measure_texts(run, drafter)
    with evaluating(drafter):
        if run.budget.speeds.cost(RANKED, 1) is None:
            measure(run, RANKED, len(rows), lambda: record_ranks(drafter, rows, vocabulary, each))
            measure(run, DESCRIBED, each, lambda: drafter.statistics(rows[:each], vocabulary))
        if run.budget.speeds.cost(ANSWERS, 1) is None and not run.state.finished(VALIDATION_ANSWERS):
            measure_answers(run, drafter, each)


def measure_answers(run: Run, drafter: DraftingModel, count: int) -> None:
    """Measures a few tokens of some answers; an answer is then taken to be as long as the references are."""
    config, ends = run.config, run.formatter.end_ids
    prompts = run.val_prompts.prompts(config.longest_prompt, count)
    seconds = []
    with drafter.drafter_lora(False):
        for tokens in (1, 1 + PROBE_TOKENS):
            began = run.budget.now()
            answer_batch(drafter.model, prompts, ends, tokens)
            seconds.append(run.budget.now() - began)
    length = sum(sum(row.loss_mask) for row in run.val_rows) / len(run.val_rows)
    each = max(seconds[1] - seconds[0], 0.0) / PROBE_TOKENS
    made = len(prompts) * processes.count()
    run.budget.speeds.measured(ANSWERS, made, seconds[0] + each * min(length, config.max_new_tokens))


def learning_seconds(run: Run, model: TargetModel, kind: str, unread: float = 1.0) -> float | None:
    """Seconds in which a text is learnt from, by what the passes of this `kind` over one were measured to take; None
    where they were not. `unread`: the share of texts that the target has still to pass over.
    """
    read, passed = run.budget.speeds.cost(TEXTS, 1), run.budget.speeds.cost(kind, 1)
    if passed is None:
        return None
    unlearnt = min(read or 0.0, passed) if model.frozen else 0.0  # the way back ends at a frozen target
    return unread * unlearnt + LEARNING * (passed - unlearnt)


def last_work(run: Run) -> dict[str, float]:
    """The last validation's work by kind: texts, answers to make, answers to rank and describe."""
    work: dict[str, float] = {TEXTS: len(run.val_rows)}
    if run.config.drafter.model is None:
        return work
    prompts = min(run.config.val_rows, len(run.val_prompts))
    known = run.state.finished(VALIDATION_ANSWERS)
    return work | {ANSWERS: 0 if known else prompts, RANKED: prompts, DESCRIBED: prompts}


def stage_end(run: Run, share: float = 1.0) -> Deadline:
    """The moment when `share` of the run's time is over, but for the time that the last validation needs."""
    return run.budget.until(share, run.budget.reserve(last_work(run)))


def measure_loss(run: Run, model: TargetModel, until: Deadline) -> dict[str, Any]:
    """`val_loss`, and `val_texts`, the number of validation texts that it comes from."""
    loss, texts = validation_loss(model, run.val_rows, until=until)
    if texts < len(run.val_rows):
        say(f"validation loss: {texts} of {len(run.val_rows)} texts in the time left")
    return {"val_loss": round(loss, 4), "val_texts": texts}


def exact_match(run: Run, answers: Sequence[TokenRow]) -> dict[str, Any]:
    """`val_em`, the share of the target's greedy `answers` that equal a reference but for white space, and
    `val_em_answers`, how many were compared; nothing where none has a reference, as rows of text have none.
    """
    ends, tokenizer = run.formatter.end_ids, run.formatter.tokenizer

    def words(ids: list[int]) -> list[str]:
        return str(tokenizer.decode([token for token in up_to_end(ids, ends) if token not in ends])).split()

    said = {tuple(row.input_ids[: row.loss_mask.count(False)]): row for row in answers}
    references: dict[tuple[int, ...], list[list[str]]] = {}
    for index in range(0 if run.config.answer_temperature else len(run.val_prompts)):
        opening = run.val_prompts.opening(index)
        if tuple(opening) not in said or without_answers([row := run.val_prompts[index]]):
            continue
        if not row.loss_mask[len(opening) - 1]:
            references.setdefault(tuple(opening), []).append(words(row.input_ids[len(opening) :]))
    if not references:
        return {}
    equal = [words(said[prompt].input_ids[len(prompt) :]) in known for prompt, known in references.items()]
    return {"val_em": round(sum(equal) / len(equal), 4), "val_em_answers": len(equal)}
