"""Reads requests in the form of Ollama's API, which become chats and completions, and lists the models in it.

Source: https://docs.ollama.com/api. tests/serve/forms/test_ollama.py covers this file.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from streamspec.errors import ConfigError
from streamspec.serve.api.answer import Read
from streamspec.serve.api.body import json_object, parsed_as, renamed
from streamspec.serve.api.chat_requests import (
    ChatRequest,
    CompletionRequest,
    ParsedRequest,
    completion_in_runtime_terms,
    in_runtime_terms,
)
from streamspec.serve.api.fields import Strict
from streamspec.serve.errors import ApiError, invalid
from streamspec.serve.forms.form import LATEST, ChatPath, Form
from streamspec.serve.forms.ollama_answer import OllamaChat, OllamaText, moment
from streamspec.serve.limits import Limits
from streamspec.serve.tools.checked_grammars import CheckedGrammars

SPOKEN = "0.13.0"  # the version of the API: some clients ask for a least one
NEVER = "9999-12-31T23:59:59Z"  # when a loaded model ends
UNLOADS = r"0+(\.0*)?[a-z]*"  # durations of no time
ROOM = 512  # tokens for which a chat loses turns where no length is asked for
RANDOM = -1  # the seed that is none
# Fields of Ollama's API that are there with these values only, beside null.
ONLY: dict[str, tuple[Any, ...]] = {"images": ([],), "shift": (False,)}
ONLY_IN_GENERATE = {**ONLY, "context": ([],), "template": ("",), "width": (), "height": (), "steps": ()}
ONLY_IN_MESSAGE: dict[str, tuple[Any, ...]] = {"images": ([],)}
ONLY_IN_SHOW: dict[str, tuple[Any, ...]] = {"system": ("",), "template": ("",), "options": ({},)}
ONLY_IN_OPTIONS: dict[str, tuple[Any, ...]] = {
    "repeat_last_n": (-1,),  # the penalty is for the whole text
    "typical_p": (1,),
    "tfs_z": (1,),
    "mirostat": (0,),
    "vocab_only": (False,),
    "embedding_only": (False,),
}
# names of a chat's and a completion's fields here
NAMES = {
    "response_format.json_schema.schema": "format",
    "response_format": "format",
    "max_tokens": "options.num_predict",
    "repetition_penalty": "options.repeat_penalty",
    **{
        name: f"options.{name}"
        for name in (
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "seed",
            "stop",
            "presence_penalty",
            "frequency_penalty",
        )
    },
}


class OllamaFunction(Strict):
    """The function of a call, and its arguments as an object."""

    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)
    index: int | None = None


class OllamaCall(Strict):
    """A call that an answer made before."""

    function: OllamaFunction
    id: str | None = None
    type: Literal["function"] | None = None


class OllamaMessage(Strict):
    """A message of a chat. The result of a call names its function, or the call."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    tool_calls: list[OllamaCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaOptions(Strict):
    """How an answer is made. Those of the machine change nothing: `streamspec serve` has options for these."""

    @model_validator(mode="before")
    @classmethod
    def _whole(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Numbers of clients that know floats alone."""
        whole = {name: int(one) for name, one in values.items() if isinstance(one, float) and one.is_integer()}
        return values | whole

    num_predict: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    num_ctx: int | None = None  # changes nothing, as those that follow
    num_keep: int | None = None
    num_batch: int | None = None
    num_gpu: int | None = None
    main_gpu: int | None = None
    num_thread: int | None = None
    numa: bool | None = None
    low_vram: bool | None = None
    f16_kv: bool | None = None
    logits_all: bool | None = None
    use_mmap: bool | None = None
    use_mlock: bool | None = None
    penalize_newline: bool | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None


class OllamaCommon(Strict):
    """Fields that all requests share."""

    model: str
    stream: bool | None = None
    format: dict[str, Any] | Literal["", "json"] | None = None
    options: dict[str, Any] | None = None
    think: bool | Literal["low", "medium", "high"] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    keep_alive: float | str | None = None  # changes nothing: `serve --idle` says it


class OllamaChatRequest(OllamaCommon):
    """The body of `POST /api/chat`."""

    messages: list[Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None  # a chat's: Ollama has none
    truncate: bool | None = None


class OllamaGenerateRequest(OllamaCommon):
    """The body of `POST /api/generate`."""

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    raw: bool | None = None
    truncate: bool | None = None


class OllamaModelRequest(Strict):
    """The body of `POST /api/show`. `name`: the older name of `model`."""

    model: str | None = None
    name: str | None = None
    verbose: bool | None = None


def read_chat(body: bytes, limits: Limits, grammars: CheckedGrammars | None = None) -> ParsedRequest:
    """Parses the body of a chat. Raises ApiError, status 400, naming the field."""
    request = parsed_as(OllamaChatRequest, json_object(body), fixed=ONLY)
    values = _values(request, limits) | {"messages": _messages(request.messages or []), "tools": _tools(request.tools)}
    values["tool_choice"] = request.tool_choice
    most = int((request.options or {}).get("num_predict") or 0)
    room = 0 if request.truncate is False else most if most > 0 else ROOM
    return replace(_chat(values, limits, grammars), room=room)


def read_generate(body: bytes, limits: Limits, grammars: CheckedGrammars | None = None) -> ParsedRequest:
    """Parses the body of a request for text: a chat of one question or, `raw` or with a suffix, a completion."""
    request = parsed_as(OllamaGenerateRequest, json_object(body), fixed=ONLY_IN_GENERATE)
    values = _values(request, limits)
    if not (request.raw or request.suffix):
        system = [{"role": "system", "content": request.system}] if request.system else []
        messages = [*system, {"role": "user", "content": request.prompt}]
        return replace(_chat(values | {"messages": messages}, limits, grammars), field="prompt")
    for name, given in (("system", request.system), ("think", request.think), ("logprobs", request.logprobs)):
        if given:
            raise invalid(f"{name} beside raw or suffix; expected one of them", name)
    for name in ("reasoning_effort", "enable_thinking", "logprobs", "top_logprobs"):
        values.pop(name)
    completion = {**values, "prompt": request.prompt, "suffix": request.suffix}
    try:
        return completion_in_runtime_terms(parsed_as(CompletionRequest, completion), limits, grammars)
    except ApiError as error:
        raise renamed(error, NAMES) from None


def _chat(values: dict[str, Any], limits: Limits, grammars: CheckedGrammars | None) -> ParsedRequest:
    try:
        parsed = in_runtime_terms(parsed_as(ChatRequest, values), limits, grammars)
    except ApiError as error:
        raise renamed(error, NAMES) from None
    return replace(parsed, thinks=values["enable_thinking"] is None and values["reasoning_effort"] is None)


def _values(request: OllamaCommon, limits: Limits) -> dict[str, Any]:
    """Returns the fields that a chat and a completion share."""
    options = parsed_as(OllamaOptions, request.options or {}, "options.", ONLY_IN_OPTIONS)
    most, schema, think = options.num_predict, request.format, request.think
    form: dict[str, Any] | None = {"type": "json_object"} if schema == "json" else None
    if isinstance(schema, dict):
        form = {"type": "json_schema", "json_schema": {"schema": schema}}
    return {
        "model": request.model,
        "stream": request.stream is not False,
        "max_tokens": most if most is not None and most > 0 else limits.max_tokens,  # as many as there may be
        "repetition_penalty": options.repeat_penalty,
        "response_format": form,
        "enable_thinking": think if isinstance(think, bool) else None,
        "reasoning_effort": think if isinstance(think, str) else None,
        "logprobs": request.logprobs,
        "top_logprobs": request.top_logprobs,
        **{name: getattr(options, name) for name, here in NAMES.items() if here == f"options.{name}"},
        "seed": None if options.seed == RANDOM else options.seed,
    }


def _tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    return None if tools is None else [{"type": "function", **tool} for tool in tools]


def _messages(given: Sequence[Any]) -> list[dict[str, Any]]:
    """Returns a chat's messages. Calls without an id are numbered, and results answer them in turn."""
    messages, calls, open_calls = list[dict[str, Any]](), 0, list[tuple[str, str]]()
    for i, one in enumerate(given):
        said = parsed_as(OllamaMessage, one, f"messages.{i}.", ONLY_IN_MESSAGE)
        message: dict[str, Any] = {"role": said.role, "content": said.content, "reasoning_content": said.thinking}
        for call in said.tool_calls or ():
            calls += 1
            made = call.id or f"call{calls:05d}"  # other lengths some templates refuse
            open_calls.append((made, call.function.name))
            function = {
                "name": call.function.name,
                "arguments": json.dumps(call.function.arguments, ensure_ascii=False),
            }
            message.setdefault("tool_calls", []).append({"id": made, "type": "function", "function": function})
        if said.role == "tool":
            found = [call for call in open_calls if said.tool_name in (None, call[1])]
            answered = said.tool_call_id or next((id for id, _ in found), None)
            if answered is None:
                raise invalid(f"messages.{i} answers no call; expected one before it", f"messages.{i}.tool_name")
            open_calls = [call for call in open_calls if call[0] != answered]
            message |= {"tool_call_id": answered, "name": said.tool_name}
        messages.append(message)
    return messages


# ---- paths


def _routes(service: ChatPath) -> list[Route]:
    async def answer(request: Request, asked: str, read: Read, build: type[OllamaChat]) -> Response:
        """Answers. Clients load or unload a model by a request without what is `asked`."""
        values = json_object(await request.body())
        if values.get(asked) or values.get("suffix") or not isinstance(values.get("model"), str):
            return await service.answer(request, read, build)
        session, _ = service.model_of(service.known(values["model"]))
        if not re.fullmatch(UNLOADS, str(values.get("keep_alive"))):
            return JSONResponse(build.loaded(values["model"], "load"))
        try:
            await asyncio.to_thread(session.unload)  # which waits where the model is being loaded
        except ConfigError as error:  # it answers
            raise ApiError(409, str(error), "unsupported_value", "keep_alive") from None
        return JSONResponse(build.loaded(values["model"], "unload"))

    async def tags(request: Request) -> Response:
        return JSONResponse({"models": [_listed(service, name) for name in service.models]})

    async def show(request: Request) -> Response:
        asked = parsed_as(OllamaModelRequest, json_object(await request.body()), fixed=ONLY_IN_SHOW)
        name = asked.model or asked.name
        if name is None:
            raise invalid("no model; expected the field", "model", "missing_field")
        known = service.known(name)
        session, _ = service.model_of(known)
        listed = _listed(service, known)
        family = session.manifest.base.model_type
        about = {"general.architecture": family, f"{family}.context_length": session.context_length}
        thinks = ["thinking"] if service.readers[known].thought is not None else []
        tools = ["tools"] if session.template is not None and "tools" in session.template else []
        return JSONResponse(
            {name: listed[name] for name in ("details", "modified_at")}
            | {"model_info": about, "capabilities": ["completion", *tools, *thinks]}
            | {"modelfile": "", "parameters": "", "template": session.template or ""}
        )

    async def loaded(request: Request) -> Response:
        shown = ((_listed(service, name), session) for name, (session, _) in service.models.items() if session.loaded)
        kept = {"expires_at": NEVER, "size_vram": 0}  # the server's own options say how long
        return JSONResponse({"models": [one | kept | {"context_length": by.context_length} for one, by in shown]})

    async def embed(request: Request) -> Response:
        found = f"{request.url.path} is not supported; expected /v1/embeddings for vectors of texts"
        raise ApiError(501, found, "unsupported_value")

    async def version(request: Request) -> Response:
        return JSONResponse({"version": SPOKEN})

    return [
        Route("/api/chat", partial(answer, asked="messages", read=read_chat, build=OllamaChat), methods=["POST"]),
        Route("/api/generate", partial(answer, asked="prompt", read=read_generate, build=OllamaText), methods=["POST"]),
        Route("/api/show", show, methods=["POST"]),
        Route("/api/embed", embed, methods=["POST"]),
        Route("/api/embeddings", embed, methods=["POST"]),
        Route("/api/ps", loaded),
        Route("/api/tags", tags),
        Route("/api/version", version),
    ]


def _listed(service: ChatPath, name: str) -> dict[str, Any]:
    manifest, tagged = service.models[name][0].manifest, name if ":" in name else name + LATEST
    family = manifest.base.model_type
    details = {"parent_model": "", "format": "streamspec", "family": family, "families": [family], "parameter_size": ""}
    return {
        "name": tagged,
        "model": tagged,
        "modified_at": moment(service.created),
        "size": manifest.data_bytes,
        "digest": hashlib.sha256(manifest.to_json().encode()).hexdigest(),
        "details": details | {"quantization_level": manifest.precision},
    }


def _error(error: ApiError) -> dict[str, Any]:
    return {"error": error.message}


OLLAMA = Form("/api/", _error, _routes)
