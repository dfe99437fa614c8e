"""Those who take part in a measurement: one way of decoding each, on a loaded session.

The only module of bench that touches the runtime's sessions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from streamspec.bench.report import Measure
from streamspec.runtime.decoding.model_runner import Pruning
from streamspec.runtime.decoding.sampling import GREEDY, Sampling
from streamspec.runtime.decoding_policy import AdaptiveState

if TYPE_CHECKING:
    from streamspec.runtime import Session

SAMPLE_ROWS = 2000  # rows that the wide / narrow comparison covers, where the prompts have as many
MARGIN_FACTOR = 2.0  # both of the two best logits may be off, in opposite directions


@dataclass(frozen=True)
class ArmOutput:
    text: str
    token_ids: list[int]
    measure: Measure
    speculation: str
    drafted: list[bool]


@dataclass(frozen=True, eq=False)
class Arm:
    """`rows`, `pruning`: forced upon the session instead of its own choice; None for the latter is the session's own.

    What a session learns of its drafts is the contender's own: no side profits or suffers from another's.
    """

    name: str
    session: Session
    speculate: bool
    sampling: Sampling = GREEDY
    rows: int | None = None
    pruning: Pruning | None = None
    learnt: list[AdaptiveState] = field(default_factory=list)  # once it has answered

    def answer(self, prompt: Any, limit: int) -> ArmOutput:
        self.session.forget()  # nobody profits from what another has read
        with self._forced():
            done = self.session.generate(prompt, max_new_tokens=limit, speculate=self.speculate, sampling=self.sampling)
        stats = done.stats
        measure = Measure(
            stats.new_tokens,
            stats.steps,
            stats.step_tokens,
            stats.plain_steps,
            stats.prefill_seconds,
            stats.decode_seconds,
            stats.graph_seconds,
        )
        return ArmOutput(done.text, list(done.token_ids), measure, stats.speculation, list(done.drafted))

    @contextmanager
    def _forced(self) -> Iterator[None]:
        session = self.session
        before = session.rows, session.calibration, session.pruning, session.learnt
        if self.rows is not None:  # without a calibration the session does not second-guess the rows while it runs
            session.rows, session.calibration = self.rows, None
        session.pruning = self.pruning or session.pruning
        if not self.learnt:
            self.learnt.append(AdaptiveState(session.calibration))
        session.learnt = self.learnt[0]
        try:
            yield
        finally:
            session.rows, session.calibration, session.pruning, session.learnt = before


class SessionTieBreaker:
    """Answers the questions of `agreement.judge` with a session. `texts`: token sequences to measure the tolerance
    on.
    """

    def __init__(self, contender: Arm, texts: list[list[int]], measured: float | None = None) -> None:
        self.contender, self.texts = contender, texts
        self.measured = measured  # the tolerance, once it is known

    def margin(self, prompt: Sequence[int], prefix: Sequence[int]) -> float:
        if not self.contender.sampling.plain_argmax:
            return math.inf  # rows that agree to the last bit draw alike: nothing else is excused
        ids = [*prompt, *prefix]
        logits = self.contender.session.score(ids, len(ids) - 1)[0]
        second, best = np.partition(logits, -2)[-2:]
        return float(best - second)

    def tolerance(self) -> float:
        if self.measured is None:
            self.measured = MARGIN_FACTOR * wide_narrow_difference(self.contender.session, self.texts)
        return self.measured

    def speculate(self, prompt: Sequence[int], prefix: Sequence[int], limit: int) -> list[int]:
        return self.contender.answer([*prompt, *prefix], limit).token_ids


def wide_narrow_difference(session: Session, texts: Sequence[Sequence[int]], rows: int = SAMPLE_ROWS) -> float:
    """Largest difference of any logit between rows computed together and one by one, over `rows` rows of `texts`."""
    engine: Any = session.engine
    one = np.zeros((1, 1), dtype=np.float32)
    worst, seen = 0.0, 0
    for text in texts:
        if seen >= rows:
            break
        ids = list(text)[: rows - seen]
        wide = session.score(ids)
        engine.reset()
        for row, token in enumerate(ids):
            narrow = engine.forward([token], [0], one)[0]
            engine.commit((0,))
            worst = max(worst, float(np.abs(narrow - wide[row]).max()))
        seen += len(ids)
    return worst
