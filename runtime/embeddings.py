"""Embeds texts: the states of the target's last layer, of each text their mean or the last one.

They are what the LM head reads, of a model that was trained to continue texts, not to compare them
(docs/guides/embed-in-an-app.md, "Embeddings").
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from streamspec.errors import ConfigError, ContextOverflow, StreamspecError
from streamspec.prompt.prompt_format import PromptFormat
from streamspec.runtime import conversation
from streamspec.runtime.decoding.model_runner import Cancelled
from streamspec.runtime.engine.dynamic_call import DynamicCall
from streamspec.runtime.engine.graph_call import CallRows, counted
from streamspec.runtime.engine.loaded_model import LoadedModel
from streamspec.runtime.engine.ort_runner import SCORE_CHUNK, OrtRunner, causal_mask
from streamspec.runtime.kv_cache.host_cache import Cache, KeyValueCache
from streamspec.runtime.kv_cache.layout import cache_groups
from streamspec.runtime.options import GenerationOptions
from streamspec.runtime.stream import CancelToken

if TYPE_CHECKING:
    from streamspec.runtime.session import Session

Texts = str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]]
MEAN, LAST = POOLINGS = "mean", "last"
TINY = 1e-30  # length of a vector of zeros
AS_IT_IS = PromptFormat()  # with the tokenizer's special tokens, as the base was trained


class StatesRunner(OrtRunner):
    """Reads texts into a cache of its own, apart from the session's conversation."""

    secondary = True

    def _empty_cache(self) -> Cache:
        if self.model.sharing is None:
            return super()._empty_cache()
        # The shared places are for answers.
        return KeyValueCache(cache_groups(self.model.features), self.context_length + self.gamma)

    def pooled(self, ids: Sequence[int], pooling: str, control: CancelToken) -> np.ndarray:
        """Returns float64 [hidden]. Raises Cancelled."""
        self.rewind(0)
        total, count = np.zeros(self.model.manifest.model.hidden_size), 0
        for states in self._states(ids, pooling == LAST):
            control.check()
            total, count = total + states.sum(axis=0, dtype=np.float64), count + len(states)
        return total / count

    def _states(self, ids: Sequence[int], last: bool) -> Iterator[np.ndarray]:
        """Finished states float32 [rows, hidden] of all tokens in parts, or of the `last` one alone."""
        assert isinstance(self._call, DynamicCall)  # other graphs give none
        end = 0
        while end < len(ids):
            limit = self._prompt_rows() if last else min(self._prompt_rows(), SCORE_CHUNK)
            start, end = end, min(end + limit, len(ids))
            self._verified = chunk = ids[start:end]
            n = len(chunk)
            logit_rows = np.array([n - 1]) if last else counted(n)
            positions, parents = self.length + counted(n), np.zeros(len(logit_rows), np.int64)
            states = self._call.states(CallRows(chunk, positions, causal_mask(n), parents, logit_rows))
            self.commit(range(n))
            if not last or end == len(ids):
                yield states


class Embedding:
    """Embeds texts in a session, once: `run` computes, `cancel` ends that from any thread, also before it begins."""

    def __init__(self, session: Session, texts: Texts, pooling: str = MEAN, normalize: bool = True) -> None:
        """Raises what `Session.embed` raises of its arguments."""
        if not session.manifest.model.embeddings:
            raise ConfigError(
                "a bundle without embeddings", "one of `streamspec export --embeddings`", "export it again with this"
            )
        if pooling not in POOLINGS:
            raise ConfigError(f"pooling {pooling!r}", " or ".join(POOLINGS), "choose one of them")
        self._session, self._pooling, self._normalize = session, pooling, normalize
        self._control = CancelToken()
        inputs: Sequence[Any] = texts if conversation.several(texts) else [texts]  # type: ignore[assignment]
        self.token_ids = [self._tokens(text, session.context_length) for text in inputs]

    def _tokens(self, text: Any, context: int) -> list[int]:
        session = self._session
        ids = conversation.encode(text, AS_IT_IS, None, session.tokenizer, {}, None)
        conversation.check_tokens(ids, session.manifest.model.vocab_size)
        if len(ids) > context:
            raise ContextOverflow(f"a text of {len(ids)} tokens", f"at most {context}", "shorten the text, or split it")
        return ids

    def run(self, timeout: float | None = None) -> np.ndarray:
        """Returns float32 [texts, hidden]. Raises StreamspecError where it was cancelled or took more than `timeout`
        seconds, ConfigError while the session is busy."""
        GenerationOptions(timeout=timeout)  # which refuses what is no time
        session, control = self._session, self._control
        try:
            with control.within(timeout), session._exclusive(control):
                control.check()
                assert isinstance(session.runner.model, LoadedModel)
                runner = StatesRunner(session.runner.model, session.context_length)
                with control.over(runner):
                    control.check()
                    vectors = np.stack([runner.pooled(ids, self._pooling, control) for ids in self.token_ids])
        except Cancelled:
            raise StreamspecError(
                f"embeddings that were ended: {control.reason}", "time for all texts", "ask again, or for fewer texts"
            ) from None
        if self._normalize:
            vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), TINY)
        return vectors.astype(np.float32)

    def cancel(self) -> None:
        """Ends `run`, which then raises StreamspecError."""
        self._control.end("cancelled")
