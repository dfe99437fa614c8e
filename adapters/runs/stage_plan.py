"""Plans a stage before its first step: how many texts a step has, and how many steps are expected.

A short time is divided into several small steps rather than one of the size asked for. Free of torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from streamspec.progress import duration

FEWEST_STEPS = 20  # that fit into the time of a stage, if need be with fewer texts
LEARNING = 3  # passes over a text that learning from it takes as long as: one forward, and one backward of twice that


@dataclass(frozen=True)
class StageTime:
    """The time for a stage: seconds `left`, infinite without a limit, and the seconds in which `each` text is learnt
    from; None where nothing is known of that, as where no time is left.
    """

    left: float
    each: float | None

    def texts(self) -> float:
        """Counts the texts that can be learnt from."""
        if math.isinf(self.left):
            return math.inf
        return 0.0 if self.each is None else max(self.left, 0.0) / max(self.each, 1e-9)


@dataclass(frozen=True)
class StagePlan:
    """A stage has `rows` to learn from with so many `tokens`, and rows `held_out` for validation. Each process reads
    `batch` of them at once, and a step has so many `batches`: of all processes, and of gradients that add up.
    """

    rows: int
    tokens: int
    held_out: int
    batch: int
    batches: int

    def steps(self, epochs: float, time: StageTime) -> int:
        """Counts the steps that are expected in so many epochs and the time, at least one."""
        texts = self.batch * self.batches
        return max(1, int(min(math.ceil(epochs * math.ceil(self.rows / texts)), time.texts() / texts)))

    def described(self, asked: int, epochs: float, time: StageTime) -> str:
        """Puts it into words. `asked`: texts of a batch by the options."""
        fewer = f" instead of {asked * self.batches:,}" if self.batch < asked else ""
        about, end = ("", "") if math.isinf(time.left) else ("about ", f" in {duration(max(time.left, 0.0))}")
        size, steps = self.batch * self.batches, self.steps(epochs, time)
        return (
            f"{_counted(self.rows, 'row')} with {_counted(self.tokens, 'token')}, {self.held_out:,} held out, "
            f"{about}{_counted(steps, 'step')} of {_counted(size, 'row')}{fewer}{end}"
        )


def batch_in_time(asked: int, batches: int, time: StageTime) -> int:
    """Returns the texts of a batch: `asked`, or as few as it takes for `FEWEST_STEPS` steps of so many `batches`."""
    return max(1, int(min(asked, time.texts() / (FEWEST_STEPS * batches))))


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' * (count != 1)}"
