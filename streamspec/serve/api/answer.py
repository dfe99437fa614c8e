"""Defines what a form of the API is made of: how it reads a request, and the builder of its answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from streamspec.runtime import Chunk
from streamspec.serve.api.chat_requests import ParsedRequest
from streamspec.serve.errors import ApiError
from streamspec.serve.limits import Limits
from streamspec.serve.tools.call_parser import CallParser
from streamspec.serve.tools.checked_grammars import CheckedGrammars

EVENTS = "text/event-stream"
LINE_ENDS = {ord(end): f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}  # at which readers of lines split


def line_of(body: Mapping[str, Any]) -> bytes:
    """Returns a JSON object as a line without its end, which nothing in it resembles."""
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).translate(LINE_ENDS).encode()


class Answer(Protocol):
    """Builds the answer to one request from a session's chunks. `waited`: seconds for a session. `left_out`: keywords
    of its schema that it need not keep to."""

    media_type: str = EVENTS  # of the stream
    waited: float = 0.0
    left_out: Sequence[str] = ()

    def push(self, chunk: Chunk) -> Any:
        """Takes the next chunk."""

    def events(self, chunk: Chunk) -> list[bytes]:
        """Takes the next chunk; returns what to send for it in a stream."""

    def ending(self) -> list[bytes]:
        """Returns what a stream ends with after its last chunk: by default nothing more."""
        return []

    def failure(self, error: ApiError) -> list[bytes]:
        """Returns what a stream that fails ends with."""

    def whole(self) -> dict[str, Any]:
        """Returns the unstreamed answer, once the last chunk was pushed."""


Read = Callable[[bytes, Limits, CheckedGrammars], ParsedRequest]  # of a request's body
# request, adapter, tokenizer, and what makes the parser of an answer that may call tools
Build = Callable[[ParsedRequest, str | None, Any, Callable[[], CallParser] | None], Answer]
