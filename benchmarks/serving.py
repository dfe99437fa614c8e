#!/usr/bin/env python3
"""Measures the overhead and the robustness of the server:
`python benchmarks/serving.py BUNDLE [--requests 2000] [--clients 4] [--tokens 48] [--threads N] [--skip-times |
--throughput]`.

- Idle: CPU time of the server over 10 s. A request without the model (`/health`), connection included.
- Time to the first token and tokens per second through the server, over a session of this process, in turn; the server
  is idle while the session works.
- Two clients at once: tokens of each until the first has finished.
- `--throughput`, alone: tokens a second of all answers to 1, 2 and 4 clients, with calls shared and in turns.
- Soak: `--requests` requests by several clients. A quarter is ended by the client (in the queue, during prefill, in the
  middle of a stream), a tenth is invalid, the rest is answered in full, streamed or not, greedy or with a seed, by any
  adapter of the bundle. Every answer is compared with a fresh session's, every partial answer with that answer's
  prefix. Memory is sampled throughout; its slope is that of the second half.

The server is a process of its own, the clients are `openai`'s.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from http.client import HTTPConnection
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import numpy as np
import openai
import psutil

from streamspec.progress import track
from streamspec.runtime import Sampling, Session, load

TOKEN = "token-of-the-benchmark"
PROMPTS = [
    "Tell me about the sea.",
    "What is twelve times twelve?",
    "Name five animals.",
    "Who wrote Faust?",
    "hello hello hello",
    "Say something about rain. " * 4,
]
SEEDS = (None, 1, 2)


class Server:
    def __init__(self, bundle: Path, threads: int | None, sessions: int, *more: str) -> None:
        command = [
            sys.executable,
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
        return httpx.get(f"{self.url}/metrics", headers={"authorization": f"Bearer {TOKEN}"}).text


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
    for i in range(repeats):
        for number, prompt in enumerate(PROMPTS):
            messages = user(f"{i} {prompt}")  # new to every cache
            for served in (False, True) if (i + number) % 2 else (True, False):
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
        one, two = threads.map(arrivals, PROMPTS[:2])
    begin, end = max(one[0][0], two[0][0]), min(one[-1][0], two[-1][0])
    counts = [sum(count for at, count in stream if begin <= at <= end) for stream in (one, two)]
    print(f"two clients at once: {counts[0]} and {counts[1]} tokens until the first had finished", flush=True)


def throughput(bundle: Path, threads: int | None, tokens: int, rounds: int = 3) -> None:
    """Tokens a second of all answers together, by clients that ask at once, with calls shared and in turns."""
    servers = {batch: Server(bundle, threads, 4, "--batch", str(batch)) for batch in (1, 4)}
    rates = {(batch, clients): list[float]() for batch in servers for clients in (1, 2, 4)}

    def ask(job: tuple[Server, str]) -> int:
        server, prompt = job
        answer = server.client().chat.completions.create(
            model=server.models[0], messages=user(prompt), max_tokens=tokens
        )
        return int(answer.usage.completion_tokens)  # type: ignore[union-attr]

    try:
        for number in range(rounds + 1):  # the first to warm up: what pays is measured then
            for (batch, clients), found in rates.items():
                jobs = [(servers[batch], f"{number}.{clients} {prompt}") for prompt in PROMPTS * 2]
                began = time.perf_counter()
                with ThreadPoolExecutor(clients) as pool:
                    count = sum(pool.map(ask, jobs))
                found += [count / (time.perf_counter() - began)] * bool(number)
    finally:
        for server in servers.values():
            server.end()
    for clients in (1, 2, 4):
        turns, shared = (rates[batch, clients] for batch in servers)
        print(
            f"{clients} clients: {median(shared):.1f} ({min(shared):.1f}..{max(shared):.1f}) tokens/s with shared "
            f"calls, {median(turns):.1f} ({min(turns):.1f}..{max(turns):.1f}) in turns",
            flush=True,
        )


def soak(server: Server, session: Session, requests: int, clients: int, tokens: int) -> int:
    """Returns the number of faults."""
    want: dict[tuple[str, str, int | None], str] = {}
    for model in server.models:
        if session.adapters:
            session.swap(None if model == server.models[0] else model)
        for prompt in PROMPTS:
            for seed in SEEDS:
                session.forget()
                sampling = Sampling(temperature=0 if seed is None else 0.8, seed=seed or 0)
                want[model, prompt, seed] = session.generate(
                    user(prompt), max_new_tokens=tokens, sampling=sampling
                ).text
    session.close()
    dice, faults, memory, counts = random.Random(0), list[str](), list[float](), dict[str, int]()
    plans = [(dice.choice([*want]), dice.random(), dice.random(), dice.random() < 0.5) for _ in range(requests)]
    lock = threading.Lock()

    def one(plan: tuple[tuple[str, str, int | None], float, float, bool]) -> None:
        (model, prompt, seed), kind, part, streamed = plan
        client, right = server.client(), want[model, prompt, seed]
        sampled: dict[str, Any] = {} if seed is None else {"temperature": 0.8, "seed": seed}
        asked: dict[str, Any] = {"model": model, "messages": user(prompt), "max_tokens": tokens, **sampled}
        done, fault = "answered", ""
        try:
            if kind < 0.10:
                done = "wrong"
                wrong: list[dict[str, Any]] = [
                    {"model": "nobody"},
                    {"temperature": 9},
                    {"extra_body": {"x": 1}},
                    {"messages": user("x" * 100_000)},
                    {"n": 99},
                ]
                with suppress(openai.BadRequestError, openai.NotFoundError):
                    client.chat.completions.create(**(asked | wrong[int(part * len(wrong))]))
                    fault = "a wrong request was answered"
            elif kind < 0.25:
                done = "cut off by its client"
                with suppress(openai.APITimeoutError):
                    client.with_options(timeout=0.002 + 0.5 * part * part, max_retries=0).chat.completions.create(
                        **asked
                    )
            elif kind < 0.35:
                done = "left in its stream"
                stream, said = client.chat.completions.create(**asked, stream=True), ""
                for _, chunk in zip(range(int(part * 12)), stream, strict=False):
                    said += chunk.choices[0].delta.content
                stream.close()
                fault = "" if right.startswith(said) else f"{said!r} is no beginning of {right!r}"
            else:
                said = (
                    "".join(c.choices[0].delta.content for c in client.chat.completions.create(**asked, stream=True))
                    if streamed
                    else client.chat.completions.create(**asked).choices[0].message.content
                )
                fault = "" if said == right else f"{said!r}, not {right!r}"
        except Exception as error:
            fault = f"{type(error).__name__} {error}"
        with lock:
            counts[done] = counts.get(done, 0) + 1
            memory.append(server.memory())
            if fault:
                faults.append(f"{done}: {fault}")

    began = time.perf_counter()
    with ThreadPoolExecutor(clients) as threads:
        for _ in track(threads.map(one, plans), "requests", requests):
            pass
    taken = time.perf_counter() - began
    for _ in range(100):
        if 'state="busy"} 0' in (found := server.metrics()):
            break
        time.sleep(0.1)
    else:
        faults.append(f"sessions are busy though nobody asks: {found}")
    half = memory[len(memory) // 2 :]
    slope = float(np.polyfit(np.arange(len(half)), half, 1)[0]) * 1000
    print(
        f"soak: {requests} requests of {clients} clients in {taken:.0f} s, "
        + ", ".join(f"{n} {what}" for what, n in sorted(counts.items())),
        flush=True,
    )
    tenths = " ".join(f"{memory[i * (len(memory) - 1) // 10]:.0f}" for i in range(11))
    print(f"memory, MB, by tenths of the way: {tenths}; {slope:+.2f} MB per 1,000 requests of the second half")
    print(f"faults: {len(faults)}" + "".join(f"\n  {fault}" for fault in faults[:10]), flush=True)
    return len(faults)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--skip-times", action="store_true", help="only the soak")
    parser.add_argument("--throughput", action="store_true", help="only the tokens a second of 1, 2 and 4 clients")
    given = parser.parse_args()
    if given.throughput:
        return throughput(given.bundle, given.threads, given.tokens)
    server = Server(given.bundle, given.threads, sessions=3)
    try:
        session = load(given.bundle, threads=given.threads)
        if not given.skip_times:
            idle(server)
            times(server, session, given.tokens)
            fair(server, given.tokens)
        faults = soak(server, session, given.requests, given.clients, given.tokens) if given.requests else 0
    finally:
        began = time.perf_counter()
        server.end()
    print(f"ended in {time.perf_counter() - began:.2f} s")
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
