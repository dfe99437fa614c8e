#!/usr/bin/env python3
"""Measures the overhead of the server:
`python benchmarks/serving.py BUNDLE [--tokens 48] [--threads N]
[--throughput [--prompts FILE] [--rounds 3] [--requests 12]]`.

- Idle: CPU time of the server over 10 s. A request without the model (`/health`), connection included.
- Time to the first token and tokens per second through the server, over a session of this process, in turn; the server
  is idle while the session works.
- Two clients at once: tokens of each until the first has finished.
- `--throughput`, alone: tokens a second of all answers to 1, 2 and 4 clients, with calls shared and in turns: rows of a
  table. `--prompts`: a data set whose prompts are asked instead of questions about things.

The server is a process of its own, the clients are `openai`'s.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from http.client import HTTPConnection
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import openai
import psutil

from streamspec.data import read_examples
from streamspec.runtime import Session, load

TOKEN = "token-of-the-benchmark"
THINGS = (
    *("rain", "bread", "glass", "trains", "honey", "chess", "ships", "paper"),
    *("salt", "music", "maps", "wool", "clocks", "bridges", "tea", "gold"),
)
TASKS = (
    "Tell me about {0}.",
    "Name five kinds of {0}.",
    "Who first made {0}?",
    "Write a short poem about {0}.",
    "What is {0} good for?",
    "Explain {0} to a child.",
    "What does {0} cost?",
    "Where does {0} come from?",
    "Say something odd about {0}. " * 4,
)


class Server:
    def __init__(self, bundle: Path, threads: int | None, sessions: int, *more: str) -> None:
        command = [
            sys.executable,
            "-P",
            "-m",
            "streamspec",
            "serve",
            str(bundle),
            "--port",
            "0",
            "--token",
            TOKEN,
            "--sessions",
            str(sessions),
            "--no-page",
            "--temperature",  # whatever the bundle recommends
            "0",
        ]
        self.process = subprocess.Popen(
            [*command, *(["--threads", str(threads)] if threads else []), *more],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ,
        )
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().split("/v1")[0]
        self.watched = psutil.Process(self.process.pid)

    def end(self) -> None:
        self.process.terminate()
        self.process.wait(10)

    @cached_property
    def models(self) -> list[str]:
        return [model.id for model in self.client().models.list()]

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=TOKEN, max_retries=3, timeout=120)

    def memory(self) -> float:
        """Returns the process's private MB, without mapped files."""
        found = self.watched.memory_info()
        return float(found.rss - getattr(found, "shared", 0)) / 1e6

    def metrics(self) -> str:
        return metrics_of(self.url)


def metrics_of(url: str) -> str:
    return httpx.get(f"{url}/metrics", headers={"authorization": f"Bearer {TOKEN}"}).text


def different(count: int, start: int = 0, file: Path | None = None) -> list[str]:
    """So many prompts of all that there are, from number `start` on: a server remembers what it has answered."""
    every = [task.format(thing) for thing in THINGS for task in TASKS]
    if file is not None:
        openings = [example.opening for example in read_examples(file, start + count)]
        every = [one if isinstance(one, str) else str(one[-1]["content"]) for one in openings]
    if start + count > len(every):
        raise SystemExit(f"found {len(every)} prompts; expected {start + count}: fewer --rounds or --requests")
    return every[start : start + count]


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def idle(server: Server) -> None:
    before = sum(server.watched.cpu_times()[:2])
    time.sleep(10)
    used = sum(server.watched.cpu_times()[:2]) - before
    taken = []
    for _ in range(100):
        began = time.perf_counter()
        connection = HTTPConnection(server.url.removeprefix("http://"))
        connection.request("GET", "/health")
        assert connection.getresponse().read()
        taken.append(1e3 * (time.perf_counter() - began))
    print(
        f"idle: {100 * used / 10:.1f} % of a core over 10 s; /health: {median(taken):.1f} ms with a connection of "
        f"its own",
        flush=True,
    )


