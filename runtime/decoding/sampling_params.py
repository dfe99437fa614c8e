"""Chooses tokens: the parameters of sampling, the uniform number that each position draws with, and log-probabilities.

The number depends on seed and position only, so a sampled text does not depend on how many tokens a call verified. The
distribution itself is processed in the graph (`streamspec.export.layers.sampling`).
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace

import numpy as np

from streamspec import step_graph as sg
from streamspec.errors import ConfigError
from streamspec.option_fields import option

# uniform numbers are multiples of 1 / STEPS: exact in float32, and the largest stays below 1 in every product
STEPS = 2**23
MIN_TEMPERATURE = 1e-3


@dataclass(frozen=True)
class Sampling:
    """Sampling options, with the names, meaning and order of transformers' `GenerationConfig`.

    - `temperature`: 0 decodes greedily; otherwise 0.001 to 100.
    - `top_k`: sample from the k most probable tokens only; 0: all.
    - `top_p`: sample from the smallest set of tokens with this total probability; 1: all.
    - `min_p`: drop tokens below this fraction of the highest probability; 0: none.
    - `repetition_penalty`: above 1, tokens of the text so far become less probable; 1: off. Applies to greedy decoding
      too.
    - `seed`: makes sampling repeatable; None draws a new one for each answer.

    Raises ConfigError for values out of range.
    """

    temperature: float = option(0.0, "0: greedy; above 0: sample at this temperature.")
    top_k: int = option(0, "Sample from the k most probable tokens only; 0: all.")
    top_p: float = option(1.0, "Sample from the smallest set of tokens with this total probability.")
    min_p: float = option(0.0, "Drop tokens below this fraction of the highest probability.")
    repetition_penalty: float = option(1.0, "Above 1: tokens of the text so far become less probable.")
    seed: int | None = option(None, "Makes sampling repeatable.")

    def __post_init__(self) -> None:
        if self.temperature != 0 or isinstance(
            self.temperature, bool
        ):  # what is smaller is greedy but for rounding, and float32 cannot divide by it
            _check("temperature", self.temperature, MIN_TEMPERATURE, 100.0, or_="0, or ")
        _check("top_k", self.top_k, 0, 2**31)
        _check("top_p", self.top_p, 0.0, 1.0, above=True)
        _check("min_p", self.min_p, 0.0, 1.0)
        _check("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        if self.seed is not None:
            _check("seed", self.seed, 0, 2**64 - 1)

    @property
    def random(self) -> bool:
        return self.temperature > 0

    @property
    def plain_argmax(self) -> bool:
        """Whether it chooses the likeliest token by the model's own logits."""
        return not self.random and self.repetition_penalty == 1

    def for_answer(self) -> Sampling:
        """Returns itself, or where it would draw without a seed, the same with a new one: for one answer."""
        return replace(self, seed=secrets.randbits(64)) if self.random and self.seed is None else self

    def scalars(self) -> dict[str, np.ndarray]:
        """Returns the graph's inputs that stay the same for a whole generation, [1] each."""
        return {
            sg.TEMPERATURE: np.array([self.temperature], np.float32),
            sg.TOP_K: np.array([self.top_k], np.int64),
            sg.TOP_P: np.array([self.top_p], np.float32),
            sg.MIN_P: np.array([self.min_p], np.float32),
            sg.REPETITION_PENALTY: np.array([self.repetition_penalty], np.float32),
        }

    def uniform(self, position: int) -> float:
        """Returns the number in [0, 1) that draws the token at `position` (counted from the prompt's first token).
        Needs a seed (`for_answer`).
        """
        assert self.seed is not None
        return int(np.random.Philox(key=self.seed, counter=position).random_raw() >> 41) / STEPS


def _check(name: str, value: float, low: float, high: float, above: bool = False, or_: str = "") -> None:
    whole = name in ("top_k", "seed")
    right = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    if not right or not low <= value <= high or (above and value == low):  # NaN lies nowhere
        kind = "a whole number" if whole else "a number"
        bounds = f"{'above' if above else 'from'} {low:g} to {high:g}"
        raise ConfigError(f"{name} {value!r}", f"{or_}{kind} {bounds}", f"correct {name}")


GREEDY = Sampling(seed=0)


@dataclass(frozen=True)
class Logprob:
    """Natural log-probabilities of one position under the model itself, before temperature, penalties and grammars.

    - `token`: id of the chosen token; `logprob`: its log-probability.
    - `top`: the most probable (token id, log-probability) pairs, most probable first.
    """

    token: int
    logprob: float
    top: list[tuple[int, float]]


def logprob(logits: np.ndarray, token: int, count: int) -> Logprob:
    """Computes those of `token` and the `count` likeliest, from the row of `logits` float32 [vocabulary] it was chosen
    from."""
    row = logits.astype(np.float64)
    row -= row.max()
    row -= np.log(np.exp(row).sum())
    count = min(count, len(row))
    best = np.argpartition(-row, count - 1)[:count] if count else np.empty(0, np.int64)
    ranked = sorted(((int(i), float(row[i])) for i in best), key=lambda pair: (-pair[1], pair[0]))
    return Logprob(token, float(row[token]), ranked)
