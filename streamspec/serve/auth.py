"""Checks every request before anything else sees it: Host, Origin, token, method, type and size of its body.

One ASGI middleware in front of the routes, so that unknown paths tell a stranger nothing either. The server listens on
loopback, but browsers of the same machine run strangers' pages: Host stops names rebound to loopback, Origin stops
other pages, the token everybody else.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import time
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from typing import Any

from starlette.responses import JSONResponse, Response

from streamspec.errors import ConfigError
from streamspec.serve.errors import ApiError
from streamspec.serve.limits import Limits

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

NAMES = ("127.0.0.1", "localhost", "[::1]")
METHODS = {"GET", "HEAD", "POST"}
ALWAYS = [
    (b"x-content-type-options", b"nosniff"),
    (b"cache-control", b"no-store"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"x-frame-options", b"DENY"),
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri "
        b"'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    (b"connection", b"close"),  # on loopback a connection costs nothing, and none is left to be held open
]
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?")
DEFAULT_PORT = re.compile(r"http://.*:80|https://.*:443")
PREFLIGHT = [  # what pages of an allowed origin may ask with
    (b"access-control-allow-methods", b"GET, HEAD, POST"),
    (b"access-control-max-age", b"600"),
]
NAMES_OF_HEADERS = re.compile(rb"[A-Za-z0-9_, -]*")
KNOWN = "streamspec.known"  # in a request's scope: it has the token
log = logging.getLogger("streamspec.serve")


def check_origins(origins: Collection[str]) -> None:
    """Raises ConfigError for what is no web origin as browsers send it."""
    for origin in origins:
        if not ORIGIN.fullmatch(origin) or DEFAULT_PORT.fullmatch(origin):
            raise ConfigError(
                f"an allowed origin {origin!r}",
                "web origins as browsers send them: scheme and host in small letters, a port unless it is the scheme's "
                "own, no path, no wildcard",
                "write it like https://app.example or http://localhost:3000",
            )


class RequestGuard:
    """Refuses requests before the application sees them.

    `port`: the port that Host must name. `open_paths`: paths that need no token. `allow_origins`:
    origins of other pages that may ask, with the token; `error_body`: what a path answers with an error. Raises
    ConfigError for what is no origin.
    """

    def __init__(
        self,
        app: App,
        token: str,
        port: int,
        limits: Limits,
        open_paths: frozenset[str],
        allow_origins: Collection[str] = (),
        error_body: Callable[[str, ApiError], Any] = lambda path, error: error.body,
    ) -> None:
        check_origins(allow_origins)
        self._error_body = error_body
        self.app, self.limits, self.open_paths = app, limits, open_paths
        self._token = token.encode()
        hosts = {f"{name}:{port}" for name in NAMES} | ({*NAMES} if port == 80 else set())
        self._hosts = {host.encode() for host in hosts}
        self._origins = {b"http://" + host for host in self._hosts}
        self._allowed = {origin.encode() for origin in allow_origins} - self._origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        began, status = time.perf_counter(), 0
        headers: dict[bytes, list[bytes]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name, []).append(value)
        sharing = self._sharing(headers)

        async def dressed(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", []), *ALWAYS, *sharing]
            await send(message)

        try:
            try:
                self._check_sender(scope, headers)
                if sharing and scope["method"] == "OPTIONS" and b"access-control-request-method" in headers:
                    sharing += _preflight(headers)
                    await Response(status_code=204)(scope, receive, dressed)
                    return
                self._check(scope, headers)
                body = await self._read(scope, receive)
            except ApiError as error:
                body_of_error = self._error_body(scope["path"], error)
                await JSONResponse(body_of_error, error.status, error.headers)(scope, receive, dressed)
                return
            if body is not None:
                await self.app(scope, _replay(body, receive), dressed)
        finally:
            log.info(
                "%s %s %d %.0f ms",
                scope["method"],
                scope["path"].encode("unicode_escape").decode(),
                status,
                1000 * (time.perf_counter() - began),
            )

    def _sharing(self, headers: dict[bytes, list[bytes]]) -> list[tuple[bytes, bytes]]:
        """Headers that let a page of an allowed origin read the answer; none for others."""
        origin = headers.get(b"origin", [])
        if len(origin) != 1 or origin[0] not in self._allowed:
            return []
        return [
            (b"access-control-allow-origin", origin[0]),
            (b"access-control-expose-headers", b"retry-after"),
            (b"vary", b"origin"),
        ]

    def _check_sender(self, scope: Scope, headers: dict[bytes, list[bytes]]) -> None:
        if (
            len(scope["raw_path"])
            + len(scope["query_string"])
            + sum(len(name) + len(value) for name, value in scope["headers"])
            > self.limits.header
        ):
            raise ApiError(431, f"a head of more than {self.limits.header} bytes; expected a smaller one", "too_large")
        if [host.lower() for host in headers.get(b"host", [])] not in [[host] for host in self._hosts]:
            raise ApiError(
                403, "a Host that is not this server; expected 127.0.0.1 or localhost with its port", "foreign_host"
            )
        known = self._origins | self._allowed
        if any(origin not in known for origin in headers.get(b"origin", [])):
            raise ApiError(
                403,
                "a request from another site's page; expected this server's own or an allowed one",
                "foreign_origin",
            )

    def _check(self, scope: Scope, headers: dict[bytes, list[bytes]]) -> None:
        if scope["path"] not in self.open_paths or scope["method"] not in ("GET", "HEAD"):
            self._check_token(headers)
            scope[KNOWN] = True
        if scope["method"] not in METHODS:
            raise ApiError(405, f"the method {scope['method']}; expected GET or POST", "method_not_allowed")
        kinds = [kind.split(b";")[0].strip().lower() for kind in headers.get(b"content-type", [])]
        if scope["method"] == "POST" and kinds not in ([b"application/json"], []):  # LiteLLM's Ollama client has none
            raise ApiError(415, "the content type of the request; expected application/json", "content_type")
        if headers.get(b"content-encoding"):
            raise ApiError(415, "an encoded request; expected plain JSON", "content_type")

    def _check_token(self, headers: dict[bytes, list[bytes]]) -> None:
        keys = [b"bearer " + key for key in headers.get(b"x-api-key", [])]  # as clients of Anthropic's API send it
        given = headers.get(b"authorization", keys)
        kind, _, token = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        # compared whatever it is, in a time that tells nothing of where they differ
        if not hmac.compare_digest(token.strip(), self._token) or kind.lower() != b"bearer":
            raise ApiError(
                401,
                "no valid token; expected the header Authorization: Bearer TOKEN with the token the server was "
                "started with, or x-api-key: TOKEN",
                "invalid_api_key",
            )

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        """Reads the body; None from a client that has gone. Reads on for a while after a body that
        is too large, or the client would never see the answer."""
        most = self.limits.body if scope["method"] == "POST" else 0
        body, size = bytearray(), 0
        try:
            async with asyncio.timeout(self.limits.body_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    size += len(message.get("body", b""))
                    if size <= most:
                        body += message.get("body", b"")
                    if not message.get("more_body", False) or size > most + 8 * self.limits.body:
                        break
        except TimeoutError:
            raise ApiError(
                408, f"a body that took more than {self.limits.body_seconds:g} s; expected it faster", "slow_request"
            ) from None
        if size > most:
            raise ApiError(413, f"a body of {size} bytes or more; expected at most {most}", "too_large")
        return bytes(body)


def _preflight(headers: dict[bytes, list[bytes]]) -> list[tuple[bytes, bytes]]:
    """Returns further headers of the answer to a browser's preflight. The request itself needs the token."""
    asked = b", ".join(headers.get(b"access-control-request-headers", []))
    answer = [*PREFLIGHT, (b"access-control-allow-headers", asked if NAMES_OF_HEADERS.fullmatch(asked) else b"")]
    if headers.get(b"access-control-request-private-network") == [b"true"]:  # a public page asks this machine
        answer.append((b"access-control-allow-private-network", b"true"))
    return answer


def _replay(body: bytes, receive: Receive) -> Receive:
    sent = False

    async def replay() -> MutableMapping[str, Any]:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay
