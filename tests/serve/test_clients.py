"""Requests as public clients send them, each in `client_bodies.jsonl`: openai 3.3, langchain-openai 1.7, instructor
1.17, openai-agents 0.24, llm 0.36 and llama-index-llms-openai-like 0.1 for Python; openai 7.57, ai 6.0 with
@ai-sdk/openai 3.0 and @ai-sdk/openai-compatible 2.0, @openai/agents 0.20, ollama 0.6, @anthropic-ai/sdk 1.14 and
Continue's @continuedev/openai-adapters 1.37 for Node.js. The model was a toy; of Open WebUI and Home Assistant the
bodies follow their sources, of Claude Code, Codex and opencode they have the fields, not the texts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serve.conftest import Running
from tests.support.thinking_sessions import thinking

BODIES = [json.loads(line) for line in Path(__file__).with_name("client_bodies.jsonl").read_text("utf-8").splitlines()]

ENDS = {  # of streams, by what paths begin with
    "/v1/responses": ("response.completed", "response.incomplete"),
    "/v1/messages": ("message_stop",),
    "/v1/": ("data: [DONE]",),
    "/api/": ('"done":true',),
}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    call = '{"name": "get_weather", "arguments": {"place": "Oslo"}}'
    running = Running(thinking(f"<think>\nRome?\n</think>\n\nI look.<call>{call}", context=4000))
    yield running
    running.stop()


@pytest.mark.parametrize("sent", BODIES, ids=lambda sent: f"{sent['client']} {sent['what']} {sent['path']}")
def test_what_clients_send_is_answered(sent: dict[str, Any], server: Running) -> None:
    body = sent["body"]
    if not {"max_tokens", "max_completion_tokens", "max_output_tokens", "options"} & body.keys():
        limit = {"/api": {"options": {"num_predict": 60}}, "/v1/responses": {"max_output_tokens": 60}}
        body = body | next((one for path, one in limit.items() if sent["path"].startswith(path)), {"max_tokens": 60})
    with server.http() as client:
        answer = client.post(sent["path"], json=body)
    assert answer.status_code == 200, answer.text
    streamed = body.get("stream", sent["path"].startswith("/api"))
    ends = next(end for path, end in ENDS.items() if sent["path"].startswith(path)) if streamed else ("Rome?",)
    assert '"error":{' not in answer.text and any(end in answer.text for end in ends)


def test_of_every_use_something_was_sent() -> None:
    assert len({sent["client"] for sent in BODIES}) == 18
    uses = {"chat", "stream", "tools", "results", "format", "thinking", "forced"}
    assert {use for sent in BODIES for use in sent["what"].split()} == uses
