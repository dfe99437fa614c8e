"""What stands in front of every route: Host, Origin, token, method, content type, sizes and slow clients."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
from collections.abc import Callable

import httpx
import pytest

from streamspec.errors import ConfigError
from streamspec.serve import Server
from streamspec.serve import server as server_module
from streamspec.serve.auth import KNOWN, RequestGuard
from streamspec.serve.limits import DEFAULT
from tests.serve.conftest import TOKEN, Running, until, user
from tests.support.as_windows import WindowsOs
from tests.support.fake_serve_session import FakeServeSession, Shared

Make = Callable[..., Running]
BODY = {"model": "base", "messages": user("say word"), "max_tokens": 4}
PATHS = [
    "/v1/models",
    "/v1/chat/completions",
    "/metrics",
    "/nowhere",
    "/v1",
    "//v1/models",
    "/health/",
    "/page/../v1/models",
    "/page/secret",
]


@pytest.mark.parametrize(
    "given", [None, "Bearer wrong", "Bearer", "", f"Basic {TOKEN}", TOKEN, f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}"]
)
def test_without_the_token_every_path_says_401_also_unknown_ones(running: Make, given: str | None) -> None:
    with running().http() as client:
        del client.headers["authorization"]
        for path in PATHS:
            answer = client.get(path, headers={"authorization": given} if given is not None else {})
            assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
            assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([("x-api-key", TOKEN)], 200),
        ([("x-api-key", "wrong")], 401),
        ([("x-api-key", "")], 401),
        ([("x-api-key", TOKEN), ("x-api-key", TOKEN)], 401),
        ([("x-api-key", TOKEN), ("authorization", "Bearer wrong")], 401),
        ([("x-api-key", "wrong"), ("authorization", f"Bearer {TOKEN}")], 200),
    ],
)
def test_a_key_of_anthropics_clients_is_the_token_or_refused(
    running: Make, headers: list[tuple[str, str]], status: int
) -> None:
    with running().http() as client:
        del client.headers["authorization"]
        for path in ("/v1/models", "/api/tags"):
            assert client.get(path, headers=headers).status_code == status
        if status == 401:
            assert client.post("/api/chat", headers=headers).json()["error"].startswith("no valid token")
            spelt = client.post("/v1/messages", headers=headers).json()
            assert (spelt["type"], spelt["error"]["type"]) == ("error", "authentication_error")


@pytest.mark.parametrize(
    ("path", "given", "known"),
    [("/v1/models", TOKEN, True), ("/v1/models", "wrong", False), ("/health", TOKEN, False), ("/nowhere", "", False)],
)
def test_a_request_is_known_by_its_token_alone(path: str, given: str, known: bool) -> None:
    """The server closes connections of those that are not known first."""
    headers = [(b"host", b"localhost:1"), (b"authorization", f"Bearer {given}".encode())]
    scope = {"type": "http", "method": "GET", "path": path, "raw_path": b"", "query_string": b"", "headers": headers}

    async def receive() -> dict[str, object]:
        return {"type": "http.request"}

    async def nothing(*_: object) -> None: ...

    asyncio.run(RequestGuard(nothing, TOKEN, 1, DEFAULT, frozenset({"/health"}))(scope, receive, nothing))
    assert scope.get(KNOWN, False) == known


def test_two_tokens_are_none(running: Make) -> None:
    with running().http() as client:
        assert (
            client.get(
                "/v1/models", headers=[("authorization", f"Bearer {TOKEN}"), ("authorization", "Bearer x")]
            ).status_code
            == 401
        )


def test_health_and_the_page_need_no_token_and_only_to_be_read(running: Make) -> None:
    with running().http() as client:
        del client.headers["authorization"]
        assert client.get("/health").json() == {"status": "ok"}
        assert client.post("/health", json={}).status_code == 401


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:{port}",
        "127.0.0.1",
        "127.0.0.1:1",
        "localhost.evil.example:{port}",
        "0.0.0.0:{port}",
        "127.0.0.1:{port}@evil.example",
    ],
)
def test_a_foreign_host_is_refused_before_anything_else(running: Make, host: str) -> None:
    server = running()
    with server.http() as client:
        for path in ("/v1/models", "/health", "/nowhere"):
            answer = client.get(path, headers={"host": host.format(port=server.server.port)})
            assert answer.status_code == 403 and answer.json()["error"]["code"] == "foreign_host"


def test_names_of_loopback_are_this_server(running: Make) -> None:
    server = running()
    with server.http() as client:
        for host in ("127.0.0.1", "localhost", "LOCALHOST", "[::1]"):
            assert client.get("/v1/models", headers={"host": f"{host}:{server.server.port}"}).status_code == 200


@pytest.mark.parametrize(
    "origin",
    ["http://evil.example", "null", "https://127.0.0.1:{port}", "http://localhost:1", "http://localhost", "file://"],
)
def test_a_foreign_origin_is_refused(running: Make, origin: str) -> None:
    server = running()
    with server.http() as client:
        headers = {"origin": origin.format(port=server.server.port)}
        for answer in (
            client.get("/v1/models", headers=headers),
            client.post("/v1/chat/completions", json=BODY, headers=headers),
            client.options("/v1/models", headers=headers),
        ):
            assert answer.status_code == 403 and answer.json()["error"]["code"] == "foreign_origin"
            assert not any(name.startswith("access-control") for name in answer.headers)
        assert client.get("/v1/models", headers={"origin": server.url}).status_code == 200


APP = "https://app.example"


def test_pages_of_an_allowed_origin_may_ask_with_the_token(running: Make) -> None:
    server = running(allow_origins=[APP, "http://localhost:3000"])
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    with server.http() as client:
        for origin in (APP, "http://localhost:3000"):
            headers = {"origin": origin}
            allowed = client.options("/v1/chat/completions", headers=headers | asked | {"authorization": ""})
            assert allowed.status_code == 204 and "POST" in allowed.headers["access-control-allow-methods"]
            assert allowed.headers["access-control-allow-headers"] == "authorization,content-type"
            assert "access-control-allow-private-network" not in allowed.headers
            for status, answer in (
                (200, client.post("/v1/chat/completions", json=BODY, headers=headers)),
                (200, client.post("/v1/chat/completions", json=BODY | {"stream": True}, headers=headers)),
                (400, client.post("/v1/chat/completions", json={}, headers=headers)),
                (401, client.post("/v1/chat/completions", json=BODY, headers=headers | {"authorization": "x"})),
                (204, allowed),
            ):
                assert answer.status_code == status and answer.headers["access-control-allow-origin"] == origin
                assert answer.headers["vary"] == "origin" and "access-control-allow-credentials" not in answer.headers
        public = client.options("/", headers=headers | asked | {"access-control-request-private-network": "true"})
        assert public.headers["access-control-allow-private-network"] == "true"
        odd = client.options("/", headers=headers | asked | {"access-control-request-headers": "a: b"})
        assert odd.headers["access-control-allow-headers"] == ""
        assert client.options("/", headers=headers).status_code == 405  # no question of a browser


def test_an_allowed_origin_changes_nothing_for_others(running: Make) -> None:
    server = running(allow_origins=[APP])
    asked = {"access-control-request-method": "POST"}
    with server.http() as client:
        for origin in ("http://app.example", f"{APP}:444", f"{APP}.evil.example", "https://x.app.example", "null"):
            for method in ("OPTIONS", "GET"):
                answer = client.request(method, "/v1/models", headers=asked | {"origin": origin})
                assert answer.status_code == 403 and answer.json()["error"]["code"] == "foreign_origin"
                assert "access-control-allow-origin" not in answer.headers
        both = [*client.headers.items(), ("origin", APP), ("origin", "http://evil.example")]
        assert client.get("/v1/models", headers=both).status_code == 403
        foreign = client.options("/v1/models", headers=asked | {"origin": APP, "host": "evil.example"})
        assert foreign.status_code == 403 and foreign.json()["error"]["code"] == "foreign_host"
        for headers in ({}, {"origin": server.url}):
            answer = client.get("/v1/models", headers=headers)
            assert answer.status_code == 200 and "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize(
    "origin",
    ["*", "null", "", "app.example", "https://", "https://app.example/", "https://App.example", "https://*.example",
     "https://a@b.example", "https://app.example:443", "http://app.example:80", "https://app.example:x", "https://ä.de"],
)  # fmt: skip
def test_what_is_no_web_origin_cannot_be_allowed(origin: str) -> None:
    with pytest.raises(ConfigError, match="an allowed origin"):
        Server(FakeServeSession(Shared()), port=0, token=TOKEN, allow_origins=[APP, origin])


def test_other_methods_are_refused(running: Make) -> None:
    with running().http() as client:
        for method in ("PUT", "DELETE", "OPTIONS", "PATCH", "TRACE"):
            assert client.request(method, "/v1/models").status_code == 405
        assert client.get("/v1/chat/completions").status_code == 405


def test_a_request_that_does_not_tell_its_type_is_taken_with_the_token_alone(running: Make) -> None:
    """LiteLLM asks Ollama's paths so. A page of another site cannot send the token without asking first."""
    with running().http() as client:
        for headers, status in (({}, 200), ({"authorization": "Bearer no"}, 401)):
            sent = client.build_request("POST", "/v1/chat/completions", content=json.dumps(BODY), headers=headers)
            assert "content-type" not in sent.headers
            assert client.send(sent).status_code == status


