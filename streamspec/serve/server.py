"""Runs the application on a socket of its own: loopback only; ends slow and idle connections; shuts down cleanly."""

from __future__ import annotations

import asyncio
import os
import socket
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from types import FrameType
from typing import Any, Unpack

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from streamspec.errors import ConfigError, StreamspecWarning
from streamspec.prompt.turn_end import unended_turn_of
from streamspec.runtime import LoadOptions, Sampling, Session, load
from streamspec.runtime.options import LoadKwargs
from streamspec.serve.app import create_app
from streamspec.serve.auth import KNOWN, App, check_origins
from streamspec.serve.kept_token import check_token, kept_token, new_token
from streamspec.serve.limits import DEFAULT, Limits
from streamspec.serve.pool import Pool

HOSTS = {"127.0.0.1": socket.AF_INET, "localhost": socket.AF_INET, "::1": socket.AF_INET6}
BACKLOG = 64
READERS = 2  # threads that read requests; as for sessions, few keep less memory
GRACE = 0.5  # seconds that cancelled generations have to end in


class Server:
    """A server on loopback over a loaded session. `run` blocks until `stop` or a signal.

    `url`: its address; `token`: the bearer token. Both are set before `run`.
    """

    def __init__(
        self,
        session: Session,
        *,
        host: str = "127.0.0.1",
        port: int = 8080,
        token: str | None = None,
        name: str = "streamspec",
        adapters: dict[str, str | Path] | None = None,
        limits: Limits = DEFAULT,
        page: bool = True,
        allow_origins: Collection[str] = (),
        more: Mapping[str, Session] | None = None,
    ) -> None:
        """Opens the port. `port` 0 takes a free one, `token` None creates one; the rest as for `create_app`.

        Raises ConfigError for a host that is not loopback, a port that is taken, a token that is too short or cannot
        be sent, or what is no web origin.
        """
        if host not in HOSTS:
            raise ConfigError(
                f"host {host}",
                "127.0.0.1, localhost or ::1: the server is for this machine alone",
                "forward a port to it if another one has to reach it",
            )
        self.token = new_token() if token is None else token
        check_token(self.token)
        self.socket = _listen(host, port)
        try:
            self.port: int = self.socket.getsockname()[1]
            self.url = f"http://{'[::1]' if host == '::1' else host}:{self.port}"
            app, self.pool = create_app(
                session,
                token=self.token,
                port=self.port,
                name=name,
                adapters=adapters,
                limits=limits,
                page=page,
                allow_origins=allow_origins,
                more=more,
            )
        except BaseException:
            self.socket.close()
            raise
        self._uvicorn = _Uvicorn(_config(app, limits), self.pool)

    @property
    def ready(self) -> bool:
        """Whether it accepts connections."""
        return self._uvicorn.started

    def run(self) -> None:
        """Serves until `stop`, SIGINT or SIGTERM. Handles signals in the main thread only, then passes them on."""
        self._uvicorn.run(sockets=[self.socket])

    def stop(self) -> None:
        """Stops the server from any thread, within a second. Running generations end with an error to their clients."""
        self._uvicorn.leave()


def serve(
    bundle: str | Path,
    options: LoadOptions | None = None,
    *,
    port: int = 8080,
    token: str | None = None,
    token_file: str | Path | None = None,
    name: str | None = None,
    adapters: list[str | Path] | None = None,
    also: Sequence[str | Path | tuple[str, str | Path]] = (),
    limits: Limits = DEFAULT,
    page: bool = True,
    allow_origins: Collection[str] = (),
    host: str = "127.0.0.1",
    sampling: Mapping[str, Any] | None = None,
    ready: Callable[[Server], None] | None = None,
    **keywords: Unpack[LoadKwargs],
) -> None:
    """Loads a bundle and serves it until SIGINT or SIGTERM. Options of `load` as one `LoadOptions` or as keywords.

    - `port`, `host`, `token`, `limits`, `page`, `allow_origins`: as for `Server`.
    - `token_file`: instead of `token`, a file that keeps it, with mode 0600; made with a new one where there is none.
    - `name`: model id of the bundle (default: its folder's name).
    - `adapters`: adapters of a swappable bundle to offer (default: all in the bundle).
    - `also`: further bundles, loaded with the same options: folders, by their names, or pairs of a name and a folder.
      Their memory beside the weights is freed until a request needs it; with `idle` the weights, too.
    - `sampling`: fields of `Sampling` in place of what the bundles recommend, where a request does not say otherwise;
      a temperature of 0: greedy.
    - `ready`: called with the `Server` before it begins to serve.
    """
    if token is not None and token_file is not None:
        raise ConfigError("a token and a token file", "one of them", "leave one out")
    check_origins(allow_origins)
    given = _checked_sampling(sampling or {})  # a fault is reported before the long work
    if also and (adapters is not None or keywords.get("past_answers") or (options and options.past_answers)):
        raise ConfigError("several bundles with --use or --past-answers", "one bundle", "leave them out")
    token = token if token_file is None else kept_token(token_file)
    session = load(bundle, options, **keywords)
    by_name = _offered(session, adapters)
    more = _further_bundles(also, session, options, keywords)
    for each in (session, *more.values()):
        each.sampling = each.sampling.changed(**given)
        if note := unended_turn_of(each):
            warnings.warn(note, StreamspecWarning, stacklevel=2)
    server = Server(
        session,
        host=host,
        port=port,
        token=token,
        name=name or Path(bundle).resolve().name,
        adapters=by_name,
        limits=limits,
        page=page,
        allow_origins=allow_origins,
        more=more,
    )
    if ready is not None:
        ready(server)
    server.run()


