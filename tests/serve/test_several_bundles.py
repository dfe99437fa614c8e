"""Several bundles in one server: each answers as alone, they share the sessions, idle ones are unloaded."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from streamspec.errors import ConfigError
from streamspec.export import export_bundle
from streamspec.runtime import load
from streamspec.serve import Limits, serve
from tests.serve.conftest import Running, until, user
from tests.support.fake_serve_session import FakeServeSession, Shared
from tests.support.tiny_bundles import lettered_base, tiny_adapter, tiny_base

Make = Callable[..., Running]
PROMPTS = ["abcabd", "Hello, hello."]


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two bundles of different models, tokenizers and prompt formats."""
    folder, made = tmp_path_factory.mktemp("several"), {}
    bases = {"one": tiny_base(folder / "base-one", chat=True), "two": lettered_base(folder / "base-two")}
    for name, base in bases.items():
        adapter = tiny_adapter(folder / f"adapter-{name}", base, kind="chat" if name == "one" else "raw")
        export_bundle(base, adapter, folder / name, "fp32", progress=lambda line: None)
        made[name] = folder / name
    return made


def ask(server: Running, model: str, prompt: str, **fields: Any) -> str:
    given: Any = {"model": model, "messages": user(prompt), "max_tokens": 20} | fields
    said = server.client().chat.completions.create(**given).choices[0].message.content
    assert said is not None
    return said


def states(server: Running) -> dict[str, int]:
    """The metric of loaded bundles."""
    return {
        state: int(count)
        for state, count in re.findall(r'streamspec_bundles{state="(\w+)"} (\d+)', server.http().get("/metrics").text)
    }


def test_each_bundle_answers_as_alone_and_idle_ones_are_unloaded(bundles: dict[str, Path]) -> None:
    want = {}
    for name, path in bundles.items():
        alone = load(path, threads=1, tree=8)
        for prompt in PROMPTS:
            alone.close()
            want[name, prompt] = alone.generate(user(prompt), max_new_tokens=20).text
    assert want["one", PROMPTS[0]] != want["two", PROMPTS[0]]
    sessions = {name: load(path, threads=1, tree=8, idle=0.5) for name, path in bundles.items()}
    running = Running(sessions["one"], name="one", more={"two": sessions["two"]}, limits=Limits(sessions=2))
    try:
        assert [model.id for model in running.client().models.list()] == ["one", "two"]
        asked = [*want] * 4
        random.Random(5).shuffle(asked)
        with ThreadPoolExecutor(4) as threads:
            assert list(threads.map(lambda which: ask(running, *which), asked)) == [want[which] for which in asked]
        until(lambda: not sessions["one"].loaded and not sessions["two"].loaded)
        assert states(running) == {"loaded": 0, "unloaded": 2}
        assert ask(running, "two", PROMPTS[0]) == want["two", PROMPTS[0]]
        assert not sessions["one"].loaded and states(running)["unloaded"] >= 1
    finally:
        running.stop()


def test_log_probabilities_name_the_tokens_of_the_bundle_that_answers(bundles: dict[str, Path]) -> None:
    sessions = {name: load(path, threads=1, tree="plain") for name, path in bundles.items()}
    running = Running(sessions["one"], name="one", more={"two": sessions["two"]}, limits=Limits(sessions=1))
    try:
        for name in bundles:
            given: Any = {"model": name, "messages": user(PROMPTS[1]), "max_tokens": 20, "logprobs": True}
            choice = running.client().chat.completions.create(**given).choices[0]
            assert choice.logprobs is not None and choice.logprobs.content
            ids = sessions[name].generate(user(PROMPTS[1]), max_new_tokens=20).token_ids
            names = [sessions[name].tokenizer.decode([one], skip_special_tokens=False) for one in ids]
            assert [one.token for one in choice.logprobs.content] == names[: len(choice.logprobs.content)]
    finally:
        running.stop()


def test_bundles_share_the_sessions_and_take_turns(running: Make) -> None:
    other = Shared()
    other.gate.set()
    server = running(more={"other": FakeServeSession(other)}, limits={"sessions": 1}, adapters={})
    for i in range(3):
        assert ask(server, "base", f"say a{i}", max_tokens=2) == f"a{i}"
        assert ask(server, "other", f"say b{i}", max_tokens=2) == f"b{i}"
    assert server.shared is not None and server.shared.asked == ["a0", "a1", "a2"] and other.asked == ["b0", "b1", "b2"]
    assert ask(server, "alpha", "say c", max_tokens=1) == "c" and other.asked[-1] == "c"  # an adapter of the other one
    assert len(server.server.pool.slots) == 1
    with pytest.raises(openai.NotFoundError, match="base, other, alpha, beta"):
        ask(server, "third", "say d")


def test_bundles_and_adapters_of_one_name_are_refused(running: Make) -> None:
    for more in ({"base": FakeServeSession(Shared())}, {"alpha": FakeServeSession(Shared())}):
        with pytest.raises(ConfigError, match="two models named"):
            running(more=more, adapters={})
    with pytest.raises(ConfigError, match="a model named 'a b'"):
        running(more={"a b": FakeServeSession(Shared())}, adapters={})


def test_serve_loads_further_bundles_under_their_folders_names(bundles: dict[str, Path], tmp_path: Path) -> None:
    found: list[Any] = []
    serve(
        bundles["one"],
        also=[bundles["two"]],
        port=0,
        idle=60,
        threads=1,
        ready=lambda server: (found.extend(one.loaded for one in server.pool.bases), server.stop()),
    )
    assert found == [False, False]  # before the first request
    serve(
        bundles["one"],
        also=[bundles["two"], ("second", bundles["two"])],
        port=0,
        threads=1,
        ready=lambda server: (found.append(len(server.pool.bases)), server.stop()),
    )
    assert found[-1] == 3  # of two names
    with pytest.raises(ConfigError, match="several bundles with --use or --past-answers"):
        serve(bundles["one"], also=[bundles["two"]], past_answers=tmp_path / "answers")
    with pytest.raises(ConfigError, match="two bundles named two"):
        serve(bundles["one"], also=[bundles["two"]] * 2, port=0, threads=1)
