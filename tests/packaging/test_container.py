"""The container. Without an engine: its file's instructions, what they build, and the entry point as a process. With
one, where STREAMSPEC_TEST_CONTAINER is set, as in CI: the image, built and talked to. Covers container/entrypoint.py.
"""

from __future__ import annotations

import fnmatch
import http.client
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.packaging.conftest import ROOT

TOKEN = "0123456789-of-the-operator"
IMAGE = "streamspec-test"
# The entry point of a container whose own address is 127.0.0.2.
ENTRY = """
import runpy, sys
entry = runpy.run_path(sys.argv[1])
entry["main"].__globals__["own_addresses"] = lambda: ["127.0.0.2"]
entry["main"](sys.argv[2:])
"""
ENTRYPOINT = ROOT / "container" / "entrypoint.py"


def instructions() -> list[tuple[str, str]]:
    """Names and arguments, in order."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Containerfile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line.strip()]
    return [(name, rest.strip()) for name, _, rest in (line.partition(" ") for line in lines)]


def given(name: str) -> list[str]:
    return [rest for one, rest in instructions() if one == name]


def copied() -> list[str]:
    """What COPY takes from the checkout."""
    return [source for rest in given("COPY") if "--from" not in rest for source in shlex.split(rest)[:-1]]


def project() -> dict:  # type: ignore[type-arg]
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_the_file_has_the_instructions_that_are_meant_and_no_others() -> None:
    known = {"FROM", "RUN", "WORKDIR", "COPY", "ENV", "USER", "VOLUME", "ENTRYPOINT", "CMD"}
    assert {name for name, _ in instructions()} <= known  # no EXPOSE: nothing is published by default; no ADD
    first, second = given("FROM")
    assert first == f"{second} AS build" and given("COPY")[-2].startswith("--from=build /opt/streamspec ")
    version = re.search(r"/python:(\d+)\.(\d+)-slim-\w+$", second)
    least = re.search(r"(\d+)\.(\d+)", project()["project"]["requires-python"])
    assert version and least and [*map(int, version.groups())] >= [*map(int, least.groups())]
    assert given("USER") == ["10001:0"] and instructions()[-5][0] == "USER"
    assert not [one for one in given("ENV") if re.search("TOKEN|PASSWORD|PUBLISH", one)]
    for rest in given("ENTRYPOINT") + given("CMD"):
        assert all(isinstance(part, str) for part in json.loads(rest))  # without a shell: signals arrive
    for script in given("RUN"):
        subprocess.run(["sh", "-n", "-c", script], check=True)


def test_what_is_copied_is_there_and_not_left_out_of_the_context() -> None:
    rules = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    assert rules[0] == "*" and "**/*.so" in rules  # a library built here may not run there
    taken = [rule[1:] for rule in rules if rule.startswith("!")]
    for source in copied():
        assert (ROOT / source).exists() and any(fnmatch.fnmatch(source, f"{one}*") for one in taken), source
    assert all(any(source.startswith(one) for source in copied()) for one in taken)
    installed = re.search(r'"\.\[([\w,]+)\]"', " ".join(given("RUN")))
    assert installed and set(installed[1].split(",")) <= set(project()["project"]["optional-dependencies"])
    assert not {"train", "export", "all"} & set(installed[1].split(","))  # these bring PyTorch


def test_the_package_builds_from_what_is_copied(wheel: Path, tmp_path: Path) -> None:
    ignored = shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info")
    for source in copied():
        target = tmp_path / "source" / source
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, target, ignore=ignored)
        else:
            shutil.copy(ROOT / source, target)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--disable-pip-version-check", "--no-deps"]
    command += ["--no-build-isolation", "-w", str(tmp_path), str(tmp_path / "source")]
    subprocess.run(command, check=True, env=os.environ | {"STREAMSPEC_NATIVE": "0"})
    [built] = tmp_path.glob("*.whl")
    there, here = ({n for n in zipfile.ZipFile(one).namelist() if "dist-info" not in n} for one in (wheel, built))
    assert here == {name for name in there if "streamspec_native." not in name}


# ---- the entry point


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def ask(
    address: str, port: int, path: str, token: str = "", host: str = "", body: dict[str, object] | None = None
) -> int:
    """Status of an answer; 0 where nobody answers."""
    connection = http.client.HTTPConnection(address, port, timeout=30)
    headers = {"Host": host or f"127.0.0.1:{port}", "Content-Type": "application/json"}
    try:
        connection.request(
            "POST" if body else "GET",
            path,
            json.dumps(body) if body else None,
            headers | ({"Authorization": f"Bearer {token}"} if token else {}),
        )
        answer = connection.getresponse()
        answer.read()
        return answer.status
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        connection.close()


def wait_for(done: Callable[[], bool], seconds: float = 90) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end
        time.sleep(0.1)


def entry(*arguments: str | Path, **variables: str) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("STREAMSPEC_")}
    return subprocess.Popen(
        [sys.executable, "-c", ENTRY, str(ENTRYPOINT), *map(str, arguments)],
        env=environment | {"PYTHONPATH": str(ROOT)} | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_without_publishing_the_command_line_runs_as_it_is() -> None:
    with entry("--version", STREAMSPEC_PUBLISH="1") as process:
        output, _ = process.communicate()
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*\n", output) and process.returncode == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "without a token"),
        (["--token", TOKEN, "--port", "0"], "--port 0"),
        (["--token-file", "t", "--host=::1"], "::1"),
        (["--token", TOKEN, "--port", "70000"], "--port 70000; expected 1..65535"),
        (["--token", TOKEN, "--port", "abc"], "--port: invalid int value: 'abc'"),
    ],
)
def test_nothing_is_published_without_a_token_of_the_operators(arguments: list[str], says: str) -> None:
    with entry("serve", "bundle", *arguments, STREAMSPEC_PUBLISH="1") as process:
        _, errors = process.communicate()
    assert process.returncode == 2 and says in errors and errors.count("\n") == 1


def test_a_port_in_use_is_said_in_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.2", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        with entry("serve", "bundle", "--port", port, STREAMSPEC_PUBLISH="1", STREAMSPEC_TOKEN=TOKEN) as process:
            _, errors = process.communicate()
    assert process.returncode == 2 and f"port {port} at 127.0.0.2: " in errors and errors.count("\n") == 1


@contextmanager
def serving(bundle: Path, port: int, **variables: str) -> Iterator[subprocess.Popen[str]]:
    process = entry("serve", bundle, "--port", str(port), "--threads", "1", STREAMSPEC_TOKEN=TOKEN, **variables)
    try:
        wait_for(lambda: process.poll() is not None or ask("127.0.0.1", port, "/health") == 200)
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_published_server_answers_those_who_have_the_token(chat_bundle: Path, tmp_path: Path) -> None:
    pytest.importorskip("uvicorn")
    if sys.platform != "linux":
        pytest.skip("only Linux has 127.0.0.2 without further ado")
    port, question = free_port(), {"model": "bundle", "messages": [{"role": "user", "content": "abc"}], "max_tokens": 4}
    with serving(chat_bundle, port, STREAMSPEC_PUBLISH="1", STREAMSPEC_CACHE=str(tmp_path)) as process:
        for address in ("127.0.0.2", "127.0.0.1"):
            assert ask(address, port, "/v1/chat/completions", TOKEN, body=question) == 200
            assert ask(address, port, "/v1/chat/completions", "another", body=question) == 401
            assert ask(address, port, "/v1/models", TOKEN, host=f"192.168.1.7:{port}") == 403  # not this machine's
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0 and ask("127.0.0.2", port, "/health") == 0


def test_without_publishing_the_own_address_is_silent(chat_bundle: Path, tmp_path: Path) -> None:
    pytest.importorskip("uvicorn")
    port = free_port()
    with serving(chat_bundle, port, STREAMSPEC_CACHE=str(tmp_path)):
        assert ask("127.0.0.1", port, "/v1/models", TOKEN) == 200 and ask("127.0.0.2", port, "/health") == 0


# ---- an engine


def docker(*arguments: str | Path, check: bool = True) -> str:
    engine = shutil.which("docker") or shutil.which("podman") or "docker"
    done = subprocess.run([engine, *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0 or not check, done.stderr[-3000:]
    return done.stdout.strip()


@pytest.mark.skipif(os.environ.get("STREAMSPEC_TEST_CONTAINER") != "1", reason="STREAMSPEC_TEST_CONTAINER is not 1")
def test_the_image_is_built_and_serves_as_no_root(chat_bundle: Path) -> None:
    docker("build", "-f", ROOT / "Containerfile", "-t", IMAGE, ROOT)
    assert docker("run", "--rm", "--entrypoint", "id", IMAGE, "-u") == "10001"
    assert "native operators: yes" in docker("run", "--rm", "--user", "12345", "--read-only", IMAGE, "doctor")
    subprocess.run(["chmod", "-R", "a+rX", str(chat_bundle)], check=True)
    mount = f"{chat_bundle}:/bundle:ro"
    assert docker("run", "--rm", "-v", mount, IMAGE, "generate", "/bundle", "abc", "--max-new-tokens", "4")
    port = free_port()
    for publish in ("1", "0"):
        name = docker(
            *("run", "-d", "-v", mount, "-p", f"127.0.0.1:{port}:{port}", "-e", f"STREAMSPEC_PUBLISH={publish}"),
            *("-e", f"STREAMSPEC_TOKEN={TOKEN}", IMAGE, "serve", "/bundle", "--port", str(port)),
        )
        try:
            wait_for(lambda name=name: f":{port}/v1" in docker("logs", name))  # type: ignore[misc]
            expected = (200, 401) if publish == "1" else (0, 0)
            assert (ask("127.0.0.1", port, "/v1/models", TOKEN), ask("127.0.0.1", port, "/v1/models")) == expected
            docker("stop", name)
            assert docker("inspect", "-f", "{{.State.ExitCode}}", name) in ("0", "143")  # 143: by SIGTERM
        finally:
            docker("rm", "-f", name, check=False)
