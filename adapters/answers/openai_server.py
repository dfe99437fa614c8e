"""Answers of a server that speaks OpenAI's `/completions`: vLLM, llama.cpp, `streamspec serve`. Standard library only.

Prompts go as token ids. Where the server returns ids (`return_token_ids` of vLLM) they are taken, else the text is
tokenised again, and answers are left out whose tokens do not give the same text, or are not as many as the server
counted: special tokens are not in its text.
"""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from http.client import HTTPException
from typing import Any
from urllib.parse import urldefrag, urlsplit

from streamspec.adapters.answers.request import AnswerRequest
from streamspec.errors import ConfigError
from streamspec.json_fields import parse_json

KEY = "STREAMSPEC_TOKEN"  # environment variable: the server's API key, as of `streamspec serve`
PARALLEL = 8  # requests under way at once
# What the API's own request leaves open, last what fewest servers know: nothing may come from a server's own settings.
FIELDS: tuple[dict[str, Any], ...] = (
    {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "top_k": 0, "min_p": 0.0},
    {"return_token_ids": True},
)
LONGEST = 300.0  # seconds that one answer may take
SOON = 5.0  # seconds in which the list of models has to come
TRIES, PAUSE = 4, 0.5  # of a request that a busy server refuses; seconds before the second, then twice as long each
BUSY = (429, 500, 502, 503, 504)
MOST_BYTES = 1 << 24  # of a response


def is_server(place: str) -> bool:
    """Tells a server's address from a folder."""
    return place.startswith(("http://", "https://"))


class OpenAiServer:
    """A server at `url`, such as `http://127.0.0.1:8080/v1`, with `#MODEL` where it serves several.

    Raises ConfigError where none answers there, or not in OpenAI's form.
    """

    parallel = PARALLEL

    def __init__(self, url: str, tokenizer: Any = None, ends: Sequence[int] = ()) -> None:
        """`tokenizer`: the target's, for servers that return text, and the tokens that end its answers; without them
        this only looks whether the server is there.
        """
        self.url, self.model = urldefrag(url)
        self.url, self.tokenizer, self.ends, self.fields = self.url.rstrip("/"), tokenizer, list(ends), [*FIELDS]
        parts = urlsplit(self.url)
        if parts.username or parts.password:
            raise ConfigError("--answers-from with a password in its address", f"the key in {KEY}", "leave it out")
        models = [str(model["id"]) for model in self._field(self._call("/models", None, SOON), "data")]
        if not self.model and len(models) != 1:
            raise ConfigError(
                f"--answers-from {self.url} serves {', '.join(models[:4]) or 'no model'}",
                "one model, or the name of one",
                f"add it: {self.url}#NAME",
            )
        self.model = self.model or models[0]

    def made_by(self) -> dict[str, str]:
        """The model by the server's name for it; where the server is does not matter."""
        return {"answers_from": f"server {self.model}"}

    def answer(self, request: AnswerRequest) -> list[int] | None:
        """The answer's token ids; None where they cannot be told from its text."""
        body: dict[str, Any] = {"model": self.model, "prompt": request.prompt, "max_tokens": request.max_new_tokens}
        body["temperature"] = request.temperature
        if request.temperature:
            body |= {"top_p": request.top_p, "seed": request.seed}
        reply = self._completion(body)
        choice = self._field(reply, "choices")[0]
        ended = choice.get("finish_reason") == "stop"
        ids = choice.get("token_ids")
        if ids is None:
            text = str(self._field(choice, "text"))
            ids = list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
            same = self.tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text
            counted = (reply.get("usage") or {}).get("completion_tokens")
            if not same or counted not in (None, len(ids), len(ids) + ended):
                return None
        complete = not ended or (ids and ids[-1] in self.ends)
        return list(ids) if complete else [*ids, *self.ends[:1]]

    def _completion(self, body: dict[str, Any]) -> Any:
        """The server's reply, with as many of `FIELDS` as it knows."""
        while True:
            fields = self.fields
            more = {name: value for each in fields for name, value in each.items()}
            try:
                return self._call("/completions", more | body, LONGEST)
            except _BadRequest as error:  # a field that it does not know, or something else is wrong
                if not fields:
                    raise self._refusal(str(error)) from None
                self.fields = min(self.fields, fields[:-1], key=len)  # another thread may have learnt as much

    def close(self) -> None:
        """Does nothing: the server drops requests whose connection ends."""

    def _call(self, path: str, body: dict[str, Any] | None, timeout: float) -> Any:
        headers = {"Content-Type": "application/json"}
        if os.environ.get(KEY):
            headers["Authorization"] = f"Bearer {os.environ[KEY]}"
        data = None if body is None else json.dumps(body).encode()
        for attempt in range(TRIES):
            try:
                request = urllib.request.Request(self.url + path, data, headers)
                with urllib.request.urlopen(request, timeout=timeout) as response:
                    content = response.read(MOST_BYTES)
                return parse_json(content, f"--answers-from {self.url}", ConfigError, "check the address")
            except urllib.error.HTTPError as error:
                reason = f"{error.code} {_message(error.read(MOST_BYTES))}"
                if error.code in (400, 422):
                    raise _BadRequest(reason) from None
                if error.code not in BUSY or attempt + 1 == TRIES:
                    raise self._refusal(reason) from None
            except (OSError, ValueError, HTTPException) as error:
                if body is None or attempt + 1 == TRIES:
                    raise self._refusal(str(getattr(error, "reason", error))) from None
            time.sleep(PAUSE * 2**attempt)
        raise AssertionError("the last attempt returns or raises")

    def _field(self, value: Any, name: str) -> Any:
        found = value.get(name) if isinstance(value, dict) else None
        if found is None or (name == "choices" and not found):
            raise self._refusal(f"a reply without {name}")
        return found

    def _refusal(self, reason: str) -> ConfigError:
        return ConfigError(
            f"--answers-from {self.url}: {reason}",
            "an OpenAI-compatible server",
            "start it, or check the address; it ends in /v1 as a rule",
        )


class _BadRequest(Exception):
    """The server does not take a request as it is."""


def _message(body: bytes) -> str:
    """The words of an error's body."""
    try:
        error = json.loads(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, LookupError, TypeError):
        return body[:200].decode("utf-8", "replace")
