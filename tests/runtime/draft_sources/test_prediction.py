"""Predicted outputs: where the text goes on in them after an edit, that they end a pause, and that no token depends on
them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamspec.errors import ConfigError
from streamspec.runtime import GenerationOptions, Grammar, load
from streamspec.runtime.draft_sources.ngram import CODES
from streamspec.runtime.draft_sources.prediction import (
    ANCHORED,
    ASSUMED,
    BEGINNING,
    CONTINUATION,
    CORRECTED,
    FOUND,
    KEPT,
    LENGTHS,
    MEASURED,
    NEAR,
    REPEATED,
    REPLACED,
    REPLACED_LONG,
    PredictionIndex,
    prediction_source,
)
from streamspec.runtime.draft_sources.registry import OF_ANSWER, SOURCES, brought
from streamspec.runtime.draft_sources.source import DraftSource
from streamspec.runtime.text.token_bytes import TokenBytes
from tests.runtime.decoding.test_loop import decode
from tests.runtime.test_session import TOKENIZER, saying
from tests.support.toy_runner import Setup, ToyRunner, adaptive, hashed, scripted

FILE, SPELLED = list(range(100, 300)), partial(TokenBytes, TOKENIZER)


def word(token: int) -> str:
    """The text of a token where each is a word, none of which begins like another."""
    return f" {chr(0x4E00 + token)}"


def following(prediction: list[int], *answer: int) -> PredictionIndex:
    index = PredictionIndex(prediction, word)
    index.extend([7, 8, 9])  # the prompt
    index.extend(answer)
    return index


def paths(index: PredictionIndex, depth: int = 3) -> dict[tuple[int, ...], int]:
    """What is offered after the text, cut off at `depth`: the tokens of each path and the level of its first."""
    found = index.find(depth)
    if found is None:
        return {}
    made = dict[int, tuple[int, ...]]()
    for node, (token, parent) in enumerate(zip(found.tokens, found.parents, strict=True)):
        made[node] = (*made.get(parent, ()), token)
    ends = set(made) - set(found.parents)
    firsts = {made[node]: level for node, level in enumerate(found.levels) if found.parents[node] < 0}
    return {made[node]: firsts[made[node][:1]] for node in sorted(ends)}


def source(prediction: list[int]) -> DraftSource:
    made = prediction_source("x", SPELLED)
    assert made is not None
    return replace(made, begin=lambda: PredictionIndex(prediction, word))


def test_a_text_that_follows_is_offered_what_comes_next_to_the_last_row() -> None:
    found = following(FILE, *FILE[:5]).find(1000)
    assert found is not None and found.tokens == FILE[5 : 5 + CONTINUATION]
    assert found.parents == list(range(-1, CONTINUATION - 1))
    assert found.levels == sorted(found.levels) and found.levels[-1] == len(LENGTHS)
    short = following(FILE, *FILE[:5]).find(2)
    assert short is not None and short.tokens == FILE[5:7]
    assert following(FILE, *FILE).find(9) is None


def test_the_prompt_is_no_part_of_the_answer() -> None:
    index = PredictionIndex(FILE, word)
    index.extend(FILE[:50])
    assert index.came == 0
    index.extend(FILE[:2])
    assert paths(index) == {(102, 103, 104): len([n for n in LENGTHS if n <= BEGINNING + 2])}


@pytest.mark.parametrize(
    ("new", "goes_on", "where"),
    [
        ([1], 111, REPLACED),
        ([1, 2], 112, REPLACED_LONG),
        ([1, 2, 3, 4, 5, 6, 110], 111, FOUND),  # after an insertion
        ([118], 119, FOUND),  # after a deletion
        ([1, 2, 118, 119], 120, 1),  # after a longer replacement
        ([1, 118, 119, 120], 121, 2),
        ([102, 103], 104, 1),  # back
    ],
)
def test_after_an_edit_the_text_goes_on_where_the_prediction_does(new: list[int], goes_on: int, where: int) -> None:
    offered = paths(following(FILE, *FILE[:10], *new))
    assert ((goes_on, goes_on + 1, goes_on + 2), where) in [
        (path, level if len(new) < 3 or level else 0) for path, level in offered.items()
    ]


def test_of_equal_places_the_one_after_the_last_certain_place_is_taken() -> None:
    prediction = [1, 2, 3, *FILE[:20], 1, 2, 3, *FILE[20:40], 1, 2, 3, *FILE[40:60]]
    certain = [1, 2, 3, *FILE[:ANCHORED]]
    assert next(iter(paths(following(prediction, *certain, 50, 1, 2, 3)))) == (120, 121, 122)
    assert next(iter(paths(following(prediction, *FILE[40:60], 50, 1, 2, 3)))) == (140, 141, 142)  # none after it


def test_three_tokens_at_a_wrong_place_lead_no_further_away() -> None:
    prediction = [*FILE[:20], *FILE[30:50], 1, 2, 3, *FILE[50:60], *FILE[30:33], 7, 7]
    index = following(prediction, *FILE[:20], 1, 2, 3, 60, 61, FILE[30], FILE[31], FILE[32])
    assert next(iter(paths(index))) == tuple(FILE[33:36])


def test_an_edit_is_made_again_where_the_same_tokens_come_again() -> None:
    """A name of two tokens is replaced by one of three; it is offered beside the old one."""
    prediction = [*FILE[:10], 50, 51, *FILE[10:30], 50, 51, *FILE[30:40], 50, 52]
    index = following(prediction, *FILE[:10], 1, 2, 3, *FILE[10:28])
    again = following(prediction, *FILE[:10], 1, 2, 3, *FILE[10:30])
    assert list(paths(index, 5)) == [(128, 129, 1, 2, 3), (128, 129, 50, 51, 130)]
    assert paths(again) == {(1, 2, 3): REPEATED, (50, 51, 130): KEPT}
    again.extend([1, 2, 3, *FILE[30:39]])
    assert list(paths(again)) == [(139, 50, 52)]  # which is another name
    gone = following([9, *FILE[:10], 9, *FILE[10:]], *FILE[:10])  # a deletion, which is made again
    assert list(paths(gone)) == [(110, 111, 112), (9, 110, 111)]


def test_one_token_that_agrees_says_nothing_far_away() -> None:
    many = [1] * 40
    assert paths(following(FILE, *FILE[:10], *many, 115)) == {(116, 117, 118): FOUND}
    assert paths(following(FILE, *FILE[:10], *many, 190)) == {}
    assert paths(following(FILE, *FILE[:10], *many, 190, 191)) == {(192, 193, 194): 1}
    last = FILE[10 + NEAR]
    assert (last + 1, last + 2, last + 3) in paths(following(FILE, *FILE[:10], last))
    assert (last + 2, last + 3, last + 4) not in paths(following(FILE, *FILE[:10], last + 1))


@pytest.mark.parametrize(
    ("new", "offered"),
    [
        # One token in the place of a word of two that begins alike, and of another one.
        ([" WITHOUT"], {" WAR|RANT|IES": CORRECTED}),
        ([" BY"], {" WAR|RANT|IES": REPLACED}),
        ([" O", "THER"], {" WAR|RANT|IES": REPLACED_LONG}),  # one word
        ([" NO", " SUCH"], {" OR| OF": REPLACED_LONG}),  # two words
        # After the beginning of a word, the rest of it is gone.
        ([" WITH", " WAR"], {"RANT|IES| OR": FOUND, " OR| OF": CORRECTED}),
        ([" WITH", " NO"], {" OR| OF": REPLACED}),
    ],
)
def test_a_replacement_ends_where_a_word_does(new: list[str], offered: dict[str, int]) -> None:
    old = [" AS", " IS", ",", " WITH", "OU", " WAR", "RANT", "IES", " OR", " OF"]
    words = [*old, " WITHOUT", " BY", " O", "THER", " NO", " SUCH"]
    index = PredictionIndex(list(range(len(old))), words.__getitem__)
    index.extend([])
    index.extend([0, 1, 2, *map(words.index, new)])
    assert {"|".join(map(words.__getitem__, path)): level for path, level in paths(index).items()} == offered


def test_without_spaces_a_token_replaces_a_token() -> None:
    """Chinese characters are words of their own."""
    words = ["今天", "天气", "很", "好", "我们", "去", "公园", "下雨"]
    index = PredictionIndex(list(range(7)), words.__getitem__)
    index.extend([])
    index.extend([0, 1, 2, 7])  # 下雨 in the place of 好
    found = index.find(8)
    assert found is not None and [words[token] for token in found.tokens] == ["我们", "去", "公园"]


def test_a_long_run_without_a_word_costs_a_few_tokens() -> None:
    asked: list[int] = []

    def text(token: int) -> str:
        asked.append(token)
        return "a"

    index = PredictionIndex([9] * 10_000, text)
    index.extend([])
    index.extend([9, 9, 9, 5])
    index.find(8)
    assert len(asked) < 100


def test_tokens_that_came_are_counted_once() -> None:
    assert following(FILE, *FILE).came == len(FILE)
    assert following(FILE, *FILE[:50], 1, 2, *FILE[60:]).came == len(FILE) - 10
    assert following(FILE, *FILE[:50], *FILE[:50]).came == 50
    assert following([0, 1, 0, 0, 0], 0, 0, 0).came == 3
    assert following(FILE, 1, 2, 3).came == following([], 1).came == 0


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 4), max_size=60), st.lists(st.integers(0, 4), max_size=60), st.integers(1, 70))
def test_any_text_is_followed(prediction: list[int], answer: list[int], limit: int) -> None:
    index = following(prediction, *answer)
    found = index.find(limit)
    assert 0 <= index.came <= min(len(prediction), len(answer))
    if found is None:
        return
    tokens, parents, levels = found
    assert 0 < len(tokens) == len(parents) == len(levels)
    assert len(set(zip(tokens, parents, strict=True))) == len(tokens)  # siblings differ
    depths = list[int]()
    for node, parent in enumerate(parents):
        assert parent < node
        depths.append(1 if parent < 0 else depths[parent] + 1)
    assert max(depths) <= limit and set(levels) <= set(range(len(ASSUMED)))


def test_tokens_beyond_the_characters_are_offered_as_they_are() -> None:
    assert list(paths(following([CODES + 1, CODES + 2, 3], CODES + 1))) == [(CODES + 2, 3)]


def test_more_agreement_is_a_surer_token() -> None:
    alone = [rates[0] for rates in ASSUMED[: len(LENGTHS) + 1]]
    assert alone == sorted(alone) and LENGTHS[-1] == MEASURED


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 40), st.integers(0, 3), st.integers(2, 20), st.booleans())
def test_output_is_plain_decoding_s_with_any_prediction(
    seed: int, limit: int, gamma: int, rows: int, near: bool
) -> None:
    rule, random = hashed(4, seed), np.random.default_rng(seed)
    plain, *_ = decode(ToyRunner(rule, 10, context=60), Setup(limit), [1, 2, 3])
    prediction = random.integers(0, 4, 40).tolist()
    if near:
        prediction = [token if random.random() < 0.8 else 9 for token in plain]
    runner = ToyRunner(rule, 10, gamma=gamma, width=2, context=60, seed=seed)
    assert decode(runner, Setup(limit, rows=rows, sources=(source(prediction),)), [1, 2, 3])[0] == plain


def test_an_edited_text_takes_few_steps() -> None:
    """Of 400 tokens every twentieth is another one, ten are new and thirty are gone."""
    old = np.random.default_rng(0).integers(0, 5000, 430).tolist()
    new = [*old[:150], *range(5000, 5010), *old[150:250], *old[280:]]
    new[19::20] = [5999] * len(new[19::20])
    runner = ToyRunner(scripted(3, new), 6000, gamma=0, context=900)
    costs = 1 + 0.1 * np.arange(64)
    setup = Setup(len(new), rows=64, costs=costs, ngram=False, sources=(source(old),), adaptive=adaptive())
    tokens, _, run = decode(runner, setup, [1, 2, 3])
    assert tokens == new
    spent = sum(costs[rows - 1] for rows, _ in runner.calls)
    assert len(new) > 4 * spent and run.stats.sources["prediction"].accepted > 0.8 * len(new)


def test_a_prediction_that_comes_true_ends_a_pause() -> None:
    old = np.random.default_rng(0).integers(0, 5000, 200).tolist()
    costs = np.full(64, 2.0)
    costs[0] = 1.0

    def plain_steps(predicted: DraftSource) -> int:
        state = adaptive()
        state.controller.expect(1.0, 2.0)  # nothing has paid so far
        assert not state.controller.on
        runner = ToyRunner(scripted(3, [*range(5000, 5040), *old]), 6000, gamma=0, context=900)
        setup = Setup(240, rows=64, costs=costs, ngram=False, sources=(predicted,), adaptive=state)
        assert len(decode(runner, setup, [1, 2, 3])[0]) == 240
        return sum(rows == 1 for rows, _ in runner.calls[1:])

    assert plain_steps(source(old)) < 50
    assert plain_steps(replace(source(old), wakes=False)) > 100


# ---- from the option to the text


def test_a_prediction_is_of_one_answer_alone() -> None:
    assert not set(OF_ANSWER) & set(SOURCES)
    assert brought(GenerationOptions(), SPELLED) == brought(GenerationOptions(prediction=""), SPELLED) == ()
    session = saying("one two three four", rows=30, gamma=0)
    predicted = session.generate("p", prediction="one two 3 four")
    assert predicted.text == "one two three four" and predicted.stats.sources["prediction"].accepted > 8
    assert "prediction" not in session.generate("p").stats.sources
    assert "prediction" not in session.generate("p", prediction="one two three four", speculate=False).stats.sources


@pytest.mark.parametrize("wrong", [5, b"text", ["text"], "half a \ud800"])
def test_what_is_no_text_is_refused_in_one_line(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"prediction .*; expected text that UTF-8 can hold"):
        GenerationOptions(prediction=wrong)


@pytest.mark.parametrize("name", ["lettered int8", "lettered full"])
@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"temperature": 1.0, "seed": 3},
        {"frequency_penalty": 0.5},
        {"grammar": Grammar.regex("[a-f]{30,40}")},
        {"stop": "zz"},
    ],
)
def test_answers_are_plain_decoding_s(bundles: Callable[[str], Path], name: str, asked: dict[str, Any]) -> None:
    session = load(bundles(name), threads=1, tree=16)
    plain = session.generate("abc", max_new_tokens=40, speculate=False, **asked)
    text = plain.text
    if not asked:
        asked = {"stop": text[len(text) // 2 :][:3]}  # in the middle of a draft
        plain = session.generate("abc", max_new_tokens=40, speculate=False, **asked)
    for prediction in (text, text[:8] + "xy" + text[8:], text[:5] + text[9:], "nothing of it", text * 3):
        chunks = list(session.stream("abc", max_new_tokens=40, prediction=prediction, **asked))
        assert [token for chunk in chunks for token in chunk.token_ids] == plain.token_ids
        assert ("".join(chunk.text for chunk in chunks), chunks[-1].finish_reason) == (plain.text, plain.finish_reason)
        assert sum(chunk.stats.new_tokens > 0 for chunk in chunks) < len(plain.token_ids) or prediction != text
