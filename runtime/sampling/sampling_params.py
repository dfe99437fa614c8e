"""Chooses tokens: the parameters of sampling, the uniform number that each position draws with, and log-probabilities.

The number depends on seed and position only, so a sampled text does not depend on how many tokens a call verified. The
distribution itself is processed in the graph (`streamspec.export.layers.sampling`); where options adjust logits in ways
that no graph knows, `AdjustedSampler` chooses instead.
"""

from __future__ import annotations

import math
import secrets
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Any

import numpy as np

from streamspec import step_graph as sg
from streamspec.errors import ConfigError
from streamspec.option_fields import option

# What the graph is given of `Sampling`: field -> input and dtype. Sequences that share a call agree in these, but each
# has a repetition penalty of its own, beside the tokens that it has seen.
GRAPH_INPUTS = {
    "temperature": (sg.TEMPERATURE, np.float32),
    "top_k": (sg.TOP_K, np.int64),
    "top_p": (sg.TOP_P, np.float32),
    "min_p": (sg.MIN_P, np.float32),
    "repetition_penalty": (sg.REPETITION_PENALTY, np.float32),
}
PER_SEQUENCE = ("repetition_penalty",)
ADJUSTMENTS = ("frequency_penalty", "presence_penalty", "logit_bias")  # that no graph knows (`AdjustedSampler`)
# uniform numbers are multiples of 1 / STEPS: exact in float32, and the largest stays below 1 in every product
STEPS = 2**23
DRAWN = 64  # positions whose numbers are made at once: a generator takes longer to make than they do
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
    - `frequency_penalty`, `presence_penalty`, -2 to 2: subtracted from the logit of each token of the answer so far,
      once for each time it occurs, and once.
    - `logit_bias`: numbers from -100 to 100 that are added to logits, by token id. Added first; the penalties of
      OpenAI's API follow `repetition_penalty`.

    Raises ConfigError for values out of range.
    """

    temperature: float = option(0.0, "0: greedy; above 0: sample at this temperature.")
    top_k: int = option(0, "Sample from the k most probable tokens only; 0: all.")
    top_p: float = option(1.0, "Sample from the smallest set of tokens with this total probability.")
    min_p: float = option(0.0, "Drop tokens below this fraction of the highest probability.")
    repetition_penalty: float = option(1.0, "Above 1: tokens of the text so far become less probable.")
    seed: int | None = option(None, "Makes sampling repeatable.")
    frequency_penalty: float = option(
        0.0, "Subtracted from a token's logit for each time it occurs in the answer.", flag=None
    )
    presence_penalty: float = option(0.0, "Subtracted from the logits of the answer's tokens.", flag=None)
    logit_bias: Mapping[int, float] | None = field(  # a dict has no hash
        default=None, hash=False, metadata={"help": "Added to logits, by token id.", "flag": None}
    )

    def __post_init__(self) -> None:
        # A smaller temperature is greedy but for rounding, and float32 cannot divide by it.
        if self.temperature != 0 or isinstance(self.temperature, bool):
            _check("temperature", self.temperature, MIN_TEMPERATURE, 100.0, or_="0, or ")
        _check("top_k", self.top_k, 0, 2**31)
        _check("top_p", self.top_p, 0.0, 1.0, above=True)
        _check("min_p", self.min_p, 0.0, 1.0)
        _check("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        if self.seed is not None:
            _check("seed", self.seed, 0, 2**64 - 1)
        for name in ("frequency_penalty", "presence_penalty"):
            _check(name, getattr(self, name), -2, 2)
        if not isinstance(self.logit_bias, Mapping | None):
            raise ConfigError(f"logit_bias {self.logit_bias!r:.60}", "numbers by token id", "correct logit_bias")
        for token, bias in (self.logit_bias or {}).items():
            _check("logit_bias token", token, 0, 2**31)
            _check("logit_bias", bias, -100, 100)

    @property
    def random(self) -> bool:
        return self.temperature > 0

    @property
    def shared_call_key(self) -> tuple[float, ...]:
        """The values of `GRAPH_INPUTS` that are no sequence's own: one call serves samplings with equal ones."""
        return tuple(getattr(self, name) for name in GRAPH_INPUTS if name not in PER_SEQUENCE)

    @property
    def adjusted(self) -> bool:
        """Tells whether it adjusts logits in ways that graphs do not know (`AdjustedSampler`)."""
        return any(getattr(self, name) for name in ADJUSTMENTS)

    @property
    def plain_argmax(self) -> bool:
        """Tells whether graphs are to choose the likeliest token by the model's own logits."""
        return not self.random and not self.uses_seen

    @property
    def uses_seen(self) -> bool:
        """Tells whether a choice depends on the tokens of the text so far."""
        return self.repetition_penalty != 1

    @property
    def in_words(self) -> str:
        """Describes it by the fields that are set, such as `temperature 0.6, top_k 20` or `greedy`."""
        words = [f"{one.name} {value}" for one in fields(self) if (value := getattr(self, one.name)) != one.default]
        return ", ".join(words if self.random else ["greedy", *words])

    def changed(self, **given: Any) -> Sampling:
        """Returns itself with the fields `given`. A temperature of 0 turns off what is not given, too: such an answer
        is greedy decoding whatever this sampling was.
        """
        return replace(Sampling() if given.get("temperature") == 0 else self, **given)

    def check_vocabulary(self, size: int) -> None:
        """Raises ConfigError for biases of tokens that there are not."""
        if self.logit_bias and max(self.logit_bias) >= size:
            raise ConfigError(f"logit_bias of token {max(self.logit_bias)}", f"0..{size - 1}", "correct logit_bias")

    def for_answer(self) -> Sampling:
        """Returns itself, or where it would draw without a seed, the same with a new one: for one answer."""
        return replace(self, seed=secrets.randbits(64)) if self.random and self.seed is None else self

    def scalars(self) -> dict[str, np.ndarray]:
        """Returns the graph's inputs that stay the same for a whole generation, [1] each."""
        return {
            graph_input: np.array([getattr(self, name)], dtype) for name, (graph_input, dtype) in GRAPH_INPUTS.items()
        }

    def uniform(self, position: int) -> float:
        """Returns the number in [0, 1) that draws the token at `position` (counted from the prompt's first token).
        Needs a seed (`for_answer`).
        """
        assert self.seed is not None
        return _uniforms(self.seed, position // DRAWN)[position % DRAWN]


@lru_cache(maxsize=64)
def _uniforms(seed: int, block: int) -> list[float]:
    """Returns the numbers of `DRAWN` positions: of each the first of the four that Philox makes of a counter, the
    position's."""
    made = np.random.Philox(key=seed, counter=block * DRAWN).random_raw(4 * DRAWN)[::4]
    return [number / STEPS for number in (made >> np.uint64(41)).tolist()]


def _check(name: str, value: float, low: float, high: float, above: bool = False, or_: str = "") -> None:
    whole = name in ("top_k", "seed", "logit_bias token")
    right = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    if not right or not low <= value <= high or (above and value == low):  # NaN lies nowhere
        kind = "a whole number" if whole else "a number"
        bounds = f"{'above' if above else 'from'} {low:g} to {high:g}"
        raise ConfigError(f"{name} {value!r}", f"{or_}{kind} {bounds}", f"correct {name}")


GREEDY = Sampling(seed=0)


class AdjustedSampler:
    """Chooses the tokens of one answer from the model's logits as `sampling` says, in double precision: what graphs do,
    and the adjustments that they do not know.
    """

    def __init__(self, sampling: Sampling, prompt: Sequence[int]) -> None:
        self._sampling, self._length = sampling, len(prompt)
        biases = sampling.logit_bias or {}
        self._biased, self._biases = list(biases), list(biases.values())
        self._seen = {*prompt} if sampling.uses_seen else set[int]()
        self._counts: Counter[int] = Counter()  # of the answer's tokens

    def extend(self, tokens: Sequence[int]) -> None:
        """Adds tokens to the answer."""
        self._length += len(tokens)
        self._counts.update(tokens)

    def choose(self, logits: np.ndarray, path: Sequence[int], allowed: np.ndarray | None = None) -> int:
        """Returns the token after `path`, tokens after the answer so far, by its `logits` [vocabulary], out of those
        `allowed` (bool [vocabulary]).
        """
        sampling, counts = self._sampling, self._counts + Counter(path)
        scores = logits.astype(np.float64)
        scores[self._biased] += self._biases
        penalize(scores, list(self._seen | counts.keys()), sampling.repetition_penalty)
        if counts:
            times = np.array(list(counts.values()))
            scores[list(counts)] -= sampling.presence_penalty + sampling.frequency_penalty * times
        if allowed is not None:
            scores[~allowed] = -np.inf
        return drawn(scores, sampling, sampling.uniform(self._length + len(path)) if sampling.random else 0.0)


def penalize(scores: np.ndarray, seen: np.ndarray | list[int], penalty: float) -> None:
    """Applies a repetition penalty to `scores` float64 [vocabulary] of the tokens that were `seen`: a mask or ids."""
    if penalty != 1:
        scores[seen] *= np.where(scores[seen] < 0, penalty, 1 / penalty)


def drawn(scores: np.ndarray, sampling: Sampling, uniform: float) -> int:
    """Returns the token that `sampling` chooses by `scores` float64 [vocabulary], to which all else was applied;
    `uniform` in [0, 1) draws it."""
    if not sampling.random:
        return int(np.argmax(scores))
    weights = np.exp((scores - scores.max()) / sampling.temperature)
    floor, total, ranked = sampling.min_p, weights.sum(), None
    if 0 < sampling.top_k < len(weights):
        ranked = -np.sort(-np.partition(weights, -sampling.top_k)[-sampling.top_k :])
        floor, total = max(floor, ranked[-1]), ranked.sum()
    if sampling.top_p < 1:
        ranked = -np.sort(-weights) if ranked is None else ranked
        before = np.cumsum(ranked) - ranked
        floor = max(floor, ranked[np.count_nonzero(before < sampling.top_p * total) - 1])
    weights[weights < floor] = 0
    ends = np.cumsum(weights)
    token = np.searchsorted(ends, uniform * ends[-1], side="right")
    return int(min(token, np.flatnonzero(weights)[-1]))


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


def prompt_logprobs(prompt: Sequence[int], chunks: Iterable[np.ndarray], count: int) -> list[Logprob]:
    """Computes those of a prompt's tokens, as `logprob`, from the rows of logits after each of them, in parts."""
    following = iter(prompt)
    scored = [Logprob(next(following), math.nan, [])]
    for logits in chunks:
        scored += [logprob(row, token, count) for row, token in zip(logits, following, strict=False)]
    return scored
