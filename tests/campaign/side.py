"""One bundle on one provider: its arms answer a prompt, and every answer is compared with the plain one."""

from __future__ import annotations

import math
import re
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from streamspec.bench.arms import Arm, SessionTieBreaker
from streamspec.bench.tie_breaker import compare_outputs, first_difference
from streamspec.bundle.files import read_manifest
from streamspec.runtime import LoadOptions, Sampling, Session, load
from streamspec.runtime.draft_sources.registry import SOURCES, chosen
from tests.campaign.arms import ARMS, CHOSEN, ROWS, SECOND, TOGETHER, ArmKind
from tests.campaign.kept import PLAIN, Kept, revision
from tests.campaign.oracle import Oracle
from tests.campaign.prompts import CONTEXT, Case, case

OFF: dict[str, Any] = dict.fromkeys(SOURCES, False)


@dataclass(frozen=True)
class Compared:
    """A prompt and its plain answer."""

    case: Case
    plain: list[int]


def side_name(bundle: Path, provider: str) -> str:
    """Names a side in the file of the campaign: bundle, provider, revision."""
    return f"{bundle.name} | {provider} | {revision(bundle)}"


class Side:
    """`name`: in the file of the campaign."""

    def __init__(self, bundle: Path, provider: str, cache: Path) -> None:
        self.bundle, self.provider, self.cache = bundle, provider, cache
        self.name, self.manifest = side_name(bundle, provider), read_manifest(bundle)
        self.oracle = Oracle(self.manifest.model.vocab_size)
        self._plain = self.load(tree="plain")
        self._sessions: dict[str, Session] = {}
        self._arms: dict[tuple[str, int], Arm] = {}  # by name and rows: what an arm has learned is its own
        self._tolerance: float | None = None
        self.kinds = {name: kind for name, kind in ARMS.items() if self._fits(kind)}
        for name in self.kinds:
            self._sessions[name] = self._session(name)
        for name in [name for name, kind in self.kinds.items() if kind.shared and self._sessions[name].batch < 2]:
            del self.kinds[name], self._sessions[name]  # a bundle whose calls cannot be shared

    def load(self, **options: Any) -> Session:
        given = OFF | {"threads": 1, "context": CONTEXT, "cache_dir": self.cache, "provider": self.provider} | options
        return load(self.bundle, prepare_grammar=False, **given)

    @property
    def second(self) -> Path | None:
        """The same bundle in another precision, which may draft for it."""
        others = [
            self.bundle.with_name(re.sub("-(int8|int4|fp32)$", f"-{p}", self.bundle.name)) for p in ("int4", "int8")
        ]
        return next((path for path in others if path != self.bundle and path.exists()), None)

    def _fits(self, kind: ArmKind) -> bool:
        there = kind.options != SECOND or self.second is not None
        return there and kind.only in ("", self.provider) and kind.fits(self.manifest)

    def _session(self, name: str) -> Session:
        """Opens the session of an arm, over the same weights where no option of `load` is its own."""
        kind = self.kinds[name]
        options = kind.options | ({"draft": self.second} if kind.options == SECOND else {})
        sources = dict.fromkeys(kind.sources, True)
        if options or {"store", "past_answers"} & {*kind.sources}:
            return self.load(**{"tree": ROWS[0]} | options | sources)
        return self.drafting(self._plain.another(), kind)

    def drafting(self, session: Session, kind: ArmKind) -> Session:
        """Has a session draft as an arm does whose `options` are none of its own."""
        sources = chosen(LoadOptions(**OFF | dict.fromkeys(kind.sources, True)))
        if kind.oracle:
            sources = (self.oracle.source,)
        session.policy = replace(session.policy, rows=ROWS[0], sources=sources)
        return session

    def _arm(self, name: str, number: int, sampling: Sampling) -> Arm:
        kind = self.kinds[name]
        rows = None if kind.options.get("tree") == "auto" else kind.rows or ROWS[number % len(ROWS)]
        made = self._arms.setdefault(
            (name, rows or 0), Arm(name, self._sessions[name], True, sampling, rows, kind.pruning)
        )
        made.sampling = sampling
        return made

    def run(self, prompts: list[str], number: int, kept: Kept, ends: float = math.inf) -> None:
        """Answers the prompt of this number in every way, and counts; at `ends`, of the monotonic clock, the next call
        goes on with the next arm. What is done is kept after each."""
        state, turn = kept.side(self.name), number // TOGETHER
        sampling = CHOSEN[turn % len(CHOSEN)]
        if sampling.random:
            sampling = replace(sampling, seed=turn)
        answers = {int(n): ids for n, ids in state.get("plain", {}).items() if int(n) // TOGETHER == turn}
        done = state.setdefault("done", [])
        asked = case(self._plain, prompts, number)
        if number not in answers:
            answers[number] = Arm(PLAIN, self._plain, False, sampling).answer(asked.ids, asked.limit).token_ids
            state["plain"] = {str(n): ids for n, ids in answers.items()}
            self.add(kept, PLAIN, sampling, asked, answers[number])
            kept.write()
        for name in [name for name in self.kinds if name not in done]:
            if time.monotonic() >= ends:
                return
            kind = self.kinds[name]
            if not kind.shared:
                arm = self._arm(name, number, sampling)
                self.oracle.know(asked.ids, answers[number], number)
                answer = arm.answer(asked.ids, asked.limit)
                one = Compared(asked, answers[number])
                self.count(kept, arm, number, one, answer.token_ids, sum(answer.drafted))
            elif number % TOGETHER == TOGETHER - 1:
                both = [Compared(case(self._plain, prompts, n), ids) for n, ids in sorted(answers.items())]
                self._run_together(kept, self._arm(name, number, sampling), number, both)
            done.append(name)
            kept.write()
        state["done"] = []
        state["next"] += 1

    def add(
        self, kept: Kept, arm: str, sampling: Sampling, asked: Case, plain: list[int], **counts: int
    ) -> tuple[str, ...]:
        """Counts an answer, and returns where."""
        bundle, provider, at = self.name.split(" | ")
        key = (bundle, provider, arm, "sampled" if sampling.random else "greedy", at)
        kept.add(key, {"prompts": 1, "tokens": len(plain)} | counts, len(asked.ids))
        return key

    def _run_together(self, kept: Kept, arm: Arm, number: int, both: list[Compared]) -> None:
        """Answers the recent prompts at once."""
        limit = max(one.case.limit for one in both)
        arm.session.forget()
        answers = arm.session.generate([one.case.ids for one in both], max_new_tokens=limit, sampling=arm.sampling)
        for one, answer in zip(both, answers, strict=True):
            cut = answer.token_ids[: one.case.limit]  # plain ones had limits of their own
            self.count(kept, arm, number, one, cut, sum(answer.drafted[: len(cut)]), answer.stats.shared_steps)

    def count(
        self, kept: Kept, arm: Arm, number: int, one: Compared, other: list[int], accepted: int, shared: int = 0
    ) -> None:
        """Compares an answer with the plain one; a mismatch is printed and kept."""
        ids, plain = one.case.ids, one.plain
        tie_breaker = SessionTieBreaker(arm, [[*ids, *plain]], self._tolerance)
        agreement = compare_outputs(ids, plain, other, tie_breaker)
        self._tolerance = tie_breaker.measured
        found = {"near_ties": agreement.near_ties, "mismatches": agreement.mismatches}
        key = self.add(kept, arm.name, arm.sampling, one.case, plain, accepted=accepted, shared_steps=shared, **found)
        if agreement.mismatches:
            at = first_difference(plain, other)
            fault = {
                "arm": key,
                "rows": arm.rows,
                "number": number,
                "sampling": str(arm.sampling),
                "position": at,
                "margins": agreement.margins,
                "prompt": ids,
                "plain": plain,
                "other": other,
            }
            kept.found.append(fault)
            print(f"MISMATCH: {fault}", flush=True)
