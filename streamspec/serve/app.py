"""Serves the routes: OpenAI's API over a pool of sessions, health, metrics and the page.
`RequestGuard` has checked every request before."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from streamspec.errors import ConfigError, StreamspecError
from streamspec.runtime import Chunk, GenerationOptions, Session
from streamspec.runtime.conversation import forget
from streamspec.runtime.draft_sources.prediction import predicted_tokens
from streamspec.runtime.embeddings import MEAN
from streamspec.runtime.options import SWITCHES
from streamspec.runtime.sampling.sampling_params import GRAPH_INPUTS
from streamspec.serve import metrics
from streamspec.serve.api.answer import Answer, Build, Read
from streamspec.serve.api.chat_requests import ParsedRequest, read_chat, read_completion
from streamspec.serve.api.chat_responses import ResponseBuilder
from streamspec.serve.api.embeddings_request import read_embeddings
from streamspec.serve.api.fill_in_middle import between
from streamspec.serve.api.kept_items import KeptItems
from streamspec.serve.api.response_events import ResponseObject
from streamspec.serve.api.responses_request import read_responses
from streamspec.serve.auth import App, Receive, RequestGuard, Scope, Send
from streamspec.serve.embeddings import EmbeddingRequest
from streamspec.serve.errors import SERVER, ApiError, closing, from_runtime, invalid, out_of_time
from streamspec.serve.forms.form import LATEST
from streamspec.serve.forms.table import FORMS, error_body
from streamspec.serve.limits import DEFAULT, Limits
from streamspec.serve.pool import Pool, QueuedRequest
from streamspec.serve.tools.call_form import CallForm
from streamspec.serve.tools.call_parser import CallParser

PAGE = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}  # files of the page, by their ending
NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
log = logging.getLogger("streamspec.serve")
Prompt = Callable[[Session], Any]


class ClientDisconnected(Exception):
    """The client has closed the connection."""


@dataclass
class Prepared:
    """A request before it is queued. `base`: its bundle's session; `hint`: the prompt's tokens; `calls`: makes the
    parser of calls in one answer, where there are tools."""

    parsed: ParsedRequest
    base: Session
    adapter: str | None
    prompts: list[Prompt]
    options: list[GenerationOptions]
    hint: list[int] | None = None
    calls: Callable[[], CallParser] | None = None

    def answer(self, build: Build) -> Answer:
        """Makes the builder of the answer."""
        return build(self.parsed, None if self.adapter is None else self.parsed.model, self.base.tokenizer, self.calls)


class Service:
    """Holds what the routes share. `models`: by the names that requests may ask for, a bundle's session and its adapter
    or None; `readers`: what encodes prompts for each, whatever adapter the session has. What a request does not say of
    sampling is the session's."""

    def __init__(
        self,
        session: Session,
        name: str,
        adapters: Mapping[str, str | Path],
        limits: Limits,
        more: Mapping[str, Session],
    ) -> None:
        self.pool, self.limits, self.created = Pool([session, *more.values()], limits), limits, int(time.time())
        offered: list[tuple[str, Session, str | None]] = [(name, session, session.adapter)]
        offered += [(model, session, str(adapter)) for model, adapter in adapters.items()]
        for bundle, other in more.items():
            offered += [(bundle, other, other.adapter), *((adapter, other, adapter) for adapter in other.adapters)]
        self.models = {model: (base, adapter) for model, base, adapter in offered}
        self.readers = {model: base.reading_for(adapter) for model, base, adapter in offered}
        for model, _, _ in offered:
            if not NAME.fullmatch(model):
                raise ConfigError(
                    f"a model named {model!r}",
                    "letters, digits, dots, dashes and underscores, at most 128",
                    "give it another name",
                )
        if len(self.models) != len(offered):
            names = [model for model, _, _ in offered]
            twice = next(model for model in names if names.count(model) > 1)
            raise ConfigError(
                f"an adapter and the bundle of one name, {twice}" if not more else f"two models named {twice}",
                "two names",
                "give the bundle another name with --name, or rename a folder",
            )

    async def list_models(self, request: Request) -> Response:
        """Answers `GET /v1/models`."""
        return JSONResponse({"object": "list", "data": [self._model(name) for name in self.models]})

    async def one_model(self, request: Request) -> Response:
        """Answers `GET /v1/models/{name}`. Raises ApiError for an unknown name."""
        name = self.known(request.path_params["name"])
        self.model_of(name)
        return JSONResponse(self._model(name))

    async def embed(self, request: Request) -> Response:
        """Answers `POST /v1/embeddings`."""
        if self.pool.closed:
            raise closing()
        parsed = await asyncio.to_thread(read_embeddings, await request.body(), self.limits)
        base, adapter = self.model_of(self.known(parsed.model))
        parsed.check(base.manifest.model)
        queued = EmbeddingRequest(self.pool, adapter, parsed.texts, parsed.pooling or MEAN, base)
        self.pool.enqueue(queued)
        try:
            vectors, tokens = await _while_connected(request, queued.embedded())
        except (ClientDisconnected, asyncio.CancelledError):
            queued.cancel()
            raise
        except Exception as error:
            raise _api_error(error, "input") from None
        return await asyncio.to_thread(lambda: JSONResponse(parsed.response(vectors, tokens)))

    async def count(self, request: Request, read: Read) -> int:
        """Counts the tokens of the prompt of a request that `read` parses. Raises ApiError."""
        body = await request.body()
        ready = await self._before_the_queue(request, asyncio.to_thread(self._prepare, read, body))
        if ready.hint is not None:
            return len(ready.hint)
        reader = self.readers[ready.parsed.model]  # which refuses it, and says why
        try:
            return len(await asyncio.to_thread(lambda: reader.encode(ready.prompts[0](reader))))
        except StreamspecError as error:
            raise _api_error(error, ready.parsed.field) from None

    async def metrics(self, request: Request) -> Response:
        """Answers `GET /metrics` in the Prometheus text format."""
        return PlainTextResponse(metrics.render(self.pool), media_type="text/plain; version=0.0.4")

    async def answer(self, request: Request, read: Read, build: Build) -> Response:
        """Answers a request that `read` parses, in the form of `build`. Raises ApiError."""
        if self.pool.closed:
            raise closing()
        body, arrived = await request.body(), time.perf_counter()
        ready = await self._before_the_queue(request, asyncio.to_thread(self._prepare, read, body))
        generation = QueuedRequest(
            self.pool, ready.adapter, ready.prompts, ready.options, ready.hint, ready.base, arrived
        )
        self.pool.enqueue(generation)
        answer, parsed = ready.answer(build), ready.parsed
        chunks: AsyncIterator[Chunk] = generation.items()
        try:
            first = await _while_connected(request, anext(chunks))  # an error before it has a status of its own
            answer.waited = generation.waited
            grammar = ready.options[0].grammar
            answer.left_out = (*parsed.left_out, *(() if grammar is None else grammar.left_out))
            if parsed.stream:
                return Events(_events(answer, first, chunks), generation, answer.media_type)
            return JSONResponse(await _while_connected(request, _whole(answer, first, chunks)))
        except (ClientDisconnected, asyncio.CancelledError):
            generation.cancel()
            raise
        except Exception as error:
            generation.cancel()
            raise _api_error(error, parsed.field) from None

    def _prepare(self, read: Read, body: bytes) -> Prepared:
        """Does what takes time before a request can be queued: checking a schema does. From any thread."""
        grammars = self.pool.grammars
        parsed = read(body, self.limits, grammars)
        parsed = replace(parsed, model=self.known(parsed.model))
        base, adapter = self.model_of(parsed.model)
        reader = self.readers[parsed.model]
        parsed = parsed.beginning_with(base.sampling)
        if (prediction := parsed.options[0].prediction) is not None:
            parsed = replace(parsed, predicted=predicted_tokens(prediction, base.tokenizer))
        if parsed.hinted and reader.thought is None:
            none = partial(replace, reasoning_effort=None, chat_template_kwargs=None, thinking_token_budget=None)
            parsed = replace(parsed, options=[none(each) for each in parsed.options])
        if parsed.thinks and reader.thought is not None:
            thinking = dict.fromkeys(SWITCHES, True)
            parsed = replace(parsed, options=[replace(each, chat_template_kwargs=thinking) for each in parsed.options])
        suffix, tokenizer = parsed.suffix, base.tokenizer
        prompts = [between(prompt, suffix, tokenizer) if suffix else prompt for prompt in parsed.prompts]
        make = partial(_prompt, parsed)
        ready = Prepared(parsed, base, adapter, [make(prompt) for prompt in prompts], parsed.options)
        if (tools := parsed.tools) is not None:
            form = self.pool.call_form(reader)
            _check_stops(parsed.options[0].stops, form)
            ready.calls = partial(CallParser, form, tools, reader.thought is None)
            grammar = tools.grammar(form, grammars) or parsed.options[0].grammar
            shown = [token for _, token in form.specials]
            ready.options = [replace(each, grammar=grammar, shown_special_tokens=shown) for each in parsed.options]
        if parsed.room:
            ready.prompts = [_fitting(make, parsed)]
        with suppress(StreamspecError):  # the generation will say it
            ready.hint = reader.encode(ready.prompts[0](reader))
        return ready

    async def _before_the_queue(self, request: Request, work: Awaitable[Prepared]) -> Prepared:
        """Returns the result of `work` while the client is connected and the request has time; a
        thread that still works is left to end. Raises ClientDisconnected, and ApiError at the time
        limit."""
        try:
            async with asyncio.timeout(self.limits.timeout):
                return await _while_connected(request, work)
        except (ClientDisconnected, asyncio.CancelledError):
            self.pool.counts.cancelled += 1
            raise
        except TimeoutError:
            self.pool.counts.cancelled += 1
            raise out_of_time(self.limits.timeout, "the request was not read and its grammar checked") from None

    def known(self, model: str) -> str:
        """Returns a model's name without the tag that Ollama's lists give it: clients take it to other paths."""
        return model if model in self.models else model.removesuffix(LATEST)

    def model_of(self, model: str) -> tuple[Session, str | None]:
        """Returns the session and the adapter of a model. Raises ApiError for an unknown name."""
        if model not in self.models:
            known = ", ".join(self.models)
            raise ApiError(404, f"the model {model!r}; expected one of {known}", "model_not_found", "model")
        return self.models[model]

    def _model(self, name: str) -> dict[str, Any]:
        sampling = {field: getattr(self.models[name][0].sampling, field) for field in GRAPH_INPUTS}
        model = {"id": name, "object": "model", "created": self.created, "owned_by": "streamspec"}
        return model | {"streamspec": {"sampling": sampling, "thinks": self.readers[name].thought is not None}}


