"""Fields of messages and tools. `tests/serve/api/test_chat_requests.py` covers this file."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from streamspec.serve.errors import invalid


class Strict(BaseModel):
    """A JSON object without unknown fields and without conversion of types."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=())


class Part(Strict):
    """A piece of a message; only text."""

    type: Literal["text"]
    text: str


class CalledFunction(Strict):
    """The function of a call and its arguments as JSON."""

    name: str
    arguments: str


class ToolCall(Strict):
    """A call that an answer made before."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class Message(Strict):
    """A message of a chat; with the role `tool`, the result of a call."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    def plain(self, where: str) -> dict[str, Any]:
        """The message as the runtime takes it. `where`: its path in the request. Raises ApiError."""
        if self.content is None and not self.tool_calls:
            raise invalid(f"no {where}.content; expected the field", f"{where}.content", "missing_field")
        for name, role in (("tool_calls", "assistant"), ("tool_call_id", "tool")):
            if getattr(self, name) and self.role != role:
                raise invalid(f"{where}.{name} with the role {self.role}; expected {role}", f"{where}.{name}")
        if self.role == "tool" and not self.tool_call_id:
            raise invalid(f"no {where}.tool_call_id; expected the field", f"{where}.tool_call_id", "missing_field")
        content = "".join(part.text for part in self.content) if isinstance(self.content, list) else self.content
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": content}
        if self.tool_calls:
            message["tool_calls"] = [call.model_dump() for call in self.tool_calls]
        return message if self.tool_call_id is None else message | {"tool_call_id": self.tool_call_id}


class Function(Strict):
    """A function that an answer may call. `parameters`: a JSON schema."""

    name: str = Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None  # a forced call keeps to the schema either way


class Tool(Strict):
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
