"""Parses `POST /v1/responses`: its input items become messages, and all else what a chat would ask for.
`tests/serve/api/test_responses.py` covers this file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field

from streamspec.serve.api.body import json_object, parsed_as, renamed, without_fixed
from streamspec.serve.api.chat_requests import (
    MAX_TOP_LOGPROBS,
    ChatRequest,
    Decoding,
    Effort,
    ParsedRequest,
    Thinking,
    Verbosity,
    in_runtime_terms,
)
from streamspec.serve.api.fields import Function, FunctionName, Hinted, Refusal, Strict, joined
from streamspec.serve.api.kept_items import KeptItems
from streamspec.serve.errors import ApiError, invalid
from streamspec.serve.limits import Limits
from streamspec.serve.tools.checked_grammars import CheckedGrammars

# Fields of OpenAI's API that are there with these values only, beside null.
ONLY: dict[str, tuple[Any, ...]] = {
    "access_programs": (),
    "background": (False,),
    "background_options": (),
    "context_management": ([],),
    "conversation": (),
    "image": (),
    "max_tool_calls": (),
    "moderation": (),
    "previous_response_id": (),
    "prompt": (),
}
ONLY_IN_ITEM: dict[str, tuple[Any, ...]] = {"caller": (), "namespace": (), "async": (False,)}
ONLY_IN_TOOL: dict[str, tuple[Any, ...]] = {
    "allowed_callers": (["direct"],),
    "async": (False,),
    "defer_loading": (False,),
    "output_schema": (),
}
# Tools that the model need not call and this server has not: an offer of them is left out.
NO_FUNCTIONS = frozenset(
    {
        *("apply_patch", "code_interpreter", "computer", "computer_use_preview", "custom", "file_search"),
        *("image_generation", "local_shell", "mcp", "namespace", "shell", "tool_search"),
        *("web_search", "web_search_preview"),
    }
)
# names of a chat's fields here
NAMES = {
    "messages": "input",
    "reasoning_effort": "reasoning.effort",
    "max_tokens": "max_output_tokens",
    "response_format.json_schema.schema": "text.format.schema",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
}
LOGPROBS = "message.output_text.logprobs"
Status = Literal["in_progress", "completed", "incomplete"]


class ItemText(Hinted):
    """A piece of text in an item, of a person or of an answer."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = Field(None, max_length=0)
    logprobs: list[Any] | None = None  # of an answer before: they change nothing
    parsed: Any = Field(None, exclude=True)  # a client's own reading of it, which it sends back


class InputMessage(Strict):
    """A message among the input items."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Annotated[ItemText | Refusal, Field(discriminator="type")]]
    id: str | None = None
    status: Status | None = None
    phase: Literal["commentary", "final_answer"] | None = None  # changes nothing: no template has it

    def add_to(self, messages: list[dict[str, Any]]) -> None:
        """Appends it to the messages of a chat, an answer to its thought."""
        said = {"role": self.role, "content": joined(self.content)}
        thought = messages and messages[-1]["role"] == self.role == "assistant" and messages[-1]["content"] is None
        if thought and "tool_calls" not in messages[-1]:
            said = messages.pop() | said
        messages.append(said)


class InputCall(Strict):
    """A call of a function that an answer made before."""

    type: Literal["function_call"]
    call_id: str = Field(min_length=1)
    name: str
    arguments: str
    parsed_arguments: Any = Field(None, exclude=True)  # a client's own reading of them
    id: str | None = None
    status: Status | None = None

    def add_to(self, messages: list[dict[str, Any]]) -> None:
        """Adds it to the answer's message before it, of which it was a part."""
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": None})
        call = {"id": self.call_id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}
        messages[-1].setdefault("tool_calls", []).append(call)


class InputCallOutput(Strict):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: str = Field(min_length=1)
    output: str | list[ItemText]
    id: str | None = None
    name: str | None = None
    status: Status | None = None

    def add_to(self, messages: list[dict[str, Any]]) -> None:
        """Appends it to the messages of a chat."""
        messages.append({"role": "tool", "tool_call_id": self.call_id, "content": joined(self.output)})


