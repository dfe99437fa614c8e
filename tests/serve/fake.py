"""A session without a model: it says the prompt's last word again and again, a letter a token, two tokens a step, as slowly as asked."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from streamspec.errors import ConfigError, ContextOverflow
from streamspec.runtime.session import Chunk
from streamspec.runtime.stats import Stats
from tests.runtime.texts import byte_level

TOKENIZER = byte_level()
CONTEXT = 4096


@dataclass
class Shared:
    """What the sessions of one fake bundle share, for tests to look at and to steer."""

    step: float = 0.0  # seconds a step takes
    running: int = 0
    most: int = 0  # running at once, at most
    swaps: int = 0
    asked: list[str] = field(default_factory=list)  # prompts in the order in which they began
    gate: threading.Event = field(default_factory=threading.Event)  # nothing is said before it is set
    fails: BaseException | None = None  # raised behind the first chunk
    lock: threading.Lock = field(default_factory=threading.Lock)


class FakeSession:
    """As much of `Session` as the server uses."""

    def __init__(self, shared: Shared, adapter: str | None = None) -> None:
        self.shared, self.adapter, self.tokenizer = shared, adapter, TOKENIZER
        self.adapters = ["alpha", "beta"]
        self.manifest = SimpleNamespace(prompt_format=SimpleNamespace(kind="raw"))
        self.engine = SimpleNamespace(tokens=[])
        self._cancelled = self._generating = False

    def another(self, adapter: str | None = None) -> FakeSession:
        return FakeSession(self.shared, adapter)

    def swap(self, adapter: str | None) -> None:
        self.shared.swaps += 1
        self.adapter, self.engine.tokens = adapter, []

    def encode(self, prompt: Any) -> list[int]:
        text = prompt if isinstance(prompt, str) else "\n".join(message["content"] for message in prompt)
        ids = list(TOKENIZER.encode(text).ids)
        if len(ids) >= CONTEXT:
            raise ContextOverflow(f"a prompt of {len(ids)} tokens", f"fewer than {CONTEXT}", "shorten the prompt")
        return ids

    def cancel(self, rollback: bool = False) -> None:
        if self._generating:
            self._cancelled = True

    def stream(self, prompt: Any, *, max_new_tokens: int = 256, timeout: float | None = None, **options: Any) -> Iterator[Chunk]:
        ids = self.encode(prompt)
        if options.get("stop") == ["refuse"]:
            raise ConfigError("a stop string", "another", "correct it")
        return self._chunks(ids, max_new_tokens, timeout or 1e9)

    def _chunks(self, ids: list[int], limit: int, timeout: float) -> Iterator[Chunk]:
        shared, ends = self.shared, time.perf_counter() + timeout
        with shared.lock:
            shared.running += 1
            shared.most = max(shared.most, shared.running)
            shared.asked.append(TOKENIZER.decode(ids).split()[-1])
        self._cancelled, self._generating = False, True
        try:
            reused = next((i for i, (a, b) in enumerate(zip(self.engine.tokens, ids, strict=False)) if a != b), min(len(ids), len(self.engine.tokens)))
            word = TOKENIZER.decode(ids).split()[-1] + " "
            stats = Stats(prompt_tokens=len(ids), reused_tokens=reused, prefill_seconds=0.01)
            said = list(TOKENIZER.encode(word).ids) * (1 + limit // len(word))
            while True:
                shared.gate.wait(max(0, ends - time.perf_counter())) if not self._cancelled else None
                time.sleep(shared.step)
                count = min(2 if stats.new_tokens else 1, limit - stats.new_tokens)
                tokens = said[stats.new_tokens : stats.new_tokens + count]
                stats.steps += stats.new_tokens > 0
                stats.step_tokens += count if stats.new_tokens else 0
                stats.rows = 4 if stats.new_tokens else 0
                stats.new_tokens += count
                self.engine.tokens = [*ids, *said[: stats.new_tokens]]
                reason = "length" if stats.new_tokens == limit else "timeout" if time.perf_counter() > ends else "cancelled" if self._cancelled else None
                yield Chunk(TOKENIZER.decode(tokens), tokens, [True] * (count - 1) + [False], reason, replace(stats))
                if reason:
                    return
                if shared.fails is not None:
                    raise shared.fails
        finally:
            self._generating = False
            with shared.lock:
                shared.running -= 1
