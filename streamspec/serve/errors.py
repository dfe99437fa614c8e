"""Builds errors in OpenAI's shape, also from the runtime's errors.

`{"error": {"message", "type", "param", "code"}}` with a status.
"""

from __future__ import annotations

from typing import Any

from streamspec.errors import ConfigError, ContextOverflow, DataError, ResourceError, StreamspecError, one_line

INVALID, SERVER = "invalid_request_error", "server_error"


class ApiError(Exception):
    """An answer with an error: HTTP `status`, one line of `message`, the `param` at fault and a stable `code`."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str,
        param: str | None = None,
        kind: str = INVALID,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param, self.kind = status, code, param, kind
        self.message = one_line(message)
        self.headers = {"www-authenticate": "Bearer"} if status == 401 else {}
        if retry_after is not None:
            self.headers["retry-after"] = str(retry_after)

    @property
    def body(self) -> dict[str, Any]:
        """Returns the JSON object that OpenAI's clients expect of an error."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def invalid(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """A request that is wrong in its field `param` (400)."""
    return ApiError(400, message, code, param)


def too_many(message: str) -> ApiError:
    """A request for which the queue has no room (429)."""
    return ApiError(429, message, "queue_full", kind="rate_limit_error", retry_after=1)


def closing() -> ApiError:
    """A request to a server that is shutting down (503)."""
    return ApiError(503, "the server is shutting down", "shutting_down", kind=SERVER, retry_after=5)


def out_of_time(seconds: float, what: str = "no session became free") -> ApiError:
    """A request that waited `seconds` in vain, by default for a session (503)."""
    return ApiError(
        503,
        f"{what} within {seconds:g} s; expected an answer in time; ask again later",
        "timeout",
        kind=SERVER,
        retry_after=1,
    )


def ended_by_time(seconds: float) -> ApiError:
    """A request that took more than `seconds` and has nothing to show for it (503)."""
    return ApiError(
        503, f"no answer within {seconds:g} s; expected one; ask for fewer texts, or later", "timeout", kind=SERVER
    )


def from_runtime(error: BaseException, field: str | None = None) -> ApiError:
    """Converts an error of the runtime: the request's fault is a 400 with the runtime's own line, anything else a 500
    without details. `field`: where the prompt stood.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ContextOverflow):
        return ApiError(400, str(error), "context_length_exceeded", field)
    if isinstance(error, DataError):
        return invalid(str(error), field)
    if isinstance(error, ConfigError):
        return ApiError(400, str(error), error.code)
    if isinstance(error, ResourceError):
        return ApiError(503, str(error), error.code, kind=SERVER, retry_after=5)
    if isinstance(error, StreamspecError):
        return ApiError(500, str(error), error.code, kind=SERVER)
    return ApiError(500, "an error inside the server; see its log", "internal_error", kind=SERVER)
