"""Answers of a bundle and of servers are the target's own, token for token, are compared with it, and end in time."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from streamspec import load
from streamspec.adapters.answers import openai_server
from streamspec.adapters.answers.completion_file import CompletionFile
from streamspec.adapters.answers.openai_server import OpenAiServer
from streamspec.adapters.answers.request import AnswerJob, AnswerRequest
from streamspec.adapters.answers.self_distillation import regenerate
from streamspec.adapters.answers.source import ask, check_answers_from, equal_tokens, open_source
from streamspec.adapters.runs.budget import ANSWERS, Deadline, Speeds
from streamspec.adapters.train import train
from streamspec.adapters.training.config import TrainConfig
from streamspec.errors import BundleError, ConfigError, DataError
from streamspec.serve import Server
from tests.support.tiny_bundles import tiny_bundle
from tests.support.tiny_models import options, tiny_model, tiny_tokenizer

PROMPTS = [[5, 9, 33], [8], [40, 41, 42, 43, 44, 45], [7, 7], [12, 60], [33, 5, 21, 9, 8]]
EOS, TOKENS = 2, 12
Reply = Callable[[dict[str, Any]], tuple[int, dict[str, Any]]]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_bundle(tmp_path_factory.mktemp("answers"))


@pytest.fixture(scope="module")
def target(bundle: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(bundle.parent / "base", dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def own(target: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[list[int], list[int]]]:
    kept = CompletionFile(tmp_path_factory.mktemp("own") / "answers", {})
    return regenerate(target, PROMPTS, (EOS,), kept, AnswerJob(TOKENS), 8)


class FakeServer:
    """A server of one model whose completions `reply` makes of a request's body."""

    def __init__(self, reply: Reply, models: tuple[str, ...] = ("tiny",)) -> None:
        requests: list[dict[str, Any]] = []

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send(200, {"data": [{"id": name} for name in models]})

            def do_POST(self) -> None:
                requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.send(*reply(requests[-1]))

            def send(self, status: int, body: dict[str, Any]) -> None:
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None: ...

        self.requests, self.http = requests, ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()


@pytest.fixture
def serve() -> Iterator[Callable[..., FakeServer]]:
    running: list[FakeServer] = []

    def start(*given: Any) -> FakeServer:
        running.append(FakeServer(*given))
        return running[-1]

    yield start
    for one in running:
        one.http.shutdown()
        one.http.server_close()


def choice(**fields: Any) -> tuple[int, dict[str, Any]]:
    return 200, {"choices": [{"finish_reason": "length", "text": ""} | fields]}


def test_a_bundle_answers_with_drafts_as_the_target_does(
    bundle: Path, own: list[tuple[list[int], list[int]]], tmp_path: Path
) -> None:
    source = open_source(str(bundle), None, (EOS,), 2, load)
    assert source is not None and source.parallel == 2
    kept, speeds = CompletionFile(tmp_path / "answers", {}), Speeds()
    assert ask(source, PROMPTS, kept, AnswerJob(TOKENS, speeds=speeds)) == own
    assert kept.known == {tuple(prompt): answer for prompt, answer in own}
    assert speeds.cost(ANSWERS, 1)
    assert source.made_by()["answers_from"].startswith("weights ")
    drawn = ask(source, PROMPTS, CompletionFile(tmp_path / "drawn", {}), AnswerJob(TOKENS, sampled=(5.0, 1.0, 1)))
    assert sum(a != b for a, b in zip(drawn, own, strict=True)) == 3  # every second one


