"""The programs of the page on other languages, run as they stand on it, over a tiny bundle."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from streamspec.runtime import load
from tests.serve.conftest import TOKEN, until
from tests.support.tiny_bundles import tiny_bundle

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "guides" / "other-languages.md").read_text(encoding="utf-8")
NODE = shutil.which("node")
runs_javascript = pytest.mark.skipif(NODE is None or os.name != "posix", reason="no Node.js, or no #! scripts")


def program(language: str) -> str:
    """The first block of the page in a language."""
    found = re.search(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    assert found is not None
    return found[1]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_bundle(tmp_path_factory.mktemp("languages"), kind="chat")


@pytest.fixture
def here(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with `bundle` in it and `streamspec` on the path."""
    (tmp_path / "bundle").symlink_to(bundle)
    command = tmp_path / "streamspec"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m streamspec "$@" --threads 1\n')
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("STREAMSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("STREAMSPEC_TOKEN", TOKEN)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def node(source: str) -> subprocess.CompletedProcess[str]:
    Path("ask.mjs").write_text(source)
    return subprocess.run([str(NODE), "ask.mjs"], capture_output=True, text=True, timeout=60, check=False)


def refused(url: str) -> bool:
    """Whether nothing listens there any more."""
    port = int(url.split(":")[2].removesuffix("/v1"))
    with suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port), 1):
        return False
    return True


@runs_javascript
def test_javascript_starts_the_server_streams_an_answer_and_ends_it(here: Path) -> None:
    done = node(program("javascript") + "console.error(server.url);\n")
    assert done.returncode == 0 and re.fullmatch(r"http://127\.0\.0\.1:\d+/v1\n", done.stderr), done.stderr
    question = [{"role": "user", "content": "Name three seas."}]
    assert done.stdout == load(here / "bundle", threads=1).generate(question, max_new_tokens=1024).text != ""
    until(lambda: refused(done.stderr.strip()))


@runs_javascript
@pytest.mark.usefixtures("here")
def test_javascript_says_that_the_server_did_not_start() -> None:
    done = node(program("javascript").replace('startServer("bundle")', 'startServer("nowhere")'))
    assert done.returncode == 1 and "the server has ended" in done.stderr and "nowhere" in done.stderr


def test_the_server_that_is_shipped_ends_when_its_input_does(here: Path) -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    (here / "server.py").write_text(program("python"))  # applications start it from their own folder
    with subprocess.Popen([sys.executable, here / "server.py"], text=True, cwd=here.parent, **pipes) as served:
        try:
            assert served.stdin is not None and served.stdout is not None
            url = served.stdout.readline().removesuffix("\n")
            models = httpx.get(f"{url}/models", headers={"authorization": f"Bearer {TOKEN}"}).json()
            assert [model["id"] for model in models["data"]] == ["local"] and served.poll() is None
            served.stdin.close()
            assert served.wait(10) == 0
        finally:
            served.kill()
