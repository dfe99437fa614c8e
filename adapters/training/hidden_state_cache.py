"""Keeps the hidden states of a frozen target on disk: its layers read each text once, not in every epoch or run.

Most of a drafter's training step on a CPU is the target's pass (docs/lab/decisions).
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from streamspec.adapters.dataset.batches import row_lengths
from streamspec.adapters.dataset.token_rows import TokenRow
from streamspec.adapters.distributed import processes
from streamspec.adapters.distributed.processes import say
from streamspec.adapters.drafters.drafting_model import DraftingModel, MainPass
from streamspec.adapters.runs.budget import ENDLESS, Deadline
from streamspec.adapters.training.device import has_bf16
from streamspec.adapters.training.text_arrays import MOST_DISK, TextArrays, key_of

FINAL, INPUT, KEYS, VALUES = "final", "input of layer {}", "keys of layer {}", "values of layer {}"
STATES = "states"  # folder in that of an unfinished run, or by that suffix beside a file of answers


@dataclass(frozen=True)
class KeptPart:
    """What a target computes at one place, a layer's input for example: [T, *shape] for a text, in files of its own, so
    that drafters share what they both read. 16 bits a number: those of a bfloat16 target stay as they are; those of a
    float32 one are rounded to float16, over a power of two for each token, since hidden states may exceed its range.
    """

    shape: torch.Size
    dtype: torch.dtype
    texts: TextArrays

    @property
    def kept_as(self) -> torch.dtype:
        return kept_dtype(self.dtype)

    def packed(self, states: Tensor) -> np.ndarray:
        """int16 [T, 1 + numbers of a token]: the bits of each token's power of two, and of its states over that."""
        flat = states.flatten(1).float()
        largest = nn.functional.pad(flat.abs(), (0, 1)).amax(1, keepdim=True)  # a convolution has no keys
        exponents = torch.frexp(largest).exponent
        power = torch.ldexp(torch.ones(len(flat), 1), exponents.clamp(-9, 30) - 15)  # float16 holds 2**-24 .. 2**15
        return torch.cat([power, flat / power], dim=1).to(self.kept_as).view(torch.int16).numpy()

    def unpacked(self, numbers: np.ndarray) -> Tensor:
        """The states [T, *shape] that `packed` made `numbers` of."""
        states = torch.from_numpy(numbers).view(self.kept_as).float()
        return (states[:, 1:] * states[:, :1]).reshape(len(numbers), *self.shape).to(self.dtype)


def kept_dtype(dtype: torch.dtype) -> torch.dtype:
    """The 16-bit type that keeps states of `dtype`."""
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float16


