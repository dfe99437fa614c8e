"""Parses request bodies: their fields, with types and ranges, become the runtime's options.

Unknown fields, and known ones with a value that is not supported here, are refused by name. Types are strict: "1" is no
number.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Literal

from pydantic import Field

from streamspec.errors import ConfigError, DataError
from streamspec.runtime import GenerationOptions, Grammar, Sampling
from streamspec.runtime.options import SWITCHES
from streamspec.runtime.sampling.sampling_params import MIN_TEMPERATURE
from streamspec.runtime.text.grammar import SEPARATORS
from streamspec.serve.api.body import bounded, json_object, parsed_as, renamed, without_fixed
from streamspec.serve.api.fields import AllowedTools, Message, NamedTool, PredictedContent, Strict, Text, Tool
from streamspec.serve.errors import ApiError, invalid
from streamspec.serve.limits import Limits
from streamspec.serve.tools.checked_grammars import CheckedGrammars
from streamspec.serve.tools.tools import Tools, undescribed

MAX_TOP_LOGPROBS = 20

# Fields of OpenAI's API that are there with these values only, beside null; a client may send them all the same.
ONLY: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "suffix": (),
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "moderation": (),
}
ONLY_IN_COMPLETION = {
    **{name: values for name, values in ONLY.items() if name not in ("echo", "suffix")},
    "reasoning_effort": (),
    "tools": ([],),
    "tool_choice": ("none",),
    "parallel_tool_calls": (),
}
ONLY_IN_MESSAGE: dict[str, tuple[Any, ...]] = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
}


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Verbosity = Literal["low", "medium", "high"]
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]


class CacheOptions(Strict):
    """Says how a provider caches prompts. They change nothing (`Hinted`)."""

    mode: Literal["implicit", "explicit"] | None = None
    ttl: Literal["30m", "12h"] | None = None


class StreamOptions(Strict):
    """Selects the content of a streamed answer."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class NamedSchema(Strict):
    """A JSON schema of `response_format`."""

    name: str = ""
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None  # False: what cannot be kept to is left out


class ResponseFormat(Strict):
    """The form of the answer: text, any JSON object, or JSON that a schema describes."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None


class GrammarRequest(Strict):
    """Ours: `{"regex": "..."}` or `{"choice": ["...", ...]}`."""

    regex: str | None = None
    choice: list[str] | None = None


LEAST_TOP_P = 1e-6  # the most probable token alone, as clients that say 0 mean it


class Decoding(Strict):
    """Fields that all requests share. `top_k`, `min_p`, `repetition_penalty`, `speculate` and `grammar` are ours."""

    model: str
    stream: bool | None = None
    stop: str | list[str] | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[str, float] | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    speculate: bool | None = None
    grammar: GrammarRequest | None = None
    user: str | None = None  # changes nothing, as those that follow: nothing is stored, billed or shared
    safety_identifier: str | None = None
    metadata: Metadata | None = None
    store: bool | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast"] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: CacheOptions | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None


class Common(Decoding):
    """Fields that chats and completions share; `prediction` of a completion is ours."""

    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1)
    n: int | None = Field(None, ge=1)
    prediction: PredictedContent | None = None
    response_format: ResponseFormat | None = None


class Thinking(Strict):
    """Fields for models that think. `chat_template_kwargs` and `thinking_token_budget` are vLLM's, `enable_thinking` is
    Qwen's."""

    enable_thinking: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    thinking_token_budget: int | None = Field(None, ge=0)


