"""Answers that follow a grammar: always valid, the same with and without speculation, and hostile grammars bounded."""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from streamspec.cli import app
from streamspec.errors import BundleError, ConfigError
from streamspec.runtime import Completion, Grammar, Logprob, Sampling, Session, load
from streamspec.runtime.sampling.sampling_params import GREEDY
from streamspec.runtime.text.grammar import MAX_TEXT, Vocabulary
from streamspec.schemas.schema_checks import MAX_PATTERN
from tests.support.byte_tokenizers import EOS, byte_fallback, byte_level
from tests.support.random_answers import accepts
from tests.support.toy_runner import Setup, ToyRunner, adaptive, scripted

Bundles = Callable[[str], Path]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["cat", "dog", 7]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
HOT = {"temperature": 1.3, "top_p": 0.95, "repetition_penalty": 1.2}


def open_session(folder: Path, tree: int | str = 12) -> Session:
    return load(folder, threads=1, tree=tree, cache_dir=folder.parent / "cache")


@cache
def opened(folder: Path) -> Session:
    """One session for all examples of a property."""
    return open_session(folder)


def check(
    session: Session, grammar: Grammar, prompt: str = "x", tokens: int = 150, sampling: Sampling = GREEDY
) -> Completion:
    """The answer, which is the same with and without speculation."""
    plain, spec = (
        session.generate(
            prompt, max_new_tokens=tokens, grammar=grammar, sampling=sampling, speculate=speculate, logprobs=2
        )
        for speculate in (False, True)
    )
    assert (spec.token_ids, spec.text, spec.finish_reason) == (plain.token_ids, plain.text, plain.finish_reason)
    assert_same(session, plain.logprobs, spec.logprobs)
    assert spec.stats.forced_tokens == plain.stats.forced_tokens
    return spec


def assert_same(session: Session, plain: list[Logprob] | None, spec: list[Logprob] | None) -> None:
    """Log-probabilities are equal bit for bit; with static graphs, whose rows are not, nearly so."""
    assert plain is not None and spec is not None
    if session.manifest.static is None:
        assert plain == spec
    else:
        assert [(said.token, said.logprob) for said in spec] == [
            (said.token, pytest.approx(said.logprob, abs=1e-3)) for said in plain
        ]


leaves = st.one_of(
    st.sampled_from(
        [
            {"type": "boolean"},
            {"type": "null"},
            {"type": "number", "minimum": -2, "maximum": 3},
            {"type": "string", "pattern": "^[a-f]{2,4}$"},
        ]
    ),
    st.builds(
        lambda a, b: {"type": "integer", "minimum": min(a, b), "maximum": max(a, b)},
        st.integers(-2000, 2000),
        st.integers(-2000, 2000),
    ),
    st.builds(
        lambda a, b: {"type": "string", "minLength": min(a, b), "maxLength": max(a, b)},
        st.integers(0, 6),
        st.integers(0, 6),
    ),
    st.builds(
        lambda values: {"enum": values},
        st.lists(
            st.one_of(st.integers(-(2**53), 2**53), st.text(max_size=5), st.booleans(), st.none()),
            min_size=1,
            max_size=4,
        ),
    ),
    st.builds(lambda value: {"const": value}, st.text(max_size=8)),
)


def compound(parts: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    arrays = st.builds(
        lambda items, a, b: {"type": "array", "items": items, "minItems": min(a, b), "maxItems": max(a, b)},
        parts,
        st.integers(0, 3),
        st.integers(0, 3),
    )
    objects = st.builds(
        lambda properties, count: {
            "type": "object",
            "properties": properties,
            "required": [*properties][:count],
            "additionalProperties": False,
        },
        st.dictionaries(st.text(max_size=5), parts, max_size=3),
        st.integers(0, 3),
    )
    return st.one_of(
        arrays, objects, st.builds(lambda options: {"anyOf": options}, st.lists(parts, min_size=1, max_size=3))
    )


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.recursive(leaves, compound, max_leaves=5), st.integers(0, 1000), st.booleans())
def test_every_finished_answer_satisfies_its_schema(
    bundles: Bundles, schema: dict[str, Any], seed: int, hot: bool
) -> None:
    session = opened(bundles("lettered fp32"))
    answer = check(session, Grammar.json_schema(schema), sampling=Sampling(**HOT, seed=seed) if hot else GREEDY)
    assert answer.finish_reason in ("eos", "length")
    if answer.finish_reason == "eos":
        jsonschema.validate(json.loads(answer.text), schema)


