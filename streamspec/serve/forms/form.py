"""Defines a form of the API beside OpenAI's: its routes, and how it spells errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from streamspec.runtime import Session
from streamspec.serve.api.answer import Build, Read
from streamspec.serve.errors import ApiError

LATEST = ":latest"  # the tag of names without one, in Ollama's lists


class ChatPath(Protocol):
    """What forms use of the service."""

    @property
    def models(self) -> Mapping[str, tuple[Session, str | None]]:
        """By name, a bundle's session and its adapter."""

    @property
    def readers(self) -> Mapping[str, Session]:
        """By name, what encodes prompts for a model, whatever adapter its session has."""

    @property
    def created(self) -> int:
        """When it began, in seconds since 1970."""

    def known(self, model: str) -> str:
        """Returns a model's name without that tag."""

    def model_of(self, model: str) -> tuple[Session, str | None]:
        """Returns the session and the adapter of a model. Raises ApiError for an unknown name."""

    async def answer(self, request: Request, read: Read, build: Build) -> Response:
        """Answers a request that `read` parses, in the form of `build`. Raises ApiError."""

    async def count(self, request: Request, read: Read) -> int:
        """Counts the tokens of the prompt of a request. Raises ApiError."""


@dataclass(frozen=True)
class Form:
    """`paths`: what its paths begin with; `error`: spells an error's body; `routes`: makes them over a service."""

    paths: str
    error: Callable[[ApiError], dict[str, Any]]
    routes: Callable[[ChatPath], Sequence[Route]]
