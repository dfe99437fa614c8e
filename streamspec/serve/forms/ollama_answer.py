"""Builds answers in the form of Ollama's API from a session's chunks: an object, or a line of JSON for each chunk.
`tests/serve/forms/test_ollama.py` covers this file.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from streamspec.runtime import Chunk
from streamspec.serve.api.answer import Answer, line_of
from streamspec.serve.api.chat_requests import ParsedRequest
from streamspec.serve.api.chat_responses import Choice, counters
from streamspec.serve.errors import ApiError
from streamspec.serve.tools.call_parser import CallParser, arguments_of


class OllamaChat(Answer):
    """Builds the answer to one chat: `push` every chunk of it, or send what `events` makes of them."""

    media_type = "application/x-ndjson"

    def __init__(
        self, request: ParsedRequest, adapter: str | None, tokenizer: Any, calls: Callable[[], CallParser] | None
    ) -> None:
        """`calls`: makes the parser of an answer that may call tools."""
        self.model, self.adapter = request.model, adapter
        self._choice = Choice(True, tokenizer, 0, calls and calls())
        self._logprobs: list[Any] = []

    @classmethod
    def loaded(cls, model: str, reason: str) -> dict[str, Any]:
        """Returns the answer to a request that asks for nothing but the model: to load it, or to unload it."""
        return _head(model) | cls.spelt("", "", []) | {"done": True, "done_reason": reason}

    @staticmethod
    def spelt(text: str, thought: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        """Returns the fields of a piece of an answer, or of all of it."""
        message: dict[str, Any] = {"role": "assistant", "content": text}
        message |= {"thinking": thought} if thought else {}
        return {"message": message | ({"tool_calls": calls} if calls else {})}

    def push(self, chunk: Chunk) -> dict[str, Any]:
        """Takes the next chunk; returns the fields of its piece."""
        body, _ = self._choice.push(chunk)
        delta, logprobs = body["delta"], (body["logprobs"] or {}).get("content", [])
        self._logprobs += logprobs
        piece = self.spelt(delta["content"], delta.get("reasoning_content", ""), [])
        return piece | ({"logprobs": logprobs} if logprobs else {})

    def events(self, chunk: Chunk) -> list[bytes]:
        """Takes the next chunk; returns what to send for it in a stream."""
        piece = self.push(chunk)
        return [] if piece == self.spelt("", "", []) else [self._line(piece | {"done": False})]

    def ending(self) -> list[bytes]:
        """Returns what a stream ends with after its last chunk: its calls, and its counts."""
        calls = [self._line(self.spelt("", "", self._calls) | {"done": False})] if self._calls else []
        return [*calls, self._line(self.spelt("", "", []) | self._end())]

    def failure(self, error: ApiError) -> list[bytes]:
        """Returns what a stream that fails ends with."""
        return [_line({"error": error.message})]

    def whole(self) -> dict[str, Any]:
        """Returns the whole answer, once the last chunk was pushed."""
        message = self._choice.whole()["message"]
        piece = self.spelt(message["content"] or "", message.get("reasoning_content", ""), self._calls)
        logprobs = {"logprobs": self._logprobs} if self._logprobs else {}
        return _head(self.model) | piece | logprobs | self._end()

    @property
    def _calls(self) -> list[dict[str, Any]]:
        """The calls of the answer; one that was cut short is none."""
        made = [(call, arguments_of(call)) for call in self._choice.calls]
        return [
            {"id": call["id"], "function": {"index": i, "name": call["function"]["name"], "arguments": arguments}}
            for i, (call, arguments) in enumerate(made)
            if arguments is not None
        ]

    def _end(self) -> dict[str, Any]:
        assert self._choice.last is not None
        stats = self._choice.last.stats
        read, wrote = _nanoseconds(stats.prefill_seconds), _nanoseconds(stats.decode_seconds)
        return {
            "done": True,
            "done_reason": "length" if self._choice.reason == "length" else "stop",
            "total_duration": _nanoseconds(self.waited) + read + wrote,
            "load_duration": 0,
            "prompt_eval_count": stats.prompt_tokens,
            "prompt_eval_duration": read,
            "eval_count": stats.new_tokens,
            "eval_duration": wrote,
            "streamspec": counters(self._choice, self.waited, self.adapter, self.left_out),
        }

    def _line(self, fields: dict[str, Any]) -> bytes:
        return _line(_head(self.model) | fields)


class OllamaText(OllamaChat):
    """Builds the answer to a request for text."""

    @staticmethod
    def spelt(text: str, thought: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        """Returns the fields of a piece of an answer, or of all of it. There are no calls."""
        return {"response": text} | ({"thinking": thought} if thought else {})


def moment(seconds: float) -> str:
    """Returns seconds since 1970 as the API writes them."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def _head(model: str) -> dict[str, Any]:
    return {"model": model, "created_at": moment(time.time())}


def _line(body: dict[str, Any]) -> bytes:
    return line_of(body) + b"\n"


def _nanoseconds(seconds: float) -> int:
    return int(1e9 * seconds)
