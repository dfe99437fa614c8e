"""Sampled text against PyTorch: transformers' model and logits processors say what may come, and how often.

Every token of an answer is placed within its distribution (`tests.support.pytorch_sampling`), of every drafter under
every processor; all drafters together show what one alone is too short for. Under grammars whole answers are counted.
Seeds are fixed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from functools import cache
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from streamspec.errors import ConfigError
from streamspec.export import export_bundle
from streamspec.runtime import Grammar, Pruning, Sampling, Session, load
from streamspec.runtime.sampling.sampling_params import STEPS
from tests.support.chi_square import p_value
from tests.support.pytorch_sampling import distributions, places
from tests.support.tiny_drafters import DRAFTERS, letters, tiny_drafter
from tests.support.tiny_models import tiny_model, tiny_tokenizer

Bundles = Callable[[str], Path]
PROMPT = [5, 9, 11, 3]
PROCESSORS: list[dict[str, Any]] = [
    {"temperature": 0.7},
    {"temperature": 1.5, "top_k": 5},
    {"temperature": 1.2, "top_p": 0.6},
    {"temperature": 1.5, "min_p": 0.2},
    {"temperature": 1.0, "repetition_penalty": 0.5},
    {"temperature": 1.0, "frequency_penalty": -1.5},
    {"temperature": 1.0, "presence_penalty": -2.0},
    {"temperature": 1.0, "logit_bias": {5: 3.0, 20: 4.0, 33: -5.0}},
    {"temperature": 1.4, "top_k": 12, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.2, "presence_penalty": 0.5},
]
SOURCES = ("ngram", "recycling", "lookahead")  # of drafts, without a drafter
ANSWERS, LENGTH = 8, 20  # of each drafter under each processor
CELLS = 8
TREES: list[tuple[str, int, Pruning | None]] = [  # drafter, rows of the tree, pruning
    *((name, 16, None) for name in DRAFTERS),
    ("streams", 2, None),
    ("streams", 12, Pruning(4)),
    ("streams", 12, Pruning(min_probability=0.05)),
    *((name, 16, None) for name in SOURCES),
]
CONSTRAINED: list[tuple[str, str, Pruning | None]] = [  # bundle, pattern, pruning
    ("fp32", r"[a-g]{2}e?", None),
    ("fp32", r"(ab|a[c-e]|[fg]{2,3})", Pruning(4)),
    ("full", r"[a-z ]+", None),
]
P = 0.001 / ((2 * len(TREES) + 3) * len(PROCESSORS) + len(CONSTRAINED) + 4)  # Bonferroni over this file


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The bundle in fp32 of a drafter of `DRAFTERS`, or of none, over one base in the folder beside it."""
    folder = tmp_path_factory.mktemp("drafting")
    torch.set_num_threads(1)
    tiny_model("llama").save_pretrained(folder / "base")
    tiny_tokenizer().save_pretrained(folder / "base")

    @cache
    def bundle(name: str) -> Path:
        adapter, options = None, {}
        if name in DRAFTERS:
            adapter, options = folder / f"{name}-adapter", DRAFTERS[name][1]
            data, answers = letters(folder / "letters.jsonl"), folder / "answers.jsonl"
            tiny_drafter(adapter, folder / "base", data, name, epochs=1.0, answers=answers)
        export_bundle(folder / "base", adapter, folder / name, "fp32", progress=lambda line: None, **options)
        return folder / name

    return bundle


def even(numbers: list[list[float]]) -> float:
    """Probability that numbers as uneven as those of these answers come of even ones."""
    cells = Counter(int(CELLS * number) for answer in numbers for number in answer)
    return p_value(cells, dict.fromkeys(range(CELLS), 1 / CELLS), cells.total())


def independent(numbers: list[list[float]]) -> float:
    """The same, of each number together with the next one of its answer."""
    pairs = Counter(
        (int(CELLS * one), int(CELLS * next_)) for answer in numbers for one, next_ in list(pairwise(answer))[::2]
    )
    return p_value(pairs, dict.fromkeys(product(range(CELLS), repeat=2), CELLS**-2), pairs.total())