def test_a_server_of_the_bundle_answers_as_the_target_does(
    bundle: Path, own: list[tuple[list[int], list[int]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(load(bundle, threads=1), port=0, token="a-token-of-the-tests")
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.ready:
        time.sleep(0.01)
    try:
        with pytest.raises(ConfigError, match="401"):
            OpenAiServer(f"{server.url}/v1")
        monkeypatch.setenv(openai_server.KEY, "a-token-of-the-tests")
        source = OpenAiServer(f"{server.url}/v1/", tiny_tokenizer(), (EOS,))
        kept = CompletionFile(tmp_path / "answers", {})
        answers = ask(source, PROMPTS, kept, AnswerJob(TOKENS))
        assert answers  # of others the text leaves out special tokens
        assert all((prompt, answer) in own for prompt, answer in answers)
    finally:
        server.stop()
        thread.join()


def test_token_ids_of_a_server_are_taken_as_they_are(serve: Callable[..., FakeServer]) -> None:
    server = serve(lambda body: choice(token_ids=[7, 1, 0], finish_reason="stop", text="b"))
    source = OpenAiServer(server.url, tiny_tokenizer(), (EOS,))
    assert source.answer(AnswerRequest([4, 5], 6)) == [7, 1, 0, EOS]
    assert server.requests == [
        {"model": "tiny", "prompt": [4, 5], "max_tokens": 6, "temperature": 0.0, "return_token_ids": True}
        | {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "top_k": 0, "min_p": 0.0}
    ]
    source.answer(AnswerRequest([4, 5], 6, 0.7, 0.9, 3))
    assert {"temperature": 0.7, "top_p": 0.9, "seed": 3}.items() <= server.requests[1].items()


def test_a_server_gets_no_field_that_it_refuses(serve: Callable[..., FakeServer]) -> None:
    def strict(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if body.keys() - {"model", "prompt", "max_tokens", "temperature"}:
            return 400, {"error": {"message": "unknown field"}}
        return choice(text="ab", finish_reason="stop")

    server = serve(strict)
    source = OpenAiServer(server.url, tiny_tokenizer(), (EOS,))
    assert source.answer(AnswerRequest([4], 6)) == source.answer(AnswerRequest([4], 6))
    assert len(server.requests) == 4  # three for the first answer, one for the second


def test_text_is_tokenised_again_where_it_comes_back_the_same(serve: Callable[..., FakeServer]) -> None:
    texts = iter(["ab", "ab", "ü", "x" * 9, "abc"])

    def reply(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if "return_token_ids" in body:
            return 400, {"error": {"message": "unknown field return_token_ids"}}
        text = next(texts)
        status, whole = choice(text=text, finish_reason="length" if len(text) > 2 else "stop")
        return status, whole | {"usage": {"completion_tokens": 9 if text == "abc" else len(text)}}

    server = serve(reply)
    source = OpenAiServer(server.url, tiny_tokenizer(), (EOS,))
    a, b = tiny_tokenizer()("ab")["input_ids"]
    assert source.answer(AnswerRequest([4], 6)) == source.answer(AnswerRequest([4], 6)) == [a, b, EOS]
    assert source.answer(AnswerRequest([4], 6)) is None  # the tokenizer cannot write it
    assert len(source.answer(AnswerRequest([4], 9)) or []) == 9
    assert source.answer(AnswerRequest([4], 9)) is None  # six tokens of it are not in its text
    assert ["return_token_ids" in body for body in server.requests] == [True, *[False] * 5]


def test_answers_of_another_model_are_refused(target: PreTrainedModel, own: list[tuple[list[int], list[int]]]) -> None:
    count = sum(len(answer) for _, answer in own)
    assert equal_tokens(target, own) == (count, count)
    prompt, answer = own[0]
    wrong = [(answer[0] + 1) % 64, *answer[1:]]
    assert equal_tokens(target, [(prompt, wrong)])[0] < len(answer)
    assert check_answers_from(target, own, "x") == {"compared": 6, "tokens": count, "equal": 1.0}
    with pytest.raises(DataError, match=r"--answers-from x: \d+ of \d+ tokens of 6 answers are .* at least 82%"):
        check_answers_from(tiny_model("llama", seed=9), own, "x")
    with pytest.raises(DataError, match="0 of 0 tokens"):
        check_answers_from(target, [], "x")


def test_a_run_learns_from_the_bundles_answers_once_they_were_compared(
    bundle: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, kept = bundle.parent / "base", tmp_path / "kept.jsonl"
    more = {"recipe": "staged", "target_adapter": "base", "answers_from": str(bundle), "answers": kept, "val": data}
    with pytest.raises(ConfigError, match="without the runtime.*streamspec.train"):
        train(options(base, data, tmp_path / "none", **more))
    with pytest.raises(DataError, match="tokens of .* answers are the target's own"):
        other = tmp_path / "other"
        tiny_model("llama", seed=5).save_pretrained(other)
        tiny_tokenizer().save_pretrained(other)
        train(options(other, data, tmp_path / "wrong", **(more | {"answers": None})), load=load)
    monkeypatch.setattr(
        "streamspec.adapters.recipe_stages.regenerate", lambda *_, **__: pytest.fail("PyTorch answered")
    )
    train(options(base, data, tmp_path / "out", **more), load=load)
    saved = json.loads((tmp_path / "out" / "training.json").read_text())
    assert saved["log"]["answers_from"]["equal"] > 0.82 and saved["config"]["answers_from"] == "bundle"
    assert json.loads(kept.read_text().splitlines()[0])["answers_from"] == saved["log"]["answers_from"]["answers_from"]
    with pytest.raises(DataError, match="answers of"):  # the target as PyTorch computes it is another maker
        train(options(base, data, tmp_path / "third", **(more | {"answers_from": None})))


def test_without_time_for_answers_of_a_bundle_the_references_validate(
    bundle: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = {"recipe": "staged", "target_adapter": "base", "answers_from": str(bundle), "val": data}
    more |= {"max_minutes": 1e-4, "epochs": 10_000}
    train(options(bundle.parent / "base", data, tmp_path / "out", **more), load=load)
    assert json.loads((tmp_path / "out" / "training.json").read_text())["metrics"]["val_answers"] == 0
    assert "in the time for it: references, if any, are taken instead" in capsys.readouterr().err


def test_answers_that_are_kept_do_not_speak_for_the_source(
    bundle: Path, data: Path, tmp_path: Path, serve: Callable[..., FakeServer]
) -> None:
    kept = tmp_path / "kept.jsonl"
    more: dict[str, Any] = {"recipe": "staged", "target_adapter": "base", "answers": kept, "val": data}
    train(options(bundle.parent / "base", data, tmp_path / "own", **more), load=load)
    made_by, *answers = kept.read_text().splitlines()
    kept.write_text("\n".join([json.dumps(json.loads(made_by) | {"answers_from": "server tiny"}), *answers, ""]))
    known = {tuple(row["prompt"]): row["answer"] for row in map(json.loads, answers)}
    right: list[bool] = []  # whether the target itself is served
    server = serve(lambda body: choice(token_ids=known[tuple(body["prompt"])] if right else [7] * 12))
    more["answers_from"] = server.url
    with pytest.raises(DataError, match=r"tokens of .* answers are the target's own"):
        train(options(bundle.parent / "base", data, tmp_path / "out", **more), load=load)
    assert kept.read_text().splitlines()[1:] == answers and server.requests
    right.append(True)
    train(options(bundle.parent / "base", data, tmp_path / "out", resume=True, **more), load=load)
    assert json.loads((tmp_path / "out" / "training.json").read_text())["log"]["answers_from"]["equal"] > 0.9


def test_a_request_under_way_does_not_keep_the_process_from_ending(
    tmp_path: Path, serve: Callable[..., FakeServer]
) -> None:
    asked, over = threading.Event(), threading.Event()

    def reply(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        asked.set()
        over.wait(60)
        return choice(token_ids=[1])

    server = serve(reply)
    script = (
        "import sys, time; from pathlib import Path;"
        "from streamspec.adapters.answers import completion_file, openai_server, request, source;"
        "from streamspec.adapters.runs.budget import Deadline;"
        "job = request.AnswerJob(4, until=Deadline(time.monotonic() + 1, time.monotonic));"
        "kept = completion_file.CompletionFile(Path(sys.argv[2]), {});"
        "assert source.ask(openai_server.OpenAiServer(sys.argv[1]), [[1]], kept, job) == []"
    )
    command = [sys.executable, "-c", script, server.url, str(tmp_path / "answers")]
    try:
        ended = subprocess.run(command, timeout=45, capture_output=True, text=True, check=False)
    finally:
        over.set()
    assert ended.returncode == 0 and asked.is_set(), ended.stderr


def test_answers_that_do_not_come_in_time_are_left_out(tmp_path: Path) -> None:
    class Slow:
        parallel, closed, ended = 2, 0, threading.Event()

        def made_by(self) -> dict[str, str]:
            return {}

        def answer(self, request: AnswerRequest) -> list[int]:
            if len(request.prompt) == 6:
                self.ended.wait(20)
            return [1]

        def close(self) -> None:
            self.closed += 1
            self.ended.set()

    source, began = Slow(), time.monotonic()
    kept = CompletionFile(tmp_path / "answers", {})
    until = Deadline(began + 2, time.monotonic)
    answers = ask(source, PROMPTS, kept, AnswerJob(4, until=until))
    assert time.monotonic() - began < 15 and source.closed == 1
    assert len(answers) < 6 and all(answer == [1] and len(prompt) < 6 for prompt, answer in answers)
    assert ask(source, PROMPTS, kept, AnswerJob(4, until=Deadline(began, time.monotonic))) == answers


def test_places_without_answers_are_refused_in_a_line(
    tmp_path: Path, serve: Callable[..., FakeServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openai_server, "PAUSE", 0.0)
    with pytest.raises(ConfigError, match=r"http://127\.0\.0\.1:9/v1: .*refused; expected an OpenAI-compatible server"):
        OpenAiServer("http://127.0.0.1:9/v1")
    with pytest.raises(ConfigError, match="password in its address"):
        OpenAiServer("http://me:secret@127.0.0.1:9/v1")
    two = serve(lambda body: choice(), ("a", "b"))
    with pytest.raises(ConfigError, match=r"serves a, b; expected one model, or the name of one; add it: .*#NAME"):
        OpenAiServer(two.url)
    assert OpenAiServer(f"{two.url}#b").made_by() == {"answers_from": "server b"}
    statuses = iter([503, 429, 200])
    busy = OpenAiServer(serve(lambda body: (next(statuses), choice(token_ids=[1])[1])).url, tiny_tokenizer(), (EOS,))
    assert busy.answer(AnswerRequest([1], 4)) == [1]
    broken = OpenAiServer(serve(lambda body: (200, {"choices": []})).url, tiny_tokenizer(), (EOS,))
    with pytest.raises(ConfigError, match="a reply without choices"):
        broken.answer(AnswerRequest([1], 4))
    long = OpenAiServer(serve(lambda body: (400, {"error": {"message": "too long"}})).url, tiny_tokenizer(), (EOS,))
    with pytest.raises(ConfigError, match="400 too long"):
        long.answer(AnswerRequest([1], 4))
    with pytest.raises(ConfigError, match="--answers-from without --target-adapter"):
        TrainConfig("b", Path("d"), Path("o"), answers_from="x")
    with pytest.raises(BundleError):
        open_source(str(tmp_path), None, (EOS,), 1, load)