@pytest.mark.parametrize(
    "bundle",
    [
        "lettered fp32",
        "lettered int8",
        "lettered full",
        "lettered lora",
        "lettered jakiro",
        "lettered lists",
        "lettered eagle",
        "static lettered fp32",
        "static lettered full",
        "endless fp32",
        "device lettered full",
    ],
)
def test_with_every_drafter_constrained_text_is_the_plain_one(bundles: Bundles, bundle: str) -> None:
    session = open_session(bundles(bundle))
    grammar, forced, steps = Grammar.json_schema(PERSON), 0, 0
    for rows in (3, 16):
        session.policy = replace(session.policy, rows=rows)
        for sampling in (
            GREEDY,
            *(Sampling(**HOT, seed=seed) for seed in range(2)),
            Sampling(2.0, top_k=5, min_p=0.05, seed=9),
        ):
            answer = check(session, grammar, sampling=sampling)
            assert answer.finish_reason == ("stop" if "endless" in bundle else "eos")
            jsonschema.validate(json.loads(answer.text), PERSON)
            forced, steps = forced + answer.stats.forced_tokens, steps + answer.stats.steps
            assert "name" in answer.text and list(json.loads(answer.text)) == ["name", "age", "kind"]
    assert forced > 80 and steps > 12


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(
        [
            r"[a-c]{1,5}",
            r"(ab|cd)+x?",
            r"[0-9]{2}-[0-9]{2}",  # not \d: the matcher knows digits of a newer Unicode than Python does
            r"\"[^\"]{0,6}\"",
            r"(yes|no), [A-Z][a-z]{1,8}\.",
            "é+!",
            r"a.{0,3}\n",
        ]
    ),
    st.integers(0, 1000),
)
def test_every_finished_answer_is_matched_whole(bundles: Bundles, pattern: str, seed: int) -> None:
    session = opened(bundles("lettered fp32"))
    answer = check(session, Grammar.regex(pattern), tokens=60, sampling=Sampling(1.5, seed=seed))
    if answer.finish_reason == "eos":
        assert re.fullmatch(pattern, answer.text)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12), min_size=1, max_size=5),
    st.integers(0, 1000),
)
def test_a_choice_is_one_of_them(bundles: Bundles, texts: list[str], seed: int) -> None:
    session = opened(bundles("lettered fp32"))
    answer = check(session, Grammar.choice(texts), tokens=60, sampling=Sampling(1.5, seed=seed))
    assert answer.finish_reason == "eos" and answer.text in texts


def test_any_object(bundles: Bundles) -> None:
    session, grammar, finished = open_session(bundles("lettered fp32")), Grammar.json_object(), 0
    for seed in range(12):
        answer = check(session, grammar, sampling=Sampling(1.5, seed=seed))
        if answer.finish_reason == "eos":
            finished += 1
            assert isinstance(json.loads(answer.text), dict)
    assert finished


def test_an_answer_that_is_cut_says_so(bundles: Bundles) -> None:
    answer = check(open_session(bundles("lettered fp32")), Grammar.json_schema(PERSON), tokens=7)
    assert answer.finish_reason == "length" and len(answer.token_ids) == 7 and answer.text.startswith('{"name": ')


def test_separators_are_those_asked_for(bundles: Bundles) -> None:
    session = open_session(bundles("lettered fp32"))
    for separators in ((", ", ": "), (",", ":"), (",\n", " : ")):
        text = check(session, Grammar.json_schema(PERSON, separators)).text
        assert text == json.dumps(json.loads(text), separators=separators, ensure_ascii=False)
    with pytest.raises(ConfigError, match="separator ';'"):
        Grammar.json_schema(PERSON, (";", ":"))


def test_end_of_text_comes_where_the_grammar_may_end_and_nowhere_else(bundles: Bundles) -> None:
    session = open_session(bundles("lettered fp32"))
    state = session.vocabulary.start(Grammar.regex("aa?"))
    eos, a = session.manifest.model.eos_token_ids[0], session.tokenizer.token_to_id("a")
    assert np.flatnonzero(state.after().mask).tolist() == [a] and state.after().forced == a
    assert np.flatnonzero(state.after((a,)).mask).tolist() == [eos, a]
    assert np.flatnonzero(state.after((a, a)).mask).tolist() == [eos] and state.after((a, a)).forced is None
    text = session.vocabulary.start(Grammar.regex(".{1,9}"))
    assert not text.after().mask[: eos + 1].any()  # special tokens are no text


