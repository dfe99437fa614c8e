"""Builds OpenAI's response objects of chats and completions from a session's chunks. `tests/serve/test_api.py` covers
this file.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from math import isnan
from typing import Any

from streamspec.runtime import Chunk, Logprob
from streamspec.runtime.draft_sources.prediction import PredictionIndex
from streamspec.runtime.text.text_deltas import TextDelta, ThoughtDeltas
from streamspec.runtime.text.token_bytes import TextOffsets, TokenBytes
from streamspec.serve.api.answer import Answer, line_of
from streamspec.serve.api.chat_requests import ParsedRequest
from streamspec.serve.errors import ApiError
from streamspec.serve.tools.call_parser import CallParser

REASONS = {"eos": "stop", "stop": "stop", "length": "length", "timeout": "length", "cancelled": "length"}
NEVER = -9999.0  # OpenAI's log-probability of a token that cannot come: JSON has no infinity


class ResponseBuilder(Answer):
    """Builds the response to one request: `push` every chunk of its answers in turn, streamed or not."""

    def __init__(
        self, request: ParsedRequest, adapter: str | None, tokenizer: Any, calls: Callable[[], CallParser] | None
    ) -> None:
        """`adapter`: of a swappable bundle. `calls`: makes the parser of an answer that may call tools."""
        self.chat, self.model, self.adapter, self.tokenizer = request.chat, request.model, adapter, tokenizer
        self.usage = request.usage  # whether every chunk of the stream has the field, and another one follows them
        self.id = ("chatcmpl-" if self.chat else "cmpl-") + secrets.token_hex(12)
        self.created = int(time.time())
        self._choices: list[Choice] = []
        self._calls = calls
        self._predicted = request.predicted
        self._before = [self._text_of(prompt) if request.repeats_prompt else "" for prompt in request.prompts]
        self._each = len(request.options) // len(request.prompts)  # answers to a prompt
        self._unanswered = request.unanswered

    def push(self, chunk: Chunk) -> dict[str, Any]:
        """Returns the object to send for it in a stream. What follows a chunk with a finish reason is the next
        answer's.
        """
        if not self._choices or self._choices[-1].reason is not None:
            calls = self._calls and self._calls()
            index, predicted = len(self._choices), PredictionIndex(self._predicted)
            before = self._before[index // self._each]
            self._choices.append(Choice(self.chat, self.tokenizer, index, calls, before, predicted))
        choice = self._choices[-1]
        if self._unanswered:  # the runtime writes one token at least
            stats, logprobs = replace(chunk.stats, new_tokens=0), None if chunk.logprobs is None else list[Logprob]()
            chunk = replace(chunk, text="", token_ids=[], drafted=[], stats=stats, logprobs=logprobs)
        body, record = choice.push(chunk)
        if choice.reason is not None:
            record |= counters(choice, self.waited, self.adapter, self.left_out)
        return self._frame("chat.completion.chunk", [body], None) | {"streamspec": record}

    def events(self, chunk: Chunk) -> list[bytes]:
        """Takes the next chunk; returns what to send for it in a stream."""
        return [event(self.push(chunk))]

    def ending(self) -> list[bytes]:
        """Returns what a stream ends with after its last chunk."""
        usage = [event(self._frame("chat.completion.chunk", [], self._usage()))] if self.usage else []
        return [*usage, b"data: [DONE]\n\n"]

    def failure(self, error: ApiError) -> list[bytes]:
        """Returns what a stream that fails ends with."""
        return [event(error.body)]

    def whole(self) -> dict[str, Any]:
        """Returns the unstreamed response, once the last chunk was pushed. Of several answers each
        has a record; a single record stands in the response, next to OpenAI's fields."""
        self.usage = True
        bodies, records = (
            [choice.whole() for choice in self._choices],
            [counters(choice, self.waited, self.adapter, self.left_out) for choice in self._choices],
        )
        if len(bodies) > 1:
            bodies = [body | {"streamspec": record} for body, record in zip(bodies, records, strict=True)]
        frame = self._frame("chat.completion", bodies, self._usage())
        return frame if len(bodies) > 1 else frame | {"streamspec": records[0]}

    def _text_of(self, prompt: str | list[int]) -> str:
        return prompt if isinstance(prompt, str) else str(self.tokenizer.decode(prompt, skip_special_tokens=False))

    def _usage(self) -> dict[str, Any]:
        each = [choice.last.stats for choice in self._choices if choice.last is not None]
        accepted = sum(choice.predicted.came for choice in self._choices)
        rejected = len(self._predicted) * len(self._choices) - accepted
        # A prediction's other tokens count as the completion's: so OpenAI defines it.
        prompt = sum(stats.prompt_tokens for stats in each[:: self._each])
        new = sum(stats.new_tokens for stats in each) + rejected
        return {
            "prompt_tokens": prompt,
            "completion_tokens": new,
            "total_tokens": prompt + new,
            "prompt_tokens_details": {"cached_tokens": sum(stats.reused_tokens for stats in each[:: self._each])},
            "completion_tokens_details": {
                "reasoning_tokens": sum(stats.reasoning_tokens for stats in each),
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": rejected,
            },
        }

    def _frame(self, kind: str, choices: list[dict[str, Any]], usage: dict[str, Any] | None) -> dict[str, Any]:
        kind = kind if self.chat else "text_completion"
        frame = {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}
        return frame | {"usage": usage} if self.usage else frame


