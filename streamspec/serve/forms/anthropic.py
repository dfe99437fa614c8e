"""Reads requests in the form of Anthropic's Messages API, which become chats.

Source: https://platform.claude.com/docs/en/api/messages. tests/serve/forms/test_anthropic.py covers this file.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from streamspec.serve.api.body import json_object, parsed_as, renamed
from streamspec.serve.api.chat_requests import ChatRequest, ParsedRequest, in_runtime_terms
from streamspec.serve.api.fields import Hinted, Strict, Text, joined
from streamspec.serve.errors import ApiError, invalid
from streamspec.serve.forms.anthropic_answer import AnthropicMessage, error_of
from streamspec.serve.forms.form import ChatPath, Form
from streamspec.serve.limits import Limits
from streamspec.serve.tools.checked_grammars import CheckedGrammars

NOTHING_EDITED: tuple[Any, ...] = ({"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]})
# Fields of Anthropic's API that are there with these values only, beside null.
ONLY: dict[str, tuple[Any, ...]] = {"container": (), "context_management": NOTHING_EDITED, "mcp_servers": ([],)}
ONLY_IN_TOOL: dict[str, tuple[Any, ...]] = {
    "allowed_callers": (["direct"],),
    "defer_loading": (False,),
    "input_examples": ([],),
}
ONLY_IN_BLOCK: dict[str, tuple[Any, ...]] = {
    "caller": ({"type": "direct"},),
    "citations": ([],),
    "toolset_name": (),
}
# names of a chat's fields here
NAMES = {
    "stop": "stop_sequences",
    "reasoning_effort": "output_config.effort",
    "thinking_token_budget": "thinking.budget_tokens",
    "response_format.json_schema.schema": "output_config.format.schema",
    "response_format": "output_config.format",
}
CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class ThinkingBlock(Strict):
    """What an answer thought before. Signatures change nothing."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedBlock(Strict):
    """A thought that no other server can read; it is left out."""

    type: Literal["redacted_thinking"]
    data: str


class CallBlock(Hinted):
    """A call that an answer made before."""

    type: Literal["tool_use"]
    id: str = Field(min_length=1)
    name: str
    input: dict[str, Any]


class ResultBlock(Hinted):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: str = Field(min_length=1)
    content: str | list[Text] | None = None
    is_error: bool | None = None  # the result's text says it, if it has one


BLOCKS = {
    "user": (Text, ResultBlock),
    "assistant": (Text, ThinkingBlock, RedactedBlock, CallBlock),
    "system": (Text,),
}


class AnthropicTurn(Strict):
    """A message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Any]


class AnthropicTool(Hinted):
    """A function that an answer may call."""

    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    type: Literal["custom"] | None = None
    eager_input_streaming: bool | None = None  # changes nothing: what is certain is sent at once


class AnthropicToolChoice(Strict):
    """Whether a tool, and which, has to be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class AnthropicThinking(Strict):
    """How a model thinks. `adaptive`: as it does by itself."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=0)
    display: Literal["summarized", "omitted"] | None = None  # thoughts are shown whole, or not at all


class JsonOutput(Strict):
    """The schema of the answer."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputOptions(Strict):
    """The effort and the form of the answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonOutput | None = None


class Caller(Strict):
    """Who asks."""

    user_id: str | None = None


class MessagesRequest(Hinted):
    """The body of `POST /v1/messages`. `top_k` and `temperature` are limited as a chat's."""

    model: str
    messages: list[Any] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    system: str | list[Text] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    tools: list[Any] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: AnthropicThinking | None = None
    output_config: OutputOptions | None = None
    metadata: Caller | None = None  # changes nothing, as those that follow
    service_tier: Literal["auto", "standard_only"] | None = None
    speed: Literal["standard", "fast"] | None = None
    inference_geo: str | None = None
    diagnostics: dict[str, Any] | None = None
    user_profile_id: str | None = None
    workspace_id: str | None = None


def read_messages(body: bytes, limits: Limits, grammars: CheckedGrammars | None = None) -> ParsedRequest:
    """Parses a body. Raises ApiError, status 400, naming the field."""
    request = parsed_as(MessagesRequest, json_object(body), fixed=ONLY)
    if request.max_tokens is None:
        raise invalid("no max_tokens; expected the field", "max_tokens", "missing_field")
    return _parsed(request, limits, grammars)


def read_counted(body: bytes, limits: Limits, grammars: CheckedGrammars | None = None) -> ParsedRequest:
    """Parses the body of a request whose tokens are counted: it need not limit the answer. Raises as
    `read_messages`."""
    return _parsed(parsed_as(MessagesRequest, json_object(body), fixed=ONLY), limits, grammars)


def _parsed(request: MessagesRequest, limits: Limits, grammars: CheckedGrammars | None) -> ParsedRequest:
    try:
        parsed = in_runtime_terms(parsed_as(ChatRequest, _of_chat(request)), limits, grammars)
    except ApiError as error:
        raise renamed(error, NAMES) from None
    hidden = request.thinking is not None and request.thinking.display == "omitted"
    return replace(parsed, echo={"hides_thoughts": hidden}, hinted=True)


