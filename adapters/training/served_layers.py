"""Puts states that a runtime computes in place of a frozen model's lower layers: those of the weights that are served,
of which PyTorch then needs neither the products nor the memory."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from streamspec.adapters.base_models.hf_decoder import HFDecoder
from streamspec.adapters.training.text_arrays import MOST_DISK, TextArrays, key_of

SCALE = np.float32(64)  # float16 holds numbers up to 65,504 over it


class States(Protocol):
    """The states of a text's token ids [T] at the input of some layers: float32 [layers, T, H]."""

    def __call__(self, ids: Sequence[int]) -> NDArray[np.float32]: ...
    def close(self) -> None:
        """Gives memory back until the next text."""


class BundleStates(States, Protocol):
    """Those of a bundle's layers, which its own sessions may keep as they answer."""

    def keep_in(self, folder: Path) -> bool:
        """Writes to `folder` the bundle whose sessions keep these states of each token beside its keys and values;
        tells whether there is such a one."""

    def kept_by(self, session: Any) -> tuple[list[int], NDArray[np.float32]]:
        """The tokens that a session of that bundle holds, and their states."""


Opener = Callable[[Path, Sequence[int], int], BundleStates]  # of a bundle's folder, for layers, on so many threads
Served = Callable[[Sequence[int]], BundleStates]  # the same of one bundle


def read_states_alone(decoder: HFDecoder, count: int) -> bool:
    """Tells whether the layers from `count` on read nothing of those below but their states."""
    return decoder.per_layer is None and not decoder.kept_below(count)


class AnsweredStates:
    """States of which those of whole answers, with their prompts, were kept as a bundle wrote them; the others are
    computed. In 16 bits a number, while half of the free disk lasts. May be added to from several threads."""

    def __init__(self, states: BundleStates, folder: Path, layers: int, hidden: int) -> None:
        """`folder`: holds the states until `close`; `layers`, `hidden`: how many states of a token, and their width."""
        self.states, self.folder, self.shape, self._lock = states, folder, (layers, hidden), Lock()
        self.texts = TextArrays(folder, "entered", "", layers * hidden)
        self.room = MOST_DISK * shutil.disk_usage(folder).free

    def __call__(self, ids: Sequence[int]) -> NDArray[np.float32]:
        kept = self.texts.read(key_of(ids))
        if kept is None:
            return self.states(ids)
        states = kept.view(np.float16).astype(np.float32) * SCALE
        return states.reshape(len(ids), *self.shape).transpose(1, 0, 2)

    def add(self, session: Any) -> None:
        """Keeps the states of all tokens that a session holds."""
        tokens, states = self.states.kept_by(session)
        with np.errstate(over="ignore"):
            numbers = (states / SCALE).astype(np.float16).transpose(1, 0, 2).reshape(len(tokens), -1)
        with self._lock:
            self.room -= numbers.nbytes
            if self.room >= 0 and np.isfinite(numbers).all():
                self.texts.add(key_of(tokens), numbers.view(np.int16))

    def close(self) -> None:
        """Gives memory and disk back: what comes later is computed."""
        self.states.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        self.texts.kept.clear()


class ServedLayers:
    """The layers of a model below the last of `layers`, which from now on have no weights: what enters `layers` is what
    `states` says, and no number enters others below. The model then reads whole texts alone, right-padded."""

    def __init__(self, model: PreTrainedModel, states: States, layers: Sequence[int]) -> None:
        decoder = HFDecoder(model)
        self.states, self.layers, self.entered = states, list(layers), torch.empty(0)
        stack: nn.Module = model.get_submodule(decoder.family.stack)
        stack.register_forward_pre_hook(self._read, with_kwargs=True)
        for index, layer in enumerate(decoder.layers[: layers[-1]]):
            layer.forward = partial(self._leave, index, decoder.family.tuples)
            for parameter in layer.parameters():
                parameter.data = parameter.data.new_empty(0)

    def _read(self, stack: nn.Module, args: Any, kwargs: Any) -> None:
        ids: Tensor = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        mask = kwargs.get("attention_mask")
        lengths = [ids.shape[1]] * len(ids) if mask is None else mask.sum(1).tolist()
        texts = [torch.from_numpy(self.states(row[:n].tolist())) for row, n in zip(ids, lengths, strict=True)]
        self.entered = pad_sequence([text.transpose(0, 1) for text in texts], batch_first=True)  # [B, T, layers, H]

    def _leave(self, index: int, tuples: int, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The states [B, T, H] after layer `index`, as Hugging Face's layer returns them (`Family.tuples`)."""
        if index + 1 in self.layers:
            states = self.entered[:, :, self.layers.index(index + 1)].to(hidden)
        else:
            states = torch.full_like(hidden, torch.nan)
        return (states, None)[:tuples] if tuples else states