class Choice:
    """One answer: `push` its chunks. `last`: the latest; `drafted`: tokens so far. `before`: its text's beginning.
    `predicted`: follows it through its prediction."""

    def __init__(
        self,
        chat: bool,
        tokenizer: Any,
        index: int,
        calls: CallParser | None = None,
        before: str = "",
        predicted: PredictionIndex | None = None,
    ) -> None:
        self._calls = calls
        self.chat, self.tokenizer, self.index = chat, tokenizer, index
        self.drafted = 0
        self.predicted = predicted or PredictionIndex(())
        self.last: Chunk | None = None
        self.reason: str | None = None  # why it ended, in OpenAI's word
        self._pieces = ThoughtDeltas(tokenizer)
        self._text: list[str] = [before]
        self._reasoning = ""
        self._logprobs: dict[str, list[Any]] = {}  # as spelt; empty where they were not requested

    @property
    def calls(self) -> list[dict[str, Any]]:
        """Returns the calls so far."""
        return [] if self._calls is None else self._calls.calls

    def push(self, chunk: Chunk) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns OpenAI's object of the chunk, and the record of its call."""
        first, self.last = self.last is None, chunk
        self.drafted += sum(chunk.drafted)
        self.predicted.follow(chunk.token_ids)
        pieces = self._pieces.push(chunk)
        self._reasoning += chunk.reasoning
        logprobs = None
        if chunk.logprobs is not None:
            kinds = chunk.thought or [False] * len(chunk.logprobs)
            if self.chat and chunk.finish_reason == "eos":  # whose token is not of the content
                kinds = [*kinds[:-1], True]
            of_text = [entry for entry, kind in zip(chunk.logprobs, kinds, strict=True) if kind is False]
            logprobs = self._spell(chunk.prompt_logprobs or [], of_text)
            for name, entries in logprobs.items():
                self._logprobs.setdefault(name, []).extend(entries)
        self.reason = None if chunk.finish_reason is None else REASONS[chunk.finish_reason]
        delta: dict[str, Any] = {"role": "assistant"} if first else {}
        delta |= {"reasoning_content": chunk.reasoning} if chunk.reasoning else {}
        if self._calls is None:
            delta["content"] = chunk.text
        else:
            delta["content"], called = self._calls.push(chunk.text, self.reason is not None)
            delta |= {"tool_calls": called} if called else {}
            self.reason = self.reason and self._calls.reason(self.reason)
        self._text.append(delta["content"])
        return self._body({"delta": delta}, chunk.text, logprobs), _of_call(chunk, pieces)

    def whole(self) -> dict[str, Any]:
        """Returns OpenAI's object of the whole answer."""
        text = "".join(self._text)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if self.calls:
            message |= {"content": text or None, "tool_calls": self.calls}
        if self._reasoning:
            message["reasoning_content"] = self._reasoning
        return self._body({"message": message}, text, self._logprobs or None)

    def _body(self, chat: dict[str, Any], text: str, logprobs: Any) -> dict[str, Any]:
        content = chat if self.chat else {"text": text}
        if self.chat and logprobs is not None:
            logprobs = logprobs | {"refusal": None}
        return {"index": self.index} | content | {"logprobs": logprobs, "finish_reason": self.reason}

    def _spell(self, of_prompt: list[Logprob], of_answer: list[Logprob]) -> dict[str, Any]:
        """Log-probabilities in the shape of the two APIs."""
        if self.chat:
            return {
                "content": [
                    self._token(entry.token, entry.logprob) | {"top_logprobs": [self._token(*top) for top in entry.top]}
                    for entry in of_answer
                ]
            }
        before, logprobs = self._text[0], [*of_prompt, *of_answer]
        within = TextOffsets(self._tokens, before)
        # of tokens that are spelt alike the likeliest one stays
        tops = [{self._tokens.text(token): value for token, value in reversed(entry.top)} for entry in logprobs]
        return {
            "tokens": [self._tokens.text(entry.token) for entry in logprobs],
            "token_logprobs": [None if isnan(entry.logprob) else max(entry.logprob, NEVER) for entry in logprobs],
            "top_logprobs": [None if isnan(entry.logprob) else top for entry, top in zip(logprobs, tops, strict=True)],
            "text_offset": [within.push(entry.token) for entry in of_prompt]
            + [len(before) + self._offsets.push(entry.token) for entry in of_answer],
        }

    @cached_property
    def _tokens(self) -> TokenBytes:
        return TokenBytes(self.tokenizer)

    @cached_property
    def _offsets(self) -> TextOffsets:
        return TextOffsets(self._tokens)

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        written = self._tokens(token)
        return {"token": self._tokens.text(token), "logprob": logprob, "bytes": None if written is None else [*written]}


