"""Fields of messages and tools. `tests/serve/api/test_chat_requests.py` covers this file."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from streamspec.errors import DataError
from streamspec.prompt.prompt_format import plain_message
from streamspec.serve.errors import invalid


class Strict(BaseModel):
    """A JSON object without unknown fields and without conversion of types."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=())


class Hinted(Strict):
    """An object with hints for a provider's cache. They change nothing: the server finds cached prompts by itself."""

    cache_control: dict[str, Any] | None = Field(None, exclude=True)
    prompt_cache_breakpoint: dict[str, Any] | None = Field(None, exclude=True)


class Text(Hinted):
    """A piece of text in a message."""

    type: Literal["text"]
    text: str


def joined(content: str | list[Any]) -> str:
    """The text of a content, itself or in pieces."""
    return content if isinstance(content, str) else "".join(piece.text for piece in content)


class Refusal(Hinted):
    """A piece of an answer before, in which it refused."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


Part = Annotated[Text | Refusal, Field(discriminator="type")]


class PredictedContent(Strict):
    """What the answer is expected to be for the most part."""

    type: Literal["content"]
    content: str | list[Text]

    @property
    def text(self) -> str:
        return joined(self.content)


class CalledFunction(Strict):
    """The function of a call and its arguments as JSON."""

    name: str
    arguments: str
    parsed_arguments: Any = Field(None, exclude=True)  # a client's own reading of them, which it sends back


class ToolCall(Strict):
    """A call that an answer made before."""

    id: str
    type: Literal["function"]
    function: CalledFunction
    index: int | None = Field(None, exclude=True)  # of a stream's piece, which clients put together and send back


class Message(Hinted):
    """A message of a chat; with the role `tool`, the result of a call."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: str | None = None  # for templates that show it
    refusal: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None  # what an answer thought before; templates drop or show it
    reasoning: str | None = None  # its other name
    parsed: Any = Field(None, exclude=True)  # a client's own reading of the content, which it sends back

    def plain(self, where: str) -> dict[str, Any]:
        """The message as the runtime takes it. `where`: its path in the request. Raises ApiError."""
        for name in ("tool_calls", "refusal", "tool_call_id", "reasoning_content", "reasoning"):
            role = "tool" if name == "tool_call_id" else "assistant"
            if getattr(self, name) and self.role != role:
                raise invalid(f"{where}.{name} with the role {self.role}; expected {role}", f"{where}.{name}")
        if self.role == "tool" and not self.tool_call_id:
            raise invalid(f"no {where}.tool_call_id; expected the field", f"{where}.tool_call_id", "missing_field")
        try:
            return plain_message(self.model_dump(exclude_none=True), where)
        except DataError as error:
            code = "invalid_value" if self.content else "missing_field"
            raise invalid(str(error), f"{where}.content", code) from None


class Function(Hinted):
    """A function that an answer may call. `parameters`: a JSON schema. `response` and `return`: one of its result, for
    templates that show it, as Gemini's clients and transformers name it."""

    name: str = Field(pattern=r"^[A-Za-z0-9_-]{1,128}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    response: dict[str, Any] | None = None
    return_: dict[str, Any] | None = Field(None, alias="return")
    strict: bool | None = None  # calls keep to the schema; forced ones either way, with False as far as a grammar can


class Tool(Hinted):
    """A tool; only functions."""

    type: Literal["function"]
    function: Function


class FunctionName(Strict):
    """A function by its name."""

    name: str


class NamedTool(Strict):
    """The tool that has to be called."""

    type: Literal["function"]
    function: FunctionName


class ToolSubset(Strict):
    """Tools of the request by name, and whether one of them has to be called."""

    mode: Literal["auto", "required"]
    tools: list[NamedTool] = Field(min_length=1)


class AllowedTools(Strict):
    """The tools that may be called; the prompt has all of them."""

    type: Literal["allowed_tools"]
    allowed_tools: ToolSubset
