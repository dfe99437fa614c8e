"""Answers that follow a schema, a pattern or a choice, and log-probabilities, through the server: as a session gives
them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from pydantic import BaseModel
from transformers import PreTrainedTokenizerFast

from streamspec.errors import ConfigError
from streamspec.export import export_bundle
from streamspec.runtime import Completion, Grammar, Logprob, Session, load
from streamspec.serve.api.chat_responses import Choice
from tests.serve.conftest import Running, user
from tests.support.byte_tokenizers import byte_level
from tests.support.tiny_bundles import tiny_adapter
from tests.support.tiny_models import tiny_model

SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}, "old": {"type": "boolean"}},
    "required": ["kind", "old"],
    "additionalProperties": False,
}
PATTERN = "[a-f]{3}-[0-9]{2}"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a base that can write every byte."""
    folder = tmp_path_factory.mktemp("structured")
    PreTrainedTokenizerFast(tokenizer_object=byte_level(), eos_token="<eos>").save_pretrained(folder / "base")
    model = tiny_model(
        "llama",
        vocab_size=257,
        max_position_embeddings=256,
        initializer_range=0.5,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    model.save_pretrained(folder / "base")
    adapter = tiny_adapter(folder / "adapter", folder / "base")
    export_bundle(folder / "base", adapter, folder / "bundle", "fp32", progress=lambda line: None)
    return folder / "bundle"


@pytest.fixture(scope="module")
def cold(bundle: Path) -> Session:
    return load(bundle, threads=1, tree=8)


@pytest.fixture(scope="module")
def server(bundle: Path) -> Iterator[Running]:
    running = Running(load(bundle, threads=1, tree=8))
    yield running
    running.stop()


def ask(server: Running, **fields: Any) -> Any:
    return server.client().chat.completions.create(
        **{"model": "base", "messages": user("say it"), "max_tokens": 60} | fields
    )


def want(cold: Session, **options: Any) -> Completion:
    cold.close()
    return cold.generate(user("say it"), **{"max_new_tokens": 60} | options)


def test_an_answer_follows_its_schema(server: Running, cold: Session) -> None:
    given = {"type": "json_schema", "json_schema": {"name": "pet", "schema": SCHEMA, "strict": True}}
    for stream in (False, True):
        answer = ask(server, response_format=given, stream=stream)
        text = (
            "".join(chunk.choices[0].delta.content for chunk in answer) if stream else answer.choices[0].message.content
        )
        pet = json.loads(text)
        assert pet["kind"] in ("cat", "dog") and isinstance(pet["old"], bool) and len(pet) == 2
        assert text == want(cold, grammar=Grammar.json_schema(SCHEMA)).text
    plain = ask(server, response_format=given, extra_body={"speculate": False})
    assert plain.choices[0].message.content == text and plain.choices[0].finish_reason == "stop"


def test_any_object_a_pattern_or_a_choice(server: Running, cold: Session) -> None:
    said = ask(server, response_format={"type": "json_object"}, max_tokens=20).choices[0].message.content
    assert said.lstrip().startswith("{") and said == want(cold, grammar=Grammar.json_object(), max_new_tokens=20).text
    said = ask(server, extra_body={"grammar": {"regex": PATTERN}}).choices[0].message.content
    assert re.fullmatch(PATTERN, said) and said == want(cold, grammar=Grammar.regex(PATTERN)).text
    said = (
        server.client()
        .completions.create(
            model="base", prompt="say it", max_tokens=30, extra_body={"grammar": {"choice": ["yes, of course", "no"]}}
        )
        .choices[0]
        .text
    )
    assert said in ("yes, of course", "no")
    free = ask(server, response_format={"type": "text"}).choices[0].message.content
    assert free == want(cold).text


def test_the_clients_own_example_of_structured_outputs(server: Running) -> None:
    """Parsed into a pydantic model, as a whole and streamed. The biases end texts and lists of a model that means
    nothing.
    """

    class CalendarEvent(BaseModel):
        name: str
        date: str
        participants: list[str]

    ends = {str(byte_level().token_to_id(mark)): 100.0 for mark in '"]'}
    asked: Any = {
        "model": "base",
        "messages": [
            {"role": "system", "content": "Extract the event information."},
            {"role": "user", "content": "Alice and Bob are going to a science fair on Friday."},
        ],
        "response_format": CalendarEvent,
        "logit_bias": ends,
    }
    client = server.client()
    message = client.chat.completions.parse(**asked).choices[0].message
    parsed = message.parsed
    asked["messages"] += [message, {"role": "user", "content": "And the next?"}]
    with pytest.warns(UserWarning, match="parsed"):  # the client's own
        assert client.chat.completions.parse(**asked).choices[0].message.parsed is not None
    asked["messages"] = asked["messages"][:-2]
    with client.chat.completions.stream(**asked) as stream:
        streamed = stream.get_final_completion().choices[0].message.parsed
    assert isinstance(parsed, CalendarEvent) and parsed == streamed


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}},
            "response_format.json_schema.schema",
        ),
        ({"extra_body": {"grammar": {"regex": "(a"}}}, "grammar.regex"),
        ({"extra_body": {"grammar": {"choice": []}}}, "grammar.choice"),
        ({"extra_body": {"grammar": {"choice": ["a"]}}, "response_format": {"type": "json_object"}}, "grammar"),
    ],
)
def test_grammars_that_make_no_sense_are_refused_by_name(server: Running, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(server, **fields)
    assert caught.value.param == param


def test_log_probabilities_of_a_chat(server: Running, cold: Session) -> None:
    right = want(cold, max_new_tokens=12, logprobs=3)
    assert right.logprobs
    logprobs = ask(server, max_tokens=12, logprobs=True, top_logprobs=3).choices[0].logprobs
    assert logprobs.model_fields_set == {"content", "refusal"} and logprobs.refusal is None
    whole = logprobs.content
    streamed = [
        entry
        for chunk in ask(server, max_tokens=12, logprobs=True, top_logprobs=3, stream=True)
        for entry in chunk.choices[0].logprobs.content
    ]
    for found in (whole, streamed):
        assert len(found) == len(right.token_ids) == 12
        for entry, known in zip(found, right.logprobs, strict=True):
            assert entry.token == cold.tokenizer.decode([known.token], skip_special_tokens=False) and math.isclose(
                entry.logprob, known.logprob, abs_tol=1e-4
            )
            assert [top.logprob for top in entry.top_logprobs] == pytest.approx(
                [value for _, value in known.top], abs=1e-4
            )
            assert bytes(entry.bytes).decode("utf-8", "replace") == entry.token
        written = b"".join(bytes(entry.bytes) for entry in found)
        assert written.decode("utf-8", "replace") == right.text and len(written) == 12
    assert all(
        entry.top_logprobs == [] for entry in ask(server, max_tokens=4, logprobs=True).choices[0].logprobs.content
    )
    assert ask(server, max_tokens=4).choices[0].logprobs is None


def test_log_probabilities_of_a_completion_in_the_old_form(server: Running, cold: Session) -> None:
    right = want(cold, max_new_tokens=12, logprobs=2)
    assert right.logprobs
    answer = server.client().completions.create(model="base", prompt="say it", max_tokens=12, logprobs=2)
    found = answer.choices[0].logprobs
    assert found and found.token_logprobs == pytest.approx([known.logprob for known in right.logprobs], abs=1e-4)
    assert found.tokens == [cold.tokenizer.decode([token], skip_special_tokens=False) for token in right.token_ids]
    assert (
        found.text_offset
        and found.text_offset[0] == 0
        and found.top_logprobs
        and max(found.top_logprobs[0].values()) == pytest.approx(found.token_logprobs[0], abs=1e-4)
    )
    offsets = []
    for chunk in server.client().completions.create(
        model="base", prompt="say it", max_tokens=12, logprobs=2, stream=True
    ):
        offsets += chunk.choices[0].logprobs.text_offset
    assert offsets == found.text_offset


def test_several_seeded_answers_are_those_of_the_seeds_after(server: Running, cold: Session) -> None:
    for fields in ({"temperature": 1.5}, {"temperature": 1.5, "frequency_penalty": 0.5, "logit_bias": {"97": 3}}):
        answer = ask(server, n=3, seed=11, max_tokens=12, **fields)
        adjusted = {**fields, "logit_bias": {97: 3.0}} if "logit_bias" in fields else fields
        known = [want(cold, seed=11 + i, max_new_tokens=12, **adjusted).text for i in range(3)]
        assert [choice.message.content for choice in answer.choices] == known and len({*known}) == 3
    answer = ask(server, n=2, max_tokens=12, temperature=1.5)
    assert answer.choices[0].message.content != answer.choices[1].message.content
    assert answer.usage.completion_tokens == sum(choice.streamspec["new_tokens"] for choice in answer.choices)


def test_a_bias_of_a_token_that_there_is_not_is_refused(server: Running) -> None:
    with pytest.raises(openai.BadRequestError, match="logit_bias of token 257; expected 0..256"):
        ask(server, logit_bias={"257": 1})


def test_a_token_of_a_prompt_that_can_never_come_has_a_number_that_json_has() -> None:
    found = Choice(False, byte_level(), 0)._spell([Logprob(5, -math.inf, [(6, -0.5)])], [Logprob(6, -0.5, [])])
    assert found["token_logprobs"] == [-9999.0, -0.5]


@pytest.mark.parametrize("as_tokens", [False, True])
def test_a_completion_that_repeats_its_prompt_says_how_likely_each_token_of_it_was(
    server: Running, cold: Session, as_tokens: bool
) -> None:
    ids = cold.encode("say it")
    logits = cold.score(ids).astype(np.float64)
    want = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    asked = server.client().completions.create
    plain = asked(model="base", prompt="say it", max_tokens=4, logprobs=2)
    prompt: Any = [ids] if as_tokens else "say it"  # as the lm-eval harness asks
    whole = asked(model="base", prompt=prompt, max_tokens=4, logprobs=2, echo=True, temperature=0)
    found = whole.choices[0].logprobs
    said = "say it\n" if as_tokens else "say it"  # the bundle's prompts end in a newline
    assert whole.choices[0].text == said + plain.choices[0].text
    assert found is not None and found.token_logprobs[0] is None and found.top_logprobs[0] is None
    assert found.token_logprobs[1 : len(ids)] == pytest.approx(
        [want[i, token] for i, token in enumerate(ids[1:])], abs=1e-4
    )
    assert [max(top.values()) for top in found.top_logprobs[1 : len(ids)]] == pytest.approx(
        want[:-1].max(axis=-1).tolist(), abs=1e-4
    )
    assert found.token_logprobs[len(ids) :] == pytest.approx(plain.choices[0].logprobs.token_logprobs, abs=1e-4)
    shown = [(at, token) for at, token in zip(found.text_offset, found.tokens, strict=True) if "\ufffd" not in token]
    if not as_tokens:
        assert shown.pop(len(ids) - 1)[1] == "\n"  # which the text lacks
    assert all(whole.choices[0].text.startswith(token, at) for at, token in shown) and len(shown) > len("say it")
    assert found.text_offset[: len(ids)] == [*range(len(ids))] and found.text_offset[len(ids)] == len(said)
    silent = asked(model="base", prompt=prompt, max_tokens=4, echo=True).choices[0]
    assert silent.logprobs is None and silent.text == whole.choices[0].text


def test_prompts_alone_are_scored_and_not_answered(server: Running) -> None:
    asked = server.client().completions.create
    given: Any = {"model": "base", "prompt": ["say it", "and more"], "logprobs": 2, "echo": True, "temperature": 0}
    answered, scored = asked(**given, max_tokens=1), asked(**given, max_tokens=0)
    for one, other, prompt in zip(scored.choices, answered.choices, given["prompt"], strict=True):
        assert one.text == prompt and one.finish_reason == "length"
        found, want = one.logprobs, other.logprobs
        assert found is not None and want is not None
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert getattr(found, name) == getattr(want, name)[:-1]
    assert scored.usage is not None and answered.usage is not None
    assert scored.usage.completion_tokens == 0 and scored.usage.prompt_tokens == answered.usage.prompt_tokens
    silent = asked(**given | {"logprobs": None}, max_tokens=0)
    assert [choice.text for choice in silent.choices] == given["prompt"]


@pytest.mark.parametrize("fields", [{"stream": True}, {"n": 2}])
def test_a_prompt_is_repeated_in_one_whole_answer_alone(server: Running, fields: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        server.client().completions.create(model="base", prompt="say it", max_tokens=4, echo=True, **fields)
    assert caught.value.param == "echo"


@pytest.mark.parametrize("speculate", [True, False])
def test_prompt_logprobs_are_those_of_the_scored_prompt_and_change_no_answer(cold: Session, speculate: bool) -> None:
    ids = cold.encode("say it again and again " * 8)
    asked = {"max_new_tokens": 8, "speculate": speculate, "logprobs": 0}
    alone, both = cold.generate(ids, **asked), cold.generate(ids, prompt_logprobs=3, **asked)
    assert both.stats.reused_tokens == 0  # the whole prompt was read anew
    assert alone.prompt_logprobs is None and both.prompt_logprobs is not None
    assert both.token_ids == alone.token_ids and both.logprobs == alone.logprobs
    assert [entry.token for entry in both.prompt_logprobs] == ids and math.isnan(both.prompt_logprobs[0].logprob)
    for row, entry in zip(cold.score(ids), both.prompt_logprobs[1:], strict=False):
        chances = np.exp(row.astype(np.float64) - row.max())
        assert entry.logprob == pytest.approx(np.log(chances[entry.token] / chances.sum()), abs=1e-5)
        assert [token for token, _ in entry.top] == np.argsort(-row, kind="stable")[:3].tolist()
    with pytest.raises(ConfigError, match="prompt_logprobs -1"):
        cold.generate(ids, prompt_logprobs=-1)


def test_what_a_schema_asks_for_and_cannot_have_is_said_where_strict_is_false(server: Running) -> None:
    kind = {"type": "string", "enum": ["cat", "dog"]}
    schema = {"type": "object", "properties": {"kind": {**kind, "not": {"format": "date"}}}, "required": ["kind"]}
    asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": {**schema, "additionalProperties": False}}}
    with pytest.raises(openai.BadRequestError, match="format in what may not hold"):
        ask(server, response_format=asked)
    asked["json_schema"]["strict"] = False
    answer = ask(server, response_format=asked)
    assert json.loads(answer.choices[0].message.content)["kind"] in kind["enum"]
    assert answer.streamspec["left_out"] == ["#/properties/kind/not"]
    *_, last = list(ask(server, response_format=asked, stream=True))
    assert last.streamspec["left_out"] == ["#/properties/kind/not"]
    assert (
        "left_out"
        not in ask(server, response_format={**asked, "json_schema": {"name": "x", "schema": kind}}).streamspec
    )
    text = {"format": {"type": "json_schema", **asked["json_schema"]}}
    said = server.client().responses.create(model="base", input="say it", text=text, max_output_tokens=60)
    assert said.streamspec["left_out"] == ["#/properties/kind/not"]
