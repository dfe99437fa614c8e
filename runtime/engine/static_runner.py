"""Static step graphs (docs/static.md): one shape for prompt chunks, drafts and plain steps alike.

What is `OrtRunner`'s stays so: session, cancelling, prompts, the probe. A call pads its rows to the graph's; the cache
is read by the graph and written here, accepted rows alone, so that nothing is ever compacted. The graph chooses
greedily and drafts behind that; where tokens are sampled, a second small graph chooses on the CPU, and guesses behind
another token are dropped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from streamspec.bundle.manifest import CHOICE, Manifest
from streamspec.draft_tree import MASKED, DraftTree
from streamspec.errors import BundleError
from streamspec.runtime.decoding.draft_tree_search import IndependentProposal
from streamspec.runtime.decoding.model_runner import Pruning, StepResult
from streamspec.runtime.decoding.verify import accept
from streamspec.runtime.engine.io_binding import IoBinding
from streamspec.runtime.engine.kv_cache import KeyValueCache, views
from streamspec.runtime.engine.loaded_model import LoadedModel
from streamspec.runtime.engine.runner import OrtRunner

_INPUTS = ("input_ids", "position_ids", "tree_mask", "past_length")
_STREAM_INPUTS = ("parents", "forced_node")
_STREAM_OUTPUTS = ("accepted_node", "candidates", "candidate_logits")


class StaticModel(LoadedModel):
    """See `streamspec.runtime.engine.loaded_model.LoadedModel`. `choice`: a session of the graph that chooses tokens
    where that is not greedy.
    """

    def _begin(self, profile: Path | None = None) -> None:
        super()._begin(profile)
        try:
            self.choice = self.ort.InferenceSession(
                str(self.path.parent / CHOICE), self.options(), providers=["CPUExecutionProvider"]
            )
        except Exception as error:
            raise BundleError(
                f"ONNX Runtime {self.version} cannot load {CHOICE}: {error}",
                "a graph it can run",
                "export the bundle again",
            ) from None

    def _close(self) -> None:
        self.choice = None
        super()._close()

    def _interface(self, manifest: Manifest) -> tuple[set[str], set[str]]:
        caches = [f"{i}.{kind}" for i in range(manifest.model.layers) for kind in ("key", "value")]
        wanted = {*_INPUTS, *(f"past_key_values.{name}" for name in caches)}
        produced = {"choices", "raw_logits", *(f"new.{name}" for name in caches)}
        if manifest.streams is not None:
            wanted, produced = wanted | set(_STREAM_INPUTS), produced | set(_STREAM_OUTPUTS)
        return wanted, produced | (
            {"pair_logits"} if manifest.streams is not None and manifest.streams.bigram else set()
        )

    def _check_interface(self, manifest: Manifest) -> np.dtype:
        dtype = super()._check_interface(manifest)
        shape, fixed = manifest.model, manifest.static
        assert fixed is not None
        promised = {
            "input_ids": [1, fixed.rows],
            "past_key_values.0.key": [1, shape.kv_heads, fixed.slots, shape.head_dim],
        }
        for value in self.session.get_inputs():
            if list(value.shape) != promised.get(value.name, list(value.shape)):
                raise BundleError(
                    f"{value.name} of shape {value.shape}",
                    f"{promised[value.name]} as the manifest says",
                    "export the bundle again",
                )
        return dtype


class StaticOrtRunner(OrtRunner):
    """See `streamspec.runtime.decoding.model_runner.ModelRunner`. Its graph is a `StaticModel`, whose rows every call
    has, however few are asked for.
    """

    model: StaticModel
    rows: int

    def verify(
        self,
        tokens: np.ndarray,
        tree: DraftTree,
        draft: bool,
        pruning: Pruning | None = None,
        priors: np.ndarray | None = None,
        allowed: np.ndarray | None = None,
    ) -> StepResult:
        result = super().verify(tokens, tree, draft, allowed=allowed)
        greedy = self._sampling.plain_argmax and allowed is None
        if not greedy and result.accepted is not None and accept(tree, tokens, result.choices)[0] != result.accepted:
            return StepResult(result.choices, logits=result.logits)
        return result

    def forward(self, tokens: Sequence[int], offsets: Sequence[int], mask: np.ndarray) -> np.ndarray:
        n = len(tokens)
        self._verified = np.asarray(tokens)
        inputs = self._inputs(self._verified, np.asarray(offsets), mask, np.zeros(n, np.int64), np.arange(n))
        self._compute(inputs, forced_node=0)
        return self._raw[:n].copy()

    # ---- one call

    def _want_logits(self, wanted: bool) -> None:
        self._logits_wanted = wanted  # bound in any case

    def _call(
        self, inputs: dict[str, np.ndarray], draft: bool, forced_node: int, allowed: np.ndarray | None = None
    ) -> StepResult:
        self._compute(inputs, forced_node)
        rows = inputs["logit_rows"]
        greedy, logits = self._greedy[rows], self._raw[rows] if self._logits_wanted else None
        choices = self._checked(
            greedy if self._sampling.plain_argmax and allowed is None else self._sample(inputs, rows, allowed)
        )
        if not self.gamma or not draft:
            return StepResult(choices, logits=logits)
        accepted, candidates, scores, *pairs = self._drafted
        node = int(accepted[0])
        at = np.flatnonzero(rows == node)
        if not len(at):
            raise BundleError(
                f"a graph that accepted row {node} of {len(rows)}",
                "one of the rows it was given",
                "export the bundle again",
            )
        if self._root_matters and choices[at[0]] != greedy[at[0]]:
            return StepResult(choices, logits=logits)
        return StepResult(
            choices,
            node,
            IndependentProposal(candidates.copy(), scores.copy(), pairs[0].copy() if pairs else None),
            logits,
        )

    def _compute(self, inputs: dict[str, np.ndarray], forced_node: int) -> None:
        """Runs the graph; rows beyond those of `inputs` see no row of the call, themselves included, so that none can
        be accepted.
        """
        ids, n = inputs["input_ids"], inputs["input_ids"].shape[1]
        binding, length = self._binding, self.cache.length
        for name, value, rest in (("input_ids", ids, 0), ("position_ids", inputs["position_ids"], length)):
            binding.input(name, np.pad(value, ((0, 0), (0, self.rows - n)), constant_values=rest))
        mask = np.full((self.rows, self.rows), MASKED, np.float32)
        mask[:n, :n] = inputs["tree_mask"]
        binding.input("tree_mask", mask)
        binding.input("past_length", inputs["past_length"])
        parents = np.zeros(self.rows, np.int64)
        parents[: len(inputs["parents"])] = inputs["parents"]
        binding.input("parents", parents)
        binding.input("forced_node", np.array([forced_node]))
        binding.input("forced_root", np.array([-1]))
        binding.follow(self.cache)
        self._run(binding)

    def _sample(self, inputs: dict[str, np.ndarray], rows: np.ndarray, allowed: np.ndarray | None) -> np.ndarray:
        """int64 [r]: choices of the `rows` that get one, from the processed distribution over what is `allowed`."""
        n = inputs["input_ids"].shape[1]
        feed = (
            self._sampling.scalars()
            | {
                "raw_logits": self._raw[rows],
                "input_ids": inputs["input_ids"],
                "tree_mask": np.ascontiguousarray(inputs["tree_mask"][rows, :n]),
                "uniforms": self._uniforms(inputs["position_ids"][0, rows]),
                "seen": self._seen,
                "free": np.array([allowed is None]),
            }
            | ({} if allowed is None else {"allowed": allowed})
        )
        try:
            choices: np.ndarray = self.model.choice.run(["choices"], feed)[0]
        except Exception as error:
            raise BundleError(
                f"{CHOICE} failed: {error}", "a graph that chooses tokens", "export the bundle again"
            ) from None
        if not isinstance(choices, np.ndarray) or choices.shape != rows.shape or choices.dtype != np.int64:
            raise BundleError(
                f"a {CHOICE} that chose {str(choices)[:100]}", f"{len(rows)} tokens", "export the bundle again"
            )
        return choices

    # ---- what is fixed

    def _at_most(self, rows: int) -> int:
        return self.rows

    def _keep_rows(self, path: Sequence[int], above: tuple[int, Sequence[int]] | None) -> None:
        self._kept_rows.place(self._new, path)

    @property
    def _kept_rows(self) -> KeyValueCache:
        assert isinstance(self.cache, KeyValueCache)  # see `_empty_cache`
        return self.cache

    def _empty_cache(self) -> KeyValueCache:
        shape, slots = self.model.manifest.model, self.model.manifest.model.context_length
        return KeyValueCache(shape.layers, shape.kv_heads, shape.head_dim, slots, self.model.cache_dtype, first=slots)

    def _bind(self, adapter: Mapping[str, Any] | None = None) -> IoBinding:
        binding = super()._bind(adapter)
        kept = self._kept_rows.data
        self._new = np.zeros((*kept.shape[:4], self.rows, kept.shape[5]), kept.dtype)  # K/V of the last call's rows
        for i, pair in enumerate(views(self._new)):
            for kind, rows in zip(("key", "value"), pair, strict=True):
                binding.output(f"new.{i}.{kind}", rows)
        self._raw = binding.output("raw_logits", np.zeros((self.rows, self.vocab_size), np.float32))
        self._greedy = binding.output("choices", (self.rows,))
        self._drafted = self._bind_drafter(binding)
        return binding

    def _bind_drafter(self, binding: IoBinding) -> list[np.ndarray]:
        """Buffers of what the drafter gives: accepted node, candidates, their logits and, with a bigram, their
        pairs.
        """
        if not self.gamma:
            return []
        shape = self.gamma, self._candidates
        forms: list[tuple[str, tuple[int, ...]]] = list(zip(_STREAM_OUTPUTS, ((1,), shape, shape), strict=True))
        if self._bigram:
            forms.append(("pair_logits", (*shape, self._candidates)))
        return [binding.output(name, form) for name, form in forms]

    @property
    def _root_matters(self) -> bool:
        """Whether guesses depend on the token behind the accepted node."""
        return self._binding.has("forced_root")