def counters(choice: Choice, waited: float, adapter: str | None, left_out: Sequence[str]) -> dict[str, Any]:
    """Returns the counters of an answer (docs/guides/serve.md). `waited`: seconds for a session. `left_out`: keywords
    of its schema that it need not keep to."""
    assert choice.last is not None
    stats = choice.last.stats
    return {
        "speculation": stats.speculation,
        "steps": stats.steps,
        "plain_steps": stats.plain_steps,
        "tokens_per_step": round(stats.tau, 3),
        "new_tokens": stats.new_tokens,
        "reasoning_tokens": stats.reasoning_tokens,
        "drafted_tokens": choice.drafted,
        "tokens_per_second": round(stats.tokens_per_second, 2),
        "queue_ms": _ms(waited),
        "prefill_ms": _ms(stats.prefill_seconds),
        "decode_ms": _ms(stats.decode_seconds),
        "prompt_tokens": stats.prompt_tokens,
        "reused_tokens": stats.reused_tokens,
        "finish_reason": choice.last.finish_reason,
        "adapter": adapter,
        **({"left_out": list(left_out)} if left_out else {}),
    }


def event(body: Mapping[str, Any], kind: str | None = None) -> bytes:
    """Returns a server-sent event. `kind`: its name, where the stream has several."""
    name = b"" if kind is None else b"event: " + kind.encode() + b"\n"
    return name + b"data: " + line_of(body) + b"\n\n"


def _of_call(chunk: Chunk, pieces: tuple[list[TextDelta], list[TextDelta]]) -> dict[str, Any]:
    stats, (thought, text) = chunk.stats, pieces
    of_thought = {"tokens": [piece.text for piece in thought], "drafted": [piece.drafted for piece in thought]}
    return {
        "tokens": [piece.text for piece in text],
        "drafted": [piece.drafted for piece in text],
        **({"reasoning": of_thought} if thought else {}),
        "rows": stats.rows if chunk.token_ids else 0,
        "committed": len(chunk.token_ids),
        "accepted": sum(chunk.drafted),
        "tokens_per_second": round(stats.tokens_per_second, 2),
        "tokens_per_step": round(stats.tau, 3),
    }


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 2)
