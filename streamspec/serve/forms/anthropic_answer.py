"""Builds answers in the form of Anthropic's Messages API from a session's chunks: a message of blocks, or its events.
`tests/serve/forms/test_anthropic.py` covers this file.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from typing import Any

from streamspec.runtime import Chunk
from streamspec.serve.api.answer import Answer
from streamspec.serve.api.chat_requests import ParsedRequest
from streamspec.serve.api.chat_responses import Choice, counters, event
from streamspec.serve.errors import ApiError
from streamspec.serve.tools.call_parser import CallParser, arguments_of

KINDS = {  # of errors by their status
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
DELTAS = {"text": ("text_delta", "text"), "thinking": ("thinking_delta", "thinking")}


class AnthropicMessage(Answer):
    """Builds the message that answers one request: `push` every chunk of it, or send what `events` makes of them."""

    def __init__(
        self, request: ParsedRequest, adapter: str | None, tokenizer: Any, calls: Callable[[], CallParser] | None
    ) -> None:
        """`calls`: makes the parser of an answer that may call tools."""
        self.model, self.adapter = request.model, adapter
        self.id = f"msg_{secrets.token_hex(12)}"
        self._stops, self._tokenizer = request.options[0].stops, tokenizer
        self._hides_thoughts = bool((request.echo or {}).get("hides_thoughts"))
        self._choice = Choice(True, tokenizer, 0, calls and calls())
        self._blocks: list[dict[str, Any]] = []
        self._open = False  # whether the last block goes on
        self._tokens: list[int] = []

    def push(self, chunk: Chunk) -> None:
        """Takes the next chunk."""
        for _ in self._push(chunk):
            pass

    def events(self, chunk: Chunk) -> list[bytes]:
        """Takes the next chunk; returns what to send for it in a stream."""
        return [event(body, body["type"]) for body in self._push(chunk)]

    def failure(self, error: ApiError) -> list[bytes]:
        """Returns what a stream that fails ends with."""
        return [event(error_of(error), "error")]

    def whole(self) -> dict[str, Any]:
        """Returns the message, once the last chunk was pushed. A call that was cut short is none."""
        made = {call["id"]: arguments_of(call) for call in self._choice.calls}
        blocks = [
            block | {"input": made[block["id"]]} if block["type"] == "tool_use" else block
            for block in self._blocks
            if block["type"] != "tool_use" or made[block["id"]] is not None
        ]
        record = counters(self._choice, self.waited, self.adapter, self.left_out)
        return self._message(blocks) | self._end() | {"usage": self._usage(), "streamspec": record}

    def _push(self, chunk: Chunk) -> Iterator[dict[str, Any]]:
        """The events of a chunk; each has to be used before the next one is made."""
        first = self._choice.last is None
        self._tokens += chunk.token_ids
        body, _ = self._choice.push(chunk)
        if first:
            message = self._message([]) | {"stop_reason": None, "stop_sequence": None}
            yield {"type": "message_start", "message": message | {"usage": self._usage() | {"output_tokens": 0}}}
        delta = body["delta"]
        if delta.get("reasoning_content") and not self._hides_thoughts:
            yield from self._piece("thinking", delta["reasoning_content"])
        if delta["content"]:
            yield from self._piece("text", delta["content"])
        for piece in delta.get("tool_calls", ()):
            yield from self._call(piece)
        if self._choice.reason is not None:
            yield from self._close()
            record = counters(self._choice, self.waited, self.adapter, self.left_out)
            yield {"type": "message_delta", "delta": self._end(), "usage": self._usage(), "streamspec": record}
            yield {"type": "message_stop"}

    def _piece(self, kind: str, text: str) -> Iterator[dict[str, Any]]:
        """Yields the events of a piece of a text or a thought, which begins a block unless one of its kind goes on."""
        if not self._open or self._blocks[-1]["type"] != kind:
            yield from self._begin({"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {}))
        self._blocks[-1][kind] += text
        delta, field = DELTAS[kind]
        yield self._delta({"type": delta, field: text})

    def _call(self, piece: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yields the events of a piece of a call, as a chat's stream has it."""
        function = piece["function"]
        if "id" in piece:
            yield from self._begin({"type": "tool_use", "id": piece["id"], "name": function["name"], "input": {}})
        if function["arguments"]:
            yield self._delta({"type": "input_json_delta", "partial_json": function["arguments"]})

    def _begin(self, block: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield from self._close()
        self._blocks.append(block)
        self._open = True
        yield {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": block}

    def _close(self) -> Iterator[dict[str, Any]]:
        """Ends the block that goes on, if one does."""
        if self._open:
            self._open = False
            yield {"type": "content_block_stop", "index": len(self._blocks) - 1}

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _message(self, blocks: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "type": "message", "role": "assistant", "model": self.model, "content": blocks}

    def _end(self) -> dict[str, Any]:
        """Returns why the answer ended."""
        calls, stop = self._choice.calls, None
        reason = "max_tokens" if self._choice.reason == "length" else "end_turn"
        if reason == "end_turn" and calls and arguments_of(calls[-1]) is not None:
            reason = "tool_use"
        elif self._choice.last is not None and self._choice.last.finish_reason == "stop":
            stop = self._stopped_by()
            reason = reason if stop is None else "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": stop}

    def _stopped_by(self) -> str | None:
        """Returns the stop string that ended the text, within the last token; None where a grammar ended it."""
        written, before = (
            self._tokenizer.decode(ids, skip_special_tokens=False) for ids in (self._tokens, self._tokens[:-1])
        )
        begin = len(before.rstrip("\ufffd"))  # of the last token
        places = ((written.find(stop, max(0, begin - len(stop) + 1)), stop) for stop in self._stops)
        found = [(at + len(stop), -len(stop), stop) for at, stop in places if at >= 0]
        return min(found)[2] if found else None  # the one that ends first, of several the longest

    def _usage(self) -> dict[str, Any]:
        assert self._choice.last is not None
        stats = self._choice.last.stats
        return {
            "input_tokens": stats.prompt_tokens - stats.reused_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": stats.reused_tokens,
            "output_tokens": stats.new_tokens,
        }


def error_of(error: ApiError) -> dict[str, Any]:
    """Returns the JSON object that clients of Anthropic's API expect of an error."""
    return {"type": "error", "error": {"type": KINDS.get(error.status, "api_error"), "message": error.message}}
