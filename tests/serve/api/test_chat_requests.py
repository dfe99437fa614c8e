"""Request bodies: strict types, unknown fields and undone values refused by name, limits, and what they mean to the
runtime.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, get_args, get_type_hints

import pytest
from openai.types.chat import (
    ChatCompletionMessageParam,
    ChatCompletionPredictionContentParam,
    completion_create_params,
)
from openai.types.chat.chat_completion_stream_options_param import ChatCompletionStreamOptionsParam
from openai.types.completion_create_params import CompletionCreateParamsBase, CompletionCreateParamsStreaming
from openai.types.responses import (
    EasyInputMessageParam,
    FunctionToolParam,
    ResponseOutputMessageParam,
    ResponseTextConfigParam,
)
from openai.types.responses.response_create_params import ResponseCreateParamsBase, ResponseCreateParamsStreaming
from openai.types.shared_params import Reasoning
from pydantic import TypeAdapter

from streamspec.errors import ConfigError
from streamspec.prompt.prompt_format import PromptFormat
from streamspec.serve.api.chat_requests import ONLY, ParsedRequest, read_chat, read_completion
from streamspec.serve.api.fields import Message, Tool
from streamspec.serve.api.responses_request import read_responses
from streamspec.serve.errors import ApiError
from streamspec.serve.limits import Limits

REFUSED = ("audio", "moderation", "web_search_options", "conversation", "previous_response_id", "background")
LIMITS = Limits(max_tokens=500, default_tokens=50, messages=3, text=100, grammar=200)


def chat(**fields: Any) -> ParsedRequest:
    return read_chat(
        json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]} | fields).encode(), LIMITS
    )


def completion(**fields: Any) -> ParsedRequest:
    return read_completion(json.dumps({"model": "m", "prompt": "hi"} | fields).encode(), LIMITS)


def refused(read: Any, **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        read(**fields)
    assert caught.value.status == 400
    return caught.value


def test_a_request_that_says_nothing_is_greedy_and_bounded() -> None:
    for parsed in (
        chat(),
        completion(),
        chat(temperature=None, stop=None, max_tokens=None, seed=None, response_format=None),
    ):
        options = parsed.options[0]
        assert options.max_new_tokens == 50 and options.stop == [] and options.speculate is True
        assert options.sampling.plain_argmax and options.grammar is None and options.logprobs is None
        assert not parsed.stream and not parsed.usage


def test_fields_reach_the_runtime() -> None:
    parsed = chat(
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        repetition_penalty=1.2,
        seed=5,
        stop="END",
        max_completion_tokens=9,
        speculate=False,
        logprobs=True,
        top_logprobs=3,
        stream=True,
        stream_options={"include_usage": True},
    )
    sampling = parsed.options[0].sampling
    assert (
        sampling.temperature,
        sampling.top_p,
        sampling.top_k,
        sampling.min_p,
        sampling.repetition_penalty,
        sampling.seed,
    ) == (0.5, 0.9, 7, 0.1, 1.2, 5)
    assert (
        parsed.options[0].stop == ["END"]
        and parsed.options[0].max_new_tokens == 9
        and parsed.options[0].speculate is False
        and parsed.options[0].logprobs == 3
    )
    assert parsed.stream and parsed.usage
    assert chat(logprobs=True).options[0].logprobs == 0 and completion(logprobs=5).options[0].logprobs == 5


def test_messages_become_plain_ones() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    said = {"role": "assistant", "content": "x", "refusal": None, "annotations": [], "tool_calls": None}
    assert chat(messages=[{"role": "developer", "content": parts}, said]).prompt == [
        {"role": "system", "content": "ab"},
        {"role": "assistant", "content": "x"},
    ]


CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "user", "content": [{"type": "text", "text": "a", "prompt_cache_breakpoint": {"mode": "explicit"}}]},
        {"role": "developer", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "assistant", "content": None, "refusal": "no"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        {"role": "tool", "content": [{"type": "text", "text": "a"}], "tool_call_id": "a"},
    ],
)
def test_a_message_means_the_same_here_and_in_python(message: Any) -> None:
    TypeAdapter(ChatCompletionMessageParam).validate_python(message)  # the API has this shape
    template = "{% for m in messages %}{{ m.role }}{{ m.content }}{{ m.tool_calls }}{% endfor %}"
    for kind in ("chat",) if "tool_calls" in message else ("chat", "raw"):
        layout = PromptFormat(kind)
        given = read_chat(json.dumps({"model": "m", "messages": [message]}).encode(), Limits()).prompt
        assert layout.render(given, template) == layout.render([message], template)


def test_fields_of_a_message_in_a_part_of_its_text_are_the_messages() -> None:
    """So the Agents SDK for JavaScript sends an answer back."""

    def read(*messages: Any) -> Any:
        asked = {"model": "m", "messages": [{"role": "user", "content": "Where?"}, *messages]}
        return read_chat(json.dumps(asked).encode(), Limits()).prompt

    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    spread = {"role": "assistant", "refusal": None, "tool_calls": [call], "reasoning_content": "Rome?"}
    part = {"type": "text", "text": "I look."}
    prompt = read({"role": "assistant", "content": [part | spread], "tool_calls": [call]})
    assert prompt == read(spread | {"content": "I look."})
    assert prompt[1]["reasoning_content"] == "Rome?" and prompt[1]["tool_calls"] == [call]
    for wrong in ({"role": "user", "content": [part | spread]}, spread | {"content": [part | {"contents": ""}]}):
        with pytest.raises(ApiError, match="unknown field messages.1.content.0"):
            read(wrong)


def test_templates_see_what_a_function_returns() -> None:
    """BFCL's harness sends `response`, transformers' `get_json_schema` makes `return`."""
    function = {"name": "f", "response": {"a": {}}, "return": {"b": {}}}
    tools = chat(tools=[{"type": "function", "function": function}]).tools
    assert tools is not None and tools.schemas[0]["function"] == function
    body = {"model": "m", "input": "a", "tools": [{"type": "function", **function}]}
    parsed = read_responses(json.dumps(body).encode(), Limits())
    assert parsed.tools is not None and parsed.tools.schemas[0]["function"] == function
    assert parsed.echo is not None and function.items() <= parsed.echo["tools"][0].items()


def test_hints_for_caches_change_nothing() -> None:
    hint = {"cache_control": {"type": "ephemeral"}}
    hinted = {"role": "user", "content": [{"type": "text", "text": "hi"} | hint]} | hint
    assert chat(messages=[hinted]).prompt == chat().prompt
    tools: list[Any] = [{"type": "function", "function": {"name": "f"}}]
    with_hints = chat(tools=[tools[0] | {"function": {"name": "f"} | hint} | hint]).tools
    assert with_hints is not None and with_hints.schemas == tools


def test_what_is_not_strict_is_lenient_alone() -> None:
    strict = {"g": False, "h": True}
    tools = [{"type": "function", "function": {"name": name, "strict": said}} for name, said in strict.items()]
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {}, "strict": False}}
    for fields, content in (({}, False), ({"response_format": form}, True)):
        made = chat(tools=tools, **fields).tools
        assert made is not None and (made.lenient, made.strict) == (frozenset("g"), frozenset("h"))
        assert made.lenient_content == content


def test_each_answer_has_its_own_seed() -> None:
    assert [one.sampling.seed for one in chat(n=3, seed=2**64 - 2, temperature=1).options] == [2**64 - 2, 2**64 - 1, 0]
    assert [one.sampling.seed for one in completion(n=2, temperature=1).options] == [None, None]


def test_penalties_and_biases_reach_the_runtime() -> None:
    given = {"frequency_penalty": -1, "presence_penalty": 0.5, "logit_bias": {"5": -100, "7": 1.5}}
    for parsed in (chat(**given), completion(**given)):
        sampling = parsed.options[0].sampling
        assert sampling.logit_bias == {5: -100, 7: 1.5}
        assert (sampling.frequency_penalty, sampling.presence_penalty) == (-1, 0.5)
    assert not chat(logit_bias={}, frequency_penalty=0).options[0].sampling.adjusted


@pytest.mark.parametrize("content", ["text", [{"type": "text", "text": "te"}, {"type": "text", "text": "xt"}]])
def test_a_prediction_reaches_the_runtime(content: Any) -> None:
    given = {"type": "content", "content": content}
    TypeAdapter(ChatCompletionPredictionContentParam).validate_python(given)  # the API has this shape
    assert chat(prediction=given).options[0].prediction == "text" == completion(prediction=given).options[0].prediction
    for wrong, param in (
        ("text", "prediction"),
        ({"type": "text", "content": "a"}, "prediction.type"),
        ({"type": "content"}, "prediction.content"),
        ({"type": "content", "content": "x" * 101}, "prediction.content"),
    ):
        assert refused(chat, prediction=wrong).param == param


WITHOUT_EFFECT: list[dict[str, Any]] = [
    {"user": "me", "safety_identifier": "a"},
    {"metadata": {"job": "7"}},
    {"store": True},
    {"store": False},
    *({"service_tier": tier} for tier in ("auto", "default", "flex", "scale", "priority", "fast")),
    {"prompt_cache_key": "k", "prompt_cache_retention": "24h", "prompt_cache_options": {"mode": "explicit"}},
    {"prompt_cache_retention": "in_memory", "prompt_cache_options": {"ttl": "30m"}},
]


@pytest.mark.parametrize("fields", [*WITHOUT_EFFECT, *({"verbosity": level} for level in ("low", "medium", "high"))])
def test_fields_that_mean_nothing_to_a_local_server_change_nothing(fields: dict[str, Any]) -> None:
    params = completion_create_params.CompletionCreateParamsNonStreaming
    TypeAdapter(params).validate_python({"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields})
    assert chat(**fields) == chat()
    if "verbosity" not in fields:
        assert completion(**fields) == completion()


def test_their_types_are_the_apis() -> None:
    for fields in (
        {"metadata": {"a": 1}},
        {"metadata": {"a" * 65: "b"}},
        {"metadata": {str(i): "" for i in range(17)}},
        {"store": "yes"},
        {"service_tier": "best"},
        {"prompt_cache_retention": "1h"},
        {"prompt_cache_options": {"mode": "both"}},
        {"prompt_cache_options": {"size": 1}},
        {"verbosity": "none"},
    ):
        assert (refused(chat, **fields).param or "").startswith(next(iter(fields)))


def test_the_name_of_a_participant_reaches_templates_that_show_it() -> None:
    message = {"role": "user", "content": "hi", "name": "bob"}
    TypeAdapter(ChatCompletionMessageParam).validate_python(message)
    prompt = chat(messages=[message]).prompt
    shown = PromptFormat("chat").render(prompt, "{% for m in messages %}{{ m.name }}: {{ m.content }}{% endfor %}")
    assert shown == "bob: hi" and PromptFormat("raw").render(prompt) == "hi"


def test_the_lowest_temperatures_are_greedy_and_names_as_long_as_any_api_has_them() -> None:
    assert chat(temperature=1e-8, top_k=40).options[0].sampling.plain_argmax
    assert chat(temperature=0.001).options[0].sampling.random
    tool = {"type": "function", "function": {"name": "f" * 128}}  # Anthropic's; OpenAI's have 64 characters
    assert Tool.model_validate(tool).function.name == "f" * 128


def test_a_call_put_together_from_a_stream_may_keep_its_index() -> None:
    call = {**CALL, "index": 0}
    message = Message.model_validate({"role": "assistant", "tool_calls": [call]})
    assert message.plain("messages.0")["tool_calls"] == [CALL]


def test_seeds_are_signed_numbers() -> None:
    assert chat(seed=-1, temperature=1).options[0].sampling.seed == 2**64 - 1
    assert chat(seed=-(2**63), temperature=1).options == chat(seed=2**63, temperature=1).options
    assert [one.sampling.seed for one in chat(n=2, seed=-1, temperature=1).options] == [2**64 - 1, 0]


def test_several_prompts_have_their_answers_in_order() -> None:
    for prompts in (["one", "two"], [[1], [2, 3]]):
        parsed = completion(prompt=prompts, n=2, seed=3, temperature=1)
        assert parsed.prompts == prompts
        assert [one.sampling.seed for one in parsed.options] == [3, 4, 3, 4]
    assert completion(prompt=["one", "two"], echo=True, logprobs=1).repeats_prompt
    assert refused(completion, prompt=["a"] * 257).code == "too_large"
    assert refused(completion, prompt=["x" * 60] * 2).code == "too_large"


def test_only_the_prompt_may_be_asked_for() -> None:
    parsed = completion(max_tokens=0, echo=True, logprobs=1)
    assert parsed.unanswered and parsed.options[0].max_new_tokens == 1 and parsed.options[0].prompt_logprobs == 1
    assert not completion(max_tokens=1, echo=True).unanswered
    assert refused(completion, max_tokens=0).message == "max_tokens 0; expected at least 1, or echo beside it"
    assert refused(chat, max_tokens=0).param == "max_tokens"


def test_a_suffix_goes_with_texts() -> None:
    assert completion(suffix="end").suffix == "end" and completion(suffix="").suffix == completion().suffix == ""
    assert refused(completion, suffix="a", prompt=[1, 2]).param == "suffix"
    assert refused(completion, suffix="a", echo=True).param == "echo"
    assert refused(completion, suffix="x" * 101).code == "too_large"


def test_prompts_of_completions() -> None:
    assert (
        completion(prompt=["one"]).prompt == "one"
        and completion(prompt=[1, 2]).prompt == [1, 2] == completion(prompt=[[1, 2]]).prompt
    )
    for prompt in (["one", ""], [[1], []], "", [], [""], None, 5, [1, "a"], [-1], [True], {"a": 1}, "x" * 101):
        assert (refused(completion, prompt=prompt).param or "").startswith("prompt")


@pytest.mark.parametrize("read", [chat, completion])
def test_unknown_fields_are_refused_by_name(read: Any) -> None:
    for fields, param in (
        ({"foo": 1}, "foo"),
        ({"temprature": None}, "temprature"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
    ):
        error = refused(read, **fields)
        assert error.param == param and error.code == "unknown_field" and param in error.message
    assert refused(completion, messages=[]).param == "messages"
    assert refused(chat, messages=[{"role": "user", "content": "a", "zz": 1}]).param == "messages.0.zz"


def test_a_misspelt_field_is_answered_with_the_right_one() -> None:
    assert refused(chat, temprature=1).message == "unknown field temprature, did you mean temperature?"
    assert refused(chat, reasoning_efort="low").message.endswith("did you mean reasoning_effort?")
    assert refused(completion, max_token=1).message.endswith("did you mean max_tokens?")
    given = {"type": "json_schema", "json_schema": {"name": "x", "schemas": {}, "schema": {}}}
    assert refused(chat, response_format=given).message.endswith("json_schema.schemas, did you mean schema?")
    tools = [{"type": "function", "function": {"name": "f", "parameter": {}}}]
    assert refused(chat, tools=tools).message == ("unknown field tools.0.function.parameter, did you mean parameters?")
    for part in ({"type": "text", "text": "a", "zz": 1}, {"type": "refusal", "refusal": "a", "zz": 1}):
        assert refused(chat, messages=[{"role": "assistant", "content": [part]}]).param == "messages.0.content.0.zz"
    message = refused(chat, messages=[{"role": "user", "content": "a", "zz": 1}]).message
    assert message.startswith("unknown field messages.0.zz; expected one of role, content, ")


def test_what_the_api_has_and_this_server_does_not_is_named() -> None:
    for kind in ("image_url", "input_audio", "file"):
        error = refused(chat, messages=[{"role": "user", "content": [{"type": kind, kind: {"x": "y"}}]}])
        assert (error.param, error.code) == ("messages.0.content.0.type", "unsupported_value")
        assert error.message == f"messages.0.content.0.type '{kind}' is not supported; expected 'text', 'refusal'"
    error = refused(chat, messages=[{"role": "user", "content": [{"text": "a"}]}])
    assert (error.param, error.code) == ("messages.0.content.0.type", "missing_field")
    error = refused(chat, tools=[{"type": "custom", "custom": {"name": "f"}}])
    assert (error.param, error.code) == ("tools.0.type", "unsupported_value") and "custom" in error.message
    error = refused(chat, messages=[{"role": "user", "content": "a", "refusal": "b"}])
    assert error.param == "messages.0.refusal"


def response(**fields: Any) -> ParsedRequest:
    return read_responses(json.dumps({"model": "m", "input": "hi"} | fields).encode(), LIMITS)


def said(**fields: Any) -> ParsedRequest:
    return chat(messages=[{"role": "assistant", "content": "hi"} | fields])


def item(**fields: Any) -> ParsedRequest:
    return response(input=[{"role": "assistant", "content": "hi"} | fields])


@pytest.mark.parametrize(
    ("params", "read"),
    [
        (completion_create_params.CompletionCreateParamsBase, chat),
        (completion_create_params.CompletionCreateParamsStreaming, chat),
        (CompletionCreateParamsBase, completion),
        (CompletionCreateParamsStreaming, completion),
        (ResponseCreateParamsBase, response),
        (ResponseCreateParamsStreaming, response),
        *((message, said) for message in get_args(ChatCompletionMessageParam)),
        (EasyInputMessageParam, item),
        (ResponseOutputMessageParam, item),
        (ChatCompletionPredictionContentParam, lambda **fields: chat(prediction={"type": "content"} | fields)),
        (ChatCompletionStreamOptionsParam, lambda **fields: chat(stream=True, stream_options=fields)),
        (completion_create_params.PromptCacheOptions, lambda **fields: chat(prompt_cache_options=fields)),
        (Reasoning, lambda **fields: response(reasoning=fields)),
        (ResponseTextConfigParam, lambda **fields: response(text=fields)),
        (FunctionToolParam, lambda **fields: response(tools=[{"type": "function", "name": "f"} | fields])),
    ],
)
def test_every_field_of_the_api_is_taken_or_refused_by_name(params: type, read: Any) -> None:
    """A field that the openai package gets is an unknown one here until someone decides what it means."""
    for name in get_type_hints(params):
        try:
            read(**{name: None})
        except ApiError as error:
            assert error.code != "unknown_field", name
        if name in REFUSED:
            assert refused(read, **{name: "something else"}).code == "unsupported_value"


def test_a_message_comes_back_with_a_clients_own_reading_of_it() -> None:
    """openai-python's `parse` and `stream` add fields to the message that users append to the chat."""
    read = {**CALL, "function": CALL["function"] | {"parsed_arguments": {}}}  # type: ignore[operator]
    sent = {"role": "assistant", "content": None, "parsed": {"a": 1}, "tool_calls": [read]}
    plain = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    read_as = [Message.model_validate(message).plain("messages.0") for message in (sent, plain)]
    assert read_as[0] == read_as[1] and "parsed" not in str(read_as)


