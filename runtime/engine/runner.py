"""One sequence of tokens on a step graph: its cache, its prebuilt bindings, how its tokens are chosen.

Any number of engines share a `LoadedModel`. One session serves prompt chunks and draft trees: shapes are dynamic.
Inputs live in numpy buffers that ONNX Runtime reads in place; a buffer is bound again only where its shape changes. The
cache is bound as past and present at once. Knows nothing about text or about which tokens are worth drafting.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

import numpy as np

from streamspec.acceptance_stats import MAX_GAMMA
from streamspec.bundle.manifest import Manifest
from streamspec.draft_tree import MASKED, DraftTree
from streamspec.errors import BundleError, ConfigError, ProviderError
from streamspec.runtime.decoding.draft_tree_search import IndependentProposal, TreeProposal
from streamspec.runtime.decoding.model_runner import Pruning, StepResult
from streamspec.runtime.decoding.sampling import GREEDY, Sampling
from streamspec.runtime.engine.device_cache import DeviceCache
from streamspec.runtime.engine.io_binding import IoBinding
from streamspec.runtime.engine.kv_cache import KeyValueCache
from streamspec.runtime.engine.loaded_model import LoadedModel, cached_layers
from streamspec.runtime.engine.memory_estimate import CHUNK, prompt_rows
from streamspec.runtime.hardware.providers import named

SHARED_CHUNK = 64  # most prompt rows per call while other sequences wait for their turn
SCORE_CHUNK = 64  # rows of logits per call: 64 x 150,000 x 4 bytes is 38 MB
NO_LIMIT = np.array([-np.inf], np.float32)


class OrtRunner:
    """See `streamspec.runtime.decoding.model_runner.ModelRunner`. Not for use from several threads at once, `cancel`
    excepted.
    """

    def __init__(self, model: LoadedModel, context: int | None = None) -> None:
        """`context`: most tokens that the cache is to hold, by default as many as the model can.

        Raises ConfigError for a context that the model does not have, ProviderError for a device without room for the
        cache.
        """
        manifest = model.manifest
        self.model, self.provider, self.threads, self.rows = model, model.provider, model.threads, model.rows
        self.context_length = manifest.model.context_length if context is None else context
        if type(self.context_length) is not int or not 2 <= self.context_length <= manifest.model.context_length:
            raise ConfigError(
                f"a context of {context!r} tokens",
                f"2..{manifest.model.context_length}, the model's",
                "correct context",
            )
        self.vocab_size = manifest.model.vocab_size
        self.graph_seconds = self.waited_seconds = 0.0
        self._describe(manifest)
        self._adapter: Mapping[str, Any] = {}
        self.tokens: list[int] = []  # in the cache
        self.cache = self._empty_cache()
        self._binding = self._bind()
        self._scoring: IoBinding | None = None
        self._options, self._shrinking = self._run_options(shrink=False), self._run_options(shrink=model.in_place)
        self._shrink = False  # whether the next call gives the room it worked in back to the system
        self._cancelled = threading.Event()
        self._sampling, self._logits_wanted = GREEDY, False
        self._seen = np.zeros(self.vocab_size, np.bool_)  # tokens of the text so far, kept where they are penalised
        self._verified = np.empty(0, np.int64)  # tokens of the last call
        self._kept: np.ndarray | None = None  # rows of the last `verify` that went on, None for all
        model.serves(self)

    def fork(self, context: int | None = None) -> Self:
        """A sequence of its own on the same graph, of the same context unless told; for a swappable bundle the base
        alone.
        """
        return type(self)(self.model, self.context_length if context is None else context)

    def use(self, manifest: Manifest, adapter: Mapping[str, Any]) -> None:
        """From now on computes with the tensors of `adapter`, OrtValues by name of an input, as `manifest` describes
        it, from an empty cache. Where they cannot be bound nothing changes: raises BundleError."""
        try:
            binding = self._bind(adapter)
        except Exception as error:
            raise BundleError(
                f"an adapter that cannot be bound: {error}", "one for this graph", "make it again"
            ) from error
        self._binding, self._scoring, self._adapter = binding, None, adapter
        self._describe(manifest)
        self.rewind(0)
        self._kept = None

    def _bind(self, adapter: Mapping[str, Any] | None = None) -> IoBinding:
        model = self.model
        return IoBinding(
            model.ort, model.session, self.cache, self._adapter if adapter is None else adapter, model.in_place
        )

    def _describe(self, manifest: Manifest) -> None:
        """What the drafter is."""
        streams = manifest.streams
        self.gamma = streams.gamma if streams else 0
        self._bigram = bool(streams and streams.bigram)
        self._levels = streams.levels if streams else ()
        self._candidates = streams.candidates if streams else 0
        self._exit = manifest.model.layers - streams.ns if streams and streams.pruning else None

    @property
    def length(self) -> int:
        """Tokens in the cache."""
        return self.cache.length

    @property
    def cache_layers(self) -> int:
        return cached_layers(self.model.manifest)

    @property
    def cache_dtype(self) -> np.dtype:
        return self.model.cache_dtype

    def begin(self, prompt: Sequence[int], sampling: Sampling = GREEDY, logits: bool = False) -> int:
        same = shared_prefix(self.tokens, prompt[:-1])
        # What a draft layer keeps of a token depends on the token behind it.
        self.rewind(max(0, same - bool(self._levels)))
        self._choose_by(sampling, logits)
        return self.length

    def reset(self, sampling: Sampling = GREEDY) -> None:
        """Empties the cache, forgets a cancellation, and from now on chooses tokens as `sampling` says."""
        self._clear()
        self.rewind(0)
        self._choose_by(sampling)

    def rewind(self, length: int) -> None:
        """Forgets all tokens behind the first `length`."""
        if not 0 <= length <= self.cache.length:
            raise ValueError(f"rewind to {length} of {self.cache.length} tokens")
        self.cache.length = length
        del self.tokens[length:]

    def release(self) -> None:
        """Forgets all tokens and gives their memory back."""
        self.rewind(0)
        self._scoring = None
        self.reload()

    def unload(self) -> None:
        """Forgets all tokens and lets go of cache and graph, as far as it has them."""
        self.tokens, self._scoring = [], None
        for held in ("cache", "_binding"):
            vars(self).pop(held, None)

    def reload(self) -> None:
        """Takes up the graph, which may have been opened again, with an empty cache."""
        self.cache = self._empty_cache()
        self._binding = self._bind()

    def snapshot(self) -> tuple[list[int], np.ndarray]:
        """The tokens in the cache and their rows, a copy, as in `KeyValueCache.data`."""
        return list(self.tokens), self.cache.rows()

    def restore(self, tokens: Sequence[int], rows: np.ndarray) -> None:
        """Takes up what `snapshot` gave."""
        self.rewind(0)
        self.cache.reserve(len(tokens))
        self._scoring = None  # it would keep the old one alive
        self.cache.fill(rows)
        self.tokens = list(tokens)
        self._binding.follow(self.cache)

    def cancel(self) -> None:
        self._cancelled.set()
        self._options.terminate = self._shrinking.terminate = True
        self.model.turns.wake()

    @contextmanager
    def generation(self) -> Iterator[None]:
        self._clear()
        with self.model.turns.sequence():
            yield

    def _clear(self) -> None:
        self._cancelled.clear()
        self._options.terminate = self._shrinking.terminate = False

    def prefill(
        self,
        ids: Sequence[int],
        draft: bool,
        progress: Callable[[int], None] | None = None,
        allowed: np.ndarray | None = None,
    ) -> StepResult:
        tokens = np.asarray(ids, dtype=np.int64)
        result, end = StepResult(np.empty(0, np.int64)), 0
        while end < len(tokens):
            start, end = end, min(end + self._prompt_rows(), len(tokens))
            chunk, n = tokens[start:end], end - start
            inputs = self._inputs(chunk, np.arange(n), causal_mask(n), np.zeros(1, np.int64), np.array([n - 1]))
            inputs["next_ids"][:] = [*tokens[start + 1 : end + 1], -1][:n]
            self._verified, self._kept = chunk, None
            last = end == len(tokens)
            self._shrink = last and end > SHARED_CHUNK  # rows x context x heads: no later call needs as much
            result = self._call(inputs, draft and last, n - 1, allowed if last else None)
            self._commit(range(n))
            if progress is not None:
                progress(end)
        return result

    def verify(
        self,
        tokens: np.ndarray,
        tree: DraftTree,
        draft: bool,
        pruning: Pruning | None = None,
        priors: np.ndarray | None = None,
        allowed: np.ndarray | None = None,
    ) -> StepResult:
        n = len(tree)
        self._verified, self._kept = tokens, None
        inputs = self._inputs(tokens, np.asarray(tree.depths), tree.mask(), np.asarray(tree.parents), np.arange(n))
        if self._exit is None or pruning is None or self._logits_wanted:
            return self._call(inputs, draft, -1, allowed)
        inputs["keep_rows"] = np.array([min(n, pruning.rows or n)])
        inputs["keep_above"] = np.array([np.log(max(pruning.min_probability, 1e-30))], np.float32)
        inputs["priors"] = np.zeros(n, np.float32) if priors is None else priors
        result = self._call(inputs, draft, -1, allowed)
        self._kept = np.flatnonzero(result.choices >= 0)
        return result

    def commit(self, path: Sequence[int]) -> None:
        above = None
        if self._kept is not None and self._exit is not None:
            above = self._exit, np.searchsorted(self._kept, path).tolist()
        self._commit(path, above)

    def forward(self, tokens: Sequence[int], offsets: Sequence[int], mask: np.ndarray) -> np.ndarray:
        """Logits float32 [n, vocabulary] of rows at positions `length + offsets` under `mask` [n, n]; commits
        nothing.
        """
        n = len(tokens)
        self._verified, self._kept = np.asarray(tokens), None
        inputs = self._inputs(self._verified, np.asarray(offsets), mask, np.zeros(n, np.int64), np.arange(n))
        logits = np.empty((n, self.vocab_size), np.float32)
        self._make_room(n)
        if self._scoring is None:
            self._scoring = self._bind()
        binding = self._scoring
        binding.follow(self.cache)
        self._bind_inputs(binding, inputs, draft=False, forced_node=0 if self.gamma else -1)
        binding.output("raw_logits", logits)
        scale = binding.output("logit_scale", (n, 1))
        self._run(binding)
        return np.multiply(logits, scale, out=logits)

    def score(self, ids: Sequence[int], start: int = 0) -> np.ndarray:
        """Logits float32 [len(ids) - start, vocabulary] after each of `ids[start:]`, from an empty cache; commits
        `ids`.
        """
        self.reset()
        if start:
            self.prefill(ids[:start], draft=False)
        out = [np.empty((0, self.vocab_size), np.float32)]
        most = self._at_most(SCORE_CHUNK)
        for at in range(start, len(ids), most):
            chunk = ids[at : at + most]
            out.append(self.forward(chunk, range(len(chunk)), causal_mask(len(chunk))))
            self._commit(range(len(chunk)))
        return np.concatenate(out)

    def _prompt_rows(self) -> int:
        """Rows of a prompt that the next call reads."""
        most = prompt_rows(self.model.manifest.model, self.length + CHUNK)
        return self._at_most(min(most, SHARED_CHUNK if self.model.turns.shared else CHUNK))

    def _at_most(self, rows: int) -> int:
        """Rows that one call takes, where `rows` are wanted."""
        return rows

    def _commit(self, path: Sequence[int], above: tuple[int, Sequence[int]] | None = None) -> None:
        """Rows of the last call become part of the text (`KeyValueCache.keep`)."""
        self._keep_rows(path, above)
        kept = self._verified[list(path)]
        self.tokens += kept.tolist()
        if self._sampling.repetition_penalty != 1:
            self._seen[kept] = True

    def _keep_rows(self, path: Sequence[int], above: tuple[int, Sequence[int]] | None) -> None:
        self.cache.keep(path, above)

    def _choose_by(self, sampling: Sampling, logits: bool = False) -> None:
        self._want_logits(logits)
        self._sampling = sampling
        self._seen[:] = False
        self._seen[self.tokens] = True
        for name, value in sampling.scalars().items():
            self._binding.input(name, value)

    def _empty_cache(self) -> KeyValueCache | DeviceCache:
        model, manifest = self.model, self.model.manifest
        shape, provider = manifest.model, named(self.provider)
        # Room beyond the context for rows that are verified but never committed.
        limit = self.context_length + CHUNK + (MAX_GAMMA if manifest.swappable else self.gamma)
        layers = self.cache_layers
        if not provider.memory:
            return KeyValueCache(layers, shape.kv_heads, shape.head_dim, limit, model.cache_dtype)
        mover = model.mover()
        try:
            return DeviceCache(model.ort, mover, provider.memory, layers, shape.kv_heads, shape.head_dim, limit)
        except Exception as error:  # no memory, or a graph that moves something else
            raise ProviderError(
                f"provider {provider.name} cannot hold the cache: {error}",
                "room for it on the device",
                "choose provider cpu",
            ) from None

    def _make_room(self, rows: int) -> None:
        """Makes room for `rows` rows and the streams', and tells the bindings where the cache lies."""
        if self.cache.reserve(rows + self.gamma):
            self._scoring = None  # it would keep the old one alive
        self._binding.follow(self.cache)

    def _inputs(
        self, tokens: np.ndarray, offsets: np.ndarray, mask: np.ndarray, parents: np.ndarray, logit_rows: np.ndarray
    ) -> dict[str, np.ndarray]:
        length = self.cache.length
        return {
            "input_ids": tokens[None],
            "position_ids": (length + offsets)[None],
            "tree_mask": mask,
            "parents": parents,
            "past_length": np.array([length]),
            "logit_rows": logit_rows,
            "next_ids": np.full(len(tokens), -1),  # as chosen
            "keep_rows": np.array([len(tokens)]),
            "keep_above": NO_LIMIT,
        }

    def _bind_inputs(self, binding: IoBinding, inputs: dict[str, np.ndarray], draft: bool, forced_node: int) -> None:
        for name, value in inputs.items():
            binding.input(name, value)
        if self.gamma:
            binding.input("stream_ids", np.arange(self.gamma if draft else 0))
            binding.input("forced_node", np.array([forced_node]))
            binding.input("forced_root", np.array([-1]))

    def _bind_choice(self, binding: IoBinding, positions: np.ndarray, allowed: np.ndarray | None) -> None:
        """What the rows at `positions` need for choosing the token behind them, out of those `allowed`."""
        binding.input("free", np.array([allowed is None]))
        if allowed is not None:
            binding.input("allowed", allowed)
        sampling = self._sampling
        if sampling.random:
            binding.input("uniforms", self._uniforms(positions))
        if sampling.repetition_penalty != 1:
            binding.input("seen", self._seen)

    def _uniforms(self, positions: np.ndarray) -> np.ndarray:
        """float32 [r]: what the token behind each of `positions` [r] is drawn with."""
        drawn = {p: self._sampling.uniform(p + 1) for p in set(positions.tolist())}
        return np.array([drawn[p] for p in positions.tolist()], np.float32)

    def _want_logits(self, wanted: bool) -> None:
        """From now on calls give their logits, or no longer: what was bound once stays so."""
        if wanted != self._logits_wanted:
            self._binding, self._logits_wanted = self._bind(), wanted

    def _bind_logits(self, binding: IoBinding, rows: int) -> tuple[np.ndarray, np.ndarray] | None:
        """Buffers of raw logits [rows, vocabulary] and their scale [rows, 1], where they are wanted."""
        if not self._logits_wanted:
            return None
        return binding.output("raw_logits", (rows, self.vocab_size)), binding.output("logit_scale", (rows, 1))

    def _call(
        self, inputs: dict[str, np.ndarray], draft: bool, forced_node: int, allowed: np.ndarray | None = None
    ) -> StepResult:
        rows = len(inputs["logit_rows"])
        self._make_room(inputs["input_ids"].shape[1])
        binding = self._binding
        self._bind_inputs(binding, inputs, draft, forced_node)
        self._bind_choice(binding, inputs["position_ids"][0, inputs["logit_rows"]], allowed)
        scaled = self._bind_logits(binding, rows)
        choices = binding.output("choices", (rows,))
        if not self.gamma:
            self._run(binding)
            return StepResult(self._checked(choices), logits=_product(scaled))
        accepted = binding.output("accepted_node", (1,))
        shape = ((sum(self._levels) or self.gamma) if draft else 0, self._candidates)
        candidates, logits = binding.output("candidates", shape), binding.output("candidate_logits", shape)
        pairs = binding.output("pair_logits", (*shape, shape[1])) if self._bigram else None
        origins = binding.output("origins", shape[:1]) if self._levels else None
        self._run(binding)
        if not draft:
            return StepResult(self._checked(choices), logits=_product(scaled))
        found = candidates.copy(), logits.copy()
        guesses = (
            TreeProposal(*found, origins, self._levels)
            if origins is not None
            else IndependentProposal(*found, None if pairs is None else pairs.copy())
        )
        return StepResult(self._checked(choices), int(accepted[0]), guesses, _product(scaled))

    def _run_options(self, shrink: bool) -> Any:
        options = self.model.ort.RunOptions()
        options.add_run_config_entry(
            "gpu_graph_id", "-1"
        )  # no capture, as by default; asked for in every call, and 80 us where it is not set
        if shrink:
            options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
        options.log_severity_level = 4
        return options

    def _run(self, binding: IoBinding) -> None:
        options, self._shrink = self._shrinking if self._shrink else self._options, False
        inside, waited = self.model.run(binding, options, self._cancelled)
        self.graph_seconds += inside
        self.waited_seconds += waited

    def _checked(self, choices: np.ndarray) -> np.ndarray:
        """A copy of choices that are tokens; of rows but the first, the root, -1 as well: they may have been pruned."""
        if not choices[0] >= 0 or choices.min() < -1 or choices.max() >= self.vocab_size:
            raise BundleError(
                f"a graph that chose {choices.tolist()}", f"tokens 0..{self.vocab_size - 1}", "export the bundle again"
            )
        return choices.copy()


def _product(scaled: tuple[np.ndarray, np.ndarray] | None) -> np.ndarray | None:
    return None if scaled is None else scaled[0] * scaled[1]


def causal_mask(n: int) -> np.ndarray:
    """float32 [n, n]: row i sees rows up to i."""
    return np.triu(np.full((n, n), MASKED, dtype=np.float32), k=1)


def shared_prefix(cached: Sequence[int], prompt: Sequence[int]) -> int:
    """How many tokens both begin with."""
    return next(
        (i for i, (a, b) in enumerate(zip(cached, prompt, strict=False)) if a != b), min(len(cached), len(prompt))
    )
