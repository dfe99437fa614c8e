"""The target's own last layer under a LoRA in PyTorch, from its tensors and the equations of
`adapters/drafters/shared_layer/model.py`, to compare the graph with.
"""

from __future__ import annotations

import copy

import numpy as np
import torch
from torch import Tensor

from streamspec.adapters.drafters.drafter_caches import GrowingCache
from streamspec.adapters.drafters.drafting_model import additive_mask
from streamspec.adapters.drafters.layer_copy import weighted
from streamspec.adapters.drafters.least_squares import unit_rms
from streamspec.export.drafters.layer_reference import tapped_states
from streamspec.export.drafters.shared_layer.spec import SharedLayerSpec
from streamspec.export.ops.builder import Array
from streamspec.export.reference.draft_reference import DraftedTree, LevelLogits, LevelReference, TreePass
from streamspec.export.reference.pytorch_reference import ReferenceModel, add_update
from streamspec.export.weights.model_spec import describe


class SharedLayerReference(LevelReference):
    """A copy of the layer with its LoRA merged, over the target's states, which a second pass of it records."""

    spec: SharedLayerSpec

    def __init__(self, model: ReferenceModel, spec: SharedLayerSpec) -> None:
        self.model, self.spec, self.decoder = model, spec, model.decoder
        self.layer = copy.deepcopy(self.decoder.layer(self.decoder.last_attention))
        shape = describe(model.model)
        for (_, module), (a, b) in spec.lora.items():
            add_update(self.layer.get_submodule(module), shape.from_graph(module, b) @ a)
        self.tensors = {name: torch.as_tensor(tensor) for name, tensor in spec.tensors.items()}
        assert self.decoder.norm is not None
        self.norm = weighted(copy.deepcopy(self.decoder.norm), self.decoder).float()
        self.norm.load_state_dict(
            {name.removeprefix("norm_out."): t for name, t in self.tensors.items() if name.startswith("norm_out.")}
        )

    def states(self, case: DraftedTree, main: TreePass) -> Tensor:
        """The tapped states [T, taps * hidden]."""
        return tapped_states(self.model, case, self.spec.tapped(self.model.layers))

    def after(self, text: Array, root: int, states: Tensor, rows: list[int]) -> LevelLogits:
        """The logits are minus infinity where nothing may be proposed."""
        following = torch.as_tensor(np.append(text[1:], root))
        entered = unit_rms(states[rows].unflatten(-1, (len(self.spec.taps), -1))).flatten(-2) @ self._map("from_entry")
        chosen = slice(None) if self.spec.draft_vocab is None else torch.as_tensor(self.spec.draft_vocab)

        @torch.no_grad()
        def logits(paths: list[list[int]]) -> Array:
            finished = torch.stack([self._finished(path, following, entered) for path in paths])
            every = self.decoder.logits(finished)
            of_paths = torch.full_like(every, -torch.inf)
            of_paths[:, chosen] = every[:, chosen]
            return of_paths.numpy()

        return logits

    def _map(self, name: str) -> Tensor:
        return self.tensors[name].T

    def _finished(self, path: list[int], following: Tensor, entered: Tensor) -> Tensor:
        """The finished state [H] after the draft tokens `path`."""
        cache = GrowingCache()
        state = self._run(following, entered, cache)
        for token in path:
            given = unit_rms(state) @ self._map("from_entry") if self.spec.one_map else state @ self._map("from_state")
            state = self._run(torch.tensor([token]), given, cache)
        return state[0]

    def _run(self, tokens: Tensor, given: Tensor, cache: GrowingCache) -> Tensor:
        """The finished state [1, H] of the last of rows that are given states [n, H] beside the tokens after them, each
        of which sees the rows up to it and those in the cache."""
        first, count, decoder = cache.get_seq_length(), len(tokens), self.decoder
        positions = torch.arange(first, first + count)[None]
        embedded = decoder.embed(tokens[None])
        if decoder.positions is not None:
            last = len(decoder.positions.weight) - decoder.family.position_offset - 1
            embedded = decoder.begin(tokens[None], (positions + 1).clamp(max=last))
        x = unit_rms(embedded) @ self._map("from_token") + self.tensors["bias"] + given
        sees = torch.ones(count, first + count).tril(first)
        sees = sees if self.spec.window is None else sees.triu(first + 1 - self.spec.window)
        mask, rotary = additive_mask(sees.bool()[None, None], x.dtype), decoder.rotary_embeddings(x, positions)
        out = decoder.call_layer(decoder.last_attention, x, mask, positions, rotary, cache, module=self.layer)
        state: Tensor = self.norm(out[0, -1:])
        return state