@pytest.fixture(scope="module")
def sessions(drafting: Callable[[str], Path]) -> Callable[[int], Session]:
    """Sessions by their place in `TREES`."""

    @cache
    def session(number: int) -> Session:
        name, rows, pruning = TREES[number]
        sources: dict[str, Any] = {source: source == name for source in SOURCES}
        return load(drafting("none" if name in SOURCES else name), tree=rows, threads=1, pruning=pruning, **sources)

    return session


@pytest.mark.parametrize("given", PROCESSORS, ids=str)
def test_each_token_follows_pytorchs_distribution_with_every_drafter(
    drafting: Callable[[str], Path], sessions: Callable[[int], Session], given: dict[str, Any]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(drafting("none").parent / "base")
    likelier, raised, accepted = list[list[float]](), list[list[float]](), list[int]()
    for number, tree in enumerate(TREES):
        seed = 1000 * (len(TREES) * PROCESSORS.index(given) + number)
        sampled = [Sampling(**given, seed=seed + answer) for answer in range(ANSWERS)]
        answers = [sessions(number).generate(PROMPT, max_new_tokens=LENGTH, sampling=one) for one in sampled]
        found = places(model, PROMPT, [answer.token_ids for answer in answers], given, seed)
        assert min(map(even, found)) > P, tree
        likelier, raised = likelier + found[0], raised + found[1]
        accepted.append(sum(sum(answer.drafted) for answer in answers))
    assert min(even(likelier), even(raised), independent(likelier)) > P
    assert sum(map(bool, accepted)) > 0.8 * len(TREES) and sum(accepted) > 4 * len(TREES)


def joint(session: Any, model: Any, given: dict[str, Any], length: int, pattern: str) -> dict[tuple[int, ...], float]:
    """Probability of every answer of at most `length` tokens, by PyTorch and by the text of its letters where the
    `pattern` says what may come.
    """
    open_, done, eos = {(): 1.0}, {}, set(session.manifest.model.eos_token_ids)
    for _ in range(length):
        following: dict[tuple[int, ...], float] = {}
        for text, probability in open_.items():
            allowed = torch.from_numpy(following_letters(session, text, pattern))
            [shares] = distributions(model, [[*PROMPT, *text]], given, len(PROMPT), allowed).tolist()
            for token, share in enumerate(shares):
                if share:
                    target = done if token in eos else following
                    target[*text, token] = probability * share
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


@pytest.mark.parametrize(("bundle", "pattern", "pruning"), CONSTRAINED, ids=str)
def test_under_a_grammar_each_token_follows_the_renormalised_distribution(
    bundles: Bundles, bundle: str, pattern: str, pruning: Pruning | None
) -> None:
    given = (
        {"temperature": 2.0, "top_k": 4}
        if "a-z" in pattern
        else {"temperature": 2.0, "top_p": 0.95, "repetition_penalty": 1.3}
    )
    session, length, runs = load(bundles(bundle), tree=8, threads=1, pruning=pruning), 3, 250
    model = AutoModelForCausalLM.from_pretrained(bundles(bundle).parent / "base")
    wanted = joint(session, model, given, length, pattern)
    assert abs(sum(wanted.values()) - 1) < 1e-9
    grammar = Grammar.regex(pattern)
    answers = [
        session.generate(PROMPT, max_new_tokens=length, sampling=Sampling(**given, seed=seed), grammar=grammar)
        for seed in range(runs)
    ]
    seen = Counter(tuple(answer.token_ids) for answer in answers)
    assert set(seen) <= set(wanted) and sum(answer.stats.steps for answer in answers) > runs / 20
    assert p_value(seen, wanted, runs) > P


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_a_seed_gives_the_same_text_with_any_tree(bundles: Bundles, precision: str) -> None:
    folder = bundles(precision)
    plain = load(folder, tree="plain", threads=1)
    trees = [load(folder, tree=rows, threads=1) for rows in (2, 5, 9, 16)]
    given = {"temperature": 1.4, "top_p": 0.9, "repetition_penalty": 1.1}
    drafted = 0
    for seed in range(16):
        sampling = Sampling(**given, seed=seed)
        answer = plain.generate(PROMPT, max_new_tokens=30, sampling=sampling).token_ids
        for session in trees[seed % 2 :: 2]:
            found = session.generate(PROMPT, max_new_tokens=30, sampling=sampling)
            assert found.token_ids == answer
            drafted += sum(found.drafted)
    assert drafted > 8


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