class HiddenStateCache:
    """`main_pass` of a drafter over a frozen target: what it returns, in 16 bits a number (`KeptPart`). Texts are
    computed alone and unpadded, and rounded alike where there is no room to keep them: states depend on the text alone,
    and a resumed run gives the results of an uninterrupted one.
    """

    def __init__(
        self,
        drafter: DraftingModel,
        folder: Path,
        target: Mapping[str, Any] | None = None,
        owner: str = "",
        most: float = math.inf,
    ) -> None:
        """`folder`: holds the files, and what an earlier attempt or run left there of such states is found. `target`:
        what states depend on besides layers and tokens. `owner`: names the only run that writes the files of that name.
        `most`: bytes of all files in the folder.
        """
        self.drafter, self.folder = drafter, folder
        self.inputs = [INPUT.format(n) if n < len(drafter.decoder.layers) else FINAL for n in drafter.tapped]
        places = map(drafter.decoder.cache_place, drafter.decoder.cache_numbers(drafter.first))
        self.heads = [(KEYS.format(n), VALUES.format(n)) for n in places]
        self.parts = dict[str, KeptPart]()
        for place, states in self._computed(torch.zeros(1, dtype=torch.long)).items():
            width = 1 + math.prod(states.shape[1:])
            depends = [target, place, str(kept_dtype(states.dtype)), has_bf16(), width]
            layout = hashlib.blake2b(json.dumps(depends).encode(), digest_size=8).hexdigest()
            texts = TextArrays(folder, layout, f"{owner}{processes.index()}", width)
            self.parts[place] = KeptPart(states.shape[1:], states.dtype, texts)
        self.most, self.room = most, 0  # bytes that may still be written

    @staticmethod
    def serves(drafter: DraftingModel) -> bool:
        """Tells whether keeping states pays: over a frozen target, whose pass a CPU takes long for."""
        return drafter.frozen and drafter.device.type == "cpu"

    def name(self) -> None:
        """Lets later runs find all texts that are kept."""
        for part in self.parts.values():
            part.texts.name()

    @torch.no_grad()
    def fill(
        self,
        texts: Sequence[Sequence[TokenRow]],
        name: str,
        until: Deadline = ENDLESS,
        ahead: bool = True,
        note: Callable[[], None] = lambda: None,
    ) -> bool:
        """Computes and keeps the states of all `texts` that are missing, until the time is over or there is no room;
        without `ahead` each at its first use. Says on behalf of the stage `name` how much that is. `note` keeps the
        time that a run has taken, after each text. Tells whether all are there, for every process.
        """
        missing, needed = processes.from_first(self._missing(texts))
        room = processes.from_first(self._announced(name, missing, needed, ahead))
        self.room = room // processes.count()
        mine = processes.dealt(list(missing.items())) if ahead else []
        with processes.counted(f"{name}: the target's states", len(mine)) as add:
            for key, (part, index) in mine:
                numbers = self._packed(torch.tensor(texts[part][index].input_ids))
                if until.over() or not self._keep(key, numbers):
                    break
                add(1)
                note()
        self.name()
        processes.gathered(None)  # all have written
        for kept in self.parts.values():
            kept.texts.find()
        return all(processes.gathered(all(map(self._kept, missing))))

    def keeps(self, texts: Sequence[Sequence[TokenRow]]) -> bool:
        """Tells whether the states of all `texts` are there."""
        return not self._missing(texts)[0]

    def kept_rows(self, rows: Sequence[TokenRow]) -> list[int]:
        """The indices of the rows whose states are there."""
        return [index for index, row in enumerate(rows) if self._kept(key_of(row.input_ids))]

    @torch.no_grad()
    def __call__(self, input_ids: Tensor, attention_mask: Tensor) -> MainPass:
        lengths = attention_mask.sum(1).tolist()
        texts = [self._states(ids[:length]) for ids, length in zip(input_ids, lengths, strict=True)]
        parts = {place: pad_sequence([text[place] for text in texts], batch_first=True) for place in self.parts}
        keys, values = ([parts[sides[side]].transpose(1, 2) for sides in self.heads] for side in (0, 1))
        entry = torch.cat([parts[place] for place in self.inputs], dim=-1)
        return MainPass(input_ids, entry, parts[FINAL], keys, values)

    def _announced(self, name: str, missing: Mapping[bytes, object], needed: int, ahead: bool) -> int:
        """The bytes that may be written. Says how many missing texts there are, the bytes that they take, and what is
        there."""
        folder, layouts = self.folder, [part.texts.layout for part in self.parts.values()]
        sizes = {file.name: file.stat().st_size for file in folder.glob("*.bin")}
        free, left = shutil.disk_usage(folder).free, max(self.most - sum(sizes.values()), 0)
        room = int(min(free * MOST_DISK, left))
        known = sum(map(self._kept, self.parts[FINAL].texts.kept))
        if known:
            say(f"{name}: the target's states of {known:,} text{'s' * (known > 1)} are in {folder}")
        if others := sum(size for file, size in sizes.items() if not any(map(file.startswith, layouts))):
            say(f"{name}: {others / 1e6:,.0f} MB of {folder} are states of another target or other layers: not read")
        if missing:
            count = f"{len(missing):,} text{'s' * (len(missing) > 1)}"
            why = "half of what is free" if free * MOST_DISK < left else "what --states-gb leaves"
            some = f"; {room / 1e6:,.0f} MB are used, {why}: the others pass again"
            size = f"{needed / 1e6:,.0f} MB of disk, {free / 1e6:,.0f} MB are free{some * (needed > room)}"
            say(f"{name}: the target's states of {count}, computed {'once' if ahead else 'at first use'}, take {size}")
        return room

    def _missing(self, texts: Sequence[Sequence[TokenRow]]) -> tuple[dict[bytes, tuple[int, int]], int]:
        """Where the texts stand that are not kept, each once, by their keys; and the bytes of what is missing."""
        missing, needed = dict[bytes, tuple[int, int]](), 0
        for part, rows in enumerate(texts):
            for index, length in enumerate(row_lengths(rows)):
                key = key_of(rows[index].input_ids)
                if not self._kept(key) and key not in missing:
                    missing[key] = part, index
                    absent = (kept.texts for kept in self.parts.values() if key not in kept.texts.kept)
                    needed += sum(files.bytes_of(length) for files in absent)
        return missing, needed

    def _kept(self, key: bytes) -> bool:
        """Tells whether all states of a text are kept."""
        return all(key in part.texts.kept for part in self.parts.values())

    def _computed(self, ids: Tensor) -> dict[str, Tensor]:
        """What is kept of a text's pass, [T, ..] by place: inputs of layers, finished states, keys and values."""
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=has_bf16()):  # as in a step
            main = self.drafter.computed_pass(ids[None], torch.ones_like(ids)[None])
        states = dict(zip(self.inputs, main.entry[0].chunk(len(self.inputs), dim=-1), strict=True))
        states[FINAL] = main.final[0]
        for sides, *computed in zip(self.heads, main.keys, main.values, strict=True):
            states |= {place: side[0].transpose(0, 1) for place, side in zip(sides, computed, strict=True)}
        return states

    def _packed(self, ids: Tensor) -> dict[str, np.ndarray]:
        """The numbers of a text by place."""
        return {place: self.parts[place].packed(states) for place, states in self._computed(ids).items()}

    def _states(self, ids: Tensor) -> dict[str, Tensor]:
        """The states [T, ..] of one text [T] by place."""
        key = key_of(ids.tolist())
        read = ((place, part.texts.read(key)) for place, part in self.parts.items())
        numbers = {place: kept for place, kept in read if kept is not None}
        if len(numbers) < len(self.parts):
            numbers = self._packed(ids)
            self._keep(key, numbers)
        return {place: part.unpacked(numbers[place]) for place, part in self.parts.items()}

    def _keep(self, key: bytes, numbers: Mapping[str, np.ndarray]) -> bool:
        """Keeps what is not kept of a text's numbers; tells whether there was room."""
        parts = [(self.parts[place].texts, kept) for place, kept in numbers.items()]
        parts = [(texts, kept) for texts, kept in parts if key not in texts.kept]
        self.room -= sum(kept.nbytes for _, kept in parts)
        if self.room < 0:
            return False
        if not all(texts.add(key, kept) for texts, kept in parts):
            self.room = 0
            return False
        return True