class Events(Response):
    """Sends the events of a generation; whatever ends them ends the generation."""

    def __init__(self, events: AsyncIterator[bytes], generation: QueuedRequest, media_type: str) -> None:
        super().__init__(media_type=media_type)
        del self.headers["content-length"]
        self.events, self.generation = events, generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def write() -> None:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for event in self.events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
                await asyncio.sleep(0)  # else a client's leaving would be seen only after all that waits to be sent
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        try:
            await _while_connected(Request(scope, receive), write())
        except ClientDisconnected:
            pass
        finally:
            self.generation.cancel()


def create_app(
    session: Session,
    *,
    token: str,
    port: int,
    name: str = "streamspec",
    adapters: Mapping[str, str | Path] | None = None,
    limits: Limits = DEFAULT,
    page: bool = True,
    allow_origins: Collection[str] = (),
    more: Mapping[str, Session] | None = None,
) -> tuple[App, Pool]:
    """Creates the ASGI application over a loaded session, and its session pool, which has to be closed with it.

    - `token`: the bearer token that clients must send.
    - `port`: the port that clients use, checked against the Host header.
    - `name`: model id of the session itself. `adapters`: further model ids with their adapters (`Session.swap`).
    - `limits`: bounds on requests and sessions. `page`: whether to serve the web page.
    - `more`: sessions of further bundles by model id, to serve with their adapters. They share the limits.
    - `allow_origins`: web origins, such as `https://app.example`, whose pages may ask with the token.

    Serve it with `Server`, which binds loopback addresses only; any other server must do the same. Raises ConfigError
    for model ids that collide or are invalid, and for what is no web origin.
    """
    service = Service(session, name, adapters or {}, limits, more or {})
    files, kept = _page_files() if page else {}, KeptItems()
    answered: dict[str, tuple[Read, Build]] = {
        "/v1/chat/completions": (read_chat, ResponseBuilder),
        "/v1/completions": (read_completion, ResponseBuilder),
        "/v1/responses": (partial(read_responses, kept=kept), partial(ResponseObject, kept=kept)),
    }
    routes = [
        Route("/v1/models", service.list_models),
        Route("/v1/models/{name}", service.one_model),
        *(Route(path, partial(service.answer, read=r, build=b), methods=["POST"]) for path, (r, b) in answered.items()),
        Route("/v1/embeddings", service.embed, methods=["POST"]),
        Route("/metrics", service.metrics),
        Route("/health", _health),
        *(route for form in FORMS for route in form.routes(service)),
        *(Route(path, _file(content, kind)) for path, (content, kind) in files.items()),
    ]
    app = Starlette(
        routes=routes,
        exception_handlers={ApiError: _say, HTTPException: _say_http, ClientDisconnected: _hang_up, Exception: _say},
    )
    app.router.redirect_slashes = False
    return RequestGuard(
        app, token, port, limits, frozenset({"/health", *files}), allow_origins, error_body
    ), service.pool


