"""Long contexts: the beginning of a book, read once, plainly, and saved; every answer goes on from what was saved.

A quarter of these prompts each ends at an eighth, a quarter and half of the context, and before its limit, which the
answer then meets. Reading goes on where it ended, too.
"""

from __future__ import annotations

import gzip
import json
import re
import time
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

from streamspec.bench.arms import Arm
from streamspec.runtime import Completion, Sampling
from streamspec.runtime.sampling.sampling_params import GREEDY
from tests.campaign.arms import ROWS
from tests.campaign.kept import PLAIN, Kept
from tests.campaign.prompts import Case
from tests.campaign.side import Compared, Side

BOOKS = Path("books", "train.jsonl.gz")
SHARES = (8, 4, 2, 1)  # of the context, in turn: an eighth, a quarter ..
ROOM, ANSWER = 100, 128  # tokens before that, and of an answer
PIECE = 512  # tokens read between looks at the clock
CHARACTERS = 8  # of a token, at most on average
CHOSEN = (GREEDY, Sampling(0.8, top_p=0.95), Sampling(1.0, min_p=0.05))  # of the answers


@dataclass(eq=False)
class SavedArm(Arm):
    """An arm that answers a prompt whose keys and values are in the file `saved`."""

    saved: Path = Path()

    def answer(self, prompt: Any, limit: int) -> Completion:
        self.session.restore(self.saved)
        policy = self._policy()
        with self.session.decode_with(policy, self.adaptive(policy)):
            return self.session.generate(prompt, max_new_tokens=limit, speculate=self.speculate, sampling=self.sampling)


@cache
def _book(file: Path, number: int) -> str:
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        return str(json.loads(next(islice(lines, number, None)))["text"])


def run_deep(side: Side, file: Path, kept: Kept, ends: float) -> None:
    """Goes on with the deep prompt that is next, until it is done or the monotonic clock is at `ends`."""
    state = kept.side(side.name)
    number, done = state["deep"], state.setdefault("deep_done", [])
    session = side.load(tree="plain", context=None)
    length = session.context_length // SHARES[number % len(SHARES)] - ROOM
    ids = session.encode(_book(file, number)[: CHARACTERS * length])[:length]
    saved = kept.path.with_suffix("") / (re.sub("[^a-z0-9.-]+", "-", side.name) + f"-{number}.session")
    saved.parent.mkdir(exist_ok=True)
    if saved.exists():
        session.restore(saved)
    read = before = session.reusable_tokens(ids)
    while read < len(ids) - 1 and time.monotonic() < ends:
        read = min(read + PIECE, len(ids) - 1)
        session.generate(ids[:read], max_new_tokens=1)
    if read != before:
        session.save(saved)
    if read < len(ids) - 1:
        return
    kinds = {name: one for name, one in side.kinds.items() if not (one.options or one.data)}
    arms = {name: side.drafting(session.another(), kind) for name, kind in kinds.items()}
    for turn, chosen in enumerate(CHOSEN):
        sampling = replace(chosen, seed=number) if chosen.random else chosen
        asked, answers = Case(ids, ANSWER), state.setdefault("deep_plain", {})
        if str(turn) not in answers:
            plain = SavedArm(PLAIN, session, False, sampling, saved=saved).answer(asked.ids, asked.limit).token_ids
            answers[str(turn)] = plain
            side.add(kept, PLAIN, sampling, asked, plain)
            kept.write()
        for name in [name for name in kinds if f"{name} {turn}" not in done]:
            if time.monotonic() >= ends:
                return
            rows = ROWS[number % len(ROWS)]
            arm = SavedArm(name, arms[name], True, sampling, rows, kinds[name].pruning, saved=saved)
            side.oracle.know(number, (asked.ids, answers[str(turn)]))
            side.count(kept, arm, number, Compared(asked, answers[str(turn)]), arm.answer(asked.ids, asked.limit))
            done.append(f"{name} {turn}")
            kept.write()
    state |= {"deep": number + 1, "deep_done": [], "deep_plain": {}}
    saved.unlink()
