"""Embeds the texts of a request in a session of the pool. `tests/serve/test_embeddings.py` covers this file."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from streamspec.errors import StreamspecError
from streamspec.runtime import Session, Stats
from streamspec.runtime.embeddings import Embedding
from streamspec.serve.errors import ended_by_time
from streamspec.serve.pool import Pool, QueuedRequest


class Embedded(NamedTuple):
    """Vectors float32 [texts, hidden], and the tokens of all texts."""

    vectors: np.ndarray
    tokens: int


class EmbeddingRequest(QueuedRequest):
    """Waits and runs as a generation does; reads and writes no conversation's cache."""

    def __init__(self, pool: Pool, adapter: str | None, texts: Sequence[Any], pooling: str, base: Session) -> None:
        super().__init__(pool, adapter, (), (), None, base)
        self.texts, self.pooling = texts, pooling

    async def embedded(self) -> Embedded:
        """Returns the vectors. Raises as `items`."""
        async for vectors in self.items():
            assert isinstance(vectors, Embedded)
            return vectors
        raise AssertionError("ended without vectors")  # only where it was cancelled, and then nobody waits

    def _answer(self, session: Session, loop: asyncio.AbstractEventLoop, ends: list[Stats]) -> None:
        self.running = embedding = Embedding(session, self.texts, self.pooling)
        if self._cancelled:  # it may have been before there was anything to end
            embedding.cancel()
        began = time.perf_counter()
        try:
            vectors = embedding.run(max(self.left, 0.001))
        except StreamspecError:
            if self._cancelled:
                return
            if self.left <= 0:
                raise ended_by_time(self.pool.limits.timeout) from None
            raise
        tokens = sum(map(len, embedding.token_ids))
        ends.append(Stats(prompt_tokens=tokens, prefill_seconds=time.perf_counter() - began))
        self.tell(loop, Embedded(vectors, tokens))