def test_editors_may_name_as_many_ends_as_a_model_of_code_has() -> None:
    ends = ["<|endoftext|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>"]
    ends += ["<|file_sep|>", "<|im_start|>", "<|im_end|>"]
    for read in (chat, completion):
        assert list(read(stop=ends).options[0].stop) == ends


def test_the_highest_effort_and_tokens_are_named_as_they_were_sent() -> None:
    assert chat(reasoning_effort="max").options == chat(reasoning_effort="xhigh").options
    assert refused(chat, max_completion_tokens=0).param == "max_completion_tokens"


def test_editors_that_ask_for_more_tokens_than_there_may_be_get_as_many() -> None:
    for fields in ({"max_tokens": 32_000}, {"max_completion_tokens": 32_000}):
        assert chat(**fields).options == chat(max_tokens=LIMITS.max_tokens).options


def test_what_other_servers_call_off_is_off() -> None:
    assert chat(top_k=-1).options == chat(top_k=0).options
    assert 0 < chat(top_p=0).options[0].sampling.top_p < 1e-5
    assert chat(top_logprobs=0, logprobs=False).options[0].logprobs is None


def test_known_fields_with_values_that_are_not_done_are_refused_by_name() -> None:
    for name, done in ONLY.items():
        for value in (*done, None):
            (one,), (other,) = chat(**{name: value}).options, completion(**{name: value}).options
            assert one == replace(other, separate_reasoning=True)
        error = refused(chat, **{name: "something else"})
        assert error.param == name and error.code == "unsupported_value"
    for fields in (
        {"n": 9},
        {"n": True},
        {"n": 0},
        {"presence_penalty": 2.5},
        {"frequency_penalty": False},
        {"tools": [{}]},
        {"logit_bias": {"five": 1}},
        {"logit_bias": {"5": 101}},
        {"echo": 0},
    ):
        assert refused(completion, **fields).param == next(iter(fields))
    said = {"role": "assistant", "content": "a", "tool_calls": [{}]}
    assert (refused(chat, messages=[said]).param or "").startswith("messages.0.tool_calls.0.")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": "1"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": 1.5}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"seed": -(2**63) - 1}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"seed": 1.0}, "seed"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": 5}, "max_tokens"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["a"] * 33}, "stop"),
        ({"stop": "x" * 257}, "stop"),
        ({"stop": [1]}, "stop.0"),
        ({"stream": "true"}, "stream"),
        ({"stream": 1}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"model": 5}, "model"),
        ({"logprobs": 1}, "logprobs"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"speculate": "no"}, "speculate"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [1]}, "messages.0"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.tool_call_id"),
        ({"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": "x"}] * 4}, "messages"),
        ({"messages": [{"role": "user", "content": "x" * 101}]}, "messages"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "text", "json_schema": {"schema": {}}}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": ["x" * 300]}}}},
            "response_format.json_schema.schema",
        ),
        ({"grammar": {}}, "grammar"),
        ({"grammar": {"regex": "a", "choice": ["b"]}}, "grammar"),
        ({"grammar": {"regex": "a" * 201}}, "grammar.regex"),
        ({"grammar": {"choice": ["a" * 201]}}, "grammar.choice"),
        ({"grammar": {"lark": "x"}}, "grammar.lark"),
    ],
)
def test_wrong_types_and_ranges_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    error = refused(chat, **fields)
    assert error.param == param and param.split(".")[0] in error.message and "\n" not in error.message


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"x"',
        b"\xff\xfe",
        b'{"model": "a", "model": "b"}',
        b'{"temperature": NaN}',
        b'{"temperature": Infinity}',
        b'{"temperature": 1e999}',
        b'{"model": "\\ud800"}',
        b'{"a": ' * 100 + b"1" + b"}" * 100,
        b"[" * 100000,
    ],
)
def test_what_is_no_plain_json_object_is_refused(body: bytes) -> None:
    for read in (read_chat, read_completion):
        with pytest.raises(ApiError) as caught:
            read(body, LIMITS)
        assert caught.value.status == 400 and caught.value.code == "invalid_json"


def test_a_value_quoted_in_a_message_forges_no_line() -> None:
    assert "\n" not in refused(chat, **{"x\ny\x1b[31m": 1}).message


@pytest.mark.parametrize(
    "given",
    [
        {"timeout": float("inf")},
        {"timeout": float("nan")},
        {"timeout": 1e10},
        {"head_seconds": 0.0},
        {"sessions": 0},
        {"sessions": 1.5},
        {"queue": -1},
        {"body": True},
    ],
)
def test_limits_that_could_not_be_kept_are_refused(given: dict[str, Any]) -> None:
    """A timeout without an end was taken, and every request refused for it."""
    with pytest.raises(ConfigError, match=next(iter(given))):
        Limits(**given)
    assert Limits(queue=0, timeout=0.5).queue == 0
