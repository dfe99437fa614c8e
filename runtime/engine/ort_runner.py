"""Runs one sequence of tokens on a loaded model: its KV cache, prompt chunks, sampling state and cancellation.

Any number of runners share a `LoadedModel`. A `GraphCall` and a `Cache`, chosen by the kind of the bundle
(`graph_kinds`), do what depends on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Self

import numpy as np

from streamspec.bundle.manifest import Manifest
from streamspec.draft_tree import MASKED, MAX_GAMMA
from streamspec.errors import BundleError, ConfigError
from streamspec.runtime.decoding.model_runner import StepRequest, StepResult
from streamspec.runtime.engine.executor import GraphExecutor
from streamspec.runtime.engine.graph_call import CallContext, CallRows, DrafterShape, GraphCall, SamplingState, counted
from streamspec.runtime.engine.graph_kinds import graph_kind
from streamspec.runtime.engine.loaded_model import LoadedModel
from streamspec.runtime.engine.memory_estimate import CHUNK, prompt_rows
from streamspec.runtime.kv_cache.host_cache import Cache
from streamspec.runtime.sampling.sampling_params import GREEDY, Sampling

SHARED_CHUNK = 64  # maximum prompt rows per call while other requests wait
SCORE_CHUNK = 64  # rows of logits per call: 64 x 150,000 x 4 bytes is 38 MB


class OrtRunner:
    """See `streamspec.runtime.decoding.model_runner.ModelRunner`. Not for use from several threads at once, `cancel`
    excepted.
    """

    secondary = False

    def __init__(self, model: LoadedModel, context: int | None = None) -> None:
        """`context`: maximum number of tokens in the cache; default: the model's context.

        Raises ConfigError for a context that the model does not have, ProviderError for a device without room for the
        cache.
        """
        manifest = model.manifest
        self.model = model
        self.provider = model.provider
        self.threads = model.threads
        self.rows = model.rows
        # The row counts of calls, where the graph has a few fixed shapes.
        self.row_counts = model.captured.rows if model.captured else ()
        self.context_length = manifest.model.context_length if context is None else context
        if type(self.context_length) is not int or not 2 <= self.context_length <= manifest.model.context_length:
            raise ConfigError(
                f"a context of {context!r} tokens",
                f"2..{manifest.model.context_length}, the model's",
                "correct context",
            )
        self.vocab_size = manifest.model.vocab_size
        self.tokens: list[int] = []  # in the cache
        self._verified: Sequence[int] = ()  # tokens of the last call
        self._kind = graph_kind(model)
        self.trees = self._kind.trees
        self._executor = GraphExecutor(model)
        self._sampling_state = SamplingState(self.vocab_size)
        self._drafter = DrafterShape.of_manifest(manifest)
        self._adapter: Mapping[str, Any] = {}
        self.gamma = self._drafter.gamma
        self.reload()
        model.attach(self)

    # ---- what it is over

    def fork(self, context: int | None = None) -> Self:
        """See `ModelRunner`. For a swappable bundle the fork runs the base alone."""
        return type(self)(self.model, self.context_length if context is None else context)

    def use(self, manifest: Manifest, adapter: Mapping[str, Any]) -> None:
        """Switches to the tensors of `adapter`, OrtValues by input name, as `manifest` describes it, and empties the
        cache. Raises BundleError where they cannot be bound; nothing changes then."""
        drafter = DrafterShape.of_manifest(manifest)
        try:
            call = self._new_call(drafter, adapter)
        except Exception as error:
            raise BundleError(
                f"an adapter that cannot be bound: {error}", "one for this graph", "make it again"
            ) from error
        self._call, self._drafter, self._adapter = call, drafter, adapter
        self.gamma = drafter.gamma
        self.rewind(0)

    def unload(self) -> None:
        """Forgets all tokens and releases cache and model."""
        self.tokens = []
        for held in ("cache", "_call"):
            vars(self).pop(held, None)

    def reload(self) -> None:
        """Binds to the model, which may have been opened again, with an empty cache."""
        self.cache = self._empty_cache()
        self._call = self._new_call(self._drafter, self._adapter)

    def _empty_cache(self) -> Cache:
        # Room beyond the context for rows that are verified but never committed.
        spare = CHUNK + (MAX_GAMMA if self.model.manifest.swappable else self.gamma)
        return self._kind.cache(self.model, self.context_length + spare)

    def _new_call(self, drafter: DrafterShape, adapter: Mapping[str, Any]) -> GraphCall:
        return self._kind.call(CallContext(self._executor, self.cache, self._sampling_state, drafter, adapter))

    # ---- the sequence

    @property
    def length(self) -> int:
        """Tokens in the cache."""
        return self.cache.length

    @property
    def position(self) -> int:
        """Position of the next token in the text."""
        return self.cache.length

    def reusable(self, prompt: Sequence[int]) -> int:
        same, cache = shared_prefix(self.tokens, prompt[:-1]), vars(self).get("cache")  # which an idle model lets go
        # What a draft layer keeps of a token depends on the token after it.
        return cache.reachable(max(0, same - bool(self._drafter.levels))) if same and cache is not None else 0

    def begin(self, prompt: Sequence[int], sampling: Sampling = GREEDY, logits: bool = False, turn: bool = True) -> int:
        self.rewind(self.reusable(prompt))
        self.cache.keep(len(prompt), turn)
        self._choose_by(sampling, logits)
        return self.length

    def reset(self, sampling: Sampling = GREEDY) -> None:
        """Empties the cache, forgets a cancellation, and chooses tokens by `sampling` from now on."""
        self._executor.clear()
        self.rewind(0)
        self._choose_by(sampling)

    def rewind(self, length: int) -> None:
        """Forgets all tokens after the first `length`. Raises ValueError where a layer no longer holds what the next
        tokens would see (`Cache.reachable`)."""
        if "_call" not in vars(self):  # the last reload failed
            self.reload()
        bound = self.cache.data
        self.cache.rewind(length)
        del self.tokens[length:]
        if self.cache.data is not bound:
            self._call.follow_cache()

    def release(self) -> None:
        """Forgets all tokens and gives their memory back."""
        self.unload()  # or neither a place among shared ones nor a device's buffers would be free yet
        self.reload()

    def snapshot(self) -> tuple[list[int], list[np.ndarray]]:
        return self.tokens[: self.cache.length], self.cache.rows()  # a failed call may have lost the last

    def restore(self, tokens: Sequence[int], rows: Sequence[np.ndarray]) -> None:
        self.rewind(0)
        self.cache.reserve(0, len(tokens))
        self.cache.fill(rows, len(tokens))
        self.tokens = list(tokens)
        self._call.follow_cache()

    def _choose_by(self, sampling: Sampling, logits: bool = False) -> None:
        self._sampling_state.begin(sampling, self.tokens, logits)
        self._call.begin()

    # ---- calls

    @property
    def together(self) -> int:
        return self._call.together

    @property
    def graph_seconds(self) -> float:
        return self._executor.graph_seconds

    @property
    def waited_seconds(self) -> float:
        return self._executor.waited_seconds

    def cancel(self) -> None:
        self._executor.cancel()

    def generation(self) -> AbstractContextManager[None]:
        return self._executor.request()

    def prefill(self, request: StepRequest, progress: Callable[[int], None] | None = None) -> StepResult:
        ids, result, end = request.tokens, StepResult(()), 0
        while end < len(ids):
            start, end = end, min(end + self._prompt_rows(), len(ids))
            chunk, n, last = ids[start:end], end - start, end == len(ids)
            positions, next_ids = self.length + np.arange(n), np.array([*ids[start + 1 : end + 1], -1][:n])
            rows = CallRows(chunk, positions, causal_mask(n), np.zeros(1, np.int64), np.array([n - 1]), next_ids)
            self._verified = chunk
            shrink = last and end > SHARED_CHUNK  # rows x context x heads: no later call needs as much
            result = self._call.run(rows, request if last else StepRequest(chunk), n - 1, shrink)
            self.commit(range(n))
            if progress is not None:
                progress(end)
        return result

    def verify(self, request: StepRequest) -> StepResult:
        tokens, tree, position = request.tokens, request.tree, self.position
        positions = [position + depth for depth in tree.depths]
        rows = CallRows(tokens, positions, tree.mask(), tree.parents_array, counted(len(tree)), None, tree)
        self._verified = tokens
        return self._call.run(rows, request)

    def commit(self, path: Sequence[int]) -> None:
        committed = [self._verified[node] for node in path]
        self.tokens += committed  # first: an interrupt between may leave more tokens than rows, not fewer
        self._call.commit(path)
        self._sampling_state.saw(committed)

    def forward(
        self, tokens: Sequence[int], offsets: Sequence[int], mask: np.ndarray, after: Sequence[int] = ()
    ) -> np.ndarray:
        """Returns logits float32 [n, vocabulary] of rows at positions `length + offsets` under `mask` [n, n]; commits
        nothing. `after` [n]: the token after each, which a draft layer reads beside it, -1 for what the model chooses.
        """
        n = len(tokens)
        self._verified = tokens
        positions = [self.length + offset for offset in offsets]
        next_ids = np.array(after[:n]) if after else None
        return self._call.logits(CallRows(tokens, positions, mask, np.zeros(n, np.int64), np.arange(n), next_ids))

    def score(self, ids: Sequence[int], start: int = 0) -> np.ndarray:
        return np.concatenate([np.empty((0, self.vocab_size), np.float32), *self.score_chunks(ids, start)])

    def score_chunks(self, ids: Sequence[int], start: int = 0) -> Iterator[np.ndarray]:
        self.reset()
        if start:
            self.prefill(StepRequest(ids[:start]))
        count = self._call.max_rows or SCORE_CHUNK
        for at in range(start, len(ids), count):
            chunk = ids[at : at + count]
            yield self.forward(chunk, range(len(chunk)), causal_mask(len(chunk)), [*ids[at + 1 : at + count + 1], -1])
            self.commit(range(len(chunk)))

    def _prompt_rows(self) -> int:
        """Returns how many rows of a prompt the next call reads."""
        limit = prompt_rows(self.model.manifest.model, self.length + CHUNK)
        limit = min(limit, SHARED_CHUNK if self.model.scheduler.shared else CHUNK)
        limit = min(limit, self._call.prompt_rows or limit)
        return self._call.max_rows or min(limit, self.cache.max_call_rows or limit)


def causal_mask(n: int) -> np.ndarray:
    """Returns float32 [n, n]: row i sees rows up to i."""
    return np.triu(np.full((n, n), MASKED, dtype=np.float32), k=1)


def shared_prefix(cached: Sequence[int], prompt: Sequence[int]) -> int:
    """Returns the number of tokens that both begin with."""
    return next(
        (i for i, (a, b) in enumerate(zip(cached, prompt, strict=False)) if a != b), min(len(cached), len(prompt))
    )