def times(server: Server, session: Session, tokens: int, repeats: int = 3) -> None:
    client, firsts, rates = (
        server.client(),
        {False: list[float](), True: list[float]()},
        {False: list[float](), True: list[float]()},
    )
    for number, prompt in enumerate(different(repeats * len(TASKS))):
        # a beginning of its own: the server's sessions keep what they have read
        messages = [{"role": "system", "content": f"{number} conversations came before this one."}, *user(prompt)]
        for served in (False, True) if number % 2 else (True, False):
            session.forget()
            began = time.perf_counter()
            first = rate = 0.0
            chunks: Any = (
                client.chat.completions.create(
                    model=server.models[0], messages=messages, max_tokens=tokens, stream=True
                )
                if served
                else session.stream(messages, max_new_tokens=tokens)
            )
            for chunk in chunks:
                first = first or 1e3 * (time.perf_counter() - began)
                rate = chunk.streamspec["tokens_per_second"] if served else chunk.stats.tokens_per_second
            firsts[served].append(first)
            rates[served].append(rate)
    for what, found in (("first token, ms", firsts), ("tokens/s, as each side counts them", rates)):
        ratio = median(one / other for one, other in zip(found[True], found[False], strict=True) if other)
        print(
            f"{what}: {median(found[True]):.1f} through the server, {median(found[False]):.1f} from a session; ratio "
            f"of the same prompt {ratio:.2f}",
            flush=True,
        )


def fair(server: Server, tokens: int) -> None:
    def arrivals(prompt: str) -> list[tuple[float, int]]:
        stream = server.client().chat.completions.create(
            model=server.models[0], messages=user(prompt), max_tokens=2 * tokens, stream=True
        )
        return [(time.perf_counter(), chunk.streamspec["committed"]) for chunk in stream]  # type: ignore[attr-defined]

    with ThreadPoolExecutor(2) as threads:
        one, two = threads.map(arrivals, different(2, 100))
    begin, end = max(one[0][0], two[0][0]), min(one[-1][0], two[-1][0])
    counts = [sum(count for at, count in stream if begin <= at <= end) for stream in (one, two)]
    print(f"two clients at once: {counts[0]} and {counts[1]} tokens until the first had finished", flush=True)


def throughput(given: argparse.Namespace) -> None:
    """Tokens a second of all answers together, by clients that ask at once, with calls shared and in turns."""
    bundle, requests = given.bundle, given.requests
    servers = {batch: Server(bundle, given.threads, 4, "--batch", str(batch)) for batch in (1, 4)}
    rates = {(batch, clients): list[float]() for batch in servers for clients in (1, 2, 4)}

    asking = {batch: server.client() for batch, server in servers.items()}  # what makes one is not the server's work

    def ask(job: tuple[int, str]) -> int:
        batch, prompt = job
        answer = asking[batch].chat.completions.create(
            model=servers[batch].models[0], messages=user(prompt), max_tokens=given.tokens
        )
        return int(answer.usage.completion_tokens)  # type: ignore[union-attr]

    try:
        for number in range(given.rounds + 1):  # the first to warm up: what pays is measured then
            for (batch, clients), found in rates.items():
                turn = number * 3 + (1, 2, 4).index(clients)
                jobs = [(batch, prompt) for prompt in different(requests, turn * requests, given.prompts)]
                began = time.perf_counter()
                with ThreadPoolExecutor(clients) as pool:
                    count = sum(pool.map(ask, jobs))
                found += [count / (time.perf_counter() - began)] * bool(number)
    finally:
        for server in servers.values():
            server.end()
    print(
        "| bundle | clients | tokens/s with shared calls | in turns | ratio of the same round |\n|---|---|---|---|---|"
    )
    for clients in (1, 2, 4):
        turns, shared = (rates[batch, clients] for batch in servers)
        ratio = median(one / other for one, other in zip(shared, turns, strict=True))
        print(
            f"| {bundle.name} | {clients} | {median(shared):.1f} ({min(shared):.1f}..{max(shared):.1f}) | "
            f"{median(turns):.1f} ({min(turns):.1f}..{max(turns):.1f}) | {ratio:.2f} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="with --throughput")
    parser.add_argument("--rounds", type=int, default=3, help="with --throughput")
    parser.add_argument("--requests", type=int, default=12, help="of a round, with --throughput")
    parser.add_argument("--throughput", action="store_true", help="only the tokens a second of 1, 2 and 4 clients")
    given = parser.parse_args()
    if given.throughput:
        return throughput(given)
    server = Server(given.bundle, given.threads, sessions=3)
    try:
        session = load(given.bundle, threads=given.threads)
        idle(server)
        times(server, session, given.tokens)
        fair(server, given.tokens)
    finally:
        began = time.perf_counter()
        server.end()
    print(f"ended in {time.perf_counter() - began:.2f} s")


if __name__ == "__main__":
    main()
