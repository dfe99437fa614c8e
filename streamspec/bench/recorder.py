"""Runs the arms in turns on every prompt and records their answers. Comparing and computing come afterwards."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from streamspec.bench.arms import Arm
from streamspec.bench.figures import Pass
from streamspec.bench.prompts import BenchPrompt, Prompt
from streamspec.bench.quality import loops, score

if TYPE_CHECKING:
    from streamspec.runtime import Completion

PLAIN, SPECULATIVE = "plain", "speculative"
WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class Difference:
    """A speculative output that is not plain's. All token ids."""

    arm: Arm
    index: int  # of the prompt
    prompt: tuple[int, ...]
    plain: tuple[int, ...]
    other: tuple[int, ...]


@dataclass
class Recorder:
    """`arms`: plain first. Each list over prompts counts the turns of a conversation as prompts of their own."""

    arms: list[Arm]
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
        """Runs the first calls of each session, which allocate and pack, without measuring them."""
        for arm in self.arms:
            arm.answer(case.turns[0], min(self.limit, WARM_UP_TOKENS), case.tools)

    def run(self, case: BenchPrompt, repetition: int, number: int) -> None:
        """Runs all turns of a case, once. Scores and keeps the answers of the first repetition."""
        answers: list[str] = []
        for turn in range(len(case.turns)):
            prompt, session = case.prompt(turn, answers), self.arms[0].session
            if turn and len(session.encode(prompt, tools=case.tools)) >= session.context_length:
                print(
                    f"row {number + 1}: no room for turn {turn + 1} of {len(case.turns)}", file=sys.stderr, flush=True
                )
                return
            by_arm = self._run_arms(case, prompt, repetition, repetition + number)
            answers.append(by_arm[PLAIN].text)
            if repetition == 0:
                self._keep(case, prompt, by_arm, case.references if turn + 1 == len(case.turns) else [])
            self._compare(case, len(self.passes[PLAIN][repetition]) - 1, prompt, by_arm)

    def _run_arms(self, case: BenchPrompt, prompt: Prompt, repetition: int, shift: int) -> dict[str, Completion]:
        by_arm = {}
        start = shift % len(self.arms)
        for arm in self.arms[start:] + self.arms[:start]:
            answer = arm.answer(prompt, self.limit, case.tools)
            by_arm[arm.name] = answer
            passes = self.passes.setdefault(arm.name, [])
            if len(passes) <= repetition:
                passes.append([])
            passes[repetition].append(answer.stats)
        return by_arm

    def _keep(self, case: BenchPrompt, prompt: Prompt, by_arm: dict[str, Completion], references: list[str]) -> None:
        plain, speculative = by_arm[PLAIN], by_arm[SPECULATIVE]
        self.categories.append(case.category)
        self.looping.append(loops(plain.token_ids))
        self.texts.append([*self.arms[0].session.encode(prompt, tools=case.tools), *plain.token_ids])
        self.speculation = speculative.stats.speculation
        # Trees of other sizes write what the speculative side writes.
        scored = [c.name for c in self.arms if c.name == SPECULATIVE or not c.speculate]
        scores = {name: score(by_arm[name].text, references) for name in scored} if references else {}
        for name in self.scores:
            self.scores[name] += [scores[name]] if scores else []
        self.outputs.append(
            {
                "prompt": prompt,
                **{name: by_arm[name].text for name in scored},
                "token_ids": plain.token_ids,
                "references": references,
                "scores": scores,
                "tokens_per_step": speculative.stats.step_tokens / max(1, speculative.stats.steps),
            }
        )

    def _compare(self, case: BenchPrompt, index: int, prompt: Prompt, by_arm: dict[str, Completion]) -> None:
        plain = by_arm[PLAIN].token_ids
        for arm in self.arms:
            other = by_arm[arm.name].token_ids
            if arm.speculate and other != plain:
                ids = tuple(arm.session.encode(prompt, tools=case.tools))
                self.differences[Difference(arm, index, ids, tuple(plain), tuple(other))] = None