class ItemThought(Strict):
    """A piece of a thought."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class InputReasoning(Strict):
    """What an answer thought before."""

    type: Literal["reasoning"]
    content: list[ItemThought] | None = None
    summary: list[ItemThought] | None = None
    encrypted_content: None = None
    id: str | None = None
    status: Status | None = None

    def add_to(self, messages: list[dict[str, Any]]) -> None:
        """Begins the answer's message, to which the next items belong."""
        thought = "".join(part.text for part in self.content or self.summary or ())
        if thought:
            messages.append({"role": "assistant", "content": None, "reasoning_content": thought})


class ItemReference(Strict):
    """An item of an earlier answer, by its id."""

    type: Literal["item_reference"]
    id: str


ITEMS: dict[str, type[InputMessage] | type[InputCall] | type[InputCallOutput] | type[InputReasoning]] = {
    "message": InputMessage,
    "reasoning": InputReasoning,
    "function_call": InputCall,
    "function_call_output": InputCallOutput,
}


class FlatTool(Function):
    """A function that an answer may call, as this path spells it."""

    type: Literal["function"]


class FlatToolChoice(FunctionName):
    """The function that has to be called, as this path spells it."""

    type: Literal["function"]

    def of_chat(self) -> dict[str, Any]:
        """Returns the choice as a chat spells it."""
        return {"type": self.type, "function": {"name": self.name}}


class FlatAllowedTools(Strict):
    """The functions that may be called, as this path spells them."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[FlatToolChoice] = Field(min_length=1)

    def of_chat(self) -> dict[str, Any]:
        """Returns the choice as a chat spells it."""
        tools = [tool.of_chat() for tool in self.tools]
        return {"type": self.type, "allowed_tools": {"mode": self.mode, "tools": tools}}


class TextFormat(Strict):
    """The form of the text: free, any JSON object, or JSON that a schema describes."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None

    def of_chat(self) -> dict[str, Any]:
        """Returns a chat's `response_format`."""
        fields = self.model_dump(by_alias=True, exclude_none=True)
        type_ = fields.pop("type")
        return {"type": type_} | ({"json_schema": fields} if fields else {})


class TextOptions(Strict):
    """The options of the answer's text."""

    format: TextFormat | None = None
    verbosity: Verbosity | None = None  # as a chat's


class Obfuscation(Strict):
    """Padding of a stream, which this server does not have."""

    include_obfuscation: Literal[False] | None = None


class Reasoning(Strict):
    """How a model thinks. Summaries are not made, whatever is asked for."""

    effort: Effort | None = None
    context: Literal["auto"] | None = None  # the template decides
    mode: Literal["standard"] | None = None
    summary: Literal["auto", "concise", "detailed", "none"] | None = None
    generate_summary: None = None


class ResponsesRequest(Decoding, Thinking):
    """The body of `POST /v1/responses`."""

    input: str | list[Any] = Field(min_length=1)
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    reasoning: Reasoning | None = None
    text: TextOptions | None = None
    tools: list[FlatTool] | None = Field(None, max_length=128)
    tool_choice: (
        Literal["none", "auto", "required"]
        | Annotated[FlatToolChoice | FlatAllowedTools, Field(discriminator="type")]
        | None
    ) = None
    parallel_tool_calls: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    stream_options: Obfuscation | None = None
    truncation: Literal["auto", "disabled"] | None = None
    client_metadata: dict[str, Any] | None = None  # changes nothing


def read_responses(
    body: bytes, limits: Limits, grammars: CheckedGrammars | None = None, *, kept: KeptItems | None = None
) -> ParsedRequest:
    """Parses a body. `grammars`: those checked before; `kept`: items that it may name. Raises ApiError, status 400,
    naming the field."""
    values, left_out = json_object(body), list[str]()
    if isinstance(tools := values.get("tools"), list):
        kinds = [str(tool.get("type")) if isinstance(tool, dict) else "" for tool in tools]
        left_out = [f"tools.{i} ({kind})" for i, kind in enumerate(kinds) if kind in NO_FUNCTIONS]
        values["tools"] = [
            _function(tool, f"tools.{i}.") for i, tool in enumerate(tools) if kinds[i] not in NO_FUNCTIONS
        ]
    request = parsed_as(ResponsesRequest, values, fixed=ONLY)
    if isinstance(request.input, list) and len(request.input) > limits.messages:
        raise invalid(f"{len(request.input)} input items; expected at most {limits.messages}", "input", "too_large")
    try:
        parsed = in_runtime_terms(parsed_as(ChatRequest, _of_chat(request, kept or KeptItems())), limits, grammars)
    except ApiError as error:
        raise renamed(error, NAMES) from None
    return replace(
        parsed,
        echo=_echo(request),
        keeps=request.store is not False,
        field="input",
        room=parsed.options[0].max_new_tokens if request.truncation == "auto" else 0,
        left_out=left_out,
    )


