"""Shows a training stage while it runs: step, time, tokens per second, time left, losses, and validation as it goes."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from streamspec.progress import duration, region

WINDOW = 60.0  # seconds of steps that speed and time left are computed from
LATEST = 10  # batches that the losses shown are means over
CHECKED = ("eval_loss", "eval_tau")  # the log's keys of figures from validation


class StageDisplay(TrainerCallback):
    """One stage's progress. `name`: its name; `left`: seconds left of its time, infinite without a limit.

    `processes`: how many train; each takes as many tokens as this one.
    """

    def __init__(self, name: str, left: Callable[[], float], processes: int = 1) -> None:
        self.name, self.left, self.processes = name, left, processes
        self.began = time.monotonic()
        self.tokens: Tensor | None = None  # of this process so far; on its device, so that no step waits for it
        self.marks: deque[tuple[float, int, Tensor]] = deque()  # time, step and tokens, some seconds apart
        self.step = self.steps = self.checked_at = 0
        self.losses: deque[dict[str, Tensor]] = deque(maxlen=LATEST)  # of a batch each; read when they are shown
        self.checked: dict[str, float] = {}
        self._changed: Callable[[], None] = lambda: None

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Shows the stage while the block runs."""
        with region(self.parts, first=True) as self._changed:
            yield

    def batch(self, inputs: dict[str, Tensor]) -> None:
        """Counts the tokens of a batch."""
        here = inputs["attention_mask"].sum()
        self.tokens = here if self.tokens is None else self.tokens + here

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.began = time.monotonic()
        self.marks = deque([(self.began, state.global_step, torch.tensor(0))])

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.step, self.steps = state.global_step, state.max_steps
        now = time.monotonic()
        if self.tokens is not None and (now - self.marks[-1][0] > WINDOW / 10 or len(self.marks) == 1):
            self.marks.append((now, self.step, self.tokens))
            while now - self.marks[1][0] > WINDOW:
                self.marks.popleft()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if checked := {k.removeprefix("eval_"): v for k, v in (logs or {}).items() if k in CHECKED}:
            self.checked, self.checked_at = checked, state.global_step
        self._changed()

    def speed(self) -> tuple[float, float]:
        """Returns seconds per step and tokens per second, of the last minute; 0 where none is known."""
        (began, first, before), (ended, last, tokens) = self.marks[0], self.marks[-1]
        if last == first:
            return 0.0, 0.0
        return (ended - began) / (last - first), self.processes * float(tokens - before.to(tokens.device)) / max(
            ended - began, 1e-9
        )

    def latest(self) -> dict[str, float]:
        """Means of the losses by name, over those of the latest batches that have them."""
        batches = list(self.losses)
        seen = {name: [batch[name] for batch in batches if name in batch] for name in dict.fromkeys(chain(*batches))}
        return {name: torch.stack(values).mean().item() for name, values in seen.items()}

    def parts(self) -> list[str]:
        """The stage in words; nothing before its first step."""
        if not self.step or not self.losses:
            return []
        each, rate = self.speed()
        used, granted = time.monotonic() - self.began, max(self.left(), 0.0)
        left = min(each * (self.steps - self.step), granted) if each else granted
        whole = "" if math.isinf(granted) else f" of {(used + granted) / 60:.1f}"
        time_left = [] if math.isinf(left) else [f"{duration(left)} left"]
        losses = " ".join(f"{name} {value:.3f}" for name, value in self.latest().items())
        checked = " ".join(f"{name} {value:.3f}" for name, value in sorted(self.checked.items(), reverse=True))
        validation = [f"validation at step {self.checked_at}: {checked}"] if checked else []
        return [
            f"{self.name}: step {self.step}/{self.steps}",
            f"{used / 60:.1f}{whole} min",
            *time_left,
            f"{rate:,.0f} tokens/s",
            losses,
            *validation,
        ]
