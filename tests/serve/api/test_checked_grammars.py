"""A request's grammar is checked once, within the request's time, and only as long as its client is there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

from streamspec.errors import ConfigError
from streamspec.runtime import Grammar
from streamspec.serve.tools.checked_grammars import KEPT, CheckedGrammars
from tests.serve.conftest import Running, until, user

Make = Callable[..., Running]
SCHEMA: Any = {"type": "object", "properties": {"b": {"type": "null"}, "a": {"type": "integer"}}}


class Checks:
    """Stands in for `Grammar.json_schema`, and waits until it is let to."""

    def __init__(self) -> None:
        self.let, self.begun, self.real = threading.Event(), 0, Grammar.json_schema

    def __call__(self, schema: Any) -> Grammar:
        self.begun += 1
        assert self.let.wait(20)
        return self.real(schema)


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Checks]:
    made = Checks()
    monkeypatch.setattr(Grammar, "json_schema", made)
    yield made
    made.let.set()


def ask(client: openai.OpenAI, schema: Any = SCHEMA) -> Any:
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return client.chat.completions.create(messages=user("a"), model="base", max_tokens=4, response_format=form)


def metric(server: Running, name: str) -> str:
    lines = server.http().get("/metrics").text.splitlines()
    (value,) = (line.rpartition(" ")[2] for line in lines if line.startswith(f"streamspec_{name} "))
    return value


def test_what_was_checked_or_refused_is_known_and_the_oldest_is_forgotten(checks: Checks) -> None:
    checks.let.set()
    grammars = CheckedGrammars()
    assert grammars.make("json_schema", SCHEMA) is grammars.make("json_schema", SCHEMA)
    turned = {"type": "object", "properties": dict(reversed(SCHEMA["properties"].items()))}
    assert grammars.make("json_schema", turned) != grammars.make("json_schema", SCHEMA)  # order decides
    for _ in range(2):
        with pytest.raises(ConfigError, match="nonsense"):
            grammars.make("json_schema", {"type": "nonsense"})
    assert (checks.begun, grammars.passed, grammars.refused, grammars.kept) == (3, 2, 1, 3)
    for i in range(KEPT - 1):
        grammars.make("choice", [str(i)])
    grammars.make("json_schema", SCHEMA)
    assert checks.begun == 4 and grammars.waiting == 0


def test_a_schema_that_comes_again_is_not_checked_again(running: Make, checks: Checks) -> None:
    checks.let.set()
    server = running()
    for _ in range(3):
        ask(server.client())
    with pytest.raises(openai.BadRequestError):
        ask(server.client(), {"type": "nonsense"})
    assert checks.begun == 2
    found = [metric(server, f'grammar_checks_total{{result="{name}"}}') for name in ("passed", "refused", "kept")]
    assert found == ["1", "1", "2"]


def test_a_client_that_leaves_while_its_schema_is_checked_is_let_go(running: Make, checks: Checks) -> None:
    server = running()
    with pytest.raises(openai.APITimeoutError):
        ask(server.client(timeout=0.5))
    until(lambda: server.server.pool.counts.cancelled == 1)
    assert metric(server, 'waiting_grammars{for="check"}') == "1" and not server.server.pool.requests
    checks.let.set()
    until(lambda: metric(server, 'waiting_grammars{for="check"}') == "0")
    assert server.shared is not None and server.shared.asked == []


def test_a_schema_whose_check_takes_too_long_ends_in_time(running: Make, checks: Checks) -> None:
    server = running(limits={"timeout": 0.3})
    with pytest.raises(openai.InternalServerError, match=r"not read and its grammar checked within 0\.3 s") as caught:
        ask(server.client())
    assert caught.value.status_code == 503 and caught.value.code == "timeout"
    assert server.server.pool.counts.cancelled == 1
