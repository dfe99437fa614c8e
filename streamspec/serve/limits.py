"""Bounds the cost of a request: every limit of the server in one place."""

from __future__ import annotations

from dataclasses import dataclass, fields

from streamspec.errors import ConfigError

LONGEST = 1e6  # seconds; beyond some 1e9 timers fail


@dataclass(frozen=True)
class Limits:
    """Limits of one server; docs/guides/serve.md lists them. All at least 1, `queue` also 0.

    Raises ConfigError for any other value, and for seconds above `LONGEST`.
    """

    sessions: int = 4  # generations at once, each with a cache of its own
    queue: int = 32  # requests that wait for one of them
    timeout: float = 300.0  # seconds from a request's arrival to its end
    max_tokens: int = 4096  # that one answer gets, however many it asks for
    default_tokens: int = 1024  # where a request says nothing
    body: int = 1 << 20  # bytes of a request
    header: int = 16 << 10  # bytes of its head
    choices: int = 8  # answers of one request
    inputs: int = 256  # texts of one request for embeddings, prompts of one for completions
    messages: int = 4096
    text: int = 1 << 19  # characters of all messages or of a prompt
    stops: int = 32  # OpenAI's is 4: editors send more for code that they fill in
    stop_length: int = 256  # characters
    grammar: int = 16 << 10  # bytes of a schema as JSON, characters of a regular expression or of all choices
    connections: int = 128
    head_seconds: float = 10.0  # to send a request's head
    body_seconds: float = 20.0  # and its body
    read_seconds: float = 20.0  # that a reader may stand still with the buffers full

    def __post_init__(self) -> None:
        for field in fields(self):
            value, minimum = getattr(self, field.name), 0 if field.name == "queue" else 1
            if field.type == "float":
                if not (isinstance(value, (int, float)) and 0 < value <= LONGEST):
                    raise ConfigError(
                        f"{field.name} {value!r}", f"seconds, above 0 and at most {LONGEST:g}", f"correct {field.name}"
                    )
            elif type(value) is not int or value < minimum:
                raise ConfigError(
                    f"{field.name} {value!r}", f"a whole number of at least {minimum}", f"correct {field.name}"
                )


DEFAULT = Limits()
