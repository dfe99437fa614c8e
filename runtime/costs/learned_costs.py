"""Learns what steps cost by their rows from the times of the steps that answers take.

The time of a step with n rows and L tokens in the cache, with the drafter (D = 1; a second model's calls) or without it
(D = 0), is taken to be

    plain * (c[n] + D * price + (a + b * n + D * d) * L / 1024),    c[1] = 1,

where `plain` is what a plain step takes at the moment. An extended Kalman filter over (log plain, price, a, b, d, c[2],
c[3], ...), with clipped innovations (Masreliez and Martin 1977: what interferes with a step must not count by its
size), compares each step with those just before it: `plain` may move with every step, ratios move slowly. What is
assumed at first says how row counts hang together: a step of 8 rows says something about 7 and 16. Done for `EVERY`
steps at once: a model call drives all of it out of the caches, and the first update takes as long as six others.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from streamspec.draft_tree import BOTH
from streamspec.runtime.costs.row_costs import RowCosts, Trial

PLAIN, PRICE, CACHE, ROW_CACHE, DRAFT_CACHE, FIRST = range(6)  # numbers in the state; from FIRST on: c of KNOTS
OF_DRAFTER = [PRICE, DRAFT_CACHE]  # those that are 0 without one
KNOTS = np.array([*range(2, 17), 20, 24, 28, 32, 40, 48, 56, 64])  # rows; between them costs are interpolated
UNIT = 1024  # tokens in the cache
# Assumed at first: mean and spread (standard deviation) of the drafter's price, a, b and d; of what each further row
# adds, all alike; and of what each adds more or less than the others.
ASSUMED = ((0.25, 0.25), (0.2, 0.2), (0.04, 0.04), (0.06, 0.08))
ROW, ROW_SPREAD, OWN_SPREAD = 0.1, 0.1, 0.05
LEARNED = 0.3  # of the spread of price, a, b and d, where they were learned another time
KNOWN = 0.2  # spread of a step's time that was measured another time
NOISE, MIN_NOISE, MAX_NOISE = 0.1, 0.02, 0.5  # spread of a step's time over what is expected, to begin with; bounds
NOISE_WEIGHT, NOISE_STEPS = 0.02, 8  # weight of the newest step in it; steps that the beginning counts for
FIRST_CALL, FIRST_NOISE = 0.4, 0.5  # logarithm of what the first call of a shape takes over later ones, and its spread
CLIP = 1.5  # spreads beyond which a time says no more
DRIFT, PAUSE_DRIFT = 0.05, 0.05  # of `plain`, from step to step and from answer to answer
EVERY = 4  # steps from one making of the curves to the next, and from trial to trial
MOST_LATER = 32  # steps that are learned from later, where no cost is asked for meanwhile
PLAIN_ALL, PLAIN_EVERY = 16, 8  # plain steps in succession: so many are learned from, then one in so many
# What is forgotten of ratios, at each making: of what rows cost more or less than the others; and the factor for what
# all rows have in common, which few plain steps tell: at first `SOON` over the steps so far.
FORGET, SLOWLY, SOON = 0.015, 0.1, 50
USED_WEIGHT = 1 / 16  # of the newest step in the rows that are used
# Spreads added to the cost of more rows than are used, so that few noisy times make no large drafts look cheap; and
# those that a trial hopes for, and fears.
CAUTION, OPTIMISM = 0.5, 1.0
SHARE, MAX_SAVED_UP = 0.01, 1.0  # share of the time that trials may lose, and plain steps that may be saved up for them
SURE = 2  # steps with so many rows that make their cost a measured one
FARTHER = 2  # times the longest context of a plain step so far, and `UNIT`: beyond, one is timed first
RISE = 1.1  # of a plain step's seconds: a busy machine must not be kept for good


@dataclass(frozen=True)
class CostRecord:
    """The known costs of a bundle's steps on this machine.

    - `seconds`: of a step by its rows, 1: a plain one, more: with the drafter; `CONTEXT` tokens in the cache.
    - `price`, `context`: of the drafter in plain steps, and (a, b, d), d None in older records; None if they were not
      learned.
    - `steps`: that this was learned from; 0: measured by a calibration.
    - `min_probability`: below which a row of a draft is pruned at the early exit, as `tune` found it; 0: none is.
      `score`: whose probability it is (`Pruning`).
    """

    seconds: Mapping[int, float] = field(default_factory=dict)
    price: float | None = None
    context: tuple[float, float, float | None] | None = None
    steps: int = 0
    min_probability: float = 0.0
    score: str = BOTH


CONTEXT = 64  # tokens in the cache that a record's seconds are for


class _Time(NamedTuple):
    """The time of a step. `again`: it is not the first of its kind; `steps`: those before it."""

    rows: int
    calls: float  # of the drafter
    seconds: float
    cached: int
    again: bool
    steps: int


class LearnedRowCosts(RowCosts):
    """Costs of steps by their rows, as far as they are known by now. Sessions of several threads share it.

    `rows`: most rows of a step, 64 at most. `drafter`: whether there is one. `keep`: receives this object where an
    answer ends, to save its `record`; and whether it is to be saved in any case.
    """

    def __init__(
        self,
        rows: int,
        drafter: bool,
        known: CostRecord | None = None,
        keep: Callable[[LearnedRowCosts, bool], None] | None = None,
    ) -> None:
        self.rows, self.drafter, self.known, self.steps = rows, drafter, known or CostRecord(), 0
        self._keep, self._lock = keep, threading.RLock()
        self._numbers = np.arange(1, rows + 1)
        at = np.interp(self._numbers, KNOTS, np.arange(len(KNOTS)))
        self._knot = np.minimum(at.astype(int), len(KNOTS) - 2)
        self._weight = at - self._knot
        self._state, prior = _assumed(drafter)
        self._spread = prior.copy()
        self._spread[PLAIN, PLAIN] = 9.0
        retained = np.full(len(prior), math.sqrt(1 - FORGET))
        retained[PLAIN] = 1.0
        self._retained, self._own = np.outer(retained, retained), FORGET * _assumed(drafter, 0.0)[1]
        self._common = FORGET * prior - self._own
        self._noise = NOISE**2
        self._times: list[_Time] = []  # that were not learned from yet
        self._due = False  # whether the curves would have been made since
        self._plain_run = 0  # plain steps in succession
        self._called: set[tuple[int, bool]] = set()  # rows, and whether the drafter ran
        self._seen: dict[int, int] = {}  # steps by rows
        self._timed = CONTEXT  # most tokens in the cache of a plain step
        self._cached, self._used, self._saved_up, self._since = CONTEXT, min(8.0, rows), MAX_SAVED_UP / 2, 0

        self._learn(self.known)
        self._make()

    def begin(self, cached: int = CONTEXT) -> None:
        with self._lock:
            self._catch_up()
            self._spread[PLAIN, PLAIN] += PAUSE_DRIFT**2
            if abs(cached - self._cached) > UNIT / 4:
                self._cached = cached
                self._make()

    def apart(self) -> RowCosts:
        return LearnedRowCosts(self.rows, self.drafter, self.known)

    def observe(self, rows: int, calls: float, seconds: float, cached: int, later: bool = False) -> None:
        if rows > self.rows or not 0 < seconds < math.inf or not self._lock.acquire(blocking=False):
            return
        try:
            plain = rows == 1 and not calls
            self._plain_run = self._plain_run + 1 if plain else 0
            if self._plain_run <= PLAIN_ALL or self._plain_run % PLAIN_EVERY == 0:
                kind = rows, calls > 0
                again = kind in self._called
                self._called.add(kind)
                if again:
                    self._seen[rows] = self._seen.get(rows, 0) + 1
                if plain:
                    self._timed = max(self._timed, cached)
                self._times.append(_Time(rows, calls, seconds, cached, again, self.steps))
                self.steps += 1
                self._since += 1
                if rows > 1:
                    self._used += USED_WEIGHT * (rows - self._used)
            self._due = self._due or _is_due(self.steps)
            if self._due and (not later or len(self._times) >= MOST_LATER):
                self._catch_up()
        finally:
            self._lock.release()

    def at(self, cached: int) -> tuple[np.ndarray, float]:
        return self._ratios(cached)[:2]

    @property
    def plain_due(self) -> bool:
        unknown = 1 not in self._seen and (not self.known.seconds or self.steps >= EVERY)
        return unknown or self._cached > FARTHER * self._timed + UNIT

    def trial(self, calls: float) -> Trial | None:
        if self._since < EVERY or self._saved_up <= 0:
            return None
        self._since = 0
        plus = calls * self.price
        return Trial(self._low + plus, self._high + plus, self._saved_up)

    def tried(self, loss: float) -> None:
        self._saved_up -= max(loss, 0.0)

    def end(self, closing: bool = False) -> None:
        if self._keep is not None and self.steps:
            self._keep(self, closing)

    @property
    def sure(self) -> bool:
        return bool(self.known.seconds) or self.steps >= 2 * EVERY

    def record(self) -> CostRecord:
        """Returns the costs known by now, of the row counts that were used and of those known before."""
        with self._lock:
            self._catch_up()
            without, price, plain = self._ratios(CONTEXT)
            now = math.exp(float(self._state[PLAIN])) * plain
            before = self.known.seconds.get(1, math.inf)
            counts = {rows for rows, steps in self._seen.items() if steps >= SURE} | set(self.known.seconds)
            seconds = {1: min(now, RISE * before)}
            for rows in sorted(counts - {1}):
                if rows <= self.rows:
                    seconds[rows] = seconds[1] * (float(without[rows - 1]) + price)
            state = self._state
            cache, row_cache, draft_cache = (max(0.0, float(state[at])) for at in (CACHE, ROW_CACHE, DRAFT_CACHE))
            steps = self.known.steps + self.steps
            price = max(0.0, float(state[PRICE]))
            context = (cache, row_cache, draft_cache)
            return CostRecord(seconds, price, context, steps, self.known.min_probability, self.known.score)

    def describe(self) -> str:
        return describe(self.record() if self.sure else CostRecord())

    # ---- the filter

    def _catch_up(self) -> None:
        """Learns from the times that it has not learned from yet, and makes the curves where that was due."""
        for rows, calls, seconds, cached, again, steps in self._times:
            if again:
                off, variance = self._update(rows, calls, math.log(seconds), cached / UNIT, self._noise)
                beyond = min(off * off, CLIP * CLIP * variance) - (variance - self._noise)
                self._noise += max(NOISE_WEIGHT, 1 / (steps + NOISE_STEPS)) * (beyond - self._noise)
                self._noise = min(max(self._noise, MIN_NOISE**2), MAX_NOISE**2)
            else:
                self._update(rows, calls, math.log(seconds) - FIRST_CALL, cached / UNIT, FIRST_NOISE**2)
            self._spread[PLAIN, PLAIN] += DRIFT**2
            self._cached = cached
            if _is_due(steps + 1):
                self._spread *= self._retained
                self._spread += self._own
                self._spread += self._common * max(SLOWLY, SOON / (steps + 2))
                spent = EVERY * float(self.with_drafter[round(self._used) - 1])
                self._saved_up = min(MAX_SAVED_UP, self._saved_up + SHARE * spent)
                self._make()
        self._times.clear()
        self._due = False

    def _update(self, rows: int, calls: float, log_seconds: float, tokens: float, noise: float) -> tuple[float, float]:
        """Learns from one time. `tokens`: in the cache, in `UNIT`s. Returns how far it was off, and the variance of
        that."""
        state, slope = self._state, np.zeros(len(self._state))
        ratio = 1.0
        if rows > 1:
            knot, weight = FIRST + int(self._knot[rows - 1]), float(self._weight[rows - 1])
            slope[knot], slope[knot + 1] = 1 - weight, weight
            ratio = float(state[knot]) * (1 - weight) + float(state[knot + 1]) * weight
        slope[PRICE:FIRST] = calls, tokens, rows * tokens, calls * tokens
        ratio += float(slope[PRICE:FIRST] @ state[PRICE:FIRST])
        ratio = max(ratio, 0.3)
        slope /= ratio
        slope[PLAIN] = 1.0
        gain = self._spread @ slope
        variance = float(slope @ gain) + noise
        off, limit = log_seconds - float(state[PLAIN]) - math.log(ratio), CLIP * math.sqrt(variance)
        state += gain * (min(max(off, -limit), limit) / variance)
        gain /= math.sqrt(variance)
        self._spread -= np.multiply.outer(gain, gain)
        return off, variance

    def _learn(self, known: CostRecord) -> None:
        """Takes up what was found another time."""
        context = known.context or (None, None, None)
        for number, value in zip(range(PRICE, FIRST), (known.price, *context), strict=True):
            if value is not None and (self.drafter or number not in OF_DRAFTER):
                self._state[number] = value
                self._spread[number] *= LEARNED
                self._spread[:, number] *= LEARNED
        if known.context is not None and known.context[2] is None and known.price and self.drafter:
            self._state[DRAFT_CACHE] = known.price * sum(known.context[:2])  # it grows as a plain step does
        counts = [rows for rows in sorted(known.seconds) if rows <= self.rows]
        if 1 not in counts:
            return
        # What interferes only adds time, so no step costs more than one of more rows did.
        least = np.minimum.accumulate([known.seconds[rows] for rows in reversed(counts)])[::-1]
        before = self._spread.copy()
        for _ in range(3):  # each brings the state nearer to what is known; the last one tells how uncertain that is
            self._spread = before.copy()
            for rows, seconds in zip(counts, least.tolist(), strict=True):
                self._update(rows, self.drafter and rows > 1, math.log(seconds), CONTEXT / UNIT, KNOWN**2)

    # ---- what it says

    def _ratios(self, cached: int) -> tuple[np.ndarray, float, float]:
        """With `cached` tokens in the cache: cost [rows] of steps without the drafter over a plain step's; the
        drafter's price; and a plain step's time over `plain`."""
        state, tokens = self._state, cached / UNIT
        cache, row_cache = max(0.0, float(state[CACHE])), max(0.0, float(state[ROW_CACHE]))
        plain = 1 + (cache + row_cache) * tokens
        ratio = self._between(state[FIRST:])
        ratio[0] = 1.0
        ratio = (ratio + (cache + row_cache * self._numbers) * tokens) / plain
        # No step takes less than one of fewer rows: halfway between lowering the one and lifting the other.
        falling, rising = np.minimum.accumulate(ratio[::-1])[::-1], np.maximum.accumulate(ratio)
        price = max(0.0, float(state[PRICE])) + max(0.0, float(state[DRAFT_CACHE])) * tokens
        return np.maximum((falling + rising) / 2, 1.0), price / plain if self.drafter else 0.0, plain

    def _make(self) -> None:
        """Makes the curves for as many tokens in the cache as there are now."""
        without, price, plain = self._ratios(self._cached)
        # What is uncertain is how others compare with the rows that are used.
        rows = round(self._used)
        block, used = self._spread[FIRST:, FIRST:], int(self._knot[rows - 1])
        spread = np.sqrt(np.maximum(block.diagonal() + block[used, used] - 2 * block[used], 0.0))
        margin = self._between(spread) / plain
        margin[0] = 0.0
        self._low = np.maximum.accumulate(np.maximum(without - OPTIMISM * margin, 1.0))
        self._high = without + OPTIMISM * margin
        margin[:rows] = 0.0
        without = np.maximum.accumulate(without + CAUTION * margin)
        curve = without + price
        curve[0] = 1.0
        self._set(curve, without, price)

    def _between(self, knots: np.ndarray) -> np.ndarray:
        """Interpolates values at `KNOTS` for all rows."""
        return knots[self._knot] * (1 - self._weight) + knots[self._knot + 1] * self._weight


class PaddedRowCosts(LearnedRowCosts):
    """Learns the costs of steps whose calls are padded to one of few row counts: up to a count, every row is free.
    `counts`: these, rising, the first of them 1. A captured graph always runs the drafter, so it has no price of its
    own.
    """

    def __init__(
        self,
        counts: Sequence[int],
        rows: int,
        known: CostRecord | None = None,
        keep: Callable[[LearnedRowCosts, bool], None] | None = None,
    ) -> None:
        padded = [next(count for count in counts if count >= number) for number in range(1, rows + 1)]
        self._padded, self._counts = np.minimum(padded, rows), counts
        super().__init__(rows, False, known, keep)

    def apart(self) -> RowCosts:
        return PaddedRowCosts(self._counts, self.rows, self.known)

    def observe(self, rows: int, calls: float, seconds: float, cached: int, later: bool = False) -> None:
        if 1 <= rows <= self.rows:
            super().observe(int(self._padded[rows - 1]), 0, seconds, cached, later)

    def _set(self, curve: np.ndarray, without_drafter: np.ndarray, price: float) -> None:
        at = self._padded - 1
        super()._set(curve[at], without_drafter[at], price)

    def _make(self) -> None:
        super()._make()
        at = self._padded - 1
        self._low, self._high = self._low[at], self._high[at]


def describe(record: CostRecord) -> str:
    """Says for the user what steps cost."""
    seconds = record.seconds
    if 1 not in seconds:
        return "not known yet"
    few = [rows for rows in (2, 4, 8, 16, 32, 64) if rows in seconds] or sorted(set(seconds) - {1})[:4]
    ratios = ", ".join(f"{rows} rows {seconds[rows] / seconds[1]:.2f}" for rows in few)
    source = f"learned from {record.steps:,} steps" if record.steps else "measured"
    over = f"; over it {ratios}" if ratios else ""
    drafter = f", the drafter {record.price:.2f} of it" if record.price else ""
    return f"plain step {1000 * seconds[1]:.2f} ms{over}{drafter} ({source})"


def _is_due(steps: int) -> bool:
    """Tells whether the curves are made after so many steps."""
    return steps % EVERY == 0 or steps < EVERY


def _assumed(drafter: bool, common: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Returns the state before anything was measured, and its covariance. `common`: factor of what all rows have in
    common, and of price and context."""
    further = KNOTS - 1.0
    state = np.array([math.log(0.02), *(mean for mean, _ in ASSUMED), *(1 + ROW * further)])
    prior = np.zeros((len(state), len(state)))
    own = OWN_SPREAD**2 * np.minimum.outer(further, further)
    prior[FIRST:, FIRST:] = own + common * ROW_SPREAD**2 * np.multiply.outer(further, further)
    prior[range(PRICE, FIRST), range(PRICE, FIRST)] = [common * spread**2 for _, spread in ASSUMED]
    if not drafter:
        state[OF_DRAFTER] = prior[OF_DRAFTER, OF_DRAFTER] = 0.0
    return state, prior