def _of_chat(request: MessagesRequest) -> dict[str, Any]:
    """Returns the fields of the chat that the request asks for."""
    thinking, output, choice = request.thinking, request.output_config or OutputOptions(), request.tool_choice
    switch = {"enabled": True, "disabled": False}
    form = output.format and {"type": "json_schema", "json_schema": {"schema": output.format.schema_}}
    return {
        **{name: getattr(request, name) for name in ("model", "max_tokens", "stream", "temperature", "top_p", "top_k")},
        "messages": _messages(request),
        "stop": request.stop_sequences,
        "enable_thinking": None if thinking is None else switch.get(thinking.type),
        "thinking_token_budget": None if thinking is None else thinking.budget_tokens,
        "reasoning_effort": output.effort,
        "response_format": form,
        "tools": [_function(tool, f"tools.{i}.") for i, tool in enumerate(request.tools or ())] or None,
        "tool_choice": None if choice is None else _chosen(choice),
        "parallel_tool_calls": None if choice is None else not choice.disable_parallel_tool_use,
    }


def _function(tool: Any, where: str) -> dict[str, Any]:
    given = parsed_as(AnthropicTool, tool, where, ONLY_IN_TOOL)
    function = {"name": given.name, "description": given.description, "strict": given.strict}
    return {"type": "function", "function": function | {"parameters": given.input_schema}}


def _chosen(choice: AnthropicToolChoice) -> str | dict[str, Any]:
    if (choice.type == "tool") != (choice.name is not None):
        raise invalid("tool_choice; expected a name with the type tool, and with no other", "tool_choice.name")
    if choice.name is not None:
        return {"type": "function", "function": {"name": choice.name}}
    return CHOICES[choice.type]


def _messages(request: MessagesRequest) -> list[dict[str, Any]]:
    """Returns the messages of a chat. Those of one role that follow each other are one turn."""
    messages: list[dict[str, Any]] = []
    if request.system:
        messages.append({"role": "system", "content": joined(request.system)})
    for i, one in enumerate(request.messages):
        turn = parsed_as(AnthropicTurn, one, f"messages.{i}.")
        blocks = [{"type": "text", "text": turn.content}] if isinstance(turn.content, str) else turn.content
        read = [_block(block, turn.role, f"messages.{i}.content.{j}.") for j, block in enumerate(blocks)]
        if not any(not isinstance(block, RedactedBlock) for block in read):
            raise invalid(f"messages.{i} without content; expected some", f"messages.{i}.content", "missing_field")
        results = [block for block in read if isinstance(block, ResultBlock)]
        messages += [
            {"role": "tool", "tool_call_id": result.tool_use_id, "content": _told(result)} for result in results
        ]
        if len(results) < len(read):
            _add(messages, _said(turn.role, read))
    if messages[-1]["role"] == "assistant":
        raise invalid("a last message of the assistant; expected one to answer", "messages", "unsupported_value")
    return messages


def _told(result: ResultBlock) -> str:
    return joined(result.content or "") or ("Error" if result.is_error else "")


def _block(block: Any, role: str, where: str) -> Any:
    kind = block.get("type") if isinstance(block, dict) else None
    kinds = {model.model_fields["type"].annotation.__args__[0]: model for model in BLOCKS[role]}  # type: ignore[union-attr]
    if kind not in kinds:
        known = " or ".join(kinds)
        raise invalid(f"{where}type {kind!r:.40} of {role}; expected {known}", f"{where}type", "unsupported_value")
    return parsed_as(kinds[kind], block, where, ONLY_IN_BLOCK)


def _said(role: str, blocks: Sequence[Any]) -> dict[str, Any]:
    """Returns the message that the blocks of a turn are, but for results of calls."""
    text = "".join(block.text for block in blocks if isinstance(block, Text))
    thought = "".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
    calls = [
        {
            "id": block.id,
            "type": "function",
            "function": {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)},
        }
        for block in blocks
        if isinstance(block, CallBlock)
    ]
    said: dict[str, Any] = {"role": role, "content": text if text or not calls else None}
    return said | ({"reasoning_content": thought} if thought else {}) | ({"tool_calls": calls} if calls else {})


def _add(messages: list[dict[str, Any]], said: dict[str, Any]) -> None:
    """Appends a message, text of the same role to the one before it."""
    last: dict[str, Any] = messages[-1] if messages else {"role": None}
    if last["role"] == said["role"] and last.keys() == said.keys() == {"role", "content"}:
        last["content"] = f"{last['content']}\n{said['content']}"
    else:
        messages.append(said)


# ---- paths


def _routes(service: ChatPath) -> list[Route]:
    async def count_tokens(request: Request) -> Response:
        return JSONResponse({"input_tokens": await service.count(request, read_counted)})

    return [
        Route("/v1/messages", partial(service.answer, read=read_messages, build=AnthropicMessage), methods=["POST"]),
        Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
    ]


ANTHROPIC = Form("/v1/messages", error_of, _routes)
