"""One bundle on one provider: its arms answer a prompt, and every answer is compared with the plain one."""

from __future__ import annotations

import math
import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from streamspec.bench.arms import Arm, SessionTieBreaker
from streamspec.bench.tie_breaker import compare_outputs, first_difference
from streamspec.bundle.files import read_manifest
from streamspec.runtime import Completion, LoadOptions, Sampling, Session, load
from streamspec.runtime.draft_sources.registry import SOURCES, chosen
from streamspec.runtime.hardware.providers import NATIVE_CPU
from tests.campaign.arms import ARMS, CHOSEN, ROWS, SECOND, SHARED, TOGETHER, ArmKind, bare
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
        self._arms: dict[tuple[str, int, int], Arm] = {}  # what an arm has learned is its own
        self._tolerance: float | None = None
        self.kinds = {name: kind for name, kind in ARMS.items() if self._fits(kind)}
        self._sessions = {name: self._session(kind) for name, kind in self.kinds.items()}
        self._sharing = self._sharing_sessions()

    def _sharing_sessions(self) -> list[Session]:
        """Those whose answers share calls; none of a bundle whose calls cannot be shared."""
        one = self.load(tree=ROWS[0], batch=TOGETHER) if self.provider == NATIVE_CPU.name else None
        return [] if one is None or one.batch < 2 else [one, *(one.another() for _ in range(TOGETHER - 1))]

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
        return (kind.options != SECOND or self.second is not None) and kind.fits(self.manifest)

    def _session(self, kind: ArmKind) -> Session:
        """Opens the session of an arm, over the same weights where no option of `load` is its own."""
        options = kind.options | ({"draft": self.second} if kind.options == SECOND else {})
        sources = dict.fromkeys(kind.sources, True)
        if options or kind.data:
            return self.load(**{"tree": ROWS[0]} | options | sources)
        return self.drafting(self._plain.another(), kind)

    def drafting(self, session: Session, kind: ArmKind) -> Session:
        """Has a session draft as an arm does whose `options` are none of its own."""
        sources = chosen(LoadOptions(**OFF | dict.fromkeys(kind.sources, True)))
        if kind.oracle:
            sources = (self.oracle.source,)
        session.policy = replace(session.policy, rows=ROWS[0], sources=sources)
        return session

    def _arm(self, name: str, number: int, sampling: Sampling, place: int | None = None) -> Arm:
        """`place`: among the sessions that share calls, None for the arm's own one."""
        kind = self.kinds[name]
        count = number if place is None else number // TOGETHER
        rows = None if kind.options.get("tree") == "auto" else kind.rows or ROWS[count % len(ROWS)]
        label, session = name, self._sessions[name]
        if place is not None:
            label, session = name + SHARED, self.drafting(self._sharing[place], kind)
        made = self._arms.setdefault(
            (label, rows or 0, place or 0), Arm(label, session, True, sampling, rows, kind.pruning)
        )
        made.sampling = sampling
        return made

    def _asked(self, number: int) -> list[tuple[str, bool]]:
        """The arms that answer a prompt, and whether it is together with the others of its turn. Where answers can
        share calls and nothing else than texts drafts, one prompt in a turn is answered alone."""
        turn, place = divmod(number, TOGETHER)
        thin = bool(self._sharing) and bare(self.manifest) and place != turn % TOGETHER
        alone = [] if thin else [(name, False) for name in self.kinds]
        ends = self._sharing and place == TOGETHER - 1
        return alone + [(name, True) for name, kind in self.kinds.items() if ends and kind.shareable]

    def run(self, prompts: list[str], number: int, kept: Kept, ends: float = math.inf) -> None:
        """Answers the prompt of this number in every way, and counts; at `ends`, of the monotonic clock, the next call
        goes on with the next arm. What is done is kept after each."""
        state, turn = kept.side(self.name), number // TOGETHER
        sampling = CHOSEN[turn % len(CHOSEN)]
        if sampling.random:
            sampling = replace(sampling, seed=turn)
        kept_plain = state.get("plain", {}) if state.get("chosen") == str(sampling) else {}
        answers = {int(n): ids for n, ids in kept_plain.items() if int(n) // TOGETHER == turn}
        done = state.setdefault("done", [])
        asked = case(self._plain, prompts, number)
        if number not in answers:
            answers[number] = Arm(PLAIN, self._plain, False, sampling).answer(asked.ids, asked.limit).token_ids
            state["plain"], state["chosen"] = {str(n): ids for n, ids in answers.items()}, str(sampling)
            self.add(kept, PLAIN, sampling, asked, answers[number])
            kept.write()
        for name, shared in self._asked(number):
            label = name + SHARED * shared
            if label in done:
                continue
            if time.monotonic() >= ends:
                return
            numbers = sorted(answers) if shared else [number]
            known = [Compared(case(self._plain, prompts, n), answers[n]) for n in numbers]
            arms = [self._arm(name, number, sampling, place if shared else None) for place in range(len(known))]
            self._compare(kept, number, arms, known)
            done.append(label)
            kept.write()
        state["done"] = []
        state["next"] += 1

    def _compare(self, kept: Kept, number: int, arms: list[Arm], known: list[Compared]) -> None:
        """Answers these prompts at once, each by its arm, and counts."""
        self.oracle.know(number, *((one.case.ids, one.plain) for one in known))
        with ThreadPoolExecutor(len(arms)) as pool:
            answers = list(pool.map(lambda arm, one: arm.answer(one.case.ids, one.case.limit), arms, known))
        for arm, one, answer in zip(arms, known, answers, strict=True):
            self.count(kept, arm, number, one, answer)

    def add(
        self, kept: Kept, arm: str, sampling: Sampling, asked: Case, plain: list[int], **counts: int
    ) -> tuple[str, ...]:
        """Counts an answer, and returns where."""
        bundle, provider, at = self.name.split(" | ")
        key = (bundle, provider, arm, "sampled" if sampling.random else "greedy", at)
        kept.add(key, {"prompts": 1, "tokens": len(plain)} | counts, len(asked.ids))
        return key

    def count(self, kept: Kept, arm: Arm, number: int, one: Compared, answer: Completion) -> None:
        """Compares an answer with the plain one; a mismatch is printed and kept."""
        ids, plain, other = one.case.ids, one.plain, answer.token_ids
        tie_breaker = SessionTieBreaker(arm, [[*ids, *plain]], self._tolerance)
        agreement = compare_outputs(ids, plain, other, tie_breaker)
        self._tolerance = tie_breaker.measured
        found = {"accepted": sum(answer.drafted), "shared_steps": answer.stats.shared_steps}
        found |= {"near_ties": agreement.near_ties, "mismatches": agreement.mismatches}
        key = self.add(kept, arm.name, arm.sampling, one.case, plain, **found)
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
