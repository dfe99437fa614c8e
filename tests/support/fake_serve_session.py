"""A session without a model: it says the prompt's last word again and again, a letter a token, two tokens a step, as
slowly as asked.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Unpack

from streamspec.errors import ConfigError, ContextOverflow
from streamspec.runtime import Chunk, GenerationOptions, Sampling
from streamspec.runtime.decoding.stats import Stats
from streamspec.runtime.engine.ort_runner import shared_prefix
from streamspec.runtime.options import GenerationKwargs
from streamspec.runtime.text.grammar import Vocabulary
from tests.support.byte_tokenizers import EOS, byte_level

TOKENIZER = byte_level()
CONTEXT = 4096


@dataclass
class Shared:
    """What the sessions of one fake bundle share, for tests to look at and to steer."""

    step: float = 0.0  # seconds a step takes
    swapping: float = 0.0  # and taking another adapter
    running: int = 0
    most: int = 0  # running at once, at most
    swaps: int = 0
    asked: list[str] = field(default_factory=list)  # prompts in the order in which they began
    options: list[GenerationOptions] = field(default_factory=list)  # of the answers, in the same order
    gate: threading.Event = field(default_factory=threading.Event)  # nothing is said before it is set
    fails: BaseException | None = None  # raised after the first chunk
    lock: threading.Lock = field(default_factory=threading.Lock)


class FakeServeSession:
    """As much of `Session` as the server uses."""

    def __init__(self, shared: Shared, adapter: str | None = None) -> None:
        self.shared, self.adapter, self.tokenizer = shared, adapter, TOKENIZER
        self.sampling, self.thought, self.context_length = Sampling(), None, CONTEXT
        self.template = None
        self.adapters, self.loaded = ["alpha", "beta"], True
        self.manifest = SimpleNamespace(
            prompt_format=SimpleNamespace(kind="raw"),
            model=SimpleNamespace(embeddings=False),
            base=SimpleNamespace(model_type="llama"),
            precision="int8",
            data_bytes=1000,
            to_json=lambda: "{}",
        )
        self.vocabulary = Vocabulary(TOKENIZER, 257, [EOS])
        self.cached_tokens: list[int] = []
        self.taken_back = CONTEXT  # most tokens that it can go back

    def reusable_tokens(self, prompt: Sequence[int]) -> int:
        same = shared_prefix(self.cached_tokens, prompt[:-1])
        return same if len(self.cached_tokens) - same <= self.taken_back else 0

    def reading_for(self, adapter: str | Path | None) -> FakeServeSession:
        return self

    def another(self) -> FakeServeSession:
        return FakeServeSession(self.shared, self.adapter)

    def swap(self, adapter: str | Path | None) -> None:
        self.shared.swaps += 1
        time.sleep(self.shared.swapping)
        self.adapter, self.cached_tokens = None if adapter is None else str(adapter), []

    def encode(self, prompt: Any, **variables: Any) -> list[int]:
        if isinstance(prompt, list) and all(isinstance(token, int) for token in prompt):
            return list(prompt)
        text = prompt if isinstance(prompt, str) else "\n".join(message["content"] for message in prompt)
        return list(TOKENIZER.encode(text).ids)

    def stream(
        self, prompt: Any, options: GenerationOptions | None = None, **keywords: Unpack[GenerationKwargs]
    ) -> FakeStream:
        ids, options = self.encode(prompt), GenerationOptions.of(options, **keywords)
        if len(ids) >= CONTEXT:
            raise ContextOverflow(f"a prompt of {len(ids)} tokens", f"fewer than {CONTEXT}", "shorten the prompt")
        self.shared.options.append(options)
        if options.stops == ["refuse"]:
            raise ConfigError("a stop string", "another", "correct it")
        cancelled = threading.Event()
        return FakeStream(self._chunks(ids, options.max_new_tokens, options.timeout or 1e9, cancelled), cancelled)

    def _chunks(
        self, ids: list[int], limit: int, timeout: float, cancelled: threading.Event
    ) -> Generator[Chunk, None, None]:
        shared, ends = self.shared, time.perf_counter() + timeout
        with shared.lock:
            shared.running += 1
            shared.most = max(shared.most, shared.running)
            shared.asked.append(TOKENIZER.decode(ids).split()[-1])
        try:
            reused = self.reusable_tokens([*ids, 0])
            word = TOKENIZER.decode(ids).split()[-1] + " "
            stats = Stats(prompt_tokens=len(ids), reused_tokens=reused, prefill_seconds=0.01)
            said = list(TOKENIZER.encode(word).ids) * (1 + limit // len(word))
            while True:
                while not (shared.gate.wait(0.005) or cancelled.is_set() or time.perf_counter() > ends):
                    pass
                time.sleep(shared.step)
                count = min(2 if stats.new_tokens else 1, limit - stats.new_tokens) if shared.gate.is_set() else 0
                tokens = said[stats.new_tokens : stats.new_tokens + count]
                stats.steps += stats.new_tokens > 0
                stats.step_tokens += count if stats.new_tokens else 0
                stats.rows = 4 if stats.new_tokens else 0
                stats.new_tokens += count
                self.cached_tokens = [*ids, *said[: stats.new_tokens]]
                reason = (
                    "length"
                    if stats.new_tokens == limit
                    else "timeout"
                    if time.perf_counter() > ends
                    else "cancelled"
                    if cancelled.is_set()
                    else None
                )
                drafted = ([True] * (count - 1) + [False])[:count]
                yield Chunk(TOKENIZER.decode(tokens), tokens, drafted, reason, replace(stats))
                if reason:
                    return
                if shared.fails is not None:
                    raise shared.fails
        finally:
            with shared.lock:
                shared.running -= 1


class FakeStream:
    def __init__(self, chunks: Generator[Chunk, None, None], cancelled: threading.Event) -> None:
        self._chunks, self._cancelled = chunks, cancelled

    def __iter__(self) -> Iterator[Chunk]:
        return self._chunks

    def close(self) -> None:
        self._chunks.close()

    def cancel(self) -> None:
        self._cancelled.set()
