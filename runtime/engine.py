"""The step graph on ONNX Runtime (docs/architecture.md, "The step graph"): one session, one cache, prebuilt bindings.

One session serves prompt chunks and draft trees: shapes are dynamic. Inputs live in numpy buffers that ONNX Runtime reads
in place; a buffer is bound again only where its shape changes. The cache is bound as past and present at once. Knows
nothing about text or about which tokens are worth drafting.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from streamspec.acceptance import MAX_GAMMA
from streamspec.bundle import COMPACT, FLOAT_ROWS, Manifest, Room
from streamspec.errors import BundleError, ConfigError, ProviderError
from streamspec.runtime.binding import TYPES, Binding
from streamspec.runtime.device import DeviceCache
from streamspec.runtime.drafting import GrownGuesses, PlaceGuesses
from streamspec.runtime.interface import Cancelled, Pruning, Verified
from streamspec.runtime.kv import KeyValueCache
from streamspec.runtime.machine import physical_cores
from streamspec.runtime.pages import huge_pages
from streamspec.runtime.providers import CPU, check_placement, flavour, import_onnxruntime, named, prepare, usable
from streamspec.runtime.sampling import GREEDY, Sampling
from streamspec.runtime.saturation import products_saturate
from streamspec.trees import MASKED, DraftTree

CHUNK = 512  # prompt rows per call: more buys little speed and costs rows x rows of mask
SCORE_CHUNK = 64  # rows of logits per call: 64 x 150,000 x 4 bytes is 38 MB
NO_LIMIT = np.array([-np.inf], np.float32)
_NEEDED = ("input_ids", "position_ids", "tree_mask", "past_length", "logit_rows")
_CHOICE_INPUTS = (*GREEDY.scalars(), "uniforms", "seen")
_STREAM_INPUTS = ("parents", "stream_ids", "forced_node")
_STREAM_OUTPUTS = ("accepted_node", "candidates", "candidate_logits")
_PRUNING_INPUTS = ("keep_rows", "keep_above", "priors")


class OrtEngine:
    """See `streamspec.runtime.interface.Engine`. Not for use from several threads at once, `cancel` excepted."""

    rows: int | None = None  # of every call, where the graph's shapes are fixed

    def __init__(
        self,
        model: Path,
        manifest: Manifest,
        threads: int | None = None,
        provider: str = "cpu",
        spin: bool = True,
        profile: Path | None = None,
    ) -> None:
        """Raises BundleError where the graph is not what the manifest promises, ConfigError for unknown providers, ProviderError
        where this one cannot be used here or leaves to the CPU what decides the speed.

        `spin`: worker threads wait busily between calls; faster, at the price of a warm core while generating.
        `profile`: ONNX Runtime records every node's time in a file whose name begins so (`end_profile` says which).
        """
        self.threads = threads if threads is not None else physical_cores()
        self.provider = provider
        self.context_length = manifest.model.context_length
        self._describe(manifest)
        self.vocab_size = manifest.model.vocab_size
        self.graph_seconds = 0.0
        self._ort = import_onnxruntime()
        self.version = str(self._ort.__version__)
        self._session = self._open(model, flavour(manifest), spin, profile)
        self.on_cpu = check_placement(self._session, named(provider))  # small nodes that the provider left there
        dtype = self._check_interface(manifest)
        self.adapter_inputs = self._adapter_inputs() if manifest.swappable else {}
        self._adapter: Mapping[str, Any] = {}
        self.cache = self._empty_cache(manifest, dtype, model)
        self._binding = self._bind()
        self._scoring: Binding | None = None
        self._options = self._ort.RunOptions()
        self._options.add_run_config_entry("gpu_graph_id", "-1")  # no capture, as by default; asked for in every call, and 80 us where it is not set
        self._options.log_severity_level = 4
        self._cancelled = threading.Event()
        self._sampling = GREEDY
        self._seen = np.zeros(self.vocab_size, np.bool_)  # tokens of the text so far, kept where they are penalised
        self._verified = np.empty(0, np.int64)  # tokens of the last `verify`
        self._kept: np.ndarray | None = None  # rows of the last `verify` that went on, None for all

    def use(self, manifest: Manifest, adapter: Mapping[str, Any]) -> None:
        """From now on computes with the tensors of `adapter`, OrtValues by name of an input, as `manifest` describes it, from an empty cache. Where
        they cannot be bound nothing changes: raises BundleError."""
        try:
            binding = self._bind(adapter)
        except Exception as error:
            raise BundleError(f"an adapter that cannot be bound: {error}", "one for this graph", "make it again") from error
        self._binding, self._scoring, self._adapter = binding, None, adapter
        self._describe(manifest)
        self.rewind(0)
        self._kept = None

    def _bind(self, adapter: Mapping[str, Any] | None = None) -> Binding:
        return Binding(self._ort, self._session, self.cache, self._adapter if adapter is None else adapter, in_place=named(self.provider).ort == CPU.ort)

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

    def reset(self, sampling: Sampling = GREEDY) -> None:
        self.rewind(0)
        self._sampling = sampling
        self._seen[:] = False
        for name, value in sampling.scalars().items():
            self._binding.input(name, value)
        self._cancelled.clear()
        self._options.terminate = False

    def rewind(self, length: int) -> None:
        """Forgets all tokens behind the first `length`."""
        if not 0 <= length <= self.cache.length:
            raise ValueError(f"rewind to {length} of {self.cache.length} tokens")
        self.cache.length = length

    def cancel(self) -> None:
        self._cancelled.set()
        self._options.terminate = True

    def prefill(self, ids: Sequence[int], draft: bool) -> Verified:
        tokens = np.asarray(ids, dtype=np.int64)
        result = Verified(np.empty(0, np.int64))
        most = self._at_most(CHUNK)
        for start in range(0, len(tokens), most):
            chunk = tokens[start : start + most]
            n, last = len(chunk), start + most >= len(tokens)
            inputs = self._inputs(chunk, np.arange(n), causal_mask(n), np.zeros(1, np.int64), np.array([n - 1]))
            inputs["next_ids"][:] = [*tokens[start + 1 : start + n + 1], -1][:n]
            self._seen[chunk] = True
            result = self._call(inputs, draft and last, forced_node=n - 1)
            self._commit(range(n))
        return result

    def verify(
        self, tokens: np.ndarray, tree: DraftTree, draft: bool, pruning: Pruning | None = None, priors: np.ndarray | None = None
    ) -> Verified:
        n = len(tree)
        self._verified, self._kept = tokens, None
        inputs = self._inputs(tokens, np.asarray(tree.depths), tree.mask(), np.asarray(tree.parents), np.arange(n))
        if self._exit is None or pruning is None:
            return self._call(inputs, draft, forced_node=-1)
        inputs["keep_rows"] = np.array([min(n, pruning.rows or n)])
        inputs["keep_above"] = np.array([np.log(max(pruning.least, 1e-30))], np.float32)
        inputs["priors"] = np.zeros(n, np.float32) if priors is None else priors
        result = self._call(inputs, draft, forced_node=-1)
        self._kept = np.flatnonzero(result.choices >= 0)
        return result

    def keep(self, path: Sequence[int]) -> None:
        above = None
        if self._kept is not None and self._exit is not None:
            above = self._exit, np.searchsorted(self._kept, path).tolist()
        self._commit(path, above)
        if self._sampling.repetition_penalty != 1:
            self._seen[self._verified[list(path)]] = True

    def forward(self, tokens: Sequence[int], offsets: Sequence[int], mask: np.ndarray) -> np.ndarray:
        """Logits float32 [n, vocabulary] of rows at positions `length + offsets` under `mask` [n, n]; commits nothing."""
        n = len(tokens)
        rows = np.arange(n)
        inputs = self._inputs(np.asarray(tokens), np.asarray(offsets), mask, np.zeros(n, np.int64), rows)
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
        """Logits float32 [len(ids) - start, vocabulary] after each of `ids[start:]`, from an empty cache; commits `ids`."""
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

    def _at_most(self, rows: int) -> int:
        """Rows that one call takes, where `rows` are wanted."""
        return rows

    def _commit(self, path: Sequence[int], above: tuple[int, Sequence[int]] | None = None) -> None:
        """Rows of the last call become part of the text (`KeyValueCache.keep`)."""
        self.cache.keep(path, above)

    def _empty_cache(self, manifest: Manifest, dtype: np.dtype, model: Path) -> KeyValueCache | DeviceCache:
        shape = manifest.model
        # Room beyond the context for rows that are verified but never committed.
        limit = self.context_length + CHUNK + (MAX_GAMMA if manifest.swappable else self.gamma)
        layers, provider = shape.layers + bool(self._levels), named(self.provider)
        if not provider.memory:
            return KeyValueCache(layers, shape.kv_heads, shape.head_dim, limit, dtype)
        mover = self._open(model.parent / COMPACT, flavour(manifest), spin=False, profile=None)
        check_placement(mover, provider)
        try:
            return DeviceCache(self._ort, mover, provider.memory, layers, shape.kv_heads, shape.head_dim, limit)
        except Exception as error:  # no memory, or a graph that moves something else
            raise ProviderError(f"provider {provider.name} cannot hold the cache: {error}", "room for it on the device", "choose provider cpu") from None

    def _make_room(self, rows: int) -> None:
        """Makes room for `rows` rows and the streams', and tells the bindings where the cache lies."""
        if self.cache.reserve(rows + self.gamma):
            self._scoring = None  # it would keep the old one alive
        self._binding.follow(self.cache)

    def end_profile(self) -> Path:
        """Closes the profile and returns its file (Chrome trace events)."""
        return Path(self._session.end_profiling())

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

    def _bind_inputs(self, binding: Binding, inputs: dict[str, np.ndarray], draft: bool, forced_node: int) -> None:
        for name, value in inputs.items():
            binding.input(name, value)
        if self.gamma:
            binding.input("stream_ids", np.arange(self.gamma if draft else 0))
            binding.input("forced_node", np.array([forced_node]))
            binding.input("forced_root", np.array([-1]))

    def _bind_choice(self, binding: Binding, positions: np.ndarray) -> None:
        """What the rows at `positions` need for choosing the token behind them."""
        sampling = self._sampling
        if sampling.random:
            binding.input("uniforms", self._uniforms(positions))
        if sampling.repetition_penalty != 1:
            binding.input("seen", self._seen)

    def _uniforms(self, positions: np.ndarray) -> np.ndarray:
        """float32 [r]: what the token behind each of `positions` [r] is drawn with."""
        drawn = {p: self._sampling.uniform(p + 1) for p in set(positions.tolist())}
        return np.array([drawn[p] for p in positions.tolist()], np.float32)

    def _call(self, inputs: dict[str, np.ndarray], draft: bool, forced_node: int) -> Verified:
        rows = len(inputs["logit_rows"])
        self._make_room(inputs["input_ids"].shape[1])
        binding = self._binding
        self._bind_inputs(binding, inputs, draft, forced_node)
        self._bind_choice(binding, inputs["position_ids"][0, inputs["logit_rows"]])
        choices = binding.output("choices", (rows,))
        if not self.gamma:
            self._run(binding)
            return Verified(self._checked(choices))
        accepted = binding.output("accepted_node", (1,))
        shape = ((sum(self._levels) or self.gamma) if draft else 0, self._candidates)
        candidates, logits = binding.output("candidates", shape), binding.output("candidate_logits", shape)
        pairs = binding.output("pair_logits", (*shape, shape[1])) if self._bigram else None
        origins = binding.output("origins", shape[:1]) if self._levels else None
        self._run(binding)
        if not draft:
            return Verified(self._checked(choices))
        found = candidates.copy(), logits.copy()
        guesses = GrownGuesses(*found, origins, self._levels) if origins is not None else PlaceGuesses(*found, None if pairs is None else pairs.copy())
        return Verified(self._checked(choices), int(accepted[0]), guesses)

    def _checked(self, choices: np.ndarray) -> np.ndarray:
        """A copy of choices that are tokens; of rows but the first, the root, -1 as well: they may have been pruned."""
        if not choices[0] >= 0 or choices.min() < -1 or choices.max() >= self.vocab_size:
            raise BundleError(f"a graph that chose {choices.tolist()}", f"tokens 0..{self.vocab_size - 1}", "export the bundle again")
        return choices.copy()

    def _run(self, binding: Binding) -> None:
        if self._cancelled.is_set():
            raise Cancelled
        started = time.perf_counter()
        try:
            self._session.run_with_iobinding(binding.io, self._options)
        except Exception as error:
            if self._cancelled.is_set():  # ONNX Runtime has no error class of its own for this
                raise Cancelled from None
            raise BundleError(
                f"the graph failed: {error}", "a graph that runs", "check the bundle, export it again"
            ) from error
        finally:
            self.graph_seconds += time.perf_counter() - started

    def _open(self, model: Path, wanted: str, spin: bool, profile: Path | None) -> Any:
        found = usable(named(self.provider), wanted)
        if self.threads < 1:
            raise ConfigError(f"{self.threads} threads", "at least 1", "correct threads")
        options = self._options_for(spin)
        if profile is not None:
            options.enable_profiling = True
            options.profile_file_prefix = str(profile)
        try:
            with huge_pages():
                return self._ort.InferenceSession(str(model), options, providers=prepare(self._ort, found, options, self.threads))
        except Exception as error:
            on = "" if found.provider is CPU else f" on {self.provider}"
            raise BundleError(
                f"ONNX Runtime {self.version} cannot load {model.name}{on}: {error}",
                "a graph it can run",
                "export the bundle again or update onnxruntime",
            ) from None

    def _options_for(self, spin: bool) -> Any:
        """Session options, whatever computes."""
        options = self._ort.SessionOptions()
        options.intra_op_num_threads = self.threads
        options.inter_op_num_threads = 1
        options.enable_mem_pattern = False  # changing shapes would grow a pattern each
        options.enable_cpu_mem_arena = False  # no slower, and 23 MB smaller (docs/decisions.md)
        options.log_severity_level = 4  # overridable initializers are meant; errors come as exceptions
        options.add_session_config_entry("session.intra_op.allow_spinning", "1" if spin else "0")
        options.add_session_config_entry("session.x64quantprecision", "1" if products_saturate() else "0")
        for key, value in FLOAT_ROWS.items() if self.rows is not None else ():
            options.add_session_config_entry(key, value)
        return options

    def _interface(self, manifest: Manifest) -> tuple[set[str], set[str]]:
        """Names of the inputs that the graph must have and of its outputs."""
        room, layers = manifest.swappable or Room(), range(manifest.model.layers + bool(self._levels))
        streams = manifest.streams is not None or bool(room.ns)
        wanted = set(_NEEDED) | set(_CHOICE_INPUTS) | (set(_STREAM_INPUTS) if streams else set())
        wanted |= {"next_ids"} if self._levels else set()
        wanted |= set(_PRUNING_INPUTS) if self._exit is not None or room.pruning else set()
        wanted |= {f"past_key_values.{i}.{kind}" for i in layers for kind in ("key", "value")}
        produced = {"choices", "raw_logits", "logit_scale"} | (set(_STREAM_OUTPUTS) if streams else set())
        produced |= {"origins"} if self._levels else set()
        produced |= {"pair_logits"} if self._bigram or room.bigram else set()
        produced |= {f"present.{i}.{kind}" for i in layers for kind in ("key", "value")}
        return wanted, produced

    def _check_interface(self, manifest: Manifest) -> np.dtype:
        """The graph's names and cache shape against the manifest; returns the cache's type."""
        inputs, outputs = (
            {value.name: value for value in side if value.type in TYPES}
            for side in (self._session.get_inputs() + self._session.get_overridable_initializers(), self._session.get_outputs())
        )
        wanted, produced = self._interface(manifest)
        missing = sorted((wanted - set(inputs)) | (produced - set(outputs)))
        unknown = sorted({i.name for i in self._session.get_inputs()} - wanted - {"forced_root", "parents"})
        if missing or unknown:
            found = (
                f"a graph without {', '.join(missing[:3])}"
                if missing
                else f"a graph that wants {', '.join(unknown[:3])}"
            )
            raise BundleError(found, "the inputs and outputs of a step graph", "export the bundle again")
        model = manifest.model
        cache = inputs["past_key_values.0.key"]
        sizes = zip(cache.shape, (1, model.kv_heads, None, model.head_dim), strict=False)
        if len(cache.shape) != 4 or any(isinstance(found, int) and size is not None and found != size for found, size in sizes):
            raise BundleError(f"a cache of shape {cache.shape}", f"{model.kv_heads} heads of {model.head_dim}", "export the bundle again")
        if cache.type not in ("tensor(float)", "tensor(float16)"):
            raise BundleError(f"a cache of type {cache.type}", "float or float16", "export the bundle again")
        return np.dtype(TYPES[cache.type])

    def _adapter_inputs(self) -> dict[str, Any]:
        """By name, the inputs of a swappable graph that belong to adapters."""
        own = {*_NEEDED, *_CHOICE_INPUTS, *_STREAM_INPUTS, *_PRUNING_INPUTS, "forced_root"}
        return {value.name: value for value in self._session.get_overridable_initializers() if value.name not in own}


def causal_mask(n: int) -> np.ndarray:
    """float32 [n, n]: row i sees rows up to i."""
    return np.triu(np.full((n, n), MASKED, dtype=np.float32), k=1)
