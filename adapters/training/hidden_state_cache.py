"""Main passes of a frozen target over texts that come again: what a drafter reads of a text is the same in every epoch.

Half of a draft layer's training step on a CPU is the target's pass (docs/decisions.md). Knows nothing about what is
learnt.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from streamspec.adapters.drafters.base import DraftingModel, MainPass

MOST_BYTES = 2 << 30  # of states; texts beyond are passed anew every time


class HiddenStateCache:
    """`main_pass` of a drafter that reads no K/V. A text is passed alone and unpadded, so its states depend on nothing
    else: a resumed run, which remembers nothing, goes on exactly as one that was never interrupted."""

    def __init__(self, drafter: DraftingModel, most_bytes: int = MOST_BYTES) -> None:
        self.drafter, self.left = drafter, most_bytes
        self.known: dict[bytes, tuple[Tensor, Tensor]] = {}

    @staticmethod
    def serves(drafter: DraftingModel) -> bool:
        """Whether it is worth it: beside a frozen target, on a CPU, for a draft layer. Streams read K/V, of which too
        much would have to be kept.
        """
        return drafter.frozen and drafter.first == len(drafter.decoder.layers) and drafter.device.type == "cpu"

    @torch.no_grad()
    def __call__(self, input_ids: Tensor, attention_mask: Tensor) -> MainPass:
        texts = [ids[: int(mask.sum())] for ids, mask in zip(input_ids, attention_mask, strict=True)]
        entries, finals = zip(*(self._states(text) for text in texts), strict=True)
        return MainPass(
            input_ids, pad_sequence(entries, batch_first=True), pad_sequence(finals, batch_first=True), [], []
        )

    def _states(self, text: Tensor) -> tuple[Tensor, Tensor]:
        """What the pass leaves of one text [T]: `entry` [T, ..] and `final` [T, E]."""
        key = text.numpy().tobytes()
        if key in self.known:
            return self.known[key]
        main = self.drafter.main_pass(text[None], torch.ones_like(text)[None])
        states = main.entry[0], main.final[0]
        size = sum(x.numel() * x.element_size() for x in states)
        if size <= self.left:
            self.left -= size
            self.known[key] = states
        return states