def test_only_json_is_taken(running: Make) -> None:
    """A form is what another page may send without asking first."""
    with running().http() as client:
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
            assert (
                client.post(
                    "/v1/chat/completions", content=json.dumps(BODY), headers={"content-type": kind}
                ).status_code
                == 415
            )
        assert (
            client.post(
                "/v1/chat/completions",
                content=b"x",
                headers={"content-type": "application/json", "content-encoding": "gzip"},
            ).status_code
            == 415
        )
        assert (
            client.post(
                "/v1/chat/completions",
                content=json.dumps(BODY),
                headers={"content-type": "application/json; charset=utf-8"},
            ).status_code
            == 200
        )


def test_every_answer_forbids_sniffing_framing_and_storing(running: Make) -> None:
    with running().http() as client:
        for path in ("/health", "/v1/models", "/nowhere"):
            headers = client.get(path).headers
            assert (
                headers["x-content-type-options"] == "nosniff"
                and headers["cache-control"] == "no-store"
                and headers["x-frame-options"] == "DENY"
            )
            assert (
                headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'; ")
                and "unsafe" not in headers["content-security-policy"]
            )
            assert "server" not in headers and "access-control-allow-origin" not in headers


@pytest.mark.parametrize("declared", [True, False])
def test_a_body_beyond_the_limit_is_413(running: Make, declared: bool) -> None:
    with running(limits={"body": 1000}).http() as client:
        body = json.dumps(BODY | {"messages": user("x" * 1000)}).encode()
        content = body if declared else iter([body[:500], body[500:]])
        answer = client.post("/v1/chat/completions", content=content, headers={"content-type": "application/json"})
        assert answer.status_code == 413 and answer.json()["error"]["code"] == "too_large"
        assert client.post("/v1/chat/completions", json=BODY).status_code == 200
        assert client.request("GET", "/v1/models", content=b"x").status_code == 413


