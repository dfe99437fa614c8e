"""A machine whose step times are known: noisy, busy at times, drifting; and drafts for it to verify.

`python -m tests.support.simulated_machine` prints how well costs are learned on it (docs/lab/decisions)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from streamspec.runtime.costs.learned_costs import CostRecord, LearnedRowCosts
from streamspec.runtime.costs.row_costs import RowCosts
from streamspec.runtime.decoding.draft_proposal import IndependentProposal
from streamspec.runtime.decoding.draft_tree_search import build_draft_tree

ROWS = 64
PLAIN = 0.012  # seconds
CACHE, ROW_CACHE = 0.3, 0.06  # what 1,024 tokens in the cache add, in plain steps: to a step, and to each of its rows
# Cost of rows over a plain step, without the drafter; the drafter's.
MACHINES: dict[str, tuple[Mapping[int, float], float]] = {
    "flat": ({1: 1.0, 2: 1.03, 4: 1.10, 8: 1.21, 16: 1.55, 32: 2.3, 64: 4.0}, 0.25),  # 8 rows with drafter: 1.46
    "steep": ({1: 1.0, 2: 1.05, 4: 1.2, 8: 1.45, 16: 1.9, 32: 2.9, 64: 5.0}, 0.25),  # 1.70
    "blocks of eight": ({1: 1.0, 8: 1.02, 9: 1.4, 16: 1.5, 17: 1.9, 24: 1.95, 64: 4.0}, 0.2),
    "wide": ({1: 1.0, 16: 1.1, 32: 1.25, 64: 2.5}, 0.1),
    "int4": ({1: 1.0, 2: 1.25, 4: 1.8, 8: 2.9, 16: 5.2, 64: 19.0}, 0.3),
    "linear": ({1: 1.0, 64: 64.0}, 0.8),
}
# Two calibrations of one bundle on one machine, twenty minutes apart; one far too low; one far too high for many rows.
MEASURED = {
    "flat": {1: 0.0113, 2: 0.0145, 4: 0.0146, 8: 0.0166},
    "steep": {1: 0.0143, 4: 0.0186, 8: 0.0244},
    "low": {1: 0.01, 8: 0.0105, 32: 0.011},
    "high": {1: 0.01, 2: 0.0125, 4: 0.013, 8: 0.014, 12: 0.02, 16: 0.028, 24: 0.045, 32: 0.06},
}
CONFIDENCE = {"task": (4.0, 1.0), "chat": (1.2, 1.6), "hopeless": (0.5, 12.0)}  # beta distributions


@dataclass
class SimulatedMachine:
    """Takes its time over steps. `noise`: relative, at every step, and up to three times the time at one of twenty.
    `busy(step)`: a factor. After `longest` tokens in the cache it begins anew."""

    name: str
    seed: int = 0
    noise: float = 0.04
    mode: str = "quiet"
    sleeps: float = 0.001  # share of steps in which the machine sleeps for a hundred steps
    steps: int = 0
    random: np.random.Generator = field(init=False)
    called: set[tuple[int, bool]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)
        points, self.price = MACHINES[self.name]
        self.ratio = np.interp(np.arange(1, ROWS + 1), list(points), list(points.values()))

    def costs(self, drafter: bool, cached: int) -> np.ndarray:
        """Of steps with 1.. rows, in plain steps of an empty cache."""
        rows = np.arange(1, ROWS + 1)
        return np.asarray(self.ratio + self.price * drafter + (CACHE + ROW_CACHE * rows) * (cached / 1024))

    def cost(self, rows: int, drafter: bool, cached: int) -> float:
        return float(self.costs(drafter, cached)[rows - 1])

    def seconds(self, rows: int, drafter: bool, cached: int) -> float:
        self.steps += 1
        noise = float(np.exp(self.noise * self.random.normal()))
        if self.random.random() < 0.05:
            noise *= 1 + 2 * self.random.random()
        if self.random.random() < self.sleeps:
            noise *= 100
        if (rows, drafter) not in self.called:  # ONNX Runtime's first call of a shape
            self.called.add((rows, drafter))
            noise *= 1.3 + self.random.random()
        return PLAIN * self.speed() * noise * self.cost(rows, drafter, cached)

    def speed(self) -> float:
        if self.mode == "drifts":  # and is busy half of the time
            return float(np.exp(0.25 * np.sin(self.steps / 300))) * (2.0 if (self.steps // 150) % 2 else 1.0)
        if self.mode == "busy at first" and self.steps < 200:
            return 2.0 * float(np.exp(self.random.normal(0, 0.3)))
        return 1.0


def drafts(kind: str, count: int = 64, seed: int = 1) -> np.ndarray:
    """float [count, rows]: tokens that drafts of 1.. rows bring on average, of as many different texts."""
    random, out = np.random.default_rng(seed), []
    for _ in range(count):
        confidence, logits = random.beta(*CONFIDENCE[kind]), np.empty((8, 8))
        for depth in range(8):
            best = float(np.clip(confidence * 0.97**depth, 0.02, 0.97))
            logits[depth] = np.log([best, *(1e-6 + random.dirichlet(np.full(7, 0.6)) * (1 - best))])
        proposal = IndependentProposal(random.permutation(64).reshape(8, 8), logits)
        expected = np.cumsum(np.sort(build_draft_tree(99, proposal, None, ROWS, None, 1.0).probabilities)[::-1])
        out.append(np.pad(expected, (0, ROWS - len(expected)), mode="edge"))
    return np.array(out)


def size(expected: np.ndarray, costs: np.ndarray) -> np.ndarray:
    """Rows of the draft that brings the most tokens per time."""
    return np.asarray(2 + np.argmax(expected[..., 1:] / costs[1:], axis=-1))


def share(expected: np.ndarray, believed: np.ndarray, true: np.ndarray) -> float:
    """Speed of drafts chosen by `believed` costs, over that of drafts chosen by the true ones."""

    def speed(costs: np.ndarray) -> float:
        rows = size(expected, costs)
        return float(np.take_along_axis(expected, rows[:, None] - 1, 1).sum() / true[rows - 1].sum())

    return speed(believed) / speed(true)


@dataclass
class Run:
    """`shares`: of the best speed, after as many steps. `lost`: share of the time that the choices cost; `tried`:
    the part of it that went into trials."""

    costs: RowCosts
    shares: dict[int, float]
    lost: float
    tried: float


def run(
    machine: SimulatedMachine,
    expected: np.ndarray,
    costs: LearnedRowCosts | None = None,
    known: Mapping[int, float] | None = None,
    steps: int = 600,
    answer: int = 60,
    marks: Iterable[int] = (),
    drafter: bool = True,
) -> Run:
    """Verifies drafts, answers of `answer` steps each, as the decoding loop does."""
    costs = costs or LearnedRowCosts(ROWS, drafter, None if known is None else CostRecord(known))
    random, shares, spent, lost, tried = np.random.default_rng(machine.seed + 1), {}, 0.0, 0.0, 0.0
    for step in range(steps + 1):
        cached = 64 + 3 * (step % answer)
        true = machine.costs(drafter, cached)
        if step in marks:
            shares[step] = share(expected, costs.with_drafter, true)
        if step % answer == 0:
            costs.begin()
        if step in (32, 40, 48) or step % 256 == 255:  # as the speculation controller has it
            costs.observe(1, False, machine.seconds(1, False, cached), cached)
            continue
        bring, believed = expected[random.integers(len(expected))], costs.with_drafter
        chosen, best = int(size(bring, believed)), int(size(bring, true))
        trial = costs.trial(drafter)
        rows = chosen if trial is None else trial.size(bring, believed, chosen)
        if trial is not None:
            costs.tried(trial.loss)
            tried += true[rows - 1] - bring[rows - 1] * true[chosen - 1] / bring[chosen - 1]
        spent += true[rows - 1]
        lost += true[rows - 1] - bring[rows - 1] * true[best - 1] / bring[best - 1]
        costs.observe(rows, drafter, machine.seconds(rows, drafter, cached), cached)
    return Run(costs, shares, lost / spent, tried / spent)


MARKS = (0, 10, 20, 50, 100, 200, 400, 600)


def main(seeds: int = 6) -> None:
    """Prints, for machines, what is known of them beforehand and how busy they are, the share of the best speed after
    so many steps: median and least of the seeds."""
    for kind in ("task", "chat"):
        expected = drafts(kind)
        for name, known in (
            ("flat", "steep"),
            ("steep", "flat"),
            ("flat", None),
            ("steep", None),
            ("blocks of eight", "steep"),
            ("wide", "steep"),
            ("int4", "flat"),
            ("int4", None),
            ("linear", "flat"),
        ):
            for mode in ("quiet", "drifts", "busy at first"):
                before = None if known is None else MEASURED[known]
                runs = [
                    run(SimulatedMachine(name, seed, mode=mode), expected, known=before, marks=MARKS)
                    for seed in range(seeds)
                ]
                figures = [[one.shares[mark] for one in runs] for mark in MARKS]
                words = " | ".join(f"{np.median(shares):.3f} {min(shares):.3f}" for shares in figures)
                lost, tried = (100 * float(np.mean([getattr(one, what) for one in runs])) for what in ("lost", "tried"))
                print(f"| {kind} | {name} | {known or '-'} | {mode} | {words} | {lost:.1f} | {tried:.1f} |", flush=True)


if __name__ == "__main__":
    main()
