"""Sampled text: the distribution of whole answers, and its independence of trees and drafts. Seeds are fixed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamspec.errors import ConfigError
from streamspec.runtime import Grammar, Pruning, Sampling, load
from streamspec.runtime.decoding.sampling_params import STEPS
from tests.support.chi_square import p_value

Bundles = Callable[[str], Path]
PROMPT = [5, 9, 11, 3]
TRUNCATED = [
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 2.5, "top_p": 0.6},
    {"temperature": 4.0, "min_p": 0.3},
    {"temperature": 2.0, "top_k": 6, "repetition_penalty": 1.8},
]
DRAFTED: list[tuple[str, int, Pruning | None]] = [  # bundle, rows of the tree, pruning
    ("fp32", 2, None),
    ("fp32", 16, None),
    ("fp32", 12, Pruning(4)),
    ("fp32", 12, Pruning(min_probability=0.05)),
    ("full", 9, None),
    ("full", 16, Pruning(5)),
]
CONSTRAINED: list[tuple[str, str, Pruning | None]] = [  # bundle, pattern, pruning
    ("fp32", r"[a-g]{2}e?", None),
    ("fp32", r"(ab|a[c-e]|[fg]{2,3})", Pruning(4)),
    ("full", r"[a-z ]+", None),
]
P = 0.001 / (len(TRUNCATED) + len(DRAFTED) + len(CONSTRAINED) + 3)  # Bonferroni over the tests of this file


def processed(
    logits: np.ndarray, context: list[int], given: dict[str, Any], allowed: np.ndarray | None = None
) -> np.ndarray:
    """Probabilities written from the definitions, in double precision."""
    scores = logits.astype(np.float64)
    used = sorted(set(context))
    penalty = given.get("repetition_penalty", 1.0)
    scores[used] = np.where(scores[used] < 0, scores[used] * penalty, scores[used] / penalty)
    if allowed is not None:
        scores[~allowed] = -np.inf
    scores /= given["temperature"]
    order = np.argsort(-scores, kind="stable")
    weights = np.exp(scores[order] - scores.max())
    if given.get("top_k"):
        weights[given["top_k"] :] = 0
    share = weights / weights.sum()
    weights[np.cumsum(share) - share >= given.get("top_p", 1.0)] = 0
    weights[weights < given.get("min_p", 0.0)] = 0
    out = np.zeros_like(weights)
    out[order] = weights / weights.sum()
    return out


def joint(
    session: Any, given: dict[str, Any], eos: set[int], length: int, pattern: str = ""
) -> dict[tuple[int, ...], float]:
    """Probability of every answer of at most `length` tokens, by the text of its letters where a `pattern` says what
    may come.
    """
    open_, done = {(): 1.0}, {}
    for _ in range(length):
        following: dict[tuple[int, ...], float] = {}
        for text, probability in open_.items():
            context = [*PROMPT, *text]
            step_probabilities = processed(
                session.score(context)[-1],
                context,
                given,
                following_letters(session, text, pattern) if pattern else None,
            )
            for token in np.flatnonzero(step_probabilities):
                target = done if int(token) in eos else following
                target[*text, int(token)] = probability * step_probabilities[token]
        open_ = following
    return done | open_


def following_letters(session: Any, text: tuple[int, ...], pattern: str) -> np.ndarray:
    """Bool [vocabulary], from the pattern's language, all texts of up to three letters: what may follow, and whether
    the end may.
    """
    letters = {i: session.tokenizer.decode([i]) for i in range(3, session.tokenizer.get_vocab_size())}
    said = "".join(letters[i] for i in text)
    begun = {"".join(x) for n in range(4) for x in product("abcdefg", repeat=n)} if "a-z" not in pattern else None
    allowed = np.zeros(64, np.bool_)
    for i, letter in letters.items():
        if begun is None:
            allowed[i] = bool(re.fullmatch(pattern, said + letter))
        else:
            allowed[i] = any(whole.startswith(said + letter) and re.fullmatch(pattern, whole) for whole in begun)
    allowed[session.manifest.model.eos_token_ids] = bool(re.fullmatch(pattern, said))
    return allowed


def check_joint(session: Any, given: dict[str, Any], runs: int = 3000, length: int = 3, pattern: str = "") -> None:
    wanted = joint(session, given, set(session.manifest.model.eos_token_ids), length, pattern)
    assert abs(sum(wanted.values()) - 1) < 1e-9
    grammar = Grammar.regex(pattern) if pattern else None
    answers = [
        session.generate(PROMPT, max_new_tokens=length, sampling=Sampling(**given, seed=seed), grammar=grammar)
        for seed in range(runs)
    ]
    seen = Counter(tuple(answer.token_ids) for answer in answers)
    assert set(seen) <= set(wanted) and sum(answer.stats.steps for answer in answers) > (
        runs / 20 if pattern else runs / 2
    )
    assert p_value(seen, wanted, runs) > P


@pytest.mark.parametrize("given", TRUNCATED, ids=str)
def test_answers_follow_the_true_joint_distribution(bundles: Bundles, given: dict[str, Any]) -> None:
    check_joint(load(bundles("fp32"), tree=8, threads=1), given)


@pytest.mark.parametrize(("bundle", "rows", "pruning"), DRAFTED, ids=str)
def test_no_tree_pruning_or_drafter_changes_the_distribution(
    bundles: Bundles, bundle: str, rows: int, pruning: Pruning | None
) -> None:
    check_joint(load(bundles(bundle), tree=rows, threads=1, pruning=pruning), TRUNCATED[0])


@pytest.mark.parametrize(("bundle", "pattern", "pruning"), CONSTRAINED, ids=str)
def test_under_a_grammar_each_token_follows_the_renormalised_distribution(
    bundles: Bundles, bundle: str, pattern: str, pruning: Pruning | None
) -> None:
    given = (
        {"temperature": 2.0, "top_k": 4}
        if "a-z" in pattern
        else {"temperature": 2.0, "top_p": 0.95, "repetition_penalty": 1.3}
    )
    check_joint(load(bundles(bundle), tree=8, threads=1, pruning=pruning), given, runs=1500, pattern=pattern)


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_a_seed_gives_the_same_text_with_any_tree(bundles: Bundles, precision: str) -> None:
    folder = bundles(precision)
    plain = load(folder, tree="plain", threads=1)
    trees = [load(folder, tree=rows, threads=1) for rows in (2, 5, 9, 16)]
    given = {"temperature": 1.4, "top_p": 0.9, "repetition_penalty": 1.1}
    drafted = 0
    for seed in range(40):
        sampling = Sampling(**given, seed=seed)
        answer = plain.generate(PROMPT, max_new_tokens=30, sampling=sampling).token_ids
        for session in trees:
            found = session.generate(PROMPT, max_new_tokens=30, sampling=sampling)
            assert found.token_ids == answer
            drafted += sum(found.drafted)
    assert drafted > 20


def test_uniform_numbers_are_uniform_over_positions_and_over_seeds() -> None:
    runs, cells = 4000, 64
    rows = {
        "positions": [Sampling(1.0, seed=7).uniform(i) for i in range(runs)],
        "seeds": [Sampling(1.0, seed=i).uniform(100) for i in range(runs)],
    }
    for numbers in rows.values():
        assert min(numbers) >= 0 and max(numbers) <= 1 - 1 / STEPS
        counts = Counter(int(n * cells) for n in numbers)
        assert p_value(counts, dict.fromkeys(range(cells), 1 / cells), runs) > P
        pairs = Counter((int(a * 8), int(b * 8)) for a, b in zip(numbers[::2], numbers[1::2], strict=True))
        assert p_value(pairs, {(a, b): 1 / 64 for a in range(8) for b in range(8)}, runs // 2) > P


def test_without_a_seed_every_answer_has_its_own(bundles: Bundles) -> None:
    plain = load(bundles("fp32"), threads=1, tree="plain")
    for one, other in ((Sampling(1.0),) * 2, (Sampling(1.0), Sampling(1.0))):
        answers = [plain.generate(PROMPT, max_new_tokens=30, sampling=s).token_ids for s in (one, other)]
        assert answers[0] != answers[1]
    assert Sampling(1.0).for_answer() != Sampling(1.0).for_answer()
    for kept in (Sampling(1.0, seed=3), Sampling()):
        assert kept.for_answer() is kept
    assert Sampling(1.0, seed=3).uniform(9) == Sampling(0.5, seed=3).uniform(9)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"temperature": -1.0}, "temperature -1.0"),
        ({"temperature": 1e-38}, "temperature 1e-38"),
        ({"repetition_penalty": 1e-40}, "repetition_penalty 1e-40"),
        ({"temperature": float("nan")}, "temperature nan"),
        ({"temperature": 10**400}, "temperature 1000"),
        ({"top_k": 2.5}, "top_k 2.5"),
        ({"top_p": 0.0}, "top_p 0.0"),
        ({"min_p": 1.5}, "min_p 1.5"),
        ({"repetition_penalty": 0}, "repetition_penalty 0"),
        ({"seed": -1}, "seed -1"),
    ],
)
def test_parameters_out_of_range_are_refused(given: dict[str, Any], found: str) -> None:
    with pytest.raises(ConfigError, match=found):
        Sampling(**given)