def test_a_head_beyond_the_limit_is_refused(running: Make) -> None:
    with running().http() as client:
        assert client.get("/health", headers={"x": "y" * (17 << 10)}).status_code == 431
        with pytest.raises(httpx.TransportError):  # too much to be read to its end
            assert client.get("/health", headers={"x": "y" * (1 << 20)}).status_code == 400
            raise httpx.TransportError("")


def test_a_head_that_drips_is_cut_off(running: Make) -> None:
    server = running(limits={"head_seconds": 0.3})
    with socket.create_connection(("127.0.0.1", server.server.port)) as drip:
        began = time.monotonic()
        with pytest.raises(OSError):
            for _ in range(100):
                drip.sendall(b"G")
                time.sleep(0.05)
        assert time.monotonic() - began < 2


def test_a_body_that_drips_is_cut_off(running: Make) -> None:
    server = running(limits={"body_seconds": 0.3})
    with socket.create_connection(("127.0.0.1", server.server.port)) as drip:
        drip.sendall(
            head(server, "POST", "/v1/chat/completions")
            + b"content-type: application/json\r\ncontent-length: 100\r\n\r\n{"
        )
        drip.settimeout(3)
        assert drip.recv(1000).startswith(b"HTTP/1.1 408 ")


def test_a_reader_that_does_not_read_is_cut_off_and_holds_no_session(running: Make) -> None:
    server = running(limits={"read_seconds": 0.5, "max_tokens": 1 << 16, "sessions": 1})
    body = json.dumps(BODY | {"stream": True, "max_tokens": 60000}).encode()
    with socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect(("127.0.0.1", server.server.port))
        deaf.sendall(
            head(server, "POST", "/v1/chat/completions")
            + b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
            + body
        )
        until(lambda: server.shared and server.shared.asked)
        until(lambda: not server.server.pool.requests and not server.server._uvicorn.server_state.connections, 10)
    with server.http() as client:
        assert client.post("/v1/chat/completions", json=BODY).status_code == 200


