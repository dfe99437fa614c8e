"""Asks another program for the target's answers, several at once, and compares a sample of them with the target.

Tests: tests/adapters/answers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from transformers import PreTrainedModel

from streamspec.adapters.answers.bundle import BundleAnswers
from streamspec.adapters.answers.completion_file import Answered, CompletionFile, answered
from streamspec.adapters.answers.openai_server import OpenAiServer, is_server
from streamspec.adapters.answers.request import AnswerJob, AnswerRequest, AnswerSource
from streamspec.adapters.runs.budget import ANSWERS
from streamspec.errors import ConfigError, DataError
from streamspec.progress import counted

SAMPLE = 16  # answers that are compared with the target
# Share of their tokens that are the target's own. Of SmolLM2 135M in bf16: itself in other batches 0.98, its bundle in
# int8 0.96, in int4 0.86; in int8 with a LoRA for another task 0.79.
FEWEST_EQUAL = 0.82
SIGN_OF_LIFE = 1.0  # seconds between two looks at the time while answers are awaited


def open_source(
    place: str | None, tokenizer: Any, ends: Sequence[int], threads: int, load: Callable[..., Any] | None
) -> AnswerSource | None:
    """The source at `place`, a bundle's folder or a server's address; None for none. `ends`: tokens that end its
    answers. `load`: opens bundles.
    """
    if place is None:
        return None
    if is_server(place):
        return OpenAiServer(place, tokenizer, ends)
    if load is None:
        raise ConfigError(
            f"answers_from = {place} without the runtime",
            "a function that opens bundles",
            "call streamspec.train, which passes it",
        )
    return BundleAnswers(Path(place), load, threads)


def ask(source: AnswerSource, prompts: list[list[int]], file: CompletionFile, job: AnswerJob) -> Answered:
    """As `self_distillation.regenerate`, one prompt a request: in a random order, always the same, each answer kept as
    it comes. Prompts whose answers have no token ids are left out.
    """
    order = [list(p) for p in dict.fromkeys(map(tuple, prompts))]
    random.Random(0).shuffle(order)
    left = [job.request(p, i) for i, p in enumerate(order) if tuple(p) not in file.known][::-1]  # the last goes first
    began, done = job.until.now(), 0
    pending: dict[Future[list[int] | None], list[int]] = {}
    try:
        with counted(job.label, len(left)) as add:
            while (left or pending) and not job.until.over():
                each = (job.until.now() - began) * source.parallel / done if done else 0.0
                if job.until.over(each):
                    left = []
                while left and len(pending) < source.parallel:
                    request = left.pop()
                    pending[_begun(source, request)] = request.prompt
                finished = wait(pending, SIGN_OF_LIFE, FIRST_COMPLETED).done
                for future in finished:
                    prompt, answer = pending.pop(future), future.result()
                    if answer:
                        file.add([prompt], [answer])
                done += len(finished)
                add(len(finished))
                job.note()
    finally:
        if pending:
            source.close()
            wait(pending, SIGN_OF_LIFE)  # a bundle's end with their step, a server's may go on
    if done:
        job.speeds.measured(ANSWERS, done, job.until.now() - began)
    return answered(prompts, file.known)


def _begun(source: AnswerSource, request: AnswerRequest) -> Future[list[int] | None]:
    """A request in a thread that does not keep the process from ending, as those of an executor do."""
    future: Future[list[int] | None] = Future()

    def work() -> None:
        try:
            future.set_result(source.answer(request))
        except BaseException as error:
            future.set_exception(error)

    Thread(target=work, daemon=True, name="streamspec-answer").start()
    return future


@torch.no_grad()
def equal_tokens(model: PreTrainedModel, answers: Answered) -> tuple[int, int]:
    """Counts the tokens of greedy answers that are the target's own best after the tokens before them, and all of them.

    So one token where two were nearly equal counts once, though all that follows differs.
    """
    device, head = model.get_input_embeddings().weight.device, model.get_output_embeddings()
    equal = total = 0
    for prompt, answer in answers:
        ids = torch.tensor([prompt + answer], device=device)
        hidden = model.base_model(input_ids=ids).last_hidden_state[0, len(prompt) - 1 : -1]
        equal += int((head(hidden).argmax(-1) == ids[0, len(prompt) :]).sum())
        total += len(answer)
    return equal, total


def check_answers_from(model: PreTrainedModel, answers: Answered, name: str) -> dict[str, Any]:
    """Compares a sample of greedy answers of the source `name` with the target; returns the report of it. Raises
    DataError where they are another model's.
    """
    equal, total = equal_tokens(model, answers)
    if not total or equal < FEWEST_EQUAL * total:
        raise DataError(
            f"--answers-from {name}: {equal} of {total} tokens of {len(answers)} answers are the target's own",
            f"at least {FEWEST_EQUAL:.0%}",
            "give the target's own bundle or server: the same base, adapter and weights",
        )
    return {"compared": len(answers), "tokens": total, "equal": round(equal / total, 4)}
