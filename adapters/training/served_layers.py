"""Puts states that a runtime computes in place of a frozen model's lower layers: those of the weights that are served,
of which PyTorch then needs neither the products nor the memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from streamspec.adapters.base_models.hf_decoder import HFDecoder


class States(Protocol):
    """The states of a text's token ids [T] at the input of the layers from the second on: float32 [layers, T, H]."""

    def __call__(self, ids: Sequence[int]) -> NDArray[np.float32]: ...
    def close(self) -> None:
        """Gives memory back until the next text."""


Opener = Callable[[Path, int, int], States]  # of a bundle's folder, for so many layers, on so many threads


def read_states_alone(decoder: HFDecoder, count: int) -> bool:
    """Tells whether the layers from `count` on read nothing of those below but their states."""
    convolve = any(decoder.conv(index) is not None for index in range(len(decoder.layers)))
    return decoder.per_layer is None and not convolve and not decoder.kept_below(count)


class ServedLayers:
    """The first `count` layers of a model, which from now on give what `states` says, without weights of their own. The
    model then reads whole texts alone, right-padded."""

    def __init__(self, model: PreTrainedModel, states: States, count: int) -> None:
        decoder = HFDecoder(model)
        self.states, self.entered = states, torch.empty(0)
        stack: nn.Module = model.get_submodule(decoder.family.stack)
        stack.register_forward_pre_hook(self._read, with_kwargs=True)
        for index, layer in enumerate(decoder.layers[:count]):
            layer.forward = partial(self._leave, index)
            for parameter in layer.parameters():
                parameter.data = parameter.data.new_empty(0)

    def _read(self, stack: nn.Module, args: Any, kwargs: Any) -> None:
        ids: Tensor = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        mask = kwargs.get("attention_mask")
        lengths = [ids.shape[1]] * len(ids) if mask is None else mask.sum(1).tolist()
        texts = [torch.from_numpy(self.states(row[:n].tolist())) for row, n in zip(ids, lengths, strict=True)]
        self.entered = pad_sequence([text.transpose(0, 1) for text in texts], batch_first=True)  # [B, T, layers, H]

    def _leave(self, index: int, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The states [B, T, H] after layer `index`."""
        return self.entered[:, :, index].to(hidden)