def test_connections_beyond_the_limit_are_closed(running: Make) -> None:
    server = running(limits={"connections": 4})
    held = [socket.create_connection(("127.0.0.1", server.server.port)) for _ in range(8)]
    for connection in held:
        connection.settimeout(1)
    closed = 0
    for connection in held:
        try:
            closed += connection.recv(1) == b""
        except TimeoutError:
            pass
        except ConnectionError:
            closed += 1
        if closed == 4:
            break
    assert closed == 4
    for connection in held:
        connection.close()
    with server.http() as client:
        until(lambda: not server.server._uvicorn.server_state.connections)
        assert client.get("/health").status_code == 200


def test_no_connection_is_kept_open(running: Make) -> None:
    with running().http() as client:
        assert client.get("/health").headers["connection"] == "close"


@pytest.mark.parametrize(
    "raw",
    [
        b"\x16\x03\x01\x02\x00\x01",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET http://evil/ HTTP/1.1\r\nhost: evil\r\n\r\n",
        b"CONNECT evil:80 HTTP/1.1\r\nhost: evil:80\r\n\r\n",
        b"GET /health HTTP/1.0\r\n\r\n",
        b"\x00" * 20000,
    ],
)
def test_what_is_no_request_of_ours_is_refused(running: Make, raw: bytes, capfd: pytest.CaptureFixture[str]) -> None:
    server = running()
    with socket.create_connection(("127.0.0.1", server.server.port)) as stranger:
        stranger.settimeout(3)
        stranger.sendall(raw if b"\r\n\r\n" in raw else raw + b"\r\n\r\n")
        assert b" 40" in stranger.recv(100)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "evil.example", ""])
def test_only_loopback_is_bound(host: str) -> None:
    with pytest.raises(ConfigError, match="this machine alone"):
        Server(FakeServeSession(Shared()), host=host, port=0, token=TOKEN)


@pytest.mark.skipif(os.name != "posix", reason="compares both")
@pytest.mark.parametrize(("system", "shared"), [(os, True), (WindowsOs(), False)], ids=["POSIX", "Windows"])
def test_a_port_is_not_shared_where_that_lets_others_bind_it_beside(
    system: object, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "os", system)
    with server_module._listen("127.0.0.1", 0) as listening:
        assert bool(listening.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR)) == shared


def test_the_other_loopback(running: Make) -> None:
    try:
        server = running(host="::1")
    except (OSError, ConfigError):
        pytest.skip("no IPv6 here")
    assert server.url == f"http://[::1]:{server.server.port}"
    with server.http() as client:
        assert client.get("/v1/models").status_code == 200


@pytest.mark.parametrize("token", ["", "short", "with blank in", "umlaut-ü-in-it", "new\nline-in-it"])
def test_tokens_that_cannot_be_sent_or_are_too_short_are_refused(token: str) -> None:
    with pytest.raises(ConfigError, match="the token"):
        Server(FakeServeSession(Shared()), port=0, token=token)


def test_each_start_makes_a_token_of_its_own() -> None:
    tokens = set()
    for _ in range(3):
        server = Server(FakeServeSession(Shared()), port=0)
        tokens.add(server.token)
        server.socket.close()
    assert len(tokens) == 3 and min(map(len, tokens)) >= 32


def head(server: Running, method: str, path: str) -> bytes:
    host = f"host: 127.0.0.1:{server.server.port}"
    return f"{method} {path} HTTP/1.1\r\n{host}\r\nauthorization: Bearer {TOKEN}\r\n".encode()
