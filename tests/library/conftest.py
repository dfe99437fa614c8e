"""A tiny bundle, a swappable one with an adapter, a library of its own, and a server that breaks off."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.support.tiny_bundles import tiny_bundle

    return tiny_bundle(tmp_path_factory.mktemp("plain"), kind="chat")


@pytest.fixture(scope="session")
def swappable_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from streamspec.export import export_swappable
    from tests.support.tiny_bundles import tiny_adapter, tiny_base

    folder = tmp_path_factory.mktemp("swappable")
    base = tiny_base(folder / "base")
    export_swappable(base, [tiny_adapter(folder / "sql", base)], folder / "bundle", "fp32", progress=lambda line: None)
    return folder / "bundle"


@pytest.fixture(autouse=True)
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STREAMSPEC_BUNDLES", str(tmp_path / "library"))
    monkeypatch.setenv("STREAMSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("streamspec.library.download.WAIT", 0.0)
    return tmp_path / "library"


@dataclass
class Served:
    """What the server has, and how it behaves. `breaks`: bytes after which the next answers end, first to last; `tags`:
    their ETags, where each has its own."""

    content: bytes = b""
    tag: str | None = '"one"'
    breaks: list[int] = field(default_factory=list)
    tags: list[str] = field(default_factory=list)
    status: int = 0
    redirect: str = ""
    length: bool = True
    url: str = ""
    asked: list[str | None] = field(default_factory=list)  # Range of each request


@pytest.fixture
def served() -> Iterator[Served]:
    state = Served()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            wanted = self.headers.get("Range")
            state.asked.append(wanted)
            if state.status or state.redirect:
                self.send_response(state.status or 302)
                self.send_header("Location", state.redirect)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            state.tag = state.tags.pop(0) if state.tags else state.tag
            at = int(wanted[6:-1]) if wanted and self.headers.get("If-Range") == state.tag else 0
            self.send_response(206 if at else 200)
            if at:
                self.send_header("Content-Range", f"bytes {at}-{len(state.content) - 1}/{len(state.content)}")
            if state.length:
                self.send_header("Content-Length", str(len(state.content) - at))
            if state.tag:
                self.send_header("ETag", state.tag)
            self.end_headers()
            most = state.breaks.pop(0) if state.breaks else len(state.content)
            self.wfile.write(state.content[at : at + most])

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_port}/models/tiny.tar"
    yield state
    server.shutdown()
    server.server_close()
