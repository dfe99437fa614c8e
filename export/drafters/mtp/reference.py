"""A checkpoint's layer for multi-token prediction in PyTorch: a copy of the target's last layer with attention, with
the layer's weights, to compare the graph with."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from streamspec.adapters.base_models.experts import EXPERT, expert_tensor
from streamspec.adapters.base_models.gguf.lazy_tensors import LazyStack
from streamspec.adapters.drafters.drafter_caches import GrowingCache
from streamspec.adapters.drafters.drafting_model import additive_mask
from streamspec.export.drafters.layer_reference import tapped_states
from streamspec.export.drafters.mtp.spec import LAYER, MAP, NORM, PAIR, MtpSpec
from streamspec.export.ops.builder import Array
from streamspec.export.reference.draft_reference import DraftedTree, LevelLogits, LevelReference, TreePass
from streamspec.export.reference.pytorch_reference import ReferenceModel
from streamspec.export.spec.mixture_spec import GATE, UP


def _with_own_stacks(layer: nn.Module, tensors: Mapping[str, Array]) -> bool:
    """Has a copy of a layer whose experts are read where they are used read those of `tensors`; tells whether there
    are such."""
    found = False
    for path, module in layer.named_modules():
        for name in [name for name, value in vars(module).items() if isinstance(value, LazyStack)]:
            parts = (GATE, UP) if name == "gate_up_proj" else (name,)
            vars(module)[name], found = _OwnStack(tensors, f"{LAYER}{path}", parts), True
    return found


@dataclass(frozen=True)
class _OwnStack:
    """The maps of the layer's experts, each read where it is used."""

    tensors: Mapping[str, Array]
    begin: str
    parts: tuple[str, ...]

    def __getitem__(self, number: Tensor | int) -> Tensor:
        maps = [self.tensors[f"{self.begin}.{int(number)}.{part}.weight"] for part in self.parts]
        return torch.from_numpy(np.concatenate(maps))


class MtpReference(LevelReference):
    """The layer over the target's finished states, which a second pass of the target records."""

    spec: MtpSpec

    def __init__(self, model: ReferenceModel, spec: MtpSpec) -> None:
        self.model, self.spec, self.decoder = model, spec, model.decoder
        self.layer = copy.deepcopy(self.decoder.layer(self.decoder.last_attention))
        state, around, stacks = self.layer.state_dict(), dict[str, Tensor](), _with_own_stacks(self.layer, spec.tensors)
        for name in spec.tensors:
            inside = name.removeprefix(LAYER)
            path, _, kind = inside.rpartition(".")
            if inside == name:
                around[name] = torch.tensor(spec.tensors[name])
            elif not (stacks and EXPERT.fullmatch(path)):
                place = expert_tensor(self.layer, path, kind) if EXPERT.fullmatch(path) else state[inside]
                assert place is not None, name
                place.copy_(torch.tensor(spec.tensors[name]))
        self.norms = {name: copy.deepcopy(self.decoder.norm) for name in (*PAIR, NORM)}
        for name, norm in self.norms.items():
            assert norm is not None
            norm.load_state_dict({"weight": around[f"{name}.weight"]})
        self.map = around[MAP]

    def states(self, case: DraftedTree, main: TreePass) -> Tensor:
        """The finished states [T, H]."""
        return tapped_states(self.model, case, self.spec.tapped(self.model.layers))

    def after(self, text: Array, root: int, states: Tensor, rows: list[int]) -> LevelLogits:
        following, states = torch.as_tensor(np.append(text[1:], root)), states[rows]

        @torch.no_grad()
        def logits(paths: list[list[int]]) -> Array:
            finished = torch.stack([self._finished(path, following, states) for path in paths])
            of_paths: Array = self.decoder.logits(finished).numpy()
            return of_paths

        return logits

    def _finished(self, path: list[int], following: Tensor, states: Tensor) -> Tensor:
        """The finished state [H] after the draft tokens `path`."""
        cache = GrowingCache()
        state = self._run(following, states, cache)
        for token in path:
            state = self._run(torch.tensor([token]), state, cache)
        return state[0]

    def _run(self, tokens: Tensor, states: Tensor, cache: GrowingCache) -> Tensor:
        """The finished state [1, H] of the last of rows with the states [n, H] and the tokens after them, each of which
        sees the rows up to it and those in the cache."""
        first, count = cache.get_seq_length(), len(tokens)
        pair = zip((self.decoder.embed(tokens), states), PAIR, strict=True)
        joined = torch.cat([self.norms[name](one) for one, name in pair], dim=-1)  # type: ignore[misc]
        x = nn.functional.linear(joined, self.map)[None]
        positions = torch.arange(first, first + count)[None]
        sees = torch.ones(count, first + count).tril(first)
        sees = sees if self.spec.window is None else sees.triu(first + 1 - self.spec.window)
        mask = additive_mask(sees.bool()[None, None], x.dtype)
        rotary = self.decoder.rotary_embeddings(x, positions)
        out = self.decoder.call_layer(self.spec.like, x, mask, positions, rotary, cache, module=self.layer)
        state: Tensor = self.norms[NORM](out[0, -1:])  # type: ignore[misc]
        return state