class ChatRequest(Common, Thinking):
    """The body of `POST /v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    reasoning_effort: Effort | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    tools: list[Tool] | None = Field(None, max_length=128)
    tool_choice: (
        Literal["none", "auto", "required"] | Annotated[NamedTool | AllowedTools, Field(discriminator="type")] | None
    ) = None
    parallel_tool_calls: bool | None = None
    verbosity: Verbosity | None = None  # changes nothing: no template has it


TokenIds = list[Annotated[int, Field(ge=0, lt=2**31)]]


class CompletionRequest(Common):
    """The body of `POST /v1/completions`."""

    prompt: str | TokenIds | list[str] | list[TokenIds]
    max_tokens: int | None = Field(None, ge=0)
    suffix: str | None = None
    logprobs: int | None = Field(None, ge=0, le=5)
    echo: bool | None = None


@dataclass(frozen=True)
class ParsedRequest:
    """A request in the runtime's terms. `prompt`: messages, text or token ids; `further`: other prompts of a
    completion. `options`: of each answer, those to the first prompt before those to the next."""

    chat: bool
    model: str
    prompt: Any
    options: list[GenerationOptions]
    stream: bool
    usage: bool  # at the end of a stream
    tools: Tools | None = None  # that the answer may or has to call
    echo: Mapping[str, Any] | None = None  # what the answer to `/v1/responses` repeats of its request
    repeats_prompt: bool = False  # a completion's text begins with its prompt
    given: Collection[str] = ()  # fields of `Sampling` that the request has
    predicted: Sequence[int] = ()  # tokens of the options' `prediction`
    further: Sequence[Any] = ()
    suffix: str = ""  # that follows a completion
    unanswered: bool = False  # only the prompt is asked for: its text and log-probabilities
    keeps: bool = False  # a later request may name the answer's items
    field: str = "messages"  # of the request, that holds the prompt
    room: int = 0  # tokens of an answer for which a chat that is too long loses its oldest turns; 0: it loses none
    thinks: bool = False  # where the model can, whatever its template does by itself
    hinted: bool = False  # how the model thinks is left out where it does not
    left_out: Sequence[str] = ()  # what the request offers and this server cannot do, by its path

    @property
    def prompts(self) -> list[Any]:
        return [self.prompt, *self.further]

    def beginning_with(self, defaults: Sampling) -> ParsedRequest:
        """Returns the request with `defaults` for what it does not say of sampling."""
        options = [
            replace(each, sampling=defaults.changed(**{name: getattr(each.sampling, name) for name in self.given}))
            for each in self.options
        ]
        return replace(self, options=options)


def read_chat(body: bytes, limits: Limits, grammars: CheckedGrammars | None = None) -> ParsedRequest:
    """Parses a body. `grammars`: those checked before. Raises ApiError, status 400, naming the field."""
    values = json_object(body)
    messages = values.get("messages")
    if isinstance(messages, list):
        values["messages"] = [
            without_fixed(_gathered(message), ONLY_IN_MESSAGE, f"messages.{i}.")
            if isinstance(message, dict)
            else message
            for i, message in enumerate(messages)
        ]
    return in_runtime_terms(parsed_as(ChatRequest, values, fixed=ONLY), limits, grammars)


def _gathered(message: dict[str, Any]) -> dict[str, Any]:
    """Returns an answer's message with those of its fields that a client wrote into a part of its text: the Agents SDK
    for JavaScript does."""
    content = message.get("content")
    if message.get("role") != "assistant" or not isinstance(content, list):
        return message
    own = (Message.model_fields.keys() | ONLY_IN_MESSAGE) - Text.model_fields.keys() - {"content"}
    texts = [part for part in content if isinstance(part, dict) and part.get("type") == "text"]
    spread = {name: part[name] for part in texts for name in own & part.keys()}
    parts = [{k: v for k, v in part.items() if k not in own} if part in texts else part for part in content]
    return spread | message | {"content": parts} if spread else message


def in_runtime_terms(request: ChatRequest, limits: Limits, grammars: CheckedGrammars | None = None) -> ParsedRequest:
    """Converts a chat for the runtime. Raises ApiError, status 400, naming the field."""
    if len(request.messages) > limits.messages:
        raise invalid(f"{len(request.messages)} messages; expected at most {limits.messages}", "messages", "too_large")
    prompt = [message.plain(f"messages.{i}") for i, message in enumerate(request.messages)]
    bounded(sum(len(json.dumps(message, ensure_ascii=False)) for message in prompt), limits.text, "messages")
    if request.top_logprobs and not request.logprobs:
        raise invalid("top_logprobs without logprobs; expected logprobs: true beside it", "top_logprobs")
    if request.max_tokens is not None and request.max_completion_tokens is not None:
        raise invalid("max_tokens and max_completion_tokens; expected one of them", "max_tokens")
    tokens = request.max_completion_tokens if request.max_tokens is None else request.max_tokens
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    try:
        parsed = _parsed(True, request, prompt, tokens, logprobs, limits)
    except ApiError as error:
        sent = {"max_tokens": "max_completion_tokens"} if request.max_tokens is None else {}
        raise renamed(error, sent) from None
    thinking = _thinking(request, limits)
    parsed = replace(parsed, options=[replace(option, **thinking).within(prompt) for option in parsed.options])
    return replace(_constrained(parsed, request, limits, grammars), tools=_tools(request, limits))


def _thinking(request: ChatRequest, limits: Limits) -> dict[str, Any]:
    """Returns the fields of the options that say how a model thinks."""
    given = dict(request.chat_template_kwargs or {})
    bounded(len(json.dumps(given, ensure_ascii=False)), limits.text, "chat_template_kwargs")
    if (on := request.enable_thinking) is not None:  # by either name of templates
        given = {**dict.fromkeys(SWITCHES, on), **given, "enable_thinking": on}
    return {
        "reasoning_effort": "xhigh" if request.reasoning_effort == "max" else request.reasoning_effort,
        "chat_template_kwargs": given or None,
        "thinking_token_budget": request.thinking_token_budget,
    }


def _tools(request: ChatRequest, limits: Limits) -> Tools | None:
    if not request.tools and request.tool_choice not in (None, "none", "auto"):
        raise invalid("tool_choice without tools; expected tools beside it", "tool_choice")
    if not request.tools or request.tool_choice == "none":
        return None
    tools = [
        tool.model_dump(by_alias=True, exclude_none=True, exclude={"function": {"strict"}}) for tool in request.tools
    ]
    names = [tool.function.name for tool in request.tools]
    if len(set(names)) < len(names):
        raise invalid("two tools of one name; expected different names", "tools")
    if request.grammar is not None:
        raise invalid("tools beside a grammar; expected one of them", "tools")
    required, listed = _chosen(request.tool_choice, names)
    made = Tools(
        schemas=tools,
        forced=required,
        named=isinstance(request.tool_choice, NamedTool),
        parallel=request.parallel_tool_calls is not False,
        callable=listed,
        strict=frozenset(tool.function.name for tool in request.tools if tool.function.strict),
        ids=frozenset(call.id for message in request.messages for call in message.tool_calls or ()),
        content=_content(request.response_format),
        lenient=frozenset(tool.function.name for tool in request.tools if tool.function.strict is False),
        lenient_content=_lenient(request.response_format),
    )
    bounded(len(json.dumps(tools)), limits.text, "tools")
    if made.forced or made.strict:
        bounded(len(json.dumps(undescribed(made.parameters))), limits.grammar, "tools")
    return made


def _chosen(choice: str | NamedTool | AllowedTools | None, names: Sequence[str]) -> tuple[bool, tuple[str, ...]]:
    """Returns whether one of the tools with these names has to be called, and those that may be."""
    if isinstance(choice, NamedTool):
        required, listed = True, [choice]
    elif isinstance(choice, AllowedTools):
        required, listed = choice.allowed_tools.mode == "required", choice.allowed_tools.tools
    else:
        return choice == "required", tuple(names)
    chosen = tuple(dict.fromkeys(tool.function.name for tool in listed))
    if unknown := [name for name in chosen if name not in names]:
        raise invalid(f"tool_choice of {unknown[0]}; expected one of {', '.join(names)}", "tool_choice")
    return required, chosen


def _content(requested: ResponseFormat | None) -> Mapping[str, Any] | None:
    """Returns the schema of an answer that calls no tool, None for any text."""
    if requested is None or requested.type == "text":
        return None
    return {"type": "object"} if requested.json_schema is None else requested.json_schema.schema_


def _lenient(requested: ResponseFormat | None) -> bool:
    schema = None if requested is None else requested.json_schema
    return schema is not None and schema.strict is False


def read_completion(body: bytes, limits: Limits, grammars: CheckedGrammars | None = None) -> ParsedRequest:
    """Parses a body. `grammars`: those checked before. Raises ApiError, status 400, naming the field."""
    request = parsed_as(CompletionRequest, json_object(body), fixed=ONLY_IN_COMPLETION)
    return completion_in_runtime_terms(request, limits, grammars)


def completion_in_runtime_terms(
    request: CompletionRequest, limits: Limits, grammars: CheckedGrammars | None = None
) -> ParsedRequest:
    """Converts a completion for the runtime. Raises ApiError, status 400, naming the field."""
    prompts = _prompts(request.prompt, limits)
    bounded(len(request.suffix or ""), limits.text, "suffix")
    if request.suffix and not isinstance(prompts[0], str):
        raise invalid("suffix beside token ids; expected a text as the prompt", "suffix")
    if request.max_tokens == 0 and not request.echo:
        raise invalid("max_tokens 0; expected at least 1, or echo beside it", "max_tokens")
    parsed = _parsed(False, request, prompts[0], request.max_tokens, request.logprobs, limits)
    parsed = replace(parsed, options=[replace(option, separate_reasoning=False) for option in parsed.options])
    parsed = _constrained(parsed, request, limits, grammars)
    options = parsed.options * len(prompts)
    parsed = replace(parsed, options=options, further=prompts[1:], suffix=request.suffix or "", field="prompt")
    if not request.echo:
        return parsed
    if request.stream or (request.n or 1) > 1 or request.suffix:
        raise invalid("echo with a stream, n or suffix; expected one whole answer to each prompt", "echo")
    options = [replace(option, prompt_logprobs=option.logprobs) for option in options]
    return replace(parsed, options=options, repeats_prompt=True, unanswered=request.max_tokens == 0)


def _prompts(given: Any, limits: Limits) -> list[Any]:
    """Returns the prompts, each a text or token ids, of one or several."""
    prompts = given if isinstance(given, list) and given and isinstance(given[0], (str, list)) else [given]
    if len(prompts) > limits.inputs:
        raise invalid(f"{len(prompts)} prompts; expected at most {limits.inputs}", "prompt", "too_large")
    if not all(prompts):
        raise invalid("an empty prompt; expected some text", "prompt")
    bounded(sum(map(len, prompts)), limits.text, "prompt")
    return prompts


def _parsed(
    chat: bool, request: Common, prompt: Any, tokens: int | None, logprobs: int | None, limits: Limits
) -> ParsedRequest:
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options without a stream; expected stream: true beside it", "stream_options")
    stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
    if len(stops) > limits.stops or any(not 0 < len(stop) <= limits.stop_length for stop in stops):
        raise invalid(
            f"stop strings; expected at most {limits.stops}, each of 1 to {limits.stop_length} characters", "stop"
        )
    if request.n is not None and request.n > limits.choices:
        raise invalid(f"n {request.n}; expected at most {limits.choices}", "n", "too_large")
    prediction = None if request.prediction is None else request.prediction.text
    bounded(len(prediction or ""), limits.text, "prediction.content")
    given = _sampling(request)
    try:
        sampling = Sampling(**given)
    except ConfigError as error:
        raise invalid(str(error), error.found.split()[0]) from None
    options = GenerationOptions(
        max_new_tokens=min(limits.default_tokens if tokens is None else max(tokens, 1), limits.max_tokens),
        stop=stops,
        speculate=request.speculate is not False,
        sampling=sampling,
        logprobs=logprobs,
        prediction=prediction,
    )
    usage = request.stream_options is not None and bool(request.stream_options.include_usage)
    answers = _each(options, request.n or 1)
    return ParsedRequest(chat, request.model, prompt, answers, bool(request.stream), usage, given=given.keys())


def _each(options: GenerationOptions, answers: int) -> list[GenerationOptions]:
    """Returns the options of each answer: a seed counts up from one answer to the next."""
    seed = options.sampling.seed
    if seed is None:
        return [options] * answers
    return [replace(options, sampling=replace(options.sampling, seed=(seed + i) % 2**64)) for i in range(answers)]


def _sampling(request: Decoding) -> dict[str, Any]:
    """The fields of `Sampling` that the request has."""
    values = {field.name: value for field in fields(Sampling) if (value := getattr(request, field.name)) is not None}
    if values.get("temperature", 1) < MIN_TEMPERATURE:  # how clients that know no 0 say greedy
        values["temperature"] = 0.0
    if "top_p" in values:
        values["top_p"] = max(values["top_p"], LEAST_TOP_P)
    if "top_k" in values:
        values["top_k"] = max(values["top_k"], 0)  # vLLM's -1: all
    if "seed" in values:
        values["seed"] %= 2**64  # OpenAI's is a signed number
    if "logit_bias" in values:
        wrong = next((token for token in values["logit_bias"] if not re.fullmatch("[0-9]{1,9}", token)), None)
        if wrong is not None:
            raise invalid(f"logit_bias of {wrong[:40]!r}; expected ids of tokens, as texts", "logit_bias")
        values["logit_bias"] = {int(token): bias for token, bias in values["logit_bias"].items()}
    return values


def _constrained(
    parsed: ParsedRequest, request: Common, limits: Limits, grammars: CheckedGrammars | None
) -> ParsedRequest:
    """Returns `parsed` with the grammar of the request in its options."""
    grammar = _grammar(request, limits, grammars or CheckedGrammars())
    return replace(parsed, options=[replace(option, grammar=grammar) for option in parsed.options])


def _grammar(request: Common, limits: Limits, grammars: CheckedGrammars) -> Grammar | None:
    formatted, extension = _from_format(request.response_format, limits), _from_grammar(request.grammar, limits)
    if formatted and extension:
        raise invalid("grammar and response_format; expected one of them", "grammar")
    chosen = formatted or extension
    if chosen is None:
        return None
    constructor, param, values = chosen
    try:
        return grammars.make(constructor, *values)
    except (ConfigError, DataError) as error:
        raise invalid(str(error), param) from None


# constructor of `Grammar`, the field that names it, arguments
_GrammarCall = tuple[str, str, tuple[Any, ...]] | None


def _from_format(requested: ResponseFormat | None, limits: Limits) -> _GrammarCall:
    if requested is None:
        return None
    if (requested.json_schema is None) == (requested.type == "json_schema"):
        raise invalid(
            "response_format; expected json_schema with the type json_schema, and with no other",
            "response_format.json_schema",
        )
    if requested.json_schema is None:
        return None if requested.type == "text" else ("json_object", "response_format", ())
    param = "response_format.json_schema.schema"
    bounded(len(json.dumps(requested.json_schema.schema_)), limits.grammar, param)
    return "json_schema", param, (requested.json_schema.schema_, *((SEPARATORS, False) if _lenient(requested) else ()))


def _from_grammar(requested: GrammarRequest | None, limits: Limits) -> _GrammarCall:
    if requested is None:
        return None
    if (requested.regex is None) == (requested.choice is None):
        raise invalid("grammar; expected one of regex and choice", "grammar")
    if requested.regex is not None:
        bounded(len(requested.regex), limits.grammar, "grammar.regex")
        return "regex", "grammar.regex", (requested.regex,)
    choices = requested.choice or []
    bounded(sum(map(len, choices)) + len(choices), limits.grammar, "grammar.choice")
    return "choice", "grammar.choice", (choices,)