def _function(tool: Any, where: str) -> Any:
    """Removes the fields of a function that change nothing. `where`: its path in the request."""
    if not isinstance(tool, dict):
        return tool
    if tool.get("type") != "function":
        raise invalid(f"{where}type {tool.get('type')!r:.40}; expected function", f"{where}type", "unsupported_value")
    return without_fixed(tool, ONLY_IN_TOOL, where)


def _of_chat(request: ResponsesRequest, kept: KeptItems) -> dict[str, Any]:
    """Returns the fields of the chat that the request asks for."""
    shared = {name: getattr(request, name) for name in (*Decoding.model_fields, *Thinking.model_fields)}
    chosen = request.tool_choice
    form = request.text.format.of_chat() if request.text is not None and request.text.format is not None else None
    functions = [tool.model_dump(exclude={"type"}, by_alias=True, exclude_none=True) for tool in request.tools or ()]
    logprobs = LOGPROBS in (request.include or ()) or request.top_logprobs is not None
    return shared | {
        "grammar": request.grammar and request.grammar.model_dump(),
        "messages": _messages(request, kept),
        "max_tokens": request.max_output_tokens,
        "reasoning_effort": request.reasoning and request.reasoning.effort,
        "response_format": form,
        "tools": [{"type": "function", "function": function} for function in functions] or None,
        "tool_choice": chosen if chosen is None or isinstance(chosen, str) else chosen.of_chat(),
        "parallel_tool_calls": request.parallel_tool_calls,
        "logprobs": logprobs or None,
        "top_logprobs": request.top_logprobs,
    }


def _messages(request: ResponsesRequest, kept: KeptItems) -> list[dict[str, Any]]:
    """Returns the messages that the input items stand for, after the instructions."""
    messages: list[dict[str, Any]] = []
    if request.instructions:
        messages.append({"role": "system", "content": request.instructions})
    if isinstance(request.input, str):
        return [*messages, {"role": "user", "content": request.input}]
    for i, item in enumerate(request.input):
        type_ = item.get("type", "message") if isinstance(item, dict) else None
        if type_ == "item_reference":
            named = parsed_as(ItemReference, item, f"input.{i}.").id
            found = kept.get(named)
            if found is None:
                raise invalid(f"input.{i}.id {named!r:.60} is not kept; expected the item itself", f"input.{i}.id")
            type_, item = found["type"], found
        if not isinstance(type_, str) or type_ not in ITEMS:
            known = ", ".join(ITEMS)
            raise invalid(
                f"input.{i}.type {type_!r:.40}; expected one of {known}", f"input.{i}.type", "unsupported_value"
            )
        parsed_as(ITEMS[type_], item, f"input.{i}.", ONLY_IN_ITEM).add_to(messages)
    return messages


def _echo(request: ResponsesRequest) -> Mapping[str, Any]:
    """Returns what the answer repeats, defaults filled in."""
    text = (request.text or TextOptions()).model_dump(by_alias=True, exclude_none=True)
    chosen = request.tool_choice
    return {
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "text": {"format": {"type": "text"}} | text,
        "tool_choice": (chosen or "auto") if chosen is None or isinstance(chosen, str) else chosen.model_dump(),
        "tools": [
            {"strict": None, **tool.model_dump(by_alias=True, exclude_none=True)} for tool in request.tools or ()
        ],
        "top_logprobs": request.top_logprobs or 0,
        "user": request.user,
        "background": False,
        "max_tool_calls": None,
        "metadata": request.metadata or {},
        "previous_response_id": None,
        "reasoning": {"effort": request.reasoning and request.reasoning.effort, "summary": None},
        "service_tier": "default",
        "store": False,
        "truncation": request.truncation or "disabled",
    }
