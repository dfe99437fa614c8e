"""Keeps the hidden states of a frozen target on disk: its layers read each text once, not in every epoch or run.

Most of a drafter's training step on a CPU is the target's pass (docs/lab/decisions).
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from streamspec.adapters.dataset.batches import row_lengths
from streamspec.adapters.dataset.token_rows import TokenRow
from streamspec.adapters.distributed import processes
from streamspec.adapters.distributed.processes import say
from streamspec.adapters.drafters.drafting_model import DraftingModel, MainPass
from streamspec.adapters.runs.budget import ENDLESS, Deadline
from streamspec.adapters.training.device import has_bf16
from streamspec.adapters.training.text_arrays import MOST_DISK, TextArrays, key_of

STATES = "states"  # folder in that of an unfinished run, or by that suffix beside a file of answers


class HiddenStateCache:
    """`main_pass` of a drafter over a frozen target: what it returns, in 16 bits a number. Those of a bfloat16 target
    stay as they are; those of a float32 one are rounded to float16, over a power of two for each token, since hidden
    states may exceed its range. Texts are computed alone and unpadded, and rounded alike where there is no room to keep
    them: states depend on the text alone, and a resumed run gives the results of an uninterrupted one.
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
        self.drafter = drafter
        decoder, first = drafter.decoder, drafter.first
        self.inside = [layer for layer in dict.fromkeys(drafter.tapped) if layer < len(decoder.layers)]
        self.sources = decoder.kv_sources[first:]
        parts = self._parts(self._computed(torch.zeros(1, dtype=torch.long)))
        self.shapes, self.dtypes = [part.shape[1:] for part in parts], [part.dtype for part in parts]
        exact = all(dtype == torch.bfloat16 for dtype in self.dtypes)
        self.dtype = torch.bfloat16 if exact else torch.float16
        width = 1 + sum(map(math.prod, self.shapes))
        depends = [target, self.inside, self.sources, str(self.dtype), has_bf16(), width]
        layout = hashlib.blake2b(json.dumps(depends).encode(), digest_size=8).hexdigest()
        self.texts = TextArrays(folder, layout, f"{owner}{processes.index()}", width)
        self.most, self.room = most, 0  # bytes that may still be written

    @staticmethod
    def serves(drafter: DraftingModel) -> bool:
        """Tells whether keeping states pays: over a frozen target, whose pass a CPU takes long for."""
        return drafter.frozen and drafter.device.type == "cpu"

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
        time that a run has taken, after each text. Tells whether all are there.
        """
        missing, tokens = processes.from_first(self._missing(texts))
        room = processes.from_first(self._announced(name, missing, tokens, ahead))
        self.room = room // processes.count()
        mine = processes.dealt(list(missing.items())) if ahead else []
        with processes.counted(f"{name}: the target's states", len(mine)) as add:
            for key, (part, index) in mine:
                numbers = self._packed(torch.tensor(texts[part][index].input_ids))
                if until.over() or not self._keep(key, numbers):
                    break
                add(1)
                note()
        processes.gathered(None)  # all have written
        self.texts.find()
        return missing.keys() <= self.texts.kept.keys()

    def keeps(self, texts: Sequence[Sequence[TokenRow]]) -> bool:
        """Tells whether the states of all `texts` are there."""
        return not self._missing(texts)[0]

    def kept_rows(self, rows: Sequence[TokenRow]) -> list[int]:
        """The indices of the rows whose states are there."""
        return [index for index, row in enumerate(rows) if key_of(row.input_ids) in self.texts.kept]

    @torch.no_grad()
    def __call__(self, input_ids: Tensor, attention_mask: Tensor) -> MainPass:
        lengths = attention_mask.sum(1).tolist()
        texts = [self._states(ids[:length]) for ids, length in zip(input_ids, lengths, strict=True)]
        parts = iter([pad_sequence(list(side), batch_first=True) for side in zip(*texts, strict=True)])
        entered = {layer: next(parts) for layer in self.inside}
        final = next(parts)
        heads = {source: [next(parts).transpose(1, 2) for _ in "kv"] for source in dict.fromkeys(self.sources)}
        keys, values = ([heads[source][side] for source in self.sources] for side in (0, 1))
        entry = torch.cat([entered.get(layer, final) for layer in self.drafter.tapped], dim=-1)
        return MainPass(input_ids, entry, final, keys, values)

    def _announced(self, name: str, missing: Mapping[bytes, object], tokens: int, ahead: bool) -> int:
        """The bytes that may be written. Says how many missing texts there are, what they take, and what is there."""
        folder, layout = self.texts.folder, self.texts.layout
        sizes = {file.name: file.stat().st_size for file in folder.glob("*.bin")}
        free, left = shutil.disk_usage(folder).free, max(self.most - sum(sizes.values()), 0)
        room, needed, known = int(min(free * MOST_DISK, left)), self.texts.bytes_of(tokens), len(self.texts.kept)
        if known:
            say(f"{name}: the target's states of {known:,} text{'s' * (known > 1)} are in {folder}")
        if others := sum(size for file, size in sizes.items() if not file.startswith(layout)):
            say(f"{name}: {others / 1e6:,.0f} MB of {folder} are states of another target or other layers: not read")
        if missing:
            count = f"{len(missing):,} text{'s' * (len(missing) > 1)}"
            why = "half of what is free" if free * MOST_DISK < left else "what --states-gb leaves"
            some = f"; {room / 1e6:,.0f} MB are used, {why}: the others pass again"
            size = f"{needed / 1e6:,.0f} MB of disk, {free / 1e6:,.0f} MB are free{some * (needed > room)}"
            say(f"{name}: the target's states of {count}, computed {'once' if ahead else 'at first use'}, take {size}")
        return room

    def _missing(self, texts: Sequence[Sequence[TokenRow]]) -> tuple[dict[bytes, tuple[int, int]], int]:
        """Where the texts stand that are not kept, each once, by their keys; and how many tokens they have."""
        missing, tokens = dict[bytes, tuple[int, int]](), 0
        for part, rows in enumerate(texts):
            for index, length in enumerate(row_lengths(rows)):
                key = key_of(rows[index].input_ids)
                if key not in self.texts.kept and key not in missing:
                    missing[key], tokens = (part, index), tokens + length
        return missing, tokens

    def _computed(self, ids: Tensor) -> MainPass:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=has_bf16()):  # as in a step
            return self.drafter.computed_pass(ids[None], torch.ones_like(ids)[None])

    def _parts(self, main: MainPass) -> list[Tensor]:
        """What is kept of a text's pass [T, ..]: the inputs of layers, the finished states, keys and values."""
        entered = dict(zip(self.drafter.tapped, main.entry[0].chunk(len(self.drafter.tapped), dim=-1), strict=True))
        heads = dict(zip(self.sources, zip(main.keys, main.values, strict=True), strict=True))
        sides = [side[0].transpose(0, 1) for pair in heads.values() for side in pair]
        return [*(entered[layer] for layer in self.inside), main.final[0], *sides]

    def _packed(self, ids: Tensor) -> np.ndarray:
        """int16 [T, width]: the bits of a token's power of two, and of its states over that."""
        states = torch.cat([part.flatten(1).float() for part in self._parts(self._computed(ids))], dim=1)
        exponents = torch.frexp(states.abs().amax(1, keepdim=True)).exponent
        power = torch.ldexp(torch.ones(len(states), 1), exponents.clamp(-9, 30) - 15)  # float16 holds 2**-24 .. 2**15
        return torch.cat([power, states / power], dim=1).to(self.dtype).view(torch.int16).numpy()

    def _states(self, ids: Tensor) -> list[Tensor]:
        """The parts [T, ..] of one text [T]."""
        key = key_of(ids.tolist())
        numbers = self.texts.read(key)
        if numbers is None:
            numbers = self._packed(ids)
            self._keep(key, numbers)
        states = torch.from_numpy(numbers).view(self.dtype).float()
        parts = (states[:, 1:] * states[:, :1]).split([math.prod(shape) for shape in self.shapes], dim=1)
        wanted = zip(parts, self.shapes, self.dtypes, strict=True)
        return [part.reshape(len(ids), *shape).to(dtype) for part, shape, dtype in wanted]

    def _keep(self, key: bytes, numbers: np.ndarray) -> bool:
        """Keeps the states of a text; tells whether there was room."""
        self.room -= numbers.nbytes
        if self.room < 0:
            return False
        if not self.texts.add(key, numbers):
            self.room = 0
            return False
        return True
