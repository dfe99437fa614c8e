"""Checks every request before anything else sees it: Host, Origin, token, method, type and size of its body.

One ASGI middleware in front of the routes, so that unknown paths tell a stranger nothing either. The server listens on
loopback, but browsers of the same machine run strangers' pages: Host stops names rebound to loopback, Origin stops
other pages, the token everybody else.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.responses import JSONResponse

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
log = logging.getLogger("streamspec.serve")


class RequestGuard:
    """`port`: the one that Host has to name. `open_paths`: what needs no token."""

    def __init__(self, app: App, token: str, port: int, limits: Limits, open_paths: frozenset[str]) -> None:
        self.app, self.limits, self.open_paths = app, limits, open_paths
        self._token = token.encode()
        hosts = {f"{name}:{port}" for name in NAMES} | ({*NAMES} if port == 80 else set())
        self._hosts = {host.encode() for host in hosts}
        self._origins = {b"http://" + host for host in self._hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        began, status = time.perf_counter(), 0

        async def dressed(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", []), *ALWAYS]
            await send(message)

        try:
            try:
                self._check(scope)
                body = await self._read(scope, receive)
            except ApiError as error:
                await JSONResponse(error.body, error.status, error.headers)(scope, receive, dressed)
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

    def _check(self, scope: Scope) -> None:
        if (
            len(scope["raw_path"])
            + len(scope["query_string"])
            + sum(len(name) + len(value) for name, value in scope["headers"])
            > self.limits.header
        ):
            raise ApiError(431, f"a head of more than {self.limits.header} bytes; expected a smaller one", "too_large")
        headers: dict[bytes, list[bytes]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name, []).append(value)
        if [host.lower() for host in headers.get(b"host", [])] not in [[host] for host in self._hosts]:
            raise ApiError(
                403, "a Host that is not this server; expected 127.0.0.1 or localhost with its port", "foreign_host"
            )
        if any(origin not in self._origins for origin in headers.get(b"origin", [])):
            raise ApiError(403, "a request from another site's page; expected this server's own", "foreign_origin")
        if scope["path"] not in self.open_paths or scope["method"] not in ("GET", "HEAD"):
            self._check_token(headers.get(b"authorization", []))
        if scope["method"] not in METHODS:
            raise ApiError(405, f"the method {scope['method']}; expected GET or POST", "method_not_allowed")
        kinds = [kind.split(b";")[0].strip().lower() for kind in headers.get(b"content-type", [])]
        if scope["method"] == "POST" and kinds != [b"application/json"]:
            raise ApiError(415, "the content type of the request; expected application/json", "content_type")
        if headers.get(b"content-encoding"):
            raise ApiError(415, "an encoded request; expected plain JSON", "content_type")

    def _check_token(self, given: list[bytes]) -> None:
        kind, _, token = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        # compared whatever it is, in a time that tells nothing of where they differ
        if not hmac.compare_digest(token.strip(), self._token) or kind.lower() != b"bearer":
            raise ApiError(
                401,
                "no valid token; expected the header Authorization: Bearer TOKEN with the token the server was "
                "started with",
                "invalid_api_key",
            )

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        """Reads the body; None from a client that has gone. What is too large is read on for a while, or the client
        would never see the answer.
        """
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


def _replay(body: bytes, receive: Receive) -> Receive:
    sent = False

    async def replay() -> MutableMapping[str, Any]:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay
