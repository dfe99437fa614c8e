"""Builds the response object of `/v1/responses` and the events of its stream, from a session's chunks.
`tests/serve/api/test_responses.py` covers this file.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from typing import Any

from streamspec.runtime import Chunk
from streamspec.serve.api.answer import Answer
from streamspec.serve.api.chat_requests import ParsedRequest
from streamspec.serve.api.chat_responses import Choice, counters, event
from streamspec.serve.api.kept_items import KeptItems
from streamspec.serve.errors import ApiError
from streamspec.serve.tools.call_parser import CallParser

Event = dict[str, Any]


class ResponseObject(Answer):
    """Builds the response to one request: `push` every chunk of its answer, or send what `events` makes of them."""

    def __init__(
        self,
        request: ParsedRequest,
        adapter: str | None,
        tokenizer: Any,
        calls: Callable[[], CallParser] | None,
        *,
        kept: KeptItems | None = None,
    ) -> None:
        """`calls`: makes the parser of an answer that may call tools; `kept`: takes its items, where the request
        wishes."""
        assert request.echo is not None
        self.request, self.adapter = request, adapter
        sampling = request.options[0].sampling
        self.echo = {**request.echo, "temperature": sampling.temperature, "top_p": sampling.top_p}
        self.id, self.created = _id("resp"), int(time.time())
        self._choice = Choice(True, tokenizer, 0, calls and calls())
        self._output: list[dict[str, Any]] = []
        self._open = False  # whether the last item of the output goes on
        self._logprobs: list[Any] = []  # of tokens whose text is held back
        self._numbers = 0
        self._kept = kept if request.keeps else None

    def push(self, chunk: Chunk) -> None:
        """Takes the next chunk."""
        for _ in self._push(chunk):
            pass

    def events(self, chunk: Chunk) -> list[bytes]:
        """Takes the next chunk; returns what to send for it in a stream."""
        return [self._send(body) for body in self._push(chunk)]

    def failure(self, error: ApiError) -> list[bytes]:
        """Returns what a stream that fails ends with."""
        response = self._response("failed") | {"error": {"code": "server_error", "message": error.message}}
        return [self._send({"type": "response.failed", "response": response})]

    def whole(self) -> dict[str, Any]:
        """Returns the response, once the last chunk was pushed."""
        assert self._choice.last is not None
        cut = self._choice.reason == "length"
        stats = self._choice.last.stats
        usage = {
            "input_tokens": stats.prompt_tokens,
            "input_tokens_details": {"cached_tokens": stats.reused_tokens, "cache_write_tokens": 0},
            "output_tokens": stats.new_tokens,
            "output_tokens_details": {"reasoning_tokens": stats.reasoning_tokens},
            "total_tokens": stats.prompt_tokens + stats.new_tokens,
        }
        return self._response("incomplete" if cut else "completed") | {
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "usage": usage,
            "streamspec": counters(self._choice, self.waited, self.adapter, self.left_out),
        }

    def _response(self, status: str) -> dict[str, Any]:
        head = {"id": self.id, "object": "response", "created_at": self.created, "status": status, "error": None}
        rest = {"model": self.request.model, "output": self._output, "incomplete_details": None, "usage": None}
        return head | rest | self.echo

    def _push(self, chunk: Chunk) -> Iterator[Event]:
        """The events of a chunk; each has to be used before the next one is made."""
        if self._choice.last is None:
            for name in ("response.created", "response.in_progress"):
                yield {"type": name, "response": self._response("in_progress")}
        body, _ = self._choice.push(chunk)
        delta, over = body["delta"], self._choice.reason is not None
        self._logprobs += [_whole_bytes(entry) for entry in (body["logprobs"] or {}).get("content", [])]
        calls = delta.get("tool_calls", ())
        if "reasoning_content" in delta:
            yield from self._thought(delta["reasoning_content"])
        if delta["content"] or (over and not calls and not self._output):
            yield from self._text(delta["content"])
        for piece in calls:
            yield from self._call(piece)
        if over:
            cut = self._choice.reason == "length"
            yield from self._close("incomplete" if cut else "completed")
            if self._kept is not None:
                self._kept.add(self._output)
            yield {"type": "response.incomplete" if cut else "response.completed", "response": self.whole()}

    def _begin(self, item: dict[str, Any], part: dict[str, Any]) -> Iterator[Event]:
        """Begins an item of one part, unless one of its type goes on."""
        if self._open and self._output[-1]["type"] == item["type"]:
            return
        yield from self._close("completed")
        yield self._added(item)
        yield {"type": "response.content_part.added", **self._place(), "part": part}
        item["content"] = [part]

    def _thought(self, text: str) -> Iterator[Event]:
        item = {"id": _id("rs"), "type": "reasoning", "status": "in_progress", "summary": [], "content": []}
        yield from self._begin(item, {"type": "reasoning_text", "text": ""})
        self._output[-1]["content"][0]["text"] += text
        yield {"type": "response.reasoning_text.delta", **self._place(), "delta": text}

    def _text(self, text: str) -> Iterator[Event]:
        item = {"id": _id("msg"), "type": "message", "status": "in_progress", "role": "assistant", "content": []}
        yield from self._begin(item, {"type": "output_text", "text": "", "annotations": [], "logprobs": []})
        part, logprobs, self._logprobs = self._output[-1]["content"][0], self._logprobs, []
        part["text"] += text
        part["logprobs"] += logprobs
        if text:
            yield {"type": "response.output_text.delta", **self._place(), "delta": text, "logprobs": logprobs}

    def _call(self, piece: dict[str, Any]) -> Iterator[Event]:
        """Yields the events of `piece`, a piece of a call as a chat's stream has it."""
        function = piece["function"]
        if "id" in piece:
            yield from self._close("completed")
            head = {"id": _id("fc"), "type": "function_call", "status": "in_progress", "call_id": piece["id"]}
            yield self._added(head | {"name": function["name"], "arguments": ""})
        if function["arguments"]:
            self._output[-1]["arguments"] += function["arguments"]
            yield {
                "type": "response.function_call_arguments.delta",
                **self._place(part=False),
                "delta": function["arguments"],
            }

    def _added(self, item: dict[str, Any]) -> Event:
        self._output.append(item)
        self._open = True
        return {"type": "response.output_item.added", "output_index": len(self._output) - 1, "item": item}

    def _close(self, status: str) -> Iterator[Event]:
        """Ends the item that goes on, if one does."""
        if not self._open:
            return
        self._open, item = False, self._output[-1]
        if "content" in item:
            part = item["content"][0]
            done = {name: part[name] for name in ("text", "logprobs") if name in part}
            yield {"type": f"response.{part['type']}.done", **self._place(), **done}
            yield {"type": "response.content_part.done", **self._place(), "part": part}
        else:
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield {"type": "response.function_call_arguments.done", **self._place(part=False), **done}
        item["status"] = status
        yield {"type": "response.output_item.done", "output_index": len(self._output) - 1, "item": item}

    def _place(self, part: bool = True) -> dict[str, Any]:
        """Returns the fields that locate an event of the last item."""
        place = {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1}
        return place | {"content_index": 0} if part else place

    def _send(self, body: Event) -> bytes:
        self._numbers += 1
        return event(body | {"sequence_number": self._numbers - 1}, body["type"])


def _whole_bytes(entry: dict[str, Any]) -> dict[str, Any]:
    """The log-probability of a token with an empty list for bytes that are not known, where a chat has null."""
    tops = [top | {"bytes": top["bytes"] or []} for top in entry["top_logprobs"]]
    return entry | {"bytes": entry["bytes"] or [], "top_logprobs": tops}


def _id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(16)}"
