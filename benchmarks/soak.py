#!/usr/bin/env python3
"""Soaks a server in requests of all kinds, in pieces that go on where the last one ended:
`python benchmarks/soak.py [BUNDLE ...] --minutes 15 --kept soak.json [--clients 6] [--tokens 32] [--threads N]
[--context N] [--provider cpu | native]`.

The server has `BUNDLE ...` and a tiny one whose template knows tools; without `BUNDLE` another tiny one, with adapters
to swap or, on native operators, whose answers share calls. Bundles are unloaded after two idle seconds.

- Most requests are answered whole, streamed or not, by any model and adapter: chats, seeds, `n` of 2, penalties, JSON
  schemas, tools that may or have to be called. Each answer has to be the one of a session that answers it alone.
- A quarter is left by its client: without a word, in the head, in the body, before an answer, in its stream, without
  reading it; half of these with a reset. A tenth is wrong and has to be refused, as has what its model cannot do.
- Each minute the clients rest. No session may then stay busy, and each bundle has to be unloaded: memory is noted.
- The first two minutes show how much memory of its own (RLIMIT_DATA) the server takes. From then on it may have a tenth
  more than that, also in later pieces.

`--kept` holds what was found so far and is written every second. A piece whose server or clients were killed loses the
requests that were under way; the next one looks at the server that was left, and ends it.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import openai
import psutil
from serving import TOKEN, Server, metrics_of, user
from soak_record import Answers, Kept, Life, report

from streamspec.bundle.swappable_adapters import names
from streamspec.errors import StreamspecError
from streamspec.runtime import Session, load
from streamspec.serve import Limits
from streamspec.serve.api.chat_requests import read_chat
from streamspec.serve.api.chat_responses import ResponseBuilder
from streamspec.serve.errors import ApiError
from streamspec.serve.tools.call_form import CallForm
from streamspec.serve.tools.call_parser import CallParser
from streamspec.serve.tools.checked_grammars import CheckedGrammars

IDLE, ROUND, SETTLED = 2, 60, 60  # seconds: to unload, between rests, that a rest may take
SHARE, UNCAPPED = 0.9, 2  # of the cap that the first rounds took, and how many those are
SESSIONS = 3
LARGEST = user("x" * 250_000)  # of which as many come first as there are sessions: nothing takes more memory
PATIENCE = 3600  # seconds for an answer, on a machine however busy
PET = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}, "old": {"type": "boolean"}},
    "required": ["kind", "old"],
    "additionalProperties": False,
}
SCHEMA = {"response_format": {"type": "json_schema", "json_schema": {"name": "pet", "schema": PET}}}
TOOLS = {
    "tools": [
        {"type": "function", "function": {"name": "look_after", "parameters": PET}},
        {"type": "function", "function": {"name": "clock"}},
    ]
}
NAMED = {"tool_choice": {"type": "function", "function": {"name": "look_after"}}}
FORMS: dict[str, tuple[int, dict[str, Any]]] = {  # how often, and what is asked for
    "greedy": (5, {}),
    "with a seed": (5, {"temperature": 0.8, "seed": 1}),
    "n of 2": (2, {"temperature": 0.8, "seed": 2, "n": 2}),
    "with a penalty": (1, {"frequency_penalty": 0.7}),
    "with a schema": (2, SCHEMA),
    "with tools": (1, TOOLS),
    "with a required tool": (1, TOOLS | {"tool_choice": "required", "temperature": 2, "seed": 3}),
    "with a named tool": (1, TOOLS | NAMED),
}
TURNS = [
    {"role": "system", "content": "Be brief."},
    *user("Hello."),
    {"role": "assistant", "content": "Good day."},
    *user("Who are you?"),
]
PROMPTS = [
    "Tell me about the sea.",
    "What is twelve times twelve?",
    "Name five animals.",
    "Who wrote Faust?",
    "hello hello hello",
    "Say something about rain. " * 4,
]
CHATS = [*map(user, PROMPTS), TURNS]
WRONG: list[dict[str, Any]] = [
    {"model": "nobody"},
    {"temperature": 9},
    {"extra_body": {"x": 1}},
    {"messages": user("x" * 100_000)},
    {"messages": []},
    {"n": 99},
    {"tool_choice": "required"},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}},
    {"extra_headers": {"Authorization": "Bearer another"}},
    {"extra_headers": {"Content-Type": "text/plain"}},
]
LEFT = ("without a word", "in the head", "in the body", "before an answer", "in its stream", "without reading it")


def body_of(key: str, tokens: int) -> dict[str, Any]:
    """The request that has the answer of that key in `Kept.want`."""
    model, form, chat = key.split("|")
    return {"model": model, "messages": CHATS[int(chat)], "max_tokens": tokens} | FORMS[form][1]


def alone(session: Session, body: dict[str, Any]) -> Answers | None:
    """What a session answers that nobody disturbs; None for what it refuses."""
    try:
        parsed = read_chat(json.dumps(body).encode(), Limits())
        prompt, options, calls = parsed.prompt, parsed.options, None
        if parsed.tools is not None:
            form = CallForm.of(session)
            prompt, calls = session.encode(prompt, tools=parsed.tools.schemas), partial(CallParser, form, parsed.tools)
            grammar = parsed.tools.grammar(form, CheckedGrammars())
            options = [replace(one, grammar=grammar or one.grammar) for one in options]
        answer = ResponseBuilder(parsed, None, session.tokenizer, calls)
        for one in options:
            session.forget()
            for chunk in session.stream(prompt, one):
                answer.push(chunk)
    except (ApiError, StreamspecError):
        return None
    return [
        [
            choice["message"]["content"] or "",
            [[c["function"]["name"], c["function"]["arguments"]] for c in choice["message"].get("tool_calls", ())],
            choice["finish_reason"],
        ]
        for choice in answer.whole()["choices"]
    ]


def want(kept: Kept, save: Callable[[], None], **options: Any) -> None:
    """Has each request that a piece may make answered by a session."""
    for bundle in map(Path, kept.bundles):
        session: Session | None = None
        for adapter in (None, *names(bundle)):
            keys = [f"{adapter or bundle.name}|{form}|{chat}" for form in FORMS for chat in range(len(CHATS))]
            for key in (key for key in keys if key not in kept.want):
                session = session or load(bundle, **options)
                if session.adapter != adapter:
                    session.swap(adapter)
                kept.want[key] = alone(session, body_of(key, kept.tokens))
                save()


class Clients:
    """Ask a server, and note in `kept` what comes of it."""

    def __init__(self, server: Server, kept: Kept) -> None:
        self.server, self.kept, self.life, self.lock = server, kept, kept.lives[-1], threading.Lock()
        self.client = server.client().with_options(timeout=PATIENCE, max_retries=0)
        self.keys = {form: [key for key, want in kept.want.items() if want and f"|{form}|" in key] for form in FORMS}
        self.impossible = [key for key, want in kept.want.items() if want is None]

    def work(self, number: int, ends: float) -> None:
        """Asks until then, or until the server has gone."""
        dice = random.Random(f"{len(self.kept.lives)}.{self.life.requests}.{number}")
        weights = [weight for weight, _ in FORMS.values()]
        while time.monotonic() < ends and self.server.process.poll() is None:
            form = dice.choices([*FORMS], weights)[0]
            key, kind = dice.choice(self.keys[form]), dice.random()
            body = body_of(key, self.kept.tokens)
            try:
                if kind < 0.02 and self.impossible:
                    done, fault = self.refused(body_of(dice.choice(self.impossible), self.kept.tokens))
                elif kind < 0.1:
                    done, fault = self.refused(body_of(f"{body['model']}|greedy|0", 8) | dice.choice(WRONG))
                elif kind < 0.35:
                    done, fault = self.left(key, body, dice)
                else:
                    done, fault = f"answered {form}", self.answered(key, body, dice.random() < 0.5)
            except Exception as error:
                done, fault = "failed", f"{type(error).__name__} {error}"
            if fault and self.gone():
                return  # its end is told, not what it broke
            with self.lock:
                self.kept.counts[done] = self.kept.counts.get(done, 0) + 1
                self.life.requests += 1
                self.kept.faults += [f"{key}, {done}: {fault}"] if fault else []

    def gone(self) -> bool:
        """Whether the server ends: who is killed closes its connections a moment before."""
        with suppress(Exception):
            self.server.process.wait(1)
        return self.server.process.poll() is not None

    def refused(self, request: dict[str, Any]) -> tuple[str, str]:
        try:
            self.client.chat.completions.create(**request)
        except openai.APIStatusError as error:
            return "wrong", "" if 400 <= error.status_code < 500 else f"{error}"
        return "wrong", "a wrong request was answered"

    def answered(self, key: str, body: dict[str, Any], streamed: bool) -> str:
        if streamed:
            began, first = time.perf_counter(), list[float]()
            chunks = self.client.chat.completions.create(**body, stream=True)
            said = gathered(chunks, lambda: first.append(1e3 * (time.perf_counter() - began)))
            with self.lock:
                self.kept.firsts.setdefault(body["model"], []).append(round(first[0], 1))
        else:
            said = [
                [
                    choice.message.content or "",
                    [[call.function.name, call.function.arguments] for call in choice.message.tool_calls or ()],
                    choice.finish_reason,
                ]
                for choice in self.client.chat.completions.create(**body).choices
            ]
        return "" if said == self.kept.want[key] else f"{said}, not {self.kept.want[key]}"

    def left(self, key: str, body: dict[str, Any], dice: random.Random) -> tuple[str, str]:
        """Asks and goes away. What was read before must be a beginning of the answer."""
        where, right = dice.choice(LEFT), self.kept.want[key]
        assert right is not None
        if where == "in its stream":
            stream, said = self.client.chat.completions.create(**body, stream=True), ""
            for _, chunk in zip(range(dice.randrange(1, 12)), stream, strict=False):
                said += (chunk.choices[0].delta.content or "") if chunk.choices[0].index == 0 else ""
            stream.close()
            return f"left {where}", "" if right[0][0].startswith(said) else f"{said!r} is no beginning of {right}"
        if where == "before an answer":  # a prompt that no cache has, so that it is read
            body |= {"messages": user(f"{dice.random()} " + PROMPTS[-1] * dice.randrange(1, 12))}
        data = json.dumps(body | {"stream": where == "without reading it"}).encode()
        host, port = self.server.url.removeprefix("http://").split(":")
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}:{port}\r\nAuthorization: Bearer {TOKEN}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        ).encode()
        cuts = {LEFT[0]: 0, LEFT[1]: dice.randrange(len(head)), LEFT[2]: len(head) + dice.randrange(len(data))}
        with socket.create_connection((host, int(port)), 30) as connection:
            connection.sendall((head + data)[: cuts.get(where)])
            if where not in cuts:
                time.sleep(dice.random() ** 2)
            if dice.random() < 0.5:  # a reset
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return f"left {where}", ""


def gathered(chunks: Any, first: Callable[[], None]) -> Answers:
    """The answers of a stream; `first` is called at what each chunk says."""
    said: dict[int, list[Any]] = {}
    for chunk in chunks:
        choice = chunk.choices[0]
        answer = said.setdefault(choice.index, ["", [], None])
        if chunk.streamspec["tokens"]:
            first()
        answer[0] += choice.delta.content or ""
        for piece in choice.delta.tool_calls or ():
            while len(answer[1]) <= piece.index:
                answer[1].append(["", ""])
            answer[1][piece.index][0] += piece.function.name or ""
            answer[1][piece.index][1] += piece.function.arguments or ""
        answer[2] = answer[2] or choice.finish_reason
    return [said[index] for index in sorted(said)]


def at_rest(metrics: Callable[[], str], loaded: bool = False) -> str:
    """Waits until nothing is under way and, unless `loaded`, no bundle in memory. Returns a fault, "" for none."""
    ends, found = time.monotonic() + SETTLED, ""
    while time.monotonic() < ends:
        with suppress(Exception):
            found = metrics()
            quiet = 'state="busy"} 0' in found and "waiting_requests 0" in found
            if quiet and (loaded or 'state="loaded"} 0' in found):
                return ""
        time.sleep(0.2)
    return f"not at rest {SETTLED} s after the last request: {found[:2000]}"


def piece(server: Server, kept: Kept, minutes: float, clients: int, save: Callable[[], None]) -> None:
    """Rounds of requests and rests, as long as it lasts."""
    life, watched, done, began = kept.lives[-1], server.watched, threading.Event(), time.monotonic()
    asking = Clients(server, kept)

    def watch() -> None:
        for tick in count(1):
            if done.wait(0.2):
                return
            with suppress(psutil.Error):
                life.highest = max(life.highest, watched.memory_info().data)
            if tick % 5 == 0:
                with asking.lock:
                    life.seconds = time.monotonic() - began
                    save()

    watcher = threading.Thread(target=watch)
    watcher.start()
    with ThreadPoolExecutor(SESSIONS) as threads:
        model = next(iter(kept.want)).split("|")[0]
        list(threads.map(asking.refused, [{"model": model, "messages": LARGEST}] * SESSIONS))
    ends, rounds = began + 60 * minutes, 0
    while time.monotonic() < ends and server.process.poll() is None:
        until = min(ends, time.monotonic() + ROUND)
        with ThreadPoolExecutor(clients) as threads:
            list(threads.map(partial(asking.work, ends=until), range(clients)))
        fault = "" if asking.gone() else at_rest(server.metrics)
        if asking.gone():
            break
        kept.faults += [fault] if fault else []
        time.sleep(IDLE)  # who unloads says so first
        life.rests.append((life.requests, round(server.memory(), 2), watched.num_threads(), watched.num_fds()))
        steps = re.search(r"^streamspec_shared_steps_total (\d+)", server.metrics(), re.MULTILINE)
        life.shared_steps = int(steps[1]) if steps else 0
        rounds += 1
        if kept.cap is None and rounds == UNCAPPED:
            kept.cap = int(life.highest / SHARE)
            watched.rlimit(psutil.RLIMIT_DATA, (kept.cap, kept.cap))
        print(f"{life.requests} requests, {len(kept.faults)} faults, {life.rests[-1][1]:.1f} MB at rest", flush=True)
    done.set()
    watcher.join()
    code = server.process.poll()
    if code is None:
        began = time.perf_counter()
        server.end()
        life.ended = f"SIGTERM, {time.perf_counter() - began:.2f} s"
    else:
        life.ended = f"killed by signal {-code}" if code < 0 else f"ended by itself with {code}"


def leftover(kept: Kept) -> None:
    """Ends the server of a piece whose clients were killed; it must have seen them go."""
    if not kept.lives or kept.lives[-1].ended:
        return
    life = kept.lives[-1]
    life.ended = "the clients were killed"
    with suppress(psutil.Error):
        process = psutil.Process(life.pid)
        if process.create_time() == life.created:
            fault = at_rest(partial(metrics_of, life.url), loaded=True)
            kept.faults += [f"clients were killed: {fault}"] if fault else []
            process.terminate()
            process.wait(10)
            life.ended += ", the server ended at once"


def tiny_bundles(folder: Path, provider: str, several: bool) -> list[Path]:
    """Makes them once: one for tools, `several`: and one for what else the provider can do."""
    sys.path.append(str(Path(__file__).resolve().parents[1]))
    from tests.support.served_bundles import NATIVE_HEADS, calling_bundle, shareable_bundle, swappable_bundle

    makers: dict[str, Callable[[Path], Path]] = {
        "shared" if provider == "native" else "swap": shareable_bundle if provider == "native" else swappable_bundle,
        "tools": partial(calling_bundle, precision="int8", **NATIVE_HEADS),
    }
    made = []
    for name in [*makers][0 if several else 1 :]:
        ready = (folder / name / name / "manifest.json").exists()
        made.append(folder / name / name if ready else makers[name](folder / name))
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundles", type=Path, nargs="*", metavar="BUNDLE")
    parser.add_argument("--minutes", type=float, default=15, help="of this piece")
    parser.add_argument("--kept", type=Path, default=Path("soak.json"))
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--context", type=int)
    parser.add_argument("--provider", default="cpu", help="of the server and the sessions; native: calls are shared")
    given = parser.parse_args()
    folder = given.kept.resolve().with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    bundles = [*given.bundles, *tiny_bundles(folder, given.provider, not given.bundles)]
    asked = [str(bundle.resolve()) for bundle in bundles], given.tokens
    kept = Kept.read(given.kept) if given.kept.exists() else Kept(*asked)
    if (kept.bundles, kept.tokens) != asked:
        parser.error(f"found other bundles or --tokens in {given.kept}; expected the same; choose another --kept")
    leftover(kept)
    save = partial(kept.write, given.kept)
    want(kept, save, threads=given.threads, context=given.context, provider=given.provider)
    more = ["--idle", str(IDLE), "--timeout", str(PATIENCE), "--provider", given.provider]
    more += ["--context", str(given.context)] if given.context else []
    also = [word for bundle in bundles[1:] for word in ("--also", str(bundle))]
    server = Server(bundles[0], given.threads, SESSIONS, *also, *more)
    kept.lives.append(Life(server.process.pid, server.watched.create_time(), server.url))
    if kept.cap is not None:
        server.watched.rlimit(psutil.RLIMIT_DATA, (kept.cap, kept.cap))
    save()
    try:
        piece(server, kept, given.minutes, given.clients, save)
    finally:
        if server.process.poll() is None:
            server.end()
        save()
    report(kept)
    return 1 if kept.faults or "killed" in kept.lives[-1].ended else 0


if __name__ == "__main__":
    sys.exit(main())