async def _health(request: Request) -> Response:
    return JSONResponse({"status": "ok"})


def _file(content: bytes, media_type: str) -> Callable[[Request], Any]:
    async def answer(request: Request) -> Response:
        return Response(content, media_type=media_type)

    return answer


def _page_files() -> dict[str, tuple[bytes, str]]:
    """Content and type of the page's files by their path; empty where the page is not installed."""
    folder = resources.files("streamspec.serve") / "page"
    candidates = [file for file in folder.iterdir() if Path(file.name).suffix in PAGE] if folder.is_dir() else []
    files = {f"/page/{file.name}": (file.read_bytes(), PAGE[Path(file.name).suffix]) for file in candidates}
    if "/page/index.html" in files:
        files["/"] = files["/page/index.html"]
    return files


def _fitting(make: Callable[[Any], Prompt], parsed: ParsedRequest) -> Prompt:
    """Makes the prompt without as many of the oldest turns as leave no room for the answer, as `Session.chat` does."""

    def of(session: Session) -> Any:
        context = session.context_length
        room = min(parsed.room, context // 2)
        turns = forget(parsed.prompt, lambda left: len(make(left)(session)), context - room)
        return make(turns)(session)

    return of


def _check_stops(stops: Sequence[str], form: CallForm) -> None:
    """Raises ApiError for a stop string that would end the answer within what the model writes around a call."""
    for stop in stops:
        if any(stop in text for text in form.texts):
            found = f"stop {stop!r:.60} beside tools, part of how this model writes a call"
            raise invalid(f"{found}; expected another, or no tools", "stop", "unsupported_value")


def _prompt(parsed: ParsedRequest, prompt: Any) -> Prompt:
    """Makes the prompt for a session. Text for completions is passed on as it is where the bundle's own format is a
    chat's."""

    def of(session: Session) -> Any:
        if isinstance(prompt, str) and session.manifest.prompt_format.kind == "chat":
            return list(session.tokenizer.encode(prompt).ids)
        if not parsed.chat:
            return prompt
        tools = None if parsed.tools is None else parsed.tools.schemas
        return session.encode(prompt, tools=tools, chat_template_kwargs=parsed.options[0].template_variables)

    return of


async def _whole(answer: Answer, first: Chunk, chunks: AsyncIterator[Chunk]) -> dict[str, Any]:
    answer.push(first)
    async for chunk in chunks:
        answer.push(chunk)
    return answer.whole()


async def _events(answer: Answer, first: Chunk, chunks: AsyncIterator[Chunk]) -> AsyncIterator[bytes]:
    for event in answer.events(first):
        yield event
    try:
        async for chunk in chunks:
            for event in answer.events(chunk):
                yield event
    except Exception as error:  # the status has been sent: an event has to say it
        for event in answer.failure(_api_error(error)):
            yield event
        return
    for event in answer.ending():
        yield event


async def _while_connected(request: Request, work: Any) -> Any:
    """Returns the result of `work`, which is given up when the client goes. Raises ClientDisconnected."""
    task = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait({task, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnected
        return task.result()
    finally:
        task.cancel()
        leaving.cancel()
        await asyncio.gather(task, leaving, return_exceptions=True)


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _api_error(error: Exception, field: str | None = None) -> ApiError:
    """Converts an error for the client and logs internal ones. `field`: the field of the request
    that holds the prompt."""
    api_error = from_runtime(error, field)
    if api_error is not error and api_error.code == "internal_error":
        log.error("a generation failed", exc_info=error)
    return api_error


async def _say(request: Request, error: Exception) -> Response:
    api_error = _api_error(error)
    return JSONResponse(error_body(request.url.path, api_error), api_error.status, api_error.headers)


async def _say_http(request: Request, error: Exception) -> Response:
    """Answers for a path or method that has no route."""
    assert isinstance(error, HTTPException)
    paths = ", ".join(route.path for route in request.app.routes if route.path.startswith(("/v1/", "/api/")))
    message = {
        404: f"no such path; expected one of {paths}",
        405: f"the method {request.method}; expected {(error.headers or {}).get('Allow', 'another')}",
    }
    kind = SERVER if error.status_code >= 500 else "invalid_request_error"
    code = "method_not_allowed" if error.status_code == 405 else "not_found"
    api_error = ApiError(error.status_code, message.get(error.status_code, error.detail), code, kind=kind)
    return JSONResponse(error_body(request.url.path, api_error), api_error.status, error.headers)


async def _hang_up(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it