def _checked_sampling(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns fields of `Sampling`. Raises ConfigError for others, a wrong value, and a seed, with which all answers of
    a request would be alike."""
    if wrong := given.keys() - ({one.name for one in fields(Sampling)} - {"seed"}):
        raise ConfigError(f"sampling with {min(wrong)}", "fields of Sampling, without a seed", "leave it out")
    Sampling(**given)
    return dict(given)


def _offered(session: Session, adapters: list[str | Path] | None) -> dict[str, str | Path]:
    """Returns the adapters to offer, by name: all in the bundle, or `adapters`, which are tried, so that a wrong one is
    refused now. Raises ConfigError for two of one name, and what `Session.swap` does."""
    chosen, loaded = session.adapters if adapters is None else adapters, session.adapter
    for adapter in adapters or ():
        session.swap(adapter)
    if adapters:
        session.swap(loaded)
    by_name: dict[str, str | Path] = {Path(adapter).name: adapter for adapter in chosen}
    if len(by_name) != len(chosen):
        raise ConfigError("two adapters of one name", "adapters of different names", "rename the folder of one")
    return by_name


def _further_bundles(
    also: Sequence[str | Path | tuple[str, str | Path]],
    session: Session,
    options: LoadOptions | None,
    keywords: LoadKwargs,
) -> dict[str, Session]:
    """Loads further bundles and closes their sessions, by name. Raises ConfigError for two of one name, and what `load`
    does."""
    more: dict[str, Session] = {}
    for one in also:
        session.close()  # before the next is loaded
        name, folder = one if isinstance(one, tuple) else (Path(one).resolve().name, one)
        if name in more:
            raise ConfigError(f"two bundles named {name}", "bundles of different names", "give one another name")
        more[name] = load(folder, options, **keywords)
        more[name].close()
    return more


def _listen(host: str, port: int) -> socket.socket:
    """Opens a listening socket on loopback: from here on clients wait instead of being refused."""
    listening = socket.socket(HOSTS[host])
    try:
        if os.name == "posix":  # elsewhere it would let others bind the port beside us
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(BACKLOG)
    except BaseException as error:
        listening.close()
        if not isinstance(error, OSError):
            raise
        raise ConfigError(
            f"{host} port {port}: {error.strerror}", "a free port", "choose another, or 0 for any"
        ) from None
    return listening


def _config(app: App, limits: Limits) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        loop="asyncio",
        http=_bounded(limits),
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        date_header=False,
        backlog=BACKLOG,
        h11_max_incomplete_event_size=limits.header,
        timeout_graceful_shutdown=1,
    )


class _Uvicorn(uvicorn.Server):
    """uvicorn's server, but idle while nothing happens, and with a pool to close first."""

    def __init__(self, config: uvicorn.Config, pool: Pool) -> None:
        super().__init__(config)
        self.pool = pool
        self._loop: asyncio.AbstractEventLoop | None = None
        self._leaving = asyncio.Event()

    async def main_loop(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.set_default_executor(ThreadPoolExecutor(READERS, "streamspec-request"))
        if not self.should_exit:
            await self._leaving.wait()

    def leave(self) -> None:
        self.should_exit = True
        if self._loop is not None:
            with suppress(RuntimeError):  # it has left already
                self._loop.call_soon_threadsafe(self._leaving.set)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        self.leave()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.pool.close()
        await super().shutdown(sockets)
        await self.pool.ended(GRACE)


def _bounded(limits: Limits) -> type[H11Protocol]:
    """Makes uvicorn's protocol with limits to what a client may draw out: its head, and reading its answer."""

    class Bounded(H11Protocol):
        since: float = 0.0  # in the loop's time
        _head: asyncio.TimerHandle | None = None  # runs until a request's head is there
        _reading: asyncio.TimerHandle | None = None  # runs while the client leaves its answer unread

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self.since = self.loop.time()
            if len(self.connections) > limits.connections:
                self._make_room()
            self._head = self.loop.call_later(limits.head_seconds, transport.abort)

        @property
        def rank(self) -> tuple[bool, float]:
            """Orders connections without the token: the one of lower rank is closed first, without
            a head, then older."""
            return self.cycle is not None, self.since

        def _make_room(self) -> None:
            """Closes a connection that has not shown the token; this one, still silent, if all
            others have shown it."""
            strangers = [
                one
                for one in self.connections
                if isinstance(one, Bounded) and one is not self and not (one.cycle is not None and one.scope.get(KNOWN))
            ]
            closed = min(strangers, key=lambda one: one.rank, default=self)
            self.connections.discard(closed)
            closed.transport.abort()

        def handle_events(self) -> None:
            super().handle_events()
            if self.cycle is not None and self._head is not None:  # the guard looks after the body
                self._head.cancel()

        def connection_lost(self, exc: Exception | None) -> None:
            for timer in (self._head, self._reading):
                if timer is not None:
                    timer.cancel()
            super().connection_lost(exc)

        def pause_writing(self) -> None:
            super().pause_writing()
            self._must_read()

        def resume_writing(self) -> None:
            super().resume_writing()
            if self._reading is not None:
                self._reading.cancel()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._must_read()  # what is left in the buffers

        def _must_read(self) -> None:
            if self._reading is not None:
                self._reading.cancel()
            self._reading = self.loop.call_later(limits.read_seconds, self.transport.abort)

    return Bounded