@pytest.mark.parametrize("bundle", ["lettered fp32", "static lettered fp32"])
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(1.0, seed=3)], ids=["greedy", "sampled"])
def test_the_next_answer_is_free_again(bundles: Bundles, bundle: str, sampling: Sampling) -> None:
    session = open_session(bundles(bundle))
    before = session.generate("x", max_new_tokens=30, sampling=sampling)
    check(session, Grammar.json_schema(PERSON))
    after = session.generate("x", max_new_tokens=30, sampling=sampling)
    assert after.token_ids == before.token_ids and after.logprobs is None and after.stats.forced_tokens == 0


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        (lambda: Grammar.json_schema({"type": "string", "description": "cite as <[1]>"}), '"a"'),
        (lambda: Grammar.json_schema({"enum": ["<[1]>", 'a\\"<[2]>']}), '"<[1]>"'),
        (lambda: Grammar.json_schema({"type": "string", "pattern": "^<[01]>$"}), '"<0>"'),
        (lambda: Grammar.regex("<[01]>"), "<1>"),
        (lambda: Grammar.choice(["a<[1]>", "b"]), "a<[1]>"),
    ],
)
def test_what_looks_like_a_special_token_within_a_text_is_text(grammar: Callable[[], Grammar], text: str) -> None:
    assert accepts(grammar(), text)


def test_sessions_over_the_same_weights_share_the_vocabulary(bundles: Bundles) -> None:
    session = open_session(bundles("lettered fp32"))
    other = session.another()
    check(session, Grammar.choice(["ab"]))
    assert other.vocabulary is session.vocabulary
    assert check(other, Grammar.choice(["ab"])).text == "ab"


@pytest.mark.parametrize("bundle", ["lettered fp32", "lettered int8", "lettered full", "static lettered fp32"])
def test_log_probabilities_are_the_models_own_whatever_is_chosen(bundles: Bundles, bundle: str) -> None:
    session = open_session(bundles(bundle))
    prompt = session.encode("abc")
    for options in ({}, {"sampling": Sampling(**HOT, seed=3)}, {"grammar": Grammar.json_schema(PERSON)}):
        plain = session.generate(prompt, max_new_tokens=25, speculate=False, logprobs=3, **options)
        spec = session.generate(prompt, max_new_tokens=25, logprobs=3, **options)
        assert spec.token_ids == plain.token_ids
        assert_same(session, plain.logprobs, spec.logprobs)
        assert plain.logprobs is not None and [said.token for said in plain.logprobs] == plain.token_ids
        rows = session.score(prompt + plain.token_ids, start=len(prompt) - 1).astype(np.float64)
        for said, row in zip(plain.logprobs, rows, strict=False):
            wanted = row - row.max() - np.log(np.exp(row - row.max()).sum())
            assert abs(said.logprob - wanted[said.token]) < 1e-3
            assert [round(value, 3) for _, value in said.top] == pytest.approx(
                np.sort(wanted)[::-1][:3].tolist(), abs=2e-3
            )
    assert session.generate(prompt, max_new_tokens=3, logprobs=0).logprobs[0].top == []  # type: ignore[index]


def test_log_probabilities_come_with_each_chunk_and_end_at_a_stop_string(bundles: Bundles) -> None:
    session = open_session(bundles("lettered fp32"))
    for chunk in session.stream("x", max_new_tokens=20, logprobs=1, grammar=Grammar.choice(["abcdefgh"]), stop="de"):
        assert chunk.logprobs is not None and [said.token for said in chunk.logprobs] == chunk.token_ids
    assert chunk.finish_reason == "stop"


BOMBS = [
    "((((a{100}){100}){100}){100}){100}",
    "a{4000000000}",
    "(" * 400 + "a{99}" + "){99}" * 400,
    "a{" + "9" * 5000 + "}",
]
WRONG: list[tuple[Callable[[], Grammar], str]] = [
    (lambda: Grammar.json_schema("{"), "no JSON"),
    (lambda: Grammar.json_schema("[]"), "is a list"),
    (lambda: Grammar.json_schema({"type": {1, 2}}), "no JSON"),
    (lambda: Grammar.json_schema({"const": float("nan")}), "no JSON"),
    (lambda: Grammar.json_schema({"type": "strin"}), "strin"),
    (lambda: Grammar.json_schema({"not": {"multipleOf": 2}}), "multipleOf in what may not hold"),
    (lambda: Grammar.json_schema({"type": "array", "uniqueItems": "no"}), "uniqueItems"),
    (lambda: Grammar.json_schema({"oneOf": [{"type": "integer"}, {"type": "number"}]}), "oneOf"),
    (lambda: Grammar.json_schema({"$ref": "http://127.0.0.1:9/x.json"}), "not present"),
    (lambda: Grammar.json_schema({"$ref": "file:///etc/passwd"}), "not present"),
    (lambda: Grammar.json_schema({"type": "integer", "minimum": 9, "maximum": 3}), "greater than maximum"),
    (lambda: Grammar.json_schema({"enum": []}), "anyOf is empty"),
    (lambda: Grammar.json_schema({"enum": [1, [{"a": 2**53 + 1}]]}), "number 9007199254740993"),
    (lambda: Grammar.json_schema({"properties": {"a": {"const": 10**1000}}}), "number 10000"),
    (lambda: Grammar.json_schema({"type": "integer", "minimum": 2**53 + 1}), "number 9007199254740993"),
    (lambda: Grammar.json_schema({"type": "string", "maxLength": 10**18}), "repetition|decimal|regex"),
    (lambda: Grammar.json_schema('{"items":' * 5000 + "{}" + "}" * 5000), "levels|no JSON"),
    (lambda: Grammar.json_schema({"description": "x" * MAX_TEXT}), "characters"),
    (lambda: Grammar.json_schema({"type": "string", "pattern": BOMBS[0]}), "repeats"),
    (lambda: Grammar.json_schema({"patternProperties": {BOMBS[0]: {}}}), "repeats"),
    (lambda: Grammar.json_schema({"allOf": [{"properties": {"a": {"pattern": BOMBS[1]}}}]}), "repeats"),
    (lambda: Grammar.regex(""), "regular expression ''"),
    (lambda: Grammar.regex("\ud800"), "regular expression '"),
    (lambda: Grammar.regex("(?=a)b"), "look-around"),
    (lambda: Grammar.regex("(a"), "unclosed"),
    (lambda: Grammar.regex("[" * MAX_PATTERN), "unclosed|cannot be used"),
    (lambda: Grammar.regex("a" * (MAX_PATTERN + 1)), "characters"),
    *[(lambda bomb=bomb: Grammar.regex(bomb), "repeats") for bomb in BOMBS],  # type: ignore[misc]
    (lambda: Grammar.choice([]), "choices"),
    (lambda: Grammar.choice([""]), "choices"),
    (lambda: Grammar.choice("ab"), "choices"),
    (lambda: Grammar.choice(["x" * MAX_TEXT, "y"]), "characters"),
]


@pytest.mark.parametrize("case", range(len(WRONG)))
def test_bad_grammars_are_refused_in_a_line_and_at_once(case: int) -> None:
    make, found = WRONG[case]
    began = time.process_time()
    with pytest.raises(ConfigError, match=found) as error:
        make()
    assert "\n" not in str(error.value) and time.process_time() - began < 1


def test_numbers_a_double_cannot_hold_are_taken_where_they_do_no_harm() -> None:
    Grammar.json_schema({"type": "integer", "maximum": 2**63 - 1, "default": 2**53 + 1})
    Grammar.json_schema({"enum": [2**53, -(2**53)]})


@pytest.mark.parametrize(
    "pattern",
    [
        "(a|b){3000}",
        "(a|b)*a(a|b){200}",
        "(.{1,90}x){1,90}",
        "([a-z]{1,20}[0-9a-f]{1,20}){1,20}",
        "((((a*)*)*)*)*b",
        r"[\p{L}\p{N}]{1,90}\p{Lu}{5,90}",
        r"[{]{3}\{9\}a{9}",
    ],
)
def test_regular_expressions_that_are_hard_take_bounded_time(bundles: Bundles, pattern: str) -> None:
    session = open_session(bundles("lettered fp32"))
    began = time.process_time()
    try:
        session.generate("x", max_new_tokens=60, grammar=Grammar.regex(pattern))
    except ConfigError as error:
        assert "that cannot be used" in str(error)
    assert time.process_time() - began < 10
    assert session.generate("x", max_new_tokens=3).token_ids  # and the session goes on


def test_a_schema_without_an_end_is_refused_when_it_is_used(bundles: Bundles) -> None:
    session = open_session(bundles("lettered fp32"))
    with pytest.raises(ConfigError, match="cannot be used|nothing in this vocabulary"):
        session.generate("x", grammar=Grammar.json_schema({"$ref": "#"}))
    assert session.generate("x", max_new_tokens=3).token_ids


def test_a_vocabulary_that_cannot_write_the_grammar_is_refused(bundles: Bundles) -> None:
    session = open_session(bundles("fp32"))  # letters alone: no brace
    with pytest.raises(ConfigError, match="nothing in this vocabulary|cannot be used"):
        session.generate("x", grammar=Grammar.json_object())
    assert session.generate("x", max_new_tokens=20, grammar=Grammar.choice(["hello"])).text == "hello"


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_tokenizers_of_both_kinds_can_be_used(make: Callable[[], Any]) -> None:
    tokenizer = make()
    state = Vocabulary(tokenizer, tokenizer.get_vocab_size(), [EOS]).start(Grammar.choice(["a b!", "a b é"]))
    tokens: list[int] = []
    while EOS not in tokens:
        mask = state.after(tuple(tokens)).mask
        tokens.append(int(np.flatnonzero(mask)[0]))
    assert tokenizer.decode(tokens).strip() in ("a b!", "a b é")


def test_the_librarys_own_settings_in_a_schema_are_ignored() -> None:
    loose = {"x-guidance": {"coerce_one_of": True, "lenient": True}, "oneOf": [{"type": "integer"}, {"type": "number"}]}
    with pytest.raises(ConfigError, match="oneOf"):
        Grammar.json_schema(loose)


def test_a_tokenizer_without_bytes_is_refused() -> None:
    from tokenizers import Tokenizer, models

    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    with pytest.raises(BundleError, match="a tokenizer that grammars cannot use"):
        Vocabulary(words, 2, [0]).start(Grammar.choice(["a"]))


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"grammar": "yes|no"}, "grammar of type str"),
        ({"logprobs": -1}, "logprobs -1"),
        ({"logprobs": True}, "logprobs True"),
        ({"logprobs": 1000}, "logprobs 1000"),
    ],
)
def test_senseless_options_are_refused(bundles: Bundles, options: dict[str, Any], found: str) -> None:
    with pytest.raises(ConfigError, match=found):
        open_session(bundles("lettered fp32")).generate("x", **options)


def test_from_the_command_line(bundles: Bundles, tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps(PERSON))
    base = ["generate", str(bundles("lettered fp32")), "--prompt", "x", "--threads", "1", "--rows", "8"]
    run = CliRunner().invoke(app, [*base, "--json-schema", str(schema), "--stats"])
    jsonschema.validate(json.loads(run.stdout.splitlines()[0]), PERSON)
    assert "forced by the grammar" in run.output
    assert re.fullmatch(r"[ab]{3}\n", CliRunner().invoke(app, [*base, "--regex", "[ab]{3}"]).stdout)
    assert CliRunner().invoke(app, [*base, "--choice", "abc", "--choice", "cab"]).stdout in ("abc\n", "cab\n")
    for wrong, found in (
        (["--regex", "a", "--choice", "b"], "--regex and --choice"),
        (["--json-schema", str(tmp_path / "no")], "a file with a JSON schema"),
    ):
        run = CliRunner().invoke(app, [*base, *wrong])
        assert run.exit_code == 2 and found in run.stderr


@pytest.mark.parametrize("answer", ["2" + "a" * 30, "2bxyyxyx"])
def test_limits_that_a_draft_alone_meets_end_drafting_and_not_the_answer(answer: str) -> None:
    """The prompt has a text whose beginning the grammar allows, and which takes more states than it may have; only an
    answer that goes there meets the limit itself."""
    words = ["".join(pair) for length in range(2, 13) for pair in itertools.product("xy", repeat=length)]
    tokenizer = byte_level(words)
    vocabulary = Vocabulary(tokenizer, tokenizer.get_vocab_size(), [0])

    def tokens(text: str) -> list[int]:
        return [tokenizer.token_to_id(character) for character in text]

    prompt, script = tokens("12bxyyxyxxyxyxyxyxyx" * 2 + "1"), [*tokens(answer), 0]
    found: list[list[int] | str] = []
    for speculate in (False, True):
        setup = Setup(100, eos=[0], rows=64 if speculate else 1, costs=1 + 0.01 * np.arange(64), adaptive=adaptive())
        setup.grammar = vocabulary.start(Grammar.regex("2(a{30}|b(x|y)*x(x|y){20})"))
        runner = ToyRunner(scripted(len(prompt), script), tokenizer.get_vocab_size(), gamma=0, context=4000)
        try:
            found.append(
                [token for chunk in setup.decoder(runner).run(prompt, setup.grammar) for token in chunk.tokens]
            )
        except ConfigError as error:
            found.append(str(error))
        assert setup.grammar.limited == speculate
    assert found[0] == found[1]
    assert found[0] == script if answer[1] == "a" else "too many states" in str(found[0])
