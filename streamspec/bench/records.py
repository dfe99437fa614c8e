"""Lets the contenders take turns on every prompt and keeps what came out. Judging and reckoning come afterwards."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

from streamspec.bench.arms import Arm, ArmOutput
from streamspec.bench.prompts import BenchPrompt, Prompt
from streamspec.bench.quality import loops, score
from streamspec.bench.report import Pass

PLAIN, SPECULATIVE = "plain", "speculative"
WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class Difference:
    """A speculative output that is not plain's. All token ids."""

    contender: Arm
    index: int  # of the prompt
    prompt: tuple[int, ...]
    plain: tuple[int, ...]
    other: tuple[int, ...]


@dataclass
class Recorder:
    """`contenders`: plain first. Each list over prompts counts the turns of a conversation as prompts of their own."""

    contenders: list[Arm]
    limit: int
    passes: dict[str, list[Pass]] = field(default_factory=dict)
    differences: dict[Difference, None] = field(default_factory=dict)  # a set that keeps its order
    scores: dict[str, list[dict[str, float]]] = field(default_factory=lambda: {PLAIN: [], SPECULATIVE: []})
    outputs: list[dict[str, Any]] = field(default_factory=list)
    texts: list[list[int]] = field(default_factory=list)  # prompt and plain answer, token ids
    categories: list[str | None] = field(default_factory=list)
    looping: list[bool] = field(default_factory=list)  # of plain answers
    speculation: str = ""

    def warm_up(self, case: BenchPrompt) -> None:
        """The first calls of a session allocate and pack; nobody is measured on them."""
        for contender in self.contenders:
            contender.answer(case.turns[0], min(self.limit, WARM_UP_TOKENS))

    def run(self, case: BenchPrompt, repetition: int, number: int) -> None:
        """All turns of a case, once. The first repetition is also scored and kept."""
        answers: list[str] = []
        for turn in range(len(case.turns)):
            prompt, engine = case.prompt(turn, answers), self.contenders[0].session.engine
            if turn and len(self.contenders[0].session.encode(prompt)) >= engine.context_length:
                print(
                    f"row {number + 1}: no room for turn {turn + 1} of {len(case.turns)}", file=sys.stderr, flush=True
                )
                return
            given = self._take_turns(prompt, repetition, repetition + number)
            answers.append(given[PLAIN].text)
            if repetition == 0:
                self._keep(case, prompt, given, case.references if turn + 1 == len(case.turns) else [])
            self._compare(len(self.passes[PLAIN][repetition]) - 1, prompt, given)

    def _take_turns(self, prompt: Prompt, repetition: int, shift: int) -> dict[str, ArmOutput]:
        given = {}
        start = shift % len(self.contenders)
        for contender in self.contenders[start:] + self.contenders[:start]:
            answer = contender.answer(prompt, self.limit)
            given[contender.name] = answer
            passes = self.passes.setdefault(contender.name, [])
            if len(passes) <= repetition:
                passes.append([])
            passes[repetition].append(answer.measure)
        return given

    def _keep(self, case: BenchPrompt, prompt: Prompt, given: dict[str, ArmOutput], references: list[str]) -> None:
        plain, speculative = given[PLAIN], given[SPECULATIVE]
        self.categories.append(case.category)
        self.looping.append(loops(plain.token_ids))
        self.texts.append([*self.contenders[0].session.encode(prompt), *plain.token_ids])
        self.speculation = speculative.speculation
        # Trees of other sizes write what the speculative side writes.
        kept = [c.name for c in self.contenders if c.name == SPECULATIVE or not c.speculate]
        scores = {name: score(given[name].text, references) for name in kept} if references else {}
        for name in self.scores:
            self.scores[name] += [scores[name]] if scores else []
        measure = speculative.measure
        self.outputs.append(
            {
                "prompt": prompt,
                **{name: given[name].text for name in kept},
                "token_ids": plain.token_ids,
                "references": references,
                "scores": scores,
                "tokens_per_step": measure.step_tokens / max(1, measure.steps),
            }
        )

    def _compare(self, index: int, prompt: Prompt, given: dict[str, ArmOutput]) -> None:
        plain = given[PLAIN].token_ids
        for contender in self.contenders:
            other = given[contender.name].token_ids
            if contender.speculate and other != plain:
                ids = tuple(contender.session.encode(prompt))
                self.differences[Difference(contender, index, ids, tuple(plain), tuple(other))] = None
