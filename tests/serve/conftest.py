"""A server in a thread over fake sessions, and clients of it."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest

from streamspec.serve import Limits, Server
from tests.support.fake_serve_session import FakeServeSession, Shared

TOKEN = "a-token-of-the-tests"
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


class Running:
    """A server that runs in a thread. `shared` steers its fake sessions."""

    def __init__(self, session: Any, shared: Shared | None = None, **options: Any) -> None:
        self.shared = shared
        self._client: openai.OpenAI | None = None
        self.server = Server(session, **{"port": 0, "token": TOKEN, "name": "base"} | options)
        self.url = self.server.url
        self.thread = threading.Thread(target=self.server.run)
        self.thread.start()
        until(lambda: self.server.ready or not self.thread.is_alive())
        assert self.server.ready

    def client(self, **options: Any) -> openai.OpenAI:
        if not options:
            self._client = self._client or self.client(timeout=20)
            return self._client
        return openai.OpenAI(base_url=f"{self.url}/v1", **{"api_key": TOKEN, "max_retries": 0, "timeout": 20} | options)

    def http(self, **headers: str) -> httpx.Client:
        return httpx.Client(base_url=self.url, headers={"authorization": f"Bearer {TOKEN}"} | headers, timeout=20)

    def stop(self) -> None:
        self.server.stop()
        self.thread.join(5)
        assert not self.thread.is_alive()


@pytest.fixture
def running() -> Iterator[Callable[..., Running]]:
    """`running(step=0.01, limits=Limits(...), ...)`: a server of fake sessions, whose model says the prompt's last word
    again and again.
    """
    made: list[Running] = []

    def make(step: float = 0.0, still: bool = False, session: Any = None, **options: Any) -> Running:
        shared = Shared(step)
        if not still:
            shared.gate.set()
        given = {
            "limits": Limits(**options.pop("limits", {})),
            "adapters": {"alpha": "alpha", "beta": "beta"},
        } | options
        made.append(Running(session or FakeServeSession(shared), shared, **given))
        return made[-1]

    yield make
    for server in made:
        if server.shared is not None:
            server.shared.gate.set()
        server.stop()


def until(true: Callable[[], Any], seconds: float = 5.0) -> None:
    """Waits for something to become true, or fails."""
    ends = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < ends, "it did not come"
        time.sleep(0.005)


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Headless, with a profile of its own."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def visit(browser: Any) -> Iterator[Callable[..., Any]]:
    """`visit(server, token=..., bypass_csp=...)`: its page. At the end no page may have broken its policy or thrown
    anything.
    """
    contexts, wrong = [], []

    def open_page(server: Running, token: str | None = TOKEN, **options: Any) -> Any:
        context = browser.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(10_000)
        page.on(
            "console",
            lambda said: (
                wrong.append(said.text) if said.type == "error" and "Failed to load resource" not in said.text else None
            ),
        )
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.goto(f"{server.url}/" + ("" if token is None else f"#token={token}"))
        return page

    open_page.wrong = wrong  # type: ignore[attr-defined]
    yield open_page
    for context in contexts:
        context.close()
    assert wrong == []
