"""Options of a call and of a load: one dataclass each, whose fields the keywords and the command line share."""

from __future__ import annotations

import pickle
from dataclasses import fields
from typing import Any, get_type_hints

import pytest

from streamspec.errors import ConfigError
from streamspec.runtime import GenerationOptions, LoadOptions, Pruning, Sampling, load
from streamspec.runtime.options import GenerationKwargs, LoadKwargs
from tests.runtime.test_session import saying


def types(*options: type) -> dict[str, Any]:
    return {field.name: get_type_hints(one)[field.name] for one in options for field in fields(one) if field.init}


def test_keywords_are_the_fields() -> None:
    assert get_type_hints(GenerationKwargs) == types(GenerationOptions, Sampling) | {"max_tokens": int}
    assert get_type_hints(LoadKwargs) == types(LoadOptions)


@pytest.mark.parametrize("options", [GenerationOptions, LoadOptions, Sampling])
def test_every_field_has_its_help(options: type) -> None:
    assert all(field.metadata["help"] for field in fields(options) if field.init)


def test_sampling_may_be_given_as_keywords() -> None:
    made = GenerationOptions.of(temperature=0.7, top_p=0.9, seed=1, max_new_tokens=4)
    assert made == GenerationOptions(max_new_tokens=4, sampling=Sampling(0.7, top_p=0.9, seed=1))
    assert GenerationOptions.of() == GenerationOptions()
    session = saying("abc", rows=1)
    answer = session.generate("p", temperature=0.7, top_p=0.9, seed=1)
    assert answer.text == "abc" and session.runner.sampling == Sampling(0.7, top_p=0.9, seed=1)  # type: ignore[attr-defined]


def test_sampling_in_two_ways_is_refused_in_one_line() -> None:
    with pytest.raises(ConfigError, match="sampling beside temperature, seed; expected one or the other") as caught:
        saying("abc").generate("p", sampling=Sampling(), temperature=0.7, seed=1)
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="temperature -1"):
        saying("abc").generate("p", temperature=-1)


def test_options_are_given_whole_or_as_keywords() -> None:
    options = GenerationOptions(max_new_tokens=2)
    assert saying("abc").generate("p", options).text == "ab"
    with pytest.raises(ConfigError, match="options beside stop"):
        saying("abc").generate("p", options, stop="c")
    with pytest.raises(ConfigError, match="options of type dict; expected a GenerationOptions"):
        saying("abc").generate("p", {"max_new_tokens": 2})  # type: ignore[arg-type]


def test_a_wrong_name_is_told_the_nearest_right_one() -> None:
    with pytest.raises(ConfigError, match="an option temprature; expected temperature; correct its name"):
        saying("abc").generate("p", temprature=0.7)  # type: ignore[call-arg]
    with pytest.raises(
        ConfigError, match=r"an option zzz; expected chat_template_kwargs or .*max_tokens.*; correct its name"
    ):
        saying("abc").stream("p", zzz=1)  # type: ignore[call-arg]


def test_max_tokens_is_another_name_of_max_new_tokens() -> None:
    assert saying("abc").generate("p", max_tokens=2).text == "ab"
    for wrong in (0, -1, 1.5, True, "many"):
        with pytest.raises(ConfigError, match=f"^max_tokens {wrong!r}; expected a whole number of at least 1"):
            saying("abc").generate("p", max_tokens=wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="max_tokens beside max_new_tokens"):
        saying("abc").generate("p", max_tokens=2, max_new_tokens=2)


@pytest.mark.parametrize("wrong", ["hot", -0.5, 101, True, False, None])
def test_a_wrong_temperature_is_told_the_range(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=f"^temperature {wrong!r}; expected 0, or a number from 0.001 to 100; "):
        saying("abc").generate("p", temperature=wrong)


@pytest.mark.parametrize("tree", ["all", 0, True, None])
def test_a_load_s_options_are_checked_before_anything_is_opened(tree: Any) -> None:
    with pytest.raises(ConfigError, match="tree"):
        load("nowhere", tree=tree)


def test_pruning_is_a_value_within_bounds() -> None:
    pruning = Pruning(min_probability=0.1)
    assert pruning == Pruning(None, 0.1) and hash(pruning) == hash(Pruning(None, 0.1))
    for wrong in ({"rows": 0}, {"min_probability": 1.0}, {"min_probability": -0.1}):
        with pytest.raises(ConfigError, match="pruning"):
            Pruning(**wrong)


def test_options_survive_pickling() -> None:
    for options in (GenerationOptions(stop="x", sampling=Sampling(0.5, seed=2)), LoadOptions(tree=4), Pruning(4, 0.1)):
        assert pickle.loads(pickle.dumps(options)) == options
