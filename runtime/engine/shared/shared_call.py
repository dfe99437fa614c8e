"""Binds and runs a call whose rows belong to several sequences, over the places of their KV caches.

The rows of each sequence are one block: its rows see each other as its draft tree says, and nothing of the others.
Nothing is drafted in such a call. Covered by tests/runtime/engine/shared/test_call_sharing.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from streamspec import step_graph as sg
from streamspec.draft_tree import MASKED
from streamspec.runtime.engine.executor import graph_failed, run_options
from streamspec.runtime.engine.graph_call import CallRows, DrafterShape, checked_tokens, counted, repeated
from streamspec.runtime.engine.io_binding import IoBinding
from streamspec.runtime.engine.loaded_model import LoadedModel
from streamspec.runtime.kv_cache.shared_cache import CachePlaces
from streamspec.runtime.sampling.sampling_params import Sampling


@dataclass(eq=False)
class SharedRows:
    """The rows of one sequence. Its cache is in `place` and holds `past` tokens. `sampling`: chooses its tokens;
    `uniforms` float32 [n]: what they are drawn with.

    Then of the call: whether somebody makes it (`taken`) or has made it (`over`); the `choices` after each row, or an
    `error`; of how many `sequences` it had rows, and when it `began` and how many `seconds` it took.
    """

    sequence: object
    rows: CallRows
    place: int
    past: int
    sampling: Sampling
    uniforms: np.ndarray | None = None
    taken: bool = False
    over: bool = False
    choices: list[int] = field(default_factory=list)
    error: Exception | None = None
    sequences: int = 1
    began: float = 0.0
    seconds: float = 0.0


class SharedCall:
    """Calls over all `places`."""

    def __init__(self, model: LoadedModel, places: CachePlaces) -> None:
        self._model, self._places = model, places
        self._vocab = model.manifest.model.vocab_size
        self._drafter = DrafterShape.of_manifest(model.manifest)
        self._options = run_options(model.ort)
        self._binding = IoBinding(model.ort, model.session, places, {}, model.in_place)

    def run(self, calls: Sequence[SharedRows]) -> None:
        """Runs all calls, which must be alike, as one and sets the `choices` of each. Raises BundleError."""
        calls = sorted(calls, key=lambda call: call.place)
        binding, counts = self._binding, [len(call.rows.tokens) for call in calls]
        n = sum(counts)
        rows = np.zeros((2, self._places.places), np.int64)  # by place: rows of the call, and slots in use before them
        mask, parents, begin = np.full((n, n), MASKED, np.float32), np.zeros(n, np.int64), 0
        for call, count in zip(calls, counts, strict=True):
            end = begin + count
            rows[:, call.place] = count, call.past
            mask[begin:end, begin:end] = call.rows.mask
            parents[begin:end] = call.rows.parents + begin
            begin = end
        binding.numbers(sg.INPUT_IDS, (1, n), [token for call in calls for token in call.rows.tokens])
        binding.numbers(sg.POSITION_IDS, (1, n), [position for call in calls for position in call.rows.positions])
        binding.numbers(sg.SEQUENCE_ROWS, rows[0].shape, rows[0])
        binding.numbers(sg.PAST_LENGTH, rows[1].shape, rows[1])
        binding.input(sg.TREE_MASK, mask)
        binding.input(sg.PARENTS, parents)
        binding.input(sg.LOGIT_ROWS, counted(n))
        for name, value in calls[0].sampling.scalars().items():
            binding.input(name, value)
        if calls[0].sampling.random:
            binding.input(sg.UNIFORMS, np.concatenate([call.uniforms for call in calls if call.uniforms is not None]))
        choices = binding.output(sg.CHOICES, (n,))
        self._bind_no_drafts(n)
        try:
            self._model.session.run_with_iobinding(binding.io, self._options)
        except Exception as error:
            raise graph_failed(error) from error
        begin = 0
        for call, count in zip(calls, counts, strict=True):
            call.choices = checked_tokens(choices[begin : begin + count], self._vocab)
            begin += count

    def _bind_no_drafts(self, rows: int) -> None:
        binding, drafter = self._binding, self._drafter
        if binding.settings == (rows,):
            return
        binding.settings = (rows,)
        binding.input(sg.KEEP_ROWS, repeated(rows))
        if not drafter.gamma:
            return
        binding.input(sg.STREAM_IDS, counted(0))
        for name in (sg.FORCED_NODE, sg.FORCED_ROOT):
            binding.input(name, repeated(-1))
        for name, shape in drafter.outputs(runs=False):
            binding.output(name, shape)
