"""Programs of this machine that do not have the token, against a client that has it."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import ExitStack

import pytest

pytest.importorskip("streamspec.serve", reason="the server is not installed")

from tests.serve.conftest import TOKEN, Running, running, until  # noqa: F401

Make = Callable[..., Running]


def idle(server: Running, stack: ExitStack, count: int, says: bytes = b"") -> list[socket.socket]:
    made = []
    for _ in range(count):
        made.append(stack.enter_context(socket.create_connection(("127.0.0.1", server.server.port), timeout=5)))
        made[-1].sendall(says)
    return made


@pytest.mark.parametrize(
    "says",
    [
        b"",
        b"GET /v1/models HTTP/1.1\r\nHost:",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9\r\n\r\n",
    ],
    ids=["nothing", "half a head", "a head without the token"],
)
def test_connections_without_the_token_do_not_keep_out_who_has_it(running: Make, says: bytes) -> None:  # noqa: F811
    server = running(limits={"connections": 16})
    with ExitStack() as stack:
        for _ in range(3):
            idle(server, stack, 16, says)
            with server.http() as client:
                assert client.get("/v1/models").status_code == 200


@pytest.mark.parametrize("count", [1, 4], ids=["one", "as many as there may be connections"])
def test_answers_under_way_are_not_closed_for_those_who_say_nothing(running: Make, count: int) -> None:  # noqa: F811
    server = running(limits={"connections": 4, "sessions": 2}, still=True)
    connections = server.server._uvicorn.server_state.connections
    with ExitStack() as stack:
        asking = idle(server, stack, count, ask(server))
        until(lambda: len(server.server.pool.requests) == count)
        idle(server, stack, 12)
        until(lambda: len(connections) <= 4)
        server.shared.gate.set()  # type: ignore[union-attr]
        for raw in asking:
            said = b""
            while b"[DONE]" not in said:
                more = raw.recv(65536)
                assert more, said
                said += more


def ask(server: Running) -> bytes:
    body = b'{"model": "base", "messages": [{"role": "user", "content": "word"}], "max_tokens": 20, "stream": true}'
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{server.server.port}\r\n"
        f"Authorization: Bearer {TOKEN}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body
